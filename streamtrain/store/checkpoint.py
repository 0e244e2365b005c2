"""Checkpoint: a directory to which shards write their files independently, and which is there once it is committed.

schemas/README.md describes the files. A directory without a manifest is no checkpoint, so half of one is never read.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypedDict
from urllib.parse import quote

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from streamtrain.errors import CheckpointCorrupt, CheckpointError
from streamtrain.store.files import Directory, FileFacts
from streamtrain.store.manifest import FILE, MANIFEST, Kind, Manifest, decode, encode
from streamtrain.store.replacement import hint
from streamtrain.store.rows import RowPart, TablePart, read_keys, read_rows, write_keys, write_rows

_READERS = 4  # files that are verified at a time


class Part(TypedDict):
    """What one shard has written; JSON-able, to be sent to whoever commits.

    Attributes:
        shard: which one it is.
        about: its own facts.
        rows: number of rows by table.
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
) -> Part:
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
    part = Part(shard=shard, about=dict(about or {}), rows={}, files={})
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


def commit(
    url: str | Path | Directory,
    about: Mapping[str, Any],
    parts: Sequence[Part],
    *,
    kind: Kind = "full",
    base: int | None = None,
) -> None:
    """Completes a checkpoint, after all shards have written their parts.

    Args:
        url: the checkpoint's directory.
        about: JSON-able facts of the whole, that a reader checks or needs.
        parts: what `write_part` has returned for every shard, in any order.
        kind: "full", or "delta" for one that holds only what changed since `base`.
        base: of a delta, the epoch number of the checkpoint before.

    Raises:
        CheckpointError: it cannot be written, it is complete already, or parts or their files are missing.
    """
    directory = _directory(url)
    _refuse_complete(directory)
    parts = sorted(parts, key=lambda part: part["shard"])
    if not parts or [part["shard"] for part in parts] != list(range(len(parts))):
        raise CheckpointError(f"cannot complete {directory.url}: its parts are of shards {[p['shard'] for p in parts]}")
    files = {name: facts for part in parts for name, facts in part["files"].items()}
    rows: dict[str, int] = {}
    for part in parts:
        for table, n in part["rows"].items():
            rows[table] = rows.get(table, 0) + n
    data = encode(Manifest(kind, base, dict(about), [dict(part["about"]) for part in parts], rows, files), directory)
    sizes = directory.sizes()
    for name, facts in files.items():
        if sizes.get(name) != facts["bytes"]:
            raise CheckpointError(
                f"cannot complete {directory.url}: {name} is not there as its shard wrote it; all shards must write to "
                "a place that they share"
            )
    directory.put(MANIFEST, data)


class CheckpointReader:
    """Reads a complete checkpoint.

    Args:
        url: its directory: a local path or any URL of fsspec.

    Attributes:
        url: the directory's, for messages.
        kind: "full" or "delta".
        base: of a delta, the epoch number of the checkpoint that it builds on.
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
        if not self._directory.exists(MANIFEST):
            raise CheckpointError(f"there is no checkpoint at {self.url}{hint(self._directory)}")
        manifest = decode(self._directory.read(MANIFEST), self._directory)
        self.kind, self.base = manifest.kind, manifest.base
        self.about, self.shards = manifest.about, manifest.shards
        self.row_counts = manifest.rows
        self._files = manifest.files

    def verify(self, shards: Iterable[int] | None = None) -> None:
        """Compares size and checksum of files with those that were written, for which they are read.

        Args:
            shards: those whose files to verify; all by default.

        Raises:
            CheckpointCorrupt: a file is missing or damaged; the message names it.
        """
        wanted = set(self._shards(shards))
        names = [name for name in self._files if _shard_of(name) in wanted]
        with ThreadPoolExecutor(_READERS, "verify") as pool:
            found = [pool.submit(self._directory.facts, name) for name in names]
            try:
                for name, one in zip(names, found, strict=True):
                    if one.result() != self._files[name]:
                        raise CheckpointCorrupt(
                            f"{self.url}/{name} is damaged: its size or checksum is not that of the manifest"
                        )
            finally:
                pool.shutdown(cancel_futures=True)

    def arrays(self, shard: int) -> dict[str, NDArray[Any]]:
        """The named arrays of a shard.

        Raises:
            CheckpointCorrupt: their file is missing or damaged.
        """
        name = _arrays_file(*self._shards([shard]))
        data = self._directory.read(name)
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
            yield from read_rows(self._directory, name)

    def tombstones(self, table: str, shards: Iterable[int] | None = None) -> Iterator[NDArray[np.uint64]]:
        """Keys, uint64, of the rows of a table that are gone since the base, in parts of at most 65536.

        Args:
            table: its name.
            shards: those whose keys to read; all by default.

        Raises:
            CheckpointCorrupt: a file is missing or damaged.
        """
        for name in self._table_files("tombstones", table, shards):
            yield from read_keys(self._directory, name)

    def _shards(self, shards: Iterable[int] | None) -> list[int]:
        wanted = list(range(len(self.shards)) if shards is None else shards)
        if missing := [shard for shard in wanted if not 0 <= shard < len(self.shards)]:
            raise CheckpointError(f"{self.url} has shards 0 to {len(self.shards) - 1}, and none of {missing}")
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
        raise CheckpointError(f"{directory.url} is a complete checkpoint already; choose another place")


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
