"""Shard: the embedding rows whose keys hash to it, its slice of the dense parameters, and the clock of both."""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from streamtrain._core import DenseVector, Rows, Table
from streamtrain.errors import ShardBroken, ShardRefused, ShardUnavailable
from streamtrain.model.bad_samples import Refusals
from streamtrain.model.spec import Rates, Spec
from streamtrain.ps.clock import Clock, Progress, PushOutcome, Span, VectorClock
from streamtrain.ps.push import DenseChange, Floats, Push, PushResult, PushStats
from streamtrain.ps.row_memory import RowMemory

logger = logging.getLogger(__name__)

_SCANNED_ROWS = 1 << 16
_SCANNED_KEYS = 1 << 17
_SWEPT_ROWS = 1 << 14
_SCAN_SECONDS = 60.0  # until a scan with which nobody goes on is given up: rows cannot leave memory before it
HASH_SLOTS = 1 << 16


class _PushBarrier:
    """Blocks pushes at the moment of a checkpoint; opens by itself if no cut follows.

    Attributes:
        target: a push up to this clock still passes.
        until: when the barrier opens, in seconds of `time.monotonic`.
    """

    def __init__(self) -> None:
        self.target: Clock = {}
        self.until = 0.0

    def close(self, target: Clock, until: float) -> None:
        """Blocks every push that ends after `target`."""
        self.target, self.until = target, until

    def open(self) -> None:
        self.until = 0.0

    def blocks(self, spans: Sequence[Span]) -> bool:
        """Whether a push over `spans` has to wait."""
        return time.monotonic() < self.until and any(end > self.target.get(partition, 0) for partition, _, end in spans)


# Rows visited for expiry with every push, per row pushed: enough to visit the whole table regularly in any stream that
# makes it grow, and few enough that a push never stalls.
_EXPIRY_VISITS = 2
_MIN_EXPIRY_VISITS = 256


class Run(NamedTuple):
    """One training run: from its first initialisation on, across all restarts of its processes.

    Attributes:
        id: unique.
        start: offsets at which learning began.
        topic: identity of the topic that these offsets and the clocks refer to; "" if unknown.
    """

    id: str
    start: Clock
    topic: str = ""


class InitialState(NamedTuple):
    """What an empty shard is initialised with.

    Attributes:
        run: the training run.
        spec: the model's spec.
        dense: float32, initial values of the shard's slice of the dense parameters.
        statistics: float32, initial values of its slice of the statistics.
    """

    run: Run
    spec: Spec
    dense: Floats
    statistics: Floats


class Removal(NamedTuple):
    """Rows that were taken away.

    Attributes:
        table: their table.
        keys: uint64 [n].
    """

    table: str
    keys: NDArray[np.uint64]


class Replicator(Protocol):
    """Replicates what happens to a shard to its backup."""

    def record(self, change: Push | Removal) -> None:
        """Queues a change that has been made. Called in the order of changes, while no other is made."""

    def wait_acked(self) -> None:
        """Waits until the backup has applied everything recorded so far; returns at once if there is no backup.

        Raises:
            ShardUnavailable: the backup has taken over.
        """

    def check_not_fenced(self) -> None:
        """Waits until the backup confirms that it has not taken over; returns at once if there is no backup.

        Raises:
            ShardUnavailable: the backup has taken over.
        """


class RowInfo(NamedTuple):
    """Metadata of an embedding row.

    Attributes:
        learned: number of occurrences learned.
        last_seen: latest event time, seconds since the epoch; 0 in a table without expire_after and capacity.
    """

    learned: int
    last_seen: int


