"""Checkpoints as files: what is written is read, what is damaged is named, and an old one survives a failed write."""

import hashlib
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from numpy.typing import NDArray

from streamtrain.errors import CheckpointCorrupt, CheckpointError
from streamtrain.store import checkpoint
from streamtrain.store.checkpoint import CheckpointReader, RowPart, TablePart, write_checkpoint

ABOUT = {"samples": 7, "nested": {"tables": ["a", 1.5, None]}}
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


def part(rows: list[RowPart], table: str = "item", name: str = "shard-0", dim: int = 3, state: int = 2) -> TablePart:
    return TablePart(table, name, dim, state, rows)


def write(path: Path, about: Any = ABOUT, tables: list[TablePart] | None = None) -> None:
    write_checkpoint(path, about, ARRAYS, [part([rows_of(10)])] if tables is None else tables)


def read(path: Path, table: str = "item") -> RowPart:
    parts = list(CheckpointReader(path).rows(table))
    return RowPart(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def assert_rows(found: RowPart, *expected: RowPart) -> None:
    for column, columns in zip(found, zip(*expected, strict=True), strict=True):
        assert_array_equal(column, np.concatenate(columns), strict=True)


def files_of(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


@pytest.fixture
def written(tmp_path: Path) -> Path:
    write(tmp_path / "c")
    return tmp_path / "c"


# --- round trip ---


def test_facts_and_arrays_come_back(written: Path) -> None:
    reader = CheckpointReader(written)
    assert reader.about == ABOUT
    arrays = reader.arrays()
    assert set(arrays) == set(ARRAYS)
    for name, expected in ARRAYS.items():
        assert_array_equal(arrays[name], expected, strict=True)


@given(
    sizes=st.lists(st.integers(0, 50), max_size=4),
    dim=st.integers(1, 20),
    state=st.integers(0, 41),
    seed=st.integers(0, 99),
)
@settings(max_examples=25)
def test_rows_come_back(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], dim: int, state: int, seed: int
) -> None:
    path = tmp_path_factory.mktemp("rows") / "c"
    parts = [rows_of(n, dim, state, seed + i) for i, n in enumerate(sizes)]
    shards = [TablePart("item", f"shard-{s}", dim, state, parts[2 * s : 2 * s + 2]) for s in range(2)]
    write(path, tables=shards)
    assert json.loads((path / "manifest.json").read_text())["rows"] == {"item": sum(sizes)}
    found = list(CheckpointReader(path).rows("item"))
    assert sum(len(one.keys) for one in found) == sum(sizes)
    if sum(sizes):
        assert_rows(read(path), *parts)


@pytest.mark.parametrize("state", [0, 1])
def test_state_of_many_rows(tmp_path: Path, state: int) -> None:
    rows = rows_of(70_000, 1, state)
    write(tmp_path / "c", tables=[part([rows], dim=1, state=state)])
    assert_rows(read(tmp_path / "c"), rows)


def test_table_is_read_in_parts_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_READ_ROWS", 7)
    rows = rows_of(40)
    write(tmp_path / "c", tables=[part([rows])])
    parts = list(CheckpointReader(tmp_path / "c").rows("item"))
    assert all(len(one.keys) <= 7 for one in parts)
    assert_rows(read(tmp_path / "c"), rows)


@pytest.mark.parametrize("name", ["a/b", "..", "../x", "a b", "ü", "100%", "item.parquet", "a\\b", "%2e%2e", "x" * 80])
def test_table_of_any_name(tmp_path: Path, name: str) -> None:
    first, second = rows_of(3, seed=1), rows_of(4, seed=2)
    write(tmp_path / "c", tables=[part([first], name), part([second], name + "2")])
    assert_rows(read(tmp_path / "c", name), first)
    assert_rows(read(tmp_path / "c", name + "2"), second)
    folders = {file.parent.name for file in (tmp_path / "c" / "tables").glob("*/shard-0.parquet")}
    assert {unquote(folder) for folder in folders} == {name, name + "2"}


def test_table_that_is_not_there_has_no_rows(written: Path) -> None:
    assert list(CheckpointReader(written).rows("ite")) == []


def test_rows_are_a_parquet_file_that_pandas_opens(tmp_path: Path) -> None:
    rows, more = rows_of(5), rows_of(4, seed=1)
    write(tmp_path / "c", tables=[part([rows]), part([more], name="shard-1")])
    frame = pd.read_parquet(tmp_path / "c" / "tables" / "item")
    assert list(frame.columns) == ["key", "embedding", "state", "count", "last_seen"]
    assert frame["key"].tolist() == [*rows.keys.tolist(), *more.keys.tolist()]
    assert_array_equal(np.stack(list(frame["embedding"])), np.concatenate([rows.embeddings, more.embeddings]))
    assert frame["count"].dtype == np.uint32


def test_manifest_lists_every_other_file(written: Path) -> None:
    manifest = json.loads((written / "manifest.json").read_text())
    assert manifest["format"] == 1
    assert sorted(["manifest.json", *manifest["files"]]) == files_of(written)
    for name, facts in manifest["files"].items():
        content = (written / name).read_bytes()
        assert facts == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


# --- replacing ---


def test_older_checkpoint_is_replaced_whole(written: Path) -> None:
    newer = rows_of(3, seed=5)
    write(written, {"samples": 8}, [part([newer], name="shard-9")])
    assert CheckpointReader(written).about == {"samples": 8}
    assert_rows(read(written), newer)
    assert files_of(written) == ["arrays.safetensors", "manifest.json", "tables/item/shard-9.parquet"]
    assert os.listdir(written.parent) == ["c"]


@pytest.mark.parametrize("content", ["directory", "file", "empty"])
def test_path_with_something_else_is_refused_and_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "mine"
    if content == "file":
        path.write_text("precious")
    else:
        path.mkdir()
    if content == "directory":
        (path / "precious.txt").write_text("precious")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="mine exists and is no checkpoint"):
        write(path)
    assert sorted(tmp_path.rglob("*")) == before


