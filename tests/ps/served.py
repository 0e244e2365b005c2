"""Shards behind real gRPC servers on loopback, in the test's process."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from streamtrain.model.spec import Spec
from streamtrain.ps.client import Client, PendingPush
from streamtrain.ps.clock import Cursor, Ends, Span
from streamtrain.ps.consistency import Async, Consistency
from streamtrain.ps.hooks import CheckpointStore
from streamtrain.ps.nodes.node import Node
from streamtrain.ps.nodes.server import ShardServer
from streamtrain.ps.nodes.shards import RunTemplate, Shards
from streamtrain.ps.push import PushResult
from streamtrain.ps.rpc.control import CHANNEL_OPTIONS
from streamtrain.ps.rpc.sessions import SessionTimeouts
from streamtrain.ps.shard import Shard
from streamtrain.settings.groups import PsSettings
from tests.ps.counting import DENSE, SPEC, Log, plan_of

COUNTING = RunTemplate(SPEC, np.zeros(DENSE, np.float32), np.zeros(2, np.float32), {})


@dataclass
class Served:
    """What is served, and how to reach it."""

    nodes: list[Node]
    servers: list[ShardServer]
    channels: list[tuple[Any, str]]
    beginning: RunTemplate

    def shards(self) -> Shards:
        return Shards(self.channels, self.beginning)

    @property
    def held(self) -> list[Shard]:
        return [node.shard for node in self.nodes]


@contextmanager
def served(
    count: int = 2,
    consistency: Callable[[Shard], Consistency] = Async,
    *,
    beginning: RunTemplate = COUNTING,
    limits: PsSettings = PsSettings(),  # noqa: B008  # it is immutable
    timeouts: SessionTimeouts = SessionTimeouts(),  # noqa: B008  # it is immutable
    stores: Sequence[CheckpointStore | None] = (),
) -> Iterator[Served]:
    """Serves `count` shards while within."""
    nodes = [Node(i, count, consistency, stores[i] if stores else None) for i in range(count)]
    servers = [ShardServer(node, limits, timeouts=timeouts) for node in nodes]
    targets = [f"127.0.0.1:{server.grpc.add_insecure_port('127.0.0.1:0')}" for server in servers]
    channels = [(grpc.insecure_channel(target, options=CHANNEL_OPTIONS), target) for target in targets]
    for server in servers:
        server.start()
    try:
        yield Served(nodes, servers, channels, beginning)
    finally:
        for channel, _ in channels:
            channel.close()
        for server in servers:
            server.stop()


def learn(of: Served, log: Log, shards: Shards | None = None) -> list[PushResult]:
    """A worker that learns a log of the counting model, one sample at a time, where the shards have not yet."""
    shards = shards or of.shards()
    client = shards.client("learner", shards.agree())
    client.join()
    cursor = Cursor()
    cursor.rewind(log, shards.clocks())
    done = []
    while spans := cursor.next(Ends({p: len(samples) for p, samples in log.items()}), 1):
        done += push(client, log, spans).wait()
    client.close()
    return done


def push(client: Client, log: Log, spans: Sequence[Span]) -> PendingPush:
    """Has a client pull for some ranges of a log of the counting model, and push their gradients."""
    plan = plan_of(log, spans, len(client._sessions))
    gradients = -plan.counts(0).astype(np.float32)
    client.pull(plan).wait()
    dense, statistics = np.full(DENSE, -plan.samples, np.float32), np.full(2, plan.samples, np.float32)
    return client.push(plan, gradients, dense, statistics, spans=spans, watermark=0)


def beginning_of(model: Any, step: Any) -> RunTemplate:
    """What a run of a model begins with."""
    return RunTemplate(Spec.of(model), step.initial_dense, step.initial_statistics, {})
