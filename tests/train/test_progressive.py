"""Progressive validation against scikit-learn and plain formulas."""

import itertools
import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn import metrics as sklearn

from streamtrain.model.features import Label
from streamtrain.quality.progressive import Metrics, ProgressiveValidation

CLICK, STARS = Label("click", kind="binary"), Label("stars", kind="real")
CLIP = 1e-7

Floats = NDArray[np.float32]
seeds = st.integers(0, 2**32)


def validate(
    predictions: Any, labels: Any, weights: Any = None, *, of: tuple[Label, ...] = (CLICK,), **options: Any
) -> ProgressiveValidation:
    p = np.asarray(predictions, np.float32).reshape(-1, len(of))
    y = np.asarray(labels, np.float32).reshape(-1, len(of))
    validation = ProgressiveValidation(of, **options)
    validation.update(p, y, np.ones(len(p), np.float32) if weights is None else np.asarray(weights, np.float32))
    return validation


def click(*args: Any, **options: Any) -> Metrics:
    return validate(*args, **options).total()["click"]


def clicks(seed: int, n: int = 500) -> tuple[Floats, Floats, Floats]:
    """Predictions, labels and weights of a model that knows something; both classes are there."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(scale=3, size=n)
    predictions = (1 / (1 + np.exp(-scores))).astype(np.float32)
    labels = (rng.random(n) < 1 / (1 + np.exp(-scores + rng.normal(size=n)))).astype(np.float32)
    labels[:2] = 0, 1
    return predictions, labels, rng.choice([0.0, 0.5, 1.0, 3.0], n).astype(np.float32) + np.float32(0.01)


def assert_same(one: Metrics, other: Metrics, rel: float = 1e-9) -> None:
    assert asdict(one) == pytest.approx(asdict(other), rel=rel, nan_ok=True)


# --- against scikit-learn ---


@given(seeds)
def test_log_loss_is_that_of_scikit_learn(seed: int) -> None:
    p, y, w = clicks(seed)
    expected = sklearn.log_loss(y, p.astype(np.float64), sample_weight=w)
    assert click(p, y, w).log_loss == pytest.approx(expected, rel=1e-6)


@given(seeds)
def test_auc_is_that_of_scikit_learn_within_its_error(seed: int) -> None:
    p, y, w = clicks(seed)
    found = click(p, y, w)
    assert abs(found.auc - sklearn.roc_auc_score(y, p, sample_weight=w)) <= found.auc_error + 1e-12
    assert found.auc_error < 0.002


@given(seeds, st.integers(1, 6))
def test_auc_of_few_distinct_predictions_is_exact(seed: int, distinct: int) -> None:
    """Values in bins of their own make ties, and nothing else, share a bin."""
    _, y, w = clicks(seed)
    p = np.random.default_rng(seed).choice(np.linspace(0.1, 0.9, distinct), len(y)).astype(np.float32)
    assert click(p, y, w).auc == pytest.approx(sklearn.roc_auc_score(y, p, sample_weight=w), abs=1e-12)


def test_auc_error_says_that_nothing_is_known_when_all_predictions_are_equal() -> None:
    found = click([0.5] * 10, [0, 1] * 5)
    assert (found.auc, found.auc_error) == (0.5, 0.5)


def test_auc_of_perfect_and_of_reversed_order() -> None:
    assert click([0.1, 0.2, 0.8, 0.9], [0, 0, 1, 1]).auc == 1
    assert click([0.9, 0.8, 0.2, 0.1], [0, 0, 1, 1]).auc == 0


@given(seeds)
def test_regression_is_that_of_scikit_learn(seed: int) -> None:
    rng = np.random.default_rng(seed)
    y, p, w = rng.normal(3, 2, 300), rng.normal(3, 2, 300), rng.random(300) + 0.1
    y, p, w = (column.astype(np.float32).astype(np.float64) for column in (y, p, w))
    found = validate(p, y, w, of=(STARS,)).total()["stars"]
    assert found.mean_squared_error == pytest.approx(sklearn.mean_squared_error(y, p, sample_weight=w))
    assert found.mean_absolute_error == pytest.approx(sklearn.mean_absolute_error(y, p, sample_weight=w))
    assert found.label_variance == pytest.approx(np.average((y - np.average(y, weights=w)) ** 2, weights=w))
    assert found.label_mean == pytest.approx(np.average(y, weights=w))
    assert found.calibration == pytest.approx(np.average(p, weights=w) / np.average(y, weights=w))
    assert math.isnan(found.auc)
    assert math.isnan(found.log_loss)


# --- formulas ---


def test_means_and_calibration_are_weighted() -> None:
    found = click([0.5, 0.25], [1, 0], [3, 1])
    assert found.label_mean == 0.75
    assert found.prediction_mean == (0.5 * 3 + 0.25) / 4
    assert found.calibration == found.prediction_mean / 0.75


def test_normalized_entropy_of_the_base_rate_is_one() -> None:
    found = click([0.25] * 8, [1, 0, 0, 0] * 2)
    assert found.normalized_entropy == pytest.approx(1)
    assert click([0.9, 0.1], [1, 0]).normalized_entropy < 1 < click([0.1, 0.9], [1, 0]).normalized_entropy


def test_certain_and_wrong_is_clipped() -> None:
    assert click([0, 1], [1, 0]).log_loss == pytest.approx(-math.log(CLIP), rel=1e-6)
    assert click([0, 1], [0, 1]).log_loss == pytest.approx(0, abs=1e-6)


def test_weight_zero_counts_as_a_sample_only() -> None:
    with_it, without = click([0.9, 0.2, 0.3], [1, 0, 1], [1, 1, 0]), click([0.9, 0.2], [1, 0])
    assert_same(with_it, Metrics(**{**asdict(without), "samples": 3}))


def test_all_weights_zero() -> None:
    found = click([0.9, 0.2], [1, 0], [0, 0])
    assert found.samples == 2
    assert math.isnan(found.log_loss)
    assert math.isnan(found.auc)


# --- what is missing ---


def test_nothing_seen() -> None:
    found = ProgressiveValidation([CLICK]).total()["click"]
    assert found.samples == found.non_finite == 0
    assert found.as_dict() == {
        "samples": 0,
        "label_mean": None,
        "prediction_mean": None,
        "calibration": None,
        "log_loss": None,
        "normalized_entropy": None,
        "auc": None,
        "auc_error": None,
        "mean_squared_error": None,
        "mean_absolute_error": None,
        "label_variance": None,
        "non_finite": 0,
    }


@pytest.mark.parametrize("label", [0, 1])
def test_one_class_has_a_loss_and_no_auc(label: int) -> None:
    found = click([0.3, 0.6], [label] * 2)
    assert math.isfinite(found.log_loss)
    assert math.isnan(found.auc)
    assert math.isnan(found.auc_error)
    assert math.isnan(found.normalized_entropy)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("of", [CLICK, STARS])
def test_predictions_that_are_not_finite_count_in_nothing_else(bad: float, of: Label) -> None:
    found = validate([0.9, bad, 0.2, bad], [1, 0, 0, 1], of=(of,)).total()[of.name]
    without = validate([0.9, 0.2], [1, 0], of=(of,)).total()[of.name]
    assert_same(found, Metrics(**{**asdict(without), "non_finite": 2}))


def test_missing_labels_count_for_the_other_labels_only() -> None:
    nan = math.nan
    both = validate(
        [[0.9, 4], [0.2, 3], [0.6, nan], [0.5, 1]], [[1, 5], [0, nan], [nan, nan], [1, 2]], of=(CLICK, STARS)
    ).total()
    assert_same(both["click"], click([0.9, 0.2, 0.5], [1, 0, 1]))
    assert_same(both["stars"], validate([4, 1], [5, 2], of=(STARS,)).total()["stars"])


# --- batches and windows ---


@given(seeds, st.lists(st.integers(0, 500), max_size=12), st.integers(1, 1000))
def test_totals_do_not_depend_on_the_split_into_batches(seed: int, cuts: list[int], window: int) -> None:
    p, y, w = clicks(seed)
    parts = ProgressiveValidation([CLICK], window=window)
    bounds = [0, *sorted(cuts), 500]
    for start, stop in itertools.pairwise(bounds):
        parts.update(p[start:stop, None], y[start:stop, None], w[start:stop])
        if stop % 3 == 0:
            parts.total()
    assert_same(parts.total()["click"], click(p, y, w))


@given(seeds, st.integers(1, 200), st.integers(1, 50), st.integers(1, 5))
def test_window_holds_the_latest_seven_or_eight_eighths(seed: int, batch: int, eighth: int, read_every: int) -> None:
    p, y, w = clicks(seed, 600)
    validation = ProgressiveValidation([CLICK], window=8 * eighth)
    for i, start in enumerate(range(0, 600, batch)):
        rows = slice(start, start + batch)
        validation.update(p[rows, None], y[rows, None], w[rows])
        if i % read_every == 0:
            held, seen = validation.window()["click"].samples, min(start + batch, 600)
            assert min(seen, 7 * eighth) <= held <= 8 * eighth
    held = validation.window()["click"].samples
    assert_same(validation.window()["click"], click(p[-held:], y[-held:], w[-held:]), rel=1e-6)
    assert validation.total()["click"].samples == 600


def test_window_of_batches_that_do_not_divide_it() -> None:
    """As in a stream of batches of 64, folded 8,192 samples at a time, with the default window of 100,000."""
    validation = ProgressiveValidation([CLICK])
    column, ones = np.tile(np.array([[0], [1]], np.float32), (32, 1)), np.ones(64, np.float32)
    for _ in range(200_000 // 64):
        validation.update(column, column, ones)
    assert 87_500 <= validation.window()["click"].samples <= 100_000


def test_window_that_is_not_full_is_the_total() -> None:
    p, y, w = clicks(1)
    validation = validate(p, y, w, window=100_000)
    assert_same(validation.window()["click"], validation.total()["click"])


def test_one_batch_larger_than_the_window() -> None:
    p, y, w = clicks(2, 1000)
    held = validate(p, y, w, window=80).window()["click"].samples
    assert 70 <= held <= 80


def test_reading_metrics_changes_nothing() -> None:
    p, y, w = clicks(3)
    validation = validate(p, y, w, window=100)
    assert_same(validation.total()["click"], validation.total()["click"])
    assert_same(validation.window()["click"], validation.window()["click"])
