"""The exactly-once rule: which push a shard applies, and where a worker goes on.

Every sample has an offset in a partition of the source. A push carries, per partition, the half-open range of offsets
that its gradients cover, and goes to every shard, also to those for which it has no rows. A shard applies it in one
critical section with the advance of its `VectorClock`. So, whatever crashes, is retried or comes late, each sample
changes each shard exactly once:

* What a shard has applied is exactly the offsets before its clock: a push is applied only if it starts there.
* A push that is repeated lies before the clock, and is acknowledged without being applied.
* A shard that was restored has an older clock, as its rows are older. Workers go back to the oldest clock of all
  shards (`Cursor.rewind`), and cut batches at every shard's clock: each shard so finds every batch wholly before its
  clock, or starting at it.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

Clock = Mapping[int, int]
"""Offset of the first sample that has not been learned, by partition."""


class Span(NamedTuple):
    """Offsets `start` to `end - 1` of a partition."""

    partition: int
    start: int
    end: int


class Stand(NamedTuple):
    """Where a shard stands.

    Attributes:
        clock: what it has learned.
        watermarks: by partition the latest event time of that, in seconds since the epoch.
    """

    clock: Clock
    watermarks: Mapping[int, float]


class Offsets(Protocol):
    """Which samples there are to read."""

    def reach(self, partition: int, start: int, most: int) -> int:
        """Offset after the first `most` samples from `start` on, or after the last there is; at least `start`."""

    def count(self, partition: int, start: int, end: int) -> int:
        """Samples from `start` to `end - 1`; fewer than offsets where there are gaps."""


class Ends(dict[int, int]):
    """Offset after the last sample by partition, where offsets have no gaps."""

    def reach(self, partition: int, start: int, most: int) -> int:
        """See Offsets."""
        return max(start, min(self.get(partition, 0), start + most))

    def count(self, partition: int, start: int, end: int) -> int:
        """See Offsets."""
        return end - start


class Outcome(IntEnum):
    """What became of a push."""

    APPLIED = 0
    DUPLICATE = 1
    REJECTED = 2


class VectorClock:
    """Decides about pushes. It does no more than that: its owner applies what it accepts, in one critical section.

    Args:
        start: offsets at which learning began. A partition that is not listed begins at offset 0.
    """

    def __init__(self, start: Clock) -> None:
        self._next = dict(start)

    def judge(self, spans: Iterable[Span]) -> Outcome:
        """What is to be done with a push over `spans`, which has at most one of each partition."""
        fresh = old = True
        for partition, start, end in spans:
            at = self._next.get(partition, 0)
            fresh &= start == at
            old &= end <= at
        # A push without spans, and one of nothing but empty spans at the clock, changes no clock: nothing to apply.
        if old:
            return Outcome.DUPLICATE
        return Outcome.APPLIED if fresh else Outcome.REJECTED

    def advance(self, spans: Iterable[Span]) -> None:
        """To be called once a push that was judged APPLIED has been applied."""
        for partition, _, end in spans:
            self._next[partition] = end

    def read(self) -> dict[int, int]:
        """The clock, as a copy."""
        return dict(self._next)


def latest(clocks: Iterable[Clock]) -> dict[int, int]:
    """By partition the latest of several clocks."""
    joined: dict[int, int] = {}
    for clock in clocks:
        for partition, at in clock.items():
            joined[partition] = max(joined.get(partition, 0), at)
    return joined


def watermarks_at(positions: Clock, stands: Iterable[Stand]) -> dict[int, float]:
    """By partition the watermark as of a position, which is the clock of at least one of the shards."""
    found: dict[int, float] = {}
    for clock, watermarks in stands:
        found |= {p: watermarks.get(p, 0.0) for p, at in positions.items() if clock.get(p, 0) == at}
    return found


class Cursor:
    """Where a worker reads on in its partitions, and where it must cut batches."""

    def __init__(self) -> None:
        self._position: dict[int, int] = {}
        self._cuts: dict[int, list[int]] = {}  # clocks of shards ahead of the position, descending

    def rewind(self, partitions: Iterable[int], clocks: Sequence[Clock]) -> None:
        """Takes over `partitions`, and no others, where the shards, whose clocks are given, stand."""
        at = {p: sorted({clock.get(p, 0) for clock in clocks}, reverse=True) for p in partitions}
        self._position = {p: offsets.pop() for p, offsets in at.items()}
        self._cuts = at

    @property
    def positions(self) -> dict[int, int]:
        """Offset of the next sample to read, by partition."""
        return dict(self._position)

    def catching_up(self, partition: int) -> bool:
        """Whether some shard has learned from the next sample already, and another has not."""
        return bool(self._cuts[partition])

    def limit(self, partition: int) -> int | None:
        """Offset at which the next batch of a partition must end at the latest; None: anywhere."""
        cuts = self._cuts[partition]
        return cuts[-1] if cuts else None

    def next(self, available: Offsets, most: int) -> list[Span]:
        """The ranges to read for the next batch, which are then behind the cursor.

        A partition in which shards differ gets batches of its own: beside another it might be old while that is new,
        and the batch neither.

        Args:
            available: the samples that there are.
            most: samples at most.
        """
        spans: list[Span] = []
        for partition in sorted(self._position, key=lambda p: not self._cuts[p]):
            alone = self.catching_up(partition)
            if alone and spans:
                break
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
            del self._position[partition]  # to the end of the queue: no partition keeps another waiting
            self._position[partition] = end
            if self._cuts[partition] and self._cuts[partition][-1] == end:
                self._cuts[partition].pop()
        return spans
