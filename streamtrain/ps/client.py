"""Client: pulls and pushes a batch's rows and dense parameters across all shards."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamtrain._core import Plan, aligned_floats
from streamtrain.model.bad_samples import Refusals
from streamtrain.model.spec import Rates, Spec, shard_slice
from streamtrain.ps.clock import PushOutcome, Span
from streamtrain.ps.push import DenseChange, Floats, Push, PushResult, PushStats, RowUpdate
from streamtrain.ps.session import Pending, PullBuffers, PullSource, Session, StateBuffers

_GRADIENT_LIMIT = 2.0**56  # as in the core's optimizer.h
_KEY_BYTES = 20  # of a row in addition to its floats: key, count, time and number of gradients
_LAST_SECOND = 2**32 - 1  # since the epoch, the last that shards can represent


@dataclass
class PendingPull:
    """A pull in flight; its arrays are filled once `wait` returns.

    Attributes:
        rows: float32, the rows of the plan, flat, in its order; empty if optimizer state was pulled, too.
        parameters: float32 [P + S], the dense parameters, then the statistics.
        slots: float32 [slots, P], state of the dense optimizer, if pulled.
        steps: step count of the dense optimizer, if pulled.
        pending: replies of the shards.
        states: buffers for optimizer state, by shard.
        awaited: by table uint8 [n], occurrences that a key still needs before its gradients are applied, if pulled.
        buffers: of all shards; the learning rates of shard 0 hold for the batch.
        pushed: samples that the worker had pushed when it pulled.
    """

    rows: Floats
    parameters: Floats
    pending: Sequence[Pending[None]]
    buffers: Sequence[PullBuffers]
    pushed: int = 0
    states: Sequence[StateBuffers] = ()
    awaited: Sequence[NDArray[np.uint8]] = ()
    slots: Floats = field(default_factory=lambda: np.empty((0, 0), np.float32))
    steps: float = 0.0

    @property
    def rates(self) -> Rates | None:
        """Learning rates to learn and to push the batch with, once it is here; None: those of the model.

        Those of one shard hold at all of them, so that a batch is learned and applied with the same ones everywhere.
        """
        return self.buffers[0].rates

    def wait(self) -> "PendingPull":
        for reply in self.pending:
            reply.result()
        if self.states:
            self.slots = np.concatenate([state.slots for state in self.states], axis=1)
            self.steps = max(state.steps for state in self.states)  # they differ only while other workers push
            self.states = ()
        return self


class RowGradients(NamedTuple):
    """Row gradients of one table, of a batch trained in several steps; see `RowUpdate`.

    Attributes:
        gradients: float32 [g, dim], row by row in the plan's order.
        counts: uint32 [g].
        repeats: uint32 [n].
    """

    gradients: Floats
    counts: NDArray[np.uint32]
    repeats: NDArray[np.uint32]


@dataclass
class PendingPush:
    """A push to all shards, in flight."""

    pending: Sequence[Pending[PushResult]]

    def wait(self) -> list[PushResult]:
        return [reply.result() for reply in self.pending]


def total_stats(pushed: Sequence[PushResult]) -> PushStats:
    """Counts of gradients over all shards."""
    stats = PushStats()
    for result in pushed:
        stats.add(result.stats)
    return stats


class ShardReader:
    """Scatters pulls over all shards and gathers the replies in the plan's order. Used by one thread.

    Args:
        sources: all shards, in order of their index.
        spec: what they hold.

    Attributes:
        most_row_bytes: largest row of any table, with its key and optimizer state.
    """

    def __init__(self, sources: Sequence[PullSource], spec: Spec) -> None:
        self._sources = sources
        self._dims, self._state_sizes = spec.dims, spec.state_sizes
        self.most_row_bytes = max(map(self._row_bytes, range(len(self._dims))), default=0)
        self._dense_size, self._statistics_size, self._slots = spec.dense_size, spec.statistics_size, spec.dense_slots
        count = len(sources)
        self._slices = [shard_slice(self._dense_size, s, count) for s in range(count)]
        self._statistics_slices = [shard_slice(self._statistics_size, s, count) for s in range(count)]

    def pull(self, plan: Plan, ahead: int = 0, with_state: Sequence[Floats] | None = None) -> PendingPull:
        """Requests the rows of a plan and all parameters.

        Args:
            plan: the batch's plan.
            ahead: batches that are pulled and not pushed yet.
            with_state: buffers for rows with optimizer state, by table float32 [n, dim + state]; None: pull no state.
        """
        rows = np.empty(0 if with_state is not None else plan.row_starts[-1], np.float32)
        by_table = self._by_table(plan, rows) if with_state is None else with_state
        parameters = aligned_floats(self._dense_size + self._statistics_size)
        dense, statistics = parameters[: self._dense_size], parameters[self._dense_size :]
        keys = [plan.keys(t) for t in range(len(self._dims))]
        awaited = [] if with_state is None else [np.zeros(len(of_table), np.uint8) for of_table in keys]
        pending, states, buffers = [], [], []
        for s, (source, parts) in enumerate(zip(self._sources, self._parts(plan), strict=True)):
            into = PullBuffers(
                [r[part] for r, part in zip(by_table, parts, strict=True)],
                dense[self._slices[s]],
                statistics[self._statistics_slices[s]],
            )
            buffers.append(into)
            if with_state is not None:
                slots = np.empty((self._slots, len(into.dense)), np.float32)
                into.state = StateBuffers(self._dims, [a[part] for a, part in zip(awaited, parts, strict=True)], slots)
                states.append(into.state)
            pending.append(source.pull([k[part] for k, part in zip(keys, parts, strict=True)], into, ahead))
        return PendingPull(rows, parameters, pending, buffers, states=states, awaited=awaited)

    def nbytes(self, plan: Plan, *, in_steps: bool = False) -> int:
        """Upper bound of the bytes of rows or gradients that a plan exchanges with any one shard.

        Args:
            plan: the batch's plan.
            in_steps: whether the batch is trained in several steps. Rows then come with optimizer state, and each may
                have a gradient in every step in which it occurs.
        """
        of_shards = np.zeros(len(self._sources), np.int64)
        for t, dim in enumerate(self._dims):
            starts = plan.shard_starts(t)
            rows = np.diff(starts)
            if not in_steps:
                of_shards += rows * (_KEY_BYTES + 4 * dim)
                continue
            occurrences = np.concatenate([[0], np.cumsum(plan.counts(t), dtype=np.int64)])
            gradients = np.diff(occurrences[starts]) * (_KEY_BYTES + 4 * dim)
            of_shards += np.maximum(rows * self._row_bytes(t), gradients)
        return int(of_shards.max())

    def _row_bytes(self, t: int) -> int:
        return _KEY_BYTES + 4 * (self._dims[t] + self._state_sizes[t])

    def _by_table(self, plan: Plan, flat: Floats) -> list[Floats]:
        starts = plan.row_starts
        return [
            flat[start:stop].reshape(-1, dim) for start, stop, dim in zip(starts, starts[1:], self._dims, strict=False)
        ]

    def _parts(self, plan: Plan) -> list[list[slice]]:
        """The rows of each shard, by shard, then by table."""
        bounds = [plan.shard_starts(t).tolist() for t in range(len(self._dims))]
        return [[slice(starts[s], starts[s + 1]) for starts in bounds] for s in range(len(self._sources))]


class Client(ShardReader):
    """A worker's pulls and pushes. Used by one thread.

    Args:
        sessions: with all shards, in order of their index.
        spec: what they hold.

    Attributes:
        spec: as given.
    """

    def __init__(self, sessions: Sequence[Session], spec: Spec) -> None:
        super().__init__(sessions, spec)
        self.spec = spec
        self._sessions = sessions
        self._pushed = 0  # samples

    def join(self, progress: int | None = None) -> int:
        """Joins all shards, with the same progress at each."""
        for session in self._sessions:
            progress = session.join(progress)
        return progress or 0

    def pull(self, plan: Plan, ahead: int = 0, with_state: Sequence[Floats] | None = None) -> PendingPull:
        pulling = super().pull(plan, ahead, with_state)
        pulling.pushed = self._pushed
        return pulling

    def push(
        self,
        plan: Plan,
        gradients: Floats | Sequence[RowGradients],
        dense: Floats | DenseChange,
        statistics_change: Floats,
        *,
        spans: Sequence[Span],
        watermark: int,
        watermarks: Mapping[int, float] = {},
        idle: Collection[int] = (),
        refusals: Mapping[int, Refusals] = {},
        predictions: Mapping[int, bytes] = {},
        pulled: PendingPull | None = None,
    ) -> PendingPush:
        """Sends every shard its part of a batch's gradients.

        Args:
            plan: the batch's plan.
            gradients: flat, as returned by `Plan.unpool`; or by table, if the batch was trained in several steps.
            dense: the gradient float32 [P], or the change made by several steps.
            statistics_change: float32 [S].
            spans: the offsets that the batch covers.
            watermark: latest event time, in seconds; like the times of rows it is capped in the year 2106.
            watermarks: latest event time of each span's partition, up to its end; shards keep them with their clocks.
            idle: other partitions that the worker has read to the end; they do not delay the expiry of rows.
            refusals: state of the bad-sample guard, by partition.
            predictions: predictions in blocks that are not stored yet, by partition.
            pulled: what the batch was learned from, with its learning rates. If other workers have pushed since, a
                change made by several steps is averaged with theirs (`Push.averaged`). None: learning rates of the
                shards, and no average.
        """
        if len(self._sessions) > 1:
            dense, statistics_change = _usable_or_none(dense), _whole_or_none(statistics_change)
        by_table: list[Floats | RowGradients] = []
        if isinstance(gradients, np.ndarray):
            by_table += self._by_table(plan, gradients)
        else:
            by_table += gradients
        parts = self._parts(plan)
        updates = [_updates_of(plan, t, of_table, [p[t] for p in parts]) for t, of_table in enumerate(by_table)]
        watermark = min(watermark, _LAST_SECOND)
        pending = []
        for s, session in enumerate(self._sessions):
            of_slice = dense.part(self._slices[s]) if isinstance(dense, DenseChange) else dense[self._slices[s]]
            statistics = statistics_change[self._statistics_slices[s]]
            mine = [of_table[s] for of_table in updates]
            push = Push(
                *(spans, plan.samples, mine, of_slice, statistics, watermark),
                watermarks=watermarks,
                idle=idle,
                refusals=refusals,
                predictions=predictions,
                rates=pulled.rates if pulled else None,
                seen=self._seen(pulled, s) if pulled else None,
            )
            pending.append(session.push(push))
        self._pushed += plan.samples
        return PendingPush(pending)

    def _seen(self, pulled: PendingPull, shard: int) -> int | None:
        """See `Push.seen`."""
        learned = pulled.buffers[shard].learned
        return None if learned is None else learned + self._pushed - pulled.pushed

    def skip(
        self,
        spans: Sequence[Span],
        watermark: int,
        watermarks: Mapping[int, float] = {},
        refusals: Mapping[int, Refusals] = {},
        predictions: Mapping[int, bytes] = {},
    ) -> PendingPush:
        """Advances the clocks over offsets without samples to learn from."""
        none = np.empty(0, np.float32)
        keys, words = np.empty(0, np.uint64), np.empty(0, np.uint32)
        updates = [RowUpdate(keys, np.empty((0, dim), np.float32), words, words) for dim in self._dims]
        push = Push(
            *(spans, 0, updates, none, none, min(watermark, _LAST_SECOND)),
            watermarks=watermarks,
            refusals=refusals,
            predictions=predictions,
        )
        return PendingPush([session.push(push) for session in self._sessions])

    @property
    def reconnects(self) -> int:
        """Reconnects to all shards. After one, a shard's clock may differ from before."""
        return sum(session.reconnects for session in self._sessions)

    @property
    def away(self) -> int:
        """Number of shards that are unreachable at the moment. Thread-safe."""
        return sum(session.away for session in self._sessions)

    def park(self, idle: Collection[int] = ()) -> None:
        """Stops other workers from waiting for this one, which has no data at the moment.

        Args:
            idle: partitions that are read to the end.
        """
        for session in self._sessions:
            session.park(idle)

    def beat(self) -> None:
        """Sends a heartbeat to all shards. Thread-safe."""
        for session in self._sessions:
            session.beat()

    def close(self) -> None:
        for session in self._sessions:
            session.close()


