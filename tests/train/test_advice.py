"""Advice: each fault of samples, graph and rates is named by real models that have it, and a good model gets none."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import streamtrain as st
from streamtrain.model.features import Feature
from streamtrain.model.samples import SampleReader
from streamtrain.train.advice import POINTS, Advisor, Learning, LearningCurve
from tests.models import Sample, logistic, make

USER = st.Categorical("user", dim=4)
RATES: dict[str, Any] = {"embedding_optimizer": st.Adagrad(0.2), "dense_optimizer": st.Adam(0.01)}


def visits(count: int, **fields: Callable[[int], Any]) -> list[Sample]:
    """Users that differ in how often the label is 1."""
    rng = np.random.default_rng(3)
    users = rng.integers(0, 20, count).tolist()
    labels = (rng.random(count) < np.where(np.array(users) % 2, 0.8, 0.1)).tolist()
    return [
        {"ts": i, "user": f"u{user}", "label": int(label)} | {name: of(i) for name, of in fields.items()}
        for i, (user, label) in enumerate(zip(users, labels, strict=True))
    ]


def advised(features: list[Feature], samples: list[Sample], graph: Any = logistic, **options: Any) -> list[str]:
    learner = st.Learner(make(features, graph, **{**RATES, **options}), batch_size=64)
    learner.learn(samples)
    return learner.advice()


def logits(inputs: dict[str, Any]) -> Any:
    return keras.layers.Dense(1)(keras.layers.Concatenate()(list(inputs.values())))


NUMBER = st.Numeric("price")


def test_a_good_run_gets_none() -> None:
    features: list[Feature] = [
        USER,
        NUMBER,
        st.Categorical("tags", dim=2, default="none"),
        st.Cross("both", dim=2, of=("user", "tags")),
    ]
    assert advised(features, visits(3000, price=lambda i: i % 50, tags=lambda i: ["a", "b"][: i % 3])) == []
    assert advised([USER], visits(3000), loss="mean_squared_error") == []


def test_nothing_is_said_of_a_few_samples() -> None:
    learner = st.Learner(make([USER]))
    assert learner.advice() == []
    learner.learn([{"ts": 0, "user": "a", "label": 1}] * 3)
    assert learner.advice() == []


CASES: list[tuple[str, list[Feature], list[Sample], dict[str, Any], str]] = [
    (
        "one label",
        [USER],
        [one | {"label": 1} for one in visits(2000)],
        {},
        "label 'label' is 1 in all 2,000 samples, so there is nothing to learn",
    ),
    (
        "no sigmoid",
        [USER, NUMBER],
        visits(2000, price=lambda i: i % 7),
        {"graph": logits},
        'outside of [0, 1]: end its graph with a sigmoid, such as keras.layers.Dense(1, "sigmoid").',
    ),
    (
        "one id",
        [USER, st.Categorical("shop", dim=2)],
        visits(2000, shop=lambda i: "s1"),
        {},
        "feature 'shop' has the same id in all samples, so it predicts nothing: check the field 'shop'",
    ),
    (
        "missing ids",
        [USER, st.Categorical("shop", dim=2, default="none")],
        visits(2000),
        {},
        "feature 'shop' is missing in all samples (or always its default, 'none')",
    ),
    (
        "empty lists",
        [USER, st.Categorical("tags", dim=2)],
        visits(2000, tags=lambda i: []),
        {},
        "feature 'tags' has no ids in any sample",
    ),
    (
        "missing numbers",
        [USER, st.Numeric("price", default=2.5)],
        visits(2000),
        {},
        "feature 'price' has the same value in all samples, or is missing: its default is 2.5",
    ),
    (
        "ids that do not repeat",
        [USER, st.Categorical("event", dim=2)],
        visits(12_000, event=lambda i: i),
        {},
        "ids of table 'event' hardly ever repeat: 12,000 ids became 12,000 rows",
    ),
    (
        "min_count",
        [USER, st.Categorical("shop", dim=2, min_count=250)],
        visits(12_000, shop=lambda i: i % 50),
        {},
        "of 12,000 ids of table 'shop' had no row, because they had occurred fewer than min_count=250 times.",
    ),
    (
        "noise",
        [st.Categorical("user", dim=4)],
        visits(4000, user=lambda i: i * 7919 % 31),
        {},
        "that of always predicting the label's mean 0.4",
    ),
    (
        "low rates",
        [USER],
        visits(3000),
        {"embedding_optimizer": st.Adagrad(1e-6), "dense_optimizer": st.Adam(1e-8)},
        "Raise the learning rates (embedding_optimizer=st.Adagrad(1e-06), dense_optimizer=st.Adam(1e-08)) tenfold",
    ),
    (
        "high rates",
        [USER],
        visits(3000),
        {"embedding_optimizer": st.SGD(50.0), "dense_optimizer": st.SGD(30.0)},
        "Lower the learning rates (embedding_optimizer=st.SGD(50), dense_optimizer=st.SGD(30))",
    ),
    (
        "raw timestamps",
        [USER, st.Numeric("at", transform=None)],
        visits(2000, at=lambda i: 1_700_000_000 + 60 * i),
        {},
        "feature 'at' is about 1.7e+09 where the graph gets it, with transform=None: the steps",
    ),
    (
        "a wrong scale",
        [USER, st.Numeric("zip", transform="standardize", mean=50.0, stddev=2.0)],
        visits(2000, zip=lambda i: 10_000 + 80_000 * (i % 2)),
        {},
        'with transform="standardize", mean=50, stddev=2: the steps of its weights are made for numbers near 1, so it '
        "learns little or diverges. Leave the transform out, which takes the logarithm; or give the mean and the "
        'deviation of your stream, such as transform="standardize", mean=50000, stddev=4e+04; or if it is a code',
    ),
    (
        "a number",
        [USER, NUMBER],
        [one | {"label": i * 7919 % 13} for i, one in enumerate(visits(3000, price=lambda i: i % 7))],
        {"loss": "mean_squared_error", "graph": logits},
        "The mean squared error of 'label', ",
    ),
]


@pytest.mark.parametrize(
    ("features", "samples", "options", "message"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_each_fault_is_named(
    features: list[Feature], samples: list[Sample], options: dict[str, Any], message: str
) -> None:
    options = dict(options)
    features = options.pop("features", features)
    if any(one.name == "price" for one in features):
        samples = (
            [{"price": i % 7} | one for i, one in enumerate(samples)] if "default" not in repr(message) else samples
        )
    (found,) = advised(features, samples, options.pop("graph", logistic), **options)
    assert message in found


def test_rows_of_a_checkpoint_are_not_taken_for_new_ids(tmp_path: Path) -> None:
    model = make([st.Categorical("user", dim=2), st.Categorical("event", dim=2)], **RATES)
    learner = st.Learner(model, batch_size=64)
    learner.learn(visits(12_000, event=lambda i: i))
    learner.save(tmp_path / "checkpoint")
    resumed = st.Learner.load(tmp_path / "checkpoint", model, batch_size=64)
    resumed.learn(visits(11_000, event=lambda i: i % 100))
    assert resumed.rows["event"] == 12_000
    assert resumed.advice() == []


def test_large_numbers_are_said_at_the_first_batch(caplog: pytest.LogCaptureFixture) -> None:
    learner = st.Learner(make([USER, st.Numeric("at", transform=None), st.Numeric("price")], **RATES), batch_size=64)
    for at in (0, 64):
        learner.learn(visits(64, at=lambda i: 1.7e9 + i, price=lambda i: 1e6))
        lines = [one.getMessage() for one in caplog.records if "where the graph gets it" in one.getMessage()]
        assert len(lines) == 1, at
        assert "feature 'at'" in lines[0]
    assert learner.advice()[0].startswith("feature 'at' is about 1.7e+09")


def test_gradients_that_are_not_finite_are_one_advice() -> None:
    (found,) = advised([USER], visits(3000), embedding_optimizer=st.SGD(3e38), dense_optimizer=st.SGD(3e38))
    assert "gradients were not finite and were dropped, as when a model diverges" in found
    assert "embedding_optimizer=st.SGD(3e+38)" in found


def test_a_curve_has_a_bounded_number_of_points_that_agree_with_the_metrics() -> None:
    learner = st.Learner(make([USER], **RATES), batch_size=50)
    learner.learn(visits(20_000))
    curve = learner.curve()["label"]
    assert POINTS // 2 <= len(curve) <= POINTS
    assert [point["samples"] for point in curve] == [256 * (i + 1) for i in range(len(curve))]
    losses = [point["log_loss"] or math.nan for point in curve]
    assert np.mean(losses) == pytest.approx(learner.metrics()["label"].log_loss, rel=0.01)
    assert np.mean(losses[-5:]) < losses[0]
    assert all(point["auc"] is not None and point["auc"] > 0.6 for point in curve[3:])


def test_the_curve_does_not_depend_on_batches() -> None:
    rng = np.random.default_rng(0)
    labels, predictions = (rng.random((5000, 1)) < 0.3).astype(np.float32), rng.random((5000, 1)).astype(np.float32)
    curves = []
    for size in (1, 7, 64, 1000, 5000):
        curve = LearningCurve((st.Label("y", kind="binary"),))
        for at in range(0, 5000, size):
            rows = slice(at, at + size)
            curve.update(predictions[rows], labels[rows], np.ones(len(labels[rows]), np.float32))
        curves.append([point.as_dict() for point in curve.points()["y"]])
    assert len(curves[0]) == 5000 // 128
    assert all(curve == curves[0] for curve in curves)


@pytest.mark.parametrize("ask_every", [1, 7, 100])
def test_what_is_found_does_not_depend_on_when_it_is_asked(ask_every: int) -> None:
    """Predictions are random; the labels of the first 9,000 samples are 1, so that the first 8,192 do not vary."""
    batch_size, samples = 300, 12_000
    rng = np.random.default_rng(11)
    predictions = rng.normal(0.5, 0.3, (samples, 1)).astype(np.float32)
    labels = np.ones((samples, 1), np.float32)
    labels[9_000:] = 0
    model = make([USER])
    advisor, read = Advisor(model), SampleReader(model)
    found: list[str] = []
    for at in range(0, samples, batch_size):
        part = slice(at, at + batch_size)
        columns = {"ts": np.arange(at, at + batch_size), "user": rng.integers(0, 20, batch_size)}
        ((batch, _),) = read.batches(columns | {"label": labels[part, 0]}, batch_size)
        advisor.update(batch, predictions[part], batch.weights)
        if at // batch_size % ask_every == ask_every - 1:
            found = advisor.advice(Learning({"user": 20}, {"user": 0}, 0, 1.0))
            assert any("is 1 in all" in one for one in found) == (at + batch_size <= 9_000)
    found = advisor.advice(Learning({"user": 20}, {"user": 0}, 0, 1.0))
    outside = int(((predictions < 0) | (predictions > 1)).sum())
    assert any(f"{outside:,} of 12,000 predictions of 'label' are outside" in one for one in found)


def test_a_learner_tells_of_itself() -> None:
    learner = st.Learner(make([USER], **RATES))
    assert repr(learner) == "Learner(model 'model', 0 samples; rows: user 0; 0.0 MB)"
    learned = learner.learn([*visits(500), {"ts": 0, "label": 1}])
    assert repr(learned).startswith("Learned(500 samples, loss 0.")
    assert "1 refused, the first: sample 500: missing_field in field 'user': the sample has 'ts', 'label')" in repr(
        learned
    )
    assert repr(learner).startswith("Learner(model 'model', 500 samples; label: auc 0.")
    assert "rows: user 20; " in repr(learner)
