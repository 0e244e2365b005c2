"""The watchdog: what is bad is left for what was good, once, on all servers or on the one that is pinned."""

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from pydantic import ValidationError

from streamtrain.errors import OriginUnavailable
from streamtrain.model.samples import SampleReader
from streamtrain.publish.versions import VersionControl
from streamtrain.quality.probes import encode_probes
from streamtrain.serve.predictor import Predictor
from streamtrain.serve.registry import HEAD, Registry, Version
from streamtrain.serve.selection import Selection
from streamtrain.serve.watchdog import Anomaly, Watchdog
from streamtrain.settings.groups import GateSettings, Settings, WatchdogSettings
from streamtrain.store.redis.source import RedisOrigin
from tests.patience import PATIENCE, until
from tests.serve.in_redis import MODEL, PREDICT, InRedis, predicted
from tests.serve.published import KEYS, origin_of, publish, weights
from tests.serve.running import TOKEN

BEARER = {"authorization": f"Bearer {TOKEN}"}
TOO_LARGE = 3e38  # two such rows are not finite, none is
TWO = ["u1", "u2"]
BOTH = {"instances": [{"user": ["u1", "u2"]}] * 5}


def probes(*samples: list[str]) -> bytes:
    """A group of probes of samples with such users."""
    batch, bad = SampleReader(MODEL, with_labels=False).decode(
        [json.dumps({"user": users}).encode() for users in samples]
    )
    assert not bad
    return encode_probes(MODEL.schema, batch, np.zeros((len(batch), 1), np.float32))


def promote(client: httpx.Client, version: int) -> None:
    answer = client.post("/v1/models/model:promote", json={"version": version}, headers=BEARER)
    assert answer.status_code == 200, answer.text


def overflow(client: httpx.Client, times: int = 2) -> None:
    """Predictions that are not finite, of inputs that their sender has chosen."""
    for _ in range(times):
        answer = client.post(PREDICT, json=BOTH)
        assert (answer.status_code, "is not finite" in answer.json()["error"]) == (400, True)


def looked(client: httpx.Client, samples: int) -> bool:
    """Whether what is served was tried with so many samples of the stream."""
    return f"watchdog_samples {float(samples)}" in client.get("/metrics").text


def test_requests_decide_nothing(published: InRedis) -> None:
    published.keep(1)
    published.publish(2, row=TOO_LARGE)
    published.versions.make("ann")
    with published.served(watchdog={"predictions": 10}) as client:
        promote(client, 1)
        promote(client, 2)
        overflow(client, times=20)
        published.model.keep_probes({0: probes(["u1"], ["u2"], [])})
        until(lambda: looked(client, 3), PATIENCE)
        overflow(client, times=20)
        assert serves(client) == "2"
    assert published.labels() == {"prod": 2}
    assert [deed.what for deed in published.versions.history()].count("rollback") == 0


def serves(client: httpx.Client) -> str:
    return client.post(PREDICT, json={"instances": [{"user": []}]}).headers["x-model-version"]


def test_all_servers_leave_a_version_that_fails_on_samples_of_the_stream(published: InRedis) -> None:
    published.keep(1, 2)
    published.publish(3, row=TOO_LARGE)
    published.versions.make("ann")
    published.model.keep_probes({0: probes(["u1", "u2"], ["u3", "u4"], ["u5"])})
    with published.served() as one, published.served() as two:
        promote(one, 1)
        promote(one, 3)
        until(lambda: predicted(one) == predicted(two) == ("1", 1), PATIENCE)
        assert published.labels() == {"prod": 1}
        deed = published.versions.history()[0]
        assert (deed.what, deed.who) == ("rollback", "watchdog")
        assert deed.why == "version 3 fails on samples of the stream: 2 of 3 predictions are not finite"
        until(lambda: rollbacks(one) + rollbacks(two) == 1, PATIENCE)  # which is counted just after it is done


def rollbacks(client: httpx.Client) -> int:
    return int('watchdog_rollbacks_total{reason="non_finite"} 1.0' in client.get("/metrics").text)


