"""The exactly-once rule by itself, case by case; that it is needed and enough is in test_exactly_once.py."""

import pytest
import streamtrain.ps.rpc.ps_pb2 as pb

from streamtrain.ps.clock import Clock, Cursor, Ends, Progress, PushOutcome, Span, VectorClock, latest, watermarks_at


@pytest.mark.parametrize(
    ("spans", "outcome"),
    [
        ([Span(0, 5, 8)], PushOutcome.APPLIED),
        ([Span(0, 5, 8), Span(1, 0, 1)], PushOutcome.APPLIED),
        ([Span(0, 4, 8)], PushOutcome.REJECTED),
        ([Span(0, 6, 8)], PushOutcome.REJECTED),
        ([Span(0, 5, 8), Span(1, 1, 2)], PushOutcome.REJECTED),
        ([Span(1, 1, 2), Span(0, 5, 8)], PushOutcome.REJECTED),
        ([Span(0, 4, 5)], PushOutcome.DUPLICATE),
        ([Span(0, 0, 4)], PushOutcome.DUPLICATE),
        ([Span(0, 4, 5), Span(1, 0, 1)], PushOutcome.REJECTED),
        ([Span(1, 0, 1), Span(0, 4, 5)], PushOutcome.REJECTED),
        ([Span(0, 5, 5)], PushOutcome.DUPLICATE),
        ([Span(0, 5, 5), Span(1, 0, 1)], PushOutcome.APPLIED),
        ([], PushOutcome.DUPLICATE),
        ([Span(7, 0, 0)], PushOutcome.DUPLICATE),
        ([Span(7, 1, 2)], PushOutcome.REJECTED),
    ],
)
def test_a_push_is_applied_only_where_the_clock_stands(spans: list[Span], outcome: PushOutcome) -> None:
    clock = VectorClock({0: 5})
    assert clock.judge(spans) is outcome
    assert clock.read() == {0: 5}


def test_the_clock_goes_on_by_what_is_applied() -> None:
    start = {0: 5}
    clock = VectorClock(start)
    clock.advance([Span(0, 5, 8), Span(2, 0, 3)])
    assert clock.read() == {0: 8, 2: 3}
    clock.read()[0] = 100  # of a copy
    assert clock.judge([Span(0, 8, 9)]) is PushOutcome.APPLIED
    assert start == {0: 5}


def test_the_latest_of_several_clocks() -> None:
    assert latest([{0: 5, 1: 2}, {0: 4, 2: 0}, {}]) == {0: 5, 1: 2, 2: 0}
    assert latest([{0: 4}, {0: 5}]) == {0: 5}
    assert latest([]) == {}


def test_watermarks_are_of_a_shard_that_stands_there() -> None:
    stands = [
        Progress({0: 5, 1: 7}, {0: 50.0, 1: 70.0}),
        Progress({0: 4, 1: 7}, {0: 40.0}),
        Progress({0: 3}, {0: 30.0}),
    ]
    assert watermarks_at({0: 4}, stands) == {0: 40.0}
    assert watermarks_at({0: 5, 1: 7}, stands[:1]) == {0: 50.0, 1: 70.0}
    assert watermarks_at({1: 7, 2: 0, 3: 9}, stands) == {1: 0.0, 2: 0.0}
    assert watermarks_at({1: 0}, [Progress({}, {}), Progress({1: 1}, {1: 9.0})]) == {1: 0.0}


@pytest.mark.parametrize(
    ("start", "most", "reach"), [(0, 4, 4), (8, 4, 10), (10, 4, 10), (12, 4, 12), (9, 1, 10), (3, 0, 3)]
)
def test_how_far_there_are_samples(start: int, most: int, reach: int) -> None:
    ends = Ends({0: 10})
    assert ends.reach(0, start, most) == reach
    assert ends.reach(1, start, most) == start
    assert ends.count(0, start, start + most) == most


def cursor(*clocks: Clock, partitions: tuple[int, ...] = (0, 1, 2)) -> Cursor:
    made = Cursor()
    made.rewind(partitions, clocks)
    return made


