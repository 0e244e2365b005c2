"""Buckets: the rows of a dictionary in the hashes of Redis."""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamtrain.errors import PublicationCorrupt
from streamtrain.store.redis_codec import Bytes, checksums
from streamtrain.store.redis_commands import BATCH_ROWS, Batch, copies, grouped, on_buckets, on_fields
from streamtrain.store.redis_layout import Keys, Layout
from streamtrain.store.redis_server import Lane, RedisServer

_COPIED = 1 << 10  # buckets that are copied or deleted at once: the server does nothing else for about a millisecond


class Encoded(NamedTuple):
    """Rows of one table that are there now, or are not any more, as they are kept.

    Attributes:
        table: its name.
        keys: uint64 [n].
        rows: uint8 [n, width].
        gone: uint64 [m].
    """

    table: str
    keys: NDArray[np.uint64]
    rows: Bytes
    gone: NDArray[np.uint64]


class Sums(NamedTuple):
    """Of each bucket of a table.

    Attributes:
        rows: uint32 [buckets], how many it has.
        sums: uint64 [buckets], its checksum; see `checksums` of redis_codec.
    """

    rows: NDArray[np.uint32]
    sums: NDArray[np.uint64]


def nothing() -> None:
    """To be called between batches where nothing else is to be done."""


