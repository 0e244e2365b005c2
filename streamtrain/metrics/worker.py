"""What a worker tells Prometheus."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from streamtrain.metrics import of_worker as of
from streamtrain.metrics.definition import Definition
from streamtrain.metrics.endpoint import process_registry

Quality = Callable[[], Mapping[str, Mapping[str, float | None]]]
"""Gives figures by label and name, such as {"click": {"auc": 0.7, "log_loss": None}}; None: not defined."""

_REFRESH_SECONDS = 1.0  # to read the quality takes as long as a small batch

# By names of what becomes of gradients, and by names of figures of quality.
_ROW_GRADIENTS = {"applied": "applied", "unadmitted": "unadmitted", "non_finite_rows": "non_finite"}
_DROPPED_ROWS = ("expired", "evicted")
_QUALITY = {
    "samples": of.WINDOW_SAMPLES,
    "auc": of.AUC,
    "log_loss": of.LOG_LOSS,
    "normalized_entropy": of.ENTROPY,
    "calibration": of.CALIBRATION,
    "mean_squared_error": of.SQUARED_ERROR,
    "mean_absolute_error": of.ABSOLUTE_ERROR,
    "non_finite": of.NON_FINITE,
}


class WorkerMetrics:
    """The metrics of one worker, told by its threads, of which one calls `learned` and `refresh`; scraped by others.

    Args:
        registry: which they are put on, once; None: a new one of a process.
        now: seconds since the epoch.
        monotonic: seconds.

    Attributes:
        registry: to be served.
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
        self._samples = of.SAMPLES.counter(registry)
        self._batches = of.BATCHES.counter(registry)
        self._repeated = of.REPEATED.counter(registry)
        self._rewinds = of.REWINDS.counter(registry)
        stage = of.STAGE.histogram(registry, of.SECONDS)
        self._stages = {name: stage.labels(name) for name in of.STAGES}
        self._bad = of.BAD.counter(registry)
        self._dead_letters = of.DEAD_LETTERS.counter(registry)
        self._late = of.LATE.counter(registry)
        self._skipped = of.SKIPPED.counter(registry)
        self._sampled_out = of.SAMPLED_OUT.counter(registry)
        self._buffered = of.BUFFERED.gauge(registry)
        self._report_failures = of.REPORT_FAILURES.counter(registry)
        row_gradients, dropped_rows = of.ROW_GRADIENTS.counter(registry), of.DROPPED_ROWS.counter(registry)
        self._gradients = {name: row_gradients.labels(label) for name, label in _ROW_GRADIENTS.items()}
        self._gradients |= {name: dropped_rows.labels(name) for name in _DROPPED_ROWS}
        self._gradients["non_finite_dense"] = of.DENSE_GRADIENTS.counter(registry)
        self._latest = _Latest(now)
        registry.register(self._latest)
        self._letters: dict[str, int] = {}
        self._learned = 0
        self._state = (monotonic(), 0, 0.0)
        self._read_quality: Quality | None = None
        self._quality_due = -math.inf
        self._quality_stale = False

    def learned(self, samples: int) -> None:
        """A batch was learned from, for the first time or again."""
        self._samples.inc(samples)
        self._learned += samples
        self._batches.inc()
        self._quality_stale = True
        self.refresh()

    def repeated(self, samples: int) -> None:
        """Samples, told to `learned` as well, had been learned by some shard before a rewind."""
        self._repeated.inc(samples)

    def rewound(self, offsets: Mapping[int, int]) -> None:
        """The worker went to where the shards stand: `position`, which may have nothing to be learned after it."""
        self._rewinds.inc()
        self.position(offsets)

    def stage(self, name: str) -> AbstractContextManager[object]:
        """Measures how long a batch takes in one of `STAGES`, also if it fails there."""
        return self._stages[name].time()

    def observe(self, stage: str, seconds: float) -> None:
        """A batch has taken so long in one of `STAGES`."""
        self._stages[stage].observe(seconds)

    def bad(self, reason: str, samples: int = 1) -> None:
        """Messages cannot be decoded or break the schema."""
        self._bad.labels(reason).inc(samples)

    def dead_letters(self, reason: str, letters: int = 1) -> None:
        """Messages were handed to the topic of dead letters."""
        self._dead_letters.labels(reason).inc(letters)
        self._letters = self._letters | {reason: self._letters.get(reason, 0) + letters}

    def late(self, samples: int) -> None:
        """Samples are further behind the watermark than they may be."""
        self._late.inc(samples)

    def skipped(self, samples: int) -> None:
        """Samples were deleted from the stream before they were learned."""
        self._skipped.inc(samples)

    def sampled_out(self, samples: int) -> None:
        """Negatives were left out by down-sampling."""
        self._sampled_out.inc(samples)

    def lag(self, messages: Mapping[int, int]) -> None:
        """Messages between position and end, of all partitions that the worker has now; others are forgotten."""
        self._latest.lag = dict(messages)

    def position(self, offsets: Mapping[int, int]) -> None:
        """Offsets of the next messages, of all partitions that the worker has now; others are forgotten."""
        self._latest.position = dict(offsets)

    def watermark(self, seconds: float) -> None:
        """Latest event time learned from, in seconds since the epoch; 0: none yet."""
        self._latest.watermark = seconds

    def gradients(self, stats: Mapping[str, int]) -> None:
        """What became of the gradients of one batch: the fields of `PushStats`, all or some, by their names."""
        for name, count in stats.items():
            if count:
                self._gradients[name].inc(count)

    def buffered(self, size: int) -> None:
        """Bytes of messages that are fetched and not yet learned from."""
        self._buffered.set(size)

    def reconnects(self, total: int) -> None:
        """Sessions with shards that were opened again, since the worker began."""
        self._latest.reconnects = total

    def watch(self, stream_away: Callable[[], bool], shards_away: Callable[[], int]) -> None:
        """What a scrape asks, in a thread of its own: whether the stream is away, and how many shards are."""
        self._latest.stream_away, self._latest.shards_away = stream_away, shards_away

    def report_failed(self) -> None:
        """A window was not taken by shard 0."""
        self._report_failures.inc()

    def state(self) -> dict[str, Any]:
        """What a coordinator is told, plain values; samples per second are since the call before. For one thread."""
        before, learned, rate = self._state
        now, total = self._monotonic(), self._learned
        if now > before:
            rate = (total - learned) / (now - before)
        self._state = now, total, rate
        lag = {str(partition): messages for partition, messages in self._latest.lag.items()}
        return {
            "partitions": sorted(self._latest.position),
            "lag": lag,
            "samples": total,
            "samples_per_s": rate,
            "dead_letters": self._letters,
        }

    def quality(self, read: Quality) -> None:
        """Where windowed figures come from. It is called by whoever calls `learned` or `refresh`, never by a scrape."""
        self._read_quality = read

    def refresh(self) -> None:
        """Takes the quality, at most once a second and only if something was learned since; `learned` does so, too.

        For a loop that has nothing to learn, so that its last batches show.
        """
        if self._read_quality is None or not self._quality_stale or (now := self._monotonic()) < self._quality_due:
            return
        self._quality_stale, self._quality_due = False, now + _REFRESH_SECONDS
        read = self._read_quality()
        self._latest.quality = {
            definition: {(label,): value for label, figures in read.items() if (value := figures.get(name)) is not None}
            for name, definition in _QUALITY.items()
        }


