"""Keeper: writes one shard into checkpoints while it is trained, and brings it back."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from streamtrain._core import Table
from streamtrain.errors import CheckpointError
from streamtrain.learned import about_shard, arrays_of, check_count, part_of, restore_shard, sources_of, tables_of
from streamtrain.ps.node import NO_EPOCH
from streamtrain.ps.shard import Shard
from streamtrain.store.chain import Chain
from streamtrain.store.checkpoint import write_part
from streamtrain.store.epochs import Epochs
from streamtrain.store.rows import RowPart

logger = logging.getLogger(__name__)

# What the core gives in one turn: more would have it grow arrays, in new memory, while pushes wait for the table.
_READ_ROWS = 1 << 12


class CheckpointKeeper:
    """See `Keeper` of ps/node.py; of one shard.

    Args:
        epochs: where checkpoints are.
        count: called with "damaged_checkpoints" for each that is passed by.
    """

    def __init__(self, epochs: Epochs, count: Callable[[str], object] = lambda name: None) -> None:
        self._epochs, self._count = epochs, count
        self._channels: list[int] = []  # by table, of what changed since the last mark

    def restore(self, index: int, shards: int) -> tuple[Shard, int] | None:
        """See Keeper."""
        chain = self._epochs.newest_good(
            lambda one: _restorable(one, shards), lambda one: sources_of(index, shards, len(one.shards))
        )
        for _ in self._epochs.damaged:
            self._count("damaged_checkpoints")
        if chain is None:
            if self._epochs.numbers():
                raise CheckpointError(
                    f"no checkpoint at {self._epochs.url} can be used: they are damaged, or their shards are at "
                    f"different clocks and not {shards}; to begin anew, give checkpoint.url another place"
                )
            return None
        logger.info("shard %d of %d restores epoch %d", index, shards, chain.epoch)
        shard = restore_shard(chain, index, shards)
        self._channels = [table.open_channel() for table in shard.tables]
        return shard, chain.epoch if len(chain.shards) == shards else NO_EPOCH

    def mark(self, shard: Shard, full: bool) -> "ShardMark":
        """See Keeper."""
        sealed = self._channels
        for table, channel in zip(shard.tables, sealed, strict=False):
            table.seal(channel)
        self._channels = [table.open_channel() for table in shard.tables]
        if full:
            for table in shard.tables:
                table.begin_snapshot()
        return ShardMark(self._epochs, shard, sealed, full)


class ShardMark:
    """See `Mark` of ps/node.py. It is made while nothing is pushed, and copies all but rows.

    Args:
        epochs: where checkpoints are.
        shard: as of now.
        sealed: by table the channel with the rows that changed; none in the beginning.
        full: whether to write all rows, of which a snapshot has begun, rather than those that changed.
    """

    def __init__(self, epochs: Epochs, shard: Shard, sealed: Sequence[int], full: bool) -> None:
        self._epochs = epochs
        self._shard = shard
        self._sealed = sealed
        self._full = full
        self._about = about_shard(shard)
        self._arrays = arrays_of(shard)

    def write(self, epoch: int) -> str:
        """See Mark."""
        shard = self._shard
        if self._full:
            self._close()  # nobody will ask what changed, and it would grow meanwhile
        gone: dict[str, list[NDArray[np.uint64]]] = {one["name"]: [] for one in shard.spec.tables}

        def changed(t: int) -> Iterator[RowPart]:
            return _changes(shard.tables[t], self._sealed[t], gone[shard.spec.tables[t]["name"]])

        tables = tables_of(shard, (lambda t: _snapshot(shard.tables[t])) if self._full else changed)
        try:
            directory = self._epochs.directory(epoch)
            part = write_part(directory, shard.index, self._arrays, tables, tombstones=gone, about=self._about)
            return json.dumps(part)
        finally:
            self.drop()

    def drop(self) -> None:
        """See Mark."""
        for table in self._shard.tables if self._full else ():
            table.end_snapshot()
        self._close()

    def _close(self) -> None:
        for table, channel in zip(self._shard.tables, self._sealed, strict=False):
            table.close_channel(channel)
        self._sealed = ()


def _restorable(chain: Chain, shards: int) -> bool:
    try:
        check_count(chain, shards)
    except CheckpointError as exc:
        logger.warning("%s", exc)
        return False
    return True


def _snapshot(table: Table) -> Iterator[RowPart]:
    while (rows := table.read_snapshot(_READ_ROWS)) is not None:
        yield part_of(rows)


def _changes(table: Table, channel: int, gone: list[NDArray[np.uint64]]) -> Iterator[RowPart]:
    """The rows that changed; keys of those that are gone are added to `gone` meanwhile."""
    while table.pending(channel):
        drained = table.drain(channel, _READ_ROWS)
        gone.append(drained.tombstones)
        yield part_of(drained.rows)
