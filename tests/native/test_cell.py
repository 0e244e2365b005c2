"""Cells of numbers: golden vectors, and the formula in Python and the xxhash package as oracles."""

import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from streamtrain._core import CategoricalSpec, CrossSpec, Decoder, NumericSpec, hash_cells

BITS = st.lists(st.integers(0, 23), min_size=1, max_size=6)
FLOATS = st.floats(width=32, allow_nan=False)


def key(number: float | None, bits: int) -> int:
    """Sign, exponent and the first bits of the mantissa, below a leading 1."""
    cell = 1
    if number is not None:
        raw = int.from_bytes(struct.pack(">f", number + 0.0), "big")
        cell = int("1" + f"{raw:032b}"[: 9 + bits], 2)
    return xxhash.xxh64_intdigest(cell.to_bytes(8, "little"))


def decoder(*numerics: NumericSpec) -> Decoder:
    return Decoder(
        labels=[],
        categoricals=[CategoricalSpec("user"), CategoricalSpec("tags")],
        crosses=[CrossSpec("both", [0, 1])],
        numerics=numerics,
        time=None,
        weight=None,
    )


def keys_of(columns: Any, feature: int) -> list[list[int]]:
    keys = columns.keys[columns.starts[feature] : columns.starts[feature + 1]]
    return [
        keys[start:end].tolist() for start, end in np.lib.stride_tricks.sliding_window_view(columns.offsets[feature], 2)
    ]


def test_golden_keys() -> None:
    """These never change: rows are stored under them."""
    assert hash_cells(np.array([1.5, -7e9, 0.0, np.nan], np.float32), [0, 16]).tolist() == [
        *(0x7F95F1B22B30A8C0, 0x8E06AE5DA78AB6DE),  # 1.5
        *(0x18B32E0B75F2BD2D, 0xB3E87D3FBEFFDE5E),  # -7e9
        *(0x1C9ADD4F74161E0A, 0xDBDA3B6DE1046BB6),  # 0
        *(0x9F29CB17A2A49995, 0x9F29CB17A2A49995),  # missing
    ]


@given(numbers=st.lists(FLOATS), bits=BITS)
def test_keys_are_the_formula(numbers: list[float], bits: list[int]) -> None:
    expected = [key(number, one) for number in numbers for one in bits]
    assert hash_cells(np.array(numbers, np.float32), bits).tolist() == expected


@given(number=FLOATS.filter(np.isfinite), bits=st.integers(0, 22))
def test_a_cell_is_the_union_of_two_of_the_next_size(number: float, bits: int) -> None:
    """And numbers that are equal are in the same ones, whatever their sign is written like."""
    near = np.nextafter(np.float32(number), np.float32(np.inf))
    coarse = hash_cells(np.array([number, near], np.float32), [bits])
    fine = hash_cells(np.array([number, near], np.float32), [bits + 1])
    assert coarse[0] == coarse[1] or fine[0] != fine[1]
    assert_array_equal(hash_cells(np.array([-0.0], np.float32), [bits]), hash_cells(np.zeros(1, np.float32), [bits]))


@pytest.mark.parametrize("bits", [[-1], [24], [3, 40]])
def test_bits_are_checked(bits: Sequence[int]) -> None:
    with pytest.raises(ValueError, match="0 to 23 bits"):
        hash_cells(np.zeros(1, np.float32), bits)
    with pytest.raises(ValueError, match='cells of numeric "x" have 0 to 23 bits'):
        decoder(NumericSpec("x", cells=bits))


@given(numbers=st.lists(st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False)), min_size=1), bits=BITS)
def test_decoded_samples_have_the_cells_of_their_numbers(numbers: list[float | None], bits: list[int]) -> None:
    """Behind ids and crosses, as float32; of a missing number one; of one without cells none."""
    made = decoder(
        NumericSpec("x", default=0.5, transform="log1p", cells=bits),
        NumericSpec("x", default=0.0, transform="log1p"),
        NumericSpec("y", cells=[7]),
    )
    samples = [{"user": 1, "tags": [2, 3], "y": i} | ({} if x is None else {"x": x}) for i, x in enumerate(numbers)]
    columns = made.decode([json.dumps(one).encode() for one in samples])
    assert columns.numeric.shape == (len(numbers), 3)
    assert len(columns.starts) == 6
    with np.errstate(over="ignore"):
        stored = [None if x is None else float(np.float32(x)) for x in numbers]
    assert keys_of(columns, 3) == [[key(x, b) for b in bits] if x is not None else [key(None, 0)] for x in stored]
    assert keys_of(columns, 4) == [[key(float(i), 7)] for i in range(len(numbers))]


def test_a_refused_sample_leaves_no_cells() -> None:
    columns = decoder(NumericSpec("x", cells=[0, 1]), NumericSpec("y", cells=[2])).decode(
        [b'{"user": 1, "tags": [], "x": 2, "y": "no"}', b'{"user": 1, "tags": [], "x": 3, "y": 4}']
    )
    assert [reason for _, reason, *_ in columns.errors] == ["wrong_type"]
    assert keys_of(columns, 3) == [[key(3.0, 0), key(3.0, 1)]]
    assert keys_of(columns, 4) == [[key(4.0, 2)]]
