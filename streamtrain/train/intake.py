"""Intake: from the stream to batches: what is fetched, decoded, too late, bad, or not to be learned from."""

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from streamtrain.errors import BadSample
from streamtrain.logs import Seldom
from streamtrain.metrics.worker import WorkerMetrics
from streamtrain.model.batch import Batch
from streamtrain.model.guard import BadSampleGuard
from streamtrain.model.samples import LATE
from streamtrain.model.sampling import Sampling
from streamtrain.ps.clock import Offsets, Span
from streamtrain.stream.dead import DeadLetter, DeadLetters
from streamtrain.stream.feed import Feed, Messages
from streamtrain.stream.formats import Format
from streamtrain.stream.source import Listener, Stream
from streamtrain.stream.waiting import available
from streamtrain.train.behind import Behind

logger = logging.getLogger(__name__)


class Taken(NamedTuple):
    """What there is to learn of some ranges.

    Attributes:
        batch: the samples to learn from.
        watermarks: latest event time by partition up to the end of its range, in seconds.
        letters: messages that cannot be learned: to be buried before the ranges count as learned.
    """

    batch: Batch
    watermarks: Mapping[int, float]
    letters: int = 0


class Intake(Offsets, Protocol):
    """Where a loop takes its batches from."""

    def open(self, listener: Listener) -> None:
        """Begins; the listener is told which partitions are the loop's."""

    def poll(self, most: int, seconds: float) -> None:
        """Fetches up to `most` samples more, or waits for some; meanwhile the listener may be called."""

    def finished(self) -> bool:
        """Whether there will never be more than was fetched."""

    def read(self, spans: Sequence[Span]) -> Taken:
        """The samples of some ranges, of which each partition has one at most."""

    def bury(self) -> None:
        """Waits until the dead letters of all that was read are written."""

    def seek(self, positions: Mapping[int, int], watermarks: Mapping[int, float]) -> None:
        """Goes to where the shards stand."""

    def release(self, spans: Sequence[Span]) -> None:
        """These ranges are learned."""

    def commit(self, positions: Mapping[int, int]) -> None:
        """Notes what is learned, for others to see; and measures how much is not."""

    def close(self) -> None:
        """Ends; the listener is told that the partitions go."""


@dataclass(frozen=True)
class Rules:
    """What is learned from, and what is not.

    Every decision is a pure function of the log, so that all replays come to the same: a shard that is restored learns
    exactly what it did before.

    Attributes:
        late_after: seconds that a sample may be behind the watermark of its partition; None: any.
        late_is_dead: whether later ones are dead letters; else they are counted and learned.
        max_bad_ratio: share of bad messages above which it stops.
    """

    late_after: float | None = None
    late_is_dead: bool = True
    max_bad_ratio: float = 1.0


