"""From samples to predictions, with one loaded publication."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np

from streamtrain._core import Plan, TensorSamples
from streamtrain.disk import RowsOnDisk
from streamtrain.errors import BadSample, PublicationCorrupt, PublicationError, SampleError
from streamtrain.model.batch import Batch
from streamtrain.model.model import Model
from streamtrain.model.samples import SampleReader, Samples
from streamtrain.serve.graph import Graph
from streamtrain.serve.rows.cache import Cache
from streamtrain.serve.rows.replica import Replica
from streamtrain.serve.rows.row_store import RowStore, View
from streamtrain.store.publication import Floats, LookupOrigin, Origin, Publication, PublicationStep

_MAX_SAMPLES = 1 << 20
WARM_SIZES = (1, 2, 64, 512)
COUNTED_BATCHES = 16  # counting in every batch would slow down small ones


class Predicted(NamedTuple):
    """Predictions of some samples, all by one publication.

    Attributes:
        predictions: float32 [k, L], of the good samples.
        bad: the others; their indexes are positions among all samples.
        publication: which one.
    """

    predictions: Floats
    bad: list[BadSample]
    publication: Publication


class Predictor:
    """Predicts with one version, or with the head, whose publications follow one another.

    Args:
        model: whose samples are read.
        graph: of the model; predictors share it.
        loaded: its rows and weights.
        name: "head", or the number of the version, as in responses.

    Attributes:
        found: by table, how many ids had a row, and how many there were, in one batch of `COUNTED_BATCHES`.
    """

    def __init__(self, model: Model, graph: Graph, loaded: RowStore, name: str) -> None:
        self.name = name
        self.loaded = loaded
        self._model = model
        self._graph = graph
        self._reader = SampleReader(model, with_labels=False)
        self._planner = model.planner(1)
        self._trained: tuple[int, str] = (-1, "")
        self._batches = 0
        self.found: dict[str, tuple[int, int]] = {}

    @classmethod
    def load(
        cls,
        model: Model,
        graph: Graph,
        origin: Origin,
        publication: Publication,
        name: str,
        *,
        cache_bytes: int | None = None,
        disk: RowsOnDisk | None = None,
    ) -> "Predictor":
        """Loads a publication, and warms it, so that the first requests are not slow.

        Args:
            model: whose samples are read.
            graph: of the model.
            origin: of the publication.
            publication: a version or the head.
            name: of the predictor.
            cache_bytes: of a cache, which starts empty; None: all rows are loaded.
            disk: for those that have no room in memory, if all are loaded; None: they are in memory.

        Raises:
            OriginUnavailable: the origin does not answer.
            PublicationCorrupt: the publication is damaged.
            PublicationError: a cache is requested, but the origin cannot look rows up.
        """
        tables = [table.name for table in model.schema.tables]
        if cache_bytes is None:
            replica = Replica(publication, tables, graph.tensors, disk)
            replica.complete(*origin.load(publication, replica.take))
            predictor = cls(model, graph, replica, name)
        elif isinstance(origin, LookupOrigin):
            cache = Cache(*origin.open(publication), tables, graph.tensors, nbytes=cache_bytes)
            predictor = cls(model, graph, cache, name)
        else:
            raise PublicationError(f"rows of {origin.name} cannot be cached, only loaded whole: serve it as a replica")
        predictor.warm()
        return predictor

    @property
    def publication(self) -> Publication:
        """What is served now."""
        return self.loaded.publication

    def warm(self) -> None:
        """Predicts samples without ids, whose numbers are at their defaults.

        Raises:
            PublicationCorrupt: the prediction is not finite.
        """
        for size in WARM_SIZES:
            batch = _blank(self._model, size)
            plans = self._plans([batch])
            if not np.isfinite(self._run(self.loaded.read(plans), plans, [batch])[0]).all():
                raise PublicationCorrupt(f"publication {self.publication.number}: predictions are not finite")

    def predict(self, samples: Samples) -> Floats:
        """Predicts samples: float32 [n, L].

        Args:
            samples: dicts, JSON messages, columns or a `Batch`; see `SampleReader.batches`.

        Raises:
            SampleError: samples cannot be used; it carries all of them with their reasons.
        """
        read = list(self._reader.batches(samples, _MAX_SAMPLES))
        if bad := [one for _, refused in read for one in refused]:
            raise SampleError(bad)
        batches = [batch for batch, _ in read]
        plans = self._plans(batches)
        predictions = self._run(self.loaded.read(plans), plans, batches)
        return np.concatenate([np.empty((0, len(self._model.labels)), np.float32), *predictions])

    def predict_messages(self, messages: Sequence[bytes | TensorSamples]) -> Predicted:
        """Predicts JSON messages and samples in tensors, at best of many requests; bad ones do not touch others."""
        predicted = self._predict(messages, self.loaded.read)
        assert predicted is not None  # reads either answer or raise
        return predicted

    def predict_at_once(self, messages: Sequence[bytes | TensorSamples]) -> Predicted | None:
        """The same; None if rows have to be fetched first, which takes longer than an event loop may wait."""
        return self._predict(messages, self.loaded.read_at_once)

    def apply(self, step: PublicationStep) -> None:
        """Goes on to the next publication of the head; see `RowStore.apply`."""
        self.loaded.apply(step)

    def trained_through(self, publication: Publication) -> str:
        """Latest event time that a publication has learned, as ISO 8601; "": it has learned none."""
        if self._trained[0] != publication.number:
            at = publication.watermark
            text = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds") if at else ""
            self._trained = publication.number, text.replace("+00:00", "Z")
        return self._trained[1]

    def _predict(
        self, messages: Sequence[bytes | TensorSamples], read: Callable[[list[Plan]], View | None]
    ) -> Predicted | None:
        batch, bad = self._reader.decode(messages)
        plans = self._plans([batch])
        view = read(plans)
        if view is None:
            return None
        return Predicted(self._run(view, plans, [batch])[0], bad, view.publication)

    def _plans(self, batches: list[Batch]) -> list[Plan]:
        return [self._planner.plan(one.keys, one.starts, one.offsets, one.times) for one in batches]

    def _run(self, view: View, plans: list[Plan], batches: list[Batch]) -> list[Floats]:
        if self._batches % COUNTED_BATCHES == 0:
            self._count(plans)
        self._batches += 1
        predictions = []
        for plan, rows, batch in zip(plans, view.rows, batches, strict=True):
            made = self._graph.run(view.tensors, plan, rows, batch)
            predictions.append(made if self._model.sampling is None else self._model.sampling.correct(made))
        return predictions

    def _count(self, plans: list[Plan]) -> None:
        for plan in plans:
            for table, (found, looked_up) in self.loaded.found(plan).items():
                before = self.found.get(table, (0, 0))
                self.found[table] = before[0] + found, before[1] + looked_up


def _blank(model: Model, samples: int) -> Batch:
    """Samples with no ids, whose numbers are at their defaults."""
    numbers = [one.blank for one in model.schema.numerics]
    features = len(model.schema.embedded)
    arrays: dict[str, Any] = {
        "keys": np.empty(0, np.uint64),
        "starts": np.zeros(features + 1, np.int64),
        "offsets": np.zeros((features, samples + 1), np.int32),
        "numeric": np.tile(np.array(numbers, np.float32), (samples, 1)),
        "labels": np.empty((samples, 0), np.float32),
        "weights": np.ones(samples, np.float32),
        "times": np.zeros(samples),
        "kept": np.arange(samples, dtype=np.int32),
    }
    return Batch(**arrays)
