"""Shards against what they have published to a real server: equal while they learn, and any other row is found."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import redis

from streamtrain._core import shards_of
from streamtrain.cluster.client import CoordinatorClient
from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import (
    GateClosed,
    OriginUnavailable,
    PublicationCorrupt,
    PublicationError,
    ShardError,
)
from streamtrain.processes.coordinator import CoordinatorProcess
from streamtrain.processes.ps import PsProcess
from streamtrain.ps.clock import Span
from streamtrain.ps.nodes.shards import Shards
from streamtrain.publish.cluster_publisher import PublicationSchedule
from streamtrain.publish.head_check import HeadComparison, TableComparison
from streamtrain.publish.published_table import isin_sorted
from streamtrain.quality.gate import Figures
from streamtrain.settings.groups import GateSettings, Settings
from tests.ports import free_ports
from tests.ps.counting import key, pushes
from tests.ps.served import COUNTING
from tests.publish.published import LOG, OPEN, Cluster, assert_published, counts, read
from tests.publish.test_shard_publisher import L1, push, spec, table_of
from tests.stream.redis_fixtures import redis_binary

__all__ = ["redis_binary"]


@pytest.fixture
def server(redis_binary: str | None) -> Iterator[Valkey]:
    """Valkey and Redis, in turn."""
    with Valkey(binary=redis_binary) as one:
        yield one
        while OPEN:
            OPEN.pop().close()


def verified(cluster: Cluster) -> HeadComparison:
    """What is new is published, then compared."""
    return PublicationSchedule(cluster.publications, 3600).verify()


def of_ids(found: HeadComparison) -> TableComparison:
    (table,) = found.tables.values()
    return table


@contextmanager
def bucket_of(server: Valkey, one: int) -> Iterator[tuple["redis.Redis", str, bytes]]:
    """A client, the name of the hash that has an id's row, and the field."""
    with redis.Redis.from_url(server.url) as client:
        field = np.array([key(one)], "<u8").tobytes()
        (name,) = (name for name in client.keys("streamtrain:rows:*") if client.hexists(name, field))
        yield client, name.decode(), field


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_what_is_published_is_what_shards_have(server: Valkey, dtype: str) -> None:
    cluster = Cluster(server.url, dtype=dtype)
    for samples in (3, 1, 4):
        cluster.learn(samples)
        found = verified(cluster)
        rows = len(counts([[1, 2], [2], [3], [1], [7, 8], [9], [2, 3], [11]][: cluster.learned]))
        assert found.agrees
        assert of_ids(found)[:5] == (rows, 0, of_ids(found).buckets, 0, [])
        assert (of_ids(found).published, of_ids(found).there) == (rows, rows)
    assert HeadComparison.from_json(found.to_json()) == found


def test_a_row_that_is_other_than_it_was_published_is_found(server: Valkey) -> None:
    cluster = Cluster(server.url)
    cluster.learn(8)
    assert verified(cluster).agrees
    with bucket_of(server, 7) as (client, name, field):
        client.hset(name, field, b"\x00\x00\x00\x41")
        found = verified(cluster)
        assert not found.agrees
        assert of_ids(found).differing == 1
        (text,) = of_ids(found).first
        assert name in text
        assert text.endswith("shards have others")
    assert_healed(cluster, server)


def assert_healed(cluster: Cluster, server: Valkey) -> None:
    """What was found has been published anew, though nothing was learned."""
    assert_published(server.url, cluster.learned)
    assert verified(cluster).agrees


