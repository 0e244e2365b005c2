"""The dense vector against its formulas in NumPy, and cut into slices."""

import itertools
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from numpy.typing import NDArray

from streamtrain import _core

Kind = Literal["sgd", "adagrad", "adam"]
Floats = NDArray[np.float32]
KINDS: list[Kind] = ["sgd", "adagrad", "adam"]
SLOTS = {"sgd": 0, "adagrad": 1, "adam": 2}
F = np.float32


def vector(kind: Kind, values: Floats, **options: Any) -> _core.DenseVector:
    return _core.DenseVector(values, optimizer=kind, rate=0.1, **options)


def gradients(seed: int, steps: int, size: int) -> Floats:
    return np.random.default_rng(seed).normal(size=(steps, size)).astype(F)


def sgd(w: Floats, steps: Floats) -> Floats:
    for g in steps:
        w = w - F(0.1) * g
    return w


def adagrad(w: Floats, steps: Floats) -> Floats:
    a = np.full_like(w, F(0.3))
    for g in steps:
        a = F(0.9) * a + ((F(1) - F(0.9)) * F(0.3) + g * g)
        w = w - F(0.1) * g / (np.sqrt(a) + F(1e-5))
    return w


def adam(w: Floats, steps: Floats) -> Floats:
    m, v = np.zeros_like(w), np.zeros_like(w)
    beta1, beta2 = F(0.8), F(0.95)
    for t, g in enumerate(steps, 1):
        m = beta1 * m + (F(1) - beta1) * g
        v = beta2 * v + (F(1) - beta2) * (g * g)
        c1, c2 = (F(1 / (1 - float(beta) ** t)) for beta in (beta1, beta2))
        w = w - F(0.1) * (m * c1) / (np.sqrt(v * c2) + F(1e-5))
    return w


@pytest.mark.parametrize(("kind", "formula"), [("sgd", sgd), ("adagrad", adagrad), ("adam", adam)])
@given(seed=st.integers(0, 2**32), size=st.integers(0, 70), steps=st.integers(0, 20))
def test_updates_are_the_formula_bit_for_bit(
    kind: Kind, formula: Callable[[Floats, Floats], Floats], seed: int, size: int, steps: int
) -> None:
    values, *pushed = gradients(seed, steps + 1, size)
    dense = vector(kind, values, initial_accumulator=0.3, epsilon=1e-5, decay=0.9, beta1=0.8, beta2=0.95)
    assert all([dense.apply(g) for g in pushed])
    assert_array_equal(dense.pull(), formula(values, np.array(pushed, F).reshape(steps, size)))
    assert len(dense) == size
    assert dense.slots.shape == (SLOTS[kind], size)
    assert dense.steps == (steps if kind == "adam" else 0)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), size=st.integers(0, 50))
def test_slices_cut_anew_go_on_as_one_vector(kind: Kind, data: st.DataObject, size: int) -> None:
    cuts = st.lists(st.integers(0, size), max_size=4).map(lambda inner: [0, *sorted(inner), size])
    values, *pushed = gradients(size, 10, size)
    whole = vector(kind, values)
    for g in pushed:
        whole.apply(g)

    bounds = data.draw(cuts)
    parts = [vector(kind, values[a:b]) for a, b in itertools.pairwise(bounds)]
    for g in pushed[:5]:
        assert all([part.apply(g[a:b]) for part, a, b in zip(parts, bounds, bounds[1:], strict=False)])
    now = np.concatenate([part.pull() for part in parts])
    slots = np.ascontiguousarray(np.concatenate([part.slots for part in parts], axis=1))
    steps = parts[0].steps

    bounds = data.draw(cuts)
    for a, b in itertools.pairwise(bounds):
        part = vector(kind, np.zeros(b - a, F))
        part.load(now[a:b], np.ascontiguousarray(slots[:, a:b]), steps)
        for g in pushed[5:]:
            part.apply(g[a:b])
        assert_array_equal(part.pull(), whole.pull()[a:b])
        assert_array_equal(part.slots, whole.slots[:, a:b])
        assert part.steps == whole.steps


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0**56, -(2.0**56)])
@pytest.mark.parametrize("at", [0, 9, 16])
def test_gradient_that_is_not_finite_changes_nothing(kind: Kind, bad: float, at: int) -> None:
    values, good = gradients(1, 2, 17)
    dense = vector(kind, values)
    dense.apply(good)
    before = dense.pull(), dense.slots, dense.steps
    assert not dense.apply(np.where(np.arange(17) == at, F(bad), good))
    assert_array_equal(dense.pull(), before[0])
    assert_array_equal(dense.slots, before[1])
    assert dense.steps == before[2]


