"""Watchdog: looks at what is predicted, and has something else served when what is served turns out to be bad."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamtrain.errors import PublicationError
from streamtrain.serve.predictor import Predicted
from streamtrain.serve.registry import HEAD, Version
from streamtrain.serve.selection import Selection

logger = logging.getLogger(__name__)

Reason = Literal["non_finite", "mean"]
WHO = "watchdog"


@dataclass(frozen=True)
class Watch:
    """When what is served counts as bad.

    Attributes:
        non_finite: share of predictions that are NaN or infinite, above which; 1: never.
        mean_factor: by which the mean of the predictions may differ from what it was before; None: it is not looked at.
        predictions: over so many both are taken.
        window: seconds after a change for which a version is watched; the head changes all the time.
    """

    non_finite: float = 0.5
    mean_factor: float | None = None
    predictions: int = 1000
    window: float = 600.0


class Fault(NamedTuple):
    """What is bad about a version, or the head.

    Attributes:
        version: which.
        reason: for the metrics.
        text: a sentence.
    """

    version: Version
    reason: Reason
    text: str


class Watchdog:
    """Takes predictions in blocks, and compares each with the last good block of what was served before.

    A version is left at most once: who has it served again, wants it. One that was published before what was served is
    not watched: to go back is the way out, and is not to lead further. `observe` is called from one event loop.

    Args:
        selection: of what is served.
        watch: what is watched for.
        labels: names of the predictions' columns.
        now: seconds of a clock that never goes back.

    Attributes:
        rollbacks: how often it had something else served, by reason.
    """

    def __init__(
        self, selection: Selection, watch: Watch, labels: list[str], now: Callable[[], float] = time.monotonic
    ) -> None:
        self.rollbacks: dict[Reason, int] = {"non_finite": 0, "mean": 0}
        self._selection, self._watch, self._labels, self._now = selection, watch, labels, now
        self._left: set[Version] = set()
        self._version: Version | None = None
        self._number = 0  # of the publication that predicted last
        self._is_back = False
        self._since = now()
        self._usual: NDArray[np.float64] | None = None  # means [L] of the block to compare with
        self._good: NDArray[np.float64] | None = None  # means [L] of the last good block of what is served now
        self._clear()

    def observe(self, version: Version, predicted: Predicted, is_finite: bool) -> Fault | None:
        """Takes predictions of what is served; a fault, if one shows.

        Args:
            version: that is served.
            predicted: with predictions float32 [n, L].
            is_finite: whether all of them are.
        """
        if version != self._version:
            self._begin(version, predicted.publication.number)
        self._number = predicted.publication.number
        predictions = predicted.predictions
        self._count += len(predictions)
        if not is_finite:
            finite = np.isfinite(predictions).all(axis=1)
            self._bad += len(predictions) - int(np.count_nonzero(finite))
            predictions = predictions[finite]
        if self._watch.mean_factor is not None:
            self._sums += predictions.sum(0, np.float64)
        return self._end_block(version, predicted) if self._count >= self._watch.predictions else None

    def react(self, fault: Fault) -> None:
        """Has something else served, if there is anything; takes as long as Redis, or a load, does."""
        if fault.version in self._left:
            return
        try:
            served = self._selection.leave(fault.version, self._left, WHO, fault.text)
        except PublicationError as exc:
            logger.error("%s, but nothing else can be served: %s", fault.text, exc)  # tried again with the next block
            return
        if served is None:
            return
        self.rollbacks[fault.reason] += 1
        logger.error("%s: rolled back to %s", fault.text, HEAD if served.version is None else served.version)
        if fault.version != HEAD:
            self._left.add(fault.version)

    def _begin(self, version: Version, number: int) -> None:
        self._is_back = version != HEAD and number < self._number
        self._version, self._since = version, self._now()
        self._usual = self._usual if self._good is None else self._good
        self._good = None
        self._clear()

    def _clear(self) -> None:
        self._count = self._bad = 0
        self._sums = np.zeros(len(self._labels))

    def _end_block(self, version: Version, predicted: Predicted) -> Fault | None:
        count, bad = self._count, self._bad
        means = self._sums / max(1, count - bad)
        self._clear()
        fault: Fault | None = None
        is_watched = version == HEAD or self._now() - self._since <= self._watch.window
        if is_watched and not self._is_back:
            name = "the head" if version == HEAD else f"version {version}"
            if bad > self._watch.non_finite * count:
                fault = Fault(version, "non_finite", f"{bad} of {count} predictions of {name} are not finite")
            elif shifted := self._shifted(means, predicted):
                fault = Fault(version, "mean", f"predictions of {name} have moved: {shifted}")
        if fault is None and bad < count:
            self._good = means
            if version == HEAD:
                self._usual = means
        return fault

    def _shifted(self, means: NDArray[np.float64], predicted: Predicted) -> str:
        """Which mean is too far from what is usual; of means that are not above 0 no factor can be said."""
        factor = self._watch.mean_factor
        if factor is None:
            return ""
        for j, label in enumerate(self._labels):
            now = float(means[j])
            learned = predicted.publication.metrics.get(label, {}).get("label_mean")
            usual = learned if self._usual is None else float(self._usual[j])
            if usual and min(now, usual) > 0 and max(now / usual, usual / now) > factor:
                return f"the mean of {label} is {now:.4g}, after {usual:.4g}"
        return ""
