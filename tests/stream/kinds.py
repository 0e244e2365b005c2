"""The kinds of streams that the contract's suite runs on. Another one is a line in KINDS."""

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, NamedTuple

import pytest
import redis
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from streamtrain.stream.kafka.stream import KafkaStream
from streamtrain.stream.redis.stream import RedisStream
from streamtrain.stream.source import Stream
from streamtrain.testing.stream import MemoryService, MemoryStream
from tests.patience import PATIENCE, until

KAFKA_OPTIONS: dict[str, str | int] = {"session.timeout.ms": 6000, "heartbeat.interval.ms": 300}
LEASE = PATIENCE
"""Seconds that a member of an instance may be silent before its group takes it for dead."""


def delete_in_memory(service: MemoryService, topic: str, partition: int, before: int) -> None:
    MemoryStream(topic, service).delete(partition, before)


def delete_in_kafka(servers: str, topic: str, partition: int, before: int) -> None:
    admin = AdminClient({"bootstrap.servers": servers})
    for deleted in admin.delete_records([TopicPartition(topic, partition, before)]).values():
        deleted.result(120)


def delete_in_redis(url: str, topic: str, partition: int, before: int) -> None:
    with redis.Redis.from_url(url) as client:
        client.xtrim(f"streamtrain:{{{topic}}}:stream:{partition}", minid=f"0-{before + 1}", approximate=False)


def remove_in_memory(service: MemoryService, topic: str) -> None:
    MemoryStream(topic, service).remove()


def remove_in_kafka(servers: str, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": servers})
    for removed in admin.delete_topics([topic]).values():
        removed.result(120)
    until(lambda: topic not in admin.list_topics(timeout=20).topics)


def remove_in_redis(url: str, topic: str) -> None:
    with redis.Redis.from_url(url) as client:
        for key in client.scan_iter(f"streamtrain:{{{topic}}}:*"):
            client.delete(key)


class Kind(NamedTuple):
    """A kind of streams.

    Attributes:
        server: where its server is, for the two below.
        open: a stream, by server and topic.
        delete: deletes the messages before an offset, by server, topic and partition.
        remove: deletes a topic, by server and topic.
        instance: a stream by server, topic and instance of its members, which may be silent for `LEASE`; where several
            processes can read it. Server is a string then.
    """

    server: Callable[[pytest.FixtureRequest], Any]
    open: Callable[[Any, str], Stream]
    delete: Callable[[Any, str, int, int], None]
    remove: Callable[[Any, str], None]
    instance: Callable[[Any, str, str], Stream] | None = None


KINDS = {
    "memory": Kind(
        lambda _: MemoryService(),
        lambda of, topic: MemoryStream(topic, of),
        delete_in_memory,
        remove_in_memory,
    ),
    "kafka": Kind(
        lambda request: request.getfixturevalue("kafka").servers,
        lambda servers, topic: KafkaStream(servers, topic, KAFKA_OPTIONS),
        delete_in_kafka,
        remove_in_kafka,
        lambda servers, topic, instance: KafkaStream(
            servers, topic, {"session.timeout.ms": int(LEASE * 1000)}, instance=instance
        ),
    ),
    **{
        name: Kind(
            lambda request, name=name: request.getfixturevalue(name),  # type: ignore[misc]
            lambda url, topic: RedisStream(url, topic, lease=3.0),
            delete_in_redis,
            remove_in_redis,
            lambda url, topic, instance: RedisStream(url, topic, lease=LEASE, instance=instance),
        )
        for name in ("valkey", "redis_server")
    },
}


class Place:
    """A server of some kind, and a topic there that no other test has."""

    _topics = count()

    def __init__(self, name: str, server: Any) -> None:
        self.name = name
        self.server = server
        self.kind = KINDS[name]
        self.topic = f"topic-{next(self._topics)}"

    def open(self, topic: str | None = None) -> Stream:
        return self.kind.open(self.server, topic or self.topic)

    def make(self, partitions: int) -> Stream:
        """The stream, with as many empty partitions."""
        stream = self.open()
        stream.create(partitions)
        return stream

    def delete(self, partition: int, before: int) -> None:
        self.kind.delete(self.server, self.topic, partition, before)

    def remove(self) -> None:
        self.kind.remove(self.server, self.topic)


def fill(stream: Stream, counts: Mapping[int, int]) -> None:
    """Adds as many messages to partitions; each tells where it is."""
    bounds = stream.bounds()
    writer = stream.writer()
    for partition, more in counts.items():
        for offset in range(bounds[partition].high, bounds[partition].high + more):
            writer.write(message(partition, offset), partition=partition)
    assert writer.flush(120) == 0
    writer.close()


def message(partition: int, offset: int) -> bytes:
    return b"%d/%d" % (partition, offset)
