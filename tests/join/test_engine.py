"""The join of one partition is what a plain join of the finished logs gives, however it is read and interrupted."""

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamtrain.join.buffer import Buffer, Memory
from streamtrain.join.engine import Impression, JoinLabel, JoinOutput, JoinPosition, Outcome, PartitionJoin, Rules
from tests.join import oracle
from tests.join.oracle import Joined

CLICK = JoinLabel("click", frozenset({"click"}), 10.0)
RULES = Rules((CLICK,), grace=2.0)

KINDS = ("click", "buy", "watch", "refund", "other")
LABELS = st.builds(
    JoinLabel,
    name=st.just(""),
    kinds=st.sets(st.sampled_from(KINDS[:3]), min_size=1).map(frozenset),
    wait=st.integers(1, 12).map(float),
    default=st.sampled_from([0.0, -1.0]),
    value=st.booleans(),
    attribution=st.sampled_from(["first", "last", "sum"]),
    cancelled_by=st.sampled_from([frozenset[str](), frozenset({"refund"})]),
)
ALL_RULES = st.builds(
    lambda labels, grace, emit: Rules(
        tuple(
            JoinLabel(f"l{n}", *(getattr(one, of) for of in JoinLabel.__match_args__[1:]))
            for n, one in enumerate(labels)
        ),
        grace,
        emit,
    ),
    st.lists(LABELS, min_size=1, max_size=3),
    st.integers(0, 4).map(float),
    st.sampled_from(["settled", "first"]),
)
IDS = st.sampled_from("abcd")


def impression(offset: int, id_: str, time: float) -> Impression:
    return Impression(offset, id_, time, b'{"id": "%s", "n": %d} ' % (id_.encode(), offset))


def outcome(offset: int, id_: str, time: float, kind: str = "click", number: float = 1.0) -> Outcome:
    return Outcome(offset, id_, time, kind, number, b"{}")


@st.composite
def logs(draw: st.DrawFn) -> tuple[list[Impression], list[Outcome]]:
    """Times grow by and large; offsets have gaps, as transactions leave them."""

    def times(most: int) -> list[tuple[int, float]]:
        steps = draw(st.lists(st.tuples(st.integers(1, 2), st.integers(-4, 5)), max_size=most))
        offset, time, found = 0, 20, []
        for gap, more in steps:
            offset, time = offset + gap, time + more
            found.append((offset, float(time)))
        return found

    impressions = [impression(offset, draw(IDS), time) for offset, time in times(12)]
    outcomes = [
        outcome(offset, draw(IDS), time, draw(st.sampled_from(KINDS)), float(draw(st.integers(1, 5))))
        for offset, time in times(16)
    ]
    return impressions, outcomes


class Run:
    """A join whose output is committed together with its progress, as a transaction does it."""

    def __init__(self, rules: Rules, impressions: list[Impression], outcomes: list[Outcome]) -> None:
        self.rules, self.impressions, self.outcomes = rules, impressions, outcomes
        self.buffer = Buffer(Memory(50))  # two impressions in memory, others in files
        self.join = PartitionJoin(rules, buffer=self.buffer)
        self.committed = (0, 0)
        self.progress = (JoinPosition(0), JoinPosition(0))
        self.steps: tuple[dict[int, float], dict[int, float]] = ({}, {})
        self.pending_steps: list[tuple[int, int, float]] = []
        self.joined = Joined(Counter(), Counter(), Counter(), Counter(), 0)

    def read(self, *, outcomes: bool, count: int) -> None:
        if outcomes:
            part = [one for one in self.outcomes if one.offset >= self.join.positions[1]][:count]
            if part:
                self.join.read_outcomes(part, part[-1].offset + 1)
        else:
            parts = [one for one in self.impressions if one.offset >= self.join.positions[0]][:count]
            if parts:
                self.join.read_impressions(parts, parts[-1].offset + 1)

    def advance(self, by: float) -> None:
        to = max(self.join.watermarks) + by
        before = self.join.watermarks
        if self.join.advance(to, to):
            for log, now in enumerate(self.join.watermarks):
                if now != before[log]:
                    self.pending_steps.append((log, self.join.positions[log], now))

    def commit(self) -> None:
        self.progress, self.committed = self.join.progress(), self.join.positions
        for log, offset, to in self.pending_steps:
            self.steps[log][offset] = max(to, self.steps[log].get(offset, to))
        self.pending_steps.clear()
        add(self.joined, self.join.output)
        self.joined = self.joined._replace(attributed=self.joined.attributed + len(self.join.output.delays))
        self.join.output.clear()

    def crash(self) -> None:
        """All that is not committed is gone; the state is read again, in an order of its own."""
        self.pending_steps.clear()
        first, last = self.progress
        self.buffer.close()
        self.buffer = Buffer(Memory(50))
        self.join = PartitionJoin(self.rules, first, last, self.buffer)
        again = [one for one in self.outcomes if last.start <= one.offset < self.committed[1]]
        self.join.read_outcomes(again, self.committed[1])
        before = [one for one in self.impressions if first.start <= one.offset < self.committed[0]]
        self.join.read_impressions(before, self.committed[0])
        self.join.output.clear()
        assert self.join.positions == self.committed

    def finish(self) -> None:
        self.read(outcomes=False, count=100)
        self.read(outcomes=True, count=100)
        self.commit()


