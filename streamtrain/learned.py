"""What has been learned, from shards into checkpoints and back; schemas/README.md describes the files."""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtrain._core import Rows, Table, shards_of
from streamtrain.errors import CheckpointCorrupt, CheckpointError, ConfigError
from streamtrain.model.spec import Spec, slice_of
from streamtrain.ps.clock import Clock, Stand
from streamtrain.ps.shard import Initial, Run, Shard
from streamtrain.store.chain import Chain
from streamtrain.store.checkpoint import commit, write_part
from streamtrain.store.epochs import open_chain
from streamtrain.store.replacement import replacing
from streamtrain.store.rows import RowPart, TablePart, Tombstones

_SCANNED_ROWS = 1 << 16
_STATE = "state/"
_ADMISSION = "admission/"

Arrays = dict[str, NDArray[Any]]
Change = RowPart | Tombstones


def write_learned(url: str | Path, shards: Sequence[Shard], state: Mapping[str, NDArray[Any]]) -> None:
    """Writes everything that a learner needs to go on.

    Args:
        url: directory of the checkpoint: a local path or any URL of fsspec.
        shards: all shards, in order; nothing may be pushed meanwhile.
        state: what a learner holds besides, by name.

    Raises:
        CheckpointError: it cannot be written.
    """
    with replacing(url) as directory:
        parts = []
        for shard in shards:
            arrays = arrays_of(shard)
            if shard.index == 0:
                arrays |= {_STATE + name: values for name, values in state.items()}
            tables = tables_of(shard, lambda t, shard=shard: _scan(shard.tables[t]))  # type: ignore[misc]
            parts.append(write_part(directory, shard.index, arrays, tables, about=about_shard(shard)))
        commit(directory, about_run(shards[0], aligned=True), parts)


def read_learned(url: str | Path, spec: Spec, shards: int) -> tuple[list[Shard], dict[str, NDArray[Any]]]:
    """All shards as of a checkpoint, whose number of shards may be another, and the state as of `write_learned`.

    Raises:
        CheckpointError: there is none, or it is of another schema, graph or optimizer.
        CheckpointCorrupt: a file of it is damaged; the message names it.
    """
    chain = open_chain(url)
    chain.verify()
    restored = [restore_shard(chain, i, shards, spec) for i in range(shards)]
    state = {name.removeprefix(_STATE): a for name, a in chain.arrays(0).items() if name.startswith(_STATE)}
    return restored, state


def about_run(shard: Shard, *, aligned: bool) -> dict[str, Any]:
    """What a checkpoint says of the whole.

    Args:
        shard: any one.
        aligned: whether all shards are at the same clock: only then can it be read into another number of shards.
    """
    return {
        "run": shard.run.id,
        "start": _clock_to_json(shard.run.start),
        "spec": shard.spec.to_json(),
        "aligned": aligned,
    }


def about_shard(shard: Shard) -> dict[str, Any]:
    """What a checkpoint says of one shard."""
    clock, watermarks = shard.stand()
    return {
        "clock": _clock_to_json(clock),
        "watermarks": {str(partition): at for partition, at in watermarks.items()},
        "samples": shard.samples,
        "watermark": shard.watermark,
    }


def arrays_of(shard: Shard) -> Arrays:
    """All of a shard but its rows."""
    arrays: Arrays = {
        "dense": shard.dense.pull(),
        "dense_slots": shard.dense.slots,
        "dense_steps": np.array([shard.dense.steps], np.float32),
        "statistics": shard.statistics.pull(),
    }
    for settings, table in zip(shard.spec.tables, shard.tables, strict=True):
        if len(sketch := table.admission()):
            arrays[_ADMISSION + settings["name"]] = sketch
    return arrays


def tables_of(shard: Shard, rows: Callable[[int], Iterator[RowPart]]) -> Iterator[TablePart]:
    """All tables of a shard, for writing; `rows` gives those of the table of an index."""
    for t, (settings, table) in enumerate(zip(shard.spec.tables, shard.tables, strict=True)):
        yield TablePart(settings["name"], table.dim, table.state_size, rows(t))


def part_of(rows: Rows) -> RowPart:
    """Rows of the core as those of the store."""
    return RowPart(rows.keys, rows.embeddings, rows.state, rows.counts, rows.last_seen)


def restore_shard(chain: Chain, index: int, shards: int, spec: Spec | None = None) -> Shard:
    """One of so many shards as of a checkpoint, whose number of shards may be another.

    Args:
        chain: the checkpoint.
        index: of the shard.
        shards: how many there are.
        spec: whose rates, admission, expiry, capacity and storage count; None: as when it was written.

    Raises:
        CheckpointError: it is of another model, or is to be split anew although its shards are at different clocks.
        CheckpointCorrupt: it lacks something or is damaged.
    """
    check_count(chain, shards)
    try:
        spec = _checked(chain, spec)
        sources = sources_of(index, shards, len(chain.shards))
        shard = _without_rows(chain, sources, spec, index, shards)
        for settings, table in zip(spec.tables, shard.tables, strict=True):
            _load_rows(table, chain.changes(settings["name"], sources), index, shards)
        told = chain.shards[sources[0]]
        stand = Stand(_clock_of_json(told["clock"]), _watermarks_of_json(told.get("watermarks", {})))
        shard.resume(stand, _whole(told["samples"], 64), _whole(told["watermark"], 32))
    except (KeyError, IndexError, ValueError, TypeError, AttributeError, OverflowError) as exc:
        raise CheckpointCorrupt(
            f"{chain.url} lacks something that a shard has, or has it in another shape: {type(exc).__name__}: {exc}"
        ) from exc
    return shard


