"""A candidate: a model that learns the decoded samples, and the losses of its predictions.

Samples are decoded once for all candidates.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamtrain.errors import ConfigError
from streamtrain.learner import Learner
from streamtrain.model.batch import Batch
from streamtrain.model.model import Model, fake_negative_likelihood, loss_function
from streamtrain.model.sampling import Sampler
from streamtrain.quality.progressive import Metrics, ProgressiveValidation
from streamtrain.train.micro import GraphCache
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


Floats = NDArray[np.float32]


class Losses:
    """The loss of samples as the model defines it, over the judged labels.

    Args:
        model: defines losses and `loss_weights`; they are the same for all candidates.
        judged: columns of the judged labels.
    """

    def __init__(self, model: Model, judged: list[int]) -> None:
        self._model = model
        self._judged = judged

    def sums(self, predictions: Floats, chunk: Chunk) -> Sums:
        """Weighted sums over the blocks of a chunk, for predictions [n, L], or [1, L] for all samples."""
        import tensorflow as tf

        total = np.zeros(len(chunk.labels))
        for j in self._judged if len(total) else ():
            label = self._model.labels[j]
            loss = self._model.losses[label.name]
            function = fake_negative_likelihood if loss == "fake_negative_weighted" else loss_function(loss)
            missing = np.isnan(chunk.labels[:, j])
            truth = np.where(missing, 0, chunk.labels[:, j])[:, None].astype(np.float32)
            predicted = np.broadcast_to(predictions[:, j : j + 1], truth.shape)
            each = np.asarray(function(tf.constant(truth), tf.constant(predicted)), np.float64).reshape(-1)
            total += self._model.loss_weights[label.name] * np.where(missing, 0, each)
        return block_sums(total * chunk.counted)


class Candidate:
    """A model that learns the samples, chunk by chunk.

    Args:
        model: the model.
        losses: judges its predictions.
        batch_size: samples pulled at once.
        graphs: compiled graphs that candidates share.
        clock: seconds.

    Attributes:
        model: the model as given.
        ended: why it was dropped; "" if it was not.
        chunks: number of chunks learned.
        seconds: time to learn them, including compilation.
        outside: number of predictions of binary labels that are not probabilities.
    """

    def __init__(
        self,
        model: Model,
        losses: Losses,
        batch_size: int,
        graphs: GraphCache,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.ended = ""
        self.chunks = 0
        self.seconds = 0.0
        self.outside = 0
        self._losses, self._batch_size, self._graphs, self._clock = losses, batch_size, graphs, clock
        self._learner: Learner | None = None
        self._blocks: list[Sums] = []
        self._predictions: list[Floats] = []
        self._times: list[float] = []

    def start(self) -> None:
        """Builds the learner.

        Raises:
            ConfigError: the graph does not work with the changed settings.
        """
        try:
            self._learner = Learner(self.model, batch_size=self._batch_size, graphs=self._graphs)
        except ConfigError:
            raise
        except Exception as exc:  # tracing the user's code can raise anything
            raise ConfigError(f"graph fails with {type(exc).__name__}: {exc}") from exc

    def learn(self, chunk: Chunk) -> None:
        """Predicts and learns the next chunk; drops itself if the loss is not finite."""
        assert self._learner is not None
        started = self._clock()
        parts = [part for piece in chunk.batch.cut(self._batch_size) for part in self._learner.stream(piece)]
        predictions = np.concatenate([part.predictions for part in parts]) if parts else np.empty_like(chunk.labels)
        blocks = self._losses.sums(predictions, chunk)
        self._predictions.append(predictions)
        self._blocks.append(blocks)
        self._times.append(self._clock() - started)
        self.seconds += self._times[-1]
        self.chunks += 1
        binary = [j for j, label in enumerate(self.model.labels) if label.kind == "binary"]
        self.outside += int(((predictions[:, binary] < 0) | (predictions[:, binary] > 1)).sum())
        if not np.isfinite(blocks).all():
            self.drop("its loss is no longer finite")

    def drop(self, why: str) -> None:
        """Ends the candidate and frees its memory."""
        self.ended = self.ended or why
        self._learner = None
        self._predictions = []

    def finish(self) -> None:
        """Frees its rows; its predictions stay."""
        self._learner = None

    def forget_predictions(self) -> None:
        """Frees its predictions; its losses stay."""
        self._predictions = []

    @property
    def nbytes(self) -> int:
        """Bytes of rows, dense parameters, optimizer state and predictions."""
        learner = 0 if self._learner is None else self._learner.nbytes
        return learner + sum(part.nbytes for part in self._predictions)

    @property
    def seconds_per_chunk(self) -> float:
        """Median time to learn a chunk; a few chunks include compilation."""
        return median(self._times)

    def blocks(self, first: int, last: int) -> Sums:
        """Sums of losses over the blocks of a range of chunks."""
        return np.concatenate(self._blocks[first:last])

    def loss(self, decoded: Decoded, first: int, last: int) -> float:
        """Mean loss per sample over a range of chunks; NaN if no sample counts."""
        weights = float(decoded.weights(first, last).sum())
        return float(self.blocks(first, last).sum()) / weights if weights else float("nan")

    def metrics(self, decoded: Decoded, first: int, last: int) -> dict[str, Metrics]:
        """Progressive validation by label over a range of chunks."""
        validation = ProgressiveValidation(self.model.labels)
        for predictions, chunk in zip(self._predictions[first:last], decoded.chunks[first:last], strict=True):
            validation.update(predictions, chunk.labels, chunk.weights)
        return validation.total()


class Mean:
    """The loss of predicting the mean of each label: of all samples before a chunk; for the first chunk, its own.

    Args:
        losses: judges predictions.
        labels: names of the labels.
    """

    def __init__(self, losses: Losses, labels: Sequence[str]) -> None:
        self._losses, self._labels = losses, labels
        self._sums = np.zeros((2, len(labels)))
        self._extremes = np.array([[np.inf] * len(labels), [-np.inf] * len(labels)])
        self._blocks: list[Sums] = []

    def add(self, chunk: Chunk) -> None:
        """Predicts the next chunk, then updates the mean."""
        before = self._sums
        has_label = ~np.isnan(chunk.labels)
        weights = has_label * chunk.weights[:, None].astype(np.float64)
        labels = np.where(has_label, chunk.labels, 0)
        self._sums = before + np.stack([(weights * labels).sum(axis=0), weights.sum(axis=0)])
        lows, highs = (np.where(has_label, chunk.labels, none) for none in (np.inf, -np.inf))
        self._extremes[0] = lows.min(axis=0, initial=np.inf).clip(max=self._extremes[0])
        self._extremes[1] = highs.max(axis=0, initial=-np.inf).clip(min=self._extremes[1])
        known = np.where(before[1] > 0, before, self._sums)
        means = known[0] / np.where(known[1] > 0, known[1], 1)
        self._blocks.append(self._losses.sums(means[None].astype(np.float32), chunk))

    def blocks(self, first: int, last: int) -> Sums:
        """Sums of losses over the blocks of a range of chunks."""
        return np.concatenate(self._blocks[first:last])

    def extremes(self, label: str) -> tuple[float, float]:
        """Lowest and highest value of a label so far."""
        low, high = self._extremes[:, self._labels.index(label)]
        return float(low), float(high)
