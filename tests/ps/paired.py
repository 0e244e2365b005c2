"""A shard with its backup behind real gRPC servers on loopback, in the test's process, for tests."""

import math
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import grpc

from streamtrain.errors import ShardUnavailable
from streamtrain.ps.client import Client
from streamtrain.ps.clock import Cursor, Ends, PushOutcome, Span
from streamtrain.ps.consistency import Async, Consistency
from streamtrain.ps.nodes.node import Node
from streamtrain.ps.nodes.server import ShardServer
from streamtrain.ps.nodes.shards import RunTemplate, Shards
from streamtrain.ps.push import PushResult
from streamtrain.ps.replication.failover import TargetPair
from streamtrain.ps.replication.primary import Peer, State
from streamtrain.ps.replication.roles import Pairing
from streamtrain.ps.replication.state_transfer import Generation
from streamtrain.ps.row_memory import RowMemory
from streamtrain.ps.rpc.control import CHANNEL_OPTIONS, RemoteControl, Retry, patiently
from streamtrain.ps.shard import Shard
from tests.patience import PATIENCE, until
from tests.ports import free_ports
from tests.ps.counting import Log
from tests.ps.served import COUNTING, push

AWAY_AFTER = 30.0  # so long that a slow machine is never taken for a backup that is away


T = TypeVar("T")
LOG: Log = {0: [[1, 2], [2], [3], [1]] * 10, 1: [[1], [4], [4], [2, 5]] * 10}
ENDS = {p: len(samples) for p, samples in LOG.items()}
RETRY = Retry(timeout=5.0, first_backoff=0.01, last_backoff=0.1, give_up=PATIENCE)


def answered(ask: Callable[[], T]) -> T:
    return patiently(ask, RETRY, threading.Event())


class Worker:
    """Learns the log, one batch at a time, and goes back when it must."""

    def __init__(self, shards: Shards, name: str = "worker") -> None:
        self.shards = shards
        self.client: Client = shards.client(name, answered(shards.agree), retry=RETRY)
        self.client.join()
        self.rewinds = -1
        self.rewind()

    def rewind(self) -> None:
        self.rewinds += 1
        self.cursor = Cursor()
        self.cursor.rewind(LOG, answered(self.shards.clocks))

    def learn(self, most: int, batch: int = 2) -> None:
        """All partitions, up to an offset."""
        while spans := self.cursor.next(Ends(dict.fromkeys(LOG, most)), batch):
            if any(one.outcome is PushOutcome.REJECTED for one in self.push(spans)):
                self.rewind()

    def push(self, spans: list[Span]) -> list[PushResult]:
        return push(self.client, LOG, spans).wait()


def upto(most: int) -> Log:
    return {p: samples[:most] for p, samples in LOG.items()}


class Place:
    """One of the two, as a process would be: started, killed and started again.

    Args:
        addresses: of both.
        at: which it is.
        index: of the shard.
        shards: how many there are.
        consistency: of workers.
        memory: for rows; None: all that they need.
    """

    def __init__(
        self,
        addresses: tuple[str, str],
        at: int,
        index: int,
        shards: int,
        consistency: Callable[[Shard], Consistency],
        *,
        memory: RowMemory | None = None,
    ) -> None:
        self._addresses, self._at, self._memory = addresses, at, memory
        self._node = index, shards, consistency
        self.channel: Any = None
        self._channel: Any = None
        self.retired: list[str] = []
        self.node: Node | None = None

    def start(self) -> Node:
        """Starts it, to be whatever it is to be."""
        node = self._serve()
        node.start(is_first=self._at == 0)
        return node

    def start_alone(self, shard: Shard) -> None:
        """Starts it with a shard that it has restored, as if it had not reached the other."""
        self._serve().role.take_over(shard, Generation(time.time_ns(), 1))

    def start_empty(self) -> Node:
        """Starts it as if it had neither reached the other nor found a checkpoint."""
        node = self._serve()
        node.restore()
        return node

    def _serve(self) -> Node:
        self.retired = []
        other = self._addresses[1 - self._at]
        self.channel = grpc.insecure_channel(self._addresses[self._at], options=CHANNEL_OPTIONS)
        self._channel = grpc.insecure_channel(other, options=CHANNEL_OPTIONS)
        pairing = Pairing(Peer(self._channel, other), AWAY_AFTER, pause=0.05, retired=self.retired.append)
        self.node = node = Node(*self._node, pairing=pairing, memory=self._memory)
        self._server = ShardServer(node)
        assert self._server.grpc.add_insecure_port(self._addresses[self._at])
        self._server.start()
        return node

    def kill(self) -> None:
        """Ends without a word to anybody but what the system says of closed sockets."""
        node, self.node = self.node, None
        if node is None:
            return
        node.stop()  # first, so that nothing is acknowledged any more
        self._server.stop(0)
        self._channel.close()
        self.channel.close()

    def control(self) -> RemoteControl:
        """Of the node, whatever it is."""
        return RemoteControl(self.channel, self._addresses[self._at])

    def take_over(self) -> None:
        """As if its primary had been silent for long."""
        assert self.node is not None
        backup = self.node.backup
        assert backup is not None

        def done() -> bool:
            backup._heard = -math.inf
            try:
                backup.promote()
            except ShardUnavailable:  # it was heard of just then
                return False
            return True

        until(done, PATIENCE)

    @property
    def state(self) -> State | None:
        """How its backup is, if it is primary."""
        node = self.node
        return node.role.replication.state if node is not None and node.ready and node.role.replication else None


class Paired:
    """Shards with a backup each; all ends with the context."""

    def __init__(
        self,
        shards: int = 1,
        *,
        beginning: RunTemplate = COUNTING,
        consistency: Callable[[Shard], Consistency] = Async,
        memory: RowMemory | None = None,
    ) -> None:
        ports = free_ports(2 * shards)
        self.beginning = beginning
        self._channels: list[Any] = []
        self.places: list[tuple[Place, Place]] = []
        self._pairs: list[TargetPair] = []
        for i in range(shards):
            first, second = (f"127.0.0.1:{port}" for port in ports[2 * i : 2 * i + 2])
            self.places.append(
                (
                    Place((first, second), 0, i, shards, consistency, memory=memory),
                    Place((first, second), 1, i, shards, consistency, memory=memory),
                )
            )
            self._pairs.append((self._channel(first), self._channel(second)))

    def _channel(self, address: str) -> tuple[Any, str]:
        self._channels.append(grpc.insecure_channel(address, options=CHANNEL_OPTIONS))
        return self._channels[-1], address

    def __enter__(self) -> "Paired":
        for first, second in self.places:
            second.start()
            first.start()
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        for pair in self.places:
            for place in pair:
                place.kill()
        for channel in self._channels:
            channel.close()

    def shards(self) -> Shards:
        """As a worker knows them."""
        return Shards(self._pairs, self.beginning)

    def wait(self, index: int = 0) -> Place:
        """The primary of a shard, once its backup is in step."""

        def found() -> list[Place]:
            return [place for place in self.places[index] if place.state is State.IN_STEP]

        until(found, PATIENCE)
        return found()[0]

    def other(self, place: Place) -> Place:
        """The one that it is paired with."""
        return next(pair[1 - pair.index(place)] for pair in self.places if place in pair)
