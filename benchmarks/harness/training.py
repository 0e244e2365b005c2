"""Training on this machine: parameter servers, workers and brokers as processes, or shards within this one.

Run as a module it is one worker process on ready batches, in the topology of streamtrain.toml; it prints lines of JSON:
seconds since the epoch and samples so far. `start_workers` starts it.
"""

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from harness.models import WORKLOADS, columns
from harness.processes import Processes, Usage, memory_of
from streamtrain.checkpoint.cluster_checkpoint import Checkpointer
from streamtrain.checkpoint.shard_checkpoint import CheckpointWriter
from streamtrain.embedded.jars import resolve
from streamtrain.embedded.kafka import Broker
from streamtrain.model.samples import SampleReader
from streamtrain.model.spec import Spec
from streamtrain.processes.ps import PsProcess
from streamtrain.ps.consistency import Async
from streamtrain.ps.nodes.node import Node
from streamtrain.ps.nodes.shards import LocalControl, RunTemplate, Shards
from streamtrain.ps.row_memory import RowMemory
from streamtrain.ps.rpc.control import CHANNEL_OPTIONS, Retry, patiently
from streamtrain.ps.shard import Shard
from streamtrain.service.start_tensorflow import load_tensorflow
from streamtrain.settings.load import load_settings
from streamtrain.store.checkpoint.epochs import Epochs
from streamtrain.stream.kafka.stream import KafkaStream
from streamtrain.train.intake import DecodedBatch
from streamtrain.train.loop import Loop, LoopConfig
from streamtrain.train.step import Step

TOPOLOGIES = ("dedicated", "colocated")
WARMUP_SECONDS = 4.0
TOPIC, PARTITIONS = "samples", 6
_REPORT_SECONDS = 0.25


def add_arguments(parser: argparse.ArgumentParser, *, seconds: float, warmup: float, rounds: int) -> None:
    """The options that all benchmarks of training have."""
    parser.add_argument("--workload", choices=WORKLOADS, default="w1")
    parser.add_argument("--batch", type=int, default=1024, help="samples of a batch")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shards", type=int, default=2, help="parameter servers of the dedicated topology")
    parser.add_argument("--seconds", type=float, default=seconds, help="length of a run")
    parser.add_argument("--warmup", type=float, default=warmup, help="seconds before a run that do not count")
    parser.add_argument("--rounds", type=int, default=rounds)


def shards_of(args: argparse.Namespace, topology: str) -> int:
    """How many shards there are: colocated, every worker serves one."""
    workers, shards = int(args.workers), int(args.shards)
    return workers if topology == "colocated" else shards


