"""Visitors of the demo: they ask for predictions while the model learns, and measure."""

import random
import statistics
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from itertools import count

from streamtrain.demo.endpoint import HEAD, Endpoint, EndpointAway
from streamtrain.demo.traffic import Traffic, happened, instance
from streamtrain.errors import SourceUnavailable
from streamtrain.stream.source import Stream, Writer

_LATEST = 1000  # answers whose times are kept
_GIVE_UP = 120.0  # seconds after which a flight that was followed counts as never learned
_WRITE_SECONDS = 30.0


class Seen:
    """What visitors saw. Thread-safe.

    Attributes:
        predictions: how many were answered.
        failures: how many were not.
        last: headers of the last answer, in small letters.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: deque[float] = deque(maxlen=_LATEST)
        self._learned: list[float] = []
        self.predictions = self.failures = 0
        self.last: Mapping[str, str] = {}

    def answered(self, ms: float, headers: Mapping[str, str]) -> None:
        """A prediction was made."""
        with self._lock:
            self.predictions += 1
            self._answers.append(ms)
            self.last = headers

    def failed(self) -> None:
        """One was not."""
        with self._lock:
            self.failures += 1

    def learned(self, ms: float) -> None:
        """A flight that was followed had been learned after so long."""
        with self._lock:
            self._learned.append(ms)

    def waited(self, ms: float) -> None:
        """One has not been learned yet after so long: that counts if it is among the longest."""
        longest = self.learned_ms(0.99)
        if longest is None or ms > longest:
            self.learned(ms)

    def answer_ms(self, share: float) -> float | None:
        """Milliseconds of the latest predictions: that at a share of them, 0 to 1."""
        with self._lock:
            return _at(list(self._answers), share)

    def learned_ms(self, share: float) -> float | None:
        """Milliseconds from a flight to a prediction that has learned it: that at a share of those followed."""
        with self._lock:
            return _at(self._learned, share)


def _at(values: list[float], share: float) -> float | None:
    """By linear interpolation; None: there are none."""
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=100, method="inclusive")[min(98, max(0, round(100 * share) - 1))]


def predict(traffic: Traffic, endpoint: Endpoint, seen: Seen, stopped: threading.Event, every: float = 0.2) -> None:
    """Predicts the flight that was written last, every so many seconds, until it is stopped."""
    while not stopped.wait(every):
        if traffic.latest is None:
            continue
        try:
            answer = endpoint.predict(instance(traffic.latest))
        except EndpointAway:
            seen.failed()
            continue
        if answer.status == 200:
            seen.answered(answer.ms, answer.headers)
        else:
            seen.failed()
    endpoint.close()


class Follower:
    """Follows one flight after another: writes it, and asks for a prediction that has learned it.

    The offset that is waited for is that of the end of the partition just after the write: the flight's own, or that
    of one written soon after it. So a time may come out too long by that, and never too short.

    Args:
        traffic: of which it takes flights.
        stream: to which it writes them.
        endpoint: that it asks.
        seen: is told.
    """

    def __init__(self, traffic: Traffic, stream: Stream, endpoint: Endpoint, seen: Seen) -> None:
        self._traffic, self._stream, self._endpoint, self._seen = traffic, stream, endpoint, seen

    def run(self, stopped: threading.Event) -> None:
        """Until it is stopped."""
        writer, partitions = self._stream.writer(), len(self._stream.bounds())
        try:
            for turn in count():
                # So that flights do not begin in step with publications: each would take the longest time there is.
                if stopped.wait(random.uniform(0, 1)):
                    return
                flight = self._traffic.next(1.0)
                if flight is not None:
                    with suppress(SourceUnavailable):  # learned all the same, but nobody knows when it should be
                        self._follow(flight, turn % partitions, writer, stopped)
        finally:
            writer.close()
            self._endpoint.close()

    def _follow(self, flight: bytes, partition: int, writer: Writer, stopped: threading.Event) -> None:
        began = time.monotonic()
        writer.write(happened(flight, time.time()), partition=partition)
        writer.flush(_WRITE_SECONDS)
        wanted = {"x-min-offset": f"{partition}:{self._stream.bounds()[partition].high - 1}"}
        about = instance(flight)
        while time.monotonic() < began + _GIVE_UP:
            try:
                status = self._endpoint.predict(about, of=HEAD, headers=wanted).status
            except EndpointAway:
                status = 0
            if status == 200:
                self._seen.learned(1000 * (time.monotonic() - began))
                return
            if stopped.wait(0.0 if status == 412 else 0.2):
                break
        self._seen.waited(1000 * (time.monotonic() - began))
