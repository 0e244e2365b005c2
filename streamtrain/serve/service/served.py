"""One of the models that a process serves: its publications, and which of them a request means."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from streamtrain.metrics.serving import LoadedState, ModelState
from streamtrain.model.features import Categorical, Cross
from streamtrain.model.schema import Schema
from streamtrain.serve.errors import RETRY_SECONDS, HTTPError
from streamtrain.serve.feedback.impressions import OwnFields
from streamtrain.serve.follower import RegistryUpdater
from streamtrain.serve.predictor import Predictor
from streamtrain.serve.registry import HEAD, Registry, Version
from streamtrain.serve.routing.guard import ArmGuard
from streamtrain.serve.routing.mirror import Mirror
from streamtrain.serve.routing.router import Router, TrafficControl
from streamtrain.serve.selection import Selection
from streamtrain.serve.watchdog import Watchdog
from streamtrain.settings.groups import WatchdogSettings
from streamtrain.store.publication import parse_version_number
from streamtrain.store.traffic import Traffic

logger = logging.getLogger(__name__)

Choose = Callable[[], Predictor]


@dataclass(frozen=True)
class InputField:
    """A field of an instance that features read.

    Attributes:
        name: its key.
        ids: whether it holds ids, one or a list; else a number.
        required: whether an instance without it is rejected.
    """

    name: str
    ids: bool
    required: bool


def input_fields(schema: Schema) -> dict[str, InputField]:
    """The fields by name, in the order of the features; one that several features read appears once."""
    fields: dict[str, InputField] = {}
    for one in schema.features:
        if isinstance(one, Cross):
            continue
        before = fields.get(one.field_name)
        ids, required = isinstance(one, Categorical), one.default is None
        if before is not None:
            ids, required = ids or before.ids, required or before.required
        fields[one.field_name] = InputField(one.field_name, ids, required)
    return fields


class ServedModel:
    """A model that is served.

    Args:
        registry: of its publications.
        updater: keeps the registry up to date; the caller starts and closes it. None: nothing does.
        watchdog: when what is served counts as bad.
        control: of its traffic, for all servers; None: there is none, only what is set at the start.

    Attributes:
        name: under which it is served.
        published: under which it is published, as arms of the traffic name it.
        fields: that its instances may have, by name.
        labels: names of its outputs, by column of predictions.
        own_fields: of its samples, which its instances do not set.
    """

    def __init__(
        self,
        registry: Registry,
        updater: RegistryUpdater | None,
        watchdog: WatchdogSettings,
        control: TrafficControl | None = None,
    ) -> None:
        self.registry, self.updater, self.control = registry, updater, control
        self.model, self.name, self.published = registry.model, registry.model.name, registry.origin.name
        self.fields: Mapping[str, InputField] = input_fields(self.model.schema)
        self.labels = [label.name for label in self.model.labels]
        self.own_fields = OwnFields(self.model.schema.time, self.model.schema.weight)
        self.selection = updater.selection if updater else Selection(registry)
        self.watchdog = Watchdog(self.selection, watchdog)
        self.routed_fields = self.fields
        self._policy = watchdog
        self._initial: Traffic | None = None
        self._meet([self], None)

    def meet(self, models: Iterable["ServedModel"], key: str | None, initial: Traffic | None = None) -> None:
        """Before it is served: the other models of this process, to which its requests may be routed.

        Args:
            models: all of them.
            key: a field of instances that is the routing key where a request has no header.
            initial: its traffic until one is set.
        """
        self._initial = initial
        self._meet([one for one in models if {*self.labels} <= {*one.labels}], key)
        self.follow_traffic(initial)

    def _meet(self, models: Iterable["ServedModel"], key: str | None) -> None:
        self._peers = {one.published: one for one in models}
        self.router = Router(self.published, {name: one.registry for name, one in self._peers.items()}, key)
        self.mirror = Mirror(self.router.find, self.labels)
        self.guard: ArmGuard | None = None
        if self.control is not None:
            self.guard = ArmGuard(self.router, self.control, self.registry_of, self._policy)

    def registry_of(self, model: str) -> Registry | None:
        """The registry of a model that has all of this one's labels."""
        return self._peers[model].registry if model in self._peers else None

    def columns_of(self, model: str) -> list[int]:
        """For each of the labels, its column in predictions of a model of this process."""
        return [self._peers[model].labels.index(label) for label in self.labels]

    def refresh_traffic(self) -> None:
        """Reads the traffic that is set for all servers.

        Raises:
            OriginUnavailable, PublicationError: it cannot be read; it stays as it was.
        """
        if self.control is not None:
            self.follow_traffic(self.control.read() or self._initial)

    def follow_traffic(self, traffic: Traffic | None) -> None:
        """Routes requests like this from now on."""
        if traffic == self.router.traffic:
            return
        arms = [] if traffic is None else traffic.every_arm
        others = [self._peers[arm.model] for arm in arms if arm.model in self._peers]
        if len(self.fields) > 1:  # of a single input clients may send plain values
            self.routed_fields = {name: field for one in [*others, self] for name, field in one.fields.items()}
        self.router.follow(traffic)
        if traffic is not None:
            logger.info("traffic of %s: %s", self.name, traffic)

    def choose(self, version: str | None = None, label: str | None = None) -> Choose:
        """A function that finds the predictor of a version or a label, or else the one that is served.

        It may be called again, as loaded versions change.

        Raises:
            HTTPError: 404, unknown; and when it is called: 404, not loaded; 503, nothing is loaded yet.
        """
        if label is not None:
            return lambda: self._loaded(self.registry.find_label(label), f"label {label!r}")
        if version is not None:
            number = parse_version(version)
            return lambda: self._loaded(self.registry.find(number), f"version {version}")
        return self._served

    def ready(self) -> Predictor:
        """The predictor that is served, if it is complete.

        Raises:
            HTTPError: 503, nothing is loaded, or what is served lacks rows that the store has lost.
        """
        predictor = self._served()
        if self.updater is not None and self.updater.fault:
            raise HTTPError(503, self.updater.fault, {"retry-after": RETRY_SECONDS})
        return predictor

    @property
    def is_ready(self) -> bool:
        """Whether `ready` would not raise."""
        return self.registry.served is not None and not (self.updater and self.updater.fault)

    @property
    def is_settled(self) -> bool:
        """Whether something is served, or could not be loaded at the first attempt."""
        return self.registry.served is not None or bool(self.updater and self.updater.trouble)

    def origin_state(self) -> str:
        """The state of the store of publications, in a few words."""
        if self.updater is None:
            return "not followed"
        stale = self.updater.stale_seconds
        return f"away for {stale:.0f} s: {self.updater.trouble}" if stale > 1 else self.updater.trouble or "ok"

    def state(self) -> ModelState:
        """For the metrics."""
        registry, served = self.registry, self.registry.served
        wanted = self.updater.selection.wanted if self.updater else None
        loaded = {
            str(version): LoadedState(
                one.publication.number,
                one.publication.watermark,
                one.loaded.rows,
                one.loaded.nbytes,
                dict(one.found),
                one.loaded.lookups,
            )
            for version, one in registry.resident.items()
        }
        return ModelState(
            loaded=loaded,
            served=served.name if served else None,
            as_wanted=wanted in (None, registry.served_version),
            swaps=registry.swaps,
            rollbacks=self.watchdog.rollbacks,
            probes=self.watchdog.probes,
            refused=registry.refused,
            stale_seconds=self.updater.stale_seconds if self.updater else 0,
            has_lost=bool(self.updater and self.updater.has_lost),
            arms=self.router.traffic.weights() if self.router.traffic else {},
            mirror=self.mirror.state(),
            stopped=self.guard.stopped if self.guard else 0,
        )

    def _served(self) -> Predictor:
        served = self.registry.served
        if served is None:
            trouble = self.updater.trouble if self.updater else ""
            why = f": {trouble}" if trouble else ""
            raise HTTPError(503, f"nothing is loaded yet{why}", {"retry-after": RETRY_SECONDS})
        return served

    def _loaded(self, predictor: Predictor | None, what: str) -> Predictor:
        if predictor is None:
            loaded = ", ".join(map(str, self.registry.resident)) or "none"
            raise HTTPError(404, f"{what} is not loaded; loaded versions: {loaded}")
        return predictor


@dataclass(frozen=True)
class Target:
    """What a request is to be predicted with.

    Attributes:
        model: the one that it names.
        choose: finds the predictor; may be called again, as loaded versions change.
        is_named: whether it names a version or a label, too.
    """

    model: ServedModel
    choose: Choose
    is_named: bool = False

    @property
    def fields(self) -> Mapping[str, InputField]:
        """Fields that instances may have, by name."""
        return self.model.fields if self.is_named else self.model.routed_fields


def parse_version(text: str) -> Version:
    """A version in a path: its number, or 0 or "head" for the head.

    Raises:
        HTTPError: 404, it is neither.
    """
    if text in ("0", HEAD):
        return HEAD
    if (number := parse_version_number(text)) is not None:
        return number
    raise HTTPError(404, f'there is no version {text!r}; versions are numbers, or "head"')
