"""LabelPrior: moves the outputs of cross entropy to the log-odds of the stream while a run begins.

A graph begins at one half. Where one sample in thousands is positive, the way from there to the log-odds costs more
than all that the samples after it teach, and optimizers, whose steps become smaller, need hundreds of thousands of them
for it. So where the labels of the first samples are other than predicted, the bias of the output moves by what is
missing, from the log-odds of the predictions to those of the labels: of the samples that have been predicted since the
last move, each beside as many as have been seen before, of which the outputs know already. It does so whenever twice as
many samples have been learned as at the last move, until 32 of either label have been seen. The first 16,384 samples
are learned in parts that are small enough for this: of one step, of one, of two, of four and so on. Nothing is known of
a sample when it is predicted but the labels of those before it.
"""

import sys

import numpy as np
from numpy.typing import NDArray

from streamtrain.model.batch import Batch
from streamtrain.model.model import Model

Floats = NDArray[np.float32]

_ENOUGH = 32  # of either label: the standard deviation of the log-odds is then 0.25 at most
_PARTED = 1 << 14  # samples after which batches are learned whole and pulled ahead: enough to see 1 of some thousands
_SIGNIFICANT = 1.4  # standard deviations; two labels that are the same are 1.41 from one half
_NONE = 0.2  # samples of either label to begin with: fewer cost less where one is rare, and more where both are common


class LabelPrior:
    """How the outputs of one run begin. Used by one thread.

    Args:
        model: the model, of which only outputs of cross entropy that end in a bias and a sigmoid are moved.
    """

    def __init__(self, model: Model) -> None:
        biases = model.output_biases
        self._columns = [i for i, label in enumerate(model.labels) if label.name in biases]
        self._places = [biases[model.labels[i].name] for i in self._columns]
        self._size = len(model.dense)
        # Weights of samples, by class (negative, positive) and output: of all; and since the last move as they were,
        # and as they had been predicted.
        self._sums = np.zeros((3, 2, len(self._columns)))
        self._is_moving = np.zeros(len(self._columns), bool)
        self._samples, self._due = 0, model.micro_batch_size or 1
        self._seen, self._were, self._predicted = self._sums

    @property
    def state(self) -> NDArray[np.float64]:
        """What it knows, as a vector, so that a learner that is loaded goes on as the one that was saved."""
        return np.concatenate([[self._samples, self._due], self._is_moving, self._sums.ravel()])

    @state.setter
    def state(self, given: NDArray[np.float64]) -> None:
        self._samples, self._due = map(int, given[:2])
        self._is_moving = given[2 : 2 + len(self._columns)] > 0
        self._sums[:] = given[2 + len(self._columns) :].reshape(self._sums.shape)

    @property
    def is_settled(self) -> bool:
        """Whether all outputs are where they belong."""
        return bool((self._seen >= _ENOUGH).all())

    @property
    def is_parted(self) -> bool:
        """Whether batches are learned in parts, none of which is pulled before the one before it was learned."""
        return self._samples < _PARTED

    @property
    def most(self) -> int:
        """Samples that the next batch may have, for the outputs to move often enough."""
        if not self.is_parted:
            return sys.maxsize
        return self._samples if self._samples >= self._due else self._due - self._samples

    def add(self, predictions: Floats, batch: Batch) -> None:
        """Takes in samples that have been learned, and their predictions [n, L]."""
        labels, predicted = batch.labels[:, self._columns], predictions[:, self._columns]
        weights = np.where(np.isfinite(labels) & np.isfinite(predicted), batch.weights[:, None], 0.0)
        for sums, of in ((self._seen, labels), (self._were, labels), (self._predicted, predicted)):
            positive = weights * np.where(weights > 0, of, 0.0)
            sums += [(weights - positive).sum(axis=0), positive.sum(axis=0)]
        self._samples += len(batch)

    def move(self) -> Floats | None:
        """What to add to the weights, float32 [P], before the next batch is learned; None: nothing."""
        if self._samples < self._due:
            return None
        self._due = 2 * self._samples
        negative, positive = self._predicted
        deviation = np.sqrt(negative * positive / np.maximum(negative + positive, 1e-9))
        self._is_moving |= np.abs(self._were[1] - positive) > _SIGNIFICANT * deviation
        if not self._is_moving.any():
            return None
        moved = np.zeros(self._size, np.float32)
        before = self._seen - self._were + _NONE
        by = _log_odds(self._were + before) - _log_odds(self._predicted + before)
        moved[self._places] = np.where(self._is_moving, by, 0.0)
        self._were[:, self._is_moving] = self._predicted[:, self._is_moving] = 0.0
        return moved


def _log_odds(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of sums of negatives and positives."""
    negative, positive = sums
    return np.asarray(np.log(positive / negative))