class ReadyBatches:
    """An intake of one partition whose batches are made beforehand and repeat forever."""

    def __init__(self, partition: int, batches: Sequence[Any], batch_size: int) -> None:
        self._partition = partition
        self._batches = batches
        self._batch_size = batch_size

    def open(self, listener: Any) -> None:
        """Assigns the partition."""
        listener.assigned([self._partition])

    def reach(self, partition: int, start: int, most: int) -> int:
        """There is always more."""
        return start + most

    def count(self, partition: int, start: int, end: int) -> int:
        """There is always a batch."""
        return self._batch_size

    def read(self, spans: Sequence[Any]) -> Any:
        """The batch at an offset."""
        return DecodedBatch(self._batches[spans[0].start // self._batch_size % len(self._batches)], {})

    def poll(self, *_: Any) -> None:
        """Does nothing."""

    release = seek = commit = poll

    def close(self) -> None:
        """Does nothing."""

    def finished(self) -> bool:
        """Never."""
        return False

    def idle(self) -> frozenset[int]:
        """No partition is idle."""
        return frozenset()

    def flush_dead_letters(self) -> None:
        """There are no dead letters."""


def start_workers(
    processes: Processes, args: argparse.Namespace, topology: str, *, batches: int, micro_batch: int | None = None
) -> list[str]:
    """Starts workers on ready batches, waits until all of them learn, and returns their names."""
    names = [f"worker{i}" for i in range(args.workers)]
    for i, name in enumerate(names):
        options: list[object] = ["--workload", args.workload, "--topology", topology, "--index", i]
        options += ["--batches", batches, *(["--micro-batch", micro_batch] if micro_batch else [])]
        processes.script(name, "harness.training", *options)
    readings = [processes.readings[name] for name in names]
    processes.wait_until(lambda: all(one and one[-1][1] for one in readings), "workers did not learn")
    return names


class Run:
    """What happens while workers learn from ready batches: warms up, then runs for some seconds.

    Attributes:
        first: its beginning, seconds since the epoch.
        last: its end.
        samples_per_s: of all workers together.
        cores: kept busy on average, by process.
        cpu: seconds of CPU, by process.
        wire_bytes: that went over the loopback device.
    """

    def __init__(self, processes: Processes, workers: Sequence[str], args: argparse.Namespace) -> None:
        processes.sleep(args.warmup)
        usage, wire, self.first = Usage(processes), loopback_bytes(), time.time()
        processes.sleep(args.seconds)
        self.last, self.wire_bytes = time.time(), loopback_bytes() - wire
        self.cpu, self.cores = usage.seconds(), usage.cores()
        self.samples_per_s = sum(self._rate(processes.readings[name]) for name in workers)
        self.samples = self.samples_per_s * (self.last - self.first)

    def _rate(self, readings: list[list[float]]) -> float:
        within = [one for one in readings if self.first <= one[0] <= self.last]
        if len(within) < 2:
            raise SystemExit("the run is too short for the reports of a worker: give more --seconds")
        return (within[-1][1] - within[0][1]) / (within[-1][0] - within[0][0])


def loopback_bytes() -> int:
    """Bytes that the loopback device has received."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "lo":
            return int(figures.split()[0])
    raise SystemExit("/proc/net/dev has no loopback device")


def peak_mb(processes: Processes) -> int:
    """Peak memory of all processes together, MB."""
    return sum(memory_of("VmHWM", pid) >> 20 for pid in processes.pids.values())


@contextmanager
def filled_broker(workload: str, count: int) -> Iterator[str]:
    """The address of a Kafka broker whose topic has `count` samples of a workload as JSON."""
    with tempfile.TemporaryDirectory() as folder, Broker(resolve(), data=Path(folder)) as broker:
        stream = KafkaStream(broker.servers, TOPIC, {})
        stream.create(PARTITIONS)
        writer, messages = stream.writer(), WORKLOADS[workload].messages()
        for i in range(count):
            writer.write(messages[i % len(messages)], partition=i % PARTITIONS)
        while writer.flush(10.0):
            continue
        writer.close()
        yield broker.servers


class LocalShards:
    """Shards of this process: restored from the newest checkpoint of a folder, or empty.

    Attributes:
        shards: all of them.
        checkpointer: takes checkpoints of them.
    """

    def __init__(self, folder: Path, count: int, spec: Spec, memory: RowMemory | None = None) -> None:
        nodes = [
            Node(i, count, Async, CheckpointWriter(Epochs(folder), memory=memory), memory=memory) for i in range(count)
        ]
        for node in nodes:
            node.restore()
        none = np.zeros(0, np.float32)
        Shards(nodes, RunTemplate(spec, np.zeros(spec.dense_size, np.float32), none, {})).agree()
        self.checkpointer = Checkpointer(
            [LocalControl(node) for node in nodes], Epochs(folder), keep=1, full_every=1_000_000
        )
        self.shards: list[Shard] = [node.shard for node in nodes]


def work(args: argparse.Namespace) -> None:
    """One worker process on ready batches, and its shard if colocated."""
    settings = load_settings()
    load_tensorflow(settings.worker.threads)
    workload, size, addresses = WORKLOADS[args.workload], settings.worker.batch_size, settings.ps.addresses
    model = workload.model(args.micro_batch)
    data = workload.data(size, args.batches, seed=1234 + args.index)
    batches = [batch for one in data for batch, _ in SampleReader(model).batches(columns(one), size)]
    step, stopped = Step(model), threading.Event()
    places: list[Any] = [(grpc.insecure_channel(one, options=CHANNEL_OPTIONS), one) for one in addresses]
    if args.topology == "colocated":
        ps = PsProcess(args.index, addresses, settings)
        ps.start()
        places[args.index] = ps.node
    shards = Shards(places, RunTemplate(Spec.of(model), step.initial_dense, step.initial_statistics, {}))
    run = patiently(shards.agree, Retry(), stopped)
    client = shards.client(f"worker-{args.index}", run, dtype=settings.ps.wire_dtype, lanes=settings.ps.lanes)
    loop = Loop(
        *(model, step, client, shards.progress),
        intake=ReadyBatches(args.index, batches, size),
        shards=len(places),
        config=LoopConfig(batch_size=size, ahead=settings.worker.ahead),
    )
    thread = threading.Thread(target=loop.run, args=(stopped,))
    thread.start()
    while thread.is_alive() and not stopped.wait(_REPORT_SECONDS):
        print(json.dumps([time.time(), loop.stats.samples]), flush=True)


def main() -> None:
    """Runs a worker process."""
    parser = argparse.ArgumentParser(description="One worker process on ready batches.")
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--topology", choices=TOPOLOGIES, required=True)
    parser.add_argument("--index", type=int, required=True, help="number of the worker")
    parser.add_argument("--batches", type=int, required=True, help="distinct batches")
    parser.add_argument("--micro-batch", type=int, help="samples of a step; default: a batch is one step")
    work(parser.parse_args())


if __name__ == "__main__":
    main()
