"""Decode and hash JSON samples: the native decoder against msgspec with xxhash, on one core.

The peer is what a Python consumer would write: a typed msgspec decode into a Struct, then one xxhash call per id, both
appended to per-feature lists that become arrays. Both sides end with the same arrays, which is checked before timing.

    python benchmarks/core_decode.py                       # ids like "c7_83a1f2"
    python benchmarks/core_decode.py --ids hex             # ids like "05db9164"

Prints one line of JSON per variant; the ratio is of medians within the run, with the two sides taking turns.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from streamtrain import _core

CATEGORICALS = [f"c{i}" for i in range(26)]
NUMERICS = [f"n{i}" for i in range(13)]


def make_messages(count: int, ids: str, spaced: bool) -> list[bytes]:
    """Make samples as a producer would write them, with `json.dumps` spacing if `spaced`."""
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


def make_peer() -> Callable[[list[bytes]], tuple[NDArray[np.uint64], NDArray[np.float32]]]:
    """Return the msgspec and xxhash decoder."""
    fields: list[tuple[str, Any]] = [("ts", float), ("label", float)]
    fields += [(name, str) for name in CATEGORICALS] + [(name, float) for name in NUMERICS]
    sample = msgspec.defstruct("Sample", fields)
    decoder: Any = msgspec.json.Decoder(sample)  # the fields of a Struct made at run time are not known to mypy
    digest = xxhash.xxh64_intdigest

    def decode(messages: list[bytes]) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
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

    return decode


def make_decoder() -> _core.Decoder:
    """Return the native decoder of the same samples."""
    return _core.Decoder(
        labels=[_core.LabelSpec("label")],
        categoricals=[_core.CategoricalSpec(name) for name in CATEGORICALS],
        crosses=[],
        numerics=[_core.NumericSpec(name) for name in NUMERICS],
        time="ts",
        weight=None,
    )


def seconds(run: Callable[[], object], times: int) -> float:
    """Return the mean time of `times` calls on this thread's processor clock, which other processes do not move."""
    begin = time.thread_time()
    for _ in range(times):
        run()
    return (time.thread_time() - begin) / times


def measure(ids: str, batch: int, runs: int, spaced: bool) -> dict[str, Any]:
    """Time both sides in turns and return the figures."""
    messages = make_messages(batch, ids, spaced)
    peer, decoder = make_peer(), make_decoder()
    keys, numbers = peer(messages)
    columns = decoder.decode(messages)
    np.testing.assert_array_equal(columns.keys.reshape(keys.shape), keys)
    np.testing.assert_array_equal(columns.numeric, numbers)
    native_times, peer_times = [], []
    for _ in range(runs):
        peer_times.append(seconds(lambda: peer(messages), 5))
        native_times.append(seconds(lambda: decoder.decode(messages), 40))
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
    """Run the variants that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", choices=["text", "hex", "both"], default="both")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--spaced", action="store_true", help="json.dumps' default separators, with spaces")
    arguments = parser.parse_args()
    for ids in ["text", "hex"] if arguments.ids == "both" else [arguments.ids]:
        print(json.dumps(measure(ids, arguments.batch, arguments.runs, arguments.spaced)))


if __name__ == "__main__":
    main()
