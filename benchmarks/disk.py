"""What do rows on disk cost a table? make bench-disk.

    python benchmarks/disk.py --rows 10000000

Tables of float16 rows of 16 with row-wise Adagrad: one with all rows in memory, one that has memory for a tenth of
them, and with --rocksdb, instead of the former, the same rows in RocksDB, in as much memory. One thread pulls and
pushes batches of 1,024 samples with 26 ids each, drawn from all rows by a power law (--power 1.05) or, with --power 0,
uniformly (the worst case); they take turns. Samples/s are of pull and push alone. The first batches only warm up.
Prints a line of JSON after every stage. RocksDB (Debian: librocksdb-dev) reads and writes rows, and learns nothing.
"""

import argparse
import ctypes
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from harness.processes import exit_on_sigterm
from numpy.typing import NDArray

from streamtrain._core import Table, hash_integers

DIM = 16
BIRTH = 50_000  # rows of a push that creates them
SAMPLES, IDS = 1024, 26
OPTIONS: dict[str, Any] = {"optimizer": "rowwise_adagrad", "dtype": "float16", "rate": 0.05, "seed": 1}


class Rows(Protocol):
    """What learns."""

    def pull(self, keys: NDArray[np.uint64]) -> object: ...
    def push(
        self,
        keys: NDArray[np.uint64],
        gradients: NDArray[np.float32],
        counts: NDArray[np.uint32],
        times: NDArray[np.uint32],
    ) -> object: ...


class RocksDb:
    """Rows of float16 [DIM] and a float in RocksDB, read and written but not changed."""

    STRIDE = 2 * DIM + 4

    def __init__(self, folder: Path, memory: int) -> None:
        source = Path(__file__).parent / "harness" / "rocksdb.cc"
        library = folder / "rows.so"
        flags = ["-O2", "-std=c++17", "-shared", "-fPIC"]
        subprocess.run(["g++", *flags, str(source), "-o", str(library), "-lrocksdb"], check=True)
        self._library = ctypes.CDLL(str(library))
        self._library.rows_open.restype = ctypes.c_void_p
        self._db = ctypes.c_void_p(self._library.rows_open(str(folder / "db").encode(), ctypes.c_uint64(memory)))
        self._rows = np.zeros((BIRTH, self.STRIDE), np.uint8)

    def _call(self, name: str, keys: NDArray[np.uint64]) -> int:
        sizes = ctypes.c_size_t(len(keys)), ctypes.c_size_t(self.STRIDE)
        return int(getattr(self._library, name)(self._db, _address(keys), *sizes, _address(self._rows)))

    def pull(self, keys: NDArray[np.uint64]) -> int:
        return self._call("rows_get", keys)

    def push(self, keys: NDArray[np.uint64], *_: object) -> int:
        return self._call("rows_put", keys)


def _address(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


class Ids:
    """Ids 0 to rows - 1, id i with a probability proportional to (i + 1)^-power."""

    def __init__(self, rows: int, power: float) -> None:
        self.rows, self.power, self.rng = rows, power, np.random.default_rng(0)

    def draw(self, n: int) -> NDArray[np.int64]:
        """Ids [n], by the inverse of the continuous distribution."""
        u = self.rng.random(n)
        if self.power == 0:
            return (u * self.rows).astype(np.int64)
        rest = 1 - self.power
        ranks: NDArray[np.float64] = (1 + u * ((self.rows + 1) ** rest - 1)) ** (1 / rest)
        return np.minimum(ranks.astype(np.int64) - 1, self.rows - 1)


def born(tables: dict[str, Rows], rows: int) -> dict[str, float]:
    """Creates rows in an order in which frequent ones are anywhere; the seconds it took."""
    order = np.random.default_rng(1).permutation(rows)
    gradients, ones = np.full((BIRTH, DIM), 0.1, np.float32), np.ones(BIRTH, np.uint32)
    took = dict.fromkeys(tables, 0.0)
    for first in range(0, rows, BIRTH):
        keys = hash_integers(order[first : first + BIRTH])
        for name, table in tables.items():
            began = time.perf_counter()
            table.push(keys, gradients[: len(keys)], ones[: len(keys)], ones[: len(keys)])
            took[name] += time.perf_counter() - began
    return took


def train(tables: dict[str, Rows], ids: Ids, batches: int) -> dict[str, dict[str, float]]:
    """Pulls and pushes batches in turns; their rates, and quantiles of pulls."""
    rng = np.random.default_rng(2)
    pulls: dict[str, list[float]] = {name: [] for name in tables}
    pushes: dict[str, list[float]] = {name: [] for name in tables}
    for batch in range(batches):
        keys = np.unique(hash_integers(ids.draw(SAMPLES * IDS)))
        gradients = rng.standard_normal((len(keys), DIM)).astype(np.float32)
        ones, times = np.ones(len(keys), np.uint32), np.full(len(keys), batch + 2, np.uint32)
        for name, table in tables.items():
            began = time.perf_counter()
            table.pull(keys)
            pulled = time.perf_counter()
            table.push(keys, gradients, ones, times)
            pulls[name].append(pulled - began)
            pushes[name].append(time.perf_counter() - pulled)
    return {
        name: {
            "samples_per_s": round(batches * SAMPLES / (sum(pulls[name]) + sum(pushes[name]))),
            "pull_ms_p50": round(float(np.median(pulls[name])) * 1e3, 2),
            "pull_ms_p99": round(float(np.quantile(pulls[name], 0.99)) * 1e3, 2),
            "push_ms_p50": round(float(np.median(pushes[name])) * 1e3, 2),
            "push_ms_p99": round(float(np.quantile(pushes[name], 0.99)) * 1e3, 2),
            "rows_per_batch": len(keys),
        }
        for name in tables
    }


def main() -> None:
    """Runs what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--power", type=float, default=1.05)
    parser.add_argument("--share", type=float, default=0.1, help="of rows in memory")
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--folder", type=Path, help="where rows go; default: the one for temporary files")
    parser.add_argument("--rocksdb", action="store_true")
    options = parser.parse_args()
    exit_on_sigterm()
    memory = Table(DIM, **OPTIONS)
    row = memory.stats()["row_bytes"] + 8
    budget = int(options.rows * (row * options.share + 10))  # and the index of what is on disk
    ids = Ids(options.rows, options.power)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        disk = Table(DIM, **OPTIONS, memory=budget, folder=folder)
        peer = RocksDb(Path(folder), budget) if options.rocksdb else memory
        name = "rocksdb" if options.rocksdb else "memory"
        tables: dict[str, Rows] = {name: peer, "disk": disk}
        print(json.dumps({"budget": budget, "born_s": born(tables, options.rows)}), flush=True)
        for stage in ("warm", "measured"):
            before = disk.stats()
            figures: dict[str, Any] = train(tables, ids, options.batches)
            stats = disk.stats()
            grown = {of: stats[of] - before[of] for of in ("disk_reads", "disk_written_bytes")}
            figures["disk"] |= {f"{of}_per_batch": round(grown[of] / options.batches) for of in grown}
            figures["ratio"] = round(figures["disk"]["samples_per_s"] / figures[name]["samples_per_s"], 3)
            kept = {of: stats[of] for of in ("rows", "rows_on_disk", "disk_bytes")}
            print(json.dumps({"stage": stage, **figures, **kept, "nbytes": disk.nbytes}), flush=True)


if __name__ == "__main__":
    main()
