"""The coordinator as it is asked over gRPC, of real shards in this process."""

import io
import itertools
import json
import logging
import re
import threading
import urllib.request
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import grpc
import pytest
import streamtrain.cluster.coordinator_pb2 as pb

from streamtrain._core import shards_of
from streamtrain.cli.up import _showing_steps
from streamtrain.cluster import coordinator as coordination
from streamtrain.cluster import members
from streamtrain.cluster.client import SERVICE, Heartbeat
from streamtrain.cluster.scaling import STEPS, Estimate, next_places, read_ahead, rows_to_read
from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import CheckpointError, ConfigError, ShardError, ShardRefused, ShardUnavailable
from streamtrain.ps.nodes.topology import ShardMap
from streamtrain.store.checkpoint.epochs import Epochs
from tests.cluster.coordinated import LOG, Coordinated, names, states
from tests.cluster.test_leading import figures, samples, windows
from tests.patience import PATIENCE, until
from tests.probes import is_ready
from tests.ps.counting import key
from tests.publish.published import read

ROOT = Path(__file__).parent.parent.parent
KEYS = [key(one) for one in (1, 2, 3, 4, 5, 7, 8, 9, 11)]


def documented() -> dict[str, Any]:
    """What the console's page says of a status."""
    text = (ROOT / "docs" / "serving.md").read_text()
    (found,) = re.findall(r'^```json\n(\{"time".*?)^```$', text, re.DOTALL | re.MULTILINE)
    status: dict[str, Any] = json.loads(found)
    return status


def test_status_has_what_is_documented(tmp_path: Path, server: Valkey) -> None:
    worker = {"partitions": [0, 1], "lag": {"0": 3, "1": 4}, "samples_per_s": 2.5, "dead_letters": {"json": 2}}
    worker |= {"samples_per_batch": 1.5}
    serving = {"address": "0.0.0.0:1", "version": "head", "publication": 1, "watermark": 1e9, "freshness_ms": 5.0}
    with (
        Coordinated(tmp_path, publish__url=server.url, publish__model="counted", publish__every="1h") as cluster,
        Heartbeat(cluster.client(), "worker", "w", lambda: worker),
        Heartbeat(cluster.client(), "server", "s", lambda: serving | {"name": "another", "seen": -1}),
    ):
        cluster.learn()
        cluster.client().report("w", windows(samples(1)))
        cluster.client().publish_now(timeout=PATIENCE)
        taken = cluster.client().checkpoint()
        status = cluster.status(lambda found: found["samples"] == 11 and names(found) and found["history"])
        expected = documented()
        assert set(expected) <= set(status)
        for name in ("shards", "workers", "servers", "history"):
            assert set(expected[name][0]) <= set(status[name][0]), name
        for name in ("checkpoint", "publication"):
            assert set(expected[name]) == set(status[name]), name
        assert set(expected["figures"]["LABEL"]) <= set(status["figures"]["click"])
        assert (status["lag"], status["dead_letters"], status["held"]) == (7, {"json": 2}, "")
        assert states(status) == ["ready", "ready"]
        assert [shard["clock"] for shard in status["shards"]] == [{"0": 8, "1": 3}] * 2
        assert sum(shard["rows"]["ids"] for shard in status["shards"]) == len(KEYS)
        assert (status["workers"][0]["name"], status["workers"][0]["lag"]) == ("w", 7)
        assert status["servers"][0].items() >= (serving | {"name": "s"}).items()
        assert 0 <= status["servers"][0]["seen"] < PATIENCE
        assert status["checkpoint"]["epoch"] == taken.epoch
        assert status["publication"]["number"] == 1
        point = status["history"][-1]
        assert point["freshness_ms"] in (None, pytest.approx(1000 * (point["time"] - 1e9)))  # None: before it joined
        assert status["slots"] == {"epoch": 1, "shards": cluster.addresses, "backups": [], "scaled": False}


