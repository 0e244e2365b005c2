"""Verify, the part of a shard: checksums of its rows as they were published, while it is trained."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import streamtrain.ps.ps_pb2 as pb
from streamtrain.cluster.published_table import PublishedTable
from streamtrain.store.origin import RowChange
from streamtrain.store.redis_buckets import Sums, add_checksums
from streamtrain.store.redis_codec import checksums
from streamtrain.store.redis_layout import Layout

Keys = NDArray[np.uint64]


def row_sums(tables: Iterable[PublishedTable], layout: Layout, in_vain: Iterable[RowChange]) -> Any:
    """Checksums by bucket, `RowSums` of schemas/ps.proto.

    Rows are read first, and what has changed afterwards. So a row that is not as it was published is among the latter:
    it is left out, and its key is told.

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
    found = no_sums(layout.tables[table.name].buckets)
    for keys, sums in parts:
        stands = ~among(keys, changing)
        add_checksums(found, sums[stands], layout.buckets(table.name, keys[stands]))
    return pb.TableSums(
        name=table.name,
        rows=found.rows.astype("<u4", copy=False).tobytes(),
        sums=found.sums.astype("<u8", copy=False).tobytes(),
        changing=changing.astype("<u8", copy=False).tobytes(),
    )


def no_sums(buckets: int) -> Sums:
    """Of so many buckets without rows."""
    return Sums(np.zeros(buckets, np.uint32), np.zeros(buckets, np.uint64))


def among(keys: Keys, ordered: Keys) -> NDArray[np.bool_]:
    """Which keys [n] are among others, that ascend: bool [n]."""
    if not len(ordered):
        return np.zeros(len(keys), np.bool_)
    at = np.searchsorted(ordered, keys)
    found: NDArray[np.bool_] = ordered[np.minimum(at, len(ordered) - 1)] == keys
    return found
