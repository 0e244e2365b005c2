"""Dead letters, on every kind of streams: whatever a message is, its dead letter is written, and tells of it."""

import threading
from collections.abc import Mapping

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from streamtrain.embedded.kafka import Broker
from streamtrain.errors import WriteFailed
from streamtrain.stream.dead_letters import (
    REPLAYED,
    SUFFIX,
    TRUNCATED,
    DeadLetter,
    DeadLetters,
    Replayed,
    StoredLetter,
    read_dead_letters,
    replay_dead_letters,
)
from streamtrain.stream.kafka.stream import KafkaStream
from streamtrain.stream.source import Record, Stream, Writer
from tests.patience import until
from tests.stream.kinds import Place


def records(stream: Stream) -> list[Record]:
    return list(stream.records(stream.bounds()))


def bury(stream: Stream, *letters: DeadLetter) -> None:
    dead = DeadLetters(stream, threading.Event())
    try:
        for letter in letters:
            dead.write(letter)
        dead.flush()
    finally:
        dead.close()


def make(broker: Broker, topic: str, partitions: int, most_bytes: int) -> None:
    settings = {"max.message.bytes": str(most_bytes)}
    admin = AdminClient({"bootstrap.servers": broker.servers})
    admin.create_topics([NewTopic(topic, partitions, 1, config=settings)])[topic].result(120)


def test_a_dead_letter_says_where_it_comes_from(place: Place) -> None:
    stream = place.make(2)
    bury(stream, DeadLetter(1, 7, "not_json", "", b"{"), DeadLetter(0, 3, "missing", "user", b"{}"))
    first, second = records(place.open(place.topic + SUFFIX))
    assert (first.partition, first.offset, first.key, first.value) == (0, 0, f"{place.topic}/0/3".encode(), b"{}")
    assert second.headers == {
        "reason": b"not_json",
        "field": b"",
        "topic": place.topic.encode(),
        "partition": b"1",
        "offset": b"7",
        "topic_id": stream.identity().encode(),
    }
    assert second.time > 1_700_000_000


def test_a_topic_that_grows_has_room_for_all_its_dead_letters(place: Place) -> None:
    """The topic of dead letters has as many partitions as the topic had once."""
    place.open(place.topic + SUFFIX).create(2)
    stream = place.make(5)
    bury(stream, *(DeadLetter(partition, 0, "not_json", "", b"%d" % partition) for partition in range(5)))
    found = records(place.open(place.topic + SUFFIX))
    assert {(one.partition, one.headers["partition"]) for one in found} == {
        (0, b"0"), (1, b"1"), (0, b"2"), (1, b"3"), (0, b"4"),
    }  # fmt: skip


@pytest.fixture
def place_of_kafka(kafka: Broker) -> Place:
    return Place("kafka", kafka.servers)


@pytest.mark.parametrize("options", [{}, {"message.max.bytes": 5_000_000}, {"compression.type": "lz4"}])
def test_what_the_topic_takes_its_dead_letters_take(
    kafka: Broker, place_of_kafka: Place, options: dict[str, str | int]
) -> None:
    topic = place_of_kafka.topic
    make(kafka, topic, 1, 5_000_000)
    sizes = [999_950, 1_000_000, 1_048_576, 1_100_000, 4_999_800]
    stream = KafkaStream(kafka.servers, topic, options)
    bury(stream, *(DeadLetter(0, at, "too_large", "", b"x" * size) for at, size in enumerate(sizes)))
    found = records(KafkaStream(kafka.servers, topic + SUFFIX, {}))
    if "message.max.bytes" in options:  # which is too little for the headers of the last one
        assert int(found[-1].headers[TRUNCATED]) == 4_999_800
        assert 4_998_800 < len(found[-1].value) < 4_999_800
        found, sizes = found[:-1], sizes[:-1]
    assert [len(one.value) for one in found] == sizes
    assert all(TRUNCATED not in one.headers for one in found)


def test_what_is_larger_is_cut_and_says_so(kafka: Broker, place_of_kafka: Place) -> None:
    topic = place_of_kafka.topic
    make(kafka, topic, 1, 5_000_000)
    make(kafka, topic + SUFFIX, 1, 20_000)
    value = bytes(range(256)) * 400
    sizes = [*range(19_500, 20_010), 100_000]
    bury(
        KafkaStream(kafka.servers, topic, {"linger.ms": 50}),
        *(DeadLetter(0, at, "not_json", "", value[:size]) for at, size in enumerate(sizes)),
    )
    found = records(KafkaStream(kafka.servers, topic + SUFFIX, {}))
    assert [int(one.headers.get(TRUNCATED, len(one.value))) for one in found] == sizes
    assert all(one.value == value[: len(one.value)] for one in found)
    assert min(len(one.value) for one in found) > 19_000
    assert TRUNCATED in found[-1].headers
    assert TRUNCATED not in found[0].headers


