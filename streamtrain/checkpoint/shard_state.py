"""Shard state: writes shards to checkpoints and restores them; schemas/README.md describes the files."""

import math
import operator
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from streamtrain._core import Rows, Table, shards_of
from streamtrain.checkpoint.evolution import Evolution, TableEvolution
from streamtrain.errors import CheckpointCorrupt, CheckpointError, ConfigError
from streamtrain.model.bad_samples import Refusals
from streamtrain.model.spec import Spec, shard_slice, share_of_capacity
from streamtrain.ps.clock import Clock, Progress
from streamtrain.ps.hooks import ChangedRows
from streamtrain.ps.row_memory import RowMemory
from streamtrain.ps.shard import InitialState, Run, Shard, own_slots, rows_at_rest
from streamtrain.store.checkpoint.checkpoint import ShardFiles, commit, replacing, write_part
from streamtrain.store.checkpoint.epochs import CheckpointChain, epochs_at, open_chain
from streamtrain.store.checkpoint.parquet import GROUP_ROWS, RowPart, TablePart, Tombstones
from streamtrain.store.files import Directory

if TYPE_CHECKING:
    from streamtrain.model.model import Model

_TABLES, _BYTES = 4, 256 << 20  # that are loaded at a time, and that reading them may take
_STATE = "state/"
_ADMISSION = "admission/"
_PREDICTIONS = "predictions/"

Arrays = dict[str, NDArray[Any]]
RowsChange = RowPart | Tombstones
_Part = TypeVar("_Part")


def save_shards(url: str | Path, shards: Sequence[Shard], state: Mapping[str, NDArray[Any]]) -> None:
    """Writes a checkpoint of all shards of a learner.

    Args:
        url: directory of the checkpoint: a local path or any fsspec URL.
        shards: all shards, in order; no push may be applied meanwhile.
        state: further arrays of the learner, by name.

    Raises:
        CheckpointError: the checkpoint cannot be written.
    """
    with replacing(url) as directory:
        parts = [write_shard(directory, one, state if one.index == 0 else {}) for one in shards]
        commit(directory, describe_run(shards[0], aligned=True), parts)


def write_shard(
    directory: Directory, shard: Shard, state: Mapping[str, NDArray[Any]], *, without: Collection[str] = ()
) -> ShardFiles:
    """Writes all of a shard, which must not change meanwhile, with further arrays; `without` some tables."""
    arrays = shard_arrays(shard) | {_STATE + name: values for name, values in state.items()}
    tables = shard_tables(shard, lambda t: prefetch(map(to_row_part, rows_at_rest(shard.tables[t]))))
    tables = (one for one in tables if one.table not in without)
    return write_part(directory, shard.index, arrays, tables, about=describe_shard(shard))


class NewModel(NamedTuple):
    """A changed model that takes over what another one has learned.

    Attributes:
        evolution: what it keeps of that.
        dense: float32 [P], first values of its weights.
        statistics: float32 [S], those of its statistics.
    """

    evolution: Evolution
    dense: NDArray[np.float32]
    statistics: NDArray[np.float32]

    @classmethod
    def of(cls, evolution: Evolution, model: "Model", allow: Collection[str]) -> "NewModel":
        """Built from the model that an evolution leads to.

        Raises:
            ConfigError: what would be lost is not in `allow`.
        """
        evolution.check(allow)
        return cls(evolution, *model.initial_parameters())


