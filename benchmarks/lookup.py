"""What looking rows up costs a prediction, by the number of rows that a serving process holds: make bench-lookup.

    python benchmarks/lookup.py --rows 10000 1000000 10000000

W1 by default (26 ids of 16 floats an instance, all in one table), one thread, without HTTP: JSON to predictions by a
`Predictor`, and its stages one by one: decode, plan, pull (from the replica's native table), graph. Ids are drawn
evenly over all rows, so that nearly every row of a large table misses the caches: the worst case. The floor beside
pull is NumPy's take of as many random rows of one array, which hashes nothing.
All sizes are there at once and take turns. Prints a table of medians over the rounds, and a line of JSON.
"""

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
from numpy.typing import NDArray
from processes import end_in_order, pss_mb
from workloads import WORKLOADS, Workload, model

from streamtrain._core import hash_integers
from streamtrain.model.model import Model
from streamtrain.model.samples import SampleReader
from streamtrain.model.spec import Spec
from streamtrain.serve.graph import Graph
from streamtrain.serve.predictor import Predictor
from streamtrain.store.origin import Publication, RowChange, Step, Weights

PART = 1 << 16
STAGES = ("decode", "plan", "pull", "graph")


def first_weights(made: Model) -> Weights:
    """Those that a model begins with."""
    variables = (made.keras.trainable_variables, made.statistics_variables)
    dense, statistics = ([one.numpy() for one in of] for of in variables)
    return Weights(made.dense.flatten(dense), made.statistics.flatten(statistics))


class Made:
    """An origin whose head has so many rows, which are made while they are loaded.

    Args:
        made: the model; its first weights are published.
        rows: of its only table; the ids are 0 to rows - 1.
    """

    name = "rows made up"

    def __init__(self, made: Model, rows: int) -> None:
        (self._table,) = made.schema.tables
        self._rows = rows
        self._weights = first_weights(made)
        about: dict[str, Any] = {"clock": {}, "watermark": 0.0, "published": 0.0, "dtype": "float32"}
        self.head = Publication(
            1, None, made.name, "run", Spec.of(made).to_json(), rows={self._table.name: rows}, **about
        )

    def versions(self) -> list[Publication]:
        """See Origin."""
        return []

    def labels(self) -> dict[str, int]:
        """See Origin."""
        return {}

    def find(self, version: int | None) -> Publication | None:
        """See Origin."""
        return self.head if version is None else None

    def load(self, publication: Publication, take: Callable[[RowChange], object]) -> tuple[Publication, Weights]:
        """See Origin."""
        rng = np.random.default_rng(0)
        for start in range(0, self._rows, PART):
            keys = hash_integers(np.arange(start, min(start + PART, self._rows), dtype=np.int64))
            rows = rng.standard_normal((len(keys), self._table.dim), np.float32) * np.float32(0.05)
            take(RowChange(self._table.name, keys, rows, keys[:0]))
        return publication, self._weights

    def follow(self, publication: Publication, seconds: float) -> Iterator[Step]:
        """See Origin."""
        return iter(())


def messages(workload: Workload, rows: int, instances: int, count: int, rng: np.random.Generator) -> list[list[bytes]]:
    """Requests of so many instances as JSON, whose ids are drawn evenly from all rows."""
    made = []
    for _ in range(count):
        ids = rng.integers(0, rows, (instances, workload.ids)).tolist()
        numbers = rng.standard_normal((instances, workload.numbers)).round(4).tolist()
        samples = [
            {f"id{i}": one for i, one in enumerate(of_sample)} | {f"number{i}": one for i, one in enumerate(of_numbers)}
            for of_sample, of_numbers in zip(ids, numbers, strict=True)
        ]
        made.append([json.dumps(sample).encode() for sample in samples])
    return made


class Size:
    """A predictor over so many rows, and what it is asked.

    Args:
        workload: of which.
        made: its model.
        graph: of the model.
        rows: how many.
    """

    def __init__(self, workload: Workload, made: Model, graph: Graph, rows: int) -> None:
        self.rows = rows
        self._workload, self._graph, self._rng = workload, graph, np.random.default_rng(1)
        origin = Made(made, rows)
        self.predictor = Predictor.load(made, graph, origin, origin.head, "head")
        self._reader, self._planner = SampleReader(made, with_labels=False), made.planner(1)
        weights = first_weights(made)
        self._tensors = graph.tensors(weights)

    def requests(self, instances: int, count: int) -> list[list[bytes]]:
        """Ones that were never asked before, so that their rows are in no cache."""
        return messages(self._workload, self.rows, instances, count, self._rng)

    def whole(self, request: list[bytes]) -> float:
        """Seconds of a prediction."""
        began = time.perf_counter()
        self.predictor.predict_messages(request)
        return time.perf_counter() - began

    def stages(self, request: list[bytes]) -> list[float]:
        """Seconds of its stages."""
        at = [time.perf_counter()]
        batch, _ = self._reader.decode(request)
        at.append(time.perf_counter())
        plan = self._planner.plan(batch.keys, batch.starts, batch.offsets, batch.times)
        at.append(time.perf_counter())
        (rows,) = self.predictor.loaded.read([plan]).rows
        at.append(time.perf_counter())
        self._graph.run(self._tensors, plan, rows, batch)
        at.append(time.perf_counter())
        return np.diff(at).tolist()


