"""Publications that are not good enough are held back: nobody sees them, and training goes on."""

import logging
from collections import Counter
from typing import Any

import numpy as np
import pytest
import redis

from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import GateClosed
from streamtrain.publish.cluster_publisher import PublicationSchedule
from streamtrain.quality.gate import Baseline
from streamtrain.settings.groups import GateSettings
from streamtrain.store.redis.dictionary import RedisDictionaries
from tests.patience import until
from tests.ps.counting import key
from tests.publish.published import Cluster, assert_published, read

Window = dict[str, dict[str, float | None]]


def window(auc: float | None = 0.75, **more: float | None) -> Window:
    figures = {"samples": 20_000.0, "auc": auc, "log_loss": 0.3, "calibration": 1.0, "non_finite": 0.0}
    return {"click": figures | more}


class Judged(Cluster):
    """A cluster whose window says what a test sets."""

    def __init__(self, url: str, gate: GateSettings, **options: Any) -> None:
        self.window = window()
        super().__init__(url, gate=gate, figures=lambda: self.window, **options)

    def held(self) -> str:
        with pytest.raises(GateClosed) as caught:
            self.publications.publish()
        return str(caught.value)


def size(url: str) -> tuple[int, int]:
    """How much there is on a server, and in the log."""
    with redis.Redis.from_url(url) as client:
        return client.dbsize(), client.xlen("streamtrain:model:{counted}:log")


def test_a_publication_tells_the_figures_of_its_window(server: Valkey) -> None:
    cluster = Judged(server.url, GateSettings())
    cluster.learn(2)
    assert cluster.publish().metrics == window()
    cluster.window = window(None)
    cluster.learn(1)
    cluster.publish()
    assert read(server.url)[0].metrics == window(None)


def test_what_is_worse_is_held_back_until_it_is_better(server: Valkey) -> None:
    cluster = Judged(server.url, GateSettings(auc_drop=0.01))
    cluster.learn(2)
    cluster.publish()
    before = size(server.url)
    for cluster.window in (window(0.73), window(0.739)):
        cluster.learn(1)
        assert cluster.held().startswith("publication 2 is held back: click: auc 0.73")
        assert_published(server.url, 2)
    assert size(server.url) == before
    cluster.window = window(0.745)
    cluster.learn(1)
    assert cluster.publish().number == 2
    assert_published(server.url, 5)


def test_predictions_that_are_not_finite_hold_back_by_default_even_the_first(server: Valkey) -> None:
    cluster = Judged(server.url, GateSettings())
    cluster.window = window(non_finite=2.0)
    cluster.learn(1)
    assert "click: 2 predictions in the window are not finite" in cluster.held()
    assert size(server.url) == (0, 0)
    cluster.window = window()
    cluster.publish()
    assert_published(server.url, 1)


def test_what_is_held_back_can_be_forced_and_is_good_from_then_on(server: Valkey) -> None:
    cluster = Judged(server.url, GateSettings(auc_drop=0.01))
    cluster.learn(1)
    cluster.publish()
    cluster.window = window(0.6)
    cluster.learn(1)
    cluster.held()
    assert cluster.publications.publish(force=True) is not None
    assert_published(server.url, 2)
    cluster.window = window(0.595)
    cluster.learn(1)
    cluster.publish()
    cluster.window = window(0.55)
    cluster.learn(1)
    cluster.held()


def test_a_model_that_worsens_slowly_is_held_back_too(server: Valkey) -> None:
    cluster = Judged(server.url, GateSettings(auc_drop=0.01))
    for auc in (0.75, 0.746, 0.742):
        cluster.window = window(auc)
        cluster.learn(1)
        cluster.publish()
    cluster.window = window(0.738)
    cluster.learn(1)
    assert "auc 0.73800 is worse than 0.75000" in cluster.held()


def test_who_begins_compares_with_the_head(server: Valkey) -> None:
    first = Judged(server.url, GateSettings(auc_drop=0.01))
    first.learn(1)
    first.publish()
    second = Judged(server.url, GateSettings(auc_drop=0.01), run="another")
    second.window = window(0.5)
    second.learn(4)
    assert "worse than 0.75000" in second.held()
    assert_published(server.url, 1)
    second.window = window(0.745)
    second.publish()
    assert_published(server.url, 4)


