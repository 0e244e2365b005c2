"""A batch that is learned in micro-batches comes to what batches of their size would have come to."""

import copy
import pickle
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import Mock

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import streamtrain as stm
from streamtrain._core import hash_cells
from streamtrain.errors import ConfigError
from streamtrain.model.features import Feature
from streamtrain.model.forward import Traced
from streamtrain.ps.client import Client, total_stats
from streamtrain.ps.clock import Span
from streamtrain.ps.consistency import Async
from streamtrain.ps.push import DenseChange, Push
from streamtrain.ps.rpc import wire
from streamtrain.ps.session import LocalSession
from streamtrain.train.micro import GraphCache, MicroStep, describe_steps
from streamtrain.train.step import Step
from streamtrain.train.trainer import Trainer
from tests.models import logistic

IDS = 40
SCHEMA = stm.Schema(features=[stm.Categorical("user", dim=4)], time="ts")
BITS = (0, 4, 8)
ROWS: dict[str, stm.SGD | stm.Adagrad | stm.RowWiseAdagrad | stm.Adam | stm.FTRL] = {
    "SGD": stm.SGD(0.1),
    "Adagrad": stm.Adagrad(0.1, decay=0.9),
    "RowWiseAdagrad": stm.RowWiseAdagrad(0.1, decay=0.9),
    "Adam": stm.Adam(0.01),
    "FTRL": stm.FTRL(0.1, l1=0.01, l2=0.01),
}
OTHERWISE = {"Adagrad": stm.Adagrad(0.1, epsilon=0.5), "Adam": stm.Adam(0.01, beta1=0.5)}
DENSE: dict[str, stm.SGD | stm.Adagrad | stm.Adam] = {
    "SGD": stm.SGD(0.1),
    "Adagrad": stm.Adagrad(0.1, decay=0.95),
    "Adam": stm.Adam(0.01),
}


def graph(inputs: dict[str, Any]) -> Any:
    """Pooled features, numbers, a sequence with its mask, and a layer that counts what it sees."""
    history, mask = inputs.pop("history"), inputs.pop("history_mask")
    attention = keras.layers.Dot(axes=(2, 1))([history, inputs["user"]])
    attention = keras.layers.Multiply()(
        [keras.layers.Activation("sigmoid")(attention), keras.ops.cast(mask, "float32")]
    )
    inputs["attended"] = keras.layers.Dot(axes=1)([attention, history])
    x = keras.layers.Concatenate()(list(inputs.values()))
    return keras.layers.Dense(1, "sigmoid")(keras.layers.Dense(6, "relu")(x))


@cache
def make(rows: str, dense: str, reduction: Any, micro: int | None, **options: Any) -> stm.Model:
    features: list[Feature] = [
        stm.Categorical("user", dim=4, **options),
        stm.Categorical("item", dim=4),
        stm.Categorical("tags", dim=4, combiner="mean"),
        stm.Categorical("history", table="item", dim=4, combiner=None, max_length=3),
        stm.Categorical("wide", field="user", dim=1, optimizer=stm.FTRL(0.1)),
        stm.Numeric("price", default=0.0, grid=stm.Grid(dim=3, bits=BITS)),
    ]
    return stm.Model(
        stm.Schema(features=features, time="ts"),
        lambda inputs: graph(dict(inputs)),
        embedding_optimizer=ROWS[rows],
        dense_optimizer=DENSE[dense],
        reduction=reduction,
        micro_batch_size=micro,
    )


def stream(count: int, seed: int) -> list[dict[str, Any]]:
    """Samples whose ids occur often, within a micro-batch and from one to the next."""
    rng = np.random.default_rng(seed)
    return [
        {
            "ts": 1000 + i,
            "label": int(rng.random() < 0.4),
            "user": int(rng.zipf(1.3)) % IDS,
            "item": int(rng.zipf(1.3)) % IDS,
            "tags": rng.integers(0, IDS, rng.integers(0, 5)).tolist(),
            "history": rng.integers(0, IDS, rng.integers(0, 5)).tolist(),
            "price": None if i % 7 == 0 else round(float(rng.normal()), 1),
        }
        for i in range(count)
    ]


