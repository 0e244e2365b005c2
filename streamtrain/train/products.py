"""Products that weights are factors of, within a traced graph, and the gradients that come of them.

The gradient of a matrix of weights is the product of what it was multiplied with and of the gradients of the results.
Both are small, so those of several micro-batches are kept, and one product of all writes a large gradient once.
TensorFlow is imported by the functions.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from streamtrain.model.forward import rewire

if TYPE_CHECKING:
    import tensorflow as tf

_FEW = 8  # rows
_LEAST = 1e-30  # squared norm of a gradient
_ROUNDING = 1e-6  # of a squared norm that is added up from larger terms


class Product(NamedTuple):
    """A product: its left factor [n, in], and the result [n, out]."""

    left: Any
    result: Any


def products_of(weight: "tf.Tensor") -> list[Product]:
    """The products that a weight [in, out] is the right factor of, in a traced graph; none, if it is used otherwise."""
    users = weight.consumers()
    if not all(user.type == "MatMul" and user.inputs[1] is weight is not user.inputs[0] for user in users):
        return []
    if any(user.get_attr(name) for user in users for name in ("transpose_a", "transpose_b")):
        return []
    return [Product(user.inputs[0], user.outputs[0]) for user in users]


def factor_shapes(weight: "tf.Tensor") -> list[list[int]] | None:
    """Shapes of both factors of a weight's gradient, those of all its products together; None: they are not known."""
    products = products_of(weight)
    shapes = [one.shape for both in products for one in both]
    if not (shapes and all(shape.is_fully_defined() for shape in shapes)):
        return None
    return [[sum(one.shape[0] for one in side), side[0].shape[1]] for side in zip(*products, strict=True)]


def turn_products(weight: "tf.Tensor") -> list[Product]:
    """Has XLA take the gradients of products by the weight as it is; returns the products, which are others then.

    The gradient of what a weight was multiplied with is G · Wᵀ, for which XLA transposes the weight each time: that
    takes longer than a product of few rows. (W · Gᵀ)ᵀ transposes only what is small, and but for the barrier XLA would
    make G · Wᵀ of it. To be called after `products_of`, and before the gradients are taken.
    """
    import tensorflow as tf
    from tensorflow.compiler.tf2xla.python.xla import optimization_barrier

    def product(left: Any, right: Any) -> Any:
        def gradients(of: Any) -> Any:
            (turned,) = optimization_barrier(tf.matmul(right, of, transpose_b=True))
            return tf.transpose(turned), _gradient_of(left, of)

        return tf.matmul(left, right), gradients

    multiply = tf.custom_gradient(product)
    made = []
    for left, result in products_of(weight):
        made.append(Product(left, multiply(left, weight)))
        rewire(result, made[-1].result)
    return made


def _gradient_of(left: "tf.Tensor", result: "tf.Tensor") -> Any:
    """The gradient of a weight, leftᵀ · result; of few rows one by one, as what XLA fuses takes half as long."""
    import tensorflow as tf

    if left.shape[0] is None or left.shape[0] > _FEW:
        return tf.matmul(left, result, transpose_a=True)
    pairs = zip(tf.unstack(left), tf.unstack(result), strict=True)
    return tf.add_n([a[:, None] * b[None, :] for a, b in pairs])


def multiply_factors(left: "tf.Tensor", right: "tf.Tensor") -> tuple[Any, Any]:
    """The sum of the gradients of several micro-batches, and its `norm_ratio`.

    Args:
        left: [micro-batches, n, in], what the weight was multiplied with.
        right: [micro-batches, n, out], the gradients of the results.
    """
    import tensorflow as tf

    steps, rows, _ = left.shape
    flat = [tf.reshape(one, [steps * rows, -1]) for one in (left, right)]
    # The scalar products of what every two rows add to the gradient.
    pairs = tf.matmul(flat[0], flat[0], transpose_b=True) * tf.matmul(flat[1], flat[1], transpose_b=True)
    alike = np.kron(np.eye(steps), np.ones((rows, rows))).astype(np.float32)
    return tf.matmul(*flat, transpose_a=True), norm_ratio(tf.reduce_sum(pairs * alike), tf.reduce_sum(pairs))


def norm_ratio(of_each: Any, of_sum: Any) -> Any:
    """The squared norms of gradients, added up, relative to that of their sum."""
    import tensorflow as tf

    return of_each / tf.maximum(of_sum, tf.maximum(of_each * _ROUNDING, _LEAST))
