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
            moments = state[:, :dim], state[:, dim : 2 * dim]
            m, v, by = _adam(settings, *moments, t, gradient, squared=gradient * gradient)
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
    *,
    ratios: list["tf.Tensor"] | None = None,
    steps: "tf.Tensor | None" = None,
) -> tuple[list[Any], list[list[Any]]]:
    """Weights and slots after one update, or several at once.

    Several are about what they come to one after another: weights move by the sum of the gradients, slots decay as
    often, and the sum of the squares is the square of the sum, scaled to the norms of the gradients.

    Args:
        settings: the optimizer's, as the core has them.
        weights: by weight.
        slots: by slot, then by weight.
        t: number of the last update, from 1.
        gradients: by weight, added up over the updates.
        ratios: by weight, the squared norms of the gradients, added up, relative to that of their sum; None: 1.
        steps: number of updates; None: 1.
    """
    import tensorflow as tf

    count = 1.0 if steps is None else tf.cast(steps, tf.float32)
    squared = [g * g for g in gradients]
    if ratios is not None:
        squared = [one * ratio for one, ratio in zip(squared, ratios, strict=True)]
    rate = settings["rate"]
    match settings["optimizer"]:
        case "sgd":
            return [w - rate * g for w, g in zip(weights, gradients, strict=True)], []
        case "adagrad":
            decay, epsilon = _power(settings["decay"], count), settings["epsilon"]
            refill = (np.float32(1) - decay) * settings["initial_accumulator"]
            sums = [decay * a + (refill + s) for a, s in zip(slots[0], squared, strict=True)]
            moved = [w - rate * g / (tf.sqrt(a) + epsilon) for w, g, a in zip(weights, gradients, sums, strict=True)]
            return moved, [sums]
        case "adam":
            t = tf.minimum(t, _MOST_STEPS)
            done = [
                _adam(settings, m, v, t, g, squared=s, steps=count)
                for m, v, g, s in zip(*slots, gradients, squared, strict=True)
            ]
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


def _adam(
    settings: dict[str, Any], m: Any, v: Any, t: Any, gradient: Any, *, squared: Any, steps: Any = 1.0
) -> tuple[Any, Any, Any]:
    """Moments after so many updates, and by what the weights move."""
    import tensorflow as tf

    beta1, beta2 = (np.float32(settings[beta]) for beta in ("beta1", "beta2"))
    keep1, keep2 = _power(beta1, steps), _power(beta2, steps)
    # Without momentum m is never read; leaving it unchanged saves a third of the work.
    m = keep1 * m + (np.float32(1) - keep1) * (gradient / steps) if beta1 else m
    v = keep2 * v + (np.float32(1) - keep2) * (squared / steps)
    move = m * (steps * _correction(beta1, t)) if beta1 else gradient
    return m, v, settings["rate"] * move / (tf.sqrt(v * _correction(beta2, t)) + settings["epsilon"])


def _power(factor: float | np.float32, steps: Any) -> Any:
    """By what so many updates decay what one does by `factor`."""
    import tensorflow as tf

    one = np.float32(factor)
    return one if isinstance(steps, float) else tf.pow(one, steps)


def _correction(beta: np.float32, t: Any) -> Any:
    """1 / (1 - beta^t), without cancellation for beta near 1."""
    import tensorflow as tf

    if beta == 0:
        return tf.ones_like(t)
    return -1.0 / tf.math.expm1(t * np.float32(math.log(float(beta))))
