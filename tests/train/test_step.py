"""What one step does to rows and weights, against the formulas; and that inputs, batches and shards do not matter."""

import math
from functools import cache
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import streamtrain as stm
from streamtrain.model.features import Feature
from tests.models import clicks, dense_of, make, statistics_of, two_towers

RATE = 0.5
IDS: list[str | int] = ["a", "b", "c"]


@cache
def pooled(combiner: Any, **options: Any) -> stm.Model:
    """sigmoid(sum of the pooled row), by SGD: no weights of its own."""
    features = [stm.Categorical("tags", dim=3, combiner=combiner)]
    return make(
        features,
        lambda inputs: keras.layers.Activation("sigmoid")(keras.ops.sum(inputs["tags"], axis=1, keepdims=True)),
        embedding_optimizer=stm.SGD(RATE),
        **options,
    )


def formula(
    combiner: str, before: NDArray[np.float32], samples: list[tuple[list[str], int]]
) -> tuple[NDArray[np.float64], float, NDArray[np.float64]]:
    """Predictions, sum of losses, and the rows of `IDS` after one step of the sum of losses."""
    rows, after, loss, predictions = before.astype(np.float64), before.astype(np.float64), 0.0, []
    for tags, label in samples:
        n = max(len(tags), 1)
        scale = {"sum": 1.0, "mean": 1 / n, "sqrtn": 1 / math.sqrt(n)}[combiner]
        logit = scale * sum(rows[IDS.index(tag)].sum() for tag in tags)
        p = 1 / (1 + math.exp(-logit))
        loss -= math.log(p if label else 1 - p)
        predictions.append(p)
        for tag in tags:
            after[IDS.index(tag)] -= RATE * scale * (p - label)
    return np.array(predictions), loss, after


SAMPLES = [(["a"], 1), (["a", "b"], 0), ([], 1), (["c", "c", "b", "a"], 0), (["b"], 1)]


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("shards", [1, 3])
def test_step_is_the_formula(combiner: str, shards: int) -> None:
    learner = stm.Learner(pooled(combiner, reduction="sum"), shards=shards)
    predictions, loss, rows = formula(combiner, learner.embeddings("tags", IDS), SAMPLES)
    learned = learner.learn([{"ts": 0, "tags": tags, "label": label} for tags, label in SAMPLES])
    np.testing.assert_allclose(learned.predictions[:, 0], predictions, rtol=1e-6)
    assert learned.loss == pytest.approx(loss, rel=1e-6)
    np.testing.assert_allclose(learner.embeddings("tags", IDS), rows, rtol=1e-5, atol=1e-7)


def test_mean_of_a_batch_divides_its_gradient() -> None:
    samples = [{"ts": 0, "tags": tags, "label": label} for tags, label in SAMPLES]
    mean, total = stm.Learner(pooled("sum", reduction="mean")), stm.Learner(pooled("sum", reduction="sum"))
    before = mean.embeddings("tags", IDS)
    assert mean.learn(samples).loss == pytest.approx(total.learn(samples).loss / len(samples))
    moved = (learner.embeddings("tags", IDS) - before for learner in (mean, total))
    np.testing.assert_allclose(next(moved) * len(samples), next(moved), rtol=1e-4, atol=1e-6)


def test_loss_of_several_batches_is_that_of_their_samples() -> None:
    one, many = stm.Learner(two_towers(), batch_size=1000), stm.Learner(two_towers(), batch_size=7)
    samples = clicks(20)
    parts = list(many.stream(samples))
    assert [part.samples for part in parts] == [7, 7, 6]
    assert stm.Learner(two_towers(), batch_size=7).learn(samples).loss == pytest.approx(
        sum(part.loss * part.samples for part in parts) / 20
    )
    assert one.learn(samples).loss == pytest.approx(one.metrics()["label"].log_loss, rel=1e-5)


