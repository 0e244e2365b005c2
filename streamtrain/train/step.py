"""Step: one call of the graph, forward and backward, over the rows that a batch pulled.

TensorFlow is loaded when a Step is made.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamtrain._core import Plan
from streamtrain.errors import ConfigError
from streamtrain.model.batch import Batch
from streamtrain.model.dense import describe_weights
from streamtrain.model.forward import Forward, Traced, differs_in_training, tensor_view
from streamtrain.model.model import Model, describe_failure, loss_function

if TYPE_CHECKING:
    import tensorflow as tf

Floats = NDArray[np.float32]


class StepResult(NamedTuple):
    """What one training step gives.

    Attributes:
        predictions: float32 [n, L], made before anything was learned from the batch.
        loss: the batch's loss, as reduced by the model.
        row_gradient: float32 [n, width or more], of the pooled rows; columns after these are those of other inputs.
        dense_gradient: float32 [P].
        statistics_change: float32 [S]. The gradients and this are read-only.
    """

    predictions: Floats
    loss: float
    row_gradient: Floats
    dense_gradient: Floats
    statistics_change: Floats


class Step:
    """The training and the prediction function of a model.

    Weights and statistics (non-trainable float weights, such as those of batch norm) come with every call, as one flat
    vector of *parameters*. The only state of a step are the graph's other non-trainable weights: the states of random
    generators, such as those of dropout, which are local to the process.

    Args:
        model: the model.

    Attributes:
        initial_dense: float32 [P], first values of the trainable weights.
        initial_statistics: float32 [S], those of the statistics.
        forward: calls the graph.
        differs: whether predictions need a separate forward pass, as a layer may behave differently in training.
        state: the states of the graph's random generators.
    """

    def __init__(self, model: Model) -> None:
        import tensorflow as tf

        self._tf = tf
        self._model = model
        self._layout = model.dense
        self._dense_size = len(self._layout)
        self.initial_dense, self.initial_statistics = model.initial_parameters()
        self._loss_shapes: dict[str, Any] = {}
        if "step" not in model.traced:
            model.traced["step"] = self._trace(Forward(model))
        self.forward, self.differs, self._train, self._predict = model.traced["step"]
        self.state: list[Any] = [tf.constant(w.numpy()) for w in self.forward.own]

    def _trace(self, forward: Forward) -> tuple[Forward, bool, Traced, Traced]:
        tf, self.forward, self.differs = self._tf, forward, differs_in_training(self._model.keras)
        parameters = tf.TensorSpec([self._dense_size + len(self._model.statistics)], tf.float32)
        state = [tf.TensorSpec(w.shape, w.dtype) for w in forward.own]
        features = tf.TensorSpec([None, forward.columns.width], tf.float32)
        targets = [tf.TensorSpec([None, len(self._model.labels)], tf.float32), tf.TensorSpec([None], tf.float32)]
        try:
            train = Traced(self._train_graph, [state, parameters, features, *targets])
            predict = Traced(self._predict_graph, [state, parameters, features])
        except Exception as exc:
            self._try_losses()
            raise ConfigError(describe_failure("graph", exc)) from exc
        for name, shape in self._loss_shapes.items():
            if shape.rank == 0 or (shape.rank is not None and shape[1:].num_elements() != 1):
                raise ConfigError(f"loss of {name!r} must return one value per sample, [batch], not {shape}")
        return forward, self.differs, train, predict

    def _try_losses(self) -> None:
        """Calls losses of the user by themselves: an error then names lines of their code, and not of a traced copy."""
        tf = self._tf
        for name, loss in self._model.losses.items():
            try:
                if callable(loss):
                    loss(tf.zeros([2, 1]), tf.fill([2, 1], 0.5))
            except Exception as exc:
                raise ConfigError(describe_failure(f"loss of {name!r}", exc)) from exc

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The states of the graph's random generators and counters, by their place in the graph."""
        labels = [label.name for label in self._model.labels]
        places = describe_weights(self._model.keras, labels, self.forward.own)
        return {f"{one.layer}/{one.name}": value.numpy() for one, value in zip(places, self.state, strict=True)}

    def set_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Replaces these states by those that `arrays` gave."""
        constant = self._tf.constant  # a checkpoint keeps a number as a list of one
        self.state = [constant(arrays[place].reshape(was.shape), was.dtype) for place, was in self.arrays().items()]

    def train(self, parameters: Floats, plan: Plan, rows: Floats, batch: Batch) -> StepResult:
        """Predicts a batch, then computes the gradients of its loss.

        Args:
            parameters: float32 [P + S], the flat dense parameters, then the statistics.
            plan: the batch's plan.
            rows: the plan's rows, flat.
            batch: the samples.
        """
        matrix = self.forward.matrix(plan, rows, batch)
        predictions, loss, row_gradient, changes, *self.state = self._train(
            *self.state, parameters, matrix, batch.labels, batch.weights
        )
        flat, cut = tensor_view(changes), self._dense_size
        return StepResult(predictions.numpy(), float(loss), tensor_view(row_gradient), flat[:cut], flat[cut:])

    def predict(self, parameters: Floats, plan: Plan, rows: Floats, batch: Batch) -> Floats:
        """Predicts a batch: float32 [n, L]. Arguments as for `train`."""
        matrix = self.forward.matrix(plan, rows, batch)
        predictions: Floats = self._predict(*self.state, parameters, matrix)[0].numpy()
        return predictions

    def _train_graph(
        self,
        own: list["tf.Tensor"],
        parameters: "tf.Tensor",
        features: "tf.Tensor",
        labels: "tf.Tensor",
        sample_weights: "tf.Tensor",
    ) -> Any:
        tf = self._tf
        weights, state = self.weights(parameters, own)
        outputs, new_state, penalties = self.forward.call(weights, state, features, training=True)
        samples = tf.cast(tf.maximum(tf.shape(labels)[0], 1), tf.float32)
        loss = self.loss(outputs, labels, sample_weights, penalties, samples)
        share = 1.0 / samples
        if self._model.reduction == "mean":
            loss *= share
        gradient, *gradients = tf.gradients(
            loss, [features, *weights], unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        if self._model.reduction == "row_sum":
            loss, gradients = loss * share, [one * share for one in gradients]
        own, new_statistics = self.forward.separate(new_state)
        flat = [tf.reshape(one, [-1]) for one in [*gradients, *new_statistics]]
        changes = tf.concat(flat, 0) if flat else tf.zeros([0])
        if new_statistics:
            changes -= tf.concat([tf.zeros([self._dense_size]), parameters[self._dense_size :]], 0)
        if self.differs:
            outputs, *_ = self.forward.call(weights, state, features, training=False)
        return self.forward.predictions(outputs), loss, gradient, changes, own

    def _predict_graph(self, own: list["tf.Tensor"], parameters: "tf.Tensor", features: "tf.Tensor") -> Any:
        weights, state = self.weights(parameters, own)
        outputs, *_ = self.forward.call(weights, state, features, training=False)
        return self.forward.predictions(outputs)

    def weights(self, parameters: "tf.Tensor", own: list["tf.Tensor"]) -> tuple[list[Any], list[Any]]:
        """Trainable weights, and all non-trainable ones."""
        pieces = (self._layout + self._model.statistics).split_tensor(parameters)
        count = len(self._layout.shapes)
        return pieces[:count], self.forward.merge(own, pieces[count:])

    def loss(
        self,
        outputs: dict[str, Any],
        labels: "tf.Tensor",
        weights: "tf.Tensor",
        penalties: list["tf.Tensor"],
        samples: "tf.Tensor",
    ) -> "tf.Tensor":
        """The sum over labels and samples, of samples that have the label, and the penalties for each sample."""
        tf = self._tf
        total = samples * tf.add_n([tf.cast(one, tf.float32) for one in penalties]) if penalties else tf.zeros([])
        for j, label in enumerate(self._model.labels):
            function = loss_function(self._model.losses[label.name])
            truth, weight = labels[:, j : j + 1], weights
            if label.optional:
                present = tf.logical_not(tf.math.is_nan(truth))
                truth = tf.where(present, truth, tf.zeros_like(truth))
                weight = weight * tf.cast(present[:, 0], tf.float32)
            per_sample = tf.convert_to_tensor(function(truth, outputs[label.name]))
            self._loss_shapes[label.name] = per_sample.shape
            per_sample = tf.cast(tf.reshape(per_sample, [-1]), tf.float32)
            total += self._model.loss_weights[label.name] * tf.reduce_sum(per_sample * weight)
        return total