def test_largest_gradient_is_applied() -> None:
    dense = vector("adagrad", np.zeros(3, F))
    assert dense.apply(np.full(3, np.nextafter(F(2.0**56), F(0)), F))
    assert np.isfinite(dense.pull()).all()


@pytest.mark.parametrize("kind", KINDS)
def test_rate_of_a_call_counts_for_that_call_only(kind: Kind) -> None:
    values, first, second = gradients(2, 3, 5)
    dense = vector(kind, values)
    dense.apply(first, rate=0.0)
    assert_array_equal(dense.pull(), values)
    dense.apply(second)
    other = _core.DenseVector(values, optimizer=kind, rate=7.0)
    other.apply(first, 0.0)
    other.apply(second, 0.1)
    assert_array_equal(dense.pull(), other.pull())


def test_values_given_are_copied() -> None:
    values = np.ones(3, F)
    dense = vector("sgd", values)
    values[:] = 5
    assert dense.pull().tolist() == [1, 1, 1]


def test_what_was_read_does_not_follow_updates() -> None:
    dense = vector("adagrad", np.zeros(4, F), initial_accumulator=1.0)
    values, slots = dense.pull(), dense.slots
    dense.apply(np.ones(4, F))
    assert values.tolist() == [0] * 4
    assert slots.tolist() == [[1] * 4]
    assert dense.pull()[0] == -F(0.1) / (np.sqrt(F(2)) + F(1e-7))
    assert dense.slots.tolist() == [[2] * 4]


def test_pull_into_a_slice() -> None:
    dense = vector("sgd", np.arange(3, dtype=F))
    out = np.full(5, 9, F)
    assert np.shares_memory(dense.pull(out[1:4]), out)
    assert out.tolist() == [9, 0, 1, 2, 9]
    with pytest.raises(ValueError, match="out must have the vector's size"):
        dense.pull(out)
    with pytest.raises(TypeError):
        dense.pull(out=np.zeros(3))  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "floats"), [("sgd", 100), ("adagrad", 200), ("adam", 301)])
def test_memory_is_values_and_state(kind: Kind, floats: int) -> None:
    assert vector(kind, np.zeros(100, F)).nbytes == 4 * floats


@pytest.mark.parametrize("size", [0, 2, 4])
def test_gradient_of_another_size(size: int) -> None:
    with pytest.raises(ValueError, match="gradient does not have the vector's size"):
        vector("sgd", np.zeros(3, F)).apply(np.zeros(size, F))


@pytest.mark.parametrize(("size", "shape"), [(2, (2, 3)), (3, (1, 3)), (3, (2, 4)), (3, (3, 2))])
def test_state_of_another_shape(size: int, shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="values must be"):
        vector("adam", np.zeros(3, F)).load(np.zeros(size, F), np.zeros(shape, F), 1.0)


@pytest.mark.parametrize("kind", ["ftrl", "rowwise_adagrad", "rmsprop"])
def test_optimizers_whose_state_is_not_by_element(kind: Any) -> None:
    with pytest.raises(ValueError, match="must be sgd, adagrad or adam"):
        vector(kind, np.zeros(3, F))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("initial_accumulator", -1.0),
        ("epsilon", 0.0),
        ("epsilon", np.nan),
        ("decay", np.nan),
        ("beta1", 1.0),
        ("beta2", -0.1),
    ],
)
def test_constants_out_of_range(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=option):
        vector("adam", np.zeros(3, F), **{option: value})


@pytest.mark.parametrize("size", [0, 1, 15, 100_000])
def test_arrays_begin_a_cache_line(size: int) -> None:
    made = _core.aligned_floats(size)
    assert made.shape == (size,)
    assert made.dtype == np.float32
    assert made.ctypes.data % 64 == 0
    made[:] = 1.0
    assert made.sum() == size
