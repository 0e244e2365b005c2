"""Versions by schedule: of what was published, as many as are to be kept, and those that are in use."""

import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import GateClosed, OriginUnavailable
from streamtrain.publish.versions import VersionSchedule
from streamtrain.settings.groups import GateSettings
from streamtrain.store.publication import Publication
from streamtrain.store.redis.dictionary import RedisDictionaries
from streamtrain.store.redis.versions import RedisVersions
from tests.patience import until
from tests.publish.published import Cluster


class Scheduled:
    """A cluster with a schedule of versions, not started."""

    def __init__(self, url: str, *, every: float = 0.01, keep: int = 10, **options: Any) -> None:
        self.window: dict[str, Any] = {}
        self.cluster = Cluster(url, figures=lambda: self.window, **options)
        self.versions = RedisVersions(self.cluster.model)
        self.counts: Counter[str] = Counter()
        self.head: Callable[[], Publication | None] = RedisDictionaries(self.cluster.model).head
        self.now = 1_000.0
        self.schedule = VersionSchedule(
            self.versions,
            self.ask,
            every=every,
            keep=keep,
            count=lambda name: self.counts.update([name]),
            now=lambda: self.now,
        )

    def ask(self) -> Publication | None:
        return self.head()

    def publish(self) -> None:
        self.cluster.learn(1)
        self.cluster.publish()

    def numbers(self) -> dict[int, int]:
        """Publication by version."""
        return {one.version: one.number for one in self.versions.all() if one.version is not None}


@pytest.fixture
def make(server: Valkey) -> Iterator[Callable[..., Scheduled]]:
    made: list[Scheduled] = []

    def start(**options: Any) -> Scheduled:
        made.append(Scheduled(server.url, **options))
        return made[-1]

    yield start
    for one in made:
        one.schedule.stop()


def step(one: Scheduled, seconds: float) -> float:
    """What the schedule's thread does when it wakes after so long."""
    one.now += seconds
    return one.schedule._task.run_once()


def test_old_versions_go_but_those_that_are_in_use(make: Callable[..., Scheduled]) -> None:
    one = make(every=100.0, keep=2)
    for number in range(1, 6):
        one.publish()
        step(one, 100.0)
        if number == 1:
            one.versions.set_label("prod", 1, "somebody")
        if number == 2:
            one.versions.acquire(2, "server", 60.0)
    assert one.numbers() == {1: 1, 2: 2, 4: 4, 5: 5}
    assert one.counts == {"versions_made": 5}
    deeds = one.versions.history()
    assert [(deed.what, deed.version) for deed in deeds if deed.what != "label"][:2] == [("delete", 3), ("version", 5)]
    assert {deed.who for deed in deeds} == {"schedule", "somebody"}


def test_a_version_is_made_when_it_is_time_and_only_of_something_new(make: Callable[..., Scheduled]) -> None:
    one = make(every=100.0)
    assert step(one, 0.0) == 100.0
    assert 0 < step(one, 100.0) < 100.0  # there is no head: soon again
    one.publish()
    assert step(one, 1.0) == 100.0
    assert one.numbers() == {1: 1}
    one.publish()
    assert step(one, 60.0) == pytest.approx(40.0)
    assert one.numbers() == {1: 1}
    step(one, 40.0)
    assert one.numbers() == {1: 1, 2: 2}
    step(one, 100.0)
    assert one.numbers() == {1: 1, 2: 2}


def test_who_begins_waits_until_the_last_version_is_old_enough(make: Callable[..., Scheduled]) -> None:
    one = make(every=100.0)
    one.publish()
    published = one.versions.make("somebody").published
    one.publish()
    one.now = published + 30.0
    assert step(one, 0.0) == pytest.approx(70.0)
    step(one, 70.0)
    assert one.numbers() == {1: 1, 2: 2}


def test_it_runs_and_says_once_that_it_cannot(
    make: Callable[..., Scheduled], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "streamtrain")
    monkeypatch.setattr("streamtrain.publish.versions._AGAIN", 0.01)
    one = make()
    later = itertools.count(1e12)
    one.schedule._now = lambda: next(later)  # always time
    one.publish()
    head, one.head = one.head, unavailable
    one.schedule.start()
    until(lambda: one.counts["versions_failed"] >= 3)
    one.head = head
    until(lambda: one.counts["versions_made"] == 1)
    until(lambda: "making a version works again" in caplog.text)
    one.head = broken
    until(lambda: "no memory" in caplog.text)
    one.head = head
    one.publish()
    until(lambda: one.numbers() == {1: 1, 2: 2})
    one.schedule.stop()
    assert "versions" not in [thread.name for thread in threading.enumerate()]
    assert caplog.text.count("making a version failed, retrying: Redis at nowhere") == 1


def unavailable() -> Publication | None:
    raise OriginUnavailable("Redis at nowhere does not answer: it is away")


def broken() -> Publication | None:
    raise MemoryError("no memory")


def test_a_version_has_passed_the_gate(make: Callable[..., Scheduled]) -> None:
    one = make(gate=GateSettings())
    one.window = {"click": {"samples": 10, "auc": 0.7, "non_finite": 0}}
    one.publish()
    step(one, 100.0)
    one.window = {"click": {"samples": 10, "auc": 0.7, "non_finite": 1}}
    with pytest.raises(GateClosed):
        one.publish()
    step(one, 100.0)
    (version,) = one.versions.all()
    assert version.metrics["click"]["auc"] == 0.7
    assert dict(version.clock) == {0: 1}