def load_shards(
    url: str | Path,
    spec: Spec,
    shards: int,
    *,
    evolve: "Model | None" = None,
    allow: Collection[str] = (),
    memory: RowMemory | None = None,
) -> tuple[list[Shard], dict[str, NDArray[Any]]]:
    """Restores all shards, possibly from a different number of them, and the state given to `save_shards`.

    Args:
        url: directory of the checkpoint, or of a cluster's epochs, of which the newest is taken.
        spec: of the model.
        shards: number of shards.
        evolve: the model, if it may be another one than that of the checkpoint; None: it must be the same.
        allow: with `evolve`, what may be lost.
        memory: what rows may take; None: all that they need.

    Raises:
        CheckpointError: no checkpoint found, or it has another schema, graph or optimizer.
        CheckpointCorrupt: a file is damaged; the message names it.
        ConfigError: what would be lost is not in `allow`.
    """

    def load(chain: CheckpointChain) -> tuple[list[Shard], dict[str, NDArray[Any]]]:
        new_model = None
        if evolve is not None and (evolution := evolution_of(chain, spec)).is_needed:
            new_model = NewModel.of(evolution, evolve, allow)
        restored = [restore_shard(chain, i, shards, spec, new_model, memory=memory) for i in range(shards)]
        state = {name.removeprefix(_STATE): a for name, a in chain.arrays(0).items() if name.startswith(_STATE)}
        return restored, state

    if (epochs := epochs_at(url)) is None:
        return load(open_chain(url))
    return epochs.required(epochs.first_good(load, lambda one: one.suits(shards)))


def read_spec(url: str | Path) -> Spec:
    """What a checkpoint, or the newest of a cluster's epochs, is of; raises the errors of `load_shards`."""
    return written_spec(open_chain(url))


def describe_run(shard: Shard, *, aligned: bool) -> dict[str, Any]:
    """The metadata of a checkpoint.

    Args:
        shard: any of the shards.
        aligned: whether all shards are at the same clock; only then can the number of shards change on restore.
    """
    return {
        "run": shard.run.id,
        "start": _clock_to_json(shard.run.start),
        "topic": shard.run.topic,
        "spec": shard.spec.to_json(),
        "aligned": aligned,
    }


def describe_shard(shard: Shard) -> dict[str, Any]:
    """The metadata of one shard in a checkpoint."""
    clock, watermarks, refusals, _ = shard.progress()
    return {
        "clock": _clock_to_json(clock),
        "watermarks": {str(partition): at for partition, at in watermarks.items()},
        "refusals": {str(partition): list(of) for partition, of in refusals.items()},
        "samples": shard.samples,
        "watermark": shard.watermark,
    }


def shard_arrays(shard: Shard) -> Arrays:
    """All arrays of a shard except its rows."""
    arrays: Arrays = {
        "dense": shard.dense.pull(),
        "dense_slots": shard.dense.slots,
        "dense_steps": np.array([shard.dense.steps], np.float32),
        "statistics": shard.statistics.pull(),
    }
    for settings, table in zip(shard.spec.tables, shard.tables, strict=True):
        if len(sketch := table.admission()):
            arrays[_ADMISSION + settings["name"]] = sketch
    for partition, of_partition in shard.progress().predictions.items():
        arrays[f"{_PREDICTIONS}{partition}"] = np.frombuffer(of_partition, np.uint8)
    return arrays


def shard_tables(shard: Shard, rows: Callable[[int], Iterator[RowPart]]) -> Iterator[TablePart]:
    """All tables of a shard, for writing; `rows` returns the rows of a table by its index."""
    for t, (settings, table) in enumerate(zip(shard.spec.tables, shard.tables, strict=True)):
        yield TablePart(settings["name"], table.dim, table.state_size, rows(t))


def to_row_part(rows: Rows) -> RowPart:
    """Converts rows of the native core to those of the store."""
    return RowPart(rows.keys, rows.embeddings, rows.state, rows.counts, rows.last_seen)


def evolution_of(chain: CheckpointChain, spec: Spec) -> Evolution:
    """What a model with this spec keeps of a checkpoint.

    Raises:
        CheckpointCorrupt: the checkpoint's own spec is damaged.
    """
    is_counted = len(chain.epochs) == 1  # what deltas add and remove is not known before they are read
    return Evolution(written_spec(chain), spec, chain.first_row_counts if is_counted else {})


