"""CheckpointWriter: writes one shard to checkpoints while it is trained, and restores it."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from streamtrain.checkpoint.shard_state import (
    GainedAhead,
    ReadAhead,
    Reading,
    check_shard_count,
    describe_shard,
    prefetch,
    restore_shard,
    shard_arrays,
    shard_tables,
    source_shards,
    to_row_part,
)
from streamtrain.errors import CheckpointCorrupt, CheckpointError
from streamtrain.ps.hooks import RestoredShard
from streamtrain.ps.nodes.node import NO_EPOCH
from streamtrain.ps.row_memory import RowMemory
from streamtrain.ps.shard import Shard
from streamtrain.store.checkpoint.checkpoint import part_digest, write_part
from streamtrain.store.checkpoint.epochs import CheckpointChain, Epochs
from streamtrain.store.checkpoint.parquet import RowPart

logger = logging.getLogger(__name__)

# Rows per read: more would make the core grow arrays, in new memory, while pushes wait for the table.
_READ_ROWS = 1 << 12
_Used = TypeVar("_Used")


class CheckpointWriter:
    """The checkpoints of one shard; see `CheckpointStore` in ps/hooks.py.

    Args:
        count: called with "damaged_checkpoints" for each damaged one that is skipped.
        memory: what the rows of restored shards may take; None: all that they need.

    Attributes:
        digest: see CheckpointStore.
    """

    def __init__(
        self, epochs: Epochs, count: Callable[[str], object] = lambda name: None, memory: RowMemory | None = None
    ) -> None:
        self._epochs, self._count, self._memory = epochs, count, memory
        self.digest = ""
        self._channels: list[int] = []  # by table, change channels since the last snapshot
        self._ahead: ReadAhead | GainedAhead | None = None
        self._reading = Reading()

    @property
    def rows_ahead(self) -> int:
        return self._reading.rows

    def stop_reading(self) -> None:
        self._reading.stop()

    def read_ahead(self, index: int, shards: int, held: Shard | None = None, *, rate: float = 0.0) -> None:
        if self._ahead is not None and self._advance(index, shards, held):
            return
        ahead, self._ahead, self._reading = self._ahead, None, Reading(rate)  # which takes memory
        if ahead is not None:
            ahead.drop()
        if shards:
            self._ahead = self._newest(shards, lambda chain: self._read(chain, index, shards, held))
            if self._ahead is None:
                raise CheckpointError(f"there is no checkpoint at {self._epochs.url}: do all shards reach that place?")

    def _read(self, chain: CheckpointChain, index: int, shards: int, held: Shard | None) -> ReadAhead | GainedAhead:
        if held is None or not self._has_written(chain, held):
            return ReadAhead.of(chain, index, shards, self._reading, self._memory)
        chain.verify(source_shards(index, shards, len(chain.shards)))  # before it gets among rows that are in use
        return GainedAhead.of(chain, held, index, shards, self._reading)

    def _advance(self, index: int, shards: int, held: Shard | None) -> bool:
        """Reads on for the same place, if the newest checkpoint adds to the one that was read."""
        ahead = self._ahead
        if ahead is None or not ahead.is_of(index, shards, held):
            return False
        try:
            advanced = ahead.advanced(self._epochs.open(max(self._epochs.numbers(), default=0)))
        except CheckpointCorrupt as exc:
            logger.warning("%s; looking for another checkpoint", exc)
            return False
        self._ahead = advanced or ahead
        return advanced is not None

    def restore(self, index: int, shards: int, held: Shard | None = None) -> RestoredShard | None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.is_of(index, shards, held):
            try:
                newest = self._epochs.open(max(self._epochs.numbers(), default=0))
                is_mine = isinstance(ahead, ReadAhead) or self._has_written(newest, ahead.held)
                if is_mine and (found := ahead.continued(newest)) is not None:
                    shard, changed = found
                    return self._restored(newest, shard, keeps=changed.kept is not None)._replace(changed=changed)
            except CheckpointError as exc:
                logger.warning("%s; looking for another checkpoint", exc)
        return self._newest(shards, lambda chain: self._restore(chain, index, shards))

    def _restore(self, chain: CheckpointChain, index: int, shards: int) -> RestoredShard:
        logger.info("restoring shard %d of %d from epoch %d", index, shards, chain.epoch)
        return self._restored(chain, restore_shard(chain, index, shards, memory=self._memory))

    def _has_written(self, chain: CheckpointChain, shard: Shard) -> bool:
        """Whether a shard's part of a checkpoint is what was written or restored here last."""
        return len(chain.shards) == shard.shards and chain.part_digest(shard.index) == self.digest

    def _restored(self, chain: CheckpointChain, shard: Shard, *, keeps: bool = False) -> RestoredShard:
        if not keeps:
            self._channels = [table.open_channel() for table in shard.tables]
        is_same = len(chain.shards) == shard.shards
        self.digest = chain.part_digest(shard.index) if is_same else ""
        return RestoredShard(shard, chain.epoch if is_same else NO_EPOCH)

    def _newest(self, shards: int, use: Callable[[CheckpointChain], _Used]) -> _Used | None:
        """What is made of the newest checkpoint that shards can be restored from; None: there are none.

        Raises:
            CheckpointError: there are, and none can be used.
        """
        used = self._epochs.first_good(use, lambda one: _restorable(one, shards))
        for _ in self._epochs.damaged:
            self._count("damaged_checkpoints")
        if used is None and self._epochs.numbers():
            raise CheckpointError(
                f"no usable checkpoint at {self._epochs.url}: they are damaged, or their shards are at "
                f"different clocks and their number is not {shards}; to start from scratch, "
                "set checkpoint.url to another place"
            )
        return used

    def forget(self) -> None:
        self._channels, self._ahead, self.digest = [], None, ""

    def snapshot(self, shard: Shard, full: bool) -> "ShardSnapshot":
        sealed = self._channels
        for table, channel in zip(shard.tables, sealed, strict=False):
            table.seal(channel)
        self._channels = [table.open_channel() for table in shard.tables]
        if full:
            for table in shard.tables:
                table.begin_snapshot()
        return ShardSnapshot(self, self._epochs, shard, sealed, full)


