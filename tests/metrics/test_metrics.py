"""Metrics as Prometheus sees them: over real HTTP, of real processes; and that the page for operators says the same."""

import re
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.parser import text_string_to_metric_families

from streamtrain.errors import ConfigError
from streamtrain.metrics import worker as of_worker
from streamtrain.metrics.cluster import CoordinatorMetrics, CoordinatorState, LeadState, ShardMetrics, ShardState
from streamtrain.metrics.join import Delays, JoinMetrics, JoinState
from streamtrain.metrics.registry import MetricsEndpoint, process_registry, serve
from streamtrain.metrics.serving import (
    DIFFERENCES,
    FeedbackState,
    LoadedState,
    MirrorState,
    ModelState,
    ServingMetrics,
    ServingState,
)
from streamtrain.metrics.worker import WorkerMetrics
from streamtrain.model.features import Label
from streamtrain.processes.ps import read_state
from streamtrain.ps.clock import PushOutcome, Span
from streamtrain.ps.consistency import Async
from streamtrain.ps.nodes.node import Node
from streamtrain.ps.push import PushStats
from streamtrain.ps.shard import InitialState, Run
from streamtrain.quality.progressive import ProgressiveValidation
from tests.metrics_page import Documented, on_the_page
from tests.patience import PATIENCE, until
from tests.probes import probe
from tests.processes import test_ps as processes
from tests.ps.counting import DENSE, SPEC, pushes

start = processes.start


class Scraped:
    """What one scrape gave."""

    def __init__(self, families: list[Metric]) -> None:
        self.families = {family.name: family for family in families}
        self._values = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }

    def get(self, name: str, **labels: str) -> float | None:
        """The value of a series, without the `streamtrain_` of its name; None: there is none."""
        return self._values.get((f"streamtrain_{name}", frozenset(labels.items())))

    def by(self, name: str) -> dict[str, float]:
        """The values of all series of a metric with one label, by it."""
        return {
            next(iter(labels))[1]: value for (of, labels), value in self._values.items() if of == f"streamtrain_{name}"
        }


def scrape(url: str) -> Scraped:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(url, timeout=PATIENCE) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        return Scraped(list(text_string_to_metric_families(answer.read().decode())))


@pytest.fixture
def served() -> Iterator[Callable[[CollectorRegistry], MetricsEndpoint]]:
    """Serves registries until the test ends."""
    endpoints: list[MetricsEndpoint] = []

    def begin(registry: CollectorRegistry) -> MetricsEndpoint:
        endpoints.append(serve("127.0.0.1:0", registry))
        return endpoints[-1]

    yield begin
    for one in endpoints:
        one.close()


@pytest.fixture
def metrics() -> WorkerMetrics:
    return WorkerMetrics()


@pytest.fixture
def seen(metrics: WorkerMetrics, served: Callable[[CollectorRegistry], MetricsEndpoint]) -> Callable[[], Scraped]:
    """Scrapes `metrics`."""
    endpoint = served(metrics.registry)
    return lambda: scrape(endpoint.url)


def batch(metrics: WorkerMetrics, samples: int = 64) -> None:
    """What a loop tells of one batch."""
    for stage in of_worker.STAGES:
        with metrics.stage(stage):
            pass
    metrics.learned(samples)
    metrics.gradients(vars(PushStats(applied=100, unadmitted=3)))
    metrics.watermark(1_000.0)
    metrics.buffered(1 << 20)
    metrics.lag({0: 10, 1: 20})
    metrics.position({0: 100, 1: 200})


# The page and the names.


