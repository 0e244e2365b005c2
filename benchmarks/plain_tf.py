"""Peers: plain TensorFlow in one process, with the whole vocabulary in a variable; and its dense part alone.

The fastest plain form: unique ids before the gather, one sparse Adagrad kernel on the table, one Adam kernel per
weight, all in one tf.function over ready tensors.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from workloads import Workload


class Network:
    """The dense layers of a workload, and their Adam.

    Args:
        workload: of which.
    """

    def __init__(self, workload: Workload) -> None:
        import tensorflow as tf

        sizes = [workload.ids * workload.dim + workload.numbers, *workload.hidden, 1]
        self.weights: list[Any] = []
        for i, (fan_in, fan_out) in enumerate(pairwise(sizes)):
            scale = (2.0 / fan_in) ** 0.5
            self.weights.append(tf.Variable(tf.random.stateless_normal([fan_in, fan_out], seed=[3, i]) * scale))
            self.weights.append(tf.Variable(tf.zeros([fan_out])))
        self._moments = [(tf.Variable(tf.zeros_like(w)), tf.Variable(tf.zeros_like(w))) for w in self.weights]
        self._powers = tf.Variable(1.0), tf.Variable(1.0)

    def gradients(self, rows: Any, flat: Callable[[Any], Any], numbers: Any, labels: Any) -> tuple[Any, Any, list[Any]]:
        """The loss, and its gradients by rows and by all weights; `flat` makes the first layer's input of rows."""
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(rows)
            x = tf.concat([flat(rows), numbers], 1)
            for i in range(0, len(self.weights), 2):
                x = tf.nn.bias_add(tf.matmul(x, self.weights[i]), self.weights[i + 1])
                x = tf.nn.relu(x) if i < len(self.weights) - 2 else x
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, x))
        gradient, *gradients = tape.gradient(loss, [rows, *self.weights])
        return loss, gradient, gradients

    def learn(self, gradients: list[Any]) -> None:
        """One step of Adam."""
        import tensorflow as tf

        power1, power2 = self._powers
        power1.assign(power1 * 0.9)
        power2.assign(power2 * 0.999)
        for weight, (m, v), g in zip(self.weights, self._moments, gradients, strict=True):
            tf.raw_ops.ResourceApplyAdam(
                var=weight.handle,
                m=m.handle,
                v=v.handle,
                beta1_power=power1,
                beta2_power=power2,
                lr=1e-3,
                beta1=0.9,
                beta2=0.999,
                epsilon=1e-7,
                grad=g,
            )


class PlainTensorFlow:
    """Trains a workload on the batches that `Workload.data` makes."""

    def __init__(self, workload: Workload, data: list[Any]) -> None:
        import tensorflow as tf

        self._tensors = [tuple(tf.constant(column) for column in batch) for batch in data]
        rows, dim = workload.ids * workload.vocabulary, workload.dim
        table = tf.Variable(tf.random.stateless_uniform([rows, dim], seed=[1, 2], minval=-0.05, maxval=0.05))
        accumulator = tf.Variable(tf.fill([rows, dim], 0.1))
        network = Network(workload)

        def train(ids: Any, numbers: Any, labels: Any) -> Any:
            unique, inverse = tf.unique(tf.reshape(ids, [-1]))

            def flat(pulled: Any) -> Any:
                return tf.reshape(tf.gather(pulled, inverse), [-1, workload.ids * dim])

            loss, gradient, gradients = network.gradients(tf.gather(table, unique), flat, numbers, labels)
            if isinstance(gradient, tf.IndexedSlices):
                gradient = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, tf.shape(unique)[0])
            tf.raw_ops.ResourceSparseApplyAdagradV2(
                var=table.handle, accum=accumulator.handle, lr=0.05, epsilon=1e-7, grad=gradient, indices=unique
            )
            network.learn(gradients)
            return loss

        self._train = tf.function(train)
        self._loss: Any = 0.0

    def step(self, k: int) -> None:
        """Trains on batch k."""
        self._loss = self._train(*self._tensors[k % len(self._tensors)])

    def finish(self) -> None:
        """Waits for the last step."""
        float(self._loss)


class DenseOnly:
    """The limit: what training would be if embeddings cost nothing. They are given, and their gradients thrown away."""

    def __init__(self, workload: Workload, batch: int) -> None:
        import tensorflow as tf

        (given,) = workload.data(batch, 1)
        _, numbers, labels = (tf.constant(column) for column in given)
        rows = tf.random.stateless_normal([batch, workload.ids * workload.dim], seed=[1, 2]) * 0.05
        network = Network(workload)

        def train(rows: Any, numbers: Any, labels: Any) -> Any:
            loss, gradient, gradients = network.gradients(rows, lambda given: given, numbers, labels)
            network.learn(gradients)
            return loss, gradient

        self._train, self._given, self._done = tf.function(train), (rows, numbers, labels), (0.0, None)

    def step(self) -> None:
        """Trains once more."""
        self._done = self._train(*self._given)

    def finish(self) -> None:
        """Waits for the last step."""
        float(self._done[0])
