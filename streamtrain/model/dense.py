"""Dense parameters: all trainable weights of the graph as one flat float32 vector."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import tensorflow as tf


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
