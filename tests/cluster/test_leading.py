"""What shard 0 does for all, as it is asked over gRPC: it hears of windows, merges them, and publishes at once."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from streamtrain.cluster.leading import Leading
from streamtrain.cluster.metrics import ShardMetrics
from streamtrain.cluster.publication_schedule import PublicationSchedule
from streamtrain.cluster.publications import Publications
from streamtrain.cluster.publisher import ShardPublisher
from streamtrain.cluster.reports import Figures, Reporter, Reports
from streamtrain.cluster.verify_head import HeadFound
from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import ShardError, ShardRefused, ShardUnavailable
from streamtrain.model.features import Label
from streamtrain.ps.control import RemoteControl
from streamtrain.ps.node import Node
from streamtrain.ps.shards import Control, LocalControl
from streamtrain.store.gate import Gate
from streamtrain.store.origin import Publication
from streamtrain.store.redis_dictionaries import RedisDictionaries
from streamtrain.store.redis_model import RedisModel
from streamtrain.train.progressive import ProgressiveValidation
from streamtrain.train.windows import encode
from tests.cluster.published import connect, read
from tests.ps.counting import DENSE
from tests.ps.raw import until
from tests.ps.served import Served, learn, served

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
    return encode(validation(*of).window_sums())


def figures(*of: Samples) -> Figures:
    return {label: metrics.as_dict() for label, metrics in validation(*of).window().items()}


def assert_close(one: Figures, other: Figures) -> None:
    assert one.keys() == other.keys()
    for label, found in one.items():
        expected = {name: value for name, value in other[label].items() if value is not None}
        assert {name: value for name, value in found.items() if value is not None} == pytest.approx(expected, rel=1e-9)


class Led(Served):
    """Two shards behind gRPC, of which the first leads."""

    reports: Reports
    leading: Leading

    def control(self, index: int = 0) -> RemoteControl:
        return RemoteControl(*self.channels[index])


@pytest.fixture
def led() -> Iterator[Led]:
    with served(2) as where:
        one = Led(**vars(where))
        one.reports = Reports()
        one.nodes[0].leader = one.leading = Leading(one.reports, one.nodes[0].count)
        yield one


def publishing(led: Led, url: str, gate: Gate) -> None:
    """Has them publish."""
    model = RedisModel(connect(url), "counted")
    for node in led.nodes:
        node._publisher = ShardPublisher(RedisDictionaries(model))
    controls: list[Control] = [LocalControl(led.nodes[0]), led.control(1)]
    publications = Publications(controls, RedisDictionaries(model), "counted", gate=gate, figures=led.reports.figures)
    led.leading.schedule = PublicationSchedule(publications, 3600.0, led.nodes[0].count)


def test_figures_are_those_of_the_union_of_all_windows(led: Led) -> None:
    assert led.reports.figures() == {}
    led.control().report("first", windows(samples(1), samples(2)))
    LocalControl(led.nodes[0]).report("second", windows(samples(3, 77)))
    assert_close(led.reports.figures(), figures(samples(1), samples(2), samples(3, 77)))
    assert led.reports.figures()["click"]["samples"] == 677
    led.control().report("first", windows(samples(4)))  # in the place of the one before
    assert_close(led.reports.figures(), figures(samples(4), samples(3, 77)))


def test_a_worker_that_is_gone_counts_no_more(led: Led) -> None:
    shards = led.shards()
    clients = {name: shards.client(name, shards.agree()) for name in ("stays", "goes")}
    for number, (name, client) in enumerate(clients.items()):
        client.join()
        led.control().report(name, windows(samples(number)))
    assert led.reports.figures()["click"]["samples"] == 600
    clients["goes"].close()
    until(lambda: led.reports.figures()["click"]["samples"] == 300)
    assert led.reports.figures() == figures(samples(0))
    clients["stays"].close()
    until(lambda: led.reports.figures() == {})


def test_a_worker_that_says_nothing_is_forgotten_and_there_are_only_so_many() -> None:
    now = [0.0]
    reports = Reports(lambda: now[0])
    reports.take("first", windows(samples(1)))
    now[0] = 299
    reports.take("second", windows(samples(2)))
    assert reports.figures()["click"]["samples"] == 600
    now[0] = 301
    assert reports.figures() == figures(samples(2))
    for number in range(2000):
        reports.take(f"worker {number}", windows(samples(0, 1)))
    assert reports.figures()["click"]["samples"] == 1024


def test_damaged_reports_are_refused_and_counted(led: Led) -> None:
    good, bad = windows(samples(1)), windows(samples(2))
    led.control().report("worker", good)
    bad[0].counts = bad[0].counts[:-3]
    large = windows(samples(2))
    large[0].label = "x" * (4 << 20)
    for worker, sent, message in (
        ("worker", bad, "the window of label 'click' is damaged"),
        ("worker", [*good, *good], "had one already"),
        ("worker", large, "at most 4194304"),
        ("", good, "a worker of 0 characters"),
        ("x" * 257, good, "a worker of 257 characters"),
    ):
        with pytest.raises(ShardRefused, match=message):
            led.control().report(worker, sent)
    assert led.nodes[0].counters["refused_reports"] == 5
    assert led.reports.figures() == figures(samples(1))
    events = {metric.name: metric for metric in ShardMetrics(led.nodes[0], list).collect()}["streamtrain_shard_events"]
    assert {s.labels["event"]: s.value for s in events.samples}["refused_reports"] == 5


def test_only_shard_0_is_told(led: Led) -> None:
    one = led.control(1)
    for ask in (lambda: one.report("worker", []), one.publish_now, one.verify):
        with pytest.raises(ShardRefused, match="shard 1 does not lead the others; ask shard 0") as caught:
            ask()
        assert caught.value.reason == "mismatch"
    for ask in (led.control().publish_now, led.control().verify, lambda: one.sums(1, "{}")):
        with pytest.raises(ShardRefused, match=r"set publish\.url"):
            ask()


def test_a_worker_that_cannot_report_goes_on(led: Led) -> None:
    failures: list[int] = []
    reporter = Reporter(led.control(1), "worker", lambda: failures.append(1))
    reporter.start()
    for seed in range(3):
        reporter.offer(validation(samples(seed)).window_sums())
        until(lambda seed=seed: len(failures) == seed + 1)  # type: ignore[misc]
    reporter.close()
    working = Reporter(led.control(), "worker", lambda: failures.append(1))
    working.start()
    working.offer(validation(samples(9)).window_sums())
    working.close()  # what was offered is sent still
    until(lambda: led.reports.figures() == figures(samples(9)))
    assert len(failures) == 3


def test_publishing_on_demand(led: Led, server: Valkey) -> None:
    publishing(led, server.url, Gate(auc_drop=0.001, min_samples=100))
    with pytest.raises(ShardUnavailable, match="nothing has been learned yet"):
        led.control().publish_now()
    log = {0: [[1, 2], [2], [3], [1]]}
    learn(led, {0: log[0][:2]})
    led.control().report("worker", windows(samples(1)))
    first = Publication.of_json(json.loads(led.control().publish_now(timeout=60)))
    assert first == read(server.url)[0]
    assert first.metrics == figures(samples(1))
    assert LocalControl(led.nodes[0]).publish_now() == led.control().publish_now()  # nothing new
    learn(led, log)
    inverted = samples(2)
    led.control().report("worker", windows((1 - inverted[0], *inverted[1:])))
    for control in (led.control(), LocalControl(led.nodes[0])):
        with pytest.raises(ShardError, match="publication 2 is held back: click: auc"):
            control.publish_now()
    assert held(led.nodes[0]) == 1
    second = Publication.of_json(json.loads(led.control().publish_now(force=True)))
    assert (second.number, dict(second.clock)) == (2, {0: 4})
    assert held(led.nodes[0]) == 0
    assert led.nodes[0].counters["publications_held"] == 2
    assert led.nodes[0].counters["publications_published"] == 2


def test_verifying_on_demand(led: Led, server: Valkey) -> None:
    publishing(led, server.url, Gate())
    with pytest.raises(ShardUnavailable, match="is empty"):
        led.control().verify()
    learn(led, {0: [[1, 2], [2], [3], [1]]})
    for control in (led.control(), LocalControl(led.nodes[0])):
        found = HeadFound.of_json(json.loads(control.verify(timeout=60)))
        assert found.agrees
        assert (found.publication, found.tables["ids"].rows) == (1, 3)
    server.kill()
    with pytest.raises(ShardError, match="does not answer"):
        led.control().verify()


def held(node: Node) -> float:
    """As Prometheus sees it."""
    (family,) = (one for one in ShardMetrics(node, list).collect() if one.name == "streamtrain_shard_publication_held")
    return family.samples[0].value


def test_one_publishes_at_a_time(led: Led, server: Valkey) -> None:
    publishing(led, server.url, Gate())
    schedule = led.leading.schedule
    assert schedule is not None
    learn(led, {0: [[1], [2]]})
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
    assert led.nodes[0].counters["publications_published"] == 1
    assert read(server.url)[2].dense.tolist() == [2] * DENSE
