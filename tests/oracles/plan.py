"""What a plan must be, in plain Python: a list of which row goes where in the matrix, read in both directions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Lists = Sequence[Sequence[int]]  # ids by sample


@dataclass(frozen=True)
class Feature:
    table: int
    combiner: Literal["sum", "mean", "sqrtn", "none"] = "sum"
    max_length: int = 0


class Columns(NamedTuple):
    """A batch as `Planner.plan` takes it."""

    keys: NDArray[np.uint64]
    starts: NDArray[np.int64]
    offsets: NDArray[np.int32]
    times: NDArray[np.float64]


def columns_of(features: Sequence[Lists], times: Sequence[float]) -> Columns:
    """The columns of features' ids by sample."""
    keys = [key for lists in features for ids in lists for key in ids]
    starts = np.cumsum([0, *(sum(map(len, lists)) for lists in features)])
    offsets = [np.cumsum([0, *map(len, lists)]) for lists in features]
    return Columns(
        np.array(keys, np.uint64),
        starts.astype(np.int64),
        np.array(offsets, np.int32).reshape(len(features), len(times) + 1),
        np.array(times, np.float64),
    )


@dataclass
class TablePlan:
    keys: list[int]
    counts: list[int]
    times: list[int]
    shard_starts: list[int]


class Entry(NamedTuple):
    """Row `row` of table `table`, times `scale`, is added to the matrix at (sample, column)."""

    sample: int
    column: int
    table: int
    row: int
    scale: float


class Plan:
    def __init__(
        self,
        features: Sequence[Feature],
        dims: Sequence[int],
        shards: int,
        ids: Sequence[Lists],
        times: Sequence[float],
    ) -> None:
        self.dims = list(dims)
        self.samples = len(times)
        widths = [dims[f.table] * (f.max_length if f.combiner == "none" else 1) for f in features]
        self.columns = [0, *np.cumsum(widths, dtype=int).tolist()]
        self.width = self.columns[-1]
        self.tables = [
            _table([lists for f, lists in zip(features, ids, strict=True) if f.table == t], times, shards)
            for t in range(len(dims))
        ]
        self.row_starts = np.cumsum([0, *(len(t.keys) * d for t, d in zip(self.tables, dims, strict=True))]).tolist()
        self.entries = [
            Entry(i, column + place, f.table, self.tables[f.table].keys.index(key), scale)
            for f, column, lists in zip(features, self.columns, ids, strict=False)
            for i, of_sample in enumerate(lists)
            for key, place, scale in _placed(f, dims[f.table], of_sample)
        ]

    def pool(self, rows: NDArray[np.float32]) -> NDArray[np.float64]:
        matrix = np.zeros((self.samples, self.width))
        tables = self._tables(rows.astype(np.float64))
        for e in self.entries:
            matrix[e.sample, e.column : e.column + self.dims[e.table]] += tables[e.table][e.row] * e.scale
        return matrix

    def unpool(self, gradient: NDArray[np.float32]) -> NDArray[np.float64]:
        flat = np.zeros(self.row_starts[-1])
        tables = self._tables(flat)
        for e in self.entries:
            tables[e.table][e.row] += gradient[e.sample, e.column : e.column + self.dims[e.table]] * e.scale
        return flat

    def _tables(self, flat: NDArray[np.float64]) -> list[NDArray[np.float64]]:
        """Views by table of a flat row buffer."""
        return [
            flat[start:stop].reshape(-1, dim)
            for start, stop, dim in zip(self.row_starts, self.row_starts[1:], self.dims, strict=False)
        ]


def _table(features: Sequence[Lists], times: Sequence[float], shards: int) -> TablePlan:
    occurrences: dict[int, list[int]] = {}
    for lists in features:
        for ids, time in zip(lists, times, strict=True):
            for key in ids:
                occurrences.setdefault(key, []).append(seconds(time))
    owners = {key: (key >> 48) * shards >> 16 for key in occurrences}
    keys = sorted(occurrences, key=lambda key: owners[key])  # stable: within a shard by first occurrence
    return TablePlan(
        keys=keys,
        counts=[len(occurrences[key]) for key in keys],
        times=[max(occurrences[key]) for key in keys],
        shard_starts=[sum(owner < s for owner in owners.values()) for s in range(shards + 1)],
    )


def _placed(feature: Feature, dim: int, ids: Sequence[int]) -> list[tuple[int, int, float]]:
    """Key, place within the feature's columns, and factor of each id of a sample."""
    if feature.combiner == "none":
        return [(key, k * dim, 1.0) for k, key in enumerate(ids)]
    n = len(ids)
    scale = {"sum": 1.0, "mean": 1 / max(n, 1), "sqrtn": 1 / math.sqrt(max(n, 1))}[feature.combiner]
    return [(key, 0, scale) for key in ids]


def seconds(time: float) -> int:
    """Event time as rows keep it: whole seconds in 32 bits, before 1970 and no time at all being 0."""
    return min(int(time), 2**32 - 1) if 0 < time < math.inf else (2**32 - 1 if time > 0 else 0)
