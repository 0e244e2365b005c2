"""Published table: the rows of one table of a shard as they are published while it is trained."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import streamtrain.ps.rpc.ps_pb2 as pb
from streamtrain._core import Rows, Table, last_of_each
from streamtrain.ps.shard import scan_rows
from streamtrain.store.publication import Floats, RowChange
from streamtrain.store.redis.buckets import BucketChecksums, add_checksums
from streamtrain.store.redis.codec import checksums
from streamtrain.store.redis.layout import Layout

_READ_ROWS = 1 << 12  # in one turn, as pushes wait meanwhile


class PublishedTable:
    """What changes goes into a channel of the table from now on.

    Rows that L1 has driven to zero are published as gone, where a key without a row reads zeros as well.

    Args:
        settings: of the table, as in a spec.
        channel: a channel that holds already what has changed since the head; None: a new one.

    Attributes:
        rows: how many there are in public, as of when `changes` ended.
    """

    def __init__(self, settings: dict[str, Any], table: Table, channel: int | None = None) -> None:
        self.name = str(settings["name"])
        self.rows = 0
        self._table = table
        self._channel = table.open_channel() if channel is None else channel
        self._zeros = Table(1, optimizer="sgd", rate=1.0) if _drops_zeros(settings) else None  # a set of keys
        self._has_all_zeros = channel is None or self._zeros is None

    def close(self) -> None:
        """Ends; what changes is not kept any more."""
        self._table.close_channel(self._channel)

    def release(self) -> int:
        """Ends, and leaves the channel, with what it holds, to somebody else."""
        return self._channel

    def all(self) -> Iterator[RowChange]:
        """Every row, some of them as they were at one moment and some at another, but for which `changes` follows."""
        for rows in scan_rows(self._table):
            change = self._change(rows, rows.keys[:0])
            yield change._replace(gone=change.gone[:0])

    def changes(self) -> RowChange:
        """What has changed since all was read, or since the last time; counts the rows that there are then."""
        found = []
        if not self._has_all_zeros:  # of rows that were published by others
            for _ in self.all():
                pass
            self._has_all_zeros = True
        while True:
            drained = self._table.drain(self._channel, _READ_ROWS)
            found.append(self._change(drained.rows, drained.tombstones))
            rows = len(self._table)
            if not self._table.pending(self._channel):  # so nothing has changed since the drain: the count is exact
                self.rows = rows - (0 if self._zeros is None else len(self._zeros))
                return merge_changes(found)

    def standing(self) -> Iterator[tuple[NDArray[np.uint64], Floats]]:
        """Every row that is in public or will be, keys [n] and embeddings [n, dim], at one moment or another.

        Those that are not as they were published are among what is `changing` afterwards.
        """
        for rows in scan_rows(self._table):
            there = rows.embeddings.any(axis=1) if self._zeros is not None else np.ones(len(rows), np.bool_)
            yield rows.keys[there], rows.embeddings[there]

    def changing(self) -> list[NDArray[np.uint64]]:
        """Keys of what has changed since `changes` ended; it all comes again with the next."""
        found: list[NDArray[np.uint64]] = []
        try:
            while not found or self._table.pending(self._channel):
                drained = self._table.drain(self._channel, _READ_ROWS)
                found += [drained.rows.keys.copy(), drained.tombstones.copy()]  # views would keep the rows
        finally:
            for keys in found:
                self._table.mark_dirty(self._channel, keys)
        return found

    def put_back(self, change: RowChange) -> None:
        """Has a change come again."""
        for keys in (change.keys, change.gone):
            self._table.mark_dirty(self._channel, keys)

    def _change(self, rows: Rows, gone: NDArray[np.uint64]) -> RowChange:
        keys, embeddings = rows.keys, rows.embeddings
        if self._zeros is None:
            return RowChange(self.name, keys, embeddings, gone)
        there = embeddings.any(axis=1)
        zeros = keys[~there]
        self._zeros.remove(np.concatenate([keys[there], gone]))
        none = np.zeros(len(zeros), np.uint32)
        self._zeros.load(
            zeros, np.zeros((len(zeros), 1), np.float32), np.empty((len(zeros), 0), np.float32), none, none
        )
        return RowChange(self.name, keys[there], embeddings[there], np.concatenate([gone, zeros]))


def merge_changes(changes: Sequence[RowChange]) -> RowChange:
    """Changes of one table as one, in which later ones prevail: a bucket that many of them touch is written once."""
    table, (keys, rows, gone) = changes[0].table, map(np.concatenate, zip(*(one[1:] for one in changes), strict=True))
    parts = [part for one in changes for part in (one.keys, one.gone)]
    every = np.concatenate(parts)
    last = last_of_each(every)
    if len(last) == len(every):
        return RowChange(table, keys, rows, gone)
    is_row = np.repeat([True, False] * len(changes), [len(part) for part in parts])
    lasting = np.zeros(len(every), np.bool_)
    lasting[last] = True
    there = lasting[is_row]
    return RowChange(table, keys[there], rows[there], gone[lasting[~is_row]])


def _drops_zeros(settings: dict[str, Any]) -> bool:
    """Whether rows become zero for good, and keys without a row read zeros."""
    return bool(settings["optimizer"] == "ftrl" and settings.get("l1", 0) > 0 and settings.get("init_scale") == 0)


Keys = NDArray[np.uint64]


def row_sums(tables: Iterable[PublishedTable], layout: Layout, in_vain: Iterable[RowChange]) -> Any:
    """Checksums by bucket, `RowSums` of schemas/ps.proto.

    Rows are read first, and what has changed afterwards. So a row that is not as it was published is among the latter:
    it is left out, and its key is reported.

    Args:
        tables: of the shard, as they are published.
        layout: of the head's dictionary.
        in_vain: what was taken out of the tables' changes for a publication that was not committed.
    """
    written: dict[str, list[Keys]] = {}
    for change in in_vain:
        written.setdefault(change.table, []).extend([change.keys, change.gone])
    return pb.RowSums(tables=[_of_table(table, layout, written.get(table.name, [])) for table in tables])


def _of_table(table: PublishedTable, layout: Layout, written: list[Keys]) -> Any:
    codec, left_out, parts = layout.codec(table.name), [*written], []
    for keys, rows in table.standing():
        finite = np.isfinite(rows).all(axis=1)  # others are never published
        left_out.append(keys[~finite])
        parts.append((keys[finite], checksums(keys[finite], codec.encode(rows[finite]))))
    changing = np.unique(np.concatenate([*left_out, *table.changing()]))
    found = empty_checksums(layout.tables[table.name].buckets)
    for keys, sums in parts:
        stands = ~isin_sorted(keys, changing)
        add_checksums(found, sums[stands], layout.buckets(table.name, keys[stands]))
    return pb.TableSums(
        name=table.name,
        rows=found.rows.astype("<u4", copy=False).tobytes(),
        sums=found.sums.astype("<u8", copy=False).tobytes(),
        changing=changing.astype("<u8", copy=False).tobytes(),
    )


def empty_checksums(buckets: int) -> BucketChecksums:
    """The checksums of buckets without rows."""
    return BucketChecksums(np.zeros(buckets, np.uint32), np.zeros(buckets, np.uint64))


def isin_sorted(keys: Keys, ordered: Keys) -> NDArray[np.bool_]:
    """Which keys [n] are among others, that ascend: bool [n]."""
    if not len(ordered):
        return np.zeros(len(keys), np.bool_)
    at = np.searchsorted(ordered, keys)
    found: NDArray[np.bool_] = ordered[np.minimum(at, len(ordered) - 1)] == keys
    return found
