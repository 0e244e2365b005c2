"""Push: what a shard is to learn from one batch, and what became of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamtrain.ps.clock import Outcome, Span

Floats = NDArray[np.float32]


class RowUpdate(NamedTuple):
    """Gradients for rows of one table.

    Attributes:
        keys: uint64 [n], unique.
        gradients: float32 [n, dim].
        counts: uint32 [n], occurrences in the batch.
        times: uint32 [n], latest event time in seconds.
    """

    keys: NDArray[np.uint64]
    gradients: Floats
    counts: NDArray[np.uint32]
    times: NDArray[np.uint32]


class Push(NamedTuple):
    """What one shard is to learn from one batch.

    Attributes:
        spans: the offsets that the batch covers, at most one range of a partition.
        samples: number of samples learned from; 0: nothing but the clock changes.
        updates: by table.
        dense_gradient: float32 [slice], of the shard's dense slice; unused without samples.
        statistics_change: float32 [slice], of the shard's slice of the statistics; unused without samples.
        watermark: latest event time, in seconds; rows not seen for `expire_after` before it are dropped.
        watermarks: latest event time by partition, up to the end of its span, in seconds.
    """

    spans: Sequence[Span]
    samples: int
    updates: Sequence[RowUpdate]
    dense_gradient: Floats
    statistics_change: Floats
    watermark: int
    watermarks: Mapping[int, float] = {}


@dataclass
class PushStats:
    """What became of gradients.

    Attributes:
        applied: row gradients applied.
        unadmitted: row gradients dropped because their id has been seen fewer than `min_count` times.
        non_finite_rows: row gradients dropped because they were NaN, infinite or absurdly large.
        non_finite_dense: dense gradients, by shard, dropped for the same reason.
        expired: rows dropped by `expire_after`.
        evicted: rows dropped by `capacity`.
    """

    applied: int = 0
    unadmitted: int = 0
    non_finite_rows: int = 0
    non_finite_dense: int = 0
    expired: int = 0
    evicted: int = 0

    def add(self, other: "PushStats") -> None:
        """Adds what became of other gradients."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass
class Pushed:
    """A shard's answer to a push.

    Attributes:
        outcome: what was done.
        clock: the shard's clock, if the push was rejected.
        stats: what became of the gradients, if it was applied.
    """

    outcome: Outcome
    clock: dict[int, int] = field(default_factory=dict)
    stats: PushStats = field(default_factory=PushStats)
