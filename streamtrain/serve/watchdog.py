"""Watchdog: predicts samples of the stream with what is served, and rolls back when the predictions are bad."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamtrain.errors import PublicationError
from streamtrain.logs import LogThrottle
from streamtrain.model.batch import Batch
from streamtrain.quality.probes import decode_probes
from streamtrain.serve.predictor import Predictor
from streamtrain.serve.registry import HEAD, Version
from streamtrain.serve.selection import Selection
from streamtrain.settings.groups import WatchdogSettings
from streamtrain.store.publication import Floats, ProbedOrigin

logger = logging.getLogger(__name__)

RollbackReason = Literal["non_finite", "mean"]
Means = NDArray[np.float64]  # [L]
WHO = "watchdog"

_RENEW_SECONDS = 10.0  # between reads of newer probes
_LOG_SECONDS = 60.0


class Anomaly(NamedTuple):
    """Why a version, or the head, is bad.

    Attributes:
        version: number, or "head".
        reason: for the metrics.
        text: as a sentence.
    """

    version: Version
    reason: RollbackReason
    text: str


class Watchdog:
    """Predicts probes with what is served, and compares the predictions with those of what was served before.

    Probes are samples of the stream (quality/probes.py). Requests are not used: inputs for which a good version has no
    finite prediction are easy to find, and clients must not be able to cause a rollback.

    A version is rolled back at most once; promoting it again is taken as intent. A version older than the one served
    before is not watched, as going back is the way out. Means are compared on the same probes, so new ones are read
    only after a good check of the head. `check` is called by one thread.

    Args:
        selection: of what is served.
        policy: when what is served counts as bad.
        now: seconds of a monotonic clock.

    Attributes:
        rollbacks: number of rollbacks, by reason.
        probes: number of samples in the last check; 0: there was none.
    """

    def __init__(
        self, selection: Selection, policy: WatchdogSettings, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.rollbacks: dict[RollbackReason, int] = {"non_finite": 0, "mean": 0}
        self.probes = 0
        self._selection, self._registry, self._policy, self._now = selection, selection.registry, policy, now
        self._labels = [label.name for label in self._registry.model.labels]
        self._demoted: set[Version] = set()
        self._version: Version | None = None
        self._number = 0  # of the publication checked last
        self._is_back = False
        self._since = now()
        self._batch: Batch | None = None
        self._usual: Means | None = None  # mean predictions of the probes, by what was served before
        self._good: Means | None = None  # by what is served now
        self._taken = now()
        self._seen: tuple[Version, int] | None = None  # checked and found good
        self._seldom = LogThrottle(_LOG_SECONDS, now)

    def check(self) -> Anomaly | None:
        """Checks what is served, if it has changed, and rolls back if it is bad; returns why.

        Blocks on Redis, or on loading a version.

        Raises:
            OriginUnavailable, PublicationError: it cannot be checked now.
        """
        served = self._registry.served
        if served is None:
            return None
        version: Version = HEAD if served.name == HEAD else int(served.name)
        if self._batch is None:
            self._renew()
        if self._batch is None or self._seen == (version, served.publication.number):
            return None
        publication = served.publication
        predictions, failure = self._try(served, self._batch)
        means = {label: one.get("label_mean") for label, one in publication.metrics.items()}
        fault = self.judge(version, publication.number, predictions, means, failure)
        if fault is None:
            self._seen = version, publication.number
            if version == HEAD:
                self._renew_after(served)
        elif fault.reason == "non_finite" and self._are_others_bad(served, self._batch):
            if self._seldom.allow():
                logger.error("%s, but no other loaded publication predicts them either: no rollback", fault.text)
        elif self.react(fault) and version != HEAD:
            self._seen = version, publication.number  # should it be served again, that is intent
        return fault

    def judge(
        self,
        version: Version,
        number: int,
        predictions: Floats,
        label_means: Mapping[str, float | None],
        failure: str = "",
    ) -> Anomaly | None:
        """Judges predictions of the probes by what is served.

        Args:
            version: that is served.
            number: of its publication.
            predictions: float32 [n, L].
            label_means: of the publication's window, for what has nothing before it.
            failure: why there are no predictions; they are all NaN then.
        """
        if version != self._version:
            self._begin(version, number)
        self._number = number
        finite = np.isfinite(predictions).all(axis=1)
        count = self.probes = len(predictions)
        bad = count - int(np.count_nonzero(finite))
        means = predictions[finite].mean(0, np.float64) if bad < count else np.zeros(len(self._labels))
        if self._is_watched(version):
            name = "the head" if version == HEAD else f"version {version}"
            if bad > self._policy.non_finite * count:
                why = failure or f"{bad} of {count} predictions are not finite"
                return Anomaly(version, "non_finite", f"{name} fails on samples of the stream: {why}")
            if shifted := self._shifted(means, count, label_means):
                return Anomaly(
                    version, "mean", f"predictions of {name} for samples of the stream have shifted: {shifted}"
                )
        if bad < count:
            self._good = means
            if version == HEAD:
                self._usual = means
        return None

    def react(self, fault: Anomaly) -> bool:
        """Rolls back; False: there is nothing to roll back to, and it is to be retried.

        Blocks on Redis, or on loading a version.
        """
        if fault.version in self._demoted:
            return True
        try:
            served = self._selection.demote(fault.version, self._demoted, WHO, fault.text)
        except PublicationError as exc:  # retried with the next check
            if self._seldom.allow():
                logger.error("%s, but nothing else can be served: %s", fault.text, exc)
            return False
        if served is None:
            return True
        self.rollbacks[fault.reason] += 1
        logger.error("%s: rolled back to %s", fault.text, HEAD if served.version is None else served.version)
        if fault.version != HEAD:
            self._demoted.add(fault.version)
        return True

    def _begin(self, version: Version, number: int) -> None:
        self._is_back = version != HEAD and number < self._number
        self._version, self._since = version, self._now()
        self._usual = self._usual if self._good is None else self._good
        self._good = None

    def _is_watched(self, version: Version) -> bool:
        return not self._is_back and (version == HEAD or self._now() - self._since <= self._policy.window)

    def _renew(self) -> None:
        """Reads the current probes, if there are any."""
        self._taken = self._now()
        origin = self._registry.origin
        if not isinstance(origin, ProbedOrigin):
            return
        found = decode_probes(self._registry.model.schema, origin.probes(), self._policy.predictions)
        self._batch = found or self._batch

    def _renew_after(self, served: Predictor) -> None:
        """Reads newer probes; the head, just found good, sets their usual means."""
        if self._now() - self._taken < _RENEW_SECONDS:
            return
        before = self._batch
        self._renew()
        assert self._batch is not None
        predictions, _ = self._try(served, self._batch)
        finite = np.isfinite(predictions).all(axis=1)
        if 2 * np.count_nonzero(finite) < len(predictions):
            self._batch = before
            return
        self._good = self._usual = predictions[finite].mean(0, np.float64)

    def _try(self, predictor: Predictor, batch: Batch) -> tuple[Floats, str]:
        """Predictions float32 [n, L], and why they are all NaN, or ""."""
        own = Predictor(self._registry.model, self._registry.graph, predictor.loaded, predictor.name)
        try:
            return own.predict(batch), ""
        except PublicationError:  # its rows cannot be looked up
            raise
        except Exception as exc:  # any error: requests run into it as well
            return np.full((len(batch), len(self._labels)), np.nan, np.float32), f"{type(exc).__name__}: {exc}"

    def _are_others_bad(self, served: Predictor, batch: Batch) -> bool:
        """Whether all other loaded publications fail, too: then the probes, or this process, may be at fault."""
        others = [one for one in self._registry.resident.values() if one is not served]
        shares = [1 - float(np.isfinite(self._try(one, batch)[0]).all(axis=1).mean()) for one in others]
        return bool(shares) and min(shares) > self._policy.non_finite

    def _shifted(self, means: Means, count: int, label_means: Mapping[str, float | None]) -> str:
        """Describes the first mean that has moved too far, or ""; there is no factor between means of 0 or below."""
        factor = self._policy.mean_factor
        if factor is None:
            return ""
        for j, label in enumerate(self._labels):
            now = float(means[j])
            learned = label_means.get(label) if count >= self._policy.predictions else None
            usual = learned if self._usual is None else float(self._usual[j])
            if usual and min(now, usual) > 0 and max(now / usual, usual / now) > factor:
                return f"the mean of {label} is {now:.4g}, after {usual:.4g}"
        return ""
