"""Worker: learns from partitions of a source, together with others, on the shards of a cluster.

    read ─► plan ─► pull ─► step ─► push ─► settle
                     └── of the next batch, while this one is in its step

A batch is predicted before it is learned. It counts once all shards have answered its push; if one of them stands
elsewhere (it was restored, or another worker had the partition), everything under way is dropped and the worker goes
on from where the shards stand: see ps/clock.py.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from streamtrain._core import Plan
from streamtrain.errors import BadSample
from streamtrain.model.batch import Batch
from streamtrain.model.model import Model
from streamtrain.ps.client import Client, Heartbeat, Pulled, Pushing, rejected, stats_of
from streamtrain.ps.clock import Cursor, Span, latest
from streamtrain.ps.push import Floats, PushStats
from streamtrain.train.step import Step, StepResult

logger = logging.getLogger(__name__)


class Source(Protocol):
    """Samples by partition and offset, which can be read again."""

    def ends(self) -> Mapping[int, int]:
        """Offset after the last sample there is, by partition."""

    def read(self, spans: Sequence[Span]) -> tuple[Batch, list[BadSample]]:
        """The samples of some ranges as one batch, and those that were refused; `BadSample.index` counts over all."""

    def wait(self, seconds: float) -> bool:
        """Waits for more samples, for at most so long; False: there will never be any."""


class Validation(Protocol):
    """What predictions are told to, such as `ProgressiveValidation`."""

    def update(self, predictions: Floats, labels: Floats, weights: Floats) -> None:
        """Takes those of a batch: float32 [n, L], [n, L] and [n]."""


@dataclass(frozen=True)
class Pace:
    """How a worker goes about it.

    Attributes:
        batch_size: samples per step at most.
        ahead: batches that are pulled while one is in its step; 0 in `bulk`, at most the staleness in `bounded`.
        beat_seconds: between two signs of life.
        idle_seconds: between two looks for more samples.
    """

    batch_size: int = 1024
    ahead: int = 1
    beat_seconds: float = 1.0
    idle_seconds: float = 0.1


@dataclass
class _Reading:
    """A batch that has been read, planned and pulled."""

    spans: Sequence[Span]
    batch: Batch
    plan: Plan
    pulled: Pulled | None  # None: nothing to learn from


@dataclass
class _Learning:
    """A batch whose gradients are under way."""

    reading: _Reading
    result: StepResult | None
    pushing: Pushing


class Worker:
    """Used by one thread.

    Args:
        model: what is learned.
        step: its training function.
        client: to all shards; joined and closed here.
        clocks: asks all shards for their clocks.
        source: of samples.
        shards: number of shards.
        pace: how to go about it.
        validation: is told every prediction, made before its sample was learned; not again after a restore.

    Attributes:
        samples: number of samples learned from.
        rewinds: how often it went back.
        watermark: latest event time seen, seconds since the epoch.
        stats: what became of gradients.
        bad: number of samples refused, by reason.
    """

    def __init__(
        self,
        model: Model,
        step: Step,
        client: Client,
        clocks: Callable[[], Sequence[Mapping[int, int]]],
        *,
        source: Source,
        shards: int,
        pace: Pace | None = None,
        validation: Validation | None = None,
    ) -> None:
        self._step = step
        self._client = client
        self._clocks = clocks
        self._source = source
        self._planner = model.planner(shards)
        self._pace = pace or Pace()
        self._validation = validation
        self._cursor = Cursor()
        self._known: dict[int, int] = {}  # what some shard had learned when the cursor was set
        self._reconnects = 0
        self._partitions: tuple[int, ...] = ()
        self._ahead: deque[_Reading] = deque()
        self._learning: _Learning | None = None
        self.samples = 0
        self.rewinds = 0
        self.watermark = 0.0
        self.stats = PushStats()
        self.bad: dict[str, int] = {}

    def run(self, partitions: Iterable[int], stopped: threading.Event) -> None:
        """Learns from partitions until the source has no more, or `stopped` is set; what is under way is finished.

        Raises:
            ShardError: a shard refuses, or cannot be reached for too long.
        """
        self._partitions = tuple(partitions)
        try:
            with Heartbeat(self._client, self._pace.beat_seconds):
                self._client.join()
                self._rewind()
                while not stopped.is_set() and self._advance():
                    continue
                self._ahead.clear()
                self._settle()
        finally:
            self._client.close()

    def _advance(self) -> bool:
        """Learns one batch, or waits; False: there is no more."""
        self._read_ahead()
        if not self._ahead:
            return self._idle()
        reading = self._ahead.popleft()
        if reading.pulled is None:
            result = None
        else:
            pulled = reading.pulled.wait()
            result = self._step.train(pulled.parameters, reading.plan, pulled.rows, reading.batch)
        if not self._settle():
            return True
        pushing = self._push(reading, result)
        self._learning = _Learning(reading, result, pushing)
        if not self._pace.ahead:
            self._settle()
        return True

    def _read_ahead(self) -> None:
        """Reads, plans and asks for the rows of this batch and those after it."""
        while len(self._ahead) <= self._pace.ahead:
            spans = self._cursor.next(self._source.ends(), self._pace.batch_size)
            if not spans:
                return
            batch, bad = self._source.read(spans)
            for one in bad:
                self.bad[one.reason] = self.bad.get(one.reason, 0) + 1
            plan = self._planner.plan(batch.keys, batch.starts, batch.offsets, batch.times)
            pulled = self._client.pull(plan, len(self._ahead)) if len(batch) else None
            self._ahead.append(_Reading(spans, batch, plan, pulled))

    def _push(self, reading: _Reading, result: StepResult | None) -> Pushing:
        if result is None:
            return self._client.skip(reading.spans, int(self.watermark))
        self.watermark = max(self.watermark, float(reading.batch.times.max()))
        return self._client.push(
            reading.plan,
            reading.plan.unpool(result.row_gradient),
            result.dense_gradient,
            result.statistics_change,
            spans=reading.spans,
            watermark=int(self.watermark),
        )

    def _settle(self) -> bool:
        """Waits for what became of the push under way; False: it was rejected, and the worker has gone back."""
        if self._learning is None:
            return True
        learning, self._learning = self._learning, None
        pushed = learning.pushing.wait()
        stats = stats_of(pushed)
        self.stats.add(stats)
        spans = learning.reading.spans
        if stats.non_finite_rows or stats.non_finite_dense:
            logger.warning(
                "dropped gradients that are not finite: %d of rows, %d of dense slices; offsets %s",
                *(stats.non_finite_rows, stats.non_finite_dense),
                ", ".join(f"{start} to {end - 1} of partition {p}" for p, start, end in spans),
            )
        if rejected(pushed):
            self._rewind()
            return False
        batch = learning.reading.batch
        self.samples += len(batch)
        new = any(end > self._known.get(partition, 0) for partition, _, end in spans)
        if new and learning.result is not None and self._validation is not None:
            self._validation.update(learning.result.predictions, batch.labels, batch.weights)
        return True

    def _idle(self) -> bool:
        """Nothing to read: finishes what is under way, and lets the others go on without this worker."""
        if self._learning is not None:
            self._settle()
            return True
        self._client.park()
        if self._client.reconnects != self._reconnects:
            self._rewind()  # a shard may have been restored, and nothing that is pushed would tell
            return True
        return self._source.wait(self._pace.idle_seconds)

    def _rewind(self) -> None:
        """Goes to where the shards stand."""
        self._ahead.clear()
        self._reconnects = self._client.reconnects
        clocks = self._clocks()
        self._cursor.rewind(self._partitions, clocks)
        self._known = latest(clocks)
        self.rewinds += 1
        logger.info("goes on from %s", self._cursor.positions)
