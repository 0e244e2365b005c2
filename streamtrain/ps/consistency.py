"""Consistency modes: how a shard coordinates its workers, their progress and their leases."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from streamtrain.errors import ShardRefused, ShardUnavailable
from streamtrain.ps.clock import PushOutcome
from streamtrain.ps.push import Push, PushResult
from streamtrain.ps.shard import Shard


class _Worker:
    def __init__(self, finished: int, last_seen: float) -> None:
        self.finished = finished
        self.last_seen = last_seen
        self.parked = False
        self.waiting = 0  # blocked calls of this worker; while there are any, its lease does not expire


class Workers:
    """The workers of a shard: their progress and leases.

    Not thread-safe: its owner holds a lock.

    Args:
        lease: seconds without a heartbeat after which a worker that others wait for is removed.
        now: monotonic seconds.
    """

    def __init__(self, lease: float, now: Callable[[], float]) -> None:
        self._workers: dict[str, _Worker] = {}
        self._lease = lease
        self._now = now

    def __len__(self) -> int:
        return len(self._workers)

    def join(self, worker: str, progress: int | None) -> int:
        """See `Consistency.join`. A worker that rejoins keeps its progress."""
        if progress is None:
            progress = min((one.finished for one in self._workers.values() if not one.parked), default=0)
        self._workers[worker] = _Worker(progress, self._now())
        return progress

    def leave(self, worker: str) -> None:
        self._workers.pop(worker, None)

    def park(self, worker: str) -> None:
        """Sets a worker aside until it is active again."""
        self._of(worker).parked = True

    def renew(self, worker: str) -> None:
        """Renews a lease. An unknown worker is ignored here; its next pull or push is refused."""
        if worker in self._workers:
            self._workers[worker].last_seen = self._now()

    def active(self, worker: str) -> _Worker:
        """Returns a worker, marked active; one that was parked continues from the slowest worker's progress."""
        one = self._of(worker)
        one.last_seen = self._now()
        if one.parked:
            one.finished = max(one.finished, min((o.finished for o in self._active()), default=0))
            one.parked = False
        return one

    def finish(self, worker: str) -> None:
        """Counts a finished batch. An unknown worker is ignored."""
        if worker in self._workers:
            self._workers[worker].finished += 1

    def slowest(self) -> int:
        """Batches that all active workers have finished."""
        return min((one.finished for one in self._active()), default=0)

    def names(self) -> set[str]:
        return {name for name, one in self._workers.items() if not one.parked}

    def expire(self, names: Sequence[str]) -> bool:
        """Removes those of `names` whose lease has expired; returns whether there were any."""
        dead = [n for n in names if self._silence(n) > self._lease]
        for name in dead:
            del self._workers[name]
        return bool(dead)

    def slow(self) -> list[str]:
        """The active workers that have finished the fewest batches."""
        least = self.slowest()
        return [name for name, one in self._workers.items() if not one.parked and one.finished == least]

    @contextmanager
    def waiting(self, worker: str) -> Iterator[None]:
        """Context in which the worker's lease does not expire."""
        one = self._of(worker)
        one.waiting += 1
        try:
            yield
        finally:
            one.waiting -= 1
            one.last_seen = self._now()

    def _silence(self, worker: str) -> float:
        one = self._workers.get(worker)
        return 0.0 if one is None or one.waiting else self._now() - one.last_seen

    def _of(self, worker: str) -> _Worker:
        if worker not in self._workers:
            raise ShardUnavailable(f"unknown worker {worker!r}: its lease has expired; join again")
        return self._workers[worker]

    def _active(self) -> list[_Worker]:
        return [one for one in self._workers.values() if not one.parked]