class StreamIntake:
    """The intake of a worker. Used by one thread.

    Args:
        stream: the topic.
        group: of the workers that share it.
        job: identifies what is learned.
        format: of messages.
        feed: what holds them.
        letters: where bad ones go; None: they are counted only.
        rules: what is learned from.
        sampling: of the model, if it learns from a part.
        metrics: where all is counted.
        stopped: once set, waiting for a schema registry ends.
    """

    def __init__(
        self,
        stream: Stream,
        group: str,
        job: str,
        format: Format,
        *,
        feed: Feed | None = None,
        letters: DeadLetters | None = None,
        rules: Rules | None = None,
        sampling: Sampling | None = None,
        metrics: WorkerMetrics | None = None,
        stopped: threading.Event | None = None,
    ) -> None:
        self._stopped = stopped or threading.Event()
        self._stream, self._group, self._job = stream, group, job
        self._format = format
        self._feed = feed or Feed()
        self._letters = letters
        self._rules = rules or Rules()
        self._sampling = sampling
        self._metrics = metrics or WorkerMetrics()
        self._guard = BadSampleGuard(self._rules.max_bad_ratio)
        self._watermarks: dict[int, float] = {}
        self._seldom, self._behind = Seldom(), Behind()
        self._refused: dict[int, int] = {}  # offset after the last message that was refused, by partition
        self.reach, self.count = self._feed.reach, self._feed.count

    def open(self, listener: Listener) -> None:
        """See Intake. Waits for the service, if it is away."""
        available(lambda: self._feed.open(self._stream, self._group, self._job, listener), self._stopped)

    def poll(self, most: int, seconds: float) -> None:
        """See Intake."""
        skipped = self._feed.skipped
        self._feed.poll(most, seconds)
        self._metrics.skipped(self._feed.skipped - skipped)
        self._metrics.buffered(self._feed.nbytes)

    def finished(self) -> bool:
        """See Intake."""
        return self._feed.source.finished()

    def read(self, spans: Sequence[Span]) -> Taken:
        """See Intake.

        Raises:
            TooManyBadSamples: the share of bad messages is above the limit; none of these is a dead letter yet.
            SourceUnavailable: the schema registry does not answer, and `stopped` is set.
        """
        messages = self._feed.read(spans)
        batch, bad = self._decode(messages.values)
        self._guard.count(len(batch), bad)
        partitions = np.repeat([span.partition for span in spans], np.diff(messages.starts))
        watermarks, late = self._watch(spans, messages, batch)
        refused = bad
        if late.any() and self._rules.late_is_dead:
            refused = sorted([*bad, *(BadSample(int(i), LATE, "") for i in batch.kept[late])], key=lambda b: b.index)
            batch = batch.select(~late)
        letters = [
            DeadLetter(int(partitions[b.index]), int(messages.offsets[b.index]), b.reason, b.field, value)
            for b, value in ((b, messages.values[b.index]) for b in refused)
        ]
        self._metrics.late(int(late.sum()))
        if times := self._seldom.due(LATE, 0 if self._rules.late_is_dead else int(late.sum())):
            logger.warning(
                "%d samples came more than %g s late, and are learned even so", times, self._rules.late_after or 0
            )
        self._refuse(letters)
        return Taken(self._sampled(batch, partitions, messages.offsets), watermarks, len(letters))

    def _decode(self, values: Sequence[bytes]) -> tuple[Batch, list[BadSample]]:
        """Waits for the schema registry, if there is one and it is away."""
        return available(lambda: self._format.decode(values), self._stopped)

    def _watch(
        self, spans: Sequence[Span], messages: Messages, batch: Batch
    ) -> tuple[dict[int, float], NDArray[np.bool_]]:
        """Watermarks after these ranges, and which samples come too late by the watermark before each."""
        late = np.zeros(len(batch), np.bool_)
        bounds = np.searchsorted(batch.kept, messages.starts)
        for span, start, stop in zip(spans, bounds, bounds[1:], strict=False):
            before = self._watermarks.get(span.partition, 0.0)
            running = np.maximum.accumulate(np.concatenate([[before], batch.times[start:stop]]))
            self._watermarks[span.partition] = float(running[-1])
            if self._rules.late_after is not None:
                late[start:stop] = batch.times[start:stop] < running[:-1] - self._rules.late_after
        return {span.partition: self._watermarks[span.partition] for span in spans}, late

    def _sampled(self, batch: Batch, partitions: NDArray[np.int64], offsets: NDArray[np.int64]) -> Batch:
        if self._sampling is None or not len(batch):
            return batch
        kept = self._sampling.select(batch, partitions[batch.kept], offsets[batch.kept])
        self._metrics.sampled_out(len(batch) - len(kept))
        return kept

    def _refuse(self, letters: Sequence[DeadLetter]) -> None:
        """Counts and writes what is refused; what is read again after a rewind only once."""
        for one in letters:
            if one.offset < self._refused.get(one.partition, 0):
                continue
            self._refused[one.partition] = one.offset + 1
            self._metrics.bad(one.reason, 1)
            if times := self._seldom.due(one.reason):
                logger.warning(
                    "%d messages are refused: %s%s; the last is offset %d of partition %d",
                    *(times, one.reason, f" in field {one.field!r}" if one.field else "", one.offset, one.partition),
                    extra={"batch": f"{one.partition}:{one.offset}-{one.offset}"},
                )
            if self._letters is not None:
                self._letters.write(one)
                self._metrics.dead_letters(one.reason, 1)

    def bury(self) -> None:
        """See Intake; errors as of `DeadLetters.flush`."""
        if self._letters is not None:
            self._letters.flush()

    def seek(self, positions: Mapping[int, int], watermarks: Mapping[int, float]) -> None:
        """See Intake."""
        self._watermarks = dict(watermarks)
        for partition, offset in positions.items():
            self._feed.seek(partition, offset)

    def release(self, spans: Sequence[Span]) -> None:
        """See Intake."""
        for span in spans:
            self._feed.release(span.partition, span.end)

    def commit(self, positions: Mapping[int, int]) -> None:
        """See Intake."""
        self._feed.source.commit(positions)
        lag = self._feed.source.lag()
        self._metrics.lag(lag)
        self._behind.look(sum(lag.values()))

    def close(self) -> None:
        """See Intake."""
        self._feed.close()
        if self._letters is not None:
            self._letters.close()
