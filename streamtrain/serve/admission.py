"""Admission: how much one process takes on at once. What is more is refused at once, so that nobody waits in vain."""

import logging
import time
from collections.abc import Callable
from typing import Literal, get_args

from streamtrain.errors import StreamtrainError
from streamtrain.logs import Seldom

logger = logging.getLogger(__name__)

Reason = Literal["requests", "bodies", "instances", "wait", "offsets"]

_SAY_SECONDS = 10.0


class Overloaded(StreamtrainError):
    """So much is under way that more is refused.

    Attributes:
        reason: what there is too much of: "requests" under way, bytes of their "bodies", "instances" that wait, their
            "wait", or requests that wait for "offsets".
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(f"{message}; try again")
        self.reason: Reason = reason


class Admission:
    """Counts requests under way, and the bytes of their bodies. All calls come from one event loop.

    Args:
        requests: under way at once, at most; half of them may wait for offsets.
        body_bytes: of all of them, at most.
        now: seconds of a clock that never goes back.

    Attributes:
        requests: under way.
        refused: requests, by reason.
    """

    def __init__(self, requests: int, body_bytes: int, *, now: Callable[[], float] = time.monotonic) -> None:
        self.requests = self.waiting = self.body_bytes = 0
        self.refused: dict[Reason, int] = dict.fromkeys(get_args(Reason), 0)
        self._most, self._most_bytes = requests, body_bytes
        self._seldom = Seldom(_SAY_SECONDS, now)

    def admit(self) -> "Admitted":
        """A request begins, and ends with the context.

        Raises:
            Overloaded: too many are under way.
        """
        if self.requests >= self._most:
            raise Overloaded("requests", f"{self.requests} requests are under way already")
        self.requests += 1
        return Admitted(self)

    def take(self, size: int) -> None:
        """So many bytes have come.

        Raises:
            Overloaded: they are too many.
        """
        if self.body_bytes + size > self._most_bytes:
            raise Overloaded("bodies", f"bodies of {self.body_bytes} bytes are under way already")
        self.body_bytes += size

    def wait(self) -> None:
        """A request begins to wait for offsets; whoever calls counts it out again.

        Raises:
            Overloaded: too many do.
        """
        if self.waiting >= max(1, self._most // 2):
            raise Overloaded("offsets", f"{self.waiting} requests wait for offsets already")
        self.waiting += 1

    def count(self, exc: Overloaded) -> None:
        """A request was refused; said at most every ten seconds, however many there are."""
        self.refused[exc.reason] += 1
        if times := self._seldom.due():
            logger.warning("overloaded, %d requests refused: %s", times, exc)


class Admitted:
    """A request under way."""

    __slots__ = ("_admission", "_bytes")

    def __init__(self, admission: Admission) -> None:
        self._admission, self._bytes = admission, 0

    def take(self, size: int) -> None:
        """So many bytes of its body have come.

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