def failing(rows: RowPart, error: Exception) -> Iterator[RowPart]:
    yield rows
    raise error


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), pa.ArrowInvalid("bad")])
def test_failed_write_is_an_error_and_leaves_the_old_checkpoint(written: Path, error: Exception) -> None:
    broken = TablePart("item", "shard-0", 3, 2, failing(rows_of(5), error))
    with pytest.raises(CheckpointError, match="cannot write checkpoint") as caught:
        write(written, {"samples": 8}, [broken])
    assert str(error) in str(caught.value)
    assert CheckpointReader(written).about == ABOUT
    assert_rows(read(written), rows_of(10))
    assert os.listdir(written.parent) == ["c"]


def test_error_of_the_rows_themselves_leaves_nothing_behind(written: Path) -> None:
    broken = TablePart("item", "shard-0", 3, 2, failing(rows_of(5), KeyError("bug")))
    with pytest.raises(KeyError):
        write(written, {"samples": 8}, [broken])
    assert CheckpointReader(written).about == ABOUT
    assert os.listdir(written.parent) == ["c"]


def test_full_disk_while_renaming_leaves_a_checkpoint(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name.endswith(".unfinished"):
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(CheckpointError, match="No space left"):
        write(written, {"samples": 8})
    assert CheckpointReader(written).about == ABOUT
    assert os.listdir(written.parent) == ["c"]


def test_writer_killed_while_replacing_leaves_the_older_one_aside(written: Path) -> None:
    """Until it is replaced in turn: a later writer that fails must not take the only good one away."""
    aside = written.with_name(".c.old")
    written.rename(aside)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint at .*c; .* is at .*\.c\.old"):
        CheckpointReader(written)
    broken = TablePart("item", "shard-0", 3, 2, failing(rows_of(5), OSError("No space left")))
    with pytest.raises(CheckpointError):
        write(written, tables=[broken])
    assert CheckpointReader(aside).about == ABOUT
    write(written, {"samples": 8})
    assert CheckpointReader(written).about == {"samples": 8}
    assert not aside.exists()


@pytest.mark.parametrize("arrays", [500, 100])
def test_disk_that_is_full(written: Path, arrays: int) -> None:
    """In the arrays, or only in the rows after them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write checkpoint .*File too large"):
            write_checkpoint(written, {"samples": 8}, {"dense": np.zeros(arrays, np.float32)}, [part([rows_of(1000)])])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert CheckpointReader(written).about == ABOUT
    assert os.listdir(written.parent) == ["c"]


def test_link_to_a_checkpoint_stays_a_link(written: Path) -> None:
    link = written.parent / "latest"
    link.symlink_to(written)
    write(link, {"samples": 8})
    assert link.is_symlink()
    assert CheckpointReader(written).about == {"samples": 8}


def test_path_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write checkpoint"):
        write(tmp_path / "file" / "c")


def test_parents_are_made(tmp_path: Path) -> None:
    write(tmp_path / "a" / "b" / "c")
    assert CheckpointReader(tmp_path / "a" / "b" / "c").about == ABOUT


def test_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("c"))
    assert CheckpointReader(Path("c")).about == ABOUT


@pytest.mark.parametrize("path", [Path(), Path("/"), Path("..")])
def test_path_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError):
        write(path)


def test_remains_of_a_killed_writer_are_cleared(written: Path) -> None:
    for remains in (".c.unfinished", ".c.old"):
        (written.parent / remains / "tables").mkdir(parents=True)
        (written.parent / remains / "half").write_text("half")
    write(written, {"samples": 8})
    assert os.listdir(written.parent) == ["c"]


def test_unfinished_checkpoint_is_none(tmp_path: Path) -> None:
    write(tmp_path / "c")
    (tmp_path / "c" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        CheckpointReader(tmp_path / "c")


def test_no_directory_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no checkpoint at .*nowhere"):
        CheckpointReader(tmp_path / "nowhere")


# --- damage ---

ARRAYS_FILE = "arrays.safetensors"
FILES = [ARRAYS_FILE, "tables/item/shard-0.parquet"]


@pytest.mark.parametrize("name", FILES)
def test_missing_file_is_named(written: Path, name: str) -> None:
    (written / name).unlink()
    with pytest.raises(CheckpointCorrupt, match=f"{name} is missing"):
        CheckpointReader(written)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99])
def test_truncated_file_is_named(written: Path, name: str, keep: float) -> None:
    content = (written / name).read_bytes()
    (written / name).write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(CheckpointCorrupt, match=f"{name} is damaged"):
        CheckpointReader(written)


@pytest.mark.parametrize("name", FILES)
def test_flipped_bit_is_found(written: Path, name: str) -> None:
    content = bytearray((written / name).read_bytes())
    content[len(content) // 2] ^= 1
    (written / name).write_bytes(bytes(content))
    with pytest.raises(CheckpointCorrupt, match=f"{name} is damaged"):
        CheckpointReader(written)


def rewrite(path: Path, **changed: Any) -> None:
    manifest = json.loads((path / "manifest.json").read_text()) | changed
    (path / "manifest.json").write_text(json.dumps({k: v for k, v in manifest.items() if v is not ...}, default=str))


def drop(path: Path, *names: str) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({k: v for k, v in manifest.items() if k not in names}))


@pytest.mark.parametrize("name", FILES)
def test_file_of_another_format_is_named(written: Path, name: str) -> None:
    """Its checksum is that of the manifest, so it was written like this."""
    (written / name).write_bytes(b"hello")
    facts = {"bytes": 5, "sha256": hashlib.sha256(b"hello").hexdigest()}
    rewrite(written, files={file: facts if file == name else describe(written / file) for file in FILES})
    reader = CheckpointReader(written)
    with pytest.raises(CheckpointCorrupt, match=f"{name} cannot be read"):
        reader.arrays() if name.startswith("arrays") else list(reader.rows("item"))


def describe(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}


@pytest.mark.parametrize("columns", [["key"], ["key", "embedding", "state", "count"]])
def test_table_without_a_column_is_named(written: Path, columns: list[str]) -> None:
    file = written / "tables" / "item" / "shard-0.parquet"
    pd.read_parquet(file)[columns].to_parquet(file)
    rewrite(written, files={name: describe(written / name) for name in FILES})
    with pytest.raises(CheckpointCorrupt, match=r"shard-0\.parquet cannot be read"):
        list(CheckpointReader(written).rows("item"))


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "tables/../../x", "a/../../../x"])
def test_manifest_that_points_outside_is_refused(written: Path, name: str) -> None:
    (written.parent / "x").write_text("x")
    rewrite(written, files={name: describe(written.parent / "x")})
    with pytest.raises(CheckpointCorrupt, match="not within the checkpoint"):
        CheckpointReader(written)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"\xff\xfe", b"[]", b"{}", b"null", b'{"format": 1}', b'{"format": 1, "about": []}']
)
def test_manifest_that_is_none(written: Path, text: bytes) -> None:
    (written / "manifest.json").write_bytes(text)
    with pytest.raises(CheckpointCorrupt, match=r"manifest\.json"):
        CheckpointReader(written)


@pytest.mark.parametrize(
    "files", [[], None, {ARRAYS_FILE: None}, {ARRAYS_FILE: {}}, {ARRAYS_FILE: []}, {ARRAYS_FILE: {"bytes": 1}}]
)
def test_manifest_with_files_of_another_kind(written: Path, files: Any) -> None:
    rewrite(written, files=files)
    with pytest.raises(CheckpointCorrupt, match="manifest"):
        CheckpointReader(written)


@pytest.mark.parametrize("name", ["format", "about", "files"])
def test_manifest_without_a_part(written: Path, name: str) -> None:
    drop(written, name)
    with pytest.raises(CheckpointCorrupt, match=r"manifest\.json"):
        CheckpointReader(written)


def test_manifest_that_is_a_directory(written: Path) -> None:
    (written / "manifest.json").unlink()
    (written / "manifest.json").mkdir()
    with pytest.raises(CheckpointCorrupt, match=r"manifest\.json cannot be read"):
        CheckpointReader(written)


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_unknown_format_is_refused(written: Path, version: Any) -> None:
    rewrite(written, format=version)
    with pytest.raises(CheckpointError, match=f"has format {version!r}; this version reads 1"):
        CheckpointReader(written)
