"""A plain join of finished logs: slow, and as the rules in streamtrain/join/engine.py say, without any state."""

import json
import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from streamtrain.join.engine import Impression, JoinLabel, Outcome, Rules


class Joined(NamedTuple):
    """What the join of finished logs has written, as multisets, and the number of outcomes that count."""

    samples: Counter[str]
    late_impressions: Counter[int]
    late: Counter[int]
    orphaned: Counter[int]
    attributed: int


Steps = Sequence[tuple[int, float]]


class Watermark:
    """Of a log, before an offset, with the advances that were made before the message there was read."""

    def __init__(self, log: Sequence[Impression] | Sequence[Outcome], steps: Steps) -> None:
        self._messages = _highest((one.offset, one.time) for one in log)
        self._steps = _highest(steps)

    def before(self, offset: float) -> float:
        messages, steps = bisect_left(self._messages[0], offset), bisect_right(self._steps[0], offset)
        return max(self._messages[1][messages], self._steps[1][steps])


def _highest(times: Iterable[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Offsets in their order, and the highest time of those before each, and of all."""
    ordered = sorted(times)
    return [at for at, _ in ordered], [*accumulate((time for _, time in ordered), max, initial=-math.inf)]


def join(
    rules: Rules, impressions: Sequence[Impression], outcomes: Sequence[Outcome], steps: tuple[Steps, Steps] = ((), ())
) -> Joined:
    """Joins finished logs; what is not settled by their watermarks is left out."""
    of_impressions, of_outcomes = Watermark(impressions, steps[0]), Watermark(outcomes, steps[1])
    end_i, end_o = of_impressions.before(math.inf), of_outcomes.before(math.inf)
    before = {one: of_impressions.before(one.offset) for one in impressions}
    before_outcome = {one: of_outcomes.before(one.offset) for one in outcomes}
    wait, grace = max(label.wait for label in rules.labels), rules.grace
    late_impressions = [i for i in impressions if i.time + grace < before[i]]
    taken = [i for i in impressions if i.time + grace >= before[i]]
    shown, became = defaultdict[str, list[Impression]](list), defaultdict[str, list[Outcome]](list)
    for i in taken:
        shown[i.id].append(i)
    for o in outcomes:
        became[o.id].append(o)
    known = {kind for label in rules.labels for kind in label.kinds | label.cancelled_by}

    def belongs(o: Outcome, i: Impression) -> bool:
        near = i.id == o.id and i.time - grace <= o.time <= i.time + wait + grace
        return near and before_outcome[o] < i.time + wait + grace and before[i] <= o.time + grace

    def counts(o: Outcome, i: Impression, label: JoinLabel) -> bool:
        is_meant = o.kind in label.kinds | label.cancelled_by
        in_time = o.time <= i.time + label.wait and before_outcome[o] < i.time + label.wait
        return belongs(o, i) and is_meant and in_time

    samples: Counter[str] = Counter()
    for i in taken:
        mine = [o for o in became[i.id] if belongs(o, i)]
        is_early = rules.emit == "first" and _is_decided(rules, mine, i, counts, end_o)
        if end_o < i.time + wait and not is_early:
            continue
        labels = {label.name: _value(label, [o for o in became[i.id] if counts(o, i, label)]) for label in rules.labels}
        samples[json.dumps(json.loads(i.value, parse_int=float) | labels)] += 1
    late, orphaned, attributed = Counter[int](), Counter[int](), 0
    for o in outcomes:
        of = [i for i in shown[o.id] if belongs(o, i)]
        if o.kind not in known:
            continue
        if not of:
            orphaned[o.offset] += end_i > o.time + grace
        elif any(counts(o, of[0], label) for label in rules.labels):
            attributed += 1
        else:
            late[o.offset] += 1
    return Joined(samples, Counter(i.offset for i in late_impressions), late, +orphaned, attributed)


def _is_decided(rules: Rules, mine: list[Outcome], i: Impression, counts: object, end: float) -> bool:
    """Whether every label either has its first outcome, with nothing that could change it, or is settled."""
    return all(
        end >= i.time + label.wait
        or (label.attribution == "first" and not label.cancelled_by and any(counts(o, i, label) for o in mine))  # type: ignore[operator]
        for label in rules.labels
    )


def _value(label: JoinLabel, outcomes: Sequence[Outcome]) -> float:
    values: list[float] = []
    for one in outcomes:
        if one.kind in label.cancelled_by:
            values.clear()
        if one.kind in label.kinds:
            values.append(one.number if label.value else 1.0)
    if not values:
        return label.default
    found: Mapping[str, float] = {"first": values[0], "last": values[-1], "sum": sum(values)}
    return found[label.attribution]
