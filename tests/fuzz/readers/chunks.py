"""Chunks: rows as Redis keeps them come back as they were, and as commands and replies they are the same.

Input: a byte for the type, one for the elements of a row, one for the number of buckets, then keys and rows.
"""

import struct
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from streamtrain.errors import PublicationError
from streamtrain.store.redis.buckets import Buckets, EncodedChange
from streamtrain.store.redis.codec import Codec, checksums
from streamtrain.store.redis.commands import field_commands, group_keys
from streamtrain.store.redis.layout import Layout, RedisKeys, TableLayout
from tests.fuzz.readers.kept import KeptServer, commands, packed
from tests.store.redis.test_codec import checksum

_DTYPES = ["float32", "float16", "int8"]


def run(data: bytes) -> None:
    """One input."""
    if len(data) < 3:
        return
    dtype, dim, buckets = _DTYPES[data[0] % len(_DTYPES)], 1 + data[1] % 9, 1 << data[2] % 4
    layout = Layout(1, dtype, 1, {"t": TableLayout(dim, buckets)})
    one = np.dtype([("key", "<u8"), ("row", "<f4", (dim,))])
    pairs = np.frombuffer(data[3 : 3 + (len(data) - 3) // one.itemsize * one.itemsize], one)
    pairs = pairs[np.unique(pairs["key"], return_index=True)[1]]
    keys, rows = np.ascontiguousarray(pairs["key"]), np.ascontiguousarray(pairs["row"])
    try:
        encoded = layout.codec("t").encode(rows)
    except PublicationError:
        assert not np.isfinite(rows).all()
        return
    assert encoded.shape == (len(keys), layout.codec("t").width)
    assert_near(layout.codec("t"), rows, layout.codec("t").decode(encoded))
    sums = [checksum(key, row.tobytes()) for key, row in zip(keys.tolist(), encoded, strict=True)]
    assert checksums(keys, encoded).tolist() == sums
    assert_kept(layout, EncodedChange("t", keys, encoded, keys[:0]))


def assert_near(codec: Codec, rows: NDArray[np.float32], back: NDArray[np.float32]) -> None:
    """As the types promise; see redis_codec.py."""
    exact = rows.astype(np.float64)
    if codec.dtype == "float16":
        exact = np.clip(exact, -65504, 65504)
        bound = np.maximum(np.abs(exact) / 2048, 2.0**-25)
    else:
        bound = np.abs(exact).max(axis=1, keepdims=True, initial=0) / 253 + 1e-43
    assert (np.abs(back - exact) <= (0 if codec.dtype == "float32" else bound)).all()


def assert_kept(layout: Layout, change: EncodedChange) -> None:
    """What is written by commands is what is read from a server that has carried them out."""
    names, at = RedisKeys("m").rows("t", 1), layout.buckets("t", change.keys)
    there: dict[str, list[tuple[bytes, bytes]]] = {}
    for batch in field_commands(b"HSET", names, group_keys(at), change.keys, change.rows):
        for _, key, *flat in commands(batch.data.tobytes()):
            bucket = int(key.partition(b"/")[2][:6], 16)
            there[f"rows/t/{bucket}"] = [*zip(flat[::2], flat[1::2], strict=True)]
    server = KeptServer("m", {name: packed(rows) for name, rows in there.items()})
    buckets = Buckets(server, RedisKeys("m"), layout)
    expected = dict(zip(change.keys.tolist(), map(bytes, change.rows), strict=True))
    read = {
        key: bytes(row) for keys, rows, _ in buckets.read("t") for key, row in zip(keys.tolist(), rows, strict=True)
    }
    assert read == expected
    asked = np.append(change.keys[::-1], np.uint64(0xABCDEF))
    rows, found = buckets.look_up({"t": asked})["t"]
    assert found.tolist() == [key in expected for key in asked.tolist()]
    assert all(bytes(row) == expected.get(key, bytes(len(row))) for key, row in zip(asked.tolist(), rows, strict=True))


def seeds() -> Iterator[bytes]:
    """Rows at the edges of each type, in one bucket and in several."""
    values = [0.0, -0.0, 1.0, -65504.0, 65520.0, 3.4e38, 1e-45, 6e-8, -1e-40, 127.5, 0.1, float("nan")]
    for dtype in range(len(_DTYPES)):
        for buckets in range(4):
            rows = b"".join(struct.pack("<Q3f", k << 10, *(values * 2)[k : k + 3]) for k in range(9))
            yield bytes([dtype, 2, buckets]) + rows
        yield bytes([dtype, 0, 0]) + struct.pack("<QfQf", 1, values[-1], 1, 2.0)
