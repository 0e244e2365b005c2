"""What a changed model keeps of what was learned: rows, weights and optimizer state, bit by bit."""

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from numpy.typing import NDArray

import streamtrain as st
from streamtrain.checkpoint.evolution import Evolution, PlannedChange
from streamtrain.errors import CheckpointError, ConfigError
from streamtrain.model.spec import Spec

Floats = NDArray[np.float32]
IDS = [f"u{i}" for i in range(50)]


def graph(units: tuple[int, ...] = (8,), norm: bool = False) -> Callable[[dict[str, Any]], Any]:
    def build(inputs: dict[str, Any]) -> Any:
        x = keras.layers.Concatenate()(list(inputs.values()))
        for width in units:
            x = keras.layers.Dense(width, "relu")(x)
            if norm:
                x = keras.layers.BatchNormalization()(x)
        return keras.layers.Dense(1, "sigmoid")(x)

    return build


def schema(dim: int = 4, more: tuple[Any, ...] = (), less: bool = False, **options: Any) -> st.Schema:
    item = () if less else (st.Categorical("item", 4, table=options.pop("table", None)),)
    return st.Schema(features=[st.Categorical("user", dim, **options), *more, *item, st.Numeric("price")])


@cache
def model(units: tuple[int, ...] = (8,), *, norm: bool = False, **options: Any) -> st.Model:
    given = {name: options.pop(name) for name in list(options) if name in ("dim", "more", "less", "table", "field")}
    return st.Model(schema(**given), graph(units, norm), micro_batch_size=None, **options)


def samples(n: int, seed: int = 0) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)
    users, items = random.integers(0, len(IDS), n), random.integers(0, 20, n)
    return [
        {"user": IDS[u], "item": f"i{i}", "price": float(p), "genre": ["a", "b"], "label": int((u + i) % 3 == 0)}
        for u, i, p in zip(users, items, random.random(n), strict=True)
    ]


@pytest.fixture(params=["adagrad", "adam"])
def dense_optimizer(request: pytest.FixtureRequest) -> Any:
    return {"adagrad": st.Adagrad(0.05), "adam": st.Adam(0.01)}[request.param]


def saved(path: Path, **options: Any) -> tuple[st.Learner, str]:
    learner = st.Learner(model(**options))
    learner.learn(samples(600))
    learner.save(path / "before")
    return learner, str(path / "before")


def evolved(place: str, allow: tuple[str, ...] = (), **options: Any) -> st.Learner:
    return st.Learner.load(place, model(**options), evolve=True, allow=allow)


def weights(learner: st.Learner) -> dict[str, Floats]:
    """Those of a learner by layer and name, as its model describes them."""
    flat = np.concatenate([shard.dense.pull() for shard in learner._shards])
    about, of = learner.model.about["weights"], learner.model.dense
    return {f"{one['layer']}/{one['name']}": w for one, w in zip(about, of.split(flat), strict=True)}


def changes(before: st.Model, after: st.Model) -> dict[tuple[str, str], PlannedChange]:
    return {(one.part, one.name): one for one in Evolution(Spec.of(before), Spec.of(after)).changes}


def test_the_same_model_keeps_everything(tmp_path: Path) -> None:
    before, place = saved(tmp_path)
    after = evolved(place)
    assert all(one.action == "kept" for one in changes(before.model, after.model).values())
    np.testing.assert_array_equal(after.predict(samples(50, 1)), before.predict(samples(50, 1)))


def test_a_feature_more_changes_no_prediction_and_shifts_nothing(tmp_path: Path, dense_optimizer: Any) -> None:
    before, place = saved(tmp_path, dense_optimizer=dense_optimizer)
    after = evolved(place, more=(st.Categorical("genre", 3),), dense_optimizer=dense_optimizer)
    np.testing.assert_array_equal(after.embeddings("user", IDS), before.embeddings("user", IDS))
    np.testing.assert_array_equal(after.embeddings("item", ["i1"]), before.embeddings("item", ["i1"]))
    old, new = weights(before)["dense/kernel"], weights(after)["dense/kernel"]
    np.testing.assert_array_equal(new[[0, 1, 2, 3, 7, 8, 9, 10, 11]], old)  # user, then the 3 of genre, item, price
    assert not new[4:7].any()
    np.testing.assert_allclose(after.predict(samples(50, 1)), before.predict(samples(50, 1)), rtol=1e-6)
    assert after.samples == before.samples
    after.learn(samples(200, 2))
    assert weights(after)["dense/kernel"][4:7].any()
    assert after.rows["genre"] == 2


