"""History: the figures of the last ten minutes that the console draws, kept with checkpoints over restarts."""

import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from streamtrain.errors import CheckpointError
from streamtrain.periodic import PeriodicTask
from streamtrain.store.files import Directory

logger = logging.getLogger(__name__)

SECONDS = 600.0
_FILE = "history.json"
_MAX_POINTS = 300
_KEEP_EVERY = 30.0
NOTHING: dict[str, Any] = {
    "samples_per_s": None, "lag": None, "freshness_ms": None, "log_delay_ms": None, "auc": {}, "log_loss": {},
}  # fmt: skip
"""A point at which nothing is known: no line is drawn across it."""


class History:
    """Points with a `time` in seconds since the epoch and figures as JSON values. Thread-safe.

    Args:
        url: of checkpoints; None: nothing is kept.
        now: seconds since the epoch.
    """

    def __init__(self, url: str | None, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._place = Directory(url) if url else None
        self._lock = threading.Lock()
        self._points: deque[dict[str, Any]] = deque(self._read(), _MAX_POINTS)
        self._task = PeriodicTask(
            "history", self._write, _KEEP_EVERY, subject="keeping the history of the console", delay=_KEEP_EVERY
        )

    def start(self) -> None:
        """Begins to keep it."""
        if self._place:
            self._task.start()

    def stop(self) -> None:
        """Keeps it a last time."""
        self._task.close()
        if self._place:
            try:
                self._write()
            except CheckpointError as exc:
                logger.warning("the history of the console is not kept: %s", exc)

    def add(self, point: dict[str, Any]) -> None:
        """Adds the newest point."""
        with self._lock:
            self._points.append(point)

    def points(self) -> list[dict[str, Any]]:
        """All points, oldest first."""
        with self._lock:
            return [*self._points]

    def _write(self) -> None:
        assert self._place is not None
        self._place.put(_FILE, json.dumps(self.points()).encode())

    def _read(self) -> list[dict[str, Any]]:
        """The points that were kept, and a gap after them; none if they cannot be read, as nothing depends on them."""
        try:
            if self._place is None or not self._place.exists(_FILE):
                return []
            found = json.loads(self._place.read(_FILE))
            points = [one for one in found if self._now() - SECONDS < float(one["time"]) <= self._now()]
            if not all(math.isfinite(one["time"]) and isinstance(one, dict) for one in points):
                raise ValueError("a point has no time")
        except (CheckpointError, ValueError, TypeError, KeyError) as exc:
            logger.warning("the history of the console cannot be read, it begins anew: %s", exc)
            return []
        return [*points, {**NOTHING, "time": points[-1]["time"] + 0.001}] if points else []
