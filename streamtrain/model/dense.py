"""Dense parameters: all trainable weights of the graph as one flat float32 vector, and what each of them stands for."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    """What a weight stands for: by this, weights of another graph are recognized (model/evolution.py).

    Attributes:
        layer: its layer. One that Keras has numbered has a number by its position in the graph, such as dense_1; that
            which gives a label's prediction is named for the label, such as "output click".
        name: its name within the layer, such as "kernel".
        is_numbered: whether Keras has named the layer.
        inputs: for a kernel, what the rows of its first axis are multiplied with; empty: it is not known.
        columns: what its last axis stands for.
    """

    layer: str
    name: str
    is_numbered: bool
    inputs: tuple[Segment, ...]
    columns: tuple[Segment, ...]


def describe_weights(model: "keras.Model", labels: Sequence[str], variables: Sequence[Any]) -> tuple[WeightInfo, ...]:
    """What each of a Keras model's variables stands for, in their order; its outputs are a mapping by label."""
    graph = _Graph(model, labels)
    owners = {id(variable): layer for layer in model.layers for variable in layer.weights}
    return tuple(graph.describe(variable, owners[id(variable)]) for variable in variables)


class _Graph:
    """Which operation gives which tensor, and what the columns of tensors stand for."""

    def __init__(self, model: "keras.Model", labels: Sequence[str]) -> None:
        import keras

        self._makers: dict[int, Any] = {}  # by id of the tensor
        self._numbers: Counter[str] = Counter()
        self._names: dict[int, str] = {}  # by id of the operation
        self._numbered: set[int] = set()
        for operation in model.operations:
            kind = _snake_case(type(operation).__name__)
            if re.fullmatch(rf"{kind}(_\d+)?", operation.name):
                number, self._numbers[kind] = self._numbers[kind], self._numbers[kind] + 1
                self._names[id(operation)] = f"{kind}_{number}" if number else kind
                self._numbered.add(id(operation))
            else:
                self._names[id(operation)] = operation.name
            for tensor in _tensors(operation, "output"):
                self._makers[id(tensor)] = operation
        in_order = keras.tree.flatten({label: label for label in labels})  # as the model has flattened its outputs
        for label, tensor in zip(in_order, model.outputs, strict=True):
            maker = self._first(tensor)
            if maker is not None and id(maker) in self._numbered:
                self._names[id(maker)] = f"output {label}"

    def _first(self, tensor: Any) -> Any:
        """The operation that gives a tensor, before those that change only its columns' values."""
        maker = self._makers.get(id(tensor))
        while maker is not None and type(maker).__name__ in _COLUMNWISE:
            maker = self._makers.get(id(_tensors(maker, "input")[0]))
        return maker

    def segments(self, tensor: Any) -> tuple[Segment, ...]:
        """What the last axis of a tensor stands for."""
        maker, width = self._first(tensor), tensor.shape[-1]
        if maker is None or not isinstance(width, int):
            return ()
        inputs = _tensors(maker, "input")
        if type(maker).__name__ == "Concatenate" and maker.axis in (-1, len(tensor.shape) - 1):
            return tuple(_joined(one for part in inputs for one in self.segments(part)))
        return (Segment(self._names[id(maker)], width),)

    def describe(self, variable: Any, layer: Any) -> WeightInfo:
        """What a variable of a layer stands for."""
        given = _tensors(layer, "input")
        inputs = self.segments(given[0]) if len(given) == 1 else ()
        name, shape = self._names[id(layer)], tuple(variable.shape)
        inner = variable.path.removeprefix(f"{layer.name}/")
        is_kernel = type(layer).__name__ == "Dense" and len(shape) == 2
        last = shape[-1] if shape else 1
        if type(layer).__name__ in _COLUMNWISE and sum(one.width for one in inputs) == last:
            columns = inputs
        else:
            columns = (Segment(name, last),)
        return WeightInfo(name, inner, id(layer) in self._numbered, inputs if is_kernel else (), columns)


def _tensors(operation: Any, which: str) -> list[Any]:
    """The tensors that an operation takes or gives; none of one that is called several times."""
    import keras

    try:
        return list(keras.tree.flatten(getattr(operation, which)))
    except (AttributeError, ValueError):
        return []


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