class WorkerBarrier:
    """What Bounded and BulkSynchronous share: the workers, under one lock."""

    def __init__(self, shard: Shard, lease: float, now: Callable[[], float]) -> None:
        self._shard = shard
        self._workers = Workers(lease, now)
        self._lease = lease
        self._now = now
        self._lock = threading.Condition()

    def join(self, worker: str, progress: int | None) -> int:
        with self._lock:
            progress = self._workers.join(worker, progress)
            self._changed()
            return progress

    def leave(self, worker: str) -> None:
        with self._lock:
            self._workers.leave(worker)
            self._changed()

    def park(self, worker: str) -> None:
        with self._lock:
            self._workers.park(worker)
            self._changed()

    def beat(self, worker: str) -> None:
        with self._lock:
            self._workers.renew(worker)

    def _changed(self) -> None:
        """Wakes waiting workers. The lock is held."""
        self._lock.notify_all()

    def _wait(self, worker: str, patience: float, ready: Callable[[], bool], awaited: Callable[[], list[str]]) -> bool:
        """Waits for `ready`, removing awaited workers whose lease expires. The lock is held."""
        with self._workers.waiting(worker):
            deadline = self._now() + patience
            while not ready():
                if self._workers.expire([one for one in awaited() if one != worker]):
                    self._changed()
                    continue
                left = deadline - self._now()
                if left <= 0:
                    return False
                self._lock.wait(min(left, self._lease / 4))
            return True


def check_ahead(ahead: int, most: int, why: str) -> None:
    """Raises ShardRefused if a worker is so far ahead that it would wait for itself."""
    if ahead > most:
        raise ShardRefused(f"the worker has pulled {ahead} batches ahead, but {why} allows {most}: lower worker.ahead")


class PushFuture(Protocol):
    """The result of a push that may have to wait for other workers."""

    def result(self, patience: float) -> PushResult | None:
        """The result; None if it is not available after `patience` seconds."""


class CompletedPush:
    """The result of a push that did not have to wait."""

    def __init__(self, pushed: PushResult) -> None:
        self._pushed = pushed

    def result(self, patience: float) -> PushResult:
        return self._pushed


class Consistency(Protocol):
    """A consistency mode. All methods are thread-safe.

    A worker whose lease has expired is refused with ShardUnavailable; it has to join again.
    """

    def join(self, worker: str, progress: int | None) -> int:
        """Adds a worker, or renews it.

        Args:
            worker: name of the worker.
            progress: batches it has finished; None: a new worker, which starts at the slowest worker's progress.

        Returns:
            The worker's progress.
        """

    def leave(self, worker: str) -> None:
        """Removes a worker. An unknown one is ignored."""

    def park(self, worker: str) -> None:
        """Stops waiting for a worker without data, until it pulls or pushes again."""

    def beat(self, worker: str) -> None:
        """Renews a worker's lease."""

    def pull(self, worker: str, ahead: int, patience: float) -> bool:
        """Waits until a worker may start a batch; False: not within `patience` seconds.

        Args:
            worker: name of the worker.
            ahead: its batches that are pulled and not pushed yet.
            patience: seconds to wait.

        Raises:
            ShardRefused: the mode does not allow a worker to pull that many batches ahead.
        """

    def push(self, worker: str, push: Push) -> PushFuture:
        """Accepts a worker's push, which finishes a batch."""


class Async:
    """Asynchronous: workers do not wait for each other."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def join(self, worker: str, progress: int | None) -> int:
        return progress or 0

    def leave(self, worker: str) -> None:
        pass

    def park(self, worker: str) -> None:
        pass

    def beat(self, worker: str) -> None:
        pass

    def pull(self, worker: str, ahead: int, patience: float) -> bool:
        return True

    def push(self, worker: str, push: Push) -> PushFuture:
        return CompletedPush(self._shard.push(push))


class Bounded(WorkerBarrier):
    """Stale synchronous parallel (SSP).

    Args:
        shard: the shard that is pulled from and pushed to.
        staleness: batches by which a worker may be ahead of the slowest one when it starts a batch.
        lease: seconds without a heartbeat after which a worker counts as dead.
        now: monotonic seconds.
    """

    def __init__(self, shard: Shard, staleness: int, lease: float, now: Callable[[], float]) -> None:
        super().__init__(shard, lease, now)
        self._staleness = staleness

    def pull(self, worker: str, ahead: int, patience: float) -> bool:
        check_ahead(ahead, self._staleness, f"staleness {self._staleness}")
        with self._lock:
            one = self._workers.active(worker)

            def ready() -> bool:
                return one.finished + ahead - self._workers.slowest() <= self._staleness

            return self._wait(worker, patience, ready, self._workers.slow)

    def push(self, worker: str, push: Push) -> PushFuture:
        with self._lock:
            self._workers.active(worker)
        pushed = self._shard.push(push)
        if pushed.outcome is not PushOutcome.REJECTED:
            with self._lock:
                self._workers.finish(worker)
                self._changed()
        return CompletedPush(pushed)
