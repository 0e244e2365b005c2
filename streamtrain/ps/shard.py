"""Shard: the embedding rows whose keys hash to it, and its slice of the dense parameters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamtrain._core import DenseVector, Table
from streamtrain.model.model import Model

# Rows looked at for expiry with every push, per row pushed: the whole table is visited often enough for any stream
# that lets it grow, and a push never stalls.
_EXPIRY_VISITS = 2
_MIN_EXPIRY_VISITS = 256


class RowUpdate(NamedTuple):
    """Gradients for rows of one table.

    Attributes:
        keys: uint64 [n], unique.
        gradients: float32 [n, dim].
        counts: uint32 [n], occurrences in the batch.
        times: uint32 [n], latest event time in seconds.
    """

    keys: NDArray[np.uint64]
    gradients: NDArray[np.float32]
    counts: NDArray[np.uint32]
    times: NDArray[np.uint32]


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


class Shard:
    """Not thread-safe: one caller at a time.

    Args:
        model: whose rows and parameters it holds.
        index: which shard it is, 0 to shards - 1.
        shards: how many there are.
        dense: float32, the initial values of its slice of the dense parameters.
    """

    def __init__(self, model: Model, index: int, shards: int, dense: NDArray[np.float32]) -> None:
        self.index = index
        self.shards = shards
        self.specs = model.schema.tables
        self.tables = [Table(**spec.settings(model.embedding_optimizer, model.seed)) for spec in self.specs]
        self.dense = DenseVector(dense, **model.dense_optimizer.settings())

    def pull(self, keys: Sequence[NDArray[np.uint64]], rows: Sequence[NDArray[np.float32]]) -> None:
        """Reads rows into `rows`, by table float32 [n, dim]; ids without a row give their birth value."""
        for table, of_table, out in zip(self.tables, keys, rows, strict=True):
            if len(of_table):
                table.pull(of_table, out)

    def push(self, updates: Sequence[RowUpdate], dense_gradient: NDArray[np.float32], watermark: int) -> PushStats:
        """Applies the gradients of one batch.

        Args:
            updates: by table.
            dense_gradient: float32, for this shard's slice.
            watermark: latest event time, in seconds; rows not seen for `expire_after` before it are dropped.
        """
        stats = PushStats()
        for spec, table, update in zip(self.specs, self.tables, updates, strict=True):
            if len(update.keys):
                done = table.push(*update)
                stats.applied += done.applied
                stats.unadmitted += done.unadmitted
                stats.evicted += done.evicted
                stats.non_finite_rows += len(done.non_finite)
            if spec.expire_after is not None:
                stats.expired += table.expire(watermark, max(_MIN_EXPIRY_VISITS, _EXPIRY_VISITS * len(update.keys)))
        stats.non_finite_dense += not self.dense.apply(dense_gradient)
        return stats
