"""Forward: how a model's Keras graph is called, in training and in serving, on the matrix of a batch.

TensorFlow is imported when a Forward is created. This module uses private APIs of TensorFlow and Keras (`rewire`,
`differs_in_training`, `_Trial`), as `turn_products` does; pyproject.toml bounds their versions for that.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamtrain._core import Plan
from streamtrain.errors import ConfigError
from streamtrain.model.batch import Batch
from streamtrain.model.features import Numeric
from streamtrain.model.model import Model, describe_failure, loss_function

if TYPE_CHECKING:
    import tensorflow as tf

logger = logging.getLogger(__name__)


def split_columns(columns: "tf.Tensor", widths: list[int]) -> list["tf.Tensor"]:
    """Splits columns [n, sum of widths] in one operation, as each operation has a fixed cost."""
    import tensorflow as tf

    return [*tf.split(columns, widths, axis=1)] if widths else []


def fuse_concats(columns: "tf.Tensor", pieces: Sequence["tf.Tensor"]) -> None:
    """Replaces concatenations of pieces, for all that uses them so far.

    To be called after the graph that uses them is traced, and before its gradients are: those of a tape would still go
    through the concatenation.

    Args:
        columns: the matrix that was split.
        pieces: its columns from `split_columns`.
    """
    bounds, at = {}, 0
    for piece in pieces:
        bounds[piece.ref()] = (at, at := at + piece.shape[1])
    users = {id(user): user for piece in pieces for user in piece.consumers()}
    for user in users.values():
        if (span := _span(user, bounds)) is None:
            continue
        with user.graph.as_default():
            whole = columns if span == (0, at) else columns[:, slice(*span)]
        rewire(user.outputs[0], whole)


def _span(operation: Any, bounds: dict[Any, tuple[int, int]]) -> tuple[int, int] | None:
    """First and last column of what an operation concatenates; None: it does something else, or has others too."""
    import tensorflow as tf

    if operation.type != "ConcatV2":
        return None
    *parts, axis = operation.inputs
    spans = [bounds.get(part.ref()) for part in parts]
    if None in spans or tf.get_static_value(axis) not in (1, -1):
        return None
    known = [one for one in spans if one is not None]
    return None if any(a[1] != b[0] for a, b in pairwise(known)) else (known[0][0], known[-1][1])


def rewire(tensor: "tf.Tensor", other: "tf.Tensor") -> None:
    """Rewires all consumers of a tensor to another one. TensorFlow has no public API for it."""
    for operation in tensor.consumers():
        for i, operand in enumerate(operation.inputs):
            if operand is tensor:
                operation._update_input(i, other)


def differs_in_training(model: Any) -> bool:
    """Whether a layer of a Keras model may behave differently in training. Keras has no public API for it."""
    import keras

    layers = model._flatten_layers(include_self=False)
    return any(layer._call_has_training_arg for layer in layers if not isinstance(layer, keras.Model))


def tensor_view(tensor: "tf.Tensor") -> NDArray[np.float32]:
    """A read-only view of a tensor's values: `numpy()` would copy them, and these are large."""
    return np.asarray(memoryview(tensor))


Floats = NDArray[np.float32]


class Made(NamedTuple):
    """What a call of a graph gives.

    Attributes:
        outputs: predictions [n, 1] by label.
        state: non-trainable weights after it.
        penalties: what its layers add to the mean loss, such as regularizers; in training only.
    """

    outputs: dict[str, Any]
    state: list[Any]
    penalties: list[Any]


class MatrixColumns(NamedTuple):
    """First column of each part of a batch's matrix, and their number; pooled rows are in front."""

    numeric: int
    lengths: int
    width: int

    @classmethod
    def of(cls, model: Model) -> "MatrixColumns":
        """Those of a model."""
        numeric = model.planner(1).width
        lengths = numeric + len(model.schema.numerics)
        return cls(numeric, lengths, lengths + sum(one.combiner is None for one in model.schema.embedded))


