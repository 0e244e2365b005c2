"""The contract of what holds a publication's rows: replicas, on disk or not, and caches, down to such of no room."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamtrain._core import hash_bytes
from streamtrain.disk import RowsOnDisk
from streamtrain.errors import PublicationCorrupt
from streamtrain.serve.graph import Graph
from streamtrain.serve.predictor import Predictor
from streamtrain.serve.rows import row_store as loaded
from streamtrain.serve.rows.cache import Cache
from streamtrain.store.publication import Publication, PublicationStep, RowChange
from tests.serve.published import KEYS, USERS, counted, rows, weights
from tests.serve.redis_published import NO_KEYS, RedisPublished

MODEL = counted()
SAMPLES = [{"user": user} for user in [*USERS, "never"]]
HOLDERS = {"replica": {}, "cache": {"cache_bytes": 1 << 20}, "tiny cache": {"cache_bytes": 1}, "disk": {}}


@pytest.fixture(scope="module")
def graph() -> Graph:
    return Graph(MODEL)


@pytest.fixture
def published(redis_url: str) -> Iterator[RedisPublished]:
    published = RedisPublished(redis_url, MODEL)
    yield published
    published.close()


@pytest.fixture(params=HOLDERS)
def holds(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of a predictor that say where it has rows: on disk nearly all of them."""
    if request.param != "disk":
        return HOLDERS[request.param]
    monkeypatch.setattr("streamtrain.serve.rows.replica._LEAST", 1)
    return {"disk": RowsOnDisk(1, str(tmp_path))}


def load(published: RedisPublished, graph: Graph, holds: dict[str, Any], version: int | None = None) -> Predictor:
    publication = published.origin.find(version)
    assert publication is not None
    name = "head" if version is None else str(version)
    return Predictor.load(MODEL, graph, published.origin, publication, name, **holds)


def follow(published: RedisPublished, predictor: Predictor) -> None:
    for step in published.origin.follow(predictor.publication, 0):
        predictor.apply(step)


def expected(number: int, missing: int = 0) -> list[list[float]]:
    """All users have the row of the publication, the first ones none."""
    return [[1000.0 * number]] * missing + [[1001.0 * number]] * (len(USERS) - missing) + [[1000.0 * number]]


def test_a_head_that_is_followed(published: RedisPublished, graph: Graph, holds: dict[str, Any]) -> None:
    published.publish(1, full=True)
    predictor = load(published, graph, holds)
    assert predictor.predict(SAMPLES).tolist() == expected(1)
    published.publish(2)
    follow(published, predictor)
    assert predictor.publication.number == 2
    for _ in range(2):
        assert predictor.predict(SAMPLES).tolist() == expected(2)
    published.publish(3, NO_KEYS, KEYS[:2].tolist())
    follow(published, predictor)
    assert predictor.predict(SAMPLES).tolist() == [[3000.0]] * 2 + [[3002.0]] * 18 + [[3000.0]]


def test_rows_that_come_back(published: RedisPublished, graph: Graph, holds: dict[str, Any]) -> None:
    published.publish(1, full=True)
    predictor = load(published, graph, holds)
    published.publish(2, KEYS[5:], KEYS[:5].tolist())
    follow(published, predictor)
    assert predictor.predict(SAMPLES).tolist() == expected(2, missing=5)
    published.publish(3)
    published.publish(4, NO_KEYS)
    follow(published, predictor)
    assert predictor.predict(SAMPLES).tolist() == [[4003.0]] * 20 + [[4000.0]]


def test_what_is_committed_but_not_yet_in_the_dictionary(
    published: RedisPublished, graph: Graph, holds: dict[str, Any]
) -> None:
    published.publish(1, full=True)
    published.publish(2, KEYS[3:], KEYS[:3].tolist(), applied=False)
    predictor = load(published, graph, holds)
    assert predictor.predict(SAMPLES).tolist() == expected(2, missing=3)


