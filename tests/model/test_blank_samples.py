"""A graph must predict and learn samples without ids: whatever the processor hides, it is refused by name if not."""

import logging
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import streamtrain as st
from streamtrain.errors import ConfigError
from streamtrain.model.features import Feature
from streamtrain.serve.graph import Graph
from tests import models

SEEN = st.Categorical("seen", dim=3, combiner=None, max_length=4)
USER = st.Categorical("user", dim=4)


def model(graph: Any, **options: Any) -> st.Model:
    features: list[Feature] = [USER, SEEN, st.Numeric("price", transform=None, default=2.0)]
    return models.make(features, lambda inputs: graph(dict(inputs)), **options)


def head(*parts: Any) -> Any:
    """A dense layer whose relu hides NaN on some processors."""
    x = keras.layers.Dense(4, activation="relu")(keras.layers.Concatenate()(list(parts)))
    return keras.layers.Dense(1, activation="sigmoid")(x)


def masked_mean(inputs: dict[str, Any]) -> Any:
    mean = keras.layers.GlobalAveragePooling1D(name="average")(inputs["seen"], mask=inputs["seen_mask"])
    return head(inputs["user"], mean)


def softmax_over_nothing(inputs: dict[str, Any]) -> Any:
    scores = ops.where(inputs["seen_mask"], ops.sum(inputs["seen"], -1), -np.inf)
    return head(inputs["user"], ops.sum(ops.expand_dims(ops.softmax(scores), -1) * inputs["seen"], 1))


def within_a_model(inputs: dict[str, Any]) -> Any:
    sequence, mask = keras.Input((4, 3)), keras.Input((4,), dtype="bool")
    mean = keras.layers.GlobalAveragePooling1D(name="average")(sequence, mask=mask)
    inner = keras.Model([sequence, mask], keras.layers.ReLU()(mean))
    return head(inputs["user"], inner([inputs["seen"], inputs["seen_mask"]]))


def maximum_of_nan(inputs: dict[str, Any]) -> Any:
    mask = ops.expand_dims(ops.cast(inputs["seen_mask"], "float32"), -1)
    mean = ops.sum(inputs["seen"] * mask, 1) / ops.sum(mask, 1)
    return head(inputs["user"], ops.maximum(mean, 0.0))


@pytest.mark.parametrize(
    ("graph", "source"),
    [
        (masked_mean, "GlobalAveragePooling1D 'average'"),
        (softmax_over_nothing, "Softmax"),
        (within_a_model, "GlobalAveragePooling1D 'average'"),
        (maximum_of_nan, "True_?Divide|Divide"),
    ],
)
def test_an_empty_sequence_that_makes_nan_is_refused_by_name(graph: Any, source: str) -> None:
    told = rf"^graph: a sample without ids of 'seen' has a prediction that is not finite: ({source}).* gives NaN\. .*"
    told += r'streamtrain\.pool_sequence\(inputs\["seen"\], inputs\["seen_mask"\]\)'
    with pytest.raises(ConfigError, match=told):
        st.Learner(model(graph))
    with pytest.raises(ConfigError, match=told):
        Graph(model(graph))


def test_a_number_is_named_too() -> None:
    def graph(inputs: dict[str, Any]) -> Any:
        return head(inputs["user"], ops.log(1.5 - inputs["price"]))  # it is 2 by default

    with pytest.raises(ConfigError, match=r"a sample with 'price' at its default has .*: Log .* gives NaN\. .*guard"):
        Graph(model(graph))
    Graph(model(lambda inputs: head(inputs["user"], 1 / inputs["price"])))


def test_what_is_nan_for_every_sample_names_no_feature() -> None:
    with pytest.raises(ConfigError, match="a sample without ids, whose numbers are at their defaults, has"):
        Graph(model(lambda inputs: head(inputs["user"], ops.log(inputs["price"] - 9.0))))


def test_nan_that_the_graph_replaces_is_no_fault() -> None:
    def graph(inputs: dict[str, Any]) -> Any:
        mask = ops.expand_dims(ops.cast(inputs["seen_mask"], "float32"), -1)
        count = ops.sum(mask, 1)
        return head(inputs["user"], ops.where(count > 0, ops.sum(inputs["seen"] * mask, 1) / count, 0.0))

    Graph(model(graph))


def test_gradients_that_are_not_finite_are_told(caplog: pytest.LogCaptureFixture) -> None:
    def graph(inputs: dict[str, Any]) -> Any:
        taste = keras.layers.Dense(3, use_bias=False)(inputs["user"])
        return keras.layers.Dense(1, "sigmoid")(ops.sqrt(ops.sum(taste * taste, -1, keepdims=True)))

    with caplog.at_level(logging.WARNING):
        Graph(model(graph))
    (line,) = [one.getMessage() for one in caplog.records]
    assert line.startswith("graph: a sample without ids of 'user' has gradients that are not finite")


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("micro", [None, 4])
def test_a_pooled_sequence_is_a_pooled_feature(combiner: Any, micro: int | None) -> None:
    rng = np.random.default_rng(5)
    given: list[dict[str, Any]] = [
        {"ts": i, "label": i % 2, "user": f"u{i % 7}", "seen": rng.integers(0, 9, i % 4).tolist(), "price": 1.0}
        for i in range(64)
    ]
    assert any(not one["seen"] for one in given)

    def pooled(inputs: dict[str, Any]) -> Any:
        return head(inputs["user"], st.pool_sequence(inputs["seen"], inputs["seen_mask"], combiner))

    learner = st.Learner(model(pooled, micro_batch_size=micro), batch_size=16)
    features: list[Feature] = [
        USER,
        st.Categorical("seen", dim=3, combiner=combiner),
        st.Numeric("price", transform=None),
    ]
    plain = models.make(features, lambda inputs: head(inputs["user"], inputs["seen"]), micro_batch_size=micro)
    same = st.Learner(plain, batch_size=16)
    for one in (learner, same):
        one.learn(given)
    found = learner.predict(given)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, same.predict(given), atol=1e-5, rtol=0)


def test_a_wrong_combiner_is_refused() -> None:
    with pytest.raises(ValueError, match='must be "sum", "mean" or "sqrtn", not \'max\''):
        st.pool_sequence(None, None, "max")  # type: ignore[arg-type]