def test_a_pinned_server_leaves_alone(published: InRedis) -> None:
    published.keep(1)
    published.publish(2, row=TOO_LARGE)
    published.versions.make("ann")
    published.versions.set_label("canary", 1, "ann")
    published.control.promote(2, "ann")
    with published.served(version="2") as client:
        until(lambda: client.post("/v1/models/model/labels/canary:predict", json=BOTH).status_code == 200, PATIENCE)
        published.model.keep_probes({0: probes(["u1", "u2"])})
        until(lambda: predicted(client) == ("1", 1), PATIENCE)
    assert published.labels() == {"prod": 2, "canary": 1}


class Watched:
    """A watchdog of three versions, a clock and samples of the stream."""

    def __init__(self, **watch: Any) -> None:
        self.origin = origin_of(MODEL)
        for number in (1, 2, 3):
            publish(self.origin, number)
            self.origin.keep()
        self.registry = Registry(MODEL, self.origin)
        self.selection = Selection(self.registry)
        self.at = 0.0
        self.dog = Watchdog(self.selection, WatchdogSettings(**{"predictions": 4, **watch}), lambda: self.at)

    @property
    def served(self) -> str:
        assert self.registry.served is not None
        return self.registry.served.name

    def serve(self, version: Version) -> None:
        self.selection.promote(version, "ann")

    def judge(self, version: Version, *values: float, means: dict[str, float | None] | None = None) -> Anomaly | None:
        assert self.registry.served is not None
        predictions = np.array([values], np.float32).T
        return self.dog.judge(version, self.registry.served.publication.number, predictions, means or {})


def test_the_head_is_left_for_the_newest_version() -> None:
    watched = Watched(mean_factor=3)
    watched.origin.keep_probes([probes(["u1"], ["u2"])])
    for version in (1, 2, HEAD):
        watched.serve(version)
    assert watched.dog.check() is None
    for number in (5, 13):  # it may move, slowly
        publish(watched.origin, number)
        watched.registry.follow_head(PATIENCE)
        assert watched.dog.check() is None
    publish(watched.origin, 100)
    watched.registry.follow_head(PATIENCE)
    fault = watched.dog.check()
    assert fault is not None
    assert fault.reason == "mean"
    assert fault.text.endswith("the mean of label is 1.001e+05, after 1.301e+04")
    assert watched.served == "2"
    assert watched.dog.rollbacks == {"non_finite": 0, "mean": 1}


def test_without_samples_nothing_is_tried() -> None:
    watched = Watched()
    assert watched.dog.check() is None  # nothing is served
    watched.serve(1)
    assert watched.dog.check() is None
    watched.origin.keep_probes([b"", b"\x95", probes(["u1"])[:-1]])
    assert watched.dog.check() is None
    assert watched.dog.probes == 0
    watched.origin.keep_probes([b"\x95", probes(["u1"], ["u2"], ["u3"]), probes(["u4"], ["u5"])])
    assert watched.dog.check() is None
    assert watched.dog.probes == 4  # at most as many as are asked for


def test_a_version_that_cannot_predict_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched()
    watched.origin.keep_probes([probes(["u1"])])
    watched.serve(1)
    watched.serve(2)
    predict = Predictor.predict
    monkeypatch.setattr(Predictor, "predict", lambda self, given: _failing(self, given, predict))
    fault = watched.dog.check()
    assert fault == Anomaly(2, "non_finite", "version 2 fails on samples of the stream: FloatingPointError: overflow")
    assert watched.served == "1"


def _failing(predictor: Predictor, samples: Any, predict: Any) -> Any:
    if predictor.name == "2":
        raise FloatingPointError("overflow")
    return predict(predictor, samples)


