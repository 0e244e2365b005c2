"""A member of a group that reads Redis Streams."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from streamtrain.errors import OffsetGone, SourceRefused, SourceUnavailable, TopicMissing
from streamtrain.stream.redis.connection import StreamConnection, StreamTopic
from streamtrain.stream.redis.group import LeaseThread
from streamtrain.stream.redis.scripts import BOUNDS
from streamtrain.stream.source import Bounds, Fetched, Listener, Record, assign_partitions

_DIGITS = 16  # of milliseconds: the year 10000 has 15
_SLICE = 1.0  # seconds that the server holds back an empty answer at most

Entry = list[Any]  # id, and field and value in turns


class RedisSource:
    """One member of a group that reads Redis Streams. Where the server hangs, a request is awaited over several polls.

    Args:
        topic: the topic to read.
        connection: connection to its server.
        lease: keeps its membership.
        listener: handles rebalances.
    """

    def __init__(
        self, topic: StreamTopic, connection: StreamConnection, lease: LeaseThread, listener: Listener
    ) -> None:
        self._topic, self._lease, self._listener = topic, lease, listener
        self._group = lease.group
        self._streams = topic.keys.streams(topic.partitions)
        self._of_stream = {stream.encode(): partition for partition, stream in enumerate(self._streams)}
        self._positions: dict[int, int] = {}
        self._is_paused = False
        self._gone: dict[int, OffsetGone] = {}
        self._highs: dict[int, int] = {}
        self._connection: StreamConnection | None = connection
        self._version = b"0-0"
        self._is_balanced = False  # whether the partitions here are those that the server has for this member
        self._is_checked = False  # whether all positions have been compared with the bounds
        self._requested: dict[int, int] = {}  # positions that were sent
        self._bounded: list[int] = []  # partitions of which the bounds were requested
        self._late = 0.0  # seconds in which the answer must come
        self._closed = False

    def poll(self, max_messages: int, seconds: float, min_messages: int = 1) -> list[Fetched]:
        deadline = time.monotonic() + seconds
        self._lease.polled()
        while True:
            try:
                fetched = self._attempt(max_messages, deadline)
            except SourceUnavailable:
                self._disconnect()  # the lease thread connects anew, and logs that the server is unreachable if it is
                fetched = []
            if fetched:
                return fetched
            if time.monotonic() >= deadline:
                for gone in self._gone.values():
                    if not self._is_paused:
                        raise gone
                return []

    def _attempt(self, max_messages: int, deadline: float) -> list[Fetched]:
        if self._connection is None:
            self._connection = self._lease.connection(max(0.0, deadline - time.monotonic()))
            self._is_balanced = self._is_checked = False
            if self._connection is None:
                return []
        if not self._connection.pending:
            self._rebalance(self._connection)
            self._request(self._connection, max_messages, deadline)
        replies = self._connection.receive(max(0.0, deadline - time.monotonic()), self._late)
        if replies is None:
            return []
        streams, bounds = (self._connection.checked(reply) for reply in replies)
        entries = dict(streams or ())
        if entries.pop(self._group.changes.encode(), None):
            self._is_balanced = False
            self._rebalance(self._connection)
        self._check_positions(bounds, entries)
        return self._fetch(entries, max_messages)

    def _request(self, connection: StreamConnection, max_messages: int, deadline: float) -> None:
        requested = {p: at for p, at in self._positions.items() if not self._is_paused and p not in self._gone}
        # Partitions of which there is more share the room; where there is none, one that gets some may have a share.
        behind = sum(self._highs.get(partition, 0) > at for partition, at in requested.items())
        count = -(-max_messages // (behind or len(requested) or 1))
        # Positions are compared with the bounds at once before they are waited at: what is gone never comes.
        seconds = min(_SLICE, deadline - time.monotonic()) if self._is_checked else 0.0
        wait = ("BLOCK", max(1, int(seconds * 1000))) if seconds > 0 else ()
        streams = [self._streams[partition] for partition in requested]
        ids = [f"0-{at}" for at in requested.values()]
        read = ("XREAD", "COUNT", count, *wait, "STREAMS", self._group.changes, *streams, self._version, *ids)
        self._requested, self._bounded = requested, list(self._positions)
        bounded = [self._streams[partition] for partition in self._bounded]
        self._late = seconds + self._topic.server.timeout
        # The server turns to the second once the first is answered: so the bounds are as of the fetch.
        connection.send(read, ("EVAL", BOUNDS, 1 + len(bounded), self._topic.keys.partitions, *bounded))
        self._is_checked = True

    def _check_positions(self, bounds: list[int] | None, entries: Mapping[bytes, list[Entry]]) -> None:
        """Takes the ends; raises OffsetGone for a partition of which what comes next was there no more, or not yet."""
        if bounds is None:
            raise TopicMissing(f"{self._topic.name} does not exist")
        for partition, low, high in zip(self._bounded, bounds[::2], bounds[1::2], strict=True):
            if low < 0:
                stream = self._streams[partition]
                raise SourceRefused(
                    f"{stream} of {self._topic.name} has ids other than 0-n: add with `XADD {stream} 0-* …`"
                )
            self._highs[partition] = high
            at = self._positions.get(partition)
            if at is None or at != self._requested.get(partition):
                continue
            first = entries.get(self._streams[partition].encode())
            if not low <= at <= high and not (first and _offset(first[0]) == at):
                self._gone[partition] = OffsetGone(partition, at, *Bounds(low, high))
                raise self._gone[partition]

    def _fetch(self, entries: Mapping[bytes, list[Entry]], max_messages: int) -> list[Fetched]:
        fetched = []
        for stream, of_stream in entries.items():
            partition = self._of_stream[stream]
            # It may have been sought, paused or revoked since it was requested.
            is_current = self._positions.get(partition) == self._requested[partition] and not self._is_paused
            if not is_current or not max_messages:
                continue
            taken = of_stream[:max_messages]
            low, high = _offset(taken[0]), _offset(taken[-1])
            dense = high - low + 1 == len(taken)
            offsets = list(range(low, high + 1)) if dense else [_offset(entry) for entry in taken]
            values = [fields[1] if fields[0] == b"v" else _value(fields) for _, fields in taken]
            fetched.append(Fetched(partition, offsets, values, [_time(fields) for _, fields in taken]))
            max_messages -= len(taken)
            del self._positions[partition]  # to the end of the queue: no partition keeps another waiting
            self._positions[partition] = high + 1
        return fetched

    def _rebalance(self, connection: StreamConnection) -> None:
        """Revokes partitions that go to others, then takes free ones, until the assignment is that of the group."""
        while self._lease.removed.is_set() or not self._is_balanced:
            self._lease.removed.clear()
            self._is_balanced = False
            state = self._group.sync(connection)
            mine = {p for p, owner in state.owners.items() if owner == self._group.member} if state else set()
            lost = sorted(self._positions.keys() - mine)
            if lost:
                self._drop(lost)
                self._listener.lost(lost)
            if state is None:
                self._group.join(connection, again=True)
                continue
            self._version = state.version
            target = set(
                assign_partitions(state.members, self._topic.partitions, state.assignment())[self._group.member]
            )
            if given := sorted(mine - target):
                self._revoke(connection, given)
                continue
            mine.update(self._group.take(connection, sorted(target - state.owners.keys())))
            # Beside what is new, what was taken before a listener failed.
            if taken := sorted(mine - self._positions.keys()):
                self._positions |= self._listener.assigned(taken)
                self._is_checked = False
            self._is_balanced = True

    def _revoke(self, connection: StreamConnection, partitions: Sequence[int]) -> None:
        if held := [partition for partition in partitions if partition in self._positions]:
            self._listener.revoked(held)
        self._drop(partitions)
        self._lease.flush_commits(connection)
        self._group.release(connection, partitions)

    def _drop(self, partitions: Sequence[int]) -> None:
        for partition in partitions:
            self._positions.pop(partition, None)
            self._gone.pop(partition, None)
            self._highs.pop(partition, None)

    def seek(self, partition: int, offset: int) -> None:
        self._positions[partition] = offset
        self._gone.pop(partition, None)
        self._is_checked = False

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = self._is_checked = False

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    def positions(self) -> dict[int, int]:
        return dict(self._positions)

    def commit(self, positions: Mapping[int, int]) -> None:
        self._lease.commit(positions)

    def lag(self) -> dict[int, int]:
        return {partition: max(0, self._highs.get(partition, at) - at) for partition, at in self._positions.items()}

    def rejoin(self) -> None:
        """By a new connection, and as the member that it is: what it has is told anew."""
        if mine := sorted(self._positions):
            self._drop(mine)
            self._listener.lost(mine)
        self._disconnect()

    def finished(self) -> bool:
        return False

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if self._positions:
                self._listener.revoked(sorted(self._positions))
        finally:
            self._drop(list(self._positions))
            self._disconnect()
            self._lease.close()

    def _disconnect(self) -> None:
        if self._connection:
            self._connection.close()
            self._connection = None


def _offset(entry: Entry) -> int:
    """The offset of an entry, from its id "0-<offset + 1>"."""
    return int(entry[0][2:]) - 1


def _time(fields: Sequence[bytes]) -> int:
    """When the server got an entry, in milliseconds; -1 where it was written without that, or with something else."""
    at = fields[3] if fields[2:3] == [b"t"] else dict(zip(fields[::2], fields[1::2], strict=True)).get(b"t", b"")
    return int(at) if at.isdigit() and len(at) < _DIGITS else -1


def _value(fields: Sequence[bytes]) -> bytes:
    """The value of an entry written by others, whose fields come in another order; b"" without one."""
    return dict(zip(fields[::2], fields[1::2], strict=True)).get(b"v", b"")


def record(partition: int, entry: Entry) -> Record:
    """An entry with all its fields."""
    fields = dict(zip(entry[1][::2], entry[1][1::2], strict=True))
    time = fields.get(b"t", b"")
    headers = {name[2:].decode(errors="replace"): of for name, of in fields.items() if name.startswith(b"h.")}
    seconds = int(time) / 1000 if time.isdigit() else 0.0
    return Record(partition, _offset(entry), seconds, fields.get(b"k"), fields.get(b"v", b""), headers)
