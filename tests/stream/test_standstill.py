"""Partitions that stand still are found, told, and read anew; those that are held, read out or slow are none."""

import logging
from collections.abc import Mapping

import pytest

from streamtrain.embedded.kafka import Broker
from streamtrain.errors import SourceUnavailable
from streamtrain.stream.buffer import PartitionBuffer
from streamtrain.stream.standstill import StandstillWatch
from tests.patience import until
from tests.stream.kinds import Place, fill
from tests.stream.members import Member


class Watched:
    """A watch by a clock and ends of its own."""

    def __init__(self, ends: Mapping[str, int]) -> None:
        self.at, self.ends = 0.0, dict(ends)
        self.is_away = False
        self.watch = StandstillWatch(self._ends, lambda place: f"partition {place}", seconds=60, now=lambda: self.at)

    def _ends(self) -> Mapping[str, int]:
        if self.is_away:
            raise SourceUnavailable("away")
        return self.ends

    def poll(
        self, positions: Mapping[str, int], held: tuple[str, ...] = (), times: int = 5, seconds: float = 61
    ) -> bool:
        """Whether it is to be read anew after some polls over so many seconds, and a look."""
        due = False
        for _ in range(times):
            self.at += seconds / times
            due = self.watch.polled(positions, held) or due
        self.watch.look()
        return due


def test_what_waits_and_is_not_taken_is_told_with_its_place_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    one = Watched({"a": 9, "b": 5, "c": 3})
    one.watch.polled({"a": 4, "b": 5, "c": 2})
    for position in (2, 3):
        one.poll({"a": 4, "b": 5, "c": position}, times=2, seconds=20)
    assert one.watch.stalled == []
    assert not one.poll({"a": 4, "b": 5, "c": 3}, times=5, seconds=30)
    assert one.watch.stalled == ["a"]
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (
            logging.ERROR,
            "partition a stands still at offset 4: 5 messages wait, and none was taken for 70 s, though nothing is "
            "known to hold it; reading it anew",
        )
    ]
    assert one.watch.polled({"a": 4, "b": 5, "c": 3})
    assert not one.watch.polled({"a": 4, "b": 5, "c": 3})  # true once
    one.poll({"a": 4, "b": 5, "c": 3}, seconds=30)
    assert len(caplog.records) == 1
    one.poll({"a": 4, "b": 5, "c": 3}, seconds=40)
    assert len(caplog.records) == 2
    assert one.watch.total == 2
    one.watch.polled({"a": 5, "b": 5, "c": 3})
    assert one.watch.stalled == []


def test_what_is_held_or_new_or_gone_or_not_polled_does_not_stand_still() -> None:
    one = Watched({"a": 9})
    one.watch.polled({"a": 4})
    one.poll({"a": 4}, held=("a",), seconds=600)
    assert one.watch.stalled == []
    one.poll({"a": 4}, times=4, seconds=600)  # who computes for long polls seldom
    assert one.watch.stalled == []
    one.watch.polled({})
    one.poll({"a": 4}, seconds=59)
    assert one.watch.stalled == []
    one.is_away = True
    one.poll({"a": 4}, seconds=600)
    assert one.watch.stalled == []
    one.is_away = False
    one.watch.look()
    assert one.watch.stalled == ["a"]
    one.watch.polled({})
    assert one.watch.stalled == []


def test_the_ends_are_those_of_what_can_be_read(place: Place) -> None:
    stream = place.make(3)
    fill(stream, {0: 4, 2: 1})
    assert stream.ends() == {0: 4, 1: 0, 2: 1}


def test_a_member_that_rejoins_has_what_it_had_and_goes_on(place: Place) -> None:
    stream = place.make(2)
    fill(stream, {0: 10, 1: 10})
    with Member(stream) as member:
        member.take_until(lambda m: m.count == 20)
        member.source.pause()
        member.source.commit(member.positions)
        until(lambda: stream.committed(member._group) == {0: 10, 1: 10})
        member.source.rejoin()
        assert member.positions == {}
        assert ("lost", [0, 1]) in member.events
        member.take_until(lambda m: len(m.positions) == 2)
        fill(stream, {0: 5, 1: 5})
        for _ in range(5):
            assert member.take() == {}  # a pause lasts
        member.source.resume()
        member.take_until(lambda m: m.count == 30)
        assert member.offsets(0) == member.offsets(1) == list(range(15))


def test_what_librdkafka_does_not_read_is_read_by_another_client(
    kafka: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """Here because somebody else has paused it: whatever the reason is, a new client has not got it."""
    stream = Place("kafka", kafka.servers).make(2)
    fill(stream, {0: 5, 1: 5})

    class Learner:
        def __init__(self) -> None:
            self.clock: dict[int, int] = {}

        def assigned(self, partitions: list[int]) -> dict[int, int]:
            return {one: self.clock.setdefault(one, 0) for one in partitions}

        def revoked(self, partitions: list[int]) -> None:
            pass

        lost = revoked

    learner = Learner()
    watch = StandstillWatch(stream.ends, str, seconds=1.0)
    buffer = PartitionBuffer(watch=watch)
    buffer.open(stream, "group", "job", learner)  # type: ignore[arg-type]

    def learn(count: int) -> None:
        def take() -> None:
            buffer.poll(100, 0.05)
            for one in learner.clock:
                learner.clock[one] = max(learner.clock[one], buffer.reach(one, learner.clock[one], 100))
                buffer.release(one, learner.clock[one])

        until(lambda: sum(learner.clock.values()) == count, doing=take)

    with watch:
        learn(10)
        source = buffer.source
        source._consumer.pause(source._consumer.assignment())  # type: ignore[attr-defined]
        buffer.poll(1, 0.2)
        fill(stream, {0: 5, 1: 5})
        learn(20)
    assert watch.total >= 1
    assert "stands still at offset" in caplog.text
    buffer.close()
