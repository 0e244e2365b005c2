"""Clients of the demo: they request predictions while the model learns, and measure."""

import random
import statistics
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from itertools import count

from streamtrain.demo.stream import LiveFlights, happened, instance
from streamtrain.errors import SourceUnavailable
from streamtrain.serve.client import HEAD, Endpoint, EndpointError
from streamtrain.stream.source import Stream, Writer

_LATEST = 1000  # answers whose times are kept
_GIVE_UP = 120.0  # seconds after which a flight that was followed counts as never learned
_WRITE_SECONDS = 30.0
_PREDICT_EVERY = 0.2  # seconds


class ClientStats:
    """Latencies and failures of the clients. Thread-safe.

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
        """Counts a prediction."""
        with self._lock:
            self.predictions += 1
            self._answers.append(ms)
            self.last = headers

    def failed(self) -> None:
        """Counts a failed request."""
        with self._lock:
            self.failures += 1

    def learned(self, ms: float) -> None:
        """Counts a flight that was learned after `ms`."""
        with self._lock:
            self._learned.append(ms)

    def waited(self, ms: float) -> None:
        """Counts a flight that is not learned yet after `ms`, if that is among the longest."""
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
    """A percentile, by linear interpolation; None: there are no values."""
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=100, method="inclusive")[min(98, max(0, round(100 * share) - 1))]


def predict(traffic: LiveFlights, endpoint: Endpoint, model: str, stats: ClientStats, stopped: threading.Event) -> None:
    """Requests a prediction of the latest flight five times a second, until it is stopped."""
    while not stopped.wait(_PREDICT_EVERY):
        if traffic.latest is None:
            continue
        began = time.perf_counter()
        try:
            _, headers = endpoint.predict(model, [instance(traffic.latest)])
            stats.answered(1000 * (time.perf_counter() - began), headers)
        except EndpointError:
            stats.failed()
    endpoint.close()


class FreshnessProbe:
    """Measures freshness: writes one flight after another, and requests a prediction that has learned it.

    The offset that is waited for is that of the end of the partition just after the write: the flight's own, or that
    of one written soon after it. So a time may come out too long by that, and never too short.

    Args:
        traffic: of which it takes flights.
        stream: to which it writes them.
        endpoint: that it asks.
        model: its name.
        stats: is told.
    """

    def __init__(
        self, traffic: LiveFlights, stream: Stream, endpoint: Endpoint, model: str, stats: ClientStats
    ) -> None:
        self._traffic, self._stream, self._endpoint, self._model, self._stats = traffic, stream, endpoint, model, stats

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
                    with suppress(SourceUnavailable):  # learned all the same, but freshness cannot tell when
                        self._follow(flight, turn % partitions, writer, stopped)
        finally:
            writer.close()
            self._endpoint.close()

    def _follow(self, flight: bytes, partition: int, writer: Writer, stopped: threading.Event) -> None:
        began = time.monotonic()
        writer.write(happened(flight, time.time()), partition=partition)
        writer.flush(_WRITE_SECONDS)
        wanted = f"{partition}:{self._stream.bounds()[partition].high - 1}"
        about = instance(flight)
        while time.monotonic() < began + _GIVE_UP:
            try:
                self._endpoint.predict(self._model, [about], HEAD, x_min_offset=wanted)
            except EndpointError as exc:
                if stopped.wait(0.0 if exc.status == 412 else 0.2):
                    break
            else:
                self._stats.learned(1000 * (time.monotonic() - began))
                return
        self._stats.waited(1000 * (time.monotonic() - began))
