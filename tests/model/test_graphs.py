"""Any graph that Keras calls a model works from learning to a checkpoint and back, also where layers are shared."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamtrain as st
from streamtrain.checkpoint.evolution import Evolution
from streamtrain.errors import CheckpointError, ConfigError
from streamtrain.model import model as model_module
from streamtrain.model.spec import Spec

Build = Callable[[dict[str, Any]], Any]
SCHEMA = st.Schema(
    label=["click", "buy"],
    features=[st.Categorical("user", 4), st.Categorical("item", 4), st.Numeric("price")],
)


class Drawn:
    """A random graph: tensors of [batch, width], and layers that are called on several of them."""

    def __init__(self, seed: int, inputs: dict[str, Any]) -> None:
        import keras

        self.keras, self.random = keras, random.Random(seed)
        self.tensors = [*inputs.values()]
        self.layers: dict[tuple[str, int], Any] = {}
        for _ in range(self.random.randrange(2, 7)):
            self.tensors.append(self.random.choice([self.called, self.called, self.joined, self.computed])())

    def any(self) -> Any:
        return self.random.choice(self.tensors)

    def joined(self) -> Any:
        if self.random.random() < 0.5:
            return self.keras.layers.Concatenate()([self.any() for _ in range(self.random.randrange(2, 4))])
        made = self.called()
        same = [one for one in self.tensors if one.shape[-1] == made.shape[-1]]
        return self.keras.layers.Add()([made, self.random.choice([made, *same])])

    def computed(self) -> Any:
        one = self.any()
        how = self.random.randrange(3)
        return self.keras.ops.tanh(one) if how == 0 else one * 0.5 if how == 1 else one + one

    def called(self) -> Any:
        """Of a layer that is new, or that was called before on what has the same width."""
        given = self.any()
        width = given.shape[-1]
        kinds: dict[str, Callable[[], Any]] = {
            "dense": lambda: self.keras.layers.Dense(self.random.randrange(1, 6), "relu"),
            "activation": lambda: self.keras.layers.Activation("sigmoid"),
            "norm": self.keras.layers.BatchNormalization,
            "layer norm": self.keras.layers.LayerNormalization,
            "dropout": lambda: self.keras.layers.Dropout(0.2),
            "reshape": lambda: self.keras.layers.Reshape((width,)),
            "named": lambda: self.keras.layers.Dense(3, name=f"tower_{len(self.layers)}"),
            "nested": lambda: self.nested(width),
            "mixed": lambda: Mixed(self.random.randrange(1, 4)),
        }
        kind = self.random.choice([*kinds])
        if (kind, width) not in self.layers or self.random.random() < 0.3:
            self.layers[kind, width] = kinds[kind]()
        return self.layers[kind, width](given)

    def nested(self, width: int) -> Any:
        layers = self.keras.layers
        if self.random.random() < 0.5:
            return self.keras.Sequential([layers.Dense(3), layers.Dropout(0.1), layers.BatchNormalization()])
        inner = self.keras.Input((width,))
        shared = layers.Dense(width)
        return self.keras.Model(inner, layers.Concatenate()([shared(inner), shared(shared(inner))]))

    def outputs(self) -> Any:
        last = self.keras.layers.Dense(1, "sigmoid")
        top = self.keras.layers.Concatenate()(self.tensors)
        how = self.random.randrange(4)
        if how == 0:  # one head for both
            narrow = self.keras.layers.Dense(4)
            return [last(narrow(top)), last(self.keras.layers.Dense(4)(top))]
        if how == 1:  # the same tensor twice
            made = last(top)
            return [made, made]
        if how == 2:  # by name, the other way round, behind what changes values only
            squash = self.keras.layers.Activation("sigmoid")
            dense = self.keras.layers.Dense(1)
            return {"buy": squash(dense(top)), "click": squash(self.keras.layers.Dense(1)(top))}
        return [last(top), self.keras.layers.Dense(1, "sigmoid", name="label")(top)]


def Mixed(width: int) -> Any:  # a class, which needs keras
    """A layer of one's own, with layers within it of which two have one name, and an integer that counts."""
    import keras

    class Mixed(keras.layers.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.parts = [keras.layers.Dense(width, name="part"), keras.layers.Dense(width, name="part")]
            self.noise = keras.layers.GaussianNoise(0.1)
            self.count = self.add_weight(shape=(), dtype="int32", trainable=False, initializer="zeros", name="n")

        def call(self, given: Any, training: bool = False) -> Any:
            if training:
                self.count.assign(self.count + 1)
            return self.noise(self.parts[0](given), training=training) + self.parts[1](given)

        def compute_output_shape(self, shape: Any) -> Any:
            return (*shape[:-1], width)

    return Mixed()


def drawn(seed: int) -> st.Model:
    def graph(inputs: dict[str, Any]) -> Any:
        return Drawn(seed, inputs).outputs()

    return st.Model(SCHEMA, graph, loss="binary_crossentropy", micro_batch_size=None if seed % 2 else 8)


def samples(count: int, seed: int) -> list[dict[str, Any]]:
    of = random.Random(seed)
    return [
        {"user": f"u{of.randrange(9)}", "item": f"i{of.randrange(5)}", "price": of.random(), "click": of.randrange(2),
         "buy": of.randrange(2)}
        for _ in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(int(os.environ.get("STREAMTRAIN_TEST_GRAPHS", "5"))))
def test_what_is_learned_by_any_graph_is_read_again(seed: int, tmp_path: Path) -> None:
    """In the same process, where Keras numbers all layers on; and what is learned from then on is the same."""
    learner = st.Learner(drawn(seed), batch_size=32)
    learner.learn(samples(64, seed))
    learner.save(tmp_path / "saved")
    again = st.Learner.load(tmp_path / "saved", drawn(seed), batch_size=32)
    asked = samples(20, -seed - 1)
    np.testing.assert_array_equal(again.predict(asked), learner.predict(asked))
    evolved = st.Learner.load(tmp_path / "saved", drawn(seed), batch_size=32, evolve=True)
    np.testing.assert_array_equal(evolved.predict(asked), learner.predict(asked))
    for one in (learner, again):
        one.learn(samples(64, seed + 1))
    np.testing.assert_array_equal(again.predict(asked), learner.predict(asked))
    evolution = Evolution(Spec.of(learner.model), Spec.of(drawn(seed)))
    assert {one.action for one in evolution.changes} == {"kept"}


def test_two_towers_of_one_layer_are_read_again(tmp_path: Path) -> None:
    def graph(inputs: dict[str, Any]) -> Any:
        import keras

        tower = keras.layers.Dense(4)
        x = keras.layers.Concatenate()([tower(inputs["user"]), tower(inputs["item"])])
        return keras.layers.Dense(1, "sigmoid")(x)

    schema = st.Schema(features=[st.Categorical("user", 4), st.Categorical("item", 4)])
    learner = st.Learner(st.Model(schema, graph))
    learner.learn([{"user": "u", "item": "i", "label": 1}])
    learner.save(tmp_path / "saved")
    about = {f"{one['layer']}/{one['name']}": one for one in learner.model.about["weights"]}
    assert about["dense/kernel"]["inputs"] == []  # it is multiplied with both
    assert about["output label/kernel"]["inputs"] == [["dense", 4], ["dense (1)", 4]]
    again = st.Learner.load(tmp_path / "saved", st.Model(schema, graph))
    assert again.predict([{"user": "u", "item": "i"}]) == learner.predict([{"user": "u", "item": "i"}])


def frozen(inputs: dict[str, Any]) -> Any:
    """A table that never changes, one of a layer that is frozen later, and one that each step changes."""
    import keras

    class Moving(keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.total = self.add_weight(shape=(12_000,), trainable=False, initializer="zeros")
            self.never = self.add_weight(shape=(11_000,), trainable=False, initializer="ones")

        def call(self, given: Any, training: bool = False) -> Any:
            if training:
                self.total.assign(self.total + keras.ops.mean(given))
            return given + self.total[:1] * self.never[0]

    table = np.random.default_rng(0).standard_normal((3_000, 8)).astype(np.float32)
    vectors = keras.layers.Embedding(3_000, 8, weights=[table], trainable=False)
    found = keras.layers.Flatten()(vectors(keras.ops.cast(inputs["price"] * 2_999, "int32")))
    x = keras.layers.Concatenate()([inputs["user"], inputs["item"], found])
    fixed = keras.layers.Dense(32, "relu")
    x = Moving()(keras.layers.BatchNormalization()(fixed(x)))
    fixed.trainable = False
    return keras.layers.Dense(1, "sigmoid")(x)


def test_what_no_step_changes_is_not_kept_by_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And predictions are the same: of the learner, of what it saves, and of a server that has no such weights."""
    schema = st.Schema(features=[st.Categorical("user", 4), st.Categorical("item", 4), st.Numeric("price")])

    def made() -> st.Model:
        return st.Model(schema, frozen)

    def learned(model: st.Model) -> st.Learner:
        learner = st.Learner(model)
        learner.learn([{**one, "label": one["click"]} for one in samples(200, 1)])
        return learner

    asked = samples(30, 2)
    learner = learned(made())
    assert {tuple(one.shape) for one in learner.model.constants} == {(3_000, 8), (16, 32), (32,), (11_000,)}
    assert learner.model.statistics.shapes == ((32,), (32,), (12_000,))
    learner.save(tmp_path / "saved")
    again = st.Learner.load(tmp_path / "saved", made())
    np.testing.assert_array_equal(again.predict(asked), learner.predict(asked))

    with monkeypatch.context() as before:  # as earlier releases kept them
        before.setattr(model_module, "_FEW_WEIGHTS", 1 << 40)
        old = learned(made())
        assert len(old.model.statistics.shapes) == 7
        old.save(tmp_path / "before")
    np.testing.assert_allclose(old.predict(asked), learner.predict(asked), rtol=1e-5)
    with pytest.raises(CheckpointError, match=r"constants.*evolve"):
        st.Learner.load(tmp_path / "before", made())
    evolved = st.Learner.load(tmp_path / "before", made(), evolve=True)
    np.testing.assert_allclose(evolved.predict(asked), old.predict(asked), rtol=1e-6)
    evolution = Evolution(Spec.of(old.model), Spec.of(made()))
    assert [(one.name, one.action) for one in evolution.changes if one.action != "kept"] == [("frozen", "changed")]


def test_layers_of_one_name_are_refused_in_words() -> None:
    def graph(inputs: dict[str, Any]) -> Any:
        import keras

        x = keras.layers.Concatenate()(list(inputs.values()))
        for _ in range(2):
            x = keras.layers.Dense(1, "sigmoid", name="same")(x)
        return x

    schema = st.Schema(features=[st.Categorical("user", 4), st.Numeric("price")])
    with pytest.raises(ConfigError, match=r"graph.*'same'|graph.*unique"):
        st.Learner(st.Model(schema, graph))
