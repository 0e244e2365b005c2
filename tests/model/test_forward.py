"""Concatenations of a matrix's columns are undone, and nothing but the time that they take changes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from numpy.testing import assert_allclose
from numpy.typing import NDArray

from streamtrain.model.forward import fuse_concats, split_columns

WIDTHS = [2, 1, 3, 1]
WEIGHTS = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
Combine = Callable[[list[Any]], Any]


def traced(combine: Combine, rejoined: bool) -> Any:
    """What the pieces combined give by fixed weights, and its gradient by the matrix."""

    def function(matrix: Any) -> Any:
        pieces = split_columns(matrix, WIDTHS)
        combined = combine(pieces)
        out = tf.tanh(combined @ tf.constant(WEIGHTS[: combined.shape[1]]))
        if rejoined:
            fuse_concats(matrix, pieces)
        return out, tf.gradients(out, matrix)

    signature = [tf.TensorSpec([None, sum(WIDTHS)], tf.float32)]
    return tf.function(function, signature, autograph=False).get_concrete_function()


def matrix() -> NDArray[np.float32]:
    return np.random.default_rng(1).normal(size=(5, sum(WIDTHS))).astype(np.float32)


def used(function: Any) -> set[str]:
    """Types of the operations that the outputs depend on."""
    found, rest = set(), [one.op for one in function.graph.outputs]
    while rest:
        operation = rest.pop()
        if operation not in found:
            found.add(operation)
            rest += [one.op for one in operation.inputs]
    return {one.type for one in found}


COMBINED: dict[str, tuple[Combine, bool]] = {
    "all": (lambda pieces: tf.concat(pieces, 1), True),
    "all, by the last axis": (lambda pieces: tf.concat(pieces, -1), True),
    "the first": (lambda pieces: tf.concat(pieces[:2], 1), True),
    "those in the middle": (lambda pieces: tf.concat(pieces[1:3], 1), True),
    "all, and one by itself": (lambda pieces: tf.concat(pieces, 1) + pieces[1], False),  # of gradients
    "all, twice": (lambda pieces: tf.concat(pieces, 1) * tf.sigmoid(tf.concat(pieces, 1)), True),
    "another order": (lambda pieces: tf.concat(pieces[::-1], 1), False),
    "with a gap": (lambda pieces: tf.concat([pieces[0], pieces[2]], 1), False),
    "one twice": (lambda pieces: tf.concat([pieces[0], pieces[0], pieces[1]], 1), False),
    "one changed": (lambda pieces: tf.concat([pieces[0], tf.square(pieces[1]), pieces[2]], 1), False),
    "along the samples": (lambda pieces: tf.concat([pieces[1], pieces[3]], 0), False),
    "another operation": (lambda pieces: tf.stack([pieces[1], pieces[3]], 1)[:, :, 0], False),
}


@pytest.mark.parametrize("case", COMBINED)
def test_values_and_gradients_stay(case: str) -> None:
    combine, _ = COMBINED[case]
    plain, rejoined = traced(combine, False), traced(combine, True)
    for expected, given in zip(tf.nest.flatten(plain(matrix())), tf.nest.flatten(rejoined(matrix())), strict=True):
        assert_allclose(given, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", COMBINED)
def test_only_what_lies_beside_each_other_is_rejoined(case: str) -> None:
    combine, gone = COMBINED[case]
    assert ("ConcatV2" in used(traced(combine, True))) is not gone


def test_all_of_them_are_the_matrix_itself() -> None:
    assert not {"SplitV", "ConcatV2", "Slice", "StridedSlice"} & used(traced(COMBINED["all"][0], True))


def test_without_columns_there_are_no_pieces() -> None:
    assert split_columns(tf.zeros([3, 0]), []) == []
