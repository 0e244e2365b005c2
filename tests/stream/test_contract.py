"""The contract of streams, on every kind of them: streamtrain/stream/source.py, sentence by sentence. Reading."""

import random
import threading
import time

import pytest

from streamtrain.errors import TopicMissing
from streamtrain.stream.source import Bounds, Stream
from tests.patience import PATIENCE
from tests.stream.kinds import Place, fill, message
from tests.stream.members import Member, group_of


def test_messages_come_in_order_with_their_offsets(place: Place) -> None:
    stream = place.make(3)
    fill(stream, {0: 500, 1: 20, 2: 0})
    with Member(stream) as member:
        member.take_until(lambda m: m.count == 520)
        assert member.got == {p: [(i, message(p, i)) for i in range(n)] for p, n in {0: 500, 1: 20}.items()}
        assert member.positions == {0: 500, 1: 20, 2: 0}
        fill(stream, {2: 1})
        member.take_until(lambda m: m.count == 521)
        assert member.got[2] == [(0, message(2, 0))]
        assert not member.source.finished()


@pytest.mark.parametrize("most", [1, 7])
def test_no_more_come_than_wanted(place: Place, most: int) -> None:
    stream = place.make(2)
    fill(stream, {0: 30, 1: 30})
    with Member(stream) as member:
        member.take_until(lambda m: m.count == 60, most)
        assert [member.offsets(p) for p in range(2)] == [list(range(30))] * 2


def test_messages_have_the_time_at_which_they_came(place: Place) -> None:
    stream, began = place.make(1), time.time()
    fill(stream, {0: 3})
    between = time.time()
    fill(stream, {0: 2})
    with Member(stream) as member:
        member.take_until(lambda m: m.count == 5)
        times = member.times[0]
    assert began - 1 < times[0] / 1000 <= times[2] / 1000 < between + 1
    assert between - 1 < times[3] / 1000 <= times[4] / 1000 < time.time() + 1
    assert times == sorted(times)


def test_no_partition_keeps_another_waiting(place: Place) -> None:
    stream = place.make(2)
    fill(stream, {0: 2000, 1: 2000})
    with Member(stream) as member:
        member.take_until(lambda m: m.count >= 3000, most=100)
        assert set(member.got) == {0, 1}


def test_poll_waits_for_the_first_and_for_no_more(place: Place) -> None:
    stream = place.make(2)
    with Member(stream) as member:
        member.take_until(lambda m: len(m.positions) == 2)
        begin = time.monotonic()
        assert member.take(10, 0.3) == {}
        assert 0.25 < time.monotonic() - begin < PATIENCE / 2
        later = threading.Timer(0.3, fill, (stream, {1: 1}))
        later.start()
        begin = time.monotonic()
        assert member.take(1000, PATIENCE) == {1: [0]}
        assert time.monotonic() - begin < PATIENCE / 2
        later.join()


def fill_in_turns(stream: Stream, messages: int) -> None:
    for i in range(messages):
        fill(stream, {i % 2: 1})


def test_poll_waits_for_more_where_it_is_told_to(place: Place) -> None:
    """For some time only, and some sources not at all."""
    stream = place.make(2)
    with Member(stream) as member:
        member.take_until(lambda m: len(m.positions) == 2)
        writer = threading.Thread(target=fill_in_turns, args=(stream, 9))
        writer.start()
        calls = 0
        while member.count < 9:
            member.take(5, PATIENCE, least=min(5, 9 - member.count))
            calls += 1
        writer.join()
        assert calls == 2 or place.name != "kafka"
        assert [member.offsets(p) for p in range(2)] == [list(range(5)), list(range(4))]
        begin = time.monotonic()
        fill(stream, {0: 1})
        assert member.take(1000, 0.3, least=1000) == {0: [5]}
        assert time.monotonic() - begin < PATIENCE / 2


def test_reading_begins_where_the_listener_says(place: Place) -> None:
    stream = place.make(3)
    fill(stream, {0: 10, 1: 10, 2: 10})
    with Member(stream, begin={0: 7, 1: 10, 2: 0}) as member:
        member.take_until(lambda m: m.count == 13)
        assert {p: member.offsets(p) for p in member.got} == {0: [7, 8, 9], 2: list(range(10))}


def test_what_was_read_is_read_again_after_a_seek(place: Place) -> None:
    """At once from there: what was on its way from before never comes."""
    stream = place.make(2)
    fill(stream, {0: 3000, 1: 10})
    choose = random.Random(7)
    with Member(stream) as member:
        member.take_until(lambda m: 0 in m.got, most=50)
        for _ in range(30):
            offset = choose.randrange(2999)
            member.source.seek(0, offset)
            assert member.positions[0] == offset
            if choose.random() < 0.3:
                member.source.poll(1, 0)  # whatever that brings, the position tells
                offset = member.positions[0]
            member.got.clear()
            member.take_until(lambda m: 0 in m.got, most=50)
            assert member.got[0][0] == (offset, message(0, offset))
            assert member.offsets(0) == list(range(offset, member.positions[0]))
        assert member.positions[1] == 10


def test_a_seek_right_after_assignment_holds(place: Place) -> None:
    stream = place.make(2)
    fill(stream, {0: 50, 1: 50})
    with Member(stream) as member:
        member.take_until(lambda m: len(m.positions) == 2, most=1)
        member.got.clear()
        member.source.seek(0, 40)
        member.source.seek(1, 45)
        member.source.seek(1, 44)
        member.take_until(lambda m: m.count == 16)
        assert {p: member.offsets(p) for p in (0, 1)} == {0: list(range(40, 50)), 1: list(range(44, 50))}


