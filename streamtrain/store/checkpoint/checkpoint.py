"""Checkpoint: a directory to which shards write their files independently, and which exists once it is committed.

schemas/README.md describes the files. A directory without a manifest is not a checkpoint, so half of one is never read.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar
from urllib.parse import quote

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from streamtrain.errors import CheckpointCorrupt, CheckpointError
from streamtrain.store.checkpoint.manifest import FILE, MANIFEST, EpochKind, Manifest, decode, encode
from streamtrain.store.checkpoint.parquet import (
    Check,
    RowPart,
    TablePart,
    read_keys,
    read_rows,
    write_keys,
    write_rows,
)
from streamtrain.store.files import Directory, FileFacts, sync

_Part = TypeVar("_Part")


@contextmanager
def replacing(url: str | Path) -> Iterator[Directory]:
    """Gives a new directory to write a checkpoint to, which is at `url` when the block ends without an error.

    An existing checkpoint is replaced if `url` is local. Elsewhere directories cannot be renamed, so `url`
    must be unused.

    Raises:
        CheckpointError: there is something that is not replaced, or it cannot be replaced.
    """
    directory = Directory(url)
    if directory.local is None:
        if directory.names():
            raise CheckpointError(f"{directory.url} is not empty; choose another location")
        with _deleted_on_failure(directory):
            yield directory
        return
    path = directory.local.resolve()
    with directory.writing(""):
        if path.exists() and not (path / MANIFEST).is_file():
            raise CheckpointError(f"{path} exists and is not a checkpoint; choose another path")
    unfinished = path.with_name(f".{path.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        yield Directory(unfinished)
        with directory.writing(""):
            _replace(unfinished, path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def hint(directory: Directory) -> str:
    """Where the checkpoint is that a writer, stopped in the midst of replacing it, has left aside; "" if nowhere."""
    path = directory.local and directory.local.resolve()
    if path and path.name and (_aside(path) / MANIFEST).is_file():
        return f"; its writer was stopped, and the previous checkpoint is at {_aside(path)}"
    return ""


@contextmanager
def _deleted_on_failure(directory: Directory) -> Iterator[None]:
    try:
        yield
    except BaseException:
        directory.delete_all()
        raise


def _aside(path: Path) -> Path:
    """Where the checkpoint that was at `path` is while a new one takes its place."""
    return path.with_name(f".{path.name}.old")


def _replace(new: Path, path: Path) -> None:
    """Puts a complete directory in the place of an older one, which is dropped only then."""
    old = _aside(path)
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    try:
        new.rename(path)
        sync(path.parent)
    except OSError:
        if old.exists():
            old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


_READERS = 4  # files that are verified at a time


class ShardFiles(TypedDict):
    """What one shard has written; JSON-able, to be sent to the process that commits.

    Attributes:
        about: its own facts.
        files: size and checksum by name of file.
    """

    shard: int
    about: dict[str, Any]
    rows: dict[str, int]
    files: dict[str, FileFacts]


def write_part(
    url: str | Path | Directory,
    shard: int,
    arrays: Mapping[str, NDArray[Any]],
    tables: Iterable[TablePart],
    *,
    tombstones: Mapping[str, Iterable[NDArray[np.uint64]]] | None = None,
    about: Mapping[str, Any] | None = None,
) -> ShardFiles:
    """Writes the files of one shard; others may write theirs at the same time, from anywhere.

    Args:
        url: the checkpoint's directory: a local path or any URL of fsspec.
        shard: which shard it is, from 0.
        arrays: named arrays.
        tables: the rows of this shard, each table once: all of them, or for a delta those that changed.
        tombstones: for a delta, keys uint64 of the rows that are gone, in parts by table. They are asked for after
            all rows have been written, so they may be collected meanwhile.
        about: JSON-able facts of this shard.

    Raises:
        CheckpointError: it cannot be written, or the checkpoint is complete already.
    """
    directory = _directory(url)
    _refuse_complete(directory)
    part = ShardFiles(shard=shard, about=dict(about or {}), rows={}, files={})
    part["files"][_arrays_file(shard)] = _write_arrays(directory, _arrays_file(shard), arrays)
    for table in tables:
        name = _table_file("tables", table.table, shard)
        with directory.create(name) as output:
            part["rows"][table.table] = write_rows(output, table)
        part["files"][name] = output.facts()
    for table_name, keys in (tombstones or {}).items():
        name = _table_file("tombstones", table_name, shard)
        if (facts := _write_tombstones(directory, name, keys)) is not None:
            part["files"][name] = facts
    return part


def part_digest(about: Mapping[str, Any], files: Mapping[str, FileFacts]) -> str:
    """SHA-256 of what a shard has written, in hexadecimal: of its facts, and of its files with their checksums."""
    text = json.dumps([about, files], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def commit(
    url: str | Path | Directory,
    about: Mapping[str, Any],
    parts: Sequence[ShardFiles],
    *,
    kind: EpochKind = "full",
    base: int | None = None,
    base_digest: str | None = None,
) -> None:
    """Completes a checkpoint, after all shards have written their parts.

    Args:
        url: the checkpoint's directory.
        about: JSON-able facts of the whole, that a reader checks or needs.
        parts: what `write_part` has returned for every shard, in any order.
        kind: "full", or "delta" for one that holds only what changed since `base`.
        base: of a delta, the epoch number of the checkpoint before.
        base_digest: of a delta, that one's `digest`; None: only its number is known.

    Raises:
        CheckpointError: it cannot be written, it is complete already, or parts or their files are missing.
    """
    directory = _directory(url)
    _refuse_complete(directory)
    parts = sorted(parts, key=lambda part: part["shard"])
    if not parts or [part["shard"] for part in parts] != list(range(len(parts))):
        raise CheckpointError(f"cannot complete {directory.url}: it has parts of shards {[p['shard'] for p in parts]}")
    files = {name: facts for part in parts for name, facts in part["files"].items()}
    rows: dict[str, int] = {}
    for part in parts:
        for table, n in part["rows"].items():
            rows[table] = rows.get(table, 0) + n
    shards = [dict(part["about"]) for part in parts]
    data = encode(Manifest(kind, base, base_digest, dict(about), shards, rows, files), directory)
    sizes = directory.sizes()
    for name, facts in files.items():
        if sizes.get(name) != facts["bytes"]:
            raise CheckpointError(
                f"cannot complete {directory.url}: {name} is missing or differs from what its shard wrote; all shards "
                "must write to shared storage"
            )
    directory.put(MANIFEST, data)


class CheckpointReader:
    """Reads a complete checkpoint. Each file is compared with the manifest when it is read for the first time.

    Args:
        url: its directory: a local path or any URL of fsspec.

    Attributes:
        url: the directory's, for messages.
        kind: "full" or "delta".
        base: of a delta, the epoch number of the checkpoint that it builds on.
        base_digest: of a delta, the digest of that checkpoint; None: its writer was of a release that did not say.
        digest: SHA-256 of the manifest, as it says itself.
        about: facts of the whole.
        shards: facts of every shard.
        row_counts: number of rows by table: all of them, or those that changed.

    Raises:
        CheckpointError: there is none, it is of another format, or out of reach.
        CheckpointCorrupt: its manifest is damaged.
    """

    def __init__(self, url: str | Path | Directory) -> None:
        self._directory = _directory(url)
        self.url = self._directory.url
        written = self._directory.read_if_there(MANIFEST)
        if written is None:
            raise CheckpointError(f"no checkpoint at {self.url}{hint(self._directory)}")
        manifest, self.digest = decode(written, self._directory)
        self.kind, self.base, self.base_digest = manifest.kind, manifest.base, manifest.base_digest
        self.about, self.shards = manifest.about, manifest.shards
        self.row_counts = manifest.rows
        self._files = manifest.files
        self._intact: set[str] = set()  # files
        self._faults: dict[str, str] = {}  # of other files

    def part_digest(self, shard: int) -> str:
        """See the function of this name."""
        return part_digest(self.shards[shard], {n: facts for n, facts in self._files.items() if _shard_of(n) == shard})

    def verify(self, shards: Iterable[int] | None = None) -> None:
        """Compares size and checksum of files with those that were written, for which they are read, once.

        Args:
            shards: those whose files to verify; all by default.

        Raises:
            CheckpointCorrupt: a file is missing or damaged; the message names it.
        """
        wanted = set(self._shards(shards))
        names = [name for name in self._files if _shard_of(name) in wanted and not self._is_intact(name)]
        with ThreadPoolExecutor(_READERS, "verify") as pool:
            found = [pool.submit(self._directory.facts, name) for name in names]
            try:
                for name, one in zip(names, found, strict=True):
                    with self._remembered(name):
                        self._check(name, one.result())
            finally:
                pool.shutdown(cancel_futures=True)

    def _is_intact(self, name: str) -> bool:
        """Whether it is known; raises CheckpointCorrupt if it is known not to be."""
        if name in self._faults:
            raise CheckpointCorrupt(self._faults[name])
        return name in self._intact

    def _check(self, name: str, found: FileFacts) -> None:
        if found != self._files[name]:
            damage = f"{self.url}/{name} is damaged: its size or checksum differs from the manifest"
            self._faults[name] = damage
            raise CheckpointCorrupt(damage)
        self._intact.add(name)

    @contextmanager
    def _remembered(self, name: str) -> Iterator[None]:
        """Context that notes what is wrong with a file."""
        try:
            yield
        except CheckpointCorrupt as exc:
            self._faults[name] = str(exc)
            raise

    @contextmanager
    def _found_out(self, name: str) -> Iterator[None]:
        """Context in which a file is read. If it is damaged, that is what is said, whatever was noticed first."""
        with self._remembered(name):
            try:
                yield
            except CheckpointCorrupt:
                if name not in self._faults:
                    self._check(name, self._directory.facts(name))
                raise

    def _read(self, name: str, read: Callable[[Directory, str, Check | None], Iterator[_Part]]) -> Iterator[_Part]:
        """Reads a file, and checks it on the way unless that was done."""
        check = None if self._is_intact(name) else partial(self._check, name)
        with self._found_out(name):
            yield from read(self._directory, name, check)

    def arrays(self, shard: int) -> dict[str, NDArray[Any]]:
        """The named arrays of a shard.

        Raises:
            CheckpointCorrupt: their file is missing or damaged.
        """
        name = _arrays_file(*self._shards([shard]))
        if name not in self._files:
            raise CheckpointCorrupt(f"{self.url} has no {name}")
        is_intact = self._is_intact(name)
        with self._found_out(name):
            data = self._directory.read(name)
            if not is_intact:
                self._check(name, {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
            try:
                return safetensors.numpy.load(data)
            except (safetensors.SafetensorError, KeyError, ValueError) as exc:
                raise CheckpointCorrupt(f"{self.url}/{name} cannot be read: {exc}") from exc

    def rows(self, table: str, shards: Iterable[int] | None = None) -> Iterator[RowPart]:
        """The rows of a table, in parts of at most 65536; none of a table that is not there.

        Args:
            table: its name.
            shards: those whose rows to read; all by default.

        Raises:
            CheckpointCorrupt: a file is missing or damaged.
        """
        for name in self._table_files("tables", table, shards):
            yield from self._read(name, read_rows)

    def copy_rows(self, table: str, shard: int, directory: Directory) -> dict[str, FileFacts]:
        """Copies the rows of a table of a shard to another checkpoint.

        Args:
            table: its name.
            shard: index of the shard.
            directory: of the other checkpoint.

        Returns:
            Size and checksum by name of file; of none if the shard has no such table.

        Raises:
            CheckpointCorrupt: the file is missing.
            CheckpointError: it cannot be copied.
        """
        names = self._table_files("tables", table, [shard])
        for name in names:
            directory.copy_from(self._directory, name)
        return {name: self._files[name] for name in names}

    def tombstones(self, table: str, shards: Iterable[int] | None = None) -> Iterator[NDArray[np.uint64]]:
        """Keys, uint64, of the rows of a table that are gone since the base, in parts of at most 65536.

        Args:
            table: its name.
            shards: those whose keys to read; all by default.

        Raises:
            CheckpointCorrupt: a file is missing or damaged.
        """
        for name in self._table_files("tombstones", table, shards):
            yield from self._read(name, read_keys)

    def _shards(self, shards: Iterable[int] | None) -> list[int]:
        wanted = list(range(len(self.shards)) if shards is None else shards)
        if missing := [shard for shard in wanted if not 0 <= shard < len(self.shards)]:
            raise CheckpointError(f"{self.url} has shards 0 to {len(self.shards) - 1}, not {missing}")
        return wanted

    def _table_files(
        self, folder: Literal["tables", "tombstones"], table: str, shards: Iterable[int] | None
    ) -> list[str]:
        names = [_table_file(folder, table, shard) for shard in self._shards(shards)]
        return [name for name in names if name in self._files]


def _directory(url: str | Path | Directory) -> Directory:
    return url if isinstance(url, Directory) else Directory(url)


def _arrays_file(shard: int) -> str:
    return f"shards/{shard}.safetensors"


def _table_file(folder: Literal["tables", "tombstones"], table: str, shard: int) -> str:
    """Dots are encoded too, for "." and ".." lead elsewhere."""
    return f"{folder}/{quote(table, safe='').replace('.', '%2E')}/shard-{shard}.parquet"


def _shard_of(name: str) -> int:
    found = re.fullmatch(FILE, name)
    assert found, name  # the manifest has been checked
    return int(found[1] or found[2])


def _refuse_complete(directory: Directory) -> None:
    if directory.exists(MANIFEST):
        raise CheckpointError(f"{directory.url} already has a complete checkpoint; choose another location")


def _write_arrays(directory: Directory, name: str, arrays: Mapping[str, NDArray[Any]]) -> FileFacts:
    with directory.writing(name):
        data = safetensors.numpy.save({key: np.ascontiguousarray(array) for key, array in arrays.items()})
    return directory.put(name, data)


def _write_tombstones(directory: Directory, name: str, keys: Iterable[NDArray[np.uint64]]) -> FileFacts | None:
    parts = (part for part in keys if len(part))
    first = next(parts, None)
    if first is None:
        return None
    with directory.create(name) as output:
        write_keys(output, chain([first], parts))
    return output.facts()
