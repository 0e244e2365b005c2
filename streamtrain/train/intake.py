"""Intake: from messages of the stream to batches: fetching, decoding, lateness, bad messages, sampling."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from streamtrain.errors import BadSample, SourceUnavailable
from streamtrain.incarnation import Incarnation
from streamtrain.logs import LogThrottle
from streamtrain.metrics.worker import WorkerMetrics
from streamtrain.model.bad_samples import BadSampleGuard, Refusals
from streamtrain.model.batch import Batch
from streamtrain.model.samples import LATE, refuse_future
from streamtrain.model.sampling import Sampling
from streamtrain.periodic import retry
from streamtrain.ps.clock import AvailableOffsets, Span
from streamtrain.settings.groups import StreamSettings
from streamtrain.stream.buffer import Messages, PartitionBuffer
from streamtrain.stream.dead_letters import DeadLetter, DeadLetters
from streamtrain.stream.formats.factory import Format
from streamtrain.stream.source import Listener, Stream
from streamtrain.train.lateness import find_late

logger = logging.getLogger(__name__)

_OBSERVE_SECONDS = 60.0
_GROWING_MINUTES = 5
_MIN_LAG = 10_000  # messages


class LagMonitor:
    """Logs once when the lag has grown for minutes, and once when it shrinks again. Used by one thread.

    Args:
        now: seconds of a clock that never goes back.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._due = now() + _OBSERVE_SECONDS
        self._lag = self._grown = 0
        self._is_behind = False

    def observe(self, lag: int) -> None:
        """Takes the lag in messages, which is evaluated at most once a minute."""
        if self._now() < self._due:
            return
        self._due = self._now() + _OBSERVE_SECONDS
        self._grown = self._grown + 1 if lag > self._lag else 0
        self._lag = lag
        if not self._is_behind and self._grown >= _GROWING_MINUTES and lag >= _MIN_LAG:
            logger.warning("falling behind: the lag has grown for %d minutes, to %d messages", self._grown, lag)
            self._is_behind = True
        elif self._is_behind and not self._grown:
            logger.info("catching up: the lag is down to %d messages", lag)
            self._is_behind = False


_WAY_OUT = (
    " (stream.max_bad_ratio). Nothing is learned past this offset: fix the producer, or what reads its messages (the "
    "model's schema, stream.format, stream.schema_file, the schema registry), and restart the workers; or restart them "
    "with stream.max_bad_ratio=1, which makes dead letters of bad messages: `streamtrain deadletters replay` puts "
    "these back once they can be read"
)


class Origins(NamedTuple):
    """Where the samples of a batch come from, in its order.

    Attributes:
        partitions: int64 [n].
        offsets: int64 [n].
        marks: float64 [n], the watermark of its partition before each, in seconds.
    """

    partitions: NDArray[np.int64]
    offsets: NDArray[np.int64]
    marks: NDArray[np.float64]

    def where(self, mask: NDArray[np.bool_]) -> "Origins":
        """Those of the samples where `mask` (bool [n]) is true, in order."""
        return Origins(self.partitions[mask], self.offsets[mask], self.marks[mask])


