"""Redis Streams as a stream of samples: a stream key per partition, whose ids the server numbers 0-1, 0-2, and so on.

The offset of a message is its number less one; the number never restarts, whatever is deleted. schemas/README.md
describes the keys. Needs Redis 7.0 or Valkey.
"""

import math
from contextlib import ExitStack, closing

from streamtrain.errors import ConfigError, SourceRefused, TopicMissing
from streamtrain.stream.redis_group import Group, Keeper
from streamtrain.stream.redis_link import Lane, Link, Topic
from streamtrain.stream.redis_scripts import AT, BOUNDS, Keys
from streamtrain.stream.redis_source import RedisSource
from streamtrain.stream.redis_writer import RedisWriter
from streamtrain.stream.source import Bounds, Listener


class RedisStream:
    """See Stream. A topic of a Redis or Valkey server.

    Args:
        url: "redis://user:password@host:port/db", "rediss://…" for TLS, or "unix://path".
        topic: its name.
        lease: seconds after which a group takes a silent member for dead.
        idle: seconds without poll after which a member gives up its lease, though its process lives.
        timeout: seconds that connecting, and any answer of the server, may take.
        maxlen: messages that a partition keeps when written to, approximately, older ones being deleted; 0: all.
        buffer_bytes: of messages that wait in a writer.

    Raises:
        ConfigError: of an argument.
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
    ) -> None:
        self.topic = topic
        self._keys = Keys(topic)
        self._link = Link(url, timeout)
        self.name = f"topic {topic} of {self._link.name}"
        self._lease, self._idle = lease, idle
        self._maxlen, self._buffer_bytes = maxlen, buffer_bytes

    @property
    def away(self) -> bool:
        """See Stream."""
        return self._link.is_away

    def bounds(self) -> dict[int, Bounds]:
        """See Stream."""
        with closing(self._link.connect()) as lane:
            streams = self._keys.streams(self._partitions(lane))
            reply = lane.call("EVAL", BOUNDS, 1 + len(streams), self._keys.partitions, *streams)
        low_high = self._checked(reply)
        return {i: Bounds(*pair) for i, pair in enumerate(zip(low_high[::2], low_high[1::2], strict=True))}

    def create(self, partitions: int) -> None:
        """See Stream."""
        if partitions < 1:
            raise ConfigError(f"{self.name} needs at least one partition, not {partitions}")
        with closing(self._link.connect()) as lane:
            lane.call("SET", self._keys.partitions, partitions, "NX")

    def committed(self, group: str) -> dict[int, int]:
        """See Stream."""
        with closing(self._link.connect()) as lane:
            self._partitions(lane)
            flat = [int(number) for number in lane.call("HGETALL", self._keys.committed(group))]
        return dict(zip(flat[::2], flat[1::2], strict=True))

    def at(self, seconds: float) -> dict[int, int]:
        """See Stream. To the millisecond."""
        with closing(self._link.connect()) as lane:
            streams = self._keys.streams(self._partitions(lane))
            time = math.floor(seconds * 1000 + 0.001)  # 1.001 s times 1000 is a little less than 1001
            reply = lane.call("EVAL", AT, 1 + len(streams), self._keys.partitions, *streams, time)
        return dict(enumerate(self._checked(reply, " and a field t, its time in ms")))

    def source(self, group: str, job: str, listener: Listener) -> RedisSource:
        """See Stream."""
        with ExitStack() as undone:
            lane, second = (undone.enter_context(closing(self._link.connect())) for _ in range(2))
            topic = Topic(self._link, self._keys, self._partitions(lane), self.name)
            member = Group(self._keys, group, job, self._lease)
            member.join(lane)
            undone.pop_all()
        return RedisSource(topic, lane, Keeper(self._link, second, member, self._idle), listener)

    def writer(self, topic: str | None = None) -> RedisWriter:
        """See Stream."""
        keys = Keys(topic or self.topic)
        with closing(self._link.connect()) as lane:
            partitions = self._partitions(lane)
            if keys.partitions != self._keys.partitions:
                lane.call("SET", keys.partitions, partitions, "NX")
                partitions = int(lane.call("GET", keys.partitions))
        name = f"topic {topic or self.topic} of {self._link.name}"
        return RedisWriter(Topic(self._link, keys, partitions, name), self._maxlen, self._buffer_bytes)

    def _partitions(self, lane: Lane) -> int:
        count = lane.call("GET", self._keys.partitions)
        if count is None:
            raise TopicMissing(f"there is no {self.name}")
        if not count.isdigit():
            raise SourceRefused(
                f"{self._keys.partitions} of {self._link.name} is no number: delete it, it is none of ours"
            )
        return int(count)

    def _checked(self, reply: list[int] | None, more: str = "") -> list[int]:
        if reply is None:
            raise TopicMissing(f"there is no {self.name}")
        if -1 in reply:
            raise SourceRefused(f"entries of {self.name} must have ids 0-n, by `XADD … 0-* …`{more}")
        return reply
