"""Merging batches of row gradients, in plain Python and NumPy: what the native `merge_rows` must equal."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Part(NamedTuple):
    """Keys [n], unique; gradients [n, dim]; counts [n]; times [n]."""

    keys: NDArray[np.uint64]
    gradients: NDArray[np.float32]
    counts: NDArray[np.uint32]
    times: NDArray[np.uint32]


def merge(parts: Sequence[Part], scales: Sequence[float]) -> Part:
    sums: dict[int, NDArray[np.float32]] = {}
    counts: dict[int, int] = {}
    times: dict[int, int] = {}
    for part, scale in zip(parts, scales, strict=True):
        for i, key in enumerate(part.keys.tolist()):
            scaled = np.float32(scale) * part.gradients[i]
            sums[key] = sums[key] + scaled if key in sums else scaled
            counts[key] = min(counts.get(key, 0) + int(part.counts[i]), 2**32 - 1)
            times[key] = max(times.get(key, 0), int(part.times[i]))
    return Part(
        np.array(list(sums), np.uint64),
        np.array(list(sums.values()), np.float32).reshape(len(sums), parts[0].gradients.shape[1]),
        np.array(list(counts.values()), np.uint32),
        np.array(list(times.values()), np.uint32),
    )
