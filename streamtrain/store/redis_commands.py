"""Commands on many hashes as bytes of the Redis protocol, put together by NumPy.

A client library packs value by value, which takes longer than the server needs for the command. Here all that is said
of one bucket is one command, and all commands that are equally long are the rows of one matrix.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)
HEX_DIGITS = 6
"""Of a bucket in the name of its key: enough for 2^24 of them."""

BATCH_ROWS = 1 << 13
"""Rows whose commands are made at once: they are in the cache until they are sent."""


_NONE = np.empty(0, np.int64)


class KeyNames(NamedTuple):
    """The keys of a table's buckets in one dictionary: all of the same length.

    Attributes:
        before: what stands before the bucket's six hexadecimal digits.
        after: what stands after them.
    """

    before: bytes
    after: bytes

    def of(self, buckets: NDArray[np.int64]) -> Bytes:
        """Their names, uint8 [n, length]."""
        shifts = np.arange(4 * (HEX_DIGITS - 1), -1, -4)
        names = np.empty((len(buckets), len(self.before) + HEX_DIGITS + len(self.after)), np.uint8)
        names[:, : len(self.before)] = np.frombuffer(self.before, np.uint8)
        names[:, len(self.before) : len(self.before) + HEX_DIGITS] = _HEX[(buckets[:, None] >> shifts) & 15]
        names[:, len(self.before) + HEX_DIGITS :] = np.frombuffer(self.after, np.uint8)
        return names


class Batch(NamedTuple):
    """Commands that are sent together.

    Attributes:
        data: their bytes.
        size: how many they are.
        order: of commands with fields, which of the keys that were given these are, one command after another.
    """

    data: Bytes
    size: int
    order: NDArray[np.int64] = _NONE


class Grouped(NamedTuple):
    """Keys sorted by their buckets.

    Attributes:
        order: int64 [n], of the keys.
        buckets: int64 [b], those that there are, ascending.
        starts: int64 [b + 1], where in `order` the keys of each begin.
    """

    order: NDArray[np.int64]
    buckets: NDArray[np.int64]
    starts: NDArray[np.int64]


def grouped(buckets: NDArray[np.int64]) -> Grouped:
    """Groups keys by the bucket of each; within one they keep their order."""
    order = np.argsort(buckets, kind="stable")
    ascending = buckets[order]
    starts = np.flatnonzero(np.concatenate([[True], ascending[1:] != ascending[:-1]])) if len(buckets) else order
    return Grouped(order, ascending[starts], np.append(starts, len(buckets)))


def on_buckets(verb: bytes, names: KeyNames, buckets: NDArray[np.int64], *more: bytes) -> Batch:
    """A command "verb key more…" for each bucket."""
    keys = names.of(buckets)
    data = _with_keys(verb, keys, 2 + len(more), b"".join(_bulk(one) for one in more))
    return Batch(data.ravel(), len(buckets))


def copies(source: KeyNames, target: KeyNames, buckets: NDArray[np.int64]) -> Batch:
    """A command for each bucket that copies it."""
    to = target.of(buckets)
    frame = b"$%d\r\n" % to.shape[1]
    tail = np.empty((len(buckets), len(frame) + to.shape[1] + 2), np.uint8)
    tail[:, : len(frame)] = np.frombuffer(frame, np.uint8)
    tail[:, len(frame) : -2] = to
    tail[:, -2:] = (13, 10)
    head = _with_keys(b"COPY", source.of(buckets), 4, b"")
    replace = np.broadcast_to(np.frombuffer(_bulk(b"REPLACE"), np.uint8), (len(buckets), 13))
    return Batch(np.concatenate([head, tail, replace], axis=1).ravel(), len(buckets))


def on_fields(
    verb: bytes, names: KeyNames, group: Grouped, keys: NDArray[np.uint64], rows: Bytes | None = None
) -> Iterator[Batch]:
    """Commands "verb bucket field…", or with rows "verb bucket field value…", one for each bucket.

    Args:
        verb: of the command.
        names: of the buckets' keys.
        group: of `keys`.
        keys: uint64 [n].
        rows: uint8 [n, width], the values.
    """
    at = 0
    while at < len(group.buckets):
        end = max(at + 1, int(np.searchsorted(group.starts, group.starts[at] + BATCH_ROWS, "right")) - 1)
        yield _batch(verb, names, Grouped(group.order, group.buckets[at:end], group.starts[at : end + 1]), keys, rows)
        at = end


def _batch(verb: bytes, names: KeyNames, group: Grouped, keys: NDArray[np.uint64], rows: Bytes | None) -> Batch:
    parts: list[Bytes] = []
    orders: list[NDArray[np.int64]] = []
    counts = np.diff(group.starts)
    bucket_keys = names.of(group.buckets)
    for count in np.unique(counts):
        which = np.flatnonzero(counts == count)
        members = group.order[(group.starts[which, None] + np.arange(count)).ravel()]
        fields = _fields(keys[members], None if rows is None else rows[members])
        per = 1 if rows is None else 2
        head = _with_keys(verb, bucket_keys[which], 2 + per * int(count), b"")
        parts.append(np.concatenate([head, fields.reshape(len(which), -1)], axis=1).ravel())
        orders.append(members)
    return Batch(np.concatenate(parts), len(counts), np.concatenate(orders))


def _fields(keys: NDArray[np.uint64], rows: Bytes | None) -> Bytes:
    """Of each key "$8 key", with rows "$8 key $width row", uint8 [n, …]."""
    frame = b"" if rows is None else b"$%d\r\n" % rows.shape[1]
    width = 14 if rows is None else 14 + len(frame) + rows.shape[1] + 2
    fields = np.empty((len(keys), width), np.uint8)
    fields[:, :4] = np.frombuffer(b"$8\r\n", np.uint8)
    fields[:, 4:12] = keys.astype("<u8").view(np.uint8).reshape(-1, 8)
    fields[:, 12:14] = (13, 10)
    if rows is not None:
        fields[:, 14 : 14 + len(frame)] = np.frombuffer(frame, np.uint8)
        fields[:, 14 + len(frame) : -2] = rows
        fields[:, -2:] = (13, 10)
    return fields


def _with_keys(verb: bytes, keys: Bytes, arguments: int, after: bytes) -> Bytes:
    """Beginnings of commands of so many arguments, the verb included: up to the key, and what comes after."""
    before = b"*%d\r\n%b$%d\r\n" % (arguments, _bulk(verb), keys.shape[1])
    after = b"\r\n" + after
    data = np.empty((len(keys), len(before) + keys.shape[1] + len(after)), np.uint8)
    data[:, : len(before)] = np.frombuffer(before, np.uint8)
    data[:, len(before) : len(before) + keys.shape[1]] = keys
    data[:, len(before) + keys.shape[1] :] = np.frombuffer(after, np.uint8)
    return data


def _bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)