def restore_shard(
    chain: CheckpointChain,
    index: int,
    shards: int,
    spec: Spec | None = None,
    new_model: NewModel | None = None,
    *,
    without: Collection[str] = (),
    memory: RowMemory | None = None,
) -> Shard:
    """Restores one shard from a checkpoint, possibly of a different number of shards.

    Args:
        chain: the checkpoint.
        index: index of the shard.
        shards: number of shards.
        spec: supplies rates, admission, expiry, capacity and storage; None: those of the checkpoint.
        new_model: with `spec`, a changed model; None: the checkpoint must be of the same model.
        without: tables whose rows are not restored.
        memory: what its rows may take; None: all that they need.

    Raises:
        CheckpointError: the checkpoint is of another model; or its number of shards differs and their clocks, too.
        CheckpointCorrupt: the checkpoint is incomplete or damaged.
    """
    check_shard_count(chain, shards)
    try:
        sources = source_shards(index, shards, len(chain.shards))
        if new_model is None:
            spec = _resolve_spec(chain, spec)
            shard = _without_rows(chain, sources, spec, index, shards, memory=memory)
        else:
            spec = new_model.evolution.new
            shard = _evolved_without_rows(chain, new_model, index, shards, memory)
        with ThreadPoolExecutor(_at_a_time(shard.tables), "load") as pool:
            loading = []
            for settings, table in zip(spec.tables, shard.tables, strict=True):
                kept = None if new_model is None else new_model.evolution.tables.get(settings["name"])
                if settings["name"] not in without and (new_model is None or kept is not None):
                    loading.append(pool.submit(_load_table, table, settings, chain, (index, shards), kept=kept))
            try:
                for one in loading:
                    one.result()
            finally:
                pool.shutdown(cancel_futures=True)
        _resume(shard, chain, sources[0])
    except _DAMAGE as exc:
        chain.verify(sources)  # a damaged file may be read in part before that is known
        raise _mismatch(chain, exc) from exc
    return shard


