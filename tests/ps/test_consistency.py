"""Who waits for whom: async, bounded, bulk; parked, gone and silent workers."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamtrain.errors import ShardBroken, ShardRefused, ShardUnavailable
from streamtrain.ps.bulk import BulkSynchronous, average
from streamtrain.ps.clock import PushOutcome, Span
from streamtrain.ps.consistency import Async, Bounded, Consistency
from streamtrain.ps.push import DenseChange, Push, RowUpdate
from streamtrain.ps.shard import Shard
from tests.patience import PATIENCE
from tests.ps.counting import assert_exact, new_shard, pushes

NOW = 0.0  # seconds for which a call of a test waits
LOG = {0: [[1, 2], [2], [3], [1]], 1: [[1], [4], [4], [2, 5]]}
LEASE = 10.0


class Time:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def shard() -> Shard:
    return new_shard(0, 1)


def push(partition: int, start: int, end: int) -> Push:
    return pushes(LOG, [Span(partition, start, end)], 1)[0]


# --- async ---


def test_async_waits_for_nobody(shard: Shard) -> None:
    consistency = Async(shard)
    assert consistency.join("a", None) == 0
    assert consistency.join("b", 7) == 7
    assert all(consistency.pull("a", ahead, NOW) for ahead in range(5))
    for partition in LOG:
        assert consistency.push("a", push(partition, 0, 4)).result(NOW).outcome is PushOutcome.APPLIED  # type: ignore[union-attr]
    assert_exact([shard], LOG)


# --- bounded ---


@given(st.lists(st.sampled_from("abc"), max_size=60), st.integers(0, 3))
def test_bounded_workers_stay_together(order: list[str], staleness: int) -> None:
    """Whoever gets its turn: nobody starts a batch that is more than `staleness` ahead of the slowest worker."""
    shard = new_shard(0, 1)
    bounded = Bounded(shard, staleness, LEASE, Time())
    finished = dict.fromkeys("abc", 0)
    for worker in finished:
        bounded.join(worker, None)
    for worker in order:
        may = bounded.pull(worker, 0, NOW)
        assert may == (finished[worker] - min(finished.values()) <= staleness)
        if may:
            partition = ord(worker)
            spans = [Span(partition, finished[worker], finished[worker] + 1)]
            done = bounded.push(worker, pushes({partition: [[1]] * 100}, spans, 1)[0])
            assert done.result(NOW).outcome is PushOutcome.APPLIED  # type: ignore[union-attr]
            finished[worker] += 1
            assert max(finished.values()) - min(finished.values()) <= staleness + 1


def test_batches_that_are_pulled_ahead_count(shard: Shard, time: Time) -> None:
    bounded = Bounded(shard, 1, LEASE, time)
    for worker in "ab":
        bounded.join(worker, None)
    assert bounded.pull("a", 0, NOW)
    assert bounded.pull("a", 1, NOW)
    bounded.push("a", push(0, 0, 1))
    assert bounded.pull("a", 0, NOW)
    assert not bounded.pull("a", 1, NOW)


def test_who_would_wait_for_itself_is_refused(shard: Shard, time: Time) -> None:
    strategies: list[Consistency] = [Bounded(shard, 1, LEASE, time), BulkSynchronous(shard, 1, LEASE, time)]
    for strategy, ahead in zip(strategies, (2, 1), strict=True):
        strategy.join("a", None)
        with pytest.raises(
            ShardRefused, match=f"pulled {ahead} batches ahead, but .* allows {ahead - 1}: lower worker.ahead"
        ):
            strategy.pull("a", ahead, NOW)


def test_a_rejected_push_finishes_nothing(shard: Shard, time: Time) -> None:
    bounded = Bounded(shard, 0, LEASE, time)
    for worker in "ab":
        bounded.join(worker, None)
    assert bounded.push("b", push(0, 2, 3)).result(NOW).outcome is PushOutcome.REJECTED  # type: ignore[union-attr]
    assert bounded.push("a", push(0, 0, 1)).result(NOW).outcome is PushOutcome.APPLIED  # type: ignore[union-attr]
    assert not bounded.pull("a", 0, NOW)
    assert bounded.pull("b", 0, NOW)


@pytest.mark.parametrize("away", ["park", "leave"])
def test_nobody_waits_for_who_has_nothing_to_do_or_is_gone(shard: Shard, time: Time, away: str) -> None:
    bounded = Bounded(shard, 0, LEASE, time)
    for worker in "ab":
        bounded.join(worker, None)
    bounded.push("a", push(0, 0, 1))
    assert not bounded.pull("a", 0, NOW)
    getattr(bounded, away)("b")
    assert bounded.pull("a", 0, NOW)


def test_who_was_parked_starts_where_the_others_are(shard: Shard, time: Time) -> None:
    bounded = Bounded(shard, 0, LEASE, time)
    for worker in "ab":
        bounded.join(worker, None)
    bounded.park("b")
    for i in range(4):
        assert bounded.pull("a", 0, NOW)
        bounded.push("a", push(0, i, i + 1))
    assert bounded.pull("b", 0, NOW)
    assert bounded.pull("a", 0, NOW)
    bounded.push("a", push(1, 0, 1))
    assert not bounded.pull("a", 0, NOW)


def test_a_new_worker_starts_where_the_slowest_is(shard: Shard, time: Time) -> None:
    bounded = Bounded(shard, 2, LEASE, time)
    bounded.join("a", None)
    for i in range(4):
        bounded.push("a", push(0, i, i + 1))
    assert bounded.join("b", None) == 4
    assert bounded.join("c", 3) == 3


def test_a_silent_worker_is_given_up_after_its_lease(shard: Shard, time: Time) -> None:
    bounded = Bounded(shard, 0, LEASE, time)
    for worker in "ab":
        bounded.join(worker, None)
    bounded.push("a", push(0, 0, 1))
    time.seconds = LEASE - 1
    bounded.beat("b")
    time.seconds = LEASE + 1
    assert not bounded.pull("a", 0, NOW), "b has been heard of"
    time.seconds = 2 * LEASE
    assert bounded.pull("a", 0, NOW)
    with pytest.raises(ShardUnavailable, match="unknown worker 'b': its lease has expired; join again"):
        bounded.push("b", push(0, 1, 2))
    assert shard.clock() == {0: 1}


def test_a_worker_that_waits_is_alive(shard: Shard, time: Time) -> None:
    """It waits here for another one: that one is silent, not this."""
    bounded = Bounded(shard, 0, LEASE, time)
    for worker in "ab":
        bounded.join(worker, None)
    bounded.push("a", push(0, 0, 1))
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(bounded.pull, "a", 0, 3 * LEASE)
        while not bounded._workers._workers["a"].waiting:
            continue
        time.seconds = 2 * LEASE
        bounded.beat("b")  # just in time
        bounded.push("b", push(1, 0, 1))
        assert waiting.result(timeout=PATIENCE)


# --- bulk ---


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        futures: list[Future[Any]] = [pool.submit(call) for call in calls]
        return [future.result(timeout=PATIENCE) for future in futures]


def until_done(bulk: BulkSynchronous, worker: str, one: Push) -> Any:
    pending = bulk.push(worker, one)
    while (pushed := pending.result(1.0)) is None:
        continue
    return pushed


def test_a_round_is_applied_once_all_have_come(shard: Shard, time: Time) -> None:
    bulk = BulkSynchronous(shard, 2, LEASE, time)
    bulk.join("a", None)
    assert not bulk.pull("a", 0, NOW), "the other one is awaited"
    bulk.join("b", None)
    assert bulk.pull("a", 0, NOW)
    first = bulk.push("a", push(0, 0, 2))
    assert first.result(NOW) is None
    assert shard.clock() == {}
    second = bulk.push("b", push(1, 0, 2))
    results = [first.result(NOW), second.result(NOW)]
    assert [one.outcome for one in results if one] == [PushOutcome.APPLIED, PushOutcome.APPLIED]
    assert shard.clock() == {0: 2, 1: 2}
    assert sum(one.stats.applied for one in results if one) == 3  # ids 1, 2, 4: one gradient each, though two have 1


def test_bulk_counts_exactly(shard: Shard) -> None:
    bulk = BulkSynchronous(shard, 2, LEASE, Time())
    for worker in "ab":
        bulk.join(worker, None)
    ranges = [(0, 1), (1, 3), (3, 4)]
    in_threads(
        [
            lambda w=worker, p=partition: [until_done(bulk, w, push(p, *one)) for one in ranges]  # type: ignore[misc]
            for partition, worker in enumerate("ab")
        ]
    )
    assert_exact([shard], LOG, averaged=True)
    assert shard.pushes[PushOutcome.APPLIED] == 3


@pytest.mark.parametrize("away", ["park", "leave"])
def test_a_round_does_not_wait_for_who_is_away(shard: Shard, time: Time, away: str) -> None:
    bulk = BulkSynchronous(shard, 2, LEASE, time)
    for worker in "ab":
        bulk.join(worker, None)
    mine = bulk.push("a", push(0, 0, 4))
    assert mine.result(NOW) is None
    getattr(bulk, away)("b")
    assert mine.result(NOW).outcome is PushOutcome.APPLIED  # type: ignore[union-attr]


def test_what_a_worker_gave_before_it_died_is_learned(shard: Shard, time: Time) -> None:
    bulk = BulkSynchronous(shard, 2, LEASE, time)
    for worker in "ab":
        bulk.join(worker, None)
    bulk.push("a", push(0, 0, 4))
    bulk.leave("a")
    assert until_done(bulk, "b", push(1, 0, 4)).outcome is PushOutcome.APPLIED
    assert_exact([shard], LOG, averaged=True)


def test_a_worker_that_came_again_gives_the_same_push_once(shard: Shard, time: Time) -> None:
    bulk = BulkSynchronous(shard, 2, LEASE, time)
    for worker in "ab":
        bulk.join(worker, None)
    bulk.push("a", push(0, 0, 4))
    bulk.join("a", 0)
    again = bulk.push("a", push(0, 0, 4))
    assert until_done(bulk, "b", push(1, 0, 4)).outcome is PushOutcome.APPLIED
    assert again.result(NOW).outcome is not PushOutcome.REJECTED  # type: ignore[union-attr]
    assert_exact([shard], LOG, averaged=True)


def test_a_repeated_push_takes_part_without_effect(shard: Shard, time: Time) -> None:
    """One shard has learned it, another has not: there, the round needs it."""
    shard.push(push(0, 0, 4))
    bulk = BulkSynchronous(shard, 2, LEASE, time)
    for worker in "ab":
        bulk.join(worker, None)
    repeated = bulk.push("a", push(0, 0, 4))
    assert repeated.result(NOW) is None
    assert until_done(bulk, "b", push(1, 0, 4)).outcome is PushOutcome.APPLIED
    assert repeated.result(NOW).outcome is PushOutcome.DUPLICATE  # type: ignore[union-attr]
    assert_exact([shard], LOG, averaged=True)


def test_two_who_hold_one_partition_do_not_count_it_twice(shard: Shard, time: Time) -> None:
    bulk = BulkSynchronous(shard, 2, LEASE, time)
    for worker in "ab":
        bulk.join(worker, None)
    zombie = bulk.push("a", push(0, 0, 3))
    late = bulk.push("b", push(0, 2, 4))
    assert late.result(NOW).outcome is PushOutcome.REJECTED  # type: ignore[union-attr]
    assert until_done(bulk, "b", push(0, 0, 2)).outcome is PushOutcome.DUPLICATE
    assert zombie.result(NOW).outcome is PushOutcome.APPLIED  # type: ignore[union-attr]
    bulk.leave("a")
    assert until_done(bulk, "b", push(0, 3, 4)).outcome is PushOutcome.APPLIED
    assert until_done(bulk, "b", push(1, 0, 4)).outcome is PushOutcome.APPLIED
    assert_exact([shard], LOG, averaged=True)


def test_a_silent_worker_does_not_stop_the_round(shard: Shard, time: Time) -> None:
    bulk = BulkSynchronous(shard, 2, LEASE, time)
    for worker in "ab":
        bulk.join(worker, None)
    mine = bulk.push("a", push(0, 0, 4))
    time.seconds = LEASE + 1
    assert mine.result(NOW).outcome is PushOutcome.APPLIED  # type: ignore[union-attr]


def test_a_failed_round_fails_for_all(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    bulk = BulkSynchronous(shard, 2, LEASE, Time())
    for worker in "ab":
        bulk.join(worker, None)

    def fail(_: Push) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(shard, "_apply", fail)
    both = [bulk.push("a", push(0, 0, 4)), bulk.push("b", push(1, 0, 4))]
    for one in both:
        with pytest.raises(ShardBroken, match="MemoryError: no memory"):
            one.result(NOW)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from(["mean", "sum"]))
def test_an_average_is_that_of_one_batch(sizes: list[int], reduction: Any) -> None:
    """By the definition of the loss: a mean over samples, or a sum."""
    shard = new_shard(0, 1)
    object.__setattr__(shard, "spec", type(shard.spec)(**{**vars(shard.spec), "reduction": reduction}))
    rng = np.random.default_rng(len(sizes))
    of_samples = [rng.standard_normal((n, 3)).astype(np.float32) for n in sizes]
    reduce = np.mean if reduction == "mean" else np.sum
    made = [
        Push(
            [Span(i, 0, len(g))],
            len(g),
            [RowUpdate(np.array([7, i], np.uint64), np.stack([reduce(g, 0)[:1], [1.0]]).astype(np.float32),
                       np.array([len(g), 1], np.uint32), np.array([i, i], np.uint32))],
            reduce(g, 0),
            np.mean(g, 0)[:2],
            i,
        )
        for i, g in enumerate(of_samples)
    ]  # fmt: skip
    whole = average(shard, made)
    everything = np.concatenate(of_samples)
    assert isinstance(whole.dense, np.ndarray)
    np.testing.assert_allclose(whole.dense, reduce(everything, 0), atol=1e-5)
    np.testing.assert_allclose(whole.statistics_change, np.mean(everything, 0)[:2], atol=1e-5)
    row = dict(zip(whole.updates[0].keys.tolist(), whole.updates[0].gradients[:, 0], strict=True))
    assert row[7] == pytest.approx(reduce(everything, 0)[0], abs=1e-5)
    assert (whole.samples, whole.watermark) == (sum(sizes), len(sizes) - 1)
    assert [span.end for span in whole.spans] == sizes


@pytest.mark.parametrize("reduction", ["row_sum", "sum"])
def test_what_workers_changed_in_several_steps_is_put_together(shard: Shard, reduction: str) -> None:
    """Also with a worker whose batch was one step. Gradients of rows follow on each other, worker by worker."""
    shard.spec = replace(shard.spec, reduction=reduction)
    slots = shard.spec.dense_slots
    size = len(shard.dense)
    row = np.array([7], np.uint64)
    one = np.ones(1, np.uint32)
    change = DenseChange(
        np.full(size, 0.5, np.float32), np.ones((slots, size), np.float32), np.full(slots, 0.5, np.float32), 3.0
    )
    steps = RowUpdate(row, np.array([[1.0], [2.0]], np.float32), np.array([2, 1], np.uint32), one, one * 2)
    single = RowUpdate(row, np.array([[4.0]], np.float32), one, one)
    none = np.zeros(len(shard.statistics), np.float32)
    gradient = np.full(size, 0.25, np.float32)
    made = average(
        shard,
        [Push([Span(0, 0, 3)], 3, [steps], change, none, 1), Push([Span(1, 0, 1)], 1, [single], gradient, none, 1)],
    )
    assert made.updates[0].gradients[:, 0].tolist() == [1, 2, 4]
    assert made.updates[0].counts.tolist() == [2, 1, 1]
    assert made.updates[0].repeats is not None
    assert made.updates[0].repeats.tolist() == [3]
    assert isinstance(made.dense, DenseChange)
    before = shard.dense.pull()
    alone = shard.spec.make_dense(before)
    alone.load(before, shard.dense.slots, shard.dense.steps)
    alone.apply(gradient)
    moved = alone.pull() - before
    expected = 0.5 + moved if reduction == "sum" else 0.75 * 0.5 + 0.25 * moved
    np.testing.assert_allclose(made.dense.by, expected, rtol=1e-5)
    assert made.dense.steps == (4 if reduction == "sum" else 2.5)


def test_threads_do_not_deadlock(shard: Shard) -> None:
    """Many rounds of several workers, some of which park now and then."""
    bulk = BulkSynchronous(shard, 3, LEASE, Time())
    log = {p: [[1]] * 30 for p in range(3)}
    for worker in "abc":
        bulk.join(worker, None)

    def work(partition: int, worker: str) -> None:
        for i in range(30):
            until_done(bulk, worker, pushes(log, [Span(partition, i, i + 1)], 1)[0])
            if i % (5 + partition) == 4:
                bulk.park(worker)
        bulk.leave(worker)

    threads = [threading.Thread(target=work, args=(p, w)) for p, w in enumerate("abc")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE)
        assert not thread.is_alive()
    assert_exact([shard], log, averaged=True)
