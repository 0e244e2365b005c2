"""Copying: a shard as records for its backup, and a backup's shard from them (schemas/ps.proto)."""

from typing import Any, NamedTuple

import numpy as np

import streamtrain.ps.rpc.ps_pb2 as pb
from streamtrain._core import Rows
from streamtrain.errors import ShardRefused
from streamtrain.model.spec import Spec, shard_slice
from streamtrain.ps.push import Push
from streamtrain.ps.row_memory import RowMemory
from streamtrain.ps.rpc import wire
from streamtrain.ps.shard import InitialState, Removal, Run, Shard


class Generation(NamedTuple):
    """Which of two that both believe to be primary continues: the greater.

    Attributes:
        begun: when the shard was restored or initialised, nanoseconds since the epoch.
        term: grows by one each time that a backup takes over.
    """

    begun: int
    term: int

    @classmethod
    def of(cls, message: Any) -> "Generation":
        return cls(message.begun, message.term)

    def message(self) -> Any:
        return pb.Line(begun=self.begun, term=self.term)


def copy_of(shard: Shard, generation: Generation) -> bytes:
    """All of a shard but its rows, as a record. Nothing may be pushed meanwhile."""
    dense, statistics, slots = shard.dense.pull(), shard.statistics.pull(), shard.dense.slots
    sketches = [table.admission() for table in shard.tables]
    progress = shard.progress()
    copy = pb.Copy(
        line=generation.message(),
        initial=pb.InitialiseRequest(
            run=shard.run.id,
            spec=shard.spec.to_json(),
            start=wire.encode_positions(shard.run.start),
            topic=shard.run.topic,
            shard=shard.index,
            shards=shard.shards,
        ),
        clock=wire.encode_positions(*progress),
        samples=shard.samples,
        watermark=shard.watermark,
        slots=len(slots),
        steps=shard.dense.steps,
        admission=[len(sketch) for sketch in sketches],
    )
    return wire.frame(pb.Record(copy=copy), [dense, np.ascontiguousarray(slots), statistics, *sketches])


def shard_of(copy: Any, bulk: memoryview, index: int, shards: int, memory: RowMemory | None) -> Shard:
    """A shard without rows, from the copy that a record holds; its rows may take the memory that is given, if any.

    Raises:
        ShardRefused: it is of another shard, or damaged.
    """
    given = copy.initial
    if (given.shard, given.shards) != (index, shards):
        raise ShardRefused(f"this is shard {index} of {shards}, not {given.shard} of {given.shards}", "mismatch")
    spec = Spec.from_json(given.spec)
    arrays = wire.ArrayReader(bulk, "float32")
    size, of_statistics = _sizes(spec, index, shards)
    dense = arrays.floats(size)
    slots = arrays.floats(copy.slots * size).reshape(copy.slots, size)
    initial = InitialState(
        Run(given.run, wire.decode_clock(given.start), given.topic), spec, dense, arrays.floats(of_statistics)
    )
    shard = Shard(initial, index, shards, memory=memory)
    shard.dense.load(dense, slots, copy.steps)
    for table, length in zip(shard.tables, copy.admission, strict=True):
        if length:
            table.merge_admission(arrays.take(np.uint8, length))
    arrays.end()
    shard.resume(wire.decode_progress(copy.clock), copy.samples, copy.watermark)
    return shard


def _sizes(spec: Spec, index: int, shards: int) -> tuple[int, int]:
    parts = (shard_slice(size, index, shards) for size in (spec.dense_size, spec.statistics_size))
    dense, statistics = (part.stop - part.start for part in parts)
    return dense, statistics


def rows_of(table: int, rows: Rows) -> bytes:
    """Rows of a table as a record."""
    columns = (rows.keys, rows.counts, rows.last_seen, rows.embeddings, rows.state)
    message = pb.Record(rows=pb.CopiedRows(table=table, rows=len(rows)))
    return wire.frame(message, [np.ascontiguousarray(column) for column in columns])


def load_rows(shard: Shard, given: Any, bulk: memoryview) -> None:
    """Writes the rows of a record into a shard.

    Raises:
        ShardRefused: the record is damaged.
    """
    if given.table >= len(shard.tables):
        raise ShardRefused(f"unknown table {given.table}; the shard has {len(shard.tables)}")
    table, arrays, n = shard.tables[given.table], wire.ArrayReader(bulk, "float32"), given.rows
    keys, counts, seen = arrays.take("<u8", n), arrays.take("<u4", n), arrays.take("<u4", n)
    embeddings = arrays.floats(n * table.dim).reshape(n, table.dim)
    state = arrays.floats(n * table.state_size).reshape(n, table.state_size)
    arrays.end()
    table.load(keys, embeddings, state, counts, seen)


Change = Push | Removal | None
"""What a record says; None: nothing, but it is answered."""


def change_record(number: int, change: Change) -> bytes:
    """A change as a record."""
    record = pb.Record(number=number)
    if isinstance(change, Push):
        return wire.frame(record, wire.encode_push(change, record.push, "float32"))
    if change is not None:
        record.removed.table, record.removed.keys = change.table, wire.encode_keys(change.keys)
    return wire.frame(record, [])


def push_of(given: Any, bulk: memoryview, shard: Shard) -> Push:
    """The push of a record.

    Raises:
        ShardRefused: the record is damaged.
    """
    arrays = wire.ArrayReader(bulk, "float32")
    push = wire.decode_push(given, arrays, wire.Sizes.of(shard))
    arrays.end()
    return push
