"""How fast are checkpoints written and restored, and for how long does taking one block pushes? make bench-checkpoint.

    python benchmarks/checkpoint.py restore [--rows 10000000]
    python benchmarks/checkpoint.py pause [--rows 5000000] [--seconds 30]
    python benchmarks/checkpoint.py fork [--rows 10000000]
    python benchmarks/checkpoint.py scale [--rows 10000000]

restore: two shards with Adagrad state are written and restored into three, one after another, which must have exactly
the same rows. The limits of any implementation are measured in the same run: pyarrow reading the same files, SHA-256 of
the same bytes, and `Table.load` of arrays that are in memory; the ratio is to their sum, each file counted as often as
a shard needs it.

pause: two workers push batches of 8,000 rows to two shards as fast as they can, while a checkpoint is taken every
second: for how long pushes are blocked, and how long a push takes without checkpoints, with full ones and with deltas.

fork: `streamtrain up` runs with two shards of these rows, and is forked with a feature more: how long `fork` takes,
for how long training is paused, and how long it takes until the fork's `up` serves.

scale: `streamtrain up` runs with two shards of these rows and learns 2,000 samples a second, while their number goes to
4, 3 and 2: how long `scale` takes, for how long pushes are held back, how long the worker pauses, from its last push
until it has joined the next shards, the longest time between two publications meanwhile and in the ten seconds after
it, and the memory of all shards, at most and afterwards, relative to that before, and of one, at most, relative to the
larger one of before and afterwards. Beside it, how long the service takes to serve when it is stopped and started with
another number.

Rows have 16 floats. Prints a line of JSON.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow.parquet as pq
from harness.figures import percentiles
from harness.training import LocalShards
from numpy.typing import NDArray

from streamtrain._core import shards_of
from streamtrain.address import free_port
from streamtrain.checkpoint.shard_state import source_shards
from streamtrain.cluster.client import CoordinatorClient
from streamtrain.errors import ShardError
from streamtrain.model.loader import load_model
from streamtrain.model.spec import Spec
from streamtrain.ps.clock import Span
from streamtrain.ps.push import Push, RowUpdate
from streamtrain.ps.shard import Shard
from streamtrain.service.service_file import find_service
from streamtrain.settings.load import load_settings

DIM = 16
BATCH_ROWS = 8_000
PART = 1 << 18
PAGE = os.sysconf("SC_PAGE_SIZE")
Measured = TypeVar("Measured")
TABLE = {"name": "item", "dim": DIM, "optimizer": "adagrad", "rate": 0.1, "seed": 1, "expire_after": 0}
SPEC = Spec("bench", 1, "mean", (TABLE,), ((1_000,),), (), {"optimizer": "adagrad", "rate": 0.1})

Columns = tuple[NDArray[Any], ...]


def rows_of(seed: int, n: int) -> Columns:
    """Random keys, embeddings, state, counts and times."""
    rng = np.random.default_rng(seed)
    return (
        rng.integers(0, 2**64, n, dtype=np.uint64),
        rng.normal(size=(n, DIM)).astype(np.float32),
        rng.random((n, DIM), np.float32),
        rng.integers(1, 1_000, n, dtype=np.uint32),
        rng.integers(0, 2**31, n, dtype=np.uint32),
    )


def fill(shards: list[Shard], rows: int) -> None:
    """Loads rows into shards, `rows` in all."""
    for seed, at in enumerate(range(0, rows, PART)):
        columns = rows_of(seed, min(PART, rows - at))
        owners = shards_of(columns[0], len(shards))
        for shard in shards:
            shard.tables[0].load(*(column[owners == shard.index] for column in columns))


def digest(shards: list[Shard]) -> tuple[int, str]:
    """The number of rows, and a checksum of all of them that does not depend on their order."""
    total, rows = np.zeros(3, np.uint64), 0
    for shard in shards:
        cursor: int | None = 0
        while cursor is not None:
            cursor, part = shard.tables[0].scan(cursor, PART)
            whole = np.concatenate(
                [
                    part.embeddings.view(np.uint32),
                    part.state.view(np.uint32),
                    part.counts[:, None],
                    part.last_seen[:, None],
                ],
                axis=1,
            ).astype(np.uint64)
            mixed = part.keys.copy()
            for column in whole.T:
                mixed = (mixed ^ column) * np.uint64(0x9E3779B97F4A7C15)
                mixed ^= mixed >> np.uint64(29)
            total += [mixed.sum(), (mixed * part.keys).sum(), part.keys.sum()]
            rows += len(part)
    return rows, total.tobytes().hex()


def restore(args: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Writes two shards and restores three."""
    cluster = LocalShards(place, 2, SPEC)
    fill(cluster.shards, args.rows)
    before = digest(cluster.shards)
    taken = cluster.checkpointer.take()
    files = sorted((place / f"epoch-{taken.epoch:09d}" / "tables").rglob("*.parquet"))
    size = sum(file.stat().st_size for file in files)
    del cluster

    began = time.monotonic()
    again = LocalShards(place, 3, SPEC)
    seconds = time.monotonic() - began
    if digest(again.shards) != before:
        raise SystemExit("the restored rows differ from those that were written")
    del again
    reads = sum(len(source_shards(i, 3, 2)) for i in range(3)) / 2  # two of three shards share a source with another
    limits = {"sha256": _time(_hash, files), "pyarrow": _time(_read, files), "load": _load_ready(files)}
    return {
        "rows": before[0],
        "bytes": size,
        "full_s": round(taken.seconds, 2),
        "full_mb_per_s": round(size / taken.seconds / 1e6),
        "restore_2_to_3_s": round(seconds, 2),
        "restore_rows_per_s": round(before[0] / seconds),
        "limits_s": {name: round(value, 2) for name, value in limits.items()},
        "read_times": reads,
        "restore_over_limits": round(seconds / (reads * (limits["sha256"] + limits["pyarrow"]) + limits["load"]), 2),
        "byte_equal": True,
    }


