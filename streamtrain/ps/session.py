"""Session: one worker's conversation with one shard. The same for a shard in the process and one behind gRPC."""

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from streamtrain.ps.consistency import Consistency
from streamtrain.ps.push import Floats, Push, Pushed
from streamtrain.ps.shard import Shard

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")

_PATIENCE = 1.0  # seconds; in the process, waiting is only cut up so that a program can be interrupted


class Pending(Protocol[T_co]):
    """An answer that is under way."""

    def result(self) -> T_co:
        """Waits for the answer.

        Raises:
            ShardError: the shard refuses, or cannot be reached for too long.
        """


class Into(Protocol):
    """Where the answer to a pull goes, all float32 and contiguous.

    Attributes:
        rows: by table, [n, dim].
        dense: the shard's dense slice.
        statistics: its slice of the statistics.
    """

    rows: Sequence[Floats]
    dense: Floats
    statistics: Floats


class Pulls(Protocol):
    """Reads what a shard has."""

    def pull(self, keys: Sequence[NDArray[np.uint64]], into: Into, ahead: int) -> Pending[None]:
        """Reads rows and the dense slice.

        Args:
            keys: by table uint64 [n].
            into: where they go; filled once the result is there.
            ahead: batches that have been pulled and not been pushed yet.
        """


class Session(Pulls, Protocol):
    """One worker's conversation with one shard; used by one thread, but for `beat`.

    Requests are taken up in their order. Several may be under way; their results are asked for in the same order.
    """

    reconnects: int
    """How often the shard had to be reached anew; it may stand elsewhere than before."""

    away: bool
    """Whether the shard cannot be reached at the moment."""

    def join(self, progress: int | None) -> int:
        """Begins, as `Consistency.join`."""

    def push(self, push: Push) -> Pending[Pushed]:
        """Sends gradients. They may be repeated, by anybody and at any time: see clock.py."""

    def park(self) -> None:
        """Nothing to learn at the moment; nobody waits for this worker until it pulls or pushes again."""

    def beat(self) -> None:
        """Says that the worker is alive. Never fails."""

    def close(self) -> None:
        """Ends; may be called twice."""


class Now(Generic[T]):
    """An answer that is there."""

    def __init__(self, value: T) -> None:
        self._value = value

    def result(self) -> T:
        """The answer."""
        return self._value


class _Later(Generic[T]):
    def __init__(self, ask: Callable[[float], T | None]) -> None:
        self._ask = ask

    def result(self) -> T:
        while (answer := self._ask(_PATIENCE)) is None:
            continue
        return answer


class LocalSession:
    """A session with a shard in the same process.

    Args:
        shard: the shard.
        consistency: its strategy.
        worker: name of the worker.
    """

    reconnects = 0
    away = False

    def __init__(self, shard: Shard, consistency: Consistency, worker: str) -> None:
        self._shard = shard
        self._consistency = consistency
        self._worker = worker

    def join(self, progress: int | None) -> int:
        """See Session."""
        return self._consistency.join(self._worker, progress)

    def pull(self, keys: Sequence[NDArray[np.uint64]], into: Into, ahead: int) -> Pending[None]:
        """See Session."""
        while not self._consistency.pull(self._worker, ahead, _PATIENCE):
            continue
        self._shard.pull_rows(keys, into.rows)
        self._shard.pull_dense(into.dense, into.statistics)
        return Now(None)

    def push(self, push: Push) -> Pending[Pushed]:
        """See Session."""
        return _Later(self._consistency.push(self._worker, push).result)

    def park(self) -> None:
        """See Session."""
        self._consistency.park(self._worker)

    def beat(self) -> None:
        """See Session."""
        self._consistency.beat(self._worker)

    def close(self) -> None:
        """See Session."""
        self._consistency.leave(self._worker)
