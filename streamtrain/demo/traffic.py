"""The flights as they go to the stream: each happens when it is written."""

import json
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from queue import Empty, SimpleQueue

from streamtrain.stream.files import Block, Sample
from streamtrain.stream.source import Writer

FLIGHTS = 327_346


def blocks(pieces: Iterable[list[bytes]]) -> Iterator[Block]:
    """Flights as samples whose time is in `departs`, with their plane as key: a plane's stay in order."""
    done = 0
    for piece in pieces:
        samples: list[Sample] = []
        for message in piece:
            flight = json.loads(message)
            flight["departs"] = flight.pop("ts")
            samples.append((json.dumps(flight).encode(), float(flight["departs"]), flight["tail"].encode()))
        done += len(piece)
        yield Block(samples, min(1.0, done / FLIGHTS))


def happened(flight: bytes, at: float) -> bytes:
    """A flight as a sample of a time, in seconds since the epoch."""
    return b'{"ts": %.3f, ' % at + flight[1:]


def instance(flight: bytes) -> bytes:
    """What is known of a flight before it departs."""
    known = json.loads(flight)
    return json.dumps({name: value for name, value in known.items() if name not in ("label", "departs")}).encode()


class Traffic:
    """A Writer that has flights happen now, and hands some to freshness probes. Thread-safe.

    Args:
        writer: that writes them.

    Attributes:
        latest: the flight that was written last; None: none yet.
        written: how many were.
        partitions: of the topic.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.partitions = writer.partitions
        self._wishes: deque[SimpleQueue[bytes]] = deque()
        self._lock = threading.Lock()  # so that a flight is not given to a client that has ended
        self.latest: bytes | None = None
        self.written = 0

    def max_value_bytes(self, key: bytes | None = None, headers: Mapping[str, bytes] = {}) -> int:
        return self._writer.max_value_bytes(key, headers)

    def next(self, seconds: float) -> bytes | None:
        """The next flight, which the caller has to write instead; None: there was none within `seconds`."""
        wish: SimpleQueue[bytes] = SimpleQueue()
        with self._lock:
            self._wishes.append(wish)
        try:
            return wish.get(timeout=seconds)
        except Empty:
            with self._lock:
                if wish in self._wishes:
                    self._wishes.remove(wish)
                    return None
            return wish.get()

    def write(
        self, value: bytes, *, partition: int | None = None, key: bytes | None = None, headers: Mapping[str, bytes] = {}
    ) -> None:
        self.latest = value
        self.written += 1
        with self._lock:
            if self._wishes:
                self._wishes.popleft().put(value)
                return
        self._writer.write(happened(value, time.time()), partition=partition, key=key, headers=headers)

    def flush(self, seconds: float) -> int:
        return self._writer.flush(seconds)

    def close(self) -> None:
        self._writer.close()
