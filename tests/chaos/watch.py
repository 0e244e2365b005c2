"""Watch: how long nothing is learned."""

import time

from tests.chaos.looking import Looking
from tests.chaos.service import Service

_EVERY = 0.25


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
            self.learned, self._last = learned, now
