"""Dense parameters: all trainable weights of the graph as one flat float32 vector, and what each of them stands for."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

# Layers and operations whose outputs mean what their only input means, column by column.
_COLUMNWISE = {
    *("Activation", "ReLU", "LeakyReLU", "PReLU", "ELU", "Softmax", "Dropout", "GaussianNoise", "GaussianDropout"),
    *("BatchNormalization", "LayerNormalization", "UnitNormalization", "Identity", "Sigmoid", "Relu", "Tanh", "Gelu"),
}
# Those of which an output column depends on several columns of an input, besides all with an axis that is the last one.
_MIXING = {
    *("Dot", "Matmul", "Einsum", "Tensordot", "Vdot", "Inner", "Outer", "Flatten", "Reshape", "GetItem", "TopK"),
    *("Attention", "AdditiveAttention"),
}
_NOT_MIXING = {"BatchNormalization", "Normalization", "Concatenate", "Stack", "ExpandDims", "Squeeze"}  # have an axis
# Those that put several inputs into one output.
_MERGING = {
    *("Add", "Subtract", "Multiply", "Divide", "TrueDivide", "Maximum", "Minimum", "Average", "Power", "Stack"),
}


@dataclass(frozen=True)
class DenseLayout:
    """Where each weight stands in the flat vector.

    Attributes:
        names: path of each weight, in order.
        shapes: shape of each weight.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> list[int]:
        """Number of floats of each weight."""
        return [int(np.prod(shape, dtype=np.int64)) for shape in self.shapes]

    def __len__(self) -> int:
        return sum(self.sizes)

    def __add__(self, other: "DenseLayout") -> "DenseLayout":
        return DenseLayout(self.names + other.names, self.shapes + other.shapes)

    def flatten(self, weights: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        """The weights, in order, as one vector [len(self)]."""
        return np.concatenate([np.empty(0, np.float32), *(np.asarray(w, np.float32).ravel() for w in weights)])

    def split(self, flat: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        """The weights of a vector, as views of it in their shapes."""
        ends = np.cumsum(self.sizes)
        return [
            flat[end - size : end].reshape(shape)
            for end, size, shape in zip(ends, self.sizes, self.shapes, strict=True)
        ]

    def split_tensor(self, flat: "tf.Tensor") -> list[Any]:
        """`split` within a TensorFlow graph."""
        import tensorflow as tf

        pieces = tf.split(flat, self.sizes) if self.sizes else []
        return [tf.reshape(piece, shape) for piece, shape in zip(pieces, self.shapes, strict=True)]


class Segment(NamedTuple):
    """Adjacent columns that have one origin.

    Attributes:
        origin: the name of the feature or layer that gives them.
        width: how many there are.
    """

    origin: str
    width: int


@dataclass(frozen=True)
class WeightInfo:
    """What a weight stands for: by this, weights of another graph are recognized (checkpoint/evolution.py).

    Attributes:
        layer: its layer. One that Keras has numbered has a number by its position in the graph, such as dense_1; that
            which gives a label's prediction is named for the label, such as "output click".
        name: its name within the layer, such as "kernel"; parts of it that Keras has numbered are numbered by their
            order within the layer.
        is_numbered: whether Keras has named the layer.
        inputs: for a kernel, what the rows of its first axis are multiplied with; empty: it is not known.
        columns: what its last axis stands for.
    """

    layer: str
    name: str
    is_numbered: bool
    inputs: tuple[Segment, ...]
    columns: tuple[Segment, ...]


@dataclass(frozen=True)
class Mix:
    """A call whose kept outputs change where an input of it gets new columns.

    Attributes:
        layer: what is called, named as in `WeightInfo`.
        inputs: what the columns of each input stand for.
        by_column: whether an output column depends on the same columns of the inputs alone, such as that of a sum.
    """

    layer: str
    inputs: tuple[tuple[Segment, ...], ...]
    by_column: bool


def describe_mixes(model: "keras.Model", labels: Sequence[str]) -> tuple[Mix, ...]:
    """What mixes columns in a Keras model, where that is known; its outputs are a mapping by label."""
    return tuple(_Graph(model, labels).mixes())


def describe_weights(model: "keras.Model", labels: Sequence[str], variables: Sequence[Any]) -> tuple[WeightInfo, ...]:
    """What each of a Keras model's variables stands for, in their order; its outputs are a mapping by label."""
    graph = _Graph(model, labels)
    owners = {id(variable): layer for layer in model.layers for variable in layer.variables}
    described = [graph.describe(variable, owners[id(variable)]) for variable in variables]
    seen: Counter[tuple[str, str]] = Counter()
    for i, one in enumerate(described):  # layers of one name within a layer of one's own
        number, seen[one.layer, one.name] = seen[one.layer, one.name], seen[one.layer, one.name] + 1
        described[i] = replace(one, name=f"{one.name} ({number})") if number else one
    return tuple(described)


def find_output_bias(tensor: Any, *, is_argument: bool = False) -> Any:
    """The bias that is added to the argument of a sigmoid, as a variable [1] of a Keras model; None: there is none.

    It is that of the Dense layer which ends in the sigmoid, or of the first of those that are added up before it.

    Args:
        tensor: output of the model; or, of the recursion, a term of the argument.
        is_argument: which of these.
    """
    history = getattr(tensor, "_keras_history", None)
    if history is None:
        return None
    operation = history.operation
    graph = getattr(operation, "_functional", operation)  # that of a Sequential
    if hasattr(graph, "_run_through_graph"):
        return find_output_bias(graph.outputs[history.tensor_index], is_argument=is_argument)
    kind, activation = type(operation).__name__, getattr(getattr(operation, "activation", None), "__name__", "")
    if kind == "Dense" and activation == ("linear" if is_argument else "sigmoid"):
        return operation.bias
    is_sigmoid = kind == "Sigmoid" or (kind == "Activation" and activation == "sigmoid")
    passes = kind == "Add" if is_argument else is_sigmoid
    inputs = operation._inbound_nodes[history.node_index].input_tensors if passes else []
    return next((bias for one in inputs if (bias := find_output_bias(one, is_argument=True)) is not None), None)


class _Graph:
    """Which operation gives which tensor, and what the columns of tensors stand for.

    Only advice for checkpoint/evolution.py comes of it, so it never fails: what is not known is left out.
    """

    def __init__(self, model: "keras.Model", labels: Sequence[str]) -> None:
        import keras

        self._numbers: Counter[str] = Counter()
        self._names: dict[int, str] = {}  # by id of the operation
        self._numbered: set[int] = set()
        self._inner: dict[int, str] = {}  # names of variables within their layers, by id
        for operation in model.operations:
            kind = _snake_case(type(operation).__name__)
            if _is_numbered(operation):
                number, self._numbers[kind] = self._numbers[kind], self._numbers[kind] + 1
                self._names[id(operation)] = f"{kind}_{number}" if number else kind
                self._numbered.add(id(operation))
            else:
                self._names[id(operation)] = operation.name
        self._calls = _calls(model.outputs)
        self._makers = {id(tensor): call for call in self._calls for tensor in call.outputs}
        in_order = keras.tree.flatten({label: label for label in labels})  # as the model has flattened its outputs
        for label, tensor in zip(in_order, model.outputs, strict=True):
            call = self._first(tensor)
            if call is not None and id(call.operation) in self._numbered:
                self._names[id(call.operation)] = f"output {label}"

    def _first(self, tensor: Any) -> "_Call | None":
        """The call that gives a tensor, before those that change only its columns' values."""
        call = self._makers.get(id(tensor))
        while call is not None and type(call.operation).__name__ in _COLUMNWISE:
            call = self._makers.get(id(call.inputs[0]))
        return call

    def segments(self, tensor: Any) -> tuple[Segment, ...]:
        """What the last axis of a tensor stands for; empty: it is not known."""
        call, width = self._first(tensor), tensor.shape[-1] if tensor.shape else None
        if call is None or not isinstance(width, int):
            return ()
        maker = call.operation
        if type(maker).__name__ == "Concatenate" and maker.axis in (-1, len(tensor.shape) - 1):
            parts = [self.segments(part) for part in call.inputs]
            return tuple(_joined(one for part in parts for one in part)) if all(parts) else ()
        return (Segment(self._names[id(maker)], width),) if id(maker) in self._names else ()

    def mixes(self) -> Iterator[Mix]:
        """All that mixes columns."""
        for call in self._calls:
            operation = call.operation
            name, inputs = self._names.get(id(operation), operation.name), tuple(map(self.segments, call.inputs))
            if getattr(getattr(operation, "activation", None), "__name__", "") in ("softmax", "log_softmax"):
                yield Mix(name, tuple(map(self.segments, call.outputs)), by_column=False)
            elif type(operation).__name__ in _MERGING and len(inputs) > 1:
                yield Mix(name, inputs, by_column=True)
            elif inputs and _mixes(call):
                yield Mix(name, inputs, by_column=False)

    def describe(self, variable: Any, layer: Any) -> WeightInfo:
        """What a variable of a layer stands for."""
        given = {
            self.segments(call.inputs[0]) if len(call.inputs) == 1 else ()
            for call in self._calls
            if call.operation is layer
        }
        inputs = given.pop() if len(given) == 1 else ()  # of all calls the same
        name, shape = self._names.get(id(layer), layer.name), tuple(variable.shape)
        if id(variable) not in self._inner:
            self._inner |= _inner_names(layer)
        inner = self._inner[id(variable)]
        width, last = sum(one.width for one in inputs), shape[-1] if shape else 1
        is_kernel = type(layer).__name__ == "Dense" and inner == "kernel" and shape[:1] == (width,)
        is_columnwise = type(layer).__name__ in _COLUMNWISE and width == last
        columns = inputs if is_columnwise else (Segment(name, last),)
        return WeightInfo(name, inner, id(layer) in self._numbered, inputs if is_kernel else (), columns)


def _mixes(call: "_Call") -> bool:
    """Whether an output column may depend on several columns of an input. Weights of layers are compared elsewhere."""
    operation, kind = call.operation, type(call.operation).__name__
    if kind in _MIXING or not type(operation).__module__.startswith("keras.") or kind == "Lambda":
        return not getattr(operation, "trainable_variables", ())
    if kind in _NOT_MIXING or not hasattr(operation, "axis"):
        return False
    axis, last = operation.axis, len(call.inputs[0].shape) - 1
    return axis is None or not {-1, last}.isdisjoint(axis if isinstance(axis, list | tuple) else [axis])


def _is_numbered(named: Any) -> bool:
    """Whether Keras has named it after its class, and counted."""
    return re.fullmatch(rf"{_snake_case(type(named).__name__)}(_\d+)?", named.name) is not None


def _inner_names(layer: Any) -> dict[int, str]:
    """Names of a layer's variables within it, by id: Keras counts what it names in all of the process."""
    numbered = {one.name for one in layer._flatten_layers(include_self=False) if _is_numbered(one)}
    numbers: Counter[str] = Counter()
    given: dict[str, str] = {}
    names = {}
    for variable in layer.variables:
        parts = variable.path.removeprefix(f"{layer.name}/").split("/")
        for part in parts:
            if part not in given:
                is_numbered = part in numbered or bool(re.fullmatch(r"(seed_generator|variable)(_\d+)?", part))
                kind = re.sub(r"_\d+$", "", part) if is_numbered else part
                number, numbers[kind] = numbers[kind], numbers[kind] + is_numbered
                given[part] = f"{kind}_{number}" if number and is_numbered else kind
        names[id(variable)] = "/".join(given[part] for part in parts)
    return names


class _Call(NamedTuple):
    """An operation called on tensors; a layer that is shared is called several times."""

    operation: Any
    inputs: list[Any]
    outputs: list[Any]


def _calls(outputs: Sequence[Any]) -> list[_Call]:
    """All calls that tensors come of.

    `Operation.input` and `output` are those of its first call: of others only the history of tensors tells.
    """
    found: dict[int, _Call] = {}
    left = [*outputs]
    while left:
        history = getattr(left.pop(), "_keras_history", None)
        if history is None:
            continue
        node = history.operation._inbound_nodes[history.node_index]
        if id(node) not in found:
            found[id(node)] = _Call(history.operation, [*node.input_tensors], [*node.outputs])
            left += node.input_tensors
    return [*found.values()]


def _joined(segments: Iterator[Segment]) -> Iterator[Segment]:
    """The same, with a number after an origin that occurs again."""
    seen: Counter[str] = Counter()
    for origin, width in segments:
        number, seen[origin] = seen[origin], seen[origin] + 1
        yield Segment(f"{origin} ({number})" if number else origin, width)


def _snake_case(name: str) -> str:
    """The name that Keras gives to layers of a class."""
    parted = re.sub(r"\W+", "", name)
    parted = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", parted)
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", parted).lower()
