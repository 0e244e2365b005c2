"""What has been learned, from shards into a checkpoint and back; schemas/README.md describes the files."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtrain._core import Table, shards_of
from streamtrain.errors import CheckpointCorrupt, CheckpointError
from streamtrain.model.model import Model
from streamtrain.ps.shard import Shard
from streamtrain.store.checkpoint import CheckpointReader, Part, commit, write_part
from streamtrain.store.files import Directory
from streamtrain.store.replacement import replacing
from streamtrain.store.rows import RowPart, TablePart

_SCANNED_ROWS = 1 << 16
_STATISTICS = "statistics/"
_ADMISSION = "admission/"

Arrays = dict[str, NDArray[Any]]


def write_learned(
    url: str | Path,
    model: Model,
    shards: Sequence[Shard],
    *,
    statistics: Mapping[str, NDArray[Any]],
    samples: int,
    watermark: float,
) -> None:
    """Writes everything that a learner needs to go on.

    Args:
        url: directory of the checkpoint: a local path or any URL of fsspec.
        model: what was learned.
        shards: all shards, in order; nothing may be pushed meanwhile.
        statistics: the graph's non-trainable weights by path.
        samples: number of samples learned from.
        watermark: latest event time, seconds since the epoch.

    Raises:
        CheckpointError: it cannot be written.
    """
    about = {**_identity(model), "samples": samples, "watermark": watermark}
    with replacing(url) as directory:
        parts = [_write_shard(directory, shard, {} if shard.index else statistics) for shard in shards]
        commit(directory, about, parts)


def read_learned(url: str | Path, model: Model, shards: Sequence[Shard]) -> tuple[Arrays, int, float]:
    """Fills new shards from a checkpoint, whose number of shards may be another.

    Returns:
        statistics, samples and watermark as `write_learned` was given them.

    Raises:
        CheckpointError: there is none, or it is of another schema, graph or optimizer.
        CheckpointCorrupt: a file of it is damaged; the message names it.
    """
    checkpoint = CheckpointReader(url)
    about = checkpoint.about
    for what, mine in _identity(model).items():
        if about.get(what) != mine:
            raise CheckpointError(f"{url} has {what} {about.get(what)!r}, but the model has {mine!r}")
    checkpoint.verify()
    arrays = [checkpoint.arrays(i) for i in range(len(checkpoint.shards))]
    try:
        _load_dense(checkpoint, arrays, model, shards)
        _load_admission(arrays, shards)
        for t, spec in enumerate(model.schema.tables):
            for rows in checkpoint.rows(spec.name):
                _load_rows([shard.tables[t] for shard in shards], rows)
        statistics = {
            name.removeprefix(_STATISTICS): a for name, a in arrays[0].items() if name.startswith(_STATISTICS)
        }
        return statistics, about["samples"], about["watermark"]
    except (KeyError, ValueError, TypeError) as exc:
        raise CheckpointCorrupt(f"{url} lacks something that a learner has, or has it in another shape: {exc}") from exc


def _identity(model: Model) -> dict[str, Any]:
    """What a checkpoint and a model must have in common."""
    tables = model.schema.tables
    return {
        "schema": model.schema.fingerprint(),
        "seed": model.seed,
        "dense": [list(shape) for shape in model.dense.shapes],
        "dense_optimizer": model.dense_optimizer.kind,
        "tables": {one.name: [one.dim, (one.optimizer or model.embedding_optimizer).kind] for one in tables},
    }


def _write_shard(directory: Directory, shard: Shard, statistics: Mapping[str, NDArray[Any]]) -> Part:
    arrays: Arrays = {"dense": shard.dense.pull(), "dense_slots": shard.dense.slots}
    arrays |= {_STATISTICS + name: values for name, values in statistics.items()}
    tables = list(zip(shard.specs, shard.tables, strict=True))
    arrays |= {_ADMISSION + spec.name: table.admission() for spec, table in tables if spec.min_count > 1}
    rows = [TablePart(spec.name, spec.dim, table.state_size, _scan(table)) for spec, table in tables]
    return write_part(directory, shard.index, arrays, rows, about={"dense_steps": shard.dense.steps})


def _load_dense(checkpoint: CheckpointReader, arrays: Sequence[Arrays], model: Model, shards: Sequence[Shard]) -> None:
    """Slices are by position; the parts in their order are the whole."""
    values = np.concatenate([one["dense"] for one in arrays])
    slots = np.concatenate([one["dense_slots"] for one in arrays], axis=1)
    steps = max(about["dense_steps"] for about in checkpoint.shards)
    for shard, part in zip(shards, model.dense.slices(len(shards)), strict=True):
        shard.dense.load(values[part], np.ascontiguousarray(slots[:, part]), steps)


def _load_rows(tables: Sequence[Table], rows: RowPart) -> None:
    """Gives each shard's table the rows it owns. Parts are of one shard's file, so mostly all go to one table."""
    owners = shards_of(rows.keys, len(tables))
    for owner in np.flatnonzero(np.bincount(owners)).tolist():
        owned = owners == owner
        tables[owner].load(*(rows if owned.all() else (column[owned] for column in rows)))


def _load_admission(arrays: Sequence[Arrays], shards: Sequence[Shard]) -> None:
    """Loads the counts of ids without a row.

    They cannot be told apart by shard, so another number of shards takes all: estimates then are a little higher.
    """
    for shard in shards:
        written: Iterable[Arrays] = [arrays[shard.index]] if shard.shards == len(arrays) else arrays
        for spec, table in zip(shard.specs, shard.tables, strict=True):
            for one in written if spec.min_count > 1 else ():
                if (counted := one.get(_ADMISSION + spec.name)) is not None:
                    table.merge_admission(counted)


def _scan(table: Table) -> Iterator[RowPart]:
    cursor: int | None = 0
    while cursor is not None:
        cursor, rows = table.scan(cursor, _SCANNED_ROWS)
        yield RowPart(rows.keys, rows.embeddings, rows.state, rows.counts, rows.last_seen)
