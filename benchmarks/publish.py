"""What does publishing cost training? make bench-publish.

    python benchmarks/publish.py --topology colocated
    python benchmarks/publish.py --topology dedicated --dtype float16

Workers learn ready batches as fast as they can, all processes on this machine, with publishing to Valkey off and on in
turns. The batches hold about --touched different ids and repeat several times a second, so about as many rows change
from one publication to the next; the rows that were published are counted in the model's log. What publishing costs by
itself is measured by publisher.py.

Prints a table of all runs, and a line of JSON with the median ratio of samples/s, on / off.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from typing import Any

from harness.figures import median_ratio, table
from harness.models import WORKLOADS, Workload
from harness.processes import Processes, exit_on_sigterm, free_addresses
from harness.training import TOPOLOGIES, Run, add_arguments, shards_of, start_workers

from streamtrain.embedded.valkey import Valkey
from streamtrain.store.redis.log import CommittedPublication
from streamtrain.store.redis.model import RedisModel
from streamtrain.store.redis.server import RedisServer


def batches_that_touch(workload: Workload, batch: int, workers: int, touched: int) -> int:
    """Distinct batches of each worker that have about `touched` different ids together."""
    made = [workload.data(batch, 1, seed=1234 + i) for i in range(workers)]
    while True:
        seen: set[int] = set()
        for count, together in enumerate(zip(*made, strict=True), 1):
            seen.update(*(ids.ravel().tolist() for ids, _, _ in together))
            if len(seen) >= touched:
                return count
        made = [workload.data(batch, 2 * len(made[0]), seed=1234 + i) for i in range(workers)]


def train(args: argparse.Namespace, store: Valkey | None, name: str) -> dict[str, Any]:
    """One run, with or without publishing: samples per second, cores, memory, publications."""
    count = shards_of(args, args.topology)
    publish = {"url": store.url, "every": args.every, "model": name, "dtype": args.dtype} if store else {}
    with Processes() as processes:
        ps = {"addresses": free_addresses(count)}
        processes.settings({"ps": ps, "worker": {"batch_size": args.batch}, "publish": publish})
        if store:
            processes.watch("valkey", store.pid)
        processes.start_shards(count if args.topology == "dedicated" else 0)
        run = Run(processes, start_workers(processes, args, args.topology, batches=args.batches), args)
        done = {"cores": run.cores, "memory_mb": processes.memory(), "samples_per_s": round(run.samples_per_s)}
    return done | (published(store.url, name, run) if store else {})


def published(url: str, name: str, run: Run) -> dict[str, Any]:
    """What the log has of the publications of a run."""
    server = RedisServer(url, timeout=60)
    try:
        found = [one for one in _log(RedisModel(server, name)) if run.first <= one.publication.published <= run.last]
    finally:
        server.close()
    rows, seconds = [sum(len(change.keys) for change in one.changes) for one in found], run.last - run.first
    size = sum(change.keys.nbytes + change.rows.nbytes + change.gone.nbytes for one in found for change in one.changes)
    size += sum(part.nbytes for one in found for part in one.weights)
    return {
        "publications_per_s": round(len(found) / seconds, 2),
        "rows_per_publication": round(statistics.median(rows)) if rows else 0,
        "rows_per_s": round(sum(rows) / seconds),
        "bytes_per_s": round(size / seconds),
        "full_ones": sum(one.is_full for one in found),
    }


def _log(place: RedisModel) -> Iterator[CommittedPublication]:
    """The publications that the log still has, except the first."""
    head = place.head()
    if head is None:
        return
    number = head.publication.number
    while number > 1 and place.log.entry_of(number - 1):
        number -= 1
    yield from place.log.between(place.log.entry_of(number) or head.id, head.id)


def _rows(runs: dict[str, list[dict[str, Any]]]) -> Iterator[list[object]]:
    for kind, of_kind in runs.items():
        for one in of_kind:
            cells = [kind, one["samples_per_s"], one.get("publications_per_s", 0), one.get("rows_per_s", 0)]
            cores = ", ".join(f"{name} {used:.2f}" for name, used in one["cores"].items())
            yield [*cells, f"{one.get('bytes_per_s', 0) / 1e6:.1f}", cores]


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser, seconds=15.0, warmup=6.0, rounds=5)
    parser.add_argument("--topology", choices=TOPOLOGIES, default="colocated")
    parser.add_argument("--every", default="1s", help="interval of publications")
    parser.add_argument("--dtype", choices=["float32", "float16", "int8"], default="float32", help="of published rows")
    parser.add_argument("--touched", type=int, default=100_000, help="different ids of all batches, about")
    parser.add_argument("--batches", type=int, default=0, help="distinct batches of a worker, instead of --touched")
    args = parser.parse_args()
    exit_on_sigterm()
    workload = WORKLOADS[args.workload]
    args.batches = args.batches or batches_that_touch(workload, args.batch, args.workers, args.touched)
    runs: dict[str, list[dict[str, Any]]] = {"off": [], "on": []}
    with Valkey() as store:
        for turn in range(args.rounds):
            # The order alternates, as the machine may become slower or faster meanwhile.
            for kind in ("off", "on") if turn % 2 == 0 else ("on", "off"):
                runs[kind].append(train(args, store if kind == "on" else None, f"run{turn}"))
    print(table(("publishing", "samples/s", "publications/s", "rows/s", "MB/s", "cores"), _rows(runs)))
    on, off = ([one["samples_per_s"] for one in runs[kind]] for kind in ("on", "off"))
    names = ("workload", "batch", "batches", "topology", "workers", "every", "dtype", "seconds")
    figures = {name: getattr(args, name) for name in names}
    print(json.dumps(figures | {"ratio": round(median_ratio(on, off), 3), "runs": runs}))


if __name__ == "__main__":
    main()
