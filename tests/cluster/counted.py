"""A model that counts, and a log of samples that everybody can make by itself, some of them bad.

Under SGD with rate 1 and a gradient of -1 per occurrence the row of an id is the number of times that it was learned,
and every dense weight the number of samples.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from streamtrain._core import Planner, hash_bytes
from streamtrain.model.features import Categorical, Constant
from streamtrain.model.model import Model
from streamtrain.model.optimizers import SGD
from streamtrain.model.schema import Schema
from streamtrain.model.spec import Spec
from streamtrain.ps.nodes.shards import RunTemplate, Shards
from streamtrain.train.step import StepResult

IDS = 2000
FEATURES = 3
DENSE = 7
BAD_EVERY = 97
_BAD = [b"", b"{", b'{"label": "x"}', b"\xff\xfe", b'{"id0": 1}', b"[1]", b'{"label": 1, "ts": 1e300}', b"{}"]


def log_of(partition: int, samples: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Ids [samples, FEATURES] of a partition: the same in every process."""
    return np.random.default_rng(partition).zipf(1.3, (samples, FEATURES)) % IDS


def is_bad(offsets: np.ndarray[Any, np.dtype[np.int64]]) -> Any:
    """Which messages of a partition are poison, bool [n]."""
    return offsets % BAD_EVERY == BAD_EVERY - 1


def bad_message(offset: int) -> bytes:
    """One that is bad, in one of several ways."""
    return _BAD[offset // BAD_EVERY % len(_BAD)]


def messages_of(partition: int, samples: int) -> list[bytes]:
    """The log as messages: every 97th is bad, in one of several ways."""
    return [
        bad_message(offset)
        if offset % BAD_EVERY == BAD_EVERY - 1
        else json.dumps({"label": 0, "ts": offset, **{f"id{i}": one for i, one in enumerate(ids)}}).encode()
        for offset, ids in enumerate(log_of(partition, samples).tolist())
    ]


def counting(inputs: dict[str, Any]) -> Any:
    """Adds all ids' rows and a weight that counts samples."""
    import keras

    ones = keras.layers.Lambda(lambda x: x * 0 + 1, output_shape=(1,))(inputs["id0"])
    samples = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(ones)
    return keras.layers.Add()([*inputs.values(), samples])


def model(name: str = "model") -> Model:
    return Model(
        Schema(
            time="ts",
            features=[
                Categorical(f"id{i}", table="ids", dim=1, combiner="sum", init=Constant(0.0)) for i in range(FEATURES)
            ],
        ),
        counting,
        loss=lambda labels, predictions: -predictions,
        reduction="sum",
        embedding_optimizer=SGD(1.0),
        dense_optimizer=SGD(1.0),
        name=name,
    )


class CountingStep:
    """The training step of the model, by hand, so that a worker starts at once."""

    initial_dense = np.zeros(DENSE, np.float32)
    initial_statistics = np.zeros(0, np.float32)

    def train(self, parameters: Any, plan: Any, rows: Any, batch: Any) -> StepResult:
        n = len(batch)
        return StepResult(
            predictions=np.zeros((n, 1), np.float32),
            loss=0.0,
            row_gradient=np.full((n, plan.width), -1, np.float32),
            dense_gradient=np.full(DENSE, -n, np.float32),
            statistics_change=np.zeros(0, np.float32),
        )


def stepping(tensorflow: bool) -> tuple[Model, Any, Spec]:
    """The model, its step and its spec, with or without TensorFlow."""
    made = model()
    if tensorflow:
        from streamtrain.train.step import Step

        return made, Step(made), Spec.of(made)
    made.micro_batch_size = None
    table = {"name": "ids", **made.schema.tables[0].settings(made.embedding_optimizer, made.seed)}
    dense = made.dense_optimizer.settings()
    spec = Spec(made.schema.fingerprint(), made.seed, made.reduction, (table,), ((DENSE,),), (), dense)
    weight = {"layer": "dense", "name": "kernel", "is_numbered": False, "inputs": [], "columns": []}
    about = {**json.loads(json.dumps(made.schema.about())), "weights": [weight], "statistics": []}
    return made, CountingStep(), replace(spec, about=about)


def beginning(tensorflow: bool) -> RunTemplate:
    _, step, spec = stepping(tensorflow)
    return RunTemplate(spec, step.initial_dense, step.initial_statistics, {})


def differences(shards: Shards, partitions: int, samples: int) -> list[str]:
    """Ids whose count is not that of the log, and wrong counts of samples."""
    good = ~is_bad(np.arange(samples))
    wrong, weights = wrong_counts(shards, [log_of(p, samples)[good] for p in range(partitions)])
    total = int(good.sum()) * partitions
    return [f"id {one}: {n} instead of {expected}" for one, (n, expected) in wrong.items()] + [
        f"a weight: {n} instead of {total}" for n in weights if n != total
    ]


def wrong_counts(
    shards: Shards, logs: Sequence[np.ndarray[Any, np.dtype[np.int64]]]
) -> tuple[dict[int, tuple[int, int]], list[float]]:
    """What shards have counted.

    Args:
        shards: that hold the model.
        logs: ids [samples, FEATURES] of the good samples of each partition.

    Returns:
        By id what was counted and what should have been, where these differ; and all weights.
    """
    expected = Counter(np.concatenate([log.ravel() for log in logs]).tolist())
    ids = sorted(expected)
    keys = np.array([hash_bytes(str(one).encode()) for one in ids], np.uint64)
    plan = Planner([(0, "sum", 0)], [1], len(shards.controls)).plan(
        keys, np.array([0, len(ids)]), np.arange(len(ids) + 1, dtype=np.int32)[None, :], np.zeros(len(ids))
    )
    client = shards.client("checker", shards.agree())
    client.join()
    pulled = client.pull(plan).wait()
    client.close()
    counted = plan.pool(pulled.rows)[:, 0]
    wrong = {one: (int(n), expected[one]) for one, n in zip(ids, counted, strict=True) if n != expected[one]}
    return wrong, [float(n) for n in pulled.parameters]
