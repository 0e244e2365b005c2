"""Redis Streams as a stream of samples: a stream key per partition, whose ids the server numbers 0-1, 0-2, and so on.

The offset of a message is its number less one; the number never restarts, whatever is deleted. schemas/README.md
describes the keys. Needs Redis 7.0 or Valkey.
"""

import math
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing

from streamtrain.errors import ConfigError, SourceRefused, TopicMissing
from streamtrain.incarnation import Incarnation
from streamtrain.stream.redis.connection import StreamConnection, StreamServer, StreamTopic
from streamtrain.stream.redis.group import ConsumerGroup, LeaseThread
from streamtrain.stream.redis.scripts import AT, BOUNDS, MEMBERS, StreamKeys
from streamtrain.stream.redis.source import RedisSource, record
from streamtrain.stream.redis.writer import RedisWriter
from streamtrain.stream.source import Bounds, Listener, Record

_RECORDS = 20  # in one answer of the server: they may be large


class RedisStream:
    """A topic of a Redis or Valkey server.

    Args:
        url: "redis://user:password@host:port/db", "rediss://…" for TLS, or "unix://path".
        topic: its name.
        lease: seconds after which a group takes a silent member for dead.
        idle: seconds without poll after which a member gives up its lease, though its process lives.
        timeout: seconds that connecting, and any answer of the server, may take.
        maxlen: messages that a partition keeps when written to, approximately, older ones being deleted; 0: all.
        buffer_bytes: maximum size of messages that wait in a writer.
        instance: static membership: a new member of an instance replaces the old one at once. None: none.

    Raises:
        ConfigError: an argument is invalid.
    """

    def __init__(
        self,
        url: str,
        topic: str,
        *,
        lease: float = 10.0,
        idle: float = 300.0,
        timeout: float = 5.0,
        maxlen: int = 0,
        buffer_bytes: int = 32 << 20,
        instance: str | None = None,
    ) -> None:
        self.topic = topic
        self._keys = StreamKeys(topic)
        self._server = StreamServer(url, timeout)
        self.name = f"topic {topic} of {self._server.name}"
        self._lease, self._idle, self._instance = lease, idle, instance
        self._maxlen, self._buffer_bytes = maxlen, buffer_bytes

    @property
    def unreachable(self) -> bool:
        return self._server.is_unreachable

    def bounds(self) -> dict[int, Bounds]:
        with closing(self._server.connect()) as connection:
            streams = self._keys.streams(self._partitions(connection))
            reply = connection.call("EVAL", BOUNDS, 1 + len(streams), self._keys.partitions, *streams)
        low_high = self._checked(reply)
        return {i: Bounds(*pair) for i, pair in enumerate(zip(low_high[::2], low_high[1::2], strict=True))}

    def ends(self) -> dict[int, int]:
        return {partition: of.high for partition, of in self.bounds().items()}

    def identity(self) -> str:
        """It is set when it is first read, and deleted with all keys of the topic."""
        with closing(self._server.connect()) as connection:
            self._partitions(connection)
            connection.call("SET", self._keys.identity, uuid.uuid4().hex, "NX")
            found: bytes | None = connection.call("GET", self._keys.identity)
        if found is None:
            raise TopicMissing(f"{self.name} does not exist")
        return found.decode("ascii", "replace")

    def create(self, partitions: int) -> None:
        if partitions < 1:
            raise ConfigError(f"a topic must have at least one partition, not {partitions}")
        with closing(self._server.connect()) as connection:
            connection.call("SET", self._keys.partitions, partitions, "NX")

    def records(self, wanted: Mapping[int, Bounds], *, committed: bool = True) -> Iterator[Record]:
        with closing(self._server.connect()) as connection:
            self._partitions(connection)
            for partition, (low, high) in wanted.items():
                stream, first = self._keys.stream(partition), low
                while entries := connection.call("XRANGE", stream, f"0-{first + 1}", f"0-{high}", "COUNT", _RECORDS):
                    found = [record(partition, entry) for entry in entries]
                    yield from found
                    first = found[-1].offset + 1

    def committed(self, group: str) -> dict[int, int]:
        with closing(self._server.connect()) as connection:
            self._partitions(connection)
            flat = [int(number) for number in connection.call("HGETALL", self._keys.committed(group))]
        return dict(zip(flat[::2], flat[1::2], strict=True))

    def at(self, seconds: float) -> dict[int, int]:
        """Exact to the millisecond."""
        with closing(self._server.connect()) as connection:
            streams = self._keys.streams(self._partitions(connection))
            time = math.floor(seconds * 1000 + 0.001)  # 1.001 s times 1000 is a little less than 1001
            reply = connection.call("EVAL", AT, 1 + len(streams), self._keys.partitions, *streams, time)
        return dict(enumerate(self._checked(reply, " and a field t, its time in ms")))

    def latest_incarnation(self, group: str) -> Incarnation | None:
        with closing(self._server.connect()) as connection:
            self._partitions(connection)
            latest = connection.call("GET", self._keys.incarnation(group)) or b""
        return Incarnation.parse(latest.decode("ascii", "replace"))

    def members(self, group: str) -> int:
        with closing(self._server.connect()) as connection:
            self._partitions(connection)
            return int(connection.call("EVAL", MEMBERS, 1, self._keys.group(group)[0]))

    def source(self, group: str, job: str, listener: Listener, incarnation: Incarnation | None = None) -> RedisSource:
        with ExitStack() as undone:
            connection, second = (undone.enter_context(closing(self._server.connect())) for _ in range(2))
            topic = StreamTopic(self._server, self._keys, self._partitions(connection), self.name)
            member = ConsumerGroup(
                self._keys, group, job, self._lease, instance=self._instance, incarnation=incarnation
            )
            member.join(connection)
            undone.pop_all()
        return RedisSource(topic, connection, LeaseThread(self._server, second, member, self._idle), listener)

    def writer(self, topic: str | None = None) -> RedisWriter:
        keys = StreamKeys(topic or self.topic)
        with closing(self._server.connect()) as connection:
            partitions = self._partitions(connection)
            if keys.partitions != self._keys.partitions:
                connection.call("SET", keys.partitions, partitions, "NX")
                partitions = int(connection.call("GET", keys.partitions))
        name = f"topic {topic or self.topic} of {self._server.name}"
        return RedisWriter(StreamTopic(self._server, keys, partitions, name), self._maxlen, self._buffer_bytes)

    def _partitions(self, connection: StreamConnection) -> int:
        count = connection.call("GET", self._keys.partitions)
        if count is None:
            raise TopicMissing(f"{self.name} does not exist")
        if not count.isdigit():
            key = f"{self._keys.partitions} of {self._server.name}"
            raise SourceRefused(f"{key} is not a number, so it was not written by streamtrain: delete it")
        return int(count)

    def _checked(self, reply: list[int] | None, more: str = "") -> list[int]:
        if reply is None:
            raise TopicMissing(f"{self.name} does not exist")
        if -1 in reply:
            raise SourceRefused(f"entries of {self.name} must have ids 0-n: add them with `XADD … 0-* …`{more}")
        return reply
