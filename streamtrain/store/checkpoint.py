"""Checkpoint: a directory that holds a learner, readable by pandas, DuckDB and anything else that reads Parquet.

    manifest.json                   what it is of, and size and SHA-256 of every other file; written last
    arrays.safetensors              dense parameters, their optimizer slots, the graph's statistics
    tables/{table}/{part}.parquet   rows: key uint64, embedding and state fixed-size lists of float, count, last_seen

A directory without a manifest is no checkpoint, so half of one is never read. Table names are percent-encoded.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from streamtrain.errors import CheckpointCorrupt, CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
ARRAYS = "arrays.safetensors"
_READ_ROWS = 1 << 16
_HASHED_BYTES = 1 << 22


class RowPart(NamedTuple):
    """Some rows of a table, column by column.

    Attributes:
        keys: uint64 [n].
        embeddings: float32 [n, dim].
        state: float32 [n, state_size], the optimizer's.
        counts: uint32 [n], occurrences learned from.
        last_seen: uint32 [n], event time in seconds.
    """

    keys: NDArray[np.uint64]
    embeddings: NDArray[np.float32]
    state: NDArray[np.float32]
    counts: NDArray[np.uint32]
    last_seen: NDArray[np.uint32]


class TablePart(NamedTuple):
    """One file of rows, for writing.

    Attributes:
        table: name of the table.
        part: name of the file within the table, such as that of the shard.
        dim: width of an embedding.
        state_size: floats of optimizer state per row.
        rows: the rows, in parts.
    """

    table: str
    part: str
    dim: int
    state_size: int
    rows: Iterable[RowPart]


def write_checkpoint(
    path: Path, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], tables: Iterable[TablePart]
) -> None:
    """Writes a checkpoint; one that is at `path` already is replaced once the new one is complete.

    Args:
        path: the directory.
        about: JSON-able facts that a reader checks or needs.
        arrays: named arrays.
        tables: the rows.

    Raises:
        CheckpointError: it cannot be written, or `path` is there and is no checkpoint.
    """
    path = path.resolve()
    if path.exists() and not (path / MANIFEST).is_file():
        raise CheckpointError(f"{path} exists and is no checkpoint; choose another path")
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        (unfinished / "tables").mkdir(parents=True)
        safetensors.numpy.save_file({name: np.ascontiguousarray(a) for name, a in arrays.items()}, unfinished / ARRAYS)
        rows: dict[str, int] = {}
        for part in tables:
            rows[part.table] = rows.get(part.table, 0) + _write_rows(unfinished, part)
        files = sorted(file for file in unfinished.rglob("*") if file.is_file())
        described = {str(f.relative_to(unfinished)): {"bytes": f.stat().st_size, "sha256": _sync(f)} for f in files}
        manifest = {"format": FORMAT, "about": dict(about), "rows": rows, "files": described}
        (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        _sync(unfinished / MANIFEST)
        _replace(unfinished, path)
    except (OSError, pa.ArrowException, safetensors.SafetensorError) as exc:
        raise CheckpointError(f"cannot write checkpoint {path}: {exc}") from exc
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


class CheckpointReader:
    """Reads a checkpoint.

    Args:
        path: the directory.

    Raises:
        CheckpointError: there is none, or it is of a newer format.
        CheckpointCorrupt: a file is missing or damaged; the message names it.

    Attributes:
        about: the facts that the writer gave.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            manifest = json.loads((path / MANIFEST).read_text())
        except FileNotFoundError as exc:
            old = _older(path.resolve()) if path.resolve().name else path
            hint = f"; its writer was stopped, and the one before it is at {old}" if (old / MANIFEST).is_file() else ""
            raise CheckpointError(f"there is no checkpoint at {path}{hint}") from exc
        except (OSError, ValueError) as exc:
            raise CheckpointCorrupt(f"{path / MANIFEST} cannot be read: {exc}") from exc
        if not isinstance(manifest, dict) or "format" not in manifest:
            raise CheckpointCorrupt(f"{path / MANIFEST} is no manifest of a checkpoint")
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {manifest['format']!r}; this version reads {FORMAT}")
        about, files = manifest.get("about"), manifest.get("files")
        if not isinstance(about, dict) or not isinstance(files, dict):
            raise CheckpointCorrupt(f"{path / MANIFEST} does not say what the checkpoint is of and what its files are")
        self.about: dict[str, Any] = about
        self._files: dict[str, Any] = files
        for name, expected in self._files.items():
            self._verify(name, expected)

    def _verify(self, name: str, expected: Any) -> None:
        file = self._path / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointCorrupt(f"{self._path / MANIFEST} names {name!r}, which is not within the checkpoint")
        if not file.is_file():
            raise CheckpointCorrupt(f"{file} is missing")
        if not isinstance(expected, dict):
            raise CheckpointCorrupt(f"{self._path / MANIFEST} has no size and checksum of {name!r}")
        if file.stat().st_size != expected.get("bytes") or _digest(file) != expected.get("sha256"):
            raise CheckpointCorrupt(f"{file} is damaged: its size or checksum is not that of the manifest")

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The named arrays."""
        try:
            return safetensors.numpy.load_file(self._path / ARRAYS)
        except (OSError, safetensors.SafetensorError) as exc:
            raise CheckpointCorrupt(f"{self._path / ARRAYS} cannot be read: {exc}") from exc

    def rows(self, table: str) -> Iterator[RowPart]:
        """The rows of a table, in parts, from all files of it."""
        folder = f"tables/{_folder(table)}/"
        for name in sorted(self._files):
            if name.startswith(folder):
                yield from _read_rows(self._path / name)


def _folder(table: str) -> str:
    """Dots are encoded too, for "." and ".." lead elsewhere."""
    return quote(table, safe="").replace(".", "%2E")


def _write_rows(root: Path, part: TablePart) -> int:
    file = root / "tables" / _folder(part.table) / f"{part.part}.parquet"
    file.parent.mkdir(exist_ok=True)
    columns = pa.schema(
        [
            ("key", pa.uint64()),
            ("embedding", pa.list_(pa.float32(), part.dim)),
            # Arrow cannot read lists of the fixed size 0 from Parquet.
            ("state", pa.list_(pa.float32(), part.state_size or -1)),
            ("count", pa.uint32()),
            ("last_seen", pa.uint32()),
        ]
    )
    written = 0
    with pq.ParquetWriter(file, columns, compression="zstd", use_dictionary=False) as writer:
        for rows in part.rows:
            table = pa.table(
                [
                    pa.array(rows.keys),
                    pa.FixedSizeListArray.from_arrays(pa.array(rows.embeddings.ravel()), part.dim),
                    pa.FixedSizeListArray.from_arrays(pa.array(rows.state.ravel()), part.state_size)
                    if part.state_size
                    else pa.array([[]] * len(rows.keys), pa.list_(pa.float32())),
                    pa.array(rows.counts),
                    pa.array(rows.last_seen),
                ],
                schema=columns,
            )
            writer.write_table(table)
            written += table.num_rows
    return written


def _read_rows(file: Path) -> Iterator[RowPart]:
    try:
        with pq.ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(_READ_ROWS):
                n = batch.num_rows
                yield RowPart(
                    batch.column("key").to_numpy(),
                    batch.column("embedding").flatten().to_numpy().reshape(n, -1),
                    batch.column("state").flatten().to_numpy().reshape(n, -1),
                    batch.column("count").to_numpy(),
                    batch.column("last_seen").to_numpy(),
                )
    except (OSError, pa.ArrowException, KeyError, ValueError) as exc:
        raise CheckpointCorrupt(f"{file} cannot be read: {exc}") from exc


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_HASHED_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _sync(file: Path) -> str:
    """Makes a file durable and returns its digest."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
    return _digest(file)


def _older(path: Path) -> Path:
    """Where the checkpoint that was at `path` is while a new one takes its place."""
    return path.with_name(f".{path.name}.old")


def _replace(new: Path, path: Path) -> None:
    """Puts a complete directory in the place of an older one, which is dropped only then."""
    old = _older(path)
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    try:
        new.rename(path)
    except OSError:
        if old.exists():
            old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)
