"""Can a shard learn more rows than its machine has memory for? make bench-beyond-memory.

    python benchmarks/beyond_memory.py --rows 625000000 --memory 10GB --seconds 300

One shard of float16 rows of 16 with row-wise Adagrad, of which most are on disk (`ps.memory`). Its rows are born,
frequent and rare ones mixed; then batches of 1,024 samples with 26 ids each, by a power law over all rows, are pulled
and pushed by one thread; then a checkpoint is taken, more is learned, and the process is killed (kill -9) and started
again. The counts of 100,000 ids, from frequent to rare, must be those as of the checkpoint. Prints a line of JSON every
ten seconds, and one with all figures at the end.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from disk import BIRTH, IDS, SAMPLES, Ids
from harness.processes import exit_on_sigterm, memory_of
from harness.training import LocalShards
from numpy.typing import NDArray

from streamtrain._core import Table, hash_integers
from streamtrain.durations import parse_size
from streamtrain.model.spec import Spec
from streamtrain.ps.row_memory import RowMemory

DIM = 16
TABLE: dict[str, Any] = {"name": "item", "dim": DIM, "rate": 0.05, "seed": 1, "expire_after": 0, "decay": 1.0}
TABLE |= {"dtype": "float16", "optimizer": "rowwise_adagrad"}
SPEC = Spec("bench", 1, "mean", (TABLE,), ((1_000,),), (), {"optimizer": "adagrad", "rate": 0.1, "decay": 1.0})
_EVERY = 10.0  # seconds between two lines
_STRIDE = 7_919  # between ids that are born one after another, without a factor in common with their number
_SAMPLED = 100_000  # ids whose counts are compared


class Counts:
    """How often some ids have occurred, from frequent to rare ones."""

    def __init__(self, rows: int) -> None:
        self._step = max(1, rows // _SAMPLED)
        self.ids = np.arange(0, rows, self._step)
        self.counts = np.zeros(len(self.ids), np.int64)

    def add(self, ids: NDArray[np.int64]) -> None:
        """These have occurred."""
        sampled = ids[ids % self._step == 0] // self._step
        np.add.at(self.counts, sampled, 1)


def push(table: Table, ids: NDArray[np.int64], time_: int) -> None:
    """A batch: its rows are pulled, and pushed with random gradients."""
    keys, counts = np.unique(hash_integers(ids), return_counts=True)
    table.pull(keys)
    gradients = np.full((len(keys), DIM), 0.1, np.float32)
    table.push(keys, gradients, counts.astype(np.uint32), np.full(len(keys), time_, np.uint32))


def batches(ids: Ids, seconds: float) -> Iterator[NDArray[np.int64]]:
    """Ids of batches, for so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield ids.draw(SAMPLES * IDS)


class Figures:
    """Prints what a table is like, every ten seconds."""

    def __init__(self, table: Table) -> None:
        self._table, self._began, self._next, self._done = table, time.monotonic(), time.monotonic() + _EVERY, 0
        self._reads = 0

    def add(self, stage: str, samples: int) -> None:
        """So many more samples, or rows that were born."""
        self._done += samples
        now = time.monotonic()
        if now < self._next:
            return
        stats = self._table.stats()
        seconds = now - self._next + _EVERY
        print(
            json.dumps(
                {
                    "stage": stage,
                    "s": round(now - self._began),
                    "per_s": round(self._done / seconds),
                    "reads_per_s": round((stats["disk_reads"] - self._reads) / seconds),
                    "rows": stats["rows"],
                    "rows_on_disk": stats["rows_on_disk"],
                    "disk_gb": round(stats["disk_bytes"] / 1e9, 2),
                    "table_gb": round(self._table.nbytes / 1e9, 2),
                    "process_gb": round(memory_of("VmRSS") / 1e9, 2),
                }
            ),
            flush=True,
        )
        self._done, self._reads, self._next = 0, stats["disk_reads"], now + _EVERY