def add(joined: Joined, output: JoinOutput) -> None:
    joined.samples.update(json.dumps(json.loads(one.value, parse_int=float)) for one in output.samples)
    joined.late_impressions.update(one.offset for one in output.late_impressions)
    joined.late.update(one.offset for one in output.late)
    joined.orphaned.update(one.offset for one in output.orphaned)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.booleans(), st.integers(1, 3)),
        st.tuples(st.just("advance"), st.sampled_from([0.0, 1.0, 6.0])),
        st.tuples(st.just("commit")),
        st.tuples(st.just("crash")),
    ),
    max_size=40,
)


def test_all_outcomes_that_were_read_before_their_impression_count() -> None:
    """Also where the wait is over by then, and the sample is written as soon as it is decided."""
    label = JoinLabel("clicks", frozenset({"click"}), 1.0, attribution="sum")
    join = PartitionJoin(Rules((label,), grace=0.0, emit="first"))
    join.read_outcomes([outcome(0, "a", 20.0), outcome(1, "a", 21.0)], 2)
    join.read_impressions([impression(0, "a", 20.0)], 1)
    assert [json.loads(one.value)["clicks"] for one in join.output.samples] == [2]


# With a wait of 10 and a grace of 2: what is read, committed and lost in a crash, and what is read afterwards.
KEPT: dict[
    str, tuple[list[tuple[str, float]], list[tuple[str, float]], list[tuple[str, float]], list[tuple[str, float]]]
] = {
    "an impression whose outcome may still seem to be orphaned": ([("a", 20)], [("a", 25), ("z", 32)], [("b", 60)], []),
    "the same at the last moment": ([("a", 20), ("c", 34)], [("a", 32)], [("b", 60)], []),
    "an impression whose outcome may still come": ([("a", 20), ("c", 50)], [("z", 31)], [], [("a", 25)]),
    "an outcome that may still be orphaned": ([], [("b", 20), ("z", 34)], [("c", 60)], []),
    "the same with an impression at the last moment": ([("c", 22)], [("b", 20), ("z", 60)], [("b", 22)], []),
    "an outcome whose sample would be written again": ([("a", 20), ("c", 37)], [("a", 20)], [], [("z", 60)]),
    "the same at the last moment of its impression": ([("a", 22), ("c", 60)], [("a", 20), ("z", 31)], [], [("y", 60)]),
}


@pytest.mark.parametrize("case", KEPT)
def test_what_still_matters_is_read_again_after_a_crash(case: str) -> None:
    before, happened, after, happens = KEPT[case]
    impressions = [impression(offset, *one) for offset, one in enumerate(before + after)]
    outcomes = [outcome(offset, *one) for offset, one in enumerate(happened + happens)]
    run = Run(RULES, impressions, outcomes)
    run.read(outcomes=False, count=len(before))
    run.read(outcomes=True, count=len(happened))
    run.commit()
    run.crash()
    run.finish()
    run.crash()  # and nothing comes twice
    run.finish()
    assert_as_wanted(run)


@settings(max_examples=400, deadline=None)
@given(ALL_RULES, logs(), ACTIONS)
def test_as_the_plain_join_however_it_is_read(
    rules: Rules, given_: tuple[list[Impression], list[Outcome]], actions: list[tuple[Any, ...]]
) -> None:
    impressions, outcomes = given_
    run = Run(rules, impressions, outcomes)
    for name, *arguments in actions:
        if name == "read":
            run.read(outcomes=arguments[0], count=arguments[1])
        elif name == "advance":
            run.advance(arguments[0])
        elif name == "commit":
            run.commit()
        else:
            run.crash()
    run.finish()
    assert_as_wanted(run)


def assert_as_wanted(run: Run) -> None:
    """What was written is what the plain join of the finished logs gives."""
    run.buffer.close()
    steps = (sorted(run.steps[0].items()), sorted(run.steps[1].items()))
    wanted, found = oracle.join(run.rules, run.impressions, run.outcomes, steps), run.joined
    assert (wanted.late_impressions, wanted.late, wanted.orphaned) == (
        found.late_impressions,
        found.late,
        found.orphaned,
    )
    assert wanted.attributed == found.attributed
    assert wanted.samples == found.samples
    assert len(run.impressions) == found.samples.total() + found.late_impressions.total() + run.join.waiting