class Shard:
    """One shard of the model. Thread-safe: pulls run concurrently; pushes are serialized, with their clock advance.

    Args:
        initial: what the shard starts from.
        index: 0 to shards - 1.
        tables: of the shard that had these rows before; None: new ones.
        memory: what their rows may take; None: all that they need.

    Attributes:
        replicator: replicates pushes to a backup; None: no backup. Set before the first push.
        spec: of the model, with the learning rates in force (`set_rates`).
        rates: these learning rates.
        memory: what its rows may take; None: all that they need.
        moved: how often rows may have got other ids, as of within `paused`: what was scanned meanwhile may miss some.
    """

    def __init__(
        self,
        initial: InitialState,
        index: int,
        shards: int,
        *,
        tables: Sequence[Table] | None = None,
        memory: RowMemory | None = None,
    ) -> None:
        self.replicator: Replicator | None = None
        self.moved = 0
        self.spec = initial.spec
        self.rates = self.spec.current_rates
        self._own_rates = self.spec.own_rates
        self.index = index
        self.shards = shards
        self.run = initial.run
        self.tables = self._make_tables(memory) if tables is None else [*tables]
        self.dense = self.spec.make_dense(initial.dense)
        # A change is a gradient of -1 per unit under SGD with rate 1: the same locks and checks as for weights.
        self.statistics = DenseVector(np.ascontiguousarray(initial.statistics, np.float32), optimizer="sgd", rate=1.0)
        self._expires = any(table["expire_after"] for table in self.spec.tables)
        self.totals = PushStats()
        self.pushes = {outcome: 0 for outcome in PushOutcome}
        self.samples = 0
        self.watermark = 0
        self._clock = VectorClock(initial.run.start)
        self._watermarks: dict[int, float] = {}
        self._idle: set[int] = set()  # partitions that their workers have read to the end
        self._refusals: dict[int, Refusals] = {}
        self._predictions: dict[int, bytes] = {}
        self._scans: dict[int, tuple[Iterator[Rows], float]] = {}  # by cursor, with their ends
        self._cursors = itertools.count(1)
        self._lock = threading.Condition()
        self._barrier = _PushBarrier()
        self._full_tables: set[str] = set()
        self._broken: str | None = None
        self._retired: str | None = None
        self._fenced: str | None = None
        self.memory = memory
        if memory is not None:
            memory.add(self)

    def _make_tables(self, memory: RowMemory | None) -> list[Table]:
        tables = self.spec.make_tables(self.shards, memory.options(self.spec.tables) if memory else None)
        for table in tables:
            table.set_slots(*own_slots(self.index, self.shards))
        return tables

    def pull_rows(self, keys: Sequence[NDArray[np.uint64]], rows: Sequence[Floats]) -> None:
        """Reads rows into `rows`, by table float32 [n, dim]; an id without a row gives its birth value."""
        self.check()
        with self.reading():
            for table, table_keys, out in zip(self.tables, keys, rows, strict=True):
                if len(table_keys):
                    table.pull(table_keys, out)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Context for whoever reads rows: what is damaged on disk is gone, so the shard then has to be restored."""
        try:
            yield
        except RuntimeError as exc:
            self._broken = f"rows cannot be read: {exc}"
            self.check(exc)

    def pull_state(
        self, keys: Sequence[NDArray[np.uint64]], rows: Sequence[Floats], awaited: Sequence[NDArray[np.uint8]]
    ) -> None:
        """Reads rows with their optimizer state.

        Args:
            keys: by table uint64 [n].
            rows: output, by table float32 [n, dim + state].
            awaited: output, by table [n]: occurrences that a key still needs before its gradients are applied.
        """
        self.check()
        with self.reading():
            for table, table_keys, out, table_awaited in zip(self.tables, keys, rows, awaited, strict=True):
                if len(table_keys):
                    table_awaited[:] = table.pull_state(table_keys, out)[1]

    def pull_dense_state(self, dense: Floats, slots: Floats, statistics: Floats) -> float:
        """`pull_dense` plus the optimizer's slots, float32 [slots, slice]; returns the optimizer's step count."""
        self.check()
        steps = self.dense.pull_state(dense, slots)
        self.statistics.pull(statistics)
        return steps

    def pull_dense(self, dense: Floats, statistics: Floats) -> None:
        """Reads the dense slice and the slice of the statistics into float32 arrays of their sizes."""
        self.check()
        self.dense.pull(dense)
        self.statistics.pull(statistics)

    def judge(self, spans: Sequence[Span]) -> PushResult:
        """The outcome that a push over `spans` would have."""
        with self._lock:
            outcome = self._clock.judge(spans)
            return PushResult(outcome, self._clock.read() if outcome is PushOutcome.REJECTED else {})

    def push(self, push: Push) -> PushResult:
        """Applies a push and advances the clock atomically; or acknowledges a duplicate, or rejects it (see clock.py).

        Raises:
            ShardBroken: this push or an earlier one failed midway, for lack of memory; the shard must be restarted
                from a checkpoint. Pulls and checkpoints raise it, too.
            ShardUnavailable: the backup has taken over. Pulls and checkpoints raise it, too.
        """
        pushed = self._push(push)
        if self.replicator is not None and pushed.outcome is not PushOutcome.REJECTED:
            self.replicator.wait_acked()
        return pushed

    def check_not_fenced(self) -> None:
        """Raises ShardUnavailable if the backup has taken over."""
        if self.replicator is not None:
            self.replicator.check_not_fenced()

    def _push(self, push: Push) -> PushResult:
        with self._lock:
            while self._barrier.blocks(push.spans):
                self._lock.wait(self._barrier.until - time.monotonic())
            self.check()
            for cursor, (_, end) in [*self._scans.items()]:
                if time.monotonic() > end:
                    self._scans.pop(cursor, None)
            outcome = self._clock.judge(push.spans)
            self.pushes[outcome] += 1
            if outcome is not PushOutcome.APPLIED:
                return PushResult(outcome, self._clock.read() if outcome is PushOutcome.REJECTED else {})
            self._watermarks.update(push.watermarks)
            self._mark_idle(push.idle)
            self._idle.difference_update(span.partition for span in push.spans)
            push = push.averaged(self.samples, self.spec.reduction)
            try:
                stats = self._apply(push)
            except BaseException as exc:
                self._broken = f"a push failed midway: {type(exc).__name__}: {exc}"
                if isinstance(exc, Exception):
                    self.check(exc)
                raise
            self._clock.advance(push.spans)
            self._refusals.update(push.refusals)
            self._predictions.update(push.predictions)
            self.totals.add(stats)
            self.samples += push.samples
            self.watermark = max(self.watermark, push.watermark)
            if self.replicator is not None:
                self.replicator.record(push)
            self._lock.notify_all()
            return PushResult(outcome, {}, stats)

    def _apply(self, push: Push) -> PushStats:
        stats = PushStats()
        if not push.samples:
            return stats
        now = self._expiry_time(push) if self._expires else 0
        rates = push.rates or self.rates
        for settings, table, own, update in zip(
            self.spec.tables, self.tables, self._own_rates, push.updates, strict=True
        ):
            if len(update.keys):
                rate = rates.embedding_optimizer if own is None else own
                done = table.push(
                    update.keys, update.gradients, update.counts, update.times, rate, repeats=update.repeats
                )
                stats.applied += done.applied
                stats.unadmitted += done.unadmitted
                stats.evicted += done.evicted
                if done.evicted:
                    self._warn_full(settings["name"])
                stats.non_finite_rows += len(done.non_finite)
            if settings["expire_after"]:
                visits = max(_MIN_EXPIRY_VISITS, _EXPIRY_VISITS * len(update.keys))
                stats.expired += table.expire(now, visits)
        dense = push.dense
        if isinstance(dense, DenseChange):
            applied = self.dense.change(*dense)
        else:
            applied = self.dense.apply(dense, rates.dense_optimizer)
        stats.non_finite_dense += not applied
        if len(push.statistics_change):
            stats.non_finite_statistics += not self.statistics.apply(-push.statistics_change)
        return stats

    def _warn_full(self, table: str) -> None:
        if table not in self._full_tables:
            self._full_tables.add(table)
            logger.warning("table %s of shard %d is full: evicting least recently seen rows", table, self.index)

    def _expiry_time(self, push: Push) -> int:
        """The watermark of the partition that is furthest behind, as its unread samples still need their rows.

        Idle partitions, and those without an event time so far, do not count.
        """
        behind = [at for partition, at in self._watermarks.items() if at > 0 and partition not in self._idle]
        return int(min(min(behind, default=push.watermark), push.watermark))

    def idle(self, partitions: Collection[int]) -> None:
        """Marks partitions as read to the end, until their next push."""
        with self._lock:
            self._mark_idle(partitions)

    def _mark_idle(self, partitions: Collection[int]) -> None:
        self._idle.update(self._watermarks.keys() & partitions)  # known ones only: a client may send anything

    def clock(self) -> dict[int, int]:
        """Offset of the first sample that has not been learned, by partition."""
        with self._lock:
            return self._clock.read()

    def adopt(self, topic: str) -> None:
        """Sets the topic that the clock's offsets refer to."""
        with self._lock:
            self.run = self.run._replace(topic=topic)

    def set_rates(self, rates: Mapping[str, float]) -> Rates:
        """Sets learning rates for the batches that are pulled from now on; see `Spec.with_rates`.

        Returns:
            The rates in force.

        Raises:
            ConfigError: as `Spec.with_rates`.
            ShardUnavailable: the backup has taken over.
        """
        with self._lock:
            self.check()
            self.spec = self.spec.with_rates(rates)
            self.rates = self.spec.current_rates
        self.check_not_fenced()  # it also waits until a backup has them
        return self.rates

    def progress(self) -> Progress:
        """The clock, with what belongs to it."""
        with self._lock:
            return Progress(self._clock.read(), dict(self._watermarks), dict(self._refusals), dict(self._predictions))

    def resume(self, progress: Progress, samples: int = 0, watermark: int = 0) -> None:
        """Restores the progress of a checkpoint whose rows have been loaded."""
        with self._lock:
            self._clock = VectorClock(progress.clock)
            self._watermarks, self._refusals = dict(progress.watermarks), dict(progress.refusals)
            self._predictions = dict(progress.predictions)
            self.samples, self.watermark = samples, watermark

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which no push is applied."""
        with self._lock:
            yield

    def release(self) -> None:
        """Ends what holds pushes back."""
        with self._lock:
            self._barrier.open()
            self._lock.notify_all()

    def sweep(self) -> None:
        """Takes away what rows of other shards its tables have, see `Table.set_slots`; many may do so together."""
        for table in self.tables:
            while table.sweep(_SWEPT_ROWS):
                pass

    def drop_foreign(self) -> None:
        """Takes away what has been loaded into its tables of other shards since it began."""
        with self._lock:
            self.moved += 1
            for table in self.tables:
                table.set_slots(*own_slots(self.index, self.shards))
        self.sweep()

    def retire_at(self, clock: Clock, why: str) -> bool:
        """`retire`, if the shard is at this clock and has not failed; returns whether it was retired."""
        with self._lock:
            if self._broken or self._fenced or not _same(self._clock.read(), clock):
                return False
            self._retired = why
            self._barrier.open()
            self._lock.notify_all()
            return True

    def retire(self, why: str) -> None:
        """Refuses all pulls, pushes and checkpoints from now on, with `why` in the error."""
        with self._lock:
            self._retired = why
            self._barrier.open()
            self._lock.notify_all()

    def fence(self, why: str) -> bool:
        """Refuses all pulls, pushes and checkpoints from now on, as another cluster continues the run.

        Returns:
            Whether the shard was not fenced before.
        """
        with self._lock:
            is_new, self._fenced = self._fenced is None, why
            self._barrier.open()
            self._lock.notify_all()
        return is_new

    def check(self, cause: Exception | None = None) -> None:
        """Raises unless the shard can be used.

        Args:
            cause: the exception that broke the shard, if any.

        Raises:
            ShardRefused: another cluster continues the run.
            ShardUnavailable: another process has replaced this one.
            ShardBroken: the shard must be restored from a checkpoint.
        """
        if self._fenced:
            raise ShardRefused(f"shard {self.index} no longer accepts pushes: {self._fenced}", "mismatch")
        if self._retired:
            raise ShardUnavailable(f"shard {self.index} has moved: {self._retired}")
        if self._broken:
            raise ShardBroken(f"shard {self.index} must be restarted from a checkpoint: {self._broken}") from cause

    def inspect(self, table: str, key: int) -> RowInfo | None:
        """Metadata of a row; None if this shard has no such row.

        Raises:
            ShardRefused: unknown table.
        """
        with self.reading():
            exists, counts, last_seen = self._table(table).lookup(np.array([key], np.uint64))
        return RowInfo(int(counts[0]), int(last_seen[0])) if exists[0] else None

    def remove(self, table: str, keys: NDArray[np.uint64], *, dry_run: bool = False) -> NDArray[np.uint64]:
        """Takes rows away, as if their ids had never been seen; an id that is learned again begins anew.

        Args:
            table: their table.
            keys: uint64 [n].
            dry_run: tells which there are, and takes none away.

        Returns:
            The keys of those that there were, uint64 [m].

        Raises:
            ShardRefused: unknown table.
            ShardUnavailable: the backup has taken over.
        """
        with self._lock, self.reading():
            self.check()
            of_table = self._table(table)
            there = keys[of_table.lookup(keys)[0]]
            if dry_run:
                return there
            of_table.remove(there)
            if self.replicator is not None:
                self.replicator.record(Removal(table, there))
        if self.replicator is not None:
            self.replicator.wait_acked()
        return there

    def keys(self, table: str, cursor: int) -> tuple[NDArray[np.uint64], int | None]:
        """Keys of some rows, uint64 [n], from a cursor on, 0 at first; and the next cursor, None at the end.

        Raises:
            ShardRefused: unknown table, or nobody has gone on for a while.
        """
        self.check()
        if not cursor:
            self.sweep()
            scan = self._table(table).rows(_SCANNED_KEYS)
        elif (known := self._scans.pop(cursor, None)) is not None:
            scan, _ = known
        else:
            raise ShardRefused(f"there is no scan at {cursor}; begin again", "mismatch")
        with self.reading():
            rows = next(scan, None)
        if rows is None:
            return np.empty(0, np.uint64), None
        with self._lock:
            after = next(self._cursors)
            self._scans[after] = scan, time.monotonic() + _SCAN_SECONDS
        return rows.keys.copy(), after

    def _table(self, name: str) -> Table:
        names = [settings["name"] for settings in self.spec.tables]
        if name not in names:
            raise ShardRefused(f"unknown table {name!r}; the tables are {', '.join(names)}", "mismatch")
        return self.tables[names.index(name)]

    def freeze(self, patience: float) -> dict[int, int]:
        """Blocks pushes until `cut`, for at most `patience` seconds; returns the clock."""
        with self._lock:
            self.check()
            clock = self._clock.read()
            self._barrier.close(clock, time.monotonic() + patience)
            return clock

    def cut(
        self, target: Clock, patience: float, mark: Callable[[], None], hold: float = 0.0
    ) -> tuple[dict[int, int], bool]:
        """Admits only pushes up to `target`, calls `mark` once the clock has reached it, then admits all pushes again.

        Args:
            target: the clock at which to cut.
            patience: seconds to wait for the target. After that, or if the clock is already past it, the cut is made
                at the current clock.
            mark: called at the cut, while no push is applied.
            hold: seconds for which later pushes wait nevertheless, in case the shard gets another place.

        Returns:
            The clock of the cut, and whether it equals the target.
        """
        deadline = time.monotonic() + patience
        with self._lock:
            self._barrier.close(target, deadline)
            self._lock.notify_all()
            try:
                while _before(self._clock.read(), target) and time.monotonic() < deadline:
                    self._lock.wait(deadline - time.monotonic())
                self.check()  # a checkpoint must not contain rows that are ahead of the clock
                mark()
                clock = self._clock.read()
            except BaseException:
                self._barrier.open()
                raise
            else:
                self._barrier.close(clock, time.monotonic() + hold)
                return clock, _same(clock, target)
            finally:
                self._lock.notify_all()


def own_slots(index: int, shards: int) -> tuple[int, int]:
    """The hash slots of shard `index` out of `shards`, begin to end - 1, as `shards_of` has them."""
    return -(-index * HASH_SLOTS // shards), -(-(index + 1) * HASH_SLOTS // shards)


def scan_rows(table: Table) -> Iterator[Rows]:
    """All rows of a table, in parts of about 65536; pushes may be applied between two of them.

    With rows on disk, one that changes meanwhile may come twice.
    """
    while table.sweep(_SWEPT_ROWS):  # which gives rows other ids
        pass
    yield from table.rows(_SCANNED_ROWS)


def rows_at_rest(table: Table) -> Iterator[Rows]:
    """The same of a table that does not change meanwhile: rows in memory, which are used more often, come first."""
    while table.sweep(_SWEPT_ROWS):
        pass
    cursor: int | None = 0
    while cursor is not None:
        cursor, rows = table.scan(cursor, _SCANNED_ROWS)
        yield rows


def _before(clock: Clock, target: Clock) -> bool:
    """Whether a clock can still reach the target."""
    return not _same(clock, target) and all(at <= target.get(partition, 0) for partition, at in clock.items())


def _same(a: Clock, b: Clock) -> bool:
    return all(a.get(p, 0) == b.get(p, 0) for p in {*a, *b})
