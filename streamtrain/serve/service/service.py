"""What all protocols share, over HTTP and gRPC: the predictor, limits, freshness, and the headers of responses."""

import asyncio
import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from streamtrain.address import Hosts
from streamtrain.errors import OriginUnavailable, PublicationError, StreamtrainError
from streamtrain.logs import REQUEST, LogThrottle
from streamtrain.metrics.serving import Counts, ServingMetrics, ServingState
from streamtrain.periodic import PeriodicTask
from streamtrain.serve.errors import HTTPError
from streamtrain.serve.feedback.feedback import Feedback
from streamtrain.serve.feedback.impressions import Answered
from streamtrain.serve.feedback.progress import AwaitedOffsets, parse_offsets
from streamtrain.serve.predictor import Predicted, Predictor
from streamtrain.serve.routing.router import Routed
from streamtrain.serve.service.admission import Admission, Admitted, RequestLimits
from streamtrain.serve.service.batcher import Batcher
from streamtrain.serve.service.served import Choose, ServedModel, Target
from streamtrain.serve.service.tokens import Tokens
from streamtrain.settings.groups import WatchdogSettings
from streamtrain.store.traffic import Traffic

logger = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")

_GROWTH = 4  # times the most bytes of a body that a request's instances may have, with what they share
_WATCHDOG_SECONDS = 1.0
_SETTLING_SECONDS = 0.5  # between checks whether one of several models has failed, of which there is no notice


@dataclass(frozen=True)
class ServingConfig:
    """How models are served.

    Attributes:
        admin_token: required for control; None: control is refused.
        read_token: required for all but health and the console's page; None: not required.
        hosts: host names that requests may use. Pages of other origins may not send requests in any case.
        max_body: bytes of a request's body.
        max_instances: of a request.
        offset_timeout: seconds that a request waits for the offsets in its x-min-offset.
        max_requests: for predictions, in flight at once.
        max_bodies: bytes of the bodies of all requests in flight.
        max_connections: open at once.
        receive_timeout: seconds to receive a whole request, and for a client to read a response.
        max_batch: instances that are predicted together; a single request may have more.
        max_queue: instances that may wait; more are refused with 503.
        max_wait: seconds that a request may wait to be predicted; then it is refused with 503.
        watchdog: when what is served counts as bad.
        startup_timeout: seconds during which no requests are accepted while nothing is loaded; afterwards they are
            answered with 503.
        grpc_listen: address of the gRPC endpoint; None: there is none.
        grpc_shares_port: whether other processes of this user may listen at the same address.
        failed: why models that should be served could not be loaded, by name.
        traffic: of the first model, until one is set; None: all requests go to what is served.
        traffic_every: seconds between polls of the traffic that is set for all servers.
        routing_key: field of an instance that is the routing key of requests without the header; None: there is none.
    """

    admin_token: str | None = field(default=None, repr=False)
    read_token: str | None = field(default=None, repr=False)
    hosts: Hosts = field(default_factory=Hosts)
    max_body: int = 8 << 20
    max_instances: int = 4096
    offset_timeout: float = 5.0
    max_requests: int = 1024
    max_bodies: int = 256 << 20
    max_connections: int = 4096
    receive_timeout: float = 30.0
    max_batch: int = 512
    max_queue: int = 8192
    max_wait: float = 1.0
    watchdog: WatchdogSettings = field(default_factory=WatchdogSettings)
    startup_timeout: float = 0.0
    grpc_listen: str | None = None
    grpc_shares_port: bool = False
    failed: Mapping[str, str] = field(default_factory=dict)
    traffic: Traffic | None = None
    traffic_every: float = 1.0
    routing_key: str | None = None


