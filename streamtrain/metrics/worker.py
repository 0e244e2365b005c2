"""The metrics of a worker."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric

from streamtrain.metrics.registry import counter, gauge, process_registry

STAGES = ("poll", "decode", "plan", "pull", "step", "push", "settle")
# Upper bounds of times. Stages take from 100 µs, for a batch of tens, to seconds, when a shard is restored.
SECONDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
# Upper bounds of sizes, in samples: a worker that keeps up takes what is there, one that is behind full batches.
SIZES = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)

Quality = Callable[[], Mapping[str, Mapping[str, float | None]]]
"""Gives figures by label and name, such as {"click": {"auc": 0.7, "log_loss": None}}; None: not defined."""

_REFRESH_SECONDS = 1.0  # to read the quality takes as long as a small batch

# The windowed metrics by the name of their figure: the rest of their name, and their help.
WINDOW = {
    "samples": ("samples", "Samples of the window that have the label."),
    "auc": ("auc_ratio", "Area under the ROC curve over the window, of binary labels."),
    "log_loss": ("log_loss_nats", "Mean cross-entropy over the window, of binary labels."),
    "normalized_entropy": (
        "normalized_entropy_ratio",
        "Log loss over that of always predicting the mean label; below 1 is better than that.",
    ),
    "calibration": ("calibration_ratio", "Mean prediction over mean label over the window; 1 is calibrated."),
    "mean_squared_error": (
        "mean_squared_error",
        "Mean squared error over the window, of labels that are not binary, in the label's unit squared.",
    ),
    "mean_absolute_error": (
        "mean_absolute_error",
        "Mean absolute error over the window, of labels that are not binary, in the label's unit.",
    ),
    "non_finite": (
        "non_finite_predictions",
        "Predictions of the window that were NaN or infinite; they count in nothing else.",
    ),
}


class WorkerMetrics:
    """The metrics of one worker. Thread-safe, but `learned` and `refresh` are called by one thread.

    Args:
        registry: where they are registered; None: a new one.
        now: seconds since the epoch.
        monotonic: seconds.
    """

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        *,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = registry = process_registry() if registry is None else registry
        self._monotonic = monotonic
        self._count_samples()
        self._count_gradients()
        self._buffered = Gauge(
            "streamtrain_worker_buffered_bytes", "Messages fetched and not yet learned from.", registry=registry
        )
        self._report_failures = Counter(
            "streamtrain_worker_report_failures_total",
            "Reports of predictions, sent about once a second, that shard 0 or the coordinator did not take.",
            registry=registry,
        )
        self._latest = _Latest(now)
        registry.register(self._latest)
        self._letters: dict[str, int] = {}
        self._examples: dict[str, dict[str, object]] = {}
        self._learned = (0, 0)
        self._state = (monotonic(), self._learned, 0.0, 0.0)
        self._spent, self._waited = dict.fromkeys(STAGES, 0.0), (0.0, 0.0)
        self._read_quality: Quality | None = None
        self._quality_due = -math.inf
        self._quality_stale = False

    def _count_samples(self) -> None:
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self._samples = counter("streamtrain_worker_samples_total", "Samples learned from, each time that they were.")
        self._batches = counter("streamtrain_worker_batches_total", "Batches learned from.")
        self._batch_samples = histogram(
            "streamtrain_worker_batch_samples",
            "Samples of a batch: few while the worker keeps up with the stream, worker.batch_size while it is behind.",
            buckets=SIZES,
        )
        self._repeated = counter(
            "streamtrain_worker_repeated_samples_total",
            "Those of the samples that some shard had learned before a rewind, and so skipped.",
        )
        self._rewinds = counter(
            "streamtrain_worker_rewinds_total",
            "Times that the worker dropped what was in flight and went back to the position of the shards.",
        )
        stage = histogram(
            "streamtrain_worker_stage_seconds",
            f"Time that a batch took in a stage of the loop: {', '.join(STAGES)}.",
            ["stage"],
            buckets=SECONDS,
        )
        self._stages = {name: stage.labels(name) for name in STAGES}
        self._bad = counter(
            "streamtrain_worker_bad_samples_total",
            "Messages that cannot be decoded or break the schema, by the reasons of docs/samples.md.",
            ["reason"],
        )
        self._dead_letters = counter(
            "streamtrain_worker_dead_letters_total", "Messages sent to the dead letter topic.", ["reason"]
        )
        self._late = counter(
            "streamtrain_worker_late_samples_total",
            "Samples further behind the watermark of their partition than stream.late_after.",
        )
        self._skipped = counter(
            "streamtrain_worker_skipped_samples_total",
            "Samples that were deleted from the stream before they were learned, counted by offsets.",
        )
        self._tombstones = counter(
            "streamtrain_worker_tombstones_total", "Messages without a value that were fetched, and skipped."
        )
        self._sampled_out = counter(
            "streamtrain_worker_sampled_out_samples_total", "Samples left out by down-sampling of negatives."
        )

    def _count_gradients(self) -> None:
        counter = partial(Counter, registry=self.registry)
        rows = counter(
            "streamtrain_worker_row_gradients_total",
            "Gradients of rows: applied, unadmitted (their id was seen fewer than min_count times) or non_finite "
            "(dropped).",
            ["outcome"],
        )
        dropped = counter(
            "streamtrain_worker_dropped_rows_total",
            "Rows that shards dropped upon the worker's pushes: expired (expire_after) or evicted (capacity).",
            ["reason"],
        )
        self._gradients = {  # by the fields of PushStats
            "applied": rows.labels("applied"),
            "unadmitted": rows.labels("unadmitted"),
            "non_finite_rows": rows.labels("non_finite"),
            "expired": dropped.labels("expired"),
            "evicted": dropped.labels("evicted"),
            "non_finite_dense": counter(
                "streamtrain_worker_non_finite_dense_gradients_total",
                "Gradients of dense slices that were dropped because they were not finite.",
            ),
            "non_finite_statistics": counter(
                "streamtrain_worker_non_finite_statistics_changes_total",
                "Changes of slices of the graph's statistics that were dropped because they were not finite.",
            ),
        }

    def learned(self, samples: int) -> None:
        """A batch was learned from, for the first time or again."""
        self._samples.inc(samples)
        self._learned = self._learned[0] + samples, self._learned[1] + 1
        self._batches.inc()
        self._batch_samples.observe(samples)
        self._quality_stale = True
        self.refresh()

    def repeated(self, samples: int) -> None:
        """Samples, which are counted by `learned` too, had been learned by some shard before a rewind."""
        self._repeated.inc(samples)

    def rewound(self, offsets: Mapping[int, int]) -> None:
        """The worker went back to the position of the shards; sets `position`, as nothing may follow it."""
        self._rewinds.inc()
        self.position(offsets)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measures the time of a batch in one of `STAGES`, whether or not it fails there."""
        began = self._monotonic()
        try:
            yield
        finally:
            self.observe(name, self._monotonic() - began)

    def observe(self, stage: str, seconds: float) -> None:
        """A batch took `seconds` in one of `STAGES`."""
        self._stages[stage].observe(seconds)
        self._spent[stage] += seconds

    def bad(self, reason: str, samples: int = 1) -> None:
        """Messages cannot be decoded or break the schema."""
        self._bad.labels(reason).inc(samples)

    def dead_letters(self, reason: str, letters: int = 1, example: Mapping[str, object] | None = None) -> None:
        """Messages were sent to the dead letter topic; `example` has the field, partition and offset of one."""
        if example is not None:
            self._examples = self._examples | {reason: dict(example)}
        self._dead_letters.labels(reason).inc(letters)
        self._letters = self._letters | {reason: self._letters.get(reason, 0) + letters}

    def late(self, samples: int) -> None:
        """Samples came too late."""
        self._late.inc(samples)

    def skipped(self, samples: int) -> None:
        """Samples were deleted from the stream before they were learned."""
        self._skipped.inc(samples)

    def tombstones(self, messages: int) -> None:
        """Messages without a value were skipped."""
        self._tombstones.inc(messages)

    def sampled_out(self, samples: int) -> None:
        """Negatives were left out by down-sampling."""
        self._sampled_out.inc(samples)

    def lag(self, messages: Mapping[int, int]) -> None:
        """Messages between position and end, of all partitions that are assigned now; others are removed."""
        self._latest.lag = dict(messages)

    def position(self, offsets: Mapping[int, int]) -> None:
        """Offsets of the next messages, of all partitions that are assigned now; others are removed."""
        self._latest.position = dict(offsets)

    def watermark(self, seconds: float) -> None:
        """Latest event time learned from, in seconds since the epoch; 0: none yet."""
        self._latest.watermark = seconds

    def gradients(self, stats: Mapping[str, int]) -> None:
        """Counts the gradients of one batch by outcome: some or all fields of `PushStats`, by name."""
        for name, count in stats.items():
            if count:
                self._gradients[name].inc(count)

    def buffered(self, size: int) -> None:
        """Sets the bytes of messages that are fetched and not yet learned from."""
        self._buffered.set(size)

    def reconnects(self, total: int) -> None:
        """Sets the number of sessions with shards that were reopened since the worker started."""
        self._latest.reconnects = total

    def watch(
        self,
        stream_away: Callable[[], bool],
        shards_away: Callable[[], int],
        stalled: Callable[[], Sequence[int]],
        stalls: Callable[[], int],
    ) -> None:
        """Sets what a scrape calls, in its thread.

        Args:
            stream_away: whether the stream is away.
            shards_away: how many shards are.
            stalled: partitions that stand still.
            stalls: how often one was found to.
        """
        self._latest.stream_away, self._latest.shards_away = stream_away, shards_away
        self._latest.stalled, self._latest.stalls = stalled, stalls

    def report_failed(self) -> None:
        """A report of predictions could not be delivered."""
        self._report_failures.inc()

    def state(self) -> dict[str, Any]:
        """What is reported to the coordinator, as JSON values; rates are since the last call. Not thread-safe."""
        before, (learned, done), rate, size = self._state
        now, (total, batches) = self._monotonic(), self._learned
        waited = self._spent["poll"], self._spent["pull"] + self._spent["settle"]
        seconds = max(now - before, 1e-9)
        for_samples, for_shards = (
            min(1.0, (after - of) / seconds) for of, after in zip(self._waited, waited, strict=True)
        )
        self._waited = waited
        if now > before:
            rate = (total - learned) / (now - before)
        if batches > done:
            size = (total - learned) / (batches - done)
        self._state = now, (total, batches), rate, size
        lag = {str(partition): messages for partition, messages in self._latest.lag.items()}
        return {
            "partitions": sorted(self._latest.position),
            "lag": lag,
            "stalled": sorted(self._latest.stalled()),
            "samples": total,
            "samples_per_s": rate,
            "samples_per_batch": size,
            "waits_for_samples": for_samples,
            "waits_for_shards": for_shards,
            "dead_letters": self._letters,
            "dead_letter_examples": self._examples,
        }

    def quality(self, read: Quality) -> None:
        """Sets what reads the windowed metrics, in the thread of `learned` and `refresh`, never in that of a scrape."""
        self._read_quality = read

    def refresh(self) -> None:
        """Reads the windowed metrics, at most once a second and only if something was learned since.

        `learned` does so, too; a loop calls this when it has nothing to learn, so that its last batches show.
        """
        if self._read_quality is None or not self._quality_stale or (now := self._monotonic()) < self._quality_due:
            return
        self._quality_stale, self._quality_due = False, now + _REFRESH_SECONDS
        read = self._read_quality()
        self._latest.quality = {
            name: {label: value for label, figures in read.items() if (value := figures.get(name)) is not None}
            for name in WINDOW
        }


