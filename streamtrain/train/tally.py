"""Tally: what a loop has learned, and how good its predictions were."""

import logging
from collections.abc import Sequence
from typing import Protocol

from streamtrain.logs import Seldom
from streamtrain.metrics.worker import WorkerMetrics
from streamtrain.model.batch import Batch
from streamtrain.model.sampling import Sampling
from streamtrain.ps.clock import Span
from streamtrain.ps.push import Floats, PushStats

logger = logging.getLogger(__name__)


class Validation(Protocol):
    """What predictions are told to, such as `ProgressiveValidation`."""

    def update(self, predictions: Floats, labels: Floats, weights: Floats) -> None:
        """Takes those of a batch: float32 [n, L], [n, L] and [n]."""


class Tally:
    """Used by one thread.

    Args:
        metrics: where all is counted.
        validation: is told every prediction, made before its sample was learned.
        sampling: of the model, if it learns from a part: validation is told of all samples.

    Attributes:
        samples: number of samples learned from.
        watermark: latest event time learned, seconds since the epoch.
        stats: what became of gradients.
    """

    def __init__(self, metrics: WorkerMetrics, validation: Validation | None, sampling: Sampling | None) -> None:
        self._metrics = metrics
        self._validation = validation
        self._sampling = sampling
        self._seldom = Seldom()
        self.samples = 0
        self.watermark = 0.0
        self.stats = PushStats()

    def answered(self, stats: PushStats, spans: Sequence[Span]) -> None:
        """What became of the gradients of some offsets."""
        self.stats.add(stats)
        self._metrics.gradients(vars(stats))
        if times := self._seldom.due(times=bool(stats.non_finite_rows or stats.non_finite_dense)):
            logger.warning(
                "dropped gradients that are not finite, of %d batches; of the last: %d of rows, %d of dense slices; "
                "offsets %s",
                *(times, stats.non_finite_rows, stats.non_finite_dense),
                ", ".join(f"{start} to {end - 1} of partition {p}" for p, start, end in spans),
                extra={"batch": ",".join(f"{p}:{start}-{end - 1}" for p, start, end in spans)},
            )

    def repeated(self, batch: Batch) -> None:
        """All shards have learned a batch that some had before."""
        self._count(len(batch))
        self._metrics.repeated(len(batch))

    def learned(self, batch: Batch, predictions: Floats | None) -> None:
        """All shards have learned a batch for the first time."""
        if predictions is not None and self._validation is not None:
            weights = batch.weights
            if self._sampling is not None:
                predictions, weights = self._sampling.correct(predictions), self._sampling.represented(batch)
            self._validation.update(predictions, batch.labels, weights)
        self._count(len(batch))  # last: metrics may take the window's figures now, and not again before the next batch

    def _count(self, samples: int) -> None:
        self.samples += samples
        self._metrics.learned(samples)
        self._metrics.watermark(self.watermark)
