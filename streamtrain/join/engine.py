"""The join of one partition: impressions and outcomes in, samples out. A state machine without Kafka.

The result is a function of the two logs alone: it does not depend on how the reading of one interleaves with the
reading of the other, so a join that is rebuilt from the logs after a crash continues as if nothing had happened. All
rules therefore compare event times with watermarks: the watermark of a log at an offset is the largest event time
before that offset, or what an idle log was advanced to (`advance`), whichever is later.

With grace g, the longest wait w and the wait w_l of label l, for an impression with time t_i that was read at watermark
W_i of the impressions, and an outcome with time t_o that was read at watermark W_o of the outcomes:

* An impression is late if t_i + g < W_i.
* An outcome belongs to an impression with its id if t_i - g <= t_o <= t_i + w + g, W_o < t_i + w + g and
  W_i <= t_o + g. Impressions with the same id have the same outcomes.
* It counts for label l of the impression if t_o <= t_i + w_l and W_o < t_i + w_l. If it counts for no label of the
  first impression it belongs to, it is late.
* An outcome that belongs to no impression is orphaned once the watermark of the impressions is beyond t_o + g.
* Label l is settled once the watermark of the outcomes reaches t_i + w_l.

An impression is kept until no outcome can belong to it, and until no message that belongs to it would be taken for
anything else if the logs were read again from the next impression on: W_i > t_i + w + 2g and W_o >= t_i + w + g.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import chain
from typing import Literal, NamedTuple

import msgspec

from streamtrain.errors import ConfigError
from streamtrain.join.buffer import Buffer

MOST_STEPS = 200
"""Advances of one log that are remembered: as many as fit into the metadata of a committed offset."""


@dataclass(frozen=True)
class JoinLabel:
    """A label of the sample.

    Attributes:
        name: field of the sample.
        kinds: kinds of outcomes that make it.
        wait: seconds that it waits for an outcome.
        default: its value without an outcome.
        value: whether it is the outcome's value, instead of 1.
        attribution: which outcome counts if there are several, in the order of the log; "sum": all of them.
        cancelled_by: kinds of outcomes that take earlier ones back.
    """

    name: str
    kinds: frozenset[str]
    wait: float
    default: float = 0.0
    value: bool = False
    attribution: Literal["first", "last", "sum"] = "first"
    cancelled_by: frozenset[str] = frozenset()

    @property
    def is_decided_at_once(self) -> bool:
        """Whether the first outcome decides it, whatever comes later."""
        return self.attribution == "first" and not self.cancelled_by


@dataclass(frozen=True)
class Rules:
    """How to join.

    Attributes:
        labels: of a sample, in the order in which they are written.
        grace: seconds by which messages of a log may be out of order, and an outcome may be ahead of its impression.
        emit: "settled": a sample is written once the wait of all its labels is over; "first": as soon as no outcome can
            change it any more, which the first outcome may bring about. The samples are the same.
        keep_negatives: share of the samples with default labels alone that is written.
        weight: field with the number of samples for which a sample stands; "": none.
    """

    labels: tuple[JoinLabel, ...]
    grace: float = 300.0
    emit: Literal["settled", "first"] = "first"
    keep_negatives: float = 1.0
    weight: str = ""

    def __post_init__(self) -> None:
        if not self.labels:
            raise ConfigError("a join needs at least one label")

    @property
    def wait(self) -> float:
        """The longest wait of all labels."""
        return max(label.wait for label in self.labels)


# The state has no cycles. With gc=False the garbage collector does not scan it, which took half of the time.


class Impression(msgspec.Struct, frozen=True, gc=False, eq=False):
    """What was shown: a sample without labels."""

    offset: int
    id: str
    time: float
    value: bytes


class Outcome(msgspec.Struct, frozen=True, gc=False, eq=False):
    """What happened afterwards. `number` is its value, and `value` the bytes of its message."""

    offset: int
    id: str
    time: float
    kind: str
    number: float
    value: bytes


class JoinedSample(NamedTuple):
    """An impression with its labels.

    Attributes:
        id: of the impression.
        value: bytes of the message.
        offset: of the impression.
        labels: index of the byte at which the labels begin, instead of the impression's closing brace.
    """

    id: str
    value: bytes
    offset: int
    labels: int

    @property
    def impression(self) -> bytes:
        """The message without its labels."""
        return self.value[: self.labels] + b"}"


class JoinPosition(NamedTuple):
    """Where a log is read again from, so that the state can be rebuilt.

    Attributes:
        start: offset of the oldest message that the state depends on.
        watermark: of the log at `start`.
        steps: advances after it, each with the offset of the next message and the watermark, ascending.
    """

    start: int
    watermark: float = -math.inf
    steps: tuple[tuple[int, float], ...] = ()


BEGIN = JoinPosition(0)
"""The progress of a log that is read from its beginning."""


@dataclass
class JoinOutput:
    """What a join has to write, in order; the writer empties the lists.

    Attributes:
        samples: joined.
        late_impressions: that are not joined.
        late, orphaned: outcomes that count for no label.
        dropped: number of samples with default labels that were left out.
        ignored: number of outcomes of kinds that make no label.
        positives: number of samples with an outcome that counts, by label.
        delays: seconds from impression to outcome, of the outcomes that count.
    """

    samples: list[JoinedSample] = field(default_factory=list)
    late_impressions: list[Impression] = field(default_factory=list)
    late: list[Outcome] = field(default_factory=list)
    orphaned: list[Outcome] = field(default_factory=list)
    dropped: int = 0
    ignored: int = 0
    positives: Counter[str] = field(default_factory=Counter)
    delays: list[float] = field(default_factory=list)

    def clear(self) -> None:
        """Forgets everything."""
        for one in (self.samples, self.late_impressions, self.late, self.orphaned, self.positives, self.delays):
            one.clear()
        self.dropped = self.ignored = 0


class _Held(msgspec.Struct, gc=False, eq=False):
    """An impression in the state.

    Attributes:
        before: watermark of the impressions at its offset.
        due: time at which its sample is written, or the first of several.
        value: what its message is taken from the buffer with; None: its sample is written.
        values: those of its labels, None where no outcome counts; None: none counts for any.
    """

    offset: int
    id: str
    time: float
    before: float
    due: float
    value: bytes | int | None
    values: list[float | None] | None = None


class _Happened(msgspec.Struct, gc=False, eq=False):
    """An outcome in the state.

    Attributes:
        before: watermark of the outcomes at its offset.
        belongs: to an impression.
    """

    outcome: Outcome
    before: float
    belongs: bool = False


class _Log:
    """Where the reading of one log stands."""

    def __init__(self, progress: JoinPosition) -> None:
        self.next = progress.start
        self.watermark = progress.watermark
        self.steps: deque[tuple[int, float]] = deque()
        self._replayed = deque(progress.steps)

    @property
    def next_step(self) -> float:
        """Offset of the next advance that is to be made again."""
        return self._replayed[0][0] if self._replayed else math.inf

    def replay_step(self) -> None:
        """Makes the next advance again."""
        offset, watermark = self._replayed.popleft()
        self.step(offset, watermark)

    def step(self, offset: int, watermark: float) -> None:
        """Advances the watermark, and remembers it."""
        if self.steps and self.steps[-1][0] == offset:
            self.steps.pop()
        self.steps.append((offset, watermark))
        self.watermark = max(self.watermark, watermark)

    def progress(self, start: int, before: float) -> JoinPosition:
        """Where to read again from, if the oldest message needed is at `start`."""
        while self.steps and self.steps[0][0] <= start:
            self.steps.popleft()
        return JoinPosition(start, before, tuple(self.steps))


class PartitionJoin:
    """The join of one partition.

    Args:
        rules: how to join.
        impressions, outcomes: where reading begins.
        buffer: of the impressions that wait; None: in memory.

    Attributes:
        output: what is to be written.
        waiting: number of impressions whose samples are not written yet.
    """

    def __init__(
        self,
        rules: Rules,
        impressions: JoinPosition = BEGIN,
        outcomes: JoinPosition = BEGIN,
        buffer: Buffer | None = None,
    ) -> None:
        self.output = JoinOutput()
        self._buffer = buffer or Buffer()
        self.waiting = 0
        self._rules = rules
        self._wait, self._grace = rules.wait, rules.grace
        self._by_kind = _labels_by_kind(rules.labels)
        self._impressions, self._outcomes = _Log(impressions), _Log(outcomes)
        self._held: dict[str, _Held | deque[_Held]] = {}
        self._order: deque[_Held] = deque()  # all of _held, by offset
        self._deadlines: list[tuple[float, int, _Held]] = []  # heap of those whose samples are not written
        self._happened: deque[_Happened] = deque()  # by offset
        self._recent: dict[str, list[_Happened]] = {}  # those that may belong to impressions that are not read yet
        self._expiries: list[tuple[float, int, _Happened]] = []  # heap of the same
        self._suffix = _Suffix(rules)
        self._is_early = rules.emit == "first"

    @property
    def watermarks(self) -> tuple[float, float]:
        """Watermarks of impressions and of outcomes."""
        return self._impressions.watermark, self._outcomes.watermark

    @property
    def positions(self) -> tuple[int, int]:
        """The next offsets of impressions and of outcomes."""
        return self._impressions.next, self._outcomes.next

    def progress(self) -> tuple[JoinPosition, JoinPosition]:
        """Where impressions and outcomes are read again from after a crash."""
        self._drop()
        impressions, outcomes = self._impressions, self._outcomes
        first, last = (impressions.next, impressions.watermark), (outcomes.next, outcomes.watermark)
        if self._order:
            first = self._order[0].offset, self._order[0].before
        if self._happened:
            last = self._happened[0].outcome.offset, self._happened[0].before
        return impressions.progress(*first), outcomes.progress(*last)

    def read_impressions(self, messages: Sequence[Impression], position: int) -> None:
        """Joins the next impressions.

        Args:
            messages: by offset; those that are missing cannot be read.
            position: the offset after them.
        """
        for part in _parts(self._impressions, messages, position):
            self._join_impressions(part)
            self._expire()
        self._impressions.next = position

    def _join_impressions(self, messages: Iterable[Impression]) -> None:
        log, held, grace, wait = self._impressions, self._held, self._grace, self._wait
        watermark, settled, recent = log.watermark, self._outcomes.watermark, self._recent
        order, deadlines, put = self._order, self._deadlines, self._buffer.put
        for message in messages:
            offset, id_, time = message.offset, message.id, message.time
            if time + grace < watermark:
                self.output.late_impressions.append(message)
                continue
            one = _Held(offset, id_, time, watermark, time + wait, put(message.value))
            older = held.setdefault(id_, one)
            if older is not one:
                if isinstance(older, deque):
                    older.append(one)
                else:
                    held[id_] = deque((older, one))
            order.append(one)
            self.waiting += 1
            if id_ in recent:
                self._claim(one)
            if one.value is not None:
                if settled >= one.due:
                    self._settle(one)
                else:
                    heappush(deadlines, (one.due, offset, one))
            watermark = max(watermark, time)
        log.watermark = watermark

    def read_outcomes(self, messages: Sequence[Outcome], position: int) -> None:
        """Joins the next outcomes; arguments as for `read_impressions`."""
        log, by_kind, deadlines = self._outcomes, self._by_kind, self._deadlines
        for part in _parts(log, messages, position):
            for message in part:
                if message.kind in by_kind:
                    self._join_outcome(_Happened(message, log.watermark))
                else:
                    self.output.ignored += 1
                if message.time > log.watermark:
                    log.watermark = message.time
                    if deadlines and deadlines[0][0] <= log.watermark:
                        self._settle_due()
            self._settle_due()
        log.next = position

    def _join_outcome(self, happened: _Happened) -> None:
        self._happened.append(happened)
        outcome = happened.outcome
        found = self._held.get(outcome.id, ())
        for one in (found,) if isinstance(found, _Held) else found:
            if self._belongs(happened, one) and self._attribute(happened, one):
                self._settle_early(one)
        if self._impressions.watermark <= outcome.time + self._grace:
            self._recent.setdefault(outcome.id, []).append(happened)
            heappush(self._expiries, (outcome.time, outcome.offset, happened))
        elif not happened.belongs:
            self._mark_orphaned(happened)

    def _belongs(self, happened: _Happened, one: _Held) -> bool:
        grace, time = self._grace, happened.outcome.time
        return (
            -grace <= time - one.time <= self._wait + grace
            and happened.before < one.time + self._wait + grace
            and one.before <= time + grace
        )

    def _claim(self, one: _Held) -> None:
        """Takes what was read before the impression: all of it, before the sample is written."""
        mine = [happened for happened in self._recent[one.id] if self._belongs(happened, one)]
        if any([self._attribute(happened, one) for happened in mine]):
            self._settle_early(one)

    def _attribute(self, happened: _Happened, one: _Held) -> bool:
        """Returns whether the outcome counts for a label of the impression."""
        outcome = happened.outcome
        since, counts = outcome.time - one.time, False
        for index, is_cancelled in self._by_kind[outcome.kind]:
            label = self._rules.labels[index]
            if since <= label.wait and happened.before < one.time + label.wait:
                counts = True
                if one.values is None:
                    one.values = [None] * len(self._rules.labels)
                one.values[index] = _attributed(label, one.values[index], outcome.number, is_cancelled)
        if not happened.belongs:
            happened.belongs = True
            if counts:
                self.output.delays.append(since)
            else:
                self.output.late.append(outcome)
        return counts

    def _settle_early(self, one: _Held) -> None:
        """Writes the sample if no label can change any more; else brings its deadline forward, if that is possible."""
        if not self._is_early or one.value is None:
            return
        assert one.values is not None
        due = max(
            (
                one.time + label.wait
                for label, value in zip(self._rules.labels, one.values, strict=True)
                if value is None or not label.is_decided_at_once
            ),
            default=-math.inf,
        )
        if due <= self._outcomes.watermark:
            self._settle(one)
        elif due < one.due:
            one.due = due
            heappush(self._deadlines, (due, one.offset, one))

    def _settle_due(self) -> None:
        deadlines, watermark = self._deadlines, self._outcomes.watermark
        while deadlines and deadlines[0][0] <= watermark:
            _, _, one = heappop(deadlines)
            if one.value is not None:
                self._settle(one)

    def _settle(self, one: _Held) -> None:
        """Writes the sample."""
        assert one.value is not None
        value, one.value = self._buffer.take(one.value), None
        self.waiting -= 1
        output, values = self.output, one.values
        if values is not None and values.count(None) < len(values):
            for label, of in zip(self._rules.labels, values, strict=True):
                output.positives[label.name] += of is not None
        elif self._rules.keep_negatives < 1 and _draw(one.id) >= self._rules.keep_negatives:
            output.dropped += 1
            return
        head = value.rstrip()[:-1]
        output.samples.append(JoinedSample(one.id, head + self._suffix.of(values), one.offset, len(head)))

    def _expire(self) -> None:
        """Outcomes to which no impression can come any more."""
        expiries, watermark, grace = self._expiries, self._impressions.watermark, self._grace
        while expiries and expiries[0][0] + grace < watermark:
            _, _, happened = heappop(expiries)
            of_id = self._recent[happened.outcome.id]
            of_id.remove(happened)
            if not of_id:
                del self._recent[happened.outcome.id]
            if not happened.belongs:
                self._mark_orphaned(happened)

    def _mark_orphaned(self, happened: _Happened) -> None:
        self.output.orphaned.append(happened.outcome)

    def _drop(self) -> None:
        """Forgets what can no longer matter."""
        grace, wait, (impressions, outcomes) = self._grace, self._wait, self.watermarks
        order, happened, held = self._order, self._happened, self._held
        while order and impressions > order[0].time + wait + 2 * grace and outcomes >= order[0].time + wait + grace:
            one = order.popleft()
            found = held[one.id]
            if isinstance(found, deque):
                found.popleft()
            if found is one or not found:
                del held[one.id]
        while (
            happened
            and impressions > happened[0].outcome.time + wait + 3 * grace
            and outcomes >= happened[0].outcome.time + wait + 2 * grace
        ):
            happened.popleft()

    def advance(self, impressions: float, outcomes: float) -> bool:
        """Advances the watermarks of idle logs; smaller values leave them as they are.

        Steps are at least 1/200 of the time for which the state is kept, so that all of them can be remembered.

        Returns:
            Whether a watermark has been advanced.
        """
        least = (self._wait + 3 * self._grace) / (MOST_STEPS / 2)
        moved = False
        for log, wanted in ((self._impressions, impressions), (self._outcomes, outcomes)):
            to = math.floor(wanted * 1000) / 1000 if math.isfinite(wanted) else wanted
            since = log.steps[-1][1] if log.steps else -math.inf
            is_same = bool(log.steps) and log.steps[-1][0] == log.next
            if log.watermark < to and (is_same or (since + least <= to and len(log.steps) < MOST_STEPS)):
                log.step(log.next, to)
                moved = True
        if moved:
            self._expire()
            self._settle_due()
        return moved


def _parts(log: _Log, messages: Sequence[Impression] | Sequence[Outcome], position: int) -> Iterator[Sequence]:  # type: ignore[type-arg]
    """Messages up to each advance that is to be made again, which is made in between."""
    begin = 0
    while (step := log.next_step) <= position:
        end = next((at for at in range(begin, len(messages)) if messages[at].offset >= step), len(messages))
        yield messages[begin:end]
        log.replay_step()
        begin = end
    yield messages[begin:] if begin else messages


def _labels_by_kind(labels: Sequence[JoinLabel]) -> Mapping[str, list[tuple[int, bool]]]:
    """The labels that each kind of outcome makes or cancels, and whether it cancels."""
    found: dict[str, list[tuple[int, bool]]] = {}
    for index, label in enumerate(labels):
        for kind, cancels in chain(((kind, False) for kind in label.kinds), ((k, True) for k in label.cancelled_by)):
            found.setdefault(kind, []).append((index, cancels))
    return found


def _attributed(label: JoinLabel, before: float | None, number: float, is_cancelled: bool) -> float | None:
    """The value of a label after one more outcome."""
    if is_cancelled:
        return None
    number = number if label.value else 1.0
    if before is None or label.attribution == "last":
        return number
    return before + number if label.attribution == "sum" else before


def _draw(of: str) -> float:
    """A number from 0 to 1 that depends on the id alone."""
    return int.from_bytes(blake2b(of.encode(errors="surrogatepass"), digest_size=7).digest()) / 2**56


class _Suffix:
    """What ends a sample: its labels, instead of the impression's closing brace."""

    def __init__(self, rules: Rules) -> None:
        self._labels = [(b"," + msgspec.json.encode(label.name) + b":", label.default) for label in rules.labels]
        one_of = 1 / rules.keep_negatives
        self._weight = b"," + msgspec.json.encode(rules.weight) + b":" if rules.weight else b""
        self._negative = self._join([None] * len(self._labels), one_of)

    def of(self, values: list[float | None] | None) -> bytes:
        """The suffix of a sample with these labels."""
        if values is None or values.count(None) == len(values):
            return self._negative
        return self._join(values, 1.0)

    def _join(self, values: Sequence[float | None], weight: float) -> bytes:
        texts = [
            name + number_text(default if value is None else value)
            for (name, default), value in zip(self._labels, values, strict=True)
        ]
        texts += [self._weight + number_text(weight)] if self._weight else []
        return b"".join(texts) + b"}"


def number_text(number: float) -> bytes:
    """A number as JSON, without a fraction where it is an integer."""
    if number.is_integer() and abs(number) < 1e15:
        return b"%d" % number
    return repr(number).encode()
