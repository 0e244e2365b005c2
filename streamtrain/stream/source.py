"""Source: the contract between what streams samples (Kafka, Redis Streams, memory) and those who read and write there.

A topic has partitions 0 to n - 1. A message has an offset in its partition, which never changes; offsets grow, and may
have gaps. Wherever a position is spoken of, it is the offset of the next message, never of the last.

Who implements this translates foreign errors into `SourceError`, waits for a service that is away by itself, and logs
one line when it goes and one when it is back.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol


class Fetched(NamedTuple):
    """Messages of one partition, one after another.

    Attributes:
        partition: whose they are.
        offsets: theirs, ascending.
        values: theirs, as many; a message without a value (a tombstone) has b"".
    """

    partition: int
    offsets: list[int]
    values: list[bytes]


class Bounds(NamedTuple):
    """What there is of a partition: offsets from `low` to `high` - 1. What was before is deleted."""

    low: int
    high: int


class Listener(Protocol):
    """Is told which partitions a member has. Its methods are called from within `Source.poll` and `Source.close`."""

    def assigned(self, partitions: Sequence[int]) -> Mapping[int, int]:
        """These are the member's from now on, beside those that it has; returns where each is to be read from."""

    def revoked(self, partitions: Sequence[int]) -> None:
        """These go to another member once this returns: what is under way may be finished and committed."""

    def lost(self, partitions: Sequence[int]) -> None:
        """These have gone to another member already."""


class Source(Protocol):
    """One member of a group, whose members share the partitions of a topic. For one thread."""

    def poll(self, most: int, seconds: float) -> list[Fetched]:
        """Messages of the member's partitions, in order, each partition from where it was assigned or sought.

        Args:
            most: messages at most, over all partitions.
            seconds: how long to wait for the first; nothing waits for more than that.

        Raises:
            OffsetGone: the messages at a position are deleted, or have never been. The partition stays where it is
                until it is sought; the others go on, and what was fetched of them is returned by the next call.
            SourceRefused: credentials, the topic or the group are refused.
        """

    def seek(self, partition: int, offset: int) -> None:
        """Goes on from another offset in a partition that the member has; it stays paused if it is."""

    def pause(self, partitions: Sequence[int]) -> None:
        """Fetches no more of these until `resume`. The member keeps them, and keeps having to poll."""

    def resume(self, partitions: Sequence[int]) -> None:
        """Fetches of these again."""

    def positions(self) -> dict[int, int]:
        """Offset of the next message that `poll` will return, for every partition that the member has."""

    def commit(self, positions: Mapping[int, int]) -> None:
        """Notes positions, of partitions that the member has, under the group's name, for lag tools.

        Does not wait, and is not needed for exactness: failures are logged.
        """

    def lag(self) -> dict[int, int]:
        """Messages between position and end, for every partition that the member has; as of the last fetch."""

    def finished(self) -> bool:
        """Whether there will never be more messages than were polled: only of sources that end."""

    def close(self) -> None:
        """Leaves the group; the partitions are revoked first. May be called twice."""


class Writer(Protocol):
    """Writes messages to one topic. Thread-safe."""

    def write(
        self, value: bytes, *, partition: int | None = None, key: bytes | None = None, headers: Mapping[str, bytes] = {}
    ) -> None:
        """Queues a message; waits while the queue is full.

        Without a partition, the key's hash decides; without a key partitions take turns. Each partition keeps the order
        of calls, and has no message twice.

        Raises:
            WriteFailed: this or an earlier message cannot be written.
        """

    def flush(self, seconds: float) -> int:
        """Waits until all that was queued is written, for at most so long; returns how much is not.

        Raises:
            WriteFailed: a message cannot be written.
        """

    def close(self) -> None:
        """Gives up what is not flushed. May be called twice."""


class Stream(Protocol):
    """A topic of some service.

    Attributes:
        topic: its name.
        name: as people know it: "topic clicks of Kafka at localhost:9092"; without secrets.
    """

    topic: str
    name: str

    @property
    def away(self) -> bool:
        """Whether its service is known not to answer at the moment."""

    def bounds(self) -> dict[int, Bounds]:
        """What there is of every partition.

        Raises:
            TopicMissing: there is no such topic.
            SourceRefused: credentials are refused.
            SourceUnavailable: the service does not answer.
        """

    def create(self, partitions: int) -> None:
        """Makes the topic; one that exists is left as it is. Errors as of `bounds`, without TopicMissing."""

    def committed(self, group: str) -> dict[int, int]:
        """Positions that a group has committed, of those partitions where it has. Errors as of `bounds`."""

    def at(self, seconds: float) -> dict[int, int]:
        """By partition the first message that the service got at or after a time, in seconds since the epoch.

        Where there is none it is the end. Errors as of `bounds`, and SourceRefused of services that do not keep times.
        """

    def source(self, group: str, job: str, listener: Listener) -> Source:
        """A new member of a group.

        Args:
            group: its name.
            job: identifies what is learned: members of one group must be of one job.
            listener: is told which partitions the member has.

        Raises:
            SourceRefused: the group has members of another job. Other errors as of `bounds`.
        """

    def writer(self, topic: str | None = None) -> Writer:
        """Writes to a topic, by default this one.

        Another is made, with as many partitions, where it is missing. Errors as of `bounds`.
        """
