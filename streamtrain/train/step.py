"""Step: one call of the graph, forward and backward, over the rows that a batch pulled.

TensorFlow is loaded when a Step is made.
"""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamtrain._core import Plan
from streamtrain.errors import ConfigError
from streamtrain.model.batch import Batch
from streamtrain.model.model import Model

if TYPE_CHECKING:
    import tensorflow as tf

Floats = NDArray[np.float32]


class StepResult(NamedTuple):
    """What one training step gives.

    Attributes:
        predictions: float32 [n, L], made before anything was learned from the batch.
        loss: the batch's loss, as reduced by the model.
        row_gradient: float32 [n, width], of the pooled rows.
        dense_gradient: float32 [P].
        statistics_change: float32 [S].
    """

    predictions: Floats
    loss: float
    row_gradient: Floats
    dense_gradient: Floats
    statistics_change: Floats


class _Columns(NamedTuple):
    """First column of each part of a batch's matrix; pooled rows are in front."""

    numeric: int
    lengths: int
    labels: int
    weight: int

    @classmethod
    def of(cls, model: Model) -> "_Columns":
        numeric = model.planner(1).width
        lengths = numeric + len(model.schema.numerics)
        labels = lengths + sum(one.combiner is None for one in model.schema.embedded)
        return cls(numeric, lengths, labels, labels + len(model.labels))

    @property
    def in_training(self) -> int:
        return self.weight + 1

    @property
    def in_prediction(self) -> int:
        return self.labels

    @property
    def sizes(self) -> list[int]:
        bounds = [0, *self, self.in_training]
        return [stop - start for start, stop in pairwise(bounds)]


class _Traced:
    """A traced graph, called as one operation.

    Calling the function that TensorFlow made of the graph would bind, check and cast each argument in Python, every
    time: two thirds of a small step. The arguments are always those that it was traced with, so nothing is lost.
    """

    def __init__(self, tf: Any, graph: Callable[..., Any], signature: list[Any]) -> None:
        self._tf = tf
        self._function = tf.function(graph, input_signature=signature).get_concrete_function()
        self._captured = list(self._function.captured_inputs)
        self._dtypes = [output.dtype for output in self._function.outputs]

    def __call__(self, *args: Any) -> list[Any]:
        tensors = [self._tf.convert_to_tensor(one) for one in args]
        outputs: list[Any] = self._tf.raw_ops.StatefulPartitionedCall(
            args=tensors + self._captured, Tout=self._dtypes, f=self._function
        )
        return outputs


