"""The loss for streams with fake negatives: predictions converge to true rates, which plain cross-entropy misses."""

from typing import Any

import keras
import numpy as np
import pytest

import streamtrain as st
from streamtrain.model.model import fake_negative_likelihood, fake_negative_weighted

RATES = np.array([0.1, 0.5, 0.9], np.float32)


def graph(inputs: dict[str, Any]) -> Any:
    x = keras.layers.Concatenate()(list(inputs.values()))
    return keras.layers.Dense(1, "sigmoid")(x)


def stream(count: int) -> list[dict[str, Any]]:
    """Every impression as a negative, and each positive once more, some samples later."""
    random = np.random.default_rng(3)
    samples: list[tuple[float, dict[str, Any]]] = []
    for i in range(count):
        item = int(random.integers(len(RATES)))
        samples.append((i, {"item": f"i{item}", "label": 0}))
        if random.random() < RATES[item]:
            samples.append((i + 50 * random.random(), {"item": f"i{item}", "label": 1}))
    return [sample for _, sample in sorted(samples, key=lambda one: one[0])]


@pytest.mark.parametrize(
    ("loss", "expected"), [("fake_negative_weighted", RATES), ("binary_crossentropy", RATES / (1 + RATES))]
)
def test_what_predictions_converge_to(loss: str, expected: Any) -> None:
    schema = st.Schema(label="label", features=[st.Categorical("item", dim=4)])
    learner = st.Learner(st.Model(schema, graph, loss=loss))
    learner.learn(stream(30_000))
    predicted = learner.predict([{"item": f"i{item}"} for item in range(len(RATES))])[:, 0]
    assert predicted == pytest.approx(expected, abs=0.05)


def test_gradient_is_zero_at_the_true_rate_alone() -> None:
    import tensorflow as tf

    for rate in RATES:
        positive = rate / (1 + rate)
        predictions = tf.Variable(np.array([[rate - 0.05], [rate], [rate + 0.05]], np.float32))
        ones = tf.ones_like(predictions)
        for loss in fake_negative_weighted, fake_negative_likelihood:
            with tf.GradientTape() as tape:
                expected = positive * loss(ones, predictions) + (1 - positive) * loss(0 * ones, predictions)
            low, zero, high = np.asarray(tape.gradient(expected, predictions))[:, 0]
            assert low < -0.01
            assert zero == pytest.approx(0, abs=1e-5)
            assert high > 0.01


def test_weights_are_those_of_the_paper() -> None:
    predictions = np.array([[0.2], [0.2]], np.float32)
    found = np.asarray(fake_negative_weighted(np.array([[1], [0]], np.float32), predictions))
    assert found == pytest.approx([-1.2 * np.log(0.2), -0.8 * 1.2 * np.log(0.8)], rel=1e-5)
