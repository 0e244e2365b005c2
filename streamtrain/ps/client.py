"""Client: pulls and pushes a batch's rows and dense parameters across all shards."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from streamtrain._core import Plan
from streamtrain.model.dense import DenseLayout
from streamtrain.ps.shard import PushStats, RowUpdate, Shard

_GRADIENT_LIMIT = 2.0**56  # as in the core's optimizer.h


class Client:
    """Scatters requests over shards and puts their answers in the plan's order.

    Args:
        shards: all shards, in order of their index.
        dims: width of a row, by table.
        layout: of the dense parameters.
    """

    def __init__(self, shards: Sequence[Shard], dims: Sequence[int], layout: DenseLayout) -> None:
        self._shards = shards
        self._dims = dims
        self._slices = layout.slices(len(shards))
        self._dense_size = len(layout)

    def pull(self, plan: Plan) -> NDArray[np.float32]:
        """The rows of a plan, as one flat float32 vector in the plan's order."""
        rows = np.empty(plan.row_starts[-1], np.float32)
        by_table = self._by_table(plan, rows)
        keys = [plan.keys(t) for t in range(len(self._dims))]
        bounds = [plan.shard_starts(t) for t in range(len(self._dims))]
        for s, shard in enumerate(self._shards):
            parts = [slice(starts[s], starts[s + 1]) for starts in bounds]
            shard.pull(
                [k[part] for k, part in zip(keys, parts, strict=True)],
                [r[part] for r, part in zip(by_table, parts, strict=True)],
            )
        return rows

    def pull_dense(self) -> NDArray[np.float32]:
        """The flat dense vector, float32 [P]."""
        dense = np.empty(self._dense_size, np.float32)
        for shard, part in zip(self._shards, self._slices, strict=True):
            shard.dense.pull(dense[part])
        return dense

    def push(
        self, plan: Plan, gradients: NDArray[np.float32], dense_gradient: NDArray[np.float32], watermark: int
    ) -> PushStats:
        """Sends every shard its part of a batch's gradients, and says what became of them.

        Args:
            plan: the batch's plan.
            gradients: flat, as `Plan.unpool` gives them.
            dense_gradient: float32 [P].
            watermark: latest event time, in seconds.
        """
        if len(self._shards) > 1 and not np.abs(dense_gradient).max(initial=0) < _GRADIENT_LIMIT:
            # Each shard judges its slice alone, but what is dropped must not depend on where slices are cut.
            dense_gradient = np.full_like(dense_gradient, np.nan)
        stats = PushStats()
        by_table = self._by_table(plan, gradients)
        columns = [(plan.keys(t), by_table[t], plan.counts(t), plan.times(t)) for t in range(len(self._dims))]
        bounds = [plan.shard_starts(t) for t in range(len(self._dims))]
        for s, shard in enumerate(self._shards):
            parts = [slice(starts[s], starts[s + 1]) for starts in bounds]
            updates = [
                RowUpdate(keys[part], rows[part], counts[part], times[part])
                for (keys, rows, counts, times), part in zip(columns, parts, strict=True)
            ]
            stats.add(shard.push(updates, dense_gradient[self._slices[s]], watermark))
        return stats

    def _by_table(self, plan: Plan, flat: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        starts = plan.row_starts
        return [
            flat[start:stop].reshape(-1, dim) for start, stop, dim in zip(starts, starts[1:], self._dims, strict=False)
        ]
