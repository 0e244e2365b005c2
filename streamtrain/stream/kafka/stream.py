"""Topics of Kafka."""

import copy
import logging
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from confluent_kafka import (
    IsolationLevel,
    KafkaError,
    TopicCollection,
    TopicPartition,
    Uuid,
)
from confluent_kafka.admin import (
    AdminClient,
    ConfigResource,
    MemberDescription,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
    TopicDescription,
)

from streamtrain.errors import ConfigError, SourceRefused, TopicMissing
from streamtrain.incarnation import Incarnation
from streamtrain.stream.kafka.client import MISSING, REQUEST_SECONDS, KafkaService, Option
from streamtrain.stream.kafka.source import KafkaSource, read_records
from streamtrain.stream.kafka.writer import KafkaWriter
from streamtrain.stream.source import Bounds, Listener, Record

_CLIENT = "streamtrain."
_CLIENT_ID = re.compile(rf"{re.escape(_CLIENT)}(?P<job>.*?)(\.(?P<incarnation>\d+-[0-9a-f]{{8}}-[\w.-]*))?")
_MAX_BYTES = 1_000_000  # of a message, where a topic does not say: what clients of Kafka send by default
_SETTINGS_REFUSED = (KafkaError.INVALID_CONFIG, KafkaError.POLICY_VIOLATION)
_FORBIDDEN = (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED)
MORE_BYTES = 65_536
"""For what is added to a message of the largest size: the headers of a dead letter, the labels of a sample."""
_NO_ID = str(Uuid(0, 0))

logger = logging.getLogger(__name__)