def _time(work: Any, files: list[Path]) -> float:
    began = time.monotonic()
    for file in files:
        work(file)
    return time.monotonic() - began


def _hash(file: Path) -> None:
    with file.open("rb") as stream:
        hashlib.file_digest(stream, "sha256")


def _read(file: Path) -> None:
    for _ in pq.ParquetFile(file).iter_batches(1 << 16):
        pass


def _load_ready(files: list[Path]) -> float:
    """Seconds of `Table.load` alone, of all rows of the files, into one table."""
    table, seconds = SPEC.make_tables()[0], 0.0
    for columns in _columns(files):
        began = time.monotonic()
        table.load(*columns)
        seconds += time.monotonic() - began
    return seconds


def _columns(files: list[Path]) -> Iterator[Columns]:
    for file in files:
        for batch in pq.ParquetFile(file).iter_batches(1 << 16):
            flat = [column.flatten().to_numpy().reshape(-1, DIM) for column in (batch.column(1), batch.column(2))]
            yield (
                batch.column(0).to_numpy(),
                *(np.ascontiguousarray(one) for one in flat),
                batch.column(3).to_numpy(),
                batch.column(4).to_numpy(),
            )


class Worker(threading.Thread):
    """Pushes ready batches to all shards, and records how long each push takes."""

    def __init__(self, partition: int, shards: list[Shard], keys: NDArray[np.uint64], stopped: threading.Event) -> None:
        super().__init__()
        self._partition, self._shards, self._stopped = partition, shards, stopped
        self._dense = [np.zeros(len(shard.dense), np.float32) for shard in shards]
        self._batches = []
        rng = np.random.default_rng(partition)
        for _ in range(50):
            batch = rng.choice(keys, BATCH_ROWS, replace=False)
            owners = shards_of(batch, len(shards))
            self._batches.append([_update(batch[owners == shard.index], rng) for shard in shards])
        self.seconds: list[float] = []

    def run(self) -> None:
        """Until stopped."""
        at, none = self._shards[0].clock().get(self._partition, 0), np.zeros(0, np.float32)
        while not self._stopped.is_set():
            spans, updates = [Span(self._partition, at, at + 1)], self._batches[at % len(self._batches)]
            for shard, update, dense in zip(self._shards, updates, self._dense, strict=True):
                began = time.perf_counter()
                shard.push(Push(spans, 1, [update], dense, none, 0))
                self.seconds.append(time.perf_counter() - began)
            at += 1


def _update(keys: NDArray[np.uint64], rng: np.random.Generator) -> RowUpdate:
    ones = np.ones(len(keys), np.uint32)
    return RowUpdate(keys, rng.normal(size=(len(keys), DIM)).astype(np.float32), ones, ones)


