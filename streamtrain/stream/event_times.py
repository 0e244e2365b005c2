"""Event times in fields of messages that no model reads: impressions and outcomes, and files that are replayed."""

import math
from datetime import UTC, datetime
from typing import Any

import numpy as np

from streamtrain._core import parse_times
from streamtrain.model.schema import TIME_UNITS, time_format

EARLIEST, LATEST = -62_135_596_800, 253_402_300_800  # years 0001 to 9999, as in samples


class EventTimes:
    """How a field says the event time.

    Args:
        form: as a schema's `time_format`: a unit of numbers, s, ms, us or ns, or a pattern of text; None: seconds, or
            ISO 8601.

    Raises:
        ConfigError: it is neither a unit nor a pattern.
    """

    def __init__(self, form: str | None = None) -> None:
        self._native = time_format(form)
        self._per_second = TIME_UNITS.get(form or "s", 1.0)
        self._has_pattern = form is not None and form not in TIME_UNITS

    def read(self, value: Any) -> float | None:
        """Seconds since the epoch by the value of the field; None: it is not a time.

        >>> EventTimes("ms").read(1500)
        1.5
        """
        if isinstance(value, str) and self._has_pattern:
            data = value.encode("utf-8", "surrogatepass")
            seconds = float(parse_times(np.frombuffer(data, np.uint8), np.array([0, len(data)]), self._native)[0])
            return seconds if math.isfinite(seconds) else None
        if not isinstance(value, int | float) or isinstance(value, bool):
            return parse_time(value)
        return parse_time(value / self._per_second)

    def write(self, seconds: float) -> bytes:
        """A number that the field may hold, as JSON."""
        return b"%.6f" % seconds if self._per_second == 1 else b"%d" % round(seconds * self._per_second)


def parse_time(value: Any) -> float | None:
    """Seconds since the epoch by a number or ISO 8601 text, by default UTC; None: it is not a time.

    >>> parse_time("1970-01-01T00:01")
    60.0
    """
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError):
        try:
            time = datetime.fromisoformat(value)
        except (TypeError, ValueError):
            return None
        seconds = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    return seconds if math.isfinite(seconds) and EARLIEST <= seconds < LATEST else None
