"""Buckets: the rows of a dictionary in the hashes of Redis."""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamtrain.errors import PublicationCorrupt
from streamtrain.store.redis.codec import Bytes, checksums
from streamtrain.store.redis.commands import (
    BATCH_ROWS,
    CommandBatch,
    bucket_commands,
    copy_commands,
    field_commands,
    group_keys,
)
from streamtrain.store.redis.layout import Layout, RedisKeys
from streamtrain.store.redis.server import PipelinedConnection, RedisServer

_TOGETHER = 1 << 10  # buckets that are copied or deleted at once: the server does nothing else for about a millisecond


class EncodedChange(NamedTuple):
    """Written and deleted rows of one table, encoded.

    Attributes:
        table: name of the table.
        keys: uint64 [n].
        rows: uint8 [n, width].
        gone: uint64 [m], keys of deleted rows.
    """

    table: str
    keys: NDArray[np.uint64]
    rows: Bytes
    gone: NDArray[np.uint64]


class BucketChecksums(NamedTuple):
    """Row counts and checksums of a table's buckets.

    Attributes:
        rows: uint32 [buckets], number of rows.
        sums: uint64 [buckets], checksum; see `checksums` in codec.py.
    """

    rows: NDArray[np.uint32]
    sums: NDArray[np.uint64]