def pause(args: argparse.Namespace, place: Path) -> dict[str, Any]:
    """For how long checkpoints block pushes, and push latency with and without checkpoints."""
    cluster = LocalShards(place, 2, SPEC)
    fill(cluster.shards, args.rows)
    keys = np.concatenate([shard.tables[0].scan(0, 1 << 21)[1].keys for shard in cluster.shards])
    figures: dict[str, Any] = {"rows": sum(len(shard.tables[0]) for shard in cluster.shards)}
    for what in ("none", "full", "delta"):
        stopped = threading.Event()
        workers = [Worker(partition, cluster.shards, keys, stopped) for partition in range(2)]
        for worker in workers:
            worker.start()
        end, taken = time.monotonic() + args.seconds, []
        while time.monotonic() < end:
            due = time.monotonic() + 1.0
            if what != "none":
                taken.append(cluster.checkpointer.take(full=what == "full"))
            time.sleep(max(due - time.monotonic(), 0))
        stopped.set()
        for worker in workers:
            worker.join()
        seconds = [one for worker in workers for one in worker.seconds]
        figures[what] = {"push_ms": percentiles(seconds, 1e3), "pushes_per_s": round(len(seconds) / args.seconds)}
        if taken:
            assert all(one.aligned and one.kind == what for one in taken)
            figures[what] |= {
                "pause_ms": percentiles([one.pause_ms for one in taken]),
                "taken": len(taken),
                "seconds": percentiles([one.seconds for one in taken]),
            }
    figures["push_p99_ratio"] = {
        what: round(figures[what]["push_ms"]["p99"] / figures["none"]["push_ms"]["p99"], 2)
        for what in ("full", "delta")
    }
    return figures


MODEL = """
import keras
import streamtrain as st

def graph(inputs):
    return keras.layers.Dense(1, "sigmoid")(keras.layers.Concatenate()(list(inputs.values())))

model = st.Model(st.Schema(features=[st.Categorical("item", 16)]), graph)
"""
_READY_SECONDS = 600


