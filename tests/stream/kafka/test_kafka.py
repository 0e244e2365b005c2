"""What is Kafka's own: options, compression, headers, retention, credentials, topics made again, brokers that go."""

import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourceType,
)

from streamtrain.embedded.kafka import Broker
from streamtrain.errors import ConfigError, TopicMissing, WriteFailed
from streamtrain.stream.kafka.client import Option
from streamtrain.stream.kafka.stream import KafkaStream
from tests.cluster.counted import messages_of
from tests.patience import PATIENCE, until
from tests.stream.kinds import KAFKA_OPTIONS, Place, fill, message
from tests.stream.members import Member, settle
from tests.stream.servers import as_user
from tests.train.test_loop import Running, counted


@pytest.fixture
def place(kafka: Broker) -> Place:
    return Place("kafka", kafka.servers)


def test_no_question_waits_for_a_connection(place: Place) -> None:
    """What a client is asked before it is connected, librdkafka sends only one or three seconds later, at times."""
    stream = place.make(1)
    took = []
    for _ in range(50):
        began = time.monotonic()
        stream.bounds()
        took.append(time.monotonic() - began)
    assert sorted(took)[-3] < 0.9  # a machine that is busy may hold up one or two


def test_a_topic_that_another_has_just_created_is_waited_for(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller knows of it, the broker that is asked does not yet."""
    place.make(2)
    describe, asked = AdminClient.describe_topics, []

    def describe_late(admin: AdminClient, topics: Any, **options: Any) -> Any:
        asked.append(topics)
        if len(asked) > 2:
            return describe(admin, topics, **options)
        unknown: Future[Any] = Future()
        unknown.set_exception(KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)))
        return {place.topic: unknown}

    monkeypatch.setattr(AdminClient, "describe_topics", describe_late)
    stream = place.open()
    stream.create(2)
    assert len(stream.bounds()) == 2


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_compressed_messages_are_read(place: Place, compression: str) -> None:
    place.make(1)
    stream = KafkaStream(place.server, place.topic, {"compression.type": compression, "linger.ms": 50})
    fill(stream, {0: 500})
    with Member(stream) as member:
        member.take_until(lambda m: m.count == 500, most=70)
        assert member.got[0] == [(i, message(0, i)) for i in range(500)]


def test_a_tombstone_has_no_value(place: Place) -> None:
    stream = place.make(1)
    producer = Producer({"bootstrap.servers": place.server})
    for value in (b"a", None, b"", b"b", None):
        producer.produce(place.topic, value, b"key", 0)
    assert producer.flush(120) == 0
    with Member(stream) as member:
        member.take_until(lambda m: m.positions == {0: 5})
        assert member.got[0] == [(0, b"a"), (2, b""), (3, b"b")]
    assert [(one.offset, one.value) for one in stream.records(stream.bounds())] == [(0, b"a"), (2, b""), (3, b"b")]


def test_tombstones_are_skipped_and_counted(place: Place) -> None:
    stream = place.make(1)
    producer = Producer({"bootstrap.servers": place.server})
    for one in messages_of(0, 10):
        for value in (None, one, None):
            producer.produce(place.topic, value, b"key", 0)
    assert producer.flush(120) == 0
    with counted(1) as where:
        running = Running(where, stream)
        until(lambda: where.held[0].clock() == {0: 30})
        assert running.stop().failure is None
        assert running.value("streamtrain_worker_tombstones_total") == 20
        assert running.value("streamtrain_worker_samples_total") == 10


class Rewinder(Member):
    """Goes back to the start of all that it keeps when something is taken away, as a loop does."""

    def revoked(self, partitions: Sequence[int]) -> None:
        super().revoked(partitions)
        for partition in set(self.positions) - {*partitions}:
            self.source.seek(partition, 0)


def test_what_a_poll_holds_is_dropped_when_the_listener_goes_back(place: Place) -> None:
    """A poll that waits for more has messages already when partitions are taken away, and others are sought."""
    stream = place.make(2)
    fill(stream, {0: 20, 1: 20})
    with Rewinder(stream) as first:
        first.take_until(lambda m: len(m.positions) == 2)

        def wait_with_messages() -> None:
            for partition in first.positions:
                first.source.seek(partition, 0)
            first.take(1, PATIENCE)  # the others are here by then
            first.take(1000, 1.0, least=1000)  # asserts that offsets ascend

        with Member(stream) as second:
            joining = threading.Thread(target=second.take_until, args=(lambda m: len(m.positions) == 1,))
            joining.start()
            until(lambda: len(first.positions) == 1, doing=wait_with_messages)
            joining.join()
            (kept,) = first.positions
            assert ("revoked", [1 - kept]) in first.events
            first.take_until(lambda m: m.positions[kept] == 20)
            assert first.offsets(kept)[-20:] == list(range(20))


def test_gaps_of_transactions_are_passed(place: Place) -> None:
    """Offsets of markers, and of messages that were taken back."""
    stream = place.make(1)
    producer = Producer({"bootstrap.servers": place.server, "transactional.id": place.topic})
    producer.init_transactions(20)
    for value, end in ((b"a", producer.commit_transaction), (b"b", producer.abort_transaction)) * 2:
        producer.begin_transaction()
        producer.produce(place.topic, value, partition=0)
        producer.flush(120)
        end(20)
    with Member(stream) as member:
        member.take_until(lambda m: m.count == 2)
        assert member.got[0] == [(0, b"a"), (4, b"a")]
        member.source.seek(0, 3)
        member.take_until(lambda m: m.count == 3)
        assert member.got[0][2] == (4, b"a")
        assert member.gone == []


def test_lag_is_zero_behind_the_marker_of_a_transaction(place: Place) -> None:
    stream = place.make(2)
    producer = Producer({"bootstrap.servers": place.server, "transactional.id": place.topic})
    producer.init_transactions(20)
    with Member(stream) as member:
        for count in (1, 2):
            producer.begin_transaction()
            producer.produce(place.topic, b"a", partition=0)
            producer.commit_transaction(20)
            member.take_until(lambda m, count=count: m.count == count and not any(m.source.lag().values()))  # type: ignore[misc]
            assert member.source.positions()[0] == stream.bounds()[0].high == 2 * count
        assert member.gone == []


def test_what_is_learned_reaches_the_end_behind_markers(place: Place) -> None:
    """The clock of a shard is the offset after the marker, so that whoever compares it with the end sees no lag."""
    stream = place.make(1)
    producer = Producer({"bootstrap.servers": place.server, "transactional.id": place.topic})
    producer.init_transactions(20)
    producer.begin_transaction()
    for one in messages_of(0, 10):
        producer.produce(place.topic, one, partition=0)
    producer.commit_transaction(20)
    with counted(1) as where:
        running = Running(where, stream)
        until(lambda: where.held[0].clock() == {0: 11})
        assert running.stop().failure is None
    assert stream.committed("workers") == {0: 11}


def test_keys_and_headers_are_written(place: Place) -> None:
    stream = place.make(2)
    writer = stream.writer()
    writer.write(b"value", partition=1, key=b"key", headers={"why": b"no reason", "empty": b""})
    assert writer.flush(120) == 0
    writer.close()
    consumer = Consumer({"bootstrap.servers": place.server, "group.id": "plain"})
    consumer.assign([TopicPartition(place.topic, 1, 0)])
    read = consumer.poll(20)
    assert read is not None
    assert (read.key(), read.headers()) == (b"key", [("why", b"no reason"), ("empty", b"")])
    consumer.close()


def test_write_waits_while_the_queue_is_full(place: Place) -> None:
    place.make(1)
    stream = KafkaStream(place.server, place.topic, {"queue.buffering.max.messages": 10, "linger.ms": 0})
    fill(stream, {0: 500})
    assert stream.bounds()[0].high == 500


def test_a_message_that_is_too_large_is_told(place: Place) -> None:
    writer = place.make(1).writer()
    with pytest.raises(WriteFailed, match="too large"):
        writer.write(b"x" * 2_000_000, partition=0)
    writer.write(b"x", partition=0)
    assert writer.flush(120) == 0
    writer.close()
    with pytest.raises(WriteFailed, match="closed"):
        writer.write(b"x", partition=0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"fetch.wait.maximum": 5}, "option fetch.wait.maximum of .*No such configuration property"),
        ({"linger.ms": -4}, "option linger.ms of .*outside allowed range"),
        ({"compression.type": "zip"}, "option compression.type of .*zip"),
        ({"check.crcs": "perhaps"}, "option check.crcs of .*true or false"),
        ({"security.protocol": "ssl", "ssl.ca.location": "/none"}, "option ssl.ca.location of"),
        (as_user("ann") | {"sasl.username": ""}, "option sasl.username of"),
        ({"group.id": "mine"}, "option group.id of .*cannot be set"),
        ({"error_cb": "print"}, "option error_cb of .*cannot be set"),
        ({"security.protocol": "ssl", "ssl.key.pem": "hush-hush"}, "option ssl.key.pem of"),
    ],
)
def test_a_bad_option_is_named(options: Mapping[str, Option], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as told:
        KafkaStream("localhost:1", "topic", options)
    assert "hush-hush" not in str(told.value)
    assert "anns-secret" not in str(told.value)


def test_options_of_every_type_pass_through(place: Place) -> None:
    place.make(1)
    options: dict[str, Option] = {
        "check.crcs": True,
        "enable.metrics.push": False,
        "fetch.error.backoff.ms": 100,
        "client.rack": "a",
    }
    fill(KafkaStream(place.server, place.topic, options), {0: 1})


def test_new_partitions_are_read(place: Place) -> None:
    place.make(1)
    stream = KafkaStream(place.server, place.topic, KAFKA_OPTIONS | {"topic.metadata.refresh.interval.ms": 200})
    with Member(stream) as member:
        settle(1, member)
        admin = AdminClient({"bootstrap.servers": place.server})
        admin.create_partitions([NewPartitions(place.topic, 3)])[place.topic].result(120)
        settle(3, member)
        fill(stream, {2: 5})
        member.take_until(lambda m: m.count == 5)


def test_a_topic_that_is_made_again_has_other_messages(place: Place) -> None:
    """It is missing first; then positions are beyond its end, until they are sought."""
    stream = place.make(2)
    fill(stream, {0: 50, 1: 50})
    admin = AdminClient({"bootstrap.servers": place.server})
    again = KafkaStream(place.server, place.topic, KAFKA_OPTIONS | {"topic.metadata.refresh.interval.ms": 200})
    with Member(again, begin={0: 50, 1: 50}) as member:
        settle(2, member)
        admin.delete_topics([place.topic])[place.topic].result(120)
        with pytest.raises(TopicMissing, match="create it"):
            member.take_until(lambda m: False)
        stream.create(2)
        fill(stream, {0: 10, 1: 10})

        def take() -> None:
            with suppress(TopicMissing):
                member.take()

        until(lambda: {one.partition for one in member.gone} == {0, 1}, doing=take)
        assert {(one.wanted, one.low, one.high) for one in member.gone} == {(50, 0, 10)}
        for partition in (0, 1):
            member.source.seek(partition, 0)
        member.take_until(lambda m: m.count == 20)


def test_retention_is_told_under_a_reader(place: Place) -> None:
    """The broker itself deletes; what was not read by then is gone."""
    topic = NewTopic(place.topic, 1, 1, config={"segment.ms": "500", "retention.ms": "-1"})
    admin = AdminClient({"bootstrap.servers": place.server})
    admin.create_topics([topic])[place.topic].result(120)
    stream = place.open()
    fill(stream, {0: 10})
    with Member(stream) as member:
        member.take_until(lambda m: m.count == 10, most=5)
        member.source.pause()
        member.source.seek(0, 4)
        retain(admin, place.topic, 500)

        def write() -> None:
            fill(stream, {0: 1})  # which begins another segment once the last is old enough
            member.take()

        until(lambda: stream.bounds()[0].low >= 10, doing=write)
        member.source.resume()
        member.take_until(lambda m: m.gone)
        assert member.gone[0].wanted == 4
        assert member.gone[0].low >= 10
        retain(admin, place.topic, -1)
        fill(stream, {0: 2})
        high = stream.bounds()[0].high
        member.source.seek(0, high - 1)
        member.take_until(lambda m: m.positions[0] == high)


def retain(admin: AdminClient, topic: str, milliseconds: int) -> None:
    entry = ConfigEntry("retention.ms", str(milliseconds), incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    for changed in admin.incremental_alter_configs([resource]).values():
        changed.result(120)


def test_a_source_that_nobody_closed_goes(place: Place) -> None:
    """With its process, and with a rebalance under way."""
    place.make(2)
    program = f"""
import gc
from tests.stream.kinds import KINDS
from tests.stream.members import Member, settle
stream = KINDS["kafka"].open({place.server!r}, {place.topic!r})
for _ in range(3):
    stays, leaves = Member(stream), Member(stream)
    settle(2, stays, leaves)
    leaves.source.close()
    del stays, leaves
    gc.collect()
kept = Member(stream)
settle(2, kept)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=2 * PATIENCE)
