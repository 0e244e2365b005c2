"""The contract of streams: what Kafka, Redis Streams and the stream in memory implement, and workers and tools use.

A topic has partitions 0 to n - 1. A message has an offset in its partition, which never changes; offsets grow, and may
have gaps. A position is always the offset of the next message, never of the last one.

Implementations translate foreign errors into `SourceError`, wait for an unreachable service by themselves, and log one
line when it becomes unreachable and one when it is reachable again. For services that do not assign partitions to the
members of a group, `assign_partitions` does.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from streamtrain.incarnation import Incarnation


class Fetched(NamedTuple):
    """Consecutive messages of one partition.

    Attributes:
        partition: number.
        offsets: ascending.
        values: by message; None for one without a value (a tombstone), which is skipped.
        times: by message, as the log has it, usually when the service got it; in milliseconds since the epoch, negative
            where the log has none.
    """

    partition: int
    offsets: list[int]
    values: Sequence[bytes | None]
    times: list[int]


class Record(NamedTuple):
    """A message with all that its topic keeps of it.

    Attributes:
        partition: number.
        offset: offset in the partition.
        time: when the topic got it, in seconds since the epoch; 0: unknown.
        key: bytes, if it has one.
        value: bytes.
        headers: by name; the last one of each name.
    """

    partition: int
    offset: int
    time: float
    key: bytes | None
    value: bytes
    headers: Mapping[str, bytes]


class Bounds(NamedTuple):
    """The offsets of a partition: from `low` to `high` - 1. Messages before `low` have been deleted."""

    low: int
    high: int


class Listener(Protocol):
    """Handles rebalances of a member. Its methods are called from within `Source.poll` and `Source.close`."""

    def assigned(self, partitions: Sequence[int]) -> Mapping[int, int]:
        """Partitions have been added to the member's; returns the position at which each is to be read."""

    def revoked(self, partitions: Sequence[int]) -> None:
        """Partitions go to another member once this returns; until then work may be finished and committed."""

    def lost(self, partitions: Sequence[int]) -> None:
        """Partitions have gone to another member already."""


class Source(Protocol):
    """One member of a consumer group, which shares the partitions of a topic. For one thread."""

    def poll(self, max_messages: int, seconds: float, min_messages: int = 1) -> list[Fetched]:
        """Fetches messages of the member's partitions, in order, from the position that was assigned or sought.

        Args:
            max_messages: over all partitions.
            seconds: maximum wait for messages; the call never takes longer.
            min_messages: wait for that many, at most `max_messages`; a source may return when it has fewer.

        Raises:
            OffsetGone: the position of a partition is out of range. It stays there until it is sought; other
                partitions continue, and what was fetched of them is returned by the next call.
            SourceRefused: the service refuses the credentials, the topic or the group.
        """

    def seek(self, partition: int, offset: int) -> None:
        """Continues from another offset of one of the member's partitions; a paused one stays paused."""

    def pause(self) -> None:
        """Stops fetching, also of partitions that are assigned later, until `resume`.

        Partitions stay the member's, which has to keep polling.
        """

    def resume(self) -> None:
        """Fetches again."""

    @property
    def is_paused(self) -> bool:
        """Whether fetching is stopped by `pause`."""

    def positions(self) -> dict[int, int]:
        """Offset of the next message that `poll` will return, for each of the member's partitions.

        It is past all that `poll` has returned, and past offsets without a message (such as transaction markers) once
        it is known that no message comes before.
        """

    def commit(self, positions: Mapping[int, int]) -> None:
        """Commits positions of the member's partitions for the group, for lag tools.

        Asynchronous, and not needed for exactness: failures are logged.
        """

    def lag(self) -> dict[int, int]:
        """Messages between position and end, for each of the member's partitions, as of the last fetch."""

    def rejoin(self) -> None:
        """Leaves the group and joins it as a new member, by a new client; all partitions are lost meanwhile."""

    def finished(self) -> bool:
        """Whether all messages were polled, and none will come: only of sources that end."""

    def close(self) -> None:
        """Leaves the group; the partitions are revoked first. May be called twice."""


