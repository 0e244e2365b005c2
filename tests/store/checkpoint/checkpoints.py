"""What the tests of checkpoints share: rows, and files on whatever filesystem."""

import json
from collections.abc import Iterable
from typing import Any

import fsspec
import numpy as np
from numpy.testing import assert_array_equal
from numpy.typing import NDArray

from streamtrain.store.checkpoint.checkpoint import ShardFiles, commit, write_part
from streamtrain.store.checkpoint.manifest import _digest
from streamtrain.store.checkpoint.parquet import RowPart, TablePart, Tombstones
from streamtrain.store.files import Directory

ARRAYS: dict[str, NDArray[Any]] = {
    "dense": np.arange(5, dtype=np.float32),
    "statistics/bn/mean": np.ones((2, 3)),
    "seed": np.array([1], np.uint32),
}


def rows_of(n: int, dim: int = 3, state: int = 2, seed: int = 0) -> RowPart:
    rng = np.random.default_rng(seed)
    return RowPart(
        rng.integers(0, 2**64, n, dtype=np.uint64),
        rng.normal(size=(n, dim)).astype(np.float32),
        rng.normal(size=(n, state)).astype(np.float32),
        rng.integers(0, 2**32, n, dtype=np.uint32),
        rng.integers(0, 2**32, n, dtype=np.uint32),
    )


def table(rows: Iterable[RowPart], name: str = "item", dim: int = 3, state: int = 2) -> TablePart:
    return TablePart(name, dim, state, rows)


def keys(*values: int) -> NDArray[np.uint64]:
    return np.array(values, np.uint64)


def write_shards(url: Any, shards: int = 2, **tombstones: Any) -> list[ShardFiles]:
    """Write 10 rows of two tables by each shard, with the shard as seed."""
    return [
        write_part(
            url,
            i,
            ARRAYS,
            [table([rows_of(10, seed=i)]), table([rows_of(5, seed=i)], "user")],
            tombstones=tombstones,
            about={"clock": 100 + i},
        )
        for i in range(shards)
    ]


def write(url: Any, about: Any = None, shards: int = 2) -> None:
    commit(url, {"samples": 7} if about is None else about, write_shards(url, shards))


def together(parts: Iterable[RowPart]) -> RowPart:
    return RowPart(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def assert_rows(found: Iterable[RowPart], *expected: RowPart) -> None:
    for column, wanted in zip(together(found), together(expected), strict=True):
        assert_array_equal(column, wanted, strict=True)


def apply(changes: Iterable[RowPart | Tombstones]) -> dict[int, float]:
    """The first element of every row's embedding after all changes, by key."""
    rows: dict[int, float] = {}
    for part in changes:
        if isinstance(part, Tombstones):
            for key in part.keys.tolist():
                rows.pop(key, None)
        else:
            rows |= dict(zip(part.keys.tolist(), part.embeddings[:, 0].tolist(), strict=True))
    return rows


def first_of(parts: Iterable[RowPart]) -> dict[int, float]:
    """By key, the value of the first row."""
    found: dict[int, float] = {}
    for part in parts:
        for key, value in zip(part.keys.tolist(), part.embeddings[:, 0].tolist(), strict=True):
            found.setdefault(key, value)
    return found


# --- files, by URL ---


def files_of(url: str) -> list[str]:
    return sorted(Directory(url).sizes())


def content_of(url: str, name: str) -> bytes:
    return Directory(url).read(name)


def set_content(url: str, name: str, content: bytes) -> None:
    with fsspec.open(f"{url}/{name}", "wb") as file:
        file.write(content)


def delete(url: str, name: str) -> None:
    Directory(url).delete(name)


def manifest_of(url: str) -> dict[str, Any]:
    found = json.loads(content_of(url, "manifest.json"))
    assert isinstance(found, dict)
    return found


def set_manifest(url: str, without: str = "", **changed: Any) -> None:
    """Change what a manifest says, as if its writer had said so: with the right checksum."""
    content = {k: v for k, v in (manifest_of(url) | changed).items() if k not in ("sha256", without)}
    set_content(url, "manifest.json", json.dumps({**content, "sha256": _digest(content)}).encode())
