"""Windows of workers on their way: merged, they are the window of all samples; damaged ones are refused."""

import itertools
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import streamtrain.cluster.coordinator_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sklearn

from streamtrain.cluster.quality import decode_windows, encode_windows, merge_windows
from streamtrain.errors import ShardRefused
from streamtrain.model.features import Label
from streamtrain.quality.progressive import Metrics, ProgressiveValidation

LABELS = (Label("click", kind="binary"), Label("stars", kind="real"))


def samples(seed: int, n: int) -> tuple[Any, Any, Any]:
    """Predictions and labels of a model that knows something, of both labels, some missing; and weights."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(scale=2, size=(n, 2))
    labels = (rng.random((n, 2)) < 1 / (1 + np.exp(-scores))).astype(np.float32)
    labels[rng.random((n, 2)) < 0.1] = np.nan
    predictions = (1 / (1 + np.exp(-scores - rng.normal(size=(n, 2))))).astype(np.float32)
    return predictions, labels, rng.choice([0.5, 1.0, 3.0], n).astype(np.float32)


def validation(*given: Any, window: int = 100_000) -> ProgressiveValidation:
    one = ProgressiveValidation(LABELS, window=window)
    one.update(*given)
    return one


def sent(one: ProgressiveValidation) -> list[Any]:
    """What arrives."""
    return [pb.LabelWindow.FromString(window.SerializeToString()) for window in encode_windows(one.window_sums())]


def assert_same(one: Metrics, other: Metrics) -> None:
    assert asdict(one) == pytest.approx(asdict(other), rel=1e-9, nan_ok=True)


@given(st.integers(0, 2**32), st.lists(st.integers(0, 400), min_size=1, max_size=4))
def test_the_figures_of_several_are_those_of_all_their_samples(seed: int, cuts: list[int]) -> None:
    given = samples(seed, 400)
    bounds = [0, *sorted(cuts), 400]
    parts = [[column[a:b] for column in given] for a, b in itertools.pairwise(bounds)]
    found = merge_windows(decode_windows(sent(validation(*part))) for part in parts)
    together = validation(*given).window()
    assert found.keys() == together.keys()
    for label, metrics in found.items():
        assert_same(metrics, replace(together[label], label_variance=math.nan))  # which is not sent


def test_the_merged_auc_is_that_of_scikit_learn() -> None:
    (p1, y1, w1), (p2, y2, w2) = samples(1, 3000), samples(2, 500)
    p2 = p2 / 3  # another worker's predictions are another way off: the mean of two AUCs would be far from it
    found = merge_windows(decode_windows(sent(validation(*one))) for one in ((p1, y1, w1), (p2, y2, w2)))["click"]
    p, y, w = np.concatenate([p1, p2])[:, 0], np.concatenate([y1, y2])[:, 0], np.concatenate([w1, w2])
    there = ~np.isnan(y)
    exact = sklearn.roc_auc_score(y[there], p[there], sample_weight=w[there])
    assert abs(found.auc - exact) <= found.auc_error + 1e-9
    assert found.auc_error < 0.001


def test_only_the_window_is_sent_and_it_is_small() -> None:
    one = validation(*samples(3, 20_000), window=800)
    (click, stars) = sent(one)
    assert click.samples == one.window()["click"].samples <= 800
    assert click.ByteSize() < 10 * 800 + 200
    assert stars.ByteSize() < 100


def test_nothing_seen_is_a_window_too() -> None:
    found = merge_windows([decode_windows(sent(ProgressiveValidation(LABELS)))])
    assert found["click"].samples == 0
    assert math.isnan(found["click"].auc)
    assert merge_windows([]) == {}


def test_predictions_that_are_not_finite_are_counted() -> None:
    predictions, labels, weights = samples(4, 100)
    predictions[:7] = np.nan
    labels[:7] = 1
    assert merge_windows([decode_windows(sent(validation(predictions, labels, weights)))])["click"].non_finite == 7


def doubled(name: str, type_: str) -> Callable[[Any], None]:
    def change(window: Any) -> None:
        values = np.frombuffer(getattr(window, name), type_)
        setattr(window, name, (2 * values).astype(type_).tobytes())

    return change


def setting(**values: Any) -> Callable[[Any], None]:
    def change(window: Any) -> None:
        for name, value in values.items():
            setattr(window, name, value)

    return change


DAMAGE: list[tuple[Callable[[Any], None], str]] = [
    (setting(label=""), "missing or duplicate label ''"),
    (setting(label="stars"), "duplicate label"),
    (setting(weight=math.nan), "sums are"),
    (setting(loss=math.inf), "sums are"),
    (setting(samples=1 << 60), "sums are"),
    (setting(weight=-1.0), "negative"),
    (setting(absolute=-1.0), "negative"),
    (setting(binary=False), "bins and"),
    (setting(bins=b"\0"), "is invalid"),
    (setting(bins=b"\0\0"), "1 bins and"),
    (setting(counts=b""), "and 0 counts"),
    (setting(bins=b"", counts=b""), "add up to 0.0"),
    (setting(bins=b"\1\0\1\0", counts=np.ones(2).tobytes()), "do not ascend"),
    (setting(bins=b"\xff\xff", counts=np.ones(1).tobytes()), "do not ascend"),
    (setting(bins=b"\1\0", counts=np.array([math.nan]).tobytes()), "not finite and above 0"),
    (setting(bins=b"\1\0", counts=np.array([-1.0]).tobytes()), "not finite and above 0"),
    (doubled("counts", "<f8"), "add up to"),
    (doubled("bins", "<u2"), "do not ascend"),
]


@pytest.mark.parametrize(("change", "message"), DAMAGE, ids=[message for _, message in DAMAGE])
def test_what_is_damaged_is_refused(change: Callable[[Any], None], message: str) -> None:
    windows = sent(validation(*samples(5, 300)))
    windows.reverse()
    change(windows[1])
    with pytest.raises(ShardRefused, match=message) as caught:
        decode_windows(windows)
    assert caught.value.reason == "malformed"
