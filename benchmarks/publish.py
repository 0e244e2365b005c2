"""What publishing costs training: make bench-publish.

    python benchmarks/publish.py --topology colocated
    python benchmarks/publish.py --topology dedicated --dtype float16

Workers learn ready batches of W1 as fast as they can, all processes on this machine, with publishing to Valkey off and
on in turns. The batches hold about as many different ids as --touched says, and come round several times a second, so
that about so many rows change from one publication to the next: the number that was published is read from the
model's log. What publishing costs without training is in dictionaries.py.
Prints a table of all runs, and a line of JSON with the ratio of samples/s, on / off (median over rounds).
"""

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import cluster
from processes import Processes, Usage, end_in_order
from workloads import WORKLOADS, Workload, columns, model

from streamtrain.embedded.valkey import Valkey
from streamtrain.store.redis_log import Committed
from streamtrain.store.redis_model import RedisModel
from streamtrain.store.redis_server import RedisServer

DTYPES = ("float32", "float16", "int8")
TELL_SECONDS = 0.25


def work(args: argparse.Namespace) -> None:
    """One worker process, and its shard if colocated: prints seconds and samples, as lines of JSON."""
    import grpc
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    from streamtrain.cluster.process import PsProcess
    from streamtrain.config import load_settings
    from streamtrain.model.samples import SampleReader
    from streamtrain.model.spec import Spec
    from streamtrain.ps.control import CHANNEL_OPTIONS, Retry, patiently
    from streamtrain.ps.shards import Beginning, Shards
    from streamtrain.train.loop import Loop
    from streamtrain.train.pace import Pace
    from streamtrain.train.step import Step

    made, settings, stopped = model(WORKLOADS[args.workload]), load_settings(), threading.Event()
    data = WORKLOADS[args.workload].data(args.batch, args.batches, seed=1234 + args.index)
    batches = [batch for one in data for batch, _ in SampleReader(made).batches(columns(one), args.batch)]
    step, addresses = Step(made), settings.ps.addresses
    places: list[Any] = [(grpc.insecure_channel(one, options=CHANNEL_OPTIONS), one) for one in addresses]
    if args.topology == "colocated":
        ps = PsProcess(args.index, addresses, settings)
        ps.start()
        places[args.index] = ps.node
    shards = Shards(places, Beginning(Spec.of(made), step.initial_dense, step.initial_statistics, {}))
    run = patiently(shards.agree, Retry(), stopped)
    loop = Loop(
        *(made, step, shards.client(f"worker-{args.index}", run), shards.stands),
        intake=cluster.ReadyBatches(args.index, batches, args.batch),
        shards=len(places),
        pace=Pace(batch_size=args.batch),
    )
    thread = threading.Thread(target=loop.run, args=(stopped,))
    thread.start()
    while thread.is_alive() and not stopped.wait(TELL_SECONDS):
        print(json.dumps([time.time(), loop.tally.samples]), flush=True)


def batches_of(workload: Workload, batch: int, workers: int, touched: int) -> int:
    """Distinct batches of each worker that have together about so many different ids."""
    made = [workload.data(batch, 1, seed=1234 + i) for i in range(workers)]
    while True:
        seen: set[int] = set()
        for count, together in enumerate(zip(*made, strict=True), 1):
            seen.update(*(ids.ravel().tolist() for ids, _, _ in together))
            if len(seen) >= touched:
                return count
        made = [workload.data(batch, 2 * len(made[0]), seed=1234 + i) for i in range(workers)]


def train(args: argparse.Namespace, store: Valkey | None, name: str) -> dict[str, Any]:
    """One run, publishing to a server or not: samples per second, cores, memory, publications."""
    count = args.workers if args.topology == "colocated" else args.shards
    addresses = [f"127.0.0.1:{port}" for port in cluster.free_ports(count)]
    publish = {"url": store.url, "every": args.every, "model": name, "dtype": args.dtype} if store else {}
    with Processes() as processes:
        processes.settings({"ps": {"addresses": addresses}, "publish": publish})
        if store:
            processes.watch("valkey", store.pid)
        for i in range(count if args.topology == "dedicated" else 0):
            processes.start(f"ps{i}", "ps", "--index", str(i))
        options = ["--topology", args.topology, "--workload", args.workload, "--batch", str(args.batch)]
        workers = [f"worker{i}" for i in range(args.workers)]
        for i, worker in enumerate(workers):
            more = ["--index", str(i), "--batches", str(args.batches)]
            processes.script(worker, "publish.py", "--role", "worker", *options, *more)
        readings = [processes.readings[worker] for worker in workers]
        processes.until(lambda: all(into and into[-1][1] for into in readings), "workers do not learn")
        processes.sleep(args.warmup)
        usage, first = Usage(processes), time.time()
        processes.sleep(args.seconds)
        cores, last = usage.cores(), time.time()
        done: dict[str, Any] = {"cores": cores, "memory_mb": processes.memory()}
    done["samples_per_s"] = round(sum(_rate(into, first, last) for into in readings))
    return done | (published(store.url, name, first, last) if store else {})