def test_a_feature_less_needs_to_be_allowed(tmp_path: Path) -> None:
    before, place = saved(tmp_path)
    with pytest.raises(ConfigError, match=r"table item: 20 rows would be lost \(allow 'drop'\)"):
        evolved(place, less=True)
    after = evolved(place, allow=("drop",), less=True)
    assert after.rows == {"user": before.rows["user"]}
    np.testing.assert_array_equal(weights(after)["dense/kernel"], weights(before)["dense/kernel"][[0, 1, 2, 3, 8]])


def test_a_wider_layer_keeps_its_old_units_and_changes_no_prediction(tmp_path: Path, dense_optimizer: Any) -> None:
    before, place = saved(tmp_path, dense_optimizer=dense_optimizer)
    after = evolved(place, units=(12,), dense_optimizer=dense_optimizer)
    old, new = weights(before), weights(after)
    np.testing.assert_array_equal(new["dense/kernel"][:, :8], old["dense/kernel"])
    assert new["dense/kernel"][:, 8:].all(axis=0).all()  # born, so that they can learn
    np.testing.assert_array_equal(new["output label/kernel"][:8], old["output label/kernel"])
    assert not new["output label/kernel"][8:].any()
    np.testing.assert_allclose(after.predict(samples(50, 1)), before.predict(samples(50, 1)), rtol=1e-5)


def test_a_layer_more_keeps_those_before_it(tmp_path: Path) -> None:
    before, place = saved(tmp_path)
    after = evolved(place, units=(8, 8))
    old, new = weights(before), weights(after)
    np.testing.assert_array_equal(new["dense/kernel"], old["dense/kernel"])
    np.testing.assert_array_equal(new["output label/bias"], old["output label/bias"])
    told = changes(before.model, after.model)
    assert told["weight", "dense_1/kernel"].action == "new"
    assert told["weight", "output label/kernel"].action == "reset"  # what it would be multiplied with is another layer


def test_statistics_are_kept_with_their_columns(tmp_path: Path) -> None:
    before, place = saved(tmp_path, norm=True)
    after = evolved(place, units=(12,), norm=True)
    old, new = (np.concatenate([s.statistics.pull() for s in one._shards]) for one in (before, after))
    mean, variance = np.split(old, 2)
    new_mean, new_variance = np.split(new, 2)
    np.testing.assert_array_equal(new_mean[:8], mean)
    np.testing.assert_array_equal(new_variance[:8], variance)
    assert not new_mean[8:].any()
    assert (new_variance[8:] == 1).all()


@pytest.mark.parametrize("optimizer", [st.SGD(0.1), st.Adagrad(), st.RowWiseAdagrad(), st.Adam(0.01), st.FTRL(0.1)])
def test_a_dim_that_grows_keeps_rows_and_state(tmp_path: Path, optimizer: Any) -> None:
    before, place = saved(tmp_path, embedding_optimizer=optimizer)
    after = evolved(place, dim=7, embedding_optimizer=optimizer)
    born = st.Learner(model(dim=7, embedding_optimizer=optimizer))
    rows = after.embeddings("user", IDS)
    np.testing.assert_array_equal(rows[:, :4], before.embeddings("user", IDS))
    np.testing.assert_array_equal(rows[:, 4:], born.embeddings("user", IDS)[:, 4:])
    np.testing.assert_allclose(after.predict(samples(50, 1)), before.predict(samples(50, 1)), rtol=1e-5)
    keys = before._shards[0].tables[0].scan(0, 100)[1].keys.copy()
    old, new, fresh = (one._shards[0].tables[0].pull_state(keys)[0] for one in (before, after, born))
    vectors = {"adagrad": 1, "adam": 2, "ftrl": 2}.get(optimizer.kind, 0)
    for v in range(vectors):
        np.testing.assert_array_equal(new[:, 7 + 7 * v : 11 + 7 * v], old[:, 4 + 4 * v : 8 + 4 * v])
        np.testing.assert_array_equal(new[:, 11 + 7 * v : 14 + 7 * v], fresh[:, 11 + 7 * v : 14 + 7 * v])
    if optimizer.kind in ("adam", "rowwise_adagrad"):
        np.testing.assert_array_equal(new[:, -1], old[:, -1])
    after.learn(samples(200, 2))


