"""Durations, such as "30d", and sizes, such as "50MB"."""

import re
import sys

from streamtrain.errors import ConfigError

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_BYTES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}


def parse_duration(value: str | float, name: str) -> float:
    """Turns "30d", "1.5h" or a number of seconds into seconds.

    Args:
        value: a number of seconds, or text with a unit: ms, s, m, h, d or w.
        name: name of the setting, for errors.

    Raises:
        ConfigError: value is not a positive duration.

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


def parse_size(value: str, name: str) -> float:
    """Turns "50MB" into bytes.

    Args:
        value: text with a unit: B, kB, MB or GB.
        name: name of the setting, for errors.

    Raises:
        ConfigError: value is not a positive size.

    >>> parse_size("50MB", "--rate")
    50000000.0
    """
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d+)?)\s*(B|kB|MB|GB)\s*", value) if isinstance(value, str) else None
    size = float(match[1]) * _BYTES[match[2]] if match else 0.0
    if not size:
        raise ConfigError(f'{name} must be a positive size such as "50MB" or "1.5GB", not {value!r}')
    return size