def test_what_waits_in_a_writer_to_redis_bounds_a_dead_letter(valkey: str) -> None:
    place = Place("valkey", valkey)
    stream = place.make(1)
    stream._buffer_bytes = 1000  # type: ignore[attr-defined]
    bury(stream, DeadLetter(0, 0, "too_large", "", b"x" * 5000), DeadLetter(0, 1, "not_json", "", b"x" * 10))
    cut, whole = records(place.open(place.topic + SUFFIX))
    assert cut.headers[TRUNCATED] == b"5000"
    assert 700 < len(cut.value) < 1000
    assert whole.value == b"x" * 10
    assert TRUNCATED not in whole.headers


def test_records_of_a_part_and_of_nothing(place: Place) -> None:
    stream = place.make(2)
    writer = stream.writer()
    for i in range(50):
        writer.write(b"%d" % i, partition=1, key=b"k" if i else None, headers={"n": b"%d" % i})
    assert writer.flush(120) == 0
    writer.close()
    place.delete(1, 10)
    low_high = stream.bounds() | {1: stream.bounds()[1]._replace(low=5, high=40)}
    found = list(stream.records(low_high))
    assert [(one.offset, one.value, one.headers, one.key) for one in found] == [
        (i, b"%d" % i, {"n": b"%d" % i}, b"k") for i in range(10, 40)
    ]


def buried(place: Place) -> Stream:
    return place.open(place.topic + SUFFIX)


def letters(place: Place) -> list[StoredLetter]:
    return list(read_dead_letters(place.open(), buried(place)))


def test_letters_are_found_each_once_and_nothing_else(place: Place) -> None:
    stream = place.make(2)
    assert letters(place) == []
    letter = DeadLetter(1, 5, "wrong_type", "user", b"\0\xff", "ä list, \ud800")
    for _ in range(2):  # as after a crash
        bury(stream, letter, DeadLetter(0, 2, "not_json", "", b""))
    writer = stream.writer(place.topic + SUFFIX)
    writer.write(b"of another topic", headers={"topic": b"x", "partition": b"1", "offset": b"6", "reason": b"late"})
    writer.write(b"no letter", headers={"topic": place.topic.encode(), "partition": b"one"})
    writer.write(b"no headers")
    assert writer.flush(120) == 0
    writer.close()
    found = letters(place)
    assert [(one.letter, one.key, one.truncated_from) for one in found] == [
        (DeadLetter(0, 2, "not_json", "", b""), f"{place.topic}/0/2 {stream.identity()}", None),
        (letter._replace(detail="ä list, ?"), f"{place.topic}/1/5 {stream.identity()}", None),
    ]


class Failing:
    """A writer that fails after some messages, those before being written."""

    def __init__(self, writer: Writer, left: int) -> None:
        self._writer, self._left = writer, left
        self.partitions, self.max_value_bytes, self.close = writer.partitions, writer.max_value_bytes, writer.close

    def write(
        self, value: bytes, *, partition: int | None = None, key: bytes | None = None, headers: Mapping[str, bytes] = {}
    ) -> None:
        self._left -= 1
        if self._left < 0:
            assert self._writer.flush(120) == 0
            raise WriteFailed("gone")
        self._writer.write(value, partition=partition, key=key, headers=headers)

    def flush(self, seconds: float) -> int:
        return self._writer.flush(seconds)


