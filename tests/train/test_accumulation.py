"""Large weights that step once for several micro-batches come to what their gradients, added up by hand, come to."""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import keras
import numpy as np
import pytest

import streamtrain as stm
from streamtrain.errors import ConfigError
from streamtrain.model.features import Feature
from streamtrain.train import micro_graph
from streamtrain.train.micro import describe_steps
from streamtrain.train.trainer import plan
from tests.train.test_micro import assert_same, stream, weights_of

MICRO, STEPS, BATCH = 4, 3, 30  # of 12, 12 and 6 samples; the last micro-batch is of 2
LARGE = 1100  # elements, here

Samples = Sequence[dict[str, Any]]


@pytest.fixture(autouse=True)
def smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_graph, "LARGE_WEIGHT", LARGE)


def graph(inputs: dict[str, Any]) -> Any:
    """Large weights used once, twice, with a regularizer, on a sequence; and smaller ones."""
    layers = keras.layers
    twice = layers.Dense(300, "tanh", name="twice")
    history = layers.Dense(300, "tanh", name="sequence")(inputs["history"])
    towers = [twice(inputs["user"]), twice(inputs["item"]), keras.ops.max(history, 1)]
    x = layers.Dense(20, "tanh", name="top", kernel_regularizer=keras.regularizers.L2(1e-3))(layers.Add()(towers))
    x = layers.Dense(50, "tanh", name="smaller")(layers.Concatenate()([x, inputs["price"]]))
    x = layers.Dense(30, "tanh", name="once")(x)
    return layers.Dense(1, "sigmoid")(x)


@cache
def model(dense: stm.SGD | stm.Adagrad | stm.Adam, **options: Any) -> stm.Model:
    features: list[Feature] = [
        stm.Categorical("user", dim=4),
        stm.Categorical("item", dim=4),
        stm.Categorical("history", table="item", dim=4, combiner=None, max_length=3),
        stm.Numeric("price", default=0.0),
    ]
    schema = stm.Schema(label=stm.Label("label", kind="real"), features=features, time="ts")
    steps = {"micro_batch_size": MICRO, "dense_accumulation_steps": STEPS}
    return stm.Model(schema, graph, loss="mean_squared_error", dense_optimizer=dense, **steps | options)


def batched(samples: Samples, size: int) -> Iterator[Samples]:
    return (samples[at : at + size] for at in range(0, len(samples), size))


class Dense:
    """The weights, stepped by NumPy as `dense_accumulation_steps` says."""

    def __init__(self, made: stm.Model, values: Any) -> None:
        self.optimizer = made.dense_optimizer
        self.values = values.copy()
        bounds = np.cumsum([0, *made.dense.sizes])
        self.parts = [slice(a, b) for a, b in pairwise(bounds.tolist())]
        self.large = [part for part in self.parts if part.stop - part.start >= LARGE]
        self.small = [part for part in self.parts if part not in self.large]
        initial = getattr(self.optimizer, "initial_accumulator", 0.0)
        self.slots = [np.full_like(values, initial), np.zeros_like(values)]
        self.gradients: list[Any] = []
        self.taken = 0

    def see(self, gradient: Any) -> None:
        """One micro-batch."""
        self.gradients.append(gradient)
        self.taken += 1
        for part in self.small:
            self.step(part, [gradient[part]])

    def end(self) -> None:
        """The last micro-batch of a step of the large weights."""
        for part in self.large if self.gradients else ():
            self.step(part, [one[part] for one in self.gradients])
        self.gradients = []

    def step(self, part: slice, gradients: list[Any]) -> None:
        of, m, (first, second) = self.optimizer, len(gradients), self.slots
        total = np.sum(gradients, 0)
        squared = total**2 * np.sum(np.square(gradients)) / max(np.sum(total**2), 1e-30)
        move = total
        if isinstance(of, stm.Adagrad):
            keep = of.decay**m
            first[part] = keep * first[part] + (1 - keep) * of.initial_accumulator + squared
            move = total / (np.sqrt(first[part]) + of.epsilon)
        elif isinstance(of, stm.Adam):
            keep1, keep2 = of.beta1**m, of.beta2**m
            first[part] = keep1 * first[part] + (1 - keep1) * total / m
            second[part] = keep2 * second[part] + (1 - keep2) * squared / m
            mean = m * first[part] / (1 - of.beta1**self.taken)
            move = mean / (np.sqrt(second[part] / (1 - of.beta2**self.taken)) + of.epsilon)
        self.values[part] -= of.rate * move


def added_up(made: stm.Model, samples: Samples) -> tuple[stm.Learner, Any]:
    """A learner of batches of `MICRO`, whose weights are put back to those of `Dense` before each; its predictions.

    Their gradients are what SGD of rate 1 changes. A batch ends a step; a micro-batch with a label of more than 1 has
    no part in it.
    """
    small = stm.Learner(made.replace(dense_optimizer=stm.SGD(1.0), micro_batch_size=None), batch_size=MICRO)
    vector, dense, predictions = small._shards[0].dense, Dense(made, weights_of(small)), []
    for batch in batched(samples, BATCH):
        for step in batched(batch, MICRO * STEPS):
            for part in batched(step, MICRO):
                vector.load(dense.values, vector.slots, 0)
                predictions.append(small.learn(list(part)).predictions)
                if max(one["label"] for one in part) <= 1:
                    dense.see(dense.values - vector.pull())
            dense.end()
    vector.load(dense.values, vector.slots, 0)
    return small, np.concatenate(predictions)


