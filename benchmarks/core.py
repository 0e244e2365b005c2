"""How fast is the native core, on one thread, compared with what NumPy and msgspec do? make bench-core.

    python benchmarks/core.py table [--rows 10000000] [--growths 5] [--json]
    python benchmarks/core.py decode [--ids hex]

table: pull, push, insert and memory of the embedding table, and NumPy on arrays of the same size. Rows have 16 floats
and Adagrad state; keys are uniformly random, the worst case for caches. Prints ratios, each with its bar. New memory
comes from the kernel 2 MiB at a time. On a virtual machine whose host reclaims free memory, a first touch costs up to
tens of milliseconds, which is the machine's cost and not the table's: the longest first touch of plain memory is
printed, too, and the longest push is given over all pushes and over those that got no new memory. Run it several times,
on an idle machine.

decode: decoding and hashing of JSON samples, and what a Python consumer would write: a typed msgspec decode into a
Struct, then one xxhash call per id, both appended to lists that become arrays. Both sides end with the same arrays,
which is checked first. Prints a line of JSON by kind of ids: "text" are like "c7_83a1f2", "hex" like "05db9164".

The two sides take turns. Times are CPU time of the thread, which other processes hardly change; figures are medians.
"""

import argparse
import json
import mmap
import random
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
import xxhash
from harness.processes import memory_of
from numpy.typing import NDArray

from streamtrain import _core

DIM = 16
BATCH = 16_384
GROWTH_BATCH = 10_000
PAYLOAD = 8 + DIM * 4 + DIM * 4  # key, embedding, optimizer state
HUGE_PAGE = 2 << 20
CATEGORICALS = [f"c{i}" for i in range(26)]
NUMERICS = [f"n{i}" for i in range(13)]

Keys = NDArray[np.uint64]
Call = Callable[[NDArray[np.int64], Keys], None]


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
        """The figures of some pushes; `pull_seconds` is the time of a pulled row."""
        seconds = [push.seconds for push in pushed]
        median = statistics.median(seconds)
        return cls(
            insert=pull_seconds * GROWTH_BATCH / median,
            insert_all=pull_seconds * GROWTH_BATCH / statistics.mean(seconds),
            stall=max(push.seconds for push in pushed if not push.faulted) / median,
            stall_all=max(seconds) / median,
            touch=longest_touch / median,
        )


def table(args: argparse.Namespace) -> None:
    """Measures the table."""
    rng = np.random.default_rng(1)
    figures: dict[str, tuple[float, str]] = {}  # name: (value, bar)
    keys = rng.integers(0, 2**64, args.rows, dtype=np.uint64)
    before = memory_of("VmRSS")
    one = new_table()
    grow(one, keys)
    peak = memory_of("VmHWM") - before
    figures["peak memory / payload, growth included"] = peak / len(one) / PAYLOAD, "<= 1.25"
    figures["nbytes / payload"] = one.nbytes / len(one) / PAYLOAD, "<= 1.25"

    pulls, pushes, pull_seconds = pull_and_push(one, keys, args.rounds or 7)
    figures["pull / numpy.take"] = pulls, ">= 0.5"
    figures["push / NumPy gather-update-scatter"] = pushes, ">= 0.5"
    del one

    growths = []
    for _ in range(args.growths):
        longest_touch = touch(2 * args.rows * (PAYLOAD + 32))
        pushed = grow(new_table(), rng.integers(0, 2**64, 2 * args.rows, dtype=np.uint64))
        growths.append(Growth.of(pushed, longest_touch, pull_seconds))
    median = Growth(*(statistics.median(column) for column in zip(*growths, strict=True)))
    figures["insert / pull, growth included, median push"] = median.insert, ">= 0.25"
    figures["insert / pull, growth included, whole growth"] = median.insert_all, "(new memory)"
    figures["longest / median push of a growth, without new memory"] = median.stall, "<= 10"
    figures["  in the worst growth"] = max(g.stall for g in growths), ""
    figures["longest / median push of a growth, all pushes"] = median.stall_all, "(new memory)"
    figures["  in the worst growth, all pushes"] = max(g.stall_all for g in growths), ""
    figures["longest plain first touch of 2 MiB / median push"] = median.touch, "(new memory)"

    if args.json:
        print(json.dumps({name: round(value, 3) for name, (value, _) in figures.items()}))
        return
    for name, (value, bar) in figures.items():
        print(f"{name:57}{value:8.2f}  {bar}")
    print(f"(pull: {1 / pull_seconds / 1e6:.1f}M rows/s)")


