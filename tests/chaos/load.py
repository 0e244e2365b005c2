"""Load: a topic that is written at a steady rate, and what has been written."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from streamtrain.stream.source import Stream
from tests.chaos.samples import Offsets, Samples
from tests.cluster.counted import BAD_EVERY, bad_message

Poison = Callable[[Samples, int, int], bytes]
"""A bad message for a partition and an offset."""

_LARGE = 1_040_000  # bytes: about what a broker takes, and more than librdkafka sends by itself
_FUTURE = 4_102_444_800.0  # the year 2100


def broken(samples: Samples, partition: int, offset: int) -> bytes:
    """One of several ways to be no sample."""
    return bad_message(offset)


def large(samples: Samples, partition: int, offset: int) -> bytes:
    """No sample, and as large as may be."""
    return b"x" * _LARGE


def future(samples: Samples, partition: int, offset: int) -> bytes:
    """A sample but for its time, which is decades away."""
    return samples.message(partition, offset, _FUTURE)


class Load:
    """A thread that writes samples, whatever happens to the broker meanwhile; one in 97 is bad.

    Args:
        stream: the topic.
        samples: what is written.
        partitions: of the topic.
        rate: samples per second that a partition gets at most.

    Attributes:
        written: messages of each partition.
        room: gives how many more may be written to each partition.
    """

    def __init__(self, stream: Stream, samples: Samples, partitions: int, rate: float) -> None:
        self._samples, self._rate = samples, rate
        self.written = [0] * partitions
        self.room: Callable[[], float] = lambda: math.inf
        self._bad: list[list[int]] = [[] for _ in range(partitions)]
        self._poison: deque[Poison] = deque()
        self._ended = threading.Event()
        self._abandoned = threading.Event()
        self._writer = stream.writer()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"load of {samples.name}", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def poison(self, count: int, how: Poison = broken) -> None:
        """The next messages of each partition are bad."""
        self._poison.extend([how] * count)

    def set_rate(self, rate: float) -> None:
        """From now on."""
        self._rate = rate

    def stop(self) -> None:
        """Ends, once all that was written is in the log."""
        self._ended.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def abandon(self) -> None:
        """Ends at once; what is not in the log yet may not come there."""
        self._abandoned.set()
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def bad(self) -> set[tuple[int, int]]:
        """Partition and offset of what is bad."""
        return {(partition, offset) for partition, bad in enumerate(self._bad) for offset in bad}

    def good(self, ends: list[int]) -> list[Offsets]:
        """Offsets of the good samples of each partition that are before an end."""
        return [
            np.setdiff1d(np.arange(end), np.array(bad, np.int64), assume_unique=True)
            for bad, end in zip(self._bad, ends, strict=True)
        ]

    def _run(self) -> None:
        try:
            self._write_all()
            while self._writer.flush(1.0) and not self._abandoned.is_set():
                continue
            self._writer.close()
        except BaseException as exc:  # for whoever stops it
            self._failure = exc

    def _write_all(self) -> None:
        began, written = time.monotonic(), 0.0
        while not self._ended.is_set():
            now = time.monotonic()
            rate = self._rate
            # What cannot be written in a second is not made up for: it would go on long after the rate is another.
            written, began = min(written + (now - began) * rate, self.room(), max(1.0, rate)), now
            while written >= 1 and self._rate == rate and not self._ended.is_set():
                self._write_one()
                written -= 1
            self._ended.wait(0.02)

    def _write_one(self) -> None:
        how = self._poison.popleft() if self._poison else None
        for partition, offset in enumerate(self.written):
            if how is not None or offset % BAD_EVERY == BAD_EVERY - 1:
                message = (how or broken)(self._samples, partition, offset)
                self._bad[partition].append(offset)
            else:
                message = self._samples.message(partition, offset, time.time())
            self.written[partition] += 1  # before it may be learned
            self._writer.write(message, partition=partition)