def _rate(readings: list[list[float]], first: float, last: float) -> float:
    within = [one for one in readings if first <= one[0] <= last]
    return (within[-1][1] - within[0][1]) / (within[-1][0] - within[0][0])


def published(url: str, name: str, first: float, last: float) -> dict[str, Any]:
    """What the log has of the publications of a time."""
    server = RedisServer(url, timeout=60)
    try:
        found = [one for one in _log(RedisModel(server, name)) if first <= one.publication.published <= last]
    finally:
        server.close()
    rows = [sum(len(change.keys) for change in one.changes) for one in found]
    size = sum(change.keys.nbytes + change.rows.nbytes + change.gone.nbytes for one in found for change in one.changes)
    size += sum(part.nbytes for one in found for part in one.weights)
    return {
        "publications_per_s": round(len(found) / (last - first), 2),
        "rows_per_publication": round(statistics.median(rows)) if rows else 0,
        "rows_per_s": round(sum(rows) / (last - first)),
        "bytes_per_s": round(size / (last - first)),
        "full_ones": sum(one.is_full for one in found),
    }


def _log(place: RedisModel) -> Iterator[Committed]:
    """The publications that the log still has, but for the first."""
    head = place.head()
    if head is None:
        return
    number = head.publication.number
    while number > 1 and place.log.entry_of(number - 1):
        number -= 1
    yield from place.log.between(place.log.entry_of(number) or head.id, head.id)


def compare(args: argparse.Namespace) -> None:
    """Off and on in turns."""
    workload = WORKLOADS[args.workload]
    args.batches = args.batches or batches_of(workload, args.batch, args.workers, args.touched)
    runs: dict[str, list[dict[str, Any]]] = {"off": [], "on": []}
    with Valkey() as store:
        for turn in range(args.rounds):
            # Who comes first changes, as a machine may grow slower or faster.
            for kind in ("off", "on") if turn % 2 == 0 else ("on", "off"):
                runs[kind].append(train(args, store if kind == "on" else None, f"run{turn}"))
    ratio = statistics.median(
        on["samples_per_s"] / off["samples_per_s"] for off, on in zip(runs["off"], runs["on"], strict=True)
    )
    print("| publishing | samples/s | publications/s | rows/s | MB/s | cores |\n|---|---|---|---|---|---|")
    for kind, of_kind in runs.items():
        for one in of_kind:
            cores = ", ".join(f"{name} {used:.2f}" for name, used in one["cores"].items())
            mb = one.get("bytes_per_s", 0) / 1e6
            cells = [kind, one["samples_per_s"], one.get("publications_per_s", 0), one.get("rows_per_s", 0)]
            print(f"| {' | '.join(map(str, cells))} | {mb:.1f} | {cores} |")
    names = ("workload", "batch", "batches", "topology", "workers", "every", "dtype", "seconds")
    about = {name: getattr(args, name) for name in names}
    print(json.dumps(about | {"ratio": round(ratio, 3), "runs": runs}))


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, default="w1")
    parser.add_argument("--topology", choices=cluster.TOPOLOGIES, default="colocated")
    parser.add_argument("--every", default="1s", help="from one publication to the next")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of rows as published")
    parser.add_argument("--touched", type=int, default=100_000, help="different ids of all batches, about")
    parser.add_argument("--batches", type=int, default=0, help="distinct batches of a worker, instead of --touched")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shards", type=int, default=2, help="of the dedicated topology")
    parser.add_argument("--warmup", type=float, default=6.0, help="seconds of a run before those that count")
    parser.add_argument("--seconds", type=float, default=15.0, help="of a run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--role", choices=["worker"], help="of a process")
    parser.add_argument("--index", type=int)
    args = parser.parse_args()
    if args.role:
        work(args)
        return
    end_in_order()
    compare(args)


if __name__ == "__main__":
    main()
