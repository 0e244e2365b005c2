"""Progressive validation: metrics of predictions that were made before their samples were learned from.

Every sample is test data first and training data after, so these figures need no held-out set and look nowhere ahead
(Blum, Kalai & Langford 1999; river's `evaluate.progressive_val_score`).

Streaming AUC: predictions are counted, by class, in bins of equal width on the log-odds scale. Pairs of a positive and
a negative in one bin count one half, as ties do. The exact AUC is therefore at most

    auc_error = ½ Σ_bin positives(bin) · negatives(bin) / (positives · negatives)

away, which is reported with it: with 8,192 bins over ±16 it is below 0.001 unless nearly all predictions are equal.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from streamtrain.model.features import Label

BINS = 8192
LOGIT_RANGE = 16.0
CLIP = 1e-7  # predictions are clipped to [CLIP, 1 - CLIP] for the log loss, as Keras does
WINDOW_PARTS = 8
_FOLD = 8192  # samples folded into the counts at a time: a histogram costs the same for 64 as for 8,192


@dataclass(frozen=True)
class Metrics:
    """Figures of one label. NaN where one is not defined, such as the AUC of one class.

    Attributes:
        samples: number of samples that have the label.
        label_mean: weighted mean of the label.
        prediction_mean: weighted mean of the predictions.
        calibration: prediction_mean / label_mean; 1 is calibrated.
        log_loss: mean cross-entropy in nats (binary labels).
        normalized_entropy: log_loss divided by that of always predicting label_mean (He et al. 2014); below 1 is
            better than knowing the base rate only (binary labels).
        auc: area under the ROC curve (binary labels).
        auc_error: the exact AUC is at most so far from `auc`.
        mean_squared_error: for other labels.
        mean_absolute_error: for other labels.
        label_variance: for other labels: the mean squared error of always predicting label_mean.
        non_finite: predictions that were NaN or infinite; they count in nothing else.
    """

    samples: int
    label_mean: float
    prediction_mean: float
    calibration: float
    log_loss: float = math.nan
    normalized_entropy: float = math.nan
    auc: float = math.nan
    auc_error: float = math.nan
    mean_squared_error: float = math.nan
    mean_absolute_error: float = math.nan
    label_variance: float = math.nan
    non_finite: int = 0

    def as_dict(self) -> dict[str, float | None]:
        """For JSON: undefined figures are None."""
        return {name: value if math.isfinite(value) else None for name, value in asdict(self).items()}


class Sums:
    """What the metrics of one label are computed from: sums, and for binary labels counts by class and bin.

    Args:
        binary: whether the label is binary.
        bins: number of bins.

    Attributes:
        counts: float64 [2, bins], weight by class and bin; [2, 0] of other labels.
        spread: of other labels, the weighted sum of their squared distances from their mean; NaN: unknown.
    """

    def __init__(self, binary: bool, bins: int = BINS) -> None:
        self.binary = binary
        self.samples = 0
        self.non_finite = 0
        self.weight = self.labels = self.predictions = self.loss = self.absolute = self.spread = 0.0
        self.counts = np.zeros((2, bins if self.binary else 0))

    def add(self, predictions: NDArray[np.float32], labels: NDArray[np.float32], weights: NDArray[np.float32]) -> None:
        """Adds samples, float32 [n] each; a label of NaN is missing."""
        has_label, finite = ~np.isnan(labels), np.isfinite(predictions)
        self.non_finite += int((has_label & ~finite).sum())
        good = has_label & finite
        p, y, w = (column[good].astype(np.float64) for column in (predictions, labels, weights))
        self.samples += len(p)
        if not self.binary and w.any():
            mean = float(w @ y) / float(w.sum())
            self._add_spread(float(w.sum()), float(w @ y), float(w @ (y - mean) ** 2))
        self.weight += float(w.sum())
        self.labels += float(w @ y)
        self.predictions += float(w @ p)
        if not self.binary:
            self.loss += float(w @ (p - y) ** 2)
            self.absolute += float(w @ np.abs(p - y))
            return
        clipped = np.clip(p, CLIP, 1 - CLIP)
        self.loss -= float(w @ (y * np.log(clipped) + (1 - y) * np.log1p(-clipped)))
        logits = np.log(clipped) - np.log1p(-clipped)
        count = self.counts.shape[1]
        bins = np.clip((logits + LOGIT_RANGE) * (count / (2 * LOGIT_RANGE)), 0, count - 1).astype(np.int64)
        self.counts += np.bincount(bins + count * (y > 0.5), weights=w, minlength=2 * count).reshape(2, count)

    def merge(self, other: "Sums") -> None:
        """Adds those of other samples of the same label."""
        self._add_spread(other.weight, other.labels, other.spread)
        for name in ("samples", "non_finite", "weight", "labels", "predictions", "loss", "absolute"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.counts += other.counts

    def _add_spread(self, weight: float, labels: float, spread: float) -> None:
        """Adds that of other samples, before their sums are added (Chan, Golub & LeVeque 1979)."""
        self.spread += spread
        if self.weight and weight:
            distance = self.labels / self.weight - labels / weight
            self.spread += distance**2 * self.weight * weight / (self.weight + weight)

    def metrics(self) -> Metrics:
        """The figures."""
        label, prediction = _ratio(self.labels, self.weight), _ratio(self.predictions, self.weight)
        common = (self.samples, label, prediction, _ratio(prediction, label))
        loss = _ratio(self.loss, self.weight)
        if not self.binary:
            return Metrics(
                *common,
                mean_squared_error=loss,
                mean_absolute_error=_ratio(self.absolute, self.weight),
                label_variance=_ratio(self.spread, self.weight),
                non_finite=self.non_finite,
            )
        auc, error = self._auc()
        entropy = -(label * math.log(label) + (1 - label) * math.log1p(-label)) if 0 < label < 1 else math.nan
        return Metrics(
            *common,
            log_loss=loss,
            normalized_entropy=_ratio(loss, entropy),
            auc=auc,
            auc_error=error,
            non_finite=self.non_finite,
        )

    def _auc(self) -> tuple[float, float]:
        negatives, positives = self.counts
        pairs = float(negatives.sum() * positives.sum())
        ties = float(negatives @ positives) / 2
        below = np.cumsum(negatives) - negatives
        return _ratio(float(positives @ below) + ties, pairs), _ratio(ties, pairs)


class ProgressiveValidation:
    """Metrics per label, in total and over the latest window.

    Args:
        labels: the model's labels, in order of the columns of predictions.
        window: samples of the window; it slides in eighths, so it holds 7/8 to 8/8 of that once it is full.
    """

    def __init__(self, labels: Sequence[Label], *, window: int = 100_000) -> None:
        self._labels = tuple(labels)
        self._part_size = max(1, window // WINDOW_PARTS)
        self._total = [Sums(label.kind == "binary") for label in labels]
        self._parts: deque[list[Sums]] = deque(maxlen=WINDOW_PARTS - 1)
        self._part = [Sums(label.kind == "binary") for label in labels]
        self._in_part = 0
        self._pending: list[tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]] = []
        self._pending_samples = 0

    def update(
        self, predictions: NDArray[np.float32], labels: NDArray[np.float32], weights: NDArray[np.float32]
    ) -> None:
        """Adds a batch.

        Args:
            predictions: float32 [n, L].
            labels: float32 [n, L]; NaN where a label is missing.
            weights: float32 [n].
        """
        self._pending.append((predictions, labels, weights))
        self._pending_samples += len(weights)
        if self._pending_samples >= min(_FOLD, self._part_size):
            self._fold()

    def total(self) -> dict[str, Metrics]:
        """Metrics by label over everything so far."""
        self._fold()
        return {label.name: sums.metrics() for label, sums in zip(self._labels, self._total, strict=True)}

    def window(self) -> dict[str, Metrics]:
        """Metrics by label over the latest window."""
        return {label: sums.metrics() for label, sums in self.window_sums().items()}

    def window_sums(self) -> dict[str, Sums]:
        """What the metrics over the latest window are computed from, by label; to be merged with those of others."""
        self._fold()
        merged = [Sums(label.kind == "binary") for label in self._labels]
        for part in [*self._parts, self._part]:
            for sums, of_part in zip(merged, part, strict=True):
                sums.merge(of_part)
        return {label.name: sums for label, sums in zip(self._labels, merged, strict=True)}

    def _fold(self) -> None:
        if not self._pending:
            return
        predictions, labels, weights = (np.concatenate(columns) for columns in zip(*self._pending, strict=True))
        self._pending, self._pending_samples = [], 0
        start = 0
        while start < len(weights):
            rows = slice(start, start + self._part_size - self._in_part)
            start = rows.stop
            part = [Sums(label.kind == "binary") for label in self._labels]
            for j, sums in enumerate(part):
                sums.add(predictions[rows, j], labels[rows, j], weights[rows])
            self._add_part(part, len(weights[rows]))

    def _add_part(self, part: list[Sums], samples: int) -> None:
        for total, current, sums in zip(self._total, self._part, part, strict=True):
            total.merge(sums)
            current.merge(sums)
        self._in_part += samples
        if self._in_part >= self._part_size:
            self._parts.append(self._part)
            self._part, self._in_part = [Sums(label.kind == "binary") for label in self._labels], 0


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan
