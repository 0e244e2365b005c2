"""Feed: the messages that a worker has fetched and not learned yet, by partition, bounded in bytes."""

import logging
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from streamtrain.errors import OffsetGone
from streamtrain.stream.source import Fetched, Listener, Source, Stream

logger = logging.getLogger(__name__)


class SpanLike(Protocol):
    """A half-open range of offsets of a partition."""

    @property
    def partition(self) -> int:
        """Whose."""

    @property
    def start(self) -> int:
        """Its first offset."""

    @property
    def end(self) -> int:
        """The offset after its last."""


class Messages(NamedTuple):
    """Messages of some ranges, n in all, range after range.

    Attributes:
        values: theirs.
        offsets: int64 [n], theirs.
        starts: by range, which of the n is its first; then n.
    """

    values: list[bytes]
    offsets: NDArray[np.int64]
    starts: list[int]


class _Held:
    """Messages of one partition, from a position on."""

    def __init__(self, position: int) -> None:
        self.offsets: list[int] = []
        self.values: list[bytes] = []
        self.begin = position  # nothing before is held
        self.end = position  # what is before, and is not held, does not exist

    def index(self, offset: int) -> int:
        """Of the first message at or after an offset."""
        return bisect_left(self.offsets, offset)


class Feed:
    """Messages are held until they are released, so that a worker that goes back a little fetches nothing again.

    Args:
        most_bytes: of messages held; no more are fetched beyond, but for those of one poll.
        skip_gone: whether messages that were deleted before they were learned are passed over.

    Attributes:
        nbytes: of messages held.
        skipped: offsets passed over because their messages were deleted.
    """

    def __init__(self, most_bytes: int = 64 << 20, *, skip_gone: bool = False) -> None:
        self._most_bytes = most_bytes
        self._skip_gone = skip_gone
        self._held: dict[int, _Held] = {}
        self._source: Source | None = None
        self._listener: Listener | None = None
        self._paused = False
        self.nbytes = 0
        self.skipped = 0

    def open(self, stream: Stream, group: str, job: str, listener: Listener) -> None:
        """Joins a group; errors as of `Stream.source`."""
        self._listener = listener
        self._source = stream.source(group, job, self)

    @property
    def source(self) -> Source:
        """What is fetched from, once open."""
        assert self._source is not None, "the feed is not open"
        return self._source

    def poll(self, most: int, seconds: float) -> None:
        """Fetches up to `most` messages, or waits for some; errors as of `Source.poll`."""
        self._hold_back()
        try:
            for fetched in self.source.poll(most, seconds):
                self._take(fetched)
        except OffsetGone as gone:
            self._skip(gone)

    def _take(self, fetched: Fetched) -> None:
        held = self._held[fetched.partition]
        held.offsets += fetched.offsets
        held.values += fetched.values
        held.end = fetched.offsets[-1] + 1
        self.nbytes += sum(map(len, fetched.values))

    def _hold_back(self) -> None:
        """Pauses while too much is held. Seldom: no more is asked for than the next batches need."""
        full = self.nbytes > (self._most_bytes // 2 if self._paused else self._most_bytes)
        if full != self._paused:
            (self.source.pause if full else self.source.resume)(list(self._held))
            self._paused = full

    def _skip(self, gone: OffsetGone) -> None:
        if gone.wanted > gone.high:
            raise OffsetGone(gone.partition, gone.wanted, gone.low, gone.high) from gone
        if not self._skip_gone:
            raise gone
        logger.warning(
            "partition %d: %d samples were deleted before they were learned; goes on at offset %d",
            *(gone.partition, gone.low - gone.wanted, gone.low),
            extra={"batch": f"{gone.partition}:{gone.wanted}-{gone.low - 1}"},
        )
        self.skipped += gone.low - gone.wanted
        self.source.seek(gone.partition, gone.low)
        self._held[gone.partition].end = gone.low

    def assigned(self, partitions: Sequence[int]) -> Mapping[int, int]:
        """See Listener."""
        assert self._listener is not None
        positions = self._listener.assigned(partitions)
        self._held |= {partition: _Held(positions[partition]) for partition in partitions}
        self._paused = False
        return positions

    def revoked(self, partitions: Sequence[int]) -> None:
        """See Listener."""
        assert self._listener is not None
        self._listener.revoked(partitions)
        self._drop(partitions)

    def lost(self, partitions: Sequence[int]) -> None:
        """See Listener."""
        assert self._listener is not None
        self._listener.lost(partitions)
        self._drop(partitions)

    def _drop(self, partitions: Sequence[int]) -> None:
        for partition in partitions:
            self.nbytes -= sum(map(len, self._held.pop(partition).values))

    def reach(self, partition: int, start: int, most: int) -> int:
        """Offset after the first `most` messages from `start` on, or after the last that is held; at least `start`.

        Up to the next message, so that what lies between is passed over with those before.
        """
        held = self._held.get(partition)
        if held is None:
            return start
        after = held.index(start) + most
        return max(start, held.offsets[after] if after < len(held.offsets) else held.end)

    def count(self, partition: int, start: int, end: int) -> int:
        """Messages held from `start` to `end - 1`."""
        held = self._held.get(partition)
        return 0 if held is None else held.index(end) - held.index(start)

    def read(self, spans: Sequence[SpanLike]) -> Messages:
        """The messages of some ranges, of which each partition has one at most."""
        values: list[bytes] = []
        offsets: list[int] = []
        starts = [0]
        for partition, start, end in ((one.partition, one.start, one.end) for one in spans):
            held = self._held[partition]
            part = slice(held.index(start), held.index(end))
            values += held.values[part]
            offsets += held.offsets[part]
            starts.append(len(values))
        return Messages(values, np.array(offsets, np.int64), starts)

    def release(self, partition: int, before: int) -> None:
        """Messages before an offset are not needed any more."""
        held = self._held.get(partition)
        if held is None or before <= held.begin:
            return
        done = held.index(before)
        self.nbytes -= sum(map(len, held.values[:done]))
        del held.values[:done], held.offsets[:done]
        held.begin = before
        held.end = max(held.end, before)

    def seek(self, partition: int, offset: int) -> None:
        """The next message to be read is at `offset`; it is fetched anew unless it is held."""
        held = self._held.get(partition)
        if held is None or held.begin <= offset <= held.end:
            return
        self._drop([partition])
        self._held[partition] = _Held(offset)
        self.source.seek(partition, offset)

    def close(self) -> None:
        """Leaves the group."""
        if self._source is not None:
            self._source.close()
