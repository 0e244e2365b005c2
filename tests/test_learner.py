"""The whole path in one process: what is predicted, what is learned, and that exactly that is learned."""

import decimal
import re
import subprocess
import sys
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import streamtrain as stm
from streamtrain.errors import ConfigError
from streamtrain.model.features import Feature
from tests.models import clicks, counting, dense_of, make, statistics_of, two_towers

# --- exactness, by counting ---


COUNTING = counting()


@settings(max_examples=10)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 5), max_size=4)), max_size=60),
    st.integers(1, 30),
    st.sampled_from([1, 2, 7]),
)
def test_every_occurrence_counts_once_in_any_split(
    events: list[tuple[int, list[int]]], batch_size: int, shards: int
) -> None:
    learner = stm.Learner(COUNTING, batch_size=batch_size, shards=shards)
    learner.learn([{"ts": i, "label": 0, "user": user, "tags": tags} for i, (user, tags) in enumerate(events)])
    ids: list[str | int] = list(range(6))
    users = Counter(user for user, _ in events)
    tags = Counter(tag for _, of_event in events for tag in of_event)
    assert learner.embeddings("user", ids)[:, 0].tolist() == [users[i] for i in range(6)]
    assert learner.embeddings("tags", ids)[:, 0].tolist() == [tags[i] for i in range(6)]
    assert learner.rows == {"user": len(users), "tags": len(tags)}


