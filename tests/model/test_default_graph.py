"""The graph of a model that gives none."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamtrain as st
from streamtrain.errors import ConfigError
from streamtrain.model.default_graph import PAIR_ROWS, PAIRED, complete
from streamtrain.model.features import Feature
from streamtrain.model.loader import load_model
from streamtrain.model.spec import Spec

SCHEMA = st.Schema(
    time="ts",
    features=[
        st.Categorical("user", dim=4, default="", expire_after="30d", min_count=2),
        st.Categorical("item", dim=4, expire_after="7d"),
        st.Categorical("tags", dim=4, max_length=5),
        st.Categorical("seen", table="item", dim=4, combiner=None, max_length=3),
        st.Numeric("price"),
        st.Numeric("age", grid=st.Grid(dim=2, bits=(3,))),
    ],
)


def samples(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """What a user likes of an item depends on both together, and on the price."""
    random = np.random.default_rng(seed)
    users, items = random.integers(30, size=count), random.integers(8, size=count)
    prices = random.uniform(0, 10, count)
    taste = np.sin(17.0 * users + 5.0 * items**2) + np.sin(3 * prices)
    labels = random.random(count) < 1 / (1 + np.exp(-3 * taste))
    return [
        {
            **{"ts": 1000 + i, "label": int(label), "user": int(user), "item": int(item), "tags": ["a", f"t{item}"]},
            **{"seen": [int(user) % 3], "price": float(price), "age": 30},
        }
        for i, (user, item, price, label) in enumerate(zip(users, items, prices, labels, strict=True))
    ]


def test_what_the_schema_becomes() -> None:
    model = st.Model(SCHEMA)
    tables = {table.name: table for table in model.schema.tables}
    weights = ["user_weight", "item_weight", "tags_weight", "user*item_weight", "user*tags_weight", "item*tags_weight"]
    assert [*tables] == ["user", "item", "tags", *weights, "price_cells", "age_cells"]
    assert tables["age_cells"].dim == 2
    assert {(tables[name].dim, tables[name].init, tables[name].optimizer) for name in weights} == {
        (1, st.Constant(0.0), st.Adagrad(0.03))
    }
    both = tables["user*item_weight"]
    assert (both.min_count, both.expire_after, both.capacity) == (2, 7 * 86_400, PAIR_ROWS // 3)
    assert model.output_biases.keys() == {"label"}
    assert st.Model(SCHEMA, model.graph).schema == SCHEMA


def test_replaced_it_stays_what_it_is() -> None:
    model = st.Model(SCHEMA)
    other = model.replace(seed=1)
    assert other.schema == model.schema
    assert other.graph is model.graph


def test_pairs_are_bounded() -> None:
    """Those of the first features of ids, whatever there are more."""
    features: list[Feature] = [st.Categorical(f"id{i}", dim=2) for i in range(PAIRED + 5)]
    crosses = complete(st.Schema(features=features)).crosses
    assert len(crosses) == PAIRED * (PAIRED - 1) // 2
    assert {name for one in crosses for name in one.of} == {f"id{i}" for i in range(PAIRED)}
    assert sum(one.capacity or 0 for one in crosses) <= PAIR_ROWS


def test_it_learns_what_pairs_and_numbers_say() -> None:
    learner, plain = st.Learner(st.Model(SCHEMA)), st.Learner(one_layer())
    aucs = []
    for one in (learner, plain):
        one.learn(samples(20_000))
        auc = one.evaluate(samples(2_000, seed=1))["label"].auc
        assert auc is not None
        aucs.append(auc)
    assert aucs[0] > 0.85
    assert aucs[0] > aucs[1] + 0.05


def one_layer() -> st.Model:
    import keras

    def graph(inputs: dict[str, Any]) -> Any:
        x = keras.layers.Concatenate()([inputs[name] for name in ("user", "item", "tags", "price")])
        return keras.layers.Dense(1, "sigmoid")(keras.layers.Dense(64, "relu")(x))

    return st.Model(SCHEMA, graph)


def test_it_takes_steps_of_its_own() -> None:
    model, other = st.Model(SCHEMA), one_layer()
    assert (model.micro_batch_size, other.micro_batch_size) == (2, 8)
    for one in (model, model.replace(micro_batch_size=8)):
        assert one.dense_optimizer == st.Adagrad(0.03, 0.1, decay=0.99975)
    for one in (other, model.replace(graph=other.graph)):
        assert one.dense_optimizer == st.Adagrad(0.03, 0.1, decay=0.999)
    assert model.replace(seed=1).micro_batch_size == 2
    assert model.replace(graph=other.graph).micro_batch_size == 8
    assert model.replace(micro_batch_size=4).replace(seed=1).micro_batch_size == 4
    with pytest.raises(ConfigError, match='micro_batch_size must be 1 to 65536, "auto" or None, not 0'):
        model.replace(micro_batch_size=0)


@pytest.mark.parametrize("features", [[st.Categorical("user", dim=4)], [st.Numeric("price")]])
def test_schemas_of_one_field(features: list[Feature]) -> None:
    learner = st.Learner(st.Model(st.Schema(features=features)))
    learner.learn([{"user": i % 3, "price": i, "label": i % 2} for i in range(50)])
    assert np.isfinite(learner.predict([{"user": 1, "price": 2}])).all()


@pytest.mark.parametrize(
    ("loss", "low", "high"),
    [("mean_squared_error", -np.inf, np.inf), ("poisson", 0, np.inf), ("huber", -np.inf, np.inf)],
)
def test_outputs_are_what_losses_need(loss: str, low: float, high: float) -> None:
    learner = st.Learner(st.Model(st.Schema(features=[st.Categorical("user", dim=4)]), loss=loss))
    learner.learn([{"user": i % 3, "label": 7.0 + i % 3} for i in range(6000)])
    found = learner.predict([{"user": i} for i in range(3)])[:, 0]
    assert ((found > low) & (found < high)).all()
    np.testing.assert_allclose(found, [7, 8, 9], atol=0.7)


def test_several_labels_share_the_deep_part() -> None:
    schema = st.Schema(label=["click", st.Label("buy", optional=True)], features=SCHEMA.features, time="ts")
    model = st.Model(schema)
    assert not model.schema.crosses
    assert model.output_biases.keys() == {"click", "buy"}
    given = [one | {"click": one["label"], "buy": None} for one in samples(200)]
    assert st.Learner(model).learn(given).predictions.shape == (200, 2)


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    learner, given = st.Learner(st.Model(SCHEMA)), samples(500)
    learner.learn(given)
    learner.save(tmp_path / "saved")
    again = st.Learner.load(tmp_path / "saved", st.Model(SCHEMA), shards=2)
    np.testing.assert_array_equal(again.predict(given), learner.predict(given))


_TASTE: dict[str, Any] = {"label": st.Label("likes", positive="yes"), "features": SCHEMA.features, "time": "ts"}


@pytest.mark.parametrize(
    "model",
    [
        st.Model(SCHEMA),
        st.Model(st.Schema(**_TASTE, time_format="ms"), name="taste", seed=3, dense_optimizer=st.Adam(beta1=0.0)),
        st.Model(st.Schema(features=[st.Numeric("price", default=0.0)]), loss="poisson", micro_batch_size=None),
        st.Model(st.Schema(features=[st.Categorical("a", 3, combiner=None, max_length=2)]), keep={0: 0.5}),
        st.Model(
            st.Schema(label=["click", st.Label("buy", optional=True)], features=SCHEMA.features, time="ts"),
            loss={"click": "binary_crossentropy", "buy": "huber"},
            loss_weights={"buy": 2.0},
            reduction="mean",
        ),
    ],
)
def test_printed_as_python_it_is_the_same_model(model: st.Model, tmp_path: Path) -> None:
    (tmp_path / "printed.py").write_text(model.source('of the "file"\n\\x'))
    printed = load_model(f"{tmp_path}/printed.py:model")
    assert Spec.of(printed).identity == Spec.of(model).identity
    assert (printed.micro_batch_size, printed.dense_optimizer) == (model.micro_batch_size, model.dense_optimizer)
    assert not isinstance(printed.graph, type(model.graph))
    positive = model.labels[0].positive
    given = [one | {"click": one["label"], "buy": 0.5, "a": [one["item"]]} for one in samples(200)]
    given = [one | {"likes": positive if one["label"] else "no"} for one in given]
    found = []
    for one in (model, printed):
        learner = st.Learner(one.replace(micro_batch_size=None), batch_size=64)
        learner.learn(given)
        found.append(learner.predict(given))
    np.testing.assert_array_equal(found[1], found[0])


def test_what_cannot_be_printed_is_refused() -> None:
    with pytest.raises(ConfigError, match="the model has a graph of its own, which stands in its file"):
        one_layer().source("")
    with pytest.raises(ConfigError, match="the loss of 'label' cannot be written down"):
        st.Model(SCHEMA, loss=lambda labels, predictions: (labels - predictions)[:, 0] ** 2).source("")


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(ConfigError, match="feature 'user_weight': a model without a graph has a weight of this name"):
        st.Model(st.Schema(features=[st.Categorical("user", dim=4), st.Numeric("user_weight")]))
    one, other = (st.Schema(features=[st.Categorical(name, dim=4) for name in names]) for names in _NAMES)
    assert "user*user_item_weight" in {one.name for one in st.Model(one).schema.features}
    with pytest.raises(ConfigError, match=r"feature 'a\*b\*c_weight': .*give the feature another one"):
        st.Model(other)


_NAMES = (("user", "item", "user_item"), ("a", "b*c", "a*b", "c"))
