"""Checkpoints as those see them who serve them."""

import numpy as np
import pytest

from streamtrain.errors import OriginUnavailable, PublicationCorrupt
from streamtrain.store.checkpoint.checkpoint import commit, write_part
from streamtrain.store.checkpoint.epochs import Epochs
from streamtrain.store.checkpoint.parquet import TablePart
from streamtrain.store.checkpoint.source import CheckpointOrigin
from streamtrain.store.publication import RowChange
from tests.store.checkpoint.checkpoints import delete, keys, rows_of, set_content, set_manifest

ABOUT = {"run": "a run", "spec": '{"schema": "x"}', "aligned": False}


def add(root: str, seed: int, *, base: int | None = None, gone: tuple[int, ...] = ()) -> None:
    """Adds an epoch of two shards with ten rows each."""
    number = Epochs(root).next()
    url = Epochs(root).directory(number)
    parts = [
        write_part(
            url,
            shard,
            {"dense": np.full(3, number + shard, np.float32), "statistics": np.full(1, -number, np.float32)},
            [TablePart("item", 3, 2, [rows_of(10, seed=10 * seed + shard)])],
            tombstones={"item": [keys(*gone)]} if gone and shard == 0 else {},
            about={"clock": {"0": 100 * number + shard, "1": 5}, "watermark": 7.5 + shard},
        )
        for shard in range(2)
    ]
    commit(url, ABOUT, parts, kind="full" if base is None else "delta", base=base)


def load(origin: CheckpointOrigin, epoch: int) -> dict[int, list[float]]:
    """Rows by key, after checking everything else."""
    publication = origin.find(epoch)
    assert publication is not None
    rows: dict[int, list[float]] = {}

    def take(change: RowChange) -> None:
        assert change.rows.shape == (len(change.keys), 3)
        for key in change.gone.tolist():
            rows.pop(key, None)
        rows.update(zip(change.keys.tolist(), change.rows.tolist(), strict=True))

    found, weights = origin.load(publication, take)
    assert found == publication
    assert publication.rows == {"item": len(rows)}
    assert weights.dense.tolist() == [epoch] * 3 + [epoch + 1] * 3
    assert weights.statistics.tolist() == [-epoch] * 2
    return rows


def test_epochs_are_versions(place: str) -> None:
    origin = CheckpointOrigin(place, "ctr")
    assert origin.versions() == []
    assert origin.find(None) is None
    add(place, 1)
    gone = rows_of(10, seed=10).keys[:4].tolist()
    add(place, 2, base=1, gone=tuple(gone))
    first, second = origin.versions()
    assert (first.number, first.version, first.model, first.run, first.spec) == (1, 1, "ctr", "a run", ABOUT["spec"])
    assert (first.clock, first.watermark) == ({0: 100, 1: 5}, 8.5)
    assert (second.number, second.rows) == (2, {"item": 36})
    assert origin.find(None) == second
    assert origin.find(3) is None
    assert origin.labels() == {}
    assert list(origin.follow(second, 1)) == []
    parts = [rows_of(10, seed=seed) for seed in (10, 11)]
    expected = {
        key: row for part in parts for key, row in zip(part.keys.tolist(), part.embeddings.tolist(), strict=True)
    }
    assert load(origin, 1) == expected
    parts = [rows_of(10, seed=seed) for seed in (20, 21)]
    expected = {key: row for key, row in expected.items() if key not in gone}
    expected |= {
        key: row for part in parts for key, row in zip(part.keys.tolist(), part.embeddings.tolist(), strict=True)
    }
    assert load(origin, 2) == expected


def test_a_checkpoint_alone(place: str) -> None:
    add(place, 1)
    gone = rows_of(10, seed=10).keys[:4].tolist()
    add(place, 2, base=1, gone=tuple(gone))
    origin = CheckpointOrigin(f"{place}/epoch-000000002", "ctr")
    assert [(one.number, one.version, one.rows) for one in origin.versions()] == [(2, 2, {"item": 36})]
    assert load(origin, 2) == load(CheckpointOrigin(place, "ctr"), 2)
    assert origin.find(1) is None
    learner = Epochs(place).directory(1).url.replace("epoch-000000001", "model")
    arrays = {"dense": np.ones(1, np.float32), "statistics": np.ones(0, np.float32)}
    about = {"clock": {"0": 7}, "watermark": 0.0}
    commit(learner, ABOUT, [write_part(learner, 0, arrays, [TablePart("item", 3, 2, [rows_of(5)])], about=about)])
    (found,) = CheckpointOrigin(learner, "ctr").versions()
    assert (found.number, found.version, found.rows, found.clock) == (1, 1, {"item": 5}, {0: 7})
    assert CheckpointOrigin(learner, "ctr").load(found, lambda _: None)[1].dense.tolist() == [1.0]


def test_what_is_damaged_is_told(place: str) -> None:
    for seed in (1, 2, 3):
        add(place, seed)
    origin = CheckpointOrigin(place, "ctr")
    third = origin.find(3)
    assert third is not None
    set_content(place, "epoch-000000002/manifest.json", b"{}")
    delete(place, "epoch-000000003/tables/item/shard-1.parquet")
    origin = CheckpointOrigin(place, "ctr")
    assert [one.number for one in origin.versions()] == [1, 3]
    with pytest.raises(PublicationCorrupt, match="epoch-000000002"):
        origin.find(2)
    with pytest.raises(PublicationCorrupt, match=r"tables/item/shard-1\.parquet"):
        origin.load(third, lambda _: None)


def test_a_checkpoint_that_cannot_be_read_yet(place: str) -> None:
    add(place, 1)
    set_manifest(f"{place}/epoch-000000001", format=99)
    with pytest.raises(OriginUnavailable, match="format 99"):
        CheckpointOrigin(place, "ctr").find(1)


def test_a_checkpoint_of_something_else(place: str) -> None:
    url = Epochs(place).directory(1)
    commit(url, {}, [write_part(url, 0, {}, [TablePart("item", 3, 2, [rows_of(1)])], about={})])
    with pytest.raises(PublicationCorrupt, match="has no valid training state"):
        CheckpointOrigin(place, "ctr").find(1)