def weights_of(learner: stm.Learner) -> Any:
    return np.concatenate([shard.dense.pull() for shard in learner._shards])


def cells_of(learner: stm.Learner) -> Any:
    """Rows of all prices, and that of none."""
    prices = np.array([*(i / 10 for i in range(-40, 40)), np.nan], np.float32)
    return learner._pull([*learner.rows].index("price_cells"), hash_cells(prices, BITS))


def assert_same(one: stm.Learner, other: stm.Learner, atol: float = 1e-5) -> None:
    for table in one.rows:
        ids: list[str | int] = list(range(IDS))
        np.testing.assert_allclose(one.embeddings(table, ids), other.embeddings(table, ids), atol=atol)
    if "price_cells" in one.rows:
        np.testing.assert_allclose(cells_of(one), cells_of(other), atol=atol)
    np.testing.assert_allclose(weights_of(one), weights_of(other), atol=atol)
    assert one.rows == other.rows
    assert vars(one.stats) == vars(other.stats)
    counts = [
        {(t, *row) for s in of._shards for t, table in enumerate(s.tables) for row in counted(table)}
        for of in (one, other)
    ]
    assert counts[0] == counts[1]


def counted(table: Any) -> list[tuple[int, int, int]]:
    _, rows = table.scan(0, 10_000)
    return list(zip(rows.keys.tolist(), rows.counts.tolist(), rows.last_seen.tolist(), strict=True))


@pytest.mark.parametrize(
    ("rows", "dense", "reduction"),
    [
        ("Adagrad", "Adam", "row_sum"),
        ("RowWiseAdagrad", "Adagrad", "mean"),
        ("Adam", "SGD", "row_sum"),
        ("SGD", "Adagrad", "sum"),
        ("FTRL", "Adam", "mean"),
    ],
)
def test_micro_batches_are_small_batches(rows: str, dense: str, reduction: str) -> None:
    """To rounding, whatever the optimizers are; and counts exactly. The last batch, and its last step, are not full.

    The graph was compiled for a model of other rates: those are its arguments.
    """
    samples, graphs, model = stream(205, 1), GraphCache(), make(rows, dense, reduction, 8, min_count=3)
    slower = model.replace(
        embedding_optimizer=replace(model.embedding_optimizer, rate=model.embedding_optimizer.rate / 3),
        dense_optimizer=replace(model.dense_optimizer, rate=model.dense_optimizer.rate / 3),
    )
    stm.Learner(slower, batch_size=64, graphs=graphs).learn(samples)
    compiled = {*graphs.compiled}
    small = stm.Learner(make(rows, dense, reduction, None, min_count=3), batch_size=8)
    large = stm.Learner(model, batch_size=64, shards=3, graphs=graphs)
    expected, learned = small.learn(samples), large.learn(samples)
    assert {*graphs.compiled} == compiled
    np.testing.assert_allclose(learned.predictions, expected.predictions, atol=1e-5)
    assert learned.loss == pytest.approx(expected.loss, rel=1e-5)
    assert np.count_nonzero(cells_of(large)) > 5
    assert_same(large, small)


