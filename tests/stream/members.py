"""Members of groups, as tests play them: what they are told and what they read. As a program: one for itself."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from streamtrain.errors import OffsetGone
from streamtrain.incarnation import Incarnation
from streamtrain.stream.source import Source, Stream
from tests.patience import until
from tests.stream.kinds import KINDS


def group_of(stream: Stream) -> str:
    """The group of members that are of no other: some services have groups across topics."""
    return f"readers of {stream.topic}"


class Member:
    """Reads on from where the group has committed, or else from `begin` or the start, and commits what it gives up.

    Attributes:
        events: ("assigned" | "revoked" | "lost", partitions).
        got: (offset, value) by partition, in order.
        times: of messages, in milliseconds, by partition, in order.
        gone: OffsetGone that were raised.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        group: str | None = None,
        job: str = "job",
        begin: Mapping[int, int] = {},
        say: Callable[..., None] | None = None,
        incarnation: Incarnation | None = None,
    ) -> None:
        self.events: list[tuple[str, list[int]]] = []
        self.got: dict[int, list[tuple[int, bytes]]] = {}
        self.times: dict[int, list[int]] = {}
        self.gone: list[OffsetGone] = []
        self._begin = begin
        self._say = say or (lambda *_: None)
        self._stream = stream
        self._group = group or group_of(stream)
        self.source: Source = stream.source(self._group, job, self, incarnation)

    def __enter__(self) -> "Member":
        return self

    def __exit__(self, *_: object) -> None:
        self.source.close()

    def _note(self, event: str, partitions: Sequence[int]) -> None:
        self.events.append((event, sorted(partitions)))
        self._say(event, sorted(partitions))

    def assigned(self, partitions: Sequence[int]) -> Mapping[int, int]:
        self._note("assigned", partitions)
        at = {**self._begin, **self._stream.committed(self._group)}
        return {partition: at.get(partition, 0) for partition in partitions}

    def revoked(self, partitions: Sequence[int]) -> None:
        self._note("revoked", partitions)
        positions = self.source.positions()
        self.source.commit({partition: positions[partition] for partition in partitions})

    def lost(self, partitions: Sequence[int]) -> None:
        self._note("lost", partitions)

    def take(self, most: int = 1000, seconds: float = 0.05, least: int = 1) -> dict[int, list[int]]:
        """Polls once; returns the offsets that came."""
        try:
            fetched = self.source.poll(most, seconds, least)
        except OffsetGone as gone:
            self.gone.append(gone)
            return {}
        assert sum(len(one.offsets) for one in fetched) <= most
        for partition, offsets, values, times in fetched:
            assert offsets == sorted(set(offsets))
            assert partition in self.positions
            self.got.setdefault(partition, []).extend(
                (offset, value) for offset, value in zip(offsets, values, strict=True) if value is not None
            )
            self.times.setdefault(partition, []).extend(times)
            assert len(times) == len(offsets)
            assert self.positions[partition] == offsets[-1] + 1
        if fetched:
            self._say("got", self.count)
        return {one.partition: one.offsets for one in fetched}

    @property
    def positions(self) -> dict[int, int]:
        return self.source.positions()

    @property
    def count(self) -> int:
        return sum(map(len, self.got.values()))

    def offsets(self, partition: int) -> list[int]:
        return [offset for offset, _ in self.got.get(partition, [])]

    def values(self, partition: int) -> list[bytes]:
        return [value for _, value in self.got.get(partition, [])]

    def take_until(self, done: Callable[["Member"], Any], most: int = 1000) -> None:
        """Polls until something is so."""
        until(
            lambda: done(self),
            doing=lambda: self.take(most),
            told=lambda: f"{self.count} messages, {self.gone[-3:]}, {self.positions}, {self.events}",
        )


def take_turns(done: Callable[[], bool], *members: Member) -> None:
    """Polls members in turn until something is so."""

    def take() -> None:
        for member in members:
            member.take(100, 0.02)

    until(done, doing=take, told=lambda: f"{[(one.count, one.positions, one.events) for one in members]}")


def settle(partitions: int, *members: Member) -> list[list[int]]:
    """Polls members in turn until they share all partitions, evenly to within one; returns those of each."""

    def shared() -> bool:
        sizes = [len(member.positions) for member in members]
        return sum(sizes) == partitions and max(sizes) - min(sizes) <= 1

    take_turns(shared, *members)
    have = [sorted(member.positions) for member in members]
    assert sorted(chain(*have)) == list(range(partitions))
    return have


def main(kind: str, server: str, topic: str, instance: str | None = None) -> None:
    """A member that polls for ever, and prints what happens to it."""

    def say(*what: object) -> None:
        print(json.dumps(what), flush=True)

    of = KINDS[kind]
    stream = of.instance(server, topic, instance) if instance and of.instance else of.open(server, topic)
    with Member(stream, say=say) as member:
        while True:
            member.take()


if __name__ == "__main__":
    main(*sys.argv[1:])
