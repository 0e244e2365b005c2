"""Session: one worker's requests to one shard; the same interface for a local shard and for one behind gRPC."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from streamtrain.model.spec import Rates
from streamtrain.ps.consistency import Consistency
from streamtrain.ps.push import Floats, Push, PushResult
from streamtrain.ps.shard import Shard

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")

_PATIENCE = 1.0  # seconds of one wait; a local session waits in slices so that the program can be interrupted


class Pending(Protocol[T_co]):
    """A reply that may not have arrived yet."""

    def result(self) -> T_co:
        """Waits for the reply.

        Raises:
            ShardError: the shard refuses the request, or stays unreachable for too long.
        """


@dataclass
class StateBuffers:
    """Output buffers for the optimizer state that is pulled along with a batch.

    Attributes:
        dims: width of the embedding by table; the floats of a row after it are optimizer state.
        awaited: by table uint8 [n], occurrences that a key still needs before its gradients are applied.
        slots: float32 [slots, slice], optimizer slots of the dense slice.
        steps: step count of the dense optimizer.
    """

    dims: Sequence[int]
    awaited: Sequence[NDArray[np.uint8]]
    slots: Floats
    steps: float = 0.0


@dataclass
class PullBuffers:
    """Output buffers for a pull, all float32 and contiguous.

    Attributes:
        rows: by table, [n, dim]; with optimizer state [n, dim + state].
        dense: the shard's dense slice.
        statistics: the shard's slice of the statistics.
        state: buffers for the remaining optimizer state; None: do not pull it.
        rates: output, the learning rates in force at the shard; None: it is of an earlier release.
        learned: output, samples that the shard has learned; None: it is of an earlier release.
    """

    rows: Sequence[Floats]
    dense: Floats
    statistics: Floats
    state: StateBuffers | None = None
    rates: Rates | None = None
    learned: int | None = None


class PullSource(Protocol):
    """A shard that can be read."""

    def pull(self, keys: Sequence[NDArray[np.uint64]], into: PullBuffers, ahead: int) -> Pending[None]:
        """Reads rows and the dense slice.

        Args:
            keys: by table uint64 [n].
            into: output buffers, filled once the reply has arrived.
            ahead: batches that are pulled and not pushed yet.
        """


class Session(PullSource, Protocol):
    """One worker's session with one shard. Used by one thread, except for `beat`.

    Requests are processed in order. Several may be in flight; their results must be requested in the same order.
    """

    reconnects: int
    """Number of reconnects. After one, the shard's clock may differ from before."""

    away: bool
    """Whether the shard is unreachable at the moment."""

    def join(self, progress: int | None) -> int:
        """Opens the session; see `Consistency.join`."""

    def push(self, push: Push) -> Pending[PushResult]:
        """Sends gradients. Repeating a push is safe: see clock.py."""

    def park(self, idle: Collection[int] = ()) -> None:
        """Stops others from waiting for this worker, which has no data, until it pulls or pushes again.

        Args:
            idle: partitions that are read to the end.
        """

    def beat(self) -> None:
        """Sends a heartbeat. Never fails or blocks."""

    def close(self) -> None:
        """Closes the session. May be called twice."""


class Ready(Generic[T]):
    """A reply that has arrived."""

    def __init__(self, value: T) -> None:
        self._value = value

    def result(self) -> T:
        return self._value


class _Deferred(Generic[T]):
    def __init__(self, ask: Callable[[float], T | None]) -> None:
        self._ask = ask

    def result(self) -> T:
        while (answer := self._ask(_PATIENCE)) is None:
            continue
        return answer


class LocalSession:
    """A session with a shard in the same process.

    Args:
        consistency: its consistency mode.
    """

    reconnects = 0
    away = False

    def __init__(self, shard: Shard, consistency: Consistency, worker: str) -> None:
        self._shard = shard
        self._consistency = consistency
        self._worker = worker

    def join(self, progress: int | None) -> int:
        return self._consistency.join(self._worker, progress)

    def pull(self, keys: Sequence[NDArray[np.uint64]], into: PullBuffers, ahead: int) -> Pending[None]:
        while not self._consistency.pull(self._worker, ahead, _PATIENCE):
            continue
        into.rates, into.learned = self._shard.rates, self._shard.samples
        if into.state is None:
            self._shard.pull_rows(keys, into.rows)
            self._shard.pull_dense(into.dense, into.statistics)
        else:
            self._shard.pull_state(keys, into.rows, into.state.awaited)
            into.state.steps = self._shard.pull_dense_state(into.dense, into.state.slots, into.statistics)
        return Ready(None)

    def push(self, push: Push) -> Pending[PushResult]:
        return _Deferred(self._consistency.push(self._worker, push).result)

    def park(self, idle: Collection[int] = ()) -> None:
        self._consistency.park(self._worker)
        self._shard.idle(idle)

    def beat(self) -> None:
        self._consistency.beat(self._worker)

    def close(self) -> None:
        self._consistency.leave(self._worker)
