"""The one hash: golden vectors, and the xxhash package as the oracle."""

import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from streamtrain import _core

# XXH64 with seed 0. The first two are published with the algorithm; all pin the keys that are stored in checkpoints.
GOLDEN = {
    b"": 0xEF46DB3751D8E999,
    b"abc": 0x44BC2CF5AD770999,
    b"a": 0xD24EC4F1A98C6E5B,
    b"0": 0x633457081244AFEC,
    b"77": 0xE80C7B03DF787940,
    b"u42": 0x3D8C6979F480D9C1,
    b"-9223372036854775808": 0x9E606AB2DD272C10,
    b"18446744073709551615": 0x8D1F8F6D8DFA7C47,
    "Żubrówka".encode(): 0x03B39F5BE398445D,
    bytes(range(100)): 0x6AC1E58032166597,
}


def cross(keys: NDArray[np.uint64]) -> list[int]:
    """Crosses the columns of [n, columns], one id in each list."""
    offsets = np.arange(len(keys) + 1, dtype=np.int32)
    crossed, _, too_large = _core.cross_ragged([column.copy() for column in keys.T], [offsets] * keys.shape[1], 0)
    assert not too_large.any()
    return [int(key) for key in crossed]


@pytest.mark.parametrize(("text", "key"), GOLDEN.items())
def test_golden_keys(text: bytes, key: int) -> None:
    assert _core.hash_bytes(text) == key


def test_golden_cross_and_shards() -> None:
    keys = np.array([[GOLDEN[b"a"], GOLDEN[b"77"]], [GOLDEN[b"77"], GOLDEN[b"a"]]], np.uint64)
    assert cross(keys) == [0x2DE2FC244BB1E5EF, 0x180A4F50D87ACABE]
    slots = np.array([0, (1 << 48) - 1, 1 << 63, (1 << 64) - 1], np.uint64)
    assert _core.shards_of(slots, 1).tolist() == [0, 0, 0, 0]
    assert _core.shards_of(slots, 2).tolist() == [0, 0, 1, 1]
    assert _core.shards_of(slots, 3).tolist() == [0, 0, 1, 2]
    assert _core.shards_of(slots, 65536).tolist() == [0, 0, 32768, 65535]


@given(st.binary(max_size=300))
def test_bytes_are_xxh64(text: bytes) -> None:
    assert _core.hash_bytes(text) == xxhash.xxh64_intdigest(text)


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1)))
def test_signed_integers_are_their_decimal_text(ids: list[int]) -> None:
    keys = _core.hash_integers(np.array(ids, np.int64))
    assert keys.tolist() == [xxhash.xxh64_intdigest(str(i).encode()) for i in ids]


@given(st.lists(st.integers(0, (1 << 64) - 1)))
def test_unsigned_integers_are_their_decimal_text(ids: list[int]) -> None:
    keys = _core.hash_integers(np.array(ids, np.uint64))
    assert keys.tolist() == [xxhash.xxh64_intdigest(str(i).encode()) for i in ids]


@given(st.lists(st.text()))
def test_strings_are_their_utf8(texts: list[str]) -> None:
    encoded = [text.encode() for text in texts]
    data = np.frombuffer(b"".join(encoded), np.uint8)
    offsets = np.cumsum([0, *map(len, encoded)])
    expected = [xxhash.xxh64_intdigest(text) for text in encoded]
    assert _core.hash_strings(data, offsets.astype(np.int64)).tolist() == expected
    assert _core.hash_strings(data, offsets.astype(np.int32)).tolist() == expected


@pytest.mark.parametrize("offsets", [[0, 4], [2, 1], [-1, 2], [0, 3, 2]])
def test_strings_outside_their_data_are_an_error(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="offsets must ascend"):
        _core.hash_strings(np.zeros(3, np.uint8), np.array(offsets, np.int64))


@given(st.integers(2, 5).flatmap(lambda n: st.lists(st.lists(st.integers(0, (1 << 64) - 1), min_size=n, max_size=n))))
def test_cross_is_the_hash_of_little_endian_keys(rows: list[list[int]]) -> None:
    keys = np.array(rows, np.uint64).reshape(len(rows), len(rows[0]) if rows else 1)
    expected = [xxhash.xxh64_intdigest(struct.pack(f"<{len(row)}Q", *row)) for row in rows]
    assert cross(keys) == expected


@given(st.lists(st.integers(0, (1 << 64) - 1)), st.integers(1, 65536))
def test_shard_is_an_even_share_of_the_top_bits(keys: list[int], shards: int) -> None:
    owners = _core.shards_of(np.array(keys, np.uint64), shards)
    assert owners.tolist() == [((key >> 48) * shards) >> 16 for key in keys]


@pytest.mark.parametrize("shards", [0, 65537])
def test_number_of_shards_is_checked(shards: int) -> None:
    with pytest.raises(ValueError, match="shards must be between"):
        _core.shards_of(np.zeros(1, np.uint64), shards)