def test_weights_of_losses() -> None:
    def graph(inputs: dict[str, Any]) -> Any:
        return {"a": inputs["user"] * 1.0, "b": inputs["user"] * 1.0}

    def moved(a: float, b: float) -> float:
        model = make(
            [stm.Categorical("user", dim=1, init=stm.Constant(0.0))],
            graph,
            label=["a", "b"],
            loss=lambda y, p: -p * y,
            loss_weights={"a": a, "b": b},
            embedding_optimizer=stm.SGD(1.0),
        )
        learner = stm.Learner(model)
        learner.learn([{"ts": 0, "user": "u", "a": 1, "b": 10}])
        return float(learner.embeddings("user", ["u"])[0, 0])

    assert moved(1, 1) == 11
    assert moved(2, 0.5) == 7
    assert moved(0, 1) == 10


def test_weights_of_the_graph_move_by_their_gradient() -> None:
    """One step of SGD on logistic regression, whose gradient is known."""

    def graph(inputs: dict[str, Any]) -> Any:
        return keras.layers.Dense(1, activation="sigmoid", use_bias=True)(inputs["x"])

    model = make([stm.Numeric("x", transform=None)], graph, dense_optimizer=stm.SGD(RATE))
    learner = stm.Learner(model, shards=2)
    kernel, bias = dense_of(learner).astype(np.float64)
    x, y = np.array([1.0, -2.0, 3.0]), np.array([1, 0, 1])
    learner.learn({"ts": [0, 0, 0], "x": x, "label": y})
    error = 1 / (1 + np.exp(-(kernel * x + bias))) - y
    expected = [kernel - RATE * np.mean(error * x), bias - RATE * np.mean(error)]
    np.testing.assert_allclose(dense_of(learner), expected, rtol=1e-5)


def test_padding_of_a_sequence_gets_no_gradient() -> None:
    """The graph pays for what stands at padded places; the rows of the sample must not."""

    def graph(inputs: dict[str, Any]) -> Any:
        return keras.ops.sum(inputs["h"] * keras.ops.array([[[1.0], [10.0], [100.0]]]), axis=1)

    model = make(
        [stm.Categorical("h", dim=1, combiner=None, max_length=3, init=stm.Constant(0.0))],
        graph,
        loss=lambda y, p: -p,
        reduction="sum",
        embedding_optimizer=stm.SGD(1.0),
    )
    learner = stm.Learner(model)
    learner.learn([{"ts": 0, "label": 0, "h": h} for h in (["a"], ["b", "a"], [], ["z", "c", "c", "b"])])
    assert learner.embeddings("h", ["a", "b", "c", "z"])[:, 0].tolist() == [11, 101, 11, 0]
    assert learner.rows == {"h": 3}


# --- what must not matter ---

EVERYTHING: list[Feature] = [
    stm.Categorical("user", dim=3),
    stm.Categorical("history", dim=5, table="item", combiner=None, max_length=3),
    stm.Categorical("item", dim=5, dtype="bfloat16"),
    stm.Cross("both", dim=2, of=("user", "item"), optimizer=stm.FTRL(0.1)),
    stm.Numeric("price", transform="log1p"),
]


@cache
def everything(**options: Any) -> stm.Model:
    def graph(inputs: dict[str, Any]) -> Any:
        mask = keras.ops.cast(inputs["history_mask"], "float32")[:, :, None]
        history = keras.ops.sum(inputs["history"] * mask, axis=1)
        x = keras.layers.Concatenate()([inputs["user"], inputs["item"], inputs["both"], inputs["price"], history])
        x = keras.layers.BatchNormalization()(keras.layers.Dense(8, activation="relu")(x))
        return keras.layers.Dense(1, activation="sigmoid")(x)

    return make(EVERYTHING, graph, weight="w", **options)


