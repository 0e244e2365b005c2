"""The contract of streams, on every kind of them: how the members of a group share partitions."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import pytest

from streamtrain.errors import SourceRefused
from streamtrain.incarnation import Incarnation
from streamtrain.stream.source import Stream
from tests.patience import PATIENCE, until
from tests.stream.kinds import KINDS, LEASE, Place, fill
from tests.stream.members import Member, group_of, settle, take_turns


class Failing(Member):
    """Fails as often as `failures` says, by event."""

    def __init__(self, stream: Stream, failures: dict[str, int]) -> None:
        self.failures = failures
        super().__init__(stream)

    def _maybe_fail(self, event: str) -> None:
        self.failures[event] = self.failures.get(event, 0) - 1
        if self.failures[event] >= 0:
            raise RuntimeError(f"cannot be {event}")

    def assigned(self, partitions: Sequence[int]) -> Mapping[int, int]:
        positions = super().assigned(partitions)
        self._maybe_fail("assigned")
        return positions

    def revoked(self, partitions: Sequence[int]) -> None:
        super().revoked(partitions)
        self._maybe_fail("revoked")


def told(member: Member, event: str) -> list[int]:
    return sorted(p for kind, partitions in member.events if kind == event for p in partitions)


def test_members_share_and_nothing_is_read_twice(place: Place) -> None:
    stream = place.make(5)
    fill(stream, dict.fromkeys(range(5), 200))
    with Member(stream) as one:
        one.take_until(lambda m: m.count > 300, most=100)
        assert one.events == [("assigned", [0, 1, 2, 3, 4])]
        with Member(stream) as two, Member(stream) as three:
            settle(5, one, two, three)
            fill(stream, dict.fromkeys(range(5), 200))
            take_turns(lambda: one.count + two.count + three.count >= 2000, one, two, three)
            for partition in range(5):
                assert sorted(chain(*(m.offsets(partition) for m in (one, two, three)))) == list(range(400))


def test_partitions_are_revoked_before_another_member_gets_them(place: Place) -> None:
    stream = place.make(4)
    owners: dict[int, str] = {}

    def watch(name: str) -> Any:
        def say(event: str, partitions: Any) -> None:
            for partition in partitions if event != "got" else ():
                assert owners.pop(partition, "nobody") == ("nobody" if event == "assigned" else name)
                if event == "assigned":
                    owners[partition] = name

        return say

    with Member(stream, say=watch("one")) as one:
        settle(4, one)
        with Member(stream, say=watch("two")) as two:
            settle(4, one, two)
            with Member(stream, say=watch("three")) as three:
                settle(4, one, two, three)
            settle(4, one, two)
        settle(4, one)
        assert owners == dict.fromkeys(range(4), "one")
    assert owners == {}


def test_what_a_member_keeps_is_left_alone(place: Place) -> None:
    stream = place.make(4)
    with Member(stream) as one:
        settle(4, one)
        with Member(stream) as two:
            have = settle(4, one, two)
            assert told(one, "assigned") == [0, 1, 2, 3]
            assert told(one, "revoked") == told(two, "assigned") == have[1]


def test_a_member_that_leaves_is_followed_where_it_was(place: Place) -> None:
    """Whatever the group is about when it leaves."""
    stream = place.make(2)
    gone = 0
    with Member(stream) as stays:
        for turn in range(1, 4):
            fill(stream, {0: 5, 1: 5})
            with Member(stream) as leaves:
                settle(2, stays, leaves)
                take_turns(lambda: gone + stays.count + leaves.count >= 10 * turn, stays, leaves)  # noqa: B023
            assert leaves.events[-1][0] == "revoked"
            gone += leaves.count
            settle(2, stays)
        assert stays.positions == {0: 15, 1: 15}
        assert gone + stays.count == 30
    assert stream.committed(group_of(stream)) == {0: 15, 1: 15}


def test_members_of_a_group_are_counted_while_they_are_there(place: Place) -> None:
    stream = place.make(2)
    group = group_of(stream)
    assert stream.members(group) == 0
    with Member(stream) as one, Member(stream) as two:
        settle(2, one, two)
        assert stream.members(group) == 2
    until(lambda: stream.members(group) == 0)


def test_a_group_keeps_the_latest_incarnation_of_its_members(place: Place) -> None:
    """While they are there, and afterwards once they have committed."""
    stream = place.make(2)
    group, first = group_of(stream), Incarnation.after(None)
    second = Incarnation.after(first)
    assert stream.latest_incarnation(group) is None
    with Member(stream, incarnation=second) as one:
        settle(2, one)
        assert stream.latest_incarnation(group) == second
        with Member(stream, incarnation=first) as two, Member(stream) as three:
            settle(2, one, two, three)
            assert stream.latest_incarnation(group) == second
        settle(2, one)
    until(lambda: stream.latest_incarnation(group) == second)
    with Member(stream) as one:
        settle(2, one)
        assert stream.latest_incarnation(group) == second


@pytest.mark.parametrize("text", ["", "1", "1-", "-0123abcd-host", "1-0123abcd", "x-0123abcd-host", "1-0123ABCD-host"])
def test_other_texts_are_no_incarnation(text: str) -> None:
    assert Incarnation.parse(text) is None
    incarnation = Incarnation.after(Incarnation(9, "ffffffff-other"))
    assert Incarnation.parse(str(incarnation)) == incarnation > Incarnation(9, "ffffffff-other")


PROCESSES = [name for name, kind in KINDS.items() if kind.instance]


@pytest.mark.parametrize("place", PROCESSES, indirect=True)
def test_a_member_that_is_killed_is_followed(place: Place) -> None:
    stream = place.make(3)
    fill(stream, dict.fromkeys(range(3), 10))
    command = [sys.executable, "-m", "tests.stream.members", place.name, place.server, place.topic]
    heard: list[list[Any]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process, Member(stream) as here:
        reader = threading.Thread(target=lambda: heard.extend(map(json.loads, process.stdout or [])))
        reader.start()
        try:
            here.take_until(lambda m: len(m.positions) in (1, 2) and any(event == "assigned" for event, _ in heard))
        finally:
            process.kill()
            reader.join()
        begin = time.monotonic()
        here.take_until(lambda m: len(m.positions) == 3)
        assert time.monotonic() - begin < PATIENCE / 2
        # What it had not committed is read again.
        here.take_until(lambda m: m.positions == {0: 10, 1: 10, 2: 10})


@pytest.mark.parametrize("place", PROCESSES, indirect=True)
def test_a_member_of_its_instance_takes_the_place_of_one_that_is_killed_at_once(place: Place) -> None:
    """Long before the group takes the other for dead, and others keep what they have."""
    stream, instance = place.make(4), place.kind.instance
    assert instance is not None
    command = [sys.executable, "-m", "tests.stream.members", place.name, place.server, place.topic, "one"]
    got: list[int] = []

    def hear(lines: Iterable[bytes]) -> None:
        got.extend(one for event, partitions in map(json.loads, lines) if event == "assigned" for one in partitions)

    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as process,
        Member(instance(place.server, place.topic, "two")) as here,
    ):
        reader = threading.Thread(target=lambda: hear(process.stdout or []))
        reader.start()
        try:
            here.take_until(lambda m: len(m.positions) == 2 and len(set(got) - set(m.positions)) == 2)
        finally:
            process.kill()
            reader.join()
        mine = set(here.positions)
        begin = time.monotonic()
        with Member(instance(place.server, place.topic, "one")) as again:
            fill(stream, dict.fromkeys(range(4), 5))
            take_turns(lambda: here.count + again.count == 20, here, again)
            assert time.monotonic() - begin < LEASE / 2
        assert set(here.got) == mine


@pytest.mark.parametrize("place", PROCESSES, indirect=True)
def test_of_two_members_of_one_instance_the_earlier_is_refused(place: Place) -> None:
    place.make(2)
    instance = place.kind.instance
    assert instance is not None
    with Member(instance(place.server, place.topic, "one")) as first:
        first.take_until(lambda m: len(m.positions) == 2)
        with Member(instance(place.server, place.topic, "one")) as second:
            second.take_until(lambda m: len(m.positions) == 2)
            with pytest.raises(SourceRefused, match="give each its own instance"):
                take_turns(lambda: False, first)
            second.take()
            assert len(second.positions) == 2


def test_an_exception_of_the_listener_comes_out_of_poll(place: Place) -> None:
    """And `assigned` is tried again: the partitions are the member's."""
    stream = place.make(2)
    fill(stream, {0: 10, 1: 10})
    with Failing(stream, {"assigned": 2, "revoked": 1}) as one:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="cannot be assigned"):
                one.take_until(lambda m: False)
            assert one.positions == {}
        one.take_until(lambda m: m.count == 20)
        with Member(stream) as two:

            def both(member: Member) -> bool:
                two.take()
                return False

            with pytest.raises(RuntimeError, match="cannot be revoked"):
                one.take_until(both)
            settle(2, one, two)


