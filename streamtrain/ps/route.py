"""Route: which of two places a shard with a backup is at; has the backup take over once its primary is away."""

import threading
from typing import Any

import grpc

import streamtrain.ps.ps_pb2 as pb
from streamtrain.errors import ShardError, ShardUnavailable
from streamtrain.ps.control import Metadata, RemoteControl
from streamtrain.ps.copying import Line

Place = tuple[grpc.Channel, str]
Pair = tuple[Place, Place]

_SECONDS = 1.0  # for an answer; who does not give one within it is away


class PairRoute:
    """See Route. Thread-safe.

    Args:
        pair: the two places, that first where a primary starts.
        metadata: sent with every call, such as a token.
    """

    def __init__(self, pair: Pair, metadata: Metadata = ()) -> None:
        self._pair = pair
        self._controls = [RemoteControl(*place, metadata, _SECONDS) for place in pair]
        self._lock = threading.Lock()
        self._last = 0  # where it was

    def find(self) -> Place:
        """See Route."""
        with self._lock:
            found = self._find()
            self._last = found
            return self._pair[found]

    def found(self) -> Place:
        """See Route."""
        return self._pair[self._last]

    def _find(self) -> int:
        statuses: list[Any] = [None, None]
        told = ""
        for i in (self._last, 1 - self._last):
            try:
                statuses[i] = self._controls[i].status()
            except ShardError as exc:
                told = told or str(exc)
                continue
            if _is_primary(statuses[i]) and i == self._last:
                return i
        primaries = [i for i, status in enumerate(statuses) if _is_primary(status)]
        if primaries:
            return max(primaries, key=lambda i: Line.of(statuses[i].standing.line))
        for i, status in enumerate(statuses):
            if status is not None and status.standing.in_step:
                self._controls[i].promote()
                return i
        if statuses[0] is not None and statuses[0].standing.role == pb.PRIMARY:
            return 0  # it is empty, and waits to be initialised
        raise ShardUnavailable(told or f"the shard is neither at {self._pair[0][1]} nor at {self._pair[1][1]}")


def _is_primary(status: Any) -> bool:
    return status is not None and status.ready


def control_of(place: Place | Pair, metadata: Metadata = (), timeout: float = 10.0) -> RemoteControl:
    """The control of a shard.

    Args:
        place: where it is, or both places where it may be.
        metadata: sent with every call, such as a token.
        timeout: seconds for an answer.
    """
    first, route = route_of(place, metadata)
    return RemoteControl(*first, metadata, timeout, route)


Routed = tuple[Place, PairRoute | None]
"""The place to ask first, and the route to go by if there are two."""


def route_of(place: Place | Pair, metadata: Metadata = ()) -> Routed:
    """The place to ask first, and the route to go by if there are two."""
    if isinstance(place[0], tuple):
        pair: Any = place
        return pair[0], PairRoute(pair, metadata)
    only: Any = place
    return only, None
