"""Slot maps: they are kept, and their epoch grows when the shards are others, and only then."""

from pathlib import Path

import fsspec
import pytest

from streamtrain.checkpoint.shard_map import begin_shard_map, load_shard_map, next_shard_map
from streamtrain.errors import CheckpointError
from streamtrain.ps.nodes.topology import ShardMap
from streamtrain.store.checkpoint.epochs import Epochs
from streamtrain.store.files import Directory

A, B, C = ("a:1", "b:1"), ("a:1", "b:1", "c:1"), ("d:1", "e:1")


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path / "not" / "there")
    where = f"memory://slots/{tmp_path.name}"
    fs = fsspec.filesystem("memory")
    if fs.exists(where):
        fs.rm(where, recursive=True)
    return where


def test_epoch_grows_with_every_change_of_the_settings(url: str) -> None:
    assert begin_shard_map(url, A) == ShardMap(1, A)
    assert begin_shard_map(url, [*A]) == ShardMap(1, A)
    assert begin_shard_map(url, B) == ShardMap(2, B)
    assert begin_shard_map(url, B) == ShardMap(2, B)
    assert begin_shard_map(url, A[::-1]) == ShardMap(3, A[::-1])  # other keys, the same shards
    assert begin_shard_map(url, A) == ShardMap(4, A)
    assert begin_shard_map(url, A, C) == ShardMap(5, A, C)
    assert load_shard_map(url) == ShardMap(5, A, C)


def test_what_was_scaled_stays_until_the_settings_change(url: str) -> None:
    begin_shard_map(url, A)
    assert next_shard_map(url, A) == ShardMap(1, A)
    assert next_shard_map(url, B) == ShardMap(2, B, scaled=True)
    assert begin_shard_map(url, A) == ShardMap(2, B, scaled=True)
    assert load_shard_map(url, A) == load_shard_map(url) == ShardMap(2, B)
    assert load_shard_map(url, C) == ShardMap(3, C)
    assert next_shard_map(url, A) == ShardMap(3, A)
    assert next_shard_map(url, B) == next_shard_map(url, B) == ShardMap(4, B, scaled=True)
    assert begin_shard_map(url, B) == ShardMap(4, B)  # the settings follow
    assert begin_shard_map(url, A) == ShardMap(5, A)  # and change


def test_what_an_earlier_release_has_kept_is_read(url: str) -> None:
    Directory(url).put("slots.json", b'{"epoch": 7, "shards": ["a:1", "b:1"]}')
    assert load_shard_map(url) == ShardMap(7, A)
    assert next_shard_map(url, B) == ShardMap(8, B, scaled=True)
    assert begin_shard_map(url, A) == ShardMap(9, A)
    assert next_shard_map(url, B) == ShardMap(10, B, scaled=True)
    assert begin_shard_map(url, A).epoch == 10


def test_it_is_no_checkpoint(url: str) -> None:
    begin_shard_map(url, A)
    assert Epochs(url).numbers() == []
    assert Epochs(url).next() == 1
    assert Epochs(url).retain(1) == []
    assert begin_shard_map(url, B).epoch == 2


def test_without_a_place_every_map_is_that_of_the_settings() -> None:
    assert begin_shard_map(None, A) == begin_shard_map(None, A) == ShardMap(1, A)
    assert begin_shard_map(None, B) == ShardMap(1, B)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"7", b"\xff", b"{}", b'{"epoch": 1}', b'{"epoch": "x", "shards": []}',
     b'{"epoch": null, "shards": []}', b'{"epoch": 1, "shards": 2}', b'{"epoch": 1, "shards": "a:1"}',
     b'{"epoch": 1, "shards": ["a:1"], "backups": "b:1"}', b'{"epoch": 1, "shards": ["a:1"], "backups": [1, 2]}',
     b'{"epoch": 1, "shards": ["a:1"], "settings": []}', b'{"epoch": 1, "shards": ["a:1"], "settings": {"shards": 1}}'],
)  # fmt: skip
def test_a_damaged_file_is_named(url: str, content: bytes) -> None:
    Directory(url).put("slots.json", content)
    with pytest.raises(CheckpointError, match=r"slots\.json of .* is damaged, delete it: "):
        begin_shard_map(url, A)
    Directory(url).delete("slots.json")
    assert begin_shard_map(url, A) == ShardMap(1, A)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError):
        begin_shard_map(str(tmp_path / "file"), A)