SHARD = ShardState(
    shard=0,
    shards=1,
    run="run",
    ready=True,
    workers=1,
    table_rows={"ids": 1},
    table_bytes={"ids": 1},
    table_rows_on_disk={"ids": 1},
    table_disk_bytes={"ids": 1},
    dense_bytes=1,
    clock={0: 1},
    samples=1,
    watermark=1.0,
    epoch=1,
    backup_in_step=True,
    counters={},
    lead=LeadState(held=False, checkpointed=1.0, published=1.0),
)
COORDINATOR = CoordinatorState(
    members={"worker": 1},
    lost={"worker": 1},
    shards={"ready": 1},
    slot_epoch=1,
    lag=1,
    proposed_shards=1,
    proposed_workers=1,
    lead=LeadState(held=False, checkpointed=1.0, published=1.0),
    counters={"refused_token": 1},
)
MODEL = ModelState(
    loaded={"head": LoadedState(1, 1.0, {"user": 1}, 1, {"user": (1, 2)}, {("user", "hit"): 1})},
    served="head",
    as_wanted=True,
    swaps={"step": 1},
    rollbacks={"mean": 1},
    probes=1,
    refused=1,
    stale_seconds=0.0,
    has_lost=False,
    arms={"prod": 95.0},
    mirror=MirrorState({"compared": 1}, {"click": ([1] * (len(DIFFERENCES) + 1), 1.0)}, {"click": 1.0}),
    stopped=1,
)
SERVING = ServingState(
    models={"model": MODEL},
    waiting=0,
    under_way=0,
    shed={"wait": 1},
    connections={"slow": 1},
    unauthorized={"admin": 1},
    feedback=FeedbackState({"written": 1}, 1, {"written": 1}),
)

JOIN = JoinState(
    impressions={"sample": 3, "dropped": 1, "tombstone": 0},
    outcomes={"attributed": 2, "late": 1, "orphaned": 1, "ignored": 0, "tombstone": 0},
    positives={"click": 2},
    dead_letters={("impressions", "not_json"): 1},
    waiting={0: 5},
    file_bytes={0: 300},
    lag={("impressions", 0): 7},
    watermarks={("impressions", 0): 1.5},
    commits=1,
    stalled=1,
    stalls=1,
    restarts=0,
)


def registries() -> list[CollectorRegistry]:
    """One of each kind of process, each metric of which has a sample."""
    worker = WorkerMetrics()
    worker.quality(lambda: {"click": dict.fromkeys(of_worker.WINDOW, 0.5)})
    batch(worker)
    worker.bad("not_json")
    worker.dead_letters("not_json")
    shard, coordinator, serving = process_registry(), process_registry(), ServingMetrics()
    joiner = process_registry()
    joiner.register(JoinMetrics(lambda: JOIN, Delays()))
    shard.register(ShardMetrics(lambda: SHARD))
    coordinator.register(CoordinatorMetrics(lambda: COORDINATOR))
    serving.watch(lambda: SERVING)
    serving.answered("tensorflow", 200)
    serving.predicted("model", "head", 0.01)
    serving.routed("model", "prod", 0.01)
    serving.routed("model", "prod", None)
    return [worker.registry, shard, coordinator, serving.registry, joiner]


def described(family: Metric) -> tuple[str, str, tuple[str, ...], str]:
    """As a row of the page says it, without the unit."""
    name = family.name + ("_total" if family.type == "counter" else "")
    (labels,) = {tuple(label for label in one.labels if label != "le") for one in family.samples}
    return name, family.type, labels, family.documentation


def test_the_page_says_what_is_exported() -> None:
    families = [one for registry in registries() for one in registry.collect() if one.name.startswith("streamtrain_")]
    exported = {described(one) for one in families}
    assert len({name for name, *_ in exported}) == len(exported)
    assert {(one.name, one.kind, one.labels, one.help) for one in on_the_page()} == exported


@pytest.mark.parametrize("registry", registries(), ids=["worker", "shard", "coordinator", "serving", "join"])
def test_a_metric_has_one_family_and_can_be_scraped_alone(registry: CollectorRegistry) -> None:
    names = [one.name for one in registry.collect()]
    assert len(set(names)) == len(names)
    for name in names:
        sampled = {sample.name for one in registry.collect() for sample in one.samples if one.name == name}
        assert [one.name for one in registry.restricted_registry(sampled).collect()] == [name]


@pytest.mark.parametrize("one", on_the_page(), ids=lambda one: str(one.name))
def test_conventions(one: Documented) -> None:
    assert re.fullmatch(r"streamtrain_(worker|shard|coordinator|serving|join|build)(_[a-z]+)+", one.name)
    assert one.name.endswith("_total") == (one.kind == "counter")
    assert one.name.removesuffix("_total").endswith(f"_{one.unit}" if one.unit else "")
    assert one.unit or one.kind == "gauge"
    assert not re.search("milli|micro|kilo|mega|minutes|hours|percent", one.name)  # base units only
    assert re.fullmatch(r"[A-Z1][^|\n]{10,}\.", one.help)


# A worker.


