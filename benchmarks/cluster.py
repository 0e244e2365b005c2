"""Workers and parameter servers as processes on this machine, W1 or W2: make bench-cluster.

    python benchmarks/cluster.py --workload w1
    python benchmarks/cluster.py --workload w2 --batch 64 --peer PYTHON_OF_PEER PSS_TF.PY

Every worker learns from ready batches of its own partition, one TensorFlow thread each. Dedicated: shards are processes
of their own (`streamtrain ps`). Colocated: every worker process also serves one shard, its own without a socket.
The peer, if given, is a script that runs TensorFlow's ParameterServerStrategy on the same workload and prints a line of
JSON with samples_per_s; it takes turns with ours.
Prints a line of JSON by topology; ratios are medians over rounds of ours / peer in the same round.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from workloads import WORKLOADS, columns, model

WARMUP_SECONDS = 4.0
TOPOLOGIES = ("dedicated", "colocated")


class ReadyBatches:
    """An intake whose batches are made beforehand and come round again."""

    def __init__(self, partition: int, batches: Sequence[Any], batch_size: int) -> None:
        self._partition = partition
        self._batches = batches
        self._batch_size = batch_size

    def open(self, listener: Any) -> None:
        """The partition is this worker's."""
        listener.assigned([self._partition])

    def reach(self, partition: int, start: int, most: int) -> int:
        """There is always more."""
        return start + most

    def count(self, partition: int, start: int, end: int) -> int:
        """There is always more."""
        return self._batch_size

    def read(self, spans: Sequence[Any]) -> Any:
        """The batch at an offset."""
        from streamtrain.train.intake import Taken

        return Taken(self._batches[spans[0].start // self._batch_size % len(self._batches)], {})

    def poll(self, *_: Any) -> None:
        """Nothing to do, as for what follows."""

    release = seek = commit = poll

    def close(self) -> None:
        """Nothing to do."""

    def finished(self) -> bool:
        """Never."""
        return False

    def bury(self) -> None:
        """There are no dead letters."""


def work(args: argparse.Namespace) -> None:
    """One worker process: prints a line of JSON a second, seconds and samples."""
    import grpc
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    from streamtrain.model.samples import SampleReader
    from streamtrain.model.spec import Spec
    from streamtrain.ps.consistency import Async
    from streamtrain.ps.control import CHANNEL_OPTIONS, Retry, patiently
    from streamtrain.ps.node import Node
    from streamtrain.ps.server import Server
    from streamtrain.ps.shards import Beginning, Shards
    from streamtrain.train.loop import Loop
    from streamtrain.train.pace import Pace
    from streamtrain.train.step import Step

    workload = WORKLOADS[args.workload]
    made = model(workload)
    reader = SampleReader(made)
    data = workload.data(args.batch, args.batches, seed=1234 + args.index)
    batches = [batch for one in data for batch, _ in reader.batches(columns(one), args.batch)]
    step = Step(made)
    places: list[Any] = [(grpc.insecure_channel(a, options=CHANNEL_OPTIONS), a) for a in args.ps.split(",")]
    if args.role == "colocated":
        places[args.index] = Node(args.index, len(places), Async)
        server = Server(places[args.index])
        server.grpc.add_insecure_port(args.ps.split(",")[args.index])
        server.start()
    stopped = threading.Event()
    shards = Shards(places, Beginning(Spec.of(made), step.initial_dense, step.initial_statistics, {}))
    run = patiently(shards.agree, Retry(), stopped)
    client = shards.client(f"worker-{args.index}", run, dtype=args.dtype, lanes=args.lanes)
    loop = Loop(
        *(made, step, client, shards.stands),
        intake=ReadyBatches(args.index, batches, args.batch),
        shards=len(places),
        pace=Pace(batch_size=args.batch, ahead=args.ahead),
    )
    thread = threading.Thread(target=loop.run, args=(stopped,))
    thread.start()
    while thread.is_alive() and not stopped.wait(0.5):
        print(json.dumps([time.time(), loop.tally.samples]), flush=True)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def measure(args: argparse.Namespace, topology: str) -> dict[str, Any]:
    """Starts all processes, and gives samples per second of all workers together, CPU and memory."""
    count = args.workers if topology == "colocated" else args.shards
    addresses = ",".join(f"127.0.0.1:{port}" for port in free_ports(count))
    names: list[str] = []
    processes: list[subprocess.Popen[Any]] = []
    try:
        if topology == "dedicated":
            for i in range(count):
                command = [*args.ps_command.split(), "--ps", addresses, "--index", str(i)]
                processes.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
                names.append(f"ps{i}")
        options = ["--ps", addresses, "--role", topology]
        workers = []
        for i in range(args.workers):
            command = [sys.executable, __file__, *options, "--index", str(i), *sys.argv[1:]]
            workers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            names.append(f"worker{i}")
        processes += workers
        readings: list[list[tuple[float, int]]] = [[] for _ in workers]
        threads = [
            threading.Thread(target=_collect, args=(worker, into), daemon=True)
            for worker, into in zip(workers, readings, strict=True)
        ]
        for thread in threads:
            thread.start()
        while not all(into and into[-1][1] > 0 for into in readings):
            if any(worker.poll() is not None for worker in workers):
                raise SystemExit("a worker ended; run it by hand to see why")
            time.sleep(0.1)
        time.sleep(args.warmup)
        wire, first, cpu = _loopback_bytes(), time.time(), [_cpu(process.pid) for process in processes]
        time.sleep(args.seconds)
        last, wire = time.time(), _loopback_bytes() - wire
        rate = sum(_rate(into, first, last) for into in readings)
        used = [b - a for a, b in zip(cpu, (_cpu(process.pid) for process in processes), strict=True)]
        per_sample = {n: c / rate / (last - first) for n, c in zip(names, used, strict=True)}
        return {
            "samples_per_s": round(rate),
            "cpu_ms_per_batch": {name: round(1e3 * args.batch * one, 3) for name, one in per_sample.items()},
            "worker_cpu_us_per_sample": _microseconds(per_sample, "worker"),
            "shard_cpu_us_per_sample": _microseconds(per_sample, "ps"),
            "wire_bytes_per_sample": round(wire / rate / (last - first)),
            "peak_mb": sum(_peak_mb(process.pid) for process in processes),
        }
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def _microseconds(per_sample: dict[str, float], kind: str) -> float:
    """Of CPU, all processes of a kind together."""
    return round(1e6 * sum(one for name, one in per_sample.items() if name.startswith(kind)), 3)


def _collect(worker: "subprocess.Popen[str]", into: list[tuple[float, int]]) -> None:
    assert worker.stdout
    for line in worker.stdout:
        at, samples = json.loads(line)
        into.append((at, samples))


def _rate(readings: list[tuple[float, int]], first: float, last: float) -> float:
    within = [one for one in readings if first <= one[0] <= last]
    if len(within) < 2:
        raise SystemExit("a worker told less than twice how far it is: run it for longer")
    return (within[-1][1] - within[0][1]) / (within[-1][0] - within[0][0])


def _loopback_bytes() -> int:
    """What has gone through the loopback device."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "lo":
            return int(figures.split()[0])
    raise SystemExit("there is no loopback device")


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _peak_mb(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) // 1024
    return 0


def peer_rate(args: argparse.Namespace) -> float:
    """Samples per second of the peer."""
    command = [*args.peer, "--workload", args.workload, "--batch", str(args.batch), "--runs", "1"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1])["samples_per_s"])


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, default="w1")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=0, help="distinct batches; default: 200 at 1024, 2000 at 64")
    parser.add_argument("--topologies", choices=TOPOLOGIES, nargs="+", default=TOPOLOGIES)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shards", type=int, default=2, help="of the dedicated topology")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    parser.add_argument(
        "--lanes", action=argparse.BooleanOptionalAction, default=True, help="shared memory; without, gRPC on loopback"
    )
    parser.add_argument("--ahead", type=int, default=1, help="batches that are pulled ahead")
    parser.add_argument("--seconds", type=float, default=10.0, help="of one run")
    parser.add_argument("--warmup", type=float, default=WARMUP_SECONDS, help="seconds of a run before those that count")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", nargs=argparse.REMAINDER, default=[], help="last: interpreter, script and options")
    parser.add_argument("--ps-command", default=f"{sys.executable} -m streamtrain ps")
    parser.add_argument("--role", choices=TOPOLOGIES, help="of a worker process")
    parser.add_argument("--ps")
    parser.add_argument("--index", type=int)
    args = parser.parse_args()
    args.batches = args.batches or (200 if args.batch >= 1024 else 2000)
    if args.role:
        work(args)
        return
    rounds: dict[str, list[dict[str, Any]]] = {topology: [] for topology in args.topologies}
    peers = []
    for _ in range(args.rounds):
        for topology in args.topologies:
            rounds[topology].append(measure(args, topology))
        if args.peer:
            peers.append(peer_rate(args))
    for topology, runs in rounds.items():
        ours = statistics.median(run["samples_per_s"] for run in runs)
        figures = {
            "topology": topology,
            **{name: getattr(args, name) for name in ("workload", "batch", "workers", "dtype", "ahead")},
            **runs[-1],
            "samples_per_s": ours,
            "runs": [run["samples_per_s"] for run in runs],
        }
        if peers:
            figures["peer_runs"] = peers
            figures["ratio_to_peer"] = round(
                statistics.median(run["samples_per_s"] / peer for run, peer in zip(runs, peers, strict=True)), 2
            )
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