def test_what_has_no_room_in_memory_is_on_disk(tmp_path: Path) -> None:
    """Also in a learner that is loaded, and nothing is left of it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    options: dict[str, Any] = {"memory": "1MB", "disk": str(disk), "batch_size": 10_000}
    learner = stm.Learner(COUNTING, **options)
    users = np.random.default_rng(0).permutation(np.arange(130_000) % 100_000).tolist()
    learner.learn([{"ts": i, "label": 0, "user": user, "tags": []} for i, user in enumerate(users)])
    learner.save(tmp_path / "saved")
    loaded = stm.Learner.load(tmp_path / "saved", COUNTING, **options)
    for one in (learner, loaded):
        counts = one.embeddings("user", list(range(100_000)))[:, 0]
        np.testing.assert_array_equal(counts, 1 + (np.arange(100_000) < 30_000))
        assert one._shards[0].tables[0].stats()["rows_on_disk"] > 20_000
    assert not list(disk.iterdir())
    assert stm.Learner(COUNTING, memory="auto", disk=str(disk)).rows == {"user": 0, "tags": 0}
    with pytest.raises(ConfigError, match=r'memory must be a positive size such as "50MB" or "1.5GB", not 8000'):
        stm.Learner(COUNTING, memory=8000)  # type: ignore[arg-type]


def test_a_birth_value_depends_on_the_key_alone() -> None:
    ids: list[str | int] = [f"u{i}" for i in range(40)]
    born = stm.Learner(two_towers()).embeddings("user", ids)
    assert len(np.unique(born)) == born.size
    assert np.abs(born).max() <= 0.05
    for shards, batch_size in ((2, 3), (7, 64)):
        learner = stm.Learner(two_towers(), shards=shards, batch_size=batch_size)
        learner.learn(clicks(1))
        learned = learner.embeddings("user", [clicks(1)[0]["user"]])
        others = [i for i in ids if i != clicks(1)[0]["user"]]
        assert not np.array_equal(learned, learner.embeddings("user", others)[:1])
        assert np.array_equal(learner.embeddings("user", others), stm.Learner(two_towers()).embeddings("user", others))
    assert not np.array_equal(stm.Learner(two_towers(seed=1)).embeddings("user", ids), born)


def test_the_number_of_shards_changes_nothing() -> None:
    one, three = (stm.Learner(two_towers(), batch_size=50, shards=shards) for shards in (1, 3))
    a, b = one.learn(clicks(500)), three.learn(clicks(500))
    np.testing.assert_allclose(a.predictions, b.predictions, atol=1e-6)
    assert one.rows == three.rows


def test_what_was_learned_of_ids_and_of_crosses_with_them_can_be_forgotten() -> None:
    features: list[Feature] = [
        stm.Categorical("user", dim=2),
        stm.Categorical("item", dim=2),
        stm.Cross("both", of=("user", "item"), dim=2),
    ]
    learner = stm.Learner(stm.Model(stm.Schema(label="label", features=features)), shards=3)
    learner.learn([{"label": i & 1, "user": f"u{i % 5}", "item": i % 7} for i in range(200)])

    def rows(users: int, items: int, both: int) -> dict[str, int]:
        """The graph by default has tables of its own for the same fields, and for their cross."""
        own = {"user": users, "item": items, "both": both}
        return own | {"user_weight": users, "item_weight": items, "user*item_weight": both}

    assert learner.rows == rows(5, 7, 35)
    assert learner.forget(user=["u1", "never"], item=[3]) == rows(1, 1, 7 + 5 - 1)
    assert learner.rows == rows(4, 6, 24)
    assert set(learner.forget(user=["u1"]).values()) == {0}
    with pytest.raises(ConfigError, match="the model has no categorical feature 'both'; it has user, item"):
        learner.forget(both=["u1"])
    with pytest.raises(ConfigError, match="0 ids: 1 to 1000 are forgotten at once"):
        learner.forget()


# --- predictions and progressive validation ---


def test_each_batch_is_predicted_before_it_is_learned() -> None:
    learner, other = stm.Learner(two_towers(), batch_size=50), stm.Learner(two_towers(), batch_size=50)
    for start in range(0, 300, 50):
        batch = clicks(300)[start : start + 50]
        before = learner.predict([{k: v for k, v in s.items() if k != "label"} for s in batch])
        np.testing.assert_allclose(learner.learn(batch).predictions, before, atol=1e-6)
    whole = other.learn(clicks(300))
    np.testing.assert_allclose(whole.predictions[-50:], before, atol=1e-6)
    assert whole.kept.tolist() == list(range(300))


def test_it_learns() -> None:
    learner = stm.Learner(two_towers(), batch_size=32, window=4000)
    learner.learn(clicks(20_000))
    assert learner.metrics(window=True)["label"].auc > learner.metrics()["label"].auc > 0.8
    assert learner.evaluate(clicks(2000, seed=1))["label"].log_loss < 0.4
    assert learner.samples == 20_000
    assert learner.watermark == 1000 + 19_999


def test_metrics_are_those_of_the_predictions() -> None:
    learner = stm.Learner(two_towers(), batch_size=64)
    p = learner.learn(clicks(1000)).predictions[:, 0].astype(np.float64)
    y = np.array([s["label"] for s in clicks(1000)])
    metrics = learner.metrics()["label"]
    assert metrics.log_loss == pytest.approx(-np.mean(np.where(y == 1, np.log(p), np.log1p(-p))), rel=1e-6)
    pairs = p[y == 1][:, None] - p[y == 0][None, :]
    exact = float(np.mean(np.where(pairs > 0, 1.0, np.where(pairs == 0, 0.5, 0.0))))
    assert abs(metrics.auc - exact) <= metrics.auc_error
    assert metrics.calibration == pytest.approx(p.mean() / y.mean())


def test_layers_that_differ_in_training_predict_as_in_serving() -> None:
    def graph(inputs: dict[str, Any]) -> Any:
        x = keras.layers.BatchNormalization()(keras.layers.Concatenate()(list(inputs.values())))
        return keras.layers.Dense(1, activation="sigmoid")(keras.layers.Dropout(0.5)(x))

    model = make([stm.Categorical("user", dim=4), stm.Numeric("price", transform=None)], graph)
    learner = stm.Learner(model, batch_size=50)
    seeds, statistics = learner._step.arrays(), statistics_of(learner)
    assert np.array_equal(learner.predict(clicks(50)), learner.predict(clicks(50)))
    expected = learner.predict(clicks(50))
    np.testing.assert_allclose(learner.learn(clicks(50)).predictions, expected, atol=1e-6)
    assert not np.array_equal(statistics_of(learner), statistics)
    assert all(not np.array_equal(seed, seeds[name]) for name, seed in learner._step.arrays().items())
    assert seeds


# --- inputs of the graph ---


def test_the_graph_gets_what_the_schema_says() -> None:
    seen: dict[str, tuple[Any, ...]] = {}

    def graph(inputs: dict[str, Any]) -> Any:
        seen.update({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in inputs.items()})
        mask = keras.ops.cast(inputs["history_mask"], "float32")
        x = keras.layers.Concatenate()([inputs["user"], inputs["price"], mask])
        return keras.layers.Dense(1, activation="sigmoid")(x)

    features: list[Feature] = [
        stm.Numeric("price", transform=None),
        stm.Categorical("history", dim=3, table="item", combiner=None, max_length=4),
        stm.Categorical("user", dim=2),
    ]
    stm.Learner(make(features, graph))
    assert seen == {
        "price": ((None, 1), "float32"),
        "history": ((None, 4, 3), "float32"),
        "history_mask": ((None, 4), "bool"),
        "user": ((None, 2), "float32"),
    }


def test_a_sequence_is_padded_and_masked() -> None:
    ones = stm.Constant(1.0)

    def total(inputs: dict[str, Any]) -> Any:
        masked = keras.ops.sum(keras.ops.cast(inputs["h_mask"], "float32"), axis=1, keepdims=True)
        return keras.ops.sum(inputs["h"], axis=(1, 2))[:, None] + 100.0 * masked

    model = make(
        [stm.Categorical("h", dim=2, combiner=None, max_length=3, init=ones)], total, loss="mean_squared_error"
    )
    samples = [{"ts": 0, "h": h} for h in ([], ["a"], ["a", "b"], ["a", "b", "c", "d"], "x")]
    assert stm.Learner(model).predict(samples)[:, 0].tolist() == [0.0, 102.0, 204.0, 306.0, 102.0]


@pytest.mark.parametrize(("combiner", "expected"), [("sum", 4.0), ("mean", 1.0), ("sqrtn", 2.0)])
def test_combiners(combiner: Any, expected: float) -> None:
    features = [stm.Categorical("h", dim=1, combiner=combiner, init=stm.Constant(1.0))]
    model = make(features, lambda inputs: inputs["h"] * 1.0, loss="mean_squared_error")
    assert stm.Learner(model).predict([{"ts": 0, "h": list("abcd")}, {"ts": 0, "h": []}])[:, 0].tolist() == [
        expected,
        0,
    ]


def test_transforms_are_the_same_in_learning_and_predicting() -> None:
    features = [
        stm.Numeric("a", transform="log1p"),
        stm.Numeric("b", transform="standardize", mean=10.0, stddev=2.0, default=14.0),
    ]
    model = make(features, lambda inputs: inputs["a"] + 100 * inputs["b"], loss="mean_squared_error")
    learner = stm.Learner(model)
    samples = [{"ts": 0, "label": 0, "a": -np.expm1(2.0), "b": 12}, {"ts": 0, "label": 0, "a": 0}]
    np.testing.assert_allclose(learner.predict(samples)[:, 0], [98.0, 200.0], rtol=1e-6)
    np.testing.assert_allclose(learner.learn(samples).predictions[:, 0], [98.0, 200.0], rtol=1e-6)


# --- labels and weights ---


def test_a_missing_optional_label_teaches_nothing() -> None:
    def graph(inputs: dict[str, Any]) -> Any:
        tasks = ("click", "buy")
        return {name: keras.layers.Dense(1, activation="sigmoid", name=f"for_{name}")(inputs["user"]) for name in tasks}

    model = make([stm.Categorical("user", dim=2)], graph, label=["click", stm.Label("buy", optional=True)])
    with_none, without = stm.Learner(model), stm.Learner(model)
    with_none.learn([{"ts": 0, "user": "a", "click": 1, "buy": None}])
    without.learn([{"ts": 0, "user": "a", "click": 1}])
    assert with_none.metrics()["buy"].samples == 0
    assert with_none.metrics()["click"].samples == 1
    assert np.array_equal(with_none.embeddings("user", ["a"]), without.embeddings("user", ["a"]))
    start, now = model.dense.split(dense_of(stm.Learner(model))), model.dense.split(dense_of(with_none))
    still = {
        name.split("/")[0]
        for name, before, after in zip(model.dense.names, start, now, strict=True)
        if np.array_equal(before, after)
    }
    assert still == {"for_buy"}


def test_predictions_are_in_the_order_of_the_labels() -> None:
    def graph(inputs: dict[str, Any]) -> Any:
        return {"b": inputs["x"] * 1.0, "a": inputs["x"] * 2.0, "c": inputs["x"] * 3.0}

    model = make([stm.Numeric("x", transform=None)], graph, label=["c", "a", "b"], loss="mean_squared_error")
    learner = stm.Learner(model)
    assert learner.predict([{"ts": 0, "x": 1}]).tolist() == [[3.0, 2.0, 1.0]]
    assert learner.learn([{"ts": 0, "x": 1, "a": 0, "b": 0, "c": 0}]).predictions.tolist() == [[3.0, 2.0, 1.0]]
    assert learner.metrics()["c"].prediction_mean == 3.0


def test_a_weight_multiplies_the_gradient() -> None:
    def after(weights: list[float]) -> Any:
        features = [stm.Categorical("user", dim=2)]
        options: dict[str, Any] = {"embedding_optimizer": stm.SGD(0.1), "dense_optimizer": stm.SGD(0.1)}
        learner = stm.Learner(make(features, weight="w", reduction="sum", **options))
        learner.learn([{"ts": 0, "user": "a", "label": 1, "w": weight} for weight in weights])
        return learner.embeddings("user", ["a"])

    np.testing.assert_allclose(after([2.0]), after([1.0, 1.0]), rtol=1e-6)
    np.testing.assert_allclose(after([1.0, 0.0]), after([1.0]), rtol=1e-6)
    assert not np.array_equal(after([2.0]), after([1.0]))


# --- life of rows ---


def test_rows_are_admitted_expire_and_are_limited() -> None:
    features = [
        stm.Categorical("often", field="user", dim=1, min_count=3),
        stm.Categorical("lately", field="user", dim=1, expire_after="1h"),
        stm.Categorical("few", field="user", dim=1, capacity=10),
    ]
    learner = stm.Learner(make(features), batch_size=1)
    learner.learn([{"ts": 1, "label": 1, "user": user} for user in ["a", "a", "b", "a", "a"]])
    assert learner.rows == {"often": 1, "lately": 2, "few": 2}
    assert learner.stats.unadmitted == 3
    learner.learn([{"ts": 7200, "label": 1, "user": f"new{i}"} for i in range(30)])
    assert learner.rows == {"often": 1, "lately": 30, "few": 10}
    assert learner.stats.expired == 2
    assert learner.stats.evicted == 22


def test_a_sample_of_the_future_is_refused_and_lets_nothing_expire() -> None:
    """In dicts, in columns, and in a batch of others; by the clock, as nothing says when it was told of."""
    learner = stm.Learner(
        make([stm.Categorical("user", dim=1, expire_after="30d")]), batch_size=64, now=lambda: 1_790_000_100.0
    )
    past = [{"ts": 1_790_000_000 + i, "label": 1, "user": f"u{i}"} for i in range(100)]
    assert learner.learn(past).bad == []
    ahead = {"ts": "2099-12-31T00:00:00Z", "label": 1, "user": "poison"}
    at_most, too_late = ({"ts": 1_790_000_100 + s, "label": 1, "user": "next"} for s in (86_400, 86_401))
    for poisoned in ([ahead], [*past, ahead, *past], {"ts": [4e9], "label": [1], "user": ["a"]}, [at_most, too_late]):
        found = learner.learn(poisoned)
        assert [one.reason for one in found.bad] == ["future"]
    assert [one.index for one in found.bad] == [1]
    assert learner.rows == {"user": 101}
    assert learner.watermark == 1_790_086_500
    assert learner.bad == {"future": 4}
    assert learner.stats.expired == 0


def test_how_far_ahead_is_an_option() -> None:
    sample = [{"ts": 5_000_000_000, "label": 1, "user": "a"}]
    features = [stm.Categorical("user", dim=1)]
    assert stm.Learner(make(features), future_after=None).learn(sample).samples == 1
    assert stm.Learner(make(features), future_after=1e10).learn(sample).samples == 1
    assert stm.Learner(make(features)).learn(sample).samples == 0
    assert len(stm.Learner(make(features)).predict(sample)) == 1


# --- what is bad ---


def test_a_bad_sample_never_spoils_its_batch() -> None:
    good = clicks(6)
    mixed: list[Any] = [*good[:2], b"{", {**good[0], "label": 2}, *good[2:], {"ts": 1, "label": 0, "user": "u"}]
    mixed.append({**good[0], "price": float("inf")})
    learner, clean = stm.Learner(two_towers()), stm.Learner(two_towers())
    learned = learner.learn(mixed)
    assert [(one.index, one.reason, one.field) for one in learned.bad] == [
        (2, "not_json", ""),
        (3, "bad_label", "label"),
        (8, "missing_field", "item"),
        (9, "not_finite", "price"),
    ]
    assert learned.kept.tolist() == [0, 1, 4, 5, 6, 7]
    assert learner.bad == {"not_json": 1, "bad_label": 1, "missing_field": 1, "not_finite": 1}
    np.testing.assert_array_equal(learned.predictions, clean.learn(good).predictions)
    with pytest.raises(stm.SampleError, match="sample 2: not_json \\(and 2 more\\)"):
        learner.predict(mixed)


def test_a_field_that_nothing_reads_may_hold_anything() -> None:
    odd = [uuid.UUID(int=7), decimal.Decimal("1.50"), b"\xff", {1, 2}, object(), decimal.Decimal("NaN"), float("nan")]
    given = [{"ts": 1, "label": 1, "user": "a", "odd": one} for one in odd[:5]]
    given += [{"ts": 1, "label": 1, "user": one} for one in odd]
    learned = stm.Learner(make([stm.Categorical("user", dim=1, default="none")])).learn(given)
    assert [(one.index, one.reason) for one in learned.bad] == [
        *((i, "wrong_type") for i in (6, 7, 8, 9)),
        (10, "not_finite"),
    ]


def test_gradients_that_are_not_finite_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def graph(inputs: dict[str, Any]) -> Any:
        return keras.layers.Dense(1)(inputs["user"]) / inputs["price"]

    model = make(
        [stm.Categorical("user", dim=2), stm.Numeric("price", transform=None)], graph, loss="mean_squared_error"
    )
    learner = stm.Learner(model, batch_size=2)
    before = dense_of(learner)
    learner.learn([{"ts": 0, "label": 1, "user": "bad", "price": 0}, {"ts": 0, "label": 1, "user": "good", "price": 1}])
    assert np.array_equal(dense_of(learner), before)
    assert (learner.stats.non_finite_rows, learner.stats.non_finite_dense, learner.stats.applied) == (1, 1, 1)
    assert learner.rows == {"user": 1}
    assert learner.metrics()["label"].non_finite == 1
    assert "samples 0 to 1" in caplog.text


def test_wrong_options_and_graphs_say_what_is_wrong() -> None:
    feature = [stm.Categorical("user", dim=2)]
    with pytest.raises(stm.ConfigError, match="shards must be"):
        stm.Learner(make(feature), shards=0)
    with pytest.raises(stm.ConfigError, match="graph returns 2 outputs for the labels"):
        stm.Learner(make(feature, lambda inputs: [inputs["user"]] * 2))
    with pytest.raises(stm.ConfigError, match="graph fails with KeyError: 'usr'"):
        stm.Learner(make(feature, lambda inputs: inputs["usr"]))
    with pytest.raises(stm.ConfigError, match="unknown table 'usr'; the tables are \\['user'\\]"):
        stm.Learner(make(feature)).embeddings("usr", ["a"])
    with pytest.raises(TypeError, match="put a single one in a list"):
        stm.Learner(make(feature)).learn(b"{}")  # type: ignore[arg-type]


def test_nothing_learned_from_nothing() -> None:
    learner = stm.Learner(two_towers())
    learned = learner.learn([])
    assert (learned.samples, learned.loss, learned.predictions.shape) == (0, 0.0, (0, 1))
    assert learner.predict([]).shape == (0, 1)
    assert learner.learn([b"not json"]).samples == 0
    assert np.isnan(learner.metrics()["label"].auc)


def test_a_graph_without_weights_of_its_own() -> None:
    features = [stm.Categorical("user", dim=1), stm.Categorical("item", dim=1)]
    model = make(features, lambda inputs: keras.layers.Activation("sigmoid")(keras.layers.Add()(list(inputs.values()))))
    learner = stm.Learner(model, shards=2)
    learner.learn(clicks(100))
    assert len(model.dense) == 0
    assert learner.stats.non_finite_dense == 0


# --- checkpoints ---


def test_a_loaded_learner_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    steady = stm.Learner(two_towers(), batch_size=50)
    steady.learn(clicks(500))
    first = stm.Learner(two_towers(), batch_size=50, shards=2)
    first.learn(clicks(500))
    first.save(tmp_path / "c")
    second = stm.Learner.load(tmp_path / "c", two_towers(), batch_size=50, shards=3)
    assert second.rows == first.rows
    assert second.samples == 500
    ids: list[str | int] = [f"u{i}" for i in range(40)]
    assert np.array_equal(second.embeddings("user", ids), first.embeddings("user", ids))
    a, b = steady.learn(clicks(500, seed=1)), second.learn(clicks(500, seed=1))
    np.testing.assert_allclose(a.predictions, b.predictions, atol=1e-6)
    second.save(tmp_path / "c")
    assert stm.Learner.load(tmp_path / "c", two_towers()).samples == 1000


@pytest.mark.parametrize("shards", [2, 3])
def test_ids_without_a_row_yet_are_remembered(tmp_path: Path, shards: int) -> None:
    model = make([stm.Categorical("user", dim=2, min_count=3)])
    learner = stm.Learner(model, shards=2)
    twice = [{"ts": 0, "label": 1, "user": f"u{i}"} for i in range(20)] * 2
    learner.learn(twice)
    assert learner.rows == {"user": 0}
    learner.save(tmp_path / "c")
    loaded = stm.Learner.load(tmp_path / "c", model, shards=shards)
    loaded.learn(twice[:20])
    assert loaded.rows == {"user": 20}


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    stm.Learner(two_towers()).save(tmp_path / "c")
    other = make([stm.Categorical("user", dim=4), stm.Categorical("item", dim=4)])
    with pytest.raises(stm.CheckpointError, match="differs in schema"):
        stm.Learner.load(tmp_path / "c", other)
    with pytest.raises(stm.CheckpointError, match="differs in seed"):
        stm.Learner.load(tmp_path / "c", two_towers(seed=5))


def sampled(**options: Any) -> stm.Model:
    return make([stm.Categorical("user", dim=2), stm.Numeric("price", transform=None)], **options)


def test_negatives_are_sampled_and_predictions_corrected() -> None:
    """Learning from a fifth of the negatives predicts about what learning from all does, and validates on all."""
    rng = np.random.default_rng(3)
    samples = [
        {"ts": 1, "user": f"u{u}", "price": 0.0, "label": int(rng.random() < 0.02 + 0.06 * u)}
        for u in rng.integers(0, 5, 60_000).tolist()
    ]
    users = [{"user": f"u{u}", "price": 0.0} for u in range(5)]
    fast: Any = {"embedding_optimizer": stm.Adagrad(0.1), "dense_optimizer": stm.Adam(0.01)}
    whole = stm.Learner(sampled(**fast), batch_size=64)
    part = stm.Learner(sampled(keep={0: 0.2}, **fast), batch_size=64)
    whole.learn(samples)
    learned = part.learn(samples)
    positives = sum(sample["label"] == 1 for sample in samples)
    assert learned.samples == pytest.approx(positives + 0.2 * (60_000 - positives), rel=0.02)
    np.testing.assert_allclose(part.predict(users), whole.predict(users), atol=0.04)
    theirs, mine = whole.metrics()["label"], part.metrics()["label"]
    assert mine.calibration == pytest.approx(1, abs=0.05)
    assert mine.log_loss == pytest.approx(theirs.log_loss, rel=0.05)


def test_what_is_sampled_goes_on_after_a_restart(tmp_path: Path) -> None:
    samples = clicks(2000)
    model = sampled(keep={0: 0.3, 1: 0.6})
    through, first = stm.Learner(model), stm.Learner(model)
    kept = through.learn(samples).kept
    mine = first.learn(samples[:1024]).kept
    first.save(tmp_path / "saved")
    rest = stm.Learner.load(tmp_path / "saved", model).learn(samples[1024:]).kept
    assert np.concatenate([mine, rest + 1024]).tolist() == kept.tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": {0: 0}}, "rate of label 0 must be more than 0"),
        ({"keep": {0: 1.5}}, "at most 1, not 1.5"),
        ({"keep": {2: 0.5}}, "labels are 0 and 1, not 2"),
        ({"keep": {True: 0.5}}, "labels are 0 and 1, not True"),
        ({"keep": {0: 0.5}, "loss": "mean_squared_error"}, "one label with the loss"),
    ],
)
def test_bad_rates_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sampled(**options)


OUT_OF_MEMORY = """
import itertools, re, resource
import keras
import streamtrain as st

def graph(inputs):
    return keras.layers.Dense(1, "sigmoid")(inputs["user"])

schema = st.Schema(features=[st.Categorical("user", dim=256)])
learner = st.Learner(st.Model(schema, graph, micro_batch_size=None), batch_size=256)
samples = ({"label": i % 2, "user": i} for i in range(5_000_000))
learner.learn(list(itertools.islice(samples, 512)))
size = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (size + 200_000_000,) * 2)
try:
    learner.learn(samples)
except st.StreamtrainError as exc:
    print(exc)
"""


def test_what_takes_the_memory_is_said_when_there_is_no_more() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY], capture_output=True, text=True, check=True, timeout=300
    )
    said = done.stdout.strip().splitlines()[-1]
    assert re.match(r"out of memory after [\d,]+ samples; tables: user [\d,]+ rows of dim 256 \([\d,]+ MB\)\. ", said)
    assert "capacity, expire_after or min_count" in said