def test_a_scrape_has_what_is_documented(seen: Callable[[], Scraped]) -> None:
    """Also before anything has happened; and of the process itself."""
    families = seen().families
    ours = {name: family for name, family in families.items() if name.startswith("streamtrain_")}
    created = {name for name in ours if name.endswith("_created")}  # of the library's
    documented = {one.name.removesuffix("_total"): one for one in on_the_page("worker", "build")}
    assert set(ours) - created == set(documented)
    for name, one in documented.items():
        assert (ours[name].type, ours[name].documentation) == (one.kind, one.help)
    assert {"process_resident_memory_bytes", "process_start_time_seconds", "process_cpu_seconds"} <= set(families)


def test_the_build(seen: Callable[[], Scraped]) -> None:
    (version,) = seen().by("build_info")
    assert re.match(r"\d+\.\d+", version)


def test_counters_count(metrics: WorkerMetrics, seen: Callable[[], Scraped]) -> None:
    for samples in (64, 36):
        metrics.learned(samples)
    metrics.repeated(36)
    metrics.rewound({3: 40})
    assert metrics.state()["partitions"] == [3]  # before anything is learned
    metrics.bad("not_json", 2)
    metrics.bad("bad_time")
    metrics.bad("not_json")
    metrics.dead_letters("not_json", 3)
    metrics.late(4)
    metrics.skipped(5)
    metrics.sampled_out(6)
    metrics.tombstones(3)
    metrics.buffered(7)
    metrics.buffered(8)
    metrics.reconnects(9)
    one = seen()
    assert (one.get("worker_samples_total"), one.get("worker_batches_total")) == (100, 2)
    assert (one.get("worker_repeated_samples_total"), one.get("worker_rewinds_total")) == (36, 1)
    assert one.by("worker_bad_samples_total") == {"not_json": 3, "bad_time": 1}
    assert one.by("worker_dead_letters_total") == {"not_json": 3}
    assert (one.get("worker_late_samples_total"), one.get("worker_skipped_samples_total")) == (4, 5)
    assert (one.get("worker_sampled_out_samples_total"), one.get("worker_tombstones_total")) == (6, 3)
    assert (one.get("worker_buffered_bytes"), one.get("worker_reconnects_total")) == (8, 9)


def test_sizes_of_batches_are_told(metrics: WorkerMetrics, seen: Callable[[], Scraped]) -> None:
    assert metrics.state()["samples_per_batch"] == 0
    for samples in (1, 3, 1024):
        metrics.learned(samples)
    assert metrics.state()["samples_per_batch"] == pytest.approx(1028 / 3)
    assert metrics.state()["samples_per_batch"] == pytest.approx(1028 / 3)  # none since
    metrics.learned(7)
    assert metrics.state()["samples_per_batch"] == 7
    one = seen()
    assert (one.get("worker_batch_samples_count"), one.get("worker_batch_samples_sum")) == (4, 1035)
    counts = one.by("worker_batch_samples_bucket")
    assert (counts["1.0"], counts["4.0"], counts["256.0"], counts["1024.0"]) == (1, 2, 3, 4)


def test_everything_that_becomes_of_gradients_is_counted(metrics: WorkerMetrics, seen: Callable[[], Scraped]) -> None:
    stats = PushStats(*range(1, len(vars(PushStats())) + 1))
    metrics.gradients(vars(stats))
    metrics.gradients({"applied": 10})
    one = seen()
    assert one.by("worker_row_gradients_total") == {
        "applied": stats.applied + 10,
        "unadmitted": stats.unadmitted,
        "non_finite": stats.non_finite_rows,
    }
    assert one.get("worker_non_finite_dense_gradients_total") == stats.non_finite_dense
    assert one.get("worker_non_finite_statistics_changes_total") == stats.non_finite_statistics
    assert one.by("worker_dropped_rows_total") == {"expired": stats.expired, "evicted": stats.evicted}


def test_times_of_stages_are_in_their_buckets(metrics: WorkerMetrics, seen: Callable[[], Scraped]) -> None:
    for seconds in (0.00005, 0.0001, 0.02, 30.0):
        metrics.observe("step", seconds)
    with metrics.stage("pull"):
        time.perf_counter()
    with pytest.raises(ValueError, match="of a step"), metrics.stage("pull"):
        raise ValueError("of a step")
    one = seen()
    counts = {stage: one.get("worker_stage_seconds_count", stage=stage) for stage in of_worker.STAGES}
    assert counts == {**dict.fromkeys(of_worker.STAGES, 0.0), "step": 4, "pull": 2}
    assert one.get("worker_stage_seconds_sum", stage="step") == pytest.approx(30.02015)
    buckets = {le: one.get("worker_stage_seconds_bucket", stage="step", le=le) for le in ("0.0001", "10.0", "+Inf")}
    assert buckets == {"0.0001": 2, "10.0": 3, "+Inf": 4}
    with pytest.raises(KeyError):
        metrics.observe("lunch", 3600.0)


