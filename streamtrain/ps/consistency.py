"""Consistency: how far workers may run apart. Three strategies, one class each, of which Bulk is in bulk.py.

    Async    (ASP)  nobody waits.
    Bounded  (SSP)  a worker starts a batch only while it is at most `staleness` batches ahead of the slowest one.
                    Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", 2013.
    Bulk     (BSP)  all workers learn the same clock; its gradients are averaged over their samples and applied once.

A shard decides alone, by the workers that it knows. A worker counts from its join until it parks (it has nothing to
learn), leaves, or is not heard of for a lease; the others then go on. Waiting is bounded: a call that must wait longer
than its patience says so, and is made again.
"""

from collections.abc import Callable
from typing import Protocol

from streamtrain.ps.clock import Outcome
from streamtrain.ps.push import Push, Pushed
from streamtrain.ps.shard import Shard
from streamtrain.ps.workers import Together, check_ahead


class Pending(Protocol):
    """A push that may have to wait for other workers."""

    def result(self, patience: float) -> Pushed | None:
        """The shard's answer; None if it is not there after `patience` seconds: ask again."""


class Done:
    """A push that did not have to wait."""

    def __init__(self, pushed: Pushed) -> None:
        self._pushed = pushed

    def result(self, patience: float) -> Pushed:
        """The shard's answer."""
        return self._pushed


class Consistency(Protocol):
    """What a strategy decides. Workers are named; all methods may be called from any thread.

    A worker that is not known, as its lease has ended, is refused with ShardUnavailable: it joins again.
    """

    def join(self, worker: str, progress: int | None) -> int:
        """A worker comes, or comes again.

        Args:
            worker: its name.
            progress: batches that it has finished; None: it is new, and starts where the slowest one is.

        Returns:
            The number of batches that it has finished from now on.
        """

    def leave(self, worker: str) -> None:
        """A worker is gone. One that is not known is ignored."""

    def park(self, worker: str) -> None:
        """A worker has nothing to learn; it counts again once it pulls or pushes."""

    def beat(self, worker: str) -> None:
        """A worker is alive."""

    def pull(self, worker: str, ahead: int, patience: float) -> bool:
        """Whether a worker may start a batch; False: not within `patience` seconds, ask again.

        Args:
            worker: its name.
            ahead: its batches that have been pulled and not been pushed yet.
            patience: seconds.

        Raises:
            ShardRefused: the strategy allows no worker to be that far ahead of itself.
        """

    def push(self, worker: str, push: Push) -> Pending:
        """Takes a worker's push, which finishes a batch."""


class Async:
    """Nobody waits for anybody."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def join(self, worker: str, progress: int | None) -> int:
        """See Consistency."""
        return progress or 0

    def leave(self, worker: str) -> None:
        """See Consistency."""

    def park(self, worker: str) -> None:
        """See Consistency."""

    def beat(self, worker: str) -> None:
        """See Consistency."""

    def pull(self, worker: str, ahead: int, patience: float) -> bool:
        """See Consistency."""
        return True

    def push(self, worker: str, push: Push) -> Pending:
        """See Consistency."""
        return Done(self._shard.push(push))


class Bounded(Together):
    """Stale synchronous parallel.

    Args:
        shard: what is pulled from and pushed to.
        staleness: batches that a worker may be ahead of the slowest one when it starts another.
        lease: seconds of silence after which a worker counts as dead.
        now: monotonic seconds.
    """

    def __init__(self, shard: Shard, staleness: int, lease: float, now: Callable[[], float]) -> None:
        super().__init__(shard, lease, now)
        self._staleness = staleness

    def pull(self, worker: str, ahead: int, patience: float) -> bool:
        """See Consistency."""
        check_ahead(ahead, self._staleness, f"staleness {self._staleness}")
        with self._lock:
            one = self._workers.active(worker)

            def ready() -> bool:
                return one.finished + ahead - self._workers.slowest() <= self._staleness

            return self._wait(worker, patience, ready, self._workers.slow)

    def push(self, worker: str, push: Push) -> Pending:
        """See Consistency."""
        with self._lock:
            self._workers.active(worker)
        pushed = self._shard.push(push)
        if pushed.outcome is not Outcome.REJECTED:
            with self._lock:
                self._workers.finish(worker)
                self._changed()
        return Done(pushed)
