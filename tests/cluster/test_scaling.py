"""Another number of shards while everything runs: each sample counts once, whoever is killed, and workers stay."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import ShardError
from streamtrain.ps.nodes.topology import ShardMap
from tests.cluster.here import refused, run, told
from tests.cluster.scaled import Scaled, good
from tests.patience import PATIENCE, until


@pytest.fixture
def cluster(server: Valkey, tmp_path: Path) -> Iterator[Scaled]:
    made = Scaled(server.url, f"scaled-{tmp_path.name}", tmp_path / "checkpoints")
    try:
        yield made
    finally:
        made.close()


def test_shards_are_added_and_taken_away(cluster: Scaled) -> None:
    """Of 2 to 4, 3, 1 and 2 others, under load: counts are exact, also in Redis, and workers are those of before."""
    cluster.fill(0, 1_000)
    cluster.start(workers=2)
    cluster.learned(500, 0, 1)
    for index in (2, 3):
        cluster.start_spare(index)
    end = 1_000
    cluster.client.publish_now()
    dictionary = cluster.dictionary()
    for epoch, to in enumerate([(0, 2, 1, 3), (0, 2, 1), (2,), (3, 1)], 2):
        cluster.fill(end, end + 1_000)
        end += 1_000
        assert cluster.scale(*to) == ShardMap(epoch, tuple(cluster.of(*to)), scaled=True)
        cluster.learned(end, *to)
        assert cluster.differences(end, *to) == []
        cluster.client.publish_now()
    assert cluster.dictionary() == dictionary  # which each full publication begins anew
    assert cluster.rows(0) == cluster.rows(2) == 0
    assert not cluster.failures
    published = cluster.client.publish_now()
    assert dict(published.clock) == {0: end, 1: end}
    assert cluster.client.verify().agrees
    until(lambda: cluster.counted() >= good(end), PATIENCE)
    assert cluster.counted() < 2 * good(end)


def test_one_that_was_left_out_and_started_again_gives_up_what_is_old(cluster: Scaled) -> None:
    """As its settings have it, it is shard 0 of 2; the map of two shards that follows has it there. Nobody learns."""
    cluster.fill(0, 1_000)
    cluster.start()
    cluster.learned(1_000, 0, 1)
    cluster.start_spare(2)
    cluster.scale(2)
    cluster.restart(0)
    cluster.processes[cluster.addresses[0]].serving()
    assert cluster.rows(0) > 0  # of the checkpoint of before
    cluster.fill(1_000, 2_000)
    cluster.learned(2_000, 2)
    cluster.scale(0, 2)
    cluster.learned(2_000, 0, 2)
    assert cluster.differences(2_000, 0, 2) == []
    names = [worker._name for worker in cluster.workers]
    controls = cluster.shards(0, 2).controls
    until(lambda: all(list(control.status().workers) == names for control in controls), PATIENCE)  # it has moved
    assert cluster.counted() == good(2_000)


def test_a_change_is_shown_limited_and_cancelled(cluster: Scaled) -> None:
    cluster.fill(0, 1_000)
    cluster.start()
    cluster.learned(1_000, 0, 1)
    cluster.start_spare(2)
    ps = ",".join(cluster.of(0, 2, 1))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(cluster.client.scale, cluster.of(0, 2, 1), rate=1.0)  # each would take minutes

        def reads() -> bool:
            scaling = cluster.client.status()["scaling"]
            return bool(scaling and 0 < scaling["rows"] < 2 * scaling["total"])

        until(reads, PATIENCE)
        shown = run("status", *cluster.options).stdout
        assert re.search(r"2 shards become 3: rows \([0-9,]+ of [0-9,]+\), for ", shown), shown
        assert "in number, or ids are being forgotten; retry later" in refused("scale", "--ps", ps, *cluster.options)
        assert run("scale", "--cancel", *cluster.options).returncode == 0
        with pytest.raises(ShardError, match="the change of shards was cancelled: those of before go on"):
            asked.result(PATIENCE)
    assert "the shards are not being changed" in refused("scale", "--cancel", *cluster.options)
    assert cluster.client.status()["scaling"] is None
    assert cluster.in_force() == [0, 1]
    cluster.fill(1_000, 2_000)
    cluster.learned(2_000, 0, 1)
    assert cluster.differences(2_000, 0, 1) == []
    assert told("scale", "--ps", ps, "--rate", "100MB", *cluster.options) == {"shards": cluster.of(0, 2, 1)}
    cluster.learned(2_000, 0, 2, 1)
    assert cluster.differences(2_000, 0, 2, 1) == []
    assert "--rate must be a positive size" in refused("scale", "--ps", ps, "--rate", "x", *cluster.options, code=2)
    assert "--ps or --workers is required" in refused("scale", *cluster.options, code=2)


def test_a_shard_is_drained(cluster: Scaled) -> None:
    cluster.fill(0, 1_000)
    cluster.start()
    cluster.learned(500, 0, 1)
    cluster.start_spare(2)
    cluster.scale(0, 2, 1)
    drained = told("drain", cluster.addresses[0], *cluster.options)
    assert drained == {"shards": [cluster.addresses[2], cluster.addresses[1]]}
    assert cluster.rows(0) == 0
    cluster.fill(1_000, 2_000)
    cluster.learned(2_000, 2, 1)
    assert cluster.differences(2_000, 2, 1) == []
    told("drain", cluster.addresses[1], *cluster.options)
    last = refused("drain", cluster.addresses[2], *cluster.options, code=2)
    assert "is the only shard: start another with ps --spare" in last


def test_whoever_is_killed_meanwhile(cluster: Scaled) -> None:
    """At a random moment of a move, over and over; whoever is killed is started again as it was."""
    cluster.fill(0, 500)
    cluster.start()
    cluster.learned(500, 0, 1)
    for index in (2, 3):
        cluster.start_spare(index)
    assert cluster.scale(0, 2, 1).epoch == 2  # all are there
    cluster.kill_while_moving([0, 2, 1], [[0, 1], [0, 2, 1], [3, 2], [2, 0, 1, 3], [1]], within=0.3, seed=7)
