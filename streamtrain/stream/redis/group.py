"""A member of a group whose service is Redis: its lease, and the partitions that are its own by it.

A member is in its group while it renews its lease; the others remove it once that has expired. The server keeps which
member owns which partition. Every change of members or owners adds to a stream, which members read together with
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
from streamtrain.incarnation import Incarnation
from streamtrain.periodic import Backoff, PeriodicTask
from streamtrain.stream.redis.connection import StreamConnection, StreamServer
from streamtrain.stream.redis.scripts import COMMIT, JOIN, LEAVE, RELEASE, SYNC, TAKE, StreamKeys

logger = logging.getLogger("streamtrain.stream.redis.stream")

RETRY = 0.2  # seconds between two attempts to reach an unreachable server


class GroupState(NamedTuple):
    """The state of a group.

    Attributes:
        version: id of its last change.
        members: names.
        owners: name of the member that has it, by partition.
    """

    version: bytes
    members: list[str]
    owners: dict[int, str]

    def assignment(self) -> dict[str, list[int]]:
        """The partitions of each member."""
        held: dict[str, list[int]] = {name: [] for name in self.members}
        for partition, name in self.owners.items():
            held.setdefault(name, []).append(partition)
        return held


class ConsumerGroup:
    """One member's view of its group. Methods may be called from any thread, each with a connection of its own.

    They raise SourceUnavailable and SourceRefused.

    Args:
        keys: the topic's keys.
        group: its name.
        job: the member's job.
        lease: seconds after which the group takes a silent member for dead.
        instance: static membership; a new member of an instance replaces the old one at once.
        incarnation: the incarnation of the member's cluster; None: it has none.
    """

    def __init__(
        self,
        keys: StreamKeys,
        group: str,
        job: str,
        lease: float,
        *,
        instance: str | None = None,
        incarnation: Incarnation | None = None,
    ) -> None:
        self._instance, self._incarnation = instance, str(incarnation or "")
        self._prefix = "" if instance is None else f"{instance}/"
        self.member = f"{self._prefix}{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(6)}"
        self.lease = lease
        self._name, self._job = group, job
        self._keys = keys.group(group)
        self.changes = self._keys[3]

    def _run(self, connection: StreamConnection, script: str, *more: Any) -> Any:
        return connection.call(
            "EVAL", script, len(self._keys), *self._keys, self.member, round(self.lease * 1000), *more
        )

    def join(self, connection: StreamConnection, *, again: bool = False) -> None:
        """Becomes a member.

        Args:
            connection: connection to the server.
            again: whether it was a member before, and has been removed.

        Raises:
            SourceRefused: the members are of another job, or another process has joined as the instance since.
        """
        how = "" if again else "replace"
        other = self._run(connection, JOIN, self._job, self._prefix, how, self._incarnation)
        if other == 1:
            raise SourceRefused(
                f"another process has joined group {self._name} as instance {self._instance}: "
                "stop one of them, or give each its own instance"
            )
        if other is not None:
            raise SourceRefused(f"group {self._name} has members of another job, {other.decode(errors='replace')}")

    def sync(self, connection: StreamConnection) -> GroupState | None:
        """Renews the lease; None: it had expired, and the member has been removed."""
        reply = self._run(connection, SYNC)
        if reply is None:
            return None
        version, members, owners = reply
        names = [name.decode() for name in owners[1::2]]
        return GroupState(
            version, [name.decode() for name in members], dict(zip(map(int, owners[::2]), names, strict=True))
        )

    def take(self, connection: StreamConnection, partitions: Iterable[int]) -> list[int]:
        """Takes those that are free; returns these."""
        return [int(partition) for partition in self._run(connection, TAKE, *partitions)]

    def release(self, connection: StreamConnection, partitions: Iterable[int]) -> None:
        """Releases partitions."""
        self._run(connection, RELEASE, *partitions)

    def commit(self, connection: StreamConnection, positions: Mapping[int, int]) -> None:
        """Commits positions of partitions that the member has."""
        self._run(connection, COMMIT, *(number for pair in positions.items() for number in pair))

    def leave(self, connection: StreamConnection) -> None:
        """Leaves the group; its partitions are free."""
        self._run(connection, LEAVE)


class LeaseThread:
    """The thread that renews a member's lease, reconnects its source, and commits its offsets.

    So the source itself never waits for a connection, and a long training step does not cost its membership.

    Args:
        connection: connection to the server.
        idle: seconds without `polled` after which it lets the lease expire: a member that does not poll is stuck.
    """

    def __init__(self, server: StreamServer, connection: StreamConnection, group: ConsumerGroup, idle: float) -> None:
        self.removed = threading.Event()
        self.group = group
        self._server, self._idle = server, idle
        self._connection: StreamConnection | None = connection
        self._polled = time.monotonic()
        self._changed = threading.Condition()
        self._wanted = False
        self._due = 0.0  # when the next heartbeat is, by the monotonic clock
        self._ready: StreamConnection | None = None
        self._refused: SourceRefused | None = None
        self._positions: dict[int, int] = {}
        self._task = PeriodicTask(
            f"redis-group-{group.member}", self._keep, group.lease / 3, backoff=Backoff(RETRY, RETRY)
        )
        self._task.start()

    def polled(self) -> None:
        """Tells that the member polls."""
        self._polled = time.monotonic()

    def connection(self, seconds: float) -> StreamConnection | None:
        """A new connection for the source; None: the server was not reached in time. Raises SourceRefused."""
        with self._changed:
            self._wanted = True
            self._task.wake()
            self._changed.wait_for(lambda: self._ready or self._refused, seconds)
            refused, self._refused = self._refused, None
            if refused:
                raise refused
            connection, self._ready = self._ready, None
            self._wanted = connection is None
            return connection

    def commit(self, positions: Mapping[int, int]) -> None:
        """Queues positions for commit; does not wait."""
        with self._changed:
            self._positions |= positions
        self._task.wake()

    def flush_commits(self, connection: StreamConnection) -> None:
        """Commits queued positions now."""
        with self._changed:
            positions, self._positions = self._positions, {}
        try:
            if positions:
                self.group.commit(connection, positions)
        except SourceUnavailable:
            with self._changed:
                self._positions = positions | self._positions
            raise
        except SourceRefused as error:
            logger.warning("committing offsets failed: %s", error)

    def _keep(self) -> float:
        """Does what is due; returns the seconds until the next heartbeat."""
        try:
            self._connection = self._connection or self._server.reconnect()
            if time.monotonic() >= self._due:
                self._renew(self._connection)
                self._due = time.monotonic() + self.group.lease / 3
            self.flush_commits(self._connection)
            self._reconnect_source()
        except SourceError as error:
            self._failed(error)
            raise
        return self._due - time.monotonic()

    def _renew(self, connection: StreamConnection) -> None:
        if time.monotonic() - self._polled < self._idle and self.group.sync(connection) is None:
            self.removed.set()

    def _reconnect_source(self) -> None:
        if self._wanted and self._ready is None:
            connection = self._server.reconnect()
            with self._changed:
                self._ready, self._refused = connection, None
                self._changed.notify_all()

    def _failed(self, error: SourceError) -> None:
        if self._connection:
            self._connection.close()
            self._connection = None
        with self._changed:
            if isinstance(error, SourceRefused):
                self._refused = error
                self._changed.notify_all()

    def close(self) -> None:
        """Leaves the group, if the server answers; otherwise the lease expires."""
        self._task.close()
        for connection in (self._connection, self._ready):
            if connection:
                connection.close()
        try:
            # On a connection of its own: the thread's may have broken since its last beat.
            connection = self._server.connect()
            self.flush_commits(connection)
            self.group.leave(connection)
            connection.close()
        except SourceError as error:
            logger.warning("leaving the group failed, so the lease of this member has to expire: %s", error)