def test_an_exception_of_the_listener_comes_out_of_close(place: Place) -> None:
    stream = place.make(2)
    one = Failing(stream, {"revoked": 1})
    settle(2, one)
    with pytest.raises(RuntimeError, match="cannot be revoked"):
        one.source.close()
    one.source.close()
    with Member(stream) as two:
        settle(2, two)


def test_close_revokes_and_may_be_called_twice(place: Place) -> None:
    stream = place.make(2)
    fill(stream, {0: 10})
    member = Member(stream)
    member.take_until(lambda m: m.count == 10)
    member.source.close()
    member.source.close()
    assert member.events == [("assigned", [0, 1]), ("revoked", [0, 1])]
    assert stream.committed(group_of(stream)) == {0: 10, 1: 0}
    Member(stream).source.close()  # one that never polled


def test_positions_are_committed_by_group(place: Place) -> None:
    stream = place.make(3)
    fill(stream, {0: 10, 1: 10})
    assert stream.committed(group_of(stream)) == {}
    with Member(stream) as member:
        settle(3, member)
        member.source.commit({0: 4, 1: 10})
        member.source.commit({})
        member.source.commit({0: 7})
        until(lambda: stream.committed(group_of(stream)) == {0: 7, 1: 10}, doing=member.take)
        assert stream.committed("another") == {}