class Buckets:
    """A dictionary's rows. Thread-safe.

    Every method may raise OriginUnavailable, or PublicationError if the server refuses.

    Args:
        server: that has them.
        keys: of the model.
        layout: of the dictionary.
    """

    def __init__(self, server: RedisServer, keys: Keys, layout: Layout) -> None:
        self._server, self._keys, self.layout = server, keys, layout

    def put(self, change: Encoded, between: Callable[[], object] = nothing) -> None:
        """Writes rows, then removes those that are gone; calls `between` before every batch."""
        names = self._keys.rows(change.table, self.layout.dictionary)
        for verb, keys, rows in ((b"HSET", change.keys, change.rows), (b"HDEL", change.gone, None)):
            buckets = self.layout.buckets(change.table, keys)
            for lane, at in self._lanes(buckets):
                batches = on_fields(verb, names, grouped(buckets[at], at), keys, rows)
                _exhaust(lane, _with(between, batches))

    def read(self, table: str) -> Iterator[tuple[NDArray[np.uint64], Bytes, NDArray[np.int64]]]:
        """Keys [n], rows [n, width] and buckets [n], in parts of about 8192 rows; less if buckets are few.

        Raises:
            PublicationCorrupt: a bucket holds what are no rows.
        """
        layout = self.layout.table(table)
        names = self._keys.rows(table, self.layout.dictionary)
        for lane, buckets in self._lanes(np.arange(layout.buckets)):
            parts = [buckets[at : at + BATCH_ROWS // 64] for at in range(0, len(buckets), BATCH_ROWS // 64)]
            batches = (on_buckets(b"HGETALL", names, part) for part in parts)
            for part, (_, replies) in zip(parts, lane.run(batches), strict=True):
                yield self._parsed(table, part, replies)

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
                f"{self.name_of(table, int(buckets[bad]))} holds what are no rows of {width} bytes"
            )
        found = np.frombuffer(keys, "<u8").astype(np.uint64, copy=False)
        return found, np.frombuffer(rows, np.uint8).reshape(-1, width), np.repeat(buckets, counts)

    def look_up(self, keys: Mapping[str, NDArray[np.uint64]]) -> dict[str, tuple[Bytes, NDArray[np.bool_]]]:
        """By table rows uint8 [n, width] of keys uint64 [n], zeros where there is none, and where there is one.

        All tables are asked for at once.
        """
        widths = {table: self.layout.codec(table).width for table in keys}
        found = {
            table: (np.zeros((len(of), widths[table]), np.uint8), np.zeros(len(of), np.bool_))
            for table, of in keys.items()
        }
        buckets = {table: self.layout.buckets(table, of) for table, of in keys.items()}
        ends = np.cumsum([0, *map(len, keys.values())])
        for lane, at in self._lanes(np.concatenate([np.empty(0, np.int64), *buckets.values()])):
            asked: list[tuple[str, Batch]] = []
            for table, start, end in zip(keys, ends, ends[1:], strict=False):
                mine = at[(at >= start) & (at < end)] - start
                names, group = self._keys.rows(table, self.layout.dictionary), grouped(buckets[table][mine], mine)
                asked += [(table, one) for one in on_fields(b"HMGET", names, group, keys[table])]
            for (table, batch), (_, replies) in zip(asked, lane.run(one for _, one in asked), strict=True):
                self._fill(table, *found[table], batch.order, list(chain.from_iterable(replies)))
        return found

    def _fill(
        self, table: str, rows: Bytes, found: NDArray[np.bool_], at: NDArray[np.int64], values: list[bytes | None]
    ) -> None:
        there = np.fromiter((value is not None for value in values), np.bool_, len(values))
        data = b"".join(value for value in values if value is not None)
        if len(data) != rows.shape[1] * int(there.sum()):
            raise PublicationCorrupt(
                f"table {table} of {self._server.name} holds what are no rows of {rows.shape[1]} bytes"
            )
        rows[at[there]] = np.frombuffer(data, np.uint8).reshape(-1, rows.shape[1])
        found[at] = there

    def copy(self, target: Layout, between: Callable[[], object]) -> None:
        """Copies all buckets into those of another dictionary; calls `between` before every batch."""
        for table, layout in self.layout.tables.items():
            source = self._keys.rows(table, self.layout.dictionary)
            names = self._keys.rows(table, target.dictionary)
            for lane, buckets in self._lanes(np.arange(layout.buckets)):
                _exhaust(lane, _with(between, (copies(source, names, part) for part in _pieces(buckets))))

    def delete(self) -> None:
        """Deletes all buckets, some at a time."""
        for table, layout in self.layout.tables.items():
            names = self._keys.rows(table, self.layout.dictionary)
            for lane, buckets in self._lanes(np.arange(layout.buckets)):
                _exhaust(lane, (on_buckets(b"UNLINK", names, part) for part in _pieces(buckets)))

    def sums(self, table: str) -> Sums:
        """Rows and checksums by bucket, for which all are read."""
        count = self.layout.table(table).buckets
        found = Sums(np.zeros(count, np.uint32), np.zeros(count, np.uint64))
        for keys, rows, buckets in self.read(table):
            add_sums(found, keys, rows, buckets)
        return found

    def name_of(self, table: str, bucket: int) -> str:
        """A bucket, for messages."""
        names = self._keys.rows(table, self.layout.dictionary)
        return f"bucket {names.of(np.array([bucket])).tobytes().decode()} of {self._server.name}"

    def _lanes(self, buckets: NDArray[np.int64]) -> Iterator[tuple[Lane, NDArray[np.int64]]]:
        if not len(buckets):
            return iter(())
        return self._server.lanes(self._keys.slots(buckets) if self._server.is_cluster else np.zeros_like(buckets))


def add_sums(into: Sums, keys: NDArray[np.uint64], rows: Bytes, buckets: NDArray[np.int64]) -> None:
    """Adds rows to those of their buckets."""
    add_checksums(into, checksums(keys, rows), buckets)


def add_checksums(into: Sums, sums: NDArray[np.uint64], buckets: NDArray[np.int64]) -> None:
    """Adds rows, by their checksums, to those of their buckets."""
    np.add.at(into.rows, buckets, 1)
    np.add.at(into.sums, buckets, sums)


def _with(between: Callable[[], object], batches: Iterator[Batch]) -> Iterator[Batch]:
    for batch in batches:
        between()
        yield batch


def _pieces(buckets: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    for at in range(0, len(buckets), _COPIED):
        yield buckets[at : at + _COPIED]


def _exhaust(lane: Lane, batches: Iterator[Batch]) -> None:
    for _ in lane.run(batches):
        pass
