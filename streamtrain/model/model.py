"""Model: a schema, a Keras graph over its features, a loss and the optimizers.

The graph never holds a table: it sees the rows that a batch pulled, so one Keras model is the training graph and the
inference graph, and no vocabulary size exists anywhere.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from streamtrain._core import Planner
from streamtrain.errors import ConfigError
from streamtrain.model.dense import DenseLayout
from streamtrain.model.features import Label, LabelKind, Numeric, is_number
from streamtrain.model.optimizers import Adagrad, Adam, Optimizer
from streamtrain.model.sampling import Sampling
from streamtrain.model.schema import Schema

if TYPE_CHECKING:
    import keras

Loss = str | Callable[[Any, Any], Any]

# What each loss needs of its label. A loss that is not listed may be given as a callable.
LOSSES: dict[str, LabelKind] = {
    "binary_crossentropy": "binary",
    "mean_squared_error": "real",
    "mean_absolute_error": "real",
    "huber": "real",
    "poisson": "count",
}


class Model:
    """What is learned.

    Args:
        schema: the fields of a sample and the features made of them.
        graph: called once with {feature name: Keras tensor}; returns the prediction `[batch, 1]`, or for several labels
            a mapping from label name to it.
        loss: one of "binary_crossentropy" (the graph ends in a sigmoid), "mean_squared_error", "mean_absolute_error",
            "huber", "poisson", or a callable of (labels [batch, 1], predictions [batch, 1]) that returns `[batch]`.
            For several labels a mapping from label name to loss, or one loss for all.
        embedding_optimizer: for the rows of all tables that name none of their own.
        dense_optimizer: for the weights of the graph: SGD, Adagrad or Adam.
        name: the name under which it is served.
        reduction: "mean" divides a batch's loss by its number of samples, "sum" does not, so that a sample's gradient
            is the same in any batch.
        loss_weights: factor of each label's loss; default 1.
        seed: of birth values and of the graph's initial weights. Building the graph sets Keras's and TensorFlow's
            global seed to it.
        keep: share of the samples that is learned from, by label, such as {0: 0.1} for a tenth of the negatives;
            predictions are corrected for it. For one label, with the loss "binary_crossentropy". Default: all.

    Raises:
        ConfigError: an option is wrong; the message names it. Errors of the graph show when it is first built.
    """

    def __init__(
        self,
        schema: Schema,
        graph: Callable[[dict[str, Any]], Any],
        *,
        loss: Loss | Mapping[str, Loss] = "binary_crossentropy",
        embedding_optimizer: Optimizer | None = None,
        dense_optimizer: Optimizer | None = None,
        name: str = "model",
        reduction: Literal["mean", "sum"] = "mean",
        loss_weights: Mapping[str, float] | None = None,
        seed: int = 0,
        keep: Mapping[int, float] | None = None,
    ) -> None:
        self.schema = schema
        self.graph = graph
        self.embedding_optimizer = Adagrad() if embedding_optimizer is None else embedding_optimizer
        self.dense_optimizer = Adam() if dense_optimizer is None else dense_optimizer
        self.name = name
        self.reduction = reduction
        self.seed = seed
        self._check_options()
        names = [label.name for label in schema.labels]
        self.losses = _per_label("loss", loss, names)
        self.loss_weights = _per_label("loss_weights", 1.0 if loss_weights is None else {**loss_weights}, names)
        for label, factor in self.loss_weights.items():
            if not is_number(factor) or not math.isfinite(factor):
                raise ConfigError(f"loss_weights: the one of {label!r} must be a finite number, not {factor!r}")
        self.labels = tuple(_resolve(label, self.losses[label.name]) for label in schema.labels)
        self.sampling = None if keep is None else Sampling(keep)
        if self.sampling and [*self.losses.values()] != ["binary_crossentropy"]:
            raise ConfigError('keep is for models of one label with the loss "binary_crossentropy"')

    def _check_options(self) -> None:
        if not isinstance(self.schema, Schema):
            raise ConfigError(f"schema must be a Schema, not {self.schema!r}")
        if not callable(self.graph):
            raise ConfigError(f"graph must be a function of {{feature name: Keras tensor}}, not {self.graph!r}")
        if not isinstance(self.embedding_optimizer, Optimizer):
            raise ConfigError(f"embedding_optimizer must be an optimizer, not {self.embedding_optimizer!r}")
        if not isinstance(self.dense_optimizer, Optimizer) or not self.dense_optimizer.for_dense:
            raise ConfigError(f"dense_optimizer must be SGD, Adagrad or Adam, not {self.dense_optimizer!r}")
        if self.reduction not in ("mean", "sum"):
            raise ConfigError(f'reduction must be "mean" or "sum", not {self.reduction!r}')
        if not isinstance(self.name, str) or not self.name.replace("-", "").replace("_", "").isalnum():
            raise ConfigError(f"name must consist of letters, digits, - and _, not {self.name!r}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ConfigError(f"seed must be an integer, not {self.seed!r}")

    @cached_property
    def keras(self) -> keras.Model:
        """The Keras model over the features; built, with TensorFlow loaded, on first use.

        Raises:
            ConfigError: the graph's output does not fit the labels.
        """
        import keras

        if keras.backend.backend() != "tensorflow":
            raise ConfigError(f"Keras runs on {keras.backend.backend()!r}; set KERAS_BACKEND=tensorflow")
        states = random.getstate(), np.random.get_state()
        keras.utils.set_random_seed(self.seed % 2**32)
        try:
            inputs = {
                name: keras.Input(shape, dtype=dtype, name=name) for name, (shape, dtype) in self._inputs().items()
            }
            outputs = self.graph(dict(inputs))
        except Exception as exc:
            raise ConfigError(f"graph fails with {type(exc).__name__}: {exc}") from exc
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
        return keras.Model(inputs, self._outputs(outputs), name=self.name)

    def _inputs(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape without the batch and dtype of every input, in the order of the features."""
        inputs: dict[str, tuple[tuple[int, ...], str]] = {}
        for one in self.schema.features:
            if isinstance(one, Numeric):
                inputs[one.name] = ((1,), "float32")
            elif one.combiner is None:
                assert one.max_length is not None
                inputs[one.name] = ((one.max_length, one.dim), "float32")
                inputs[f"{one.name}_mask"] = ((one.max_length,), "bool")
            else:
                inputs[one.name] = ((one.dim,), "float32")
        return inputs

    def _outputs(self, outputs: Any) -> dict[str, Any]:
        names = [label.name for label in self.labels]
        if not isinstance(outputs, Mapping):
            listed = list(outputs) if isinstance(outputs, Sequence) else [outputs]
            if len(listed) != len(names):
                raise ConfigError(f"graph returns {len(listed)} outputs for the labels {names}")
            outputs = dict(zip(names, listed, strict=True))
        if set(outputs) != set(names):
            raise ConfigError(f"graph returns outputs named {sorted(outputs)}, but the labels are {names}")
        for name, output in outputs.items():
            if tuple(getattr(output, "shape", ())) != (None, 1):
                shape = getattr(output, "shape", None)
                raise ConfigError(
                    f"graph: the output for {name!r} must be a Keras tensor [batch, 1], not of shape {shape}"
                )
        return {name: outputs[name] for name in names}

    @cached_property
    def dense(self) -> DenseLayout:
        """The layout of the graph's trainable weights in the flat dense vector."""
        weights = self.keras.trainable_variables
        for weight in weights:
            if weight.dtype != "float32":
                raise ConfigError(f"graph: weight {weight.path!r} is {weight.dtype}; trainable weights must be float32")
        return DenseLayout(tuple(w.path for w in weights), tuple(tuple(w.shape) for w in weights))

    @cached_property
    def statistics_variables(self) -> list[Any]:
        """The graph's non-trainable float weights, which layers such as batch norm keep."""
        return [w for w in self.keras.non_trainable_variables if w.dtype == "float32"]

    @cached_property
    def statistics(self) -> DenseLayout:
        """The layout of the graph's non-trainable float weights in the flat vector of statistics."""
        weights = self.statistics_variables
        return DenseLayout(tuple(w.path for w in weights), tuple(tuple(w.shape) for w in weights))

    def planner(self, shards: int) -> Planner:
        """A planner of batches for tables that are split over `shards` shards."""
        index = {table.name: i for i, table in enumerate(self.schema.tables)}
        return Planner(
            [(index[one.table_name], one.combiner or "none", one.max_length or 0) for one in self.schema.embedded],
            [table.dim for table in self.schema.tables],
            shards,
        )


def _per_label(option: str, given: Any, names: list[str]) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        return dict.fromkeys(names, given)
    for name in given:
        if name not in names:
            raise ConfigError(f"{option} names {name!r}, which is no label; labels are {names}")
    if option == "loss":
        for name in names:
            if name not in given:
                raise ConfigError(f"loss has none for label {name!r}")
    return {name: given.get(name, 1.0) for name in names}


def _resolve(label: Label, loss: Loss) -> Label:
    if callable(loss):
        return Label(label.name, kind=label.kind or "real", optional=label.optional)
    if not isinstance(loss, str) or loss not in LOSSES:
        raise ConfigError(f"loss must be one of {', '.join(LOSSES)} or a callable, not {loss!r}")
    if label.kind not in (None, LOSSES[loss]):
        raise ConfigError(f"label {label.name!r} is {label.kind}, but loss {loss!r} needs it to be {LOSSES[loss]}")
    return Label(label.name, kind=LOSSES[loss], optional=label.optional)
