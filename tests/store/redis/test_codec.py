"""How rows are kept, and where: bounds of error, checksums, names, commands."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.testing import assert_array_equal
from redis.crc import key_slot

from streamtrain.errors import ConfigError, PublicationError
from streamtrain.store.redis.codec import Codec, checksums
from streamtrain.store.redis.commands import KeyNames, field_commands, group_keys
from streamtrain.store.redis.layout import Layout, RedisKeys, TableSize, bucket_of, buckets_for

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
ROWS = st.tuples(st.integers(0, 5), st.integers(1, 9)).flatmap(lambda shape: arrays(np.float32, shape, elements=FLOATS))
WORD = 2**64 - 1


@given(ROWS)
def test_float32_keeps_rows(rows: np.ndarray) -> None:
    codec = Codec("float32", rows.shape[1])
    assert_array_equal(codec.decode(codec.encode(rows)), rows, strict=True)


@given(ROWS)
def test_float16_is_off_by_so_much(rows: np.ndarray) -> None:
    codec = Codec("float16", rows.shape[1])
    encoded = codec.encode(rows)
    assert encoded.shape == (len(rows), codec.width)
    small = np.clip(rows.astype(np.float64), -65504, 65504)
    assert (np.abs(codec.decode(encoded) - small) <= np.maximum(np.abs(small) / 2048, 2.0**-25)).all()


@given(ROWS)
def test_int8_is_off_by_so_much(rows: np.ndarray) -> None:
    codec = Codec("int8", rows.shape[1])
    encoded = codec.encode(rows)
    assert encoded.shape == (len(rows), codec.width)
    error = np.abs(codec.decode(encoded).astype(np.float64) - rows)
    assert (error <= np.abs(rows.astype(np.float64)).max(axis=1, keepdims=True) / 253 + 1e-43).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_refused(dtype: str, bad: float) -> None:
    rows = np.ones((3, 2), np.float32)
    rows[1, 1] = bad
    with pytest.raises(PublicationError, match="row 1 of 3 is not finite"):
        Codec(dtype, 2).encode(rows)
    with pytest.raises(PublicationError, match=r"expected rows of 3 elements, got an array of shape \(3, 2\)"):
        Codec(dtype, 3).encode(rows)


def test_what_cannot_be_kept() -> None:
    with pytest.raises(ConfigError, match="unknown dtype 'bfloat16'"):
        Codec("bfloat16", 2)
    with pytest.raises(ConfigError, match="at least 1 element, not 0"):
        Codec("int8", 0)
    for model in ("", "a{b", "a}b", "a\n"):
        with pytest.raises(ConfigError, match="invalid model name"):
            RedisKeys(model)


def mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & WORD
    return x ^ x >> 31


def checksum(key: int, row: bytes) -> int:
    total = mix(key)
    for j in range(0, len(row), 8):
        word = int.from_bytes(row[j : j + 8], "little")
        x = (word ^ word >> 32) * (0x9E3779B97F4A7C15 * (2 * (j // 8) + 1) & WORD) & WORD
        total += x ^ x >> 29
    return mix(total & WORD)


@given(st.lists(st.tuples(st.integers(0, WORD), st.binary(min_size=11, max_size=11)), max_size=20))
def test_checksums_are_as_documented(pairs: list[tuple[int, bytes]]) -> None:
    keys = np.array([key for key, _ in pairs], np.uint64)
    rows = np.frombuffer(b"".join(row for _, row in pairs), np.uint8).reshape(-1, 11)
    assert checksums(keys, rows).tolist() == [checksum(key, row) for key, row in pairs]


def test_checksums_tell_one_bit_and_swapped_rows() -> None:
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 2**64, 10_000, dtype=np.uint64)
    rows = rng.integers(0, 256, (10_000, 16), dtype=np.uint8)
    sums = checksums(keys, rows)
    assert len({*sums.tolist()}) == len(sums)
    for bit in range(128):
        other = rows.copy()
        other[:, bit // 8] ^= 1 << bit % 8
        assert (checksums(keys, other) != sums).all()
    other = rows.copy()
    other[:, (7, 15)] ^= 0x80  # the signs of two elements
    assert (checksums(keys, other) != sums).all()
    assert checksums(keys, rows[::-1]).sum(dtype=np.uint64) != sums.sum(dtype=np.uint64)


def test_a_golden_checksum() -> None:
    """As schemas/README.md says."""
    row = Codec("float32", 3).encode(np.array([[1, -2, 0.5]], np.float32))
    assert row.tobytes().hex() == "0000803f000000c00000003f"
    assert hex(checksums(np.array([0x3D8C6979F480D9C1], np.uint64), row)[0]) == "0x70f5b68442354dc2"


@given(
    st.text(st.characters(exclude_characters="{}", categories=["L", "N", "P"]), min_size=1), st.integers(0, 2**22 - 1)
)
def test_slots_are_those_of_a_cluster(model: str, bucket: int) -> None:
    keys = RedisKeys(model)
    buckets = np.array([bucket], np.int64)
    for dictionary in (1, 22):
        name = keys.rows("ta{b}le", dictionary).of(buckets).tobytes()
        assert keys.slots(buckets).tolist() == [key_slot(name)]


@pytest.mark.parametrize(("rows", "buckets"), [(0, 1), (1, 1), (90, 1), (100, 2), (64_000, 1024), (2**40, 2**22)])
def test_buckets_have_about_64_rows(rows: int, buckets: int) -> None:
    assert buckets_for(rows) == buckets


def test_buckets_are_of_bits_that_nothing_else_goes_by() -> None:
    keys = np.uint64(1) << np.arange(64, dtype=np.uint64)
    used = bucket_of(keys, 2**22) > 0
    assert np.flatnonzero(used).tolist() == list(range(10, 32))


def test_a_layout_as_json() -> None:
    layout = Layout.from_sizes(3, "int8", 2, {"item": TableSize(16, 10**6), "user": TableSize(8, 0)})
    assert Layout.from_json(layout.to_json()) == layout


@given(st.lists(st.integers(0, 5), max_size=40), st.booleans())
def test_commands_are_those_of_the_protocol(buckets: list[int], with_rows: bool) -> None:
    at = np.array(buckets, np.int64)
    keys = np.arange(len(at), dtype=np.uint64) + np.uint64(2**63)
    rows = np.arange(3 * len(at), dtype=np.uint8).reshape(-1, 3)
    batches = list(field_commands(b"HSET", KeyNames(b"a{", b"}b"), group_keys(at), keys, rows if with_rows else None))
    found: dict[int, list[bytes]] = {}
    for batch in batches:
        parts = batch.data.tobytes().split(b"\r\n")
        position = 0
        for _ in range(batch.size):
            count = int(parts[position][1:])
            words = parts[position + 2 : position + 2 * count + 1 : 2]
            assert [len(word) for word in words] == [
                int(size[1:]) for size in parts[position + 1 : position + 2 * count : 2]
            ]
            assert words[0] == b"HSET"
            found.setdefault(int(words[1][2:-2], 16), []).extend(words[2:])
            position += 2 * count + 1
    expected: dict[int, list[bytes]] = {}
    for bucket, key, row in zip(buckets, keys, rows, strict=True):
        expected.setdefault(bucket, []).extend([key.tobytes(), *([row.tobytes()] if with_rows else [])])
    assert found == expected
