"""Members: the processes of a cluster that say that they are there."""

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from streamtrain.errors import ShardRefused

logger = logging.getLogger(__name__)

LEASE = 5.0
"""Seconds for which a process is there without saying so again."""

_MOST = 4096
_MOST_NAME = 256
_MOST_ABOUT = 64 << 10


class Member(NamedTuple):
    """A process.

    Attributes:
        kind: "worker" or "server".
        name: unique among its kind.
        about: what it says of itself, plain values.
        seen: seconds since it did.
    """

    kind: str
    name: str
    about: dict[str, Any]
    seen: float


class Members:
    """Who is there. Thread-safe.

    Args:
        left: is told of each that leaves, or whose lease ends.
        now: monotonic seconds.

    Attributes:
        lost: how many leases have ended, by kind: nobody has said that these processes end.
    """

    def __init__(
        self, left: Callable[[Member], object] = lambda member: None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._left, self._now = left, now
        self.lost: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], tuple[float, dict[str, Any]]] = {}

    def beat(self, kind: str, name: str, about: str) -> None:
        """A process is there.

        Raises:
            ShardRefused: it has no proper name, what it says of itself is no JSON object or too long, or there are too
                many.
        """
        if not 0 < len(name) <= _MOST_NAME:
            raise ShardRefused(f"a process has a name of 1 to {_MOST_NAME} characters, not {len(name)}")
        if len(about) > _MOST_ABOUT:
            raise ShardRefused(f"{name} says {len(about)} characters of itself; at most {_MOST_ABOUT}", "limit")
        try:
            said = json.loads(about, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as exc:
            raise ShardRefused(f"what {name} says of itself is no JSON: {exc}") from exc
        if not isinstance(said, dict):
            raise ShardRefused(f"what {name} says of itself is no JSON object")
        self._expire()
        with self._lock:
            if len(self._known) >= _MOST and (kind, name) not in self._known:
                raise ShardRefused(f"there are {_MOST} processes already", "limit")
            is_new = (kind, name) not in self._known
            self._known[kind, name] = self._now(), said
        if is_new:
            logger.info("%s %s is there", kind, name)

    def leave(self, kind: str, name: str) -> None:
        """A process ends."""
        with self._lock:
            gone = self._known.pop((kind, name), None)
        if gone:
            logger.info("%s %s has ended", kind, name)
            self._left(Member(kind, name, gone[1], self._now() - gone[0]))

    def of(self, kind: str) -> list[Member]:
        """Those of a kind, by name."""
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
            logger.warning("%s %s is lost: it has not said for %.0f s that it is there", *gone[:2], gone.seen)
            self._left(gone)


def _refuse_constant(name: str) -> None:
    """NaN and infinities, which Python reads and others do not: a status that had one would be no JSON."""
    raise ValueError(f"{name} is none of its numbers")