def new_table() -> _core.Table:
    """An empty table."""
    return _core.Table(DIM, optimizer="adagrad", rate=0.05)


def grow(one: _core.Table, keys: Keys) -> list[Push]:
    """Pushes each key once, in batches of GROWTH_BATCH."""
    gradients = np.full((GROWTH_BATCH, DIM), 0.1, np.float32)
    ones = np.ones(GROWTH_BATCH, np.uint32)
    pushed = []
    for i in range(0, len(keys) - GROWTH_BATCH + 1, GROWTH_BATCH):
        batch = keys[i : i + GROWTH_BATCH]
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        start = time.thread_time()
        one.push(batch, gradients, ones, ones)
        seconds = time.thread_time() - start
        pushed.append(Push(seconds, resource.getrusage(resource.RUSAGE_THREAD).ru_minflt != faults))
    return pushed


def pull_and_push(one: _core.Table, keys: Keys, rounds: int) -> tuple[float, float, float]:
    """The speeds of pull and of push relative to NumPy, and the seconds of a pulled row."""
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
        one.pull(batch, out=out)

    def update(chosen: NDArray[np.int64], _: Keys) -> None:
        accumulator = accumulators[chosen] + gradients * gradients
        accumulators[chosen] = accumulator
        weights[chosen] -= rate * gradients / (np.sqrt(accumulator) + epsilon)

    def push(_: NDArray[np.int64], batch: Keys) -> None:
        one.push(batch, gradients, ones, ones)

    def ratio(numpy_call: Call, table_call: Call) -> tuple[float, float]:
        ratios, row_seconds = [], []
        for _ in range(rounds):
            took: dict[Call, list[float]] = {numpy_call: [], table_call: []}
            for _ in range(100):
                for call, times in took.items():  # in turns, so that noise affects both alike
                    chosen = rng.integers(0, len(keys), BATCH)
                    batch = keys[chosen]
                    start = time.thread_time()
                    call(chosen, batch)
                    times.append(time.thread_time() - start)
            medians = [statistics.median(times) for times in took.values()]
            ratios.append(medians[0] / medians[1])
            row_seconds.append(medians[1] / BATCH)
        return statistics.median(ratios), statistics.median(row_seconds)

    pulls, pull_seconds = ratio(take, pull)
    pushes, _ = ratio(update, push)
    return pulls, pushes, pull_seconds


def touch(size: int) -> float:
    """Touches `size` bytes of new memory by huge pages; the seconds of the longest first touch."""
    longest = 0.0
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory_map:
        memory_map.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, size, HUGE_PAGE):
            start = time.thread_time()
            memory_map[at] = 1
            longest = max(longest, time.thread_time() - start)
    return longest


def decode(args: argparse.Namespace) -> None:
    """Measures decoding."""
    for ids in ["text", "hex"] if args.ids == "both" else [args.ids]:
        print(json.dumps(decode_and_hash(ids, args.batch, args.rounds or 9, args.spaced)))


def make_messages(count: int, ids: str, spaced: bool) -> list[bytes]:
    """Samples as a producer would write them, with the spacing of `json.dumps` if `spaced`."""
    rng = random.Random(7)
    messages = []
    for i in range(count):
        sample: dict[str, Any] = {"ts": 1_700_000_000 + i / 8, "label": rng.randrange(2)}
        for c, name in enumerate(CATEGORICALS):
            value = int(rng.paretovariate(0.6)) % 0xFFFFFF
            sample[name] = f"c{c}_{value:06x}" if ids == "text" else f"{value * 2654435761 % 2**32:08x}"
        for name in NUMERICS:
            digits = rng.randint(1, 6)
            whole = rng.randrange(10**digits)
            sample[name] = whole / 10 ** rng.randint(1, digits) if rng.random() < 0.7 else whole
        messages.append(json.dumps(sample, separators=None if spaced else (",", ":")).encode())
    return messages