class Traced:
    """A traced graph, called as one operation.

    Calling the function that TensorFlow made of the graph would bind, check and cast each argument in Python, every
    time: two thirds of a small step. The arguments are always those that it was traced with, so nothing is lost.

    Args:
        graph: function to trace.
        signature: its arguments; those in a list are given one by one when it is called.
        xla: whether XLA compiles it, at the first call.
        options: attributes of the call's operation.
    """

    def __init__(self, graph: Callable[..., Any], signature: list[Any], *, xla: bool = False, **options: Any) -> None:
        import tensorflow as tf

        if xla:  # within a function around it: the operation alone does not say that what it calls is to be compiled
            compiled = tf.function(graph, jit_compile=True, autograph=False)
            graph = lambda *args: compiled(*args)  # noqa: E731, PLW0108  # a function, which `compiled` is not
            as_it_is = tf.compat.v1.ConfigProto()  # XLA optimizes it; doing so before takes a tenth of a second
            as_it_is.graph_options.rewrite_options.disable_meta_optimizer = True
            options["config_proto"] = as_it_is.SerializeToString()
        function = tf.function(graph, input_signature=signature, autograph=False).get_concrete_function()
        self._captured = list(function.captured_inputs)
        self._call = tf.raw_ops.StatefulPartitionedCall
        self._options = {"Tout": [output.dtype for output in function.outputs], "f": function, **options}

    def __call__(self, *args: Any) -> list[Any]:
        """The outputs as tensors.

        An array is not made a tensor before: TensorFlow's core does so in a fifth of the time that its Python takes.
        """
        outputs: list[Any] = self._call(args=[*args, *self._captured], **self._options)
        return outputs


class Forward:
    """A model's Keras graph as a function of the batch's matrix and of weights that come with every call.

    Args:
        model: the model.

    Attributes:
        columns: layout of the matrix.
        own: non-trainable weights other than statistics: the states of random generators, such as those of dropout.

    Raises:
        ConfigError: see `check_blank_samples`.
    """

    def __init__(self, model: Model) -> None:
        import tensorflow as tf

        check_blank_samples(model)
        self._tf = tf
        self._model = model
        self._sequences = [f for f, one in enumerate(model.schema.embedded) if one.combiner is None]
        self.columns = MatrixColumns.of(model)
        pooled = [one.dim * (one.max_length or 1 if one.combiner is None else 1) for one in model.schema.embedded]
        self._widths = pooled + [1] * (self.columns.width - self.columns.numeric)  # numeric features, lengths
        state = model.keras.non_trainable_variables
        constants = {id(one) for one in model.constants}
        self._kinds = [2 if id(one) in constants else int(one.dtype == "float32") for one in state]
        self.own = [one for one, kind in zip(state, self._kinds, strict=True) if kind == 0]
        # Tensors, which a graph takes from around it: as values in it they would be copied, and compiled.
        self._constants = [tf.convert_to_tensor(one.value) for one in model.constants]

    def merge(self, own: list[Any], statistics: list[Any]) -> list[Any]:
        """All non-trainable weights in Keras's order."""
        kinds = iter(own), iter(statistics), iter(self._constants)
        return [next(kinds[kind]) for kind in self._kinds]

    def separate(self, state: list[Any]) -> tuple[list[Any], list[Any]]:
        """The states of random generators, and the statistics; what `merge` put together, without the constants."""
        by_kind: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
        for one, kind in zip(state, self._kinds, strict=True):
            by_kind[kind].append(one)
        return by_kind[:2]

    def matrix(self, plan: Plan, rows: Floats, batch: Batch) -> Floats:
        """All inputs of the graph for a batch, as one matrix: each argument of a function has a fixed cost.

        Args:
            plan: the batch's plan.
            rows: the plan's rows, flat.
            batch: the samples.

        Returns:
            float32 [n, width]: pooled rows, numeric features, lengths of sequences.
        """
        at = self.columns
        matrix = plan.pool(rows, at.width - at.numeric)
        self.set_numbers(batch, matrix[:, at.numeric :])
        return matrix

    def set_numbers(self, batch: Batch, out: Floats) -> None:
        """Writes what of the matrix comes from no row: numeric features, lengths of sequences."""
        count = self.columns.lengths - self.columns.numeric
        out[:, :count] = batch.numeric
        for column, feature in enumerate(self._sequences, count):
            out[:, column] = np.diff(batch.offsets[feature])

    def call(
        self,
        trainable: list["tf.Tensor"],
        state: list["tf.Tensor"],
        features: "tf.Tensor",
        *,
        training: bool,
    ) -> Made:
        """Calls the graph, within one that is traced.

        Args:
            trainable: weights in Keras's order.
            state: non-trainable ones, too.
            features: the matrix; see `matrix`.
            training: whether layers behave as in training.
        """
        pieces = split_columns(features, self._widths)
        outputs, new_state, *rest = self._model.keras.stateless_call(
            trainable, state, self._inputs(pieces), training=training, return_losses=training
        )
        fuse_concats(features, pieces)
        return Made(outputs, new_state, rest[0] if training else [])

    def _inputs(self, parts: list["tf.Tensor"]) -> dict[str, Any]:
        """The graph's named inputs."""
        tf = self._tf
        schema = self._model.schema
        names = [one.name for one in [*schema.embedded, *schema.numerics]]
        by_name = dict(zip(names, parts, strict=False))
        for f, lengths in zip(self._sequences, parts[len(names) :], strict=True):
            one = schema.embedded[f]
            by_name[one.name] = tf.reshape(by_name[one.name], [-1, one.max_length, one.dim])
            by_name[f"{one.name}_mask"] = tf.sequence_mask(tf.cast(lengths[:, 0], tf.int32), one.max_length)
        return by_name

    def predictions(self, outputs: dict[str, Any]) -> "tf.Tensor":
        """The outputs as columns in the order of the labels; Keras may return them in another order."""
        tf = self._tf
        return tf.concat([tf.cast(outputs[label.name], tf.float32) for label in self._model.labels], 1)


