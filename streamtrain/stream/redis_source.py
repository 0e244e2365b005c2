"""A member of a group that reads Redis Streams."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from streamtrain.errors import OffsetGone, SourceRefused, SourceUnavailable, TopicMissing
from streamtrain.stream.redis_group import Keeper
from streamtrain.stream.redis_link import Lane, Topic
from streamtrain.stream.redis_scripts import BOUNDS
from streamtrain.stream.share import share
from streamtrain.stream.source import Bounds, Fetched, Listener

_SLICE = 1.0  # seconds that the server holds back an empty answer at most

Entry = list[Any]  # id, and field and value in turns


class RedisSource:
    """See Source. Where the server hangs, what has been asked is waited for over several polls.

    Args:
        topic: what is read.
        lane: to its server.
        keeper: of the membership.
        listener: of the partitions.
    """

    def __init__(self, topic: Topic, lane: Lane, keeper: Keeper, listener: Listener) -> None:
        self._topic, self._keeper, self._listener = topic, keeper, listener
        self._group = keeper.group
        self._streams = topic.keys.streams(topic.partitions)
        self._of_stream = {stream.encode(): partition for partition, stream in enumerate(self._streams)}
        self._positions: dict[int, int] = {}
        self._paused: set[int] = set()
        self._gone: dict[int, OffsetGone] = {}
        self._highs: dict[int, int] = {}
        self._lane: Lane | None = lane
        self._version = b"0-0"
        self._is_settled = False  # whether what is the member's here is so in the server
        self._is_known = False  # whether all positions have been compared with what there is
        self._asked: dict[int, int] = {}  # positions that were sent
        self._bounded: list[int] = []  # partitions of which the bounds were asked
        self._late = 0.0  # seconds in which the answer must come
        self._closed = False

    def poll(self, most: int, seconds: float) -> list[Fetched]:
        """See Source."""
        deadline = time.monotonic() + seconds
        self._keeper.polled()
        while True:
            try:
                fetched = self._attempt(most, deadline)
            except SourceUnavailable:
                self._hang_up()  # the keeper gets another lane, and says that the server is away if it is
                fetched = []
            if fetched:
                return fetched
            if time.monotonic() >= deadline:
                gone = [error for partition, error in self._gone.items() if partition not in self._paused]
                if gone:
                    raise gone[0]
                return []

    def _attempt(self, most: int, deadline: float) -> list[Fetched]:
        if self._lane is None:
            self._lane = self._keeper.lane(max(0.0, deadline - time.monotonic()))
            self._is_settled = self._is_known = False
            if self._lane is None:
                return []
        if not self._lane.pending:
            self._settle(self._lane)
            self._ask(self._lane, most, deadline)
        replies = self._lane.receive(max(0.0, deadline - time.monotonic()), self._late)
        if replies is None:
            return []
        streams, bounds = (self._lane.checked(reply) for reply in replies)
        entries = dict(streams or ())
        if entries.pop(self._group.changes.encode(), None):
            self._is_settled = False
            self._settle(self._lane)
        self._compare(bounds, entries)
        return self._fetch(entries, most)

    def _ask(self, lane: Lane, most: int, deadline: float) -> None:
        asked = {p: at for p, at in self._positions.items() if p not in self._paused and p not in self._gone}
        # Partitions of which there is more share the room; where there is none, one that gets some may have a share.
        behind = sum(self._highs.get(partition, 0) > at for partition, at in asked.items())
        count = -(-most // (behind or len(asked) or 1))
        # Positions are compared with the bounds at once before they are waited at: what is gone never comes.
        seconds = min(_SLICE, deadline - time.monotonic()) if self._is_known else 0.0
        wait = ("BLOCK", max(1, int(seconds * 1000))) if seconds > 0 else ()
        streams = [self._streams[partition] for partition in asked]
        ids = [f"0-{at}" for at in asked.values()]
        read = ("XREAD", "COUNT", count, *wait, "STREAMS", self._group.changes, *streams, self._version, *ids)
        self._asked, self._bounded = asked, list(self._positions)
        bounded = [self._streams[partition] for partition in self._bounded]
        self._late = seconds + self._topic.link.timeout
        # The server turns to the second once the first is answered: so the bounds are as of the fetch.
        lane.send(read, ("EVAL", BOUNDS, 1 + len(bounded), self._topic.keys.partitions, *bounded))
        self._is_known = True

    def _compare(self, bounds: list[int] | None, entries: Mapping[bytes, list[Entry]]) -> None:
        """Takes the ends; raises OffsetGone for a partition of which what comes next was there no more, or not yet."""
        if bounds is None:
            raise TopicMissing(f"there is no {self._topic.name}")
        for partition, low, high in zip(self._bounded, bounds[::2], bounds[1::2], strict=True):
            if low < 0:
                stream = self._streams[partition]
                raise SourceRefused(
                    f"{stream} of {self._topic.name} has ids other than 0-n: add with `XADD {stream} 0-* …`"
                )
            self._highs[partition] = high
            at = self._positions.get(partition)
            if at is None or at != self._asked.get(partition):
                continue
            first = entries.get(self._streams[partition].encode())
            if not low <= at <= high and not (first and _offset(first[0]) == at):
                self._gone[partition] = OffsetGone(partition, at, *Bounds(low, high))
                raise self._gone[partition]

    def _fetch(self, entries: Mapping[bytes, list[Entry]], most: int) -> list[Fetched]:
        fetched = []
        for stream, of_stream in entries.items():
            partition = self._of_stream[stream]
            # It may have been sought, paused or given away since it was asked for.
            if self._positions.get(partition) != self._asked[partition] or partition in self._paused or not most:
                continue
            taken = of_stream[:most]
            low, high = _offset(taken[0]), _offset(taken[-1])
            dense = high - low + 1 == len(taken)
            offsets = list(range(low, high + 1)) if dense else [_offset(entry) for entry in taken]
            values = [fields[1] if fields[0] == b"v" else _value(fields) for _, fields in taken]
            fetched.append(Fetched(partition, offsets, values))
            most -= len(taken)
            del self._positions[partition]  # to the end of the queue: no partition keeps another waiting
            self._positions[partition] = high + 1
        return fetched

    def _settle(self, lane: Lane) -> None:
        """Gives up partitions that go to others, then takes those that are free, until that is how the group has it."""
        while self._keeper.removed.is_set() or not self._is_settled:
            self._keeper.removed.clear()
            self._is_settled = False
            state = self._group.sync(lane)
            mine = {p for p, owner in state.owners.items() if owner == self._group.me} if state else set()
            lost = sorted(self._positions.keys() - mine)
            if lost:
                self._drop(lost)
                self._listener.lost(lost)
            if state is None:
                self._group.join(lane)
                continue
            self._version = state.version
            target = set(share(state.members, self._topic.partitions, state.held())[self._group.me])
            if given := sorted(mine - target):
                self._give(lane, given)
                continue
            mine.update(self._group.take(lane, sorted(target - state.owners.keys())))
            # Beside what is new, what was taken before a listener failed.
            if taken := sorted(mine - self._positions.keys()):
                self._positions |= self._listener.assigned(taken)
                self._is_known = False
            self._is_settled = True

    def _give(self, lane: Lane, partitions: Sequence[int]) -> None:
        if held := [partition for partition in partitions if partition in self._positions]:
            self._listener.revoked(held)
        self._drop(partitions)
        self._keeper.noted(lane)
        self._group.release(lane, partitions)

    def _drop(self, partitions: Sequence[int]) -> None:
        for partition in partitions:
            self._positions.pop(partition, None)
            self._gone.pop(partition, None)
            self._highs.pop(partition, None)
        self._paused.difference_update(partitions)

    def seek(self, partition: int, offset: int) -> None:
        """See Source."""
        self._positions[partition] = offset
        self._gone.pop(partition, None)
        self._is_known = False

    def pause(self, partitions: Sequence[int]) -> None:
        """See Source."""
        self._paused.update(partitions)

    def resume(self, partitions: Sequence[int]) -> None:
        """See Source."""
        self._paused.difference_update(partitions)
        self._is_known = False

    def positions(self) -> dict[int, int]:
        """See Source."""
        return dict(self._positions)

    def commit(self, positions: Mapping[int, int]) -> None:
        """See Source."""
        self._keeper.commit(positions)

    def lag(self) -> dict[int, int]:
        """See Source."""
        return {partition: max(0, self._highs.get(partition, at) - at) for partition, at in self._positions.items()}

    def finished(self) -> bool:
        """See Source. There may always be more."""
        return False

    def close(self) -> None:
        """See Source."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._positions:
                self._listener.revoked(sorted(self._positions))
        finally:
            self._drop(list(self._positions))
            self._hang_up()
            self._keeper.close()

    def _hang_up(self) -> None:
        if self._lane:
            self._lane.close()
            self._lane = None


def _offset(entry: Entry) -> int:
    """Of an entry, by its id "0-<offset + 1>"."""
    return int(entry[0][2:]) - 1


def _value(fields: Sequence[bytes]) -> bytes:
    """Of an entry written by others, whose fields come in another order; b"" without one."""
    return dict(zip(fields[::2], fields[1::2], strict=True)).get(b"v", b"")