def fork(args: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Forks a running `up`."""
    (place / "model.py").write_text(MODEL)
    (place / "new.py").write_text(MODEL.replace("features=[", 'features=[st.Categorical("user", 16, default=""), '))
    cluster = LocalShards(place / ".streamtrain" / "checkpoints", 2, Spec.of(load_model(f"{place}/model.py")))
    fill(cluster.shards, args.rows)
    cluster.checkpointer.take()
    del cluster
    up = ("up", "--set", "up.workers=1", "--set", "up.standby=false")
    with _started(place, *up, "--model", "model.py", "--topic", "bench", "--listen", f"127.0.0.1:{free_port()}"):
        began = time.monotonic()
        command = [sys.executable, "-m", "streamtrain", "fork", "wide", "--model", "new.py", "--json"]
        forked = json.loads(subprocess.run(command, cwd=place, check=True, capture_output=True).stdout)
        took = time.monotonic() - began
        with _started(place / "wide", "up"):
            return {
                "rows": sum(forked["rows"].values()),
                "fork_s": round(took, 2),
                "pause_ms": round(forked["pause_ms"], 2),
                "until_serving_s": round(time.monotonic() - began, 2),
            }


_RATE = 2_000  # samples a second
_HELD = re.compile(r"pushes were held back for ([0-9.]+) s")
_PAUSED = re.compile(r"shards, after a pause of ([0-9.]+) s")


def scale(args: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Changes the number of shards of a running `up`."""
    (place / "model.py").write_text(MODEL)
    cluster = LocalShards(place / ".streamtrain" / "checkpoints", 2, Spec.of(load_model(f"{place}/model.py")))
    fill(cluster.shards, args.rows)
    cluster.checkpointer.take()
    del cluster
    rng = np.random.default_rng(0)
    with (place / "samples.jsonl").open("w") as file:
        for i, item in enumerate((rng.zipf(1.2, _RATE * 600) % args.rows).tolist()):
            file.write(f'{{"label": {i & 1}, "item": {item}}}\n')
    up = ("up", "--set", "up.workers=1", "--set", "up.standby=false", "--model", "model.py", "--topic", "bench")
    listen = ("--listen", f"127.0.0.1:{free_port()}")
    with _started(place, *up, *listen):
        produce = [sys.executable, "-m", "streamtrain", "produce", "samples.jsonl", "--topic", "bench"]
        with subprocess.Popen([*produce, "--rate", str(_RATE)], cwd=place, stdout=subprocess.DEVNULL) as producer:
            try:
                moves = [_scale(place, shards) for shards in (4, 3, 2)]
            finally:
                producer.terminate()
    began = time.monotonic()
    with _started(place, *up, *listen, "--set", "up.ps=3"):
        restarted = time.monotonic() - began
    return {"rows": args.rows, "moves": moves, "restart_until_serving_s": round(restarted, 2)}


def _scale(place: Path, shards: int) -> dict[str, Any]:
    time.sleep(10)  # of learning since the last one
    service = find_service(place / ".streamtrain")
    assert service
    with (
        CoordinatorClient.from_settings(load_settings(service.path)) as client,
        _sampled(lambda: _memory_of("streamtrain ps")) as memory,
        _sampled(lambda: _published(client)) as published,
    ):
        began = time.monotonic()
        command = [sys.executable, "-m", "streamtrain", "scale", "--ps", str(shards)]
        subprocess.run(command, cwd=place, check=True, capture_output=True)
        took = time.monotonic() - began
        time.sleep(10)  # until predictions are those of the next shards
    log = (place / "log").read_text()
    changes = [at for (_, was), (at, number) in pairwise(published) if number != was]
    return {
        "to": shards,
        "s": round(took, 2),
        "held_s": float(_HELD.findall(log)[-1]),
        "paused_s": float(_PAUSED.findall(log)[-1]),
        **_memory_ratios([of for _, of in memory]),
        "between_publications_s": round(max((b - a for a, b in pairwise(changes)), default=0.0), 2),
    }


def _published(client: CoordinatorClient) -> int:
    """The number of the last publication; waits for the first one, of all rows."""
    while (last := client.status()["publication"]) is None:
        time.sleep(1)
    return int(last["number"])


def _memory_ratios(samples: list[dict[str, int]]) -> dict[str, float]:
    """Of all shards: the most together, and at the end, relative to before; of one: relative to before or the end."""
    before, after = samples[0], samples[-1]
    peaks = {one: max(sample.get(one, 0) for sample in samples) for one in before | after}
    together = max(sum(sample.values()) for sample in samples)
    return {
        "memory": round(together / sum(before.values()), 2),
        "memory_afterwards": round(sum(after.values()) / sum(before.values()), 2),
        "memory_of_one": round(max(of / max(before.get(one, 0), after.get(one, 0)) for one, of in peaks.items()), 2),
    }


def _memory_of(words: str) -> dict[str, int]:
    """Bytes of processes with these words in their command, without those of files."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if words in (process / "cmdline").read_text().replace("\0", " "):
                resident, of_files = map(int, (process / "statm").read_text().split()[1:3])
                found[process.name] = (resident - of_files) * PAGE
    return found


@contextmanager
def _sampled(measure: Callable[[], Measured]) -> Iterator[list[tuple[float, Measured]]]:
    """Seconds and what is measured then, over time, until the block ends."""
    found, ended = [(time.monotonic(), measure())], threading.Event()

    def watch() -> None:
        while not ended.wait(0.1):
            with suppress(ShardError):  # which is measured again
                found.append((time.monotonic(), measure()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


@contextmanager
def _started(folder: Path, *command: str) -> Iterator[None]:
    """Runs a service until the end of the block; it serves when the block begins."""
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-m", "streamtrain", *command], cwd=folder, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + _READY_SECONDS
        while "serving predictions at" not in (folder / "log").read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit((folder / "log").read_text())
            time.sleep(0.1)
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def main() -> None:
    """Runs one of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["restore", "pause", "fork", "scale"])
    parser.add_argument("--rows", type=int)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each part of `pause`")
    parser.add_argument("--place", type=Path, help="an empty directory; default: a temporary one")
    args = parser.parse_args()
    args.rows = args.rows or (5_000_000 if args.what == "pause" else 10_000_000)
    place = Path(tempfile.mkdtemp(dir=args.place))
    try:
        figures = {"restore": restore, "pause": pause, "fork": fork, "scale": scale}[args.what](args, place)
    finally:
        shutil.rmtree(place)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
