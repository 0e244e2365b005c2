"""Graph: a model's inference graph, called with the weights of any publication.

Weights come as tensors, one each, made once per publication: to cut them out of the flat vector in every call, as a
training step does, costs more than the rest of a small prediction. The graph is small, so it runs on the thread that
calls it; and it is not compiled by XLA, which was slower at 1 instance and no faster at 512 (benchmarks/serving.py).
"""

from typing import Any

from streamtrain._core import Plan
from streamtrain.model.batch import Batch
from streamtrain.model.model import Model
from streamtrain.store.origin import Floats, Weights
from streamtrain.train.step import Step

Tensors = list[Any]


class Graph(Step):
    """The prediction function of a model, over any weights. Threads may share it.

    Args:
        model: whose graph it calls. TensorFlow is loaded.
    """

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        tf = self._tf
        self._trainable = len(model.keras.trainable_variables)
        first = Weights(self.initial_dense, self.initial_statistics)
        matrix = tf.TensorSpec([None, self._columns.in_prediction], tf.float32)
        signature = [tf.TensorSpec(one.shape, one.dtype) for one in self.tensors(first)]
        self._function = tf.function(self._served_graph, input_signature=[signature, matrix]).get_concrete_function()
        self._captured = list(self._function.captured_inputs)
        self._dtypes = [output.dtype for output in self._function.outputs]

    def tensors(self, weights: Weights) -> Tensors:
        """The weights of a publication as the graph takes them."""
        tf = self._tf
        shared = iter(self._model.statistics.split(weights.statistics))
        own = iter(self.state)
        trainable = [tf.constant(one) for one in self._layout.split(weights.dense)]
        return trainable + [tf.constant(next(shared)) if is_shared else next(own) for is_shared in self._shared]

    def run(self, tensors: Tensors, plan: Plan, rows: Floats, batch: Batch) -> Floats:
        """Predicts a batch: float32 [n, L].

        Args:
            tensors: what `tensors` gave.
            plan: the batch's plan.
            rows: the plan's rows, flat.
            batch: the samples.
        """
        matrix = self._matrix(plan, rows, batch, self._columns.in_prediction)
        predictions: Floats = self.call(tensors, matrix).numpy()
        return predictions

    def call(self, tensors: Tensors, matrix: Any) -> Any:
        """Predicts a batch as one matrix, float32 [n, columns]: a tensor [n, L].

        An array is not made a tensor before: TensorFlow's core does so in a fifth of the time that its Python takes.
        """
        return self._tf.raw_ops.StatefulPartitionedCall(
            args=[*tensors, matrix, *self._captured],
            Tout=self._dtypes,
            f=self._function,
            executor_type="SINGLE_THREADED_EXECUTOR",
        )[0]

    def _served_graph(self, tensors: Tensors, matrix: Any) -> Any:
        rows, numeric, lengths = self._tf.split(matrix, self._columns.sizes[:3], axis=1)
        pieces, state = tensors[: self._trainable], tensors[self._trainable :]
        outputs, _ = self._call(pieces, state, rows, numeric, lengths, training=False)
        return self._predictions(outputs)