def _updates_of(plan: Plan, t: int, of: Floats | RowGradients, parts: Sequence[slice]) -> list[RowUpdate]:
    """The updates of a table, by shard."""
    keys, times = plan.keys(t), plan.times(t)
    if not isinstance(of, RowGradients):
        counts = plan.counts(t)
        return [RowUpdate(keys[part], of[part], counts[part], times[part]) for part in parts]
    ends = np.concatenate([[0], np.cumsum(of.repeats, dtype=np.int64)])
    spans = [slice(ends[part.start], ends[part.stop]) for part in parts]
    return [
        RowUpdate(keys[part], of.gradients[span], of.counts[span], times[part], of.repeats[part])
        for part, span in zip(parts, spans, strict=True)
    ]


def _usable_or_none(dense: Floats | DenseChange) -> Floats | DenseChange:
    if not isinstance(dense, DenseChange):
        return _whole_or_none(dense)
    by = _whole_or_none(dense.by) if np.isfinite(dense.added).all() else np.full_like(dense.by, np.nan)
    return dense._replace(by=by)


def _whole_or_none(vector: Floats) -> Floats:
    """The vector, or all NaN if any of it is unusable: shards check only their slices, and all must decide the same."""
    # max and min rather than max of abs, which would allocate a second vector. With a NaN both are NaN.
    usable = vector.max(initial=0) < _GRADIENT_LIMIT and vector.min(initial=0) > -_GRADIENT_LIMIT
    return vector if usable else np.full_like(vector, np.nan)


def any_rejected(pushed: Sequence[PushResult]) -> bool:
    """Whether any shard has rejected the push."""
    return any(result.outcome is PushOutcome.REJECTED for result in pushed)
