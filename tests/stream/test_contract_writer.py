"""The contract of streams, on every kind of them: writing, and making topics."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from streamtrain.errors import TopicMissing, WriteFailed
from streamtrain.stream.source import Bounds, Stream
from tests.stream.kinds import Place, fill
from tests.stream.members import Member


def read(stream: Stream, count: int, group: str = "readers") -> Member:
    with Member(stream, group=group) as member:
        member.take_until(lambda m: m.count >= count)
    return member


def test_values_of_every_shape_arrive(place: Place) -> None:
    stream = place.make(1)
    values = [b"one", b"", bytes(range(256)), b"x" * 900_000]
    writer = stream.writer()
    for value in values:
        writer.write(value, partition=0, headers={"why": b"no reason", "empty": b""})
    assert writer.flush(120) == 0
    assert read(stream, len(values)).values(0) == values
    writer.close()


def test_a_key_always_goes_to_one_partition(place: Place) -> None:
    stream = place.make(5)
    for _ in range(2):
        writer = stream.writer()
        for i in range(400):
            writer.write(b"%d" % (i % 40), key=b"key %d" % (i % 40))
        assert writer.flush(120) == 0
        writer.close()
    member = read(stream, 800)
    assert len(member.got) > 1
    of = [set(member.values(partition)) for partition in range(5)]
    assert sum(map(len, of)) == 40


def test_without_a_key_partitions_take_turns(place: Place) -> None:
    stream = place.make(4)
    writer = stream.writer()
    for i in range(40):
        writer.write(b"%d" % i)
    assert writer.flush(120) == 0
    writer.close()
    assert stream.bounds() == dict.fromkeys(range(4), Bounds(0, 10))


def test_the_order_of_calls_is_kept_of_every_thread(place: Place) -> None:
    stream = place.make(2)
    writer = stream.writer()

    def write(thread: int) -> None:
        for i in range(2000):
            writer.write(b"%d %d" % (thread, i), partition=i % 2)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert writer.flush(120) == 0
    writer.close()
    member = read(stream, 6000)
    for partition in range(2):
        for thread in range(3):
            begin = b"%d " % thread
            written = [int(value.split()[1]) for value in member.values(partition) if value.startswith(begin)]
            assert written == list(range(partition, 2000, 2))


def test_a_partition_that_is_not_there_is_told(place: Place) -> None:
    stream = place.make(2)
    writer = stream.writer()

    def write() -> None:
        writer.write(b"lost", partition=7)
        writer.flush(120)

    with pytest.raises(WriteFailed):
        write()
    writer.write(b"found", partition=1)
    assert writer.flush(120) == 0
    writer.close()
    assert read(stream, 1).got == {1: [(0, b"found")]}


def test_close_may_be_called_twice(place: Place) -> None:
    writer = place.make(1).writer()
    writer.close()
    writer.close()


def test_create_leaves_alone_what_there_is(place: Place) -> None:
    stream = place.make(3)
    fill(stream, {0: 1})
    stream.create(5)
    place.open().create(2)
    assert stream.bounds() == {0: Bounds(0, 1), 1: Bounds(0, 0), 2: Bounds(0, 0)}


def test_who_creates_a_topic_that_another_has_just_created_finds_it(place: Place) -> None:
    def create(name: str, together: threading.Barrier) -> int:
        stream = place.open(name)
        together.wait()
        stream.create(2)
        return len(stream.bounds())

    with ThreadPoolExecutor(4) as pool:
        for i in range(5):
            together = threading.Barrier(4)
            made = [pool.submit(create, f"{place.topic}.{i}", together) for _ in range(4)]
            assert [one.result() for one in made] == [2] * 4


def test_another_topic_is_made_where_it_is_missing(place: Place) -> None:
    stream = place.make(3)
    other = place.open(f"{place.topic}.dead")
    with pytest.raises(TopicMissing):
        other.bounds()
    for _ in range(2):
        writer = stream.writer(other.topic)
        writer.write(b"dead", partition=2)
        assert writer.flush(120) == 0
        writer.close()
    assert other.bounds() == {0: Bounds(0, 0), 1: Bounds(0, 0), 2: Bounds(0, 2)}
    assert stream.bounds() == dict.fromkeys(range(3), Bounds(0, 0))
    assert stream.writer(stream.topic).flush(1) == 0