def events(count: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [
        {
            **sample,
            "history": [f"{i}" for i in rng.integers(0, 60, rng.integers(0, 5))],
            "w": float(rng.choice([0.5, 1.0, 2.0])),
        }
        for sample in clicks(count, seed)
    ]


@pytest.mark.parametrize("shards", [2, 7])
def test_shards_do_not_matter(shards: int) -> None:
    one, many = stm.Learner(everything(), batch_size=32), stm.Learner(everything(), batch_size=32, shards=shards)
    a, b = one.learn(events(300)), many.learn(events(300))
    np.testing.assert_allclose(a.predictions, b.predictions, atol=1e-6)
    assert one.rows == many.rows
    ids: list[str | int] = list(range(60))
    np.testing.assert_allclose(one.embeddings("item", ids), many.embeddings("item", ids), atol=1e-6)
    np.testing.assert_allclose(dense_of(one), dense_of(many), atol=1e-6)
    assert vars(one.stats) == vars(many.stats)


def test_the_form_of_samples_does_not_matter() -> None:
    samples = events(100)
    learners = [stm.Learner(everything(), batch_size=40) for _ in range(3)]
    columns = {name: [sample[name] for sample in samples] for name in samples[0]}
    learned = [learners[0].learn(samples), learners[1].learn(columns)]
    batches = [batch for batch, _ in learners[2].read(samples)]
    predictions = np.concatenate([learners[2].learn(batch).predictions for batch in batches])
    np.testing.assert_array_equal(learned[0].predictions, learned[1].predictions)
    np.testing.assert_array_equal(learned[0].predictions, predictions)


def test_same_stream_same_model() -> None:
    first, second = stm.Learner(everything(), batch_size=16), stm.Learner(everything(), batch_size=16)
    np.testing.assert_array_equal(first.learn(events(200)).predictions, second.learn(events(200)).predictions)


@settings(max_examples=10)
@given(st.lists(st.sampled_from([1, 5, 16, 64]), min_size=1, max_size=4))
def test_predicting_and_evaluating_change_nothing(sizes: list[int]) -> None:
    learner = LEARNER
    before = (
        learner.embeddings("user", IDS),
        dense_of(learner),
        learner._step.arrays(),
        statistics_of(learner),
        learner.rows,
    )
    for seed, size in enumerate(sizes):
        learner.predict(events(size, seed))
        learner.evaluate(events(size, seed))
    assert learner.samples == 100
    assert learner.metrics()["label"].samples == 100
    after = (
        learner.embeddings("user", IDS),
        dense_of(learner),
        learner._step.arrays(),
        statistics_of(learner),
        learner.rows,
    )
    np.testing.assert_equal(after, before)


LEARNER = stm.Learner(everything())
LEARNER.learn(events(100))


def test_evaluation_is_the_metrics_of_the_predictions() -> None:
    samples = events(500, seed=3)
    p = LEARNER.predict(samples)[:, 0].astype(np.float64)
    y, w = (np.array([sample[name] for sample in samples]) for name in ("label", "w"))
    found = LEARNER.evaluate(samples)["label"]
    assert found.log_loss == pytest.approx(np.average(-np.log(np.where(y == 1, p, 1 - p)), weights=w), rel=1e-5)
    assert found.prediction_mean == pytest.approx(np.average(p, weights=w), rel=1e-6)


def test_predictions_do_not_depend_on_the_batch_they_are_made_in() -> None:
    samples = events(50, seed=4)
    alone = np.concatenate([LEARNER.predict([sample]) for sample in samples])
    np.testing.assert_allclose(LEARNER.predict(samples), alone, atol=1e-6)


@pytest.mark.parametrize(("a", "label"), [(1e38, 1.0), (1.0, 1e20), (1.0, -1e20)])
def test_bad_gradient_of_weights_changes_none_of_them_on_any_shard(a: float, label: float) -> None:
    """Only one weight's gradient is not finite; what is dropped must not depend on where it lies."""

    def graph(inputs: dict[str, Any]) -> Any:
        return keras.layers.Dense(1, use_bias=False)(keras.layers.Concatenate()(list(inputs.values())))

    for shards in (1, 2):
        model = make(
            [stm.Numeric(name, transform=None) for name in "ab"],
            graph,
            loss="mean_squared_error",
            dense_optimizer=stm.SGD(),
        )
        learner = stm.Learner(model, shards=shards)
        before = dense_of(learner)
        learner.learn([{"ts": 0, "label": label, "a": a, "b": 1e-30}])
        np.testing.assert_array_equal(dense_of(learner), before)
        assert learner.stats.non_finite_dense == shards


# --- graphs that do not fit ---


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (lambda inputs: [], "graph returns 0 outputs"),
        (lambda inputs: {"clicks": inputs["x"] * 1.0}, "graph returns outputs named"),
        (lambda inputs: {}, "graph returns outputs named"),
        (lambda inputs: None, "must be a Keras tensor"),
        (lambda inputs: 0.5, "must be a Keras tensor"),
        (lambda inputs: keras.ops.concatenate([inputs["x"]] * 2, axis=1), "must be a Keras tensor"),
        (lambda inputs: inputs["x"][:, 0], "must be a Keras tensor"),
        (lambda inputs: 1 / 0, "graph fails with ZeroDivisionError"),
    ],
)
def test_graph_whose_outputs_do_not_fit(graph: Any, message: str) -> None:
    with pytest.raises(stm.ConfigError, match=message):
        stm.Learner(make([stm.Numeric("x", transform=None)], graph))


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, p: keras.ops.mean(y - p),
        lambda y, p: keras.ops.concatenate([y, p], axis=1),
    ],
)
def test_loss_that_is_not_by_sample(loss: Any) -> None:
    """It could not be weighted, and samples without an optional label would teach."""
    model = make([stm.Numeric("x", transform=None)], lambda inputs: inputs["x"] * 1.0, loss=loss)
    with pytest.raises(stm.ConfigError, match="loss of 'label' must return one value per sample"):
        stm.Learner(model)


