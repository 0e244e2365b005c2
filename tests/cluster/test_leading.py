"""The coordinator in the process of shard 0, over gRPC: it merges windows, publishes at once, and compares."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from streamtrain.cluster import members
from streamtrain.cluster.client import Heartbeat
from streamtrain.cluster.coordinator import Coordinator
from streamtrain.cluster.quality import (
    ProbePublisher,
    QualityAggregator,
    QualityReporter,
    WindowFigures,
    encode_windows,
)
from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import ShardError, ShardRefused, ShardUnavailable
from streamtrain.metrics.cluster import ShardMetrics
from streamtrain.model.features import Label
from streamtrain.processes.ps import read_state
from streamtrain.quality.progressive import ProgressiveValidation
from streamtrain.store.publication import Publication
from streamtrain.store.redis.model import RedisModel
from tests.cluster.coordinated import Coordinated, names, states
from tests.patience import until
from tests.ps.counting import DENSE
from tests.publish.published import connect, read

LABELS = (Label("click", kind="binary"),)
Samples = tuple[Any, Any, Any]


def samples(seed: int, n: int = 300) -> Samples:
    rng = np.random.default_rng(seed)
    predictions = rng.random((n, 1)).astype(np.float32)
    return predictions, (rng.random((n, 1)) < predictions**2).astype(np.float32), np.ones(n, np.float32)


def validation(*of: Samples) -> ProgressiveValidation:
    one = ProgressiveValidation(LABELS)
    for given in of:
        one.update(*given)
    return one


def windows(*of: Samples) -> list[Any]:
    return encode_windows(validation(*of).window_sums())


def figures(*of: Samples) -> WindowFigures:
    return {label: metrics.as_dict() for label, metrics in validation(*of).window().items()}


def assert_close(one: WindowFigures, other: WindowFigures) -> None:
    assert one.keys() == other.keys()
    for label, found in one.items():
        expected = {name: value for name, value in other[label].items() if value is not None}
        assert {name: value for name, value in found.items() if value is not None} == pytest.approx(expected, rel=1e-9)


def quality(cluster: Coordinated) -> QualityAggregator:
    return coordinator(cluster).quality


def coordinator(cluster: Coordinated) -> Coordinator:
    found = cluster.shards[0]._coordinator
    assert found is not None
    return found


def publishing(url: str, **settings: float) -> Coordinated:
    return Coordinated(None, process=False, publish__url=url, publish__model="counted", publish__every="1h", **settings)


@pytest.fixture
def cluster() -> Iterator[Coordinated]:
    """Two shards behind gRPC, and a coordinator in the process of the first."""
    with Coordinated(process=False) as one:
        yield one


def test_figures_are_those_of_the_union_of_all_windows(cluster: Coordinated) -> None:
    client, reports = cluster.client(), quality(cluster)
    assert reports.figures() == {}
    client.report("first", windows(samples(1), samples(2)))
    client.report("second", windows(samples(3, 77)))
    assert_close(reports.figures(), figures(samples(1), samples(2), samples(3, 77)))
    assert reports.figures()["click"]["samples"] == 677
    client.report("first", windows(samples(4)))  # in the place of the one before
    assert_close(reports.figures(), figures(samples(4), samples(3, 77)))


def test_it_knows_the_cluster_as_a_process_of_its_own_does(cluster: Coordinated) -> None:
    cluster.learn()
    with Heartbeat(cluster.client(), "worker", "w", lambda: {"lag": {"0": 3}, "dead_letters": {"json": 2}}):
        status = cluster.status(lambda found: names(found) == ["w"] and states(found) == ["ready", "ready"])
    assert [shard["address"] for shard in status["shards"]] == cluster.addresses
    assert (status["samples"], status["lag"], status["dead_letters"]) == (11, 3, {"json": 2})
    assert status["slots"] == {"epoch": 1, "shards": cluster.addresses, "backups": [], "scaled": False}
    with pytest.raises(ShardRefused, match=r"set checkpoint\.url"):
        cluster.client().checkpoint()


def test_a_worker_that_is_gone_counts_no_more(cluster: Coordinated, monkeypatch: pytest.MonkeyPatch) -> None:
    client, reports = cluster.client(), quality(cluster)
    with Heartbeat(cluster.client(), "worker", "stays", dict):
        with Heartbeat(cluster.client(), "worker", "goes", dict):
            cluster.status(lambda found: names(found) == ["goes", "stays"])
            for number, name in enumerate(("stays", "goes")):
                client.report(name, windows(samples(number)))
            assert reports.figures()["click"]["samples"] == 600
        assert reports.figures() == figures(samples(0))
        monkeypatch.setattr(members, "LEASE", 2.5)
        client.beat("worker", "killed", {})
        client.report("killed", windows(samples(3)))
        until(lambda: reports.figures()["click"]["samples"] == 300)
    assert reports.figures() == {}


def test_a_worker_that_says_nothing_is_forgotten_and_there_are_only_so_many() -> None:
    now = [0.0]
    reports = QualityAggregator(lambda: now[0])
    reports.add("first", windows(samples(1)))
    now[0] = 299
    reports.add("second", windows(samples(2)))
    assert reports.figures()["click"]["samples"] == 600
    now[0] = 301
    assert reports.figures() == figures(samples(2))
    for number in range(2000):
        reports.add(f"worker {number}", windows(samples(0, 1)))
    assert reports.figures()["click"]["samples"] == 1024


def test_damaged_reports_are_refused_and_counted(cluster: Coordinated) -> None:
    client, node = cluster.client(), cluster.shards[0].node
    good, bad = windows(samples(1)), windows(samples(2))
    client.report("worker", good)
    bad[0].counts = bad[0].counts[:-3]
    large = windows(samples(2))
    large[0].label = "x" * (4 << 20)
    for worker, sent, message in (
        ("worker", bad, "the window of label 'click' is invalid"),
        ("worker", [*good, *good], "duplicate label 'click'"),
        ("worker", large, "at most 4194304"),
        ("", good, "1 to 256 characters, not 0"),
        ("x" * 257, good, "1 to 256 characters, not 257"),
    ):
        with pytest.raises(ShardRefused, match=message):
            client.report(worker, sent)
    assert node.counters["refused_reports"] == 5
    assert quality(cluster).figures() == figures(samples(1))
    metrics = ShardMetrics(lambda: read_state(node, [])).collect()
    events = {metric.name: metric for metric in metrics}["streamtrain_shard_events"]
    assert {s.labels["event"]: s.value for s in events.samples}["refused_reports"] == 5


def test_only_the_process_of_shard_0_answers(cluster: Coordinated) -> None:
    client, other = cluster.client(), cluster.client(cluster.addresses[1])
    for ask in (lambda: other.report("worker", []), other.publish_now, other.verify, other.status):
        with pytest.raises(ShardRefused, match="shard 1 is not the coordinator; shard 0 is") as caught:
            ask()
        assert caught.value.reason == "mismatch"
    for ask in (client.publish_now, client.verify, lambda: cluster.control(1).sums(1, "{}")):
        with pytest.raises(ShardRefused, match=r"set publish\.url"):
            ask()


def test_a_worker_that_cannot_report_goes_on(cluster: Coordinated) -> None:
    failures: list[int] = []
    reporter = QualityReporter(cluster.client(cluster.addresses[1]).report, "worker", lambda: failures.append(1))
    reporter.start()
    for seed in range(3):
        reporter.offer(validation(samples(seed)).window_sums())
        until(lambda seed=seed: len(failures) == seed + 1)  # type: ignore[misc]
    reporter.close()
    working = QualityReporter(cluster.client().report, "worker", lambda: failures.append(1))
    working.start()
    working.offer(validation(samples(9)).window_sums())
    working.close()  # what was offered is sent still
    until(lambda: quality(cluster).figures() == figures(samples(9)))
    assert len(failures) == 3


def test_publishing_on_demand(server: Valkey) -> None:
    with publishing(server.url, gate__auc_drop=0.001, gate__min_samples=100) as cluster:
        client, node = cluster.client(), cluster.shards[0].node
        with pytest.raises(ShardUnavailable, match="nothing has been learned yet"):
            client.publish_now()
        log = {0: [[1, 2], [2], [3], [1]]}
        cluster.learn({0: log[0][:2]})
        client.report("worker", windows(samples(1)))
        first = client.publish_now()
        assert first == read(server.url)[0]
        assert first.metrics == figures(samples(1))
        assert client.publish_now() == first  # nothing new
        cluster.learn(log)
        inverted = samples(2)
        client.report("worker", windows((1 - inverted[0], *inverted[1:])))
        for _ in range(2):
            with pytest.raises(ShardError, match="publication 2 is held back: click: auc"):
                client.publish_now()
        assert held(cluster) == 1
        second = client.publish_now(force=True)
        assert (second.number, dict(second.clock)) == (2, {0: 4})
        assert held(cluster) == 0
        assert node.counters["publications_held"] == 2
        assert node.counters["publications_published"] == 2


def test_verifying_on_demand(server: Valkey) -> None:
    with publishing(server.url) as cluster:
        client = cluster.client()
        with pytest.raises(ShardUnavailable, match="is empty"):
            client.verify()
        cluster.learn({0: [[1, 2], [2], [3], [1]]})
        found = client.verify()
        assert found.agrees
        assert (found.publication, found.tables["ids"].rows) == (1, 3)
        server.kill()
        with pytest.raises(ShardError, match="does not answer"):
            client.verify()


def held(cluster: Coordinated) -> float:
    """As Prometheus sees it."""
    metrics = ShardMetrics(lambda: read_state(cluster.shards[0].node, [], coordinator(cluster))).collect()
    (family,) = (one for one in metrics if one.name == "streamtrain_shard_publication_held")
    return family.samples[0].value


def test_one_publishes_at_a_time(server: Valkey) -> None:
    with publishing(server.url) as cluster:
        schedule = coordinator(cluster).publications
        assert schedule is not None
        cluster.learn({0: [[1], [2]]})
        publish, begun, go_on = schedule._publications.publish, threading.Event(), threading.Event()

        def slowly(**options: Any) -> Publication | None:
            begun.set()
            assert go_on.wait(60)
            return publish(**options)

        schedule._publications.publish = slowly  # type: ignore[method-assign]
        first = threading.Thread(target=schedule.now)
        first.start()
        assert begun.wait(60)
        with pytest.raises(ShardError, match=r"another publication has been under way for 0\.01 s"):
            schedule.now(patience=0.01)
        go_on.set()
        assert schedule.now().number == 1
        first.join()
        assert cluster.shards[0].node.counters["publications_published"] == 1
        assert read(server.url)[2].dense.tolist() == [2] * DENSE


def test_probes_of_workers_are_published_next_to_the_model(cluster: Coordinated) -> None:
    client, reports = cluster.client(), quality(cluster)
    with Valkey() as valkey:
        model, now = RedisModel(connect(valkey.url), "counted"), [0.0]
        probes = ProbePublisher(reports, model, lambda: now[0])
        probes.publish()
        assert model.probes() == []
        client.report("first", windows(samples(1)), b"one")
        client.report("first", windows(samples(1)), b"two")
        client.report("second", windows(samples(2)), b"three")
        client.report("third", windows(samples(3)))
        probes.publish()
        assert sorted(model.probes()) == [b"three", b"two"]
        for number in range(20):  # the last sixteen stay
            client.report("first", windows(samples(1)), b"%d" % number)
            probes.publish()
            assert len(model.probes()) == min(16, 2 + number)
            now[0] += 10
            probes.publish()
        assert sorted(model.probes()) == sorted(b"%d" % number for number in range(4, 20))
        valkey.kill()
        client.report("first", windows(samples(1)), b"lost")
        now[0] += 10
        probes.publish()  # training and publishing do not end for it
        valkey.start()
        client.report("first", windows(samples(1)), b"later")
        now[0] += 10
        probes.publish()
        assert model.probes() == [b"later"]
    with pytest.raises(ShardRefused, match="probes have 131073 bytes; at most 131072"):
        client.report("first", windows(samples(1)), bytes((128 << 10) + 1))
    for number in range(2000):
        reports.add(f"worker {number}", windows(samples(0, 1)), b"p")
    assert len(reports.take_probes(5000)) == 1024
    assert reports.take_probes(5000) == []