@pytest.mark.parametrize("is_first", [True, False])
def test_rows_that_are_not_finite_are_not_published(server: Valkey, is_first: bool) -> None:
    cluster = Judged(server.url, GateSettings())
    if not is_first:
        cluster.learn(2)
        cluster.publish()
    cluster.learn(3)
    shard = next(node.shard for node in cluster.nodes if node.shard.tables[0].lookup(keys_of(2))[0].all())
    (good,) = shard.tables[0].pull(keys_of(2))
    steps = np.ones(1, np.uint32)
    shard.tables[0].push(keys_of(2), np.full((1, 1), 2.0**50, np.float32), steps, steps, 3e38)  # it has diverged
    assert np.isinf(shard.tables[0].pull(keys_of(2))).all()
    assert f"shard {shard.index} has 1 rows of table ids that are not finite" in cluster.held()
    before = size(server.url)
    for _ in range(3):
        cluster.held()
    with pytest.raises(GateClosed):
        cluster.publications.publish(force=True)
    assert is_first or size(server.url) == before  # the other shard's part is not written again and again
    shard.tables[0].load(keys_of(2), good[None], np.empty((1, 0), np.float32), steps, steps)
    cluster.publish()
    assert_published(server.url, cluster.learned)


def keys_of(*ids: int) -> Any:
    return np.array([key(one) for one in ids], np.uint64)


def test_weights_that_are_not_finite_are_not_published(server: Valkey) -> None:
    cluster = Judged(server.url, GateSettings(), dense=np.array([0, 0, 0, np.inf, np.nan], np.float32))
    cluster.learn(1)
    assert "shard 1 has 2 dense weights that are not finite" in cluster.held()
    assert read_head(cluster) is None


def read_head(cluster: Cluster) -> Any:
    return RedisDictionaries(cluster.model).head()


def test_the_schedule_says_once_that_it_is_held_back(server: Valkey, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "streamtrain")
    cluster = Judged(server.url, GateSettings(auc_drop=0.01))
    counts: Counter[str] = Counter()
    schedule = PublicationSchedule(cluster.publications, 0.02, lambda name: counts.update([name]))
    schedule.start()
    cluster.learn(1)
    until(lambda: counts["publications_published"] == 1)
    assert not schedule.held
    cluster.window = window(0.5)
    cluster.learn(1)
    until(lambda: counts["publications_held"] >= 3)
    assert schedule.held
    with pytest.raises(GateClosed):
        schedule.now()
    cluster.window = window()
    until(lambda: counts["publications_published"] == 2)
    until(lambda: not schedule.held)
    schedule.stop()
    assert_published(server.url, 2)
    assert schedule.now().number == 2  # there is nothing new
    assert caplog.text.count("publication 2 is held back") == 1
    assert caplog.text.count("publications are no longer held back") == 1
    assert counts["publications_failed"] == 0


def test_the_schedule_goes_on_whatever_happens(server: Valkey, caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(server.url)
    cluster.learn(1)
    publish, broken = cluster.publications.publish, [True]

    def breaks(**options: Any) -> Any:
        if broken:
            raise MemoryError("no memory")
        return publish(**options)

    cluster.publications.publish = breaks  # type: ignore[method-assign]
    schedule = PublicationSchedule(cluster.publications, 0.02)
    schedule.start()
    until(lambda: schedule.failed >= 2)
    broken.clear()
    until(lambda: schedule.published == 1)
    schedule.stop()
    assert "no memory" in caplog.text
    assert_published(server.url, 1)


def test_nothing_is_compared_with_small_windows() -> None:
    reference = Baseline(10_000)
    reference.add(window(0.99, samples=9_999.0))
    assert reference.figures() == {}
    reference.add(window(0.7))
    assert reference.figures()["click"]["auc"] == 0.7


def test_the_best_of_an_hour_counts_and_what_was_before_is_forgotten() -> None:
    now = [0.0]
    reference = Baseline(1, lambda: now[0])
    reference.add(window(0.8, log_loss=0.4, calibration=1.2))
    now[0] = 1800
    reference.add(window(0.7, log_loss=0.3, calibration=0.9))
    best = reference.figures()["click"]
    assert (best["auc"], best["log_loss"], best["calibration"]) == (0.8, 0.3, 0.9)
    now[0] = 3 * 3600  # held back for long: the good one stays
    assert reference.figures()["click"]["auc"] == 0.8
    reference.add(window(0.6))
    assert reference.figures()["click"]["auc"] == 0.6
    for now[0] in np.arange(10_000, 30_000, 0.5).tolist():
        reference.add(window(0.5))
    assert len(reference._slots) <= 61


def test_a_gate_that_is_open_lets_all_through(server: Valkey) -> None:
    cluster = Judged(server.url, GateSettings(non_finite=False))
    cluster.learn(1)
    cluster.publish()
    cluster.window = window(0.1, non_finite=5.0, log_loss=9.0, calibration=7.0)
    cluster.learn(1)
    cluster.publish()
    assert_published(server.url, 2)