def test_partitions_that_are_given_up_go(metrics: WorkerMetrics, seen: Callable[[], Scraped]) -> None:
    lag, position = {0: 10, 1: 20}, {0: 100, 1: 200}
    metrics.lag(lag)
    metrics.position(position)
    lag.clear()  # the loop may go on using its own
    one = seen()
    assert one.by("worker_lag_messages") == {"0": 10, "1": 20}
    assert one.by("worker_position_offset") == {"0": 100, "1": 200}
    metrics.lag({1: 5, 2: 6})
    metrics.position({})
    one = seen()
    assert one.by("worker_lag_messages") == {"1": 5, "2": 6}
    assert one.by("worker_position_offset") == {}


def test_the_delay_is_that_of_the_scrape(served: Callable[[CollectorRegistry], MetricsEndpoint]) -> None:
    now = 1_700_000_010.0
    metrics = WorkerMetrics(now=lambda: now)
    url = served(metrics.registry).url
    metrics.watermark(0.0)
    one = scrape(url)
    assert one.get("worker_watermark_timestamp_seconds") is one.get("worker_watermark_delay_seconds") is None
    metrics.watermark(1_700_000_000.5)
    assert scrape(url).get("worker_watermark_delay_seconds") == 9.5
    now += 60.0
    one = scrape(url)
    assert one.get("worker_watermark_timestamp_seconds") == 1_700_000_000.5
    assert one.get("worker_watermark_delay_seconds") == 69.5


def test_quality_by_label(metrics: WorkerMetrics, seen: Callable[[], Scraped]) -> None:
    validation = ProgressiveValidation(
        (Label("click", kind="binary"), Label("price", kind="real"), Label("never", kind="binary"))
    )
    metrics.quality(lambda: {label: figures.as_dict() for label, figures in validation.window().items()})
    assert seen().by("worker_window_samples") == {}
    predictions = np.array([[0.9, 3.0, 0.5], [0.2, 5.0, 0.5], [0.6, 2.0, 0.5], [0.7, np.inf, 0.5]], np.float32)
    labels = np.array([[1, 4, np.nan], [0, 5, np.nan], [1, 2, np.nan], [0, 2, np.nan]], np.float32)
    validation.update(predictions, labels, np.ones(4, np.float32))
    metrics.learned(4)
    one, click = seen(), validation.window()["click"]
    assert one.by("worker_window_samples") == {"click": 4, "price": 3, "never": 0}
    assert one.by("worker_window_auc_ratio") == {"click": 0.75}
    assert one.by("worker_window_log_loss_nats") == {"click": click.log_loss}
    assert one.by("worker_window_normalized_entropy_ratio") == {"click": click.normalized_entropy}
    assert one.by("worker_window_calibration_ratio")["click"] == pytest.approx(1.2)
    assert one.by("worker_window_mean_squared_error") == {"price": pytest.approx(1 / 3)}
    assert one.by("worker_window_mean_absolute_error") == {"price": pytest.approx(1 / 3)}
    assert one.by("worker_window_non_finite_predictions") == {"click": 0, "price": 1, "never": 0}


def test_quality_is_read_by_the_loop_once_a_second(served: Callable[[CollectorRegistry], MetricsEndpoint]) -> None:
    now = 100.0
    metrics = WorkerMetrics(monotonic=lambda: now)
    url, readers = served(metrics.registry).url, []

    def read() -> dict[str, dict[str, float | None]]:
        readers.append(threading.get_ident())
        return {"click": {"samples": len(readers), "auc": None}}

    metrics.quality(read)
    metrics.refresh()
    assert readers == []  # nothing has been learned
    for _ in range(3):
        metrics.learned(1)
    assert [scrape(url).by("worker_window_samples") for _ in range(2)] == [{"click": 1}] * 2
    now += 1.0
    metrics.refresh()  # the two batches after the first
    assert scrape(url).by("worker_window_samples") == {"click": 2}
    now += 1.0
    metrics.refresh()
    assert readers == [threading.get_ident()] * 2


