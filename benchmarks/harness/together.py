"""Several workers in one process that learn a stream together, from shards behind gRPC, as it arrives."""

import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

import streamtrain as st
from harness.models import metrics_of
from streamtrain.model.spec import Spec
from streamtrain.ps.consistency import Async
from streamtrain.ps.nodes.node import Node
from streamtrain.ps.nodes.server import ShardServer
from streamtrain.ps.nodes.shards import RunTemplate, Shards
from streamtrain.ps.rpc.control import CHANNEL_OPTIONS
from streamtrain.stream.formats.factory import JsonFormat
from streamtrain.stream.source import Listener, Stream
from streamtrain.testing.stream import MemoryStream
from streamtrain.train.intake import StreamIntake
from streamtrain.train.loop import Loop, LoopConfig
from streamtrain.train.step import Step

SHARDS = 2


@dataclass(frozen=True)
class Run:
    """Figures of a pass over a stream."""

    auc: float
    auc_error: float
    log_loss: float
    samples_per_s: float


class Predictions:
    """Keeps the predictions of a worker, in place of its metrics."""

    def __init__(self) -> None:
        self._parts: list[tuple[Any, Any, Any]] = []

    def update(self, *part: Any) -> None:
        """Keeps predictions, labels and weights of a batch."""
        self._parts.append(part)

    @staticmethod
    def metrics(model: st.Model, made: Iterable["Predictions"]) -> st.Metrics:
        """The metrics of several workers."""
        predictions, labels, _ = (
            np.concatenate(parts) for parts in zip(*(p for one in made for p in one._parts), strict=True)
        )
        return metrics_of(model, predictions, labels)


class Arrivals:
    """Lets samples arrive in order as fast as all workers take them, as in a live stream.

    Args:
        partitions: the partition of every sample, in the order of the stream.
        workers: one for each partition.
        ahead: how many samples may arrive ahead of the slowest worker.
    """

    def __init__(self, partitions: list[int], workers: int, ahead: int) -> None:
        self._order = [np.flatnonzero(np.array(partitions) == p) for p in range(workers)]
        self._taken = [0] * workers
        self._ahead = ahead

    def take(self, partition: int, end: int) -> None:
        """Records that a worker has taken a partition up to an offset."""
        self._taken[partition] = end

    def are_all_taken(self) -> bool:
        """Whether all samples are taken."""
        return all(taken == len(order) for order, taken in zip(self._order, self._taken, strict=True))

    def ends(self) -> dict[int, int]:
        """The end offset of what has arrived, by partition."""
        next_ones = [order[taken] for order, taken in zip(self._order, self._taken, strict=True) if taken < len(order)]
        arrived = min(next_ones, default=1 << 60) + self._ahead
        return {p: int(np.searchsorted(order, arrived)) for p, order in enumerate(self._order)}


class LiveIntake(StreamIntake):
    """An intake whose samples arrive over time; all workers start at once.

    Attributes:
        partitions: those that it has read.
    """

    def __init__(self, model: st.Model, stream: Stream, arrivals: Arrivals, all_here: threading.Barrier) -> None:
        super().__init__(stream, "workers", "job", JsonFormat(model))
        self._arrivals, self._all_here = arrivals, all_here
        self.partitions: set[int] = set()
        self._reach, self._count = self.reach, self.count
        self.reach, self.count = self._arrived, self._arrived_count

    def open(self, listener: Listener) -> None:
        """Waits until all have joined, so that each has its partition from the first step on."""
        super().open(listener)
        self._all_here.wait()

    def _arrived(self, partition: int, start: int, most: int) -> int:
        return max(start, min(self._reach(partition, start, most), self._arrivals.ends()[partition]))

    def _arrived_count(self, partition: int, start: int, end: int) -> int:
        return self._count(partition, start, self._arrived(partition, start, max(end - start, 0)))

    def read(self, spans: Any) -> Any:
        """Takes some ranges."""
        for span in spans:
            self._arrivals.take(span.partition, span.end)
            self.partitions.add(span.partition)
        return super().read(spans)

    def finished(self) -> bool:
        """Whether all samples are taken."""
        return self._arrivals.are_all_taken()


Streamed = Callable[[dict[int, list[bytes]]], Stream]


def learn_together(
    model: st.Model,
    messages: list[bytes],
    order: list[int],
    *,
    batch_size: int,
    streamed: Streamed = MemoryStream.of,
    ahead: int = 0,
    judged: Collection[int] | None = None,
) -> Run:
    """A pass of workers with a partition each; samples arrive in order, as fast as all workers take them.

    Args:
        model: learned asynchronously.
        messages: the stream.
        order: the partition of every message, from 0 on.
        batch_size: of each worker.
        streamed: makes a stream of messages by partition.
        ahead: batches that a worker pulls before it has pushed the previous one.
        judged: partitions whose predictions count; None: all.
    """
    workers = max(order) + 1
    partitions: dict[int, list[bytes]] = {p: [] for p in range(workers)}
    for message, partition in zip(messages, order, strict=True):
        partitions[partition].append(message)
    arrivals = Arrivals(order, workers, batch_size * workers * (1 + ahead))
    nodes = [Node(i, SHARDS, Async) for i in range(SHARDS)]
    servers = [ShardServer(node) for node in nodes]
    targets = [f"127.0.0.1:{server.grpc.add_insecure_port('127.0.0.1:0')}" for server in servers]
    for server in servers:
        server.start()
    steps = [Step(model) for _ in range(workers)]
    beginning = RunTemplate(Spec.of(model), steps[0].initial_dense, steps[0].initial_statistics, {})
    shards = Shards([(grpc.insecure_channel(one, options=CHANNEL_OPTIONS), one) for one in targets], beginning)
    run, stopped = shards.agree(), threading.Event()
    pace = LoopConfig(batch_size=batch_size, ahead=ahead, idle_seconds=0.0002)
    stream, all_here = streamed(partitions), threading.Barrier(workers)
    threads, intakes, made = [], [], []
    for p, step in enumerate(steps):
        intakes.append(LiveIntake(model, stream, arrivals, all_here))
        made.append(Predictions())
        worker = Loop(
            *(model, step, shards.client(f"worker-{p}", run), shards.progress),
            intake=intakes[-1],
            shards=SHARDS,
            config=pace,
            validation=made[-1],
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
    counted = [one for one, of in zip(made, intakes, strict=True) if judged is None or of.partitions <= {*judged}]
    metrics = Predictions.metrics(model, counted)
    assert metrics.samples == sum(judged is None or partition in judged for partition in order)
    return Run(metrics.auc, metrics.auc_error, metrics.log_loss, len(messages) / seconds)
