"""Crosses of ragged columns against itertools.product and the one hash."""

import itertools
import math
import struct
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from streamtrain import _core

MOST = 4096

Lists = Sequence[Sequence[int]]  # keys by sample
keys = st.integers(0, 2**64 - 1)


def ragged(lists: Lists) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    flat = np.array([key for one in lists for key in one], np.uint64)
    return flat, np.cumsum([0, *map(len, lists)]).astype(np.int32)


def cross(columns: Sequence[Lists], max_length: int = 0) -> tuple[list[list[int]], list[bool]]:
    """The keys of each sample, and which samples have too many."""
    flat, offsets = zip(*map(ragged, columns), strict=True)
    crossed, ends, too_many = _core.cross_ragged(flat, offsets, max_length)
    assert [one.dtype.name for one in (crossed, ends, too_many)] == ["uint64", "int32", "uint8"]
    return [crossed[a:b].tolist() for a, b in itertools.pairwise(ends)], too_many.astype(bool).tolist()


def product(lists: Sequence[Sequence[int]], max_length: int = 0) -> list[int]:
    combinations = [_core.hash_bytes(struct.pack(f"<{len(lists)}Q", *one)) for one in itertools.product(*lists)]
    return combinations[-max_length:] if max_length else combinations


@st.composite
def columns_of_keys(draw: st.DrawFn) -> list[Lists]:
    samples = draw(st.integers(0, 5))
    return [[draw(st.lists(keys, max_size=4)) for _ in range(samples)] for _ in range(draw(st.integers(1, 4)))]


@given(columns_of_keys(), st.integers(0, 20))
def test_keys_are_the_hashes_of_the_product(columns: list[Lists], max_length: int) -> None:
    crossed, too_many = cross(columns, max_length)
    assert crossed == [product(of_sample, max_length) for of_sample in zip(*columns, strict=True)]
    assert not any(too_many)


@given(st.integers(1, 100))
def test_max_length_keeps_the_last(max_length: int) -> None:
    first, second = list(range(7)), list(range(100, 113))
    (limited,), _ = cross([[first], [second]], max_length)
    assert limited == product([first, second])[-max_length:]


def test_eight_lists_at_most() -> None:
    ones: Lists = [[1]]
    crossed, _ = cross([ones] * 8)
    assert crossed == [[_core.hash_bytes(struct.pack("<8Q", *[1] * 8))]]
    with pytest.raises(ValueError, match="1 to 8 columns"):
        cross([ones] * 9)


@pytest.mark.parametrize(
    ("lengths", "fits"),
    [
        ((64, 64), True),
        ((4096, 1), True),
        ((1, 4096), True),
        ((64, 65), False),
        ((4097, 1), False),
        ((17, 17, 17), False),
    ],
)
def test_more_than_4096_combinations_are_refused(lengths: tuple[int, ...], fits: bool) -> None:
    lists = [[list(range(n))] for n in lengths]
    (crossed,), (too_many,) = cross(lists)
    assert too_many is not fits
    assert len(crossed) == (math.prod(lengths) if fits else 0)


def test_refusal_goes_before_max_length_and_leaves_other_samples_alone() -> None:
    many = list(range(MOST + 1))
    crossed, too_many = cross([[[1, 2], many, [3]], [[7], [7], [8]]], 1)
    assert too_many == [False, True, False]
    assert crossed == [product([[2], [7]]), [], product([[3], [8]])]


def test_empty_list_has_no_combinations_however_long_the_others() -> None:
    many = list(range(10 * MOST))
    assert cross([[many], [many], [[]]]) == ([[]], [False])
    assert cross([[[]], [many], [many]]) == ([[]], [False])


def test_order_of_columns_matters() -> None:
    forward, _ = cross([[[1]], [[2]]])
    backward, _ = cross([[[2]], [[1]]])
    assert forward != backward


@pytest.mark.parametrize(
    "offsets",
    [[], [0], [0, 1], [0, 2, 1], [1, 2, 2], [0, 3, 2], [0, 1, 3], [0, -1, 2], [0, 1, 1, 2]],
)
def test_offsets_that_do_not_fit(offsets: list[int]) -> None:
    good = np.array([0, 1, 2], np.int32)
    two = np.array([1, 2], np.uint64)
    with pytest.raises(ValueError, match="offsets must"):
        _core.cross_ragged([two, two], [good, np.array(offsets, np.int32)], 0)


def test_columns_without_offsets() -> None:
    two = np.array([1, 2], np.uint64)
    with pytest.raises(ValueError, match="give keys and offsets of each column"):
        _core.cross_ragged([two, two], [np.array([0, 1, 2], np.int32)], 0)
    with pytest.raises(ValueError, match="1 to 8 columns"):
        _core.cross_ragged([], [], 0)
