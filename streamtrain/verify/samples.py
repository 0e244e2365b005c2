"""Compares predictions of the same samples by what has been learned, on shards or in a checkpoint, and by a server."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import grpc
import numpy as np

from streamtrain.errors import CheckpointError, ShardRefused, ShardUnavailable
from streamtrain.learner import Learner
from streamtrain.model.batch import Batch
from streamtrain.model.model import Model
from streamtrain.model.samples import SampleReader
from streamtrain.model.spec import Spec
from streamtrain.ps.client import ShardReader
from streamtrain.ps.nodes.topology import ShardMap, connect_shards
from streamtrain.ps.replication.failover import open_control
from streamtrain.ps.rpc import wire
from streamtrain.ps.rpc.control import RemoteControl
from streamtrain.ps.rpc.remote_session import ReadSource
from streamtrain.ps.rpc.security import Security, metadata
from streamtrain.quality.progressive import ProgressiveValidation
from streamtrain.serve.client import Endpoint, EndpointError
from streamtrain.settings.groups import Settings
from streamtrain.store.checkpoint.epochs import Epochs
from streamtrain.store.checkpoint.source import CheckpointOrigin
from streamtrain.store.publication import Floats, Origin, Publication
from streamtrain.train.step import Step
from streamtrain.train.trainer import predict


class TrainedState(NamedTuple):
    """What has been learned.

    Attributes:
        run: of it.
        clock: by partition the offset of the first sample that has not been, where there is any that has.
    """

    run: str
    clock: Mapping[int, int]

    @classmethod
    def of(cls, run: str, clock: Mapping[int, int]) -> Self:
        """Without partitions of which nothing has been learned."""
        return cls(run, {partition: at for partition, at in clock.items() if at})


class TrainingPredictor(ABC):
    """Predicts as training does; a context manager."""

    _channels: Sequence[grpc.Channel] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self._channels:
            channel.close()

    @abstractmethod
    def learned(self) -> TrainedState | None:
        """What predictions are by now; None: of several moments."""

    @abstractmethod
    def predict(self, batch: Batch) -> Floats:
        """Predicts samples: float32 [n, L]."""


class CheckpointTrainer(TrainingPredictor):
    """Predicts by the newest epoch at a URL, or by the checkpoint at it.

    Raises:
        CheckpointError: there is none, or it has another schema, graph or optimizer.
        OriginUnavailable, PublicationCorrupt: it cannot be read.
    """

    def __init__(self, url: str, model: Model) -> None:
        publication = CheckpointOrigin(url, model.name).find(None)
        if publication is None:
            raise CheckpointError(f"there is no checkpoint at {url}")
        epochs = Epochs(url)
        place = epochs.place(publication.number) if publication.number in epochs.numbers() else url
        self._learned = TrainedState.of(publication.run, publication.clock)
        self._learner = Learner.load(place, model)

    def learned(self) -> TrainedState:
        return self._learned

    def predict(self, batch: Batch) -> Floats:
        return self._learner.predict(batch)


class ShardTrainer(TrainingPredictor):
    """Predicts by what shards have now. They are not told of any worker, and none waits for it.

    Raises:
        ConfigError: the backups do not fit the shards.
        ShardUnavailable: a shard does not answer, or is empty.
        ShardRefused: they are of another model, or another number of shards.
    """

    def __init__(self, model: Model, step: Step, shard_map: ShardMap, settings: Settings) -> None:
        security = Security.from_settings(settings.security)
        self._model, self._step = model, step
        self._channels = channels = list[grpc.Channel]()
        places = connect_shards(shard_map.shards, shard_map.backups, security, channels.append)
        self._controls = [open_control(place, metadata(security)) for place in places]
        spec = Spec.of(model)
        for control in self._controls:
            self._check(control, spec)
        self._planner = model.planner(len(places))
        self._shards = ShardReader([ReadSource(control) for control in self._controls], spec)

    def _check(self, control: RemoteControl, spec: Spec) -> None:
        status = control.status()
        if not status.ready:
            raise ShardUnavailable(f"{control.target} is not ready: it has no model yet")
        if status.shards != len(self._controls):
            raise ShardRefused(
                f"{control.target} belongs to {status.shards} shards, not {len(self._controls)}", "mismatch"
            )
        if differing := spec.differing(Spec.from_json(status.spec)):
            raise ShardRefused(f"{control.target} has another model; differing: {', '.join(differing)}", "mismatch")

    def learned(self) -> TrainedState | None:
        statuses = [control.status() for control in self._controls]
        found = [TrainedState.of(status.run, wire.decode_clock(status.clock)) for status in statuses]
        return found[0] if all(one == found[0] for one in found) else None

    def predict(self, batch: Batch) -> Floats:
        predictions = predict(self._planner, self._shards, self._step, batch)
        return predictions if self._model.sampling is None else self._model.sampling.correct(predictions)


TOLERANCES = {"float32": 1e-5, "float16": 2e-3, "int8": 2e-2}
"""How far predictions of one state may be apart, by dtype of publications: |a - b| / max(1, |a|)."""

_INSTANCES, _BYTES = 512, 4 << 20  # of a request
_LATE = 412


class SamplesComparison(NamedTuple):
    """How predictions compare.

    Attributes:
        samples: that were predicted.
        refused: that cannot be read.
        largest: difference, see `TOLERANCES`.
        mean: difference.
        auc: by label that of the trainer and that of the server; None where it is not defined.
        publication: that the server predicted by; None: by several.
        same: whether both predicted by what had learned the same.
        tolerance: that is asked for; None: none, as they are not of the same.
    """

    samples: int
    refused: int
    largest: float
    mean: float
    auc: dict[str, list[float | None]]
    publication: int | None
    same: bool
    tolerance: float | None

    @property
    def agrees(self) -> bool | None:
        """Whether they are as close as is asked for; None: nothing is."""
        return None if self.tolerance is None else self.largest <= self.tolerance

    def to_json(self) -> dict[str, Any]:
        """The figures as values of JSON; a difference is None if a prediction is not finite."""
        apart = {name: at if math.isfinite(at := getattr(self, name)) else None for name in ("largest", "mean")}
        return self._asdict() | apart | {"agrees": self.agrees}


def compare_samples(
    model: Model,
    trainer: TrainingPredictor,
    endpoint: Endpoint,
    origin: Origin | None,
    messages: Iterable[bytes],
    *,
    tolerance: float | None = None,
) -> SamplesComparison:
    """Predicts samples, messages of JSON, by both, and compares. Training continues.

    Args:
        model: of both.
        trainer: that predicts.
        endpoint: of the server.
        origin: where the server's publications come from, which say what they have learned; None: it is not known.
        messages: samples.
        tolerance: by which they agree, whatever has been learned; None: by dtype, if both have learned the same.

    Raises:
        EndpointError: the server does not answer, or refuses.
        ShardError: a shard cannot be reached.
        OriginUnavailable: the origin does not answer.
    """
    both = _Both(model, trainer, endpoint)
    before = trainer.learned()
    for part in _parts(messages):
        both.predict(part, before)
    same, publication = False, _publication(origin, both.answered)
    if publication is not None:
        same = before == trainer.learned() == TrainedState.of(publication.run, publication.clock)
        tolerance = TOLERANCES[publication.dtype] if same and tolerance is None else tolerance
    return both.found(same, tolerance)


class _Both:
    def __init__(self, model: Model, trainer: TrainingPredictor, endpoint: Endpoint) -> None:
        self._model, self._trainer, self._endpoint = model, trainer, endpoint
        self._reader, self._labels = SampleReader(model, with_labels=False), SampleReader(model)
        self._validations = [ProgressiveValidation(model.labels) for _ in range(2)]
        self._differences: list[Floats] = []
        self._refused = 0
        self.answered: set[tuple[str, str]] = set()  # version and publication

    def predict(self, messages: list[bytes], learned: TrainedState | None) -> None:
        batch, bad = self._reader.decode(messages)
        self._refused += len(bad)
        if not len(batch):
            return
        good = [messages[at] for at in batch.kept.tolist()]
        if not self.answered and learned is not None and learned.clock:
            self._await(good[0], learned.clock)
        trained, served = self._trainer.predict(batch), self._served(good)
        self._differences.append((np.abs(trained - served) / np.maximum(1, np.abs(trained))).ravel())
        labelled, _ = self._labels.decode(good)
        for validation, predictions in zip(self._validations, (trained, served), strict=True):
            validation.update(predictions[labelled.kept], labelled.labels, labelled.weights)

    def _await(self, message: bytes, clock: Mapping[int, int]) -> None:
        """Gives the server its time to follow."""
        wanted = ",".join(f"{partition}:{at - 1}" for partition, at in clock.items())
        try:
            self._endpoint.predict(self._model.name, [message], x_min_offset=wanted)
        except EndpointError as exc:
            if exc.status != _LATE:  # it serves a version, or training continues
                raise

    def _served(self, messages: list[bytes]) -> Floats:
        predictions, headers = self._endpoint.predict(self._model.name, messages)
        self.answered.add((headers.get("x-model-version", ""), headers.get("x-publication", "")))
        labels = [label.name for label in self._model.labels]
        try:
            rows = [[one[name][0] for name in labels] if isinstance(one, dict) else one for one in predictions]
            return np.array(rows, np.float32).reshape(len(messages), len(labels))
        except (IndexError, KeyError, TypeError, ValueError) as exc:
            raise EndpointError(f"{self._endpoint.url} did not predict the labels {', '.join(labels)}") from exc

    def found(self, same: bool, tolerance: float | None) -> SamplesComparison:
        differences = np.concatenate([np.empty(0, np.float32), *self._differences])
        totals = [validation.total() for validation in self._validations]
        return SamplesComparison(
            samples=len(differences) // len(self._model.labels),
            refused=self._refused,
            largest=float(differences.max(initial=0)),
            mean=float(differences.mean()) if len(differences) else 0.0,
            auc={label.name: [one[label.name].as_dict()["auc"] for one in totals] for label in self._model.labels},
            publication=int(next(iter(self.answered))[1]) if len(self.answered) == 1 else None,
            same=same,
            tolerance=tolerance,
        )


def _parts(messages: Iterable[bytes]) -> Iterator[list[bytes]]:
    part: list[bytes] = []
    size = 0
    for one in messages:
        if part and (len(part) == _INSTANCES or size + len(one) > _BYTES):
            yield part
            part, size = [], 0
        part.append(one)
        size += len(one)
    if part:
        yield part


def _publication(origin: Origin | None, answered: set[tuple[str, str]]) -> Publication | None:
    """What a server predicted by, if it is one publication that still exists."""
    if origin is None or len(answered) != 1:
        return None
    ((version, number),) = answered
    found = origin.find(int(version) if version.isdigit() else None)
    return found if found is not None and str(found.number) == number else None
