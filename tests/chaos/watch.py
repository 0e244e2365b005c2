"""Watch: how long nothing is learned, of all and of each partition."""

import sys
import time
from collections.abc import Mapping

from tests.chaos.load import Load
from tests.chaos.looking import Looking
from tests.chaos.service import Service

_EVERY = 0.25
_LONG = 5.0  # seconds without anything new that are reported, so that the fault is known that caused them


class Standstill:
    """How long each partition was not taken on, though it was not at its end.

    Attributes:
        longest: in seconds, by partition.
    """

    def __init__(self) -> None:
        self._since: dict[str, tuple[int, float]] = {}
        self.longest: dict[str, float] = {}

    def see(self, positions: Mapping[str, tuple[int, int]]) -> None:
        """Takes notice of how far each is now, and where it ends."""
        now = time.monotonic()
        for place, (at, end) in positions.items():
            was, since = self._since.get(place, (at, now))
            if was < end:
                self.longest[place] = max(self.longest.get(place, 0.0), now - since)
            if at != was or at >= end:
                self._since[place] = (at, now)

    def worst(self) -> tuple[float, str]:
        """The longest of all, and of which partition."""
        return max(((seconds, place) for place, seconds in self.longest.items()), default=(0.0, "none"))


class Training(Looking):
    """A thread that looks at a service's shards.

    Args:
        service: whose.
        load: what is written.

    Attributes:
        learned: messages that all shards have learned, or passed over as bad.
        longest: seconds for which no shard had learned anything new.
        standstill: of each partition.
    """

    def __init__(self, service: Service, load: Load) -> None:
        super().__init__(f"watch of {service.name}", _EVERY)
        self._service, self._load = service, load
        self.standstill = Standstill()
        self.learned = 0
        self._last = time.monotonic()
        self.longest = 0.0

    def start(self) -> None:
        """Begins."""
        self._last = time.monotonic()
        super().start()

    def look(self) -> None:
        """At the clocks of all shards."""
        written = [*self._load.written]
        clocks = self._service.clocks()
        if clocks is None:
            return
        ends = {f"partition {p}": (min(one.get(p, 0) for one in clocks), end) for p, end in enumerate(written)}
        self.standstill.see(ends)
        learned, now = min(sum(one.values()) for one in clocks), time.monotonic()
        self.longest = max(self.longest, now - self._last)
        if learned != self.learned:  # less is as good: a shard was restored, and learns
            if now - self._last > _LONG:
                silent = f"{self._service.name} learns again after {now - self._last:.1f} s"
                sys.stderr.write(f"{time.strftime('%H:%M:%S')} {silent}\n")
            self.learned, self._last = learned, now
