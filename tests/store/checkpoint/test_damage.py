"""Damaged checkpoints: whatever has happened to a file, it is found before it is used, and named."""

import hashlib
import io
import json
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamtrain.errors import CheckpointCorrupt, CheckpointError
from streamtrain.store.checkpoint import parquet
from streamtrain.store.checkpoint.checkpoint import CheckpointReader
from streamtrain.store.files import Directory, FileFacts, Input
from tests.store.checkpoint.checkpoints import (
    assert_rows,
    content_of,
    delete,
    manifest_of,
    rows_of,
    set_content,
    set_manifest,
    write,
)

FILES = ["shards/1.safetensors", "tables/item/shard-1.parquet"]


@pytest.fixture
def written(place: str) -> str:
    write(place)
    return place


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One that every example damages and mends again."""
    url = f"memory://{tmp_path_factory.mktemp('shared')}"
    write(url)
    return url


def read_all(url: str, *, verify: bool = True) -> None:
    reader = CheckpointReader(url)
    if verify:
        reader.verify()
    for shard in range(2):
        reader.arrays(shard)
    assert_rows(reader.rows("item"), rows_of(10), rows_of(10, seed=1))


# --- files ---


@pytest.mark.parametrize("name", FILES)
def test_missing_file_is_named(written: str, name: str) -> None:
    delete(written, name)
    reader = CheckpointReader(written)
    with pytest.raises(CheckpointCorrupt, match=f"place/{name} is missing"):
        reader.verify()
    with pytest.raises(CheckpointCorrupt, match=f"place/{name} is missing"):
        reader.arrays(1) if name.startswith("shards") else list(reader.rows("item"))


@pytest.mark.parametrize("name", FILES)
def test_shards_are_verified_by_themselves(written: str, name: str) -> None:
    set_content(written, name, b"")
    CheckpointReader(written).verify([0])
    with pytest.raises(CheckpointCorrupt, match=f"place/{name} is damaged"):
        CheckpointReader(written).verify([1])


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
@given(data=st.data())
@settings(max_examples=40)
def test_file_cut_anywhere(shared: str, name: str, data: st.DataObject) -> None:
    content = content_of(shared, name)
    # What follows the last brace of the manifest is a line's end, which says nothing.
    keep = data.draw(st.integers(0, len(content) - (2 if name == "manifest.json" else 1)))
    set_content(shared, name, content[:keep])
    try:
        with pytest.raises(CheckpointCorrupt, match=name):
            read_all(shared, verify=data.draw(st.booleans()))
    finally:
        set_content(shared, name, content)
    read_all(shared)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("name", FILES)
@given(data=st.data())
@settings(max_examples=40)
def test_bit_flipped_anywhere(shared: str, name: str, verify: bool, data: st.DataObject) -> None:
    """It is also found by those who read it without having it verified."""
    content = content_of(shared, name)
    at = data.draw(st.integers(0, 8 * len(content) - 1))
    set_content(shared, name, flipped(content, at))
    try:
        with pytest.raises(CheckpointCorrupt, match=f"{name} is damaged"):
            read_all(shared, verify=verify)
    finally:
        set_content(shared, name, content)


@given(data=st.data())
@settings(max_examples=100)
def test_bit_flipped_anywhere_in_the_manifest(shared: str, data: st.DataObject) -> None:
    """Either it is found, or it was in white space and says the same as before."""
    content = content_of(shared, "manifest.json")
    damaged = flipped(content, data.draw(st.integers(0, 8 * len(content) - 1)))
    set_content(shared, "manifest.json", damaged)
    try:
        read_all(shared)
        assert json.loads(damaged) == json.loads(content)
    except CheckpointCorrupt as exc:
        assert "manifest.json" in str(exc)  # noqa: PT017  # it need not be raised
    finally:
        set_content(shared, "manifest.json", content)


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_a_file_is_read_once(written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Directory, name: str) -> FileFacts:
        raise AssertionError(f"{name} is read to be verified only")

    def count(self: Directory, name: str) -> AbstractContextManager[Input]:
        opened.append(name)
        return open_once(self, name)

    opened: list[str] = []
    open_once = Directory.open_once
    monkeypatch.setattr(Directory, "facts", refuse)
    monkeypatch.setattr(Directory, "open_once", count)
    reader = CheckpointReader(written)
    for _ in range(2):
        assert_rows(reader.rows("item"), rows_of(10), rows_of(10, seed=1))
        assert_rows(reader.rows("user"), rows_of(5), rows_of(5, seed=1))
        assert [len(reader.arrays(shard)) for shard in range(2)] == [3, 3]
    names = [f"tables/{table}/shard-{shard}.parquet" for table in ("item", "user") for shard in range(2)]
    assert opened == names, "the second time they are known to be intact"
    reader.verify()


def test_a_file_that_becomes_shorter_while_it_is_read_has_what_is_left() -> None:
    stream = io.BytesIO(b"0123456789")
    file = Input(stream)
    file.next_region(4)
    stream.truncate(6)
    assert file.facts() == {"bytes": 6, "sha256": hashlib.sha256(b"012345").hexdigest()}


@pytest.mark.parametrize("dictionary", [True, False])
def test_file_of_several_row_groups(written: str, dictionary: bool) -> None:
    table = pq.read_table(io.BytesIO(content_of(written, FILES[1])))
    file = io.BytesIO()
    pq.write_table(table, file, row_group_size=3, use_dictionary=dictionary)
    set_content(written, FILES[1], file.getvalue())
    sign(written, FILES[1])
    parts = [*CheckpointReader(written).rows("item")]
    assert [len(part.keys) for part in parts] == [10, 3, 3, 3, 1]
    assert_rows(parts, rows_of(10), rows_of(10, seed=1))


@pytest.mark.parametrize(("first", "size", "total"), [(0, 100, 100), (4, 0, 100), (4, -1, 100), (4, 1 << 40, 100)])
def test_a_row_group_that_cannot_be_is_not_read(first: int, size: int, total: int) -> None:
    column = SimpleNamespace(data_page_offset=first, total_compressed_size=size, has_dictionary_page=False)
    group = SimpleNamespace(num_rows=1, num_columns=1, column=lambda c: column, total_byte_size=total)
    with pytest.raises(pa.ArrowInvalid, match=f"row group 0 is at {first} to {first + size}, after 4"):
        parquet._ends(cast(Any, SimpleNamespace(num_row_groups=1, row_group=lambda g: group)))


def sign(url: str, *names: str) -> None:
    """Make the manifest say that files are as they were written."""
    files = manifest_of(url)["files"]
    for name in names:
        content = content_of(url, name)
        files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    set_manifest(url, files=files)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("content", [b"", b"hello", b"\xff" * 100])
def test_file_of_another_format_is_named(written: str, name: str, content: bytes) -> None:
    """Its checksum is that of the manifest, so it was written like this."""
    set_content(written, name, content)
    sign(written, name)
    reader = CheckpointReader(written)
    reader.verify()
    with pytest.raises(CheckpointCorrupt, match=f"place/{name} cannot be read"):
        reader.arrays(1) if name.startswith("shards") else list(reader.rows("item"))


@pytest.mark.parametrize("columns", [["key"], ["key", "embedding", "state", "count"]])
def test_table_without_a_column_is_named(tmp_path: Path, columns: list[str]) -> None:
    write(tmp_path / "c")
    file = tmp_path / "c" / "tables" / "item" / "shard-0.parquet"
    pd.read_parquet(file)[columns].to_parquet(file)
    sign(str(tmp_path / "c"), "tables/item/shard-0.parquet")
    with pytest.raises(CheckpointCorrupt, match=r"shard-0\.parquet cannot be read: "):
        list(CheckpointReader(tmp_path / "c").rows("item"))


def test_column_of_another_type_is_named(tmp_path: Path) -> None:
    write(tmp_path / "c")
    file = tmp_path / "c" / "tables" / "item" / "shard-0.parquet"
    pd.read_parquet(file).astype({"key": str}).to_parquet(file)
    sign(str(tmp_path / "c"), "tables/item/shard-0.parquet")
    with pytest.raises(CheckpointCorrupt, match=r"unexpected columns: key: .*string"):
        list(CheckpointReader(tmp_path / "c").rows("item"))


# --- the manifest ---


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "tables/../../x", "tables/../shard-0.parquet", "shards/./0", ""]
)
def test_manifest_that_names_another_file(written: str, name: str) -> None:
    set_manifest(written, files=manifest_of(written)["files"] | {name: {"bytes": 1, "sha256": ""}})
    with pytest.raises(CheckpointCorrupt, match="is not a file of a full checkpoint of 2 shards"):
        CheckpointReader(written)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"\xff\xfe", b"[]", b"{}", b"null", b'{"format": 2}', b'{"format": 2, "a": []}']
)
def test_manifest_that_is_none(written: str, text: bytes) -> None:
    set_content(written, "manifest.json", text)
    with pytest.raises(CheckpointCorrupt, match=r"manifest\.json"):
        CheckpointReader(written)


@pytest.mark.parametrize("facts", [None, {}, [], {"bytes": 1}])
def test_manifest_without_facts_of_a_file(written: str, facts: Any) -> None:
    set_manifest(written, files=manifest_of(written)["files"] | {FILES[0]: facts})
    with pytest.raises(CheckpointCorrupt, match=r"manifest\.json is invalid: the size and checksum of 'shards"):
        CheckpointReader(written)


@pytest.mark.parametrize("name", ["format", "kind", "about", "shards", "rows", "files"])
@pytest.mark.parametrize("value", [..., None, 1.5, "x", [], [1], [{}], {"a": []}])
def test_manifest_whose_parts_are_of_another_kind(tmp_path: Path, name: str, value: Any) -> None:
    url = str(tmp_path / "c")
    write(url)
    if name == "about" and value == {"a": []}:
        return  # these are facts
    if value is ...:
        set_manifest(url, without=name)
    else:
        set_manifest(url, **{name: value})
    with pytest.raises(CheckpointError, match=r"manifest\.json|has format"):
        CheckpointReader(url)


def test_manifest_without_the_arrays_of_a_shard(written: str) -> None:
    files = manifest_of(written)["files"]
    set_manifest(written, files={name: facts for name, facts in files.items() if name != FILES[0]})
    with pytest.raises(CheckpointCorrupt, match=r"the arrays of shards \[1\] are missing"):
        CheckpointReader(written)


def test_manifest_that_is_a_directory(tmp_path: Path) -> None:
    (tmp_path / "c" / "manifest.json").mkdir(parents=True)
    with pytest.raises(CheckpointCorrupt, match=r"manifest\.json cannot be read"):
        CheckpointReader(tmp_path / "c")


@pytest.mark.parametrize("version", [0, 1, 3, "2", None])
def test_unknown_format_is_refused(written: str, version: Any) -> None:
    set_manifest(written, format=version)
    with pytest.raises(CheckpointError, match=f"has format {version!r}; this version reads 2") as caught:
        CheckpointReader(written)
    assert not isinstance(caught.value, CheckpointCorrupt)


def test_first_format_is_refused(written: str) -> None:
    """Its manifest had no checksum of its own."""
    set_content(written, "manifest.json", b'{"format": 1, "about": {}, "rows": {}, "files": {}}')
    with pytest.raises(CheckpointError, match="has format 1; this version reads 2"):
        CheckpointReader(written)


def test_nothing_there(place: str) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint at .*place"):
        CheckpointReader(place)
