"""The table's index where keys collide: in segment, home bucket and tag, through growth and removal."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from numpy.typing import NDArray

from streamtrain import _core
from tests.native.examples import examples

Keys = NDArray[np.uint64]


def pushed(table: _core.Table, keys: Keys) -> None:
    """Each key once more."""
    ones = np.ones(len(keys), np.uint32)
    table.push(keys, np.ones((len(keys), 1), np.float32), ones, ones)


def counting() -> _core.Table:
    return _core.Table(1, optimizer="sgd", rate=1.0, init="constant", init_scale=0.0)


def made(numbers: Keys, homes: Keys, low: Keys) -> Keys:
    """Keys of one segment whose places have bits 53..28 (home), 21..10 (filter, tag) and 9..0 and 27..22 (numbers)."""
    rest: Keys = numbers % np.uint64(1024) | numbers // np.uint64(1024) << np.uint64(22)
    places: Keys = homes << np.uint64(28) | low << np.uint64(10) | rest
    return _core.keys_at(places)


def assert_counts(table: _core.Table, universe: Keys, expected: dict[int, int]) -> None:
    found, counts, _ = table.lookup(universe)
    assert_array_equal(found, [key in expected for key in universe.tolist()])
    assert_array_equal(counts, [expected.get(key, 0) for key in universe.tolist()])
    assert len(table) == len(expected)


def through(table: _core.Table, universe: Keys, rng: np.random.Generator, steps: int, batch: int) -> None:
    """Pushes and removes keys at random, more pushes than removals first and fewer at last; looks at all of them."""
    expected: dict[int, int] = {}
    for step in range(steps):
        keys = rng.choice(universe, batch)
        pushed(table, keys)
        for key in keys.tolist():
            expected[key] = expected.get(key, 0) + 1
        gone = rng.choice(universe, batch * 2 * step // steps)
        assert table.remove(gone) == sum(expected.pop(key, None) is not None for key in gone.tolist())
        if step % 4 == 3:
            assert_counts(table, universe, expected)
    assert table.remove(universe) == len(expected)
    assert_counts(table, universe, {})


@pytest.mark.parametrize("homes", [1, 2, 40, 1 << 26], ids=lambda n: f"{n}-homes")
@pytest.mark.parametrize("lows", [1, 1 << 12], ids=lambda n: f"{n}-tags")
def test_one_segment_of_keys_alike(homes: int, lows: int) -> None:
    """One home bucket has far more keys than slots, so that they overflow into many others, at every size."""
    rng = np.random.default_rng(homes * lows)
    numbers = np.arange(3000, dtype=np.uint64)
    places = rng.integers(0, homes, 3000).astype(np.uint64)
    low = rng.integers(0, lows, 3000).astype(np.uint64)
    through(counting(), made(numbers, places, low), rng, 24, 700)


def test_the_last_bucket_overflows_into_the_first() -> None:
    rng = np.random.default_rng(3)
    numbers = np.arange(600, dtype=np.uint64)
    homes = np.where(numbers % 3, (1 << 26) - 1, 0).astype(np.uint64)
    low = rng.integers(0, 1 << 12, 600).astype(np.uint64)
    through(counting(), made(numbers, homes, low), rng, 40, 100)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 2000), st.sampled_from([1, 3, 300]))
def test_any_size(seed: int, size: int, segments: int) -> None:
    rng = np.random.default_rng(seed)
    places = rng.integers(0, 2**54, size, dtype=np.uint64)
    segment = rng.integers(0, segments, size).astype(np.uint64)
    places |= segment << np.uint64(54)
    through(counting(), _core.keys_at(places), rng, 8, size)


def test_memory_of_the_index_while_it_grows() -> None:
    """Per row, whatever the size."""
    rng = np.random.default_rng(4)
    table = counting()
    for _ in range(40):
        pushed(table, rng.integers(0, 2**64, 20_000, dtype=np.uint64))
        if len(table) >= 200_000:
            assert 64 / 12 < table.stats()["index_bytes"] / len(table) < 11
    assert table.stats()["index_bytes"] / len(table) < 9
