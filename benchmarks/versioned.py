"""A model whose predictions tell the publication that they are of."""

from typing import Any

import numpy as np

import streamtrain as st
from streamtrain._core import hash_bytes
from streamtrain.store.origin import Weights

WIDTH = 16
USERS = [f"u{i}" for i in range(64)]
KEYS = np.array([hash_bytes(user.encode()) for user in USERS], np.uint64)


def _versioned() -> st.Model:
    """Predicts 1000 times the dense bias, plus the sum of the user's row: 1016 n where both are all n."""

    def graph(inputs: dict[str, Any]) -> Any:
        import keras

        bias = keras.layers.Dense(1, kernel_initializer="zeros")(inputs["user"])
        return 1000 * bias + keras.ops.sum(inputs["user"], axis=-1, keepdims=True)

    user = st.Categorical("user", dim=WIDTH, combiner="sum", init=st.Constant(0.0))
    return st.Model(st.Schema(features=[user]), graph, loss="mean_squared_error")


def prediction_of(number: int) -> float:
    """What publication `number` of the model predicts; a mixed one gives another value."""
    return 1000.0 * number + WIDTH * number


def weights_of(number: int) -> Weights:
    """Those of the model: kernel 0, bias `number`."""
    dense = np.zeros(WIDTH + 1, np.float32)
    dense[-1] = number
    return Weights(dense, np.empty(0, np.float32))


model = _versioned()