class Service:
    """Serves predictions of one or more models, from one event loop.

    Args:
        models: that are served; the first one is what the console shows at first.
        config: how to serve.
        feedback: where impressions and outcomes go; None: nowhere.
        now: seconds since the epoch.
        refused_connections: by reason, kept up to date by its owner, for the metrics; None: there are none.

    Attributes:
        models: by name.
        default: the first one.

    Raises:
        ConfigError: a token is empty, or both are the same.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        config: ServingConfig,
        feedback: Feedback | None = None,
        now: Callable[[], float] = time.time,
        *,
        refused_connections: Counts | None = None,
    ) -> None:
        self.models, self.default, self.config = {model.name: model for model in models}, models[0], config
        self.feedback = feedback or Feedback()
        self.tokens = Tokens(config.admin_token, config.read_token)
        self._refused_connections = refused_connections or {}
        self.admission = Admission(config.max_requests, config.max_bodies)
        self.metrics = ServingMetrics(now=now)
        self.batcher = Batcher(config.max_batch, config.max_queue, config.max_wait, observe=self.metrics.observe_batch)
        for model in models:
            if self.feedback.impressions is not None:
                self.feedback.impressions.check_fields(model.name, model.fields)
            model.meet(models, config.routing_key, config.traffic if model is self.default else None)
        self.metrics.watch(self._state)
        self._following = PeriodicTask(
            "follow-traffic", self._follow_traffic, config.traffic_every, subject="following the traffic"
        )
        self._watching = PeriodicTask("watchdog", self._look, _WATCHDOG_SECONDS, subject="the watchdog")
        self._now = now
        self._throttle = LogThrottle()
        self._changed = asyncio.Event()
        self._stopping = False
        self._listener: Callable[[], object] = lambda: None

    def open(self) -> None:
        """Starts, in the event loop that serves."""
        loop = asyncio.get_running_loop()
        self._listener = lambda: loop.call_soon_threadsafe(self._notify)
        for model in self.models.values():
            model.registry.listen(self._listener)
        self.feedback.start()
        self._watching.start()
        if any(model.control for model in self.models.values()):
            self._following.start()

    async def wait_loaded(self) -> None:
        """Waits until all models that can be loaded are, for at most `startup_timeout`, or until `stop`."""
        deadline = time.monotonic() + self.config.startup_timeout
        while not (self._is_loaded() or self._stopping) and (left := deadline - time.monotonic()) > 0:
            patience = threading.TIMEOUT_MAX if len(self.models) == 1 else _SETTLING_SECONDS
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(left, patience))

    def _is_loaded(self) -> bool:
        """Whether there is something to serve, and one model that fails is not what the others wait for."""
        models = self.models.values()
        return any(model.registry.served for model in models) and all(model.is_settled for model in models)

    def stop(self) -> None:
        """Announces that it will be closed soon. Thread-safe."""
        self._stopping = True
        self._listener()

    def close(self) -> None:
        """Stops, before the event loop does."""
        for model in self.models.values():
            model.registry.unlisten(self._listener)
        self._listener = lambda: None
        self.batcher.close()
        self._watching.close()
        if any(model.control for model in self.models.values()):
            self._following.close()
        for model in self.models.values():
            model.mirror.close()

    def find(self, name: str) -> ServedModel:
        """The model of a name.

        Raises:
            HTTPError: 404, there is none; 503, it could not be loaded.
        """
        if (found := self.models.get(name)) is not None:
            return found
        if name in self.config.failed:
            raise HTTPError(503, f"model {name!r} could not be loaded: {self.config.failed[name]}")
        if len(self.models) == 1:
            raise HTTPError(404, f"there is no model {name!r}; the model is {self.default.name!r}")
        raise HTTPError(404, f"there is no model {name!r}; the models are {', '.join(self.models)}")

    def resolve(self, name: str, version: str | None = None, label: str | None = None) -> Target:
        """What a request is to be predicted with: a version, a label, or else what is served.

        Raises:
            HTTPError: 404, unknown; 503, the model could not be loaded.
        """
        model = self.find(name)
        return Target(model, model.choose(version, label), is_named=not (version is None and label is None))

    def check_ready(self) -> None:
        """Raises HTTPError 503 unless every model can predict."""
        for name in self.config.failed:
            self.find(name)
        for model in self.models.values():
            try:
                model.ready()
            except HTTPError as exc:
                if len(self.models) == 1:
                    raise
                raise HTTPError(exc.status, f"model {model.name!r}: {exc}", exc.headers) from exc

    @property
    def is_ready(self) -> bool:
        """Whether `check_ready` would not raise."""
        return not self.config.failed and all(model.is_ready for model in self.models.values())

    def limits(self, admitted: Admitted | None = None) -> RequestLimits:
        """What a request may have; None: what it makes of what it shares is not counted with others."""
        take = admitted.take if admitted else lambda size: None
        return RequestLimits(self.config.max_instances, _GROWTH * self.config.max_body, take)

    async def predict(
        self,
        target: Target,
        messages: Sequence[bytes],
        headers: Mapping[str, str],
        began: float,
        *,
        one_by_one: bool = False,
    ) -> tuple[Predicted, dict[str, str]]:
        """Predicts instances: the predictions, and the headers of the response.

        Args:
            target: what to predict them with.
            messages: the instances, as JSON or `TensorSamples`.
            headers: of the request, or metadata of a call.
            began: when the request arrived, by `time.perf_counter`.
            one_by_one: see `Batcher.predict`.

        Raises:
            HTTPError: 413, too many instances; 412, the offsets were not learned in time; 400, no finite prediction.
            Overloaded, SampleError: see `Batcher.predict`.
        """
        self.limits().check(len(messages))
        wanted = headers.get("x-min-offset")
        routed = None if target.is_named else target.model.router.route(headers, messages)
        if routed is not None:
            predicted, about = await self._predict_routed(
                target, routed, messages, wanted, began, one_by_one=one_by_one
            )
        else:
            predicted, about = await self._predict(
                target, target.choose, messages, wanted, began, one_by_one=one_by_one
            )
        if (log := self.feedback.impressions) is not None:
            model, arrived = target.model, self._now() - (time.perf_counter() - began)
            answered = (REQUEST.get(), arrived, model.name, model.labels, model.own_fields, messages)
            log.take(Answered(*answered, predicted.predictions, about))
        return predicted, about

    async def _predict_routed(
        self,
        target: Target,
        routed: Routed,
        messages: Sequence[bytes],
        wanted: str | None,
        began: float,
        *,
        one_by_one: bool,
    ) -> tuple[Predicted, dict[str, str]]:
        """Like `predict`, by an arm; the mirror gets a copy."""
        model, name = target.model, routed.arm.name
        try:
            predicted, about = await self._predict(
                target, lambda: routed.choose() or target.choose(), messages, wanted, began, one_by_one=one_by_one
            )
        except StreamtrainError:
            model.router.failures[name] += 1
            self.metrics.routed(model.name, name, None)
            raise
        model.router.requests[name] += 1
        self.metrics.routed(model.name, name, time.perf_counter() - began)
        if routed.arm.model != model.published:
            columns = model.columns_of(routed.arm.model)
            predicted = predicted._replace(predictions=predicted.predictions[:, columns].copy())
        if (mirror := model.router.mirror) is not None and model.registry_of(mirror.model) is not None:
            model.mirror.copy(mirror, model.columns_of(mirror.model), messages, predicted.predictions)
        return predicted, about | {"x-arm": name, "x-propensity": f"{routed.propensity:.6g}"}

    async def _predict(
        self,
        target: Target,
        choose: Choose,
        messages: Sequence[bytes],
        wanted: str | None,
        began: float,
        *,
        one_by_one: bool,
    ) -> tuple[Predicted, dict[str, str]]:
        predictor = choose() if wanted is None else await self._wait_learned(choose, parse_offsets(wanted))
        predicted = await self.batcher.predict(predictor, messages, one_by_one=one_by_one)
        if not np.isfinite(predicted.predictions).all():
            at = int(np.flatnonzero(~np.isfinite(predicted.predictions).all(axis=1))[0])
            raise HTTPError(
                400, f"instance {at}: the prediction is not finite; check that its numbers are in the usual range"
            )
        self.metrics.predicted(target.model.name, predictor.name, time.perf_counter() - began)
        publication = predicted.publication
        about = {"x-model-version": predictor.name, "x-publication": str(publication.number)}
        if publication.watermark:
            about["x-trained-through"] = predictor.trained_through(publication)
            about["x-freshness-ms"] = str(max(0, round(1000 * (self._now() - publication.watermark))))
        return predicted, about

    def _look(self) -> None:
        failure: PublicationError | None = None
        for model in self.models.values():
            try:
                model.watchdog.check()
                if model.guard is not None:
                    model.guard.check()
            except OriginUnavailable:  # the updater logs it
                continue
            except PublicationError as exc:  # of one model; the others are watched nevertheless
                failure = exc
        if failure is not None:
            raise failure

    def _follow_traffic(self) -> None:
        for model in self.models.values():
            model.refresh_traffic()

    async def _wait_learned(self, choose: Choose, wanted: AwaitedOffsets) -> Predictor:
        """The predictor, once it has learned the samples at offsets, and those that came of outcomes."""
        timeout = self.config.offset_timeout
        deadline = time.monotonic() + timeout
        offsets = wanted.samples
        if wanted.outcomes:
            self.admission.wait()
            try:
                offsets = await self.feedback.wait_joined(wanted, deadline, timeout)
            finally:
                self.admission.waiting -= 1
        while True:
            changed, predictor = self._changed, choose()
            clock = predictor.publication.clock
            if all(clock.get(partition, 0) > offset for partition, offset in offsets.items()):
                return predictor
            self.admission.wait()
            try:
                await asyncio.wait_for(changed.wait(), deadline - time.monotonic())
            except TimeoutError:
                at = ",".join(f"{partition}:{offset}" for partition, offset in sorted(clock.items())) or "none"
                message = f"x-min-offset: not learned within {timeout:g} s; the next offsets to be learned are {at}"
                if times := self._throttle.allow():
                    logger.warning("%d requests timed out waiting for their x-min-offset; the last: %s", times, message)
                raise HTTPError(412, message) from None
            finally:
                self.admission.waiting -= 1

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _state(self) -> ServingState:
        """For the metrics."""
        return ServingState(
            models={model.name: model.state() for model in self.models.values()},
            waiting=self.batcher.waiting,
            under_way=self.admission.requests,
            shed=self.admission.refused,
            connections=self._refused_connections,
            unauthorized=self.tokens.refused,
            feedback=self.feedback.state(),
        )


def request_id(given: bytes) -> bytes:
    """The id of a request: the one that it has, if that is valid, or a new one."""
    return given if _ID.fullmatch(given) else os.urandom(8).hex().encode()
