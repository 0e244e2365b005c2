"""Behind: whether a worker falls behind its partitions, for the log."""

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

_SECONDS = 60.0
_LOOKS = 5
_LEAST = 10_000  # messages


class Behind:
    """Says once that the lag grows minute by minute, and once that it shrinks again. Used by one thread.

    Args:
        now: seconds of a clock that never goes back.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._due = now() + _SECONDS
        self._lag = self._grown = 0
        self._is_behind = False

    def look(self, lag: int) -> None:
        """So many messages are not learned; asked as often as one likes, looked at once a minute."""
        if self._now() < self._due:
            return
        self._due = self._now() + _SECONDS
        self._grown = self._grown + 1 if lag > self._lag else 0
        self._lag = lag
        if not self._is_behind and self._grown >= _LOOKS and lag >= _LEAST:
            logger.warning("falls behind: the lag has grown for %d minutes, to %d messages", self._grown, lag)
            self._is_behind = True
        elif self._is_behind and not self._grown:
            logger.info("catches up: the lag is %d messages", lag)
            self._is_behind = False