def test_a_shard_goes_away_and_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "streamtrain.cluster.coordinator")
    with Coordinated(tmp_path) as cluster:
        assert states(cluster.status(lambda found: "away" not in states(found))) == ["empty", "empty"]
        cluster.learn()
        cluster.client().checkpoint()
        cluster.status(lambda found: states(found) == ["ready", "ready"])
        cluster.stop_shard(1)
        status = cluster.status(lambda found: states(found) == ["ready", "away"])
        assert status["shards"][1] == {"index": 1, "address": cluster.addresses[1], "state": "away"}
        assert status["samples"] == 11
        with pytest.raises(ShardUnavailable):
            cluster.client().checkpoint()
        cluster.start_shard(1)
        cluster.status(lambda found: states(found) == ["ready", "ready"])
        assert cluster.client().checkpoint().epoch > 1
        at = f"shard 1 at {cluster.addresses[1]}"
    said = [one.getMessage() for one in caplog.records if one.name == "streamtrain.cluster.coordinator"]
    assert said[:2] == [f"{at} does not answer", f"{at} answers again"]


def test_workers_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    with Coordinated() as cluster:
        client = cluster.client()
        with Heartbeat(cluster.client(), "worker", "stays", lambda: {"dead_letters": {"json": 1}}):
            with Heartbeat(cluster.client(), "worker", "leaves", lambda: {"dead_letters": {"json": 10, "time": 5}}):
                cluster.status(lambda found: names(found) == ["leaves", "stays"])
                cluster.client().report("leaves", windows(samples(1)))
                assert cluster.status()["figures"] == figures(samples(1))
            status = cluster.status(lambda found: names(found) == ["stays"])
            assert status["dead_letters"] == {"json": 11, "time": 5}
            assert status["figures"] == {}  # its predictions count no more
            monkeypatch.setattr(members, "LEASE", 2.5)
            client.beat("worker", "slow", {"dead_letters": {"json": 100}})
            assert cluster.status(lambda found: names(found) == ["stays"])["dead_letters"] == {"json": 111, "time": 5}
            client.beat("worker", "slow", {"dead_letters": {"json": 101}})  # which counts on
            assert cluster.status()["dead_letters"] == {"json": 112, "time": 5}


def test_it_publishes_and_hears_of_predictions(server: Valkey) -> None:
    with Coordinated(publish__url=server.url, publish__model="counted", publish__every="1h") as cluster:
        shard = cluster.client(cluster.addresses[0])
        for ask in (lambda: shard.report("w", []), shard.publish_now, shard.verify, shard.status):
            with pytest.raises(ShardRefused, match=f"shard 0 is not the coordinator; it is at {cluster.address}"):
                ask()
        with pytest.raises(ShardUnavailable, match="nothing has been learned"):
            cluster.client().publish_now(timeout=PATIENCE)
        cluster.learn()
        cluster.client().report("w", windows(samples(1)))
        published = cluster.client().publish_now(timeout=PATIENCE)
        assert published == read(server.url)[0]
        assert published.metrics == figures(samples(1))
        bad = windows(samples(1))
        bad[0].counts = bad[0].counts[:-3]
        with pytest.raises(ShardRefused, match="is invalid"):
            cluster.client().report("w", bad)
        assert cluster.coordinator
        assert cluster.coordinator.server.counters["refused_reports"] == 1


