"""The samples of a file, decoded once and kept for all candidates."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamtrain.model.batch import Batch
from streamtrain.model.model import Model
from streamtrain.model.sampling import Sampler
from streamtrain.tuning.compare import Sums, block_sums

CHUNK = 2048
"""Samples per chunk, rounded up to a multiple of the batch size. Batches never span two chunks."""


class Chunk(NamedTuple):
    """Consecutive samples; n of them are learned, which is all unless the model samples (`keep`).

    Attributes:
        batch: all samples.
        labels: float32 [n, L].
        weights: float32 [n].
        counted: float64 [n], weights in comparisons: 0 for samples without any judged label.
        blocks: sums of `counted` over blocks.
    """

    batch: Batch
    labels: NDArray[np.float32]
    weights: NDArray[np.float32]
    counted: NDArray[np.float64]
    blocks: Sums


class Decoded:
    """Chunks of samples, in order.

    Args:
        model: reads the samples.
        judged: columns of the labels that candidates are compared by.

    Attributes:
        chunks: chunks so far.
        nbytes: bytes of the chunks.
    """

    def __init__(self, model: Model, judged: list[int]) -> None:
        self._judged = judged
        self._sampler = Sampler(model.sampling)
        self.chunks: list[Chunk] = []
        self.nbytes = 0

    def add(self, batch: Batch) -> Chunk:
        """Appends a batch as the next chunk."""
        taken = self._sampler.take(batch)
        weights = self._sampler.weights(taken)
        has_label = ~np.isnan(taken.labels[:, self._judged]).all(axis=1)
        counted = np.where(has_label, weights, 0).astype(np.float64)
        chunk = Chunk(batch, taken.labels, weights, counted, block_sums(counted))
        self.chunks.append(chunk)
        self.nbytes += sum(column.nbytes for column in vars(batch).values())
        self.nbytes += chunk.labels.nbytes + chunk.weights.nbytes + chunk.counted.nbytes + chunk.blocks.nbytes
        return chunk

    def weights(self, first: int, last: int) -> Sums:
        """Sums of `counted` over the blocks of a range of chunks."""
        return np.concatenate([chunk.blocks for chunk in self.chunks[first:last]])

    def samples(self, chunks: int) -> int:
        """Number of samples in the first `chunks` chunks."""
        return sum(len(chunk.batch) for chunk in self.chunks[:chunks])

    def __len__(self) -> int:
        return len(self.chunks)
