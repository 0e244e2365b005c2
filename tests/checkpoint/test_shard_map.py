"""Slot maps: they are kept, and their epoch grows when the shards are others, and only then."""

from pathlib import Path

import fsspec
import pytest

from streamtrain.checkpoint.shard_map import next_shard_map
from streamtrain.errors import CheckpointError
from streamtrain.ps.nodes.topology import ShardMap
from streamtrain.store.checkpoint.epochs import Epochs
from streamtrain.store.files import Directory

A, B = ("a:1", "b:1"), ("a:1", "b:1", "c:1")


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path / "not" / "there")
    where = f"memory://slots/{tmp_path.name}"
    fs = fsspec.filesystem("memory")
    if fs.exists(where):
        fs.rm(where, recursive=True)
    return where


def test_epoch_grows_with_every_change(url: str) -> None:
    assert next_shard_map(url, A) == ShardMap(1, A)
    assert next_shard_map(url, [*A]) == ShardMap(1, A)
    assert next_shard_map(url, B) == ShardMap(2, B)
    assert next_shard_map(url, B) == ShardMap(2, B)
    assert next_shard_map(url, A[::-1]) == ShardMap(3, A[::-1])  # other keys, the same shards
    assert next_shard_map(url, A) == ShardMap(4, A)


def test_it_is_no_checkpoint(url: str) -> None:
    next_shard_map(url, A)
    assert Epochs(url).numbers() == []
    assert Epochs(url).next() == 1
    assert Epochs(url).retain(1) == []
    assert next_shard_map(url, B).epoch == 2


def test_without_a_place_every_map_is_the_first() -> None:
    assert next_shard_map(None, A) == next_shard_map(None, A) == ShardMap(1, A)
    assert next_shard_map(None, B) == ShardMap(1, B)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"7", b"\xff", b"{}", b'{"epoch": 1}', b'{"epoch": "x", "shards": []}',
     b'{"epoch": null, "shards": []}', b'{"epoch": 1, "shards": 2}', b'{"epoch": 1, "shards": "a:1"}'],
)  # fmt: skip
def test_a_damaged_file_is_named(url: str, content: bytes) -> None:
    Directory(url).put("slots.json", content)
    with pytest.raises(CheckpointError, match=r"slots\.json of .* is damaged, delete it: "):
        next_shard_map(url, A)
    Directory(url).delete("slots.json")
    assert next_shard_map(url, A) == ShardMap(1, A)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError):
        next_shard_map(str(tmp_path / "file"), A)
