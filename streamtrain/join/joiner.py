"""Joins two topics of Kafka into a third, exactly once.

Samples, late and orphaned outcomes, dead letters and the offsets of both inputs are written in one transaction. The
metadata of the offsets say from where the state is rebuilt. Whatever fails in a transaction, the joiner leaves the
group and joins it again: then it continues from what is committed.
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from streamtrain.errors import ConfigError, InstanceFenced, SourceError, SourceRefused, SourceUnavailable, TopicMissing
from streamtrain.join.buffer import Buffer, Memory
from streamtrain.join.engine import JoinLabel, JoinPosition, Rules
from streamtrain.join.messages import JoinReader
from streamtrain.join.partition import (
    Committed,
    JoinedPartition,
    from_metadata,
    sample_of_metadata,
    to_metadata,
    topic_of_metadata,
)
from streamtrain.periodic import Backoff, retry
from streamtrain.settings.groups import JoinSettings, Settings
from streamtrain.stream.dead_letters import SUFFIX
from streamtrain.stream.kafka.client import REQUEST_SECONDS
from streamtrain.stream.kafka.pauses import Pauses, Place
from streamtrain.stream.kafka.source import DEFAULTS as READ_DEFAULTS
from streamtrain.stream.kafka.stream import MORE_BYTES, KafkaStream
from streamtrain.stream.kafka.writer import DEFAULTS as WRITE_DEFAULTS
from streamtrain.stream.kafka.writer import allowed_bytes, max_value_bytes
from streamtrain.stream.opening import open_stream, topic_settings
from streamtrain.stream.source import Fetched
from streamtrain.stream.standstill import StandstillWatch

LATE, ORPHANED = ".late", ".orphaned"
"""Suffixes of the topics of outcomes that count for no label."""

_POLL_SECONDS = 0.05
_MOST_MESSAGES = 5000  # read at once
_MOST_AHEAD = 60.0  # seconds that one log may be read ahead of the other
_TRANSACTION_SECONDS = 15.0  # after which a broker takes back the transaction of a joiner that was killed
_MOST_TRANSACTION_SECONDS = 900.0  # that a broker allows by default
_PATIENCE = 0.6  # of that time, for each step of a transaction
_GROWING_SECONDS = 60.0  # in which topics are given more partitions, one after the other
_LARGE = 4096  # bytes of a message that a topic may refuse for its size
_END = KafkaError._PARTITION_EOF
_FORBIDDEN = (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)

logger = logging.getLogger(__name__)


class Topics(NamedTuple):
    """The topics of a join, of one Kafka."""

    impressions: KafkaStream
    outcomes: KafkaStream
    samples: KafkaStream


def rules_of(settings: JoinSettings) -> Rules:
    """The rules that settings describe."""
    labels = tuple(
        JoinLabel(
            name,
            frozenset(one.kinds),
            one.wait or settings.wait,
            one.default,
            one.value,
            one.attribution,
            frozenset(one.cancelled_by),
        )
        for name, one in settings.labels.items()
    )
    keep = settings.keep
    return Rules(labels, settings.grace, settings.emit, keep.negatives, keep.weight or "")


def open_topics(settings: Settings) -> Topics:
    """The topics of a join.

    Raises:
        ConfigError: nothing is to be joined, the topics are not of one Kafka, or two of them are the same.
    """
    join, stream = settings.join, settings.stream
    if join.impressions is None or join.outcomes is None:
        raise ConfigError("join.impressions and join.outcomes are not set: they are the topics that are joined")
    if stream.format != "json":
        raise ConfigError(f"stream.format is {stream.format!r}, but a join reads and writes JSON only")
    given = {
        "join.impressions": topic_settings(stream, join.impressions, "join.impressions"),
        "join.outcomes": topic_settings(stream, join.outcomes, "join.outcomes"),
        "stream.topic": stream,
    }
    opened = {key: open_stream(one) for key, one in given.items()}
    for key, one in opened.items():
        if not isinstance(one, KafkaStream):
            raise ConfigError(f"{key}: {one.name} is not one of Kafka, whose transactions a join needs")
        for other, another in opened.items():
            if isinstance(another, KafkaStream) and one.service.name != another.service.name:
                raise ConfigError(
                    f"{key} is at {one.service.name}, but {other} at {another.service.name}: a transaction needs all "
                    "topics of a join at the same brokers, spelled the same"
                )
            if key < other and one.topic == another.topic:
                raise ConfigError(f"{key} and {other} are both {one.topic!r}: they must be different topics")
    return Topics(*opened.values())  # type: ignore[arg-type]


def create_topics(topics: Topics, create: int, *, dead_letters: bool, grow: bool = False) -> int:
    """Creates the topics that are written, and with `create` partitions those that are read, where they are missing.

    Args:
        topics: of the join.
        create: number of partitions of topics to be read; 0: they are created elsewhere.
        dead_letters: whether there are any.
        grow: whether those that are written get as many partitions as those that are read, which have got more.

    Returns:
        Number of partitions of all of them.

    Raises:
        TopicMissing: a topic to be read is missing, and `create` is 0.
        PartitionsDiffer: they have different numbers of partitions.
    """
    read = (topics.impressions, topics.outcomes)
    if create:
        for stream in read:
            stream.create(create)
    count = topics.impressions.partition_count()
    first, last = (stream.max_message_bytes() + MORE_BYTES for stream in read)
    written = {topics.samples.topic: first, topics.outcomes.topic + LATE: last, topics.outcomes.topic + ORPHANED: last}
    if dead_letters:
        written |= {topics.impressions.topic + SUFFIX: first, topics.outcomes.topic + SUFFIX: last}
    for stream in (topics.outcomes, *map(topics.samples.of, written)):
        if stream is not topics.outcomes:
            stream.create(count, written[stream.topic])
            if grow:
                stream.grow(count)
        if (other := stream.partition_count()) != count:
            raise PartitionsDiffer(
                f"{stream.name} has {other} partitions, but topic {topics.impressions.topic} has {count}: topics of a "
                "join must have the same number, and be written with the same partitioner by id"
            )
    return count


class PartitionsDiffer(ConfigError):
    """Topics of a join have different numbers of partitions."""


@dataclass
class Totals:
    """What a joiner has done so far, by name; only what is committed counts."""

    impressions: int = 0
    outcomes: int = 0
    samples: int = 0
    dropped: int = 0
    attributed: int = 0
    late: int = 0
    orphaned: int = 0
    ignored: int = 0
    commits: int = 0
    restarts: int = 0
    tombstones: list[int] = field(default_factory=lambda: [0, 0])
    dead_letters: dict[tuple[str, str], int] = field(default_factory=dict)
    positives: dict[str, int] = field(default_factory=dict)


class Position(NamedTuple):
    """How far a partition is joined: the next offset of its outcomes and of its samples."""

    outcome: int
    sample: int


class Joiner:
    """One member of a group of joiners. For one thread; what is public may be read by others.

    Args:
        settings: of the join and its stream.
        instance: name of this joiner, unique in the group, by which it takes over from a predecessor at once; None:
            any.
        observe: called after each commit with the delays of its outcomes in seconds, and how far partitions are joined.

    Attributes:
        totals: what is done so far.
        partitions: those of this member, by number.
        standstill: finds partitions that stand still.

    Raises:
        ConfigError: as `open_topics`.
    """

    def __init__(
        self,
        settings: Settings,
        instance: str | None = None,
        observe: Callable[[Sequence[float], Mapping[int, Position]], object] = lambda delays, positions: None,
    ) -> None:
        self.totals = Totals()
        self.partitions: dict[int, JoinedPartition] = {}
        self.topics = open_topics(settings)
        self._settings, self._instance, self._observe = settings, instance, observe
        self._rules = rules_of(settings.join)
        self._ahead = min(settings.join.grace, settings.stream.future_after or settings.join.grace)
        self._logs = (self.topics.impressions.topic, self.topics.outcomes.topic)
        self._group = f"{settings.stream.group}.join"
        self._name = instance or uuid.uuid4().hex[:12]
        self._errors: list[Exception] = []
        self._memory = Memory(settings.join.memory_bytes)
        self._partition_count = 0  # partitions of each topic
        self._different_since: float | None = None  # when their numbers were first seen to differ
        self._limits: dict[str, int] = {}  # bytes of the largest message, by topic that is written
        self._refused: dict[str, tuple[int, Message]] = {}  # the largest that was refused, with its bytes, by topic
        self._identities: dict[str, str] = {}  # of the topics that are read
        self._samples: dict[int, int] = {}  # next offsets
        self._read_to: dict[Place, int] = {}  # next offsets to be read
        self.standstill = StandstillWatch[Place](
            self._ends, lambda place: f"partition {place[1]} of {self.topics.samples.of(place[0]).name}"
        )
        self._pauses: Pauses
        self._consumer: Consumer
        self._producer: Producer
        self._transaction_seconds = _TRANSACTION_SECONDS
        self._is_initialized = False
        self._member = ""  # of the group, once it has been assigned partitions
        self._is_open = False
        self._next_commit = 0.0

    @property
    def is_member(self) -> bool:
        """Whether it is a member of its group now."""
        return self._is_open and self._is_initialized

    def run(self, stopped: threading.Event) -> None:
        """Joins until `stopped` is set.

        Raises:
            ConfigError, SourceRefused: it cannot continue.
        """
        with self.standstill:
            retry(lambda: self._join_group(stopped), SourceUnavailable, stopped, backoff=Backoff(0.1, 5.0))

    def _join_group(self, stopped: threading.Event) -> None:
        """Is a member of the group until it is stopped or something fails."""
        self._check_topics()
        self._open()
        try:
            logger.info("joining %s and %s into %s", *self._logs, self.topics.samples.topic)
            while not stopped.is_set():
                self.step()
            self._commit()
        except (KafkaException, SourceUnavailable, InstanceFenced) as exc:
            self.totals.restarts += 1
            self._raise_if_replaced()
            raise self._translate(exc) from exc
        finally:
            self._close()

    def _check_topics(self) -> None:
        """Creates what is missing, and looks how many partitions the topics have, and how large messages they take."""
        stream, samples = self._settings.stream, self.topics.samples
        has_joined = self._partition_count > 0 or bool(self.topics.impressions.committed(self._group))
        try:
            self._partition_count = create_topics(
                self.topics, stream.create, dead_letters=stream.dead_letters, grow=has_joined
            )
        except PartitionsDiffer as exc:
            self._different_since = self._different_since or time.monotonic()
            if self._partition_count == 0 or time.monotonic() - self._different_since > _GROWING_SECONDS:
                raise
            raise SourceUnavailable(f"{exc}; waiting for topics that are being given more partitions") from exc
        self._different_since = None
        self._check_identities()
        letters = [topic + SUFFIX for topic in self._logs] if stream.dead_letters else []
        for topic in (*self._written, *letters):
            found = allowed_bytes(samples.of(topic).max_message_bytes())
            ours = int(samples.service.option("message.max.bytes", found))
            self._limits[topic] = min(found, ours, self._limits.get(topic, found))

    def _check_identities(self) -> None:
        """Raises SourceRefused if a topic that is read is another one than it was: its offsets mean other messages."""
        for log in (self.topics.impressions, self.topics.outcomes):
            try:
                found = log.identity()
            except TopicMissing as exc:  # also of a broker that has just started; else it is told when it joins again
                raise SourceUnavailable(str(exc)) from exc
            if self._identities.setdefault(log.topic, found) != found:
                raise self._recreated(log.topic)

    def _recreated(self, topic: str) -> SourceRefused:
        return SourceRefused(
            f"topic {topic} has been deleted and created again: group {self._group} has joined messages of the one "
            "before, and none of this one. To go on with it from its beginning, stop all joiners of the group and run "
            f"`kafka-consumer-groups --bootstrap-server {self.topics.samples.service.servers} --group {self._group} "
            f"--topic {topic} --reset-offsets --to-earliest --execute`"
        )

    @property
    def _written(self) -> tuple[str, str, str]:
        """Topics of samples, of late and of orphaned outcomes."""
        return self.topics.samples.topic, self._logs[1] + LATE, self._logs[1] + ORPHANED

    def _translate(self, exc: Exception) -> SourceError:
        """What to do about an error: go on from what is committed, or stop."""
        if isinstance(exc, SourceUnavailable):
            return exc
        error = exc.args[0] if isinstance(exc, KafkaException) else None
        is_refused = error is not None and (not error.fatal() or error.code() in _FORBIDDEN)
        refused = self.topics.samples.service.refusal(error) if error is not None and is_refused else None
        if refused and not isinstance(refused, InstanceFenced):
            return refused
        return SourceUnavailable(f"the join goes on from what is committed: {error.str() if error else exc}")

    def _raise_if_replaced(self) -> None:
        """Raises InstanceFenced if another process has joined as this instance: the earlier one ends.

        A broker may also fence a member that was silent for too long, or one that it takes for two after a restart.
        """
        if self._instance is None:
            return
        for member in self.topics.samples.group_members(self._group):
            if self._member and member.group_instance_id == self._instance and member.member_id != self._member:
                raise InstanceFenced(
                    f"another process has joined group {self._group} as instance {self._instance}: this one stops; "
                    "give each its own --instance"
                )

    def _open(self) -> None:
        service = self.topics.samples.service
        self._errors.clear()
        self._monitor = service.monitor(self._errors.append)
        self._producer = service.create_client(
            Producer,
            self._monitor,
            {
                "transactional.id": f"{self._group}.{self._name}",
                "transaction.timeout.ms": int(self._transaction_seconds * 1000),
                "delivery.timeout.ms": int(self._transaction_seconds * 1000),
            },
            {
                **WRITE_DEFAULTS,
                "linger.ms": 0,
                "queue.buffering.max.messages": 1_000_000,
                "message.max.bytes": max(self._limits.values()),
            },
        )
        self._is_initialized, self._member = False, ""
        self._consumer = service.create_client(
            Consumer,
            self._monitor,
            {
                "group.id": self._group,
                "client.id": f"streamtrain.join.{self._name}",
                "partition.assignment.strategy": "range",  # the same partitions of both topics
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "error",
                "enable.partition.eof": True,
                "isolation.level": "read_committed",
                **({} if self._instance is None else {"group.instance.id": self._instance}),
            },
            READ_DEFAULTS,
        )
        self._pauses = Pauses(self._consumer)
        self._is_open = True
        self._consumer.subscribe(
            list(self._logs), on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
        )

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._drop(list(self.partitions))
            self._consumer.close()
        self._producer.purge()
        self._monitor.close()

    def step(self) -> None:
        """Reads, joins and commits what there is."""
        messages = self._consumer.consume(_MOST_MESSAGES, _POLL_SECONDS)
        for error in self._errors:
            raise error
        self._read(messages)
        self._read_ends()
        for partition in self.partitions.values():
            partition.advance_idle(self._settings.join.idle)
        ahead = self._balance()
        if self.standstill.polled(self._read_to, ahead):
            raise SourceUnavailable("a partition stands still: the join goes on from what is committed")
        if time.monotonic() >= self._next_commit:
            self._commit()
            self._next_commit = time.monotonic() + self._settings.join.commit_every

    def _read(self, messages: Sequence[Message]) -> None:
        for (topic, number, code), group in groupby(messages, _place):
            run = list(group)
            if topic not in self._logs:  # an error of the client as a whole
                raise KafkaException(run[0].error())
            partition = self.partitions.get(number)
            if partition is None:
                continue  # it went to another member
            log = self._logs.index(topic)
            if code is None:
                partition.add(log, _fetched(number, run))
                self._read_to[topic, number] = (run[-1].offset() or 0) + 1
            elif code == _END:
                self._read_to[topic, number] = run[-1].offset() or 0
                partition.end(log, self._read_to[topic, number])
            else:
                self._raise(run[0])

    def _read_ends(self) -> None:
        for number, partition in self.partitions.items():
            for log, topic in enumerate(self._logs):
                _, high = self._consumer.get_watermark_offsets(TopicPartition(topic, number), cached=True)
                partition.ends[log] = high

    def _raise(self, message: Message) -> None:
        error = message.error()
        assert error is not None
        if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            self._check_identities()
            raise SourceRefused(
                f"partition {message.partition()} of topic {message.topic()} no longer has the messages that the join "
                "has to read next: they were deleted before they were joined. Keep messages longer than join.wait and "
                f"4 x join.grace; to go on with what is left, delete the group {self._group}"
            )
        raise KafkaException(error)

    def _ends(self) -> dict[Place, int]:
        """Where what can be read of both logs ends."""
        logs = (self.topics.impressions, self.topics.outcomes)
        return {(log.topic, number): end for log in logs for number, end in log.ends().items()}

    def _balance(self) -> list[Place]:
        """Pauses the log of a partition that is read ahead of the other one, as what is read ahead has to be kept.

        Returns:
            What is paused.
        """
        ahead: list[Place] = []
        for number, partition in self.partitions.items():
            marks = partition.join.watermarks
            for log in (0, 1):
                is_ahead = marks[log] > marks[1 - log] + _MOST_AHEAD and not partition.is_at_end(1 - log)
                if is_ahead and not partition.is_rebuilding:
                    ahead.append((self._logs[log], number))
        self._pauses.set(ahead)
        return ahead

    def _on_assign(self, consumer: Consumer, given: Sequence[TopicPartition]) -> None:
        try:
            self._assign(consumer, given)
        except Exception as exc:  # which is to come out of `step`, not of librdkafka
            self._errors.append(exc)

    def _assign(self, consumer: Consumer, given: Sequence[TopicPartition]) -> None:
        numbers = sorted({one.partition for one in given})
        wanted = {(topic, number) for topic in self._logs for number in numbers}
        is_same = wanted == {(one.topic, one.partition) for one in given}
        if not is_same or (numbers and numbers[-1] >= self._partition_count):  # a topic has been given more partitions
            before = self._partition_count
            self._check_topics()
            if not is_same and self._partition_count != before:
                raise SourceUnavailable(f"the topics have {self._partition_count} partitions now, instead of {before}")
        if not is_same:
            raise SourceRefused(
                f"the group {self._group} assigns partitions of both topics differently: they must have the same "
                "number of partitions, and only `streamtrain join` may be in the group"
            )
        self._member = consumer.memberid() or ""
        if not self._is_initialized:  # a member of the group first: so the later one of two of an instance stays
            self._producer.init_transactions(REQUEST_SECONDS)
            self._is_initialized = True
        committed = self._committed(consumer, given)
        reader = JoinReader(self._settings.join, self._ahead)
        for number in numbers:
            first, last = (committed[topic, number] for topic in self._logs)
            if last.is_reset and first.progress.start < first.offset:
                # Only from the outcomes could be told which of these impressions have been written already. Read again,
                # all of them would be written, without their outcomes.
                logger.warning(
                    "partition %d: the offset of %s has been reset to %d, so impressions %d to %d, which may have "
                    "waited for outcomes, are not joined again",
                    *(number, self._logs[1], last.offset, first.progress.start, first.offset - 1),
                )
                first = committed[self._logs[0], number] = Committed(first.offset, JoinPosition(first.offset))
            buffer = Buffer(self._memory, self._settings.join.folder)
            self.partitions[number] = JoinedPartition(number, self._rules, reader, (first, last), buffer=buffer)
        self._read_to = {place: of.progress.start for place, of in committed.items()}
        consumer.assign([TopicPartition(*place, offset) for place, offset in self._read_to.items()])
        if numbers:
            logger.info("partitions %s are joined here", ", ".join(map(str, numbers)))

    def _committed(self, consumer: Consumer, given: Sequence[TopicPartition]) -> dict[Place, Committed]:
        """What the group has committed of these partitions; else their beginnings."""
        logs = (self.topics.impressions, self.topics.outcomes)
        without = [log for log in logs if not log.committed(self._group)]
        # Brokers forget what was committed of a topic that is deleted. Asked again, as both are committed together, and
        # another member may have done so for the first time between the two questions.
        if len(without) == 1 and not without[0].committed(self._group):
            raise self._recreated(without[0].topic)
        committed: dict[Place, Committed] = {}
        for one in consumer.committed(list(given), timeout=REQUEST_SECONDS):
            if one.error is not None:
                raise KafkaException(one.error)
            offset = one.offset
            if offset < 0:
                offset, _ = consumer.get_watermark_offsets(one, timeout=REQUEST_SECONDS)
            progress = from_metadata(one.metadata, offset)
            committed[one.topic, one.partition] = Committed(offset, progress, one.offset >= 0 and not one.metadata)
            if topic_of_metadata(one.metadata) not in ("", self._identities[one.topic]):
                raise self._recreated(one.topic)
            if one.topic == self._logs[1]:
                self._samples[one.partition] = sample_of_metadata(one.metadata)
        return committed

    def _on_revoke(self, consumer: Consumer, given: Sequence[TopicPartition]) -> None:
        try:
            if self._is_open:
                self._commit()
        except Exception as exc:  # as in _on_assign
            self._errors.append(exc)
        self._on_lost(consumer, given)

    def _on_lost(self, _: Consumer, given: Sequence[TopicPartition]) -> None:
        self._drop({one.partition for one in given})

    def _drop(self, numbers: Collection[int]) -> None:
        self._pauses.forget((topic, number) for topic in self._logs for number in numbers)
        for number in numbers:
            if partition := self.partitions.pop(number, None):
                partition.close()
            for topic in self._logs:
                self._read_to.pop((topic, number), None)

    def _commit(self) -> None:
        """Writes what has come of the messages, together with the offsets, in a transaction."""
        dirty = [one for one in self.partitions.values() if one.is_dirty and not one.is_rebuilding]
        if not dirty:
            return
        self._check_identities()  # of what was read until now
        began = time.monotonic()
        try:
            self._write_transaction(dirty)
        except KafkaException:
            self._learn_limits()
            took = time.monotonic() - began
            if took > _PATIENCE * self._transaction_seconds and self._monitor.last_failure < began:
                self._take_longer()
            raise
        self._transaction_seconds = _TRANSACTION_SECONDS  # of the next producer
        self.totals.commits += 1
        delays: list[float] = []
        for partition in dirty:
            delays += partition.join.output.delays
            self._count(partition)
            partition.committed()
        self._observe(delays, {one.number: Position(one.join.positions[1], self._samples[one.number]) for one in dirty})

    def _take_longer(self) -> None:
        """More has come at once than can be written in time, such as all that waited when a watermark has jumped."""
        before = self._transaction_seconds
        self._transaction_seconds = min(2 * before, _MOST_TRANSACTION_SECONDS)
        logger.warning(
            "a transaction could not be written within %g s: trying again with %g s", before, self._transaction_seconds
        )

    def _write_transaction(self, dirty: Sequence[JoinedPartition]) -> None:
        producer, offsets, patience = self._producer, [], _PATIENCE * self._transaction_seconds
        samples_, late, orphaned = (max_value_bytes(self._limits[topic]) for topic in self._written)
        producer.begin_transaction()
        for partition in dirty:
            partition.refuse_large((samples_, late, orphaned))
            self._write(partition)
        producer.flush(patience)  # which serves delivery reports
        for partition in dirty:
            number, samples = partition.number, (None, self._samples[partition.number])
            for topic, at, progress, sample in zip(
                self._logs, partition.join.positions, partition.join.progress(), samples, strict=True
            ):
                metadata = to_metadata(progress, sample, self._identities[topic])
                offsets.append(TopicPartition(topic, number, at, metadata))
        producer.send_offsets_to_transaction(offsets, self._consumer.consumer_group_metadata(), patience)
        producer.commit_transaction(patience)

    def _write(self, partition: JoinedPartition) -> None:
        output, number, samples = partition.join.output, partition.number, self.topics.samples.topic
        for sample in output.samples[:-1]:
            self._produce(samples, sample.value, sample.id.encode(errors="surrogatepass"), number)
        if output.samples:
            last = output.samples[-1]

            def note(error: KafkaError | None, message: Message) -> None:
                if error is None:
                    self._samples[number] = (message.offset() or 0) + 1
                self._note_limit(samples, len(last.value) + len(last.id), error, message)

            self._produce(samples, last.value, last.id.encode(errors="surrogatepass"), number, on_delivery=note)
        for suffix, outcomes in ((LATE, output.late), (ORPHANED, output.orphaned)):
            for one in outcomes:
                self._produce(self._logs[1] + suffix, one.value, one.id.encode(errors="surrogatepass"), number)
        if self._settings.stream.dead_letters:
            for topic, letters in zip(self._logs, partition.all_letters(), strict=True):
                limit = self._limits[topic + SUFFIX]
                for letter in letters:
                    key, value, headers = letter.message(
                        topic, self._identities[topic], partial(max_value_bytes, limit)
                    )
                    self._produce(topic + SUFFIX, value, key, number, headers=list(headers.items()))

    def _produce(self, topic: str, value: bytes, key: bytes, partition: int, **more: Any) -> None:
        if len(value) >= _LARGE and "on_delivery" not in more:
            more["on_delivery"] = partial(self._note_limit, topic, len(value) + len(key))
        while True:
            try:
                self._producer.produce(topic, value, key, partition, **more)
                return
            except BufferError:
                self._producer.poll(0.1)

    def _note_limit(self, topic: str, size: int, error: KafkaError | None, message: Message) -> None:
        """Notes what a topic refuses for its size: all that was sent together with it is refused, too."""
        is_too_large = error is not None and error.code() == KafkaError.MSG_SIZE_TOO_LARGE
        if is_too_large and (topic not in self._refused or size > self._refused[topic][0]):
            self._refused[topic] = size, message

    def _learn_limits(self) -> None:
        """Learns how large a message may be where the topic's settings cannot be read, or have changed."""
        for topic, (size, message) in self._refused.items():
            logger.warning(
                "topic %s does not take a message of %d bytes for partition %s with key %r; what is as large will be a "
                "dead letter", topic, size, message.partition(), message.key()
            )  # fmt: skip
            self._limits[topic] = min(self._limits[topic], size // 2 if topic.endswith(SUFFIX) else size - 1)
        self._refused.clear()

    def _count(self, partition: JoinedPartition) -> None:
        output, totals = partition.join.output, self.totals
        letters = partition.all_letters()
        totals.impressions += partition.read[0]
        totals.outcomes += partition.read[1]
        totals.tombstones = [sum(both) for both in zip(totals.tombstones, partition.tombstones, strict=True)]
        partition.read, partition.tombstones = [0, 0], [0, 0]
        totals.samples += len(output.samples)
        totals.dropped += output.dropped
        totals.attributed += len(output.delays)
        totals.late += len(output.late)
        totals.orphaned += len(output.orphaned)
        totals.ignored += output.ignored
        for label, count in output.positives.items():
            totals.positives[label] = totals.positives.get(label, 0) + count
        for log, of_log in zip(("impressions", "outcomes"), letters, strict=True):
            for letter in of_log:
                totals.dead_letters[log, letter.reason] = totals.dead_letters.get((log, letter.reason), 0) + 1

    def lag(self) -> dict[tuple[str, int], int]:
        """Messages that are not read yet, by topic and partition, as of the last fetch; 0 where the end is reached."""
        return {
            (topic, number): partition.lag(log)
            for number, partition in list(self.partitions.items())
            for log, topic in enumerate(self._logs)
        }


def _place(message: Message) -> tuple[str, int, int | None]:
    error = message.error()
    return message.topic() or "", message.partition() or 0, None if error is None else error.code()


def _fetched(number: int, messages: Sequence[Message]) -> Fetched:
    return Fetched(
        number,
        [one.offset() or 0 for one in messages],
        [one.value() for one in messages],
        [one.timestamp()[1] for one in messages],
    )