def test_what_it_tells_prometheus(server: Valkey) -> None:
    with Coordinated(
        publish__url=server.url, publish__model="counted", publish__every="1h", coordinator__metrics="127.0.0.1:0"
    ) as cluster:
        cluster.learn()
        cluster.client().publish_now(timeout=PATIENCE)
        assert cluster.coordinator
        assert cluster.coordinator.metrics

        def scraped() -> str:
            assert cluster.coordinator
            assert cluster.coordinator.metrics
            with urllib.request.urlopen(cluster.coordinator.metrics.url, timeout=PATIENCE) as answer:
                return str(answer.read().decode())

        until(lambda: 'streamtrain_coordinator_shards{state="ready"} 2.0' in scraped(), PATIENCE)
        assert is_ready(cluster.coordinator.metrics.port)
        lines = scraped().splitlines()
        assert 'streamtrain_shard_publications_total{outcome="published"} 1.0' in lines
        assert 'streamtrain_shard_publications_total{outcome="failed"} 0.0' in lines
        assert "streamtrain_shard_publication_held 0.0" in lines
        assert 'streamtrain_coordinator_members{kind="worker"} 0.0' in lines
        assert 'streamtrain_coordinator_lost_members_total{kind="worker"} 0.0' in lines
        assert 'streamtrain_shard_checkpoints_total{outcome="failed"} 0.0' in lines
        published = read(server.url)[0].published
        (at,) = (line for line in lines if line.startswith("streamtrain_shard_publication_timestamp_seconds "))
        assert float(at.split()[1]) == published
        assert "streamtrain_coordinator_slot_epoch 1.0" in lines


def test_it_publishes_at_intervals(server: Valkey) -> None:
    with Coordinated(publish__url=server.url, publish__model="counted", publish__every="200ms") as cluster:
        cluster.learn()
        cluster.status(lambda found: found["publication"] is not None)
        until(lambda: dict(read(server.url)[0].clock) == {0: 8, 1: 3}, PATIENCE)


def test_checkpoints_on_demand(tmp_path: Path) -> None:
    with Coordinated(tmp_path) as cluster:
        client = cluster.client()
        with pytest.raises(ShardError, match="is empty: nothing to save"):
            client.checkpoint()
        cluster.learn({0: LOG[0][:3]})
        first = client.checkpoint(full=False, timeout=PATIENCE)
        assert (first.kind, first.aligned) == ("full", True)
        cluster.learn()
        second, third = client.checkpoint(), client.checkpoint(full=True)
        assert (second.kind, third.kind) == ("delta", "full")
        clocks = [[one["clock"] for one in Epochs(tmp_path).open(taken.epoch).shards] for taken in (first, second)]
        assert clocks == [[{"0": 3}] * 2, [{"0": 8, "1": 3}] * 2]
        (tmp_path / "epoch-000000004").write_text("in the way")
        with pytest.raises(CheckpointError):
            client.checkpoint()


def test_a_last_checkpoint_when_it_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Coordinated(tmp_path) as cluster:
        cluster.stop()
        assert Epochs(tmp_path).numbers() == []  # as nothing was learned
        cluster.start()
        cluster.learn({0: LOG[0][:3]})
        cluster.stop()
        assert Epochs(tmp_path).numbers() == [1]
        cluster.start()
        cluster.stop()
        assert Epochs(tmp_path).numbers() == [1]  # as nothing more was
        cluster.start()
        cluster.learn()
        cluster.stop()
        assert Epochs(tmp_path).numbers() == [1, 2]
        assert Epochs(tmp_path).open(2).shards[0]["clock"] == {"0": 8, "1": 3}
    assert "Traceback" not in caplog.text


def test_rows_are_found_at_their_owner() -> None:
    import numpy as np

    with Coordinated() as cluster:
        client = cluster.client()
        with pytest.raises(ShardUnavailable):
            client.inspect("ids", KEYS[0])  # as they are empty
        cluster.learn()
        owners = shards_of(np.array(KEYS, np.uint64), 2).tolist()
        assert set(owners) == {0, 1}
        for one, owner in zip(KEYS, owners, strict=True):
            row = cluster.control(owner).inspect("ids", one)
            assert row is not None
            assert cluster.control(1 - owner).inspect("ids", one) is None
            assert client.inspect("ids", one) == {"count": row.learned, "last_seen": row.last_seen or None}
        assert [(client.inspect("ids", one) or {})["count"] for one in KEYS[:2]] == [2, 4]
        assert client.inspect("ids", key(12345)) is None
        with pytest.raises(ShardRefused, match="unknown table 'x'; the tables are ids"):
            client.inspect("x", KEYS[0])


