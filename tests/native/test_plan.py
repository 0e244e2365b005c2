"""The plan of a batch against its oracle: unique keys by table and shard, pooling, and its gradient."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

from streamtrain import _core
from tests.oracles import plan as oracle
from tests.oracles.plan import Feature, Lists

SHARDS = [1, 2, 7]
COMBINERS = ["sum", "mean", "sqrtn", "none"]
MAX_U32 = 2**32 - 1


class Case(NamedTuple):
    features: list[Feature]
    dims: list[int]
    shards: int
    ids: list[Lists]
    times: list[float]

    def planner(self) -> _core.Planner:
        return planner_of(self.features, self.dims, self.shards)

    def build(self) -> tuple[_core.Plan, oracle.Plan]:
        return self.planner().plan(*oracle.columns_of(self.ids, self.times)), oracle.Plan(*self)


def planner_of(features: Sequence[Feature], dims: Sequence[int], shards: int = 1) -> _core.Planner:
    return _core.Planner([(f.table, f.combiner, f.max_length) for f in features], dims, shards)


@st.composite
def cases(draw: st.DrawFn, combiners: Sequence[Any] = COMBINERS) -> Case:
    dims = draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    feature = st.builds(Feature, st.integers(0, len(dims) - 1), st.sampled_from(combiners), st.integers(1, 5))
    features = draw(st.lists(feature, max_size=5))
    samples = draw(st.integers(0, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    # A few keys, so that they repeat; some of them equal in their low bits, some at the ends of the range.
    low = rng.integers(0, 2**64, 3, dtype=np.uint64) & np.uint64(0xFFFFFFFF)
    high = rng.integers(0, 2**16, 6, dtype=np.uint64) << np.uint64(48)
    keys = [0, 2**64 - 1, *(low[:, None] | high).ravel().tolist()]
    single = draw(st.booleans())  # every sample has exactly one id, which the core stores without offsets
    ids: list[Lists] = [
        [
            rng.choice(np.array(keys, np.uint64), 1 if single else rng.integers(0, f.max_length + 1)).tolist()
            for _ in range(samples)
        ]
        for f in features
    ]
    times = (1.7e9 + rng.integers(0, 10_000, samples) / 7).tolist()
    return Case(features, dims, draw(st.sampled_from(SHARDS)), ids, times)


def whole_numbers(seed: int, *shape: int) -> NDArray[np.float32]:
    """Float32 whole numbers of which thousands can be added without rounding."""
    return np.random.default_rng(seed).integers(-1000, 1001, shape).astype(np.float32)


# --- building ----------------------------------------------------------------------------------------------------


@given(cases())
def test_tables_are_those_of_the_oracle(case: Case) -> None:
    plan, expected = case.build()
    assert (plan.samples, plan.width) == (expected.samples, expected.width)
    assert plan.row_starts.tolist() == expected.row_starts
    for t, table in enumerate(expected.tables):
        assert plan.keys(t).tolist() == table.keys
        assert plan.counts(t).tolist() == table.counts
        assert plan.times(t).tolist() == table.times
        assert plan.shard_starts(t).tolist() == table.shard_starts


@given(cases())
def test_keys_of_a_shard_are_those_that_it_owns(case: Case) -> None:
    plan, _ = case.build()
    for t in range(len(case.dims)):
        bounds = plan.shard_starts(t)
        owners = np.repeat(np.arange(case.shards), np.diff(bounds))
        assert_array_equal(_core.shards_of(plan.keys(t), case.shards), owners)


@given(cases())
def test_planner_knows_its_columns(case: Case) -> None:
    expected = oracle.Plan(case.features, case.dims, 1, [[] for _ in case.features], [])
    assert case.planner().columns == expected.columns
    assert case.planner().width == expected.width


def test_times_are_whole_seconds_that_fit() -> None:
    times = [-5.0, 0.0, 0.9, 1.0, 1.7e9 + 0.999, 2.0**32 - 1, 2.0**32, 1e300, np.inf, np.nan]
    plan = planner_of([Feature(0)], [1]).plan(*oracle.columns_of([[[i] for i in range(len(times))]], times))
    assert plan.times(0).tolist() == [0, 0, 0, 1, 1_700_000_000, MAX_U32, MAX_U32, MAX_U32, MAX_U32, 0]


def test_latest_time_counts_in_whatever_order_samples_come() -> None:
    plan = planner_of([Feature(0), Feature(0)], [1]).plan(
        *oracle.columns_of([[[5], [5], [5]], [[6], [], [7]]], [20.0, 30.0, 10.0])
    )
    assert dict(zip(plan.keys(0).tolist(), plan.times(0).tolist(), strict=True)) == {5: 30, 6: 20, 7: 10}


def test_batch_without_samples() -> None:
    plan = planner_of([Feature(0), Feature(1, "none", 3)], [4, 2], 7).plan(*oracle.columns_of([[], []], []))
    assert plan.samples == 0
    assert plan.row_starts.tolist() == [0, 0, 0]
    assert plan.shard_starts(1).tolist() == [0] * 8
    assert plan.pool(np.empty(0, np.float32)).shape == (0, 4 + 6)
    assert plan.unpool(np.empty((0, 10), np.float32)).shape == (0,)


def test_model_without_embedded_features() -> None:
    plan = planner_of([], [], 2).plan(*oracle.columns_of([], [1.0, 2.0]))
    assert plan.row_starts.tolist() == [0]
    assert plan.pool(np.empty(0, np.float32), 3).shape == (2, 3)
    assert plan.unpool(np.empty((2, 0), np.float32)).shape == (0,)


@given(cases(), cases())
def test_plans_of_one_planner_are_independent(case: Case, other: Case) -> None:
    planner = case.planner()
    plan = planner.plan(*oracle.columns_of(case.ids, case.times))
    backwards = [lists[::-1] for lists in case.ids]
    planner.plan(*oracle.columns_of(backwards, case.times))
    other.planner().plan(*oracle.columns_of(other.ids, other.times))
    assert plan.row_starts.tolist() == oracle.Plan(*case).row_starts
    for t, table in enumerate(oracle.Plan(*case).tables):
        assert plan.keys(t).tolist() == table.keys


# --- pooling -----------------------------------------------------------------------------------------------------


@given(cases(["sum", "none"]), st.integers(0, 2**32))
def test_pooling_without_rounding_is_exactly_the_oracle(case: Case, seed: int) -> None:
    plan, expected = case.build()
    rows = whole_numbers(seed, expected.row_starts[-1])
    assert_array_equal(plan.pool(rows), expected.pool(rows))


@given(cases(), st.integers(0, 2**32))
def test_pooling_is_the_oracle(case: Case, seed: int) -> None:
    plan, expected = case.build()
    rows = np.random.default_rng(seed).normal(size=expected.row_starts[-1]).astype(np.float32)
    assert_allclose(plan.pool(rows), expected.pool(rows), rtol=1e-5, atol=1e-5)


@given(cases(["sum", "none"]), st.integers(0, 2**32))
def test_unpooling_without_rounding_is_exactly_the_oracle(case: Case, seed: int) -> None:
    plan, expected = case.build()
    gradient = whole_numbers(seed, expected.samples, expected.width)
    assert_array_equal(plan.unpool(gradient), expected.unpool(gradient))


@given(cases(), st.integers(0, 2**32))
def test_unpooling_is_the_oracle(case: Case, seed: int) -> None:
    plan, expected = case.build()
    gradient = np.random.default_rng(seed).normal(size=(expected.samples, expected.width)).astype(np.float32)
    assert_allclose(plan.unpool(gradient), expected.unpool(gradient), rtol=1e-4, atol=1e-4)


@given(cases(), st.integers(0, 2**32), st.integers(1, 5))
def test_unpooling_leaves_further_columns_out(case: Case, seed: int, further: int) -> None:
    plan, expected = case.build()
    wide = whole_numbers(seed, expected.samples, expected.width + further)
    assert_array_equal(plan.unpool(wide), plan.unpool(np.ascontiguousarray(wide[:, : expected.width])))


@given(cases(), st.integers(0, 2**32))
def test_unpooling_is_the_adjoint_of_pooling(case: Case, seed: int) -> None:
    plan, expected = case.build()
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=expected.row_starts[-1]).astype(np.float32)
    gradient = rng.normal(size=(expected.samples, expected.width)).astype(np.float32)
    forward = float(np.sum(plan.pool(rows).astype(np.float64) * gradient))
    backward = float(np.sum(plan.unpool(gradient).astype(np.float64) * rows))
    assert forward == pytest.approx(backward, rel=1e-4, abs=1e-3)


# Dimensions for which the core has loops of its own, and neighbours.
@pytest.mark.parametrize("dim", [1, 2, 4, 5, 8, 16, 17, 32, 64, 100, 128, 129])
@pytest.mark.parametrize("combiner", COMBINERS)
def test_every_width_of_row(dim: int, combiner: Any) -> None:
    features = [Feature(0, combiner, 3), Feature(0, "sum")]
    case = Case(features, [dim], 2, [[[1], [], [2, 1], [3, 3, 2]], [[1], [4], [2], [2]]], [1.0, 2.0, 3.0, 4.0])
    plan, expected = case.build()
    rows = whole_numbers(dim, expected.row_starts[-1])
    assert_allclose(plan.pool(rows), expected.pool(rows), rtol=1e-6)
    gradient = whole_numbers(dim, 4, expected.width)
    assert_allclose(plan.unpool(gradient), expected.unpool(gradient), rtol=1e-6, atol=1e-3)


def test_extra_columns_stand_on_the_right() -> None:
    case = Case([Feature(0), Feature(1, "none", 2)], [3, 2], 1, [[[1], [2]], [[], [7, 8]]], [0.0, 0.0])
    plan, expected = case.build()
    rows = whole_numbers(0, expected.row_starts[-1])
    matrix = plan.pool(rows, 5)
    assert matrix.shape == (2, expected.width + 5)
    assert_array_equal(matrix[:, : expected.width], plan.pool(rows))


def test_matrices_start_on_a_cache_line() -> None:
    case = Case([Feature(0)], [3], 1, [[[1], [2]]], [0.0, 0.0])
    plan, _ = case.build()
    assert plan.pool(whole_numbers(0, 6)).ctypes.data % 64 == 0
    assert plan.unpool(whole_numbers(0, 2, 3)).ctypes.data % 64 == 0


def test_views_outlive_plan_and_planner() -> None:
    case = Case([Feature(0)], [2], 2, [[[1], [2**63], [1]]], [1.0, 2.0, 3.0])
    plan = case.planner().plan(*oracle.columns_of(case.ids, case.times))
    views = plan.keys(0), plan.counts(0), plan.times(0), plan.shard_starts(0), plan.row_starts
    del plan
    assert [view.tolist() for view in views] == [[1, 2**63], [2, 1], [3, 2], [0, 1, 2], [0, 4]]
    assert not any(view.flags.writeable for view in views)


# --- what does not fit ------------------------------------------------------------------------------------------

TWO = [Feature(0), Feature(0, "none", 2)]


def columns(**changed: Any) -> oracle.Columns:
    """A good batch of two samples for `TWO`, with some columns replaced."""
    good = oracle.columns_of([[[1], [2, 3]], [[4, 5], []]], [1.0, 2.0])
    return good._replace(**changed)


def test_good_columns_fit() -> None:
    assert planner_of(TWO, [2]).plan(*columns()).samples == 2


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([0, 3], "starts must have one entry per feature"),
        ([0, 3, 5, 5], "starts must have one entry per feature"),
        ([1, 3, 5], "starts must have one entry per feature"),
        ([0, 3, 4], "starts must have one entry per feature"),
        ([0, 3, 6], "starts must have one entry per feature"),
        ([0, 2, 5], "offsets must run from 0"),
        ([0, -1, 5], "starts must have one entry per feature"),
        ([0, 2**62, 5], "starts must have one entry per feature"),
    ],
)
def test_starts_that_do_not_fit(starts: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planner_of(TWO, [2]).plan(*columns(starts=np.array(starts, np.int64)))


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([[0, 1, 3]], r"offsets must be \[features, samples \+ 1\]"),
        ([[0, 3], [0, 2]], r"offsets must be \[features, samples \+ 1\]"),
        ([[0, 1, 2, 3], [0, 1, 1, 2]], r"offsets must be \[features, samples \+ 1\]"),
        ([[1, 1, 3], [0, 2, 2]], "offsets must run from 0"),
        ([[0, 1, 2], [0, 2, 2]], "offsets must run from 0"),
        ([[0, 1, 4], [0, 2, 2]], "offsets must run from 0"),
        ([[0, 4, 3], [0, 2, 2]], "offsets must ascend"),
        ([[0, -1, 3], [0, 2, 2]], "offsets must ascend"),
    ],
)
def test_offsets_that_do_not_fit(offsets: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planner_of(TWO, [2]).plan(*columns(offsets=np.array(offsets, np.int32)))


def test_offsets_whose_differences_overflow() -> None:
    """Each difference is positive modulo 2^32, and they add up to the number of keys modulo 2^32."""
    offsets = np.array([[0, 2**31 - 1, -2, 1]], np.int32)
    with pytest.raises(ValueError, match="offsets must ascend"):
        planner_of([Feature(0)], [1]).plan(np.zeros(1, np.uint64), np.array([0, 1]), offsets, np.zeros(3))


def test_sequence_longer_than_its_max_length() -> None:
    with pytest.raises(ValueError, match="longer than its max_length"):
        planner_of([Feature(0, "none", 2)], [2]).plan(*oracle.columns_of([[[1, 2, 3]]], [0.0]))


@pytest.mark.parametrize("size", [0, 3, 5])
def test_rows_of_another_size(size: int) -> None:
    plan, _ = Case([Feature(0)], [2], 1, [[[1], [2]]], [0.0, 0.0]).build()
    with pytest.raises(ValueError, match="rows do not have the plan's size"):
        plan.pool(np.zeros(size, np.float32))


@pytest.mark.parametrize("shape", [(0, 2), (1, 2), (2, 1), (3, 2)])
def test_gradient_of_another_shape(shape: tuple[int, int]) -> None:
    plan, _ = Case([Feature(0)], [2], 1, [[[1], [2]]], [0.0, 0.0]).build()
    with pytest.raises(ValueError, match=r"shape \[samples, width or more\]"):
        plan.unpool(np.zeros(shape, np.float32))


def test_table_that_does_not_exist() -> None:
    plan, _ = Case([Feature(0)], [2], 1, [[[1]]], [0.0]).build()
    for read in (plan.keys, plan.counts, plan.times, plan.shard_starts):
        with pytest.raises(IndexError, match="no such table"):
            read(1)


@pytest.mark.parametrize(
    ("features", "dims", "shards", "message"),
    [
        ([(0, "sum", 0)], [1], 0, "shards must be between 1 and 65536"),
        ([(0, "sum", 0)], [1], 65537, "shards must be between 1 and 65536"),
        ([(1, "sum", 0)], [1], 1, "names a table that does not exist"),
        ([(0, "none", 0)], [1], 1, "a sequence needs a max_length"),
        ([(0, "max", 0)], [1], 1, "combiner must be sum, mean, sqrtn or none, not max"),
        ([(0, "none", 2**31), (0, "none", 2**31)], [1], 1, "too wide"),
        ([(0, "none", 2**32 - 1)], [4096], 1, "too wide"),
    ],
)
def test_planner_that_makes_no_sense(features: Any, dims: list[int], shards: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _core.Planner(features, dims, shards)
