"""Merging batches of row gradients against the oracle."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from streamtrain import _core
from tests.oracles.merge import Part, merge


def native(parts: Sequence[Part], scales: Sequence[float]) -> Part:
    keys, gradients, counts, times = zip(*parts, strict=True)
    return Part(*_core.merge_rows(keys, gradients, counts, times, scales))


def random_part(rng: np.random.Generator, keys: list[int], dim: int) -> Part:
    n = len(keys)
    gradients = (rng.standard_normal((n, dim)) * 10.0 ** rng.integers(-20, 20)).astype(np.float32)
    counts = rng.choice(np.array([0, 1, 2, 3, 2**31, 2**32 - 1], np.uint32), n)
    return Part(np.array(keys, np.uint64), gradients, counts, rng.integers(0, 2**32, n, dtype=np.uint32))


def assert_same(actual: Part, expected: Part) -> None:
    for name in Part._fields:
        one, other = getattr(actual, name), getattr(expected, name)
        assert one.dtype == other.dtype
        assert_array_equal(one, other)


# The last ones begin at the same place of the table.
KEYS = st.sampled_from([0, 1, 2**64 - 1, *range(100, 130), *(5 + (i << 40) for i in range(20))])


@given(
    lists=st.lists(st.lists(KEYS, unique=True, max_size=40), min_size=1, max_size=5),
    dim=st.sampled_from([1, 3, 16]),
    seed=st.integers(0, 2**32),
)
def test_merging_equals_the_oracle(lists: list[list[int]], dim: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = [random_part(rng, keys, dim) for keys in lists]
    scales = rng.choice([1.0, 0.5, 1 / 3, -2.0, 0.0], len(parts)).tolist()
    assert_same(native(parts, scales), merge(parts, scales))


def test_many_rows() -> None:
    rng = np.random.default_rng(1)
    universe = rng.integers(0, 2**64, 5000, dtype=np.uint64)
    parts = [random_part(rng, rng.permutation(universe)[:3000].tolist(), 8) for _ in range(3)]
    assert_same(native(parts, [0.2, 0.3, 0.5]), merge(parts, [0.2, 0.3, 0.5]))


def test_what_is_not_finite_stays_so() -> None:
    keys, ones = np.arange(3, dtype=np.uint64), np.ones(3, np.uint32)
    first = Part(keys, np.array([[np.inf], [np.nan], [1]], np.float32), ones, ones)
    second = Part(keys, np.array([[-np.inf], [1], [2]], np.float32), ones, ones)
    merged = native([first, second], [1, 1])
    assert_array_equal(merged.gradients, np.array([[np.nan], [np.nan], [3]], np.float32))


def test_results_are_their_own() -> None:
    part = random_part(np.random.default_rng(2), [1, 2], 2)
    merged = native([part], [1.0])
    assert_same(merged, part)
    assert not any(np.shares_memory(one, other) for one, other in zip(merged, part, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gradients": np.ones((2, 3), np.float32)}, "part 1: gradients must be"),
        ({"gradients": np.ones((3, 2), np.float32)}, "part 1: gradients must be"),
        ({"counts": np.ones(3, np.uint32)}, "part 1: counts"),
        ({"times": np.ones(1, np.uint32)}, "part 1: times"),
    ],
)
def test_parts_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    part = random_part(np.random.default_rng(3), [1, 2], 2)
    with pytest.raises(ValueError, match=message):
        native([part, part._replace(**change)], [1.0, 1.0])


def test_bad_arguments() -> None:
    part = random_part(np.random.default_rng(4), [1, 2], 2)
    with pytest.raises(ValueError, match="at least one part"):
        _core.merge_rows([], [], [], [], [])
    with pytest.raises(ValueError, match="a scale of each part"):
        native([part, part], [1.0])
    for scale in (np.nan, np.inf, 1e300):
        with pytest.raises(ValueError, match="part 0: the scale must be finite"):
            native([part], [scale])
    with pytest.raises(TypeError):
        native([part._replace(keys=part.keys.astype(np.int64))], [1.0])