class Buckets:
    """The rows of a dictionary. Thread-safe.

    Every method may raise OriginUnavailable, or PublicationError if the server refuses the command.
    """

    def __init__(self, server: RedisServer, keys: RedisKeys, layout: Layout) -> None:
        self._server, self._keys, self.layout = server, keys, layout

    def put(self, change: EncodedChange, between: Callable[[], object] = lambda: None) -> None:
        """Writes rows, then deletes those of `gone`; calls `between` before every batch."""
        names = self._keys.rows(change.table, self.layout.dictionary)
        for verb, keys, rows in ((b"HSET", change.keys, change.rows), (b"HDEL", change.gone, None)):
            buckets = self.layout.buckets(change.table, keys)
            for connection, at in self._connections(buckets):
                batches = field_commands(verb, names, group_keys(buckets[at], at), keys, rows)
                _exhaust(connection, _with(between, batches))

    def read(self, table: str) -> Iterator[tuple[NDArray[np.uint64], Bytes, NDArray[np.int64]]]:
        """Reads keys [n], rows [n, width] and buckets [n], in parts of about 8192 rows or fewer.

        Raises:
            PublicationCorrupt: a bucket has fields that are not rows.
        """
        for buckets, replies in self._run(b"HGETALL", table, BATCH_ROWS // 64):
            yield self._parsed(table, buckets, replies)

    def _run(self, verb: bytes, table: str, together: int = _TOGETHER) -> Iterator[tuple[NDArray[np.int64], list[Any]]]:
        """Runs a command on every bucket of a table; yields buckets with their replies, `together` at most."""
        names = self._keys.rows(table, self.layout.dictionary)
        for connection, buckets in self._connections(np.arange(self.layout.table(table).buckets)):
            parts = list(_pieces(buckets, together))
            batches = (bucket_commands(verb, names, part) for part in parts)
            for part, (_, replies) in zip(parts, connection.run(batches), strict=True):
                yield part, replies

    def _parsed(
        self, table: str, buckets: NDArray[np.int64], replies: list[list[bytes]]
    ) -> tuple[NDArray[np.uint64], Bytes, NDArray[np.int64]]:
        flat = list(chain.from_iterable(replies))
        counts = np.fromiter(map(len, replies), np.int64, len(replies)) // 2
        width = self.layout.codec(table).width
        keys, rows = b"".join(flat[::2]), b"".join(flat[1::2])
        if len(keys) != 8 * (len(flat) // 2) or len(rows) != width * (len(flat) // 2):
            bad = next(
                i
                for i, reply in enumerate(replies)
                if {*map(len, reply[::2])} - {8} or {*map(len, reply[1::2])} - {width}
            )
            raise PublicationCorrupt(
                f"{self.bucket_name(table, int(buckets[bad]))} has fields that are not rows of {width} bytes"
            )
        found = np.frombuffer(keys, "<u8").astype(np.uint64, copy=False)
        return found, np.frombuffer(rows, np.uint8).reshape(-1, width), np.repeat(buckets, counts)

    def look_up(self, keys: Mapping[str, NDArray[np.uint64]]) -> dict[str, tuple[Bytes, NDArray[np.bool_]]]:
        """Looks up keys uint64 [n] by table: rows uint8 [n, width], zeros for missing ones, and which exist, bool [n].

        All tables are read in one round trip.
        """
        widths = {table: self.layout.codec(table).width for table in keys}
        found = {
            table: (np.zeros((len(of), widths[table]), np.uint8), np.zeros(len(of), np.bool_))
            for table, of in keys.items()
        }
        buckets = {table: self.layout.buckets(table, of) for table, of in keys.items()}
        ends = np.cumsum([0, *map(len, keys.values())])
        for connection, at in self._connections(np.concatenate([np.empty(0, np.int64), *buckets.values()])):
            asked: list[tuple[str, CommandBatch]] = []
            for table, start, end in zip(keys, ends, ends[1:], strict=False):
                mine = at[(at >= start) & (at < end)] - start
                names, group = self._keys.rows(table, self.layout.dictionary), group_keys(buckets[table][mine], mine)
                asked += [(table, one) for one in field_commands(b"HMGET", names, group, keys[table])]
            for (table, batch), (_, replies) in zip(asked, connection.run(one for _, one in asked), strict=True):
                self._fill(table, *found[table], batch.order, list(chain.from_iterable(replies)))
        return found

    def _fill(
        self, table: str, rows: Bytes, found: NDArray[np.bool_], at: NDArray[np.int64], values: list[bytes | None]
    ) -> None:
        there = np.fromiter((value is not None for value in values), np.bool_, len(values))
        data = b"".join(value for value in values if value is not None)
        if len(data) != rows.shape[1] * int(there.sum()):
            raise PublicationCorrupt(
                f"table {table} at {self._server.name} has fields that are not rows of {rows.shape[1]} bytes"
            )
        rows[at[there]] = np.frombuffer(data, np.uint8).reshape(-1, rows.shape[1])
        found[at] = there

    def copy(self, target: Layout, between: Callable[[], object]) -> None:
        """Copies all buckets into those of another dictionary; calls `between` before every batch."""
        for table, layout in self.layout.tables.items():
            source = self._keys.rows(table, self.layout.dictionary)
            names = self._keys.rows(table, target.dictionary)
            for connection, buckets in self._connections(np.arange(layout.buckets)):
                _exhaust(connection, _with(between, (copy_commands(source, names, part) for part in _pieces(buckets))))

    def delete(self) -> None:
        """Deletes all buckets, in batches."""
        for table in self.layout.tables:
            for _ in self._run(b"UNLINK", table):
                pass

    def counts(self, table: str) -> NDArray[np.int64]:
        """Number of rows of each bucket, int64 [buckets], without reading them."""
        found = np.zeros(self.layout.table(table).buckets, np.int64)
        for buckets, replies in self._run(b"HLEN", table):
            found[buckets] = replies
        return found

    def non_empty(self, table: str, buckets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of the buckets int64 [n] have rows: bool [n]."""
        names = self._keys.rows(table, self.layout.dictionary)
        found = np.zeros(len(buckets), np.bool_)
        for connection, at in self._connections(buckets):
            for _, replies in connection.run([bucket_commands(b"EXISTS", names, buckets[at])]):
                found[at] = np.array(replies, np.bool_)
        return found

    def sums(self, table: str) -> BucketChecksums:
        """Counts and checksums all rows by bucket; reads all of them."""
        count = self.layout.table(table).buckets
        found = BucketChecksums(np.zeros(count, np.uint32), np.zeros(count, np.uint64))
        for keys, rows, buckets in self.read(table):
            add_rows(found, keys, rows, buckets)
        return found

    def bucket_name(self, table: str, bucket: int) -> str:
        """Name of a bucket, for messages."""
        names = self._keys.rows(table, self.layout.dictionary)
        return f"bucket {names.of(np.array([bucket])).tobytes().decode()} of {self._server.name}"

    def _connections(self, buckets: NDArray[np.int64]) -> Iterator[tuple[PipelinedConnection, NDArray[np.int64]]]:
        if not len(buckets):
            return iter(())
        return self._server.connections(
            self._keys.slots(buckets) if self._server.is_cluster else np.zeros_like(buckets)
        )


def add_rows(into: BucketChecksums, keys: NDArray[np.uint64], rows: Bytes, buckets: NDArray[np.int64]) -> None:
    """Adds rows to the checksums of their buckets."""
    add_checksums(into, checksums(keys, rows), buckets)


def add_checksums(into: BucketChecksums, sums: NDArray[np.uint64], buckets: NDArray[np.int64]) -> None:
    """Adds the checksums of rows to those of their buckets."""
    np.add.at(into.rows, buckets, 1)
    np.add.at(into.sums, buckets, sums)


def _with(between: Callable[[], object], batches: Iterator[CommandBatch]) -> Iterator[CommandBatch]:
    for batch in batches:
        between()
        yield batch


def _pieces(buckets: NDArray[np.int64], size: int = _TOGETHER) -> Iterator[NDArray[np.int64]]:
    for at in range(0, len(buckets), size):
        yield buckets[at : at + size]


def _exhaust(connection: PipelinedConnection, batches: Iterator[CommandBatch]) -> None:
    for _ in connection.run(batches):
        pass
