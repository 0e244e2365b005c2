"""Shards behind real gRPC servers on loopback, in the test's process."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from streamtrain.model.spec import Spec
from streamtrain.ps.consistency import Async, Consistency
from streamtrain.ps.control import CHANNEL_OPTIONS
from streamtrain.ps.node import Keeper, Node
from streamtrain.ps.server import Server
from streamtrain.ps.sessions import Limits
from streamtrain.ps.shard import Shard
from streamtrain.ps.shards import Beginning, Shards
from tests.ps.counting import DENSE, SPEC

COUNTING = Beginning(SPEC, np.zeros(DENSE, np.float32), np.zeros(2, np.float32), {})


@dataclass
class Served:
    """What is served, and how to reach it."""

    nodes: list[Node]
    servers: list[Server]
    channels: list[tuple[Any, str]]
    beginning: Beginning

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
    beginning: Beginning = COUNTING,
    limits: Limits | None = None,
    keepers: Sequence[Keeper | None] = (),
) -> Iterator[Served]:
    """Serves `count` shards while within."""
    nodes = [Node(i, count, consistency, keepers[i] if keepers else None) for i in range(count)]
    servers = [Server(node, limits) for node in nodes]
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


def beginning_of(model: Any, step: Any) -> Beginning:
    """What a run of a model begins with."""
    return Beginning(Spec.of(model), step.initial_dense, step.initial_statistics, {})
