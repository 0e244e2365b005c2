"""Names instead of addresses: processes of a cluster are reached where they have registered themselves.

An address "registry:shard-0" is that of the process that has registered itself by the name shard-0 last. So a process
may be started again on another machine and another port, and others reach it there without being started anew.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import grpc

from streamtrain.address import parse_address
from streamtrain.errors import ConfigError, ShardUnavailable

logger = logging.getLogger(__name__)

_GRACE = 2.0  # seconds that calls to where a name was may go on


class Registry(Protocol):
    """Who is where, for all processes of a cluster."""

    def lookup(self, name: str) -> str | None:
        """The address by which a name is registered; None: it is not."""

    def register(self, name: str, listen: str) -> None:
        """Registers this process, in the place of any other of the name, until it ends.

        Args:
            name: of this process.
            listen: address at which it listens; of any host: the one by which others are reached.
        """

    def watch(self, changed: Callable[[], object]) -> None:
        """Has a method called after each change, as long as its object is in use."""


_registry: Registry | None = None


def use_registry(registry: Registry | None) -> None:
    """The registry of this process; set before it opens channels."""
    global _registry  # noqa: PLW0603  # one for each process, as there is one cluster to reach
    _registry = registry


def get_registry() -> Registry:
    """The registry of this process.

    Raises:
        ConfigError: there is none.
    """
    if _registry is None:
        raise ConfigError('addresses "registry:…" need publish.url: processes register themselves in that Redis')
    return _registry


def register(address: str, listen: str, port: int) -> None:
    """Registers this process if its address is a name.

    Args:
        address: its own, as others know it.
        listen: where it listens.
        port: the one that it got there.
    """
    name = parse_address(address, "address", names=True).name
    if name:
        get_registry().register(name, str(replace(parse_address(listen, "listen", any_port=True), port=port)))


class NamedChannel(grpc.Channel):  # type: ignore[misc]  # gRPC has no types
    """A channel to a name: each call goes to where the name is registered when it begins.

    Once the name has moved, calls to where it was are cancelled after a short while, as nobody may answer them.

    Args:
        name: that is looked up.
        open_channel: opens the channel to an address.
    """

    def __init__(self, name: str, open_channel: Callable[[str], grpc.Channel]) -> None:
        self._name, self._open, self._names = name, open_channel, get_registry()
        self._lock = threading.Lock()
        self._address: str | None = None
        self._channel: grpc.Channel | None = None
        self._is_closed = False
        self._names.watch(self._follow)

    def _follow(self) -> None:
        """The name may have moved."""
        address = self._names.lookup(self._name)
        with self._lock:
            if address == self._address or self._is_closed:
                return
            before, was = self._channel, self._address
            self._address, self._channel = address, self._open(address) if address else None
        if before is not None:
            logger.info("%s is at %s now, not at %s", self._name, address, was)
            ending = threading.Timer(_GRACE, before.close)
            ending.daemon = True
            ending.start()

    def _current(self) -> grpc.Channel:
        """Where the name is.

        Raises:
            ShardUnavailable: nowhere.
        """
        if self._channel is None:
            self._follow()
        if (channel := self._channel) is None:
            raise ShardUnavailable(f"{self._name} is not registered: it has not been started yet")
        return channel

    def _method(self, kind: str, *method: Any, **options: Any) -> Callable[..., Any]:
        def begin(*call: Any, **more: Any) -> Any:
            return getattr(self._current(), kind)(*method, **options)(*call, **more)

        return begin

    def unary_unary(self, *method: Any, **options: Any) -> Any:
        return self._method("unary_unary", *method, **options)

    def unary_stream(self, *method: Any, **options: Any) -> Any:
        return self._method("unary_stream", *method, **options)

    def stream_unary(self, *method: Any, **options: Any) -> Any:
        return self._method("stream_unary", *method, **options)

    def stream_stream(self, *method: Any, **options: Any) -> Any:
        return self._method("stream_stream", *method, **options)

    def subscribe(self, callback: Any, try_to_connect: bool | None = False) -> None:
        self._current().subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Any) -> None:
        self._current().unsubscribe(callback)

    def close(self) -> None:
        with self._lock:
            self._is_closed, channel = True, self._channel
            self._channel = None
        if channel is not None:
            channel.close()

    def __enter__(self) -> "NamedChannel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
