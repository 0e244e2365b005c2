"""Watch: how long nothing is learned."""

import sys
import time

from tests.chaos.looking import Looking
from tests.chaos.service import Service

_EVERY = 0.25
_LONG = 5.0  # seconds without anything new that are reported, so that the fault is known that caused them


class Training(Looking):
    """A thread that looks at a service's shards.

    Attributes:
        learned: messages that all shards have learned, or passed over as bad.
        longest: seconds for which no shard had learned anything new.
    """

    def __init__(self, service: Service) -> None:
        super().__init__(f"watch of {service.name}", _EVERY)
        self._service = service
        self.learned = 0
        self._last = time.monotonic()
        self.longest = 0.0

    def start(self) -> None:
        """Begins."""
        self._last = time.monotonic()
        super().start()

    def look(self) -> None:
        """At the clocks of all shards."""
        clocks = self._service.clocks()
        if clocks is None:
            return
        learned, now = min(sum(one.values()) for one in clocks), time.monotonic()
        self.longest = max(self.longest, now - self._last)
        if learned != self.learned:  # less is as good: a shard was restored, and learns
            if now - self._last > _LONG:
                silent = f"{self._service.name} learns again after {now - self._last:.1f} s"
                sys.stderr.write(f"{time.strftime('%H:%M:%S')} {silent}\n")
            self.learned, self._last = learned, now
