"""Rows expire by the partition that is furthest behind, unless nothing of it is unread."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from streamtrain.ps.clock import Span
from streamtrain.ps.push import Push, RowUpdate
from streamtrain.ps.shard import InitialState, Run, Shard
from tests.ps.counting import DENSE, SPEC, key, plan_of
from tests.ps.served import served

HOUR = 3600
EXPIRING = replace(SPEC, tables=({**SPEC.tables[0], "expire_after": HOUR},))


@pytest.fixture
def shard() -> Shard:
    return Shard(InitialState(Run("run", {}), EXPIRING, np.zeros(DENSE, np.float32), np.zeros(2, np.float32)), 0, 1)


def push(shard: Shard, watermarks: Mapping[int, int], *, watermark: int, one: int, idle: tuple[int, ...] = ()) -> int:
    """Learns id `one` in one sample of each partition, seen at its watermark; gives the rows that there are then."""
    clock, at = shard.clock(), max(watermarks.values())
    spans = [Span(p, clock.get(p, 0), clock.get(p, 0) + 1) for p in watermarks]
    update = RowUpdate(
        np.array([key(one)], np.uint64), -np.ones((1, 1), np.float32), np.ones(1, np.uint32), np.array([at], np.uint32)
    )
    none = np.zeros(DENSE, np.float32), np.zeros(2, np.float32)
    shard.push(Push(spans, 1, [update], *none, watermark, dict(watermarks), idle))
    return len(shard.tables[0])


def test_rows_of_a_partition_that_lags_live(shard: Shard) -> None:
    assert push(shard, {0: 100_000}, watermark=100_000, one=1) == 1
    for one in range(2, 10):  # from ten hours before
        assert push(shard, {1: 100_000 - 10 * HOUR + one}, watermark=100_000, one=one) == one


def test_rows_expire_once_the_last_partition_has_come_that_far(shard: Shard) -> None:
    push(shard, {0: 100_000}, watermark=100_000, one=1)
    push(shard, {1: 50_000}, watermark=100_000, one=2)
    assert push(shard, {0: 200_000}, watermark=200_000, one=3) == 3
    assert push(shard, {1: 150_000}, watermark=200_000, one=4) == 2


def test_a_partition_of_which_nothing_is_unread_keeps_nothing_alive(shard: Shard) -> None:
    push(shard, {0: 100_000}, watermark=100_000, one=1)
    push(shard, {1: 50_000}, watermark=100_000, one=2)
    assert push(shard, {0: 200_000}, watermark=200_000, one=3) == 3
    assert push(shard, {0: 200_001}, watermark=200_001, one=3, idle=(1,)) == 1
    assert push(shard, {0: 200_002}, watermark=200_002, one=4) == 2
    assert push(shard, {1: 60_000}, watermark=200_002, one=5) == 3  # there is something of it again
    assert push(shard, {0: 200_003}, watermark=200_003, one=6) == 4
    shard.idle([1])
    assert push(shard, {0: 200_004}, watermark=200_004, one=6) == 3


@pytest.mark.parametrize("lanes", [True, False])
def test_what_is_idle_goes_with_a_push_and_with_a_pause(lanes: bool) -> None:
    """And of it what a shard has had: a list of anything takes no memory."""
    log = {0: [[1]], 1: [[2]], 2: [[3]]}
    with served() as of:
        shards = of.shards()
        client = shards.client("worker", shards.agree(), lanes=lanes)
        client.join()
        for partition, idle in ((0, [7]), (1, [0, 9]), (2, [])):
            spans = [Span(partition, 0, 1)]
            plan = plan_of(log, spans, 2)
            client.pull(plan).wait()
            dense, statistics = np.full(DENSE, -1, np.float32), np.ones(2, np.float32)
            given: dict[str, Any] = {"spans": spans, "watermark": 5, "watermarks": {partition: 5.0}, "idle": idle}
            client.push(plan, -plan.counts(0).astype(np.float32), dense, statistics, **given).wait()
        assert [shard._idle for shard in of.held] == [{0}] * 2
        client.park([1, 2, 8])
        assert [shard._idle for shard in of.held] == [{0, 1, 2}] * 2
        client.close()


def test_a_partition_that_is_read_is_not_idle(shard: Shard) -> None:
    push(shard, {0: 100_000, 1: 50_000}, watermark=100_000, one=1)
    assert push(shard, {1: 50_001}, watermark=100_000, one=2, idle=(1,)) == 2


def test_a_partition_without_a_sample_keeps_nothing_alive(shard: Shard) -> None:
    shard.push(Push([Span(7, 0, 3)], 0, [], np.empty(0, np.float32), np.empty(0, np.float32), 0, {7: 0.0}))
    assert push(shard, {0: 100_000}, watermark=100_000, one=1) == 1
    assert push(shard, {0: 200_000}, watermark=200_000, one=2) == 1


def test_a_learner_of_one_partition_expires_by_what_it_has_seen(shard: Shard) -> None:
    update = RowUpdate(
        np.array([key(1)], np.uint64), -np.ones((1, 1), np.float32), np.ones(1, np.uint32), np.array([5], np.uint32)
    )
    none = np.zeros(DENSE, np.float32), np.zeros(2, np.float32)
    shard.push(Push([Span(0, 0, 1)], 1, [update], *none, 5))
    shard.push(Push([Span(0, 1, 2)], 1, [update._replace(keys=np.array([key(2)], np.uint64))], *none, 5 + 2 * HOUR))
    assert len(shard.tables[0]) == 0
