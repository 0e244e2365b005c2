"""Peer: plain TensorFlow in one process, with the whole vocabulary in a variable.

The fastest plain form: unique ids before the gather, one sparse Adagrad kernel on the table, one Adam kernel per
weight, all in one tf.function over ready tensors.
"""

from itertools import pairwise
from typing import Any

from workloads import Workload


class PlainTensorFlow:
    """Trains a workload on the batches that `Workload.data` makes."""

    def __init__(self, workload: Workload, data: list[Any]) -> None:
        import tensorflow as tf

        self._tensors = [tuple(tf.constant(column) for column in batch) for batch in data]
        rows, dim = workload.ids * workload.vocabulary, workload.dim
        table = tf.Variable(tf.random.stateless_uniform([rows, dim], seed=[1, 2], minval=-0.05, maxval=0.05))
        accumulator = tf.Variable(tf.fill([rows, dim], 0.1))
        sizes = [workload.ids * dim + workload.numbers, *workload.hidden, 1]
        weights = []
        for i, (fan_in, fan_out) in enumerate(pairwise(sizes)):
            scale = (2.0 / fan_in) ** 0.5
            weights.append(tf.Variable(tf.random.stateless_normal([fan_in, fan_out], seed=[3, i]) * scale))
            weights.append(tf.Variable(tf.zeros([fan_out])))
        moments = [(tf.Variable(tf.zeros_like(w)), tf.Variable(tf.zeros_like(w))) for w in weights]
        power1, power2 = tf.Variable(1.0), tf.Variable(1.0)

        def forward(rows: Any, numbers: Any) -> Any:
            x = tf.concat([tf.reshape(rows, [-1, workload.ids * dim]), numbers], 1)
            for i in range(0, len(weights), 2):
                x = tf.nn.bias_add(tf.matmul(x, weights[i]), weights[i + 1])
                x = tf.nn.relu(x) if i < len(weights) - 2 else x
            return x

        def train(ids: Any, numbers: Any, labels: Any) -> Any:
            unique, inverse = tf.unique(tf.reshape(ids, [-1]))
            pulled = tf.gather(table, unique)
            with tf.GradientTape() as tape:
                tape.watch(pulled)
                logits = forward(tf.gather(pulled, inverse), numbers)
                loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))
            gradient, *gradients = tape.gradient(loss, [pulled, *weights])
            if isinstance(gradient, tf.IndexedSlices):
                gradient = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, tf.shape(unique)[0])
            tf.raw_ops.ResourceSparseApplyAdagradV2(
                var=table.handle, accum=accumulator.handle, lr=0.05, epsilon=1e-7, grad=gradient, indices=unique
            )
            power1.assign(power1 * 0.9)
            power2.assign(power2 * 0.999)
            for weight, (m, v), g in zip(weights, moments, gradients, strict=True):
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
            return loss

        self._train = tf.function(train)
        self._loss: Any = 0.0

    def step(self, k: int) -> None:
        """Trains on batch k."""
        self._loss = self._train(*self._tensors[k % len(self._tensors)])

    def finish(self) -> None:
        """Waits for the last step."""
        float(self._loss)