class KafkaStream:
    """A topic of Kafka.

    Args:
        servers: "host:port[,…]".
        topic: its name.
        options: settings of librdkafka by name, such as security.protocol; those that the contract decides are refused.
            Its defaults hold, but for queued.max.messages.kbytes 16384, fetch.queue.backoff.ms 20,
            fetch.wait.max.ms 100, linger.ms 5, partitioner murmur2_random and reconnect.backoff.max.ms 2000.
        instance: group.instance.id of its members in their groups: a new one takes the place of another at once.

    Raises:
        ConfigError: an option is unknown, or has a bad value; the message names it.
    """

    def __init__(self, servers: str, topic: str, options: Mapping[str, Option], *, instance: str | None = None) -> None:
        self.topic, self._instance = topic, instance
        self.name = f"topic {topic} of Kafka at {servers}"
        self._service = KafkaService(servers, options)

    @property
    def service(self) -> KafkaService:
        """The Kafka that it is a topic of."""
        return self._service

    def of(self, topic: str) -> "KafkaStream":
        """Another topic of the same Kafka, by the same clients."""
        other = copy.copy(self)
        other.topic, other.name = topic, f"topic {topic} of {self._service.name}"
        return other

    def _partition_count(self, topic: str, transient: frozenset[int] = frozenset()) -> int:
        """Number of partitions."""
        return len(self._describe(topic, transient).partitions)

    def _describe(self, topic: str, transient: frozenset[int] = frozenset()) -> TopicDescription:
        topics = TopicCollection([topic])
        found = self._service.call(
            lambda admin: admin.describe_topics(topics, request_timeout=REQUEST_SECONDS), transient
        )
        described: TopicDescription = self._checked(found[topic])
        return described

    def _checked(self, answer: Any) -> Any:
        if isinstance(answer, KafkaError):
            raise self._service.translate(answer)
        return answer

    def _offsets(self, spec: Mapping[str, OffsetSpec], **options: Any) -> dict[str, dict[int, int]]:
        """Offsets of all partitions, by name of what is asked for; -1: there is none."""
        partitions = [TopicPartition(self.topic, one) for one in range(self._partition_count(self.topic))]

        def question(admin: AdminClient) -> dict[tuple[str, int], Any]:
            futures: dict[tuple[str, int], Any] = {}
            for name, of in spec.items():
                every = {one: of for one in partitions}
                asked = admin.list_offsets(every, request_timeout=REQUEST_SECONDS, **options)
                futures |= {(name, one.partition): future for one, future in asked.items()}
            return futures

        offsets: dict[str, dict[int, int]] = {name: {} for name in spec}
        for (name, partition), answer in sorted(self._service.call(question).items()):
            offsets[name][partition] = self._checked(answer).offset
        return offsets

    @property
    def unreachable(self) -> bool:
        return self._service.is_unreachable

    def bounds(self) -> dict[int, Bounds]:
        offsets = self._offsets({"low": OffsetSpec.earliest(), "high": OffsetSpec.latest()})
        return {one: Bounds(low, offsets["high"][one]) for one, low in offsets["low"].items()}

    def ends(self) -> dict[int, int]:
        return self._offsets({"end": OffsetSpec.latest()}, isolation_level=IsolationLevel.READ_COMMITTED)["end"]

    def identity(self) -> str:
        """Empty with Kafka before 2.8."""
        found = str(self._describe(self.topic).topic_id)
        return "" if found == _NO_ID else found

    def create(self, partitions: int, max_bytes: int | None = None) -> None:
        """The brokers' defaults decide on replicas, retention and all else.

        Args:
            partitions: number of them.
            max_bytes: the largest message that it is to take; None: the brokers' default.
        """
        try:  # brokers refuse whoever may not create topics before they look whether there is anything to create
            self._describe(self.topic)
        except TopicMissing:
            self._create(self.topic, partitions, {} if max_bytes is None else {"max.message.bytes": str(max_bytes)})

    def _create(self, topic: str, partitions: int, settings: Mapping[str, str]) -> None:
        if partitions < 1:
            raise ConfigError(f"a topic must have at least one partition, not {partitions}")
        wanted = NewTopic(topic, num_partitions=partitions, replication_factor=-1, config=dict(settings))
        answer = self._service.call(lambda admin: admin.create_topics([wanted], request_timeout=REQUEST_SECONDS))[topic]
        if isinstance(answer, KafkaError) and answer.code() in _SETTINGS_REFUSED and settings:
            logger.warning("created topic %s without %s: %s", topic, ", ".join(settings), answer.str())
            return self._create(topic, partitions, {})
        if not isinstance(answer, KafkaError) or answer.code() != KafkaError.TOPIC_ALREADY_EXISTS:
            self._changed(answer, f"topic {topic} is missing, and this user may not create it: allow `Create` on it")
        self._partition_count(topic, MISSING)  # the controller knows it; brokers learn of it a moment later

    def _changed(self, answer: Any, way_out: str) -> None:
        """Raises the error of a request to create or change a topic, with the way out where the right is missing."""
        if isinstance(answer, KafkaError) and answer.code() in _FORBIDDEN:
            raise SourceRefused(f"{self._service.name} refuses: {way_out}, or have an administrator do it")
        self._checked(answer)

    def grow(self, partitions: int) -> None:
        """Adds partitions up to this number, if it has fewer. Errors as `bounds`."""
        if self._partition_count(self.topic) >= partitions:
            return
        wanted = [NewPartitions(self.topic, partitions)]
        found = self._service.call(lambda admin: admin.create_partitions(wanted, request_timeout=REQUEST_SECONDS))
        self._changed(
            found[self.topic], f"topic {self.topic} needs {partitions} partitions, and this user may not add them: "
            "allow `Alter` on it"
        )  # fmt: skip
        logger.info("topic %s has %d partitions now", self.topic, partitions)

    def partition_count(self) -> int:
        """Number of partitions. Errors as `bounds`."""
        return self._partition_count(self.topic)

    def committed(self, group: str) -> dict[int, int]:
        return {one.partition: one.offset for one in self._committed(group)}

    def _committed(self, group: str) -> list[TopicPartition]:
        partitions = [TopicPartition(self.topic, one) for one in range(self._partition_count(self.topic))]
        return [one for one in self._service.committed(group, partitions) if one.offset >= 0]

    def at(self, seconds: float) -> dict[int, int]:
        """The time of a message is the topic's: when it was written, unless the topic is set otherwise."""
        since = OffsetSpec.for_timestamp(math.ceil(seconds * 1000))
        offsets = self._offsets({"first": since, "end": OffsetSpec.latest()})
        return {one: first if first >= 0 else offsets["end"][one] for one, first in offsets["first"].items()}

    def latest_incarnation(self, group: str) -> Incarnation | None:
        """Members show theirs in their client.id, and leave it in the metadata of what they commit."""
        texts = [found["incarnation"] or "" for found in map(_CLIENT_ID.fullmatch, self._client_ids(group)) if found]
        texts += [one.metadata or "" for one in self._committed(group)]
        return max((one for one in map(Incarnation.parse, texts) if one), default=None)

    def source(self, group: str, job: str, listener: Listener, incarnation: Incarnation | None = None) -> KafkaSource:
        self._partition_count(self.topic)

        def check() -> None:
            self._check_members(group, job)

        check()
        return KafkaSource(
            *(self._service, self.topic, group, listener),
            client=f"{_CLIENT}{job}" + (f".{incarnation}" if incarnation else ""),
            check=check,
            instance=self._instance,
            metadata=str(incarnation or ""),
        )

    def _check_members(self, group: str, job: str) -> None:
        """Refuses members of other jobs, which show in their client.id."""
        for client in self._client_ids(group):
            found = _CLIENT_ID.fullmatch(client)
            if not found or found["job"] != job:
                what = f"of another job, {found['job']}" if found else f"like {client}"
                raise SourceRefused(
                    f"group {group} of {self.name} has members {what}: use another group, or stop them first"
                )

    def members(self, group: str) -> int:
        return len(self._client_ids(group))

    def _client_ids(self, group: str) -> list[str]:
        """Client ids of the members of a group."""
        return [member.client_id for member in self.group_members(group)]

    def group_members(self, group: str) -> list[MemberDescription]:
        """The members of a group. Errors as `bounds`."""
        answer = self._service.describe_group(group, self.topic)
        if isinstance(answer, KafkaError) and answer.code() == KafkaError.GROUP_ID_NOT_FOUND:
            return []
        return list(self._checked(answer).members)

    def writer(self, topic: str | None = None) -> KafkaWriter:
        topic = topic or self.topic
        if topic != self.topic:
            self.of(topic).create(self._partition_count(self.topic), self.max_message_bytes() + MORE_BYTES)
        return KafkaWriter(self._service, topic, self._partition_count(topic), self._max_message_bytes(topic))

    def max_message_bytes(self) -> int:
        """The largest message that it takes. Errors as `bounds`."""
        return self._max_message_bytes(self.topic)

    def _max_message_bytes(self, topic: str) -> int:
        """The largest message that a topic takes; the default of clients where the setting cannot be read."""
        asked = ConfigResource(ResourceType.TOPIC, topic)
        found = self._service.call(
            lambda admin: admin.describe_configs([asked], request_timeout=REQUEST_SECONDS), MISSING
        )
        limit = None if isinstance(found[asked], KafkaError) else found[asked].get("max.message.bytes")
        return _MAX_BYTES if limit is None else int(limit.value)

    def records(self, wanted: Mapping[int, Bounds], *, committed: bool = True) -> Iterator[Record]:
        return read_records(self._service, self.topic, wanted, committed=committed)