def test_a_version_stays(published: RedisPublished, graph: Graph, holds: dict[str, Any]) -> None:
    published.publish(1, full=True)
    published.publish(2)
    published.versions.make("ann")
    published.publish(3)
    predictor = load(published, graph, holds, version=1)
    assert predictor.predict(SAMPLES).tolist() == expected(2)
    published.publish(4, NO_KEYS, KEYS.tolist())
    assert predictor.predict(SAMPLES).tolist() == expected(2)


def test_ids_are_counted(published: RedisPublished, graph: Graph) -> None:
    published.publish(1, full=True)
    predictors = [load(published, graph, holds) for holds in ({}, {"cache_bytes": 1 << 20})]
    never = np.array([hash_bytes(b"never")], np.uint64)
    plan = MODEL.planner(1).plan(np.append(KEYS, never), np.array([0, 21]), np.array([[0, 21]], np.int32), np.zeros(1))
    for predictor in predictors:
        predictor.loaded.read([plan])
        assert predictor.loaded.found(plan) == {"user": (20, 21)}


def test_no_answer_mixes_publications(
    published: RedisPublished, graph: Graph, holds: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head moves on by half of the rows while two threads predict; every answer is of one publication."""
    monkeypatch.setattr(loaded, "PART_ROWS", 3)
    published.publish(1, full=True)
    first = load(published, graph, holds)
    if isinstance(first.loaded, Cache):
        first.loaded._patience = 60.0
    predictors = [first, Predictor(MODEL, graph, first.loaded, "head")]
    done, read = threading.Event(), threading.Event()
    seen: list[set[int]] = [set(), set()]
    mixed: list[object] = []

    def predict(reader: int) -> None:
        messages = [b'{"user": "%s"}' % user.encode() for user in USERS]
        while not done.is_set():
            try:
                predicted = predictors[reader].predict_messages(messages)
            except Exception as exc:
                mixed.append(exc)
                return
            values, number = predicted.predictions[:, 0].tolist(), predicted.publication.number
            if values != [1000.0 * number + max(1, number - (i - number) % 2) for i in range(len(USERS))]:
                mixed.append((number, values))
            seen[reader].add(number)

    def follow_all() -> None:
        while not read.is_set():  # a reader may wait for the last publication
            for step in published.origin.follow(first.publication, 0.01):
                first.apply(step)

    readers = [threading.Thread(target=predict, args=(reader,)) for reader in range(2)]
    follower = threading.Thread(target=follow_all)
    for thread in (*readers, follower):
        thread.start()
    number = 1
    while number < 60 or (number < 2000 and min(map(len, seen)) < 4 and not mixed):  # however slow the machine is
        number += 1
        published.publish(number, KEYS[number % 2 :: 2])
    done.set()
    for thread in readers:
        thread.join()
    read.set()
    follower.join()
    assert mixed == []
    assert all(len(one) > 3 for one in seen)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (RowChange("user", KEYS, rows(np.inf), NO_KEYS), "rows are not finite"),
        (RowChange("user", KEYS, np.ones((20, 2), np.float32), NO_KEYS), r"\(20, 2\), not \[n, 1\]"),
        (RowChange("item", KEYS, rows(1), NO_KEYS), "unknown table 'item'"),
    ],
)
def test_a_bad_step_changes_nothing(
    published: RedisPublished, graph: Graph, holds: dict[str, Any], change: RowChange, message: str
) -> None:
    published.publish(1, full=True)
    predictor = load(published, graph, holds)
    publication: Publication = predictor.publication
    with pytest.raises(PublicationCorrupt, match=message):
        predictor.apply(PublicationStep(publication, weights(2), [change]))
    with pytest.raises(PublicationCorrupt, match="dense weights are not finite"):
        predictor.apply(PublicationStep(publication, weights(np.nan), []))
    assert predictor.predict(SAMPLES).tolist() == expected(1)
