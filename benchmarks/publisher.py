"""What does publishing to Redis cost by itself, by the type of rows? make bench-publish.

    python benchmarks/publisher.py redis --rows 1000000 --touched 100000
    python benchmarks/publisher.py shards --rows 120000 --touched 123000

Rows of 16 floats, Valkey on this machine, nothing else running. In every round random rows are touched and published,
as each type in turns.

redis: a full publication of all rows, then publications in three stages: write (to the log), commit, and apply (to the
rows of the head). The floor takes turns with them: the same keys and bytes by HSET with 8192 fields to a command, into
one big hash, pipelined. Prints medians (means of CPU); rows/s are of write, commit and apply together.

shards: the same by what a trainer does: two shards of a model of W1's size, in this process, write, the publication is
committed, and all shards apply. Prints microseconds of CPU per published row, of this process and of the server, which
other processes on the machine hardly change.

Both print a table and a line of JSON.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import redis
from harness.figures import median_ratio
from harness.figures import table as markdown
from harness.processes import cpu_seconds, exit_on_sigterm
from numpy.typing import NDArray

from streamtrain._core import hash_integers, shards_of
from streamtrain.embedded.valkey import Valkey
from streamtrain.model.spec import Spec
from streamtrain.ps.clock import Span
from streamtrain.ps.consistency import Async
from streamtrain.ps.nodes.node import Node
from streamtrain.ps.nodes.shards import LocalControl
from streamtrain.ps.push import Push, RowUpdate
from streamtrain.ps.shard import InitialState, Run
from streamtrain.publish.cluster_publisher import Publications
from streamtrain.publish.shard_publisher import ShardPublisher
from streamtrain.store.publication import Publication, RowChange, Weights
from streamtrain.store.redis.dictionary import RedisDictionaries
from streamtrain.store.redis.layout import Layout, TableSize
from streamtrain.store.redis.model import RedisModel
from streamtrain.store.redis.server import RedisServer

DIM, DENSE, SHARDS = 16, 150_000, 2  # dense parameters: about those of W1
PART = 1 << 15
FIELDS = 1 << 13
DTYPES = ("float32", "float16", "int8")
FLOOR = "plain"
WEIGHTS = Weights(np.zeros(DENSE, np.float32), np.empty(0, np.float32))
SPEC = Spec(
    schema="publisher",
    seed=0,
    reduction="mean",
    tables=({"name": "ids", "dim": DIM, "optimizer": "adagrad", "rate": 0.05, "expire_after": 0},),
    dense=((DENSE,),),
    statistics=((0,),),
    dense_optimizer={"optimizer": "adam", "rate": 1e-3},
)

Keys = NDArray[np.uint64]


class PublishedRows:
    """A model of one shard in Redis, without a trainer."""

    def __init__(self, server: RedisServer, dtype: str, keys: Keys) -> None:
        self._dictionaries = RedisDictionaries(RedisModel(server, dtype))
        self._dtype, self._keys = dtype, keys
        self._number = 0

    def publish_all(self) -> None:
        """Publishes all rows."""
        layout = self._dictionaries.begin({"ids": TableSize(DIM, 2 * len(self._keys))}, dtype=self._dtype, shards=1)
        self.publish(random_rows(self._keys), layout)

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


def random_rows(keys: Keys) -> Iterator[RowChange]:
    """Rows of some keys, in parts."""
    for start in range(0, len(keys), PART):
        yield random_change(keys[start : start + PART], start)


def random_change(keys: Keys, seed: int) -> RowChange:
    """Rows of some keys."""
    rows = np.random.default_rng(seed).standard_normal((len(keys), DIM), np.float32)
    return RowChange("ids", keys, rows, keys[:0])


def write_plain(client: "redis.Redis", change: RowChange) -> None:
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
    """Bytes that the server uses."""
    return int(client.info("memory")["used_memory"])


def through_redis(args: argparse.Namespace, server: Valkey, keys: Keys) -> dict[str, Any]:
    """Publications of rows that no trainer holds."""
    pid = server.pid
    assert pid

    def now() -> NDArray[np.float64]:
        return np.array([time.perf_counter(), cpu_seconds(pid), cpu_seconds(os.getpid())])

    done: dict[str, Any] = {name: {} for name in (*args.dtypes, FLOOR)}
    client, place = redis.Redis.from_url(server.url), RedisServer(server.url, timeout=60)
    models = {dtype: PublishedRows(place, dtype, keys) for dtype in args.dtypes}
    for name, figures in done.items():
        before, began = memory_of(client), now()
        if name == FLOOR:
            for change in random_rows(keys):
                write_plain(client, change)
        else:
            models[name].publish_all()
        figures["full_s"] = round(float((now() - began)[0]), 4)
        figures["bytes_per_row"] = round((memory_of(client) - before) / len(keys), 1)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in done}
    rng = np.random.default_rng(0)
    for turn in range(args.rounds):
        change = random_change(rng.choice(keys, args.touched, replace=False), turn)
        for name, runs in rounds.items():
            began, stages = now(), {}
            if name == FLOOR:
                write_plain(client, change)
            else:
                stages = models[name].publish(iter([change]))
            took = dict(zip(("seconds", "server_cpu", "client_cpu"), (now() - began).tolist(), strict=True))
            runs.append(took | stages)
    client.close()
    place.close()
    plain = [one["seconds"] for one in rounds[FLOOR]]
    for name, runs in rounds.items():
        medians = {what: statistics.median(one[what] for one in runs) for what in runs[0]}
        # The kernel counts CPU in hundredths of a second.
        medians |= {what: statistics.mean(one[what] for one in runs) for what in ("server_cpu", "client_cpu")}
        done[name] |= {what: round(value, 4) for what, value in medians.items()}
        done[name]["rows_per_s"] = round(args.touched / medians["seconds"])
        done[name]["seconds_to_plain"] = round(median_ratio([one["seconds"] for one in runs], plain), 2)
    return done


def redis_table(args: argparse.Namespace, done: dict[str, Any]) -> str:
    """The figures of `through_redis`."""
    stages = ("write", "commit", "apply", "server_cpu", "client_cpu")
    names = (f"{args.touched:,} rows", *(f"{stage} ms" for stage in stages))
    rows = []
    for name, one in done.items():
        cells = [name, *(round(1e3 * one[stage], 1) if stage in one else "" for stage in stages)]
        cells += [f"{one['rows_per_s']:,}", one["seconds_to_plain"], round(one.get("bytes", 0) / 1e6, 2) or ""]
        rows.append([*cells, one["bytes_per_row"], one["full_s"]])
    return markdown((*names, "rows/s", "/ plain", "MB", "B/row kept", "full s"), rows)


class TrainedRows:
    """A model of several shards of this process, which are published."""

    def __init__(self, server: RedisServer, dtype: str) -> None:
        model = RedisModel(server, f"publisher-{dtype}")
        nodes = [Node(i, SHARDS, Async, publisher=ShardPublisher(RedisDictionaries(model))) for i in range(SHARDS)]
        for node in nodes:
            zeros = np.zeros(DENSE // SHARDS, np.float32)
            node.initialise(InitialState(Run("run", {}), SPEC, zeros, zeros[:0]))
        self._shards = [node.shard for node in nodes]
        self._publications = Publications(
            [*map(LocalControl, nodes)], RedisDictionaries(model), model.keys.model, dtype
        )
        self._learned = 0

    def learn(self, keys: Keys) -> None:
        """Touches the rows of keys [n]."""
        span = Span(0, self._learned, self._learned + 1)
        rng, of = np.random.default_rng(self._learned), shards_of(keys, SHARDS)
        for shard in self._shards:
            mine = keys[of == shard.index]
            ones = np.ones(len(mine), np.uint32)
            update = RowUpdate(mine, rng.standard_normal((len(mine), DIM), np.float32), ones, ones)
            zeros = np.zeros(DENSE // SHARDS, np.float32)
            shard.push(Push([span], 1, [update], zeros, zeros[:0], 1))
        self._learned += 1

    def publish(self) -> None:
        """Publishes what was touched, and applies it."""
        assert self._publications.publish() is not None


def server_seconds(pid: int) -> float:
    """CPU time of the server's main thread, in nanoseconds rather than the hundredths of `cpu_seconds`."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def through_shards(args: argparse.Namespace, store: Valkey, keys: Keys) -> dict[str, Any]:
    """Publications of shards: microseconds of CPU per row, of this process and the server."""
    assert store.pid
    server, rng = RedisServer(store.url, timeout=60), np.random.default_rng(0)
    models = {dtype: TrainedRows(server, dtype) for dtype in args.dtypes}
    for one in models.values():
        one.learn(keys)
        one.publish()
    spent: dict[str, list[tuple[float, float]]] = {dtype: [] for dtype in models}
    for _ in range(args.rounds):
        touched = rng.choice(keys, args.touched, replace=False)
        for dtype, one in models.items():
            one.learn(touched)
            ours, theirs = time.process_time(), server_seconds(store.pid)
            one.publish()
            spent[dtype].append((time.process_time() - ours, server_seconds(store.pid) - theirs))
    server.close()
    done: dict[str, Any] = {}
    for dtype, pairs in spent.items():
        shards, of_server = (statistics.median(part) * 1e6 / args.touched for part in zip(*pairs, strict=True))
        done[dtype] = {"shards": round(shards, 3), "server": round(of_server, 3)}
    return done


def shards_table(args: argparse.Namespace, done: dict[str, Any]) -> str:
    """The figures of `through_shards`."""
    rows = ((dtype, of["shards"], of["server"]) for dtype, of in done.items())
    return markdown(("rows as", "shards, µs/row", "server, µs/row"), rows)


def main() -> None:
    """Runs one of the two."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["redis", "shards"])
    parser.add_argument("--rows", type=int, help="of the model; default: 1,000,000 of redis, 200,000 of shards")
    parser.add_argument("--touched", type=int, default=100_000, help="rows of a publication")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="of published rows")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    args.rows = args.rows or (1_000_000 if args.what == "redis" else 200_000)
    exit_on_sigterm()
    keys = hash_integers(np.arange(args.rows, dtype=np.int64))
    measure, table = (through_redis, redis_table) if args.what == "redis" else (through_shards, shards_table)
    with Valkey() as store:
        done = measure(args, store, keys)
    print(table(args, done))
    print(json.dumps({"rows": args.rows, "touched": args.touched, "rounds": args.rounds, "results": done}))


if __name__ == "__main__":
    main()