def test_messages_are_put_back_each_once_however_often_that_is_interrupted(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = place.make(3)
    bury(stream, *(DeadLetter(i % 4, i, "not_json", "", b"%d" % i) for i in range(100)))
    write = stream.writer
    for _ in range(3):
        monkeypatch.setattr(stream, "writer", lambda: Failing(write(), 20))
        with pytest.raises(WriteFailed, match="gone"):
            replay_dead_letters(stream, buried(place), lambda: letters(place))
    monkeypatch.setattr(stream, "writer", write)
    told: list[int] = []
    assert replay_dead_letters(stream, buried(place), lambda: letters(place), told.append) == Replayed(40, 60, [])
    assert told == [40]
    assert replay_dead_letters(stream, buried(place), lambda: letters(place)) == Replayed(0, 100, [])
    found = records(stream)
    assert sorted(int(one.value) for one in found) == list(range(100))
    assert {(one.partition, int(one.value) % 4) for one in found} >= {(0, 0), (1, 1), (2, 2)}
    assert all(
        one.headers[REPLAYED] == f"{place.topic}/{int(one.value) % 4}/{int(one.value)} {stream.identity()}".encode()
        for one in found
    )


def test_what_was_put_back_is_remembered_though_the_topic_has_deleted_it(place: Place) -> None:
    stream = place.make(1)
    bury(stream, DeadLetter(0, 5, "not_json", "", b"a"), DeadLetter(0, 6, "late", "", b"b"))
    assert replay_dead_letters(stream, buried(place), lambda: letters(place)[:1]) == Replayed(1, 0, [])
    place.delete(0, stream.bounds()[0].high)
    assert replay_dead_letters(stream, buried(place), lambda: letters(place)) == Replayed(1, 1, [])
    assert [one.value for one in records(stream)] == [b"b"]
    assert len(letters(place)) == 2  # notes are none


@pytest.mark.parametrize("noted", [True, False])
def test_what_was_put_back_behind_an_open_transaction_is_not_put_back_again(kafka: Broker, noted: bool) -> None:
    """Readers see nothing behind it; and a replay that was killed has not noted what it wrote."""
    place = Place("kafka", kafka.servers)
    stream = place.make(1)
    bury(stream, *(DeadLetter(0, i, "not_json", "", b"%d" % i) for i in range(10)))
    producer = Producer({"bootstrap.servers": kafka.servers, "transactional.id": place.topic})
    producer.init_transactions(60)
    producer.begin_transaction()
    producer.produce(place.topic, b"of a transaction", partition=0)
    assert producer.flush(60) == 0
    assert replay_dead_letters(stream, buried(place), lambda: letters(place)) == Replayed(10, 0, [])
    assert records(stream) == []
    if not noted:
        place.kind.remove(kafka.servers, place.topic + SUFFIX)
        bury(stream, *(DeadLetter(0, i, "not_json", "", b"%d" % i) for i in range(10)))
    assert replay_dead_letters(stream, buried(place), lambda: letters(place)) == Replayed(0, 10, [])
    producer.commit_transaction(60)
    until(lambda: len(records(stream)) == 11)


def test_what_is_not_whole_stays_a_dead_letter(valkey: str) -> None:
    place = Place("valkey", valkey)
    stream = place.make(1)
    stream._buffer_bytes = 1000  # type: ignore[attr-defined]
    bury(stream, DeadLetter(0, 4, "too_large", "", b"x" * 5000), DeadLetter(0, 5, "not_json", "", b"x" * 10))
    assert replay_dead_letters(stream, buried(place), lambda: letters(place)) == Replayed(1, 0, [f"{place.topic}/0/4"])
    assert [one.value for one in records(stream)] == [b"x" * 10]


def test_a_message_that_is_refused_again_is_a_letter_of_its_own(place: Place) -> None:
    stream = place.make(1)
    bury(stream, DeadLetter(0, 5, "not_json", "", b"a"))
    replay_dead_letters(stream, buried(place), lambda: letters(place))
    bury(stream, DeadLetter(0, 0, "not_json", "", b"a"))
    assert replay_dead_letters(stream, buried(place), lambda: letters(place)) == Replayed(1, 1, [])


def test_letters_of_a_topic_that_is_created_again_are_others(place: Place) -> None:
    """They have the same offsets as those of the one before, and are replayed all the same."""
    stream = place.make(1)
    dead = place.open(place.topic + SUFFIX)

    def replayed() -> Replayed:
        return replay_dead_letters(stream, dead, lambda: read_dead_letters(stream, dead))

    bury(stream, DeadLetter(0, 3, "not_json", "", b"before"))
    assert replayed() == Replayed(1, 0, [])
    place.remove()
    stream = place.make(1)
    bury(stream, DeadLetter(0, 3, "not_json", "", b"after"))
    assert [stored.letter.value for stored in read_dead_letters(stream, dead)] == [b"before", b"after"]
    assert replayed().replayed == 1
    assert [one.value for one in records(stream)] == [b"after"]
