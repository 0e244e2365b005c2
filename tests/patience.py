"""How long tests wait: until it happens, or until it is plain that it never will."""

import time
from collections.abc import Callable

PATIENCE = 240.0
"""Seconds that nothing takes, also on a machine that is busy with other things, unless it hangs."""


def until(
    condition: Callable[[], object],
    seconds: float = PATIENCE,
    *,
    doing: Callable[[], object] | None = None,
    told: Callable[[], object] | None = None,
) -> None:
    """Waits for a condition that others bring about.

    Args:
        condition: is asked until it is true.
        seconds: to wait at most.
        doing: what is done between two questions; a pause if it is None.
        told: what to say of it if it does not happen.
    """
    began, pause = time.monotonic(), 0.001
    while not condition():
        waited = time.monotonic() - began
        assert waited < seconds, told() if told else "it does not happen"
        if doing:
            doing()
            continue
        # Often at first; who waits for long leaves the processor to others.
        pause = min(2 * pause, max(0.05, min(0.25, waited / 20)))
        time.sleep(pause)
