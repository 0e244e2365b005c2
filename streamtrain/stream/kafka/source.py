"""One member of a group that reads a topic of Kafka."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby, islice
from operator import itemgetter
from typing import cast

from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Consumer, KafkaError, KafkaException, Message, TopicPartition

from streamtrain.errors import InstanceFenced, OffsetGone, SourceRefused, SourceUnavailable
from streamtrain.stream.kafka.client import REQUEST_SECONDS, KafkaService, Option
from streamtrain.stream.kafka.pauses import Pauses
from streamtrain.stream.source import Bounds, Fetched, Listener, Record

DEFAULTS: dict[str, Option] = {
    "queued.max.messages.kbytes": 16384,
    # A seek or resume takes effect after the fetch under way.
    "fetch.wait.max.ms": 100,
    # Pause before the next fetch when that much is queued: librdkafka's default, a second, would leave readers idle.
    "fetch.queue.backoff.ms": 20,
}
_PROBE_SECONDS = 0.2
_WATERMARK_SECONDS = 5.0
_LEAVING_SECONDS = 10.0
_FENCING_SECONDS = 60.0  # after the brokers were unreachable, in which a member may be fenced by its own predecessor
# Messages without an error have all of these.
_PARTITION = cast(Callable[[Message], int], Message.partition)
_OFFSET = cast(Callable[[Message], int], Message.offset)
_VALUE = cast(Callable[[Message], bytes | None], Message.value)
_TIME = itemgetter(1)  # of the kind of a timestamp and its milliseconds, which are -1 where there is none
# librdkafka wants a group, and asks for its coordinator, also where nothing is committed and no member joins.
_WITHOUT_A_GROUP = frozenset({KafkaError.GROUP_AUTHORIZATION_FAILED})
_GONE = {KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE}

logger = logging.getLogger("streamtrain.stream.kafka.stream")


class KafkaSource:
    """One member of a consumer group, with cooperative-sticky assignment.

    Args:
        service: Kafka.
        topic: its name.
        group: consumer group.
        listener: handles rebalances.
        client: client.id of the member.
        check: raises SourceRefused while the group has members of another job.
        instance: group.instance.id of the member.
        metadata: metadata of the offsets that it commits.
    """

    def __init__(
        self,
        service: KafkaService,
        topic: str,
        group: str,
        listener: Listener,
        *,
        client: str,
        check: Callable[[], None],
        instance: str | None = None,
        metadata: str = "",
    ) -> None:
        self._service = service
        self._topic = topic
        self._check = check
        self._listener = listener
        self._metadata = metadata
        self._positions: dict[int, int] = {}
        self._moved: set[int] = set()  # assigned, sought or taken away within the last call of consume
        self._is_paused = False
        self._pending: set[int] = set()  # assigned by the group, but not by the listener: that failed, and is retried
        self._errors: deque[Exception] = deque()
        self._is_group_checked = False
        self._closed = True  # until there is something to close
        self._settings = {
            "group.id": group,
            "client.id": client,
            "partition.assignment.strategy": "cooperative-sticky",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "on_commit": self._on_commit,
            **({} if instance is None else {"group.instance.id": instance}),
        }
        self._join()

    def _join(self) -> None:
        self._monitor = self._service.monitor(self._errors.append)
        self._consumer: Consumer = self._service.create_client(Consumer, self._monitor, self._settings, DEFAULTS)
        self._pauses = Pauses(self._consumer)
        self._closed = False
        self._consumer.subscribe(
            [self._topic], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
        )

    def rejoin(self) -> None:
        self._notify(sorted(self._positions), self._listener.lost)
        self._pending.clear()
        self._is_group_checked = False
        self._closed = True
        self._leave_group()
        self._monitor.close()
        self._errors.clear()  # the same one comes several times
        self._join()

    def poll(self, max_messages: int, seconds: float, min_messages: int = 1) -> list[Fetched]:
        if self._pending:
            self._assign(sorted(self._pending))
        self._raise_error()
        fetched = self._sort(self._consume(max_messages, seconds, min_messages))
        if not fetched:
            self._raise_error()
        return fetched  # an error that came with messages waits for the next call

    def _raise_error(self) -> None:
        while self._errors:
            error = self._errors.popleft()
            if isinstance(error, InstanceFenced) and time.monotonic() - self._monitor.last_failure < _FENCING_SECONDS:
                # A broker that has just restarted may take one member of the same instance for two.
                logger.warning(
                    "rejoining the group: topic %s of %s fenced this instance", self._topic, self._service.name
                )
                self.rejoin()
                continue
            # Somebody may have sought on since, or have taken the partition.
            if not isinstance(error, OffsetGone) or self._positions.get(error.partition) == error.wanted:
                raise error

    def _consume(self, max_messages: int, seconds: float, min_messages: int) -> list[Message]:
        """What is queued, or else the first messages that come."""
        look = max(0.01, min(0.2 * seconds, _PROBE_SECONDS))
        deadline = time.monotonic() + max(0.0, seconds - self._monitor.probe(self._consumer, self._topic, look))
        messages = self._consumer.consume(max_messages, 0)
        while (missing := self._missing(messages, min_messages)) and (left := deadline - time.monotonic()) > 0:
            messages = self._consume_more(messages, missing, left)
            messages = self._consume_more(messages, max_messages - len(messages), 0)
        return messages

    def _consume_more(self, messages: list[Message], count: int, seconds: float) -> list[Message]:
        """Adds messages; drops those that partitions have had which were sought or taken away meanwhile."""
        self._moved.clear()
        more = self._consumer.consume(count, seconds) if count > 0 else []
        if self._moved:
            messages = [one for one in messages if _PARTITION(one) not in self._moved or not _is_of_position(one)]
        return messages + more

    @staticmethod
    def _missing(messages: list[Message], wanted: int) -> int:
        """How many messages are missing; ends of partitions do not count."""
        others = (message for message in messages if message.error() is None or not _is_end(message))
        return wanted - sum(1 for _ in islice(others, wanted))

    def _sort(self, messages: list[Message]) -> list[Fetched]:
        """Groups messages by partition, with few operations for each message; handles errors."""
        ends: list[Message] = []
        if any(map(Message.error, messages)):
            for message in messages:
                if (error := message.error()) and not _is_end(message):
                    self._on_error(error, message.partition())
            ends = [message for message in messages if message.error() and _is_end(message)]
            messages = [message for message in messages if not message.error()]
        fetched: dict[int, tuple[list[int], list[bytes | None], list[int]]] = {}
        for partition, run in groupby(messages, _PARTITION):
            if partition not in self._positions:
                continue  # it was read for this member before it went to another
            of_run = list(run)
            offsets, values, times = fetched.setdefault(partition, ([], [], []))
            offsets.extend(map(_OFFSET, of_run))
            values.extend(map(_VALUE, of_run))
            times.extend(map(_TIME, map(Message.timestamp, of_run)))
        for partition, (offsets, *_) in fetched.items():
            self._positions[partition] = offsets[-1] + 1
        for message in ends:
            self._advance_to_end(message)
        return [Fetched(partition, *columns) for partition, columns in fetched.items()]

    def _advance_to_end(self, message: Message) -> None:
        """Nothing comes before an end: neither messages nor, after the last of them, markers of transactions."""
        partition, end = _PARTITION(message), _OFFSET(message)
        if partition in self._positions:
            self._positions[partition] = max(self._positions[partition], end)

    def _on_error(self, error: KafkaError, partition: int | None) -> None:
        if error.code() in _GONE and partition in self._positions:
            self._on_gone(partition)
        elif refusal := self._service.refusal(error):
            self._errors.append(refusal)
        else:
            logger.warning("topic %s of %s: %s", self._topic, self._service.name, error.str())

    def _on_gone(self, partition: int) -> None:
        at = TopicPartition(self._topic, partition)
        try:
            low, high = self._consumer.get_watermark_offsets(at, timeout=_WATERMARK_SECONDS)
        except KafkaException:
            # The broker became unreachable meanwhile: the error will come again.
            self._fetch_from(self._topic_partition(partition, self._positions[partition]))
        else:
            self._errors.append(OffsetGone(partition, self._positions[partition], low, high))

    def _on_commit(self, error: KafkaError | None, partitions: Sequence[TopicPartition]) -> None:
        for failed in filter(None, [error, *(one.error for one in partitions)]):
            logger.warning("committing offsets in topic %s of %s failed: %s", self._topic, self._service.name, failed)
            return

    def _on_assign(self, _: Consumer, given: Sequence[TopicPartition]) -> None:
        if self._closed:
            with self._leaving():
                self._consumer.incremental_assign([])
            return
        try:
            self._assign([one.partition for one in given])
        except Exception as exc:  # of the listener, which is to come out of `poll`, not of librdkafka
            self._errors.append(exc)
            self._consumer.incremental_assign([])

    def _assign(self, partitions: Sequence[int]) -> None:
        self._pending.update(partitions)
        if not self._is_group_checked:
            self._check()
            self._is_group_checked = True
        positions = self._listener.assigned(partitions) if partitions else {}
        self._consumer.incremental_assign([self._topic_partition(one, positions[one]) for one in partitions])
        self._positions |= {one: positions[one] for one in partitions}
        self._moved.update(partitions)
        self._pending.difference_update(partitions)
        self._apply_pause()

    def _on_revoke(self, _: Consumer, given: Sequence[TopicPartition]) -> None:
        self._unassign(given, self._listener.revoked)

    def _on_lost(self, _: Consumer, given: Sequence[TopicPartition]) -> None:
        self._is_group_checked = False  # others may have joined since
        self._unassign(given, self._listener.lost)

    def _unassign(self, given: Sequence[TopicPartition], tell: Callable[[Sequence[int]], None]) -> None:
        partitions = {one.partition for one in given}
        self._pending -= partitions
        self._notify(sorted(partitions & self._positions.keys()), tell)
        with self._leaving():
            # librdkafka refuses to unassign what was not taken over.
            taken = [one for one in self._consumer.assignment() if one.partition in partitions]
            self._consumer.incremental_unassign(taken)

    @contextmanager
    def _leaving(self) -> Iterator[None]:
        """What is raised in a callback comes out of `close`, where librdkafka has given up the assignment itself."""
        try:
            yield
        except KafkaException as exc:
            if not self._closed or exc.args[0].code() != KafkaError._DESTROY:
                raise

    def _notify(self, partitions: Sequence[int], tell: Callable[[Sequence[int]], None]) -> None:
        """Tells the listener which partitions are taken away, and forgets them."""
        if partitions:
            try:
                tell(partitions)
            except Exception as exc:  # as in _on_assign
                self._errors.append(exc)
            self._pauses.forget((self._topic, one) for one in partitions)
            for one in partitions:
                del self._positions[one]
            self._moved.update(partitions)

    def _topic_partition(self, partition: int, offset: int, metadata: str = "") -> TopicPartition:
        if offset < 0:  # which has meanings of its own in librdkafka
            raise ValueError(f"offset {offset} of partition {partition} is negative")
        return TopicPartition(self._topic, partition, offset, metadata)

    def seek(self, partition: int, offset: int) -> None:
        if partition not in self._positions:
            raise ValueError(f"partition {partition} is not assigned to this member")
        at = self._topic_partition(partition, offset)
        self._positions[partition] = offset
        self._fetch_from(at)

    def _fetch_from(self, at: TopicPartition) -> None:
        """Fetches from there. librdkafka's own seek wants a partition that is being fetched of, without an error."""
        self._consumer.incremental_unassign([at])
        self._consumer.incremental_assign([at])
        self._moved.add(at.partition)
        self._pauses.renew([(self._topic, at.partition)])

    def pause(self) -> None:
        self._is_paused = True
        self._apply_pause()

    def resume(self) -> None:
        self._is_paused = False
        self._apply_pause()

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    def _apply_pause(self) -> None:
        self._pauses.set((self._topic, one) for one in self._positions if self._is_paused)

    def positions(self) -> dict[int, int]:
        return dict(self._positions)

    def commit(self, positions: Mapping[int, int]) -> None:
        if positions:
            try:
                self._consumer.commit(
                    offsets=[self._topic_partition(*one, self._metadata) for one in positions.items()],
                    asynchronous=True,
                )
            except KafkaException as exc:
                self._on_commit(exc.args[0], [])

    def lag(self) -> dict[int, int]:
        """Queries Kafka where nothing was fetched yet; 0 while it is unreachable."""
        return {partition: max(0, self._end(partition) - at) for partition, at in self._positions.items()}

    def _end(self, partition: int) -> int:
        at = TopicPartition(self._topic, partition)
        high: int = self._consumer.get_watermark_offsets(at, cached=True)[1]
        if high < 0:
            try:
                high = self._consumer.get_watermark_offsets(at, timeout=_WATERMARK_SECONDS)[1]
            except KafkaException:
                return 0
        return high

    def finished(self) -> bool:
        return False

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._errors.clear()
        # Before librdkafka leaves: that loses what is committed late, where an assignment waits to be taken over.
        self._notify(sorted(self._positions), self._listener.revoked)
        self._leave_group()
        self._monitor.close()
        self._raise_error()

    def _leave_group(self) -> None:
        """Closes the consumer, which may wait forever if its broker goes away during a rebalance."""
        errors: list[Exception] = []

        def leave(consumer: Consumer) -> None:
            try:
                consumer.close()
            except Exception as exc:  # raised where it was called
                errors.append(exc)

        leaving = threading.Thread(target=leave, args=(self._consumer,), name="leave-group", daemon=True)
        leaving.start()
        leaving.join(_LEAVING_SECONDS)
        if leaving.is_alive():
            logger.warning(
                "did not leave the group of topic %s of %s within %g s; others take its partitions once its session "
                "has timed out",
                *(self._topic, self._service.name, _LEAVING_SECONDS),
            )
        for error in errors:
            raise error

    def __del__(self) -> None:
        """Leaves the group in silence: librdkafka would hang if it went with a rebalance under way."""
        if not self._closed:
            self._closed = True
            self._positions.clear()
            self._consumer.close()
            self._monitor.close()