class _Latest(Collector):
    """What was told last, each of it replaced as a whole: a scrape in another thread sees it before or after."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.lag: Mapping[int, int] = {}
        self.position: Mapping[int, int] = {}
        self.watermark = 0.0
        self.reconnects = 0
        self.stream_away: Callable[[], bool] = lambda: False
        self.shards_away: Callable[[], int] = lambda: 0
        self.quality: Mapping[Definition, Mapping[tuple[object, ...], float]] = {}
        self._now = now

    def describe(self) -> Iterator[Metric]:
        """Without values: what a registry knows it by."""
        of_moment = (of.LAG, of.POSITION, of.WATERMARK, of.DELAY, of.RECONNECTS, of.STREAM_AWAY, of.SHARDS_AWAY)
        for definition in (*of_moment, *_QUALITY.values()):
            yield definition.family()

    def collect(self) -> Iterator[Metric]:
        """As of now."""
        yield of.LAG.family({(partition,): messages for partition, messages in self.lag.items()})
        yield of.POSITION.family({(partition,): offset for partition, offset in self.position.items()})
        watermark = self.watermark
        yield of.WATERMARK.family({(): watermark} if watermark else None)
        yield of.DELAY.family({(): self._now() - watermark} if watermark else None)
        yield of.RECONNECTS.family({(): self.reconnects})
        yield of.STREAM_AWAY.family({(): self.stream_away()})
        yield of.SHARDS_AWAY.family({(): self.shards_away()})
        quality = self.quality
        for definition in _QUALITY.values():
            yield definition.family(quality.get(definition))