def test_a_row_that_is_missing_or_too_much_is_found(server: Valkey) -> None:
    cluster = Cluster(server.url)
    cluster.learn(8)
    verified(cluster)
    with bucket_of(server, 7) as (client, name, field):
        client.hdel(name, field)
        table = of_ids(verified(cluster))
        assert (table.differing, table.there, table.published) == (1, table.rows - 1, table.rows)
    assert_healed(cluster, server)
    with bucket_of(server, 7) as (client, name, field):
        row: Any = client.hget(name, field)
        client.hset(name, (12345).to_bytes(8, "little"), row)
        assert not verified(cluster).agrees
    assert_healed(cluster, server)
    with bucket_of(server, 7) as (client, name, field):
        client.hset(name, field, b"short")
        with pytest.raises(PublicationCorrupt, match="not rows of 4 bytes"):
            verified(cluster)
    assert_healed(cluster, server)


def test_what_changes_meanwhile_is_left_out_and_published_with_the_next(server: Valkey) -> None:
    cluster = Cluster(server.url)
    cluster.learn(5)
    assert verified(cluster).agrees
    cluster.learn(3)  # 9; 2, 3; 11
    found = cluster.publications.verify()  # of the head as it is
    assert found.agrees
    assert (of_ids(found).rows, of_ids(found).changing, of_ids(found).there) == (3, 4, 5)  # 1, 7, 8; 2, 3, 9, 11
    assert cluster.publications.verify() == found  # looking changes nothing
    cluster.publish()
    assert_published(server.url, 8)
    assert of_ids(cluster.publications.verify()).changing == 0


def test_rows_that_go_meanwhile_are_left_out_and_removed_with_the_next(server: Valkey) -> None:
    cluster = Cluster(server.url)
    cluster.learn(5)
    verified(cluster)
    table_of(cluster, 1).remove(np.array([key(1)], np.uint64))
    found = cluster.publications.verify()
    assert found.agrees
    assert (of_ids(found).rows, of_ids(found).changing) == (4, 1)
    cluster.learn(1)
    cluster.publish()
    assert key(1) not in read(server.url)[1]
    assert verified(cluster).agrees


def test_what_was_written_in_vain_is_left_out(server: Valkey) -> None:
    """A shard has taken changes out for a publication that another shard could not write."""
    cluster = Cluster(server.url)
    cluster.learn(5)
    verified(cluster)
    cluster.learn(3)
    working, cluster.controls[1].publish = cluster.controls[1].publish, fails  # type: ignore[method-assign]
    with pytest.raises(ShardError, match="away"):
        cluster.publications.publish()
    found = cluster.publications.verify()
    assert found.agrees
    assert of_ids(found).changing == 4
    cluster.controls[1].publish = working  # type: ignore[method-assign]
    assert of_ids(verified(cluster)).changing == 0
    assert_published(server.url, 8)


def fails(number: int, layout: str, generation: int = 0) -> str:
    raise ShardError("away")


def test_zeros_of_l1_are_not_missed(server: Valkey) -> None:
    cluster = Cluster(server.url, spec=spec(**L1))
    cluster.learn(8)
    found = verified(cluster)
    assert found.agrees
    assert of_ids(found).rows == 3  # ids that were seen twice
    push(cluster, 2, 2.0)  # which brings it back to zero
    assert cluster.publications.verify().agrees


def test_rows_that_are_not_finite_are_left_out(server: Valkey) -> None:
    cluster = Cluster(server.url)
    cluster.learn(7)
    verified(cluster)
    keys, ones = np.array([key(2)], np.uint64), np.ones(1, np.uint32)
    table_of(cluster, 2).push(keys, np.full((1, 1), 2.0**50, np.float32), ones, ones, 3e38)  # it has diverged
    found = cluster.publications.verify()
    assert (found.agrees, of_ids(found).changing) == (True, 1)
    cluster.learn(1)
    for _ in range(2):
        with pytest.raises(GateClosed, match="not finite"):
            cluster.publish()
        found = cluster.publications.verify()
        assert (found.agrees, of_ids(found).changing) == (True, 2)  # and 11, which is new


