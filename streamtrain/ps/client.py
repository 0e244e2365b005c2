"""Client: pulls and pushes a batch's rows and dense parameters across all shards."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from streamtrain._core import Plan, aligned_floats
from streamtrain.model.spec import Spec, slice_of
from streamtrain.ps.clock import Outcome, Span
from streamtrain.ps.push import Floats, Push, Pushed, PushStats, RowUpdate
from streamtrain.ps.session import Pending, Pulls, Session

_GRADIENT_LIMIT = 2.0**56  # as in the core's optimizer.h
_LAST_SECOND = 2**32 - 1  # that shards can tell, as of the epoch


@dataclass
class Pulled:
    """What a batch needs, once `wait` returns.

    Attributes:
        rows: float32, the rows of the plan, flat, in its order.
        parameters: float32 [P + S], the dense parameters, then the statistics.
    """

    rows: Floats
    parameters: Floats
    pending: Sequence[Pending[None]]

    def wait(self) -> "Pulled":
        """Waits for all shards."""
        for one in self.pending:
            one.result()
        return self


class _Into:
    def __init__(self, rows: Sequence[Floats], dense: Floats, statistics: Floats) -> None:
        self.rows, self.dense, self.statistics = rows, dense, statistics


@dataclass
class Pushing:
    """A push that is under way to all shards."""

    pending: Sequence[Pending[Pushed]]

    def wait(self) -> list[Pushed]:
        """What became of it, by shard."""
        return [one.result() for one in self.pending]


def stats_of(pushed: Sequence[Pushed]) -> PushStats:
    """What became of gradients on all shards."""
    stats = PushStats()
    for one in pushed:
        stats.add(one.stats)
    return stats


class Puller:
    """Scatters pulls over shards, which work on them side by side, and puts their answers in the plan's order.

    Used by one thread.

    Args:
        sources: all shards, in order of their index.
        spec: of the model.
    """

    def __init__(self, sources: Sequence[Pulls], spec: Spec) -> None:
        self._sources = sources
        self._dims = spec.dims
        self._dense_size, self._statistics_size = spec.dense_size, spec.statistics_size
        count = len(sources)
        self._slices = [slice_of(self._dense_size, s, count) for s in range(count)]
        self._statistics_slices = [slice_of(self._statistics_size, s, count) for s in range(count)]

    def pull(self, plan: Plan, ahead: int = 0) -> Pulled:
        """Asks for the rows of a plan and all parameters.

        Args:
            plan: the batch's plan.
            ahead: batches that have been pulled and not been pushed yet.
        """
        rows = np.empty(plan.row_starts[-1], np.float32)
        parameters = aligned_floats(self._dense_size + self._statistics_size)
        dense, statistics = parameters[: self._dense_size], parameters[self._dense_size :]
        by_table = self._by_table(plan, rows)
        keys = [plan.keys(t) for t in range(len(self._dims))]
        pending = []
        for s, (source, parts) in enumerate(zip(self._sources, self._parts(plan), strict=True)):
            into = _Into(
                [r[part] for r, part in zip(by_table, parts, strict=True)],
                dense[self._slices[s]],
                statistics[self._statistics_slices[s]],
            )
            pending.append(source.pull([k[part] for k, part in zip(keys, parts, strict=True)], into, ahead))
        return Pulled(rows, parameters, pending)

    def _by_table(self, plan: Plan, flat: Floats) -> list[Floats]:
        starts = plan.row_starts
        return [
            flat[start:stop].reshape(-1, dim) for start, stop, dim in zip(starts, starts[1:], self._dims, strict=False)
        ]

    def _parts(self, plan: Plan) -> list[list[slice]]:
        """By shard, by table, which rows are its own."""
        bounds = [plan.shard_starts(t).tolist() for t in range(len(self._dims))]
        return [[slice(starts[s], starts[s + 1]) for starts in bounds] for s in range(len(self._sources))]


class Client(Puller):
    """A worker's pulls and pushes. Used by one thread.

    Args:
        sessions: with all shards, in order of their index.
        spec: of the model.
    """

    def __init__(self, sessions: Sequence[Session], spec: Spec) -> None:
        super().__init__(sessions, spec)
        self._sessions = sessions

    def join(self, progress: int | None = None) -> int:
        """Begins with all shards, which count the worker from the same batch on."""
        for session in self._sessions:
            progress = session.join(progress)
        return progress or 0

    def push(
        self,
        plan: Plan,
        gradients: Floats,
        dense_gradient: Floats,
        statistics_change: Floats,
        *,
        spans: Sequence[Span],
        watermark: int,
        watermarks: Mapping[int, float] = {},
    ) -> Pushing:
        """Sends every shard its part of a batch's gradients.

        Args:
            plan: the batch's plan.
            gradients: flat, as `Plan.unpool` gives them.
            dense_gradient: float32 [P].
            statistics_change: float32 [S].
            spans: the offsets that the batch covers.
            watermark: latest event time, in seconds; beyond the year 2105 it is taken for the last that shards know, as
                the times of rows are.
            watermarks: that of each span's partition up to its end; the shards keep them with their clocks.
        """
        if len(self._sessions) > 1:
            dense_gradient, statistics_change = _whole_or_none(dense_gradient), _whole_or_none(statistics_change)
        by_table = self._by_table(plan, gradients)
        columns = [(plan.keys(t), by_table[t], plan.counts(t), plan.times(t)) for t in range(len(self._dims))]
        watermark = min(watermark, _LAST_SECOND)
        pending = []
        for s, (session, parts) in enumerate(zip(self._sessions, self._parts(plan), strict=True)):
            updates = [
                RowUpdate(keys[part], rows[part], counts[part], times[part])
                for (keys, rows, counts, times), part in zip(columns, parts, strict=True)
            ]
            dense, statistics = dense_gradient[self._slices[s]], statistics_change[self._statistics_slices[s]]
            pending.append(session.push(Push(spans, plan.samples, updates, dense, statistics, watermark, watermarks)))
        return Pushing(pending)

    def skip(self, spans: Sequence[Span], watermark: int, watermarks: Mapping[int, float] = {}) -> Pushing:
        """Advances the clocks over offsets that hold nothing to learn from."""
        none = np.empty(0, np.float32)
        keys, words = np.empty(0, np.uint64), np.empty(0, np.uint32)
        updates = [RowUpdate(keys, np.empty((0, dim), np.float32), words, words) for dim in self._dims]
        push = Push(spans, 0, updates, none, none, min(watermark, _LAST_SECOND), watermarks)
        return Pushing([session.push(push) for session in self._sessions])

    @property
    def reconnects(self) -> int:
        """How often a shard had to be reached anew; it may stand elsewhere than before."""
        return sum(session.reconnects for session in self._sessions)

    @property
    def away(self) -> int:
        """How many shards cannot be reached at the moment; may be asked by another thread."""
        return sum(session.away for session in self._sessions)

    def park(self) -> None:
        """Nothing to learn at the moment: other workers do not wait for this one."""
        for session in self._sessions:
            session.park()

    def beat(self) -> None:
        """Says that this worker is alive; may be called from another thread."""
        for session in self._sessions:
            session.beat()

    def close(self) -> None:
        """Ends all sessions."""
        for session in self._sessions:
            session.close()


def _whole_or_none(vector: Floats) -> Floats:
    """A vector that no shard uses unless all can: each judges its slice alone, and cuts must decide nothing."""
    # Not the largest of their sizes: that would be a second vector. Of what has a NaN, both are NaN.
    usable = vector.max(initial=0) < _GRADIENT_LIMIT and vector.min(initial=0) > -_GRADIENT_LIMIT
    return vector if usable else np.full_like(vector, np.nan)


class Heartbeat:
    """Says at intervals that a client's worker is alive, also while it computes. A context manager.

    Args:
        client: whose.
        every: seconds.
    """

    def __init__(self, client: Client, every: float) -> None:
        self._client = client
        self._every = every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            self._client.beat()


def rejected(pushed: Sequence[Pushed]) -> bool:
    """Whether some shard stands elsewhere than the push."""
    return any(one.outcome is Outcome.REJECTED for one in pushed)