def test_scrapes_while_it_learns(
    metrics: WorkerMetrics, served: Callable[[CollectorRegistry], MetricsEndpoint]
) -> None:
    """Two scrapers beside a loop: every scrape is whole, and nothing is lost."""
    url, enough, found = served(metrics.registry).url, threading.Event(), list[Scraped]()
    metrics.quality(lambda: {"click": {"auc": 0.5}})

    def scraping() -> None:
        while len(found) < 20:
            found.append(scrape(url))
        enough.set()

    scrapers = [threading.Thread(target=scraping) for _ in range(2)]
    for one in scrapers:
        one.start()
    batches = 0

    def learn() -> None:
        nonlocal batches
        metrics.lag({partition: batches for partition in range(batches % 7)})
        metrics.bad(f"reason {batches % 50}")
        metrics.learned(3)
        batches += 1

    until(enough.is_set, doing=learn)
    for one in scrapers:
        one.join(PATIENCE)
    assert len(found) >= 20
    assert all(len(set(one.by("worker_lag_messages").values())) <= 1 for one in found)  # of one moment
    last = scrape(url)
    assert last.get("worker_samples_total") == 3 * batches
    assert sum(last.by("worker_bad_samples_total").values()) == batches


def test_a_batch_costs_few_calls(metrics: WorkerMetrics) -> None:
    """A batch of 64 samples takes a millisecond in all, and Python makes some ten calls in a microsecond."""
    batch(metrics)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        batch(metrics)
    finally:
        sys.setprofile(None)
    assert 50 < calls < 300, calls


# The endpoint.


