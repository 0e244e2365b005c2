"""Forward: how a model's Keras graph is called, in training and in serving, on the matrix of a batch.

TensorFlow is loaded when a Forward is made.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamtrain._core import Plan
from streamtrain.model.batch import Batch
from streamtrain.model.model import Model
from streamtrain.model.pieces import cut, rejoin

if TYPE_CHECKING:
    import tensorflow as tf

Floats = NDArray[np.float32]
Made = tuple[dict[str, Any], list[Any]]
"""Outputs of a graph by name, and its non-trainable weights afterwards."""


class Columns(NamedTuple):
    """First column of each part of a batch's matrix, and their number; pooled rows are in front."""

    numeric: int
    lengths: int
    width: int

    @classmethod
    def of(cls, model: Model) -> "Columns":
        """Those of a model."""
        numeric = model.planner(1).width
        lengths = numeric + len(model.schema.numerics)
        return cls(numeric, lengths, lengths + sum(one.combiner is None for one in model.schema.embedded))


class Traced:
    """A traced graph, called as one operation.

    Calling the function that TensorFlow made of the graph would bind, check and cast each argument in Python, every
    time: two thirds of a small step. The arguments are always those that it was traced with, so nothing is lost.

    Args:
        graph: what is traced.
        signature: its arguments; those in a list are given one by one when it is called.
        options: of the operation.
    """

    def __init__(self, graph: Callable[..., Any], signature: list[Any], **options: Any) -> None:
        import tensorflow as tf

        function = tf.function(graph, input_signature=signature).get_concrete_function()
        self._captured = list(function.captured_inputs)
        self._call = tf.raw_ops.StatefulPartitionedCall
        self._options = {"Tout": [output.dtype for output in function.outputs], "f": function, **options}

    def __call__(self, *args: Any) -> list[Any]:
        """The outputs as tensors.

        An array is not made a tensor before: TensorFlow's core does so in a fifth of the time that its Python takes.
        """
        outputs: list[Any] = self._call(args=[*args, *self._captured], **self._options)
        return outputs


class Forward:
    """A model's Keras graph as a function of the batch's matrix and of weights that come with every call.

    Args:
        model: whose graph it calls.

    Attributes:
        columns: of the matrix.
        own: non-trainable weights that are no statistics: the states of random generators, as of dropout.
    """

    def __init__(self, model: Model) -> None:
        import tensorflow as tf

        self._tf = tf
        self._model = model
        self._sequences = [f for f, one in enumerate(model.schema.embedded) if one.combiner is None]
        self.columns = Columns.of(model)
        pooled = [one.dim * (one.max_length or 1 if one.combiner is None else 1) for one in model.schema.embedded]
        self._widths = pooled + [1] * (self.columns.width - self.columns.numeric)  # numeric features, lengths
        state = model.keras.non_trainable_variables
        self._is_statistic = [one.dtype == "float32" for one in state]
        self.own = [one for one, is_statistic in zip(state, self._is_statistic, strict=True) if not is_statistic]

    def merge(self, own: list[Any], statistics: list[Any]) -> list[Any]:
        """All non-trainable weights in Keras's order."""
        kinds = iter(own), iter(statistics)
        return [next(kinds[is_statistic]) for is_statistic in self._is_statistic]

    def separate(self, state: list[Any]) -> tuple[list[Any], list[Any]]:
        """The states of random generators, and the statistics; what `merge` put together."""
        by_kind: tuple[list[Any], list[Any]] = ([], [])
        for one, is_statistic in zip(state, self._is_statistic, strict=True):
            by_kind[is_statistic].append(one)
        return by_kind

    def matrix(self, plan: Plan, rows: Floats, batch: Batch) -> Floats:
        """Everything that the graph needs of a batch as one matrix: each argument of a function has its price.

        Args:
            plan: the batch's plan.
            rows: the plan's rows, flat.
            batch: the samples.

        Returns:
            float32 [n, width]: pooled rows, numeric features, lengths of sequences.
        """
        at = self.columns
        matrix = plan.pool(rows, at.width - at.numeric)
        matrix[:, at.numeric : at.lengths] = batch.numeric
        for column, feature in enumerate(self._sequences, at.lengths):
            matrix[:, column] = np.diff(batch.offsets[feature])
        return matrix

    def call(
        self,
        trainable: list["tf.Tensor"],
        state: list["tf.Tensor"],
        features: "tf.Tensor",
        *,
        training: bool,
    ) -> Made:
        """Calls the graph, within one that is traced.

        Args:
            trainable: weights in Keras's order.
            state: non-trainable ones, too.
            features: the matrix.
            training: whether layers behave as in training.
        """
        pieces = cut(features, self._widths)
        inputs = self._inputs(pieces)
        outputs, new_state = self._model.keras.stateless_call(trainable, state, inputs, training=training)
        self._tf.autograph.experimental.do_not_convert(rejoin)(features, pieces)
        return outputs, new_state

    def _inputs(self, parts: list["tf.Tensor"]) -> dict[str, Any]:
        """The graph's named inputs."""
        tf = self._tf
        schema = self._model.schema
        names = [one.name for one in [*schema.embedded, *schema.numerics]]
        by_name = dict(zip(names, parts, strict=False))
        for f, lengths in zip(self._sequences, parts[len(names) :], strict=True):
            one = schema.embedded[f]
            by_name[one.name] = tf.reshape(by_name[one.name], [-1, one.max_length, one.dim])
            by_name[f"{one.name}_mask"] = tf.sequence_mask(tf.cast(lengths[:, 0], tf.int32), one.max_length)
        return by_name

    def predictions(self, outputs: dict[str, Any]) -> "tf.Tensor":
        """The outputs as columns in the order of the labels; Keras gives them in an order of its own."""
        return self._tf.concat([outputs[label.name] for label in self._model.labels], 1)