class Floor:
    """Random rows of one array.

    Args:
        rows: how many it has.
        dim: floats of each.
    """

    def __init__(self, rows: int, dim: int) -> None:
        self._array = np.zeros((rows, dim), np.float32)
        self._array += 1  # pages that were never written are all the same one
        self._rng = np.random.default_rng(2)

    def seconds(self, keys: int) -> float:
        """Of taking so many rows."""
        at: NDArray[np.int64] = self._rng.integers(0, len(self._array), keys)
        began = time.perf_counter()
        self._array.take(at, axis=0)
        return time.perf_counter() - began


def measure(size: Size, floor: Floor, instances: int, repeats: int, ids: int) -> dict[str, float]:
    """Median microseconds of one round."""
    requests = size.requests(instances, 2 * repeats)
    whole = statistics.median(size.whole(one) for one in requests[:repeats])
    stages = np.median([size.stages(one) for one in requests[repeats:]], axis=0)
    taken = statistics.median(floor.seconds(instances * ids) for _ in range(repeats))
    seconds = {"whole": whole, **dict(zip(STAGES, stages.tolist(), strict=True)), "take": taken}
    return {name: 1e6 * one for name, one in seconds.items()}


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, default="w1")
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 1_000_000, 10_000_000])
    parser.add_argument("--instances", type=int, nargs="+", default=[1, 512], help="per prediction")
    parser.add_argument("--repeats", type=int, nargs="+", default=[300, 30], help="predictions of one round, of each")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    end_in_order()
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    workload = WORKLOADS[args.workload]
    made = model(workload)
    graph = Graph(made)
    sizes, memory, loading = [], {}, {}
    for rows in args.rows:
        gc.collect()
        before, began = pss_mb(os.getpid()), time.perf_counter()
        sizes.append(Size(workload, made, graph, rows))
        loading[rows] = time.perf_counter() - began
        gc.collect()
        memory[rows] = pss_mb(os.getpid()) - before
    floors = [Floor(rows, workload.dim) for rows in args.rows]
    gc.freeze()
    print("| rows | instances | whole us | decode | plan | pull | graph | take | pull of all | pull / take | MB |")
    print("|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    results = []
    for instances, repeats in zip(args.instances, args.repeats, strict=True):
        rounds: dict[int, list[dict[str, float]]] = {rows: [] for rows in args.rows}
        for turn in range(args.rounds + 1):
            for size, floor in zip(sizes, floors, strict=True):
                figures = measure(size, floor, instances, repeats, workload.ids)
                if turn:  # the first one warms
                    rounds[size.rows].append(figures)
        for size in sizes:
            results.append(_line(size, instances, rounds[size.rows], memory[size.rows], loading[size.rows]))
    print(json.dumps({"workload": args.workload, "ids_per_instance": workload.ids, "results": results}))


def _line(size: Size, instances: int, rounds: list[dict[str, float]], mb: int, loading: float) -> dict[str, Any]:
    us = {name: round(statistics.median(one[name] for one in rounds), 1) for name in rounds[0]}
    share = statistics.median(one["pull"] / sum(one[name] for name in STAGES) for one in rounds)
    ratio = statistics.median(one["pull"] / one["take"] for one in rounds)
    cells = [f"{size.rows:,}", instances, *us.values(), f"{share:.0%}", f"{ratio:.2f}", mb]
    print(f"| {' | '.join(map(str, cells))} |", flush=True)
    return {
        "rows": size.rows,
        "instances": instances,
        "us": us,
        "pull_share": round(share, 3),
        "pull_to_take": round(ratio, 2),
        "memory_mb": mb,
        "bytes_in_replica": size.predictor.loaded.nbytes,
        "bytes_per_row": round(size.predictor.loaded.nbytes / size.rows, 2),
        "load_seconds": round(loading, 2),
    }


if __name__ == "__main__":
    main()