_HIDING_NAN = {
    *("ReLU", "Relu", "Relu6", "LeakyReLU", "Maximum", "Minimum", "Max", "Min", "Amax", "Amin", "Clip", "MaxPool"),
    *("MaxPooling1D", "MaxPooling2D", "GlobalMaxPooling1D", "GlobalMaxPooling2D"),
}
"""Operations of Keras that may make a number of NaN, depending on the processor; and layers with an activation."""


def check_blank_samples(model: Model) -> None:
    """Tries the graph on a sample without ids, with numbers at their defaults, such as that of a new user.

    The mean of an empty sequence, 0 / 0, is NaN, which spreads to the predictions: they cannot be served, and all
    gradients of their step are dropped. If only gradients are not finite, as those of a norm at 0, it logs a warning.

    Raises:
        ConfigError: the prediction is not finite; the message names the feature and the layer.
    """
    full = [one.name for one in model.schema.features]
    blank = _Trial(model, ())
    if blank.is_finite and blank.has_finite_gradients:
        return
    normal = _Trial(model, full)
    alone = {one: _Trial(model, [other for other in full if other != one]) for one in full}
    if not blank.is_finite:
        guilty = [one for one in full if normal.is_finite and not alone[one].is_finite]
        raise ConfigError(
            f"graph: {_without(model, guilty)} has a prediction that is not finite: {blank.source or 'a layer'} gives "
            f"{blank.value}. {_remedy(model, guilty)}"
        )
    if normal.has_finite_gradients:
        guilty = [one for one in full if not alone[one].has_finite_gradients]
        logger.warning(
            "graph: %s has gradients that are not finite, so its step will be dropped, as of a norm or a root at 0. %s",
            *(_without(model, guilty), _remedy(model, guilty)),
        )


def _without(model: Model, guilty: Sequence[str]) -> str:
    """A sample without some features, in words; without all, if there are none."""
    numbers = {one.name for one in model.schema.numerics}
    ids = [repr(one) for one in guilty if one not in numbers]
    values = [f"{one!r} at its default" for one in guilty if one in numbers]
    parts = ([f"without ids of {' or '.join(ids)}"] if ids else []) + (
        [f"with {' or '.join(values)}"] if values else []
    )
    return f"a sample {' or '.join(parts) or 'without ids, whose numbers are at their defaults,'}"


def _remedy(model: Model, guilty: Sequence[str]) -> str:
    sequences = [one.name for one in model.schema.embedded if one.combiner is None]
    for name in [one for one in sequences if one in guilty] or ([] if guilty else sequences):
        call = f'streamtrain.pool_sequence(inputs["{name}"], inputs["{name}_mask"])'
        return f"New users have empty lists: take their mean with {call}, which is 0 for them."
    return "New users and items have no ids: guard the division, root or logarithm, such as with keras.ops.maximum."


