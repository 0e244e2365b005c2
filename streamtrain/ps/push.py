"""Push: the update of one shard from one batch, and its result."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamtrain.model.bad_samples import Refusals
from streamtrain.model.spec import Rates, Spec
from streamtrain.ps.clock import PushOutcome, Span

Floats = NDArray[np.float32]


class RowUpdate(NamedTuple):
    """Gradients for rows of one table.

    A batch trained in micro-batches has several gradients per row, which are applied one after another.

    Attributes:
        keys: uint64 [n], unique.
        gradients: float32 [g, dim], key by key; g is n, or the sum of `repeats`.
        counts: uint32 [g], occurrences in each gradient.
        times: uint32 [n], latest event time in seconds.
        repeats: uint32 [n], number of gradients of each key; None: one.
    """

    keys: NDArray[np.uint64]
    gradients: Floats
    counts: NDArray[np.uint32]
    times: NDArray[np.uint32]
    repeats: NDArray[np.uint32] | None = None


class DenseChange(NamedTuple):
    """The effect of several steps on a dense slice: values += by, optimizer slots = decay * slots + added.

    Changes of workers that started from the same state add up, and the optimizer state becomes the same as if they had
    stepped one after the other.

    Attributes:
        by: float32 [slice].
        added: float32 [slots, slice].
        decay: float32 [slots], 0 to 1.
        steps: number of steps.
    """

    by: Floats
    added: Floats
    decay: Floats
    steps: float

    def part(self, of: slice) -> "DenseChange":
        """The change of a part of the slice."""
        return DenseChange(self.by[of], np.ascontiguousarray(self.added[:, of]), self.decay, self.steps)


def change_of_step(
    spec: Spec, values: Floats, slots: Floats, steps: float, *, gradient: Floats, rate: float
) -> DenseChange:
    """The change that one step by a gradient makes of a part of the dense vector.

    Args:
        spec: of the shards.
        values: float32 [n], the weights.
        slots: float32 [slots, n], the optimizer's.
        steps: how many the optimizer has made.
        gradient: float32 [n].
        rate: learning rate.

    Returns:
        The change; NaN if the gradient cannot be applied.
    """
    trial = spec.make_dense(values)
    trial.load(values, slots, steps)
    usable = trial.apply(gradient, rate)
    by = trial.pull() - values if usable else np.full_like(values, np.nan)
    return DenseChange(by, trial.slots - slots, np.ones(len(slots), np.float32), 1.0)


class Push(NamedTuple):
    """The update of one shard from one batch.

    Attributes:
        spans: the offsets that the batch covers, at most one range of a partition.
        samples: number of samples; 0: only the clock changes.
        updates: by table.
        dense: for the shard's dense slice: float32 [slice], the gradient of one step; or the change made by several
            steps. Unused without samples.
        statistics_change: float32 [slice], for the shard's slice of the statistics; unused without samples.
        watermark: latest event time, in seconds.
        watermarks: latest event time by partition, up to the end of its span, in seconds.
        idle: other partitions that the worker has read to the end.
        refusals: state of the bad-sample guard by partition, up to the end of its span.
        predictions: predictions in blocks that are not stored yet (train/blocks.py), by partition.
        rates: learning rates with which the worker learned the batch, and with which every shard applies it; None:
            those of the shard.
        seen: samples that the shard had learned when the worker pulled, plus the worker's own since then: what it has
            learned beyond is of other workers, who stepped from the same state; None: unknown, or none did.
    """

    spans: Sequence[Span]
    samples: int
    updates: Sequence[RowUpdate]
    dense: Floats | DenseChange
    statistics_change: Floats
    watermark: int
    watermarks: Mapping[int, float] = {}
    idle: Collection[int] = ()
    refusals: Mapping[int, Refusals] = {}
    predictions: Mapping[int, bytes] = {}
    rates: Rates | None = None
    seen: int | None = None

    def averaged(self, learned: int, reduction: str) -> "Push":
        """The push with the share of its moves that averages them with those of other workers.

        Workers that step from the same state in the same direction would together step too far. So a batch of several
        steps moves dense parameters and statistics by a share of n / (n + samples that others have pushed since its
        pull), n being its own: staleness-aware SGD (Zhang, Gupta, Lian and Liu, 2016), with staleness in samples.
        As in `bulk` mode, moves of dense parameters add up if the loss is a sum.

        Args:
            learned: samples that the shard has learned so far.
            reduction: of the model's loss.

        Returns:
            A push without `seen`, so that a backup which is sent it applies the same.
        """
        others = 0 if self.seen is None else learned - self.seen
        if others <= 0 or not self.samples or not isinstance(self.dense, DenseChange):
            return self._replace(seen=None)
        share = np.float32(self.samples / (self.samples + others))
        dense = self.dense if reduction == "sum" else self.dense._replace(by=self.dense.by * share)
        return self._replace(dense=dense, statistics_change=self.statistics_change * share, seen=None)


@dataclass
class PushStats:
    """Counts of applied and dropped gradients.

    Attributes:
        applied: row gradients applied.
        unadmitted: row gradients dropped because their id has been seen fewer than `min_count` times.
        non_finite_rows: row gradients dropped because they were NaN, infinite or absurdly large.
        non_finite_dense: dense gradients, by shard, dropped for the same reason.
        expired: rows dropped by `expire_after`.
        evicted: rows dropped by `capacity`.
        non_finite_statistics: changes of statistics, by shard, dropped for the same reason.
    """

    applied: int = 0
    unadmitted: int = 0
    non_finite_rows: int = 0
    non_finite_dense: int = 0
    expired: int = 0
    evicted: int = 0
    non_finite_statistics: int = 0

    def add(self, other: "PushStats") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass
class PushResult:
    """A shard's reply to a push.

    Attributes:
        outcome: whether the push was applied.
        clock: the shard's clock, if it was rejected.
        stats: counts of its gradients, if it was applied.
    """

    outcome: PushOutcome
    clock: dict[int, int] = field(default_factory=dict)
    stats: PushStats = field(default_factory=PushStats)
