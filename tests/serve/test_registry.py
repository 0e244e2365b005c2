"""What is loaded, what is served, and what is refused; and that serving goes on whatever the origin does."""

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import streamtrain as stm
from streamtrain._core import hash_bytes
from streamtrain.disk import RowsOnDisk
from streamtrain.errors import (
    ConfigError,
    NothingBefore,
    OriginUnavailable,
    PublicationCorrupt,
    PublicationError,
    PublicationMismatch,
    PublicationMissing,
)
from streamtrain.model.spec import Spec
from streamtrain.serve.follower import RegistryUpdater
from streamtrain.serve.registry import HEAD, Registry
from streamtrain.store.publication import Publication, PublicationStep, RowChange, Weights
from streamtrain.testing.store import MemoryOrigin
from tests.patience import PATIENCE, until
from tests.serve.published import KEYS, counted, origin_of, publish, rows, weights

MODEL = counted()
SAMPLE = [{"user": "u1"}]


class Away(MemoryOrigin):
    """An origin that can be away."""

    away = False

    def find(self, version: int | None) -> Publication | None:
        self._ask()
        return super().find(version)

    def labels(self) -> dict[str, int]:
        self._ask()
        return super().labels()

    def load(self, publication: Publication, take: Callable[[RowChange], object]) -> tuple[Publication, Weights]:
        self._ask()
        return super().load(publication, take)

    def follow(self, publication: Publication, seconds: float) -> Iterator[PublicationStep]:
        self._ask()
        return super().follow(publication, seconds)

    def _ask(self) -> None:
        if self.away:
            raise OriginUnavailable("memory is away")


@pytest.fixture
def origin() -> Away:
    return Away(Spec.of(MODEL).to_json())


@pytest.fixture
def registry(origin: Away) -> Registry:
    return Registry(MODEL, origin)


def served(registry: Registry) -> float:
    """The number of the publication that predicts."""
    assert registry.served is not None
    return float(registry.served.predict(SAMPLE)[0, 0]) / 1001


class Changes:
    """Waits until a registry is as it should be."""

    def __init__(self, registry: Registry) -> None:
        self._changed = threading.Condition()
        registry.listen(self._tell)

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE)


@pytest.fixture
def follow(registry: Registry) -> Iterator[Callable[..., RegistryUpdater]]:
    followers: list[RegistryUpdater] = []

    def begin(**options: object) -> RegistryUpdater:
        followers.append(RegistryUpdater(registry, every=0.02, **options))  # type: ignore[arg-type]
        followers[-1].start()
        return followers[-1]

    yield begin
    for one in followers:
        one.close()


def test_promote_and_roll_back(origin: Away, registry: Registry) -> None:
    for number in (1, 2):
        publish(origin, number)
        origin.keep()
    publish(origin, 3)
    registry.promote(1)
    registry.promote(HEAD)
    assert (served(registry), [*registry.resident]) == (3, [1, HEAD])
    assert registry.rollback().version == 1
    assert served(registry) == 1
    assert registry.rollback().version is None  # and forth
    registry.promote(2)
    assert served(registry) == 2
    assert registry.swaps == {"promote": 3, "rollback": 2, "step": 0, "reload": 0}


def test_nothing_to_roll_back_to(origin: Away, registry: Registry) -> None:
    publish(origin, 1)
    registry.promote(HEAD)
    with pytest.raises(NothingBefore, match="nothing that was served before is loaded"):
        registry.rollback()


def test_versions_beyond_the_limit_are_dropped(origin: Away) -> None:
    held: list[frozenset[int]] = []
    registry = Registry(MODEL, origin, limit=2, resident_changed=held.append)
    for number in range(1, 6):
        publish(origin, number)
        origin.keep()
    registry.promote(HEAD)
    for version in (1, 2, 3, 1, 4):
        registry.promote(version)
    assert [*registry.resident] == [HEAD, 1, 4]
    assert held[-1] == {0, 1, 4}  # 0 is the head
    assert (registry.rollback().version, served(registry)) == (1, 1)