def test_a_dim_that_shrinks_needs_to_be_allowed(tmp_path: Path) -> None:
    before, place = saved(tmp_path)
    with pytest.raises(ConfigError, match=r"dim 4 -> 2: the last 2 columns would be lost \(allow 'truncate'\)"):
        evolved(place, dim=2)
    after = evolved(place, allow=("truncate",), dim=2)
    np.testing.assert_array_equal(after.embeddings("user", IDS), before.embeddings("user", IDS)[:, :2])


@pytest.mark.parametrize(
    ("of", "to"),
    [
        (st.FTRL(0.2, l1=0.001), st.Adagrad()),
        *((st.Adagrad(), to) for to in (st.SGD(0.1), st.RowWiseAdagrad(), st.Adam(0.01), st.FTRL(0.1))),
    ],
)
def test_another_optimizer_keeps_the_rows_and_begins_its_state_anew(tmp_path: Path, of: Any, to: Any) -> None:
    before, place = saved(tmp_path, embedding_optimizer=of)
    after = evolved(place, embedding_optimizer=to)
    np.testing.assert_array_equal(after.embeddings("user", IDS), before.embeddings("user", IDS))
    np.testing.assert_array_equal(after.predict(samples(50, 1)), before.predict(samples(50, 1)))
    table = after._shards[0].tables[0]
    keys = table.scan(0, 100)[1].keys.copy()
    rows, _ = table.pull_state(keys)
    if to.kind == "ftrl":  # with no gradient it computes the row that it has from its state
        table.push(
            keys, np.zeros((len(keys), 4), np.float32), np.ones(len(keys), np.uint32), np.zeros(len(keys), np.uint32)
        )
        np.testing.assert_allclose(table.pull(keys), rows[:, :4], rtol=1e-5, atol=1e-8)
    else:
        never = np.arange(1, len(keys) + 1, dtype=np.uint64)
        np.testing.assert_array_equal(rows[:, 4:], table.pull_state(never)[0][:, 4:])


def test_another_meaning_needs_to_be_allowed(tmp_path: Path) -> None:
    before, place = saved(tmp_path)
    with pytest.raises(ConfigError, match=r"feature user: field 'user' -> 'genre' \(allow 'meaning'\)"):
        evolved(place, field="genre")
    after = evolved(place, allow=("meaning",), field="genre")
    np.testing.assert_array_equal(after.embeddings("user", IDS), before.embeddings("user", IDS))
    with pytest.raises(ConfigError, match=r"allow must be some of drop, truncate, meaning, not 'drops'"):
        evolved(place, allow=("drops",), field="genre")


def test_without_evolve_a_changed_model_is_refused_with_what_changes(tmp_path: Path) -> None:
    _, place = saved(tmp_path)
    with pytest.raises(CheckpointError, match=r"differs in schema, dense, tables: .*dim 4 -> 7.*evolve=True"):
        st.Learner.load(place, model(dim=7))


def test_any_number_of_shards(tmp_path: Path) -> None:
    learner = st.Learner(model(), shards=3)
    learner.learn(samples(600))
    learner.save(tmp_path / "before")
    after = st.Learner.load(tmp_path / "before", model(units=(12,), dim=6), evolve=True, shards=2)
    np.testing.assert_array_equal(after.embeddings("user", IDS)[:, :4], learner.embeddings("user", IDS))
    np.testing.assert_allclose(after.predict(samples(50, 1)), learner.predict(samples(50, 1)), rtol=1e-5)