def test_nothing_comes_while_it_is_paused(place: Place) -> None:
    stream = place.make(2)
    fill(stream, {0: 3000, 1: 10})
    with Member(stream) as member:
        assert not member.source.is_paused
        member.take_until(lambda m: 0 in m.got, most=20)
        member.source.pause()
        assert member.source.is_paused
        positions = member.positions
        fill(stream, {1: 10})
        for _ in range(10):
            assert member.take() == {}
        assert member.positions == positions
        member.source.resume()
        assert not member.source.is_paused
        member.take_until(lambda m: m.count == 3020)
        assert (member.offsets(0), member.offsets(1)) == (list(range(3000)), list(range(20)))


def test_what_is_sought_while_it_is_paused_stays_paused(place: Place) -> None:
    stream = place.make(2)
    fill(stream, {0: 100, 1: 10})
    with Member(stream) as member:
        member.take_until(lambda m: m.count == 110)
        member.source.pause()
        member.source.seek(0, 30)
        fill(stream, {1: 10})
        for _ in range(10):
            assert member.take() == {}
        assert member.positions == {0: 30, 1: 10}
        member.source.seek(0, 90)
        member.source.resume()
        member.take_until(lambda m: m.count == 130)
        assert member.offsets(0)[100:] == list(range(90, 100))


def test_lag_is_what_is_left_to_read(place: Place) -> None:
    stream = place.make(3)
    fill(stream, {0: 40, 1: 7})
    with Member(stream) as member:
        assert member.source.lag() == {}
        member.take_until(lambda m: m.count == 47)
        assert member.source.lag() == {0: 0, 1: 0, 2: 0}
        member.source.seek(0, 10)
        assert member.source.lag() == {0: 30, 1: 0, 2: 0}
        member.take_until(lambda m: m.source.lag()[0] < 30, most=10)
        assert member.source.lag()[0] == 40 - member.positions[0]


def test_bounds_are_what_there_is(place: Place) -> None:
    stream = place.make(3)
    fill(stream, {0: 10, 1: 4})
    assert stream.bounds() == {0: Bounds(0, 10), 1: Bounds(0, 4), 2: Bounds(0, 0)}
    place.delete(0, 6)
    place.delete(1, 4)
    assert stream.bounds() == {0: Bounds(6, 10), 1: Bounds(4, 4), 2: Bounds(0, 0)}


def test_a_topic_that_is_made_anew_has_another_identity(place: Place) -> None:
    stream = place.make(2)
    fill(stream, {0: 3})
    before = stream.identity()
    assert before
    place.make(2)
    fill(stream, {0: 3, 1: 2})
    assert stream.identity() == place.open().identity() == before
    place.remove()
    with pytest.raises(TopicMissing):
        stream.identity()
    place.make(2)
    assert stream.identity() not in {"", before}
    assert stream.identity() == place.open().identity()


def test_at_is_the_first_message_since(place: Place) -> None:
    stream = place.make(2)
    before = time.time() - 1
    fill(stream, {0: 3})
    time.sleep(0.01)  # times are of milliseconds
    between = time.time()
    time.sleep(0.01)
    fill(stream, {0: 2})
    assert stream.at(before) == {0: 0, 1: 0}
    assert stream.at(between) == {0: 3, 1: 0}
    assert stream.at(time.time() + 3600) == {0: 5, 1: 0}


@pytest.mark.parametrize("begin", [0, 50])
def test_what_is_gone_is_told_and_the_others_go_on(place: Place, begin: int) -> None:
    """Below what there is, or above it."""
    stream = place.make(3)
    fill(stream, {0: 10, 1: 20, 2: 30})
    place.delete(0, 4)
    with Member(stream, begin={0: begin}) as member:
        member.take_until(lambda m: m.gone and m.count == 50)
        gone = member.gone[0]
        assert (gone.partition, gone.wanted, gone.low, gone.high) == (0, begin, 4, 10)
        assert member.positions == {0: begin, 1: 20, 2: 30}
        fill(stream, {1: 5})
        member.take_until(lambda m: m.count == 55)
        assert member.positions == {0: begin, 1: 25, 2: 30}
        member.source.seek(0, 4)
        member.take_until(lambda m: m.count == 61)
        assert member.offsets(0) == list(range(4, 10))
        fill(stream, {0: 5})
        member.take_until(lambda m: m.count == 66)
        assert {one.partition for one in member.gone} == {0}


def test_what_comes_with_an_error_is_not_lost(place: Place) -> None:
    """Also if every partition but one is gone, and again after a seek to nowhere."""
    stream = place.make(6)
    fill(stream, dict.fromkeys(range(6), 300))
    with Member(stream, begin={p: 1000 + p for p in range(5)}) as member:
        member.take_until(lambda m: len({one.partition for one in m.gone}) == 5 and m.count == 300, most=50)
        member.gone.clear()
        for partition in range(5):
            member.source.seek(partition, 2000 if partition == 3 else 0)
        member.take_until(lambda m: m.gone and m.count == 300 * 5, most=50)
        assert {one.wanted for one in member.gone} == {2000}
        assert all(member.offsets(p) == list(range(300)) for p in range(6) if p != 3)


def test_a_missing_topic_is_told(place: Place) -> None:
    stream = place.open()
    for question in (
        stream.bounds,
        lambda: stream.committed(group_of(stream)),
        lambda: stream.at(0.0),
        lambda: Member(stream),
        stream.writer,
    ):
        with pytest.raises(TopicMissing):
            question()
    stream.create(1)
    assert stream.bounds() == {0: Bounds(0, 0)}
