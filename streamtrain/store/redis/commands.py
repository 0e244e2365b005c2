"""Commands on many hashes as bytes of the Redis protocol.

A client library packs value by value, which takes longer than the server needs for the command. Here all that is said
of one bucket is one command. Those with fields are put together by the native core, the others, which are all equally
long, by NumPy.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamtrain._core import group_by_bucket, pack_fields

Bytes = NDArray[np.uint8]

_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)
HEX_DIGITS = 6
"""Digits of a bucket's number in the name of its key: enough for 2^24 buckets."""

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


class CommandBatch(NamedTuple):
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
    """Keys by their buckets.

    Attributes:
        order: int64 [n], of the keys.
        buckets: int64 [b], those that there are, ascending.
        starts: int64 [b + 1], where in `order` the keys of each begin, and the last end.
    """

    order: NDArray[np.int64]
    buckets: NDArray[np.int64]
    starts: NDArray[np.int64]


def group_keys(buckets: NDArray[np.int64], at: NDArray[np.int64] | None = None) -> Grouped:
    """Groups keys by the bucket of each; within one they keep their order.

    Args:
        buckets: int64 [n].
        at: int64 [n], which of more keys these are; None: the first.
    """
    order, there, starts = group_by_bucket(buckets)
    return Grouped(order if at is None else at[order], there, starts)


def bucket_commands(verb: bytes, names: KeyNames, buckets: NDArray[np.int64], *more: bytes) -> CommandBatch:
    """A command "verb key more…" for each bucket."""
    keys = names.of(buckets)
    data = _with_keys(verb, keys, 2 + len(more), b"".join(_bulk(one) for one in more))
    return CommandBatch(data.ravel(), len(buckets))


def copy_commands(source: KeyNames, target: KeyNames, buckets: NDArray[np.int64]) -> CommandBatch:
    """A command for each bucket that copies it."""
    to = target.of(buckets)
    frame = b"$%d\r\n" % to.shape[1]
    tail = np.empty((len(buckets), len(frame) + to.shape[1] + 2), np.uint8)
    tail[:, : len(frame)] = np.frombuffer(frame, np.uint8)
    tail[:, len(frame) : -2] = to
    tail[:, -2:] = (13, 10)
    head = _with_keys(b"COPY", source.of(buckets), 4, b"")
    replace = np.broadcast_to(np.frombuffer(_bulk(b"REPLACE"), np.uint8), (len(buckets), 13))
    return CommandBatch(np.concatenate([head, tail, replace], axis=1).ravel(), len(buckets))


def field_commands(
    verb: bytes, names: KeyNames, group: Grouped, keys: NDArray[np.uint64], rows: Bytes | None = None
) -> Iterator[CommandBatch]:
    """Commands "verb bucket field…", or with rows "verb bucket field value…", one for each bucket.

    Args:
        verb: of the command.
        names: of the buckets' keys.
        group: of `keys`.
        keys: uint64 [n].
        rows: uint8 [n, width], the values.
    """
    keys, at = np.ascontiguousarray(keys), 0
    while at < len(group.buckets):
        end = max(at + 1, int(np.searchsorted(group.starts, group.starts[at] + BATCH_ROWS, "right")) - 1)
        starts = group.starts[at : end + 1]
        data = pack_fields(
            verb,
            names.before,
            names.after,
            order=group.order,
            buckets=group.buckets[at:end],
            starts=starts,
            keys=keys,
            rows=rows,
        )
        yield CommandBatch(data, end - at, group.order[starts[0] : starts[-1]])
        at = end


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
