"""Loop: a worker that trains on its assigned partitions of a stream, with the shards of a cluster.

    poll ─► read ─► plan ─► pull ─► step ─► push ─► settle ─► commit
                             └── of the next batches, while this one is in its step

A batch is predicted before it is learned. It counts once all shards have acknowledged its push. If a shard's clock
differs (it was restored, or another worker had the partition), everything in flight is dropped and the loop resumes
from the shards' clocks: see ps/clock.py.

Everything runs in one thread. Partitions are assigned and revoked within `poll`; pushes in flight are settled first.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from streamtrain._core import Plan
from streamtrain.errors import ShardError
from streamtrain.logs import LogThrottle, counted
from streamtrain.metrics.worker import WorkerMetrics
from streamtrain.model.batch import Batch
from streamtrain.model.model import Model
from streamtrain.model.sampling import Sampling
from streamtrain.periodic import PeriodicTask
from streamtrain.ps.client import Client, PendingPush, any_rejected, total_stats
from streamtrain.ps.clock import Clock, Cursor, Progress, Span, latest, refusals_at, watermarks_at
from streamtrain.ps.push import Floats, PushStats
from streamtrain.train.blocks import BlockTracker
from streamtrain.train.intake import DecodedBatch, Intake
from streamtrain.train.micro import GraphCache, MicroStep
from streamtrain.train.step import Step
from streamtrain.train.trainer import BatchResult, PulledBatch, Trainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoopConfig:
    """Batching, prefetching and intervals of a loop.

    Attributes:
        batch_size: maximum number of samples of a batch.
        batch_min: minimum number of samples, unless the first one has waited for `batch_age`.
        batch_age: maximum seconds for which the first sample of a batch waits for others; see BatchLinger.
        ahead: batches pulled ahead of the one in its step; 0 in `bulk`, at most the staleness in `bounded`.
        beat_seconds: interval of heartbeats.
        idle_seconds: how long one poll waits for samples when there are none.
        commit_seconds: interval of offset commits.
        shard_bytes: maximum bytes of rows or gradients of a batch on one shard; a larger batch is trained in parts,
            each of which counts by itself. Together with keys and weights this is well below a shard's request limit.
    """

    batch_size: int = 1024
    batch_min: int = 1
    batch_age: float = 0.0
    ahead: int = 1
    beat_seconds: float = 1.0
    idle_seconds: float = 0.1
    commit_seconds: float = 5.0
    shard_bytes: int = 96 << 20


class Validation(Protocol):
    """Receives predictions and labels, such as `ProgressiveValidation`."""

    def update(self, predictions: Floats, labels: Floats, weights: Floats) -> None:
        """Adds a batch: float32 [n, L], [n, L] and [n]."""


class LoopStats:
    """What a loop has learned. Used by one thread.

    Args:
        metrics: the worker's metrics.
        validation: receives every prediction, made before its sample was learned.
        sampling: the model's down-sampling, for which predictions and weights are corrected; None: no down-sampling.

    Attributes:
        samples: number of samples learned.
        latest: the last batch learned for the first time, and its predictions float32 [n, L]; None: no batch yet.
        watermark: latest event time learned, seconds since the epoch.
        stats: counts of applied and dropped gradients.
    """

    def __init__(self, metrics: WorkerMetrics, validation: Validation | None, sampling: Sampling | None) -> None:
        self._metrics = metrics
        self._validation = validation
        self._sampling = sampling
        self._seldom = LogThrottle()
        self.samples = 0
        self.latest: tuple[Batch, Floats] | None = None
        self.watermark = 0.0
        self.stats = PushStats()

    def answered(self, stats: PushStats, spans: Sequence[Span]) -> None:
        """Counts the push result of some offsets."""
        self.stats.add(stats)
        self._metrics.gradients(vars(stats))
        dropped = (stats.non_finite_rows, stats.non_finite_dense, stats.non_finite_statistics)
        if times := self._seldom.allow(times=any(dropped)):
            logger.warning(
                "dropped gradients that are not finite, of %d batches; of the last: %d of rows, %d of dense slices, "
                "%d changes of statistics; offsets %s",
                *(times, *dropped),
                ", ".join(f"{start} to {end - 1} of partition {p}" for p, start, end in spans),
                extra={"batch": ",".join(f"{p}:{start}-{end - 1}" for p, start, end in spans)},
            )

    def repeated(self, batch: Batch) -> None:
        """Counts a batch that some shards had learned before."""
        self._count(len(batch))
        self._metrics.repeated(len(batch))

    def learned(self, batch: Batch, predictions: Floats | None) -> None:
        """Counts a batch that all shards have learned for the first time."""
        if predictions is not None and self._validation is not None:
            self.latest = batch, predictions
            weights = batch.weights
            if self._sampling is not None:
                predictions, weights = self._sampling.correct(predictions), self._sampling.represented(batch)
            self._validation.update(predictions, batch.labels, weights)
        self._count(len(batch))  # last: metrics may export the window's figures now

    def _count(self, samples: int) -> None:
        self.samples += samples
        self._metrics.learned(samples)
        self._metrics.watermark(self.watermark)


_SHARE = 0.25  # of a core that partial batches may keep busy


class BatchLinger:
    """Decides how long a partial batch waits for more samples. Used by one thread.

    A batch has a fixed cost: a pull and a push of all dense parameters at every shard, and a call of the graph. So a
    partial batch starts at the earliest four times the CPU time of the previous batch after that one started, or
    `LoopConfig.batch_age` after its first sample arrived, whichever is sooner. A sample that arrives after a pause is
    learned at once; in a steady stream a batch holds what arrived meanwhile; a worker with a lag has full batches.

    CPU time rather than wall time, as the latter includes waiting for others: in `bulk`, workers would wait for each
    other longer and longer.

    Args:
        config: the bounds.
        now: monotonic seconds.
        cpu: seconds of CPU time used by the process.
    """

    def __init__(
        self,
        config: LoopConfig,
        now: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.process_time,
    ) -> None:
        self._config, self._now, self._cpu = config, now, cpu
        self._began, self._spent = now(), cpu()
        self._interval: float | None = 0.0  # minimum, between the starts of batches; None: one is in progress
        self._since: float | None = None  # when the first sample started to wait

    def begin(self) -> None:
        """Starts the measurement of a batch, before it is read."""
        self._began, self._spent, self._interval = self._now(), self._cpu(), None
        self._since = None

    def end(self) -> None:
        """Ends it, once the batch is learned. May be called again."""
        if self._interval is None:
            self._interval = (self._cpu() - self._spent) / _SHARE

    def remaining(self, waiting: int) -> float:
        """Seconds for which a batch of `waiting` samples should still wait for more; 0: start it now.

        Until the previous batch is learned, samples wait for `LoopConfig.batch_age`.
        """
        if not 0 < waiting < self._config.batch_size:
            self._since = None
            return 0.0
        now = self._now()
        if self._since is None:
            self._since = now
        due = self._since + self._config.batch_age
        if waiting >= self._config.batch_min and self._interval is not None:
            due = min(due, self._began + self._interval)
        return max(0.0, due - now)


_POLL_SECONDS = 0.5  # maximum poll interval, also with a full buffer: a consumer must poll to keep its partitions


_Part = tuple[Sequence[Span], DecodedBatch]


@dataclass
class _Prefetched:
    """A batch that has been read, planned and pulled."""

    spans: Sequence[Span]
    decoded: DecodedBatch
    pulled: PulledBatch | None  # None: no samples to learn from


@dataclass
class _InFlight:
    """A batch whose push is not acknowledged yet."""

    prefetched: _Prefetched
    result: BatchResult | None
    push: PendingPush


class OtherShards(NamedTuple):
    """Shards with which a loop goes on.

    Attributes:
        client: connected to all of them.
        shards: how many there are.
    """

    client: Client
    shards: int


class Loop:
    """The training loop of a worker. Used by one thread.

    Args:
        model: the model to train.
        step: its training function.
        client: connected to all shards; joined and closed here.
        progress: returns the progress of all shards.
        intake: source of samples; opened and closed here.
        shards: number of shards.
        start: where the run began; None: at offset 0.
        config: batching, prefetching and intervals.
        validation: receives every prediction, made before its sample was learned; not again after a rewind.
        blocks: receives them too, by where their samples stand in the log; None: no blocks are made.
        metrics: the worker's metrics.
        graphs: returns the compiled graphs to begin with; called once the first partitions are assigned.
        others: returns the shards that the cluster has now; None: those of before. Called after errors of shards.

    Attributes:
        stats: statistics of what it has learned.
        rewinds: number of rewinds.
    """

    def __init__(
        self,
        model: Model,
        step: Step,
        client: Client,
        progress: Callable[[], Sequence[Progress]],
        *,
        intake: Intake,
        shards: int,
        start: Clock | None = None,
        config: LoopConfig | None = None,
        validation: Validation | None = None,
        blocks: BlockTracker | None = None,
        metrics: WorkerMetrics | None = None,
        graphs: Callable[[], GraphCache] = GraphCache,
        others: Callable[[], OtherShards | None] = lambda: None,
    ) -> None:
        self._client, self._shards, self._others = client, shards, others
        self._progress, self._start = progress, start or {}
        self._intake = intake
        self._config = config = config or LoopConfig()
        self._linger = BatchLinger(config)

        def make_trainer() -> Trainer:
            micro = None
            if model.micro_batch_size:
                micro = MicroStep(model, step, config.batch_size, client.spec, graphs=graphs())
            return Trainer(model, step, self._client, self._shards, micro=micro, ahead=config.ahead)

        self._make_trainer = make_trainer
        self._metrics = metrics or WorkerMetrics()
        self._blocks = blocks
        self._cursor = Cursor()
        self._learned_before: dict[int, int] = {}  # latest offset learned by any shard at the last rewind
        self._reconnects = 0
        self._partitions: list[int] = []
        self._ahead: deque[_Prefetched] = deque()
        self._parts: list[_Part] = []  # of a batch that is too large to train at once; a stack
        self._in_flight: _InFlight | None = None
        self._settled: dict[int, int] = {}  # offsets to commit
        self._read_out: frozenset[int] = frozenset()  # partitions that were read to the end at the last commit
        self._committed = self._polled = time.monotonic()
        self._is_closing = False
        self.stats = LoopStats(self._metrics, validation, model.sampling)
        self._pushed: float | None = None  # when the push in flight was sent
        self.rewinds = 0

    @cached_property
    def _trainer(self) -> Trainer:
        return self._make_trainer()

    def run(self, stopped: threading.Event) -> None:
        """Trains until the stream ends or `stopped` is set; finishes what is in flight.

        Raises:
            ShardError: a shard refuses a request, or stays unreachable for too long.
            SourceError: the stream refuses access, or has lost samples.
            TooManyBadSamples: too many samples were refused.
        """
        every = self._config.beat_seconds  # also while it computes
        try:
            with PeriodicTask("heartbeat", self._beat, every, delay=every, subject="heartbeat to the shards"):
                self._join()
                self._intake.open(self)
                while not stopped.is_set() and self._advance_or_follow():
                    continue
                self._drop()
                self._settle()
        finally:
            self._drop()
            self._in_flight = None  # after a failure another worker learns it
            self._is_closing = True
            self._intake.close()
            self._client.close()

    @property
    def away(self) -> bool:
        """Whether a shard is unreachable at the moment."""
        return bool(self._client.away)

    def _beat(self) -> None:
        self._client.beat()

    def _join(self) -> None:
        try:
            self._client.join()
        except ShardError:
            if not self._follow():
                raise

    def _follow(self) -> bool:
        """Joins other shards, if the cluster has others now; what was in flight is to be read again."""
        began, other = self._pushed or time.monotonic(), self._others()
        if other is None:
            return False
        self._drop()
        self._in_flight = None
        self._client.close()
        self._client, self._shards = other
        if "_trainer" in vars(self):
            self._trainer.move_to(*other)
        self._join()
        pause = time.monotonic() - began
        logger.info("learning with %s, after a pause of %.2f s", counted(self._shards, "shard"), pause)
        return True

    def _advance_or_follow(self) -> bool:
        try:
            return self._advance()
        except ShardError:
            if not self._follow():
                raise
        self._rewind()
        return True

    def _advance(self) -> bool:
        """Trains on one batch, or waits; False: the stream has ended."""
        self._poll()
        self._read_ahead()
        if not self._ahead:
            return self._idle()
        prefetched = self._ahead.popleft()
        result = self._train(prefetched)
        if not self._settle():
            return True
        if prefetched.decoded.letters:
            self._intake.flush_dead_letters()
        self._in_flight = _InFlight(prefetched, result, self._push(prefetched, result))
        self._pushed = time.monotonic()
        if not self._trainer.ahead:
            self._settle()
        return True

    def _poll(self) -> None:
        wanted = self._wanted()
        if wanted or time.monotonic() - self._polled > _POLL_SECONDS:
            self._fetch(max(wanted, 1), 0.0)

    def _wanted(self) -> int:
        """Samples missing from the next batches."""
        return max(0, (self._config.ahead + 1 - len(self._ahead)) * self._config.batch_size - self._waiting())

    def _waiting(self) -> int:
        """Samples fetched and not read yet."""
        return sum(self._intake.count(p, at, 1 << 62) for p, at in self._cursor.positions.items())

    def _fetch(self, most: int, seconds: float, least: int = 1) -> None:
        with self._metrics.stage("poll"):
            self._intake.poll(most, seconds, least)
        self._metrics.refresh()  # here, as every iteration polls: so the last batches are exported, too
        self._polled = time.monotonic()

    def _read_ahead(self) -> None:
        """Reads, plans and pulls this batch and the next ones."""
        while len(self._ahead) <= self._trainer.ahead and (self._parts or self._is_ripe()):
            if not self._parts and not self._read():
                return
            spans, decoded, plan = self._plan()
            pulled = self._trainer.pull(plan, decoded.batch, len(self._ahead)) if len(decoded.batch) else None
            self._ahead.append(_Prefetched(spans, decoded, pulled))

    def _read(self) -> bool:
        """Reads the next batch; False: no samples are available."""
        spans = self._cursor.next(self._intake, self._config.batch_size)
        if spans:
            self._read_out -= {span.partition for span in spans}
            self._linger.begin()
            with self._metrics.stage("decode"):
                self._parts.append((spans, self._intake.read(spans)))
        return bool(spans)

    def _plan(self) -> tuple[Sequence[Span], DecodedBatch, Plan]:
        """Plans the next part of what was read: as much as shards accept at once, at least one sample."""
        while True:
            spans, decoded = self._parts.pop()
            with self._metrics.stage("plan"):
                plan = self._trainer.plan(decoded.batch)
            fits = self._trainer.fits(plan, decoded.batch, self._config.shard_bytes)
            if fits or len(decoded.batch) < 2 or decoded.origins is None:
                return spans, decoded, plan
            self._parts += reversed(decoded.split(spans))

    def _drop(self) -> None:
        """Discards what was read and not learned."""
        self._ahead.clear()
        self._parts.clear()

    def _is_ripe(self) -> bool:
        """Whether the next batch is full, has waited long enough, or cannot grow."""
        if not self._ahead and self._in_flight is None:
            self._linger.end()
        return not self._linger.remaining(self._waiting()) or self._intake.finished()

    def _train(self, prefetched: _Prefetched) -> BatchResult | None:
        if prefetched.pulled is None:
            return None
        with self._metrics.stage("pull"):
            prefetched.pulled.wait()
        with self._metrics.stage("step"):
            return self._trainer.step(prefetched.pulled)

    def _push(self, prefetched: _Prefetched, result: BatchResult | None) -> PendingPush:
        decoded, stats = prefetched.decoded, self.stats
        with self._metrics.stage("push"):
            predictions = self._blocks.add(prefetched.spans, decoded, result) if self._blocks else {}
            if result is None or prefetched.pulled is None:
                return self._client.skip(
                    *(prefetched.spans, int(stats.watermark), decoded.watermarks, decoded.refusals, predictions)
                )
            stats.watermark = max(stats.watermark, float(decoded.batch.times.max()))
            return self._trainer.push(
                prefetched.pulled,
                result,
                spans=prefetched.spans,
                watermark=int(stats.watermark),
                watermarks=decoded.watermarks,
                idle=self._read_out,
                refusals=decoded.refusals,
                predictions=predictions,
            )

    def _settle(self) -> bool:
        """Waits for the push in flight; False: it was rejected, and the loop has rewound."""
        if self._in_flight is None:
            return True
        in_flight, self._in_flight = self._in_flight, None
        try:
            with self._metrics.stage("settle"):
                pushed = in_flight.push.wait()
        except ShardError:
            if not self._follow():
                raise
            self._rewind()
            return False
        self._pushed = None
        spans, batch, result = in_flight.prefetched.spans, in_flight.prefetched.decoded.batch, in_flight.result
        stats = total_stats(pushed)
        stats.non_finite_dense += result.non_finite_dense if result else 0
        self.stats.answered(stats, spans)
        if any_rejected(pushed):
            self._rewind()
            return False
        if all(end <= self._learned_before.get(partition, 0) for partition, _, end in spans):
            self.stats.repeated(batch)
        else:
            self.stats.learned(batch, result.predictions if result else None)
        if self._blocks:
            self._blocks.settle()
        self._intake.release(spans)
        self._settled |= {span.partition: span.end for span in spans}
        if time.monotonic() - self._committed >= self._config.commit_seconds:
            self._commit()
        return True

    def _commit(self) -> None:
        self._intake.commit(self._settled)
        self._read_out = self._intake.idle()
        self._metrics.position(self._cursor.positions)
        self._metrics.reconnects(self._client.reconnects)
        self._settled, self._committed = {}, time.monotonic()

    def _idle(self) -> bool:
        """Without a batch to train on: settles the push in flight, then parks and waits for samples."""
        if self._in_flight is not None:
            self._settle()
            return True
        if waiting := self._waiting():
            # As many as fill the batch: fewer need not wake this thread.
            least = max(self._config.batch_size - waiting, 1)
            self._fetch(max(self._wanted(), 1), self._linger.remaining(waiting), least)
            return True
        self._client.park(self._intake.idle())
        if self._client.reconnects != self._reconnects:
            self._rewind()  # a shard may have been restored, and no push would reveal it
            return True
        if self._intake.finished():
            return False
        self._fetch(max(self._wanted(), 1), self._config.idle_seconds)
        if self._settled and not self._waiting():  # otherwise it would commit after every small batch
            self._commit()
        return True

    def assigned(self, partitions: Sequence[int]) -> Mapping[int, int]:
        self._settle()
        self._partitions = sorted({*self._partitions, *partitions})
        self._rewind()
        logger.info("partitions assigned: %s", self._partitions)
        return {partition: self._cursor.positions[partition] for partition in partitions}

    def revoked(self, partitions: Sequence[int]) -> None:
        self._settle()
        self._commit()
        self.lost(partitions)

    def lost(self, partitions: Sequence[int]) -> None:
        self._partitions = [p for p in self._partitions if p not in partitions]
        self._read_out -= {*partitions}
        self._settled = {p: at for p, at in self._settled.items() if p not in partitions}
        logger.info("partitions revoked: %s", sorted(partitions))
        if self._partitions and not self._is_closing:
            self._rewind()
        else:
            self._drop()
            self._cursor.rewind([], [])
            self._metrics.position({})

    def _read_progress(self) -> Sequence[Progress]:
        while True:
            self._reconnects = self._client.reconnects  # before: a later one is to be noticed
            try:
                return self._progress()
            except ShardError:
                if not self._follow():
                    raise

    def _rewind(self) -> None:
        """Resumes from the clocks of the shards."""
        self._drop()
        self._trainer.forget()
        progress = self._read_progress()
        if not any(at > self._start.get(p, 0) for shard in progress for p, at in shard.clock.items()):
            self._trainer.begin()  # also if shards have lost all that they had learned
        elif not self.rewinds:
            self._trainer.beginning = None
        self._cursor.rewind(self._partitions, [shard.clock for shard in progress])
        if self._blocks:
            self._blocks.restore(self._cursor.positions, progress)
        self._learned_before = latest(shard.clock for shard in progress)
        positions = self._cursor.positions
        self._intake.seek(positions, watermarks_at(positions, progress), refusals_at(positions, progress))
        self.rewinds += 1
        self._metrics.rewound(positions)
        logger.info("resuming from offsets %s", positions)