def _is_of_position(message: Message) -> bool:
    """Whether a message depends on where its partition was read; other errors do not."""
    error = message.error()
    return error is None or error.code() in _GONE or _is_end(message)


def _is_end(message: Message) -> bool:
    error = message.error()
    return error is not None and error.code() == KafkaError._PARTITION_EOF


def read_records(
    service: KafkaService, topic: str, wanted: Mapping[int, Bounds], *, committed: bool = True
) -> Iterator[Record]:
    """Messages of some partitions without a group; see Stream.records."""
    refused: list[SourceRefused] = []
    monitor = service.monitor(refused.append, _WITHOUT_A_GROUP)
    settings = {
        "group.id": "streamtrain.records",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "earliest",
        "enable.partition.eof": True,
        "isolation.level": "read_committed" if committed else "read_uncommitted",
    }
    consumer: Consumer = service.create_client(Consumer, monitor, settings, DEFAULTS)
    try:
        for partition, (low, high) in wanted.items():
            if low < high:
                consumer.assign([TopicPartition(topic, partition, low)])
                yield from _records(service, consumer, high, refused)
    finally:
        consumer.close()
        monitor.close()


def _records(service: KafkaService, consumer: Consumer, high: int, refused: list[SourceRefused]) -> Iterator[Record]:
    """Records of the assigned partition, up to an offset or its end, whichever comes first."""
    while True:
        message = consumer.poll(REQUEST_SECONDS)
        for error in refused:
            raise error
        if message is None:
            raise SourceUnavailable(f"{service.name} does not answer within {REQUEST_SECONDS:g} s")
        if problem := message.error():
            if problem.code() == KafkaError._PARTITION_EOF:
                return
            if problem.code() in _WITHOUT_A_GROUP:
                continue
            raise service.translate(problem)
        found = _record(message)
        if found.offset < high and message.value() is not None:
            yield found
        if found.offset >= high - 1:
            return


def _record(message: Message) -> Record:
    kind, milliseconds = message.timestamp()
    seconds = 0.0 if kind == TIMESTAMP_NOT_AVAILABLE else milliseconds / 1000
    headers = {name: of or b"" for name, of in cast(list[tuple[str, bytes | None]], message.headers() or [])}
    return Record(_PARTITION(message), _OFFSET(message), seconds, message.key(), message.value() or b"", headers)
