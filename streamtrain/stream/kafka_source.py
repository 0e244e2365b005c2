"""One member of a group that reads a topic of Kafka."""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import cast

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from streamtrain.errors import OffsetGone
from streamtrain.stream.kafka_service import Option, Service
from streamtrain.stream.source import Fetched, Listener

DEFAULTS: dict[str, Option] = {
    "queued.max.messages.kbytes": 16384,
    # What is sought or resumed waits until the fetch is over that is under way.
    "fetch.wait.max.ms": 100,
    # librdkafka waits so long with the next fetch when that much is queued: its own second would leave readers idle.
    "fetch.queue.backoff.ms": 20,
}
_SECONDS_OF_LOOK = 0.2
_SECONDS_OF_BOUNDS = 5.0
# Messages without an error have all of these.
_PARTITION = cast(Callable[[Message], int], Message.partition)
_OFFSET = cast(Callable[[Message], int], Message.offset)
_VALUE = cast(Callable[[Message], bytes], Message.value)  # but tombstones, which have None
_GONE = {KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE}

logger = logging.getLogger("streamtrain.stream.kafka")


class KafkaSource:
    """See Source.

    Args:
        service: whose topic it is.
        topic: its name.
        group: the group's.
        listener: is told which partitions the member has.
        client: name of the member's client.
        check: raises SourceRefused while the group has members that it must not have.
    """

    def __init__(
        self, service: Service, topic: str, group: str, listener: Listener, *, client: str, check: Callable[[], None]
    ) -> None:
        self._service = service
        self._topic = topic
        self._check = check
        self._listener = listener
        self._positions: dict[int, int] = {}
        self._paused: set[int] = set()
        self._waiting: set[int] = set()  # given by the group, but not taken over: that failed, and is tried again
        self._errors: deque[Exception] = deque()
        self._among_its_own = False
        self._closed = True  # until there is something to close
        self._link = service.link(self._errors.append)
        self._consumer: Consumer = service.make(
            Consumer,
            self._link,
            {
                "group.id": group,
                "client.id": client,
                "partition.assignment.strategy": "cooperative-sticky",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "error",
                "on_commit": self._on_commit,
            },
            DEFAULTS,
        )
        self._closed = False
        self._consumer.subscribe([topic], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost)

    def poll(self, most: int, seconds: float) -> list[Fetched]:
        """See Source."""
        if self._waiting:
            self._take_over(sorted(self._waiting))
        self._raise_error()
        fetched = self._sort(self._consume(most, seconds))
        if not fetched:
            self._raise_error()
        return fetched  # an error that came with messages waits for the next call

    def _raise_error(self) -> None:
        while self._errors:
            error = self._errors.popleft()
            # Somebody may have sought on since, or have taken the partition.
            if not isinstance(error, OffsetGone) or self._positions.get(error.partition) == error.wanted:
                raise error

    def _consume(self, most: int, seconds: float) -> list[Message]:
        """What is there, or else the first that comes."""
        consumer = self._consumer
        look = max(0.01, min(0.2 * seconds, _SECONDS_OF_LOOK))
        seconds = max(0.0, seconds - self._link.look(consumer, self._topic, look))
        messages = consumer.consume(most, 0)
        if not messages and seconds > 0:
            messages = consumer.consume(1, seconds)
            if messages and most > 1:
                messages += consumer.consume(most - 1, 0)
        return messages

    def _sort(self, messages: list[Message]) -> list[Fetched]:
        """By partition; what is an error is noted. Nearly nothing is done for every message by itself."""
        if any(map(Message.error, messages)):
            for message in messages:
                if error := message.error():
                    self._note(error, message.partition())
            messages = [message for message in messages if not message.error()]
        fetched: dict[int, Fetched] = {}
        for partition, run in groupby(messages, _PARTITION):
            if partition not in self._positions:
                continue  # it was read for this member before it went to another
            of_run = list(run)
            into = fetched.setdefault(partition, Fetched(partition, [], []))
            into.offsets.extend(map(_OFFSET, of_run))
            values = list(map(_VALUE, of_run))
            into.values.extend(values if all(values) else [value or b"" for value in values])
        for partition, (_, offsets, _) in fetched.items():
            self._positions[partition] = offsets[-1] + 1
        return list(fetched.values())

    def _note(self, error: KafkaError, partition: int | None) -> None:
        if error.code() in _GONE and partition in self._positions:
            self._note_gone(partition)
        elif refusal := self._service.refusal(error):
            self._errors.append(refusal)
        else:
            logger.warning("topic %s of %s: %s", self._topic, self._service.name, error.str())

    def _note_gone(self, partition: int) -> None:
        at = TopicPartition(self._topic, partition)
        try:
            low, high = self._consumer.get_watermark_offsets(at, timeout=_SECONDS_OF_BOUNDS)
        except KafkaException:
            self._start(
                self._at(partition, self._positions[partition])
            )  # the broker went away meanwhile: it will say so again
        else:
            self._errors.append(OffsetGone(partition, self._positions[partition], low, high))

    def _on_commit(self, error: KafkaError | None, partitions: Sequence[TopicPartition]) -> None:
        for failed in filter(None, [error, *(one.error for one in partitions)]):
            logger.warning("positions in topic %s of %s are not committed: %s", self._topic, self._service.name, failed)
            return

    def _on_assign(self, _: Consumer, given: Sequence[TopicPartition]) -> None:
        if self._closed:
            self._consumer.incremental_assign([])
            return
        try:
            self._take_over([one.partition for one in given])
        except Exception as exc:  # of the listener, which is to come out of `poll`, not of librdkafka
            self._errors.append(exc)
            self._consumer.incremental_assign([])

    def _take_over(self, partitions: Sequence[int]) -> None:
        self._waiting.update(partitions)
        if not self._among_its_own:
            self._check()
            self._among_its_own = True
        positions = self._listener.assigned(partitions) if partitions else {}
        self._consumer.incremental_assign([self._at(one, positions[one]) for one in partitions])
        self._positions |= {one: positions[one] for one in partitions}
        self._waiting.difference_update(partitions)

    def _on_revoke(self, _: Consumer, given: Sequence[TopicPartition]) -> None:
        self._give_up(given, self._listener.revoked)

    def _on_lost(self, _: Consumer, given: Sequence[TopicPartition]) -> None:
        self._among_its_own = False  # others may have come since
        self._give_up(given, self._listener.lost)

    def _give_up(self, given: Sequence[TopicPartition], tell: Callable[[Sequence[int]], None]) -> None:
        partitions = {one.partition for one in given}
        self._waiting -= partitions
        self._tell(sorted(partitions & self._positions.keys()), tell)
        # librdkafka refuses to unassign what was not taken over.
        self._consumer.incremental_unassign([one for one in self._consumer.assignment() if one.partition in partitions])

    def _tell(self, partitions: Sequence[int], tell: Callable[[Sequence[int]], None]) -> None:
        """Tells the listener which partitions go, and forgets them."""
        if partitions:
            try:
                tell(partitions)
            except Exception as exc:  # see above
                self._errors.append(exc)
            self.resume(partitions)  # librdkafka would go on with a pause where a partition comes back
            for one in partitions:
                del self._positions[one]

    def _at(self, partition: int, offset: int) -> TopicPartition:
        if offset < 0:  # which has meanings of its own in librdkafka
            raise ValueError(f"offset {offset} of partition {partition} is negative")
        return TopicPartition(self._topic, partition, offset)

    def seek(self, partition: int, offset: int) -> None:
        """See Source."""
        if partition not in self._positions:
            raise ValueError(f"partition {partition} is not this member's")
        at = self._at(partition, offset)
        self._positions[partition] = offset
        self._start(at)

    def _start(self, at: TopicPartition) -> None:
        """Fetches from there. librdkafka's own seek wants a partition that is being fetched of, without an error."""
        self._consumer.incremental_unassign([at])
        self._consumer.incremental_assign([at])
        if at.partition in self._paused:
            self._consumer.pause([at])

    def pause(self, partitions: Sequence[int]) -> None:
        """See Source."""
        self._paused.update(partitions)
        self._consumer.pause([TopicPartition(self._topic, one) for one in partitions])

    def resume(self, partitions: Sequence[int]) -> None:
        """See Source."""
        self._paused.difference_update(partitions)
        self._consumer.resume([TopicPartition(self._topic, one) for one in partitions])

    def positions(self) -> dict[int, int]:
        """See Source."""
        return dict(self._positions)

    def commit(self, positions: Mapping[int, int]) -> None:
        """See Source."""
        if positions:
            try:
                self._consumer.commit(offsets=[self._at(*one) for one in positions.items()], asynchronous=True)
            except KafkaException as exc:
                self._on_commit(exc.args[0], [])

    def lag(self) -> dict[int, int]:
        """See Source. Where nothing was fetched yet Kafka is asked; 0 where it is away."""
        return {partition: max(0, self._end(partition) - at) for partition, at in self._positions.items()}

    def _end(self, partition: int) -> int:
        at = TopicPartition(self._topic, partition)
        high: int = self._consumer.get_watermark_offsets(at, cached=True)[1]
        if high < 0:
            try:
                high = self._consumer.get_watermark_offsets(at, timeout=_SECONDS_OF_BOUNDS)[1]
            except KafkaException:
                return 0
        return high

    def finished(self) -> bool:
        """See Source."""
        return False

    def close(self) -> None:
        """See Source."""
        if self._closed:
            return
        self._closed = True
        self._errors.clear()
        # Before librdkafka leaves: that loses what is committed late, where an assignment waits to be taken over.
        self._tell(sorted(self._positions), self._listener.revoked)
        self._consumer.close()
        self._link.close()
        self._raise_error()

    def __del__(self) -> None:
        """Leaves the group in silence: librdkafka would hang if it went with a rebalance under way."""
        if not self._closed:
            self._closed = True
            self._positions.clear()
            self._consumer.close()
            self._link.close()
