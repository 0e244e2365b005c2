"""Checkpoints of a whole cluster: all shards are cut at one clock, and written while training goes on."""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from streamtrain.errors import CheckpointCorrupt, CheckpointError, ShardError, StreamtrainError
from streamtrain.periodic import Backoff, FailureLog, PeriodicTask
from streamtrain.ps.clock import latest
from streamtrain.ps.nodes.shards import Control
from streamtrain.ps.rpc import wire
from streamtrain.store.checkpoint.checkpoint import ShardFiles, commit
from streamtrain.store.checkpoint.epochs import CheckpointChain, Epochs
from streamtrain.store.checkpoint.manifest import EpochKind

logger = logging.getLogger(__name__)

_LONGEST = 10  # times full_every deltas

T = TypeVar("T")


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint that was taken.

    Attributes:
        epoch: its number.
        kind: "full", or "delta": what changed since the epoch before.
        aligned: whether all shards were cut at one clock; only then can it be restored to another number of shards.
        pause_ms: for how long pushes were held back, on the shard where that was longest.
        seconds: how long all of it took.
    """

    epoch: int
    kind: str
    aligned: bool
    pause_ms: float
    seconds: float


class Saved(NamedTuple):
    """A checkpoint that exists, whichever process took it.

    Attributes:
        epoch: its number.
        at: when it was complete, seconds since the epoch; None: it does not say.
    """

    epoch: int
    at: float | None


class Checkpointer:
    """Takes checkpoints of all shards.

    Args:
        controls: of all shards, in order.
        epochs: where checkpoints go.
        keep: how many are kept at least.
        full_every: deltas after which the next one is full, if they have as many rows as that would: before, reading
            them takes less than writing it. 0: every one is full. At the latest, after ten times as many.
    """

    def __init__(self, controls: Sequence[Control], epochs: Epochs, *, keep: int = 3, full_every: int = 10) -> None:
        self._controls = controls
        self._epochs = epochs
        self._keep = keep
        self._full_every = full_every
        self._saved: list[dict[int, int]] | None = None

    def take(self, *, full: bool = False, delta: bool = False, hold: float = 0.0) -> CheckpointInfo:
        """Takes a checkpoint.

        1. Every shard holds back pushes and tells its clock.
        2. The latest of these clocks is where all are cut: a push that one shard has applied is on its way to the
           others, which let it through and cut there. From then on all train again.
        3. Every shard writes its part. 4. The manifest makes a checkpoint of the parts. 5. Old ones are deleted, unless
           pushes are held back meanwhile.

        Args:
            full: write all rows, also where those that changed would do.
            delta: write those that changed, if that can be, also where a full one is due.
            hold: seconds for which pushes after it are held back nevertheless; see `release`.

        Raises:
            ShardError: a shard cannot be reached or is empty. No checkpoint, no harm.
            CheckpointError: a shard cannot write. The checkpoints before stay as they are.
        """
        began = time.monotonic()
        with ThreadPoolExecutor(max(len(self._controls), 1)) as pool:

            def of_all(ask: Callable[[Control], T]) -> list[T]:
                return list(pool.map(ask, self._controls))

            statuses = of_all(lambda control: control.status())
            for index, (control, status) in enumerate(zip(self._controls, statuses, strict=True)):
                if not status.ready or status.run != statuses[0].run:
                    raise ShardError(
                        f"{control.target} is {'of another run' if status.ready else 'empty'}: nothing to save"
                    )
                if (status.shard, status.shards) != (index, len(statuses)):
                    raise ShardError(
                        f"{control.target} is shard {status.shard} of {status.shards}, not {index} of {len(statuses)}: "
                        "its rows are not those of this cluster's shard"
                    )
            # All that may take long comes before pushes are held back.
            epoch, newest = self._epochs.next(), None if full else self._base(at_any_length=delta)
            frozen = of_all(lambda control: control.freeze())
            target = latest(one.clock for one in frozen)
            base = newest if newest and {one.written for one in frozen} == {newest.epoch} else None
            if base and any(one.digest not in ("", base.part_digest(i)) for i, one in enumerate(frozen)):
                logger.warning(
                    "epoch %d is not the one that the shards have written; the next checkpoint is full", base.epoch
                )
                base = None
            cuts = of_all(lambda control: control.cut(epoch, target, base is None, hold))
            parts: list[ShardFiles] = [json.loads(part) for part in of_all(lambda control: control.write(epoch))]
        clocks = [{int(partition): at for partition, at in part["about"]["clock"].items()} for part in parts]
        aligned = all(clock == clocks[0] for clock in clocks)
        kind: EpochKind = "full" if base is None else "delta"
        about = {**_about(statuses[0]), "aligned": aligned, "time": time.time()}
        named: Any = {"base": base.epoch, "base_digest": base.digest} if base else {}
        commit(self._epochs.directory(epoch), about, parts, kind=kind, **named)
        self._saved = clocks
        if not hold:
            self.retain()
        pause = max(cut.pause_ms for cut in cuts)
        return CheckpointInfo(epoch, kind, aligned, pause, time.monotonic() - began)

    def retain(self) -> None:
        """Deletes old checkpoints; raises CheckpointError if that cannot be."""
        self._epochs.retain(self._keep)

    def release(self) -> None:
        """Ends the hold of `take` soon: shards let pushes through again once no cut follows."""
        for control in self._controls:
            with suppress(ShardError):
                control.freeze()

    def newest(self) -> Saved | None:
        """The newest checkpoint there; None: there is none.

        Raises:
            CheckpointError: it is out of reach, or damaged.
        """
        newest = max(self._epochs.numbers(), default=None)
        if newest is None:
            return None
        at = self._epochs.open(newest).about.get("time")
        return Saved(newest, at if isinstance(at, int | float) else None)

    def changed(self) -> bool:
        """Whether anything has been learned since the last checkpoint; the first one is always due.

        Raises:
            ShardError: a shard cannot be reached.
            CheckpointError: the last checkpoint is out of reach.
        """
        statuses = [control.status() for control in self._controls]
        if self._saved is None:
            self._saved = self._found(statuses)
        return [wire.decode_clock(status.clock) for status in statuses] != self._saved

    def _found(self, statuses: Sequence[Any]) -> list[dict[int, int]] | None:
        """Where the shards stand by the newest epoch, which another process may have taken; None: it is not theirs."""
        newest = max(self._epochs.numbers(), default=None)
        if newest is None or {status.epoch for status in statuses} != {newest}:
            return None
        try:
            shards = self._epochs.open(newest).shards
        except CheckpointCorrupt:  # reported when the next one is taken
            return None
        return [{int(partition): at for partition, at in shard["clock"].items()} for shard in shards]

    def _base(self, *, at_any_length: bool) -> CheckpointChain | None:
        """What a delta could build on: the newest epoch, if all shards have written it. None: a full one is due."""
        newest = max(self._epochs.numbers(), default=None)
        if newest is None:
            return None
        try:
            chain = self._epochs.open(newest)
        except CheckpointCorrupt as exc:
            logger.warning("%s; the next checkpoint is full", exc)
            return None
        return chain if at_any_length or not self._is_full_due(chain) else None

    def _is_full_due(self, chain: CheckpointChain) -> bool:
        deltas = len(chain.epochs) - 1
        changed, rows = chain.changed_row_count, sum(chain.first_row_counts.values())
        return deltas >= self._full_every * (1 if changed >= rows else _LONGEST)


def _about(status: Any) -> dict[str, Any]:
    return {
        "run": status.run,
        "start": {str(partition): at for partition, at in wire.decode_clock(status.start).items()},
        "topic": status.topic,
        "spec": status.spec,
    }


class CheckpointSchedule:
    """Takes checkpoints at intervals, in a thread of its own, and when it is asked to.

    Args:
        checkpointer: what takes them; used here only.
        every: seconds from one to the next.
        at_end: whether `stop` takes a last one, if anything has been learned since.
        count: called with "checkpoints_taken" or "checkpoints_failed" for each.

    Attributes:
        taken: how many there are.
        failed: how many could not be taken; why is logged.
        last: the one that was taken last, here or before; None: it is not known.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        every: float,
        *,
        at_end: bool = False,
        count: Callable[[str], object] = lambda name: None,
    ) -> None:
        self._checkpointer = checkpointer
        self._every = every
        self._at_end = at_end
        self._count = count
        self._failures = FailureLog()
        self._lock = threading.Lock()  # who takes one
        backoff = Backoff(every, every)
        self._task = PeriodicTask("checkpoints", self._run, every, backoff=backoff, observe=self._observe)
        self._has_begun = False
        self.start = self._task.start
        self.taken = 0
        self.failed = 0
        self.last: Saved | None = None

    def stop(self) -> None:
        """Ends, after the checkpoint that is being taken."""
        self._task.close()
        if self._at_end:
            self._has_begun = True
            self._task.run_once()

    def now(self, *, full: bool = False, delta: bool = False) -> CheckpointInfo:
        """Takes one, after the one that is being taken; see `Checkpointer.take`."""
        with self._lock:
            return self._take(full=full, delta=delta)

    @contextmanager
    def held(self, seconds: float) -> Iterator[CheckpointInfo]:
        """Takes a delta after which pushes are held back for so long, or until the block fails; no other one within it.

        Raises:
            ShardError: the shards were not cut at one clock; or the errors of `Checkpointer.take`.
        """
        with self._lock:
            try:
                taken = self._take(delta=True, hold=seconds)
                if not taken.aligned:
                    raise ShardError("the shards could not be cut at one clock; retry later")
                yield taken
            except BaseException:
                self._checkpointer.release()
                raise
            try:
                self._checkpointer.retain()
            except CheckpointError as exc:  # what the block did is done
                logger.warning("old checkpoints could not be deleted, and the next one tries again: %s", exc)

    def _take(self, *, full: bool = False, delta: bool = False, hold: float = 0.0) -> CheckpointInfo:
        taken = self._checkpointer.take(full=full, delta=delta, hold=hold)
        self.taken += 1
        self._count("checkpoints_taken")
        if self._failures.end():
            logger.info("checkpoints succeed again")
        self.last = Saved(taken.epoch, time.time())
        logger.info(
            "checkpoint %d committed (%s, %s, paused %.1f ms, took %.2f s)",
            *(
                taken.epoch,
                taken.kind,
                "aligned" if taken.aligned else "not aligned",
                taken.pause_ms,
                taken.seconds,
            ),
        )
        return taken

    def _run(self) -> float:
        began = time.monotonic()
        if not self._has_begun:
            self._has_begun = True
            self._find()
        elif self._checkpointer.changed():
            self.now()
        return max(began + self._every - time.monotonic(), 0)

    def _find(self) -> None:
        """The checkpoint that was taken before this process began."""
        with self._lock:
            try:
                self.last = self.last or self._checkpointer.newest()
            except StreamtrainError as exc:
                logger.warning("reading the newest checkpoint failed: %s", exc)

    def _observe(self, error: Exception | None) -> None:
        if error is None:
            return
        self.failed += 1
        self._count("checkpoints_failed")
        if isinstance(error, StreamtrainError) and (line := self._failures.line(str(error), type(error).__name__)):
            level = logging.ERROR if isinstance(error, CheckpointError) else logging.WARNING
            logger.log(level, "no checkpoint: %s", line)