def test_plan_of_several_changes_at_once() -> None:
    told = changes(
        model(), model((12,), dim=6, more=(st.Categorical("genre", 3),), less=True, dense_optimizer=st.SGD(0.1))
    )
    assert {key: one.action for key, one in told.items()} == {
        ("table", "user"): "changed",
        ("table", "genre"): "new",
        ("table", "item"): "dropped",
        ("feature", "genre"): "new",
        ("feature", "item"): "dropped",
        ("weight", "dense/kernel"): "changed",
        ("weight", "dense/bias"): "changed",
        ("weight", "output label/kernel"): "changed",
        ("weight", "output label/bias"): "kept",
        ("optimizer", "of the dense weights"): "reset",
    }
    assert told["weight", "dense/kernel"].detail == "[9, 8] -> [10, 12], 40 of 72 values kept"


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("weights", [], "0 weights are described, but there are 4"),
        ("weights", [{}] * 4, "missing required field"),
        ("features", [], "Expected `object`"),
        ("labels", None, "Expected `array`"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(part: str, value: Any, message: str) -> None:
    given = json.loads(Spec.of(model()).to_json())
    if part in given["about"]:
        given["about"][part] = value
    else:
        given["about"]["weights"][0][part] = value
    with pytest.raises(ConfigError, match=f"invalid model spec: .*({message})"):
        Spec.from_json(json.dumps(given))


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("columns", [["dense", 7]]),
        ("columns", [["dense", 9], ["dense", -1]]),
        ("inputs", [["user", 4], ["item", 4]]),
        ("inputs", [["user", 1 << 70]]),
    ],
)
def test_a_segment_that_does_not_fit_says_nothing(part: str, value: Any) -> None:
    """Earlier releases wrote such of layers that are shared: what they describe is whole all the same."""
    spec = Spec.of(model())
    given = json.loads(spec.to_json())
    given["about"]["weights"][0][part] = value
    read = Spec.from_json(json.dumps(given))
    assert read.identity == spec.identity
    assert read.about["weights"][0][part] == ([] if part == "inputs" else [["dense", 8]])
    assert {one.action for one in Evolution(read, spec).changes} == {"kept"}


def test_accumulators_of_an_earlier_release_do_not_decay() -> None:
    spec = Spec.of(model(embedding_optimizer=st.Adagrad(0.1, decay=0.99), dense_optimizer=st.Adagrad(0.1)))
    given = json.loads(spec.to_json())
    for one in (*given["tables"], given["dense_optimizer"]):
        del one["decay"]
    old = Spec.from_json(json.dumps(given))
    assert old.dense_optimizer == spec.dense_optimizer
    (told,) = old.overridden(spec)
    assert told.endswith("decay 1.0, not 0.99")
    assert old.identity == spec.identity


def test_what_an_earlier_release_wrote_keeps_rows_and_weights_of_the_same_shapes() -> None:
    before, same, wider = model(), model(dense_optimizer=st.SGD(0.1)), model((12,))
    given = json.loads(Spec.of(before).to_json())
    del given["about"]
    old = Spec.from_json(json.dumps(given))
    values = np.arange(old.dense_size, dtype=np.float32)
    slots = np.ones((old.dense_slots, old.dense_size), np.float32)
    for changed, kept in ((same, True), (wider, False)):
        spec = Spec.of(changed)
        born = spec.make_dense(changed.initial_parameters()[0])
        evolution = Evolution(old, spec)
        carried, _ = evolution.dense(values, slots, born.pull(), born.slots)
        np.testing.assert_array_equal(carried, values if kept else born.pull())
        (told,) = [one for one in evolution.changes if one.part == "weight"]
        assert told.action == ("kept" if kept else "reset")


def of_layers(*made: Callable[[], Callable[[Any], Any]]) -> Callable[..., Callable[[dict[str, Any]], Any]]:
    """A graph with these layers after a hidden one."""

    def of(units: int) -> Callable[[dict[str, Any]], Any]:
        def build(inputs: dict[str, Any]) -> Any:
            x = keras.layers.Dense(units, "relu")(keras.layers.Concatenate()([*inputs.values()]))
            for make in made:
                x = make()(x)
            return keras.layers.Dense(1, "sigmoid")(x)

        return build

    return of


def towers(merge: Callable[[], Callable[[list[Any]], Any]]) -> Callable[[int], Callable[[dict[str, Any]], Any]]:
    """A graph of two towers, which something merges, and of the inputs themselves."""

    def of(units: int) -> Callable[[dict[str, Any]], Any]:
        def build(inputs: dict[str, Any]) -> Any:
            user, *_, item, price = inputs.values()
            merged = merge()([keras.layers.Dense(units, "tanh")(one) for one in (user, item)])
            return keras.layers.Dense(1, "sigmoid")(keras.layers.Concatenate()([merged, price]))

        return build

    return of


