"""Replicas: rows and weights are of one publication, whatever happens meanwhile."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from streamtrain.errors import PublicationCorrupt
from streamtrain.model.samples import SampleReader
from streamtrain.serve.graph import Graph
from streamtrain.serve.predictor import Predictor
from streamtrain.serve.rows import replica
from streamtrain.serve.rows import row_store as loaded
from streamtrain.serve.rows.replica import Replica
from streamtrain.store.publication import RowChange, Weights
from streamtrain.store.redis.codec import Codec
from streamtrain.store.redis.codec import checksums as row_checksums
from streamtrain.testing.store import MemoryOrigin
from streamtrain.train.step import Step
from tests import models
from tests.serve.published import KEYS, USERS, counted, origin_of, publish, rows, weights

MODEL = counted()


@pytest.fixture(scope="module")
def graph() -> Graph:
    return Graph(MODEL)


@pytest.fixture
def origin() -> MemoryOrigin:
    return origin_of(MODEL)


def load(origin: MemoryOrigin, graph: Graph) -> Predictor:
    publication = origin.find(None)
    assert publication is not None
    return Predictor.load(MODEL, graph, origin, publication, "head")


def test_predicts_what_was_published(origin: MemoryOrigin, graph: Graph) -> None:
    publish(origin, 3)
    predictor = load(origin, graph)
    assert predictor.predict([{"user": "u1"}, {"user": ["u1", "u2"]}, {"user": "never"}]).tolist() == [
        [3003],
        [3006],
        [3000],
    ]
    assert predictor.trained_through(predictor.publication) == "2023-11-14T22:13:23.000Z"


def test_no_answer_mixes_publications(origin: MemoryOrigin, graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are applied in many parts while two threads predict; every answer is of one publication, for all users."""
    monkeypatch.setattr(loaded, "PART_ROWS", 3)
    publish(origin, 1)
    predictors = [load(origin, graph)]
    predictors.append(Predictor(MODEL, graph, predictors[0].loaded, "head"))  # another reader of the same replica
    done = threading.Event()
    seen: list[set[float]] = [set(), set()]
    mixed: list[list[float]] = []

    def predict(reader: int) -> None:
        messages = [b'{"user": "%s"}' % user.encode() for user in USERS]
        while not done.is_set():
            predicted = predictors[reader].predict_messages(messages)
            values = predicted.predictions[:, 0].tolist()
            if values != [1001.0 * predicted.publication.number] * len(USERS):
                mixed.append(values)
            seen[reader].add(values[0])

    threads = [threading.Thread(target=predict, args=(reader,)) for reader in range(2)]
    for thread in threads:
        thread.start()
    for number in range(2, 402):
        publish(origin, number)
        for step in origin.follow(predictors[0].publication, 1):
            predictors[0].apply(step)
    done.set()
    for thread in threads:
        thread.join()
    assert mixed == []
    assert all(len(one) > 5 for one in seen)


def test_rows_come_and_go(origin: MemoryOrigin, graph: Graph) -> None:
    publish(origin, 1)
    predictor = load(origin, graph)
    new = np.array([7], np.uint64)
    origin.publish({"user": (new, rows(5, 1))}, weights(2), gone={"user": KEYS[:2]})
    (step,) = origin.follow(predictor.publication, 1)
    predictor.apply(step)
    assert predictor.loaded.rows == {"user": len(KEYS) - 1}
    assert predictor.predict([{"user": user} for user in ("u0", "u1", "u2")]).tolist() == [[2000], [2000], [2001]]
    assert load(origin, graph).loaded.rows == predictor.loaded.rows


def test_a_row_that_comes_twice_in_a_step_is_put_aside_once(origin: MemoryOrigin, graph: Graph) -> None:
    publish(origin, 1)
    predictor = load(origin, graph)
    replica = predictor.loaded
    assert isinstance(replica, Replica)
    for number in (8, 9):
        replica._write(RowChange("user", KEYS, rows(number), KEYS[:1]))
        assert set(predictor.predict([{"user": user} for user in USERS])[:, 0].tolist()) == {1001.0}


@pytest.mark.parametrize(
    ("change", "of", "message"),
    [
        (RowChange("user", KEYS, rows(np.inf), KEYS[:0]), weights(2), "rows are not finite"),
        (RowChange("user", KEYS, np.ones((20, 2), np.float32), KEYS[:0]), weights(2), r"\(20, 2\), not \[n, 1\]"),
        (RowChange("item", KEYS, rows(1), KEYS[:0]), weights(2), "unknown table 'item'"),
        (RowChange("user", KEYS, rows(2), KEYS[:0]), weights(np.nan), "dense weights are not finite"),
        (
            RowChange("user", KEYS, rows(2), KEYS[:0]),
            Weights(*np.zeros((2, 3), np.float32)),
            r"dense \(3,\), not \[2\]",
        ),
    ],
)
def test_a_bad_step_changes_nothing(
    origin: MemoryOrigin, graph: Graph, change: RowChange, of: Weights, message: str
) -> None:
    publish(origin, 1)
    predictor = load(origin, graph)
    publish(origin, 2)
    (step,) = origin.follow(predictor.publication, 1)
    with pytest.raises(PublicationCorrupt, match=message):
        predictor.apply(step._replace(weights=of, changes=[change]))
    assert predictor.predict([{"user": "u1"}]).tolist() == [[1001]]
    assert predictor.publication.number == 1


def test_a_publication_with_too_few_rows(origin: MemoryOrigin, graph: Graph) -> None:
    publish(origin, 1)
    state = origin._states[None]
    origin._states[None] = replace(state, publication=replace(state.publication, rows={"user": 21}))
    with pytest.raises(PublicationCorrupt, match="table 'user' should have 21 rows, but 20 were loaded"):
        load(origin, graph)


def test_predicts_as_the_step_does(origin: MemoryOrigin, graph: Graph) -> None:
    publish(origin, 4)
    predictor = load(origin, graph)
    samples: list[models.Sample] = [{"user": ["u1", "u2", "none"]}, {"user": []}]
    ((batch, _),) = SampleReader(MODEL, with_labels=False).batches(samples, 8)
    plan = MODEL.planner(1).plan(batch.keys, batch.starts, batch.offsets, batch.times)
    of_step = Step(MODEL).predict(np.array([0, 4], np.float32), plan, predictor.loaded.read([plan]).rows[0], batch)
    assert of_step.tolist() == predictor.predict(samples).tolist() == [[4008], [4000]]


def test_checksums_are_of_all_rows_and_of_one_publication(
    origin: MemoryOrigin, graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "_SUMMED_IDS", 3)
    publish(origin, 1)
    loaded_one, loaded_two = load(origin, graph).loaded, load(origin, graph).loaded
    expected = int(row_checksums(KEYS, Codec("float32", 1).encode(rows(1))).sum(dtype=np.uint64))
    found = loaded_one.checksums()
    assert found is not None
    assert found.tables == {"user": (len(KEYS), expected)}
    publish(origin, 2)
    (step,) = origin.follow(found.publication, 0)
    loaded_one.apply(step)
    after = loaded_one.checksums()
    assert after is not None
    assert (after.publication.number, after.tables["user"].checksum != expected) == (2, True)
    assert loaded_two.checksums() == found
