"""Evolving a stopped cluster: its newest checkpoint becomes one of a changed model, from which shards start."""

import time
import uuid
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from streamtrain.checkpoint.evolution import Evolution
from streamtrain.checkpoint.restore import next_shards, open_epochs, refuse_running
from streamtrain.checkpoint.shard_state import (
    NewModel,
    describe_run,
    evolution_of,
    restore_shard,
    write_shard,
    written_spec,
)
from streamtrain.errors import CheckpointError
from streamtrain.model.spec import Spec
from streamtrain.ps.row_memory import RowMemory
from streamtrain.store.checkpoint.checkpoint import commit
from streamtrain.store.checkpoint.epochs import CheckpointChain, Epochs, open_chain

if TYPE_CHECKING:
    from streamtrain.model.model import Model
    from streamtrain.settings.groups import Settings


class Evolved(NamedTuple):
    """A checkpoint of a changed model.

    Attributes:
        url: where it is.
        epoch: its number.
        rows: number of rows by table.
        seconds: how long it took.
    """

    url: str
    epoch: int
    rows: dict[str, int]
    seconds: float


def plan(settings: "Settings", model: "Model", source: str | None) -> Evolution:
    """What a model keeps of a checkpoint; nothing is written.

    Args:
        settings: of the cluster.
        model: the changed model.
        source: directory of a checkpoint; None: the newest intact epoch at checkpoint.url.

    Raises:
        ConfigError: there is no place to look for it.
        CheckpointError: there is no checkpoint.
        CheckpointCorrupt: it is damaged.
    """
    return _evolution(_open(settings, source), model)


def evolve(
    settings: "Settings",
    tf_config: str | None,
    model: "Model",
    *,
    source: str | None = None,
    to: str | None = None,
    allow: Collection[str] = (),
) -> Evolved:
    """Writes what a changed model keeps of a checkpoint as a new one.

    Args:
        settings: of the cluster.
        tf_config: of the environment, if there is one.
        model: the changed model.
        source: directory of a checkpoint; None: the newest intact epoch at checkpoint.url.
        to: another place for checkpoints, where a cluster of its own begins; None: checkpoint.url, whose shards must be
            stopped.
        allow: what may be lost; see `streamtrain.checkpoint.evolution.ALLOWABLE`.

    Raises:
        ConfigError: there is no place for checkpoints, or what would be lost is not allowed.
        ShardError: a shard of the cluster runs.
        CheckpointError: there is no checkpoint, or `to` has one, or nothing can be written.
        CheckpointCorrupt: the checkpoint is damaged.
    """
    began = time.monotonic()
    chain, epochs = _open(settings, source), open_epochs(settings) if to is None else Epochs(to)
    if to is None:
        refuse_running(settings, next_shards(settings, tf_config))
    elif epochs.numbers():
        raise CheckpointError(f"{epochs.url} already has checkpoints; choose another place")
    evolution = _evolution(chain, model)
    new_model = NewModel.of(evolution, model, allow) if evolution.is_needed else None
    chain.verify()
    run = None if to is None else uuid.uuid4().hex
    memory = RowMemory.from_settings(settings.ps)
    try:
        return _write(chain, evolution, new_model, epochs, memory, run=run, began=began)
    finally:
        if memory is not None:
            memory.close()


def _evolution(chain: CheckpointChain, model: "Model") -> Evolution:
    return evolution_of(chain, Spec.of(model).keeping_rates(written_spec(chain)))


def _open(settings: "Settings", source: str | None) -> CheckpointChain:
    return open_chain(source) if source is not None else open_epochs(settings).newest()


def _write(
    chain: CheckpointChain,
    evolution: Evolution,
    new_model: NewModel | None,
    epochs: Epochs,
    memory: RowMemory | None,
    *,
    run: str | None,
    began: float,
) -> Evolved:
    """Shard by shard, so that no more than one of them is in memory. Rows that stay as they are are not even read."""
    epoch, parts, about = epochs.next(), [], {}
    directory, shards, counts = epochs.directory(epoch), len(chain.shards), chain.first_row_counts
    tables = evolution.tables if len(chain.epochs) == 1 else {}
    same = [name for name, table in tables.items() if table.keeps_rows]
    for index in range(shards):
        shard = restore_shard(chain, index, shards, evolution.new, new_model, without=same, memory=memory)
        if run is not None:  # what another run has predicted of a block of samples does not belong to its figures
            shard.resume(shard.progress()._replace(predictions={}), shard.samples, shard.watermark)
        part = write_shard(directory, shard, {}, without=same)
        for table in same:
            part["files"] |= chain.copy_rows(table, index, directory)
            part["rows"][table] = counts.get(table, 0) if index == 0 else 0  # the manifest has their sum alone
        parts.append(part)
        about = describe_run(shard, aligned=chain.is_aligned)
        del shard
    commit(directory, {**about, "run": run or about["run"], "time": time.time()}, parts)
    rows = {name: sum(part["rows"].get(name, 0) for part in parts) for part in parts for name in part["rows"]}
    return Evolved(epochs.place(epoch), epoch, rows, time.monotonic() - began)
