"""What the coordinator knows of the stream, and of what was done before it began."""

import time
from pathlib import Path

import pytest

from streamtrain.cluster.client import Heartbeat
from streamtrain.cluster.history import History
from streamtrain.embedded.valkey import Valkey
from streamtrain.stream.redis.stream import RedisStream
from tests.cluster.coordinated import Coordinated, states
from tests.patience import PATIENCE

PARTITIONS = 3
EACH = 10
LEARNED = 11  # of the log of `Coordinated`


def test_lag_counts_partitions_that_nobody_has() -> None:
    """Two of three partitions have been learned from; one worker says of another that it is behind by 5."""
    with Valkey() as server:
        stream = RedisStream(server.url, "clicks")
        stream.create(PARTITIONS)
        writer = stream.writer()
        for partition in range(PARTITIONS):
            for _ in range(EACH):
                writer.write(b"{}", partition=partition)
        assert writer.flush(PATIENCE) == 0
        with (
            Coordinated(stream__url=server.url, stream__topic="clicks") as cluster,
            Heartbeat(cluster.client(), "worker", "w", lambda: {"lag": {"1": 5}}),
        ):
            cluster.status(lambda found: found["lag"] == 5)  # before anything is learned, workers know best
            cluster.learn()
            cluster.status(lambda found: found["lag"] == PARTITIONS * EACH - LEARNED)
            cluster.stop_shard(1)
            cluster.status(lambda found: states(found) == ["ready", "away"])
            writer.write(b"{}", partition=2)
            cluster.status(lambda found: found["lag"] == PARTITIONS * EACH - LEARNED + 1)
            server.stop()
            cluster.status(lambda found: found["lag"] == 5)  # the stream tells no more
        writer.close()


def test_a_coordinator_that_begins_again_knows_what_was_done_before(tmp_path: Path, server: Valkey) -> None:
    with Coordinated(tmp_path, publish__url=server.url, publish__model="counted", publish__every="1h") as cluster:
        assert cluster.status()["checkpoint"] is cluster.status()["publication"] is None
        cluster.learn()
        cluster.client().publish_now(timeout=PATIENCE)
        cluster.client().checkpoint()
        before = cluster.status()
        cluster.stop()
        cluster.start()
        after = cluster.status(lambda found: found["checkpoint"] and found["publication"])
        assert after["publication"] == before["publication"]
        assert after["checkpoint"]["epoch"] == before["checkpoint"]["epoch"]
        assert abs(after["checkpoint"]["at"] - before["checkpoint"]["at"]) < PATIENCE


def test_a_damaged_checkpoint_is_no_hindrance(tmp_path: Path) -> None:
    with Coordinated(tmp_path) as cluster:
        cluster.learn()
        epoch = cluster.client().checkpoint().epoch
        cluster.stop()
        (tmp_path / f"epoch-{epoch:09d}" / "manifest.json").write_text("{")
        cluster.start()
        assert cluster.status(lambda found: states(found) == ["ready", "ready"])["checkpoint"] is None
        assert cluster.client().checkpoint().epoch == epoch + 1
        assert cluster.status()["checkpoint"]["epoch"] == epoch + 1


# The history of the console.


def test_the_history_survives_restarts(tmp_path: Path) -> None:
    with Coordinated(tmp_path) as cluster:
        cluster.learn()
        before = cluster.status(lambda found: len(found["history"]) > 1)["history"]
        cluster.stop()
        cluster.start()
        after = cluster.status(lambda found: len(found["history"]) > len(before) + 1)["history"]
        assert after[: len(before)] == before
        assert after[len(before)]["samples_per_s"] is None  # no line is drawn across the time between
    old = History(str(tmp_path), now=lambda: before[-1]["time"] + 601.0)
    assert old.points() == []


@pytest.mark.parametrize("text", ["", "[", "{}", "7", '["x"]', '[{"time": "x"}]', '[{"time": null}]', "[{}]"])
def test_a_history_that_cannot_be_read_begins_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / "history.json").write_text(text)
    assert History(str(tmp_path)).points() == []


def test_where_the_stream_is_learned_through_is_known_by_its_own_time(tmp_path: Path) -> None:
    """Whatever the times of the events are; a message that is not learned yet holds it back."""
    with Valkey() as server:
        stream = RedisStream(server.url, "clicks")
        stream.create(2)
        writer = stream.writer()
        for partition, count in ((0, 8), (1, 3)):
            for _ in range(count):
                writer.write(b"{}", partition=partition)
        assert writer.flush(PATIENCE) == 0
        with Coordinated(stream__url=server.url, stream__topic="clicks") as cluster:
            assert cluster.status()["log_time"] is None
            cluster.learn()
            found = cluster.status(lambda found: found["log_time"])
            assert 0 <= found["time"] - found["log_time"] < PATIENCE
            later = cluster.status(lambda other: other["log_time"] > found["log_time"])  # goes on though nothing comes
            writer.write(b"{}", partition=0)
            assert writer.flush(PATIENCE) == 0
            written = time.time()
            behind = cluster.status(lambda other: other["lag"] == 1)
            held = cluster.status(lambda other: other["time"] > written + 5)
            assert later["log_time"] <= behind["log_time"] <= held["log_time"] <= written
        writer.close()


def test_dead_letters_have_an_example_and_workers_that_left_are_counted() -> None:
    place = {"field": "item", "partition": 1, "offset": 7}
    with Coordinated() as cluster:
        assert cluster.status()["workers_left"] == 0
        about = {"dead_letters": {"bad_time": 1}, "dead_letter_examples": {"bad_time": place}}
        with Heartbeat(cluster.client(), "worker", "w", lambda: about):
            status = cluster.status(lambda found: found["workers"])
            assert status["dead_letter_examples"] == {"bad_time": place}
        status = cluster.status(lambda found: not found["workers"])
        assert (status["workers_left"], status["dead_letter_examples"]) == (1, {"bad_time": place})