def test_groups_read_by_themselves(place: Place) -> None:
    stream = place.make(2)
    fill(stream, {0: 10, 1: 10})
    with Member(stream) as one, Member(stream, group="another", job="another") as two:
        one.take_until(lambda m: m.count == 20)
        two.take_until(lambda m: m.count == 20)


def test_a_pause_outlasts_rebalances_and_ends_for_all_partitions(place: Place) -> None:
    """Those that it keeps, and one that goes and comes back."""
    stream = place.make(2)
    fill(stream, {0: 10, 1: 10})
    with Member(stream) as one:
        one.take_until(lambda m: m.count == 20)
        one.source.pause()
        with Member(stream) as two:
            settle(2, one, two)
        settle(2, one)
        assert len(told(two, "assigned")) == 1
        fill(stream, {0: 10, 1: 10})
        for _ in range(10):
            assert one.take() == {}
        one.source.resume()
        one.take_until(lambda m: m.count == 40)
        assert one.offsets(0) == one.offsets(1) == list(range(20))


def test_partitions_that_come_and_go_while_it_is_not_paused_are_read(place: Place) -> None:
    """Whatever was paused when they went."""
    stream = place.make(2)
    fill(stream, {0: 10, 1: 10})
    with Member(stream) as one:
        one.take_until(lambda m: m.count == 20)
        one.source.pause()
        with Member(stream) as two:
            settle(2, one, two)
            one.source.resume()
        settle(2, one)
        fill(stream, {0: 10, 1: 10})
        one.take_until(lambda m: m.count == 40)


def test_another_job_is_refused(place: Place) -> None:
    stream = place.make(2)
    with Member(stream) as one:
        settle(2, one)
        with pytest.raises(SourceRefused, match="group"):
            Member(stream, job="another")
        Member(stream, group="another", job="another").source.close()
    Member(stream, job="another").source.close()


def test_two_jobs_that_come_at_once_do_not_both_go_on(place: Place) -> None:
    stream = place.make(2)
    fill(stream, {0: 10, 1: 10})
    barrier = threading.Barrier(2)
    members: list[Member] = []
    refused: list[SourceRefused] = []

    def join(job: str) -> None:
        barrier.wait()
        try:
            member = Member(stream, job=job)
            members.append(member)
            barrier.wait(PATIENCE)
            member.take_until(lambda m: m.count > 0)
            until(lambda: refused, doing=member.take)
        except SourceRefused as exc:
            refused.append(exc)
            barrier.abort()
        except threading.BrokenBarrierError:
            pass  # the other was refused before it began

    threads = [threading.Thread(target=join, args=(job,)) for job in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refused
    for member in members:
        member.source.close()
