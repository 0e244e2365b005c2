"""The native embedding table against NumPy on arrays of the same size, on one thread.

All figures are ratios within one run, each with its bar. Rows have 16 floats and Adagrad state; keys are uniformly
random, which is the worst case for caches. Times are processor time of the thread, so that other processes on the
machine do not count, and medians of several rounds.

New memory comes from the kernel 2 MiB at a time. On a virtual machine whose host takes free memory back, a first touch
costs up to tens of milliseconds, which is the machine's and not the table's: the longest plain first touch of as much
memory is printed for comparison, and the longest push is given both over all pushes and over those that got no new
memory. Run it several times, and on a machine that is otherwise at rest.

    python benchmarks/core_table.py [--rows 10000000] [--growths 5] [--rounds 7] [--json]
"""

import argparse
import json
import mmap
import resource
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from streamtrain import _core

DIM = 16
BATCH = 16_384
GROWTH_BATCH = 10_000
PAYLOAD = 8 + DIM * 4 + DIM * 4  # key, embedding, optimizer state
HUGE_PAGE = 2 << 20

Keys = NDArray[np.uint64]
Call = Callable[[NDArray[np.int64], Keys], None]


def main() -> None:
    """Measure everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--growths", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    options = parser.parse_args()
    rng = np.random.default_rng(1)

    figures: dict[str, tuple[float, str]] = {}  # name: (value, bar)
    keys = rng.integers(0, 2**64, options.rows, dtype=np.uint64)
    before = memory("VmRSS")
    table = new_table()
    grow(table, keys)
    peak = memory("VmHWM") - before
    figures["peak memory / payload, growth included"] = peak / len(table) / PAYLOAD, "<= 1.25"
    figures["nbytes / payload"] = table.nbytes / len(table) / PAYLOAD, "<= 1.25"

    pulls, pushes, pull_seconds = compare(table, keys, options.rounds)
    figures["pull / numpy.take"] = pulls, ">= 0.5"
    figures["push / NumPy gather-update-scatter"] = pushes, ">= 0.5"
    del table

    growths = []
    for _ in range(options.growths):
        longest_touch = touch(2 * options.rows * (PAYLOAD + 32))
        pushed = grow(new_table(), rng.integers(0, 2**64, 2 * options.rows, dtype=np.uint64))
        growths.append(Growth.of(pushed, longest_touch, pull_seconds))
    median = Growth(*(statistics.median(column) for column in zip(*growths, strict=True)))
    figures["insert / pull, growth included, median push"] = median.insert, ">= 0.25"
    figures["insert / pull, growth included, whole growth"] = median.insert_all, "(new memory)"
    figures["longest / median push of a growth, without new memory"] = median.stall, "<= 10"
    figures["  in the worst growth"] = max(g.stall for g in growths), ""
    figures["longest / median push of a growth, all pushes"] = median.stall_all, "(new memory)"
    figures["  in the worst growth, all pushes"] = max(g.stall_all for g in growths), ""
    figures["longest plain first touch of 2 MiB / median push"] = median.touch, "(new memory)"

    if options.json:
        print(json.dumps({name: round(value, 3) for name, (value, _) in figures.items()}))
        return
    for name, (value, bar) in figures.items():
        print(f"{name:57}{value:8.2f}  {bar}")
    print(f"(pull: {1 / pull_seconds / 1e6:.1f}M rows/s)")


class Push(NamedTuple):
    """The seconds of a push, and whether the kernel gave it new memory."""

    seconds: float
    faulted: bool


class Growth(NamedTuple):
    """Figures of one growth; the stalls and the touch in units of its median push."""

    insert: float
    insert_all: float
    stall: float
    stall_all: float
    touch: float

    @classmethod
    def of(cls, pushed: list[Push], longest_touch: float, pull_seconds: float) -> Self:
        seconds = [push.seconds for push in pushed]
        median = statistics.median(seconds)
        return cls(
            insert=pull_seconds * GROWTH_BATCH / median,
            insert_all=pull_seconds * GROWTH_BATCH / statistics.mean(seconds),
            stall=max(push.seconds for push in pushed if not push.faulted) / median,
            stall_all=max(seconds) / median,
            touch=longest_touch / median,
        )


def new_table() -> _core.Table:
    return _core.Table(DIM, optimizer="adagrad", rate=0.05)


def grow(table: _core.Table, keys: Keys) -> list[Push]:
    """Push each key once, in batches of GROWTH_BATCH."""
    gradients = np.full((GROWTH_BATCH, DIM), 0.1, np.float32)
    ones = np.ones(GROWTH_BATCH, np.uint32)
    pushed = []
    for i in range(0, len(keys) - GROWTH_BATCH + 1, GROWTH_BATCH):
        batch = keys[i : i + GROWTH_BATCH]
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        start = time.thread_time()
        table.push(batch, gradients, ones, ones)
        seconds = time.thread_time() - start
        pushed.append(Push(seconds, resource.getrusage(resource.RUSAGE_THREAD).ru_minflt != faults))
    return pushed


def compare(table: _core.Table, keys: Keys, rounds: int) -> tuple[float, float, float]:
    """Return the speed of pull and of push relative to NumPy, and the seconds of one pulled row."""
    rng = np.random.default_rng(2)
    rate, epsilon = np.float32(0.05), np.float32(1e-7)
    weights = np.full((len(keys), DIM), 0.5, np.float32)
    accumulators = np.full((len(keys), DIM), 0.1, np.float32)
    gradients = rng.standard_normal((BATCH, DIM)).astype(np.float32)
    ones = np.ones(BATCH, np.uint32)
    out = np.empty((BATCH, DIM), np.float32)

    def take(chosen: NDArray[np.int64], _: Keys) -> None:
        np.take(weights, chosen, axis=0, out=out, mode="clip")

    def pull(_: NDArray[np.int64], batch: Keys) -> None:
        table.pull(batch, out=out)

    def update(chosen: NDArray[np.int64], _: Keys) -> None:
        accumulator = accumulators[chosen] + gradients * gradients
        accumulators[chosen] = accumulator
        weights[chosen] -= rate * gradients / (np.sqrt(accumulator) + epsilon)

    def push(_: NDArray[np.int64], batch: Keys) -> None:
        table.push(batch, gradients, ones, ones)

    def ratio(numpy_call: Call, table_call: Call) -> tuple[float, float]:
        ratios, row_seconds = [], []
        for _ in range(rounds):
            seconds: dict[Call, list[float]] = {numpy_call: [], table_call: []}
            for _ in range(100):
                for call, times in seconds.items():  # by turns, so that noise meets both alike
                    chosen = rng.integers(0, len(keys), BATCH)
                    batch = keys[chosen]
                    start = time.thread_time()
                    call(chosen, batch)
                    times.append(time.thread_time() - start)
            medians = [statistics.median(times) for times in seconds.values()]
            ratios.append(medians[0] / medians[1])
            row_seconds.append(medians[1] / BATCH)
        return statistics.median(ratios), statistics.median(row_seconds)

    pulls, pull_seconds = ratio(take, pull)
    pushes, _ = ratio(update, push)
    return pulls, pushes, pull_seconds


def touch(size: int) -> float:
    """Touch `size` bytes of new memory by huge pages; return the seconds of the longest first touch."""
    longest = 0.0
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory_map:
        memory_map.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, size, HUGE_PAGE):
            start = time.thread_time()
            memory_map[at] = 1
            longest = max(longest, time.thread_time() - start)
    return longest


def memory(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) * 1024


if __name__ == "__main__":
    main()
