"""Dead letters as they are in the stream, beside those that should be there."""

import threading
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import redis
from confluent_kafka import Consumer, TopicPartition

from streamtrain.errors import SourceUnavailable
from streamtrain.periodic import retry
from streamtrain.settings.groups import StreamSettings
from streamtrain.stream.dead_letters import SUFFIX
from streamtrain.stream.opening import open_stream
from streamtrain.stream.source import Bounds

_SECONDS = 10.0


def wrong_letters(settings: StreamSettings, expected: Collection[tuple[int, int]]) -> list[str]:
    """Dead letters that should not be there, or are not. Those that were written twice say so, and count once.

    Args:
        settings: of the stream of the samples.
        expected: partition and offset of every message that is bad.
    """
    topic = f"{settings.topic}{SUFFIX}"
    stream = open_stream(settings.model_copy(update={"topic": topic}))
    dead = retry(stream.bounds, SourceUnavailable, threading.Event())  # it may just have been restarted
    scheme, _, servers = settings.url.partition("://")
    read = _in_kafka(servers, topic, dead) if scheme == "kafka" else _in_redis(settings.url, topic)
    return [f"dead letter {one}" for one in set(expected).symmetric_difference(read)]


def _in_kafka(servers: str, topic: str, partitions: Mapping[int, Bounds]) -> Iterator[tuple[int, int]]:
    """Where each dead letter came from."""
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "checker", "enable.auto.commit": False})
    for partition, (low, high) in partitions.items():
        consumer.assign([TopicPartition(topic, partition, low)])
        left = high - low
        while left:
            for one in consumer.consume(left, _SECONDS):
                headers: Any = dict(one.headers() or [])
                yield int(headers["partition"]), int(headers["offset"])
                left -= 1
    consumer.close()


def _in_redis(url: str, topic: str) -> Iterator[tuple[int, int]]:
    """Where each dead letter came from."""
    client: Any = redis.Redis.from_url(url)
    for key in client.scan_iter(f"*{topic}*", _type="stream"):
        for _, fields in client.xrange(key):
            yield int(fields[b"h.partition"]), int(fields[b"h.offset"])
