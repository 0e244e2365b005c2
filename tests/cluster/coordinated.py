"""A cluster with a coordinator in this process, over gRPC on loopback, for tests."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc

from streamtrain.cluster.client import CoordinatorClient
from streamtrain.errors import ShardUnavailable
from streamtrain.processes.coordinator import CoordinatorProcess
from streamtrain.processes.ps import PsProcess
from streamtrain.ps.rpc.control import CHANNEL_OPTIONS, RemoteControl
from streamtrain.ps.rpc.security import Security, metadata
from streamtrain.settings.load import load_settings
from tests.patience import PATIENCE, until
from tests.ports import free_ports
from tests.ps.counting import Log
from tests.ps.served import COUNTING, Served, learn

LOG: Log = {0: [[1, 2], [2], [3], [1], [7, 8], [9], [2, 3], [11]], 1: [[5], [2, 5], [4]]}


class Coordinated:
    """Two shards and a coordinator, each to be stopped and started again; all end with the context.

    Args:
        place: of checkpoints; None: there are none.
        process: whether the coordinator is a process of its own, or part of shard 0.
        settings: others, by key.
    """

    def __init__(self, place: Path | None = None, *, process: bool = True, **settings: object) -> None:
        *shards, own = [f"127.0.0.1:{port}" for port in free_ports(3)]
        self.addresses, self.address = shards, own if process else shards[0]
        overrides: dict[str, object] = {"ps.addresses": ",".join(shards)}
        if process:
            overrides["coordinator.address"] = own
        if place is not None:
            overrides |= {"checkpoint.url": str(place), "checkpoint.every": "1h"}
        self.settings = load_settings(None, {}, overrides | {k.replace("__", "."): v for k, v in settings.items()})
        self.shards: dict[int, PsProcess] = {}
        self.coordinator: CoordinatorProcess | None = None
        self._stack = ExitStack()
        self._metadata = metadata(self.security)
        self.channels = [(grpc.insecure_channel(one, options=CHANNEL_OPTIONS), one) for one in shards]

    @property
    def security(self) -> Security:
        return Security.from_settings(self.settings.security)

    def __enter__(self) -> "Coordinated":
        try:
            for index in reversed(range(len(self.addresses))):  # shard 0 last, as it may ask the others at once
                self.start_shard(index)
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for index in [*self.shards]:
            self.stop_shard(index)
        self._stack.close()
        for connected in self.channels:
            connected[0].close()

    def start(self, addresses: list[str] | None = None) -> None:
        """Starts the coordinator, if it is a process of its own."""
        if self.settings.coordinator.address is None:
            return
        self.coordinator = CoordinatorProcess(addresses or self.addresses, self.settings)
        self.coordinator.start()

    def stop(self) -> None:
        """Ends it, if it is there."""
        if self.coordinator:
            self.coordinator.stop()
            self.coordinator = None

    def start_shard(self, index: int) -> None:
        self.shards[index] = PsProcess(index, self.addresses, self.settings)
        self.shards[index].start()

    def stop_shard(self, index: int) -> None:
        self.shards.pop(index).stop()

    def client(self, address: str | None = None) -> CoordinatorClient:
        """A client of the coordinator, or of another process, which ends with the cluster."""
        client = CoordinatorClient([address or self.address], self.security, timeout=PATIENCE)
        self._stack.callback(client.close)
        return client

    def control(self, index: int = 0) -> RemoteControl:
        """Of a shard."""
        return RemoteControl(*self.channels[index], self._metadata, PATIENCE)

    def learn(self, log: Log = LOG) -> None:
        """All of a log that was not learned yet, one sample at a time."""
        learn(Served([], [], self.channels, COUNTING), log)

    def status(self, condition: Callable[[dict[str, Any]], object] = lambda status: True) -> dict[str, Any]:
        """The status, once it fulfils a condition."""
        client, found = self.client(), dict[str, Any]()

        def fulfils() -> object:
            try:
                found.update(client.status())
            except ShardUnavailable:  # it has begun again, and the channel waits before it looks
                return False
            return condition(found)

        until(fulfils, PATIENCE)
        return found


def states(status: dict[str, Any]) -> list[str]:
    """Of shards."""
    return [shard["state"] for shard in status["shards"]]


def names(status: dict[str, Any], kind: str = "workers") -> list[str]:
    """Of workers, or of servers."""
    return [one["name"] for one in status[kind]]