class SquaredError(keras.losses.Loss):  # type: ignore[misc]
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return (y_true - y_pred) ** 2


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, p: (y - p) ** 2,
        lambda y, p: keras.ops.sum((y - p) ** 2, axis=1),
        keras.losses.MeanSquaredError(),
        keras.losses.MeanSquaredError(reduction=None),
        keras.losses.mean_squared_error,
        SquaredError(),
    ],
)
def test_loss_by_sample(loss: Any) -> None:
    model = make([stm.Numeric("x", transform=None)], lambda inputs: inputs["x"] * 1.0, loss=loss)
    assert stm.Learner(model).learn([{"ts": 0, "x": 3, "label": 1}, {"ts": 0, "x": 1, "label": 1}]).loss == 2


@pytest.mark.parametrize(
    ("given", "name", "kind"),
    [
        (keras.losses.BinaryCrossentropy(reduction="sum", name="mine"), "binary_crossentropy", "binary"),
        (keras.losses.binary_crossentropy, "binary_crossentropy", "binary"),
        (keras.losses.Huber(), "huber", "real"),
        (keras.losses.Poisson(), "poisson", "count"),
        (keras.losses.MeanAbsoluteError(), "mean_absolute_error", "real"),
        (keras.losses.BinaryCrossentropy(from_logits=True), None, "real"),
        (keras.losses.BinaryCrossentropy(label_smoothing=0.1), None, "binary"),
        (keras.losses.BinaryFocalCrossentropy(), None, "binary"),
        (keras.losses.BinaryFocalCrossentropy(from_logits=True), None, "real"),
        (SquaredError(), None, "real"),
    ],
)
def test_losses_of_keras_are_the_named_ones_unless_they_differ(given: Any, name: str | None, kind: str) -> None:
    model = make([stm.Numeric("x", transform=None)], lambda inputs: inputs["x"] * 1.0, loss=given)
    assert model.losses["label"] == name if name else callable(model.losses["label"])
    assert model.labels[0].kind == kind


