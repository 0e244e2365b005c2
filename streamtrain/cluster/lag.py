"""Lag: how many messages of the stream are not learned yet, whoever has their partitions, or nobody."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from streamtrain.errors import SourceError
from streamtrain.ps import wire
from streamtrain.stream.source import Bounds

logger = logging.getLogger(__name__)

_EVERY = 2.0  # seconds between two looks at the stream


class Lag:
    """Looks at a stream in a thread of its own, from `start` to `stop`. Thread-safe.

    Args:
        bounds: of all partitions, as of `Stream.bounds`.
        every: seconds from one look to the next.
    """

    def __init__(self, bounds: Callable[[], Mapping[int, Bounds]], every: float = _EVERY) -> None:
        self._ask, self._every = bounds, every
        self._bounds: Mapping[int, Bounds] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lag", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def stop(self) -> None:
        """Ends; it is not waited for an answer that is on its way."""
        self._stop.set()

    def behind(self, ready: Sequence[Any]) -> int | None:
        """How many offsets lie between what all shards have learned and the ends; None: the stream does not answer.

        Args:
            ready: status of all shards that hold something; if none does, it is not known where the run began either.
        """
        bounds = self._bounds
        if bounds is None or not ready:
            return None
        clocks = [wire.clock_of(status.start) | wire.clock_of(status.clock) for status in ready]
        learned = {one: min(clock.get(one, of.low) for clock in clocks) for one, of in bounds.items()}
        return sum(max(0, of.high - max(learned[one], of.low)) for one, of in bounds.items())

    def _run(self) -> None:
        while True:
            try:
                self._bounds = self._ask()
            except SourceError as exc:
                if self._bounds is not None:
                    logger.info("lag is not known: %s", exc)
                self._bounds = None
            except Exception:  # whatever it is: the next look may be better
                logger.exception("the stream was not looked at")
                self._bounds = None
            if self._stop.wait(self._every):
                return
