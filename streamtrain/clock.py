"""Durations as people write them."""

import re
import sys

from streamtrain.errors import ConfigError

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def parse_duration(value: str | float, name: str) -> float:
    """Turns "30d", "1.5h" or a number of seconds into seconds.

    Args:
        value: a number of seconds, or a number with a unit of ms, s, m, h, d or w.
        name: what is being set, for the error.

    Raises:
        ConfigError: value is not a duration, or not positive.

    >>> parse_duration("30d", "expire_after")
    2592000.0
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|w)\s*", value) if isinstance(value, str) else None
    seconds = float(match[1]) * _UNITS[match[2]] if match else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= sys.float_info.max:
        raise ConfigError(
            f'{name} must be a positive duration such as "30d", "12h" or a number of seconds, not {value!r}'
        )
    return float(seconds)
