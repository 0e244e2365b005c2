"""Membership: the processes of a cluster, as long as they send heartbeats."""

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from streamtrain.errors import ShardRefused

logger = logging.getLogger(__name__)

WORKER, SERVER = "worker", "server"

LEASE = 5.0
"""Seconds after its last heartbeat that a process stays a member."""

_MAX_MEMBERS = 4096
_MAX_NAME = 256
_MAX_ABOUT = 64 << 10


class Member(NamedTuple):
    """A process.

    Attributes:
        kind: "worker" or "server".
        name: unique among its kind.
        about: JSON values of its last heartbeat.
        seen: seconds since that.
    """

    kind: str
    name: str
    about: dict[str, Any]
    seen: float


class Members:
    """The members of a cluster. Thread-safe.

    Args:
        left: called with each member that leaves, or whose lease expires.
        now: monotonic seconds.

    Attributes:
        lost: how many leases have expired, by kind.
    """

    def __init__(
        self, left: Callable[[Member], object] = lambda member: None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._left, self._now = left, now
        self.lost: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], tuple[float, dict[str, Any]]] = {}

    def beat(self, kind: str, name: str, about: str) -> None:
        """Takes a heartbeat; `about` is the JSON object that the status of the cluster shows of the process.

        Raises:
            ShardRefused: the name or `about` is malformed or too long, or there are too many members.
        """
        if not 0 < len(name) <= _MAX_NAME:
            raise ShardRefused(f"a process name must have 1 to {_MAX_NAME} characters, not {len(name)}")
        if len(about) > _MAX_ABOUT:
            raise ShardRefused(f"the heartbeat of {name} has {len(about)} characters; at most {_MAX_ABOUT}", "limit")
        try:
            values = json.loads(about, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as exc:
            raise ShardRefused(f"the heartbeat of {name} is not JSON: {exc}") from exc
        if not isinstance(values, dict):
            raise ShardRefused(f"the heartbeat of {name} is not a JSON object")
        self._expire()
        with self._lock:
            if len(self._known) >= _MAX_MEMBERS and (kind, name) not in self._known:
                raise ShardRefused(f"the cluster has {_MAX_MEMBERS} members already", "limit")
            is_new = (kind, name) not in self._known
            self._known[kind, name] = self._now(), values
        if is_new:
            logger.info("%s %s joined", kind, name)

    def leave(self, kind: str, name: str) -> None:
        """Ends a membership."""
        with self._lock:
            gone = self._known.pop((kind, name), None)
        if gone:
            logger.info("%s %s left", kind, name)
            self._left(Member(kind, name, gone[1], self._now() - gone[0]))

    def of(self, kind: str) -> list[Member]:
        self._expire()
        with self._lock:
            return [
                Member(kind, name, about, self._now() - at)
                for (of, name), (at, about) in sorted(self._known.items())
                if of == kind
            ]

    def _expire(self) -> None:
        with self._lock:
            now = self._now()
            ended = [Member(*key, about, now - at) for key, (at, about) in self._known.items() if at < now - LEASE]
            for gone in ended:
                del self._known[gone.kind, gone.name]
                self.lost[gone.kind] += 1
        for gone in ended:
            logger.warning("%s %s lost: no heartbeat for %.0f s", *gone[:2], gone.seen)
            self._left(gone)


def _refuse_constant(name: str) -> None:
    """Refuses NaN and infinities, which only Python accepts: a status with one would not be JSON."""
    raise ValueError(f"{name} is not a JSON number")