def regularized(inputs: dict[str, Any]) -> Any:
    """Penalties of weights, of what a layer gives, and of a layer's own."""
    x = keras.layers.Dense(3, "tanh", kernel_regularizer="l2", bias_initializer="ones")(inputs["x"])
    x = keras.layers.ActivityRegularization(l2=0.3)(x)
    return keras.layers.Dense(1, "sigmoid", bias_regularizer=keras.regularizers.L1(0.2))(x)


@pytest.mark.parametrize(("micro", "size"), [(None, 6), (3, 3)])
@pytest.mark.parametrize("reduction", ["row_sum", "mean", "sum"])
def test_what_layers_add_to_the_loss_is_learned_as_keras_does(reduction: Any, micro: int | None, size: int) -> None:
    times = size if reduction == "sum" else 1
    options = {"dense_optimizer": stm.SGD(RATE / times), "reduction": reduction, "micro_batch_size": micro}
    model = make([stm.Numeric("x", transform=None)], regularized, **options)
    learner = stm.Learner(model, batch_size=6, shards=2)
    x, y = np.array([1.0, -2.0, 3.0, 0.5, 1.5, -1.0]), np.array([1, 0, 1, 0, 0, 1])
    loss = learner.learn({"ts": np.zeros(6), "x": x, "label": y}).loss
    keras_model = model.replace(name="oracle").keras
    keras_model.compile(keras.optimizers.SGD(RATE), {"label": "binary_crossentropy"})
    parts = [slice(at, at + size) for at in range(0, 6, size)]
    expected = [keras_model.train_on_batch({"x": x[of][:, None]}, {"label": y[of][:, None]}) for of in parts]
    assert loss == pytest.approx(np.mean(expected) * times, rel=1e-5)
    weights = np.concatenate([one.numpy().ravel() for one in keras_model.trainable_variables])
    np.testing.assert_allclose(dense_of(learner), weights, rtol=1e-5)


def test_rows_feel_what_layers_add_to_the_loss() -> None:
    """The label is what is predicted, so that only the penalty moves the row."""

    def graph(inputs: dict[str, Any]) -> Any:
        return keras.layers.ActivityRegularization(l2=0.5)(inputs["user"]) * 1.0

    user = stm.Categorical("user", dim=1, init=stm.Constant(2.0))
    model = make([user], graph, loss="mean_squared_error", embedding_optimizer=stm.SGD(0.1))
    learner = stm.Learner(model)
    learner.learn([{"ts": 0, "user": "u", "label": 2}])
    assert learner.embeddings("user", ["u"])[0, 0] == pytest.approx(2.0 - 0.1 * 2 * 0.5 * 2.0)


def test_a_constraint_is_refused() -> None:
    def graph(inputs: dict[str, Any]) -> Any:
        return keras.layers.Dense(1, kernel_constraint="non_neg")(inputs["x"])

    with pytest.raises(
        stm.ConfigError, match="kernel' has the constraint NonNeg, but shards change weights without it"
    ):
        stm.Learner(make([stm.Numeric("x", transform=None)], graph))


def test_a_graph_of_half_precision() -> None:
    def graph(inputs: dict[str, Any]) -> Any:
        return keras.layers.Dense(1, "sigmoid", dtype="mixed_float16")(inputs["x"])

    learner = stm.Learner(make([stm.Numeric("x", transform=None)], graph))
    learned = learner.learn([{"ts": 0, "x": 1, "label": 1}] * 100)
    assert learned.predictions.dtype == np.float32
    assert learner.learn([{"ts": 0, "x": 1, "label": 1}]).loss < learned.loss


def test_graph_with_weights_that_are_not_float32() -> None:
    def graph(inputs: dict[str, Any]) -> Any:
        x = keras.layers.Dense(1, dtype="float64")(inputs["x"])
        return keras.ops.cast(x, "float32")

    with pytest.raises(stm.ConfigError, match="trainable weights must be float32"):
        stm.Learner(make([stm.Numeric("x", transform=None)], graph))
