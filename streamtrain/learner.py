"""Learner: the whole of streamtrain in one process, without any server: for notebooks, tests and replays."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from streamtrain._core import hash_bytes, shards_of
from streamtrain.errors import BadSample, ConfigError, SampleError
from streamtrain.learned import read_learned, write_learned
from streamtrain.model.batch import Batch
from streamtrain.model.model import Model
from streamtrain.model.samples import SampleReader, Samples
from streamtrain.model.sampling import Sampler
from streamtrain.model.spec import Spec, slice_of
from streamtrain.ps.client import Client, stats_of
from streamtrain.ps.clock import Span, Stand
from streamtrain.ps.consistency import Async
from streamtrain.ps.push import PushStats
from streamtrain.ps.session import LocalSession
from streamtrain.ps.shard import Initial, Run, Shard
from streamtrain.train.progressive import Metrics, ProgressiveValidation
from streamtrain.train.step import Step

logger = logging.getLogger(__name__)

MAX_SHARDS = 1 << 16

# What a checkpoint of a learner holds beyond its shards.
_WATERMARK, _READ, _SEEDS = "watermark", "read", "seeds/"


@dataclass(frozen=True)
class Learned:
    """What came of a call to `Learner.learn`, or of one batch of it.

    Attributes:
        samples: number of samples learned from.
        loss: their loss as the model defines it, averaged over batches by number of samples.
        predictions: float32 [samples, L], made before each was learned from.
        kept: int32 [samples], position of each among the given samples.
        bad: the samples that were refused, and why.
    """

    samples: int
    loss: float
    predictions: NDArray[np.float32]
    kept: NDArray[np.int32]
    bad: list[BadSample]


class Learner:
    """Predicts and learns, in one process.

    Every batch is predicted before it is learned from, and `metrics()` reports how good these predictions were.

    Args:
        model: what to learn.
        batch_size: samples per step.
        shards: number of shards to split tables and dense parameters over. It changes no result.
        window: samples of the window of `metrics(window=True)`.

    Attributes:
        samples: number of samples learned from.
        watermark: latest event time seen, seconds since the epoch.
        bad: number of samples refused, by reason.
        stats: what became of gradients.

    Raises:
        ConfigError: an option is wrong, or the model's graph is.

    Example:
        >>> learner = Learner(model)                                        # doctest: +SKIP
        >>> learner.learn([{"user": "u42", "item": 77, "label": 1}])        # doctest: +SKIP
        >>> learner.predict([{"user": "u42", "item": 77}])                  # doctest: +SKIP
        array([[0.53]], dtype=float32)
    """

    def __init__(self, model: Model, *, batch_size: int = 1024, shards: int = 1, window: int = 100_000) -> None:
        for option, value, most in (("batch_size", batch_size, 1 << 20), ("shards", shards, MAX_SHARDS)):
            if not isinstance(value, int) or not 1 <= value <= most:
                raise ConfigError(f"{option} must be an integer from 1 to {most}, not {value!r}")
        self.model = model
        self.batch_size = batch_size
        self._step = Step(model)
        self._planner = model.planner(shards)
        self._use(self._new_shards(shards))
        self._to_learn = SampleReader(model)
        self._to_predict = SampleReader(model, with_labels=False)
        self._window = window
        self._validation = ProgressiveValidation(model.labels, window=window)
        self.samples = 0
        self._sampler = Sampler(model.sampling)
        self.watermark = 0.0
        self.bad: dict[str, int] = {}
        self.stats = PushStats()

    def _use(self, shards: list[Shard]) -> None:
        self._shards = shards
        self._client = Client([LocalSession(shard, Async(shard), "learner") for shard in shards], shards[0].spec)

    def _new_shards(self, count: int) -> list[Shard]:
        spec, dense, statistics = Spec.of(self.model), self._step.initial_dense, self._step.initial_statistics
        return [
            Shard(
                Initial(
                    Run("learner", {}),
                    spec,
                    dense[slice_of(len(dense), i, count)],
                    statistics[slice_of(len(statistics), i, count)],
                ),
                i,
                count,
            )
            for i in range(count)
        ]

    def predict(self, samples: Samples) -> NDArray[np.float32]:
        """Predicts samples; labels are not needed and not read.

        Args:
            samples: dicts, JSON messages, columns or a `Batch`; see `SampleReader.batches`.

        Returns:
            float32 [n, L], a column per label.

        Raises:
            SampleError: samples cannot be used; it carries all of them with their reasons.
        """
        predictions, bad = [np.empty((0, len(self.model.labels)), np.float32)], []
        for batch, refused in self._to_predict.batches(samples, self.batch_size):
            bad += refused
            predictions.append(self._predict(batch))
        if bad:
            raise SampleError(bad)
        return np.concatenate(predictions)

    def learn(self, samples: Samples) -> Learned:
        """Predicts samples, then learns from them, batch by batch in their order.

        Samples that cannot be used are left out, and reported in `Learned.bad` and counted in `Learner.bad`.

        Args:
            samples: dicts, JSON messages, columns or a `Batch`; see `SampleReader.batches`.
        """
        parts = list(self.stream(samples))
        total = sum(part.samples for part in parts)
        return Learned(
            samples=total,
            loss=sum(part.loss * part.samples for part in parts) / total if total else 0.0,
            predictions=np.concatenate([self._no_predictions(), *(part.predictions for part in parts)]),
            kept=np.concatenate([np.empty(0, np.int32), *(part.kept for part in parts)]),
            bad=[one for part in parts for one in part.bad],
        )

    def stream(self, samples: Samples) -> Iterator[Learned]:
        """As `learn`, one batch at a time: for streams that are long or never end."""
        for batch, bad in self.read(samples):
            for one in bad:
                self.bad[one.reason] = self.bad.get(one.reason, 0) + 1
            taken = self._sampler.take(batch)
            predictions, loss = self._learn(taken) if len(taken) else (self._no_predictions(), 0.0)
            yield Learned(len(taken), loss, predictions, taken.kept, bad)

    def read(self, samples: Samples) -> Iterator[tuple[Batch, list[BadSample]]]:
        """Reads samples with their labels into batches of at most `batch_size`, and says which were refused and why.

        A `Batch` can be learned from, evaluated and predicted many times without being read again.
        """
        return self._to_learn.batches(samples, self.batch_size)

    def evaluate(self, samples: Samples) -> dict[str, Metrics]:
        """Metrics by label of predicting samples without learning from them.

        Raises:
            SampleError: samples cannot be used.
        """
        validation, bad = ProgressiveValidation(self.model.labels), []
        for batch, refused in self.read(samples):
            bad += refused
            validation.update(self._predict(batch), batch.labels, batch.weights)
        if bad:
            raise SampleError(bad)
        return validation.total()

    def metrics(self, *, window: bool = False) -> dict[str, Metrics]:
        """Progressive validation by label: over everything learned from since the start or `load`, or the window."""
        return self._validation.window() if window else self._validation.total()

    @property
    def rows(self) -> dict[str, int]:
        """Number of rows by table."""
        return {
            spec.name: sum(len(shard.tables[t]) for shard in self._shards)
            for t, spec in enumerate(self.model.schema.tables)
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all tables and the dense parameters, optimizer state included."""
        return sum(table.nbytes for shard in self._shards for table in shard.tables) + sum(
            shard.dense.nbytes for shard in self._shards
        )

    def embeddings(self, table: str, ids: list[str | int]) -> NDArray[np.float32]:
        """The rows of ids, float32 [n, dim]; an id that was never learned has its birth value.

        Raises:
            ConfigError: there is no such table.
        """
        names = [spec.name for spec in self.model.schema.tables]
        if table not in names:
            raise ConfigError(f"there is no table {table!r}; tables are {names}")
        keys = np.array([hash_bytes(str(one).encode()) for one in ids], np.uint64)
        owners = shards_of(keys, len(self._shards))
        t = names.index(table)
        rows = np.empty((len(keys), self.model.schema.tables[t].dim), np.float32)
        for shard in self._shards:
            mine = owners == shard.index
            rows[mine] = shard.tables[t].pull(keys[mine])
        return rows

    def save(self, path: str | Path) -> None:
        """Writes rows, optimizer state, dense parameters and the graph's statistics into a new directory.

        The format is in schemas/README.md; progressive validation is not part of it.

        Args:
            path: a local path, where an existing checkpoint is replaced once the new one is complete; or any URL of
                fsspec, such as s3://bucket/name, with nothing there yet.

        Raises:
            CheckpointError: it cannot be written, or `path` exists and is no checkpoint, or the URL is in use.
        """
        state = {_WATERMARK: np.array([self.watermark]), _READ: np.array([self._sampler.read])}
        write_learned(path, self._shards, state | {_SEEDS + n: values for n, values in self._step.arrays().items()})

    @classmethod
    def load(
        cls, path: str | Path, model: Model, *, batch_size: int = 1024, shards: int = 1, window: int = 100_000
    ) -> "Learner":
        """A learner that goes on from a checkpoint, at a local path or any URL of fsspec.

        The writer may have been a learner or a cluster, with any number of shards (for a cluster: cut at one clock).

        Raises:
            CheckpointError: it is missing, or of another schema, graph or optimizer.
            CheckpointCorrupt: a file of it is damaged; the message names it.
        """
        learner = cls(model, batch_size=batch_size, shards=shards, window=window)
        restored, state = read_learned(path, Spec.of(model), shards)
        learner.samples, learner.watermark = restored[0].samples, float(restored[0].watermark)
        if _WATERMARK in state:
            learner.watermark = float(state[_WATERMARK][0])
        learner._sampler.read = int(state.get(_READ, [learner.samples])[0])
        seeds = {name.removeprefix(_SEEDS): values for name, values in state.items() if name.startswith(_SEEDS)}
        if seeds:
            learner._step.set_arrays(seeds)
        for shard in restored:
            shard.resume(Stand({0: learner.samples}, {}), learner.samples, int(learner.watermark))
        learner._use(restored)
        return learner

    def _predict(self, batch: Batch) -> NDArray[np.float32]:
        if not len(batch):
            return self._no_predictions()
        plan = self._planner.plan(batch.keys, batch.starts, batch.offsets, batch.times)
        pulled = self._client.pull(plan).wait()
        return self._sampler.correct(self._step.predict(pulled.parameters, plan, pulled.rows, batch))

    def _learn(self, batch: Batch) -> tuple[NDArray[np.float32], float]:
        plan = self._planner.plan(batch.keys, batch.starts, batch.offsets, batch.times)
        pulled = self._client.pull(plan).wait()
        result = self._step.train(pulled.parameters, plan, pulled.rows, batch)
        predictions = self._sampler.correct(result.predictions)
        self._validation.update(predictions, batch.labels, self._sampler.weights(batch))
        self.watermark = max(self.watermark, float(batch.times.max()))
        pushing = self._client.push(
            plan,
            plan.unpool(result.row_gradient),
            result.dense_gradient,
            result.statistics_change,
            spans=[Span(0, self.samples, self.samples + len(batch))],
            watermark=int(self.watermark),
        )
        stats = stats_of(pushing.wait())
        if stats.non_finite_rows or stats.non_finite_dense:
            logger.warning(
                "dropped gradients that are not finite: %d of rows, %d of dense slices; samples %d to %d",
                *(stats.non_finite_rows, stats.non_finite_dense, self.samples, self.samples + len(batch) - 1),
            )
        self.stats.add(stats)
        self.samples += len(batch)
        return predictions, result.loss

    def _no_predictions(self) -> NDArray[np.float32]:
        return np.empty((0, len(self.model.labels)), np.float32)