@pytest.mark.parametrize("rows", [*OTHERWISE])
def test_a_worker_whose_model_file_has_changed_steps_as_the_shards_do(rows: str) -> None:
    """Settings stay as the run began, also where a batch sees its own updates before the shards have them."""
    samples, begun = stream(96, 12), make(rows, "Adagrad", "row_sum", 8)
    edited = begun.replace(embedding_optimizer=OTHERWISE[rows], dense_optimizer=stm.Adagrad(0.1, decay=0.5))
    large = stm.Learner(begun, batch_size=32)
    small = stm.Learner(begun.replace(micro_batch_size=None), batch_size=8)
    expected = small.learn(samples).predictions
    worker = trainer(edited, large._shards, 0, GraphCache())
    for i, (batch, _) in enumerate(large.read(samples)):
        pulling = worker.pull(worker.plan(batch), batch)
        pulling.wait()
        stepped = worker.step(pulling)
        np.testing.assert_allclose(stepped.predictions, expected[32 * i : 32 * (i + 1)], atol=1e-5)
        span = Span(0, 32 * i, 32 * (i + 1))
        total_stats(worker.push(pulling, stepped, spans=[span], watermark=0).wait())
    np.testing.assert_allclose(weights_of(large), weights_of(small), atol=1e-5)
    slots = large._shards[0].dense.slots
    np.testing.assert_allclose(slots, small._shards[0].dense.slots, atol=1e-5)