def summed(_: int) -> Callable[[dict[str, Any]], Any]:
    """A graph that adds up what each input says."""
    return lambda inputs: keras.layers.Activation("sigmoid")(
        keras.layers.Add()([keras.layers.Dense(1)(one) for one in inputs.values()])
    )


def normalized(_: int) -> Callable[[dict[str, Any]], Any]:
    """A graph of the normalized inputs."""
    return lambda inputs: keras.layers.Dense(1, "sigmoid")(
        keras.layers.LayerNormalization()(keras.layers.Concatenate()([*inputs.values()]))
    )


def factorized(_: int) -> Callable[[dict[str, Any]], Any]:
    """A graph of the pairwise products of all rows."""

    def build(inputs: dict[str, Any]) -> Any:
        *rows, price = inputs.values()
        total = keras.ops.sum(keras.ops.stack(rows, axis=1), axis=1)
        return keras.layers.Dense(1, "sigmoid")(keras.layers.Concatenate()([total * total, price]))

    return build


@pytest.mark.parametrize("change", ["feature", "units"])
@pytest.mark.parametrize(
    ("of", "by_feature", "by_units"),
    [
        (of_layers(keras.layers.LayerNormalization), [], ["layer_normalization"]),
        (of_layers(keras.layers.UnitNormalization), [], ["unit_normalization"]),
        (of_layers(keras.layers.Softmax), [], ["softmax"]),
        (of_layers(partial(keras.layers.Activation, "softmax")), [], ["activation"]),
        (of_layers(lambda: lambda x: x / (1 + keras.ops.sum(x, axis=-1, keepdims=True))), [], ["sum"]),
        (of_layers(keras.layers.BatchNormalization, lambda: lambda x: keras.ops.tanh(x) * 2), [], []),
        (of_layers(partial(keras.layers.Dropout, 0.2), keras.layers.PReLU), [], []),
        (towers(partial(keras.layers.Dot, -1)), [], ["dot"]),
        (towers(keras.layers.Multiply), [], []),
        (summed, ["output label"], []),
        (normalized, ["layer_normalization"], []),
        (factorized, ["stack"], []),
    ],
)
def test_the_plan_tells_where_predictions_change(
    tmp_path: Path, of: Callable[[int], Any], by_feature: list[str], by_units: list[str], change: str
) -> None:
    def made(units: int, more: tuple[Any, ...] = ()) -> st.Model:
        return st.Model(schema(more=more), of(units), micro_batch_size=None)

    before = made(8)
    after = made(8, (st.Categorical("genre", 4),)) if change == "feature" else made(12)
    told = [one.name for one in Evolution(Spec.of(before), Spec.of(after)).changes if one.part == "layer"]
    assert told == (by_feature if change == "feature" else by_units)
    learner = st.Learner(before)
    learner.learn(samples(600))
    learner.save(tmp_path / "before")
    again = st.Learner.load(tmp_path / "before", after, evolve=True)
    asked = [{name: value for name, value in one.items() if name != "label"} for one in samples(50, 1)]
    is_same = np.allclose(again.predict(asked), learner.predict(asked), atol=1e-6)
    assert is_same == (not told)


def test_a_wider_softmax_and_a_new_layer_that_mixes() -> None:
    """The first changes predictions; what the second gives is new, and begins at zero behind it."""

    def of(units: int, *, dot: bool) -> Callable[[dict[str, Any]], Any]:
        def build(inputs: dict[str, Any]) -> Any:
            x = [keras.layers.Dense(units, "softmax", name="gate")(inputs["user"]), inputs["item"], inputs["price"]]
            x += [keras.layers.Dot(-1)([inputs["user"], inputs["item"]])] if dot else []
            return keras.layers.Dense(1)(keras.layers.Concatenate()(x))

        return build

    def told(units: int, *, dot: bool) -> list[str]:
        old, new = (Spec.of(st.Model(schema(), of(one[0], dot=one[1]))) for one in ((4, False), (units, dot)))
        return [one.name for one in Evolution(old, new).changes if one.part == "layer"]

    assert told(6, dot=False) == ["gate"]
    assert told(4, dot=True) == []
