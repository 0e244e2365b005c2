"""The watchdog: what is bad is left for what was good, once, on all servers or on the one that is pinned."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from streamtrain.cluster.versions import VersionControl
from streamtrain.serve.follower import Follower
from streamtrain.serve.predictor import Predicted
from streamtrain.serve.registry import HEAD, Registry, Version
from streamtrain.serve.selection import Selection
from streamtrain.serve.watchdog import Fault, Watch, Watchdog
from streamtrain.store.gate import Gate
from streamtrain.store.origin import Publication
from streamtrain.store.redis_origin import RedisOrigin
from tests.ps.raw import until
from tests.serve.in_redis import MODEL, PREDICT, InRedis, predicted
from tests.serve.published import origin_of, publish
from tests.serve.running import LONG, TOKEN, serving

BEARER = {"authorization": f"Bearer {TOKEN}"}
TOO_LARGE = 3e38  # two such rows are not finite, none is
BOTH = {"instances": [{"user": ["u1", "u2"]}] * 5}


def promote(client: httpx.Client, version: int) -> None:
    answer = client.post("/v1/models/model:promote", json={"version": version}, headers=BEARER)
    assert answer.status_code == 200, answer.text


def overflow(client: httpx.Client, times: int = 2) -> None:
    """A block of predictions that are not finite."""
    for _ in range(times):
        answer = client.post(PREDICT, json=BOTH)
        assert (answer.status_code, "is not finite" in answer.json()["error"]) == (400, True)


def test_all_servers_leave_a_version_whose_predictions_are_not_finite(published: InRedis) -> None:
    published.keep(1, 2)
    published.publish(3, row=TOO_LARGE)
    published.versions.make("ann")
    watchdog = {"predictions": 10}
    with published.served(watchdog=watchdog) as one, published.served(watchdog=watchdog) as two:
        for version in (1, 3):
            promote(one, version)
        until(lambda: two.get("/healthz/ready").json()["version"] == "3", LONG)
        overflow(one)
        until(lambda: predicted(one) == predicted(two) == ("1", 1), LONG)
        assert published.labels() == {"prod": 1}
        deed = published.versions.history()[0]
        assert (deed.what, deed.who) == ("rollback", "watchdog")
        assert deed.why == "10 of 10 predictions of version 3 are not finite"
        assert 'watchdog_rollbacks_total{reason="non_finite"} 1.0' in one.get("/metrics").text
        assert 'watchdog_rollbacks_total{reason="non_finite"} 0.0' in two.get("/metrics").text
        promote(one, 3)  # whoever does so knows what it is
        overflow(one, times=10)
        assert published.labels() == {"prod": 3}


def test_a_pinned_server_leaves_alone(published: InRedis) -> None:
    published.keep(1)
    published.publish(2, row=TOO_LARGE)
    published.versions.make("ann")
    published.versions.set_label("canary", 1, "ann")
    published.control.promote(2, "ann")
    with published.served(version="2", watchdog={"predictions": 10}) as client:
        until(lambda: client.post("/v1/models/model/labels/canary:predict", json=BOTH).status_code == 200, LONG)
        overflow(client)
        until(lambda: predicted(client) == ("1", 1), LONG)
    assert published.labels() == {"prod": 2, "canary": 1}


def test_the_head_is_left_for_the_newest_version() -> None:
    origin = origin_of(MODEL)
    for number in (1, 2):
        publish(origin, number)
        origin.keep(f"l{number}")
    registry = Registry(MODEL, origin)
    watch = Watch(mean_factor=3, predictions=10)
    with serving(registry, Follower(registry, every=0.02), watch=watch) as client:
        until(lambda: len(registry.resident) == 3, LONG)
        block = {"instances": [{"user": "u1"}] * 10}
        for number in (3, 5, 12):  # it may move, slowly
            publish(origin, number)
            until(lambda number=number: predicted(client) == ("head", number), LONG)  # type: ignore[misc]
            for _ in range(2):
                assert client.post(PREDICT, json=block).headers["x-model-version"] == "head"
        publish(origin, 100)
        until(lambda: client.post(PREDICT, json=block).headers["x-model-version"] == "2", LONG)
        assert predicted(client) == ("2", 2)
        assert 'watchdog_rollbacks_total{reason="mean"} 1.0' in client.get("/metrics").text


class Watched:
    """A watchdog of three versions and a clock."""

    def __init__(self, **watch: float) -> None:
        origin = origin_of(MODEL)
        for number in (1, 2, 3):
            publish(origin, number)
            origin.keep()
        self.registry = Registry(MODEL, origin)
        self.selection = Selection(self.registry)
        self.at = 0.0
        self.dog = Watchdog(self.selection, Watch(predictions=4, **watch), ["label"], lambda: self.at)

    def serve(self, version: Version) -> None:
        self.selection.promote(version, "ann")

    def block(
        self, version: Version, *values: float, metrics: dict[str, dict[str, float | None]] | None = None
    ) -> Fault | None:
        assert self.registry.served is not None
        about = self.registry.served.publication.as_json() | {"metrics": metrics or {}}
        predictions = np.array([values], np.float32).T
        given = Predicted(predictions, [], Publication.of_json(about))
        return self.dog.observe(version, given, bool(np.isfinite(predictions).all()))


def test_a_block_is_looked_at_when_it_is_whole() -> None:
    watched = Watched(non_finite=0.5)
    watched.serve(1)
    nan = float("nan")
    assert watched.block(1, nan, nan, nan) is None
    assert watched.block(1, nan) == Fault(1, "non_finite", "4 of 4 predictions of version 1 are not finite")
    assert watched.block(1, nan, nan, 1, 1) is None  # not above the share


def test_a_version_is_compared_with_what_was_before() -> None:
    watched = Watched(mean_factor=2, window=60)
    watched.serve(1)
    assert watched.block(1, 0.1, 0.1, 0.1, 0.1) is None
    watched.serve(2)
    fault = watched.block(2, 0.3, 0.3, 0.3, 0.1)
    assert fault == Fault(2, "mean", "predictions of version 2 have moved: the mean of label is 0.25, after 0.1")
    assert watched.block(2, 0.19, 0.19, 0.19, 0.19) is None
    assert watched.block(2, 0.3, 0.3, 0.3, 0.3) is not None  # not with its own last block
    watched.at = 61
    assert watched.block(2, 0.9, 0.9, 0.9, 0.9) is None
    watched.serve(3)
    assert watched.block(3, 0.8, 0.8, 0.8, 0.8) is None
    watched.serve(1)
    assert watched.block(1, 0.1, 0.1, 0.1, 0.1) is None  # to go back is not to lead further back


def test_the_first_is_compared_with_the_labels() -> None:
    watched = Watched(mean_factor=2)
    watched.serve(1)
    learned: dict[str, dict[str, float | None]] = {"label": {"label_mean": 0.5}}
    assert watched.block(1, 0.1, 0.1, 0.1, 0.1) is None  # nothing is known
    watched = Watched(mean_factor=2)
    watched.serve(1)
    assert watched.block(1, 0.1, 0.1, 0.1, 0.1, metrics=learned) is not None
    assert watched.block(1, -0.1, -0.1, -0.1, -0.1, metrics=learned) is None  # no factor


def test_nothing_else_to_be_served(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.serve(HEAD)
    watched.dog.react(Fault(HEAD, "non_finite", "all is lost"))
    assert "all is lost, but nothing else can be served: nothing good is loaded" in caplog.text
    assert watched.registry.served_version == HEAD
    watched.serve(1)
    watched.dog.react(Fault(HEAD, "non_finite", "all is lost"))  # it is not served any more
    assert watched.dog.rollbacks == {"non_finite": 0, "mean": 0}
    watched.dog.react(Fault(1, "mean", "it has moved"))
    assert (watched.registry.served_version, watched.dog.rollbacks["mean"]) == (HEAD, 1)


class Together(VersionControl):
    """Changes nothing before another is about to do so, too."""

    def __init__(self, published: InRedis, barrier: threading.Barrier) -> None:
        super().__init__(published.versions, Gate())
        self._barrier = barrier

    def promote(self, *given: Any, **options: Any) -> int | None:
        self._barrier.wait(LONG)
        return super().promote(*given, **options)

    def rollback(self, *given: Any, **options: Any) -> int | None:
        self._barrier.wait(LONG)
        return super().rollback(*given, **options)


@pytest.mark.parametrize("bad", [3, HEAD])
def test_two_watchdogs_at_once_go_back_once(published: InRedis, bad: Version) -> None:
    published.keep(1, 2, 3)
    for version in (1, 2, 3):
        published.control.promote(version, "ann")
    if bad == HEAD:
        published.control.promote(None, "ann")
    before, barrier = len(published.versions.history()), threading.Barrier(2)
    origin = RedisOrigin(published.model)
    watchdogs = []
    for instead in (1, 2):  # what each would serve instead of the head
        selection = Selection(Registry(MODEL, origin), promoter=Together(published, barrier))
        selection.registry.promote(instead)
        selection.keep_up(bad)
        watchdogs.append(Watchdog(selection, Watch(), ["label"]))
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(one.react, Fault(bad, "non_finite", "bad")) for one in watchdogs]:
            done.result(LONG)
    assert sorted(one.rollbacks["non_finite"] for one in watchdogs) == [0, 1]
    assert len(published.versions.history()) == before + 1
    assert published.labels()["prod"] in ({2} if bad == 3 else {1, 2})
