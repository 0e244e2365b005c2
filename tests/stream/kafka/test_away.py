"""Brokers that die, hang or come late under readers and writers."""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition

from streamtrain.embedded.kafka import Broker
from streamtrain.errors import InstanceFenced, SourceUnavailable, WriteFailed
from streamtrain.stream.kafka.stream import KafkaStream
from streamtrain.stream.source import Stream
from tests.patience import PATIENCE, until
from tests.stream.kinds import KAFKA_OPTIONS, Place, fill, message
from tests.stream.members import Member, settle, take_turns

LOGGER = "streamtrain.stream.kafka.stream"


@pytest.fixture
def place(own_kafka: Broker) -> Place:
    return Place("kafka", own_kafka.servers)


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """What was logged for people, up to the reason."""
    records = [one for one in caplog.records if one.name == LOGGER and one.levelno >= logging.INFO]
    return [(one.levelname, one.getMessage().split(": ")[0]) for one in records]


def test_who_is_fenced_after_the_broker_was_away_joins_again_once(
    own_kafka: Broker, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """As the broker may have taken it for two, and here does now and then. If there is another, that one ends."""
    place.make(2)

    def member() -> Member:
        return Member(KafkaStream(place.server, place.topic, KAFKA_OPTIONS, instance="one"))

    with member() as first:
        first.take_until(lambda m: len(m.positions) == 2)
        own_kafka.kill()
        first.take_until(lambda _: "is unreachable" in caplog.text)
        own_kafka.start()
        fill(place.open(), {0: 5, 1: 5})
        first.take_until(lambda m: m.positions == {0: 5, 1: 5})
        caplog.clear()
        of: Any = first.source
        of._monitor.last_failure = time.monotonic()  # whether it was fenced for itself or not
        with member() as second:
            second.take_until(lambda m: len(m.positions) == 2)
            first.take_until(lambda m: "rejoining the group" in caplog.text and len(m.positions) == 2)
            with pytest.raises(InstanceFenced, match="another process has joined as this instance"):
                second.take_until(lambda _: False)
        fill(place.open(), {0: 5, 1: 5})
        first.take_until(lambda m: m.positions == {0: 10, 1: 10})


def test_a_reader_and_a_writer_go_on_when_the_broker_comes_back(
    own_kafka: Broker, place: Place, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    away = ("WARNING", f"Kafka at {place.server} is unreachable")
    back = ("INFO", f"Kafka at {place.server} is reachable again")
    stream = place.make(2)
    writer = stream.writer()
    fill(stream, {0: 10, 1: 10})
    with Member(stream) as member:
        member.take_until(lambda m: m.count == 20)
        own_kafka.kill()
        member.take_until(lambda _: away in lines(caplog))
        assert "refused" in caplog.text
        assert stream.unreachable
        for offset in range(10, 15):
            writer.write(message(0, offset), partition=0)
        assert writer.flush(0.1) == 5
        begin = time.monotonic()
        assert member.take(100, 0.5) == {}
        assert time.monotonic() - begin < PATIENCE / 2
        own_kafka.start()
        assert writer.flush(PATIENCE) == 0
        member.take_until(lambda m: m.positions == {0: 15, 1: 10})  # it may have lost and got them meanwhile
        member.take_until(lambda _: lines(caplog)[-1] == back)
        told = lines(caplog)
        # Connections that end for being idle are nothing to tell of.
        quiet = time.monotonic() + 3
        while time.monotonic() < quiet:
            member.take()
        writer.write(message(0, 15), partition=0)
        member.take_until(lambda m: m.positions.get(0) == 16)
    writer.close()
    assert not stream.unreachable
    assert lines(caplog) == told == [away, back] * (len(told) // 2)  # on a slow machine it may go once more
    assert capfd.readouterr().err == ""


def test_who_did_not_poll_for_too_long_joins_again(own_kafka: Broker, place: Place) -> None:
    """As a worker whose step takes longer than `max.poll.interval.ms`: others take its partitions meanwhile."""
    fill(place.make(2), {0: 5, 1: 5})
    slow = KafkaStream(place.server, place.topic, KAFKA_OPTIONS | {"max.poll.interval.ms": 6000})
    with Member(slow) as first, Member(place.open()) as other:
        settle(2, first, other)
        other.take_until(lambda m: len(m.positions) == 2)  # nobody polls the first one
        settle(2, first, other)
        assert "lost" in [event for event, _ in first.events]
        fill(slow, {0: 5, 1: 5})
        take_turns(lambda: first.positions | other.positions == {0: 10, 1: 10}, first, other)


def test_a_reader_goes_on_when_the_broker_hung(own_kafka: Broker, place: Place) -> None:
    stream = place.make(1)
    fill(stream, {0: 10})
    with Member(stream) as member:
        member.take_until(lambda m: m.count == 10)
        own_kafka.pause()
        begin = time.monotonic()
        for _ in range(10):
            assert member.take(100, 0.1) == {}
        assert time.monotonic() - begin < PATIENCE / 2
        own_kafka.resume()
        fill(stream, {0: 10})
        member.take_until(lambda m: m.count == 20)


@pytest.fixture
def uncaptured(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """What librdkafka says when it aborts the process is seen."""
    with capfd.disabled():
        yield


@pytest.mark.usefixtures("uncaptured")
def test_close_does_not_wait_for_a_broker_that_is_away(own_kafka: Broker, place: Place) -> None:
    stream = place.make(1)
    member = Member(stream)
    settle(1, member)
    writer = stream.writer()
    own_kafka.kill()
    writer.write(b"lost", partition=0)
    begin = time.monotonic()
    writer.close()
    member.source.close()
    assert time.monotonic() - begin < PATIENCE / 2
    own_kafka.start()
    until(lambda: is_answered(stream))
    assert stream.bounds()[0].high == 0


@pytest.mark.usefixtures("uncaptured")
def test_members_can_be_asked_for_while_the_broker_is_away(
    own_kafka: Broker, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Librdkafka aborts the process when a coordinator comes back after a request to it has timed out."""
    stream = place.make(1)
    assert stream.members("group") == 0
    own_kafka.kill()
    with monkeypatch.context() as impatient:
        for module in ("client", "stream"):
            impatient.setattr(f"streamtrain.stream.kafka.{module}.REQUEST_SECONDS", 1.0)
        for _ in range(2):
            with pytest.raises(SourceUnavailable, match="does not answer within 1 s"):
                stream.members("group")
    own_kafka.start()
    until(lambda: is_answered(stream))
    asked = time.monotonic()
    while time.monotonic() < asked + 5:  # in which every client has connected again
        assert stream.members("group") == 0


def is_answered(stream: Stream) -> bool:
    """Whether a broker that has just started answers: a busy machine takes it long."""
    try:
        stream.bounds()
    except SourceUnavailable:
        return False
    return True


class Hanging:
    """A consumer that librdkafka does not let go."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        pass

    def commit(self, **_: Any) -> None:
        pass

    def close(self) -> None:
        self.released.wait()


def test_close_ends_where_librdkafka_hangs(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("streamtrain.stream.kafka.source._LEAVING_SECONDS", 0.1)
    stream = place.make(1)
    member = Member(stream)
    settle(1, member)
    source: Any = member.source
    hanging, consumer = Hanging(), source._consumer
    source._consumer = hanging
    source.close()
    (told,) = (text for _, text in lines(caplog) if text.startswith("did not leave the group"))
    assert told.startswith(f"did not leave the group of topic {place.topic} of Kafka at {place.server}")
    hanging.released.set()
    source._consumer = consumer
    consumer.close()


def test_what_cannot_be_written_in_time_is_told(own_kafka: Broker, place: Place) -> None:
    place.make(1)
    stream = KafkaStream(place.server, place.topic, KAFKA_OPTIONS | {"message.timeout.ms": 1000})
    writer = stream.writer()
    own_kafka.pause()
    writer.write(b"late", partition=0)
    with pytest.raises(WriteFailed, match=r"cannot write to topic .*timed out"):
        writer.flush(PATIENCE)
    own_kafka.resume()

    def write() -> None:
        writer.write(b"in time", partition=0)
        with suppress(WriteFailed):
            assert writer.flush(PATIENCE) == 0

    until(lambda: stream.bounds()[0].high, doing=write)  # a broker that just woke may need more than a second
    writer.close()


class Stuck:
    """A producer whose thread stays in librdkafka, as if the clock had been set back by a day."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self.waits, self.end = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def poll(self, seconds: float) -> int:
        if seconds:
            self.waits.set()
            self.end.wait()
        return self._producer.poll(seconds)


def test_closing_does_not_wait_for_the_wall_clock(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.make(1)
    stream = KafkaStream(place.server, place.topic, KAFKA_OPTIONS)
    writer = stream.writer(place.topic)
    stuck, thread = Stuck(writer._producer), writer._thread
    monkeypatch.setattr("streamtrain.stream.kafka.writer.CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(writer, "_producer", stuck)
    try:
        assert stuck.waits.wait(PATIENCE)
        writer.close()
        assert thread.is_alive()
    finally:
        stuck.end.set()
        thread.join()