class DecodedBatch(NamedTuple):
    """What there is to learn of some ranges.

    Attributes:
        batch: the samples to learn from.
        watermarks: latest event time by partition up to the end of its range, in seconds.
        letters: number of dead letters, which must be flushed before the ranges count as learned.
        refusals: by partition, decaying counts of bad messages up to the end of its range.
        origins: where the samples come from.
    """

    batch: Batch
    watermarks: Mapping[int, float]
    letters: int = 0
    refusals: Mapping[int, Refusals] = {}
    origins: Origins | None = None

    def split(
        self, spans: Sequence[Span]
    ) -> tuple[tuple[list[Span], "DecodedBatch"], tuple[list[Span], "DecodedBatch"]]:
        """Two batches to learn one after the other, with their ranges: as they would have been had so much been read.

        Args:
            spans: the ranges of this one, of at least two samples whose origins are known.
        """
        assert self.origins is not None
        middle = len(self.batch) // 2
        partition, offset, mark = (column[middle] for column in self.origins)
        at = [span.partition for span in spans].index(partition)
        whole, cut, others = spans[:at], spans[at], spans[at + 1 :]
        first = [*whole, *([cut._replace(end=int(offset))] if offset > cut.start else [])]
        second = [cut._replace(start=int(offset)), *others]
        before = {p: float(mark) if p == partition else self.watermarks[p] for p, _, _ in first}
        after = {p: self.watermarks[p] for p, _, _ in second}
        ended = {p: of for p, of in self.refusals.items() if p != partition and any(p == one for one, _, _ in first)}
        last = {p: of for p, of in self.refusals.items() if p not in ended}
        is_first = np.arange(len(self.batch)) < middle
        # Dead letters of both go with the first: they are flushed before either counts.
        return (
            (
                first,
                DecodedBatch(self.batch.select(is_first), before, self.letters, ended, self.origins.where(is_first)),
            ),
            (second, DecodedBatch(self.batch.select(~is_first), after, 0, last, self.origins.where(~is_first))),
        )


class Intake(AvailableOffsets, Protocol):
    """Where a loop takes its batches from."""

    def open(self, listener: Listener) -> None:
        """Joins the consumer group; the listener learns which partitions it has."""

    def poll(self, max_messages: int, seconds: float, min_messages: int = 1) -> None:
        """Fetches more samples, or waits for some; meanwhile the listener may be called. Arguments as `Source.poll`."""

    def finished(self) -> bool:
        """Whether there will never be more than was fetched."""

    def read(self, spans: Sequence[Span]) -> DecodedBatch:
        """The samples of some ranges, of which each partition has one at most."""

    def flush_dead_letters(self) -> None:
        """Waits until the dead letters of all that was read are written."""

    def seek(
        self,
        positions: Mapping[int, int],
        watermarks: Mapping[int, float],
        refusals: Mapping[int, Refusals],
    ) -> None:
        """Goes to where the shards stand."""

    def release(self, spans: Sequence[Span]) -> None:
        """These ranges are learned."""

    def idle(self) -> frozenset[int]:
        """Partitions of the loop of which there is nothing that has not been released, as far as is known."""

    def commit(self, positions: Mapping[int, int]) -> None:
        """Notes what is learned, for others to see; and measures how much is not."""

    def close(self) -> None:
        """Leaves the consumer group; the listener's partitions are revoked first."""


