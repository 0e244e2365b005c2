"""Shard: the embedding rows whose keys hash to it, its slice of the dense parameters, and the clock of both."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from streamtrain._core import DenseVector
from streamtrain.errors import ShardBroken, ShardRefused, ShardUnavailable
from streamtrain.model.spec import Spec
from streamtrain.ps.clock import Clock, Outcome, Span, Stand, VectorClock
from streamtrain.ps.full import Full
from streamtrain.ps.gate import Gate
from streamtrain.ps.push import Floats, Push, Pushed, PushStats

# Rows looked at for expiry with every push, per row pushed: the whole table is visited often enough for any stream
# that lets it grow, and a push never stalls.
_EXPIRY_VISITS = 2
_MIN_EXPIRY_VISITS = 256


class Run(NamedTuple):
    """What is learned from a first initialisation on, however often its processes are restarted.

    Attributes:
        id: unique.
        start: offsets at which learning began.
    """

    id: str
    start: Clock


class Initial(NamedTuple):
    """What an empty shard begins with.

    Attributes:
        run: what it is part of.
        spec: of the model.
        dense: float32, first values of its slice of the dense parameters.
        statistics: float32, those of its slice of the statistics.
    """

    run: Run
    spec: Spec
    dense: Floats
    statistics: Floats


class Mirror(Protocol):
    """Has another process apply what a shard applies."""

    def record(self, push: Push) -> None:
        """A push has been applied. Called in the order of pushes, while nothing else is pushed."""

    def settle(self) -> None:
        """Waits until all that was recorded so far is applied there too, or nobody is there to apply it.

        Raises:
            ShardUnavailable: the other has taken over.
        """

    def confirm(self) -> None:
        """Waits until the other has said that it has not taken over, or nobody is there; errors as of `settle`."""


class Row(NamedTuple):
    """What is known of a row beside its values.

    Attributes:
        learned: occurrences that were learned.
        last_seen: latest event time, seconds since the epoch; 0 in a table without expire_after and capacity.
    """

    learned: int
    last_seen: int


class Shard:
    """Thread-safe: pulls run beside each other and beside a push; pushes, with their advance of the clock, take turns.

    Args:
        initial: what it begins with.
        index: which shard it is, 0 to shards - 1.
        shards: how many there are.

    Attributes:
        mirror: what follows it; None: nothing. Set before anything is pushed.
    """

    def __init__(self, initial: Initial, index: int, shards: int) -> None:
        self.mirror: Mirror | None = None
        self.spec = initial.spec
        self.index = index
        self.shards = shards
        self.run = initial.run
        self.tables = self.spec.make_tables()
        self.dense = self.spec.make_dense(initial.dense)
        # A change is a gradient of -1 per unit under SGD with rate 1: the same locks and checks as for weights.
        self.statistics = DenseVector(np.ascontiguousarray(initial.statistics, np.float32), optimizer="sgd", rate=1.0)
        self.totals = PushStats()
        self.pushes = {outcome: 0 for outcome in Outcome}
        self.samples = 0
        self.watermark = 0
        self._clock = VectorClock(initial.run.start)
        self._watermarks: dict[int, float] = {}
        self._lock = threading.Condition()
        self._gate = Gate()
        self._full = Full(index)
        self._broken: str | None = None
        self._retired: str | None = None

    def pull_rows(self, keys: Sequence[NDArray[np.uint64]], rows: Sequence[Floats]) -> None:
        """Reads rows into `rows`, by table float32 [n, dim]; ids without a row give their birth value."""
        self._check()
        for table, of_table, out in zip(self.tables, keys, rows, strict=True):
            if len(of_table):
                table.pull(of_table, out)

    def pull_dense(self, dense: Floats, statistics: Floats) -> None:
        """Reads the dense slice and the slice of the statistics into float32 arrays of their sizes."""
        self._check()
        self.dense.pull(dense)
        self.statistics.pull(statistics)

    def judge(self, spans: Sequence[Span]) -> Pushed:
        """What a push over `spans` would come to."""
        with self._lock:
            outcome = self._clock.judge(spans)
            return Pushed(outcome, self._clock.read() if outcome is Outcome.REJECTED else {})

    def push(self, push: Push) -> Pushed:
        """Applies a push and advances the clock, as one; or acknowledges or rejects it (see clock.py).

        Raises:
            ShardBroken: this push, or one before, failed half-way for lack of memory: only a restart from a checkpoint
                helps. Pulls and checkpoints raise it, too.
            ShardUnavailable: its backup has taken over. Pulls and checkpoints raise it, too.
        """
        pushed = self._push(push)
        if self.mirror is not None and pushed.outcome is not Outcome.REJECTED:
            self.mirror.settle()
        return pushed

    def confirm(self) -> None:
        """Makes sure that no backup has taken over; errors as of `Mirror.confirm`."""
        if self.mirror is not None:
            self.mirror.confirm()

    def _push(self, push: Push) -> Pushed:
        with self._lock:
            while self._gate.holds(push.spans):
                self._lock.wait(self._gate.until - time.monotonic())
            self._check()
            outcome = self._clock.judge(push.spans)
            self.pushes[outcome] += 1
            if outcome is not Outcome.APPLIED:
                return Pushed(outcome, self._clock.read() if outcome is Outcome.REJECTED else {})
            try:
                stats = self._apply(push)
            except BaseException as exc:
                self._broken = f"a push failed half-way: {type(exc).__name__}: {exc}"
                if isinstance(exc, Exception):
                    self._check(exc)
                raise
            self._clock.advance(push.spans)
            self._watermarks.update(push.watermarks)
            self.totals.add(stats)
            self.samples += push.samples
            self.watermark = max(self.watermark, push.watermark)
            if self.mirror is not None:
                self.mirror.record(push)
            self._lock.notify_all()
            return Pushed(outcome, {}, stats)

    def _apply(self, push: Push) -> PushStats:
        stats = PushStats()
        if not push.samples:
            return stats
        for settings, table, update in zip(self.spec.tables, self.tables, push.updates, strict=True):
            if len(update.keys):
                done = table.push(*update)
                stats.applied += done.applied
                stats.unadmitted += done.unadmitted
                stats.evicted += done.evicted
                self._full.note(settings["name"], done.evicted)
                stats.non_finite_rows += len(done.non_finite)
            if settings["expire_after"]:
                visits = max(_MIN_EXPIRY_VISITS, _EXPIRY_VISITS * len(update.keys))
                stats.expired += table.expire(push.watermark, visits)
        stats.non_finite_dense += not self.dense.apply(push.dense_gradient)
        if len(push.statistics_change):
            self.statistics.apply(-push.statistics_change)
        return stats

    def clock(self) -> dict[int, int]:
        """Offset of the first sample that has not been learned, by partition."""
        with self._lock:
            return self._clock.read()

    def stand(self) -> Stand:
        """The clock, and the watermarks by partition as of it."""
        with self._lock:
            return Stand(self._clock.read(), dict(self._watermarks))

    def resume(self, stand: Stand, samples: int = 0, watermark: int = 0) -> None:
        """Takes over where a checkpoint stood, whose rows have been loaded."""
        with self._lock:
            self._clock = VectorClock(stand.clock)
            self._watermarks = dict(stand.watermarks)
            self.samples, self.watermark = samples, watermark

    @contextmanager
    def still(self) -> Iterator[None]:
        """Nothing is pushed while within."""
        with self._lock:
            yield

    def retire(self, why: str) -> None:
        """From now on nothing is pulled, pushed or saved; who tries is told why."""
        with self._lock:
            self._retired = why
            self._gate.open()
            self._lock.notify_all()

    def inspect(self, table: str, key: int) -> Row | None:
        """What is known of a row; None: there is none here.

        Raises:
            ShardRefused: there is no such table.
        """
        names = [one["name"] for one in self.spec.tables]
        if table not in names:
            raise ShardRefused(f"there is no table {table!r}; tables are {', '.join(names)}", "mismatch")
        found, counts, seen = self.tables[names.index(table)].lookup(np.array([key], np.uint64))
        return Row(int(counts[0]), int(seen[0])) if found[0] else None

    def freeze(self, patience: float) -> dict[int, int]:
        """Holds pushes back until `cut`, for at most `patience` seconds, and says where the clock stands."""
        with self._lock:
            self._check()
            clock = self._clock.read()
            self._gate.close(clock, time.monotonic() + patience)
            return clock

    def cut(self, target: Clock, patience: float, mark: Callable[[], None]) -> tuple[dict[int, int], bool]:
        """Lets those pushes through that lead to `target`, calls `mark` there and then lets all through.

        Args:
            target: the clock at which to cut.
            patience: seconds to wait for it; then, and if the clock is past it, the cut is made where the clock stands.
            mark: notes the moment; nothing is pushed meanwhile.

        Returns:
            The clock of the cut, and whether it is the target.
        """
        deadline = time.monotonic() + patience
        with self._lock:
            self._gate.close(target, deadline)
            self._lock.notify_all()
            try:
                while _before(self._clock.read(), target) and time.monotonic() < deadline:
                    self._lock.wait(deadline - time.monotonic())
                self._check()  # rows that are ahead of the clock would be so for good
                mark()
                clock = self._clock.read()
                return clock, _same(clock, target)
            finally:
                self._gate.open()
                self._lock.notify_all()

    def _check(self, cause: Exception | None = None) -> None:
        if self._retired:
            raise ShardUnavailable(f"shard {self.index} is not here any more: {self._retired}")
        if self._broken:
            raise ShardBroken(f"shard {self.index} must be restarted from a checkpoint: {self._broken}") from cause


def _before(clock: Clock, target: Clock) -> bool:
    """Whether a clock can still come to the target."""
    return not _same(clock, target) and all(at <= target.get(partition, 0) for partition, at in clock.items())


def _same(a: Clock, b: Clock) -> bool:
    return all(a.get(p, 0) == b.get(p, 0) for p in {*a, *b})
