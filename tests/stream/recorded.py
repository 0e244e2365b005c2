"""Members of groups for tests: what they were told, and what they polled."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from streamtrain.stream.redis.stream import RedisStream
from streamtrain.stream.source import Source
from tests.patience import until


class Recorder:
    """A listener that begins at the start, or where it has polled to, and notes what it is told.

    Args:
        say: is called with every event and its partitions.
    """

    def __init__(self, say: Callable[[str, list[int]], None] = lambda event, partitions: None) -> None:
        self.events: list[tuple[str, list[int]]] = []
        self.got: dict[int, list[bytes]] = {}
        self.offsets: dict[int, list[int]] = {}
        self._say = say

    def _note(self, event: str, partitions: Sequence[int]) -> None:
        self.events.append((event, list(partitions)))
        self._say(event, list(partitions))

    def assigned(self, partitions: Sequence[int]) -> Mapping[int, int]:
        self._note("assigned", partitions)
        return {partition: self.offsets.get(partition, [-1])[-1] + 1 for partition in partitions}

    def revoked(self, partitions: Sequence[int]) -> None:
        self._note("revoked", partitions)

    def lost(self, partitions: Sequence[int]) -> None:
        self._note("lost", partitions)

    def take(self, source: Source, most: int = 1000, seconds: float = 0.1) -> int:
        """Polls once; returns how many messages came."""
        fetched = source.poll(most, seconds)
        for one in fetched:
            self.got.setdefault(one.partition, []).extend(value for value in one.values if value is not None)
            self.offsets.setdefault(one.partition, []).extend(one.offsets)
        return sum(len(one.values) for one in fetched)

    def take_until(self, source: Source, done: Callable[["Recorder"], Any]) -> "Recorder":
        """Polls until something is so."""
        until(
            lambda: done(self),
            doing=lambda: self.take(source),
            told=lambda: f"got {self.count} messages, {self.events}",
        )
        return self

    @property
    def count(self) -> int:
        return sum(len(values) for values in self.got.values())


def main(url: str, topic: str, lease: str) -> None:
    """A process that is a member for ever, and prints what it is told."""

    def say(event: str, partitions: list[int]) -> None:
        print(json.dumps([event, partitions]), flush=True)

    recorder = Recorder(say)
    source = RedisStream(url, topic, lease=float(lease)).source("group", "job", recorder)
    while True:
        recorder.take(source, seconds=0.05)


if __name__ == "__main__":
    main(*sys.argv[1:])
