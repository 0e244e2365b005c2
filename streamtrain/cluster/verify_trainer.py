"""Verify, the part of training: predictions by what shards have, as a worker makes them before it learns."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import grpc

from streamtrain.cluster.places import places_of
from streamtrain.errors import ShardRefused, ShardUnavailable
from streamtrain.model.batch import Batch
from streamtrain.model.model import Model
from streamtrain.model.spec import Spec
from streamtrain.ps import wire
from streamtrain.ps.client import Puller
from streamtrain.ps.control import RemoteControl
from streamtrain.ps.reading import ReadSource
from streamtrain.ps.route import control_of
from streamtrain.ps.security import Security, metadata
from streamtrain.settings import Settings
from streamtrain.store.origin import Floats

if TYPE_CHECKING:
    from streamtrain.train.step import Step


class Learned(NamedTuple):
    """What has been learned.

    Attributes:
        run: of it.
        clock: by partition the offset of the first sample that has not been, where there is any that has.
    """

    run: str
    clock: Mapping[int, int]


class Trainer(Protocol):
    """Predicts as training does."""

    def learned(self) -> Learned | None:
        """What predictions are by now; None: of several moments."""

    def predict(self, batch: Batch) -> Floats:
        """Predicts samples: float32 [n, L]."""


class ShardTrainer:
    """Predicts by what shards have now. They are not told of any worker, and none waits for it.

    Args:
        model: that they learn.
        step: of the model.
        addresses: of all shards.
        settings: where their backups are, if they have some, and of the wire.

    Raises:
        ConfigError: the backups do not fit the shards.
        ShardUnavailable: a shard does not answer, or is empty.
        ShardRefused: they are of another model, or another number of shards.
    """

    def __init__(self, model: Model, step: "Step", addresses: Sequence[str], settings: Settings) -> None:
        security = Security.read(**settings.security.arguments())
        self._model, self._step = model, step
        self._channels: list[grpc.Channel] = []
        places = places_of(addresses, settings.ps, security, self._channels.append)
        self._controls = [control_of(place, metadata(security)) for place in places]
        spec = Spec.of(model)
        for control in self._controls:
            self._check(control, spec)
        self._planner = model.planner(len(addresses))
        self._puller = Puller([ReadSource(control) for control in self._controls], spec)

    def _check(self, control: RemoteControl, spec: Spec) -> None:
        status = control.status()
        if not status.ready:
            raise ShardUnavailable(f"{control.target} is empty: nothing has been learned yet")
        if status.shards != len(self._controls):
            raise ShardRefused(
                f"{control.target} is one of {status.shards} shards, not {len(self._controls)}", "mismatch"
            )
        if differing := spec.differing(Spec.from_json(status.spec)):
            raise ShardRefused(
                f"{control.target} holds another model; they differ in: {', '.join(differing)}", "mismatch"
            )

    def learned(self) -> Learned | None:
        """See Trainer."""
        statuses = [control.status() for control in self._controls]
        found = [Learned(status.run, without_zeros(wire.clock_of(status.clock))) for status in statuses]
        return found[0] if all(one == found[0] for one in found) else None

    def predict(self, batch: Batch) -> Floats:
        """See Trainer."""
        plan = self._planner.plan(batch.keys, batch.starts, batch.offsets, batch.times)
        pulled = self._puller.pull(plan).wait()
        made = self._step.predict(pulled.parameters, plan, pulled.rows, batch)
        return made if self._model.sampling is None else self._model.sampling.correct(made)

    def close(self) -> None:
        """Ends the connections."""
        for channel in self._channels:
            channel.close()


def without_zeros(clock: Mapping[int, int]) -> dict[int, int]:
    """A clock without partitions of which nothing has been learned."""
    return {partition: at for partition, at in clock.items() if at}
