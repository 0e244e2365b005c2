"""What does looking up rows cost a prediction, by the number of rows that a serving process holds? make bench-lookup.

    python benchmarks/lookup.py --rows 10000 1000000 10000000

W1 by default (26 ids of 16 floats per instance, all in one table), one thread, without HTTP: JSON to predictions by a
`Predictor`, and its stages one by one: decode, plan, pull (from the replica's native table), graph. Ids are drawn
uniformly from all rows, so that nearly every row of a large table misses the caches: the worst case. The floor of pull
is NumPy's take of as many random rows of one array, which hashes nothing. All sizes take turns.

Prints a table (medians of the rounds, µs; "pull of all" is its share of all stages) and a line of JSON.
"""

import argparse
import gc
import json
import os
import statistics
import time
from typing import Any

import numpy as np
from harness.figures import table_header, table_row
from harness.models import WORKLOADS, GeneratedRows, Workload, first_weights
from harness.processes import exit_on_sigterm, pss_mb
from numpy.typing import NDArray

from streamtrain.model.model import Model
from streamtrain.model.samples import SampleReader
from streamtrain.serve.graph import Graph
from streamtrain.serve.predictor import Predictor
from streamtrain.service.start_tensorflow import load_tensorflow

STAGES = ("decode", "plan", "pull", "graph")


def messages(workload: Workload, rows: int, instances: int, count: int, rng: np.random.Generator) -> list[list[bytes]]:
    """Requests of some instances as JSON, whose ids are drawn uniformly from all rows."""
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
    """A predictor that holds a number of rows, and its requests."""

    def __init__(self, workload: Workload, made: Model, graph: Graph, rows: int) -> None:
        self.rows = rows
        self._workload, self._graph, self._rng = workload, graph, np.random.default_rng(1)
        origin = GeneratedRows(made, rows)
        self.predictor = Predictor.load(made, graph, origin, origin.head, "head")
        self._reader, self._planner = SampleReader(made, with_labels=False), made.planner(1)
        weights = first_weights(made)
        self._tensors = graph.tensors(weights)

    def requests(self, instances: int, count: int) -> list[list[bytes]]:
        """New requests, whose rows are in no cache."""
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
    """Takes random rows of an array."""

    def __init__(self, rows: int, dim: int) -> None:
        self._array = np.zeros((rows, dim), np.float32)
        self._array += 1  # pages that were never written share one physical page
        self._rng = np.random.default_rng(2)

    def seconds(self, keys: int) -> float:
        """Seconds of taking `keys` rows."""
        at: NDArray[np.int64] = self._rng.integers(0, len(self._array), keys)
        began = time.perf_counter()
        self._array.take(at, axis=0)
        return time.perf_counter() - began


def measure(size: Size, floor: Floor, instances: int, repeats: int, ids: int) -> dict[str, float]:
    """Median microseconds of a round."""
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
    parser.add_argument("--instances", type=int, nargs="+", default=[1, 512], help="of a prediction")
    parser.add_argument(
        "--repeats", type=int, nargs="+", default=[300, 30], help="predictions per round, for each of --instances"
    )
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    exit_on_sigterm()
    load_tensorflow(1)
    workload = WORKLOADS[args.workload]
    made = workload.model()
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
    names = ("whole µs", *STAGES, "take", "pull of all", "pull / take", "MB")
    print(table_header(("rows", "instances", *names)), flush=True)
    results = []
    for instances, repeats in zip(args.instances, args.repeats, strict=True):
        rounds: dict[int, list[dict[str, float]]] = {rows: [] for rows in args.rows}
        for turn in range(args.rounds + 1):
            for size, floor in zip(sizes, floors, strict=True):
                figures = measure(size, floor, instances, repeats, workload.ids)
                if turn:  # the first one warms up
                    rounds[size.rows].append(figures)
        for size in sizes:
            results.append(_line(size, instances, rounds[size.rows], memory[size.rows], loading[size.rows]))
    print(json.dumps({"workload": args.workload, "ids_per_instance": workload.ids, "results": results}))


def _line(size: Size, instances: int, rounds: list[dict[str, float]], mb: int, loading: float) -> dict[str, Any]:
    us = {name: round(statistics.median(one[name] for one in rounds), 1) for name in rounds[0]}
    share = statistics.median(one["pull"] / sum(one[name] for name in STAGES) for one in rounds)
    ratio = statistics.median(one["pull"] / one["take"] for one in rounds)
    cells = [f"{size.rows:,}", instances, *us.values(), f"{share:.0%}", f"{ratio:.2f}", mb]
    print(table_row(cells), flush=True)
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
