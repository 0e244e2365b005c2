"""The steps of a batch against a plain reading of its samples, and what they ask of tables and dense vectors."""

# The names of option types exist only in the stub, so annotations stay unevaluated.
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from streamtrain import _core
from tests.native.test_plan import Case, cases
from tests.native.test_table import OPTIMIZERS, random_keys

F = np.float32


@given(cases(), st.integers(1, 9), st.booleans(), st.integers(0, 3))
def test_steps_are_those_of_the_samples(case: Case, size: int, together: bool, spare: int) -> None:
    """Rows, occurrences, lists and the order of gradients, of groups of one table and of all."""
    plan, _ = case.build()
    tables = range(len(case.dims))
    groups = [list(tables)] if together else [[t] for t in tables]
    micro = _core.MicroPlan(plan, size, groups)
    samples = len(case.times)
    assert micro.steps == -(-samples // size)
    steps = micro.steps + spare
    for g, group in enumerate(groups):
        base = dict(zip(group, np.cumsum([0, *(len(plan.keys(t)) for t in group)])[:-1].tolist(), strict=True))
        row = {(t, int(key)): base[t] + i for t in group for i, key in enumerate(plan.keys(t))}
        assert micro.rows(g) == len(row)
        mine = [f for f, one in enumerate(case.features) if one.table in group]
        kinds = [("sequence", size * case.features[f].max_length) for f in mine]
        width, none = micro.width(g) + 1, len(row) + 7
        index = micro.index(g, steps, width, none)
        positions = micro.occurrences(g, steps, kinds, width - 1)  # type: ignore[arg-type]  # of literals
        live = micro.live(g, steps, width, None)
        seen: dict[int, list[tuple[int, int]]] = {}
        for k in range(steps):
            entries = index[k][index[k] != none].tolist()
            assert len(set(entries)) == len(entries)
            assert live[k].tolist() == [1.0] * len(entries) + [0.0] * (width - len(entries))
            counts = dict.fromkeys(entries, 0)
            column = 0
            for f, (_, slots) in zip(mine, kinds, strict=True):
                length = case.features[f].max_length
                of_feature = positions[k, column : column + slots].reshape(size, length)
                column += slots
                for i in range(size):
                    sample = k * size + i
                    real = sample < samples
                    ids = case.ids[f][min(sample, samples - 1)] if k < micro.steps else []
                    expected = [row[case.features[f].table, key] for key in ids]
                    found = [entries[at] for at in of_feature[i].tolist() if at != width - 1]
                    assert found == expected, "what is left of the last step is its last sample"
                    for one in expected if real else []:
                        counts[one] += 1
            for at, one in enumerate(entries):
                seen.setdefault(one, []).append((k * width + at, counts[one]))
        order, repeats, counts_of = micro.order(g, width)
        assert repeats.tolist() == [len(seen[r]) for r in range(len(row))]
        expected_order = [entry for r in range(len(row)) for entry in seen[r]]
        assert list(zip(order.tolist(), counts_of.tolist(), strict=True)) == expected_order


@given(cases(["sum", "mean", "sqrtn"]), st.integers(1, 9))
def test_segments_pool_as_the_plan_does(case: Case, size: int) -> None:
    plan, _ = case.build()
    micro = _core.MicroPlan(plan, size, [[t] for t in range(len(case.dims))])
    for f, (single, longest) in enumerate(micro.lengths):
        assert single == (bool(case.times) and all(len(ids) == 1 for ids in case.ids[f]))
        segments, scales = micro.segments(f, micro.steps, longest + 2)
        for k in range(micro.steps):
            lengths = [len(case.ids[f][min(k * size + i, len(case.times) - 1)]) for i in range(size)]
            assert [int((segments[k] == i).sum()) for i in range(size)] == lengths
            assert int((segments[k] == size).sum()) == longest + 2 - sum(lengths)
            power = {"sum": 0.0, "mean": -1.0, "sqrtn": -0.5}[case.features[f].combiner]
            assert_allclose(scales[k], np.array([float(n) ** power if n else 0.0 for n in lengths]), rtol=1e-6)


def test_a_row_is_live_from_the_occurrence_that_admits_it_on() -> None:
    keys = np.array([5, 5, 9, 5, 9, 5], np.uint64)
    planner = _core.Planner([(0, "sum", 0)], [1], 1)
    offsets = np.arange(7, dtype=np.int32)[None, :]
    plan = planner.plan(keys, np.array([0, 6], np.int64), offsets, np.zeros(6))
    micro = _core.MicroPlan(plan, 2, [[0]])
    awaited = np.array([3, 2], np.uint8)
    index, live = micro.index(0, 3, 2, -1), micro.live(0, 3, 2, awaited)
    assert index.tolist() == [[0, -1], [1, 0], [1, 0]]
    assert live.tolist() == [[0, 0], [0, 1], [1, 1]]


def test_what_does_not_fit_is_refused() -> None:
    planner = _core.Planner([(0, "sum", 0)], [1], 1)
    plan = planner.plan(
        np.array([5, 6], np.uint64), np.array([0, 2], np.int64), np.array([[0, 2]], np.int32), np.zeros(1)
    )
    with pytest.raises(ValueError, match="at least one sample"):
        _core.MicroPlan(plan, 0, [[0]])
    for groups in ([], [[0], [0]], [[1]]):
        with pytest.raises(ValueError, match="each table once"):
            _core.MicroPlan(plan, 1, groups)
    micro = _core.MicroPlan(plan, 1, [[0]])
    with pytest.raises(ValueError, match="too small"):
        micro.index(0, 1, 1, 0)
    with pytest.raises(ValueError, match="too long"):
        micro.occurrences(0, 1, [("list", 1)], 0)
    with pytest.raises(ValueError, match="exactly one id"):
        micro.occurrences(0, 1, [("single", 1)], 0)
    with pytest.raises(IndexError):
        micro.rows(1)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("min_count", [1, 3])
def test_gradients_that_follow_on_each_other_are_pushes_one_by_one(
    optimizer: _core.OptimizerName, min_count: int
) -> None:
    """Rows, state, counts and what is dropped; and the state that is pulled is that which the next gradient finds."""
    rng = np.random.default_rng(3)
    made = [_core.Table(3, optimizer=optimizer, rate=0.1, min_count=min_count, expire_after=100) for _ in range(2)]
    keys = random_keys(rng, 40)
    for _ in range(3):
        repeats = rng.integers(0, 4, len(keys), dtype=np.uint32)
        total = int(repeats.sum())
        gradients = rng.normal(size=(total, 3)).astype(F)
        gradients[rng.random(total) < 0.1] = np.nan
        counts, times = rng.integers(1, 3, total, dtype=np.uint32), rng.integers(1, 99, len(keys), dtype=np.uint32)
        at_once = made[0].push(keys, gradients, counts, times, repeats=repeats)
        ends = np.cumsum(repeats)
        applied = dropped = 0
        for i, (end, count) in enumerate(zip(ends.tolist(), repeats.tolist(), strict=True)):
            for g in range(end - count, end):
                alone = made[1].push(keys[i : i + 1], gradients[g : g + 1], counts[g : g + 1], times[i : i + 1])
                applied, dropped = applied + alone.applied, dropped + len(alone.non_finite)
        assert (at_once.applied, len(at_once.non_finite)) == (applied, dropped)
        assert np.isnan(gradients[at_once.non_finite]).all()
        rows = [_core_rows(table) for table in made]
        assert rows[0] == rows[1]
    state, awaited = made[0].pull_state(keys)
    assert_array_equal(state[:, :3], made[0].pull(keys))
    found, _, _ = made[0].lookup(keys)
    assert ((awaited == 0) | ~found).all()
    fresh = random_keys(rng, 5)
    assert made[0].pull_state(fresh)[1].tolist() == [min_count if min_count > 1 else 0] * 5
    with pytest.raises(ValueError, match="sum of repeats"):
        made[0].push(
            keys, np.zeros((1, 3), F), np.ones(1, np.uint32), np.zeros(40, np.uint32), repeats=np.ones(40, np.uint32)
        )


def _core_rows(table: _core.Table) -> list[tuple[object, ...]]:
    _, rows = table.scan(0, 1000)
    listed = zip(rows.keys.tolist(), rows.embeddings.tolist(), rows.state.tolist(), rows.counts.tolist(), strict=True)
    return sorted((key, tuple(embedding), tuple(state), count) for key, embedding, state, count in listed)


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam"])
def test_a_change_is_what_steps_elsewhere_came_to(kind: str) -> None:
    """Two that began with the same state leave the slots as if one had followed on the other."""
    rng = np.random.default_rng(1)
    values = rng.normal(size=6).astype(F)
    options = {"optimizer": kind, "rate": 0.1}
    made = _core.DenseVector(values, **options)  # type: ignore[arg-type]
    count = len(made.slots)
    decay = np.array([0.9**2, 0.999**2], F)[:count] if kind == "adam" else np.ones(count, F)
    before, changes = made.slots, []
    for _ in range(2):
        elsewhere = _core.DenseVector(values, **options)  # type: ignore[arg-type]
        for gradient in rng.normal(size=(2, 6)).astype(F):
            elsewhere.apply(gradient)
        changes.append((elsewhere.pull() - values, elsewhere.slots - decay[:, None] * before))
    for by, added in changes:
        assert made.change(by, added, decay, 2.0)
    assert_allclose(made.pull(), values + changes[0][0] + changes[1][0], rtol=1e-6)
    expected = decay[:, None] * (decay[:, None] * before + changes[0][1]) + changes[1][1]
    assert_allclose(made.slots, expected, rtol=1e-5, atol=1e-7)
    assert made.steps == (4 if kind == "adam" else 0)
    copied, slots = np.empty(6, F), np.empty((count, 6), F)
    assert made.pull_state(copied, slots) == made.steps
    assert_array_equal(copied, made.pull())
    assert_array_equal(slots, made.slots)
    for bad in (np.full(6, np.nan, F), np.full(6, 2.0**57, F)):
        assert not made.change(bad, np.zeros((count, 6), F), decay, 1.0)
    if count:
        assert not made.change(np.zeros(6, F), np.full((count, 6), np.inf, F), decay, 1.0)
        assert not made.change(np.zeros(6, F), np.zeros((count, 6), F), decay + 2, 1.0)
    assert not made.change(np.zeros(6, F), np.zeros((count, 6), F), decay, -1.0)
    assert_array_equal(copied, made.pull())
