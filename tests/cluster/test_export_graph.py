"""The exported graph predicts what the trainer and the server do."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas
import pytest
import tensorflow as tf
from numpy.typing import NDArray

import streamtrain as stm
from streamtrain._core import hash_bytes
from streamtrain.cluster.exports import Export
from streamtrain.cluster.versions import published_model, version_of_checkpoint
from streamtrain.errors import ConfigError
from streamtrain.model.load import load_model
from streamtrain.serve.graph import Graph
from streamtrain.serve.predictor import Predictor
from streamtrain.settings import PublishSettings
from streamtrain.store.checkpoint_origin import CheckpointOrigin
from streamtrain.store.redis_origin import RedisOrigin
from tests import models
from tests.cluster.commands import Commands
from tests.stream.redis_fixtures import valkey

__all__ = ["valkey"]

# Keras asks NumPy 2 in the old way for the values that it writes.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

MODEL = """
import keras
import streamtrain as st

def graph(inputs):
    seen = keras.layers.GlobalAveragePooling1D()(inputs["seen"], mask=inputs["seen_mask"])
    x = keras.layers.Concatenate()([inputs["user"], inputs["tags"], seen, inputs["price"]])
    x = keras.layers.Dropout(0.2)(keras.layers.BatchNormalization()(x))
    return {"label": keras.layers.Dense(1, activation="sigmoid")(keras.layers.Dense(4, activation="relu")(x))}

features = [
    st.Categorical("user", dim=4),
    st.Categorical("tags", dim=3, combiner="sum"),
    st.Categorical("seen", dim=2, combiner=None, max_length=4),
    st.Numeric("price"),
]
model = st.Model(st.Schema(features=features, time="ts", label="label"), graph, keep={0: 0.5})
other = st.Model(st.Schema(features=[st.Categorical("item", dim=8)], time="ts", label="label"), lambda inputs: (
    keras.layers.Dense(1)(inputs["item"])), loss="mean_squared_error")
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("model") / "m.py"
    file.write_text(MODEL)
    return file


def samples(count: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(7)
    return [
        {
            "ts": 1000 + i,
            "label": int(rng.integers(2)),
            "user": f"u{rng.integers(9)}",
            "tags": [f"t{one}" for one in rng.integers(5, size=1 + i % 3)],
            "seen": [int(one) for one in rng.integers(6, size=1 + i % 4)],
            "price": float(rng.normal()),
        }
        for i in range(count)
    ]


def inputs_of(folder: Path, given: Sequence[Mapping[str, Any]]) -> dict[str, NDArray[Any]]:
    """What somebody makes of samples who has nothing but the files."""
    rows: dict[str, dict[int, NDArray[np.float32]]] = {}
    for table in ("user", "tags", "seen"):
        frame = pandas.read_parquet(folder / "tables" / f"{table}.parquet")
        rows[table] = dict(zip(frame["key"].tolist(), frame["embedding"].tolist(), strict=True))

    def row(table: str, one: Any) -> NDArray[np.float32]:
        return np.asarray(rows[table][hash_bytes(str(one).encode())], np.float32)

    seen, mask = np.zeros((len(given), 4, 2), np.float32), np.zeros((len(given), 4), np.bool_)
    for i, sample in enumerate(given):
        for j, one in enumerate(sample["seen"]):
            seen[i, j], mask[i, j] = row("seen", one), True
    return {
        "user": np.stack([row("user", sample["user"]) for sample in given]),
        "tags": np.stack([np.sum([row("tags", one) for one in sample["tags"]], axis=0) for sample in given]),
        "seen": seen,
        "seen_mask": mask,
        "price": np.array([[sample["price"]] for sample in given], np.float32),
    }


def test_it_predicts_the_same(valkey: str, tmp_path: Path, file: Path) -> None:
    model = load_model(f"{file}:model")
    learner = stm.Learner(model, batch_size=32)
    given = samples(300)
    learner.learn(given)
    learner.save(tmp_path / "epochs" / "epoch-000000001")
    settings = PublishSettings(url=valkey, model="exported")
    with published_model(settings) as published:
        version = version_of_checkpoint(published, str(tmp_path / "epochs"), "float32", "ann")
        predictor = Predictor.load(model, Graph(model), RedisOrigin(published), version, "1")
        served = predictor.predict(given)
    learned = learner.predict(given)
    folder = tmp_path / "out"
    done = Commands(valkey, "exported").json("export", "1", str(folder), "--model", f"{file}:model")
    assert (done["version"], done["rows"], done["url"]) == (1, learner.rows, str(folder))
    inputs = inputs_of(folder, given)
    saved = tf.saved_model.load(str(folder / "saved_model")).signatures["serving_default"]
    found = saved(**{name: tf.constant(values) for name, values in inputs.items()})["label"].numpy()
    np.testing.assert_allclose(found, learned, atol=1e-6, rtol=0)
    np.testing.assert_allclose(found, served, atol=1e-6, rtol=0)
    loaded = keras.saving.load_model(folder / "model.keras", safe_mode=True)
    assert model.sampling is not None
    raw = loaded.predict_on_batch(inputs)["label"]
    np.testing.assert_allclose(model.sampling.correct(raw), learned, atol=1e-6, rtol=0)
    assert np.abs(raw - learned).max() > 0.01  # which are corrected


def test_the_model_is_as_before(tmp_path: Path) -> None:
    model = models.two_towers()
    learner = stm.Learner(model, batch_size=64)
    before = [weight.numpy() for weight in model.keras.weights]
    learner.learn(models.clicks(200))
    learner.save(tmp_path / "epochs" / "epoch-000000001")
    origin = CheckpointOrigin(tmp_path / "epochs", "clicks")
    Export(tmp_path / "out").write(origin, origin.versions()[0], model)
    for weight, value in zip(model.keras.weights, before, strict=True):
        assert np.array_equal(weight.numpy(), value)
    loaded = keras.saving.load_model(tmp_path / "out" / "model.keras")
    assert not all(np.array_equal(one.numpy(), value) for one, value in zip(loaded.weights, before, strict=True))


class Odd(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """A layer that cannot be written."""

    def call(self, inputs: Any) -> Any:
        return inputs

    def get_config(self) -> dict[str, Any]:
        raise ValueError("no config of mine")


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, file: Path) -> None:
    odd = models.make([stm.Categorical("user", dim=4)], lambda inputs: models.logistic({"x": Odd()(inputs["user"])}))
    learner = stm.Learner(odd, batch_size=64)
    learner.learn(models.clicks(100))
    learner.save(tmp_path / "epochs" / "epoch-000000001")
    origin = CheckpointOrigin(tmp_path / "epochs", "clicks")
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="graph cannot be written: ValueError: no config of mine"):
        Export(out).write(origin, origin.versions()[0], odd)
    assert [one for one in out.rglob("*") if one.is_file()] == []
    with pytest.raises(ConfigError, match=r"publication 1 of clicks has schema .*, but the model has"):
        Export(out).write(origin, origin.versions()[0], load_model(f"{file}:other"))
    Export(out).write(origin, origin.versions()[0])
    assert sorted(one.name for one in out.rglob("*") if one.is_file()) == [
        "manifest.json",
        "user.parquet",
        "weights.safetensors",
    ]
