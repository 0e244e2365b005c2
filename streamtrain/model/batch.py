"""Batch: many samples as columns, which is what plan, step and metrics work on."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Batch:
    """Samples as columns; n samples, F embedded features (categoricals, crosses, cells), D numerics, L labels.

    Attributes:
        keys: uint64 [total], the keys of all features one after another.
        starts: int64 [F + 1]; feature f has `keys[starts[f]:starts[f + 1]]`.
        offsets: int32 [F, n + 1]; within these, sample i has those from `offsets[f, i]` to `offsets[f, i + 1]`.
        numeric: float32 [n, D], transformed.
        labels: float32 [n, L]; NaN where an optional label is missing.
        weights: float32 [n].
        times: float64 [n], event time in seconds since the epoch; 0 where the schema has none.
        kept: int32 [n], the position of each sample among those that were given.
    """

    keys: NDArray[np.uint64]
    starts: NDArray[np.int64]
    offsets: NDArray[np.int32]
    numeric: NDArray[np.float32]
    labels: NDArray[np.float32]
    weights: NDArray[np.float32]
    times: NDArray[np.float64]
    kept: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.times)

    def select(self, mask: NDArray[np.bool_]) -> "Batch":
        """The samples where `mask` (bool [n]) is true, in order."""
        lengths = np.diff(self.offsets, axis=1)
        offsets = np.zeros((len(self.offsets), int(mask.sum()) + 1), np.int32)
        np.cumsum(lengths[:, mask], axis=1, out=offsets[:, 1:])
        keys = [
            self.keys[start:stop][np.repeat(mask, of_feature)]
            for start, stop, of_feature in zip(self.starts, self.starts[1:], lengths, strict=False)
        ]
        columns: dict[str, Any] = {
            name: getattr(self, name)[mask] for name in ("numeric", "labels", "weights", "times", "kept")
        }
        return Batch(
            keys=np.concatenate([*keys, np.empty(0, np.uint64)]),
            starts=np.concatenate([[0], np.cumsum(offsets[:, -1], dtype=np.int64)]).astype(np.int64),
            offsets=offsets,
            **columns,
        )

    def part(self, first: int, end: int | None = None) -> "Batch":
        """The samples from `first` to `end`, or to the last; without copies but for keys and offsets."""
        rows = slice(first, len(self) if end is None else min(end, len(self)))
        bounds = self.offsets[:, rows.start : rows.stop + 1]
        keys = [
            self.keys[start + of_feature[0] : start + of_feature[-1]]
            for start, of_feature in zip(self.starts, bounds, strict=False)
        ]
        return Batch(
            keys=np.concatenate([*keys, np.empty(0, np.uint64)]),
            starts=np.cumsum([0, *map(len, keys)], dtype=np.int64),
            offsets=np.ascontiguousarray(bounds - bounds[:, :1]),
            numeric=self.numeric[rows],
            labels=self.labels[rows],
            weights=self.weights[rows],
            times=self.times[rows],
            kept=self.kept[rows],
        )

    def cut(self, size: int) -> Iterator["Batch"]:
        """Its samples in order, at most `size` at a time; see `part`."""
        for first in range(0, len(self), size):
            yield self.part(first, first + size)
