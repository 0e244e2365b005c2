"""Gate: holds pushes back for the moment of a checkpoint."""

import time
from collections.abc import Sequence

from streamtrain.ps.clock import Clock, Span


class Gate:
    """Holds pushes back for the moment of a checkpoint; opens by itself should nobody come to cut.

    Attributes:
        target: pushes that lead there are let through.
        until: when it opens, seconds as of `time.monotonic`.
    """

    def __init__(self) -> None:
        self.target: Clock = {}
        self.until = 0.0

    def close(self, target: Clock, until: float) -> None:
        """Lets nothing through but what leads to `target`."""
        self.target, self.until = target, until

    def open(self) -> None:
        """Lets everything through."""
        self.until = 0.0

    def holds(self, spans: Sequence[Span]) -> bool:
        """Whether a push over `spans` has to wait."""
        return time.monotonic() < self.until and any(end > self.target.get(partition, 0) for partition, _, end in spans)