class Step:
    """The training and the prediction function of a model.

    Weights and statistics (non-trainable float weights, such as those of batch norm) come with every call, as one flat
    vector of *parameters*. What a step holds itself, and nothing else that changes, are the graph's other non-trainable
    weights: the states of random generators, as of dropout, which concern nobody else.

    Args:
        model: whose graph it calls.

    Attributes:
        initial_dense: float32 [P], first values of the trainable weights.
        initial_statistics: float32 [S], those of the statistics.
    """

    def __init__(self, model: Model) -> None:
        import tensorflow as tf

        self._tf = tf
        self._model = model
        self._layout = model.dense
        self._dense_size = len(self._layout)
        self._sequences = [f for f, one in enumerate(model.schema.embedded) if one.combiner is None]
        self.initial_dense = self._layout.flatten([w.numpy() for w in model.keras.trainable_variables])
        self.initial_statistics = model.statistics.flatten([w.numpy() for w in model.statistics_variables])
        self._shared = [w.dtype == "float32" for w in model.keras.non_trainable_variables]
        self._own = [
            w for w, shared in zip(model.keras.non_trainable_variables, self._shared, strict=True) if not shared
        ]
        self.state: list[Any] = [tf.constant(w.numpy()) for w in self._own]
        self._differs = _differs_in_training(model.keras)
        self._columns = _Columns.of(model)
        self._loss_shapes: dict[str, Any] = {}
        parameters = tf.TensorSpec([self._dense_size + len(model.statistics)], tf.float32)
        state = [tf.TensorSpec(w.shape, w.dtype) for w in self.state]
        self._train, self._predict = (
            _Traced(tf, graph, [state, parameters, tf.TensorSpec([None, columns], tf.float32)])
            for graph, columns in (
                (self._train_graph, self._columns.in_training),
                (self._predict_graph, self._columns.in_prediction),
            )
        )
        for name, shape in self._loss_shapes.items():
            if shape.rank == 0 or (shape.rank is not None and shape[1:].num_elements() != 1):
                raise ConfigError(f"loss of {name!r} must return one value per sample, [batch], not {shape}")

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The states of the graph's random generators by path."""
        return {variable.path: value.numpy() for variable, value in zip(self._own, self.state, strict=True)}

    def set_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Replaces the states of the graph's random generators by those that `arrays` gave."""
        self.state = [self._tf.constant(arrays[v.path], v.dtype) for v in self._own]

    def train(self, parameters: Floats, plan: Plan, rows: Floats, batch: Batch) -> StepResult:
        """Predicts a batch, then computes the gradients of its loss.

        Args:
            parameters: float32 [P + S], the flat dense parameters, then the statistics.
            plan: the batch's plan.
            rows: the plan's rows, flat.
            batch: the samples.
        """
        columns = self._columns
        matrix = self._matrix(plan, rows, batch, columns.in_training)
        matrix[:, columns.labels : columns.weight] = batch.labels
        matrix[:, columns.weight] = batch.weights
        predictions, loss, row_gradient, changes, *self.state = self._train(*self.state, parameters, matrix)
        flat, cut = changes.numpy(), self._dense_size
        return StepResult(predictions.numpy(), float(loss), row_gradient.numpy(), flat[:cut], flat[cut:])

    def predict(self, parameters: Floats, plan: Plan, rows: Floats, batch: Batch) -> Floats:
        """Predicts a batch: float32 [n, L]. Arguments as for `train`."""
        matrix = self._matrix(plan, rows, batch, self._columns.in_prediction)
        predictions: Floats = self._predict(*self.state, parameters, matrix)[0].numpy()
        return predictions

    def _matrix(self, plan: Plan, rows: Floats, batch: Batch, columns: int) -> Floats:
        """Everything that the graph needs of a batch as one matrix: each argument of a function has its price.

        Columns: pooled rows, numeric features, lengths of sequences; in training then labels and weight.
        """
        at = self._columns
        matrix = plan.pool(rows, columns - at.numeric)
        matrix[:, at.numeric : at.lengths] = batch.numeric
        for column, feature in enumerate(self._sequences, at.lengths):
            matrix[:, column] = np.diff(batch.offsets[feature])
        return matrix

    def _train_graph(self, state: list["tf.Tensor"], parameters: "tf.Tensor", matrix: "tf.Tensor") -> Any:
        tf, at = self._tf, self._columns
        dense, statistics = tf.split(parameters, [self._dense_size, len(self._model.statistics)])
        pieces, state = self._layout.split_tensor(dense), self._merge(state, statistics)
        rows, numeric, lengths, labels, weights = tf.split(matrix, at.sizes, axis=1)
        with tf.GradientTape() as tape:
            tape.watch([rows, pieces])
            outputs, new_state = self._call(pieces, state, rows, numeric, lengths, training=True)
            loss = self._loss(outputs, labels, weights[:, 0])
        row_gradient, gradients = tape.gradient(
            loss, [rows, pieces], unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        own, new_statistics = self._separate(new_state)
        flat = [tf.reshape(one, [-1]) for one in [*gradients, *new_statistics]]
        changes = tf.concat(flat, 0) if flat else tf.zeros([0])
        if new_statistics:
            changes -= tf.concat([tf.zeros([self._dense_size]), statistics], 0)
        if self._differs:
            outputs, _ = self._call(pieces, state, rows, numeric, lengths, training=False)
        return self._predictions(outputs), loss, row_gradient, changes, own

    def _predict_graph(self, state: list["tf.Tensor"], parameters: "tf.Tensor", matrix: "tf.Tensor") -> Any:
        tf, at = self._tf, self._columns
        dense, statistics = tf.split(parameters, [self._dense_size, len(self._model.statistics)])
        pieces, state = self._layout.split_tensor(dense), self._merge(state, statistics)
        rows, numeric, lengths = tf.split(matrix, at.sizes[:3], axis=1)
        outputs, _ = self._call(pieces, state, rows, numeric, lengths, training=False)
        return self._predictions(outputs)

    def _merge(self, own: list["tf.Tensor"], statistics: "tf.Tensor") -> list[Any]:
        """All non-trainable weights in Keras's order."""
        own_ones, shared_ones = iter(own), iter(self._model.statistics.split_tensor(statistics))
        return [next(shared_ones if shared else own_ones) for shared in self._shared]

    def _separate(self, state: list[Any]) -> tuple[list[Any], list[Any]]:
        """The states of random generators, and the statistics."""
        by_kind: tuple[list[Any], list[Any]] = ([], [])
        for one, shared in zip(state, self._shared, strict=True):
            by_kind[shared].append(one)
        return by_kind

    def _call(
        self,
        pieces: list["tf.Tensor"],
        state: list["tf.Tensor"],
        rows: "tf.Tensor",
        numeric: "tf.Tensor",
        lengths: "tf.Tensor",
        *,
        training: bool,
    ) -> tuple[dict[str, Any], list[Any]]:
        inputs = self._inputs(rows, numeric, lengths)
        outputs, new_state = self._model.keras.stateless_call(pieces, state, inputs, training=training)
        return outputs, new_state

    def _inputs(self, rows: "tf.Tensor", numeric: "tf.Tensor", lengths: "tf.Tensor") -> dict[str, Any]:
        """Cuts the columns into the graph's named inputs."""
        tf = self._tf
        schema = self._model.schema
        widths = [one.dim * (one.max_length or 1 if one.combiner is None else 1) for one in schema.embedded]
        parts = [*tf.split(rows, widths, axis=1)] if widths else []
        parts += [numeric[:, i : i + 1] for i in range(len(schema.numerics))]
        by_name = dict(zip([one.name for one in [*schema.embedded, *schema.numerics]], parts, strict=True))
        for i, f in enumerate(self._sequences):
            one = schema.embedded[f]
            by_name[one.name] = tf.reshape(by_name[one.name], [-1, one.max_length, one.dim])
            by_name[f"{one.name}_mask"] = tf.sequence_mask(tf.cast(lengths[:, i], tf.int32), one.max_length)
        return by_name

    def _predictions(self, outputs: dict[str, Any]) -> "tf.Tensor":
        """The outputs as columns in the order of the labels; Keras gives them in an order of its own."""
        return self._tf.concat([outputs[label.name] for label in self._model.labels], 1)

    def _loss(self, outputs: dict[str, Any], labels: "tf.Tensor", weights: "tf.Tensor") -> "tf.Tensor":
        """The sum over labels and samples, of samples that have the label; divided by n where the model says mean."""
        import keras

        tf = self._tf
        total = tf.zeros([])
        for j, label in enumerate(self._model.labels):
            loss = self._model.losses[label.name]
            function = loss if callable(loss) else getattr(keras.losses, loss)
            truth, weight = labels[:, j : j + 1], weights
            if label.optional:
                present = tf.logical_not(tf.math.is_nan(truth))
                truth = tf.where(present, truth, tf.zeros_like(truth))
                weight = weight * tf.cast(present[:, 0], tf.float32)
            per_sample = tf.convert_to_tensor(function(truth, outputs[label.name]))
            self._loss_shapes[label.name] = per_sample.shape
            per_sample = tf.reshape(per_sample, [-1])
            total += self._model.loss_weights[label.name] * tf.reduce_sum(per_sample * weight)
        if self._model.reduction == "mean":
            total /= tf.cast(tf.maximum(tf.shape(labels)[0], 1), tf.float32)
        return total


def _differs_in_training(model: Any) -> bool:
    """Whether a layer may behave differently in training: then predicting needs a forward pass of its own."""
    import keras

    layers = model._flatten_layers(include_self=False)
    return any(layer._call_has_training_arg for layer in layers if not isinstance(layer, keras.Model))
