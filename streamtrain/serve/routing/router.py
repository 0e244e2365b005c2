"""The router: which arm predicts a request, and with what probability."""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import orjson

from streamtrain._core import hash_bytes
from streamtrain.serve.predictor import Predictor
from streamtrain.serve.registry import HEAD, Registry
from streamtrain.store.publication import PROD, parse_version_number
from streamtrain.store.traffic import Arm, Traffic

KEY = "x-routing-key"


class TrafficControl(Protocol):
    """The traffic of a model, for all servers. Thread-safe.

    Every method may raise OriginUnavailable, PublicationError, and Superseded if it was changed meanwhile.
    """

    def read(self) -> Traffic | None:
        """The traffic in force; None: none has been set."""

    def change(
        self, weights: Mapping[str, float], who: str, why: str = "", *, mirror: str | None = None, force: bool = False
    ) -> Traffic:
        """Divides requests among arms; see RedisTraffic. Raises ConfigError, TrafficRefused."""

    def stop(self, traffic: Traffic, name: str, who: str, why: str) -> Traffic:
        """Gives an arm no more requests."""


class Routed(NamedTuple):
    """Where a request goes.

    Attributes:
        arm: that predicts it.
        propensity: the share of the requests that this arm gets in this process.
        model: name of the arm's model.
        choose: finds the arm's predictor; None: it is not loaded.
    """

    arm: Arm
    propensity: float
    model: str
    choose: Callable[[], Predictor | None]


class Router:
    """Divides the requests for one model among arms, by a hash of a routing key. All calls come from one event loop.

    A key always goes to the same arm; where weights change, only keys at the borders between arms move. Requests for
    an arm that this process has not loaded go to what is served.

    Args:
        own: name under which the model is published, also an attribute.
        registries: of all models of this process, by that name.
        field: of an instance, whose value is the key where the request has no header; None: there is none.

    Attributes:
        requests, failures: that arms of this process have predicted and have failed to, by name, since weights changed.
    """

    def __init__(self, own: str, registries: Mapping[str, Registry], field: str | None = None) -> None:
        self.own, self._registries, self._field = own, registries, field
        self._prod = Arm(PROD, own, PROD)
        self._traffic: Traffic | None = None
        self.requests, self.failures = Counter[str](), Counter[str]()

    @property
    def traffic(self) -> Traffic | None:
        """The traffic in force here; None: all requests go to what is served."""
        return self._traffic

    @property
    def mirror(self) -> Arm | None:
        """What also predicts all requests."""
        return self._traffic.mirror if self._traffic else None

    def follow(self, traffic: Traffic | None) -> None:
        """Routes requests like this from now on. May be called in any thread."""
        arms = [] if traffic is None else traffic.every_arm
        for name, registry in self._registries.items():
            versions = (parse_version_number(arm.at) for arm in arms if arm.model == name)
            numbers = frozenset(one for one in versions if one is not None)
            if arms and numbers != registry.requested and (numbers or name == self.own):
                registry.requested = numbers
        before, self._traffic = self._traffic, traffic
        if before is None or traffic is None or before.arms != traffic.arms:
            self.requests, self.failures = Counter(), Counter()

    def route(self, headers: Mapping[str, str], messages: Sequence[bytes]) -> Routed | None:
        """The arm of a request; None: there is no traffic to divide."""
        traffic = self._traffic
        if traffic is None:
            return None
        point, end, lost = 100 * self._point(headers, messages), 0.0, 0.0
        picked = self._prod
        share = 0.0
        is_picked = False
        for arm, weight in traffic.arms:
            end += weight
            if not weight:
                continue
            if arm != self._prod and self.find(arm) is None:
                lost += weight
                continue
            if not is_picked and end - weight <= point < end:
                picked, share, is_picked = arm, weight, True
        if picked == self._prod:
            share = lost + traffic.weights().get(PROD, 0.0)
        return Routed(picked, share / 100, picked.model, lambda: self.find(picked))

    def find(self, arm: Arm) -> Predictor | None:
        """The predictor of an arm, if it is loaded."""
        registry = self._registries.get(arm.model)
        if registry is None:
            return None
        if arm.at == PROD:
            return registry.served
        if arm.at == HEAD:
            return registry.find(HEAD)
        number = parse_version_number(arm.at)
        return registry.find_label(arm.at) or (None if number is None else registry.find(number))

    def _point(self, headers: Mapping[str, str], messages: Sequence[bytes]) -> float:
        """Where a request lies, from 0 to below 1: XXH64 of its key, or at random where it has none."""
        key = headers.get(KEY)
        if key is None and self._field is not None and messages:
            key = _value(messages[0], self._field)
        drawn = int.from_bytes(os.urandom(8)) if key is None else hash_bytes(key.encode("utf-8", "surrogatepass"))
        return (drawn >> 11) / (1 << 53)


def _value(message: bytes, field: str) -> str | None:
    """The value of a field as a key; None: there is none."""
    try:
        instance = orjson.loads(message)
    except ValueError:  # the predictor says what is wrong
        return None
    value = instance.get(field) if isinstance(instance, dict) else None
    return None if value is None or value == [] else value if isinstance(value, str) else orjson.dumps(value).decode()
