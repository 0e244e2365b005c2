"""Admission control: what exceeds the limits of a process is refused at once rather than queued."""

import logging
import time
from collections.abc import Callable
from typing import NamedTuple, get_args

from streamtrain.logs import LogThrottle
from streamtrain.serve.errors import HTTPError, Overloaded, OverloadReason

logger = logging.getLogger(__name__)


_LOG_SECONDS = 10.0


class Admission:
    """Counts requests in flight, and the bytes of their bodies. All calls come from one event loop.

    Args:
        max_requests: in flight at once; half of them may wait for offsets.
        max_body_bytes: of all of them.
        now: seconds of a monotonic clock.

    Attributes:
        requests: in flight.
        waiting: those that wait for offsets.
        body_bytes: of those in flight.
        refused: requests, by reason.
    """

    def __init__(self, max_requests: int, max_body_bytes: int, *, now: Callable[[], float] = time.monotonic) -> None:
        self.requests = self.waiting = self.body_bytes = 0
        self.refused: dict[OverloadReason, int] = dict.fromkeys(get_args(OverloadReason), 0)
        self._max_requests, self._max_body_bytes = max_requests, max_body_bytes
        self._throttle = LogThrottle(_LOG_SECONDS, now)

    def admit(self) -> "Admitted":
        """Admits a request until its context ends.

        Raises:
            Overloaded: too many requests are in flight.
        """
        if self.requests >= self._max_requests:
            raise Overloaded("requests", f"{self.requests} requests are in flight")
        self.requests += 1
        return Admitted(self)

    def take(self, size: int) -> None:
        """Counts received bytes.

        Raises:
            Overloaded: there are too many of all requests.
        """
        if self.body_bytes + size > self._max_body_bytes:
            raise Overloaded("bodies", f"bodies of {self.body_bytes} bytes are in flight")
        self.body_bytes += size

    def wait(self) -> None:
        """Counts a request that waits for offsets; the caller decrements `waiting` afterwards.

        Raises:
            Overloaded: too many requests wait.
        """
        if self.waiting >= max(1, self._max_requests // 2):
            raise Overloaded("offsets", f"{self.waiting} requests are waiting for offsets")
        self.waiting += 1

    def count(self, exc: Overloaded) -> None:
        """Counts a refused request; logged at most every ten seconds."""
        self.refused[exc.reason] += 1
        if times := self._throttle.allow():
            logger.warning("overloaded, %d requests refused: %s", times, exc)


class Admitted:
    """A request in flight."""

    __slots__ = ("_admission", "_bytes")

    def __init__(self, admission: Admission) -> None:
        self._admission, self._bytes = admission, 0

    def take(self, size: int) -> None:
        """Counts received bytes of its body.

        Raises:
            Overloaded: there are too many of all requests.
        """
        self._admission.take(size)
        self._bytes += size

    def __enter__(self) -> "Admitted":
        return self

    def __exit__(self, *_: object) -> None:
        self._admission.requests -= 1
        self._admission.body_bytes -= self._bytes


class RequestLimits(NamedTuple):
    """What is counted of a request before anything of it is copied.

    Attributes:
        instances: that it may have.
        bytes: to which its instances may grow by what they share.
        take: counts these bytes among those of all requests in flight; raises Overloaded.
    """

    instances: int
    bytes: int
    take: Callable[[int], object]

    def check(self, instances: int, shared: int = 0) -> None:
        """Before its instances are made, each with so many bytes that are sent once for all of them.

        Raises:
            HTTPError: 413, there are too many, or they would take too much memory.
            Overloaded: see `take`.
        """
        if instances > self.instances:
            raise HTTPError(413, f"a request may have at most {self.instances} instances, not {instances}")
        if instances * shared > self.bytes:
            raise HTTPError(
                413,
                f"a context of {shared} bytes for {instances} examples makes {instances * shared} bytes, and a request "
                f"may have at most {self.bytes}: send fewer examples at once",
            )
        if shared:
            self.take(instances * shared)