def test_nothing_is_left_if_all_that_is_loaded_fails(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    publish(watched.origin, 4)
    keys = (KEYS, np.full((len(KEYS), 1), TOO_LARGE, np.float32))
    for _ in range(2):
        watched.origin.publish({"user": keys}, weights(4))
        watched.origin.keep()
    watched.serve(4)
    watched.serve(5)
    watched.origin.keep_probes([probes(["u1", "u2"])])
    fault = watched.dog.check()
    assert fault is not None
    assert watched.served == "5"
    assert "no other loaded publication predicts them either" in caplog.text
    watched.serve(1)
    watched.serve(5)  # now one is loaded that is good
    assert watched.dog.check() is not None
    assert watched.served == "1"


def test_newer_probes_are_taken_of_a_good_head_and_it_is_their_measure() -> None:
    watched = Watched(mean_factor=1.0008)
    watched.origin.keep_probes([probes(["u1"])])
    watched.serve(HEAD)

    def look(*newer: list[str], at: float) -> int:
        """With how many probes the next publication, which predicts as the one before, was tried."""
        watched.at = at
        if newer:
            watched.origin.keep_probes([probes(*newer)])
        publish(watched.origin, 3)
        watched.registry.follow_head(PATIENCE)
        assert watched.dog.check() is None
        return watched.dog.probes

    many = ["u1", "u2", "u3", "u4"]  # whose mean is higher by more than the factor
    assert look(at=0) == 1
    assert look(many, many, at=9.9) == 1
    assert look(at=9.95) == 1
    assert look(at=10) == 1  # with the old ones; then the new ones are taken
    assert look(at=11) == 2
    assert look(["u1"], ["u1"], many, at=19.9) == 2
    assert look(at=20.5) == 2
    assert look(at=21) == 3
    watched.serve(2)
    fault = watched.dog.check()
    assert fault is None  # to go back is not to lead further back


@pytest.mark.parametrize(
    ("newer", "count"),
    [
        ([TWO, TWO, ["u1"]], 1),
        ([TWO, ["u1"]], 2),
        ([["u1"], ["u1"], ["u1"]], 3),
        ([TWO, TWO, TWO, TWO, ["u1"], ["u1"], ["u1"]], 1),
    ],
)
def test_newer_probes_that_a_good_head_fails_on_are_not_taken(newer: list[list[str]], count: int) -> None:
    watched = Watched(predictions=8)
    keys = (KEYS, np.full((len(KEYS), 1), TOO_LARGE, np.float32))
    watched.origin.keep_probes([probes(["u1"])])
    watched.serve(HEAD)
    for at in (0, 10, 20):
        watched.at = at
        watched.origin.publish({"user": keys}, weights(0))
        watched.registry.follow_head(PATIENCE)
        watched.dog.check()
        if at == 0:
            watched.origin.keep_probes([probes(*newer)])
    assert watched.dog.probes == count


def test_the_head_may_be_left_again_and_a_version_may_not() -> None:
    watched = Watched()
    watched.origin.keep_probes([probes(TWO)])
    for version in (1, 2):
        watched.serve(version)
        assert watched.dog.check() is None
    keys = (KEYS, np.full((len(KEYS), 1), TOO_LARGE, np.float32))
    watched.origin.publish({"user": keys}, weights(0))
    watched.origin.keep()
    for _ in range(2):
        watched.serve(HEAD)
        assert watched.dog.check() is not None
        assert watched.served == "2"
    assert watched.dog.rollbacks["non_finite"] == 2
    watched.serve(4)
    assert watched.dog.check() is not None
    assert watched.served == "2"
    watched.dog.check()
    watched.serve(4)
    assert watched.dog.check() is not None
    assert watched.dog.check() is None  # whoever serves it again wants it
    assert watched.served == "4"
    assert watched.dog.rollbacks["non_finite"] == 3


def predicting(monkeypatch: pytest.MonkeyPatch, **by_name: list[float] | Exception) -> None:
    """What is called so predicts these."""

    def predict(predictor: Predictor, _: Any) -> Any:
        found = by_name[f"v{predictor.name}"]
        if isinstance(found, Exception):
            raise found
        return np.array([found], np.float32).T

    monkeypatch.setattr(Predictor, "predict", predict)


def test_what_cannot_be_read_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched()
    watched.origin.keep_probes([probes(["u1"])])
    watched.serve(1)
    watched.serve(2)
    predicting(monkeypatch, v2=OriginUnavailable("Redis does not answer"))
    with pytest.raises(OriginUnavailable):
        watched.dog.check()
    assert watched.served == "2"


def test_one_other_that_is_not_above_the_share_is_enough(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(non_finite=0.5)
    watched.origin.keep_probes([probes(["u1"], ["u2"])])
    watched.serve(1)
    watched.serve(2)
    predicting(monkeypatch, v1=[math.nan, 1], v2=[math.nan, math.nan])
    assert watched.dog.check() is not None
    assert watched.served == "1"
    assert caplog.records[-1].getMessage().endswith("2 of 2 predictions are not finite: rolled back to 1")


def test_a_version_whose_mean_moved_is_rolled_back_even_if_the_others_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only predictions that are not finite may be the fault of the probes or of this process."""
    watched = Watched(mean_factor=2)
    watched.origin.keep_probes([probes(["u1"])])
    watched.serve(1)
    predicting(monkeypatch, v1=[0.1])
    assert watched.dog.check() is None
    watched.serve(2)
    predicting(monkeypatch, v1=[math.nan], v2=[0.9])
    fault = watched.dog.check()
    assert fault is not None
    assert (fault.reason, watched.served) == ("mean", "1")


def test_defaults() -> None:
    assert WatchdogSettings() == WatchdogSettings(non_finite=0.5, mean_factor=None, predictions=1000, window=600.0)
    assert Settings().watchdog == WatchdogSettings()
    with pytest.raises(ValidationError, match="frozen"):
        WatchdogSettings().window = 1.0


def test_a_share_above_the_bound_is_a_fault() -> None:
    watched = Watched(non_finite=0.5)
    watched.serve(1)
    nan = float("nan")
    assert watched.judge(1, nan, nan, 1, 1) is None  # not above the share
    why = "version 1 fails on samples of the stream: 3 of 4 predictions are not finite"
    assert watched.judge(1, nan, nan, nan, 1) == Anomaly(1, "non_finite", why)
    never = Watched(non_finite=1)
    never.serve(1)
    assert never.judge(1, nan, nan, nan, nan) is None


def test_a_version_is_compared_with_what_was_before() -> None:
    watched = Watched(mean_factor=2, window=60)
    watched.serve(1)
    assert watched.judge(1, 0.1, 0.1, 0.1, 0.1) is None
    watched.serve(2)
    fault = watched.judge(2, 0.3, 0.3, 0.3, 0.1)
    why = "predictions of version 2 for samples of the stream have shifted: the mean of label is 0.25, after 0.1"
    assert fault == Anomaly(2, "mean", why)
    assert watched.judge(2, 0.04, 0.04, 0.04, 0.04) is not None
    assert watched.judge(2, 0.19, 0.19, 0.19, 0.19) is None
    assert watched.judge(2, 0.3, 0.3, 0.3, 0.3) is not None  # not with its own last look
    watched.at = 60
    assert watched.judge(2, 0.3, 0.3, 0.3, 0.3) is not None
    watched.at = 61
    assert watched.judge(2, 0.9, 0.9, 0.9, 0.9) is None
    watched.serve(3)
    assert watched.judge(3, 0.8, 0.8, 0.8, 0.8) is None
    watched.at = 121
    assert watched.judge(3, 9, 9, 9, 9) is not None  # a minute after it came
    watched.serve(1)
    assert watched.judge(1, 0.1, 0.1, 0.1, 0.1) is None  # to go back is not to lead further back


def test_the_window_starts_when_a_version_is_first_judged() -> None:
    watched = Watched(window=60)
    good, bad = np.ones((4, 1), np.float32), np.full((4, 1), np.nan, np.float32)
    assert watched.dog.judge(int("1000"), 1, good, {}) is None
    watched.at = 60
    assert watched.dog.judge(int("1000"), 1, bad, {}) is not None
    watched.at = 61
    assert watched.dog.judge(int("1000"), 1, bad, {}) is None


def test_the_first_is_compared_with_the_labels() -> None:
    watched = Watched(mean_factor=2)
    watched.serve(1)
    learned: dict[str, float | None] = {"label": 0.5}
    assert watched.judge(1, 0.1, 0.1, 0.1, 0.1) is None  # nothing is known
    watched = Watched(mean_factor=2)
    watched.serve(1)
    assert watched.judge(1, 0.1, 0.1, 0.1, means=learned) is None  # too few to compare with all samples of a window
    watched = Watched(mean_factor=2)
    watched.serve(1)
    assert watched.judge(1, 0.1, 0.1, 0.1, 0.1, means=learned) is not None
    assert watched.judge(1, -0.1, -0.1, -0.1, -0.1, means=learned) is None  # no factor
    assert watched.judge(1, 0.0, 0.0, 0.0, 0.0, means=learned) is None
    assert watched.judge(1, 0.25, 0.25, 0.25, 0.25, means=learned) is None  # it must be more than the factor
    watched = Watched(mean_factor=2)
    watched.serve(1)
    assert watched.judge(1, -0.1, -0.1, -0.1, -0.1, means={"label": -0.5}) is None  # no factor
    watched = Watched(mean_factor=2, predictions=300)
    watched.serve(1)
    assert watched.judge(1, *[0.1] * 299, means=learned) is None
    watched = Watched(mean_factor=2, predictions=300)
    watched.serve(1)
    assert watched.judge(1, *[0.1] * 300, means=learned) is not None


def test_what_has_no_mean_is_no_measure() -> None:
    watched = Watched(mean_factor=2, non_finite=1)
    watched.serve(1)
    assert watched.judge(1, 0.1, 0.1, 0.1, 0.1) is None
    watched.serve(2)
    assert watched.judge(2, *[math.nan] * 300) is None
    watched.serve(3)
    assert watched.judge(3, 0.9, 0.9, 0.9, 0.9) is not None


def test_a_version_of_the_publication_that_was_the_head_is_watched() -> None:
    watched = Watched()
    watched.serve(HEAD)
    assert watched.judge(HEAD, 1, 1, 1, 1) is None
    watched.serve(3)
    assert watched.judge(3, *[math.nan] * 4) is not None
    watched.serve(2)
    assert watched.judge(2, *[math.nan] * 4) is None


def test_nothing_else_to_be_served(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.serve(HEAD)
    assert watched.dog.react(Anomaly(HEAD, "non_finite", "all is lost")) is False
    assert "all is lost, but nothing else can be served: no good version is loaded" in caplog.text
    assert watched.served == HEAD
    for at, said in ((59.9, 1), (60.0, 2)):  # at most once a minute
        watched.at = at
        assert watched.dog.react(Anomaly(HEAD, "non_finite", "all is lost")) is False
        assert caplog.text.count("nothing else can be served") == said
    watched.serve(1)
    assert watched.dog.react(Anomaly(HEAD, "non_finite", "all is lost")) is True  # it is not served any more
    assert watched.dog.rollbacks == {"non_finite": 0, "mean": 0}
    assert watched.dog.react(Anomaly(1, "mean", "it has moved")) is True
    assert (watched.served, watched.dog.rollbacks["mean"]) == (HEAD, 1)
    assert caplog.records[-1].getMessage() == "it has moved: rolled back to head"
    watched.serve(1)
    assert watched.dog.react(Anomaly(1, "mean", "it has moved")) is True  # who has it served again, wants it
    assert (watched.served, watched.dog.rollbacks["mean"]) == ("1", 1)


class Together(VersionControl):
    """Changes nothing before another is about to do so, too."""

    def __init__(self, published: InRedis, barrier: threading.Barrier) -> None:
        super().__init__(published.versions, GateSettings())
        self._barrier = barrier

    def promote(self, *given: Any, **options: Any) -> int | None:
        self._barrier.wait(PATIENCE)
        return super().promote(*given, **options)

    def rollback(self, *given: Any, **options: Any) -> int | None:
        self._barrier.wait(PATIENCE)
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
        selection.apply(bad)
        watchdogs.append(Watchdog(selection, WatchdogSettings()))
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(one.react, Anomaly(bad, "non_finite", "bad")) for one in watchdogs]:
            done.result(PATIENCE)
    assert sorted(one.rollbacks["non_finite"] for one in watchdogs) == [0, 1]
    assert len(published.versions.history()) == before + 1
    assert published.labels()["prod"] in ({2} if bad == 3 else {1, 2})


def test_what_is_promoted_again_is_wanted_by_all_watchdogs(published: InRedis) -> None:
    published.keep(1, 2)
    published.control.promote(1, "ann")
    origin, fault = RedisOrigin(published.model), Anomaly(2, "non_finite", "bad")
    watchdogs = []
    for _ in range(2):
        selection = Selection(Registry(MODEL, origin), promoter=published.control)
        watchdogs.append(Watchdog(selection, WatchdogSettings()))
    for _ in range(2):
        published.control.promote(2, "ann")
        assert all([one.react(fault) for one in watchdogs])
    assert published.labels() == {"prod": 2}
    assert [one.rollbacks["non_finite"] for one in watchdogs] == [1, 0]
