"""From JSON in Kafka to what is learned, W1 or W2: make bench-stream.

    python benchmarks/stream.py --workload w1 --topology colocated

Starts a broker, fills a topic of 6 partitions, and has workers learn it, one TensorFlow thread each; then, in turns,
the same step in the same topology on ready batches (cluster.py). Prints a line of JSON: samples per second of both,
their ratio (median over rounds), what share of the workers' time each stage took, CPU by process, and their memory.
With --broker the topic is one that is full already (see `fill`), and no ready batches are learned.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import cluster
from workloads import WORKLOADS, model

from streamtrain.embedded.jars import resolve
from streamtrain.embedded.kafka import Broker
from streamtrain.stream.kafka import KafkaStream

PARTITIONS = 6
TOPIC = "samples"
DISTINCT = 100_000


def messages(name: str) -> list[bytes]:
    """Distinct samples as JSON; ids are texts."""
    workload = WORKLOADS[name]
    made = []
    for ids, numbers, labels in workload.data(1000, DISTINCT // 1000):
        for i in range(len(ids)):
            sample: dict[str, Any] = {"label": int(labels[i, 0]), "ts": 1_700_000_000 + i}
            sample |= {f"id{j}": f"{one:x}" for j, one in enumerate(ids[i].tolist())}
            sample |= {f"number{j}": round(one, 4) for j, one in enumerate(numbers[i].tolist())}
            made.append(json.dumps(sample, separators=(",", ":")).encode())
    return made


def fill(stream: KafkaStream, made: list[bytes], count: int) -> None:
    """Writes so many messages, round and round."""
    writer = stream.writer()
    for i in range(count):
        writer.write(made[i % len(made)], partition=i % PARTITIONS)
    while writer.flush(10.0):
        continue
    writer.close()


def work(args: argparse.Namespace) -> None:
    """One worker process: prints a line of JSON a second, seconds and samples; then seconds by stage."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    from streamtrain.cluster.worker import WorkerProcess
    from streamtrain.config import load_settings
    from streamtrain.model.spec import Spec
    from streamtrain.train.step import Step

    made = model(WORKLOADS[args.workload])
    overrides = {
        "stream.url": f"kafka://{args.servers}",
        "stream.topic": TOPIC,
        "stream.group": args.group,
        "worker.batch_size": args.batch,
        "ps.addresses": args.ps,
        "ps.wire_dtype": args.dtype,
    }
    shard = args.index if args.role == "colocated" else None
    settings = load_settings(overrides=overrides)
    process = WorkerProcess(made, Step(made), Spec.of(made), args.ps.split(","), settings, shard=shard)
    stopped = threading.Event()
    thread = threading.Thread(target=process.run, args=(stopped,))
    thread.start()
    value = process.metrics.registry.get_sample_value
    while thread.is_alive() and not stopped.wait(0.5):
        print(json.dumps([time.time(), value("streamtrain_worker_samples_total"), stages(value), memory()]), flush=True)


def stages(value: Any) -> dict[str, float]:
    """Seconds so far, by stage."""
    from streamtrain.metrics.of_worker import STAGES

    return {name: value("streamtrain_worker_stage_seconds_sum", {"stage": name}) or 0.0 for name in STAGES}