class StreamIntake:
    """The intake of a worker. Used by one thread.

    Every decision about a sample is a pure function of the log, so that all replays come to the same: a shard that is
    restored learns exactly what it did before. Only where the log has no time of a message, the worker's clock decides
    whether its sample is too far ahead.

    Args:
        stream: the topic.
        group: consumer group.
        job: identifies what is learned.
        incarnation: the cluster's incarnation; None: it has none.
        format: decodes messages.
        buffer: holds fetched messages.
        dead_letters: takes messages that cannot be learned; None: these are counted only.
        policy: which samples are refused, and how many may be.
        sampling: the model's sampling, if it learns from a part.
        metrics: the worker's metrics.
        stopped: once set, waiting for a schema registry ends.
        now: seconds since the epoch.
    """

    def __init__(
        self,
        stream: Stream,
        group: str,
        job: str,
        format: Format,
        *,
        incarnation: Incarnation | None = None,
        buffer: PartitionBuffer | None = None,
        dead_letters: DeadLetters | None = None,
        policy: StreamSettings = StreamSettings(),  # noqa: B008  # it is immutable
        sampling: Sampling | None = None,
        metrics: WorkerMetrics | None = None,
        stopped: threading.Event | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._now = now
        self._stopped = stopped or threading.Event()
        self._stream, self._group, self._job, self._incarnation = stream, group, job, incarnation
        self._format = format
        self._buffer = buffer or PartitionBuffer()
        self._dead_letters = dead_letters
        self._policy = policy
        self._sampling = sampling
        self._metrics = metrics or WorkerMetrics()
        self._guard = BadSampleGuard(self._policy.max_bad_ratio, _WAY_OUT)
        self._watermarks: dict[int, float] = {}
        self._throttle, self._lag_monitor = LogThrottle(), LagMonitor()
        self._next_letter: dict[int, int] = {}  # offset after the last message that was refused, by partition
        self.reach, self.count = self._buffer.reach, self._buffer.count

    def open(self, listener: Listener) -> None:
        """Waits for the service while it is unreachable."""
        member = (self._stream, self._group, self._job, listener, self._incarnation)
        retry(lambda: self._buffer.open(*member), SourceUnavailable, self._stopped)

    def poll(self, max_messages: int, seconds: float, min_messages: int = 1) -> None:
        skipped, tombstones = self._buffer.skipped, self._buffer.tombstones
        self._buffer.poll(max_messages, seconds, min_messages)
        self._metrics.skipped(self._buffer.skipped - skipped)
        self._metrics.tombstones(self._buffer.tombstones - tombstones)
        self._metrics.buffered(self._buffer.nbytes)

    def finished(self) -> bool:
        return self._buffer.source.finished()

    def read(self, spans: Sequence[Span]) -> DecodedBatch:
        """Decodes ranges.

        Raises:
            TooManyBadSamples: the share of bad messages is above the limit; none of these is a dead letter yet.
            SourceUnavailable: the schema registry does not answer, and `stopped` is set.
        """
        messages = self._buffer.read(spans)
        batch, bad = self._without_future(messages, *self._decode(messages.values))
        self._check_ratio(spans, messages, bad)
        partitions = np.repeat([span.partition for span in spans], np.diff(messages.starts))
        watermarks, marks, late = self._advance_watermarks(spans, messages, batch)
        refused = bad
        if late.any() and self._policy.late == "dead":
            refused = sorted([*bad, *(BadSample(int(i), LATE, "") for i in batch.kept[late])], key=lambda b: b.index)
            batch, marks = batch.select(~late), marks[~late]
        letters = [
            DeadLetter(partition, offset, b.reason, b.field, messages.values[b.index], b.detail)
            for b in refused
            for partition, offset in [(int(partitions[b.index]), int(messages.offsets[b.index]))]
        ]
        self._metrics.late(int(late.sum()))
        if times := self._throttle.allow(LATE, 0 if self._policy.late == "dead" else int(late.sum())):
            logger.warning(
                "%d samples were more than %g s late, and are learned anyway", times, self._policy.late_after or 0
            )
        self._reject(letters)
        refusals = {span.partition: self._guard.remembered(span.partition) for span in spans}
        origins = Origins(partitions[batch.kept], messages.offsets[batch.kept], marks)
        batch, origins = self._sampled(batch, origins)
        return DecodedBatch(batch, watermarks, len(letters), refusals, origins)

    def _check_ratio(self, spans: Sequence[Span], messages: Messages, bad: Sequence[BadSample]) -> None:
        """Stops at a broken stream; see BadSampleGuard."""
        seen = np.diff(messages.starts).tolist()
        refused = np.diff(np.searchsorted([one.index for one in bad], messages.starts)).tolist()
        counts = zip(seen, refused, strict=True)
        batch = {span.partition: Refusals(*count) for span, count in zip(spans, counts, strict=True)}
        last = ""
        if bad:
            of = int(np.searchsorted(messages.starts, bad[-1].index, side="right")) - 1
            offset = messages.offsets[bad[-1].index]
            last = f"offset {offset} of partition {spans[of].partition}: {bad[-1].describe()}"
        self._guard.judge(batch, bad, last)

    def _decode(self, values: Sequence[bytes]) -> tuple[Batch, list[BadSample]]:
        """Waits for the schema registry while it is unreachable."""
        return retry(lambda: self._format.decode(values), SourceUnavailable, self._stopped)

    def _without_future(self, messages: Messages, batch: Batch, bad: list[BadSample]) -> tuple[Batch, list[BadSample]]:
        if self._policy.future_after is None or not len(batch):
            return batch, bad
        times = messages.times[batch.kept]
        received = np.where(times < 0, self._now(), times / 1000)
        return refuse_future(batch, bad, received + self._policy.future_after)

    def _advance_watermarks(
        self, spans: Sequence[Span], messages: Messages, batch: Batch
    ) -> tuple[dict[int, float], NDArray[np.float64], NDArray[np.bool_]]:
        """Watermarks after these ranges; for each sample that of its partition before it, and whether it is late."""
        marks, late = np.zeros(len(batch)), np.zeros(len(batch), np.bool_)
        bounds = np.searchsorted(batch.kept, messages.starts)
        logged = messages.times[batch.kept] / 1000
        logged[logged < 0] = np.nan
        for span, start, stop in zip(spans, bounds, bounds[1:], strict=False):
            before, of = self._watermarks.get(span.partition, 0.0), slice(start, stop)
            if self._policy.late_after is None:
                running = np.maximum.accumulate(np.concatenate([[before], batch.times[of]]))
            else:
                running, late[of] = find_late(before, batch.times[of], logged[of], self._policy.late_after)
            self._watermarks[span.partition] = float(running[-1])
            marks[of] = running[:-1]
        return {span.partition: self._watermarks[span.partition] for span in spans}, marks, late

    def _sampled(self, batch: Batch, origins: Origins) -> tuple[Batch, Origins]:
        if self._sampling is None or not len(batch):
            return batch, origins
        keep = self._sampling.keep(batch.labels[:, 0], origins.partitions, origins.offsets)
        self._metrics.sampled_out(len(batch) - int(keep.sum()))
        return batch.select(keep), origins.where(keep)

    def _reject(self, letters: Sequence[DeadLetter]) -> None:
        """Counts and writes dead letters; after a rewind, each message only once."""
        for one in letters:
            if one.offset < self._next_letter.get(one.partition, 0):
                continue
            self._next_letter[one.partition] = one.offset + 1
            self._metrics.bad(one.reason, 1)
            if times := self._throttle.allow(one.reason):
                logger.warning(
                    "refused %d messages: %s%s; the last one is offset %d of partition %d",
                    *(times, one.reason, f" in field {one.field!r}" if one.field else "", one.offset, one.partition),
                    extra={"batch": f"{one.partition}:{one.offset}-{one.offset}"},
                )
            if self._dead_letters is not None:
                self._dead_letters.write(one)
                example = {"field": one.field, "partition": one.partition, "offset": one.offset}
                self._metrics.dead_letters(one.reason, 1, example)

    def flush_dead_letters(self) -> None:
        """Errors as `DeadLetters.flush`."""
        if self._dead_letters is not None:
            self._dead_letters.flush()

    def seek(
        self,
        positions: Mapping[int, int],
        watermarks: Mapping[int, float],
        refusals: Mapping[int, Refusals],
    ) -> None:
        self._watermarks = dict(watermarks)
        self._guard.restore(refusals)
        for partition, offset in positions.items():
            self._buffer.seek(partition, offset)

    def release(self, spans: Sequence[Span]) -> None:
        for span in spans:
            self._buffer.release(span.partition, span.end)

    def idle(self) -> frozenset[int]:
        """Empty while the service is unreachable: there may be more."""
        return frozenset() if self._stream.unreachable else self._buffer.idle()

    def commit(self, positions: Mapping[int, int]) -> None:
        self._buffer.source.commit(positions)
        lag = self._buffer.source.lag()
        self._metrics.lag(lag)
        self._lag_monitor.observe(sum(lag.values()))

    def close(self) -> None:
        self._buffer.close()
        if self._dead_letters is not None:
            self._dead_letters.close()
