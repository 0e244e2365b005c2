"""Bulk synchronous parallel (BSP): all workers learn the same clock, and what they push is applied as one."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from streamtrain._core import merge_rows
from streamtrain.ps.clock import Outcome, Span, VectorClock
from streamtrain.ps.consistency import Done, Pending
from streamtrain.ps.push import Push, Pushed, RowUpdate
from streamtrain.ps.shard import Shard
from streamtrain.ps.workers import Together, check_ahead


class _Round:
    """The pushes of one clock, until all active workers have given theirs."""

    def __init__(self) -> None:
        self.pushes: dict[str, Push | None] = {}  # None: a repeated one, which adds nothing
        self.pushed: dict[str, Pushed] = {}
        self.failure: Exception | None = None

    @property
    def complete(self) -> bool:
        return bool(self.pushed) or self.failure is not None


class _InRound:
    """A push that waits for its round."""

    def __init__(self, bulk: "Bulk", worker: str, of: _Round) -> None:
        self._bulk, self._worker, self._round = bulk, worker, of

    def result(self, patience: float) -> Pushed | None:
        return self._bulk.wait(self._worker, self._round, patience)


class Bulk(Together):
    """Bulk synchronous parallel.

    Args:
        shard: what is pulled from and pushed to.
        workers: the first round waits until so many have joined.
        lease: seconds of silence after which a worker counts as dead.
        now: monotonic seconds.
    """

    def __init__(self, shard: Shard, workers: int, lease: float, now: Callable[[], float]) -> None:
        super().__init__(shard, lease, now)
        self._expected = workers
        self._round = _Round()
        self._tentative: VectorClock | None = None  # the shard's clock after the round so far

    def pull(self, worker: str, ahead: int, patience: float) -> bool:
        """See Consistency."""
        check_ahead(ahead, 0, "bulk")
        with self._lock:
            self._workers.active(worker)
            return self._wait(worker, patience, lambda: not self._expected, lambda: [])

    def push(self, worker: str, push: Push) -> Pending:
        """See Consistency."""
        with self._lock:
            self._workers.active(worker)
            if self._tentative is None:
                self._tentative = VectorClock(self._shard.clock())
            outcome = self._tentative.judge(push.spans)
            if outcome is Outcome.REJECTED:
                return Done(Pushed(outcome, self._tentative.read()))
            this = self._round
            if outcome is Outcome.APPLIED:
                self._tentative.advance(push.spans)
            earlier = this.pushes.get(worker)  # of a worker that came again before the round was complete
            this.pushes[worker] = push if outcome is Outcome.APPLIED else earlier
            if earlier is not None and outcome is Outcome.APPLIED:
                this.pushes[f"{worker} before"] = earlier
            self._changed()
            return _InRound(self, worker, this)

    def wait(self, worker: str, this: _Round, patience: float) -> Pushed | None:
        """The result of a worker's push in a round; None: not yet."""
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
            pushed = self._shard.push(average(self._shard, fresh)) if fresh else Pushed(Outcome.DUPLICATE)
        except Exception as exc:
            this.failure = exc  # raised where the round's pushes are waited for
            return
        for worker, push in this.pushes.items():
            self._workers.finish(worker)
            this.pushed[worker] = Pushed(Outcome.DUPLICATE if push is None else pushed.outcome, pushed.clock)
        first = next((worker for worker, push in this.pushes.items() if push is not None), None)
        if first is not None:
            this.pushed[first].stats = pushed.stats  # once, so that sums over workers are right


def average(shard: Shard, pushes: Sequence[Push]) -> Push:
    """One push that is what several would be as one batch.

    The loss of a batch is the mean over its samples, or their sum, as the model says; so are gradients. The change of
    statistics is always averaged.
    """
    if len(pushes) == 1:
        return pushes[0]
    learned = [push for push in pushes if push.samples] or list(pushes[:1])
    total = max(sum(push.samples for push in learned), 1)
    shares = np.array([push.samples / total for push in learned], np.float32)
    scales = shares if shard.spec.reduction == "mean" else np.ones_like(shares)
    parts = zip(*(push.updates for push in learned), strict=True)
    return Push(
        spans=_joined(span for push in pushes for span in push.spans),
        samples=sum(push.samples for push in learned),
        updates=[RowUpdate(*_merged(of_table, scales.tolist())) for of_table in parts],
        dense_gradient=np.sum([s * p.dense_gradient for s, p in zip(scales, learned, strict=True)], 0, np.float32),
        statistics_change=np.sum(
            [s * p.statistics_change for s, p in zip(shares, learned, strict=True)], 0, np.float32
        ),
        watermark=max(push.watermark for push in pushes),
        watermarks=_latest(push.watermarks for push in pushes),
    )


def _latest(watermarks: Iterable[Mapping[int, float]]) -> dict[int, float]:
    latest: dict[int, float] = {}
    for of_push in watermarks:
        latest |= {partition: max(at, latest.get(partition, at)) for partition, at in of_push.items()}
    return latest


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Ranges that follow on each other as one; a partition has no others in one round."""
    bounds: dict[int, Span] = {}
    for span in spans:
        known = bounds.get(span.partition, span)
        bounds[span.partition] = Span(span.partition, min(known.start, span.start), max(known.end, span.end))
    return list(bounds.values())


def _merged(updates: Sequence[RowUpdate], scales: list[float]) -> RowUpdate:
    keys, gradients, counts, times = zip(*updates, strict=True)
    return RowUpdate(*merge_rows(keys, gradients, counts, times, scales))