@given(
    rows=st.sampled_from(sorted(ROWS)),
    dense=st.sampled_from(sorted(DENSE)),
    reduction=st.sampled_from(["row_sum", "mean", "sum"]),
    micro=st.integers(1, 9),
    batch=st.integers(2, 40),
    count=st.integers(1, 60),
    shards=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_micro_batches_of_any_size(
    *, rows: str, dense: str, reduction: str, micro: int, batch: int, count: int, shards: int, seed: int
) -> None:
    """Also where they do not fit into the batch: then each batch ends with one that is smaller."""
    samples = stream(count, seed)
    small = stm.Learner(make(rows, dense, reduction, None), batch_size=batch)
    large = stm.Learner(make(rows, dense, reduction, micro), batch_size=batch, shards=shards)
    large._trainer.beginning = None  # else the first batches are cut elsewhere, and outputs begin at the log-odds
    for start in range(0, count, batch):
        part = samples[start : start + batch]
        expected = [small.learn(part[at : at + micro]).predictions for at in range(0, len(part), micro)]
        np.testing.assert_allclose(large.learn(part).predictions, np.concatenate(expected), atol=1e-5)
    assert_same(large, small)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_counts_are_exact(dtype: Any) -> None:
    """Rows that count occurrences, and a weight that counts samples."""
    zero = stm.Constant(0.0)

    def counting(inputs: dict[str, Any]) -> Any:
        ones = keras.layers.Lambda(lambda x: x * 0 + 1, output_shape=(1,))(inputs["user"])
        samples = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(ones)
        return keras.layers.Add()([*inputs.values(), samples])

    features = [stm.Categorical(name, dim=1, combiner="sum", init=zero, dtype=dtype) for name in ("user", "tags")]
    model = stm.Model(
        stm.Schema(features=features, time="ts"),
        counting,
        loss=lambda labels, predictions: -predictions,
        reduction="sum",
        embedding_optimizer=stm.SGD(1.0),
        dense_optimizer=stm.SGD(1.0),
        micro_batch_size=4,
    )
    learner = stm.Learner(model, batch_size=100, shards=2)
    samples = [{**one, "user": i % 7, "tags": [i % 3, i % 3, 9]} for i, one in enumerate(stream(150, 3))]
    learner.learn(samples)
    assert learner.embeddings("user", list(range(7)))[:, 0].tolist() == [22, 22, 22, 21, 21, 21, 21]
    assert learner.embeddings("tags", [0, 1, 2, 9])[:, 0].tolist() == [100, 100, 100, 150]
    assert weights_of(learner).tolist() == [150]


def test_a_gradient_that_is_not_finite_is_dropped_alone() -> None:
    """The steps before and after it count as they would without it; so do the other rows of its own step."""

    def models(micro: int | None) -> stm.Model:
        def loss(labels: Any, predictions: Any) -> Any:
            factor = keras.ops.where(labels > 100, np.float32(np.nan), np.float32(1))
            return keras.ops.square(labels - predictions) * factor

        features = [stm.Categorical("user", dim=4), stm.Categorical("item", dim=4)]
        return stm.Model(
            stm.Schema(label=stm.Label("label", kind="real"), features=features, time="ts"),
            lambda inputs: keras.layers.Dense(1)(keras.layers.Concatenate()(list(inputs.values()))),
            loss=loss,
            embedding_optimizer=stm.Adagrad(0.1),
            dense_optimizer=stm.Adam(0.01),
            micro_batch_size=micro,
        )

    samples = stream(60, 4)
    samples[21]["label"] = 1000
    small, large = stm.Learner(models(None), batch_size=4), stm.Learner(models(4), batch_size=30, shards=2)
    for at in (0, 30):
        large.learn(samples[at : at + 30])
        for start in range(at, at + 30, 4):
            small.learn(samples[start : min(start + 4, at + 30)])
    assert large.stats.non_finite_rows == small.stats.non_finite_rows > 0
    assert large.stats.non_finite_dense == small.stats.non_finite_dense == 1
    assert_same(large, small)


def trainer(model: stm.Model, shards: Sequence[Any], ahead: int, graphs: GraphCache) -> Trainer:
    step = Step(model)
    spec = shards[0].spec
    client = Client([LocalSession(shard, Async(shard), "worker") for shard in shards], spec)
    return Trainer(model, step, client, len(shards), micro=MicroStep(model, step, 32, spec, graphs=graphs), ahead=ahead)


@pytest.mark.parametrize("rows", ["Adagrad", "Adam", "FTRL"])
def test_batches_that_are_pulled_ahead_learn_from_those_before_them(rows: str) -> None:
    """As if each were pulled once the one before it is pushed."""
    model = make(rows, "Adam", "row_sum", 8, min_count=3)
    graphs = GraphCache()
    learner, waiting = (stm.Learner(model, batch_size=32, graphs=graphs) for _ in range(2))
    ahead = trainer(model, learner._shards, 2, graphs)
    samples = stream(160, 5)
    batches = [batch for batch, _ in waiting.read(samples)]
    expected = waiting.learn(samples).predictions
    made, pulled, learned = [], [ahead.pull(ahead.plan(batch), batch) for batch in batches[:3]], 0
    for batch in [*batches[3:], None, None, None]:
        pulling = pulled.pop(0)
        pulling.wait()
        stepped = ahead.step(pulling)
        made.append(stepped.predictions)
        span = Span(0, learned, learned + len(pulling.batch))
        total_stats(ahead.push(pulling, stepped, spans=[span], watermark=0).wait())
        learned += len(pulling.batch)
        if batch is not None:
            pulled.append(ahead.pull(ahead.plan(batch), batch))
    np.testing.assert_allclose(np.concatenate(made), expected, atol=1e-4)
    np.testing.assert_allclose(weights_of(learner), weights_of(waiting), atol=1e-4)


def test_what_the_outputs_are_moved_by_is_carried_to_batches_that_are_pulled_ahead() -> None:
    schema = stm.Schema(features=[stm.Categorical("user", dim=4)])
    model = stm.Model(schema, lambda inputs: keras.layers.Dense(1, "sigmoid")(inputs["user"]), micro_batch_size=8)
    learner = stm.Learner(model, batch_size=32)
    worker = trainer(model, learner._shards, 2, GraphCache())
    worker.begin()
    [(_, bias)] = model.output_biases.items()
    batches = [batch for batch, _ in learner.read([{**one, "label": 0} for one in stream(96, 7)])]
    pulled = [worker.pull(worker.plan(batch), batch) for batch in batches]
    for pulling in pulled:
        pulling.wait()
    begun = [float(pulling.pulled.parameters[bias]) for pulling in pulled]
    changes = [worker.step(pulling).dense for pulling in pulled[:2]]
    worker.beginning = None
    worker.step(pulled[2])
    by = [float(one.by[bias]) for one in changes if isinstance(one, DenseChange)]
    assert by[1] < -1  # it has been moved
    assert float(pulled[2].pulled.parameters[bias]) - begun[2] == pytest.approx(sum(by), rel=1e-5)


@pytest.mark.parametrize(("reduction", "share"), [("row_sum", 0.5), ("mean", 0.5), ("sum", 1.0)])
def test_two_workers_that_step_from_the_same_weights_do_not_step_twice_as_far(reduction: str, share: float) -> None:
    """Both pull, then both push: the later move is averaged with the other, unless the loss is a sum.

    Moments are those of one after the other, though gradients are of the same weights.
    """
    model = make("Adagrad", "Adam", reduction, 8)
    learner = stm.Learner(model, batch_size=32)
    samples = stream(64, 6)
    batches = [batch for batch, _ in learner.read(samples)]
    graphs = GraphCache()
    workers = [trainer(model, learner._shards, 0, graphs) for _ in range(2)]
    pulled = [worker.pull(worker.plan(batch), batch) for worker, batch in zip(workers, batches, strict=True)]
    results = []
    for i, (worker, pulling) in enumerate(zip(workers, pulled, strict=True)):
        pulling.wait()
        results.append(worker.step(pulling))
        worker.push(pulling, results[-1], spans=[Span(i, 0, 32)], watermark=0).wait()
    dense = learner._shards[0].dense
    a, b = (one.dense for one in results)
    assert isinstance(a, DenseChange)
    assert isinstance(b, DenseChange)
    np.testing.assert_allclose(dense.slots, b.decay[:, None] * a.added + b.added, rtol=1e-5, atol=1e-9)
    assert dense.steps == 8
    expected = learner._step.initial_dense + a.by + share * b.by
    np.testing.assert_allclose(dense.pull(), expected, rtol=1e-5, atol=1e-7)


def test_workers_that_take_turns_are_one_worker() -> None:
    """Each pulls after the other has pushed, so that there is nothing to average."""
    model, graphs = make("Adagrad", "Adam", "row_sum", 8), GraphCache()
    learner, alone = (stm.Learner(model, batch_size=32, graphs=graphs) for _ in range(2))
    samples = stream(160, 7)
    alone._trainer.beginning = None
    workers = [trainer(model, learner._shards, 0, graphs) for _ in range(2)]
    for i, (batch, _) in enumerate(alone.read(samples)):
        worker = workers[i % 2]
        pulling = worker.pull(worker.plan(batch), batch)
        pulling.wait()
        worker.push(pulling, worker.step(pulling), spans=[Span(0, 32 * i, 32 * (i + 1))], watermark=0).wait()
    alone.learn(samples)
    np.testing.assert_array_equal(weights_of(learner), weights_of(alone))


def test_one_sample_of_very_many_ids_does_not_blow_up_what_all_steps_take() -> None:
    """Every step would be as wide as that one, for good: such a batch is one step, and those after it are as before."""
    schema = stm.Schema(features=[stm.Categorical("user", dim=4), stm.Categorical("tags", dim=4)], time="ts")

    def one_layer(inputs: dict[str, Any]) -> Any:
        return keras.layers.Dense(1, "sigmoid")(keras.layers.Concatenate()(list(inputs.values())))

    learner = stm.Learner(stm.Model(schema, one_layer, micro_batch_size=8), batch_size=256)
    samples = stream(768, 10)
    samples[300]["tags"] = list(range(9_000))
    micro = learner._micro
    assert micro is not None
    takes = [micro.takes(batch) for batch, _ in learner.read(samples)]
    assert takes == [True, False, True]
    assert learner.learn(samples).samples == 768
    assert max(slots for _, slots in micro._shape.slots) < 100
    assert not learner.stats.non_finite_rows


@pytest.mark.parametrize(
    ("units", "size", "line"),
    [
        (64, None, "learning each batch in one step, as micro_batch_size is None"),
        (64, 8, "learning batches in steps of 8 samples (micro_batch_size)"),
        (3000, 64, "learning batches in steps of 64 samples (micro_batch_size)"),
    ],
)
def test_a_worker_says_in_what_steps_it_learns(units: int, size: int | None, line: str) -> None:
    schema = stm.Schema(features=[stm.Categorical("user", dim=7)], time="ts")

    def layers(inputs: dict[str, Any]) -> Any:
        return keras.layers.Dense(1, "sigmoid")(keras.layers.Dense(units)(inputs["user"]))

    assert describe_steps(stm.Model(schema, layers, micro_batch_size=size)) == line


def test_models_whose_cells_differ_may_share_a_cache() -> None:
    """A number of four cells is not learned by the graph for one of two."""
    samples, graphs = stream(40, 3), GraphCache()

    def logistic(inputs: dict[str, Any]) -> Any:
        return keras.layers.Dense(1, "sigmoid")(keras.layers.Concatenate()([*inputs.values()]))

    def model(bits: tuple[int, ...], micro: int | None) -> stm.Model:
        price = stm.Numeric("price", default=0.0, grid=stm.Grid(dim=3, bits=bits))
        return stm.Model(stm.Schema(features=[price], time="ts"), logistic, micro_batch_size=micro)

    for bits in ((0, 4), (0, 4, 8, 12)):
        large = stm.Learner(model(bits, 8), batch_size=40, graphs=graphs)
        large._trainer.beginning = None
        small = stm.Learner(model(bits, None), batch_size=8)
        np.testing.assert_allclose(large.learn(samples).predictions, small.learn(samples).predictions, atol=1e-5)


def test_numbers_alone_are_learned_in_steps() -> None:
    schema = stm.Schema(features=[stm.Numeric("price", default=0.0)], time="ts")

    def logistic(inputs: dict[str, Any]) -> Any:
        return keras.layers.Dense(1, "sigmoid")(inputs["price"])

    small = stm.Learner(stm.Model(schema, logistic, micro_batch_size=None), batch_size=8)
    large = stm.Learner(stm.Model(schema, logistic, micro_batch_size=8), batch_size=40, shards=2)
    large._trainer.beginning = None
    samples = stream(80, 11)
    np.testing.assert_allclose(large.learn(samples).predictions, small.learn(samples).predictions, atol=1e-5)


def test_a_graph_that_xla_cannot_compile_learns_even_so(caplog: pytest.LogCaptureFixture) -> None:
    import tensorflow as tf

    class Printing(keras.layers.Layer):  # type: ignore[misc]  # of an untyped library
        def call(self, x: Any) -> Any:
            return tf.ensure_shape(tf.py_function(lambda y: y, [x], tf.float32), x.shape) + 0 * x

        def compute_output_shape(self, shape: Any) -> Any:
            return shape

    def printing(inputs: dict[str, Any]) -> Any:
        return keras.layers.Dense(1, "sigmoid")(Printing()(inputs["user"]))

    def models(micro: int | None) -> stm.Model:
        schema = stm.Schema(features=[stm.Categorical("user", dim=4)], time="ts")
        return stm.Model(schema, printing, micro_batch_size=micro)

    samples = stream(40, 7)
    small, large = stm.Learner(models(None), batch_size=8), stm.Learner(models(8), batch_size=40)
    large._trainer.beginning = None
    expected, learned = small.learn(samples), large.learn(samples)
    np.testing.assert_allclose(learned.predictions, expected.predictions, atol=1e-5)
    assert "XLA cannot compile the graph" in caplog.text


def test_statistics_of_batch_norm_follow_the_steps() -> None:
    def normed(inputs: dict[str, Any]) -> Any:
        x = keras.layers.BatchNormalization(momentum=0.9)(inputs["user"])
        return keras.layers.Dense(1, "sigmoid")(x)

    schema = stm.Schema(features=[stm.Categorical("user", dim=4)], time="ts")
    small = stm.Learner(stm.Model(schema, normed, micro_batch_size=None), batch_size=8)
    large = stm.Learner(stm.Model(schema, normed, micro_batch_size=8), batch_size=40, shards=2)
    large._trainer.beginning = None
    samples = stream(80, 9)
    np.testing.assert_allclose(large.learn(samples).predictions, small.learn(samples).predictions, atol=1e-5)
    statistics = [np.concatenate([s.statistics.pull() for s in one._shards]) for one in (small, large)]
    np.testing.assert_allclose(statistics[1], statistics[0], rtol=1e-4, atol=1e-6)


def test_models_that_differ_in_more_have_graphs_of_their_own() -> None:
    schema = stm.Schema(features=[stm.Categorical("user", dim=4)], time="ts")

    def one_layer(inputs: dict[str, Any]) -> Any:
        return keras.layers.Dense(1, "sigmoid")(inputs["user"])

    samples, graphs, model = stream(64, seed=11), GraphCache(), stm.Model(schema, one_layer, micro_batch_size=8)
    for other in (
        model,
        model.replace(seed=1),
        model.replace(reduction="mean"),
        model.replace(dense_optimizer=stm.SGD()),
    ):
        stm.Learner(other, batch_size=64, graphs=graphs).learn(samples)
    assert len(graphs.compiled) == 4


@pytest.mark.parametrize("micro", [None, 4])
def test_learners_of_one_model_trace_and_compile_it_once(micro: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, samples = make.__wrapped__("Adam", "SGD", "mean", micro), stream(64, 14)
    learned = stm.Learner(model, batch_size=32).learn(samples)
    monkeypatch.setattr(Traced, "__init__", Mock(side_effect=AssertionError("it is traced again")))
    for again in (model, model.named("other")):
        np.testing.assert_array_equal(stm.Learner(again, batch_size=32).learn(samples).predictions, learned.predictions)
    with pytest.raises((AssertionError, ConfigError), match="traced again"):
        stm.Learner(model.replace(seed=1))


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras, which writes its weights
def test_a_model_can_be_copied_and_pickled_after_it_has_learned() -> None:
    samples = stream(40, 15)
    model = stm.Model(SCHEMA, logistic)
    expected = stm.Learner(model).learn(samples).predictions
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        np.testing.assert_array_equal(stm.Learner(again).learn(samples).predictions, expected)


@pytest.mark.parametrize("micro", [None, 4])
def test_a_plan_tells_what_goes_to_a_shard_at_most(micro: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked, what is answered and what is pushed, beside weights."""
    model = make("Adagrad", "Adam", "row_sum", micro)
    learner = stm.Learner(model, batch_size=100, shards=2)
    [(batch, _)] = learner.read(stream(100, 5))
    learner._trainer.beginning = None
    client, plan = learner._trainer._client, learner._trainer.plan(batch)
    sent: list[int] = []
    pull, push = LocalSession.pull, LocalSession.push

    def size(push: Push | None, pull: wire.PullRequest | None) -> int:
        return len(wire.encode_request(push, pull, "float32"))

    def watched_pull(self: LocalSession, keys: Any, into: Any, ahead: int) -> Any:
        sent.append(size(None, wire.PullRequest(keys, ahead)))
        sent.append(sum(rows.nbytes for rows in into.rows))
        return pull(self, keys, into, ahead)

    def watched_push(self: LocalSession, one: Push) -> Any:
        sent.append(size(one, None) - size(one._replace(updates=[u._replace(**NOTHING) for u in one.updates]), None))
        return push(self, one)

    monkeypatch.setattr(LocalSession, "pull", watched_pull)
    monkeypatch.setattr(LocalSession, "push", watched_push)
    learner.learn(batch)
    most = client.nbytes(plan, in_steps=micro is not None)
    assert len(sent) == 6
    assert max(sent) <= most < 2 * max(sent)
    assert most <= client.most_row_bytes * len(batch.keys)


NOTHING: dict[str, Any] = {
    "keys": np.empty(0, np.uint64),
    "gradients": np.empty((0, 4), np.float32),
    "counts": np.empty(0, np.uint32),
    "times": np.empty(0, np.uint32),
    "repeats": None,
}