class _Trial:
    """The graph and its gradients with its first weights, on one sample.

    A processor may hide NaN: with AVX-512, oneDNN's relu(NaN) is 0. So the graph is called operation by operation, and
    what such an operation makes of NaN is NaN here.

    Args:
        model: the model.
        present: names of the features that the sample has; others have no ids, or are at their defaults.

    Attributes:
        is_finite: whether all predictions are.
        has_finite_gradients: whether all gradients are that would be applied.
        source: the first operation that makes something that is not finite out of what is; empty: there is none.
        value: what it makes, "NaN" or "infinity".
    """

    def __init__(self, model: Model, present: Sequence[str]) -> None:
        import tensorflow as tf

        self._tf = tf
        self.source, self.value = "", ""
        inputs = {name: tf.constant(value) for name, value in _one_sample(model, present)}
        watched = [inputs[name] for name in present]
        weights = model.keras.trainable_variables
        with tf.GradientTape() as tape:
            tape.watch(watched)
            try:
                outputs = self._run(model.keras, [inputs[one.name] for one in model.keras.inputs])
            except Exception as exc:
                raise ConfigError(describe_failure("graph", exc)) from exc
            losses = [self._loss(model, name, outputs[name]) for name in model.losses]
        self.is_finite = _is_finite(self._floats(outputs))
        gradients = tape.gradient(losses, [*watched, *(one.value for one in weights)])
        self.has_finite_gradients = _is_finite(self._floats(gradients))

    def _loss(self, model: Model, label: str, prediction: Any) -> Any:
        try:
            return self._tf.reduce_sum(loss_function(model.losses[label])(self._tf.ones([1, 1]), prediction))
        except Exception as exc:
            raise ConfigError(describe_failure(f"loss of {label!r}", exc)) from exc

    def _run(self, graph: Any, inputs: list[Any]) -> Any:
        return graph._run_through_graph(inputs, operation_fn=self._watched)

    def _watched(self, operation: Any) -> Callable[..., Any]:
        """What calls an operation, a layer, or a model within the model."""
        import keras

        graph = getattr(operation, "_functional", operation)  # that of a Sequential
        if hasattr(graph, "_run_through_graph"):
            return lambda inputs, **_: self._run(graph, graph._standardize_inputs(inputs))

        def call(*args: Any, **options: Any) -> Any:
            outputs = operation(*args, **options)
            given, made = self._floats([args, options]), self._floats(outputs)
            if _has_nan(given):
                hides = type(operation).__name__ in _HIDING_NAN or hasattr(operation, "activation")
                return keras.tree.map_structure(lambda one: one * np.nan, outputs) if hides else outputs
            if (_has_nan(made) and self.value != "NaN") or not (_is_finite(made) or self.source):
                self.source = f"{type(operation).__name__} {operation.name!r}"
                self.value = "NaN" if _has_nan(made) else "infinity"
            return outputs

        return call

    def _floats(self, nested: Any) -> list[Floats]:
        """Values of all tensors of floats."""
        return [
            one.numpy()
            for one in self._tf.nest.flatten(nested, expand_composites=True)
            if self._tf.is_tensor(one) and one.dtype.is_floating
        ]


def _one_sample(model: Model, present: Sequence[str]) -> Iterator[tuple[str, Floats | NDArray[np.bool_]]]:
    """The inputs of a graph for one sample, in which each present feature has one id, or the number 1."""
    random = np.random.default_rng(0)
    for one in model.schema.features:
        has = one.name in present
        if isinstance(one, Numeric):
            yield one.name, np.array([[1.0 if has else one.blank]], np.float32)
            if one.cells:
                yield one.cells.name, np.zeros((1, one.cells.dim), np.float32)
            continue
        row = random.uniform(-0.05, 0.05, one.dim).astype(np.float32) * has
        if one.combiner is not None:
            yield one.name, row[None]
            continue
        assert one.max_length is not None
        rows, mask = np.zeros((1, one.max_length, one.dim), np.float32), np.zeros((1, one.max_length), bool)
        rows[0, 0], mask[0, 0] = row, has
        yield one.name, rows
        yield f"{one.name}_mask", mask


def _has_nan(values: Sequence[Floats]) -> bool:
    return any(np.isnan(one).any() for one in values)


def _is_finite(values: Sequence[Floats]) -> bool:
    return all(np.isfinite(one).all() for one in values)