@pytest.mark.parametrize(
    ("dense", "reduction", "xla"),
    [
        (stm.Adagrad(0.1, decay=0.95), "row_sum", True),
        (stm.Adam(0.01, epsilon=1e-3), "mean", True),  # else it makes large steps of gradients that are all rounding
        (stm.SGD(0.1), "sum", True),
        (stm.SGD(0.1), "sum", False),
    ],
)
def test_gradients_of_large_weights_are_added_up(dense: Any, reduction: Any, xla: bool) -> None:
    samples = stream(BATCH * 2 + 10, 1)
    made = model(dense, reduction=reduction)
    large = stm.Learner(made, batch_size=BATCH, shards=3)
    assert large._micro is not None
    large._micro._graphs.xla = xla
    expected, predictions = added_up(made, samples)
    np.testing.assert_allclose(large.learn(samples).predictions, predictions, atol=1e-5)
    assert_same(large, expected)


def test_a_gradient_that_is_not_finite_is_dropped_alone() -> None:
    """Also if no other is left for a step."""
    samples = stream(BATCH * 2, 4)
    for i in (5, BATCH - 6, BATCH - 1):
        samples[BATCH + i]["label"] = 1e30  # whose gradient is too large
    made = model(stm.Adam(0.01, epsilon=1e-3))
    large = stm.Learner(made, batch_size=BATCH)
    expected, predictions = added_up(made, samples)
    np.testing.assert_allclose(large.learn(samples).predictions, predictions, atol=1e-5)
    assert large.stats.non_finite_dense == 3
    np.testing.assert_allclose(weights_of(large), weights_of(expected), atol=1e-5)


def test_a_gradient_is_dropped_alone_though_its_factors_are_finite() -> None:
    def one_weight(inputs: dict[str, Any]) -> Any:
        ops = keras.ops
        units = keras.layers.Dense(LARGE, use_bias=False)(inputs["price"])
        return 2000 * ops.sum(units, 1, keepdims=True) + ops.sum(inputs["user"], 1, keepdims=True)

    price = stm.Numeric("price", default=0.0, transform=None, grid=None)
    features: list[Feature] = [stm.Categorical("user", dim=4), price]
    schema = stm.Schema(label=stm.Label("label", kind="real"), features=features, time="ts")
    made = stm.Model(
        schema,
        one_weight,
        loss="mean_absolute_error",  # whose gradient is the same for any error
        dense_optimizer=stm.Adagrad(0.1),
        micro_batch_size=MICRO,
        dense_accumulation_steps=STEPS,
    )
    samples = stream(BATCH * 2, 4)
    for i in (5, BATCH - 6, BATCH - 1):
        samples[BATCH + i] |= {"label": 2.0, "price": 7e16}  # below 2^56; times 500, its square is infinite
    large = stm.Learner(made, batch_size=BATCH)
    expected, predictions = added_up(made, samples)
    np.testing.assert_allclose(large.learn(samples).predictions, predictions, rtol=1e-4, atol=1e-4)
    assert large.stats.non_finite_dense == 3
    np.testing.assert_allclose(weights_of(large), weights_of(expected), rtol=1e-4, atol=1e-5)


def test_every_product_is_found() -> None:
    """By large weight, the largest first, the shapes of its factors; none for one that is used otherwise, too."""
    learner = stm.Learner(model(stm.SGD()), batch_size=BATCH)
    micro = learner._micro
    assert micro is not None
    [(batch, _)] = learner.read(stream(BATCH, 1))
    made = micro._graph(micro.reserve(plan(learner.model.planner(1), batch)))
    names = [learner.model.dense.names[i] for [i] in made._packs[: made._large]]
    assert dict(zip(names, made._factors(), strict=True)) == {
        "top/kernel": None,
        "once/kernel": [[MICRO, 50], [MICRO, 30]],
        "sequence/kernel": [[MICRO * 3, 4], [MICRO * 3, 300]],
        "twice/kernel": [[MICRO * 2, 4], [MICRO * 2, 300]],
    }


def test_by_default_a_step_has_32_samples_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    schema = stm.Schema(features=[stm.Categorical("user", dim=7)])

    def of(units: int, **options: Any) -> stm.Model:
        layers = keras.layers
        return stm.Model(
            schema, lambda inputs: layers.Dense(1, "sigmoid")(layers.Dense(units)(inputs["user"])), **options
        ).replace(seed=1)

    sizes = {size: of(8, micro_batch_size=size).accumulated_steps for size in (1, 2, 8, 16, 64, None)}
    assert sizes == {1: 4, 2: 4, 8: 4, 16: 2, 64: 1, None: 1}
    assert of(8, dense_accumulation_steps=3).accumulated_steps == 3
    with pytest.raises(ConfigError, match='dense_accumulation_steps must be 1 to 65536 or "auto", not 0'):
        of(8, dense_accumulation_steps=0)
    steps = "learning batches in steps of 8 samples (micro_batch_size)"
    assert describe_steps(of(9_362)) == steps
    assert describe_steps(of(9_363, dense_accumulation_steps=1)) == steps
    assert describe_steps(of(9_363)) == (f"{steps}, 65,541 of the weights once in 4 of them (dense_accumulation_steps)")