def test_a_dropped_version_is_freed_once_nobody_uses_it(origin: Away) -> None:
    registry = Registry(MODEL, origin, limit=1)
    for number in (1, 2):
        publish(origin, number)
        origin.keep()
    registry.promote(1)
    used = registry.served
    gone = weakref.ref(used)
    registry.promote(2)
    assert used is not None
    assert used.predict(SAMPLE).tolist() == [[1001]]  # who has it can go on
    del used
    assert gone() is None


def test_labelled_versions_are_loaded_and_stay(origin: Away, registry: Registry) -> None:
    for number in range(1, 5):
        publish(origin, number)
        origin.keep("canary" if number == 2 else None)
    registry.promote(1)
    assert registry.find_label("canary") is None
    assert registry.refresh_labels() == {"canary": 2}
    registry.keep(2)
    canary = registry.find_label("canary")
    assert canary is not None
    assert canary.predict(SAMPLE).tolist() == [[2002]]
    registry.promote(3)
    registry.promote(4)
    assert {*registry.resident} == {2, 4}
    assert registry.find_label("head") is None


def test_what_there_is_not(registry: Registry) -> None:
    with pytest.raises(PublicationMissing, match="nothing has been published in memory"):
        registry.promote(HEAD)
    with pytest.raises(PublicationMissing, match="there is no version 7 in memory"):
        registry.promote(7)
    with pytest.raises(ConfigError, match="at least 1"):
        Registry(MODEL, registry.origin, limit=0)


def damage(origin: MemoryOrigin, **about: object) -> None:
    state = origin._states[1]
    origin._states[1] = replace(state, publication=replace(state.publication, **about))  # type: ignore[arg-type]


def test_a_bad_version_is_refused_and_the_old_one_serves_on(origin: Away, registry: Registry) -> None:
    publish(origin, 1)
    origin.keep()
    registry.promote(HEAD)
    other = stm.Model(MODEL.schema, MODEL.graph, loss="mean_squared_error", seed=1)
    state = origin._states[1]
    for bad, error, message in (
        ({"spec": Spec.of(other).to_json()}, PublicationMismatch, "version 1 is of another model: different seed"),
        ({"spec": replace(Spec.of(MODEL), schema="0" * 16).to_json()}, PublicationMismatch, "different schema"),
        ({"spec": "{}"}, PublicationCorrupt, "no usable spec"),
        ({"rows": {"user": 3}}, PublicationCorrupt, "should have 3 rows, but 20 were loaded"),
    ):
        origin._states[1] = state
        damage(origin, **bad)
        with pytest.raises(error, match=message):
            registry.promote(1)
        assert served(registry) == 1
    origin._states[1] = replace(state, weights=weights(np.nan))
    with pytest.raises(PublicationCorrupt, match="dense weights are not finite"):
        registry.promote(1)
    origin._states[1] = replace(state, weights=weights(3e38))
    with pytest.raises(PublicationCorrupt, match="predictions are not finite"):
        registry.promote(1)
    assert (registry.refused, served(registry), [*registry.resident]) == (6, 1, [HEAD])


def test_the_head_is_followed(origin: Away, registry: Registry, follow: Callable[..., RegistryUpdater]) -> None:
    changes = Changes(registry)
    publish(origin, 1)
    follower = follow()
    changes.wait(lambda: registry.served is not None)
    for number in (2, 3):
        publish(origin, number)
        changes.wait(lambda number=number: registry.served.publication.number == number)  # type: ignore[misc,union-attr]
        assert served(registry) == number
    assert (follower.trouble, follower.stale_seconds) == ("", 0)
    assert registry.swaps["reload"] == 0


def test_steps_that_were_missed(origin: Away, registry: Registry, follow: Callable[..., RegistryUpdater]) -> None:
    publish(origin, 1)
    registry.promote(HEAD)
    for number in range(2, 102):
        publish(origin, number)
    changes = Changes(registry)
    follow()
    changes.wait(lambda: registry.swaps["reload"] == 1)
    assert served(registry) == 101


