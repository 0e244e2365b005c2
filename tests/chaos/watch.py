"""Watch: how long nothing is learned."""

import threading
import time

from tests.chaos.service import Service

_EVERY = 0.25


class Training:
    """A thread that looks at a service's shards.

    Attributes:
        learned: messages that all shards have learned, or passed over as bad.
        longest: seconds for which no shard had learned anything new.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._ended = threading.Event()
        self.learned = 0
        self._last = time.monotonic()
        self.longest = 0.0
        self._thread = threading.Thread(target=self._run, name=f"watch of {service.name}", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._last = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Ends."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_EVERY):
            clocks = self._service.clocks()
            if clocks is None:
                continue
            learned, now = min(sum(one.values()) for one in clocks), time.monotonic()
            self.longest = max(self.longest, now - self._last)
            if learned != self.learned:  # less is as good: a shard was restored, and learns
                self.learned, self._last = learned, now
