"""The metrics of a serving process."""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import HistogramMetricFamily, Metric

from streamtrain.metrics.registry import counter, gauge, process_registry

# Upper bounds: of requests from 250 µs, and of instances in a batch.
SECONDS = (2.5e-4, 5e-4, 1e-3, 2e-3, 3e-3, 5e-3, 7.5e-3, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
INSTANCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


DIFFERENCES = (1e-5, 1e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # of two predictions

Counts = Mapping[Any, int]  # by a name


class MirrorState(NamedTuple):
    """What the mirror of a model has measured.

    Attributes:
        requests: by outcome: "compared", "dropped" or "failed".
        absolute: by label, absolute differences by bucket of `DIFFERENCES`, the last one being larger, and their sum.
        signed: by label, the sum of the differences.
    """

    requests: Counts
    absolute: Mapping[str, tuple[list[int], float]]
    signed: Mapping[str, float]


class FeedbackState(NamedTuple):
    """Impressions and outcomes.

    Attributes:
        impressions: by what became of them: "written", "skipped", "dropped" or "failed".
        waiting: bytes of impressions that are not written yet.
        outcomes: by what became of them: "written", "refused" or "failed".
    """

    impressions: Counts
    waiting: int
    outcomes: Counts


class LoadedState(NamedTuple):
    """The state of a loaded version.

    Attributes:
        publication: its number.
        watermark: latest event time that it has learned from, in seconds since the epoch; 0: none.
        rows: by table.
        nbytes: memory of all rows and indexes.
        ids: ids that have a row, and ids looked up, by table, of a sample of the batches.
        lookups: in the cache, by table and outcome.
    """

    publication: int
    watermark: float
    rows: Mapping[str, int]
    nbytes: int
    ids: Mapping[str, tuple[int, int]]
    lookups: Mapping[tuple[str, str], int]


@dataclass(frozen=True)
class ModelState:
    """The state of a served model at one moment.

    Attributes:
        loaded: by version.
        served: version that is served; None: nothing is.
        as_wanted: whether that is the version that should be served.
        swaps, rollbacks: changes of the version that is served, by kind, and those by the watchdog, by reason.
        probes: samples that the watchdog tried the served version with.
        refused: publications that could not be loaded.
        stale_seconds: time for which the origin has not answered.
        has_lost: whether the origin has lost labels or traffic.
        arms: weight in percent of each arm; empty: requests are not divided.
        mirror: its measurements.
        stopped: arms that the watchdog has taken requests away from.
    """

    loaded: Mapping[str, LoadedState]
    served: str | None
    as_wanted: bool
    swaps: Counts
    rollbacks: Counts
    probes: int
    refused: int
    stale_seconds: float
    has_lost: bool
    arms: Mapping[str, float] = field(default_factory=dict)
    mirror: MirrorState = field(default_factory=lambda: MirrorState({}, {}, {}))
    stopped: int = 0


@dataclass(frozen=True)
class ServingState:
    """The state of a serving process at one moment.

    Attributes:
        models: by name.
        waiting: instances in the queue of the batcher.
        under_way: requests for predictions.
        shed, connections, unauthorized: requests and connections that were refused, by reason.
        feedback: impressions and outcomes.
    """

    models: Mapping[str, ModelState]
    waiting: int
    under_way: int
    shed: Counts
    connections: Counts
    unauthorized: Counts
    feedback: FeedbackState = field(default_factory=lambda: FeedbackState({}, 0, {}))


class ServingMetrics:
    """The metrics of one serving process.

    Args:
        now: seconds since the epoch.
    """

    def __init__(self, *, now: Callable[[], float] = time.time) -> None:
        self.registry: CollectorRegistry = process_registry()
        self._now = now
        requests = Counter(
            "streamtrain_serving_requests_total",
            "Requests for predictions, by protocol (tensorflow or openinference; over gRPC tensorflow-grpc or "
            "openinference-grpc) and status code, over gRPC that of HTTP with the same meaning.",
            ["protocol", "code"],
            registry=self.registry,
        )
        latency = Histogram(
            "streamtrain_serving_request_seconds",
            "Time from the first byte of a request to its response, of successful predictions.",
            ["model", "version"],
            registry=self.registry,
            buckets=SECONDS,
        )
        arms = Histogram(
            "streamtrain_serving_arm_request_seconds",
            "Time from the first byte of a request to its response, by arm of the traffic, of successful predictions.",
            ["model", "arm"],
            registry=self.registry,
            buckets=SECONDS,
        )
        failures = Counter(
            "streamtrain_serving_arm_failed_requests_total",
            "Requests that an arm of the traffic has not predicted, whatever the reason.",
            ["model", "arm"],
            registry=self.registry,
        )
        self._arms, self._failures = cache(arms.labels), cache(failures.labels)
        batch = Histogram(
            "streamtrain_serving_batch_instances",
            "Instances that were predicted together.",
            registry=self.registry,
            buckets=INSTANCES,
        )
        self.observe_batch: Callable[[float], None] = batch.observe
        # Looking a child up by its labels takes longer than counting, so it is done once.
        self._requests = cache(requests.labels)
        self._latency = cache(latency.labels)
        self._collectors: dict[str, _ModelCollector] = {}

    def answered(self, protocol: str, code: int) -> None:
        """A request for predictions was answered."""
        self._requests(protocol, code).inc()

    def predicted(self, model: str, version: str, seconds: float) -> None:
        """A request was predicted by a version of a model, in `seconds`."""
        self._latency(model, version).observe(seconds)

    def routed(self, model: str, arm: str, seconds: float | None) -> None:
        """A request was predicted by an arm, in `seconds`; None: it failed."""
        if seconds is None:
            self._failures(model, arm).inc()
        else:
            self._arms(model, arm).observe(seconds)

    def watch(self, read: Callable[[], ServingState]) -> None:
        """Collects the state of the process, too: `read` is called at each scrape, in its thread."""
        self._read = read
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """All families of the state, those without samples as well."""
        state = self._read()
        yield from _collect_requests(state)
        collected = {}
        for name, model in state.models.items():
            collector = self._collectors.setdefault(name, _ModelCollector(name, self._now))
            collected[name] = [*collector.collect(model)]
        yield from _merge(collected)


class _ModelCollector:
    """Families of one model; counters of its versions stay when a version is unloaded."""

    def __init__(self, model: str, now: Callable[[], float]) -> None:
        self._model, self._now = model, now
        self._ids: dict[tuple[str, str, str], int] = {}
        self._lookups: dict[tuple[str, str, str], int] = {}

    def collect(self, state: ModelState) -> Iterator[Metric]:
        """All families, those without samples as well."""
        yield from self._collect_served(state)
        yield from _collect_changes(state)
        yield from self._collect_ids(state.loaded)
        yield from _collect_traffic(state)

    def _collect_served(self, state: ModelState) -> Iterator[Metric]:
        loaded, served = state.loaded, state.served
        watermarks = {version: one.watermark for version, one in loaded.items() if one.watermark}
        watermark = watermarks.get(served) if served else None
        yield gauge(
            "streamtrain_serving_ready", "1 if a publication is served; 0 before the first.", served is not None
        )
        yield gauge(
            "streamtrain_serving_info",
            "1, with the version that is served, or head.",
            {(self._model, served): 1} if served else None,
            *("model", "version"),
        )
        yield gauge(
            "streamtrain_serving_as_wanted",
            "1 if the version that should be served is; 0 if it cannot be loaded, or not yet: see /healthz/ready and "
            "the log.",
            state.as_wanted,
        )
        yield gauge(
            "streamtrain_serving_publication",
            "Number of the publication, by loaded version.",
            {version: one.publication for version, one in loaded.items()},
            "version",
        )
        yield gauge(
            "streamtrain_serving_watermark_timestamp_seconds",
            "Latest event time learned from, in seconds since the epoch, by loaded version; missing if there is none.",
            watermarks,
            "version",
        )
        yield gauge(
            "streamtrain_serving_freshness_seconds",
            "Time between the latest event that the served version has learned from and the scrape; missing if there "
            "is none.",
            watermark and self._now() - watermark,
        )
        yield gauge(
            "streamtrain_serving_table_rows",
            "Rows of a table, by loaded version.",
            {(version, table): rows for version, one in loaded.items() for table, rows in one.rows.items()},
            *("version", "table"),
        )
        yield gauge(
            "streamtrain_serving_version_bytes",
            "Memory of all rows and indexes of a loaded version.",
            {version: one.nbytes for version, one in loaded.items()},
            "version",
        )

    def _collect_ids(self, loaded: Mapping[str, LoadedState]) -> Iterator[Metric]:
        """Counters, which stay when a version is unloaded, and are reset if it is loaded again."""
        for version, one in loaded.items():
            for table, (found, looked_up) in one.ids.items():
                self._ids[version, table, "found"] = found
                self._ids[version, table, "born"] = looked_up - found
            for (table, outcome), ids in one.lookups.items():
                self._lookups[version, table, outcome] = ids
        yield counter(
            "streamtrain_serving_ids_total",
            "Distinct ids of one batch in 16: found (they have a row) or born (never learned: they read their initial "
            "value).",
            self._ids,
            *("version", "table", "outcome"),
        )
        yield counter(
            "streamtrain_serving_lookups_total",
            "Lookups of ids in the cache: hit, miss (Redis was asked) or failed (it did not answer).",
            self._lookups,
            *("version", "table", "outcome"),
        )


def _collect_traffic(state: ModelState) -> Iterator[Metric]:
    yield gauge(
        "streamtrain_serving_arm_weight_ratio",
        "Share of requests that an arm of the traffic should get, from 0 to 1; nothing if requests are not divided.",
        {arm: percent / 100 for arm, percent in state.arms.items()},
        "arm",
    )
    yield counter(
        "streamtrain_serving_stopped_arms_total",
        "Arms that the watchdog of this process has taken all requests away from.",
        state.stopped,
    )
    yield counter(
        "streamtrain_serving_mirrored_requests_total",
        "Copies of requests for the mirror: compared, dropped (too many waited) or failed.",
        state.mirror.requests,
        "outcome",
    )
    yield gauge(
        "streamtrain_serving_mirror_signed_difference",
        "Sum of the mirror's predictions less those that were answered, by label; over the count of "
        "streamtrain_serving_mirror_difference it is the mean difference.",
        state.mirror.signed,
        "label",
    )
    family = HistogramMetricFamily(
        "streamtrain_serving_mirror_difference",
        "Absolute difference between the mirror's prediction and the one that was answered, by label.",
        labels=["label"],
    )
    for label, (counts, total) in state.mirror.absolute.items():
        bounds = [*map(str, DIFFERENCES), "+Inf"]
        family.add_metric([label], [*zip(bounds, itertools.accumulate(counts), strict=True)], total)
    yield family


def _merge(collected: Mapping[str, list[Metric]]) -> Iterator[Metric]:
    """Families of all models; where there are several, their samples have the label `model`."""
    if len(collected) == 1:
        yield from next(iter(collected.values()))
        return
    for families in zip(*collected.values(), strict=True):
        for model, family in zip(collected, families, strict=True):
            family.samples = [one._replace(labels={"model": model} | one.labels) for one in family.samples]
        first, *others = families
        first.samples += [sample for family in others for sample in family.samples]
        yield first


def _collect_requests(state: ServingState) -> Iterator[Metric]:
    yield gauge("streamtrain_serving_waiting_instances", "Instances that wait to be predicted.", state.waiting)
    yield gauge(
        "streamtrain_serving_under_way_requests",
        "Requests for predictions that are not answered yet.",
        state.under_way,
    )
    yield counter(
        "streamtrain_serving_shed_requests_total",
        "Requests refused with 503: too many requests in flight, bytes of bodies or waiting instances, or too long a "
        "wait.",
        state.shed,
        "reason",
    )
    yield counter(
        "streamtrain_serving_refused_connections_total",
        "Connections closed: too many of them, a slow client, headers too large, or responses left unread.",
        state.connections,
        "reason",
    )
    yield counter(
        "streamtrain_serving_unauthorized_requests_total",
        "Requests whose admin or read token was missing or wrong.",
        state.unauthorized,
        "token",
    )
    yield counter(
        "streamtrain_serving_impressions_total",
        "Predicted instances for serve.log: written, skipped (serve.log_sample), dropped (no room, or the server "
        "stopped) or failed (Kafka did not take them).",
        state.feedback.impressions,
        "outcome",
    )
    yield gauge(
        "streamtrain_serving_impressions_waiting_bytes",
        "Size of the impressions that Kafka does not have yet, which a crash would lose.",
        state.feedback.waiting,
    )
    yield counter(
        "streamtrain_serving_outcomes_total",
        "Outcomes that clients have posted: written, refused (they were bad) or failed (Kafka did not take them).",
        state.feedback.outcomes,
        "result",
    )


def _collect_changes(state: ModelState) -> Iterator[Metric]:
    yield counter(
        "streamtrain_serving_swaps_total",
        "Changes of what is served: step (of the head), reload (of the whole head, or of a version whose rows on disk "
        "cannot be read), promote or rollback.",
        state.swaps,
        "kind",
    )
    yield counter(
        "streamtrain_serving_watchdog_rollbacks_total",
        "Rollbacks by the watchdog: predictions were non_finite, or their mean has moved.",
        state.rollbacks,
        "reason",
    )
    yield gauge(
        "streamtrain_serving_watchdog_samples",
        "Samples of the stream that the watchdog last tried the served version with; 0: it has none and watches "
        "nothing.",
        state.probes,
    )
    yield counter(
        "streamtrain_serving_refused_publications_total",
        "Publications that were damaged or of another model, counted at each attempt.",
        state.refused,
    )
    yield gauge(
        "streamtrain_serving_stale_seconds",
        "Time for which the store of publications has not answered; 0 while it does.",
        state.stale_seconds,
    )
    yield gauge(
        "streamtrain_serving_decisions_lost",
        "1 while the store has lost labels or traffic, so that what was decided before is served on, else 0.",
        int(state.has_lost),
    )
