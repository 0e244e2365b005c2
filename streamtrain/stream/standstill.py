"""StandstillWatch: finds partitions of which messages wait, and none is taken, though nothing holds them.

It does not trust the client that reads: where messages end is asked apart from it. What it finds is logged, and cured
by a new client, as by a restart of the process; clocks and committed offsets keep that exact.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Generic, NamedTuple, TypeVar

from streamtrain.errors import SourceError
from streamtrain.periodic import PeriodicTask

logger = logging.getLogger(__name__)

Place = TypeVar("Place", bound=Hashable)

STANDSTILL_SECONDS = 60.0
"""After which a partition that could be read counts as standing still."""

_EVERY = 10.0
_POLLS = 5  # while none was taken: who computes for a minute takes what there is at the first poll afterwards


class _Seen(NamedTuple):
    """What was known of a partition when it last moved, or was held."""

    position: int
    at: float
    polls: int


class StandstillWatch(Generic[Place]):
    """Watches the partitions of one reader. `polled` is called by its thread, the rest by any.

    Args:
        ends: gives the offset after the last message that can be read, by partition; asked in a thread. SourceError:
            it cannot be told now.
        describe: names a partition in a line of the log.
        seconds: after which one stands still.
        now: monotonic seconds.

    Attributes:
        total: times that a partition was found to stand still.
    """

    def __init__(
        self,
        ends: Callable[[], Mapping[Place, int]],
        describe: Callable[[Place], str],
        *,
        seconds: float = STANDSTILL_SECONDS,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total = 0
        self._ends, self._describe, self._seconds, self._now = ends, describe, seconds, now
        self._lock = threading.Lock()
        self._seen: dict[Place, _Seen] = {}
        self._stalled: set[Place] = set()
        self._polls = 0
        self._is_cure_due = False
        every = min(_EVERY, seconds / 2)
        self._task = PeriodicTask("standstill", self.look, every, delay=every, subject="looking for standstills")

    def __enter__(self) -> "StandstillWatch[Place]":
        self._task.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._task.stop()

    @property
    def stalled(self) -> list[Place]:
        """Partitions that were found to stand still, and have not moved since."""
        with self._lock:
            return list(self._stalled)

    def polled(self, positions: Mapping[Place, int], held: Collection[Place] = ()) -> bool:
        """Takes note of a poll.

        Args:
            positions: of all partitions of the reader.
            held: those that are not fetched on purpose.

        Returns:
            Whether the reader should be made anew, as a partition stands still; true once for each time.
        """
        with self._lock:
            self._polls += 1
            now, seen = self._now(), self._seen
            moved = {place for place, at in positions.items() if place not in seen or seen[place].position != at}
            for place in moved | positions.keys() & set(held):
                seen[place] = _Seen(positions[place], now, self._polls)
            for place in [place for place in seen if place not in positions]:
                del seen[place]
            if self._stalled:
                self._stalled -= moved
                self._stalled &= positions.keys()
            is_due, self._is_cure_due = self._is_cure_due, False
            return is_due

    def look(self) -> None:
        """Looks for partitions that stand still, and logs each; again once it has stood still for as long again."""
        with self._lock:
            now, polls = self._now(), self._polls
            late = {p: of for p, of in self._seen.items() if now - of.at > self._seconds and polls - of.polls >= _POLLS}
        if not late:
            return
        try:
            ends = self._ends()
        except SourceError as exc:
            logger.debug("%s", exc)
            return
        for place, of in late.items():
            with self._lock:
                if self._seen.get(place) != of or ends.get(place, 0) <= of.position:
                    continue
                self._seen[place] = _Seen(of.position, now, polls)
                self._stalled.add(place)
                self._is_cure_due = True
                self.total += 1
            logger.error(
                "%s stands still at offset %d: %d messages wait, and none was taken for %.0f s, though nothing is "
                "known to hold it; reading it anew",
                *(self._describe(place), of.position, ends[place] - of.position, now - of.at),
            )
