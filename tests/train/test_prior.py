"""Outputs of cross entropy begin where the labels are, and nothing is known of a sample beforehand."""

import math
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import streamtrain as st
from streamtrain.model.batch import Batch
from streamtrain.train.prior import LabelPrior

SCHEMA = st.Schema(features=[st.Categorical("user", dim=4)])


def last_layer(x: Any) -> Any:
    return keras.layers.Dense(1, "sigmoid")(x)


def activation(x: Any) -> Any:
    return keras.layers.Activation("sigmoid")(keras.layers.Dense(1)(x))


def operation(x: Any) -> Any:
    return keras.ops.sigmoid(keras.layers.Dense(1)(x))


def wide_and_deep(x: Any) -> Any:
    wide = keras.layers.Dense(1, use_bias=False)(x)
    return keras.layers.Activation("sigmoid")(keras.layers.Add()([wide, keras.layers.Dense(1)(x) + wide]))


def nested(x: Any) -> Any:
    return keras.Sequential([keras.layers.Dense(3, "relu"), keras.layers.Dense(1, "sigmoid")])(x)


def without_bias(x: Any) -> Any:
    return keras.layers.Dense(1, "sigmoid", use_bias=False)(x)


def other(x: Any) -> Any:
    return keras.ops.clip(keras.layers.Dense(1)(x), 0.01, 0.99)


def make(head: Any = last_layer, **options: Any) -> st.Model:
    return st.Model(SCHEMA, lambda inputs: head(inputs["user"]), **options)


def samples(count: int, rate: float, seed: int = 0) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)
    return [{"user": int(random.integers(50)), "label": int(random.random() < rate)} for _ in range(count)]


def log_loss(labels: list[int], predictions: Any) -> float:
    p = np.asarray(predictions, float)[:, 0]
    return float(-np.where(np.array(labels) > 0, np.log(p), np.log1p(-p)).sum())


@pytest.mark.parametrize("head", [last_layer, activation, operation, wide_and_deep, nested])
def test_the_bias_of_an_output_is_found(head: Any) -> None:
    model = make(head)
    [(label, at)] = model.output_biases.items()
    assert label == "label"
    weights = model.keras.trainable_variables
    ends = np.cumsum(model.dense.sizes).tolist()
    biases = [end - 1 for one, end in zip(weights, ends, strict=True) if one.path.endswith("bias")]
    assert at == biases[-1]
    assert model.dense.sizes[ends.index(at + 1)] == 1


@pytest.mark.parametrize("model", [make(without_bias), make(other), make(loss="mean_squared_error")])
def test_other_outputs_begin_where_the_graph_does(model: st.Model) -> None:
    assert model.output_biases == {}
    assert st.Learner(model)._trainer.beginning is None


@pytest.mark.parametrize("batch_size", [1, 7, 1024])
def test_rare_labels_cost_little_until_they_are_known(batch_size: int) -> None:
    """Nearly as little as an estimate of the rate that is as good as can be, and much less than without."""
    given = samples(3_000, 0.002)
    labels = [one["label"] for one in given]
    assert 0 < sum(labels) < 10
    learned = st.Learner(make(), batch_size=batch_size).learn(given)
    seen = np.cumsum([0, *labels[:-1]])
    best = (seen + 0.5) / (np.arange(len(labels)) + 1)
    assert learned.samples == 3_000
    assert log_loss(labels, learned.predictions) < log_loss(labels, best[:, None]) + 6
    frozen = st.Learner(make(), batch_size=batch_size)
    frozen._trainer.beginning = None
    assert log_loss(labels[:1000], frozen.learn(given[:1000]).predictions) > 80


def test_predictions_know_only_labels_before_them() -> None:
    given = samples(600, 0.01)
    expected = st.Learner(make()).learn(given).predictions
    turned = [{**one, "label": 1 - one["label"]} if i >= 300 else one for i, one in enumerate(given)]
    found = st.Learner(make()).learn(turned).predictions
    np.testing.assert_array_equal(found[:256], expected[:256])


