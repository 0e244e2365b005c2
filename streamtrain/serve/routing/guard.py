"""The guard of arms: takes the requests away from an arm that fails on samples of the stream."""

import logging
import time
from collections.abc import Callable

import numpy as np

from streamtrain.errors import OriginUnavailable, Superseded
from streamtrain.model.batch import Batch
from streamtrain.model.model import Model
from streamtrain.quality.probes import decode_probes
from streamtrain.serve.predictor import Predictor
from streamtrain.serve.registry import Registry
from streamtrain.serve.routing.router import Router, TrafficControl
from streamtrain.settings.groups import WatchdogSettings
from streamtrain.store.publication import PROD, ProbedOrigin
from streamtrain.store.traffic import Arm, Traffic

logger = logging.getLogger(__name__)

WHO = "watchdog"

_RENEW_SECONDS = 10.0  # between reads of newer probes


class ArmGuard:
    """Predicts probes with each arm but the one that is served, as the watchdog does with that one.

    An arm that predicts more than `watchdog.non_finite` of its probes with errors or not finitely gets no more
    requests, on all servers, as long as what is served predicts its own ones. Requests of clients have no say in it.

    Args:
        router: of the requests.
        control: of the traffic, for all servers.
        registries: of all models of this process, by name.
        policy: when an arm counts as bad.
        now: seconds of a monotonic clock.

    Attributes:
        stopped: arms that it has taken all requests from.
    """

    def __init__(
        self,
        router: Router,
        control: TrafficControl,
        registry: Callable[[str], Registry | None],
        policy: WatchdogSettings,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stopped = 0
        self._now = now
        self._probes: dict[str, tuple[Batch | None, float]] = {}  # by model, and until when they are good enough
        self._router, self._control, self._registry, self._policy = router, control, registry, policy
        self._good: dict[Arm, tuple[str, int]] = {}  # publications that were found good

    def checked(self, arm: Arm) -> int | None:
        """The publication with which an arm was last found good; None: there was none. May be called in any thread."""
        good = self._good.get(arm)
        return None if good is None else good[1]

    def check(self) -> str:
        """Checks the arms whose publications have changed; returns what was wrong with one that was stopped, or "".

        Raises:
            OriginUnavailable, PublicationError: the store cannot be asked now.
        """
        traffic = self._router.traffic
        for arm, weight in traffic.arms if traffic else ():
            predictor = self._router.find(arm)
            if not weight or arm.name == PROD or predictor is None:
                continue
            seen = predictor.name, predictor.publication.number
            if self._good.get(arm) == seen:
                continue
            found = self._fault(arm, predictor)
            if found is None:
                continue
            if not found:
                self._good[arm] = seen
                continue
            assert traffic is not None
            return self._stop(traffic, arm, found)
        return ""

    def _stop(self, traffic: Traffic, arm: Arm, found: str) -> str:
        """Stops the arm unless the traffic has changed since it was checked: another server may have stopped it."""
        why = f"{arm.name} fails on samples of the stream: {found}"
        if self._prod_fails():
            logger.error("%s, but what is served fails as well: it keeps its requests", why)
            return ""
        try:
            self._router.follow(self._control.stop(traffic, arm.name, WHO, why))
        except Superseded:  # by another server, or by a person
            return ""
        self.stopped += 1
        logger.error("%s: it gets no more requests", why)
        return why

    def _prod_fails(self) -> bool:
        prod = Arm(PROD, self._router.own, PROD)
        predictor = self._router.find(prod)
        return predictor is None or bool(self._fault(prod, predictor))

    def _fault(self, arm: Arm, predictor: Predictor) -> str | None:
        """Why an arm is bad; "": it is good; None: there are no probes to tell."""
        registry = self._registry(arm.model)
        if registry is None or not isinstance(registry.origin, ProbedOrigin):
            return None
        batch, until = self._probes.get(arm.model, (None, 0.0))
        if not batch or self._now() >= until:
            batch = decode_probes(registry.model.schema, registry.origin.probes(), self._policy.predictions)
            self._probes[arm.model] = batch, self._now() + _RENEW_SECONDS
        if not batch:
            return None
        bad, why = _bad_share(registry.model, registry, predictor, batch)
        return why if bad > self._policy.non_finite else ""


def _bad_share(model: Model, registry: Registry, predictor: Predictor, batch: Batch) -> tuple[float, str]:
    own = Predictor(model, registry.graph, predictor.loaded, predictor.name)
    try:
        predictions = own.predict(batch)
    except OriginUnavailable:
        raise
    except Exception as exc:  # any error: requests run into it as well
        return 1.0, f"{type(exc).__name__}: {exc}"
    bad = len(batch) - int(np.count_nonzero(np.isfinite(predictions).all(axis=1)))
    return bad / len(batch), f"{bad} of {len(batch)} predictions are not finite"
