"""Outcomes: each is counted for a label, or not, or a dead letter, however deep the stack.

Input: messages, with a byte 0xFE between them.
"""

import math
from collections.abc import Iterator

from streamtrain.join.engine import Impression, JoinLabel, PartitionJoin, Rules
from tests.fuzz.readers import in_join
from tests.fuzz.seeds import SAMPLES

_RULES = Rules(
    (
        JoinLabel("clicked", frozenset({"click"}), 60.0, cancelled_by=frozenset({"undo"})),
        JoinLabel("spent", frozenset({"buy"}), 120.0, value=True, attribution="sum"),
    ),
    grace=60.0,
)


def run(data: bytes) -> None:
    """One input."""
    messages = data.split(in_join.BETWEEN)[: in_join.MOST]
    outcomes = in_join.read(in_join.READER.outcomes, messages)
    assert all(math.isfinite(one.number) and one.value == messages[one.offset] for one in outcomes)
    join = PartitionJoin(_RULES)
    shown = [Impression(i, one.id, one.time, b"{}") for i, one in enumerate(sorted(outcomes, key=lambda one: one.time))]
    join.read_impressions(shown, len(shown))
    join.read_outcomes(outcomes, len(messages))
    join.advance(4e11, 4e11)
    assert not join.waiting
    assert join.output.ignored + len(join.output.delays) + len(join.output.late) <= len(outcomes)


def seeds() -> Iterator[bytes]:
    """Good ones and bad ones."""
    kinds = [b'"kind":"click"}', b'"kind":"undo","value":1}', b'"kind":"buy","value":2.5}', b'"kind":7,"value":null}']
    good = [one.rstrip()[:-1] + b"," + kind for one in in_join.SEEDS if one.rstrip()[-1:] == b"}" for kind in kinds]
    yield from good
    yield in_join.BETWEEN.join(SAMPLES)
    yield in_join.BETWEEN.join(good)
