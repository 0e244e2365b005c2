"""A member of a group whose service is Redis: its lease, and the partitions that are its own by it.

A member is in its group while it renews its lease; who finds that another's has run out removes it. Who owns which
partition is kept in the server. Every change of members or owners adds to a stream, which members read together with
their messages: so none polls for changes, and none takes messages without hearing that it has been removed.
"""

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from streamtrain.errors import SourceError, SourceRefused, SourceUnavailable
from streamtrain.stream.redis_link import Lane, Link
from streamtrain.stream.redis_scripts import COMMIT, JOIN, LEAVE, RELEASE, SYNC, TAKE, Keys

logger = logging.getLogger("streamtrain.stream.redis_streams")

RETRY = 0.2  # seconds between two attempts to reach a server that is away


class State(NamedTuple):
    """A group at one moment.

    Attributes:
        version: id of its last change.
        members: their names.
        owners: of partitions that have one, the member's name.
    """

    version: bytes
    members: list[str]
    owners: dict[int, str]

    def held(self) -> dict[str, list[int]]:
        """The partitions of each member."""
        held: dict[str, list[int]] = {name: [] for name in self.members}
        for partition, name in self.owners.items():
            held.setdefault(name, []).append(partition)
        return held


class Group:
    """One member's view of its group. Methods may be called from any thread, each with a lane of its own.

    They raise SourceUnavailable and SourceRefused.

    Args:
        keys: of the topic.
        group: its name.
        job: of the member.
        lease: seconds after which the group takes a silent member for dead.
    """

    def __init__(self, keys: Keys, group: str, job: str, lease: float) -> None:
        self.me = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(6)}"
        self.lease = lease
        self._name, self._job = group, job
        self._keys = keys.group(group)
        self.changes = self._keys[3]

    def _run(self, lane: Lane, script: str, *more: Any) -> Any:
        return lane.call("EVAL", script, len(self._keys), *self._keys, self.me, round(self.lease * 1000), *more)

    def join(self, lane: Lane) -> None:
        """Becomes a member; raises SourceRefused if the members are of another job."""
        other = self._run(lane, JOIN, self._job)
        if other is not None:
            raise SourceRefused(f"group {self._name} has members of another job, {other.decode(errors='replace')}")

    def sync(self, lane: Lane) -> State | None:
        """Renews the lease; None: it had run out, and others have taken note."""
        reply = self._run(lane, SYNC)
        if reply is None:
            return None
        version, members, owners = reply
        names = [name.decode() for name in owners[1::2]]
        return State(version, [name.decode() for name in members], dict(zip(map(int, owners[::2]), names, strict=True)))

    def take(self, lane: Lane, partitions: Iterable[int]) -> list[int]:
        """Takes those that are free; returns which were."""
        return [int(partition) for partition in self._run(lane, TAKE, *partitions)]

    def release(self, lane: Lane, partitions: Iterable[int]) -> None:
        """Gives partitions up."""
        self._run(lane, RELEASE, *partitions)

    def commit(self, lane: Lane, positions: Mapping[int, int]) -> None:
        """Notes positions of partitions that the member has."""
        self._run(lane, COMMIT, *(number for pair in positions.items() for number in pair))

    def leave(self, lane: Lane) -> None:
        """Is no member any more; what it has is free."""
        self._run(lane, LEAVE)


class Keeper:
    """The thread that keeps a member's lease, connects its source anew, and notes what it commits.

    So the source itself never waits for a connection, and a long step of training does not cost its membership.

    Args:
        lane: on which it goes about it.
        idle: seconds without `polled` after which it lets the lease run out: who does not poll is stuck.
    """

    def __init__(self, link: Link, lane: Lane, group: Group, idle: float) -> None:
        self.removed = threading.Event()
        self.group = group
        self._link, self._idle = link, idle
        self._lane: Lane | None = lane
        self._polled = time.monotonic()
        self._changed = threading.Condition()
        self._wanted = self._closed = False
        self._ready: Lane | None = None
        self._refused: SourceRefused | None = None
        self._positions: dict[int, int] = {}
        self._thread = threading.Thread(target=self._run, name=f"redis-group-{group.me}", daemon=True)
        self._thread.start()

    def polled(self) -> None:
        """The member is alive."""
        self._polled = time.monotonic()

    def lane(self, seconds: float) -> Lane | None:
        """A new connection for the source; None: there is none within that time. Raises SourceRefused."""
        with self._changed:
            self._wanted = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ready or self._refused, seconds)
            refused, self._refused = self._refused, None
            if refused:
                raise refused
            lane, self._ready = self._ready, None
            self._wanted = lane is None
            return lane

    def commit(self, positions: Mapping[int, int]) -> None:
        """Has positions noted; does not wait."""
        with self._changed:
            self._positions |= positions
            self._changed.notify_all()

    def noted(self, lane: Lane) -> None:
        """Notes now what is to be noted."""
        with self._changed:
            positions, self._positions = self._positions, {}
        try:
            if positions:
                self.group.commit(lane, positions)
        except SourceUnavailable:
            with self._changed:
                self._positions = positions | self._positions
            raise
        except SourceRefused as error:
            logger.warning("positions are not noted: %s", error)

    def _run(self) -> None:
        beat = 0.0  # when the next is due, by the monotonic clock
        while not self._closed:
            try:
                self._lane = self._lane or self._link.reconnect()
                if time.monotonic() >= beat:
                    self._beat(self._lane)
                    beat = time.monotonic() + self.group.lease / 3
                self.noted(self._lane)
                self._provide()
            except SourceError as error:
                self._failed(error)
                continue
            with self._changed:
                self._changed.wait_for(self._is_needed, max(0.0, beat - time.monotonic()))

    def _is_needed(self) -> bool:
        return self._closed or bool(self._positions) or (self._wanted and self._ready is None)

    def _beat(self, lane: Lane) -> None:
        if time.monotonic() - self._polled < self._idle and self.group.sync(lane) is None:
            self.removed.set()

    def _provide(self) -> None:
        if self._wanted and self._ready is None:
            lane = self._link.reconnect()
            with self._changed:
                self._ready, self._refused = lane, None
                self._changed.notify_all()

    def _failed(self, error: SourceError) -> None:
        if self._lane:
            self._lane.close()
            self._lane = None
        with self._changed:
            if isinstance(error, SourceRefused):
                self._refused = error
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed, RETRY)

    def close(self) -> None:
        """Leaves the group, if the server answers; else the lease runs out."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        for lane in (self._lane, self._ready):
            if lane:
                lane.close()
        try:
            # On a connection of its own: the thread's may have broken since its last beat.
            lane = self._link.connect()
            self.noted(lane)
            self.group.leave(lane)
            lane.close()
        except SourceError as error:
            logger.warning("a member leaves without a word, so its lease has to run out: %s", error)
