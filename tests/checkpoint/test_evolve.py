"""A stopped cluster's checkpoint becomes one of a changed model, from which its shards start."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamtrain as st
from streamtrain._core import hash_integers
from streamtrain.checkpoint.evolve import evolve, plan
from streamtrain.checkpoint.shard_checkpoint import CheckpointWriter
from streamtrain.checkpoint.shard_map import begin_shard_map, next_shard_map
from streamtrain.checkpoint.shard_state import describe_run, write_shard
from streamtrain.errors import CheckpointError, ConfigError, ShardError
from streamtrain.ps.shard import Shard
from streamtrain.settings.groups import PsSettings
from streamtrain.settings.load import Settings, load_settings
from streamtrain.store.checkpoint.checkpoint import CheckpointReader, ShardFiles, commit
from streamtrain.store.checkpoint.epochs import Epochs
from streamtrain.store.files import Directory
from tests import commands
from tests.ports import free_ports
from tests.ps.served import served

IDS = [f"u{i}" for i in range(40)]
MODEL = """
import keras
import streamtrain as st

def graph(inputs):
    x = keras.layers.Concatenate()(list(inputs.values()))
    return keras.layers.Dense(1, "sigmoid")(keras.layers.Dense(WIDTH, "relu")(x))

model = st.Model(st.Schema(features=[FEATURES]), graph, micro_batch_size=None)
"""
BEFORE = MODEL.replace("WIDTH", "4").replace("FEATURES", 'st.Categorical("user", 4)')
TAG = 'st.Categorical("tag", 2, default="none")'
AFTER = MODEL.replace("WIDTH", "6").replace("FEATURES", f'{TAG}, st.Categorical("user", 6)')
WITHOUT = MODEL.replace("WIDTH", "4").replace("FEATURES", TAG)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, text in (("before", BEFORE), ("after", AFTER), ("without", WITHOUT)):
        (folder / f"{name}.py").write_text(text)
    return folder


def load(files: Path, name: str) -> st.Model:
    from streamtrain.model.loader import load_model

    return load_model(f"{files / name}.py:model")


@pytest.fixture
def learned(files: Path, tmp_path: Path) -> tuple[st.Learner, str]:
    """What two shards have learned, and where epoch 3 of it is, as a cluster writes it."""
    learner = st.Learner(load(files, "before"), shards=2)
    learner.learn([{"user": IDS[i % 40], "label": int(i % 3 == 0)} for i in range(400)])
    epochs = Epochs(tmp_path / "checkpoints")
    directory = epochs.directory(3)
    parts = [write_shard(directory, shard, {}) for shard in learner._shards]
    commit(directory, describe_run(learner._shards[0], aligned=True), parts)
    return learner, epochs.url


def cluster(url: str) -> Settings:
    """Settings of a cluster whose shards do not run."""
    return load_settings(None, {}, {"checkpoint.url": url, "ps.addresses": f"127.0.0.1:{free_ports(1)[0]}"})


def run(*arguments: str) -> str:
    """What a command prints, as a user runs it."""
    command = [*commands.COMMAND, *arguments]
    done = commands.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def test_shards_start_from_it_with_everything_that_fits(files: Path, learned: tuple[st.Learner, str]) -> None:
    learner, url = learned
    after = load(files, "after")
    planned = plan(cluster(url), after, None)
    assert [one.name for one in planned.changes if one.part == "table"] == ["tag", "user"]
    evolved = evolve(cluster(url), None, after)
    assert (evolved.epoch, evolved.rows) == (4, {"tag": 0, "user": 40})
    for i, before in enumerate(learner._shards):
        restored = CheckpointWriter(Epochs(url)).restore(i, 2)
        assert restored is not None
        shard, epoch = restored.shard, restored.epoch
        assert (epoch, shard.clock(), shard.run) == (4, before.clock(), before.run)
        keys = before.tables[0].scan(0, 100)[1].keys.copy()
        np.testing.assert_array_equal(shard.tables[1].pull(keys)[:, :4], before.tables[0].pull(keys))
    again = st.Learner.load(evolved.url, after)
    known = [{"user": one} for one in IDS]
    np.testing.assert_allclose(again.predict(known), learner.predict(known), rtol=1e-5)


def test_as_commands(files: Path, learned: tuple[st.Learner, str]) -> None:
    _, url = learned
    options = ("--model", f"{files}/after.py:model", "--set", f"checkpoint.url={url}", "--ps", "127.0.0.1:1")
    table = run("plan", *options[:4])
    assert "40 rows kept, dim 4 -> 6: the new columns begin at their first values" in " ".join(table.split())
    line = run("evolve", *options)
    assert line.startswith(
        f"checkpoint 4 of the changed model committed to {url}/epoch-000000004 (rows: tag 0, user 40;"
    )
    changes = json.loads(run("plan", *options[:4], "--json"))["changes"]
    assert {one["action"] for one in changes} == {"kept"}


def test_at_another_place_it_is_a_run_of_its_own(files: Path, learned: tuple[st.Learner, str], tmp_path: Path) -> None:
    _, url = learned
    model, other = load(files, "before"), f"{tmp_path}/fork"
    evolved = evolve(cluster(url), None, model, to=other)
    runs = {Epochs(place).open(number).about["run"] for place, number in ((url, 3), (other, evolved.epoch))}
    assert len(runs) == 2
    assert Epochs(url).numbers() == [3]
    with pytest.raises(CheckpointError, match="already has checkpoints; choose another place"):
        evolve(cluster(url), None, model, to=other)


def test_what_would_be_lost_must_be_allowed(files: Path, learned: tuple[st.Learner, str]) -> None:
    _, url = learned
    model = load(files, "without")
    assert [one.needs for one in plan(cluster(url), model, None).changes if one.needs] == ["drop"]
    with pytest.raises(ConfigError, match=r"table user: 40 rows would be lost \(allow 'drop'\)"):
        evolve(cluster(url), None, model)
    assert Epochs(url).numbers() == [3]
    assert evolve(cluster(url), None, model, allow=("drop",)).rows == {"tag": 0}


def test_rows_that_only_a_delta_has_must_be_allowed_to_be_lost_as_well(files: Path, tmp_path: Path) -> None:
    learner, epochs = st.Learner(load(files, "before")), Epochs(tmp_path / "checkpoints")
    (shard,), about = learner._shards, describe_run(learner._shards[0], aligned=True)
    commit(epochs.directory(1), about, [write_shard(epochs.directory(1), shard, {})])
    learner.learn([{"user": IDS[i % 40], "label": int(i % 3 == 0)} for i in range(400)])
    part = write_shard(epochs.directory(2), shard, {})
    commit(epochs.directory(2), about, [part], kind="delta", base=1, base_digest=epochs.open(1).digest)
    with pytest.raises(ConfigError, match=r"table user: its rows would be lost \(allow 'drop'\)"):
        evolve(cluster(epochs.url), None, load(files, "without"))
    evolved = evolve(cluster(epochs.url), None, load(files, "after"))
    assert evolved.rows == {"tag": 0, "user": 40}


def test_rows_for_which_memory_has_no_room_are_on_disk_meanwhile(
    files: Path, learned: tuple[st.Learner, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, n = st.Learner(load(files, "before")), 100_000
    keys, rows = hash_integers(np.arange(n)), np.random.default_rng(1).random((n, 4), np.float32)
    table = learner._shards[0].tables[0]
    table.load(keys, rows, np.ones((n, table.state_size), np.float32), np.ones(n, np.uint32), np.ones(n, np.uint32))
    learner.save(tmp_path / "saved")
    on_disk = []

    def write(directory: Directory, shard: Shard, *given: Any, **options: Any) -> ShardFiles:
        on_disk.append([one.stats()["rows_on_disk"] for one in shard.tables])
        return write_shard(directory, shard, *given, **options)

    monkeypatch.setattr("streamtrain.checkpoint.evolve.write_shard", write)
    settings = cluster(learned[1]).model_copy(update={"ps": PsSettings(memory=3e6, disk=str(tmp_path))})
    evolved = evolve(settings, None, load(files, "after"), source=str(tmp_path / "saved"), to=str(tmp_path / "to"))
    assert evolved.rows == {"tag": 0, "user": n}
    assert on_disk[0][1] > n / 2
    again = st.Learner.load(evolved.url, load(files, "after"))._shards[0].tables[1]
    np.testing.assert_array_equal(again.pull(keys)[:, :4], rows)
    assert again.lookup(keys)[1].tolist() == [1] * n


def test_a_cluster_that_runs_is_refused(files: Path, learned: tuple[st.Learner, str]) -> None:
    _, url = learned
    with served(1) as running_shards:
        address = running_shards.channels[0][1]
        settings = load_settings(None, {}, {"checkpoint.url": url, "ps.addresses": address})
        with pytest.raises(ShardError, match=f"the shard at {address} runs: stop workers and all shards first"):
            evolve(settings, None, load(files, "after"))
        # A backup that runs on with the rows of a cluster which was scaled since its settings were written.
        gone, at_first = f"127.0.0.1:{free_ports(1)[0]}", (("127.0.0.1:1",), ("127.0.0.1:2",))
        begin_shard_map(url, *at_first)
        next_shard_map(url, (gone,), (address,))
        for given in ({"ps.addresses": at_first[0][0], "ps.backups": at_first[1][0]}, {}):
            with pytest.raises(ShardError, match=f"the shard at {address} runs: stop workers and all shards first"):
                evolve(load_settings(None, {}, {"checkpoint.url": url, **given}), None, load(files, "after"))
        Path(url, "slots.json").unlink()
    assert Epochs(url).numbers() == [3]


def test_without_a_checkpoint_there_is_nothing_to_keep(files: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no checkpoint at .*/empty yet; `streamtrain checkpoint`"):
        plan(cluster(f"{tmp_path}/empty"), load(files, "after"), None)


def test_if_no_checkpoint_is_intact_the_way_to_see_why_is_told(
    files: Path, learned: tuple[st.Learner, str], tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(learned[1], damaged)
    for manifest in damaged.rglob("manifest.json"):
        manifest.write_text("{}")
    with pytest.raises(CheckpointError, match=r"none .* at .*/damaged can be used; `streamtrain restore --list`"):
        plan(cluster(str(damaged)), load(files, "after"), None)


def test_rows_that_stay_as_they_are_share_their_files(files: Path, learned: tuple[st.Learner, str]) -> None:
    """Of a full checkpoint, whose older epochs may be deleted."""
    learner, url = learned
    (files / "wider.py").write_text(BEFORE.replace("(4, ", "(8, "))
    evolved = evolve(cluster(url), None, load(files, "wider"))
    old, new = (Path(place, "tables", "user", "shard-1.parquet") for place in (f"{url}/epoch-000000003", evolved.url))
    assert old.samefile(new)
    assert (evolved.rows, dict(CheckpointReader(evolved.url).row_counts)) == ({"user": 40}, {"user": 40})
    Epochs(url).retain(1)
    assert not old.exists()
    assert Epochs(url).check() == {}
    for i, before in enumerate(learner._shards):
        restored = CheckpointWriter(Epochs(url)).restore(i, 2)
        assert restored is not None
        keys = before.tables[0].scan(0, 100)[1].keys.copy()
        for of in ("embeddings", "state", "counts", "last_seen"):
            rows, kept = (getattr(table.scan(0, 100)[1], of) for table in (restored[0].tables[0], before.tables[0]))
            np.testing.assert_array_equal(np.sort(rows, axis=0), np.sort(kept, axis=0))
        np.testing.assert_array_equal(restored[0].tables[0].pull(keys), before.tables[0].pull(keys))