def test_a_head_that_is_held_back_is_compared_as_it_is(server: Valkey) -> None:
    bad: Figures = {}
    cluster = Cluster(server.url, gate=GateSettings(), figures=lambda: bad)
    cluster.learn(5)
    assert verified(cluster).publication == 1
    cluster.learn(3)
    bad["label"] = {"samples": 10.0, "non_finite": 3.0}  # type: ignore[index]
    found = verified(cluster)
    assert (found.publication, found.agrees, of_ids(found).changing) == (1, True, 4)


def test_a_shard_that_has_just_begun_has_everything_published_anew(server: Valkey) -> None:
    first = Cluster(server.url)
    first.learn(5)
    verified(first)
    again = Cluster(server.url)  # as if restored
    again.learn(5)
    found = verified(again)
    assert (found.publication, found.agrees, of_ids(found).rows) == (2, True, 5)


def test_what_cannot_be_compared_says_so(server: Valkey) -> None:
    cluster = Cluster(server.url)
    with pytest.raises(PublicationError, match="has no head"):
        cluster.publications.verify()
    cluster.learn(1)
    cluster.publish()
    other = Cluster(server.url, run="another")
    with pytest.raises(PublicationError, match="is not of the run that the shards have"):
        other.publications.verify()
    server.kill()
    with pytest.raises(OriginUnavailable):
        verified(cluster)


def test_all_is_equal_while_rows_change_all_the_time(server: Valkey) -> None:
    cluster = Cluster(server.url, spec=spec(dim=3))
    tables = [node.shard.tables[0] for node in cluster.nodes]
    keys = np.arange(1, 200_001, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    halves = [keys[shards_of(keys, 2) == index] for index in range(2)]
    for table, mine in zip(tables, halves, strict=True):
        ones = np.ones(len(mine), np.uint32)
        table.load(
            mine,
            np.random.default_rng(1).random((len(mine), 3), np.float32),
            np.empty((len(mine), 0), np.float32),
            ones,
            ones,
        )
    stop = threading.Event()

    def change() -> None:
        draw = np.random.default_rng(2)
        while not stop.is_set():
            for table, mine in zip(tables, halves, strict=True):
                some = draw.choice(mine[:20_000], 500, replace=False)
                ones = np.ones(500, np.uint32)
                table.push(some, draw.random((500, 3), np.float32), ones, ones)
                table.remove(draw.choice(mine[:20_000], 20))

    cluster.publish()
    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(3):
            found = cluster.publications.verify()
            assert found.agrees, found
    finally:
        stop.set()
        thread.join()
    assert of_ids(found).rows >= 160_000
    assert of_ids(found).changing > 0


def test_among() -> None:
    ordered = np.array([3, 5, 2**64 - 1], np.uint64)
    keys = np.array([0, 3, 4, 5, 6, 2**64 - 1], np.uint64)
    assert isin_sorted(keys, ordered).tolist() == [False, True, False, True, False, True]
    assert isin_sorted(keys, ordered[:0]).tolist() == [False] * 6


def test_a_coordinator_compares(server: Valkey) -> None:
    one, other, coordinator = (f"127.0.0.1:{port}" for port in free_ports(3))
    settings = Settings.model_validate(
        {
            "ps": {"addresses": [one, other]},
            "coordinator": {"address": coordinator},
            "publish": {"url": server.url, "model": "counted", "every": 3600.0},
        }
    )
    shards = [PsProcess(index, [one, other], settings) for index in range(2)]
    process = CoordinatorProcess([one, other], settings)
    running: list[PsProcess | CoordinatorProcess] = [*shards, process]
    for member in running:
        member.start()
    try:
        Shards([shard.node for shard in shards], COUNTING).agree()
        for shard, pushed in zip(shards, pushes(LOG, [Span(0, 0, 8)], 2), strict=True):
            shard.node.shard.push(pushed)
        with CoordinatorClient.from_settings(settings) as client:
            found = client.verify(timeout=60)
        assert (found.publication, found.agrees, of_ids(found).rows) == (1, True, 7)
    finally:
        for member in reversed(running):
            member.stop()
