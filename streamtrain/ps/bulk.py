"""Bulk synchronous parallel (BSP): the pushes of all workers in a round are applied as one."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce

import numpy as np

from streamtrain._core import merge_rows
from streamtrain.model.spec import Rates
from streamtrain.ps.clock import PushOutcome, Span, VectorClock
from streamtrain.ps.consistency import CompletedPush, PushFuture, WorkerBarrier, check_ahead
from streamtrain.ps.push import DenseChange, Floats, Push, PushResult, RowUpdate, change_of_step
from streamtrain.ps.shard import Shard


class _Round:
    """The pushes of one round, until all active workers have sent theirs."""

    def __init__(self) -> None:
        self.pushes: dict[str, Push | None] = {}  # None: a duplicate, which adds nothing
        self.pushed: dict[str, PushResult] = {}
        self.failure: Exception | None = None

    @property
    def complete(self) -> bool:
        return bool(self.pushed) or self.failure is not None


class _RoundPush:
    """The result of a push, available once its round is complete."""

    def __init__(self, bulk: "BulkSynchronous", worker: str, of: _Round) -> None:
        self._bulk, self._worker, self._round = bulk, worker, of

    def result(self, patience: float) -> PushResult | None:
        return self._bulk.wait(self._worker, self._round, patience)


class BulkSynchronous(WorkerBarrier):
    """Bulk synchronous parallel.

    Args:
        shard: the shard that is pulled from and pushed to.
        workers: number of workers that must have joined before the first round.
        lease: seconds without a heartbeat after which a worker counts as dead.
        now: monotonic seconds.
    """

    def __init__(self, shard: Shard, workers: int, lease: float, now: Callable[[], float]) -> None:
        super().__init__(shard, lease, now)
        self._expected = workers
        self._round = _Round()
        self._tentative: VectorClock | None = None  # the shard's clock after the round so far

    def pull(self, worker: str, ahead: int, patience: float) -> bool:
        check_ahead(ahead, 0, "bulk")
        with self._lock:
            self._workers.active(worker)
            return self._wait(worker, patience, lambda: not self._expected, lambda: [])

    def push(self, worker: str, push: Push) -> PushFuture:
        with self._lock:
            self._workers.active(worker)
            if self._tentative is None:
                self._tentative = VectorClock(self._shard.clock())
            outcome = self._tentative.judge(push.spans)
            if outcome is PushOutcome.REJECTED:
                return CompletedPush(PushResult(outcome, self._tentative.read()))
            this = self._round
            if outcome is PushOutcome.APPLIED:
                self._tentative.advance(push.spans)
            earlier = this.pushes.get(worker)  # of a worker that rejoined before the round was complete
            this.pushes[worker] = push if outcome is PushOutcome.APPLIED else earlier
            if earlier is not None and outcome is PushOutcome.APPLIED:
                this.pushes[f"{worker} before"] = earlier
            self._changed()
            return _RoundPush(self, worker, this)

    def wait(self, worker: str, this: _Round, patience: float) -> PushResult | None:
        """The result of a worker's push in a round; None if it is not available after `patience` seconds."""
        with self._lock:
            if not this.complete and not self._wait(worker, patience, lambda: this.complete, self._missing):
                return None
            if this.failure is not None:
                raise this.failure
            return this.pushed[worker]

    def _missing(self) -> list[str]:
        return list(self._workers.names() - self._round.pushes.keys())

    def _changed(self) -> None:
        if len(self._workers) >= self._expected:
            self._expected = 0
        if self._round.pushes and not self._expected and not self._missing():
            self._finish()
        super()._changed()

    def _finish(self) -> None:
        this, self._round, self._tentative = self._round, _Round(), None
        fresh = [push for push in this.pushes.values() if push is not None]
        try:
            pushed = self._shard.push(average(self._shard, fresh)) if fresh else PushResult(PushOutcome.DUPLICATE)
        except Exception as exc:
            this.failure = exc  # raised to every worker that waits for the round
            return
        for worker, push in this.pushes.items():
            self._workers.finish(worker)
            this.pushed[worker] = PushResult(PushOutcome.DUPLICATE if push is None else pushed.outcome, pushed.clock)
        first = next((worker for worker, push in this.pushes.items() if push is not None), None)
        if first is not None:
            this.pushed[first].stats = pushed.stats  # once, so that sums over workers are right