def _at_a_time(tables: Sequence[Table]) -> int:
    """How many tables are loaded at a time: of each there are a row group as it is in the file and three of rows."""
    widest = max((4 * (table.dim + table.state_size) + 16 for table in tables), default=1)
    return max(1, min(_TABLES, _BYTES // (4 * GROUP_ROWS * widest)))


class Reading:
    """A reading of rows that is under way. Thread-safe.

    Args:
        rate: bytes per second that are read at most; 0: as many as can be.

    Attributes:
        rows: that have been read so far.
    """

    def __init__(self, rate: float = 0.0) -> None:
        self.rows = 0
        self._rate, self._bytes, self._began = rate, 0, time.monotonic()
        self._stopped = threading.Event()

    def stop(self) -> None:
        """It ends with CheckpointError."""
        self._stopped.set()

    def add(self, change: RowsChange) -> None:
        """These rows have been read; returns when more may be.

        Raises:
            CheckpointError: it was stopped.
        """
        columns = change if isinstance(change, RowPart) else (change.keys,)
        self.rows += len(change.keys)
        self._bytes += sum(column.nbytes for column in columns)
        due = self._began + self._bytes / self._rate if self._rate else 0.0
        if self._stopped.wait(max(0.0, due - time.monotonic())):
            raise CheckpointError("the reading of rows was stopped")


class ReadAhead(NamedTuple):
    """The rows of a shard in a checkpoint, read before the one from which it is to go on.

    Attributes:
        chain: the checkpoint.
        shard: with these rows.
        channels: by table, a change channel with what later checkpoints than the first have of them.
        since: where that one stands.
    """

    chain: CheckpointChain
    shard: Shard
    channels: list[int]
    since: dict[int, int]

    @classmethod
    def of(
        cls, chain: CheckpointChain, index: int, shards: int, reading: Reading, memory: RowMemory | None
    ) -> "ReadAhead":
        """Reads them; raises the errors of `restore_shard`."""
        sources = source_shards(index, shards, len(chain.shards))
        try:
            spec = written_spec(chain)
            shard = _without_rows(chain, sources, spec, index, shards, admission=False, memory=memory)
            for settings, table in zip(shard.spec.tables, shard.tables, strict=True):
                _load_table(table, settings, chain, (index, shards), reading=reading)
        except _DAMAGE as exc:
            chain.verify(sources)
            raise _mismatch(chain, exc) from exc
        return cls(chain, shard, [table.open_channel() for table in shard.tables], _clock_of(chain, sources[0]))

    def is_of(self, index: int, shards: int, held: Shard | None) -> bool:
        """Whether it is of a place of the process that holds a shard, or None."""
        return (self.shard.index, self.shard.shards) == (index, shards)

    def drop(self) -> None:
        """Lets go of these rows."""

    def advanced(self, chain: CheckpointChain) -> "ReadAhead | None":
        """The same with what a later checkpoint adds, which is verified; None: this one does not build on it.

        Raises:
            CheckpointCorrupt: it is damaged.
        """
        shard = self.shard
        if not (chain.builds_on(self.chain) and written_spec(chain) == shard.spec):
            return None
        sources = source_shards(shard.index, shard.shards, len(chain.shards))
        chain.verify(sources, known=self.chain)
        try:
            for settings, table, channel in zip(shard.spec.tables, shard.tables, self.channels, strict=True):
                changes = chain.changes(settings["name"], sources, self.chain)
                for keys in _load_rows(table, changes, (shard.index, shard.shards)):
                    table.mark_dirty(channel, keys)
        except _DAMAGE as exc:
            raise _mismatch(chain, exc) from exc
        return self._replace(chain=chain)

    def continued(self, chain: CheckpointChain) -> tuple[Shard, ChangedRows] | None:
        """The shard in a later checkpoint; otherwise as `advanced`."""
        if self.advanced(chain) is None:
            return None
        shard = self.shard
        sources = source_shards(shard.index, shard.shards, len(chain.shards))
        try:
            vectors = _read_vectors(chain, sources, shard.spec, shard.index, shard.shards)
            shard.dense.load(vectors.dense, vectors.slots, vectors.steps)
            shard.statistics.load(vectors.statistics, np.empty((0, len(vectors.statistics)), np.float32), 0.0)
            _merge_admission(shard, vectors.arrays, [settings["name"] for settings in shard.spec.tables])
            _resume(shard, chain, sources[0])
        except _DAMAGE as exc:
            raise _mismatch(chain, exc) from exc
        return shard, ChangedRows(self.since, self.channels)


class GainedAhead(NamedTuple):
    """The same, of a process that holds a shard: rows that it gains with its next place, in the tables that it has.

    Attributes:
        chain: the checkpoint, which has been written by the shards of before.
        held: the shard.
        place: its next index.
        shards: how many there are then.
        gained: by table, keys of what later checkpoints than the first have of these rows.
        since: where that one stands.
    """

    chain: CheckpointChain
    held: Shard
    place: int
    shards: int
    gained: list[NDArray[np.uint64]]
    since: dict[int, int]

    @classmethod
    def of(cls, chain: CheckpointChain, held: Shard, index: int, shards: int, reading: Reading) -> "GainedAhead":
        """Reads them; raises the errors of `restore_shard`."""
        sources = source_shards(index, shards, len(chain.shards))
        none = [np.empty(0, np.uint64) for _ in held.tables]
        ahead = cls(chain, held, index, shards, none, _clock_of(chain, sources[0]))
        held.sweep()
        try:
            ahead._load(reading=reading)
        except BaseException as exc:
            ahead.drop()
            if isinstance(exc, _DAMAGE):
                raise _mismatch(chain, exc) from exc
            raise
        return ahead

    def is_of(self, index: int, shards: int, held: Shard | None) -> bool:
        return held is self.held and (self.place, self.shards) == (index, shards)

    def drop(self) -> None:
        self.held.drop_foreign()

    def advanced(self, chain: CheckpointChain) -> "GainedAhead | None":
        if not (chain.builds_on(self.chain) and written_spec(chain) == self.held.spec):
            return None
        chain.verify(source_shards(self.place, self.shards, len(chain.shards)), known=self.chain)
        try:
            more = self._load(chain)
        except _DAMAGE as exc:
            raise _mismatch(chain, exc) from exc
        gained = [np.concatenate(both) for both in zip(self.gained, more, strict=True)]
        return self._replace(chain=chain, gained=gained)

    def continued(self, chain: CheckpointChain) -> tuple[Shard, ChangedRows] | None:
        """As of `ReadAhead`; None also if the shard has learned on since. Otherwise it is retired."""
        advanced = self.advanced(chain)
        if advanced is None:
            return None
        held, spec, index, shards = self.held, self.held.spec, self.place, self.shards
        sources = source_shards(index, shards, len(chain.shards))
        try:
            vectors = _read_vectors(chain, sources, spec, index, shards)
            initial = InitialState(_run_of(chain), spec, vectors.dense, vectors.statistics)
            shard = Shard(initial, index, shards, tables=held.tables, memory=held.memory)
            shard.dense.load(vectors.dense, vectors.slots, vectors.steps)
            _resume(shard, chain, sources[0])
        except _DAMAGE as exc:
            raise _mismatch(chain, exc) from exc
        if not held.retire_at(shard.clock(), "its process has another place in the map of shards"):
            return None
        for settings, table in zip(spec.tables, shard.tables, strict=True):
            table.set_slots(*own_slots(index, shards))
            table.set_capacity(share_of_capacity(settings, shards))
            table.reset_admission()
        _merge_admission(shard, vectors.arrays, [settings["name"] for settings in spec.tables])
        return shard, ChangedRows(self.since, (), held, advanced.gained)

    def _load(self, later: CheckpointChain | None = None, reading: Reading | None = None) -> list[NDArray[np.uint64]]:
        """Loads what is gained of the checkpoint, or of what a later one adds to it; by table, the keys."""
        sources = source_shards(self.place, self.shards, len(self.chain.shards))
        others = [source for source in sources if source != self.held.index]
        chain, known = (later, self.chain) if later else (self.chain, None)
        keys = []
        for settings, table in zip(self.held.spec.tables, self.held.tables, strict=True):
            changes = chain.changes(settings["name"], others, known)
            parts = _load_rows(table, changes, (self.place, self.shards), reading=reading)
            keys.append(np.concatenate([np.empty(0, np.uint64), *parts]))
        return keys


_DAMAGE = (KeyError, IndexError, ValueError, TypeError, AttributeError, OverflowError)


def _mismatch(chain: CheckpointChain, exc: Exception) -> CheckpointCorrupt:
    return CheckpointCorrupt(f"{chain.url} does not match the shard's contents or shapes: {type(exc).__name__}: {exc}")


def _resume(shard: Shard, chain: CheckpointChain, source: int) -> None:
    """Gives a shard the progress of one of a checkpoint."""
    about = chain.shards[source]
    watermarks, refusals = about.get("watermarks", {}), about.get("refusals", {})
    clock = _clock_of(chain, source)
    predictions = _predictions_of(chain.arrays(source))
    progress = Progress(clock, _watermarks_from_json(watermarks), _refusals_from_json(refusals), predictions)
    shard.resume(progress, _parse_uint(about["samples"], 64), _parse_uint(about["watermark"], 32))


def _clock_of(chain: CheckpointChain, shard: int) -> dict[int, int]:
    return _clock_from_json(chain.shards[shard]["clock"])


def check_shard_count(chain: CheckpointChain, shards: int) -> None:
    """Raises unless a checkpoint can be restored to `shards` shards.

    Raises:
        CheckpointError: it was written by a different number of shards, at different clocks.
    """
    written = len(chain.shards)
    if written != shards and not chain.is_aligned:
        raise CheckpointError(
            f"{chain.url} has {written} shards at different clocks and cannot be split into {shards}; "
            "use one that is aligned, or the same number of shards"
        )


def source_shards(index: int, shards: int, written: int) -> range:
    """The shards of a checkpoint that hold the rows and slices of shard `index` out of `shards`.

    A shard has the same share of the hash slots and of every vector, so its sources are adjacent and the same for both.
    """
    return range(index * written // shards, -(-(index + 1) * written // shards))


def written_spec(chain: CheckpointChain) -> Spec:
    """The spec of what was learned; raises CheckpointCorrupt if it is damaged."""
    try:
        return Spec.from_json(chain.about["spec"])
    except ConfigError as exc:
        raise CheckpointCorrupt(f"{chain.url}: {exc}") from exc


def _resolve_spec(chain: CheckpointChain, wanted: Spec | None) -> Spec:
    written = written_spec(chain)
    if wanted is not None and wanted.identity != written.identity:
        change = evolution_of(chain, wanted).summary()
        raise CheckpointError(
            f"{chain.url} is of another model, which differs in {', '.join(written.differing(wanted))}: {change}; "
            "to keep what was learned, load it with evolve=True, or run `streamtrain evolve`"
        )
    return wanted or written


def _run_of(chain: CheckpointChain) -> Run:
    if not isinstance(run_id := chain.about["run"], str):
        raise TypeError(f"invalid run id {run_id!r}")
    if not isinstance(topic := chain.about.get("topic", ""), str):
        raise TypeError(f"invalid topic id {topic!r}")
    return Run(run_id, _clock_from_json(chain.about["start"]), topic)


def _evolved_without_rows(
    chain: CheckpointChain, new_model: NewModel, index: int, shards: int, memory: RowMemory | None
) -> Shard:
    """Like `_without_rows`, for a changed model. Its vectors depend on all of the old ones, so all writers are read."""
    arrays = [chain.arrays(source) for source in range(len(chain.shards))]
    evolution, spec = new_model.evolution, new_model.evolution.new
    whole = {n: np.concatenate([one[n] for one in arrays], axis=-1) for n in ("dense", "dense_slots", "statistics")}
    born = spec.make_dense(new_model.dense)
    dense, slots = evolution.dense(whole["dense"], whole["dense_slots"], new_model.dense, born.slots)
    statistics = evolution.statistics(whole["statistics"], new_model.statistics)
    mine = shard_slice(spec.dense_size, index, shards)
    my_statistics = statistics[shard_slice(spec.statistics_size, index, shards)]
    shard = Shard(InitialState(_run_of(chain), spec, dense[mine], my_statistics), index, shards, memory=memory)
    steps = float(arrays[0]["dense_steps"][0]) if evolution.keeps_dense_steps else 0.0
    shard.dense.load(dense[mine], np.ascontiguousarray(slots[:, mine]), steps)
    sources = source_shards(index, shards, len(chain.shards))
    _merge_admission(shard, [arrays[source] for source in sources], evolution.tables)
    return shard


def _merge_admission(shard: Shard, arrays: Sequence[Arrays], tables: Collection[str]) -> None:
    """Admission counts cannot be split by shard: those of all sources are merged, so estimates are slightly higher."""
    for settings, table in zip(shard.spec.tables, shard.tables, strict=True):
        for one in arrays if settings.get("min_count", 1) > 1 and settings["name"] in tables else ():
            if (counted := one.get(_ADMISSION + settings["name"])) is not None:
                table.merge_admission(counted)


class _Vectors(NamedTuple):
    """What a shard has besides rows.

    Attributes:
        dense, slots, steps: of its weights.
        statistics: its slice of them.
        arrays: of all its sources.
    """

    dense: NDArray[np.float32]
    slots: NDArray[np.float32]
    steps: float
    statistics: NDArray[np.float32]
    arrays: list[Arrays]


def _without_rows(
    chain: CheckpointChain,
    sources: Sequence[int],
    spec: Spec,
    index: int,
    shards: int,
    *,
    admission: bool = True,
    memory: RowMemory | None = None,
) -> Shard:
    """A shard with its slices and admission counts, without rows."""
    vectors = _read_vectors(chain, sources, spec, index, shards)
    initial = InitialState(_run_of(chain), spec, vectors.dense, vectors.statistics)
    shard = Shard(initial, index, shards, memory=memory)
    shard.dense.load(vectors.dense, vectors.slots, vectors.steps)
    if admission:
        _merge_admission(shard, vectors.arrays, [settings["name"] for settings in spec.tables])
    return shard


def _read_vectors(chain: CheckpointChain, sources: Sequence[int], spec: Spec, index: int, shards: int) -> _Vectors:
    """Those of a shard: the slices of all writers, in order, make up the whole vector."""
    arrays = [chain.arrays(source) for source in sources]

    def cut(name: str, size: int) -> NDArray[np.float32]:
        together = np.concatenate([one[name] for one in arrays], axis=-1)
        first, mine = shard_slice(size, sources[0], len(chain.shards)).start, shard_slice(size, index, shards)
        return np.ascontiguousarray(together[..., mine.start - first : mine.stop - first])

    dense, slots = cut("dense", spec.dense_size), cut("dense_slots", spec.dense_size)
    return _Vectors(dense, slots, float(arrays[0]["dense_steps"][0]), cut("statistics", spec.statistics_size), arrays)


def _load_table(
    table: Table,
    settings: Mapping[str, Any],
    chain: CheckpointChain,
    place: tuple[int, int],
    *,
    kept: TableEvolution | None = None,
    reading: Reading | None = None,
) -> None:
    """Loads the rows of an empty table that belong to a place, an index and the number of shards.

    The newest row of each key comes first, so that each is written once. Not where there may be too many, of which some
    are evicted: an older one of the same key would then be taken for new.
    """
    name, (index, shards) = settings["name"], place
    sources = source_shards(index, shards, len(chain.shards))
    table.expect(chain.first_row_counts.get(name, 0) // shards)
    if settings.get("capacity"):
        changes, newest_first = chain.changes(name, sources), False
    else:
        changes, newest_first = chain.rows(name, sources), True
    for _ in _load_rows(table, changes, place, kept=kept, newest_first=newest_first, reading=reading):
        pass


def _load_rows(
    table: Table,
    changes: Iterator[RowsChange],
    place: tuple[int, int],
    *,
    kept: TableEvolution | None = None,
    newest_first: bool = False,
    reading: Reading | None = None,
) -> Iterator[NDArray[np.uint64]]:
    """Loads rows, part by part, and gives the keys, also of those that are gone."""
    for change in prefetch(_owned(changes, *place)):
        if isinstance(change, Tombstones):
            table.remove(change.keys)
        else:
            rows = change
            if kept is not None:
                born, _ = table.pull_state(change.keys)
                embeddings, state = kept.convert(change.embeddings, change.state, born)
                rows = change._replace(embeddings=embeddings, state=state)
            table.load(*rows, cold=newest_first, only_new=newest_first)
        if reading is not None:
            reading.add(change)
        yield change.keys


def _owned(changes: Iterator[RowsChange], index: int, shards: int) -> Iterator[RowsChange]:
    for change in changes:
        owned = np.flatnonzero(shards_of(change.keys, shards) == index)
        if len(owned) == len(change.keys):
            yield change
        else:
            yield type(change)._make(column.take(owned, axis=0) for column in change)


def prefetch(parts: Iterator[_Part]) -> Iterator[_Part]:
    """Reads the next part in another thread while one is in use."""
    with ThreadPoolExecutor(1, "rows") as pool:
        coming = pool.submit(next, parts, None)
        while (part := coming.result()) is not None:
            coming = pool.submit(next, parts, None)
            yield part


def _clock_to_json(clock: Clock) -> dict[str, int]:
    """With strings as keys, as JSON requires."""
    return {str(partition): at for partition, at in clock.items()}


def _clock_from_json(given: Mapping[str, int]) -> dict[int, int]:
    return {_parse_uint(int(partition), 32): _parse_uint(at, 64) for partition, at in given.items()}


def _watermarks_from_json(given: Mapping[str, float]) -> dict[int, float]:
    found = {_parse_uint(int(partition), 32): float(at) for partition, at in given.items()}
    if not all(map(math.isfinite, found.values())):
        raise ValueError(f"watermarks are {found}")
    return found


def _refusals_from_json(given: Mapping[str, Sequence[float]]) -> dict[int, Refusals]:
    found = {_parse_uint(int(partition), 32): Refusals(*map(float, of)) for partition, of in given.items()}
    if not all(math.isfinite(seen) and 0 <= refused <= seen for seen, refused in found.values()):
        raise ValueError(f"refusals are {found}")
    return found


def _predictions_of(arrays: Arrays) -> dict[int, bytes]:
    named = {n.removeprefix(_PREDICTIONS): a for n, a in arrays.items() if n.startswith(_PREDICTIONS)}
    return {_parse_uint(int(partition), 32): a.astype(np.uint8).tobytes() for partition, a in named.items()}


def _parse_uint(given: int, bits: int) -> int:
    """Validates an unsigned integer of `bits` bits."""
    if not 0 <= (number := operator.index(given)) < 1 << bits:
        raise ValueError(f"{number} is not a {bits}-bit number")
    return number
