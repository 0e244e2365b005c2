"""A worker compiles its graph before it has partitions: for the batches that it is going to learn."""

from typing import Any

import pytest

import streamtrain as stm
from streamtrain.stream.formats.factory import JsonFormat
from streamtrain.testing.stream import MemoryStream
from streamtrain.train.step import Step
from streamtrain.train.warmup import Warmup
from tests.train.test_micro import assert_same, make, stream


def test_the_first_batch_is_not_compiled_for() -> None:
    samples, model = stream(128, seed=11), make("Adam", "Adam", "row_sum", 8)
    topic = MemoryStream.of({0: samples[:64], 1: samples[64:]})
    graphs = Warmup(model, Step(model), topic, JsonFormat(model), 64).graphs()
    compiled = dict(graphs.compiled)
    assert len(compiled) == 1
    ahead, alone = stm.Learner(model, batch_size=64, graphs=graphs), stm.Learner(model, batch_size=64)
    for one in (ahead, alone):
        one.learn(samples)
    assert_same(ahead, alone)
    assert graphs.compiled == compiled


@pytest.mark.parametrize("topic", [MemoryStream(), MemoryStream.of({0: []}), MemoryStream.of({0: ["{"] * 99})])
def test_where_nothing_is_known_of_samples_they_are_made_up(topic: MemoryStream) -> None:
    """The first batch of a new topic is not compiled for either, if each feature has one id."""
    features: list[Any] = [
        stm.Categorical("user", 4),
        stm.Categorical("item", 2, field="it"),
        stm.Cross("both", 2, of=("user", "item")),
    ]
    schema = stm.Schema(
        time="ts", label=["label", stm.Label("spent", kind="real")], features=[*features, stm.Numeric("price")]
    )

    def graph(inputs: dict[str, Any]) -> Any:
        import keras

        top = keras.layers.Concatenate()(list(inputs.values()))
        return [keras.layers.Dense(1, "sigmoid")(top), keras.layers.Dense(1)(top)]

    model = stm.Model(schema, graph, loss={"label": "binary_crossentropy", "spent": "mean_squared_error"})
    graphs = Warmup(model, Step(model), topic, JsonFormat(model), 64).graphs()
    compiled = dict(graphs.compiled)
    assert len(compiled) == 1
    learner = stm.Learner(model, batch_size=64, graphs=graphs)
    for count in (64, 9, 40):
        learner.learn(
            {"ts": i, "label": i % 2, "spent": 1.5, "user": f"u{i % 7}", "it": f"i{i}", "price": i}
            for i in range(count)
        )
    assert learner.samples == 113
    assert graphs.compiled == compiled