def test_an_address_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"cannot serve metrics at {address}: Address already in use; every"):
            serve(address, CollectorRegistry())


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("unix:/run/metrics.sock", 'over TCP only: use "host:port"'),
        ("9100", 'the address of metrics must be "host:port"'),
        ("nowhere.invalid:0", r"cannot serve metrics at nowhere\.invalid:0: "),
        ("a" * 64 + ":0", "cannot serve metrics at aaaa"),
    ],
)
def test_addresses_that_cannot_be(address: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        serve(address, CollectorRegistry())


@pytest.mark.parametrize(
    ("address", "host", "status"),
    [
        ("127.0.0.1:0", "evil.example:9100", 403),
        ("127.0.0.1:0", "localhost:9100", 200),
        ("127.0.0.1:0", "127.0.0.1", 200),
        ("0.0.0.0:0", "worker-0.example:9100", 200),
    ],
)
def test_at_loopback_no_name_of_another_site_leads_here(address: str, host: str, status: int) -> None:
    endpoint = serve(address, CollectorRegistry())
    try:
        url = f"http://127.0.0.1:{endpoint.port}/metrics"
        assert httpx.get(url, headers={"host": host}, trust_env=False).status_code == status
    finally:
        endpoint.close()


def test_probes_are_told_why_a_process_is_not_ready() -> None:
    reasons = ["shard 1 is being restored", ""]
    endpoint = serve("127.0.0.1:0", CollectorRegistry(), lambda: reasons[0])
    try:
        assert probe(endpoint.port) == (503, '{"status": "not ready", "error": "shard 1 is being restored"}')
        assert probe(endpoint.port, "/healthz/live") == (200, '{"status": "live"}')
        del reasons[0]
        assert probe(endpoint.port) == (200, '{"status": "ready"}')
        assert probe(endpoint.port, "/metrics")[0] == 200
    finally:
        endpoint.close()


def test_a_closed_endpoint_gives_its_port_free() -> None:
    first = serve("127.0.0.1:0", process_registry())
    assert first.url == f"http://127.0.0.1:{first.port}/metrics"
    first.close()
    first.close()
    second = serve(f"127.0.0.1:{first.port}", process_registry())
    assert scrape(second.url).by("build_info")
    second.close()


def test_two_workers_cannot_share_a_registry(metrics: WorkerMetrics) -> None:
    with pytest.raises(ValueError, match="streamtrain_worker_samples"):
        WorkerMetrics(metrics.registry)


# A shard.


def test_a_shard(served: Callable[[CollectorRegistry], MetricsEndpoint]) -> None:
    node = Node(0, 1, Async)
    registry = CollectorRegistry()
    registry.register(ShardMetrics(lambda: read_state(node, ["w", "x"])))
    url = served(registry).url
    one = scrape(url)
    assert set(one.families) == {row.name.removesuffix("_total") for row in on_the_page("shard")}
    assert one.get("shard_info", shard="0", shards="1", run="") == 1
    assert (one.get("shard_ready"), one.get("shard_workers")) == (0, 2)
    assert one.by("shard_pushes_total") == {"applied": 0, "duplicate": 0, "rejected": 0}
    assert one.get("shard_samples") is one.get("shard_checkpoint_epoch") is None

    node.initialise(InitialState(Run("run 1", {0: 0}), SPEC, np.zeros(DENSE, np.float32), np.zeros(2, np.float32)))
    log = {0: [[1], [2], [2], [3]], 1: [[4], [5]]}
    first, second = (pushes(log, [Span(p, 0, 2)], 1)[0]._replace(watermark=1_000 + p) for p in log)
    rejected = pushes(log, [Span(0, 3, 4)], 1)[0]
    outcomes = [node.shard.push(one).outcome for one in (first, first, second, rejected)]
    assert outcomes == [PushOutcome.APPLIED, PushOutcome.DUPLICATE, PushOutcome.APPLIED, PushOutcome.REJECTED]
    for event in ("refused_token", "refused_token", "checkpoint_failures"):
        node.count(event)
    one = scrape(url)
    assert one.get("shard_info", shard="0", shards="1", run="run 1") == 1
    assert (one.get("shard_ready"), one.get("shard_samples")) == (1, 4)
    assert one.by("shard_pushes_total") == {"applied": 2, "duplicate": 1, "rejected": 1}
    assert one.by("shard_row_gradients_total") == {"applied": 4, "unadmitted": 0, "non_finite": 0}
    assert one.get("shard_non_finite_dense_gradients_total") == 0
    assert one.get("shard_non_finite_statistics_changes_total") == 0
    assert one.by("shard_dropped_rows_total") == {"expired": 0, "evicted": 0}
    assert one.by("shard_clock_offset") == {"0": 2, "1": 2}
    assert one.by("shard_table_rows") == {"ids": 4}
    assert one.by("shard_table_bytes") == {"ids": node.shard.tables[0].nbytes}
    assert one.get("shard_dense_bytes") == node.shard.dense.nbytes
    assert one.get("shard_watermark_timestamp_seconds") == 1_001
    assert one.get("shard_checkpoint_failures_total") == 1
    assert {name: count for name, count in one.by("shard_events_total").items() if count} == {"refused_token": 2}
    assert one.by("shard_events_total")["backup_took_over"] == 0  # so that the first one is an increase


def test_a_process_serves_the_figures_of_its_shard(tmp_path: Path, start: Callable[..., processes.Process]) -> None:
    addresses = processes.free_addresses(1)
    arguments = ("--index", "0", "--ps", addresses[0], "--set", "ps.metrics=127.0.0.1:0")
    process = start(*arguments, *processes.saving(tmp_path)).serving()
    (url,) = re.findall(r"metrics at (http://127\.0\.0\.1:\d+/metrics)", "\n".join(process.said))
    assert scrape(url).get("shard_ready") == 0
    worker = processes.Worker(addresses)
    worker.learn(500)
    one = scrape(url)
    assert (one.get("shard_ready"), one.get("shard_workers")) == (1, 1)
    assert one.by("shard_clock_offset") == dict.fromkeys(map(str, processes.LOG), 500)
    assert one.get("shard_samples") == 500 * len(processes.LOG)
    assert one.by("shard_table_rows")["ids"] > 0
    assert "process_resident_memory_bytes" in one.families
    processes.wait_for_epoch(str(tmp_path), worker, 500)
    until(lambda: (scrape(url).get("shard_checkpoint_epoch") or 0) >= 1)
    worker.close()
    assert process.end() == 0
    assert not any("Traceback" in line for line in process.said)


def test_a_process_whose_metrics_cannot_be_served(start: Callable[..., processes.Process]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        process = start("--index", "0", "--ps", processes.free_addresses(1)[0], "--set", f"ps.metrics={address}")
        assert process.wait() == 2
    assert process.said[-1].startswith(f"streamtrain: cannot serve metrics at {address}: Address already in use")
    assert not any("Traceback" in line for line in process.said)
