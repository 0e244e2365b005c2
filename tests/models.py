"""Small models and streams that several tests share. Loads Keras, so the tests of the native core must not."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import keras
import numpy as np

import streamtrain as stm
from streamtrain.model.features import Feature

Sample = dict[str, Any]


def logistic(inputs: dict[str, Any]) -> Any:
    tensors = list(inputs.values())
    x = keras.layers.Concatenate()(tensors) if len(tensors) > 1 else tensors[0]
    return keras.layers.Dense(1, activation="sigmoid")(x)


def make(features: Sequence[Feature], graph: Callable[[dict[str, Any]], Any] = logistic, **options: Any) -> stm.Model:
    schema = {name: options.pop(name) for name in ("label", "weight") if name in options}
    # One step a batch unless a test asks for more: these are about what one step does.
    return stm.Model(stm.Schema(features=features, time="ts", **schema), graph, **{"micro_batch_size": None, **options})


def clicks(count: int, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    users, items = rng.integers(0, 40, count), rng.integers(0, 60, count)
    return [
        {
            "ts": 1000 + i,
            "label": int(u * 3 % 40 + v * 7 % 60 > 50),
            "user": f"u{u}",
            "item": int(v),
            "price": float(v) / 10,
        }
        for i, (u, v) in enumerate(zip(users.tolist(), items.tolist(), strict=True))
    ]


@cache
def two_towers(**options: Any) -> stm.Model:
    return make(
        [stm.Categorical("user", dim=4), stm.Categorical("item", dim=4), stm.Numeric("price", transform=None)],
        embedding_optimizer=stm.Adagrad(0.1),
        dense_optimizer=stm.Adam(0.01),
        **options,
    )


@cache
def counting() -> stm.Model:
    """Gradient -1 per occurrence, rate 1, rows born zero: a row's value is the number of times its id was learned."""
    zero = stm.Constant(0.0)
    return make(
        [stm.Categorical(name, dim=1, combiner="sum", init=zero) for name in ("user", "tags")],
        lambda inputs: keras.layers.Add()(list(inputs.values())),
        loss=lambda labels, predictions: -predictions,
        reduction="sum",
        embedding_optimizer=stm.SGD(1.0),
    )


def dense_of(learner: stm.Learner) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The flat dense vector."""
    return np.concatenate([shard.dense.pull() for shard in learner._shards])


def statistics_of(learner: stm.Learner) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The flat vector of statistics."""
    return np.concatenate([shard.statistics.pull() for shard in learner._shards])
