"""`streamtrain checkpoint` and `streamtrain restore`, and how epochs are set aside."""

import shutil
from pathlib import Path

import fsspec
import pytest

from streamtrain.errors import CheckpointError
from streamtrain.store.checkpoint.epochs import Epochs
from tests.cluster.coordinated import LOG, Coordinated, states
from tests.cluster.here import refused, run, told
from tests.store.checkpoint.test_epochs import add, damage, unfinished


def at(place: object) -> tuple[str, ...]:
    return ("--set", f"checkpoint.url={place}")


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path / "epochs")
    where = f"memory://aside/{tmp_path.name}"
    fs = fsspec.filesystem("memory")
    if fs.exists(where):
        fs.rm(where, recursive=True)
    return where


def test_a_cluster_goes_back_and_forth(tmp_path: Path) -> None:
    with Coordinated(tmp_path) as cluster:
        asking = ("--set", f"coordinator.address={cluster.address}")
        cluster.learn({0: LOG[0][:3]})
        taken = told("checkpoint", *asking)
        assert taken.keys() == {"epoch", "kind", "aligned", "pause_ms", "seconds"}
        assert (taken["epoch"], taken["kind"], taken["aligned"]) == (1, "full", True)
        cluster.learn()
        assert run("checkpoint", *asking).stdout.startswith("checkpoint 2 committed (delta, paused ")
        assert told("checkpoint", *asking, "--full")["kind"] == "full"

        shards = ("--ps", ",".join(cluster.addresses), *at(tmp_path))
        cluster.stop()
        cluster.stop_shard(1)
        assert f"the shard at {cluster.addresses[0]} runs: stop workers and all shards first" in refused(
            "restore", "1", *shards
        )
        assert Epochs(tmp_path).numbers() == [1, 2, 3]
        cluster.stop_shard(0)

        back = told("restore", "1", *at(tmp_path))  # the slot map says where shards would be
        assert (back["epoch"], back["moved"]) == (1, [2, 3])
        assert Epochs(tmp_path).numbers() == [1]
        aside = Path(back["aside"])
        assert sorted(one.name for one in aside.iterdir()) == ["epoch-000000002", "epoch-000000003"]
        assert told("restore", "newest", *shards) == {"epoch": 1, "moved": [], "aside": None}

        for index in range(2):
            cluster.start_shard(index)
        cluster.start()
        status = cluster.status(lambda found: states(found) == ["ready", "ready"])
        assert [shard["clock"] for shard in status["shards"]] == [{"0": 3}] * 2
        cluster.learn()
        assert told("checkpoint", *asking)["epoch"] == 2
    shutil.rmtree(tmp_path / "epoch-000000002")
    for one in aside.iterdir():
        one.rename(tmp_path / one.name)
    assert [one.epoch for one in map(Epochs(tmp_path).open, (1, 2, 3))] == [1, 2, 3]
    assert Epochs(tmp_path).check() == {}


def test_epochs_are_listed_with_what_is_wrong(tmp_path: Path) -> None:
    root = str(tmp_path)
    add(root)
    add(root, 1)
    add(root, 2)
    add(root)
    unfinished(root, 5)
    damage(root, 2)
    (tmp_path / "epoch-000000004" / "manifest.json").write_text("{")
    found = told("restore", "--list", *at(root))
    assert found["url"] == root
    first, second, third, last = found["epochs"]
    assert (first["kind"], first["base"], first["rows"], first["fault"]) == ("full", None, {"item": 4}, "")
    assert first["bytes"] > 1000
    assert (second["kind"], second["base"]) == ("delta", 1)
    assert "epoch-000000002/tables/item/shard-0.parquet" in second["fault"]
    assert third["fault"] == second["fault"]  # which it builds on
    assert (last["epoch"], last["kind"], last["rows"]) == (4, None, None)
    assert "manifest.json" in last["fault"]
    shown = run("restore", "--list", *at(root)).stdout
    for text in ("delta on 1", "item 4", "intact", "epoch-000000002/tables/item/shard-0.parquet"):
        assert text in shown

    nobody = ("--ps", "127.0.0.1:1,127.0.0.1:2", *at(root))
    assert "epoch-000000002/tables/item/shard-0.parquet" in refused("restore", "3", *nobody)
    assert "there is no epoch 7" in refused("restore", "7", *nobody)
    assert "there is no epoch 5" in refused("restore", "5", *nobody)  # it was never finished
    assert "use one that is aligned" in refused("restore", "1", "--ps", "127.0.0.1:1", *at(root))
    assert Epochs(root).numbers() == [1, 2, 3, 4]
    done = told("restore", "newest", *nobody)
    assert (done["epoch"], done["moved"]) == (1, [2, 3, 4, 5])


def test_epochs_are_set_aside_and_can_be_put_back(root: str) -> None:
    for base in (None, 1, 2, 3):
        add(root, base)
    unfinished(root, 5)
    epochs = Epochs(root)
    assert epochs.set_aside(2, "aside") == [3, 4, 5]
    assert epochs.numbers() == [1, 2]
    assert epochs.next() == 3
    assert epochs.check() == {}
    assert epochs.set_aside(2, "aside") == []
    assert Epochs(f"{root}/aside").numbers() == [3, 4]
    add(root, 2)
    assert epochs.set_aside(2, "aside again") == [3]
    fs, path = fsspec.core.url_to_fs(root)
    for number in (3, 4):
        fs.mv(f"{path}/aside/epoch-{number:09d}", f"{path}/epoch-{number:09d}", recursive=True)
    assert epochs.numbers() == [1, 2, 3, 4]
    assert epochs.check() == {}


def test_nothing_is_lost_where_something_is_in_the_way(tmp_path: Path) -> None:
    for base in (None, 1, 2):
        add(str(tmp_path), base)
    (tmp_path / "aside").write_text("a file")
    with pytest.raises(CheckpointError, match=r"cannot move .*epoch-000000003"):
        Epochs(tmp_path).set_aside(1, "aside")
    assert Epochs(tmp_path).numbers() == [1, 2, 3]
    assert Epochs(tmp_path).check() == {}


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (("checkpoint",), "neither coordinator.address nor ps.addresses is set", 2),
        (("checkpoint", "--set", "coordinator.address=127.0.0.1:1"), "127.0.0.1:1: ", 1),
        (("checkpoint", "--timeout", "long"), "--timeout", 2),
        (("restore",), "give an EPOCH to restore", 2),
        (("restore", "1", "--list"), "give an EPOCH to restore", 2),
        (("restore", "0"), "EPOCH must be a number from 1, or newest, not '0'", 2),
        (("restore", "1"), "checkpoint.url is not set", 2),
        (("restore", "1", *at("memory://nothing")), "ps.addresses is not set, so it is not known", 2),
        (("restore", "--list"), "checkpoint.url is not set", 2),
        (("restore", "1", "--ps", "127.0.0.1:1"), "checkpoint.url is not set", 2),
    ],
)
def test_what_is_missing_is_named(arguments: tuple[str, ...], message: str, code: int) -> None:
    assert message in refused(*arguments, code=code)
