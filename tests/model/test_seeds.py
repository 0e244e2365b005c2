"""A model's seed decides on its initial weights, whatever else happens in the process."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

import streamtrain as st
from tests.models import two_towers


@contextmanager
def others_draw() -> Iterator[None]:
    """Other threads draw from Python's generator, as clients of servers do that pause between two attempts."""
    stopped = threading.Event()

    def draw() -> None:
        while not stopped.is_set():
            random.random()

    threads = [threading.Thread(target=draw) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopped.set()
        for thread in threads:
            thread.join()


def weights(model: st.Model) -> list[Any]:
    return [np.asarray(one) for one in model.keras.weights]


def test_initial_weights_are_the_same_while_other_threads_draw_numbers() -> None:
    expected = weights(two_towers())
    assert any(one.any() for one in expected)
    for _ in range(3):
        with others_draw():
            found = weights(two_towers())
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)


def test_two_models_are_built_at_once() -> None:
    expected = weights(two_towers())
    found: list[list[Any]] = []
    threads = [threading.Thread(target=lambda: found.append(weights(two_towers()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(threads)
    for of_one in found:
        for one, other in zip(of_one, expected, strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_graph_draws_numbers_of_its_own() -> None:
    def graph(inputs: Any) -> Any:
        return keras.layers.Dense(1, "sigmoid", bias_initializer=keras.initializers.Constant(random.random()))(
            inputs["user"]
        )

    schema = st.Schema(features=[st.Categorical("user", dim=2)])
    biases = {float(weights(st.Model(schema, graph, seed=seed))[1][0]) for seed in (1, 1, 2)}
    assert len(biases) == 2