def average(shard: Shard, pushes: Sequence[Push]) -> Push:
    """One push that is what several would be as one batch.

    Gradients are averaged over the samples or added up, as the model says. The change of statistics is always averaged.
    Where workers learned their batches in several steps, all from the same start, what these changed of the weights is
    put together in the same way, and gradients of rows are applied one worker after the other.
    """
    if len(pushes) == 1:
        return pushes[0]
    learned = [push for push in pushes if push.samples] or list(pushes[:1])
    total = max(sum(push.samples for push in learned), 1)
    shares = np.array([push.samples / total for push in learned], np.float32)
    scales = shares if shard.spec.reduction == "mean" else np.ones_like(shares)
    parts = zip(*(push.updates for push in learned), strict=True)
    # While rates are being set, workers may have pulled different ones: every shard takes the lowest.
    rates = min((push.rates for push in learned if push.rates), default=None)
    return Push(
        spans=_joined(span for push in pushes for span in push.spans),
        samples=sum(push.samples for push in learned),
        updates=[_merged(of_table, scales.tolist()) for of_table in parts],
        dense=_dense_of(shard, [push.dense for push in learned], shares, rates or shard.rates),
        statistics_change=np.sum(
            [s * p.statistics_change for s, p in zip(shares, learned, strict=True)], 0, np.float32
        ),
        watermark=max(push.watermark for push in pushes),
        watermarks=_latest(push.watermarks for push in pushes),
        idle={partition for push in pushes for partition in push.idle},
        refusals={partition: of for push in pushes for partition, of in push.refusals.items()},
        predictions={partition: of for push in pushes for partition, of in push.predictions.items()},
        rates=rates,
    )


def _latest(watermarks: Iterable[Mapping[int, float]]) -> dict[int, float]:
    latest: dict[int, float] = {}
    for of_push in watermarks:
        latest |= {partition: max(at, latest.get(partition, at)) for partition, at in of_push.items()}
    return latest


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Merges the adjacent ranges of each partition; one round has no others."""
    bounds: dict[int, Span] = {}
    for span in spans:
        known = bounds.get(span.partition, span)
        bounds[span.partition] = Span(span.partition, min(known.start, span.start), max(known.end, span.end))
    return list(bounds.values())


def _dense_of(
    shard: Shard, given: Sequence[Floats | DenseChange], shares: Floats, rates: Rates
) -> Floats | DenseChange:
    gradients = [one for one in given if not isinstance(one, DenseChange)]
    if len(gradients) == len(given):
        scales = np.ones_like(shares) if shard.spec.reduction == "sum" else shares
        return np.asarray(np.sum([s * g for s, g in zip(scales, gradients, strict=True)], 0, np.float32))
    # One whose batch was a single step comes with its gradient.
    begun = shard.spec, shard.dense.pull(), shard.dense.slots, shard.dense.steps
    changes = [
        one if isinstance(one, DenseChange) else change_of_step(*begun, gradient=one, rate=rates.dense_optimizer)
        for one in given
    ]
    if shard.spec.reduction == "sum":
        return reduce(_one_after_the_other, changes)
    by, added, decay = (
        np.asarray(np.sum([s * one[i] for s, one in zip(shares, changes, strict=True)], 0, np.float32))
        for i in range(3)
    )
    return DenseChange(by, added, decay, float(shares @ np.array([one.steps for one in changes], np.float32)))


def _one_after_the_other(a: DenseChange, b: DenseChange) -> DenseChange:
    return DenseChange(a.by + b.by, b.decay[:, None] * a.added + b.added, a.decay * b.decay, a.steps + b.steps)


def _merged(updates: Sequence[RowUpdate], scales: list[float]) -> RowUpdate:
    keys, gradients, counts, times, repeats = zip(*updates, strict=True)
    if all(one is None for one in repeats):
        return RowUpdate(*merge_rows(keys, gradients, counts, times, scales))
    each = [np.ones(len(k), np.uint32) if r is None else r for k, r in zip(keys, repeats, strict=True)]
    merged, row = np.unique(np.concatenate(keys), return_inverse=True)
    of_gradient = np.repeat(row, np.concatenate(each))
    order = np.argsort(of_gradient, kind="stable")
    latest = np.zeros(len(merged), np.uint32)
    np.maximum.at(latest, row, np.concatenate(times))
    return RowUpdate(
        merged,
        np.concatenate([np.float32(s) * g for s, g in zip(scales, gradients, strict=True)])[order],
        np.concatenate(counts)[order],
        latest,
        np.bincount(of_gradient, minlength=len(merged)).astype(np.uint32),
    )
