"""Loop: learns from partitions of a stream, together with other workers, on the shards of a cluster.

    poll ─► read ─► plan ─► pull ─► step ─► push ─► settle ─► commit
                             └── of the next batches, while this one is in its step

A batch is predicted before it is learned. It counts once all shards have answered its push; if one of them stands
elsewhere (it was restored, or another worker had the partition), everything under way is dropped and the loop goes
on from where the shards stand: see ps/clock.py.

All in one thread. Partitions come and go within `poll`: one that goes is settled first.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from streamtrain._core import Plan
from streamtrain.metrics.worker import WorkerMetrics
from streamtrain.model.model import Model
from streamtrain.ps.client import Client, Heartbeat, Pulled, Pushing, rejected, stats_of
from streamtrain.ps.clock import Cursor, Span, Stand, latest, watermarks_at
from streamtrain.train.intake import Intake, Taken
from streamtrain.train.pace import Pace
from streamtrain.train.step import Step, StepResult
from streamtrain.train.tally import Tally, Validation

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5  # at the latest, also while there is enough to learn: who does not poll loses its partitions


@dataclass
class _Reading:
    """A batch that has been read, planned and pulled."""

    spans: Sequence[Span]
    taken: Taken
    plan: Plan
    pulled: Pulled | None  # None: nothing to learn from


@dataclass
class _Learning:
    """A batch whose gradients are under way."""

    reading: _Reading
    result: StepResult | None
    pushing: Pushing


class Loop:
    """Used by one thread.

    Args:
        model: what is learned.
        step: its training function.
        client: to all shards; joined and closed here.
        stands: asks all shards where they stand.
        intake: of samples; opened and closed here.
        shards: number of shards.
        pace: how to go about it.
        validation: is told every prediction, made before its sample was learned; not again after a restore.
        metrics: where all is counted.

    Attributes:
        tally: what it has learned.
        rewinds: how often it went back.
    """

    def __init__(
        self,
        model: Model,
        step: Step,
        client: Client,
        stands: Callable[[], Sequence[Stand]],
        *,
        intake: Intake,
        shards: int,
        pace: Pace | None = None,
        validation: Validation | None = None,
        metrics: WorkerMetrics | None = None,
    ) -> None:
        self._step = step
        self._client = client
        self._stands = stands
        self._intake = intake
        self._planner = model.planner(shards)
        self._pace = pace or Pace()
        self._metrics = metrics or WorkerMetrics()
        self._cursor = Cursor()
        self._known: dict[int, int] = {}  # what some shard had learned when the cursor was set
        self._reconnects = 0
        self._partitions: list[int] = []
        self._ahead: deque[_Reading] = deque()
        self._learning: _Learning | None = None
        self._settled: dict[int, int] = {}  # positions to commit
        self._committed = self._polled = time.monotonic()
        self._waiting_since: float | None = None
        self._is_closing = False
        self.tally = Tally(self._metrics, validation, model.sampling)
        self.rewinds = 0

    def run(self, stopped: threading.Event) -> None:
        """Learns until the stream has no more, or `stopped` is set; what is under way is finished.

        Raises:
            ShardError: a shard refuses, or cannot be reached for too long.
            SourceError: the stream refuses, or has lost samples.
            TooManyBadSamples: the stream is broken.
        """
        try:
            with Heartbeat(self._client, self._pace.beat_seconds):
                self._client.join()
                self._intake.open(self)
                while not stopped.is_set() and self._advance():
                    continue
                self._ahead.clear()
                self._settle()
        finally:
            self._ahead.clear()
            self._learning = None  # if it has failed: another worker learns it
            self._is_closing = True
            self._intake.close()
            self._client.close()

    def _advance(self) -> bool:
        """Learns one batch, or waits; False: there is no more."""
        self._poll()
        self._read_ahead()
        if not self._ahead:
            return self._idle()
        reading = self._ahead.popleft()
        result = self._train(reading)
        if not self._settle():
            return True
        if reading.taken.letters:
            self._intake.bury()
        self._learning = _Learning(reading, result, self._push(reading, result))
        if not self._pace.ahead:
            self._settle()
        return True

    def _poll(self) -> None:
        wanted = self._wanted()
        if wanted or time.monotonic() - self._polled > _POLL_SECONDS:
            self._fetch(max(wanted, 1), 0.0)

    def _wanted(self) -> int:
        """How many samples the next batches lack."""
        return max(0, (self._pace.ahead + 1 - len(self._ahead)) * self._pace.batch_size - self._waiting())

    def _waiting(self) -> int:
        """Samples that are fetched and not read."""
        return sum(self._intake.count(p, at, 1 << 62) for p, at in self._cursor.positions.items())

    def _fetch(self, most: int, seconds: float) -> None:
        with self._metrics.stage("poll"):
            self._intake.poll(most, seconds)
        self._metrics.refresh()  # here, as it is called in any case: also the last batches are to show
        self._polled = time.monotonic()

    def _read_ahead(self) -> None:
        """Reads, plans and asks for the rows of this batch and those after it."""
        while len(self._ahead) <= self._pace.ahead and self._is_ripe():
            spans = self._cursor.next(self._intake, self._pace.batch_size)
            if not spans:
                return
            with self._metrics.stage("decode"):
                taken = self._intake.read(spans)
            batch = taken.batch
            with self._metrics.stage("plan"):
                plan = self._planner.plan(batch.keys, batch.starts, batch.offsets, batch.times)
            pulled = self._client.pull(plan, len(self._ahead)) if len(batch) else None
            self._ahead.append(_Reading(spans, taken, plan, pulled))
            self._waiting_since = None

    def _is_ripe(self) -> bool:
        """Whether the next batch is full, has waited long enough, or cannot grow."""
        waiting = self._waiting()
        if not waiting or waiting >= self._pace.batch_size or self._intake.finished():
            return True
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        return now - self._waiting_since >= self._pace.batch_age

    def _train(self, reading: _Reading) -> StepResult | None:
        if reading.pulled is None:
            return None
        with self._metrics.stage("pull"):
            pulled = reading.pulled.wait()
        with self._metrics.stage("step"):
            return self._step.train(pulled.parameters, reading.plan, pulled.rows, reading.taken.batch)

    def _push(self, reading: _Reading, result: StepResult | None) -> Pushing:
        taken, tally = reading.taken, self.tally
        with self._metrics.stage("push"):
            if result is None:
                return self._client.skip(reading.spans, int(tally.watermark), taken.watermarks)
            tally.watermark = max(tally.watermark, float(taken.batch.times.max()))
            return self._client.push(
                reading.plan,
                reading.plan.unpool(result.row_gradient),
                result.dense_gradient,
                result.statistics_change,
                spans=reading.spans,
                watermark=int(tally.watermark),
                watermarks=taken.watermarks,
            )

    def _settle(self) -> bool:
        """Waits for what became of the push under way; False: it was rejected, and the loop has gone back."""
        if self._learning is None:
            return True
        learning, self._learning = self._learning, None
        with self._metrics.stage("settle"):
            pushed = learning.pushing.wait()
        spans, batch, result = learning.reading.spans, learning.reading.taken.batch, learning.result
        self.tally.answered(stats_of(pushed), spans)
        if rejected(pushed):
            self._rewind()
            return False
        if all(end <= self._known.get(partition, 0) for partition, _, end in spans):
            self.tally.repeated(batch)
        else:
            self.tally.learned(batch, result.predictions if result else None)
        self._intake.release(spans)
        self._settled |= {span.partition: span.end for span in spans}
        if time.monotonic() - self._committed >= self._pace.commit_seconds:
            self._commit()
        return True

    def _commit(self) -> None:
        self._intake.commit(self._settled)
        self._metrics.position(self._cursor.positions)
        self._metrics.reconnects(self._client.reconnects)
        self._settled, self._committed = {}, time.monotonic()

    def _idle(self) -> bool:
        """Nothing to read: finishes what is under way, and lets the others go on without this worker."""
        if self._learning is not None:
            self._settle()
            return True
        if self._waiting_since is not None:
            left = self._waiting_since + self._pace.batch_age - time.monotonic()
            self._fetch(max(self._wanted(), 1), max(left, 0.0))
            return True
        self._client.park()
        if self._client.reconnects != self._reconnects:
            self._rewind()  # a shard may have been restored, and nothing that is pushed would tell
            return True
        if self._settled:
            self._commit()
        if self._intake.finished():
            return False
        self._fetch(max(self._wanted(), 1), self._pace.idle_seconds)
        return True

    def assigned(self, partitions: Sequence[int]) -> Mapping[int, int]:
        """See Listener."""
        self._settle()
        self._partitions = sorted({*self._partitions, *partitions})
        self._rewind()
        logger.info("learns from partitions %s", self._partitions)
        return {partition: self._cursor.positions[partition] for partition in partitions}

    def revoked(self, partitions: Sequence[int]) -> None:
        """See Listener."""
        self._settle()
        self._commit()
        self.lost(partitions)

    def lost(self, partitions: Sequence[int]) -> None:
        """See Listener."""
        self._partitions = [p for p in self._partitions if p not in partitions]
        self._settled = {p: at for p, at in self._settled.items() if p not in partitions}
        logger.info("partitions %s go to others", sorted(partitions))
        if self._partitions and not self._is_closing:
            self._rewind()
        else:
            self._ahead.clear()
            self._cursor.rewind([], [])
            self._metrics.position({})

    def _rewind(self) -> None:
        """Goes to where the shards stand."""
        self._ahead.clear()
        self._waiting_since = None
        self._reconnects = self._client.reconnects
        stands = self._stands()
        self._cursor.rewind(self._partitions, [stand.clock for stand in stands])
        self._known = latest(stand.clock for stand in stands)
        positions = self._cursor.positions
        self._intake.seek(positions, watermarks_at(positions, stands))
        self.rewinds += 1
        self._metrics.rewound(positions)
        logger.info("goes on from %s", positions)
