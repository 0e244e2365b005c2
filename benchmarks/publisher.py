"""What publishing costs by processor time, by itself: rows from the tables of shards into Redis.

    python benchmarks/publisher.py --rows 120000 --touched 123000

Two shards of a model of W1's size in this process, Valkey on this machine. Turn by turn some random rows are touched,
which is not counted; then all shards write, the publication is committed, and all shards apply. The processor time of
this process and of the server does not depend on what else the machine does, as seconds would.
Prints microseconds of processor time per row that was published, medians over turns, and a line of JSON.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from processes import end_in_order

from streamtrain._core import hash_integers, shards_of
from streamtrain.cluster.publications import Publications
from streamtrain.cluster.publisher import ShardPublisher
from streamtrain.embedded.valkey import Valkey
from streamtrain.model.spec import Spec
from streamtrain.ps.clock import Span
from streamtrain.ps.consistency import Async
from streamtrain.ps.node import Node
from streamtrain.ps.push import Push, RowUpdate
from streamtrain.ps.shard import Initial, Run
from streamtrain.ps.shards import LocalControl
from streamtrain.store.redis_dictionaries import RedisDictionaries
from streamtrain.store.redis_model import RedisModel
from streamtrain.store.redis_server import RedisServer

DIM, DENSE, SHARDS = 16, 150_000, 2
DTYPES = ("float32", "float16", "int8")
SPEC = Spec(
    schema="publisher",
    seed=0,
    reduction="mean",
    tables=({"name": "ids", "dim": DIM, "optimizer": "adagrad", "rate": 0.05, "expire_after": 0},),
    dense=((DENSE,),),
    statistics=((0,),),
    dense_optimizer={"optimizer": "adam", "rate": 1e-3},
)


class Trained:
    """Shards that are published.

    Args:
        server: where to.
        dtype: of the rows as published.
    """

    def __init__(self, server: RedisServer, dtype: str) -> None:
        model = RedisModel(server, f"publisher-{dtype}")
        nodes = [Node(i, SHARDS, Async, publisher=ShardPublisher(RedisDictionaries(model))) for i in range(SHARDS)]
        for node in nodes:
            zeros = np.zeros(DENSE // SHARDS, np.float32)
            node.initialise(Initial(Run("run", {}), SPEC, zeros, zeros[:0]))
        self._shards = [node.shard for node in nodes]
        self._publications = Publications(
            [*map(LocalControl, nodes)], RedisDictionaries(model), model.keys.model, dtype
        )
        self._learned = 0

    def learn(self, keys: NDArray[np.uint64]) -> None:
        """Touches rows of keys [n]."""
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
        """Publishes what has been touched, and applies it."""
        assert self._publications.publish() is not None


def server_seconds(pid: int) -> float:
    """Processor time of the server's main thread, to the nanosecond, which `cpu_seconds` is not."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def measure(args: argparse.Namespace, store: Valkey) -> dict[str, Any]:
    """Microseconds of processor time per published row, of this process and the server, by type."""
    assert store.pid
    server, rng = RedisServer(store.url, timeout=60), np.random.default_rng(0)
    keys = hash_integers(np.arange(args.rows, dtype=np.int64))
    models = {dtype: Trained(server, dtype) for dtype in args.dtypes.split(",")}
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
    each: dict[str, Any] = {}
    for dtype, pairs in spent.items():
        shards, of_server = (statistics.median(part) * 1e6 / args.touched for part in zip(*pairs, strict=True))
        each[dtype] = {"shards": round(shards, 3), "server": round(of_server, 3)}
    return each


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=200_000, help="of the model")
    parser.add_argument("--touched", type=int, default=100_000, help="rows of a publication")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="of rows as published")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    end_in_order()
    with Valkey() as store:
        done = measure(args, store)
    print("| rows as | shards, us a row | server, us a row |\n|---|---|---|")
    for dtype, of in done.items():
        print(f"| {dtype} | {of['shards']} | {of['server']} |")
    print(json.dumps({"rows": args.rows, "touched": args.touched, "rounds": args.rounds, "results": done}))


if __name__ == "__main__":
    main()
