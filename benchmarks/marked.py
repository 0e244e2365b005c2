"""Models whose predictions tell what they are of."""

from dataclasses import replace
from typing import Any

import numpy as np
import workloads

import streamtrain as st
from streamtrain._core import hash_bytes
from streamtrain.store.origin import Weights

WIDTH = 16
USERS = [f"u{i}" for i in range(64)]
KEYS = np.array([hash_bytes(user.encode()) for user in USERS], np.uint64)


def _probed() -> st.Model:
    """W1 with an output beside it, "seen": how many times the sample's probe has been learned, exactly.

    All fields have defaults, so that a probe can be asked for alone.
    """
    base = workloads.model(workloads.WORKLOADS["w1"])
    probe = st.Categorical("probe", dim=1, combiner="sum", default="", init=st.Constant(0.0), optimizer=st.SGD(1.0))

    def graph(inputs: dict[str, Any]) -> Any:
        rows = {name: tensor for name, tensor in inputs.items() if name != "probe"}
        return {"label": base.graph(rows), "seen": inputs["probe"]}

    return st.Model(
        st.Schema(
            label=["label", st.Label("seen", kind="real", optional=True)],
            time="ts",
            features=[*(replace(one, default=0) for one in base.schema.features), probe],
        ),
        graph,
        loss={"label": "binary_crossentropy", "seen": lambda labels, predictions: -predictions[:, 0]},
        embedding_optimizer=base.embedding_optimizer,
        dense_optimizer=base.dense_optimizer,
        reduction="sum",
    )


def _versioned() -> st.Model:
    """Predicts 1000 times the dense bias, plus the sum of the user's row: 1016 n where both are all n."""

    def graph(inputs: dict[str, Any]) -> Any:
        import keras

        bias = keras.layers.Dense(1, kernel_initializer="zeros")(inputs["user"])
        return 1000 * bias + keras.ops.sum(inputs["user"], axis=-1, keepdims=True)

    user = st.Categorical("user", dim=WIDTH, combiner="sum", init=st.Constant(0.0))
    return st.Model(st.Schema(features=[user]), graph, loss="mean_squared_error")


def prediction_of(number: int) -> float:
    """What publication `number` of `versioned` predicts; a mixed one gives another value."""
    return 1000.0 * number + WIDTH * number


def weights_of(number: int) -> Weights:
    """Those of `versioned`: kernel 0, bias `number`."""
    dense = np.zeros(WIDTH + 1, np.float32)
    dense[-1] = number
    return Weights(dense, np.empty(0, np.float32))


probed = _probed()
versioned = _versioned()
