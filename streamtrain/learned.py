"""What has been learned, from shards into a checkpoint and back; schemas/README.md describes the files."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtrain._core import Table, shards_of
from streamtrain.errors import CheckpointError
from streamtrain.model.model import Model
from streamtrain.ps.shard import Shard
from streamtrain.store.checkpoint import CheckpointReader, RowPart, TablePart, write_checkpoint

_SCANNED_ROWS = 1 << 16
_STATISTICS = "statistics/"


def write_learned(
    path: Path,
    model: Model,
    shards: Sequence[Shard],
    *,
    statistics: Mapping[str, NDArray[Any]],
    samples: int,
    watermark: float,
) -> None:
    """Writes everything that a learner needs to go on.

    Args:
        path: directory of the checkpoint.
        model: what was learned.
        shards: all shards, in order; nothing may be pushed meanwhile.
        statistics: the graph's non-trainable weights by path.
        samples: number of samples learned from.
        watermark: latest event time, seconds since the epoch.

    Raises:
        CheckpointError: it cannot be written.
    """
    arrays: dict[str, NDArray[Any]] = {
        "dense": np.concatenate([shard.dense.pull() for shard in shards]),
        "dense_slots": np.concatenate([shard.dense.slots for shard in shards], axis=1),
    }
    arrays |= {_STATISTICS + name: values for name, values in statistics.items()}
    parts = []
    for shard in shards:
        for spec, table in zip(shard.specs, shard.tables, strict=True):
            parts.append(TablePart(spec.name, f"shard-{shard.index}", spec.dim, table.state_size, _scan(table)))
            if spec.min_count > 1:
                arrays[_admission(spec.name, shard.index)] = table.admission()
    about = {
        **_identity(model),
        "samples": samples,
        "watermark": watermark,
        "shards": len(shards),
        "dense_steps": shards[0].dense.steps,
    }
    write_checkpoint(path, about, arrays, parts)


def read_learned(path: Path, model: Model, shards: Sequence[Shard]) -> tuple[dict[str, NDArray[Any]], int, float]:
    """Fills new shards from a checkpoint, whose number of shards may be another.

    Returns:
        statistics, samples and watermark as `write_learned` was given them.

    Raises:
        CheckpointError: there is none, or it is of another schema, graph or optimizer.
        CheckpointCorrupt: a file of it is damaged; the message names it.
    """
    checkpoint = CheckpointReader(path)
    about = checkpoint.about
    for what, mine in _identity(model).items():
        if about.get(what) != mine:
            raise CheckpointError(f"{path} has {what} {about.get(what)!r}, but the model has {mine!r}")
    arrays = checkpoint.arrays()
    for shard, part in zip(shards, model.dense.slices(len(shards)), strict=True):
        shard.dense.load(
            arrays["dense"][part], np.ascontiguousarray(arrays["dense_slots"][:, part]), about["dense_steps"]
        )
        for spec, table in zip(shard.specs, shard.tables, strict=True):
            for rows in checkpoint.rows(spec.name):
                owned = shards_of(rows.keys, len(shards)) == shard.index
                table.load(*(column[owned] for column in rows))
            for writer in _writers(shard, about["shards"]) if spec.min_count > 1 else ():
                if (counted := arrays.get(_admission(spec.name, writer))) is not None:
                    table.merge_admission(counted)
    statistics = {name.removeprefix(_STATISTICS): a for name, a in arrays.items() if name.startswith(_STATISTICS)}
    return statistics, about["samples"], about["watermark"]


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


def _admission(table: str, shard: int) -> str:
    """Name of the array that holds how often the ids without a row have been seen."""
    return f"admission/{shard}/{table}"


def _writers(shard: Shard, written: int) -> Iterable[int]:
    """The writer's shards whose counts of ids without a row a shard takes over.

    Counts cannot be told apart by shard, so another number of shards takes all: estimates then are a little higher.
    """
    return [shard.index] if shard.shards == written else range(written)


def _scan(table: Table) -> Iterator[RowPart]:
    cursor: int | None = 0
    while cursor is not None:
        cursor, rows = table.scan(cursor, _SCANNED_ROWS)
        yield RowPart(rows.keys, rows.embeddings, rows.state, rows.counts, rows.last_seen)
