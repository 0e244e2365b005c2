"""RedisRegistry: where the processes of a cluster are, by name, in the Redis to which its model is published."""

import logging
import socket
import threading
from collections.abc import Callable
from urllib.parse import urlsplit
from weakref import WeakMethod

from streamtrain.address import Address, parse_address
from streamtrain.errors import OriginUnavailable
from streamtrain.periodic import Backoff, PeriodicTask, retry
from streamtrain.store.redis.layout import RedisKeys
from streamtrain.store.redis.server import RedisServer

logger = logging.getLogger(__name__)

_EVERY = 0.5  # seconds between two looks
_COUNTER = b"#"  # field with the number of registrations; no name
_REDIS_PORT = 6379


class RedisRegistry:
    """A hash with "number address" of each name, of which every process keeps a copy that is half a second old at most.

    Who registers later has the higher number, and the name. What Redis loses, processes write again. While Redis is
    unreachable, names are where they were.

    Args:
        url: of Redis.
        model: that is published.
        cluster: whether it is a cluster.
        stopped: ends the waiting for Redis at the beginning.
    """

    def __init__(self, url: str, model: str, *, cluster: bool = False, stopped: threading.Event | None = None) -> None:
        self._url = url
        self._server = RedisServer(url, cluster=cluster)
        self._key = RedisKeys(model).places
        self._lock = threading.Lock()
        self._places: dict[str, tuple[int, str]] = {}
        self._own: dict[str, tuple[int, str]] = {}
        self._watchers: list[WeakMethod[Callable[[], object]]] = []
        # A shard that does not know where its other process is would take itself for the only one.
        retry(self._look, OriginUnavailable, stopped or threading.Event())
        backoff = Backoff(_EVERY, 2.0)
        self._task = PeriodicTask("registry", self._look, _EVERY, subject="looking up who is where", backoff=backoff)
        self._task.start()

    def close(self) -> None:
        """Ends looking; what is registered stays."""
        self._task.close(_EVERY)
        self._server.close()

    def lookup(self, name: str) -> str | None:
        place = self._places.get(name)
        return place[1] if place else None

    def watch(self, changed: Callable[[], object]) -> None:
        with self._lock:
            self._watchers = [one for one in self._watchers if one() is not None]
            self._watchers.append(WeakMethod(changed))

    def register(self, name: str, listen: str) -> None:
        where = parse_address(listen, "listen")
        address = str(Address(self._reachable(where.host), where.port))
        retry(lambda: self._register(name, address), OriginUnavailable, threading.Event())
        logger.info("registered as %s at %s", name, address)

    def _register(self, name: str, address: str) -> None:
        before = self._read().get(name, (0, ""))[0]
        number = max(int(self._server.call("HINCRBY", self._key, _COUNTER, 1)), before + 1)
        self._server.call("HSET", self._key, name, f"{number} {address}")
        self._own[name] = number, address
        self._look()

    def _reachable(self, host: str) -> str:
        """The host itself, or if it is any, the address of this machine by which it reaches Redis."""
        if host not in {"0.0.0.0", "::"}:
            return host
        parts = urlsplit(self._url)
        if not parts.hostname:
            return "127.0.0.1"
        found = socket.getaddrinfo(parts.hostname, parts.port or _REDIS_PORT, type=socket.SOCK_DGRAM)
        family, kind, _, _, at = found[0]
        with socket.socket(family, kind) as probe:
            probe.connect(at)  # sends nothing
            return str(probe.getsockname()[0])

    def _read(self) -> dict[str, tuple[int, str]]:
        fields = self._server.call("HGETALL", self._key)
        pairs = zip(fields[::2], fields[1::2], strict=True) if isinstance(fields, list) else fields.items()
        found = {}
        for name, value in pairs:
            number, _, address = value.decode().partition(" ")
            if name != _COUNTER and number.isdecimal():
                found[name.decode()] = int(number), address
        return found

    def _look(self) -> None:
        found = self._read()
        for name, place in [*self._own.items()]:
            there = found.get(name, (0, ""))
            if there[0] > place[0]:
                logger.warning("another process has registered as %s, at %s", name, there[1])
                self._own.pop(name, None)  # it is looked up in two threads
            elif there != place:
                self._server.call("HSET", self._key, name, f"{place[0]} {place[1]}")
                found[name] = place
        found = self._places | found  # a name that Redis has lost is where it was
        with self._lock:
            is_new, self._places, watchers = found != self._places, found, [*self._watchers]
        if is_new:
            for watcher in watchers:
                if (changed := watcher()) is not None:
                    changed()