def make_peer() -> Callable[[list[bytes]], tuple[Keys, NDArray[np.float32]]]:
    """The decoder of msgspec and xxhash."""
    fields: list[tuple[str, Any]] = [("ts", float), ("label", float)]
    fields += [(name, str) for name in CATEGORICALS] + [(name, float) for name in NUMERICS]
    sample = msgspec.defstruct("Sample", fields)
    decoder: Any = msgspec.json.Decoder(sample)  # mypy does not know the fields of a Struct made at run time
    digest = xxhash.xxh64_intdigest

    def decode_messages(messages: list[bytes]) -> tuple[Keys, NDArray[np.float32]]:
        keys: list[list[int]] = [[] for _ in CATEGORICALS]
        numbers: list[list[float]] = [[] for _ in NUMERICS]
        labels, times = [], []
        id_columns = list(zip(CATEGORICALS, keys, strict=True))
        number_columns = list(zip(NUMERICS, numbers, strict=True))
        decode_one = decoder.decode
        for message in messages:
            row = decode_one(message)
            labels.append(row.label)
            times.append(row.ts)
            for name, column in id_columns:
                column.append(digest(getattr(row, name).encode()))
            for name, values in number_columns:
                values.append(getattr(row, name))
        np.array(labels, np.float32), np.array(times, np.float64)
        return np.array(keys, np.uint64), np.array(numbers, np.float32).T

    return decode_messages


def make_decoder() -> _core.Decoder:
    """The native decoder of the same samples."""
    return _core.Decoder(
        labels=[_core.LabelSpec("label")],
        categoricals=[_core.CategoricalSpec(name) for name in CATEGORICALS],
        crosses=[],
        numerics=[_core.NumericSpec(name) for name in NUMERICS],
        time="ts",
        weight=None,
    )


def seconds_of(call: Callable[[], object], times: int) -> float:
    """The mean CPU time of `times` calls."""
    began = time.thread_time()
    for _ in range(times):
        call()
    return (time.thread_time() - began) / times


def decode_and_hash(ids: str, batch: int, rounds: int, spaced: bool) -> dict[str, Any]:
    """Times both decoders in turns."""
    messages = make_messages(batch, ids, spaced)
    peer, decoder = make_peer(), make_decoder()
    keys, numbers = peer(messages)
    columns = decoder.decode(messages)
    np.testing.assert_array_equal(columns.keys.reshape(keys.shape), keys)
    np.testing.assert_array_equal(columns.numeric, numbers)
    native_times, peer_times = [], []
    for _ in range(rounds):
        peer_times.append(seconds_of(lambda: peer(messages), 5))
        native_times.append(seconds_of(lambda: decoder.decode(messages), 40))
    native, python = statistics.median(native_times), statistics.median(peer_times)
    size = sum(map(len, messages))
    return {
        "benchmark": "core_decode",
        "ids": ids,
        "batch": batch,
        "bytes_per_message": round(size / batch, 1),
        "native_ns_per_message": round(native / batch * 1e9, 1),
        "native_mb_per_s": round(size / native / 1e6, 1),
        "peer_ns_per_message": round(python / batch * 1e9, 1),
        "ratio": round(python / native, 2),
    }


def main() -> None:
    """Runs one of the two."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["table", "decode"])
    parser.add_argument("--rounds", type=int, help="default: 7 of table, 9 of decode")
    parser.add_argument("--rows", type=int, default=10_000_000, help="of the table")
    parser.add_argument("--growths", type=int, default=5, help="tables that are grown to twice --rows")
    parser.add_argument("--json", action="store_true", help="table: print a line of JSON")
    parser.add_argument("--ids", choices=["text", "hex", "both"], default="both", help="kind of ids that are decoded")
    parser.add_argument("--batch", type=int, default=1024, help="messages that are decoded at once")
    parser.add_argument("--spaced", action="store_true", help="decode JSON with spaces after its separators")
    args = parser.parse_args()
    (table if args.what == "table" else decode)(args)


if __name__ == "__main__":
    main()