def check_count(chain: Chain, shards: int) -> None:
    """Refuses what cannot be restored to so many shards.

    Raises:
        CheckpointError: they are not as many as wrote it, and those were at different clocks.
    """
    written = len(chain.shards)
    if written != shards and not chain.about.get("aligned"):
        raise CheckpointError(
            f"{chain.url} has {written} shards at different clocks and cannot be split into {shards}; "
            "use one that is aligned, or the same number of shards"
        )


def sources_of(index: int, shards: int, written: int) -> range:
    """Which of the shards that wrote a checkpoint hold what is to be on a shard, when there are `shards` of them.

    A shard has the same share of the hash slots and of every vector, so these are neighbours, and the same for both.
    """
    return range(index * written // shards, -(-(index + 1) * written // shards))


def _checked(chain: Chain, wanted: Spec | None) -> Spec:
    try:
        written = Spec.from_json(chain.about["spec"])
    except ConfigError as exc:
        raise CheckpointCorrupt(f"{chain.url}: {exc}") from exc
    theirs, mine = written.meaning(), (wanted or written).meaning()
    for what, value in mine.items():
        if theirs[what] != value:
            raise CheckpointError(f"{chain.url} has {what} {theirs[what]!r}, but the model has {value!r}")
    return wanted or written


def _without_rows(chain: Chain, sources: Sequence[int], spec: Spec, index: int, shards: int) -> Shard:
    """A shard with its slices and admission counts.

    Slices are by position: those of all writers in their order are the whole. Counts of ids without a row cannot be
    told apart by shard, so all of the sources are taken: estimates then are a little higher.
    """
    arrays = [chain.arrays(source) for source in sources]

    def cut(name: str, size: int) -> NDArray[np.float32]:
        together = np.concatenate([one[name] for one in arrays], axis=-1)
        first, mine = slice_of(size, sources[0], len(chain.shards)).start, slice_of(size, index, shards)
        return np.ascontiguousarray(together[..., mine.start - first : mine.stop - first])

    if not isinstance(run_id := chain.about["run"], str):
        raise TypeError(f"its run is {run_id!r}")
    run = Run(run_id, _clock_of_json(chain.about["start"]))
    dense, statistics = cut("dense", spec.dense_size), cut("statistics", spec.statistics_size)
    shard = Shard(Initial(run, spec, dense, statistics), index, shards)
    shard.dense.load(dense, cut("dense_slots", spec.dense_size), float(arrays[0]["dense_steps"][0]))
    for settings, table in zip(spec.tables, shard.tables, strict=True):
        for one in arrays if settings.get("min_count", 1) > 1 else ():
            if (counted := one.get(_ADMISSION + settings["name"])) is not None:
                table.merge_admission(counted)
    return shard


def _load_rows(table: Table, changes: Iterator[Change], index: int, shards: int) -> None:
    for change in _ahead(_owned(changes, index, shards)):
        if isinstance(change, Tombstones):
            table.remove(change.keys)
        else:
            table.load(*change)


def _owned(changes: Iterator[Change], index: int, shards: int) -> Iterator[Change]:
    for change in changes:
        if isinstance(change, RowPart):
            owned = np.flatnonzero(shards_of(change.keys, shards) == index)
            if len(owned) < len(change.keys):
                yield RowPart._make(column.take(owned, axis=0) for column in change)
                continue
        yield change


def _ahead(changes: Iterator[Change]) -> Iterator[Change]:
    """The same; the next one is read in another thread while one is in use."""
    with ThreadPoolExecutor(1, "restore") as pool:
        coming = pool.submit(next, changes, None)
        while (change := coming.result()) is not None:
            coming = pool.submit(next, changes, None)
            yield change


def _scan(table: Table) -> Iterator[RowPart]:
    cursor: int | None = 0
    while cursor is not None:
        cursor, rows = table.scan(cursor, _SCANNED_ROWS)
        yield part_of(rows)


def _clock_to_json(clock: Clock) -> dict[str, int]:
    """JSON has only texts for keys."""
    return {str(partition): at for partition, at in clock.items()}


def _clock_of_json(given: Mapping[str, int]) -> dict[int, int]:
    return {_whole(int(partition), 32): _whole(at, 64) for partition, at in given.items()}


def _watermarks_of_json(given: Mapping[str, float]) -> dict[int, float]:
    found = {_whole(int(partition), 32): float(at) for partition, at in given.items()}
    if not all(map(math.isfinite, found.values())):
        raise ValueError(f"watermarks are {found}")
    return found


def _whole(given: int, bits: int) -> int:
    """A number that the wire has so many bits for."""
    if not 0 <= (number := operator.index(given)) < 1 << bits:
        raise ValueError(f"{number} is no number of {bits} bits")
    return number
