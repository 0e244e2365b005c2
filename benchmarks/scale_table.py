"""What do rows cost a shard, as it has more of them? make bench-scale.

    python benchmarks/scale_table.py --rows 10000000

One shard of float16 rows of 16 with row-wise Adagrad (--float32: of float32 rows with Adagrad). Pushes create --rows
rows; then one thread pulls and pushes batches of 1,024 samples with 26 ids each, drawn uniformly from all rows (the
worst case for caches); then a full checkpoint is written and restored. Samples/s are of pull and push alone. Memory is
what the process gained; payload is key, row and optimizer state (44 bytes, or 136), to which a row adds its count (4
bytes). Prints a line of JSON after every stage; the last one has all figures.
"""

import argparse
import gc
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness.processes import exit_on_sigterm, memory_of
from harness.training import LocalShards
from numpy.typing import NDArray

from streamtrain._core import Table, hash_integers
from streamtrain.model.spec import Spec

DIM = 16
BIRTH = 50_000  # rows of a push that creates them
SAMPLES, IDS = 1024, 26
COMMON = {"name": "item", "dim": DIM, "rate": 0.05, "seed": 1, "expire_after": 0}
HALF = {"dtype": "float16", "optimizer": "rowwise_adagrad"}
FULL = {"dtype": "float32", "optimizer": "adagrad"}


def keys_of(first: int, last: int) -> NDArray[np.uint64]:
    """Keys of a range of ids."""
    return hash_integers(np.arange(first, last, dtype=np.int64))


def born(table: Table, rows: int) -> float:
    """Creates rows; the seconds it took."""
    began = time.perf_counter()
    gradients, ones = np.full((BIRTH, DIM), 0.1, np.float32), np.ones(BIRTH, np.uint32)
    for first in range(0, rows, BIRTH):
        keys = keys_of(first, min(first + BIRTH, rows))
        table.push(keys, gradients[: len(keys)], ones[: len(keys)], ones[: len(keys)])
    return time.perf_counter() - began


def train(table: Table, rows: int, batches: int) -> dict[str, float]:
    """Pulls and pushes batches; medians of their rates."""
    rng, took = np.random.default_rng(0), []
    for _ in range(batches):
        keys = np.unique(hash_integers(rng.integers(0, rows, SAMPLES * IDS)))
        gradients = rng.standard_normal((len(keys), DIM)).astype(np.float32)
        ones = np.ones(len(keys), np.uint32)
        began = time.perf_counter()
        table.pull(keys)
        pulled = time.perf_counter()
        table.push(keys, gradients, ones, ones)
        took.append(((pulled - began) / len(keys), (time.perf_counter() - pulled) / len(keys), len(keys)))
    pull, push, unique = (statistics.median(one) for one in zip(*took, strict=True))
    return {
        "samples_per_s": round(SAMPLES / unique / (pull + push)),
        "pulled_rows_per_s": round(1 / pull),
        "pushed_rows_per_s": round(1 / push),
    }


def measure(rows: int, batches: int, full: bool, place: Path, checkpoint: bool = True) -> dict[str, Any]:
    """Creates, trains, writes and restores."""
    one = COMMON | (FULL if full else HALF)
    spec = Spec("bench", 1, "mean", (one,), ((1_000,),), (), {"optimizer": "adagrad", "rate": 0.1})
    payload = 8 + (2 * 4 * DIM if full else 2 * DIM + 4)
    cluster = LocalShards(place, 1, spec)
    table = cluster.shards[0].tables[0]
    gc.collect()
    before = memory_of("VmRSS")
    seconds = born(table, rows)
    per_row = {
        "bytes_per_row": (memory_of("VmRSS") - before) / rows,
        "peak_bytes_per_row": (memory_of("VmHWM") - before) / rows,
    }
    figures: dict[str, Any] = {
        "rows": len(table),
        "born_rows_per_s": round(rows / seconds),
        **{name: round(value, 2) for name, value in per_row.items()},
        "payload_bytes": payload,
        "memory_over_payload": round(per_row["bytes_per_row"] / payload, 3),
        "peak_memory_over_payload": round(per_row["peak_bytes_per_row"] / payload, 3),
        "table_over_payload": round(table.nbytes / rows / payload, 3),
        **train(table, rows, batches),
    }
    if not checkpoint:
        return figures
    print(json.dumps(figures), flush=True)
    taken = cluster.checkpointer.take()
    size = sum(file.stat().st_size for file in place.rglob("*.parquet"))
    figures |= {
        "checkpoint_s": round(taken.seconds, 2),
        "checkpoint_gb": round(size / 1e9, 3),
        "checkpoint_peak_bytes_per_row": round((memory_of("VmHWM") - before) / rows, 2),
    }
    print(json.dumps(figures), flush=True)
    keys = keys_of(0, min(rows, BIRTH))
    expected = table.pull(keys)
    del cluster, table
    gc.collect()
    began = time.perf_counter()
    again = LocalShards(place, 1, spec).shards[0].tables[0]
    seconds = time.perf_counter() - began
    if len(again) != rows or not np.array_equal(again.pull(keys), expected):
        raise SystemExit("the restored rows differ from those that were written")
    return figures | {"restore_s": round(seconds, 2), "restore_rows_per_s": round(rows / seconds)}


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batches", type=int, default=200, help="that are pulled and pushed")
    parser.add_argument("--float32", action="store_true", help="float32 rows, with Adagrad's state for each float")
    parser.add_argument("--no-checkpoint", action="store_true", help="the table alone")
    parser.add_argument("--place", type=Path, help="an empty directory; default: a temporary one")
    args = parser.parse_args()
    exit_on_sigterm()
    place = Path(tempfile.mkdtemp(dir=args.place))
    try:
        print(json.dumps(measure(args.rows, args.batches, args.float32, place, not args.no_checkpoint)))
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
