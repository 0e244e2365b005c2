"""Pieces: the columns of a matrix as tensors of their own, within a traced graph.

A model's graph takes each feature for itself, and the first thing that most do is to put them together again. Both cost
a copy of the whole matrix, and as much again in the gradient. So a concatenation of pieces that lie beside each other
is replaced by the columns it is made of: all of them, without a copy, or a slice.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tensorflow as tf


def cut(columns: "tf.Tensor", widths: list[int]) -> list["tf.Tensor"]:
    """Columns [n, sum of widths] in parts: by one operation, as each has its price."""
    import tensorflow as tf

    return [*tf.split(columns, widths, axis=1)] if widths else []


def rejoin(columns: "tf.Tensor", pieces: Sequence["tf.Tensor"]) -> None:
    """Replaces concatenations of pieces, for all that uses them so far.

    To be called after the graph that uses them is traced, and before its gradients are: those of a tape would still go
    through the concatenation.

    Args:
        columns: what was cut.
        pieces: what `cut` made of it.
    """
    bounds, at = {}, 0
    for piece in pieces:
        bounds[piece.ref()] = (at, at := at + piece.shape[1])
    users = {id(user): user for piece in pieces for user in piece.consumers()}
    for user in users.values():
        if (span := _span(user, bounds)) is None:
            continue
        with user.graph.as_default():
            whole = columns if span == (0, at) else columns[:, slice(*span)]
        _replace(user.outputs[0], whole)


def _span(operation: Any, bounds: dict[Any, tuple[int, int]]) -> tuple[int, int] | None:
    """First and last column of what an operation concatenates; None: it does something else, or has others too."""
    import tensorflow as tf

    if operation.type != "ConcatV2":
        return None
    *parts, axis = operation.inputs
    spans = [bounds.get(part.ref()) for part in parts]
    if None in spans or tf.get_static_value(axis) not in (1, -1):
        return None
    known = [one for one in spans if one is not None]
    return None if any(a[1] != b[0] for a, b in pairwise(known)) else (known[0][0], known[-1][1])


def _replace(tensor: "tf.Tensor", other: "tf.Tensor") -> None:
    """Has all operations that take a tensor take another one; TensorFlow has no public way."""
    for operation in tensor.consumers():
        for i, one in enumerate(operation.inputs):
            if one is tensor:
                operation._update_input(i, other)
