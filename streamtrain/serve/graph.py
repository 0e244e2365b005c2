"""Graph: a model's inference graph, called with the weights of any publication.

Weights come as tensors, one each, made once per publication: to cut them out of the flat vector in every call, as a
training step does, costs more than the rest of a small prediction. The graph is small, so it runs on the thread that
calls it; and it is not compiled by XLA, which was slower at 1 instance and no faster at 512 (benchmarks/serving.py).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from streamtrain._core import Plan
from streamtrain.model.batch import Batch
from streamtrain.model.forward import Forward, Traced
from streamtrain.model.model import Model
from streamtrain.store.publication import Floats, Weights

Tensors = list[Any]


class Graph:
    """The prediction function of a model, over any weights. Threads may share it.

    Args:
        model: whose graph it calls. TensorFlow is loaded.

    Attributes:
        columns: of the matrix that it takes.
    """

    def __init__(self, model: Model) -> None:
        import tensorflow as tf

        self._tf = tf
        self._model = model
        self._forward = Forward(model)
        self._own = [tf.constant(one.numpy()) for one in self._forward.own]
        keras = model.keras
        self._trainable = len(keras.trainable_variables)
        self.columns = self._forward.columns.width
        weights = [
            tf.TensorSpec(one.shape, one.dtype) for one in (*keras.trainable_variables, *keras.non_trainable_variables)
        ]
        matrix = tf.TensorSpec([None, self.columns], tf.float32)
        self._traced = Traced(self.function, [weights, matrix], executor_type="SINGLE_THREADED_EXECUTOR")

    def tensors(self, weights: Weights) -> Tensors:
        """The weights of a publication as the graph takes them."""
        constant = self._tf.constant
        trainable = [constant(one) for one in self._model.dense.split(weights.dense)]
        statistics = [constant(one) for one in self._model.statistics.split(weights.statistics)]
        return trainable + self._forward.merge(self._own, statistics)

    def run(self, tensors: Tensors, plan: Plan, rows: Floats, batch: Batch) -> Floats:
        """Predicts a batch: float32 [n, L].

        Args:
            tensors: what `tensors` gave.
            plan: the batch's plan.
            rows: the plan's rows, flat.
            batch: the samples.
        """
        matrix = self._forward.matrix(plan, rows, batch)
        predictions: Floats = self.call(tensors, matrix).numpy()
        return predictions

    def call(self, tensors: Tensors, matrix: Any) -> Any:
        """Predicts a batch as one matrix, float32 [n, columns]: a tensor [n, L]."""
        return self._traced(*tensors, matrix)[0]

    def warm(self, sizes: Sequence[int]) -> None:
        """Predicts batches of zeros of these sizes with the model's first weights, as a graph's first call is slow."""
        tensors = self.tensors(Weights(*self._model.initial_parameters()))
        for size in sizes:
            self.call(tensors, np.zeros((size, self.columns), np.float32))

    def function(self, tensors: Tensors, matrix: Any) -> Any:
        """What is traced: `call`, in TensorFlow's operations."""
        trainable, state = tensors[: self._trainable], tensors[self._trainable :]
        outputs, *_ = self._forward.call(trainable, state, matrix, training=False)
        return self._forward.predictions(outputs)
