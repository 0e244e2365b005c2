"""What publishing to Redis costs by itself, by the type of rows: make bench-publish.

    python benchmarks/dictionaries.py --rows 1000000 --touched 100000

Rows of 16 floats, one shard, Valkey on this machine, nothing else at work: a full publication of all rows, then
publications of random rows: write (to the log), commit, and apply (over the rows of the head). In turns with them the
floor: the same keys and bytes by HSET with 8192 fields to a command, into one big hash, pipelined.
Prints a table of medians (of CPU means), and a line of JSON; rows/s are of write, commit and apply together.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import redis
from numpy.typing import NDArray
from processes import cpu_seconds, end_in_order

from streamtrain._core import hash_integers
from streamtrain.embedded.valkey import Valkey
from streamtrain.store.origin import Publication, RowChange, Weights
from streamtrain.store.redis_dictionaries import RedisDictionaries
from streamtrain.store.redis_layout import Layout, TableSize
from streamtrain.store.redis_model import RedisModel
from streamtrain.store.redis_server import RedisServer

DIM = 16
PART = 1 << 15
FIELDS = 1 << 13
DTYPES = ("float32", "float16", "int8")
WEIGHTS = Weights(np.zeros(150_000, np.float32), np.empty(0, np.float32))  # about those of W1


class Clocks:
    """Seconds, and those of CPU of the server and of this process, from its making on.

    Args:
        server: its process.
    """

    def __init__(self, server: int) -> None:
        self._server = server
        self._began = self._now()

    def _now(self) -> NDArray[np.float64]:
        return np.array([time.perf_counter(), cpu_seconds(self._server), cpu_seconds(os.getpid())])

    def seconds(self) -> list[float]:
        """So far."""
        return [round(float(one), 4) for one in self._now() - self._began]


class Published:
    """A model of one shard.

    Args:
        server: where it is published.
        dtype: of its rows.
        keys: of all rows.
    """

    def __init__(self, server: RedisServer, dtype: str, keys: NDArray[np.uint64]) -> None:
        self._dictionaries = RedisDictionaries(RedisModel(server, dtype))
        self._dtype, self._keys = dtype, keys
        self._number = 0

    def full(self) -> None:
        """Publishes all rows."""
        layout = self._dictionaries.begin({"ids": TableSize(DIM, 2 * len(self._keys))}, dtype=self._dtype, shards=1)
        self.publish(self._all(), layout)

    def _all(self) -> Iterator[RowChange]:
        for start in range(0, len(self._keys), PART):
            yield change_of(self._keys[start : start + PART], start)

    def publish(self, changes: Iterator[RowChange], layout: Layout | None = None) -> dict[str, float]:
        """Publishes changes; bytes in the log, and seconds by stage."""
        self._number += 1
        rows = {"ids": len(self._keys)}
        at = [time.perf_counter()]
        part = self._dictionaries.write(self._number, 0, changes, WEIGHTS, rows=rows, layout=layout)
        at.append(time.perf_counter())
        about: dict[str, Any] = {"clock": {0: self._number}, "watermark": 0.0, "published": time.time()}
        about |= {"dtype": self._dtype, "rows": rows}
        self._dictionaries.commit(Publication(self._number, None, self._dtype, "run", "{}", **about), [part], layout)
        at.append(time.perf_counter())
        self._dictionaries.apply(0)
        at.append(time.perf_counter())
        return {"bytes": part.size, **dict(zip(("write", "commit", "apply"), np.diff(at).tolist(), strict=True))}


def change_of(keys: NDArray[np.uint64], seed: int) -> RowChange:
    """Rows at random."""
    rows = np.random.default_rng(seed).standard_normal((len(keys), DIM), np.float32)
    return RowChange("ids", keys, rows, keys[:0])


def plain(client: "redis.Redis", change: RowChange) -> None:
    """The floor: rows as bytes into one big hash."""
    names, rows = change.keys.astype("<u8").tobytes(), change.rows.tobytes()
    width = 4 * DIM
    pipeline = client.pipeline(transaction=False)
    for start in range(0, len(change.keys), FIELDS):
        fields = [
            part
            for i in range(start, min(start + FIELDS, len(change.keys)))
            for part in (names[8 * i : 8 * i + 8], rows[width * i : width * i + width])
        ]
        pipeline.hset("plain", items=fields)
    pipeline.execute()


def memory_of(client: "redis.Redis") -> int:
    """Bytes that the server has in use."""
    return int(client.info("memory")["used_memory"])


def measure(args: argparse.Namespace, server: Valkey, keys: NDArray[np.uint64]) -> dict[str, Any]:
    """All types and the floor, in turns."""
    assert server.pid
    done: dict[str, Any] = {name: {} for name in (*DTYPES, "plain")}
    client, place = redis.Redis.from_url(server.url), RedisServer(server.url, timeout=60)
    models = {dtype: Published(place, dtype, keys) for dtype in DTYPES}
    for name, one in done.items():
        before, clocks = memory_of(client), Clocks(server.pid)
        if name == "plain":
            for start in range(0, len(keys), PART):
                plain(client, change_of(keys[start : start + PART], start))
        else:
            models[name].full()
        one["full_s"] = clocks.seconds()[0]
        one["bytes_per_row"] = round((memory_of(client) - before) / len(keys), 1)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in done}
    rng = np.random.default_rng(0)
    for turn in range(args.rounds):
        change = change_of(rng.choice(keys, args.touched, replace=False), turn)
        for name in done:
            clocks, stages = Clocks(server.pid), {}
            if name == "plain":
                plain(client, change)
            else:
                stages = models[name].publish(iter([change]))
            whole, of_server, of_client = clocks.seconds()
            rounds[name].append({"seconds": whole, "server_cpu": of_server, "client_cpu": of_client, **stages})
    client.close()
    place.close()
    for name, of_name in rounds.items():
        medians = {what: statistics.median(one[what] for one in of_name) for what in of_name[0]}
        # The system counts CPU in hundredths of a second.
        medians |= {what: statistics.mean(one[what] for one in of_name) for what in ("server_cpu", "client_cpu")}
        done[name] |= {what: round(value, 4) for what, value in medians.items()}
        done[name]["rows_per_s"] = round(args.touched / medians["seconds"])
        ratio = statistics.median(a["seconds"] / b["seconds"] for a, b in zip(of_name, rounds["plain"], strict=True))
        done[name]["seconds_to_plain"] = round(ratio, 2)
    return done


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--touched", type=int, default=100_000, help="rows of a publication")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    end_in_order()
    with Valkey() as server:
        done = measure(args, server, hash_integers(np.arange(args.rows, dtype=np.int64)))
    stages = ("write", "commit", "apply", "server_cpu", "client_cpu")
    print(f"| {args.touched:,} rows | {' ms | '.join(stages)} ms | rows/s | / plain | MB | B/row kept | full s |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for name, one in done.items():
        cells = [name, *(round(1e3 * one[stage], 1) if stage in one else "" for stage in stages)]
        cells += [f"{one['rows_per_s']:,}", one["seconds_to_plain"], round(one.get("bytes", 0) / 1e6, 2) or ""]
        print(f"| {' | '.join(map(str, [*cells, one['bytes_per_row'], one['full_s']]))} |")
    print(json.dumps({"rows": args.rows, "touched": args.touched, "rounds": args.rounds, "results": done}))


if __name__ == "__main__":
    main()
