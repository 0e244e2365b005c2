"""Learning rates of a cluster: changes them while it learns."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from streamtrain.errors import ConfigError
from streamtrain.model.spec import Rates, Spec
from streamtrain.ps.nodes.shards import Control


class RateChange(NamedTuple):
    """A change of learning rates.

    Attributes:
        now: the rates in force.
        was: those before the change.
        initial: those of the model file with which the run began.
        epoch: the checkpoint that has them; None: none does yet.
    """

    now: Rates
    was: Rates
    initial: Rates
    epoch: int | None = None

    def to_json(self) -> dict[str, Any]:
        rates = zip(Rates._fields, self.now, self.was, self.initial, strict=True)
        named = {name: {"rate": now, "was": was, "initial": initial} for name, now, was, initial in rates}
        return {"rates": named, "epoch": self.epoch}

    def describe(self, rates: Rates) -> str:
        """Those of `rates` that the change concerns, such as "dense_optimizer.rate=0.001"."""
        changed = zip(Rates._fields, rates, self.now, self.was, strict=True)
        return " ".join(f"{name}.rate={rate:g}" for name, rate, now, was in changed if now != was)


def change_rates(control: Control, changes: Mapping[str, float | None]) -> RateChange:
    """Sets learning rates; the others stay as they are.

    Args:
        control: of shard 0, whose rates hold for a batch at all shards.
        changes: by the names of `Rates`; None: as the run began.

    Raises:
        ConfigError: a name or a rate is invalid, or nothing would change.
        ShardError: the shard does not answer, or refuses.
    """
    spec = Spec.from_json(control.status().spec)
    kept = {name: rate for name, rate in spec.rates.items() if name not in changes}
    wanted = spec.with_rates(
        kept
        | {name: spec.first_rates._asdict().get(name, 1.0) if rate is None else rate for name, rate in changes.items()}
    )
    if not changes:
        return RateChange(spec.current_rates, spec.current_rates, spec.first_rates)
    if wanted.rates == spec.rates:
        listed = ", ".join(f"{name}.rate is {rate:g}" for name, rate in spec.current_rates._asdict().items())
        raise ConfigError(f"nothing would change: {listed} already")
    control.set_rates(wanted.rates)
    return RateChange(wanted.current_rates, spec.current_rates, spec.first_rates)


def rates_to_json(status: Any | None) -> dict[str, Any] | None:
    """The rates in the status of a cluster, from that of shard 0; None: it does not answer, or is empty."""
    if status is None or not status.ready:
        return None
    spec = Spec.from_json(status.spec)
    pairs = zip(Rates._fields, spec.current_rates, spec.first_rates, strict=True)
    return {name: {"rate": rate, "initial": initial} for name, rate, initial in pairs}
