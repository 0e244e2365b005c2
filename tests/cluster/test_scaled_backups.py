"""Shards with backups change in number: pairs move together, backups copy anew, and take over where they then are."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamtrain.cluster.client import known_shards, resolve_cluster
from streamtrain.embedded.valkey import Valkey
from streamtrain.ps.nodes.topology import ShardMap
from streamtrain.settings.load import load_settings
from tests.cluster.here import refused, told
from tests.cluster.scaled import Scaled

MOST = 3


@pytest.fixture
def cluster(server: Valkey, tmp_path: Path) -> Iterator[Scaled]:
    made = Scaled(server.url, f"scaled-{tmp_path.name}", tmp_path / "checkpoints", MOST, backups=True)
    try:
        yield made
    finally:
        made.close()


def start(cluster: Scaled) -> None:
    """Two shards that have learned 500 samples of each partition, and a pair of processes without a place."""
    cluster.fill(0, 500)
    cluster.start()
    cluster.learned(500, 0, 1)
    cluster.start_spare(2)
    cluster.start_spare(MOST + 2)


def test_pairs_are_added_and_drained_and_their_backups_take_over(cluster: Scaled) -> None:
    start(cluster)
    ps, backups = (",".join(of(0, 2, 1)) for of in (cluster.of, cluster.backups))
    assert told("scale", "--ps", ps, "--backups", backups, *cluster.options) == {"shards": cluster.of(0, 2, 1)}
    now = ShardMap(2, tuple(cluster.of(0, 2, 1)), tuple(cluster.backups(0, 2, 1)), scaled=True)
    assert cluster.client.slots() == now
    told_where = {"coordinator.address": cluster.settings.coordinator.address, "ps.backups": cluster.backups(0, 1)}
    found, settings = resolve_cluster(load_settings(overrides=told_where), None, threading.Event())
    assert (found.ps, settings.ps.backups) == (now.shards, now.backups)  # of a worker that knows the coordinator alone
    assert known_shards(cluster.settings, None) == now
    cluster.fill(500, 1_000)
    cluster.learned(1_000, 0, 2, 1)
    for index in (0, 2, 1):
        cluster.in_step(index)
    for index in (0, 2):  # one by the settings, and one that was a spare
        cluster.kill(cluster.addresses[index])
    cluster.fill(1_000, 1_500)
    cluster.learned(1_500, 0, 2, 1)
    assert cluster.differences(1_500, 0, 2, 1) == []
    cluster.start_shard(0)
    cluster.start_spare(2)
    for index in (0, 2, 1):
        cluster.in_step(index)
    drained = told("drain", cluster.addresses[MOST], *cluster.options)
    assert drained == {"shards": cluster.of(2, 1)}
    assert cluster.rows(0) == cluster.rows(MOST) == 0
    cluster.fill(1_500, 2_000)
    cluster.learned(2_000, 2, 1)
    for index in (2, 1):
        cluster.in_step(index)
        cluster.kill(cluster.addresses[index + MOST] if index == 2 else cluster.addresses[index])
    cluster.fill(2_000, 2_500)
    cluster.learned(2_500, 2, 1)
    assert cluster.differences(2_500, 2, 1) == []
    assert not cluster.failures


def test_what_would_part_a_pair_is_refused(cluster: Scaled) -> None:
    start(cluster)
    (first, second, third), backups = cluster.of(0, 1, 2), cluster.backups(0, 1, 2)

    def scale(ps: list[str], to: list[str], code: int = 1) -> str:
        return refused("scale", "--ps", ",".join(ps), "--backups", ",".join(to), *cluster.options, code=code)

    assert "have backups: give as many with --backups, not 0 for 3 shards" in scale([first, second, third], [])
    assert "not 1 for 2 shards" in scale([first, second], backups[:1])
    parted = scale([first, second, third], [backups[1], backups[0], backups[2]])
    assert (
        f"{min(first, backups[0])} and {max(first, backups[0])} are a shard and its backup, and must stay so" in parted
    )
    assert f"{first} is named twice" in scale([first, second], [first, backups[1]])
    assert "--backups goes with the addresses of all shards" in refused(
        *("scale", "--ps", "3", "--backups", ",".join(backups)), *cluster.options, code=2
    )
    assert cluster.client.slots().epoch == 1
    cluster.fill(500, 1_000)
    cluster.learned(1_000, 0, 1)
    assert cluster.differences(1_000, 0, 1) == []


def test_whoever_is_killed_meanwhile(cluster: Scaled) -> None:
    """At a random moment of a move, over and over; whoever is killed is started again as it was."""
    start(cluster)
    cluster.kill_while_moving([0, 1], [[0, 1], [0, 2, 1], [2, 0], [1]], within=0.5, seed=11)
