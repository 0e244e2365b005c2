"""Checkpoints as files: what is written is read, on any filesystem, and by shards that know nothing of each other."""

import hashlib
import json
import multiprocessing
import os
import resource
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import fsspec
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from numpy.typing import NDArray

from streamtrain.errors import CheckpointCorrupt, CheckpointError
from streamtrain.store.checkpoint.checkpoint import CheckpointReader, commit, replacing, write_part
from streamtrain.store.checkpoint.parquet import GROUP_ROWS, RowPart, TablePart
from streamtrain.store.files import Directory
from tests.store.checkpoint.checkpoints import (
    ARRAYS,
    assert_rows,
    content_of,
    files_of,
    keys,
    manifest_of,
    rows_of,
    table,
    together,
    write,
    write_shards,
)

NAMES = [
    "manifest.json",
    "shards/0.safetensors",
    "shards/1.safetensors",
    "tables/item/shard-0.parquet",
    "tables/item/shard-1.parquet",
    "tables/user/shard-0.parquet",
    "tables/user/shard-1.parquet",
]


# --- round trip ---


def test_facts_and_arrays_come_back(place: str) -> None:
    write(place, {"samples": 7, "nested": {"tables": ["a", 1.5, None], 3: "three"}})
    reader = CheckpointReader(place)
    assert (reader.kind, reader.base) == ("full", None)
    assert reader.about == {"samples": 7, "nested": {"tables": ["a", 1.5, None], "3": "three"}}
    assert reader.shards == [{"clock": 100}, {"clock": 101}]
    assert reader.row_counts == {"item": 20, "user": 10}
    arrays = reader.arrays(1)
    assert set(arrays) == set(ARRAYS)
    for name, expected in ARRAYS.items():
        assert_array_equal(arrays[name], expected, strict=True)


def test_rows_of_all_shards_or_of_some(place: str) -> None:
    write(place, shards=3)
    reader = CheckpointReader(place)
    reader.verify()
    assert_rows(reader.rows("item"), *(rows_of(10, seed=i) for i in range(3)))
    assert_rows(reader.rows("item", [2, 0]), rows_of(10, seed=2), rows_of(10, seed=0))
    assert list(reader.rows("item", [])) == list(reader.rows("ite")) == []


def test_file_url(tmp_path: Path) -> None:
    write(f"file://{tmp_path}/c")
    assert_rows(CheckpointReader(tmp_path / "c").rows("item"), rows_of(10), rows_of(10, seed=1))


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
    rows = [rows_of(n, dim, state, seed + i) for i, n in enumerate(sizes)]
    parts = [write_part(path, s, {}, [table(rows[2 * s : 2 * s + 2], "item", dim, state)]) for s in range(2)]
    commit(path, {}, parts)
    reader = CheckpointReader(path)
    assert reader.row_counts == {"item": sum(sizes)}
    if sum(sizes):
        assert_rows(reader.rows("item"), *rows)
    else:
        assert list(reader.rows("item")) == []


