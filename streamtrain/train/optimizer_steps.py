"""One step of every row and dense optimizer, in TensorFlow; tests compare them with the core's, which shards use."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import tensorflow as tf

_MOST_STEPS = 2.0**24  # up to which a float counts exactly


def step_rows(settings: dict[str, Any], rows: "tf.Tensor", gradient: "tf.Tensor") -> "tf.Tensor":
    """Rows with their state after one update.

    Args:
        settings: the table's settings, as the core has them.
        rows: float32 [n, dim + state].
        gradient: float32 [n, dim].
    """
    import tensorflow as tf

    dim = gradient.shape[1]
    w, state = rows[:, :dim], rows[:, dim:]
    rate = settings["rate"]
    match settings["optimizer"]:
        case "sgd":
            return w - rate * gradient
        case "adagrad":
            a = settings["decay"] * state + (_refill(settings) + gradient * gradient)
            return tf.concat([w - rate * gradient / (tf.sqrt(a) + settings["epsilon"]), a], 1)
        case "rowwise_adagrad":
            a = settings["decay"] * state + (_refill(settings) + tf.reduce_mean(gradient * gradient, 1, keepdims=True))
            return tf.concat([w - rate / (tf.sqrt(a) + settings["epsilon"]) * gradient, a], 1)
        case "adam":
            t = tf.minimum(state[:, 2 * dim :] + 1.0, _MOST_STEPS)
            m, v, by = _adam(settings, state[:, :dim], state[:, dim : 2 * dim], t, gradient)
            return tf.concat([w - by, m, v, t], 1)
        case "ftrl":
            z, n = state[:, :dim], state[:, dim:]
            after = n + gradient * gradient
            root = tf.sqrt(after)
            total = z + (gradient - (root - tf.sqrt(n)) / rate * w)
            excess = tf.abs(total) - settings["l1"]
            value = -tf.sign(total) * excess / ((settings["beta"] + root) / rate + settings["l2"])
            return tf.concat([tf.where(excess > 0, value, 0.0), total, after], 1)
        case other:
            raise AssertionError(other)


def step_dense(
    settings: dict[str, Any],
    weights: list["tf.Tensor"],
    slots: list[list["tf.Tensor"]],
    t: "tf.Tensor",
    gradients: list["tf.Tensor"],
) -> tuple[list[Any], list[list[Any]]]:
    """Weights and slots after the t-th update; slots are by slot, then by weight."""
    import tensorflow as tf

    rate = settings["rate"]
    match settings["optimizer"]:
        case "sgd":
            return [w - rate * g for w, g in zip(weights, gradients, strict=True)], []
        case "adagrad":
            decay, refill, epsilon = settings["decay"], _refill(settings), settings["epsilon"]
            sums = [decay * a + (refill + g * g) for a, g in zip(slots[0], gradients, strict=True)]
            moved = [w - rate * g / (tf.sqrt(a) + epsilon) for w, g, a in zip(weights, gradients, sums, strict=True)]
            return moved, [sums]
        case "adam":
            t = tf.minimum(t, _MOST_STEPS)
            done = [_adam(settings, m, v, t, g) for m, v, g in zip(*slots, gradients, strict=True)]
            moved = [w - by for w, (_, _, by) in zip(weights, done, strict=True)]
            return moved, [[m for m, _, _ in done], [v for _, v, _ in done]]
        case other:
            raise AssertionError(other)


def _refill(settings: dict[str, Any]) -> Any:
    """What Adagrad's accumulator gets back of its initial value in each update."""
    return (np.float32(1) - np.float32(settings["decay"])) * settings["initial_accumulator"]


def dense_decay(settings: dict[str, Any], steps: int) -> NDArray[np.float32]:
    """Factor by which `steps` steps decay each slot of the dense optimizer, float32 [slots]."""
    match settings["optimizer"]:
        case "sgd":
            return np.empty(0, np.float32)
        case "adagrad":
            return np.array([np.float32(settings["decay"]) ** steps], np.float32)
        case _:
            keeps = [float(np.float32(settings[beta])) for beta in ("beta1", "beta2")]
            keeps[0] = keeps[0] or 1.0  # without momentum its slot is left as it is, see _adam
            return np.array([keep**steps for keep in keeps], np.float32)


def _adam(settings: dict[str, Any], m: Any, v: Any, t: Any, gradient: Any) -> tuple[Any, Any, Any]:
    """Moments after an update, and by what the weights move."""
    import tensorflow as tf

    keep1, keep2 = (np.float32(settings[beta]) for beta in ("beta1", "beta2"))
    # Without momentum m is never read; leaving it unchanged saves a third of the work.
    m = keep1 * m + (np.float32(1) - keep1) * gradient if keep1 else m
    v = keep2 * v + (np.float32(1) - keep2) * (gradient * gradient)
    move = m * _correction(keep1, t) if keep1 else gradient
    return m, v, settings["rate"] * move / (tf.sqrt(v * _correction(keep2, t)) + settings["epsilon"])


def _correction(beta: np.float32, t: Any) -> Any:
    """1 / (1 - beta^t), without cancellation for beta near 1."""
    import tensorflow as tf

    if beta == 0:
        return tf.ones_like(t)
    return -1.0 / tf.math.expm1(t * np.float32(math.log(float(beta))))
