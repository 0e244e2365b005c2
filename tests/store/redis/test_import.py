"""Versions in Redis that are made of what another origin has."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import redis

from streamtrain.errors import OriginUnavailable, PublicationCorrupt, PublicationError
from streamtrain.store.checkpoint.checkpoint import commit, write_part
from streamtrain.store.checkpoint.epochs import Epochs
from streamtrain.store.checkpoint.parquet import TablePart
from streamtrain.store.checkpoint.source import CheckpointOrigin
from streamtrain.store.publication import Publication, RowChange, Weights
from streamtrain.store.redis.versions import import_version
from streamtrain.testing.store import MemoryOrigin
from tests.store.checkpoint.checkpoints import rows_of
from tests.store.published import NO_KEYS, Published

KEYS = np.arange(1, 3001, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def memory(value: float = 1.0) -> MemoryOrigin:
    origin = MemoryOrigin("{}", "other")
    rows = np.full((len(KEYS), 3), value, np.float32)
    origin.publish({"item": (KEYS, rows)}, Weights(np.full(4, 2, np.float32), NO_KEYS[:0].astype(np.float32)))
    return origin


def bring(published: Published, origin: MemoryOrigin | CheckpointOrigin, dtype: str = "float32") -> Publication:
    head = origin.find(None)
    assert head is not None
    return import_version(published.model, origin, head, {"item": 3}, who="ann", why="a try", dtype=dtype)


def rows_in(published: Published, version: Publication) -> tuple[dict[int, list[float]], Weights]:
    rows: dict[int, list[float]] = {}
    found, weights = published.origin.load(
        version, lambda change: rows.update(zip(change.keys.tolist(), change.rows.tolist(), strict=True))
    )
    assert found == version
    return rows, weights


def assert_nothing_is_left(published: Published, client: redis.Redis) -> None:
    assert published.origin.versions() == []
    assert client.hlen(published.model.keys.dictionaries) == 0
    assert not list(client.scan_iter(f"streamtrain:rows:{{{published.model.keys.model}/*"))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_another_origin_becomes_a_version(published: Published, dtype: str) -> None:
    version = bring(published, memory(), dtype)
    assert (version.version, version.number, version.dtype) == (1, 1, dtype)
    assert version.model == published.model.keys.model
    assert version.published > 0
    rows, weights = rows_in(published, version)
    assert rows == {key: [1.0] * 3 for key in KEYS.tolist()}
    assert weights.dense.tolist() == [2.0] * 4
    assert published.origin.find(None) is None  # there is no head of it
    deed = published.versions.history()[0]
    assert (deed.what, deed.who, deed.why, deed.version) == ("version", "ann", "a try", 1)


def test_the_head_stays(published: Published) -> None:
    published.full(1)
    published.versions.make("ann")
    head = published.publish(2)
    version = bring(published, memory(5.0))
    assert version.version == 2
    assert published.origin.find(None) == head
    published.publish(3)
    assert rows_in(published, version)[0] == {key: [5.0] * 3 for key in KEYS.tolist()}


def test_deltas_and_their_tombstones(published: Published, tmp_path: Path) -> None:
    epochs = Epochs(tmp_path)
    first, second = rows_of(10, seed=1), rows_of(10, seed=2)
    gone = first.keys[:4]
    for number, rows, tombstones in ((1, first, {}), (2, second, {"item": [gone]})):
        url = epochs.directory(number)
        arrays = {"dense": np.full(4, number, np.float32), "statistics": np.zeros(0, np.float32)}
        about = {"clock": {"0": number}, "watermark": 7.5}
        part = write_part(url, 0, arrays, [TablePart("item", 3, 2, [rows])], tombstones=tombstones, about=about)
        about = {"run": "a run", "spec": "{}", "aligned": True}
        commit(url, about, [part], kind="delta" if number > 1 else "full", base=1 if number > 1 else None)
    version = bring(published, CheckpointOrigin(tmp_path, "other"))
    assert (version.number, version.version, version.run, version.watermark) == (2, 1, "a run", 7.5)
    keys = np.concatenate([first.keys[4:], second.keys])
    embeddings = np.concatenate([first.embeddings[4:], second.embeddings])
    found, weights = rows_in(published, version)
    assert found == dict(zip(keys.tolist(), embeddings.tolist(), strict=True))
    assert weights.dense.tolist() == [2.0] * 4


class Failing(MemoryOrigin):
    """Gives rows, then fails."""

    def load(self, publication: Publication, take: Callable[[RowChange], object]) -> tuple[Publication, Weights]:
        super().load(publication, take)
        raise OriginUnavailable("away")


def test_what_fails_leaves_nothing(published: Published, client: redis.Redis) -> None:
    with pytest.raises(PublicationError, match=r"table item cannot be published: .* finite"):
        bring(published, memory(float("nan")))
    assert_nothing_is_left(published, client)
    origin = memory()
    state = origin._states[None]
    origin._states[None] = replace(state, weights=Weights(np.array([np.inf], np.float32), state.weights.statistics))
    with pytest.raises(PublicationCorrupt, match="publication 1 of memory has weights that are not finite"):
        bring(published, origin)
    assert_nothing_is_left(published, client)
    few = memory()
    state = few._states[None]
    few._states[None] = replace(state, publication=replace(state.publication, rows={"item": 7}))
    with pytest.raises(PublicationCorrupt, match=r"table item of publication 1 .* has 3000 rows, not 7"):
        bring(published, few)
    assert_nothing_is_left(published, client)
    failing = Failing("{}")
    failing._states = memory()._states
    with pytest.raises(OriginUnavailable, match="away"):
        bring(published, failing)
    assert_nothing_is_left(published, client)
