"""Traffic: which shares of the requests for a model go to which arms, and which arm gets a copy of them."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from streamtrain.errors import ConfigError
from streamtrain.store.json import convert, parse_json
from streamtrain.store.publication import PROD

HEAD = "head"
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Arm:
    """What predicts a share of the requests.

    Attributes:
        name: as it was given: "prod", "canary", "12", "challenger" or "challenger@canary".
        model: the published model.
        at: "prod" (what is served of it), "head", the number of a version, or a label.
    """

    name: str
    model: str
    at: str


@dataclass(frozen=True)
class Traffic:
    """Shares of the requests that name a model and neither a version nor a label.

    Attributes:
        arms: with their weights in percent, which add up to 100.
        mirror: what also predicts all requests, without an effect on responses; None: nothing.
        stopped: arms that the watchdog has taken all requests away from, and why.
    """

    arms: tuple[tuple[Arm, float], ...]
    mirror: Arm | None = None
    stopped: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        parts = [f"{arm.name}={weight:g}" for arm, weight in self.arms]
        return " ".join([*parts, *([f"mirror={self.mirror.name}"] if self.mirror else [])])

    @property
    def every_arm(self) -> list[Arm]:
        """Its arms, also those without a share, then the mirror."""
        return [*(arm for arm, _ in self.arms), *([self.mirror] if self.mirror else [])]

    def weights(self) -> dict[str, float]:
        """Weight in percent by name."""
        return {arm.name: weight for arm, weight in self.arms}

    def stop(self, name: str, model: str, why: str) -> "Traffic":
        """Without requests for an arm: its weight goes to what is served of the model."""
        weight = self.weights()[name]
        arms = self.arms if PROD in self.weights() else ((Arm(PROD, model, PROD), 0.0), *self.arms)
        shares = {name: -weight, PROD: weight}
        stopped = {**dict(self.stopped), name: why}
        divided = tuple((arm, share + shares.get(arm.name, 0.0)) for arm, share in arms)
        return replace(self, arms=divided, stopped=tuple(stopped.items()))

    def to_json(self) -> str:
        """The inverse of `from_json`."""
        arms = [vars(arm) | {"weight": weight} for arm, weight in self.arms]
        mirror = None if self.mirror is None else vars(self.mirror)
        return json.dumps({"arms": arms, "mirror": mirror, "stopped": dict(self.stopped)})

    @classmethod
    def from_json(cls, text: bytes) -> "Traffic":
        """The inverse of `to_json`.

        Raises:
            ValueError: the text is none.
        """
        given = convert(dict[str, Any], parse_json(text))
        try:
            weights = [(convert(Arm, one), one["weight"]) for one in given["arms"]]
            mirror = None if given["mirror"] is None else convert(Arm, given["mirror"])
            stopped = convert(dict[str, str], given.get("stopped", {}))
        except (KeyError, TypeError, AttributeError) as exc:
            raise ValueError(f"not the traffic of a model: {exc!r}") from exc
        check_weights({arm.name: weight for arm, weight in weights})
        return cls(tuple((arm, float(weight)) for arm, weight in weights), mirror, tuple(stopped.items()))


def check_weights(weights: Mapping[str, float]) -> None:
    """Raises ConfigError unless weights are percentages that add up to 100."""
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= 100:
            raise ConfigError(f"the weight of {name!r} must be a percentage from 0 to 100, not {weight!r}")
    if not math.isclose(total := math.fsum(weights.values()), 100, abs_tol=_TOLERANCE):
        raise ConfigError(f"weights must add up to 100, not {total:g}: {describe_weights(weights)}")


def describe_weights(weights: Mapping[str, float]) -> str:
    """The weights as text, such as "prod=95 canary=5"."""
    return " ".join(f"{name}={weight:g}" for name, weight in weights.items())