def test_frequent_labels_move_nothing() -> None:
    prior, labels = LabelPrior(make()), np.tile([[0.0], [1.0]], (8, 1)).astype(np.float32)
    prior.add(np.full((16, 1), 0.5, np.float32), batch(labels))
    assert prior.move() is None
    assert prior.most == 16


def test_it_ends_when_enough_of_either_label_were_seen() -> None:
    prior = LabelPrior(make())
    prior.add(np.full((40, 1), 0.5, np.float32), batch(np.zeros((40, 1), np.float32)))
    moved = prior.move()
    assert moved is not None
    [place] = np.flatnonzero(moved)
    assert moved[place] == pytest.approx(math.log(0.2 / 40.2), rel=1e-6)
    assert not prior.is_settled
    prior.add(np.full((32, 1), 0.01, np.float32), batch(np.ones((32, 1), np.float32)))
    assert prior.is_settled


def test_labels_that_are_missing_and_weights_count() -> None:
    prior = LabelPrior(make())
    labels = np.array([[0.0]] * 20 + [[np.nan]] * 20 + [[1.0]], np.float32)
    prior.add(np.full((41, 1), 0.5, np.float32), batch(labels, weights=[2.0] * 20 + [1.0] * 20 + [0.0]))
    moved = prior.move()
    assert moved is not None
    assert moved.sum() == pytest.approx(math.log(0.2 / 40.2), rel=1e-6)


def test_a_learner_that_is_loaded_goes_on_with_it(tmp_path: Path) -> None:
    learner, given = st.Learner(make(), batch_size=64), samples(256, 0.02, seed=3)
    learner.learn(given[:128])
    learner.save(tmp_path / "saved")
    again = st.Learner.load(tmp_path / "saved", make(), batch_size=64)
    expected = learner.learn(given[128:]).predictions
    np.testing.assert_array_equal(again.learn(given[128:]).predictions, expected)


def test_it_begins_again_where_shards_have_lost_all() -> None:
    """As if nothing had happened, though the worker has seen the samples before."""
    learner, given = st.Learner(make(), batch_size=64), samples(64, 0.0)
    learner.learn(given)
    trainer = learner._trainer
    before = trainer.beginning
    assert before is not None
    trainer.begin()
    assert trainer.most == 8
    assert trainer.beginning is not None
    assert not np.array_equal(trainer.beginning, before)


def test_batches_are_pulled_ahead_long_before_a_rare_label_has_been_seen_often() -> None:
    """Of a stream whose labels are all the same, the outputs would otherwise begin for ever."""
    learner = st.Learner(make(), batch_size=1024)
    trainer = learner._trainer
    trainer._ahead = 2
    learner.learn(samples(16_383, 0.0))
    assert (trainer.ahead, trainer.most) == (0, 1)
    learner.learn(samples(1, 0.0))
    assert (trainer.ahead, trainer.beginning is None) == (2, False)
    assert trainer.most >= 1 << 32


def test_the_state_of_other_outputs_is_left_out(tmp_path: Path) -> None:
    learner = st.Learner(make(), batch_size=64)
    learner.learn(samples(64, 0.0))
    learner.save(tmp_path / "saved")
    other = make(loss=keras.losses.binary_crossentropy)
    again = st.Learner.load(tmp_path / "saved", other, batch_size=64)
    assert again.learn(samples(64, 0.1)).samples == 64


def batch(labels: Any, weights: Any = 1.0) -> Batch:
    count = len(labels)
    return Batch(
        keys=np.zeros(count, np.uint64),
        starts=np.array([0, count], np.int64),
        offsets=np.arange(count + 1, dtype=np.int32)[None],
        numeric=np.zeros((count, 0), np.float32),
        labels=labels,
        weights=np.broadcast_to(np.asarray(weights, np.float32), (count,)),
        times=np.zeros(count),
        kept=np.arange(count, dtype=np.int32),
    )