def test_processes_outlive_the_coordinator(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "streamtrain")

    def said(text: str) -> int:
        return sum(text in record.getMessage() for record in caplog.records)

    beaten = threading.Semaphore(0)
    with Coordinated() as cluster:

        def about() -> dict[str, Any]:
            beaten.release()
            return {}

        with Heartbeat(cluster.client(), "worker", "w", about):
            cluster.status(lambda found: names(found) == ["w"])
            cluster.stop()
            until(lambda: said("the coordinator is unreachable, all else continues"), PATIENCE)
            while beaten.acquire(blocking=False):
                pass
            assert all(beaten.acquire(timeout=PATIENCE) for _ in range(3))  # it goes on trying
            cluster.learn()
            cluster.start()
            assert names(cluster.status(lambda found: names(found) == ["w"])) == ["w"]
            until(lambda: said("the coordinator is reachable again"), PATIENCE)
        assert said("the coordinator is unreachable") == said("the coordinator is reachable again") == 1


def test_each_step_of_a_change_of_shards_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    shown = io.StringIO()

    def watch(name: str) -> None:
        do = getattr(coordination, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            seen.append(cluster.client().status()["scaling"])
            until(lambda: STEPS[seen[-1]["step"]] in shown.getvalue(), PATIENCE)
            return do(*arguments, **options)

        monkeypatch.setattr(coordination, name, watched)

    with Coordinated(tmp_path) as cluster:
        cluster.learn()
        assert cluster.client().status()["scaling"] is None
        watch("read_ahead")
        watch("next_shard_map")
        with redirect_stderr(shown), _showing_steps(cluster.settings):
            cluster.client().scale(cluster.addresses[::-1])
        assert {one["shards"] for one in seen} == {2}
        steps = [one["step"] for one in seen]
        assert [*dict.fromkeys(steps)] == ["rows", "changes", "switch"]
        assert 1 <= steps.count("changes") <= 3
        assert cluster.client().status()["scaling"] is None
        with pytest.raises(ShardRefused, match="named twice"):
            cluster.client().scale(cluster.addresses[:1] * 2)
        assert cluster.client().status()["scaling"] is None


def test_shards_that_read_what_has_changed_stop_if_it_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(coordination, "forget_ahead", lambda control: told.append(control.target))

    def cancelled(*arguments: Any, **options: Any) -> None:
        scaling = cluster.client().status()["scaling"]
        if scaling["step"] == "changes":
            cluster.client().cancel_scale()
            assert len(told) == len(cluster.addresses), "each is told to stop reading"
        read_ahead(*arguments, **options)

    with Coordinated(tmp_path) as cluster:
        cluster.learn()
        monkeypatch.setattr(coordination, "read_ahead", cancelled)
        with pytest.raises(ShardError, match="the change of shards was cancelled: those of before go on"):
            cluster.client().scale(cluster.addresses[::-1])
        assert cluster.client().status()["scaling"] is None
        assert list(cluster.client().slots().shards) == cluster.addresses


def test_what_a_change_of_shards_takes_is_estimated() -> None:
    shards = [
        {"state": "ready", "rows": {"a": 30, "b": 10}, "bytes": 1000},
        {"state": "ready", "rows": {"a": 20}, "bytes": 800},
    ]
    assert Estimate.of({"shards": shards}, 4) == (2, 4, 60, 1800, 450, 1000)  # none of the two gets other rows
    assert Estimate.of({"shards": shards}, 1) == (2, 1, 60, 1800, 1800, 1000 + 900)
    assert Estimate.of({"shards": shards * 3}, 4)[-1] == 1000 + 5400 // 12
    assert Estimate.of({"shards": shards[:1]}, 3)[-1] == 1000
    with pytest.raises(ShardUnavailable, match="c:1: not ready"):
        Estimate.of({"shards": [*shards, {"state": "away", "address": "c:1"}]}, 4)


def test_shards_get_the_places_for_which_fewest_rows_move() -> None:
    for before, after in itertools.product(range(1, 6), repeat=2):
        chosen = next_places(before, after)
        stay = [was for was in chosen if was is not None]
        assert chosen[0] == 0
        assert stay == sorted(stay)
        assert len(stay) == min(before, after)
        then = ShardMap(0, tuple("abcde"[:before]))
        moved = {}
        for places in itertools.permutations([*range(before), *[None] * max(0, after - before)], after):
            addresses = tuple(f"new{i}" if was is None else "abcde"[was] for i, was in enumerate(places))
            moved[places] = rows_to_read(then, ShardMap(1, addresses), 10**9)
        assert moved[tuple(chosen)] <= min(moved.values()) + 10


def test_how_many_rows_are_read_is_estimated() -> None:
    two, four = ShardMap(1, ("a", "b")), ("a", "b", "c", "d")
    assert rows_to_read(two, ShardMap(0, four), 1000) == 750  # b has another half, and keeps none
    assert rows_to_read(two, ShardMap(0, ("a", "c", "b", "d")), 1000) == 500
    assert rows_to_read(two, ShardMap(0, ("b", "a")), 1000) == 1000
    assert rows_to_read(ShardMap(1, four), ShardMap(0, ("a", "b")), 1000) == 750
    assert rows_to_read(two, ShardMap(0, ("c",)), 1000) == 1000


def test_whoever_goes_by_an_old_slot_map_is_told(tmp_path: Path) -> None:
    moved = threading.Semaphore(0)

    def hear() -> bool:
        moved.release()
        return True

    with Coordinated(tmp_path) as cluster, Heartbeat(cluster.client(), "worker", "w", dict, hear):
        assert cluster.client().slots() == ShardMap(1, tuple(cluster.addresses))
        cluster.status(lambda found: names(found) == ["w"])
        assert moved.acquire(timeout=PATIENCE)  # of the first one that it hears of
        cluster.stop()
        cluster.start()  # with the same shards
        cluster.status(lambda found: names(found) == ["w"])
        assert not moved.acquire(blocking=False)
        cluster.stop()
        cluster.start(cluster.addresses[::-1])
        assert moved.acquire(timeout=PATIENCE)
        assert cluster.client().slots() == ShardMap(2, tuple(cluster.addresses[::-1]))
        assert not moved.acquire(blocking=False)


def test_only_those_with_the_token_are_answered() -> None:
    with Coordinated(security__token="secret") as cluster:
        assert cluster.client().slots().epoch == 1
        cluster.status(lambda found: states(found) == ["empty", "empty"])  # shards take its token, too
        with grpc.insecure_channel(cluster.address) as channel:
            for number, carried in enumerate([(), (("authorization", "Bearer wrong"),)]):
                ask = channel.unary_unary(f"/{SERVICE.full_name}/Status")
                with pytest.raises(grpc.RpcError) as caught:
                    ask(pb.StatusRequest().SerializeToString(), metadata=carried, timeout=PATIENCE)
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
                assert cluster.coordinator
                assert cluster.coordinator.server.counters["refused_token"] == number + 1


def test_nonsense_is_refused_and_counted() -> None:
    with Coordinated() as cluster, grpc.insecure_channel(cluster.address) as channel:
        for name, request, message in (
            ("Beat", b"\xff", "the request is not a BeatRequest"),
            ("Beat", pb.BeatRequest(kind=7, name="w", about="{}").SerializeToString(), "unknown kind of process 7"),
            ("Beat", pb.BeatRequest(name="w", about="[]").SerializeToString(), "is not a JSON object"),
            ("Leave", pb.LeaveRequest(kind=7, name="w").SerializeToString(), "unknown kind of process 7"),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(f"/{SERVICE.full_name}/{name}")(request, timeout=PATIENCE)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert message in caught.value.details()
        assert cluster.coordinator
        assert cluster.coordinator.server.counters["refused_malformed"] == 4
        with pytest.raises(ShardRefused, match=r"set checkpoint\.url where the coordinator runs"):
            cluster.client().checkpoint()
        with pytest.raises(ShardRefused, match=r"set publish\.url where"):
            cluster.client().publish_now()
        with pytest.raises(ConfigError, match="cannot listen"):
            cluster.start()  # a second one at the same address
