"""A model of librdkafka's consumer and producer, for state machines: what it keeps, forgets and calls back.

What it says of pauses holds for the real one, too (tests/stream/kafka/test_pauses.py): a partition that was paused
stays so when it is taken away and comes back.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from confluent_kafka import KafkaError, Message, TopicPartition

Place = tuple[str, int]


def _message(place: Place, offset: int, value: bytes = b"", code: int | None = None) -> Message:
    """A message, an error, or the end of a partition."""
    error = None if code is None else KafkaError(code)
    return Message(topic=place[0], partition=place[1], offset=offset, value=value, error=error, timestamp=(1, -1))


class ModelKafka:
    """The logs of topics, and committed offsets with their metadata.

    Attributes:
        logs: values by topic and partition; an offset is an index.
        low: first offset that is not deleted.
        committed: offset and metadata.
        consumers: all that were made.
    """

    def __init__(self) -> None:
        self.name = "Kafka in a model"
        self.logs: dict[Place, list[bytes]] = defaultdict(list)
        self.low: dict[Place, int] = defaultdict(int)
        self.committed: dict[Place, tuple[int, str]] = {}
        self.consumers: list[ModelConsumer] = []

    def monitor(self, refused: Callable[[Any], object]) -> "ModelMonitor":
        return ModelMonitor()

    def create_client(self, kind: Any, monitor: Any, *_: object) -> Any:
        if kind.__name__ == "Producer":
            return ModelProducer(self)
        self.consumers.append(ModelConsumer(self))
        return self.consumers[-1]

    def refusal(self, error: KafkaError) -> None:
        return None

    def option(self, name: str, default: Any) -> Any:
        return default


class ModelMonitor:
    """Kafka is always there."""

    last_failure = float("-inf")

    def probe(self, *_: object) -> float:
        return 0.0

    def close(self) -> None:
        pass


class ModelConsumer:
    """A consumer: rebalances that the test asks for come within the next call of consume, as they do in truth."""

    def __init__(self, kafka: ModelKafka) -> None:
        self._kafka = kafka
        self._at: dict[Place, int] = {}  # of the assignment
        self._paused: set[Place] = set()  # also of what is not assigned any more
        self._ended: dict[Place, int] = {}
        self._callbacks: dict[str, Callable[..., None]] = {}
        self._due: list[tuple[str, list[Place]]] = []
        self._in_callback = False
        self._has_assigned = False
        self.is_closed = False

    def subscribe(self, topics: Sequence[str], **callbacks: Callable[..., None]) -> None:
        self._callbacks = callbacks

    # What the test asks for.

    def rebalance(self, kind: str, places: Iterable[Place]) -> None:
        """kind: assign, revoke or lost."""
        self._due.append((kind, sorted(places)))

    # What the client is.

    def list_topics(self, *_: object, **__: object) -> None:
        pass

    def assignment(self) -> list[TopicPartition]:
        return _partitions(self._at)

    def assign(self, given: Sequence[TopicPartition]) -> None:
        self._at = {}
        self.incremental_assign(given)

    def incremental_assign(self, given: Sequence[TopicPartition]) -> None:
        self._has_assigned = True
        for one in given:
            assert one.offset >= 0
            self._at[one.topic, one.partition] = one.offset
            self._ended.pop((one.topic, one.partition), None)

    def incremental_unassign(self, given: Sequence[TopicPartition]) -> None:
        self._has_assigned = True
        for one in given:
            del self._at[one.topic, one.partition]

    def pause(self, given: Sequence[TopicPartition]) -> None:
        self._paused |= {(one.topic, one.partition) for one in given if (one.topic, one.partition) in self._kafka.logs}

    def resume(self, given: Sequence[TopicPartition]) -> None:
        self._paused -= {(one.topic, one.partition) for one in given}

    def commit(self, offsets: Sequence[TopicPartition], asynchronous: bool) -> None:
        self._kafka.committed |= {(one.topic, one.partition): (one.offset, one.metadata or "") for one in offsets}

    def committed(self, given: Sequence[TopicPartition], timeout: float) -> list[TopicPartition]:
        found = []
        for one in given:
            offset, metadata = self._kafka.committed.get((one.topic, one.partition), (-1001, ""))
            found.append(TopicPartition(one.topic, one.partition, offset, metadata))
        return found

    def memberid(self) -> str:
        return "member"

    def consumer_group_metadata(self) -> object:
        return object()

    def get_watermark_offsets(self, of: TopicPartition, timeout: float = 0.0, cached: bool = False) -> tuple[int, int]:
        place = (of.topic, of.partition)
        return self._kafka.low[place], len(self._kafka.logs[place])

    def consume(self, count: int, seconds: float) -> list[Message]:
        while self._due:
            self._call_back(*self._due.pop(0))
        found: list[Message] = []
        for place in list(self._at):
            if place in self._paused or len(found) >= count:
                continue
            found += self._consume(place, count - len(found))
            self._at[place] = self._at.pop(place)  # to the end of the queue
        return found

    def _consume(self, place: Place, most: int) -> list[Message]:
        at, log, low = self._at[place], self._kafka.logs[place], self._kafka.low[place]
        if not low <= at <= len(log):
            if self._ended.get(place) == at:
                return []
            self._ended[place] = at
            return [_message(place, at, code=KafkaError._AUTO_OFFSET_RESET)]
        taken = [_message(place, offset, log[offset]) for offset in range(at, min(len(log), at + most))]
        self._at[place] += len(taken)
        if self._at[place] == len(log) and self._ended.get(place) != len(log) and len(taken) < most:
            self._ended[place] = len(log)
            taken.append(_message(place, len(log), code=KafkaError._PARTITION_EOF))
        return taken

    def _call_back(self, kind: str, places: list[Place]) -> None:
        if kind != "assign":
            places = [one for one in places if one in self._at]
        given = _partitions(places)
        self._has_assigned = False
        self._callbacks[f"on_{kind}"](self, given)
        if not self._has_assigned:  # confluent-kafka does it where a callback does not
            self._at = {} if kind != "assign" else dict.fromkeys(places, 0)

    def had(self, topic: str, partition: int) -> bool:
        """Whether it had a partition when it was closed."""
        return (topic, partition) in self._at

    def close(self) -> None:
        self.is_closed = True


class ModelProducer:
    """A producer whose transactions succeed at once."""

    def __init__(self, kafka: ModelKafka) -> None:
        self._kafka = kafka
        self._offsets: list[TopicPartition] = []
        self._values: list[tuple[Place, bytes]] = []
        self._reports: list[Callable[..., None]] = []

    def init_transactions(self, _: float) -> None:
        pass

    def begin_transaction(self) -> None:
        self._values.clear()

    def produce(self, topic: str, value: bytes, key: bytes, partition: int, **more: Any) -> None:
        self._values.append(((topic, partition), value))

    def flush(self, _: float) -> int:
        return 0

    def send_offsets_to_transaction(self, offsets: Sequence[TopicPartition], *_: object) -> None:
        self._offsets = list(offsets)

    def commit_transaction(self, _: float) -> None:
        for place, value in self._values:
            self._kafka.logs[place].append(value)
        self._kafka.committed |= {(one.topic, one.partition): (one.offset, one.metadata or "") for one in self._offsets}

    def purge(self) -> None:
        pass


def _partitions(places: Iterable[Place]) -> list[TopicPartition]:
    return [TopicPartition(*one) for one in sorted(places)]
