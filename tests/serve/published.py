"""Models and publications whose predictions say which publication they are of."""

from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

import streamtrain as stm
from streamtrain._core import hash_bytes
from streamtrain.model.spec import Spec
from streamtrain.store.publication import Publication, Weights
from streamtrain.testing.store import MemoryOrigin
from tests import models

USERS = [f"u{i}" for i in range(20)]
KEYS = np.array([hash_bytes(user.encode()) for user in USERS], np.uint64)
TIME = 1_700_000_000.0


def counted(field: str = "user", **options: Any) -> stm.Model:
    """Predicts 1000 times the dense bias, plus the sum of the rows of the users, whose ids are in a field."""

    def graph(inputs: dict[str, Any]) -> Any:
        bias = keras.layers.Dense(1, kernel_initializer="zeros")(inputs[field])
        return 1000 * bias + inputs[field]

    user = stm.Categorical(field, table="user", dim=1, combiner="sum", init=stm.Constant(0.0))
    return models.make([user], graph, loss="mean_squared_error", **options)


def weights(number: float) -> Weights:
    """Of `counted`: kernel 0, bias `number`."""
    return Weights(np.array([0, number], np.float32), np.empty(0, np.float32))


def rows(number: float, count: int = len(KEYS)) -> NDArray[np.float32]:
    return np.full((count, 1), number, np.float32)


def origin_of(model: stm.Model, **options: Any) -> MemoryOrigin:
    return MemoryOrigin(Spec.of(model).to_json(), model.name, **options)


def publish(origin: MemoryOrigin, number: int) -> Publication:
    """All rows and the bias become `number`; its clock says so as well."""
    return origin.publish({"user": (KEYS, rows(number))}, weights(number), clock={0: number}, watermark=TIME + number)


def number_of(prediction: float, users: int = 1) -> float:
    """The publication of a prediction; a mixed one gives no whole number, or another one for the rows."""
    return prediction / (1000 + users)