def test_a_bad_step_is_refused_until_a_good_head_comes(
    origin: Away, registry: Registry, follow: Callable[..., RegistryUpdater], caplog: pytest.LogCaptureFixture
) -> None:
    publish(origin, 1)
    registry.promote(HEAD)
    origin.publish({"user": (KEYS, rows(2))}, weights(np.nan))
    changes = Changes(registry)
    follower = follow()
    until(lambda: "not finite" in follower.trouble)
    assert served(registry) == 1
    publish(origin, 3)
    changes.wait(lambda: served(registry) == 3)
    until(lambda: not follower.trouble)
    assert sum("following the head failed, retrying" in record.message for record in caplog.records) == 1


def test_a_head_of_another_run_is_loaded_anew(
    origin: Away, registry: Registry, follow: Callable[..., RegistryUpdater]
) -> None:
    publish(origin, 1)
    registry.promote(HEAD)
    origin.run = "another"
    publish(origin, 2)
    changes = Changes(registry)
    follow()
    changes.wait(lambda: registry.swaps["reload"] == 1)
    assert served(registry) == 2


def test_an_origin_that_goes_away(origin: Away, registry: Registry, follow: Callable[..., RegistryUpdater]) -> None:
    publish(origin, 1)
    changes = Changes(registry)
    follower = follow()
    changes.wait(lambda: registry.served is not None)
    origin.away = True
    until(lambda: follower.stale_seconds > 0)
    assert follower.trouble == "memory is away"
    assert served(registry) == 1
    publish(origin, 2)
    origin.away = False
    changes.wait(lambda: served(registry) == 2)
    until(lambda: follower.stale_seconds == 0)


def test_a_start_while_the_origin_is_away(
    origin: Away, registry: Registry, follow: Callable[..., RegistryUpdater]
) -> None:
    publish(origin, 1)
    origin.away = True
    changes = Changes(registry)
    follower = follow()
    until(lambda: follower.trouble == "memory is away")
    assert registry.served is None
    origin.away = False
    changes.wait(lambda: registry.served is not None)


@pytest.mark.parametrize("serve", [HEAD, 1])
def test_a_fallback_until_the_origin_is_there(
    origin: Away, registry: Registry, follow: Callable[..., RegistryUpdater], serve: int
) -> None:
    publish(origin, 1)
    origin.keep()
    origin.away = True
    fallback = origin_of(MODEL)
    publish(fallback, 77)
    changes = Changes(registry)
    follow(fallback=fallback, serve=serve)
    changes.wait(lambda: registry.served is not None)
    assert served(registry) == 77
    origin.away = False
    changes.wait(lambda: served(registry) == 1)


def test_errors_are_of_publications() -> None:
    assert issubclass(PublicationMissing, PublicationError)
    assert issubclass(PublicationMismatch, PublicationError)


def test_a_version_whose_rows_on_disk_cannot_be_read_is_loaded_again(
    origin: Away, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("streamtrain.serve.rows.replica._LEAST", 1)
    users = [f"u{i}" for i in range(100_000)]
    keys = np.array([hash_bytes(user.encode()) for user in users], np.uint64)
    origin.publish({"user": (keys, rows(1, len(keys)))}, weights(1), clock={0: 1}, watermark=1.0)
    origin.keep()
    publish(origin, 2)
    registry = Registry(MODEL, origin, disk=RowsOnDisk(1, str(tmp_path)))
    registry.requested = frozenset({1})
    updater = RegistryUpdater(registry, serve=HEAD, every=0.02)
    updater.start()
    try:
        until(lambda: registry.find(1) is not None and registry.served is not None)
        damaged = registry.resident[1]
        for one in Path("/proc/self/fd").iterdir():
            if os.path.lexists(one) and str(one.readlink()).startswith(str(tmp_path)):
                os.truncate(one, 0)
        samples = [{"user": user} for user in users]
        with pytest.raises(PublicationCorrupt, match=r"version 1 .*: rows cannot be read: .* shorter"):
            damaged.predict(samples)
        until(lambda: registry.find(1) not in (None, damaged))
        assert (registry.resident[1].predict(samples) == 1001).all()
        assert registry.swaps["reload"] == 1
        assert "reloaded version 1 (publication 1)" in caplog.text
    finally:
        updater.close()
