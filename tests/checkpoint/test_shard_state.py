"""Saving and loading learners: a loaded one goes on as if nothing had happened, or says why it cannot."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import keras
import numpy as np
import pandas as pd
import pytest

import streamtrain as stm
from streamtrain._core import Table
from streamtrain.checkpoint.shard_state import _at_a_time, load_shards, restore_shard
from streamtrain.errors import CheckpointCorrupt
from streamtrain.model.features import Feature
from streamtrain.model.optimizers import Optimizer
from streamtrain.store.checkpoint.checkpoint import CheckpointReader, commit, write_part
from streamtrain.store.checkpoint.epochs import open_chain
from tests.models import clicks, dense_of, make, two_towers

ROWS: list[Optimizer] = [
    stm.SGD(0.1),
    stm.Adagrad(0.1),
    stm.RowWiseAdagrad(0.1),
    stm.Adam(0.01),
    stm.FTRL(0.1, l1=0.01),
]
DENSE: list[Optimizer] = [stm.SGD(0.1), stm.Adagrad(0.1), stm.Adam(0.01)]
IDS: list[str | int] = [f"u{i}" for i in range(40)]


def kind(optimizer: Optimizer) -> str:
    return optimizer.kind


def assert_goes_on(model: stm.Model, path: Path, *, shards: tuple[int, int] = (2, 3), samples: Any = clicks) -> None:
    """Assert that learning, saving, loading and learning is learning without a break."""
    steady = stm.Learner(model, batch_size=30)
    steady.learn(samples(300))
    first = stm.Learner(model, batch_size=30, shards=shards[0])
    first.learn(samples(300))
    first.save(path)
    second = stm.Learner.load(path, model, batch_size=30, shards=shards[1])
    assert (second.samples, second.watermark, second.rows) == (first.samples, first.watermark, first.rows)
    np.testing.assert_array_equal(second.embeddings("user", IDS), first.embeddings("user", IDS))
    np.testing.assert_array_equal(dense_of(second), dense_of(first))
    a, b = steady.learn(samples(300, 1)), second.learn(samples(300, 1))
    np.testing.assert_allclose(b.predictions, a.predictions, atol=1e-6)
    np.testing.assert_allclose(second.embeddings("user", IDS), steady.embeddings("user", IDS), atol=1e-6)
    np.testing.assert_allclose(dense_of(second), dense_of(steady), atol=1e-6)


@pytest.mark.parametrize("optimizer", ROWS, ids=kind)
def test_rows_of_every_optimizer(tmp_path: Path, optimizer: Optimizer) -> None:
    features: list[Feature] = [stm.Categorical("user", dim=3, optimizer=optimizer), stm.Numeric("price")]
    assert_goes_on(make(features), tmp_path / "c")


@pytest.mark.parametrize("optimizer", DENSE, ids=kind)
def test_weights_of_every_optimizer(tmp_path: Path, optimizer: Optimizer) -> None:
    features: list[Feature] = [stm.Categorical("user", dim=3), stm.Numeric("price")]
    assert_goes_on(make(features, dense_optimizer=optimizer), tmp_path / "c")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_of_16_bits(tmp_path: Path, dtype: Any) -> None:
    """Also their stochastic rounding, which goes by the row's count."""
    features = [stm.Categorical("user", dim=3, dtype=dtype), stm.Categorical("item", dim=3)]
    assert_goes_on(make(features), tmp_path / "c")


@pytest.mark.parametrize("shards", [(1, 1), (7, 1), (1, 7)])
def test_any_number_of_shards(tmp_path: Path, shards: tuple[int, int]) -> None:
    assert_goes_on(two_towers(), tmp_path / "c", shards=shards)


def test_the_topic_of_the_clock_is_kept_and_may_be_missing_from_older_ones(tmp_path: Path) -> None:
    learner = stm.Learner(two_towers())
    learner.learn(clicks(10))
    learner.save(tmp_path / "unknown")
    learner._shards[0].adopt("a topic")
    learner.save(tmp_path / "known")
    manifest = json.loads((tmp_path / "known" / "manifest.json").read_text())
    assert manifest["about"]["topic"] == "a topic"
    spec = learner._shards[0].spec
    assert [one.run.topic for one in load_shards(tmp_path / "known", spec, 2)[0]] == ["a topic"] * 2
    chain = open_chain(tmp_path / "unknown")
    del chain.about["topic"]
    assert restore_shard(chain, 0, 1, spec).run.topic == ""
    chain.about["topic"] = 7
    with pytest.raises(CheckpointCorrupt, match="invalid topic id 7"):
        restore_shard(chain, 0, 1, spec)