@pytest.mark.parametrize("state", [0, 1])
def test_many_rows_are_read_in_parts_of_bounded_size(place: str, state: int) -> None:
    rows = rows_of(3 * GROUP_ROWS // 2, 1, state)
    commit(place, {}, [write_part(place, 0, {}, [table([rows], "item", 1, state)])])
    parts = list(CheckpointReader(place).rows("item"))
    assert [len(part.keys) for part in parts] == [GROUP_ROWS, GROUP_ROWS // 2]
    assert_rows(parts, rows)


def test_rows_are_contiguous(tmp_path: Path) -> None:
    """As the table wants them, so that it need not copy."""
    write(tmp_path / "c")
    for part in CheckpointReader(tmp_path / "c").rows("item"):
        assert all(column.flags.c_contiguous and column.flags.aligned for column in part)


def test_memory_is_bounded_by_a_part_of_rows(tmp_path: Path) -> None:
    """Two row groups at most: one that is written, and the next, which is gathered."""
    alive: list[weakref.ref[NDArray[Any]]] = []

    def parts() -> Iterator[RowPart]:
        for i in range(40):
            part = rows_of(GROUP_ROWS // 4, 1, 0, seed=i)
            alive.append(weakref.ref(part.keys))
            yield part
            del part
            assert sum(one() is not None for one in alive) <= 9

    written = write_part(tmp_path / "c", 0, {}, [table(parts(), "item", 1, 0)])
    assert written["rows"] == {"item": 10 * GROUP_ROWS}


@pytest.mark.parametrize("name", ["a/b", "..", "../x", "a b", "ü", "100%", "item.parquet", "a\\b", "%2e%2e", "x" * 80])
def test_table_of_any_name(tmp_path: Path, name: str) -> None:
    first, second = rows_of(3, seed=1), rows_of(4, seed=2)
    commit(tmp_path / "c", {}, [write_part(tmp_path / "c", 0, {}, [table([first], name), table([second], name + "2")])])
    reader = CheckpointReader(tmp_path / "c")
    assert_rows(reader.rows(name), first)
    assert_rows(reader.rows(name + "2"), second)
    folders = {file.parent.name for file in (tmp_path / "c" / "tables").glob("*/shard-0.parquet")}
    assert {unquote(folder) for folder in folders} == {name, name + "2"}


def test_rows_are_a_parquet_dataset_that_pandas_opens(tmp_path: Path) -> None:
    write(tmp_path / "c")
    frame = pd.read_parquet(tmp_path / "c" / "tables" / "item")
    rows = together([rows_of(10), rows_of(10, seed=1)])
    assert list(frame.columns) == ["key", "embedding", "state", "count", "last_seen"]
    assert frame["key"].tolist() == rows.keys.tolist()
    assert_array_equal(np.stack(list(frame["embedding"])), rows.embeddings)
    assert frame["count"].dtype == np.uint32


def test_manifest_lists_every_other_file(place: str) -> None:
    write(place)
    manifest = manifest_of(place)
    assert files_of(place) == NAMES
    assert sorted(["manifest.json", *manifest["files"]]) == NAMES
    for name, facts in manifest["files"].items():
        content = content_of(place, name)
        assert facts == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


# --- deltas ---


def test_tombstones_come_back(place: str) -> None:
    commit(place, {}, write_shards(place, item=[keys(3), keys(), keys(1, 2)], user=[keys()]), kind="delta", base=4)
    reader = CheckpointReader(place)
    assert (reader.kind, reader.base) == ("delta", 4)
    assert [key for part in reader.tombstones("item", [1]) for key in part.tolist()] == [3, 1, 2]
    assert sum(len(part) for part in reader.tombstones("item")) == 6
    assert list(reader.tombstones("user")) == []
    assert not any(name.startswith("tombstones/user") for name in files_of(place))
    frame = pd.DataFrame(fsspec_parquet(place, "tombstones/item/shard-0.parquet"))
    assert frame["key"].tolist() == [3, 1, 2]


def fsspec_parquet(place: str, name: str) -> pd.DataFrame:
    with fsspec.open(f"{place}/{name}") as file:
        return pd.read_parquet(file)


def test_tombstones_may_be_collected_while_rows_are_written(tmp_path: Path) -> None:
    gone: list[NDArray[np.uint64]] = []

    def drained() -> Iterator[RowPart]:
        for i in range(3):
            gone.append(keys(i))
            yield rows_of(2, seed=i)

    part = write_part(tmp_path, 0, {}, [table(drained())], tombstones={"item": gone})
    commit(tmp_path, {}, [part], kind="delta", base=1)
    assert sum(len(one) for one in CheckpointReader(tmp_path).tombstones("item")) == 3


# --- parts and commit ---


def write_in_process(url: str, shard: int, back: Any) -> None:
    back.put(json.dumps(write_part(url, shard, ARRAYS, [table([rows_of(100, seed=shard)])])))


def test_shards_write_from_processes_of_their_own(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    back = spawn.Queue()
    processes = [spawn.Process(target=write_in_process, args=(str(tmp_path / "c"), i, back)) for i in range(3)]
    for process in processes:
        process.start()
    parts = [json.loads(back.get(timeout=60)) for _ in processes]
    for process in processes:
        process.join()
    commit(tmp_path / "c", {"samples": 1}, parts)
    CheckpointReader(tmp_path / "c").verify()
    assert_rows(CheckpointReader(tmp_path / "c").rows("item"), *(rows_of(100, seed=i) for i in range(3)))


def test_checkpoint_is_there_only_once_it_is_committed(place: str) -> None:
    parts = write_shards(place)
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        CheckpointReader(place)
    commit(place, {}, parts[::-1])  # any order will do
    assert_rows(CheckpointReader(place).rows("item"), rows_of(10), rows_of(10, seed=1))


def test_complete_checkpoint_is_not_written_to(place: str) -> None:
    write(place)
    before = content_of(place, "shards/0.safetensors")
    with pytest.raises(CheckpointError, match="place already has a complete checkpoint"):
        write_part(place, 0, {}, [])
    with pytest.raises(CheckpointError, match="place already has a complete checkpoint"):
        commit(place, {}, [])
    assert content_of(place, "shards/0.safetensors") == before


@pytest.mark.parametrize("chosen", [[], [0], [1], [0, 2], [0, 0, 1], [1, 2]])
def test_parts_of_some_shards_only(tmp_path: Path, chosen: list[int]) -> None:
    parts = write_shards(tmp_path / "c", 3)
    if chosen == [0]:  # which is a checkpoint of one shard
        commit(tmp_path / "c", {}, [parts[0]])
        assert len(CheckpointReader(tmp_path / "c").shards) == 1
        return
    with pytest.raises(CheckpointError, match=r"it has parts of shards \["):
        commit(tmp_path / "c", {}, [parts[i] for i in chosen])
    assert not (tmp_path / "c" / "manifest.json").exists()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "manifest.json"])
def test_part_that_was_written_elsewhere(tmp_path: Path, name: str) -> None:
    """As on a machine that does not share the directory."""
    parts = write_shards(tmp_path / "c")
    (tmp_path / "c" / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing .* shared storage"):
        commit(tmp_path / "c", {}, parts)


@pytest.mark.parametrize(
    ("kind", "base", "message"),
    [
        ("full", 3, "a full checkpoint has the base 3"),
        ("delta", None, "a delta checkpoint has the base None"),
        ("other", None, "kind 'other'"),
    ],
)
def test_kind_and_base_that_do_not_fit(tmp_path: Path, kind: Any, base: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        commit(tmp_path / "c", {}, write_shards(tmp_path / "c"), kind=kind, base=base)


def test_tombstones_in_a_full_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'tombstones/item/shard-0\.parquet' is not a file of a full checkpoint"):
        commit(tmp_path / "c", {}, write_shards(tmp_path / "c", item=[keys(1)]))


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "tables/../shard-0.parquet", "shards/2.safetensors"])
def test_part_that_names_another_file(tmp_path: Path, name: str) -> None:
    parts = write_shards(tmp_path / "c")
    parts[0]["files"][name] = {"bytes": 1, "sha256": ""}
    with pytest.raises(CheckpointError, match="is not a file of a full checkpoint of 2 shards"):
        commit(tmp_path / "c", {}, parts)


@pytest.mark.parametrize("value", [{1}, b"x", float("nan"), np.float32(1)])
def test_facts_that_are_not_json(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match="its facts are not JSON"):
        commit(tmp_path / "c", {"value": value}, write_shards(tmp_path / "c"))


def test_shard_that_is_not_there(place: str) -> None:
    write(place)
    for read in (CheckpointReader(place).arrays, lambda i: list(CheckpointReader(place).rows("item", [i]))):
        with pytest.raises(CheckpointError, match=r"has shards 0 to 1, not \[2\]"):
            read(2)


# --- places that cannot be used ---


@pytest.mark.parametrize(
    ("url", "message"), [("nope://x/y", "cannot use nope://x/y: Protocol not known"), ("abfs://x", "Install adlfs")]
)
def test_unknown_protocol(url: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        write_part(url, 0, {}, [])
    with pytest.raises(CheckpointError, match=message):
        CheckpointReader(url)


def test_credentials_are_not_shown() -> None:
    with pytest.raises(CheckpointError) as caught:
        Directory("nope://me:secret@host/x?token=secret")
    assert str(caught.value).startswith("cannot use nope://***@host/x?token=***: Protocol not known")


def test_secrets_are_not_shown_where_the_client_of_a_store_says_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(url: str) -> None:
        raise OSError(f"no such key: 'the secret' at {url}")

    monkeypatch.setattr("fsspec.core.url_to_fs", refuse)
    with pytest.raises(CheckpointError, match=r"no such key: '[*]{3}' at s3://[*]{3}@bucket/x"):
        Directory("s3://key:the%20secret@bucket/x?version=the%20secret")


@contextmanager
def unprivileged() -> Iterator[None]:
    """Nobody's rights, for a root that could write anywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_place_that_must_not_be_written() -> None:
    with unprivileged(), pytest.raises(CheckpointError, match=r"cannot write /usr/lib/checkpoint/.*Permission denied"):
        write_part("/usr/lib/checkpoint", 0, ARRAYS, [])


def test_file_that_must_not_be_read() -> None:
    """It is not damaged, so an older epoch is no way out."""
    with tempfile.TemporaryDirectory() as folder:
        write(folder + "/c")
        Path(folder).chmod(0o755)
        Path(folder, "c", "shards", "0.safetensors").chmod(0)
        reader = CheckpointReader(folder + "/c")
        with unprivileged(), pytest.raises(CheckpointError, match="Permission denied") as caught:
            reader.verify()
        assert not isinstance(caught.value, CheckpointCorrupt)


def test_path_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"):
        write_part(tmp_path / "file" / "c", 0, {}, [])


@contextmanager
def full_disk() -> Iterator[None]:
    """No file can be larger than 3000 bytes: neither can what pytest writes, so never for longer than needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ((1000, 1, 0), "shards/0.safetensors"),
        ((1, 1000, 0), "tables/item/shard-0.parquet"),
        ((1, 1, 1000), "tombstones/item/shard-0.parquet"),
    ],
)
def test_disk_that_is_full(tmp_path: Path, sizes: tuple[int, int, int], name: str) -> None:
    arrays, rows, gone = sizes
    with pytest.raises(CheckpointError, match=rf"cannot write .*{name}: .*File too large"), full_disk():
        write_part(
            tmp_path / "c",
            0,
            {"dense": np.zeros(arrays, np.float32)},
            [table([rows_of(rows)])],
            tombstones={"item": [rows_of(gone).keys]},
        )
    assert not (tmp_path / "c" / name).exists()
    assert not list(tmp_path.rglob("*.unfinished"))


def test_disk_that_is_full_for_the_manifest(tmp_path: Path) -> None:
    parts = write_shards(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"cannot write .*manifest\.json: .*File too large"), full_disk():
        commit(tmp_path / "c", {"long": "x" * 3000}, parts)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        CheckpointReader(tmp_path / "c")


def test_rows_that_do_not_fit_the_table(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot write .*tables/item/shard-0\.parquet"):
        write_part(tmp_path / "c", 0, {}, [TablePart("item", 4, 2, [rows_of(5)])])


def failing(error: Exception) -> Iterator[RowPart]:
    yield rows_of(5)
    raise error


def test_error_of_the_rows_themselves_passes_and_leaves_no_file(place: str) -> None:
    with pytest.raises(ZeroDivisionError):
        write_part(place, 0, {}, [table(failing(ZeroDivisionError()))])
    assert files_of(place) == ["shards/0.safetensors"]


# --- replacing ---


def replace(url: Any, about: Any) -> None:
    with replacing(url) as directory:
        write(directory, about, shards=1)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    replace(tmp_path / "c", {"samples": 7})
    return tmp_path / "c"


def about_of(path: Path) -> Any:
    reader = CheckpointReader(path)
    reader.verify()
    return reader.about


def test_older_checkpoint_is_replaced_whole(written: Path) -> None:
    (written / "tables" / "item" / "shard-7.parquet").write_text("of the older one")
    replace(written, {"samples": 8})
    assert about_of(written) == {"samples": 8}
    assert files_of(str(written)) == [name for name in NAMES if "1" not in name]
    assert os.listdir(written.parent) == ["c"]


def test_url_that_is_not_local_is_not_replaced(tmp_path: Path) -> None:
    url = f"memory://{tmp_path}/c"
    replace(url, {"samples": 7})
    with pytest.raises(CheckpointError, match=r"memory://.*/c is not empty"):
        replace(url, {"samples": 8})
    assert CheckpointReader(url).about == {"samples": 7}


def test_failure_elsewhere_leaves_nothing_behind(tmp_path: Path) -> None:
    url = f"memory://{tmp_path}/c"
    with pytest.raises(ZeroDivisionError), replacing(url) as directory:
        write_part(directory, 0, {}, [table(failing(ZeroDivisionError()))])
    assert files_of(url) == []


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
    with pytest.raises(CheckpointError, match="mine exists and is not a checkpoint"):
        replace(path, {})
    assert sorted(tmp_path.rglob("*")) == before


def test_failed_write_leaves_the_older_one(written: Path) -> None:
    with pytest.raises(CheckpointError, match="File too large"), full_disk(), replacing(written) as directory:
        write_part(directory, 0, {"dense": np.zeros(1000)}, [])
    assert about_of(written) == {"samples": 7}
    assert os.listdir(written.parent) == ["c"]


def test_full_disk_while_renaming_leaves_the_older_one(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name.endswith(".unfinished"):
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(CheckpointError, match="No space left"):
        replace(written, {"samples": 8})
    assert about_of(written) == {"samples": 7}
    assert os.listdir(written.parent) == ["c"]


def test_writer_killed_while_replacing_leaves_the_older_one_aside(written: Path) -> None:
    """Until it is replaced in turn: a later writer that fails must not take the only good one away."""
    aside = written.with_name(".c.old")
    written.rename(aside)
    with pytest.raises(CheckpointError, match=r"no checkpoint at .*c; .* is at .*\.c\.old"):
        CheckpointReader(written)
    with pytest.raises(ZeroDivisionError), replacing(written) as directory:
        write_part(directory, 0, {}, [table(failing(ZeroDivisionError()))])
    assert about_of(aside) == {"samples": 7}
    replace(written, {"samples": 8})
    assert about_of(written) == {"samples": 8}
    assert not aside.exists()


def test_remains_of_a_killed_writer_are_cleared(written: Path) -> None:
    for remains in (".c.unfinished", ".c.old"):
        (written.parent / remains / "tables").mkdir(parents=True)
        (written.parent / remains / "half").write_text("half")
    replace(written, {"samples": 8})
    assert os.listdir(written.parent) == ["c"]


def test_link_to_a_checkpoint_stays_a_link(written: Path) -> None:
    link = written.parent / "latest"
    link.symlink_to(written)
    replace(link, {"samples": 8})
    assert link.is_symlink()
    assert about_of(written) == {"samples": 8}


def test_relative_path_whose_parents_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    replace("a/b/c", {"samples": 7})
    assert about_of(Path("a/b/c")) == {"samples": 7}


@pytest.mark.parametrize("path", [Path(), Path("/"), Path("..")])
def test_path_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError):
        replace(path, {})


def test_rows_are_copied_to_another_checkpoint(place: str, tmp_path: Path) -> None:
    write(f"{place}/one")
    reader, there = CheckpointReader(f"{place}/one"), Directory(tmp_path / "two")
    files = reader.copy_rows("user", 1, there)
    assert files == {"tables/user/shard-1.parquet": there.facts("tables/user/shard-1.parquet")}
    assert reader.copy_rows("user", 1, there) == files
    assert reader.copy_rows("unknown", 1, there) == {}
    (reader._directory / "tables/item").delete_all()
    with pytest.raises(CheckpointCorrupt, match=r"one/tables/item/shard-0.parquet is missing"):
        reader.copy_rows("item", 0, there)
