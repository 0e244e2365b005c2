"""How fast do workers learn from JSON in Kafka, compared with ready batches? make bench-stream.

    python benchmarks/stream.py --workload w1 --topology colocated
    python benchmarks/stream.py --workload readme --topology dedicated --micro

Starts a broker, fills a topic of 6 partitions, and has `streamtrain worker` processes learn it from the beginning, one
TensorFlow thread each; in turns with them, the same step in the same topology learns from ready batches (cluster.py).
With --broker the topic is one that is full already, and no ready batches are learned.

Prints a line of JSON: samples/s of both by round and the median of their ratio, the share of the workers' time that
each stage took, and their resident memory (MB) at the beginning and the end of the last run.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
import uuid
from typing import Any, NamedTuple

from harness.client import learned_samples, scrape
from harness.figures import median_ratio
from harness.models import location
from harness.processes import BENCHMARKS, Processes, exit_on_sigterm, free_addresses, free_ports, memory_of
from harness.training import TOPIC, TOPOLOGIES, WARMUP_SECONDS, add_arguments, filled_broker, shards_of

STAGES = "streamtrain_worker_stage_seconds_sum"


class Reading(NamedTuple):
    """The figures of a worker at a moment.

    Attributes:
        at: seconds.
        samples: that it has learned.
        stages: seconds by stage.
        memory: resident, MB.
    """

    at: float
    samples: float
    stages: dict[str, float]
    memory: int


def read(port: int, pid: int) -> Reading:
    """Reads the metrics of a worker."""
    stages = {one.labels["stage"]: one.value for of in scrape(port) for one in of.samples if one.name == STAGES}
    return Reading(time.monotonic(), learned_samples(port), stages, memory_of("VmRSS", pid) >> 20)


def measure(args: argparse.Namespace, servers: str) -> dict[str, Any]:
    """One run from the beginning of the topic."""
    count, ports = shards_of(args, args.topology), free_ports(args.workers)
    with Processes() as processes:
        processes.settings(
            {
                # A new group: the last members of another are taken for alive for a while.
                "stream": {"url": f"kafka://{servers}", "topic": TOPIC, "group": uuid.uuid4().hex},
                "worker": {"batch_size": args.batch},
                "ps": {"addresses": free_addresses(count), "wire_dtype": args.dtype},
            },
            model=location(args.workload + ("_micro" if args.micro else "")),
        )
        processes.start_shards(count if args.topology == "dedicated" else 0)
        for i, port in enumerate(ports):
            shard = ["--shard", str(i)] if args.topology == "colocated" else []
            processes.start(f"worker{i}", "worker", "--set", f"worker.metrics=127.0.0.1:{port}", *shard)
        processes.wait_until(lambda: all(map(learned_samples, ports)), "workers did not learn")
        processes.sleep(args.warmup)
        pids = [processes.pids[f"worker{i}"] for i in range(args.workers)]
        first = [read(*one) for one in zip(ports, pids, strict=True)]
        processes.sleep(args.seconds)
        last = [read(*one) for one in zip(ports, pids, strict=True)]
        if args.verbose:
            print(processes.logs(), file=sys.stderr)
    pairs = list(zip(first, last, strict=True))
    seconds = sum(b.at - a.at for a, b in pairs)
    shares = {
        name: sum(b.stages[name] - a.stages.get(name, 0.0) for a, b in pairs) / seconds for name in last[0].stages
    }
    return {
        "samples_per_s": round(sum((b.samples - a.samples) / (b.at - a.at) for a, b in pairs)),
        "shares": {name: round(share, 3) for name, share in shares.items()},
        "memory_mb": [[a.memory, b.memory] for a, b in pairs],
    }


def ready_rate(args: argparse.Namespace) -> float:
    """Samples per second of the same step on ready batches, in the same topology."""
    command = [
        *(sys.executable, str(BENCHMARKS / "cluster.py")),
        *("--workload", args.workload, "--batch", str(args.batch), "--topologies", args.topology),
        *("--workers", str(args.workers), "--shards", str(args.shards), "--dtype", args.dtype),
        *("--seconds", str(args.seconds), "--rounds", "1", *(["--micro", "8"] if args.micro else [])),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1])["samples_per_s"])


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser, seconds=15.0, warmup=WARMUP_SECONDS, rounds=3)
    parser.add_argument("--topology", choices=TOPOLOGIES, default="colocated")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32", help="on the wire")
    parser.add_argument("--messages", type=int, default=5_000_000, help="that the topic is filled with")
    parser.add_argument("--broker", help="host:port of one whose topic is full; default: one is started")
    parser.add_argument("--micro", action="store_true", help="in micro-batches of 8; without, a batch is one step")
    parser.add_argument("--verbose", action="store_true", help="show the ends of all logs")
    args = parser.parse_args()
    exit_on_sigterm()
    ours, ready = [], []
    if args.broker:
        ours = [measure(args, args.broker) for _ in range(args.rounds)]
    else:
        with filled_broker(args.workload, args.messages) as servers:
            for _ in range(args.rounds):
                ours.append(measure(args, servers))
                ready.append(ready_rate(args))
    rates = [one["samples_per_s"] for one in ours]
    figures = {name: getattr(args, name) for name in ("workload", "batch", "topology", "workers", "dtype")}
    figures |= {**ours[-1], "samples_per_s": statistics.median(rates), "runs": rates}
    if ready:
        figures |= {"ready_runs": ready, "ratio_to_ready": round(median_ratio(rates, ready), 3)}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
