"""What the coordinator knows of the stream, and of what was done before it began."""

from pathlib import Path

from streamtrain.cluster.coordinator_client import Beats
from streamtrain.embedded.valkey import Valkey
from streamtrain.stream.redis_streams import RedisStream
from tests.cluster.coordinated import SECONDS, Coordinated, states

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
        assert writer.flush(SECONDS) == 0
        with (
            Coordinated(stream__url=server.url, stream__topic="clicks") as cluster,
            Beats(cluster.client(), "worker", "w", lambda: {"lag": {"1": 5}}),
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
        cluster.control().publish_now(timeout=SECONDS)
        cluster.client().checkpoint()
        before = cluster.status()
        cluster.stop()
        cluster.start()
        after = cluster.status(lambda found: found["checkpoint"] and found["publication"])
        assert after["publication"] == before["publication"]
        assert after["checkpoint"]["epoch"] == before["checkpoint"]["epoch"]
        assert abs(after["checkpoint"]["at"] - before["checkpoint"]["at"]) < SECONDS


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
