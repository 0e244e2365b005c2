"""The exported graph predicts what the trainer and the server do."""

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas
import pytest
import tensorflow as tf
from hypothesis import given as each
from hypothesis import settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import streamtrain as stm
from streamtrain._core import birth, hash_bytes, hash_cells
from streamtrain.errors import ConfigError
from streamtrain.model.loader import load_model
from streamtrain.publish.export import Export
from streamtrain.publish.lookup_graph import hash_texts, hash_words, initial_rows
from streamtrain.publish.opening import open_published_model
from streamtrain.publish.versions import import_checkpoint
from streamtrain.serve.graph import Graph
from streamtrain.serve.predictor import Predictor
from streamtrain.settings.groups import PublishSettings
from streamtrain.store.checkpoint.source import CheckpointOrigin
from streamtrain.store.redis.source import RedisOrigin
from tests import models
from tests.cli.commands import Commands
from tests.patience import PATIENCE
from tests.stream.redis_fixtures import valkey

__all__ = ["valkey"]

# Keras asks NumPy 2 in the old way for the values that it writes.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

MODEL = """
import keras
import streamtrain as st

def graph(inputs):
    seen = st.pool_sequence(inputs["seen"], inputs["seen_mask"])
    rest = [value for name, value in inputs.items() if not name.startswith("seen")]
    x = keras.layers.Concatenate()([seen, *rest])
    x = keras.layers.Dropout(0.2)(keras.layers.BatchNormalization()(x))
    return {"label": keras.layers.Dense(1, activation="sigmoid")(keras.layers.Dense(4, activation="relu")(x))}

features = [
    st.Categorical("user", dim=4),
    st.Categorical("tags", dim=3, combiner="sum"),
    st.Categorical("seen", dim=2, combiner=None, max_length=4),
    st.Numeric("price", transform=None, default=0.5, grid=st.Grid(dim=3, bits=(0, 5))),
    st.Categorical("slot", dim=2),
    st.Numeric("slot_number", field="slot", default=0.0),
    st.Cross("by_tag", dim=2, of=("tags", "user")),
    st.Cross("of_seen", dim=1, of=("seen", "user", "seen", "slot", "tags"), max_length=3, combiner="sum",
             init=st.Constant(0.0)),
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
            "user": f"u{rng.integers(9)}" if i % 5 else "",
            "tags": [f"t{one}" for one in rng.integers(5, size=1 + i % 3)],
            "seen": [int(one) for one in rng.integers(6, size=1 + i % 4)],
            "price": float(rng.normal()) if i % 7 else None,
            "slot": i % 4 - 1,
        }
        for i in range(count)
    ]


def inputs_of(folder: Path, given: Sequence[Mapping[str, Any]]) -> dict[str, NDArray[Any]]:
    """What somebody makes of samples who has nothing but the files."""
    rows: dict[str, dict[int, NDArray[np.float32]]] = {}
    for table in ("user", "tags", "seen", "price_cells", "slot", "by_tag", "of_seen"):
        frame = pandas.read_parquet(folder / "tables" / f"{table}.parquet")
        rows[table] = dict(zip(frame["key"].tolist(), frame["embedding"].tolist(), strict=True))

    def row(table: str, one: Any) -> NDArray[np.float32]:
        return np.asarray(rows[table][hash_bytes(str(one).encode())], np.float32)

    def cells(number: float | None) -> NDArray[np.float32]:
        keys = hash_cells(np.array([np.nan if number is None else number], np.float32), [0, 5]).tolist()
        known = [rows["price_cells"].get(one, np.zeros(3, np.float32)) for one in keys]
        return np.asarray(known[0] if number is None else np.sum(known, axis=0) / np.sqrt(2), np.float32)

    def crossed(table: str, *lists: Sequence[Any], last: int | None = None) -> list[NDArray[np.float32]]:
        of_ids = [*product(*lists)][-(last or 0) :]
        keys = [b"".join(hash_bytes(str(one).encode()).to_bytes(8, "little") for one in ids) for ids in of_ids]
        none = [0.0] if table == "of_seen" else None  # of samples that no unit was active for
        return [np.asarray(rows[table].get(hash_bytes(key), none), np.float32) for key in keys]

    def of_seen(one: Mapping[str, Any]) -> NDArray[np.float32]:
        lists = (one["seen"][-4:], [one["user"]], one["seen"][-4:], [one["slot"]], one["tags"])
        return np.asarray(np.sum(crossed("of_seen", *lists, last=3), axis=0), np.float32)

    seen, mask = np.zeros((len(given), 4, 2), np.float32), np.zeros((len(given), 4), np.bool_)
    for i, sample in enumerate(given):
        for j, one in enumerate(sample["seen"]):
            seen[i, j], mask[i, j] = row("seen", one), True
    return {
        "user": np.stack([row("user", sample["user"]) for sample in given]),
        "tags": np.stack([np.sum([row("tags", one) for one in sample["tags"]], axis=0) for sample in given]),
        "seen": seen,
        "seen_mask": mask,
        "price": np.array([[0.5 if one["price"] is None else one["price"]] for one in given], np.float32),
        "slot": np.stack([row("slot", sample["slot"]) for sample in given]),
        "slot_number": np.array([[np.copysign(np.log1p(abs(one["slot"])), one["slot"])] for one in given], np.float32),
        "by_tag": np.stack([np.mean(crossed("by_tag", one["tags"], [one["user"]]), axis=0) for one in given]),
        "of_seen": np.stack([of_seen(one) for one in given]),
        "price_cells": np.stack([cells(sample["price"]) for sample in given]),
    }


PLAIN = """
import json, sys
import numpy as np
import tensorflow as tf

