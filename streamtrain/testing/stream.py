"""A stream in memory: for tests, notebooks and benchmarks. It passes the contract suite that Kafka passes."""

import json
import sys
import threading
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from streamtrain.errors import OffsetGone, SourceRefused, TopicMissing, WriteFailed
from streamtrain.incarnation import Incarnation
from streamtrain.stream.source import Bounds, Fetched, Listener, Record, assign_partitions

Message = bytes | str | Mapping[str, Any]


class MemoryService:
    """The topics of one process, shared by streams, group members and writers. Thread-safe."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.topics: dict[str, list[_Partition]] = {}
        self.identities: dict[str, str] = {}
        self.groups: dict[tuple[str, str], _Group] = {}
        self.ended: set[str] = set()


class _Partition:
    """Messages from offset `low` on, with their times."""

    def __init__(self) -> None:
        self.low = 0
        self.values: list[bytes] = []
        self.times: list[float] = []
        self.keys: list[bytes | None] = []
        self.headers: list[Mapping[str, bytes]] = []

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.low, self.low + len(self.values))


class _Group:
    """Members of a group, the partitions of each, and committed positions."""

    def __init__(self) -> None:
        self.jobs: dict[str, str] = {}
        self.held: dict[str, set[int]] = {}
        self.committed: dict[int, int] = {}
        self.incarnation: Incarnation | None = None


class MemoryStream:
    """A topic.

    Args:
        topic: its name.
        service: shared with other streams; None: one of its own.
    """

    def __init__(self, topic: str = "samples", service: MemoryService | None = None) -> None:
        self.topic = topic
        self.name, self.unreachable = f"topic {topic} in memory", False
        self._service = service or MemoryService()

    @classmethod
    def of(cls, messages: Mapping[int, Sequence[Message]], *, more: bool = False) -> "MemoryStream":
        """A stream of messages by partition, dicts or JSON; it ends unless `more` are to be added."""
        stream = cls()
        stream.create(max(messages, default=0) + 1)
        for partition, of_partition in messages.items():
            stream.add(partition, of_partition)
        if not more:
            stream.end()
        return stream

    def add(self, partition: int, messages: Sequence[Message], at: float | None = None) -> None:
        """Appends messages to a partition; `at`: their time, in seconds since the epoch, by default now."""
        values = [one if isinstance(one, bytes) else _text(one).encode() for one in messages]
        self._add(partition, values, [None] * len(values), [{}] * len(values), at)

    def _add(
        self,
        partition: int,
        values: Sequence[bytes],
        keys: Sequence[bytes | None],
        headers: Sequence[Mapping[str, bytes]],
        at: float | None = None,
    ) -> None:
        with self._service.changed:
            into = self.partitions()[partition]
            into.values += values
            into.keys += keys
            into.headers += headers
            into.times += [time.time() if at is None else at] * len(values)
            self._service.changed.notify_all()

    def end(self) -> None:
        """Ends the topic: no more messages will come."""
        with self._service.changed:
            self._service.ended.add(self.topic)
            self._service.changed.notify_all()

    def delete(self, partition: int, before: int) -> None:
        """Deletes the messages before an offset, as retention does."""
        with self._service.changed:
            of = self.partitions()[partition]
            gone = max(0, min(before, of.bounds.high) - of.low)
            of.low += gone
            del of.values[:gone], of.times[:gone], of.keys[:gone], of.headers[:gone]

    def remove(self) -> None:
        """Deletes the topic, which may then be created again."""
        with self._service.changed:
            del self._service.topics[self.topic], self._service.identities[self.topic]

    def messages(self, partition: int) -> list[tuple[bytes, Mapping[str, bytes]]]:
        """All messages of a partition, with their headers."""
        of = self.partitions()[partition]
        return list(zip(of.values, of.headers, strict=True))

    def partitions(self) -> list[_Partition]:
        """The partitions; raises TopicMissing."""
        with self._service.changed:
            if self.topic not in self._service.topics:
                raise TopicMissing(f"{self.name} does not exist")
            return self._service.topics[self.topic]

    def bounds(self) -> dict[int, Bounds]:
        return {partition: one.bounds for partition, one in enumerate(self.partitions())}

    def ends(self) -> dict[int, int]:
        return {partition: of.high for partition, of in self.bounds().items()}

    def identity(self) -> str:
        with self._service.changed:
            self.partitions()
            return self._service.identities[self.topic]

    def create(self, partitions: int) -> None:
        with self._service.changed:
            self._service.topics.setdefault(self.topic, [_Partition() for _ in range(partitions)])
            self._service.identities.setdefault(self.topic, uuid.uuid4().hex)
            self._service.changed.notify_all()

    def records(self, wanted: Mapping[int, Bounds], *, committed: bool = True) -> Iterator[Record]:
        for partition, (low, high) in wanted.items():
            of = self.partitions()[partition]
            with self._service.changed:
                kept = slice(max(0, low - of.low), max(0, high - of.low))
                offsets = range(of.low, of.bounds.high)[kept]
                fields = (of.times[kept], of.keys[kept], of.values[kept], of.headers[kept])
            for offset, time_, key, value, headers in zip(offsets, *fields, strict=True):
                yield Record(partition, offset, time_, key, value, headers)

    def committed(self, group: str) -> dict[int, int]:
        with self._service.changed:
            self.partitions()
            return dict(self._service.groups.get((self.topic, group), _Group()).committed)

    def at(self, seconds: float) -> dict[int, int]:
        with self._service.changed:
            return {
                partition: one.low + sum(time < seconds for time in one.times)
                for partition, one in enumerate(self.partitions())
            }

    def latest_incarnation(self, group: str) -> Incarnation | None:
        with self._service.changed:
            self.partitions()
            return self._service.groups.get((self.topic, group), _Group()).incarnation

    def members(self, group: str) -> int:
        with self._service.changed:
            self.partitions()
            return len(self._service.groups.get((self.topic, group), _Group()).jobs)

    def source(
        self, group: str, job: str, listener: Listener, incarnation: Incarnation | None = None
    ) -> "MemorySource":
        source = MemorySource(self, self._service, group, job, listener)
        with self._service.changed:
            of = self._service.groups[self.topic, group]
            of.incarnation = max((one for one in (of.incarnation, incarnation) if one), default=None)
        return source

    def writer(self, topic: str | None = None) -> "MemoryWriter":
        partitions = len(self.partitions())
        other = MemoryStream(topic or self.topic, self._service)
        other.create(partitions)
        return MemoryWriter(other)


class MemorySource:
    """See Source."""

    _names = count()

    def __init__(self, stream: MemoryStream, service: MemoryService, group: str, job: str, listener: Listener) -> None:
        self._stream, self._service, self._listener = stream, service, listener
        self._name = f"member-{next(self._names):06}"
        self._positions: dict[int, int] = {}
        self._is_paused = False
        self._gone: set[int] = set()
        with service.changed:
            stream.partitions()
            self._group = service.groups.setdefault((stream.topic, group), _Group())
            others = set(self._group.jobs.values()) - {job}
            if others:
                raise SourceRefused(f"group {group} of {stream.name} has members of another job, {others.pop()}")
            self._group.jobs[self._name] = job
            self._group.held[self._name] = set()
            service.changed.notify_all()

    def poll(self, max_messages: int, seconds: float, min_messages: int = 1) -> list[Fetched]:
        deadline = time.monotonic() + seconds
        self._rebalance()
        while True:
            with self._service.changed:
                fetched = self._fetch(max_messages)
                if fetched or self.finished():
                    return fetched
                left = deadline - time.monotonic()
                if left <= 0:
                    return []
                self._service.changed.wait(left)
            self._rebalance()

    def _fetch(self, max_messages: int) -> list[Fetched]:
        topic = self._stream.partitions()
        active = [one for one in self._positions if not self._is_paused and one not in self._gone]
        reading = [(partition, topic[partition]) for partition in active]
        for partition, of in reading:  # before anything is fetched, which would be lost
            if not of.low <= self._positions[partition] <= of.bounds.high:
                self._gone.add(partition)
                raise OffsetGone(partition, self._positions[partition], *of.bounds)
        fetched = []
        for partition, of in reading:
            at = self._positions[partition]
            part = slice(at - of.low, at - of.low + max_messages)
            values, times = of.values[part], [round(1000 * time) for time in of.times[part]]
            if values:
                fetched.append(Fetched(partition, list(range(at, at + len(values))), values, times))
                max_messages -= len(values)
                del self._positions[partition]  # to the end of the queue: no partition keeps another waiting
                self._positions[partition] = at + len(values)
        return fetched

    def _rebalance(self) -> None:
        """Revokes partitions that go to others, then takes free ones. Calls the listener without the lock."""
        group, changed = self._group, self._service.changed
        with changed:
            if self._name not in group.jobs:
                return
            shares = assign_partitions(list(group.jobs), len(self._stream.partitions()), group.held)
            target = set(shares[self._name])
            given = sorted(group.held[self._name] - target)
        if given:
            self._listener.revoked(given)
            self._drop(given)
        with changed:
            elsewhere = set().union(*(held for name, held in group.held.items() if name != self._name))
            taken = sorted(target - elsewhere - set(self._positions))
            group.held[self._name].update(taken)
        if taken:
            self._positions |= self._listener.assigned(taken)  # which is tried again if it fails

    def _drop(self, partitions: Sequence[int]) -> None:
        self._positions = {one: at for one, at in self._positions.items() if one not in partitions}
        self._gone.difference_update(partitions)
        with self._service.changed:
            self._group.held[self._name].difference_update(partitions)
            self._service.changed.notify_all()

    def seek(self, partition: int, offset: int) -> None:
        self._positions[partition] = offset
        self._gone.discard(partition)

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    def positions(self) -> dict[int, int]:
        return dict(self._positions)

    def commit(self, positions: Mapping[int, int]) -> None:
        with self._service.changed:
            self._group.committed |= positions

    def lag(self) -> dict[int, int]:
        partitions = self._stream.partitions()
        return {partition: partitions[partition].bounds.high - at for partition, at in self._positions.items()}

    def rejoin(self) -> None:
        if mine := sorted(self._positions):
            self._listener.lost(mine)
            self._drop(mine)

    def finished(self) -> bool:
        return self._stream.topic in self._service.ended and not any(self.lag().values())

    def close(self) -> None:
        if self._positions:
            self._listener.revoked(sorted(self._positions))
            self._drop(list(self._positions))
        with self._service.changed:
            self._group.jobs.pop(self._name, None)
            self._group.held.pop(self._name, None)
            self._service.changed.notify_all()


class MemoryWriter:
    """See Writer."""

    def __init__(self, stream: MemoryStream) -> None:
        self._stream = stream
        self._turn = count()
        self.partitions = len(stream.partitions())

    def max_value_bytes(self, key: bytes | None = None, headers: Mapping[str, bytes] = {}) -> int:
        """Unlimited."""
        return sys.maxsize

    def write(
        self, value: bytes, *, partition: int | None = None, key: bytes | None = None, headers: Mapping[str, bytes] = {}
    ) -> None:
        partitions = len(self._stream.partitions())
        if partition is None:
            partition = (next(self._turn) if key is None else zlib.crc32(key)) % partitions
        if not 0 <= partition < partitions:
            raise WriteFailed(f"{self._stream.name} has no partition {partition}")
        self._stream._add(partition, [value], [key], [dict(headers)])

    def flush(self, seconds: float) -> int:
        return 0

    def close(self) -> None:
        pass


def _text(message: str | Mapping[str, Any]) -> str:
    return message if isinstance(message, str) else json.dumps(dict(message))