def learn(args: argparse.Namespace) -> None:
    """The process that is killed: it waits for that."""
    cluster = LocalShards(args.place, 1, SPEC, RowMemory(parse_size(args.memory, "--memory"), args.disk))
    table, counts, ids = cluster.shards[0].tables[0], Counts(args.rows), Ids(args.rows, args.power)
    figures, began = Figures(table), time.monotonic()
    for first in range(0, args.rows, BIRTH):
        born = np.arange(first, min(first + BIRTH, args.rows)) * _STRIDE % args.rows
        counts.add(born)
        push(table, born, 1)
        figures.add("born", len(born))
    result = {"rows": len(table), "born_s": round(time.monotonic() - began, 1)}
    samples, began = 0, time.monotonic()
    for at, batch in enumerate(batches(ids, args.seconds)):
        counts.add(batch)
        push(table, batch, at + 2)
        samples += SAMPLES
        figures.add("learned", SAMPLES)
    result |= {"samples_per_s": round(samples / (time.monotonic() - began)), "samples": samples}
    taken = cluster.checkpointer.take()
    size = sum(file.stat().st_size for file in args.place.rglob("*.parquet"))
    np.save(args.place / "counts.npy", counts.counts)
    result |= {"checkpoint_s": round(taken.seconds, 1), "checkpoint_gb": round(size / 1e9, 2)}
    for batch in batches(ids, args.seconds / 10):
        push(table, batch, 1 << 20)
    result |= {"peak_process_gb": round(memory_of("VmHWM") / 1e9, 2), "disk_gb": table.stats()["disk_bytes"] / 1e9}
    print(json.dumps(result), flush=True)
    sys.stdin.read()


def restore(args: argparse.Namespace) -> None:
    """The process that is started again."""
    began = time.monotonic()
    memory = RowMemory(parse_size(args.memory, "--memory"), args.disk)
    table = LocalShards(args.place, 1, SPEC, memory).shards[0].tables[0]
    seconds = time.monotonic() - began
    found, counts, _ = table.lookup(hash_integers(Counts(args.rows).ids))
    expected = np.load(args.place / "counts.npy")
    if len(table) != args.rows or not (found.all() and np.array_equal(counts, expected)):
        raise SystemExit(f"{np.count_nonzero(counts != expected)} of {len(counts)} counts differ")
    print(
        json.dumps(
            {
                "restore_s": round(seconds, 1),
                "compared_ids": len(counts),
                "peak_process_gb_restored": round(memory_of("VmHWM") / 1e9, 2),
            }
        )
    )


def main() -> None:
    """Runs the benchmark, or one of its processes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--memory", default="100MB", help="as ps.memory")
    parser.add_argument("--power", type=float, default=1.05)
    parser.add_argument("--seconds", type=float, default=20.0, help="of learning")
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="as ps.disk")
    parser.add_argument("--place", type=Path, help="an empty directory for the checkpoint; default: a temporary one")
    parser.add_argument("--process", choices=("learn", "restore"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    exit_on_sigterm()
    if args.rows % _STRIDE == 0:
        parser.error(f"--rows must not be a multiple of {_STRIDE}")
    if args.process:
        return {"learn": learn, "restore": restore}[args.process](args)
    place = Path(tempfile.mkdtemp(dir=args.place))
    options = [f"--{name}={getattr(args, name)}" for name in ("rows", "memory", "power", "seconds", "disk")]
    command = [sys.executable, __file__, *options, f"--place={place}", "--process"]
    try:
        with subprocess.Popen(
            [*command, "learn"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as learning:
            assert learning.stdout is not None
            figures: dict[str, Any] = {"stage": "begins"}
            while "stage" in figures:
                line = learning.stdout.readline()
                if not line:
                    raise SystemExit("the process that learns has ended")
                figures = json.loads(line)
                print(line, end="", flush=True)
            learning.kill()
        done = subprocess.run([*command, "restore"], stdout=subprocess.PIPE, text=True, check=True)
        print(json.dumps(figures | json.loads(done.stdout)))
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
