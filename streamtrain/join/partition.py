"""One partition of a join in a running process: its state, how it is rebuilt, and when an idle log is advanced.

From where its logs are read again is kept with the committed offsets, as JSON of at most 4 KiB.
"""

import json
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from streamtrain.errors import SourceRefused
from streamtrain.join.buffer import Buffer
from streamtrain.join.engine import JoinedSample, JoinPosition, Outcome, PartitionJoin, Rules
from streamtrain.join.messages import JoinReader
from streamtrain.stream.dead_letters import DeadLetter
from streamtrain.stream.source import Fetched

TOO_LARGE = "too_large"


class Committed(NamedTuple):
    """What a group has committed of one log.

    Attributes:
        offset: the next one.
        progress: from where the state is rebuilt.
        is_reset: whether a tool has set the offset, so that nothing is known of what came before.
    """

    offset: int
    progress: JoinPosition
    is_reset: bool = False


class JoinedPartition:
    """A partition of both logs. Whatever it has to write is in `join.output` and `letters` until it is committed.

    Args:
        number: of the partition.
        rules: how to join.
        reader: of messages.
        committed: of impressions and of outcomes.
        buffer: of the impressions that wait; None: in memory.
        now: monotonic seconds.

    Attributes:
        join: the state machine.
        buffer: of the impressions that wait.
        letters: messages of each log that cannot be read.
        read: messages of each log, since the last commit.
        tombstones: those of them that had no value, and are skipped.
        ends: offset after the last message of each log, as of the last fetch: also after those of open transactions.
        is_dirty: whether anything has changed since it was committed.
    """

    def __init__(
        self,
        number: int,
        rules: Rules,
        reader: JoinReader,
        committed: tuple[Committed, Committed],
        *,
        buffer: Buffer | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.number = number
        self.buffer = buffer or Buffer()
        self.join = PartitionJoin(rules, committed[0].progress, committed[1].progress, self.buffer)
        self.letters: tuple[list[DeadLetter], list[DeadLetter]] = ([], [])
        self.read = [0, 0]
        self.tombstones = [0, 0]
        self.ends = [0, 0]
        self.is_dirty = False
        self._reader = reader
        self._committed = [one.offset for one in committed]
        self._held: list[list[Fetched]] = [[], []]
        self._now = now
        self._ends: list[int | None] = [None, None]  # of a log that has no more messages for now
        self._since = [now(), now()]  # of the last message
        self._clock_at = now()  # up to which the watermarks are known to have come
        self._rebuilding = [one.progress.start < one.offset for one in committed]
        for log in (0, 1):
            if not self._rebuilding[log]:
                self._replay(log, Fetched(number, [], [], []), self._committed[log])

    @property
    def is_rebuilding(self) -> bool:
        """Whether the state of what was committed is not complete yet."""
        return any(self._rebuilding)

    def lag(self, log: int) -> int:
        """Messages of a log that are not read yet, including those of open transactions."""
        end = self._ends[log]
        return max(0, self.ends[log] - (self.join.positions[log] if end is None else end))

    def is_at_end(self, log: int) -> bool:
        """Whether a log has no more messages for now; there may be some in open transactions."""
        return self._ends[log] is not None

    def open_transaction(self, log: int) -> int | None:
        """Offset from which a log is not read yet, as a transaction is open there; None: no transaction is."""
        end = self._ends[log]
        return None if end is None or end >= self.ends[log] else end

    def all_letters(self) -> tuple[list[DeadLetter], list[DeadLetter]]:
        """Dead letters of impressions and of outcomes, including impressions that are late."""
        late = [
            DeadLetter(self.number, one.offset, "late", self._reader.time, one.value)
            for one in self.join.output.late_impressions
        ]
        return self.letters[0] + late, self.letters[1]

    def add(self, log: int, fetched: Fetched) -> None:
        """The next messages of a log: 0 of impressions, 1 of outcomes."""
        self._since[log] = self._clock_at = self._now()
        self._ends[log] = None
        if not self.is_rebuilding:
            self._join(log, fetched)
            return
        end, first = self._committed[log], len(fetched.offsets)
        if self._rebuilding[log]:
            first = next((i for i, at in enumerate(fetched.offsets) if at >= end), first)
            part = _cut(fetched, 0, first)
            done = first < len(fetched.offsets) or (part.offsets and part.offsets[-1] + 1 >= end)
            self._replay(log, part, end if done else part.offsets[-1] + 1)
        else:
            first = 0
        if first < len(fetched.offsets):
            self._held[log].append(_cut(fetched, first, len(fetched.offsets)))
        self._go_on()

    def end(self, log: int, offset: int) -> None:
        """A log has no more committed messages for now; `offset` is the next one."""
        self._ends[log] = offset
        if self._rebuilding[log]:
            self._replay(log, Fetched(self.number, [], [], []), self._committed[log])
            self._go_on()

    def _replay(self, log: int, fetched: Fetched, position: int) -> None:
        """Reads what was read before; what came of it is written already."""
        self._feed(log, fetched, position)
        self._rebuilding[log] = position < self._committed[log]
        self.join.output.clear()
        self.letters[log].clear()

    def _go_on(self) -> None:
        if self.is_rebuilding:
            return
        for log, held in enumerate(self._held):
            for fetched in held:
                self._join(log, fetched)
            held.clear()

    def _join(self, log: int, fetched: Fetched) -> None:
        if fetched.offsets:
            self.read[log] += len(fetched.offsets)
            self.tombstones[log] += fetched.values.count(None)
            self._feed(log, fetched, fetched.offsets[-1] + 1)
            self.is_dirty = True

    def _feed(self, log: int, fetched: Fetched, position: int) -> None:
        if log == 0:
            impressions, letters = self._reader.impressions(fetched)
            self.join.read_impressions(impressions, position)
        else:
            outcomes, letters = self._reader.outcomes(fetched)
            self.join.read_outcomes(outcomes, position)
        self.letters[log].extend(letters)

    def advance_idle(self, idle: float) -> None:
        """Advances the watermark of a log without messages: to that of the other one, or with the clock if both idle.

        Args:
            idle: seconds at its end after which a log is idle.
        """
        now = self._now()
        for log in (0, 1):
            if self.open_transaction(log) is not None:  # what it holds is not known, nor what time it is there
                self._since[log] = now
        is_idle = [self.is_at_end(log) and now - self._since[log] >= idle for log in (0, 1)]
        if self.is_rebuilding or not any(is_idle):
            return
        to = max(self.join.watermarks)
        if not math.isfinite(to):
            return
        if all(is_idle):
            to += now - self._clock_at
        if self.join.advance(to if is_idle[0] else -math.inf, to if is_idle[1] else -math.inf):
            self.is_dirty, self._clock_at = True, now

    def refuse_large(self, limits: tuple[int, int, int]) -> None:
        """Makes dead letters of what its topic does not take.

        Args:
            limits: the most bytes of key and value of a sample, of a late outcome and of an orphaned one.
        """
        output = self.join.output
        kept: list[JoinedSample] = []
        for sample in output.samples:
            if len(sample.value) + 4 * len(sample.id) <= limits[0] or _size(sample) <= limits[0]:
                kept.append(sample)
            else:
                self._refuse(0, sample.offset, sample.impression, _size(sample), limits[0])
        output.samples = kept
        for outcomes, limit in ((output.late, limits[1]), (output.orphaned, limits[2])):
            large = [one for one in outcomes if _size(one) > limit]
            for one in large:
                self._refuse(1, one.offset, one.value, _size(one), limit)
            outcomes[:] = [one for one in outcomes if _size(one) <= limit]

    def _refuse(self, log: int, offset: int, value: bytes, size: int, limit: int) -> None:
        detail = f"it would be written as {size:,} bytes; its topic takes {limit:,}"
        self.letters[log].append(DeadLetter(self.number, offset, TOO_LARGE, "", value, detail))

    def close(self) -> None:
        """Forgets the state, which is rebuilt where the partition is assigned next."""
        self.buffer.close()

    def committed(self) -> None:
        """What was to be written is written."""
        self.is_dirty = False
        self.join.output.clear()
        for letters in self.letters:
            letters.clear()


def _size(of: JoinedSample | Outcome) -> int:
    return len(of.value) + len(of.id.encode(errors="surrogatepass"))


def _cut(fetched: Fetched, begin: int, end: int) -> Fetched:
    partition, offsets, values, times = fetched
    return Fetched(partition, offsets[begin:end], values[begin:end], times[begin:end])


def to_metadata(progress: JoinPosition, sample: int | None = None, topic: str = "") -> str:
    """The metadata of a committed offset: {"start", "watermark", "steps"}, the last as differences in a row.

    Args:
        progress: from where the log is read again.
        topic: identity of the log's topic, as {"topic"}: offsets of one that is created again mean other messages.
        sample: offset after the last sample that was written, as {"sample"}: the end of its topic is after the markers
            of transactions.

    >>> to_metadata(Progress(7, 1.5, ((9, 2.0), (12, 4.25))))
    '{"start":7,"watermark":1.5,"steps":[2,500,3,2250]}'
    """
    steps: list[int] = []
    offset, time = progress.start, _milliseconds(progress.watermark)
    for at, watermark in progress.steps:
        steps += [at - offset, _milliseconds(watermark) - time]
        offset, time = at, _milliseconds(watermark)
    watermark_ = progress.watermark if math.isfinite(progress.watermark) else None
    fields: dict[str, Any] = {"start": progress.start, "watermark": watermark_, "steps": steps}
    fields |= ({} if sample is None else {"sample": sample}) | ({"topic": topic} if topic else {})
    return json.dumps(fields, separators=(",", ":"))


def sample_of_metadata(text: str | None) -> int:
    """The offset after the last sample that was written when an offset was committed; 0: none was."""
    return int(json.loads(text).get("sample", 0)) if text else 0


def topic_of_metadata(text: str | None) -> str:
    """The identity of the topic whose offset was committed; "": unknown."""
    return str(json.loads(text).get("topic", "")) if text else ""


def from_metadata(text: str | None, committed: int) -> JoinPosition:
    """The inverse of `to_metadata`; without metadata, nothing is read again.

    Args:
        text: of the committed offset.
        committed: that offset.

    Raises:
        SourceRefused: something else has committed the offset.
    """
    if not text:
        return JoinPosition(committed)
    try:
        fields = json.loads(text)
        offset, watermark = int(fields["start"]), fields["watermark"]
        start = -math.inf if watermark is None else float(watermark)
        time, steps, flat = _milliseconds(start), [], [int(one) for one in fields["steps"]]
        first = offset
        for gap, more in zip(flat[::2], flat[1::2], strict=True):
            offset, time = offset + gap, time + more
            steps.append((offset, time / 1000))
        return JoinPosition(first, start, tuple(steps))
    except (ValueError, KeyError, TypeError) as exc:
        raise SourceRefused(
            f"the offset {committed} was not committed by `streamtrain join`: its metadata is {text[:80]!r}; let "
            "nothing else use the group"
        ) from exc


def _milliseconds(time: float) -> int:
    return round(time * 1000) if math.isfinite(time) else 0
