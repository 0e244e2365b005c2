"""Paces: when the messages of a file are due."""

from typing import Protocol

from streamtrain.errors import ConfigError


class Pace(Protocol):
    """When messages are due. Belongs to one run."""

    def due(self, event_time: float | None) -> float:
        """When the next message is, which has this event time: in seconds since the first was."""


class Rate:
    """Evenly in time; what was late is made up for.

    Args:
        rate: messages per second.
    """

    def __init__(self, rate: float) -> None:
        if not rate > 0:
            raise ConfigError(f"a rate must be above 0 messages per second, not {rate:g}")
        self._rate = rate
        self._before = 0

    def due(self, event_time: float | None) -> float:
        """See Pace."""
        self._before += 1
        return (self._before - 1) / self._rate


class EventTime:
    """As far apart as the events were; those that are late, or have no time, at once.

    Args:
        speed: seconds of event time that pass in a second.
        max_gap: seconds that are waited at most between two messages.
    """

    def __init__(self, speed: float, max_gap: float) -> None:
        if not speed > 0:
            raise ConfigError(f"a speed must be above 0, not {speed:g}; 1 is as fast as it happened")
        self._speed, self._max_gap = speed, max_gap
        self._latest: float | None = None
        self._due = 0.0

    def due(self, event_time: float | None) -> float:
        """See Pace."""
        if event_time is not None and self._latest is None:
            self._latest = event_time
        elif event_time is not None and self._latest is not None and event_time > self._latest:
            self._due += min((event_time - self._latest) / self._speed, self._max_gap)
            self._latest = event_time
        return self._due


def pace_of(rate: float | None, speed: float | None, max_gap: float) -> Pace | None:
    """The pace by a rate in messages per second, or by event time at a speed; None: as fast as possible.

    Raises:
        ConfigError: both are given, or one of them is not above 0.
    """
    if rate is not None and speed is not None:
        raise ConfigError("a rate and a speed exclude each other: give one of --rate and --speed")
    if speed is not None:
        return EventTime(speed, max_gap)
    return None if rate is None else Rate(rate)
