"""Grids of numbers: what the graph gets, from every kind of sample, and what changes when one is added."""

from functools import cache
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas
import pyarrow as pa
import pytest

import streamtrain as st
from streamtrain.errors import ConfigError
from streamtrain.model.features import Cells
from streamtrain.model.samples import SampleReader

PRICE = st.Numeric("price", default=2.0, transform=None, grid=st.Grid(dim=4, bits=(0, 6)))


def graph(inputs: dict[str, Any]) -> Any:
    x = keras.layers.Concatenate()(list(inputs.values()))
    return keras.layers.Dense(1, "sigmoid")(keras.layers.Dense(8, "relu")(x))


@cache
def make(*features: Any, **options: Any) -> st.Model:
    return st.Model(st.Schema(features=features or (st.Categorical("user", dim=4), PRICE)), graph, **options)


def samples(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """A label that depends on the number in a way that no line through it shows."""
    random = np.random.default_rng(seed)
    prices = np.round(random.uniform(44.9, 45.0, count), 5)
    labels = (prices * 100).astype(int) % 2
    return [
        {"user": f"u{random.integers(9)}", "price": price, "label": int(label)}
        for price, label in zip(prices.tolist(), labels, strict=True)
    ]


def test_the_graph_gets_the_number_and_its_cells() -> None:
    model = make()
    assert {name: one.shape for name, one in model.keras.input.items()} == {
        "user": (None, 4),
        "price": (None, 1),
        "price_cells": (None, 4),
    }
    assert [(table.name, table.dim, table.init) for table in model.schema.tables] == [
        ("user", 4, st.Uniform(0.05)),
        ("price_cells", 4, st.Constant(0.0)),
    ]


@pytest.mark.parametrize("form", ["dicts", "pandas", "arrow", "mapping"])
def test_all_forms_of_samples_have_the_same_cells(form: str) -> None:
    given = [{**one, "price": None} if i % 3 == 0 else one for i, one in enumerate(samples(20))]
    reader = SampleReader(make())
    frame = pandas.DataFrame(given)
    forms: dict[str, Any] = {
        "dicts": given,
        "pandas": frame,
        "arrow": pa.Table.from_pylist(given),
        "mapping": {name: [one[name] for one in given] for name in given[0]},
    }
    [(expected, _)] = reader.batches([dict(one) for one in given], 100)
    [(batch, bad)] = reader.batches(forms[form], 100)
    assert not bad
    for name in ("keys", "starts", "offsets", "numeric"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(expected, name))


def test_what_depends_on_a_number_in_any_way_is_learned() -> None:
    given = samples(4000)
    with_cells, without = (st.Learner(make(st.Numeric("price", grid=grid))) for grid in (st.Grid(), None))
    for learner in (with_cells, without):
        learner.learn(given)
    found = [learner.evaluate(samples(1000, seed=1))["label"].auc for learner in (with_cells, without)]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0] > 0.95
    assert found[1] < 0.6


def test_a_row_that_nothing_was_learned_of_says_nothing() -> None:
    """A number far from all others is predicted as one whose cells are all zeros."""
    learner = st.Learner(make(st.Numeric("price", transform="standardize", stddev=1e30, grid=st.Grid())))
    learner.learn(samples(500))
    assert learner.predict([{"price": 1e6}]) == pytest.approx(learner.predict([{"price": -3e-9}]), abs=1e-6)


def test_results_depend_neither_on_shards_nor_on_a_restart(tmp_path: Path) -> None:
    given = samples(600)
    one, three = st.Learner(make()), st.Learner(make(), shards=3)
    np.testing.assert_allclose(one.learn(given).predictions, three.learn(given).predictions, atol=1e-6)
    three.save(tmp_path / "saved")
    again = st.Learner.load(tmp_path / "saved", make())
    assert again.rows == one.rows
    np.testing.assert_array_equal(again.predict(given), three.predict(given))


def test_a_model_gets_grids_by_evolve(tmp_path: Path) -> None:
    """All that was learned is kept, and predictions are at first what they were."""
    given = samples(600)
    plain = st.Learner(make(st.Categorical("user", dim=4), st.Numeric("price", default=2.0, transform=None)))
    plain.learn(given)
    plain.save(tmp_path / "saved")
    evolved = st.Learner.load(tmp_path / "saved", make(), evolve=True)
    assert evolved.rows == {"user": 9, "price_cells": 0}
    np.testing.assert_allclose(evolved.predict(given), plain.predict(given), atol=1e-6)


def test_a_schema_without_grids_is_the_schema_of_before() -> None:
    schema = st.Schema(features=[st.Categorical("user", dim=4), st.Numeric("price")])
    assert schema.fingerprint() == "ae8f0080569d2b3b"
    other = st.Schema(features=[st.Categorical("user", dim=4), st.Numeric("price", grid=st.Grid())])
    assert other.fingerprint() != schema.fingerprint()
    bounded = st.Schema(features=[st.Categorical("user", dim=4), st.Numeric("price", grid=st.Grid(capacity=100))])
    assert bounded.fingerprint() == other.fingerprint()
    assert [table.capacity for table in bounded.tables] == [None, 100]


def test_options_of_a_grid() -> None:
    assert st.Grid(bits=[1, 5]).bits == (1, 5)  # type: ignore[arg-type]  # a list is as good
    assert st.Numeric("price", grid=st.Grid(3, (2,), dtype="bfloat16")).cells == Cells(
        "price_cells", 3, combiner="sqrtn", init=st.Constant(0.0), dtype="bfloat16", of="price", bits=(2,)
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: st.Grid(bits=()), r"bits must ascend, each from 0 to 23, not \(\)"),
        (lambda: st.Grid(bits=(4, 4)), "bits must ascend"),
        (lambda: st.Grid(bits=(0, 24)), "bits must ascend"),
        (lambda: st.Grid(bits=(True,)), "bits must ascend"),
        (lambda: st.Grid(bits=5), "bits must ascend"),  # type: ignore[arg-type]
        (lambda: st.Grid(dim=0), "dim must be 1 to 4096, not 0"),
        (lambda: st.Grid(capacity=-1), "capacity must be"),
        (lambda: st.Numeric("price", grid=16), "grid must be a Grid or None, not 16"),  # type: ignore[arg-type]
        (lambda: make(PRICE, st.Categorical("price_cells", dim=4)), "feature 'price_cells' appears twice"),
    ],
)
def test_wrong_options(wrong: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        wrong()
