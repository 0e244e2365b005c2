"""What librdkafka does of pauses, as tests/stream/kafka/model.py has it."""

from contextlib import closing

from confluent_kafka import Consumer, TopicPartition

from streamtrain.embedded.kafka import Broker
from tests.patience import until
from tests.stream.kinds import Place, fill


def test_librdkafka_keeps_a_pause_where_a_partition_goes_and_comes_back(kafka: Broker) -> None:
    place = Place("kafka", kafka.servers)
    fill(place.make(2), {0: 5, 1: 5})
    at = [TopicPartition(place.topic, one, 0) for one in (0, 1)]
    got: list[int] = []

    def take(consumer: Consumer) -> None:
        got.extend(one.partition() for one in consumer.consume(10, 0.1) if one.error() is None)  # type: ignore[misc]

    with closing(Consumer({"bootstrap.servers": kafka.servers, "group.id": place.topic})) as consumer:
        consumer.incremental_assign(at)
        until(lambda: sorted(got) == [0] * 5 + [1] * 5, doing=lambda: take(consumer))
        consumer.pause(at)
        take(consumer)
        consumer.incremental_unassign(at)
        take(consumer)
        consumer.incremental_assign(at)
        for _ in range(10):
            take(consumer)
        assert len(got) == 10
        consumer.resume(at[:1])
        until(lambda: got[10:] == [0] * 5, doing=lambda: take(consumer))
        consumer.incremental_unassign(at)
        take(consumer)
        consumer.resume(at)  # of what is not assigned, too
        consumer.incremental_assign(at)
        until(lambda: len(got) == 25, doing=lambda: take(consumer))