class ShardSnapshot:
    """See `Snapshot` in ps/hooks.py. Created while no push is applied; copies everything except rows.

    Args:
        writer: receives the digest of the written part.
        sealed: by table, the channel with the changed rows; empty for the first snapshot.
        full: whether to write all rows, from a snapshot that has begun, rather than the changed ones.
    """

    def __init__(
        self, writer: CheckpointWriter, epochs: Epochs, shard: Shard, sealed: Sequence[int], full: bool
    ) -> None:
        self._writer = writer
        self._epochs = epochs
        self._shard = shard
        self._sealed = sealed
        self._full = full
        self._about = describe_shard(shard)
        self._arrays = shard_arrays(shard)

    def write(self, epoch: int) -> str:
        shard = self._shard
        if self._full:
            self._close()  # not needed for a full checkpoint, and it would grow meanwhile
        gone: dict[str, list[NDArray[np.uint64]]] = {one["name"]: [] for one in shard.spec.tables}

        def changed(t: int) -> Iterator[RowPart]:
            return _changes(shard, t, self._sealed[t], gone[shard.spec.tables[t]["name"]])

        tables = shard_tables(shard, (lambda t: prefetch(_snapshot(shard, t))) if self._full else changed)
        try:
            directory = self._epochs.directory(epoch)
            part = write_part(directory, shard.index, self._arrays, tables, tombstones=gone, about=self._about)
            self._writer.digest = part_digest(part["about"], part["files"])
            return json.dumps(part)
        finally:
            self.drop()

    def drop(self) -> None:
        for table in self._shard.tables if self._full else ():
            table.end_snapshot()
        self._close()

    def _close(self) -> None:
        for table, channel in zip(self._shard.tables, self._sealed, strict=False):
            table.close_channel(channel)
        self._sealed = ()


def _restorable(chain: CheckpointChain, shards: int) -> bool:
    try:
        check_shard_count(chain, shards)
    except CheckpointError as exc:
        logger.warning("%s", exc)
        return False
    return True


def _snapshot(shard: Shard, table: int) -> Iterator[RowPart]:
    with shard.reading():
        while (rows := shard.tables[table].read_snapshot(_READ_ROWS)) is not None:
            yield to_row_part(rows)


def _changes(shard: Shard, table: int, channel: int, gone: list[NDArray[np.uint64]]) -> Iterator[RowPart]:
    """The changed rows of a table; keys of removed ones are added to `gone`."""
    of_table = shard.tables[table]
    with shard.reading():
        while of_table.pending(channel):
            drained = of_table.drain(channel, _READ_ROWS)
            gone.append(drained.tombstones)
            yield to_row_part(drained.rows)
