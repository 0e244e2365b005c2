"""The exactly-once rule: which pushes a shard applies, and where a worker resumes.

Every sample has an offset in a partition of the source. A push carries, per partition, the half-open range of offsets
that its gradients cover, and goes to every shard, also to those for which it has no rows. A shard applies it in one
critical section with the advance of its `VectorClock`. So, across crashes, retries and delays, each sample changes
each shard exactly once:

* What a shard has applied is exactly the offsets before its clock: a push is applied only if it starts there.
* A repeated push lies before the clock, and is acknowledged without being applied.
* A restored shard has an older clock, as its rows are older. Workers rewind to the oldest clock of all shards
  (`Cursor.rewind`) and end batches at every shard's clock, so every batch is either wholly before a shard's clock or
  starts at it.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

from streamtrain.model.bad_samples import Refusals

Clock = Mapping[int, int]
"""Offset of the first sample that has not been learned, by partition."""


class Span(NamedTuple):
    """Offsets `start` to `end - 1` of a partition."""

    partition: int
    start: int
    end: int


class Progress(NamedTuple):
    """How far a shard has learned.

    Attributes:
        clock: offsets learned.
        watermarks: latest event time up to the clock, by partition, in seconds since the epoch.
        refusals: state of the bad-sample guard at the clock, by partition.
        predictions: predictions in blocks that are not stored yet (train/blocks.py), by partition.
    """

    clock: Clock
    watermarks: Mapping[int, float]
    refusals: Mapping[int, Refusals] = {}
    predictions: Mapping[int, bytes] = {}


class AvailableOffsets(Protocol):
    """The samples available to read."""

    def reach(self, partition: int, start: int, most: int) -> int:
        """Offset after `most` samples from `start` on, or after the last one available; at least `start`."""

    def count(self, partition: int, start: int, end: int) -> int:
        """Samples from `start` to `end - 1`; fewer than offsets where there are gaps."""


class Ends(dict[int, int]):
    """Offset after the last sample by partition, where offsets have no gaps."""

    def reach(self, partition: int, start: int, most: int) -> int:
        return max(start, min(self.get(partition, 0), start + most))

    def count(self, partition: int, start: int, end: int) -> int:
        return end - start


class PushOutcome(IntEnum):
    """What a shard did with a push."""

    APPLIED = 0
    DUPLICATE = 1
    REJECTED = 2


class VectorClock:
    """Decides which pushes to apply. Its owner applies them and advances the clock in one critical section.

    Args:
        start: offsets at which learning began. A partition that is not listed begins at offset 0.
    """

    def __init__(self, start: Clock) -> None:
        self._next = dict(start)

    def judge(self, spans: Iterable[Span]) -> PushOutcome:
        """The outcome for a push over `spans`, at most one per partition."""
        fresh = old = True
        for partition, start, end in spans:
            at = self._next.get(partition, 0)
            fresh &= start == at
            old &= end <= at
        # A push without spans, and one of nothing but empty spans at the clock, changes no clock: nothing to apply.
        if old:
            return PushOutcome.DUPLICATE
        return PushOutcome.APPLIED if fresh else PushOutcome.REJECTED

    def advance(self, spans: Iterable[Span]) -> None:
        """Moves to the end of a push that has been applied."""
        for partition, _, end in spans:
            self._next[partition] = end

    def read(self) -> dict[int, int]:
        return dict(self._next)


def latest(clocks: Iterable[Clock]) -> dict[int, int]:
    """The latest offset of several clocks, by partition."""
    joined: dict[int, int] = {}
    for clock in clocks:
        for partition, at in clock.items():
            joined[partition] = max(joined.get(partition, 0), at)
    return joined


def watermarks_at(positions: Clock, progress: Iterable[Progress]) -> dict[int, float]:
    """The watermark at each position; a position is the clock of at least one shard."""
    result: dict[int, float] = {}
    for clock, watermarks, *_ in progress:
        result |= {p: watermarks.get(p, 0.0) for p, offset in positions.items() if clock.get(p, 0) == offset}
    return result


def refusals_at(positions: Clock, progress: Iterable[Progress]) -> dict[int, Refusals]:
    """The state of the bad-sample guard at each position; a position is the clock of at least one shard."""
    result: dict[int, Refusals] = {}
    for clock, _, refusals, _ in progress:
        result |= {p: counts for p, counts in refusals.items() if p in positions and clock.get(p, 0) == positions[p]}
    return result


class Cursor:
    """Where a worker reads next in its partitions, and where its batches must end."""

    def __init__(self) -> None:
        self._position: dict[int, int] = {}
        self._cuts: dict[int, list[int]] = {}  # clocks of shards ahead of the position, descending

    def rewind(self, partitions: Iterable[int], clocks: Sequence[Clock]) -> None:
        """Replaces all partitions by `partitions`, positioned at the oldest of the shards' clocks."""
        at = {p: sorted({clock.get(p, 0) for clock in clocks}, reverse=True) for p in partitions}
        self._position = {p: offsets.pop() for p, offsets in at.items()}
        self._cuts = at

    @property
    def positions(self) -> dict[int, int]:
        """Offset of the next sample to read, by partition."""
        return dict(self._position)

    def catching_up(self, partition: int) -> bool:
        """Whether some shards have learned the next sample already and others have not."""
        return bool(self._cuts[partition])

    def limit(self, partition: int) -> int | None:
        """Offset at which the next batch of a partition must end at the latest; None: no limit."""
        cuts = self._cuts[partition]
        return cuts[-1] if cuts else None

    def next(self, available: AvailableOffsets, most: int) -> list[Span]:
        """The ranges to read for the next batch; moves the cursor past them.

        A partition in which shards differ gets batches of its own. Together with others, a batch could be partly old
        and partly new to a shard.

        Args:
            available: the samples available.
            most: maximum number of samples.
        """
        spans: list[Span] = []
        for partition in sorted(self._position, key=lambda p: not self._cuts[p]):
            alone = self.catching_up(partition)
            start = self._position[partition]
            end = available.reach(partition, start, most)
            if (limit := self.limit(partition)) is not None:
                end = min(end, limit)
            if end > start:
                spans.append(Span(partition, start, end))
                most -= available.count(partition, start, end)
            if most == 0 or (alone and spans):
                break
        for partition, _, end in spans:
            del self._position[partition]  # to the end of the queue: no partition starves another
            self._position[partition] = end
            if self._cuts[partition] and self._cuts[partition][-1] == end:
                self._cuts[partition].pop()
        return spans
