"""Which rows of a table a stream needs, how often, and how soon again; and so what memory of any size is worth.

Only some keys are watched, chosen by their hash, so that a table of any size takes as much memory here (SHARDS:
Waldspurger et al., Efficient MRC construction with SHARDS, FAST 2015). How many rows are found in memory follows from
the numbers of accesses between two of the same row (AET: Hu et al., Kinetic modeling of data eviction in cache, USENIX
ATC 2016), for a memory that keeps the rows that were needed last.
"""

import math

import numpy as np
from numpy.typing import NDArray

_MOST = 1 << 20  # accesses that are kept of a table
_ACCESS = np.dtype([("key", np.uint64), ("batch", np.uint32), ("count", np.uint32), ("time", np.uint32)])
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # spreads keys that are chosen by other bits elsewhere
_ALL = 1 << 32


class Accesses:
    """Which rows of a table each batch pulls: of all keys, or of a share of them once there are too many.

    Args:
        most: accesses that are kept.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most, self._below, self._kept = most, _ALL, 0
        self._parts: list[NDArray[np.void]] = []
        self._samples: list[int] = []

    @property
    def share(self) -> float:
        """Of the keys that are watched."""
        return self._below / _ALL

    def add(
        self, keys: NDArray[np.uint64], counts: NDArray[np.uint32], times: NDArray[np.uint32], samples: int
    ) -> None:
        """A batch pulls these rows.

        Args:
            keys: [n], unique.
            counts: [n], how often each occurs in the batch.
            times: [n], event time of each in seconds; 0: unknown.
            samples: size of the batch.
        """
        part = np.empty(len(keys), _ACCESS)
        part["key"], part["count"], part["time"] = keys, counts, times
        part["batch"] = len(self._samples)
        part = self._watched(part)
        self._samples.append(samples)
        self._parts.append(part)
        self._kept += len(part)
        while self._kept > self._most and self._below > 1:
            self._below //= 2
            self._parts = [self._watched(np.concatenate(self._parts))]
            self._kept = len(self._parts[0])

    def _watched(self, part: NDArray[np.void]) -> NDArray[np.void]:
        return part[(part["key"] * _MULTIPLIER) >> np.uint64(32) < self._below]

    def reuse(self, min_count: int = 1, expire_after: float = 0.0) -> "Reuse":
        """What these accesses say of a table with such options; `expire_after` in seconds, 0: never."""
        found = np.concatenate([*self._parts, np.empty(0, _ACCESS)])
        self._parts = [found]
        return Reuse(found, np.cumsum([0, *self._samples]), self.share, min_count=min_count, expire_after=expire_after)

    def seconds(self) -> float:
        """Event time from the first to the last access; 0 if the samples have none."""
        times = np.concatenate([np.empty(0, np.uint32), *(part["time"] for part in self._parts)])
        times = times[times > 0]
        return float(times.max() - times.min()) if len(times) else 0.0


class Reuse:
    """How many rows a table has, and how many accesses pass until a row is needed again.

    What is said per sample holds for the later half of the samples, as the first ones find no rows.

    Args:
        accesses: of the keys that are watched, in order.
        samples: before each batch, and at the end.
        share: of all keys that are watched.
        min_count: occurrences of a key before it has a row.
        expire_after: seconds of event time after which a row is dropped; 0: never.
    """

    def __init__(
        self,
        accesses: NDArray[np.void],
        samples: NDArray[np.int64],
        share: float,
        *,
        min_count: int,
        expire_after: float,
    ) -> None:
        self._samples, self._share = samples, share
        by_key = accesses[np.argsort(accesses["key"], kind="stable")]
        if min_count > 1:
            total = np.cumsum(by_key["count"], dtype=np.int64)
            first = np.flatnonzero(_is_first(by_key["key"]))
            before = (total[first] - by_key["count"][first])[np.cumsum(_is_first(by_key["key"])) - 1]
            by_key = by_key[total - before >= min_count]
        self._born = _is_first(by_key["key"])
        if expire_after:
            times = by_key["time"].astype(np.int64)
            self._born |= np.diff(times, prepend=0) > expire_after
        self._accesses, self._expire_after = by_key, expire_after
        self._half = int(np.searchsorted(samples, samples[-1] / 2))
        self._measure()

    def _measure(self) -> None:
        """Gaps between accesses to the same row, in accesses to any row."""
        batches = self._accesses["batch"]
        later = batches >= self._half
        at = np.cumsum(np.bincount(batches, minlength=len(self._samples)), dtype=np.float64)
        at = np.concatenate([[0.0], at])[batches] / self._share
        gaps = np.sort(np.diff(at, prepend=0.0)[later & ~self._born])
        self._later_samples = max(int(self._samples[-1] - self._samples[self._half]), 1)
        self._later = int(np.count_nonzero(later))
        self._gaps = gaps
        # Rows that were needed within a gap: the integral of the share of accesses whose gap is longer.
        done = np.arange(1, len(gaps) + 1)
        sums = np.cumsum(gaps)
        self._needed = gaps - (done * gaps - sums) / max(self._later, 1)

    @property
    def accesses(self) -> float:
        """Rows that are pulled, or made, per sample."""
        return self._later / self._share / self._later_samples

    @property
    def rows(self) -> float:
        """After the last sample."""
        return self._alive(self._accesses["batch"] >= 0)

    @property
    def growth(self) -> float:
        """Exponent g of the growth: with n times as many samples, there are n^g times as many rows; 0 to 1."""
        before = self._alive(self._accesses["batch"] < self._half)
        more = self._samples[-1] / max(self._samples[self._half], 1)
        return min(1.0, max(0.0, math.log(max(self.rows, 1.0) / before, more))) if before and more > 1 else 0.0

    def _alive(self, which: NDArray[np.bool_]) -> float:
        accesses = self._accesses[which]
        if not self._expire_after or not len(accesses):
            return int(np.count_nonzero(self._born[which])) / self._share
        last = np.append(_is_first(accesses["key"])[1:], True)
        ends = int(accesses["time"].max()) - self._expire_after
        return int(np.count_nonzero(last & (accesses["time"] >= ends))) / self._share

    def rows_after(self, samples: float) -> float:
        """Rows after so many samples, if the stream goes on like this."""
        more: float = max(samples / max(int(self._samples[-1]), 1), 1.0) ** self.growth
        return self.rows * more

    def reads(self, room: float, samples: float) -> float:
        """Rows that a sample reads from disk, where so many rows have room in memory, after so many samples."""
        if room >= self.rows_after(samples):
            return 0.0
        missed = len(self._gaps) - int(np.searchsorted(self._needed, room, side="right"))
        # Of keys that are first seen in these samples, some will have a row by then, which is on disk.
        more = max(samples / max(int(self._samples[-1]), 1), 1.0)
        known = (self._later - len(self._gaps)) * (1 - more ** (self.growth - 1))
        return float(missed + known) / self._share / self._later_samples

    def lost(self, seconds: float) -> float:
        """Share of the accesses that would find no row if rows were dropped after so many seconds."""
        later = self._accesses["batch"] >= self._half
        times: NDArray[np.int64] = self._accesses["time"].astype(np.int64)
        gaps = (times[1:] - times[:-1])[(later & ~self._born)[1:]]
        return int(np.count_nonzero(gaps > seconds)) / max(self._later, 1)


def _is_first(keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Whether each of sorted keys differs from the one before."""
    return np.append(True, keys[1:] != keys[:-1])[: len(keys)]
