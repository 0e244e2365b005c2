"""How fast do workers and parameter servers learn from ready batches, as processes? make bench-cluster.

    python benchmarks/cluster.py --workload w1
    python benchmarks/cluster.py --workload w2 --batch 64 --peer PYTHON_OF_PEER PSS_TF.PY

Every worker learns W1 or W2 from batches of its own partition, with one TensorFlow thread. Dedicated: shards are
processes of their own (`streamtrain ps`). Colocated: every worker also serves a shard, which it reaches without a
socket. A peer is a script that trains the workload with TensorFlow's ParameterServerStrategy and prints a line of JSON
with samples_per_s; it takes turns with ours.

Prints a line of JSON by topology: samples/s of all workers together (median of the rounds), CPU, bytes over loopback,
peak memory, and the median of ours / peer of the same round.
"""

import argparse
import json
import statistics
import subprocess
from typing import Any

from harness.figures import median_ratio
from harness.processes import Processes, exit_on_sigterm, free_addresses
from harness.training import TOPOLOGIES, WARMUP_SECONDS, Run, add_arguments, peak_mb, shards_of, start_workers


def measure(args: argparse.Namespace, topology: str) -> dict[str, Any]:
    """One run."""
    count = shards_of(args, topology)
    with Processes() as processes:
        processes.settings(
            {
                "ps": {"addresses": free_addresses(count), "wire_dtype": args.dtype, "lanes": args.lanes}
                | ({"memory": args.memory} if args.memory else {}),
                "worker": {"batch_size": args.batch, "ahead": args.ahead},
            }
        )
        processes.start_shards(count if topology == "dedicated" else 0)
        workers = start_workers(processes, args, topology, batches=args.batches, micro_batch=args.micro)
        run = Run(processes, workers, args)
        per_sample = {name: run.cpu[name] / run.samples for name in processes.pids}
        return {
            "samples_per_s": round(run.samples_per_s),
            "cpu_ms_per_batch": {name: round(1e3 * args.batch * one, 3) for name, one in per_sample.items()},
            "worker_cpu_us_per_sample": _microseconds(per_sample, "worker"),
            "shard_cpu_us_per_sample": _microseconds(per_sample, "ps"),
            "wire_bytes_per_sample": round(run.wire_bytes / run.samples),
            "peak_mb": peak_mb(processes),
        }


def _microseconds(per_sample: dict[str, float], kind: str) -> float:
    """Of CPU, all processes of a kind together."""
    return round(1e6 * sum(one for name, one in per_sample.items() if name.startswith(kind)), 3)


def peer_rate(args: argparse.Namespace) -> float:
    """Samples per second of the peer."""
    command = [*args.peer, "--workload", args.workload, "--batch", str(args.batch), "--runs", "1"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1])["samples_per_s"])


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser, seconds=10.0, warmup=WARMUP_SECONDS, rounds=3)
    parser.add_argument("--batches", type=int, default=0, help="distinct batches; default: 200 of 1024, 2000 of 64")
    parser.add_argument("--topologies", choices=TOPOLOGIES, nargs="+", default=TOPOLOGIES)
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32", help="on the wire")
    parser.add_argument(
        "--lanes", action=argparse.BooleanOptionalAction, default=True, help="shared memory; without, gRPC on loopback"
    )
    parser.add_argument("--micro", type=int, help="samples of a micro-batch; default: a batch is one step")
    parser.add_argument("--ahead", type=int, default=1, help="batches that are pulled ahead")
    parser.add_argument("--memory", help="of a shard's rows, as ps.memory; default: all that they need")
    parser.add_argument("--peer", nargs=argparse.REMAINDER, default=[], help="last: interpreter, script and options")
    args = parser.parse_args()
    args.batches = args.batches or (200 if args.batch >= 1024 else 2000)
    exit_on_sigterm()
    rounds: dict[str, list[dict[str, Any]]] = {topology: [] for topology in args.topologies}
    peers = []
    for _ in range(args.rounds):
        for topology in args.topologies:
            rounds[topology].append(measure(args, topology))
        if args.peer:
            peers.append(peer_rate(args))
    for topology, runs in rounds.items():
        rates = [run["samples_per_s"] for run in runs]
        figures = {
            "topology": topology,
            **{name: getattr(args, name) for name in ("workload", "batch", "workers", "dtype", "ahead")},
            **runs[-1],
            "samples_per_s": statistics.median(rates),
            "runs": rates,
        }
        if peers:
            figures |= {"peer_runs": peers, "ratio_to_peer": round(median_ratio(rates, peers), 2)}
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
