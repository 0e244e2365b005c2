"""Workers: those that a shard knows, how far each is, and who has not been heard of for too long."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from streamtrain.errors import ShardRefused, ShardUnavailable
from streamtrain.ps.shard import Shard


class _Worker:
    def __init__(self, finished: int, heard: float) -> None:
        self.finished = finished
        self.heard = heard
        self.parked = False
        self.waiting = 0  # calls of it that wait here: it is alive then, however long they take


class Workers:
    """Who takes part, how far each is, and who has not been heard of for too long.

    Not thread-safe: its owner holds a lock.

    Args:
        lease: seconds of silence after which a worker that others wait for is given up.
        now: monotonic seconds.
    """

    def __init__(self, lease: float, now: Callable[[], float]) -> None:
        self._workers: dict[str, _Worker] = {}
        self._lease = lease
        self._now = now

    def __len__(self) -> int:
        return len(self._workers)

    def join(self, worker: str, progress: int | None) -> int:
        """As of Consistency; who is back loses nothing."""
        if progress is None:
            progress = min((one.finished for one in self._workers.values() if not one.parked), default=0)
        self._workers[worker] = _Worker(progress, self._now())
        return progress

    def leave(self, worker: str) -> None:
        """Forgets a worker."""
        self._workers.pop(worker, None)

    def park(self, worker: str) -> None:
        """Sets a worker aside until it is active again."""
        self._of(worker).parked = True

    def heard(self, worker: str) -> None:
        """Notes that a worker is alive; one that is gone is ignored, and told when it pulls or pushes."""
        if worker in self._workers:
            self._workers[worker].heard = self._now()

    def active(self, worker: str) -> _Worker:
        """A worker that takes part from now on; one that was parked starts where the slowest one is."""
        one = self._of(worker)
        one.heard = self._now()
        if one.parked:
            one.finished = max(one.finished, min((o.finished for o in self._active()), default=0))
            one.parked = False
        return one

    def finish(self, worker: str) -> None:
        """Notes that a worker has finished a batch; one that is gone is ignored."""
        if worker in self._workers:
            self._workers[worker].finished += 1

    def slowest(self) -> int:
        """Batches that all active workers have finished."""
        return min((one.finished for one in self._active()), default=0)

    def names(self) -> set[str]:
        """The active workers."""
        return {name for name, one in self._workers.items() if not one.parked}

    def expire(self, names: Sequence[str]) -> bool:
        """Gives up those of the workers that have been silent for a lease; says whether there were any."""
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
        """While within, the worker is known to be alive."""
        one = self._of(worker)
        one.waiting += 1
        try:
            yield
        finally:
            one.waiting -= 1
            one.heard = self._now()

    def _silence(self, worker: str) -> float:
        one = self._workers.get(worker)
        return 0.0 if one is None or one.waiting else self._now() - one.heard

    def _of(self, worker: str) -> _Worker:
        if worker not in self._workers:
            raise ShardUnavailable(f"worker {worker!r} is not known here: its lease has ended; join again")
        return self._workers[worker]

    def _active(self) -> list[_Worker]:
        return [one for one in self._workers.values() if not one.parked]


class Together:
    """What Bounded and Bulk share: the workers, under one lock."""

    def __init__(self, shard: Shard, lease: float, now: Callable[[], float]) -> None:
        self._shard = shard
        self._workers = Workers(lease, now)
        self._lease = lease
        self._now = now
        self._lock = threading.Condition()

    def join(self, worker: str, progress: int | None) -> int:
        """See Consistency."""
        with self._lock:
            progress = self._workers.join(worker, progress)
            self._changed()
            return progress

    def leave(self, worker: str) -> None:
        """See Consistency."""
        with self._lock:
            self._workers.leave(worker)
            self._changed()

    def park(self, worker: str) -> None:
        """See Consistency."""
        with self._lock:
            self._workers.park(worker)
            self._changed()

    def beat(self, worker: str) -> None:
        """See Consistency."""
        with self._lock:
            self._workers.heard(worker)

    def _changed(self) -> None:
        """Something happened that others may wait for. The lock is held."""
        self._lock.notify_all()

    def _wait(self, worker: str, patience: float, ready: Callable[[], bool], awaited: Callable[[], list[str]]) -> bool:
        """Waits for `ready`, giving up those of the awaited workers whose leases end. The lock is held."""
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
    """A worker that is too far ahead of itself would wait for itself."""
    if ahead > most:
        raise ShardRefused(f"the worker has pulled {ahead} batches ahead; {why} allows {most}: lower its pace.ahead")