folder, path = sys.argv[1:]
serve = tf.saved_model.load(folder).signatures["serving_default"]
found = []
for inputs in json.load(open(path)):
    tensors = {name: tf.constant(one) for name, one in inputs.items() if name != "price"}
    found.append(serve(price=tf.constant(inputs["price"], tf.float32), **tensors)["label"].numpy().tolist())
assert "streamtrain" not in sys.modules
print(json.dumps(found))
"""


def from_ids(folder: Path, requests: Sequence[Sequence[Mapping[str, Any]]], scratch: Path) -> list[NDArray[np.float32]]:
    """What TensorFlow alone predicts from the fields of samples, request by request."""

    def padded(name: str, given: Sequence[Mapping[str, Any]]) -> list[list[str]]:
        lists = [one[name] if isinstance(one[name], list) else [one[name]] for one in given]
        longest = max(map(len, lists))
        return [[str(id_) for id_ in one] + [""] * (longest - len(one)) for one in lists]

    inputs = [
        {name: padded(name, given) for name in ("tags", "seen")}
        | {"user": [one["user"] for one in given], "slot": [str(one["slot"]) for one in given]}
        | {"price": [math.nan if one["price"] is None else one["price"] for one in given]}
        for given in requests
    ]
    (scratch / "inputs.json").write_text(json.dumps(inputs))
    command = [sys.executable, "-c", PLAIN, str(folder), str(scratch / "inputs.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE, cwd=scratch)
    assert done.returncode == 0, done.stderr
    return [np.array(one, np.float32) for one in json.loads(done.stdout)]


@each(
    st.lists(st.binary(max_size=256), max_size=20),
    st.integers(0, 2**64 - 1),
    st.sampled_from(["float32", "float16", "bfloat16"]),
)
@settings(max_examples=10)  # each traces a graph
def test_keys_and_initial_rows_are_those_of_the_core(texts: list[bytes], seed: int, dtype: Any) -> None:
    keys = np.array([hash_bytes(one) for one in texts], np.uint64)
    found = hash_texts(tf.constant(texts, tf.string), 256)
    assert found.numpy().tolist() == keys.tolist()
    table = {"dim": 3, "seed": seed, "init": "uniform", "init_scale": 0.05, "dtype": dtype}
    born = birth(keys, 3, seed=seed, init="uniform", init_scale=0.05, dtype=dtype)
    for rows in (initial_rows, tf.function(initial_rows)):  # a graph makes constants in another way
        np.testing.assert_array_equal(rows(found, table).numpy(), born)


@pytest.mark.parametrize("size", [0, 1, 3, 4, 7, 8, 11, 12, 15, 16, 31, 32, 33, 63, 64, 95, 96, 224, 255, 256])
def test_keys_at_the_bounds_of_words_and_stripes(size: int) -> None:
    text = bytes(range(256))[:size]
    assert hash_texts(tf.constant([text]), 256).numpy().tolist() == [hash_bytes(text)]


@pytest.mark.parametrize("count", range(1, 9))
def test_keys_of_words(count: int) -> None:
    words = np.arange(3 * count, dtype=np.uint64).reshape(3, count) * np.uint64(0x9E3779B185EBCA87)
    assert hash_words(tf.constant(words)).numpy().tolist() == [hash_bytes(one.tobytes()) for one in words]


def test_ids_that_are_too_long_are_refused() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="ids have at most 8 bytes"):
        hash_texts(tf.constant(["123456789"]), 8)


def test_it_is_written_for_tables_of_a_moderate_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.two_towers()
    learner = stm.Learner(model, batch_size=64)
    learner.learn(models.clicks(200))
    learner.save(tmp_path / "epochs" / "epoch-000000001")
    origin = CheckpointOrigin(tmp_path / "epochs", "clicks")
    monkeypatch.setattr("streamtrain.publish.export.MAX_SERVING_BYTES", 1 << 10)
    Export(tmp_path / "out").write(origin, origin.versions()[0], model)
    assert not (tmp_path / "out" / "serving").exists()
    said = json.loads((tmp_path / "out" / "manifest.json").read_text())["without_serving"]
    assert said.startswith("its rows would take")
    assert said.endswith("and 0 MiB are the limit")


def test_it_predicts_the_same(valkey: str, tmp_path: Path, file: Path) -> None:
    model = load_model(f"{file}:model")
    learner = stm.Learner(model, batch_size=32)
    given = samples(300)
    learner.learn(given)
    learner.save(tmp_path / "epochs" / "epoch-000000001")
    publish = PublishSettings(url=valkey, model="exported")
    with open_published_model(publish) as published:
        version = import_checkpoint(published, str(tmp_path / "epochs"), "float32", "ann")
        predictor = Predictor.load(model, Graph(model), RedisOrigin(published), version, "1")
        new = [{"user": "new", "tags": ["new", "t1"], "seen": [1, 2, 3, 4, 5], "price": 0.5, "slot": 9}]
        new += [{"user": "u" * 100, "tags": [], "seen": [], "price": -1.0, "slot": 0}]
        of_new = predictor.predict(new)
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
    known, unknown = from_ids(folder / "serving" / "1", [given, new], tmp_path)
    np.testing.assert_allclose(known, served, atol=1e-6, rtol=0)
    np.testing.assert_allclose(unknown, of_new, atol=1e-6, rtol=0)
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
    with pytest.raises(ConfigError, match="cannot write the graph: ValueError: no config of mine"):
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