class _Latest:
    """What was set last, each attribute replaced as a whole: a scrape in another thread sees it before or after."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.lag: Mapping[int, int] = {}
        self.position: Mapping[int, int] = {}
        self.watermark = 0.0
        self.reconnects = 0
        self.stream_away: Callable[[], bool] = lambda: False
        self.shards_away: Callable[[], int] = lambda: 0
        self.stalled: Callable[[], Sequence[int]] = list
        self.stalls: Callable[[], int] = lambda: 0
        self.quality: Mapping[str, Mapping[str, float]] = {}
        self._now = now

    def collect(self) -> Iterator[Metric]:
        """All families, those without samples as well."""
        watermark, quality = self.watermark or None, self.quality
        yield gauge(
            "streamtrain_worker_stalled_partitions",
            "Partitions of which messages wait, and none was taken for a minute, though nothing is known to hold them.",
            len(self.stalled()),
        )
        yield counter(
            "streamtrain_worker_stalls_total",
            "Times that a partition was found to stand still, and was read anew.",
            self.stalls(),
        )
        yield gauge(
            "streamtrain_worker_lag_messages",
            "Messages between the worker's position and the end, of the partitions that it has.",
            self.lag,
            "partition",
        )
        yield gauge(
            "streamtrain_worker_position_offset",
            "Offset of the worker's next message, of the partitions that it has.",
            self.position,
            "partition",
        )
        yield gauge(
            "streamtrain_worker_watermark_timestamp_seconds",
            "Latest event time learned from, in seconds since the epoch; missing before the first.",
            watermark,
        )
        yield gauge(
            "streamtrain_worker_watermark_delay_seconds",
            "Time between that event and the scrape; below 0 if event times are ahead of the clock.",
            watermark and self._now() - watermark,
        )
        yield counter(
            "streamtrain_worker_reconnects_total", "Sessions with shards that were reopened.", self.reconnects
        )
        yield gauge(
            "streamtrain_worker_stream_away",
            "1 while the broker of the stream is known not to answer, else 0.",
            self.stream_away(),
        )
        yield gauge(
            "streamtrain_worker_shards_away",
            "Shards that the worker has reached before and cannot reach now; it waits for them.",
            self.shards_away(),
        )
        for name, (suffix, documentation) in WINDOW.items():
            yield gauge(f"streamtrain_worker_window_{suffix}", documentation, quality.get(name), "label")
