"""Negative down-sampling: learning from a part of the samples, by label, and predicting as if from all.

A model that learned from negatives kept with probability w_0 and positives with w_1 sees odds w_1 / w_0 times the true
ones; its predictions are corrected by that factor (He et al., Practical Lessons from Predicting Clicks on Ads at
Facebook, ADKDD 2014, section 6.3: q = p / (p + (1 - p) / w)).
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from streamtrain.errors import ConfigError
from streamtrain.model.batch import Batch

Floats = NDArray[np.float32]


class Sampling:
    """Which samples are learned from: a pure function of where a sample stands, so that every replay keeps the same.

    Args:
        rates: share that is kept, more than 0 and at most 1, by label: 0, 1 or both; the other's is 1.

    Raises:
        ConfigError: a label is neither 0 nor 1, or a rate is out of range.
    """

    def __init__(self, rates: Mapping[int, float]) -> None:
        for label, rate in rates.items():
            if label not in (0, 1) or isinstance(label, bool):
                raise ConfigError(f"keep: labels are 0 and 1, not {label!r}")
            if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate <= 1:
                raise ConfigError(f"keep: the rate of label {label} must be more than 0 and at most 1, not {rate!r}")
        self.rates = {label: float(rates.get(label, 1.0)) for label in (0, 1)}

    def keep(self, labels: Floats, partitions: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of n samples are learned from, bool [n].

        Args:
            labels: float32 [n]; one of at least 0.5 counts as 1.
            partitions: int64 [n], where each stands.
            offsets: int64 [n], where each stands.
        """
        drawn = _uniform(partitions, offsets)
        return drawn < self._keep_rates(labels)

    def weights(self, labels: Floats) -> Floats:
        """For how many samples each that was kept stands, float32 [n]."""
        return (1 / self._keep_rates(labels)).astype(np.float32)

    def correct(self, predictions: Floats) -> Floats:
        """Probabilities of a model that learned from what is kept, as probabilities over all samples."""
        ratio = np.float32(self.rates[0] / self.rates[1])
        positive = predictions * ratio
        corrected: Floats = positive / (positive + (1 - predictions))
        return corrected

    def select(self, batch: Batch, partitions: NDArray[np.int64], offsets: NDArray[np.int64]) -> Batch:
        """The samples of a batch that are learned from; `partitions` and `offsets` are int64 [n], where each stands."""
        return batch.select(self.keep(batch.labels[:, 0], partitions, offsets)) if len(batch) else batch

    def represented(self, batch: Batch) -> Floats:
        """Weights of the samples that were kept, each for those like it that were not, float32 [n]."""
        weights: Floats = batch.weights * self.weights(batch.labels[:, 0])
        return weights

    def _keep_rates(self, labels: Floats) -> NDArray[np.float64]:
        return np.where(labels >= 0.5, self.rates[1], self.rates[0])


class Sampler:
    """Takes the samples of one stream, of which a model may learn from a part.

    Args:
        sampling: the model's sampling; None: it learns from all samples.

    Attributes:
        read: samples of the stream so far.
    """

    def __init__(self, sampling: Sampling | None) -> None:
        self._sampling = sampling
        self.read = 0

    def take(self, batch: Batch) -> Batch:
        """Those of the next samples that are learned from; the next call is for those after them."""
        taken = self.select(batch)
        self.read += len(batch)
        return taken

    def select(self, batch: Batch) -> Batch:
        """Those of the next samples that are learned from."""
        if self._sampling is None:
            return batch
        positions = np.arange(self.read, self.read + len(batch))
        return self._sampling.select(batch, np.zeros_like(positions), positions)

    def correct(self, predictions: Floats) -> Floats:
        """Predictions over all samples."""
        return predictions if self._sampling is None else self._sampling.correct(predictions)

    def weights(self, batch: Batch) -> Floats:
        """Weights of samples that were taken, each for those like it that were not, float32 [n]."""
        return batch.weights if self._sampling is None else self._sampling.represented(batch)


def _uniform(partitions: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.float64]:
    """Numbers from 0 to 1 from the places of samples, by splitmix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        x = offsets.astype(np.uint64) + partitions.astype(np.uint64) * np.uint64(0xD1342543DE82EF95)
        x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    uniform: NDArray[np.float64] = (x >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return uniform
