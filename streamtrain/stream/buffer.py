"""PartitionBuffer: the messages that a worker has fetched and not learned yet, by partition, bounded in bytes."""

import logging
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamtrain.errors import OffsetGone
from streamtrain.incarnation import Incarnation
from streamtrain.stream.source import Fetched, Listener, Source, Stream
from streamtrain.stream.standstill import StandstillWatch

logger = logging.getLogger(__name__)


class Messages(NamedTuple):
    """Messages of some ranges, n in all, range after range.

    Attributes:
        values: their bytes.
        offsets: int64 [n].
        times: int64 [n], in milliseconds since the epoch; negative where the log has none.
        starts: by range, which of the n is its first; then n.
    """

    values: list[bytes]
    offsets: NDArray[np.int64]
    times: NDArray[np.int64]
    starts: list[int]


class _Partition:
    """Messages of one partition, from a position on."""

    def __init__(self, position: int) -> None:
        self.offsets: list[int] = []
        self.values: list[bytes] = []
        self.times: list[int] = []
        self.begin = position  # nothing before is buffered
        self.end = position  # what is before, and is not buffered, does not exist

    def index(self, offset: int) -> int:
        """Index of the first message at or after an offset."""
        return bisect_left(self.offsets, offset)


class PartitionBuffer:
    """Keeps messages until they are released, so that a worker that rewinds a little fetches nothing again.

    It is the listener of its source, and passes on to the one that it is given.

    Args:
        max_bytes: maximum size of buffered messages; beyond it fetching pauses, and only the last poll may exceed it.
        skip_gone: whether messages that were deleted before they were learned are skipped.
        watch: finds partitions that stand still, which are then read by a new member; None: nothing does.

    Attributes:
        nbytes: size of buffered messages.
        skipped: offsets skipped because their messages were deleted.
        tombstones: number of messages without a value, which are not kept.
    """

    def __init__(
        self, max_bytes: int = 64 << 20, *, skip_gone: bool = False, watch: StandstillWatch[int] | None = None
    ) -> None:
        self._max_bytes = max_bytes
        self._skip_gone = skip_gone
        self._watch = watch
        self._partitions: dict[int, _Partition] = {}
        self._source: Source | None = None
        self._listener: Listener | None = None
        self.nbytes = 0
        self.skipped = 0
        self.tombstones = 0

    def open(
        self, stream: Stream, group: str, job: str, listener: Listener, incarnation: Incarnation | None = None
    ) -> None:
        """Joins a group; errors as `Stream.source`."""
        self._listener = listener
        self._source = stream.source(group, job, self, incarnation)

    @property
    def source(self) -> Source:
        """Where messages are fetched from, once open."""
        assert self._source is not None, "the buffer is not open"
        return self._source

    def poll(self, max_messages: int, seconds: float, min_messages: int = 1) -> None:
        """Fetches up to `max_messages` messages, or waits for some; arguments and errors as `Source.poll`."""
        self._apply_backpressure()
        try:
            for fetched in self.source.poll(max_messages, seconds, min_messages):
                self._append(fetched)
            positions = self.source.positions()
            for number, position in positions.items():  # past offsets without messages, such as markers
                partition = self._partitions[number]
                partition.end = max(partition.end, position)
            if self._watch and self._watch.polled(positions, positions if self.source.is_paused else ()):
                self.source.rejoin()
        except OffsetGone as gone:
            self._skip_deleted(gone)

    def _append(self, fetched: Fetched) -> None:
        partition = self._partitions[fetched.partition]
        values = [value for value in fetched.values if value is not None]
        has_value = [value is not None for value in fetched.values] if len(values) < len(fetched.values) else None
        partition.offsets += fetched.offsets if has_value is None else compress(fetched.offsets, has_value)
        partition.times += fetched.times if has_value is None else compress(fetched.times, has_value)
        partition.values += values
        partition.end = fetched.offsets[-1] + 1
        self.nbytes += sum(map(len, values))
        self.tombstones += len(fetched.values) - len(values)

    def _apply_backpressure(self) -> None:
        """Pauses the source while the buffer is full, until half of it is free."""
        source = self.source
        full = self.nbytes > (self._max_bytes // 2 if source.is_paused else self._max_bytes)
        if full != source.is_paused:
            (source.pause if full else source.resume)()

    def _skip_deleted(self, gone: OffsetGone) -> None:
        if gone.wanted > gone.high:
            raise OffsetGone(gone.partition, gone.wanted, gone.low, gone.high) from gone
        if not self._skip_gone:
            raise gone
        at = max(gone.wanted, gone.low)
        if at == gone.wanted:
            logger.warning("%s; resuming there: earlier messages are skipped", gone)
        else:
            logger.warning(
                "partition %d: %d samples were deleted before they were learned; resuming at offset %d",
                *(gone.partition, at - gone.wanted, at),
                extra={"batch": f"{gone.partition}:{gone.wanted}-{at - 1}"},
            )
        self.skipped += at - gone.wanted
        self.source.seek(gone.partition, at)
        self._partitions[gone.partition].end = at

    def assigned(self, partitions: Sequence[int]) -> Mapping[int, int]:
        assert self._listener is not None
        positions = self._listener.assigned(partitions)
        self._partitions |= {partition: _Partition(positions[partition]) for partition in partitions}
        return positions

    def revoked(self, partitions: Sequence[int]) -> None:
        assert self._listener is not None
        self._listener.revoked(partitions)
        self._drop(partitions)

    def lost(self, partitions: Sequence[int]) -> None:
        assert self._listener is not None
        self._listener.lost(partitions)
        self._drop(partitions)

    def _drop(self, partitions: Sequence[int]) -> None:
        for number in partitions:
            self.nbytes -= sum(map(len, self._partitions.pop(number).values))

    def reach(self, partition: int, start: int, most: int) -> int:
        """Offset after the first `most` messages from `start` on, or after the last one buffered; at least `start`.

        It is the offset of the next message, so that offsets without a message belong to the range before.
        """
        buffered = self._partitions.get(partition)
        if buffered is None:
            return start
        after = buffered.index(start) + most
        return max(start, buffered.offsets[after] if after < len(buffered.offsets) else buffered.end)

    def count(self, partition: int, start: int, end: int) -> int:
        """Number of messages buffered from `start` to `end - 1`."""
        buffered = self._partitions.get(partition)
        return 0 if buffered is None else buffered.index(end) - buffered.index(start)

    def idle(self) -> frozenset[int]:
        """Partitions whose messages are all released, as of the last fetch."""
        return frozenset(p for p, lag in self.source.lag().items() if not lag and not self._partitions[p].offsets)

    def read(self, spans: Iterable[tuple[int, int, int]]) -> Messages:
        """The messages of ranges: partition, first offset, offset after the last. A partition has one range at most."""
        values: list[bytes] = []
        offsets: list[int] = []
        times: list[int] = []
        starts = [0]
        for number, start, end in spans:
            partition = self._partitions[number]
            part = slice(partition.index(start), partition.index(end))
            values += partition.values[part]
            offsets += partition.offsets[part]
            times += partition.times[part]
            starts.append(len(values))
        return Messages(values, np.array(offsets, np.int64), np.array(times, np.int64), starts)

    def release(self, partition: int, before: int) -> None:
        """Drops the messages before an offset."""
        buffered = self._partitions.get(partition)
        if buffered is None or before <= buffered.begin:
            return
        done = buffered.index(before)
        self.nbytes -= sum(map(len, buffered.values[:done]))
        del buffered.values[:done], buffered.offsets[:done], buffered.times[:done]
        buffered.begin = before
        buffered.end = max(buffered.end, before)

    def seek(self, partition: int, offset: int) -> None:
        """Continues at `offset`; messages from there on are fetched again unless they are buffered."""
        buffered = self._partitions.get(partition)
        if buffered is None or buffered.begin <= offset <= buffered.end:
            return
        self._drop([partition])
        self._partitions[partition] = _Partition(offset)
        self.source.seek(partition, offset)

    def close(self) -> None:
        """Leaves the group."""
        if self._source is not None:
            self._source.close()
