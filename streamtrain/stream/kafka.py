"""Topics of Kafka."""

import math
from collections.abc import Mapping
from typing import Any

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec

from streamtrain.errors import ConfigError, SourceRefused
from streamtrain.stream.kafka_link import MISSING
from streamtrain.stream.kafka_service import PATIENCE, Option, Service
from streamtrain.stream.kafka_source import KafkaSource
from streamtrain.stream.kafka_writer import KafkaWriter
from streamtrain.stream.source import Bounds, Listener

_CLIENT = "streamtrain."


class KafkaStream:
    """A topic. See Stream.

    Args:
        servers: "host:port[,…]".
        topic: its name.
        options: settings of librdkafka by name, such as security.protocol; those that the contract decides are refused.
            Its defaults hold, but for queued.max.messages.kbytes 16384, fetch.queue.backoff.ms 20,
            fetch.wait.max.ms 100, linger.ms 5, partitioner murmur2_random and reconnect.backoff.max.ms 2000.

    Raises:
        ConfigError: an option is unknown, or has a bad value; the message names it.
    """

    def __init__(self, servers: str, topic: str, options: Mapping[str, Option]) -> None:
        self.topic = topic
        self.name = f"topic {topic} of Kafka at {servers}"
        self._service = Service(servers, options)

    def _count(self, topic: str, passing: frozenset[int] = frozenset()) -> int:
        """How many partitions it has."""
        topics = TopicCollection([topic])
        found = self._service.ask(lambda admin: admin.describe_topics(topics, request_timeout=PATIENCE), passing)
        return len(self._good(found[topic]).partitions)

    def _good(self, answer: Any) -> Any:
        if isinstance(answer, KafkaError):
            raise self._service.translate(answer)
        return answer

    def _offsets(self, spec: Mapping[str, OffsetSpec]) -> dict[str, dict[int, int]]:
        """Offsets of all partitions, by name of what is asked for; -1: there is none."""
        partitions = [TopicPartition(self.topic, one) for one in range(self._count(self.topic))]

        def question(admin: AdminClient) -> dict[tuple[str, int], Any]:
            futures: dict[tuple[str, int], Any] = {}
            for name, of in spec.items():
                asked = admin.list_offsets({one: of for one in partitions}, request_timeout=PATIENCE)
                futures |= {(name, one.partition): future for one, future in asked.items()}
            return futures

        offsets: dict[str, dict[int, int]] = {name: {} for name in spec}
        for (name, partition), answer in sorted(self._service.ask(question).items()):
            offsets[name][partition] = self._good(answer).offset
        return offsets

    @property
    def away(self) -> bool:
        """See Stream."""
        return self._service.is_away

    def bounds(self) -> dict[int, Bounds]:
        """See Stream."""
        offsets = self._offsets({"low": OffsetSpec.earliest(), "high": OffsetSpec.latest()})
        return {one: Bounds(low, offsets["high"][one]) for one, low in offsets["low"].items()}

    def create(self, partitions: int) -> None:
        """See Stream. The brokers' defaults decide on replicas, retention and all else."""
        self._create(self.topic, partitions)

    def _create(self, topic: str, partitions: int) -> None:
        if partitions < 1:
            raise ConfigError(f"a topic has one partition or more, not {partitions}")
        wanted = NewTopic(topic, num_partitions=partitions, replication_factor=-1)
        answer = self._service.ask(lambda admin: admin.create_topics([wanted], request_timeout=PATIENCE))[topic]
        if isinstance(answer, KafkaError) and answer.code() == KafkaError.TOPIC_ALREADY_EXISTS:
            return
        self._good(answer)
        self._count(topic, MISSING)  # the controller has it; whom we ask hears of it a moment later

    def committed(self, group: str) -> dict[int, int]:
        """See Stream."""
        partitions = [TopicPartition(self.topic, one) for one in range(self._count(self.topic))]
        request = ConsumerGroupTopicPartitions(group, partitions)
        answer = self._service.ask(
            lambda admin: admin.list_consumer_group_offsets([request], request_timeout=PATIENCE)
        )[group]
        if isinstance(answer, KafkaError) and answer.code() == KafkaError.GROUP_ID_NOT_FOUND:
            return {}
        return {one.partition: one.offset for one in self._good(answer).topic_partitions if one.offset >= 0}

    def at(self, seconds: float) -> dict[int, int]:
        """See Stream. The time of a message is the topic's: when it was written, unless the topic is set otherwise."""
        since = OffsetSpec.for_timestamp(math.ceil(seconds * 1000))
        offsets = self._offsets({"first": since, "end": OffsetSpec.latest()})
        return {one: first if first >= 0 else offsets["end"][one] for one, first in offsets["first"].items()}

    def source(self, group: str, job: str, listener: Listener) -> KafkaSource:
        """See Stream."""
        self._count(self.topic)
        client = f"{_CLIENT}{job}"

        def check() -> None:
            self._check_members(group, client)

        check()
        return KafkaSource(self._service, self.topic, group, listener, client=client, check=check)

    def _check_members(self, group: str, client: str) -> None:
        """Members tell their job by the name of their client."""
        answer = self._service.ask(lambda admin: admin.describe_consumer_groups([group], request_timeout=PATIENCE))[
            group
        ]
        if isinstance(answer, KafkaError) and answer.code() == KafkaError.GROUP_ID_NOT_FOUND:
            return
        others = {member.client_id for member in self._good(answer).members} - {client}
        if others:
            other = others.pop()
            what = f"of another job, {other.removeprefix(_CLIENT)}" if other.startswith(_CLIENT) else f"like {other}"
            raise SourceRefused(
                f"group {group} of {self.name} has members {what}: take another group, or stop them first"
            )

    def writer(self, topic: str | None = None) -> KafkaWriter:
        """See Stream."""
        partitions = self._count(self.topic)
        if topic is not None and topic != self.topic:
            self._create(topic, partitions)
            partitions = self._count(topic)
        return KafkaWriter(self._service, topic or self.topic, partitions)