class Writer(Protocol):
    """Writes messages to one topic. Thread-safe.

    Attributes:
        partitions: number of the topic's partitions when the writer was made.
    """

    partitions: int

    def max_value_bytes(self, key: bytes | None = None, headers: Mapping[str, bytes] = {}) -> int:
        """The most bytes of a value in a message with this key and these headers."""

    def write(
        self, value: bytes, *, partition: int | None = None, key: bytes | None = None, headers: Mapping[str, bytes] = {}
    ) -> None:
        """Queues a message; waits while the queue is full.

        Without a partition, the hash of the key decides; without a key, messages go round robin. Each partition keeps
        the order of calls, and has no message twice.

        Raises:
            WriteFailed: this or an earlier message cannot be written.
        """

    def flush(self, seconds: float) -> int:
        """Waits for queued messages to be written, up to `seconds`; returns how many are left.

        Raises:
            WriteFailed: a message cannot be written.
        """

    def close(self) -> None:
        """Discards messages that were not flushed. May be called twice."""


class Stream(Protocol):
    """A topic of some service.

    Attributes:
        topic: its name.
        name: for messages: "topic clicks of Kafka at localhost:9092"; without secrets.
    """

    topic: str
    name: str

    @property
    def unreachable(self) -> bool:
        """Whether its service is known to be unreachable at the moment."""

    def bounds(self) -> dict[int, Bounds]:
        """The bounds of every partition.

        Raises:
            TopicMissing: the topic does not exist.
            SourceRefused: the service refuses the credentials.
            SourceUnavailable: the service does not answer.
        """

    def ends(self) -> dict[int, int]:
        """The offset after the last message that can be read, of every partition: of transactions, committed ones.

        Errors as `bounds`.
        """

    def identity(self) -> str:
        """The topic's id: one that is deleted and created again has another; "" if the service has none.

        Errors as `bounds`.
        """

    def create(self, partitions: int) -> None:
        """Creates the topic unless it exists. Errors as `bounds`, without TopicMissing."""

    def records(self, wanted: Mapping[int, Bounds], *, committed: bool = True) -> Iterator[Record]:
        """Reads partitions from `low` to `high` - 1, one after another, without a group.

        Messages that are deleted meanwhile are skipped, and so are those without a value. Errors as `bounds`.

        Args:
            wanted: by partition.
            committed: whether to read up to the first open transaction only, and no message of one that was aborted.
        """

    def committed(self, group: str) -> dict[int, int]:
        """Committed positions of a group, of partitions that have one. Errors as `bounds`."""

    def at(self, seconds: float) -> dict[int, int]:
        """The offset of the first message at or after a time (seconds since the epoch), else the end, by partition.

        Errors as `bounds`, and SourceRefused of services that do not keep times.
        """

    def latest_incarnation(self, group: str) -> Incarnation | None:
        """The latest incarnation of any member that a group has or has had, if any is known. Errors as `bounds`."""

    def members(self, group: str) -> int:
        """Number of members that a group has now. Errors as `bounds`."""

    def source(self, group: str, job: str, listener: Listener, incarnation: Incarnation | None = None) -> Source:
        """A new member of a group.

        Args:
            group: consumer group.
            job: identifies what is learned; all members of a group must have the same.
            listener: handles rebalances.
            incarnation: the incarnation of the member's cluster, which the group keeps if it is the latest; None: none.

        Raises:
            SourceRefused: the group has members of another job. Other errors as `bounds`.
        """

    def writer(self, topic: str | None = None) -> Writer:
        """Writes to a topic, by default this one.

        Another topic is created if it is missing, with as many partitions, and takes messages as large as this one's
        with more headers. Errors as `bounds`.
        """


def assign_partitions(
    members: Sequence[str], partitions: int, held: Mapping[str, Iterable[int]]
) -> dict[str, list[int]]:
    """A balanced and sticky assignment: numbers of partitions differ by one at most, and as few as possible move.

    Args:
        members: names; at least one.
        partitions: number.
        held: current partitions by member.

    Returns:
        The partitions of each member, ascending; the same for the same arguments.
    """
    names = sorted(members)
    least, over = divmod(partitions, len(names))
    mine: dict[str, list[int]] = {name: [] for name in names}
    free = set(range(partitions))
    # Members with the most partitions keep one more, if there are some over.
    for name in sorted(names, key=lambda name: (-len(set(held.get(name, ()))), name)):
        most = least + (over > 0)
        mine[name] = sorted(free.intersection(held.get(name, ())))[:most]
        over -= len(mine[name]) > least
        free -= set(mine[name])
    for partition in sorted(free):
        name = min(names, key=lambda name: (len(mine[name]), name))
        mine[name].append(partition)
    return {name: sorted(of_member) for name, of_member in mine.items()}
