"""Verify, samples: the same are predicted by the trainer and through HTTP."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from streamtrain.cluster.verify_endpoint import Endpoint, EndpointError
from streamtrain.cluster.verify_trainer import Learned, Trainer, without_zeros
from streamtrain.model.model import Model
from streamtrain.model.samples import SampleReader
from streamtrain.store.origin import Floats, Origin, Publication
from streamtrain.train.progressive import ProgressiveValidation

TOLERANCES = {"float32": 1e-5, "float16": 2e-3, "int8": 2e-2}
"""By dtype of publications, how far predictions of one state may be apart: |a - b| / max(1, |a|)."""

_INSTANCES, _BYTES = 512, 4 << 20  # of a request
_LATE = 412
_APART = ("largest", "mean")


class SamplesFound(NamedTuple):
    """How predictions compare.

    Attributes:
        samples: that were predicted.
        refused: that cannot be read.
        largest: difference, as of `TOLERANCES`.
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


def compare_samples(
    model: Model,
    trainer: Trainer,
    endpoint: Endpoint,
    origin: Origin | None,
    messages: Iterable[bytes],
    *,
    tolerance: float | None = None,
) -> SamplesFound:
    """Predicts samples by both, and compares. What learns goes on learning.

    Args:
        model: of both.
        trainer: that predicts.
        endpoint: of the server.
        origin: where the server's publications come from, which say what they have learned; None: it is not known.
        messages: samples as JSON.
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
        same = before == trainer.learned() == Learned(publication.run, without_zeros(publication.clock))
        tolerance = TOLERANCES[publication.dtype] if same and tolerance is None else tolerance
    return both.found(same, tolerance)


class _Both:
    def __init__(self, model: Model, trainer: Trainer, endpoint: Endpoint) -> None:
        self._model, self._trainer, self._endpoint = model, trainer, endpoint
        self._reader, self._labels = SampleReader(model, with_labels=False), SampleReader(model)
        self._validations = [ProgressiveValidation(model.labels) for _ in range(2)]
        self._differences: list[Floats] = []
        self._refused = 0
        self.answered: set[tuple[str, str]] = set()  # version and publication

    def predict(self, messages: list[bytes], learned: Learned | None) -> None:
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
            if exc.status != _LATE:  # it serves a version, or learning goes on
                raise

    def _served(self, messages: list[bytes]) -> Floats:
        predictions, headers = self._endpoint.predict(self._model.name, messages)
        self.answered.add((headers.get("x-model-version", ""), headers.get("x-publication", "")))
        labels = [label.name for label in self._model.labels]
        try:
            rows = [[one[name][0] for name in labels] if isinstance(one, dict) else one for one in predictions]
            return np.array(rows, np.float32).reshape(len(messages), len(labels))
        except (IndexError, KeyError, TypeError, ValueError) as exc:
            raise EndpointError(f"{self._endpoint.url} predicts other labels than {', '.join(labels)}") from exc

    def found(self, same: bool, tolerance: float | None) -> SamplesFound:
        differences = np.concatenate([np.empty(0, np.float32), *self._differences])
        totals = [validation.total() for validation in self._validations]
        return SamplesFound(
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
    """What a server predicted by, if it is one publication that is there still."""
    if origin is None or len(answered) != 1:
        return None
    ((version, number),) = answered
    found = origin.find(int(version) if version.isdigit() else None)
    return found if found is not None and str(found.number) == number else None


def as_json(found: SamplesFound) -> dict[str, Any]:
    """It as values of JSON; differences are None if a prediction is not finite."""
    apart = {name: value if math.isfinite(value) else None for name, value in found._asdict().items() if name in _APART}
    return found._asdict() | apart | {"agrees": found.agrees}
