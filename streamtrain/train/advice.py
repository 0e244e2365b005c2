"""Advice: what keeps a model from learning a stream, found while it learns, with the way out in words.

A learning curve and a few statistics of samples and predictions are kept for that: they cost a few percent of a
learner's time at most, as a feature that has been seen to vary is not checked again.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamtrain._core import hash_bytes
from streamtrain.model.batch import Batch
from streamtrain.model.features import Categorical, Label, Numeric
from streamtrain.model.model import Model
from streamtrain.quality.progressive import CLIP, Metrics

Floats = NDArray[np.float32]

POINTS = 128
"""Maximum number of points of a learning curve; then neighbours are merged."""

_FIRST_SEGMENT = 128  # samples
_FOLDED_SAMPLES = 8192  # at which an advisor adds up what it has seen
_FEW_SAMPLES = 100  # below which nothing is constant
_MIN_SAMPLES = 1000  # below which figures say nothing
_MIN_IDS = 10_000  # of a table: at the beginning of any stream, most ids are new
_NO_BETTER = 0.998  # of the loss of the label's mean
_WORSE = 1.1
_COMPARED = ("binary_crossentropy", "mean_squared_error", "poisson")  # losses that the label's mean minimizes
_HARDLY_MOVED = 0.05  # change of weights or rows, relative to their first values
_MOSTLY = 0.8
_LARGE = 30.0  # numbers that a graph gets; docs/quality.md
_FEW_NUMBERS = 30  # below which a mean and a deviation say nothing


class LearningCurve:
    """Progressive validation by segments of the stream: what learning looks like over time.

    Args:
        labels: the model's labels, in order of the columns of predictions.
    """

    def __init__(self, labels: tuple[Label, ...]) -> None:
        self._labels = labels
        self._size = _FIRST_SEGMENT
        self._pending: list[tuple[Floats, Floats, Floats]] = []
        self._count = 0
        self._segments: list[list[Metrics]] = [[] for _ in labels]

    def update(self, predictions: Floats, labels: Floats, weights: Floats) -> None:
        """Adds a batch, as `ProgressiveValidation.update`."""
        self._pending.append((predictions, labels, weights))
        self._count += len(weights)
        if self._count < self._size:
            return
        columns = [np.concatenate(parts) for parts in zip(*self._pending, strict=True)]
        while self._count >= self._size:
            self._close([column[: self._size] for column in columns])
            columns = [column[-self._count :] if self._count else column[:0] for column in columns]
        self._pending = [(columns[0], columns[1], columns[2])] if self._count else []

    def _close(self, columns: list[Floats]) -> None:
        predictions, labels, weights = columns
        for j, label in enumerate(self._labels):
            self._segments[j].append(_measure(label.kind == "binary", predictions[:, j], labels[:, j], weights))
        self._count -= len(weights)
        if len(self._segments[0]) == POINTS:
            self._size *= 2
            for segments in self._segments:
                segments[:] = [_merge(*pair) for pair in zip(segments[::2], segments[1::2], strict=True)]

    def points(self) -> dict[str, list[Metrics]]:
        """Metrics of each segment, by label, in order; those of samples that fill no segment yet are missing."""
        return {label.name: list(of) for label, of in zip(self._labels, self._segments, strict=True)}


def _measure(binary: bool, predictions: Floats, labels: Floats, weights: Floats) -> Metrics:
    """Metrics of one segment, as `Sums` has them but for the AUC, which is exact: few samples need no bins."""
    has_label, finite = ~np.isnan(labels), np.isfinite(predictions)
    good = has_label & finite
    p, y, w = (column[good].astype(np.float64) for column in (predictions, labels, weights))
    weight, non_finite = float(w.sum()), int((has_label & ~finite).sum())
    if not weight:
        return Metrics(len(p), math.nan, math.nan, math.nan, non_finite=non_finite)
    label, prediction = float(w @ y) / weight, float(w @ p) / weight
    common = (len(p), label, prediction, prediction / label if label else math.nan)
    if not binary:
        squared, absolute = float(w @ (p - y) ** 2) / weight, float(w @ np.abs(p - y)) / weight
        return Metrics(*common, mean_squared_error=squared, mean_absolute_error=absolute, non_finite=non_finite)
    p = np.clip(p, CLIP, 1 - CLIP)
    loss = -float(w @ (y * np.log(p) + (1 - y) * np.log1p(-p))) / weight
    values, place = np.unique(p, return_inverse=True)
    positives, negatives = np.bincount(place, w * y, len(values)), np.bincount(place, w * (1 - y), len(values))
    pairs = float(positives.sum() * negatives.sum())
    return Metrics(
        *common,
        log_loss=loss,
        normalized_entropy=loss / entropy if (entropy := _entropy(label)) else math.nan,
        auc=float(positives @ (np.cumsum(negatives) - negatives / 2)) / pairs if pairs else math.nan,
        auc_error=0.0 if pairs else math.nan,
        non_finite=non_finite,
    )


def _merge(one: Metrics, other: Metrics) -> Metrics:
    """Metrics of two segments as one, as the means of both; the AUC is therefore that within segments."""
    weights = np.array([one.samples, other.samples], np.float64)

    def mean(name: str) -> float:
        values = np.array([getattr(one, name), getattr(other, name)], np.float64)
        known = np.isfinite(values) & (weights > 0)
        return float(values[known] @ weights[known] / weights[known].sum()) if known.any() else math.nan

    label, prediction, loss = mean("label_mean"), mean("prediction_mean"), mean("log_loss")
    return Metrics(
        samples=one.samples + other.samples,
        label_mean=label,
        prediction_mean=prediction,
        calibration=prediction / label if label else math.nan,
        log_loss=loss,
        normalized_entropy=loss / entropy if (entropy := _entropy(label)) else math.nan,
        auc=mean("auc"),
        auc_error=mean("auc_error"),
        mean_squared_error=mean("mean_squared_error"),
        mean_absolute_error=mean("mean_absolute_error"),
        non_finite=one.non_finite + other.non_finite,
    )


def _entropy(p: float) -> float:
    return -(p * math.log(p) + (1 - p) * math.log1p(-p)) if 0 < p < 1 else 0.0


def describe_scales(numerics: Sequence[Numeric], values: Floats) -> list[str]:
    """What to do about numbers that are so large that a graph does not learn, a sentence or two each.

    Args:
        numerics: of the schema.
        values: float32 [n, D], those of some samples as the graph gets them.
    """
    found = []
    for one, column in zip(numerics, values.T.astype(np.float64), strict=True):
        size = float(np.median(np.abs(column))) if len(column) else 0.0
        if one.transform == "log1p" or not size > _LARGE:
            continue
        scaled = one.transform == "standardize"
        now = f'transform="standardize", mean={one.mean:g}, stddev={one.stddev:g}' if scaled else "transform=None"
        found.append(
            f"feature {one.name!r} is about {size:.2g} where the graph gets it, with {now}: the steps of its weights "
            "are made for numbers near 1, so it learns little or diverges. Leave the transform out, which takes the "
            f"logarithm; or give the mean and the deviation of your stream{_scale(one, column)}; or if it is a code, "
            f"such as a zip code, make it an id: st.Categorical({one.name!r}, dim=16)."
        )
    return found


def _scale(number: Numeric, column: NDArray[np.float64]) -> str:
    """The options that fit some numbers, if these are enough to tell."""
    given = column * number.stddev + number.mean if number.transform == "standardize" else column
    deviation, mean = float(given.std()), float(given.mean())
    if len(column) < _FEW_NUMBERS or not deviation:
        return ""
    mean = round(mean, 1 - math.floor(math.log10(deviation)))
    return f', such as transform="standardize", mean={mean:.12g}, stddev={deviation:.2g}'


class Learning(NamedTuple):
    """The state of what learns, for advice.

    Attributes:
        rows: number of rows by table, without those of a checkpoint that learning began with.
        unadmitted: by table, occurrences of ids that had no row yet because of `min_count`.
        non_finite: gradients dropped because they were not finite.
        moved: relative change of weights and rows since they began; NaN: there are none.
    """

    rows: Mapping[str, int]
    unadmitted: Mapping[str, int]
    non_finite: int
    moved: float


class Advisor:
    """Watches samples and predictions of one model as they are learned.

    Args:
        model: the model.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self.curve = LearningCurve(model.labels)
        self._samples = 0
        count, numbers = len(model.schema.embedded), len(model.schema.numerics)
        self._ids = np.zeros(count, np.int64)
        self._constant_ids: dict[int, int | None] = {}  # by feature, the one key of all samples; None: no ids
        self._varying = {f for f, one in enumerate(model.schema.embedded) if not isinstance(one, Categorical)}
        self._numbers = np.array([[np.inf] * numbers, [-np.inf] * numbers])
        self._extremes = np.array([[np.inf] * len(model.labels), [-np.inf] * len(model.labels)])
        self._moments = np.zeros((3, len(model.labels)))  # weight, and weighted sums of labels and their squares
        self._outside = np.zeros(len(model.labels), np.int64)
        self._first: list[Floats] = []  # numbers of the first samples
        self._pending: list[tuple[Floats, Floats, Floats]] = []  # not yet part of the three before
        self._waiting = 0  # their samples

    def update(self, batch: Batch, predictions: Floats, weights: Floats) -> None:
        """Adds a batch that was predicted and is not empty."""
        if self._samples < _MIN_SAMPLES:
            self._first.append(batch.numeric)
        self._samples += len(batch)
        self.curve.update(predictions, batch.labels, weights)
        self._ids += np.diff(batch.starts)
        for f in range(len(self._ids)):
            if f not in self._varying:
                self._compare_ids(f, batch)
        if (self._numbers[0] >= self._numbers[1]).any():
            self._numbers[0] = np.minimum(self._numbers[0], batch.numeric.min(axis=0))
            self._numbers[1] = np.maximum(self._numbers[1], batch.numeric.max(axis=0))
        self._pending.append((predictions, batch.labels, weights))
        self._waiting += len(batch)
        if self._waiting >= _FOLDED_SAMPLES:
            self._fold()

    def _fold(self) -> None:
        """Adds what is pending: many batches at once, as small ones would cost as much each."""
        if not self._pending:
            return
        predictions, labels, weights = (np.concatenate(parts) for parts in zip(*self._pending, strict=True))
        self._pending, self._waiting = [], 0
        self._outside += ((predictions < 0) | (predictions > 1)).sum(axis=0)
        known = ~np.isnan(labels)
        values, weighted = np.where(known, labels, 0).astype(np.float64), known * weights[:, None]
        self._moments += np.stack([weighted.sum(0), (weighted * values).sum(0), (weighted * values**2).sum(0)])
        lows, highs = np.where(known, labels, np.inf).min(axis=0), np.where(known, labels, -np.inf).max(axis=0)
        self._extremes = np.stack([np.minimum(self._extremes[0], lows), np.maximum(self._extremes[1], highs)])

    def _compare_ids(self, f: int, batch: Batch) -> None:
        keys = batch.keys[batch.starts[f] : batch.starts[f + 1]]
        key = int(keys[0]) if len(keys) else None
        of_sample = np.diff(batch.offsets[f])
        alike = (keys == keys[0]).all() and (of_sample == 1).all() if len(keys) else True
        if not alike or self._constant_ids.setdefault(f, key) != key:
            self._varying.add(f)

    def advice(self, learning: Learning) -> list[str]:
        """What to change, a sentence or two each; empty if nothing is known to be wrong."""
        self._fold()
        first = self._first or [np.empty((0, len(self._model.schema.numerics)), np.float32)]
        scales = describe_scales(self._model.schema.numerics, np.concatenate(first))
        found = scales + (self._constants() if self._samples >= _FEW_SAMPLES else [])
        if learning.non_finite and not scales:
            found.append(
                f"{learning.non_finite:,} gradients were not finite and were dropped, as when a model diverges. Lower "
                f"the learning rates ({self._rates()}), or look for a division or logarithm in the graph."
            )
        if self._samples < _MIN_SAMPLES:
            return found
        found += self._tables(learning)
        for j, label in enumerate(self._model.labels):
            found += [] if learning.non_finite or scales else self._label(j, label, learning)
        return found

    def _constants(self) -> list[str]:
        found, schema = [], self._model.schema
        for j, label in enumerate(self._model.labels):
            low, high = self._extremes[:, j]
            if low == high:
                found.append(
                    f"label {label.name!r} is {low:g} in all {self._samples:,} samples, so there is nothing to learn: "
                    "check how labels are made, and whether the samples of the other outcome are missing."
                )
        for f, one in enumerate(schema.embedded):
            if f in self._varying or not isinstance(one, Categorical):
                continue
            key, default = self._constant_ids.get(f), one.default_ids
            if key is None:
                what = "has no ids in any sample"
            elif default and key == hash_bytes(default[0].encode()):
                what = f"is missing in all samples (or always its default, {one.default!r})"
            else:
                what = "has the same id in all samples"
            found.append(_useless(one.name, one.field_name, what))
        for i, number in enumerate(schema.numerics):
            if self._numbers[0, i] == self._numbers[1, i]:
                missing = f", or is missing: its default is {number.default:g}" if number.default is not None else ""
                found.append(_useless(number.name, number.field_name, f"has the same value in all samples{missing}"))
        return found

    def _tables(self, learning: Learning) -> list[str]:
        found, ids = [], dict.fromkeys(learning.rows, 0)
        lone = {one.table_name for one in self._model.schema.embedded if isinstance(one, Categorical)}
        for f, one in enumerate(self._model.schema.embedded):
            ids[one.table_name] += int(self._ids[f])
        for table in self._model.schema.tables:
            count, rows = ids[table.name], learning.rows[table.name]
            if table.name not in lone or count < _MIN_IDS:
                continue
            if (waiting := learning.unadmitted.get(table.name, 0)) > count / 2:
                found.append(
                    f"At least {waiting:,} of {count:,} ids of table {table.name!r} had no row, because they had "
                    f"occurred fewer than min_count={table.min_count} times. Lower min_count, or leave the feature out "
                    "if its ids hardly ever repeat."
                )
            elif rows > _MOSTLY * count:
                found.append(
                    f"ids of table {table.name!r} hardly ever repeat: {count:,} ids became {rows:,} rows, and a row "
                    "that is seen once predicts nothing. Leave out the feature if it is the id of an event, or store "
                    "only ids that repeat, with min_count=2."
                )
        return found

    def _label(self, j: int, label: Label, learning: Learning) -> list[str]:
        low, high = self._extremes[:, j]
        if label.kind == "binary" and self._outside[j]:
            return [
                f"{self._outside[j]:,} of {self._samples:,} predictions of {label.name!r} are outside of [0, 1]: end "
                'its graph with a sigmoid, such as keras.layers.Dense(1, "sigmoid").'
            ]
        if not low < high or self._model.losses[label.name] not in _COMPARED:
            return []
        name = "log loss" if label.kind == "binary" else "mean squared error"
        loss, base, mean, samples = self._losses(j, label)
        if not samples or loss <= _NO_BETTER * base:
            return []
        of = f"The {name} of {label.name!r}, {loss:.5g} over the later {samples:,} samples, is"
        by_mean = f"{base:.5g}, that of always predicting the label's mean {mean:.4g}"
        rates = f"the learning rates ({self._rates()}) tenfold, or let `streamtrain tune` search for better ones"
        if learning.moved < _HARDLY_MOVED:
            moved = f"weights and rows have hardly moved ({learning.moved:.2%})"
            return [f"{of} no better than {by_mean}, and {moved}. Raise {rates}."]
        if loss > _WORSE * base:
            return [f"{of} worse than {by_mean}: the model diverges. Lower {rates}."]
        return [
            f"{of} no better than {by_mean}. Do the features say anything about the label, and are they known at the "
            "time of the event? `streamtrain tune` searches for settings that learn more."
        ]

    def _losses(self, j: int, label: Label) -> tuple[float, float, float, int]:
        """Over the later half of the curve: the loss, that of the label's mean, this mean, and samples."""
        segments = self.curve.points()[label.name]
        later = segments[len(segments) // 2 :]
        samples = np.array([one.samples for one in later], np.float64)
        losses = np.array([one.log_loss if label.kind == "binary" else one.mean_squared_error for one in later])
        known = np.isfinite(losses) & (samples > 0)
        if not known.any():
            return math.nan, math.nan, math.nan, 0
        samples, losses, counted = samples[known], losses[known], int(samples[known].sum())
        loss = float(losses @ samples / counted)
        if label.kind == "binary":
            mean = float(np.array([one.label_mean for one in later])[known] @ samples / counted)
            return loss, _entropy(mean), mean, counted
        weight, total, squares = self._moments[:, j]
        mean = float(total / weight)
        return loss, float(squares / weight) - mean**2, mean, counted

    def _rates(self) -> str:
        model = self._model
        rates = [f"embedding_optimizer={_call(model.embedding_optimizer)}"] if model.schema.embedded else []
        return ", ".join([*rates, f"dense_optimizer={_call(model.dense_optimizer)}"])


def _call(optimizer: object) -> str:
    return f"st.{type(optimizer).__name__}({getattr(optimizer, 'rate', 0):g})"


def _useless(feature: str, field: str, what: str) -> str:
    return f"feature {feature!r} {what}, so it predicts nothing: check the field {field!r}, or leave the feature out."