def test_statistics_of_the_graph(tmp_path: Path) -> None:
    def graph(inputs: dict[str, Any]) -> Any:
        x = keras.layers.BatchNormalization()(keras.layers.Concatenate()(list(inputs.values())))
        return keras.layers.Dense(1, activation="sigmoid")(keras.layers.Dropout(0.2)(x))

    assert_goes_on(make([stm.Categorical("user", dim=3), stm.Numeric("price")], graph), tmp_path / "c")


def test_model_without_tables(tmp_path: Path) -> None:
    model = make([stm.Numeric("price")])
    learner = stm.Learner(model, batch_size=10)
    learner.learn(clicks(50))
    learner.save(tmp_path / "c")
    loaded = stm.Learner.load(tmp_path / "c", model)
    np.testing.assert_array_equal(loaded.predict(clicks(5)), learner.predict(clicks(5)))


def test_learner_that_has_learned_nothing(tmp_path: Path) -> None:
    stm.Learner(two_towers(), shards=3).save(tmp_path / "c")
    loaded = stm.Learner.load(tmp_path / "c", two_towers())
    assert (loaded.samples, loaded.rows) == (0, {"user": 0, "item": 0})
    np.testing.assert_array_equal(loaded.predict(clicks(9)), stm.Learner(two_towers()).predict(clicks(9)))


def test_saving_changes_nothing(tmp_path: Path) -> None:
    learner = stm.Learner(two_towers(), batch_size=20)
    learner.learn(clicks(100))
    before = learner.predict(clicks(50, seed=2))
    learner.save(tmp_path / "c")
    learner.save(str(tmp_path / "c"))
    np.testing.assert_array_equal(learner.predict(clicks(50, seed=2)), before)


def test_any_url(place: str) -> None:
    learner = stm.Learner(two_towers(), shards=2)
    learner.learn(clicks(100))
    learner.save(place)
    loaded = stm.Learner.load(place, two_towers(), shards=3)
    np.testing.assert_array_equal(loaded.predict(clicks(50)), learner.predict(clicks(50)))


def test_shards_have_files_of_their_own(tmp_path: Path) -> None:
    learner = stm.Learner(make([stm.Categorical("user", dim=3, min_count=2)]), shards=3)
    learner.learn(clicks(100))
    learner.save(tmp_path / "c")
    reader = CheckpointReader(tmp_path / "c")
    assert len(reader.shards) == 3
    for i, shard in enumerate(learner._shards):
        arrays = reader.arrays(i)
        np.testing.assert_array_equal(arrays["dense"], shard.dense.pull())
        np.testing.assert_array_equal(arrays["admission/user"], shard.tables[0].admission())
        assert sum(len(rows.keys) for rows in reader.rows("user", [i])) == len(shard.tables[0])


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_ids_that_were_counted_but_not_admitted(tmp_path: Path, shards: int) -> None:
    model = make([stm.Categorical("user", dim=3, min_count=4)])
    first = stm.Learner(model, shards=2)
    first.learn(clicks(60))
    first.save(tmp_path / "c")
    second = stm.Learner.load(tmp_path / "c", model, shards=shards)
    for learner in (first, second):
        learner.learn(clicks(60, 1))
    assert second.rows == first.rows
    np.testing.assert_array_equal(second.embeddings("user", IDS), first.embeddings("user", IDS))


def test_tables_are_for_pandas(tmp_path: Path) -> None:
    learner = stm.Learner(two_towers(), shards=2)
    learner.learn(clicks(100))
    learner.save(tmp_path / "c")
    rows = pd.read_parquet(tmp_path / "c" / "tables" / "user")
    assert len(rows) == learner.rows["user"]
    assert rows["count"].sum() == 100
    assert rows["last_seen"].max() == 0, "kept only where rows expire or give way"


# --- what cannot be loaded ---


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: make([stm.Categorical("user", dim=3)]), "differs in schema"),
        (lambda: make([stm.Categorical("user", dim=2)], seed=1), "differs in seed: setting seed: 0 -> 1"),
        (
            lambda: make([stm.Categorical("user", dim=2)], dense_optimizer=stm.SGD()),
            "differs in dense_optimizer: .*adagrad -> sgd",
        ),
        (
            lambda: make([stm.Categorical("user", dim=2)], embedding_optimizer=stm.SGD()),
            "differs in tables: .*optimizer adagrad -> ",
        ),
        (
            lambda: make([stm.Categorical("user", dim=2, optimizer=stm.Adam())]),
            "differs in tables: .*optimizer adagrad -> ",
        ),
        (lambda: make([stm.Categorical("user", dim=2)], wider), "differs in dense: weight dense/kernel: new"),
    ],
)
def test_checkpoint_of_another_model(tmp_path: Path, other: Any, message: str) -> None:
    stm.Learner(make([stm.Categorical("user", dim=2)])).save(tmp_path / "c")
    with pytest.raises(stm.CheckpointError, match=message):
        stm.Learner.load(tmp_path / "c", other())


def wider(inputs: dict[str, Any]) -> Any:
    return keras.layers.Dense(1, activation="sigmoid")(keras.layers.Dense(4)(inputs["user"]))


def test_what_may_change(tmp_path: Path) -> None:
    """Rates, admission, expiry, capacity and the width of storage are operation, not meaning."""
    first = stm.Learner(make([stm.Categorical("user", dim=2)], embedding_optimizer=stm.Adagrad(0.1)))
    first.learn(clicks(100))
    first.save(tmp_path / "c")
    user = stm.Categorical("user", dim=2, min_count=2, expire_after="1d", capacity=1000, dtype="float16")
    loaded = stm.Learner.load(tmp_path / "c", make([user], embedding_optimizer=stm.Adagrad(0.2)))
    np.testing.assert_allclose(loaded.embeddings("user", IDS), first.embeddings("user", IDS), atol=1e-3)
    assert loaded.rows == first.rows


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(stm.CheckpointError, match="no checkpoint at"):
        stm.Learner.load(tmp_path / "c", two_towers())


@pytest.mark.parametrize(
    ("array", "value"),
    [
        ("dense", None),
        ("dense", np.zeros(1, np.float32)),
        ("dense_slots", np.zeros(1, np.float32)),
        ("dense_steps", np.zeros(0, np.float32)),
        ("statistics", None),
    ],
)
def test_what_a_learner_would_not_have_written(tmp_path: Path, array: str, value: Any) -> None:
    model = make([stm.Categorical("user", dim=2)])
    stm.Learner(model).save(tmp_path / "c")
    whole = CheckpointReader(tmp_path / "c")
    arrays = whole.arrays(0) | ({array: value} if value is not None else {})
    if value is None:
        del arrays[array]
    commit(tmp_path / "d", whole.about, [write_part(tmp_path / "d", 0, arrays, [], about=whole.shards[0])])
    with pytest.raises(stm.CheckpointCorrupt, match="does not match the shard"):
        stm.Learner.load(tmp_path / "d", model)


@pytest.mark.parametrize(("dim", "tables"), [(1, 4), (16, 4), (32, 3), (64, 1), (1024, 1)])
def test_what_loading_takes_is_bounded(dim: int, tables: int) -> None:
    """A part of 65,536 rows of 1,024 floats and as much state has half a gigabyte."""
    of = [cast(Table, SimpleNamespace(dim=wide, state_size=wide)) for wide in (1, dim)]
    assert _at_a_time(of) == tables
    assert _at_a_time([]) >= 1


def test_damaged_rows(tmp_path: Path) -> None:
    learner = stm.Learner(two_towers())
    learner.learn(clicks(100))
    learner.save(tmp_path / "c")
    file = tmp_path / "c" / "tables" / "user" / "shard-0.parquet"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(stm.CheckpointCorrupt, match=r"user/shard-0\.parquet is damaged"):
        stm.Learner.load(tmp_path / "c", two_towers())


def test_directory_with_something_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(stm.CheckpointError, match="exists and is not a checkpoint"):
        stm.Learner(two_towers()).save(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "precious"