def test_it_goes_on_from_the_oldest_clock_and_cuts_at_the_others() -> None:
    one = cursor({0: 5, 1: 3}, {0: 9, 1: 3}, {0: 7, 1: 3, 2: 4}, partitions=(0, 1))
    assert one.positions == {0: 5, 1: 3}
    assert one.catching_up(0)
    assert not one.catching_up(1)
    assert (one.limit(0), one.limit(1)) == (7, None)
    one.positions[0] = 100  # of a copy
    ends = Ends({0: 20, 1: 20})
    assert [one.next(ends, 10) for _ in range(3)] == [[Span(0, 5, 7)], [Span(0, 7, 9)], [Span(1, 3, 13)]]
    assert (one.limit(0), one.catching_up(0)) == (None, False)
    assert one.next(ends, 20) == [Span(0, 9, 20), Span(1, 13, 20)]
    assert one.next(ends, 20) == []


def test_partitions_in_which_shards_differ_come_first_and_alone() -> None:
    one = cursor({2: 4}, {2: 2, 1: 3})
    ends = Ends(dict.fromkeys(range(3), 10))
    assert one.next(ends, 10) == [Span(1, 0, 3)]
    assert one.next(ends, 10) == [Span(2, 2, 4)]
    assert one.next(ends, 30) == [Span(0, 0, 10), Span(1, 3, 10), Span(2, 4, 10)]


def test_where_shards_differ_and_there_is_nothing_yet_others_are_read() -> None:
    one = cursor({0: 5}, {0: 2})
    assert one.next(Ends({0: 2, 1: 4, 2: 4}), 10) == [Span(1, 0, 4), Span(2, 0, 4)]
    assert one.next(Ends({0: 3, 1: 9, 2: 4}), 10) == [Span(0, 2, 3)]
    assert one.limit(0) == 5
    assert one.next(Ends({0: 9, 1: 9, 2: 4}), 2) == [Span(0, 3, 5)]
    assert one.limit(0) is None


def test_a_cut_that_is_not_reached_stays() -> None:
    one = cursor({0: 5}, {}, partitions=(0,))
    assert [one.next(Ends({0: 9}), most) for most in (2, 2, 2, 2)] == [
        [Span(0, 0, 2)],
        [Span(0, 2, 4)],
        [Span(0, 4, 5)],
        [Span(0, 5, 7)],
    ]


def test_no_partition_keeps_another_waiting_and_no_batch_is_too_large() -> None:
    one, ends = cursor({}), Ends({0: 5, 1: 5, 2: 5})
    assert one.next(ends, 4) == [Span(0, 0, 4)]
    assert one.next(ends, 4) == [Span(1, 0, 4)]
    assert one.next(ends, 6) == [Span(2, 0, 5), Span(0, 4, 5)]
    assert one.positions == {0: 5, 1: 4, 2: 5}
    assert one.next(ends, 6) == [Span(1, 4, 5)]


class Gaps(Ends):
    """Every other offset has no sample."""

    def reach(self, partition: int, start: int, most: int) -> int:
        return super().reach(partition, start, 2 * most)

    def count(self, partition: int, start: int, end: int) -> int:
        return (end - start) // 2


def test_a_batch_has_as_many_samples_as_it_may_not_offsets() -> None:
    one = cursor({})
    assert one.next(Gaps({0: 4, 1: 100}), 5) == [Span(0, 0, 4), Span(1, 0, 6)]


def test_offsets_are_large() -> None:
    """Equal ones are so by value: these are not the same object."""
    clock = VectorClock({0: int("1000000")})
    assert clock.judge([Span(0, int("1000000"), 1000001)]) is PushOutcome.APPLIED
    assert watermarks_at({0: int("1000000")}, [Progress({0: int("1000000")}, {0: 5.0})]) == {0: 5.0}
    one = cursor({0: int("1000000")}, {}, partitions=(0,))
    assert one.next(Ends({0: int("1000000")}), 1 << 30) == [Span(0, 0, 1000000)]
    assert not one.catching_up(0)


def test_outcomes_are_those_of_the_protocol() -> None:
    assert {one.name: one.value for one in PushOutcome} == dict(pb.Outcome.items())


class Leading(Ends):
    """A range of no samples reaches up to the next, as where offsets before it have none."""

    def reach(self, partition: int, start: int, most: int) -> int:
        return super().reach(partition, start, max(most, 1))


def test_a_full_batch_takes_nothing_of_others() -> None:
    assert cursor({}).next(Leading({0: 4, 1: 9}), 4) == [Span(0, 0, 4)]


def test_it_takes_over_the_partitions_it_is_given_and_no_others() -> None:
    one = cursor({0: 5, 1: 2})
    one.rewind([1], [{0: 5, 1: 7}])
    assert one.positions == {1: 7}
    one.rewind([], [])
    assert one.positions == {}
    assert one.next(Ends({0: 9}), 5) == []
