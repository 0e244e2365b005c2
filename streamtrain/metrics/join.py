"""The metrics of a joiner."""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.metrics_core import HistogramMetricFamily, Metric

from streamtrain.metrics.registry import counter, gauge

DELAYS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 180.0, 600.0, 1800.0, 3600.0, 10_800.0, 43_200.0, 86_400.0, 604_800.0)


@dataclass(frozen=True)
class JoinState:
    """The state of a joiner at one moment.

    Attributes:
        impressions: by what became of them: sample, dropped, tombstone.
        outcomes: by what became of them: attributed, late, orphaned, ignored, tombstone.
        positives: samples with an outcome, by label.
        dead_letters: by log (impressions or outcomes) and reason.
        waiting: impressions whose samples are not written yet, by partition.
        file_bytes: size of the files in which impressions wait, by partition.
        lag: messages that are not read yet, by topic and partition.
        watermarks: event times in seconds since the epoch, by log and partition.
        commits, restarts: numbers of transactions, and of times that the joiner went back to what was committed.
        stalled, stalls: partitions of a topic that stand still, and times that one was found to.
    """

    impressions: Mapping[str, int]
    outcomes: Mapping[str, int]
    positives: Mapping[str, int]
    dead_letters: Mapping[tuple[str, str], int]
    waiting: Mapping[int, int]
    file_bytes: Mapping[int, int]
    lag: Mapping[tuple[str, int], int]
    watermarks: Mapping[tuple[str, int], float]
    commits: int
    restarts: int
    stalled: int
    stalls: int


class Delays:
    """A histogram of how long after its impression an outcome happened."""

    def __init__(self) -> None:
        self._counts = [0] * (len(DELAYS) + 1)
        self._sum = 0.0

    def add(self, delays: Sequence[float]) -> None:
        """Counts outcomes, by their seconds."""
        for seconds in delays:
            self._counts[bisect_left(DELAYS, seconds)] += 1
        self._sum += sum(delays)

    def family(self) -> Metric:
        """The metric, computed at each scrape."""
        family = HistogramMetricFamily(
            "streamtrain_join_outcome_delay_seconds",
            "Event time between an impression and an outcome that counts; says how long to wait.",
        )
        bounds = [*map(str, DELAYS), "+Inf"]
        family.add_metric([], [*zip(bounds, itertools.accumulate(self._counts), strict=True)], self._sum)
        return family


class JoinMetrics:
    """The metrics of a joiner, as a collector of prometheus_client.

    Args:
        read: reads its state, at each scrape and in its thread.
        delays: of outcomes.
    """

    def __init__(self, read: Callable[[], JoinState], delays: Delays) -> None:
        self._read, self._delays = read, delays

    def collect(self) -> Iterator[Metric]:
        """All families, those without samples as well."""
        state = self._read()
        yield counter(
            "streamtrain_join_impressions_total",
            "Impressions by what became of them: sample, dropped (a negative left out by join.keep) or tombstone (it "
            "had no value).",
            state.impressions,
            "result",
        )
        yield counter(
            "streamtrain_join_outcomes_total",
            "Outcomes by what became of them: attributed, late, orphaned, ignored (of a kind that makes no label) or "
            "tombstone (it had no value).",
            state.outcomes,
            "result",
        )
        yield counter(
            "streamtrain_join_positive_samples_total", "Samples with an outcome that counts.", state.positives, "label"
        )
        yield counter(
            "streamtrain_join_dead_letters_total",
            "Messages that cannot be joined, by log (impressions or outcomes) and the reasons of docs/samples.md.",
            state.dead_letters,
            "log",
            "reason",
        )
        yield gauge(
            "streamtrain_join_waiting_impressions",
            "Impressions whose samples are not written yet.",
            state.waiting,
            "partition",
        )
        yield gauge(
            "streamtrain_join_file_bytes",
            "Size of the files in which impressions wait, beyond join.memory_bytes.",
            state.file_bytes,
            "partition",
        )
        yield gauge(
            "streamtrain_join_lag_messages",
            "Messages between the joiner's position and the end, of the partitions that it has.",
            state.lag,
            "topic",
            "partition",
        )
        yield gauge(
            "streamtrain_join_watermark_timestamp_seconds",
            "Event time that a log has come to, in seconds since the epoch; missing before its first message.",
            state.watermarks,
            "log",
            "partition",
        )
        yield counter("streamtrain_join_transactions_total", "Transactions committed.", state.commits)
        yield counter(
            "streamtrain_join_restarts_total",
            "Times that the joiner went back to what was committed, as a transaction or its brokers failed.",
            state.restarts,
        )
        yield from _collect_stalls(state)
        yield self._delays.family()


def _collect_stalls(state: JoinState) -> Iterator[Metric]:
    yield gauge(
        "streamtrain_join_stalled_partitions",
        "Partitions of both topics of which messages wait, and none was taken for a minute, though nothing is "
        "known to hold them.",
        state.stalled,
    )
    yield counter(
        "streamtrain_join_stalls_total",
        "Times that a partition was found to stand still, and was read anew.",
        state.stalls,
    )