def memory() -> int:
    """Resident now, MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20


def measure(args: argparse.Namespace, servers: str) -> dict[str, Any]:
    """One run from the beginning of the topic."""
    count = args.workers if args.topology == "colocated" else args.shards
    addresses = ",".join(f"127.0.0.1:{port}" for port in cluster.free_ports(count))
    processes: list[subprocess.Popen[Any]] = []
    try:
        if args.topology == "dedicated":
            for i in range(count):
                command = [sys.executable, "-m", "streamtrain", "ps", "--ps", addresses, "--index", str(i)]
                processes.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        # A group of its own: members of the run before were killed, and are taken for living ones for a while.
        options = [
            "--group",
            uuid.uuid4().hex,
            "--ps",
            addresses,
            "--servers",
            servers,
            "--role",
            args.topology,
            *sys.argv[1:],
        ]
        readings: list[list[Any]] = [[] for _ in range(args.workers)]
        workers = [
            subprocess.Popen(
                [sys.executable, __file__, "--index", str(i), *options], stdout=subprocess.PIPE, stderr=args.log
            )
            for i in range(args.workers)
        ]
        processes += workers
        for worker, into in zip(workers, readings, strict=True):
            threading.Thread(target=collect, args=(worker, into), daemon=True).start()
        while not all(into and into[-1][1] for into in readings):
            if any(worker.poll() is not None for worker in workers):
                raise SystemExit("a worker ended; run it by hand to see why")
            time.sleep(0.1)
        time.sleep(args.warmup)
        first = time.time()
        time.sleep(args.seconds)
        return figures(readings, first, time.time())
    finally:
        for process in processes:
            process.kill()
            process.wait()


def collect(worker: "subprocess.Popen[bytes]", into: list[Any]) -> None:
    """What a worker prints."""
    assert worker.stdout
    for line in worker.stdout:
        into.append(json.loads(line))


def figures(readings: list[list[Any]], first: float, last: float) -> dict[str, Any]:
    """Samples per second, shares of stages, and memory at the beginning and the end."""
    windows = [[one for one in into if first <= one[0] <= last] for into in readings]
    if any(len(window) < 2 for window in windows):
        raise SystemExit("a worker told less than twice how far it is: run it for longer")
    rate = sum((w[-1][1] - w[0][1]) / (w[-1][0] - w[0][0]) for w in windows)
    names = windows[0][0][2]
    seconds = sum(w[-1][0] - w[0][0] for w in windows)
    shares = {name: sum(w[-1][2][name] - w[0][2][name] for w in windows) / seconds for name in names}
    return {
        "samples_per_s": round(rate),
        "shares": {name: round(share, 3) for name, share in shares.items()},
        "memory_mb": [[w[0][3], w[-1][3]] for w in windows],
    }


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, default="w1")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--topology", choices=cluster.TOPOLOGIES, default="colocated")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shards", type=int, default=2, help="of the dedicated topology")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    parser.add_argument("--messages", type=int, default=5_000_000)
    parser.add_argument("--seconds", type=float, default=15.0, help="of one run")
    parser.add_argument("--warmup", type=float, default=cluster.WARMUP_SECONDS, help="seconds before those that count")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--broker", help="host:port of one whose topic is full; default: one is started")
    parser.add_argument("--verbose", action="store_true", help="what workers say")
    parser.add_argument("--role", choices=cluster.TOPOLOGIES, help="of a worker process")
    parser.add_argument("--ps")
    parser.add_argument("--servers")
    parser.add_argument("--group")
    parser.add_argument("--index", type=int)
    args = parser.parse_args()
    if args.role:
        work(args)
        return
    args.log = None if args.verbose else subprocess.DEVNULL
    ours, ready = [], []
    about = {name: getattr(args, name) for name in ("workload", "batch", "topology", "workers", "dtype")}
    if args.broker:
        ours = [measure(args, args.broker) for _ in range(args.rounds)]
    else:
        with full_broker(args.workload, args.messages) as broker:
            for _ in range(args.rounds):
                ours.append(measure(args, broker.servers))
                ready.append(run_ready(args))
    rates = [one["samples_per_s"] for one in ours]
    about |= {**ours[-1], "samples_per_s": statistics.median(rates), "runs": rates}
    if ready:
        ratio = statistics.median(o / r for o, r in zip(rates, ready, strict=True))
        about |= {"ready_runs": ready, "ratio_to_ready": round(ratio, 3)}
    print(json.dumps(about))


@contextmanager
def full_broker(workload: str, count: int) -> Iterator[Broker]:
    """A broker whose topic has so many messages."""
    with tempfile.TemporaryDirectory() as folder, Broker(resolve(), data=Path(folder)) as broker:
        stream = KafkaStream(broker.servers, TOPIC, {})
        stream.create(PARTITIONS)
        fill(stream, messages(workload), count)
        yield broker


def run_ready(args: argparse.Namespace) -> float:
    """Samples per second of the same step on ready batches, in the same topology."""
    command = [
        *(sys.executable, str(Path(__file__).with_name("cluster.py"))),
        *("--workload", args.workload, "--batch", str(args.batch), "--topologies", args.topology),
        *("--workers", str(args.workers), "--shards", str(args.shards), "--dtype", args.dtype),
        *("--seconds", str(args.seconds), "--rounds", "1"),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1])["samples_per_s"])


if __name__ == "__main__":
    main()
