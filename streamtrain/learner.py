"""Learner: the training loop without a stream, in one process: for notebooks, tests and replays."""

import logging
import re
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from streamtrain._core import birth, hash_bytes, shards_of
from streamtrain.checkpoint.shard_state import load_shards, read_spec, save_shards
from streamtrain.disk import rows_folder
from streamtrain.durations import parse_size
from streamtrain.errors import BadSample, ConfigError, SampleError, ShardBroken, ShardRefused
from streamtrain.model.batch import Batch
from streamtrain.model.model import Model
from streamtrain.model.samples import FUTURE_AFTER, SampleReader, Samples
from streamtrain.model.sampling import Sampler
from streamtrain.model.schema import birth_settings
from streamtrain.model.spec import Spec, shard_slice
from streamtrain.ps.client import Client, total_stats
from streamtrain.ps.clock import Progress, PushOutcome, Span
from streamtrain.ps.consistency import Async
from streamtrain.ps.push import PushStats
from streamtrain.ps.row_memory import RowMemory
from streamtrain.ps.rows_of_ids import Sought, take_away
from streamtrain.ps.session import LocalSession
from streamtrain.ps.shard import InitialState, Run, Shard
from streamtrain.quality.progressive import Metrics, ProgressiveValidation
from streamtrain.shutdown import defer_signals
from streamtrain.train.advice import Advisor, Learning
from streamtrain.train.micro import GraphCache, MicroStep
from streamtrain.train.step import Step
from streamtrain.train.trainer import BatchResult, PulledBatch, Trainer

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_SHARDS = 1 << 16

# To wait for a thread that still reads: one within Arrow would abort an interpreter that shuts down.
_READER_SECONDS = 2.0

# Arrays that a learner's checkpoint contains in addition to its shards.
_WATERMARK, _READ, _BEGINNING, _SEEDS = "watermark", "read", "beginning", "seeds/"


@dataclass(frozen=True)
class Learned:
    """Result of a call to `Learner.learn`, or of one batch of it.

    Attributes:
        samples: number of samples learned from.
        loss: the model's loss, averaged over batches by number of samples.
        predictions: float32 [samples, L], made before the samples were learned from.
        kept: int32 [samples], position of each sample among the given ones.
        bad: the refused samples, with reasons.
    """

    samples: int
    loss: float
    predictions: NDArray[np.float32]
    kept: NDArray[np.int32]
    bad: list[BadSample]

    def __repr__(self) -> str:
        first = f", the first: {self.bad[0]}" if self.bad else ""
        return f"Learned({self.samples:,} samples, loss {self.loss:.5g}, {len(self.bad):,} refused{first})"


class Learner:
    """Predicts and learns, in one process: a worker's loop (pull, step, push) on shards of its own.

    Every batch is predicted before it is learned from, and `metrics()` reports how good these predictions were.
    `curve()` has the same by parts of the stream, and `advice()` says what keeps the model from learning.

    Thread-safe: calls from several threads take turns, batch by batch. An interrupt (Ctrl-C) ends a call between two
    batches: a batch counts as a whole or not at all, and `samples` tells how many do. A learner that fails within a
    batch, such as for lack of memory, raises ShardBroken from then on.

    Args:
        model: the model to learn.
        batch_size: samples pulled and pushed at once. They are learned in steps of the model's `micro_batch_size`, so
            accuracy does not depend on `batch_size` unless that is None.
        shards: number of shards to split tables and dense parameters over; results do not depend on it.
        window: samples of the window of `metrics(window=True)`.
        future_after: seconds that the event time of samples to learn may be ahead of `now`; None: any. The clock stands
            in for the timestamp that a stream has for each message.
        now: seconds since the epoch.
        memory: what rows may take in memory, with their indexes, such as "8GB"; other rows are on disk. "auto": as much
            as there is, but for a tenth of the machine's or the container's memory. None: all are in memory.
        disk: folder for rows on disk; None: that for temporary files. Its files have no names, and go with the process.
        graphs: compiled graphs to share between learners whose models differ in their rates only; None: those of the
            model, which all its learners share.

    Attributes:
        samples: number of samples learned from.
        watermark: latest event time seen, seconds since the epoch.
        bad: number of samples refused, by reason.
        stats: counts of applied and dropped gradients.

    Raises:
        ConfigError: an option or the model's graph is invalid.

    Example:
        >>> learner = Learner(model)                                        # doctest: +SKIP
        >>> learner.learn([{"user": "u42", "item": 77, "label": 1}])        # doctest: +SKIP
        >>> learner.predict([{"user": "u42", "item": 77}])                  # doctest: +SKIP
        array([[0.53]], dtype=float32)
    """

    def __init__(
        self,
        model: Model,
        *,
        batch_size: int = 1024,
        shards: int = 1,
        window: int = 100_000,
        future_after: float | None = FUTURE_AFTER,
        now: Callable[[], float] = time.time,
        memory: str | None = None,
        disk: str | None = None,
        graphs: GraphCache | None = None,
    ) -> None:
        for option, value, most in (("batch_size", batch_size, 1 << 20), ("shards", shards, MAX_SHARDS)):
            if not isinstance(value, int) or not 1 <= value <= most:
                raise ConfigError(f"{option} must be an integer from 1 to {most}, not {value!r}")
        self.model = model
        self.batch_size = batch_size
        self._lock = threading.RLock()  # reentrant, as a signal handler may call save
        self._memory = (
            RowMemory("auto" if memory == "auto" else parse_size(memory, "memory"), rows_folder(disk, "disk"))
            if memory
            else None
        )
        if self._memory is not None:
            weakref.finalize(self, self._memory.close)
        self._broken = ""
        self._step = Step(model)
        self._micro = None
        if model.micro_batch_size:
            self._micro = MicroStep(model, self._step, batch_size, Spec.of(model), graphs=graphs)
        self._use(self._new_shards(shards), begins=True)
        self._to_learn = SampleReader(model, future_after=future_after, now=now)
        self._to_predict = SampleReader(model, with_labels=False)
        self._window = window
        self._validation = ProgressiveValidation(model.labels, window=window)
        self._advisor = Advisor(model)
        self._latest: Batch | None = None
        self._loaded_rows = dict.fromkeys(self.rows, 0)
        self.samples = 0
        self._sampler = Sampler(model.sampling)
        self.watermark = 0.0
        self.bad: dict[str, int] = {}
        self.stats = PushStats()

    def _use(self, shards: list[Shard], *, begins: bool) -> None:
        self._shards = shards
        client = Client([LocalSession(shard, Async(shard), "learner") for shard in shards], shards[0].spec)
        self._trainer = Trainer(self.model, self._step, client, len(shards), micro=self._micro)
        if begins:
            self._trainer.begin()

    def _new_shards(self, count: int) -> list[Shard]:
        spec, dense, statistics = Spec.of(self.model), self._step.initial_dense, self._step.initial_statistics
        return [
            Shard(
                InitialState(
                    Run("learner", {}),
                    spec,
                    dense[shard_slice(len(dense), i, count)],
                    statistics[shard_slice(len(statistics), i, count)],
                ),
                i,
                count,
                memory=self._memory,
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
            SampleError: samples are invalid; it carries all of them with their reasons.
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

        Invalid samples are skipped, reported in `Learned.bad` and counted in `Learner.bad`.

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
            bad=[sample for part in parts for sample in part.bad],
        )

    def stream(self, samples: Samples, *, read_ahead: bool = False) -> Iterator[Learned]:
        """Like `learn`, one batch at a time: for streams that are long or endless.

        Args:
            samples: as for `learn`.
            read_ahead: whether a thread reads the next batch while one is learned. `samples` is then iterated in that
                thread, one batch ahead of what was learned.
        """
        for batch, bad in _read_ahead(self.read(samples)) if read_ahead else self.read(samples):
            left, refused = batch, bad
            while len(left) > (most := self._trainer.most):  # while a run begins (train/prior.py)
                self._trainer.reserve(self._trainer.plan(left))
                part, left = left.part(0, most), left.part(most)
                yield self._learn(part, refused)
                refused = []
            yield self._learn(left, refused)

    def read(self, samples: Samples) -> Iterator[tuple[Batch, list[BadSample]]]:
        """Reads samples with their labels into batches of at most `batch_size`, each with its refused samples.

        A `Batch` can be learned from, evaluated and predicted many times without being read again.
        """
        return self._to_learn.batches(samples, self.batch_size)

    def evaluate(self, samples: Samples) -> dict[str, Metrics]:
        """Metrics by label of predicting samples without learning from them.

        Raises:
            SampleError: samples are invalid.
        """
        validation, bad = ProgressiveValidation(self.model.labels), []
        for batch, refused in self.read(samples):
            bad += refused
            validation.update(self._predict(batch), batch.labels, batch.weights)
        if bad:
            raise SampleError(bad)
        return validation.total()

    def metrics(self, *, window: bool = False) -> dict[str, Metrics]:
        """Progressive validation by label, over all samples since the start or `load`, or over the window."""
        with self._lock:
            return self._validation.window() if window else self._validation.total()

    def curve(self) -> dict[str, list[dict[str, float | None]]]:
        """The learning curve: progressive validation by segments of the stream, at most 128, of equal size.

        For plots: `pandas.DataFrame(learner.curve()["label"]).plot("samples", "log_loss")`.

        Returns:
            By label a list of the figures of `Metrics`; `samples` is the number of samples up to the segment's end.
            Samples since the last full segment are missing; undefined figures are None.
        """
        with self._lock:
            points = self._advisor.curve.points()
        curves: dict[str, list[dict[str, float | None]]] = {}
        for label, segments in points.items():
            ends = np.cumsum([one.samples for one in segments]).tolist()
            curves[label] = [one.as_dict() | {"samples": end} for one, end in zip(segments, ends, strict=True)]
        return curves

    def advice(self) -> list[str]:
        """What keeps the model from learning the samples so far, a sentence or two each, with the way out.

        Such as: labels or features that never vary, predictions that are not probabilities, ids that do not repeat,
        learning rates that are too high or too low, a loss that is no better than that of the label's mean. Empty if
        nothing of this is found.
        """
        with self._lock:
            unadmitted = {
                spec.name: sum(shard.tables[t].stats()["unadmitted"] for shard in self._shards)
                for t, spec in enumerate(self.model.schema.tables)
            }
            dropped = self.stats.non_finite_rows + self.stats.non_finite_dense
            rows = {name: max(0, count - self._loaded_rows[name]) for name, count in self.rows.items()}
            return self._advisor.advice(Learning(rows, unadmitted, dropped, self._moved()))

    def _moved(self) -> float:
        """Change of the weights, and of the rows of the latest batch, relative to their first values."""
        pairs = [(self._step.initial_dense, np.concatenate([shard.dense.pull() for shard in self._shards]))]
        if self._latest is not None:
            plan = self._trainer.plan(self._latest)
            for t, spec in enumerate(self.model.schema.tables):
                keys = plan.keys(t)[:1000]
                born = birth(keys, spec.dim, **birth_settings(spec, self.model.seed), dtype=spec.dtype)
                pairs.append((born, self._pull(t, keys)))
        return max((_change(first, now) for first, now in pairs if first.size), default=float("nan"))

    def __repr__(self) -> str:
        figures = []
        for label, metrics in self.metrics().items():
            known = [(name, metrics.as_dict()[name]) for name in ("auc", "log_loss", "mean_squared_error")]
            figures += [f"{label}: " + ", ".join(f"{name} {value:.4f}" for name, value in known if value is not None)]
        rows = ", ".join(f"{name} {count:,}" for name, count in self.rows.items())
        shown = "; ".join(one for one in figures if not one.endswith(": "))
        return (
            f"Learner(model {self.model.name!r}, {self.samples:,} samples{f'; {shown}' if shown else ''}"
            f"{f'; rows: {rows}' if rows else ''}; {self.nbytes / 1e6:,.1f} MB)"
        )

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

    def embeddings(self, table: str, ids: Sequence[str | int]) -> NDArray[np.float32]:
        """The rows of ids, float32 [n, dim]; an id that was never learned has its initial value.

        Raises:
            ConfigError: the table does not exist.
        """
        names = [spec.name for spec in self.model.schema.tables]
        if table not in names:
            raise ConfigError(f"unknown table {table!r}; the tables are {names}")
        keys = np.array([hash_bytes(str(id_).encode()) for id_ in ids], np.uint64)
        with self._lock:
            self._check()
            return self._pull(names.index(table), keys)

    def _pull(self, table: int, keys: NDArray[np.uint64]) -> NDArray[np.float32]:
        owners = shards_of(keys, len(self._shards))
        rows = np.empty((len(keys), self.model.schema.tables[table].dim), np.float32)
        for shard in self._shards:
            owned = owners == shard.index
            rows[owned] = shard.tables[table].pull(keys[owned])
        return rows

    def forget(self, **ids: Sequence[str | int]) -> dict[str, int]:
        """Deletes the rows of ids, and those of crosses with them, as if they had never been seen.

        Of a cross with a feature whose table loses rows (`expire_after`, `capacity`, `min_count`), those are not found
        whose other id has no row any more. Shared weights keep what they have learned; docs/forget.md says more.

        Args:
            ids: by feature, such as `user=["u1"]`; at most 1,000.

        Returns:
            How many rows were deleted, by table.

        Raises:
            ConfigError: a feature is none that has ids; or there are none, or too many.
        """
        wanted = [(feature, str(one)) for feature, of in ids.items() for one in of]
        with self._lock:
            self._check()
            spec = self._shards[0].spec
            try:
                gone, _ = take_away(self._shards, spec, Sought.of(spec, wanted))
            except ShardRefused as exc:
                raise ConfigError(str(exc)) from exc
        return {table: len(keys) for table, keys in gone.items()}

    def save(self, path: str | Path) -> None:
        """Writes rows, optimizer state, dense parameters and the graph's statistics into a new directory.

        The format is in schemas/README.md; progressive validation is not part of it.

        Args:
            path: a local path, where an existing checkpoint is replaced once the new one is complete; or an fsspec URL,
                such as s3://bucket/name, where nothing exists yet.

        Raises:
            CheckpointError: it cannot be written, or `path` exists and is not a checkpoint, or the URL is in use.
            ShardBroken: a batch was learned in part; load the learner from an earlier checkpoint.
        """
        with self._lock:
            self._check()
            state = {_WATERMARK: np.array([self.watermark]), _READ: np.array([self._sampler.read])}
            if (beginning := self._trainer.beginning) is not None:
                state[_BEGINNING] = beginning
            save_shards(path, self._shards, state | {_SEEDS + n: values for n, values in self._step.arrays().items()})

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: Model,
        *,
        batch_size: int = 1024,
        shards: int = 1,
        window: int = 100_000,
        future_after: float | None = FUTURE_AFTER,
        memory: str | None = None,
        disk: str | None = None,
        evolve: bool = False,
        allow: Collection[str] = (),
    ) -> "Learner":
        """A learner that resumes from a checkpoint, at a local path or an fsspec URL.

        The checkpoint may be of a learner or a cluster, with any number of shards (of a cluster: at one clock).

        Args:
            path: the checkpoint; or the folder of a cluster's checkpoints, whose newest epoch is loaded.
            model: the model that was saved, or with `evolve` one that was made of it. Rates, admission, expiry,
                capacity and storage may differ in any case.
            batch_size: see Learner.
            shards: see Learner.
            window: see Learner.
            future_after: see Learner.
            memory: see Learner.
            disk: see Learner.
            evolve: whether the model may have changed: rows, weights and optimizer state are kept where they fit, and
                the rest begins anew; see docs/change.md.
            allow: what may be lost by that: "drop" the rows of tables that the model no longer has, "truncate" rows
                whose dim has become smaller, "meaning" where a feature is read or made in another way.

        Raises:
            CheckpointError: it is missing, or has another schema, graph or optimizer; the message says how they differ.
            CheckpointCorrupt: one of its files is damaged; the message names it.
            ConfigError: what would be lost is not in `allow`.
        """
        if not isinstance(model, Model):
            raise ConfigError(f"load takes the path of the checkpoint, then the model, not {path!r} and {model!r}")
        if not evolve:
            model = model.with_defaults_of(read_spec(path))
        options: Any = {"window": window, "future_after": future_after, "memory": memory, "disk": disk}
        learner = cls(model, batch_size=batch_size, shards=shards, **options)
        changed = model if evolve else None
        restored, state = load_shards(path, Spec.of(model), shards, evolve=changed, allow=allow, memory=learner._memory)
        learner.samples, learner.watermark = restored[0].samples, float(restored[0].watermark)
        if _WATERMARK in state:
            learner.watermark = float(state[_WATERMARK][0])
        learner._sampler.read = int(state.get(_READ, [learner.samples])[0])
        seeds = {name.removeprefix(_SEEDS): values for name, values in state.items() if name.startswith(_SEEDS)}
        if seeds:
            own = learner._step.arrays()
            learner._step.set_arrays(own | _placed(seeds, own))
        for shard in restored:
            shard.resume(Progress({0: learner.samples}, {}), learner.samples, int(learner.watermark))
        beginning = None if evolve else state.get(_BEGINNING)
        learner._use(restored, begins=not learner.samples or beginning is not None)
        if beginning is not None:
            learner._trainer.beginning = beginning
        learner._loaded_rows = learner.rows
        return learner

    def _predict(self, batch: Batch) -> NDArray[np.float32]:
        if not len(batch):
            return self._no_predictions()
        with self._lock:
            self._check()
            return self._sampler.correct(self._trainer.predict(batch))

    def _learn(self, batch: Batch, bad: list[BadSample]) -> Learned:
        with self._lock, self._explaining_memory():
            self._check()
            taken = self._sampler.select(batch)
            if len(taken):
                pulling = self._trainer.pull(self._trainer.plan(taken), taken)
                pulling.wait()
                result = self._trainer.step(pulling)
                predictions, loss = self._sampler.correct(result.predictions), result.loss
            else:
                predictions, loss = self._no_predictions(), 0.0
            with defer_signals():  # all of the following, or nothing
                if len(taken):
                    self._push(pulling, result)
                    weights = self._sampler.weights(taken)
                    self._validation.update(predictions, taken.labels, weights)
                    self._advisor.update(taken, predictions, weights)
                    self._latest = taken
                self._sampler.read += len(batch)
                for sample in bad:
                    self.bad[sample.reason] = self.bad.get(sample.reason, 0) + 1
        return Learned(len(taken), loss, predictions, taken.kept, bad)

    @contextmanager
    def _explaining_memory(self) -> Iterator[None]:
        """Says what takes the memory where it is not enough."""
        try:
            yield
        except (MemoryError, ShardBroken) as exc:
            if not isinstance(exc, MemoryError) and not isinstance(exc.__cause__, MemoryError):
                raise
            tables = ", ".join(
                f"{spec.name} {self.rows[spec.name]:,} rows of dim {spec.dim} "
                f"({sum(shard.tables[t].nbytes for shard in self._shards) / 1e6:,.0f} MB)"
                for t, spec in enumerate(self.model.schema.tables)
            )
            raise ShardBroken(
                f"out of memory after {self.samples:,} samples; tables: {tables}. Limit them with memory, capacity, "
                'expire_after or min_count, make rows smaller with dim or dtype="bfloat16", lower batch_size, or learn '
                "on several machines with `streamtrain ps`"
            ) from exc

    def _push(self, pulling: PulledBatch, result: BatchResult) -> None:
        batch = pulling.batch
        watermark = max(self.watermark, float(batch.times.max()))
        span = Span(0, self.samples, self.samples + len(batch))
        try:
            pushed = self._trainer.push(pulling, result, spans=[span], watermark=int(watermark)).wait()
            if any(shard.outcome is not PushOutcome.APPLIED for shard in pushed):
                outcomes = ", ".join(shard.outcome.name for shard in pushed)
                raise ShardBroken(
                    f"samples {span.start} to {span.end - 1} must be new to all shards, but are {outcomes}"
                )
        except BaseException as exc:
            self._broken = f"samples {span.start} to {span.end - 1} were learned in part: {type(exc).__name__}: {exc}"
            raise
        self.watermark = watermark
        self.samples = span.end
        stats = total_stats(pushed)
        stats.non_finite_dense += result.non_finite_dense
        self.stats.add(stats)
        dropped = (stats.non_finite_rows, stats.non_finite_dense, stats.non_finite_statistics)
        if any(dropped):
            logger.warning(
                "dropped non-finite gradients of samples %d to %d: %d of rows, %d of dense slices, %d of statistics",
                *(span.start, span.end - 1, *dropped),
            )

    def _check(self) -> None:
        if self._broken:
            raise ShardBroken(f"the learner is broken, load it from a checkpoint: {self._broken}")

    def _no_predictions(self) -> NDArray[np.float32]:
        return np.empty((0, len(self.model.labels)), np.float32)


def _change(first: NDArray[np.float32], now: NDArray[np.float32]) -> float:
    """Mean change of values, relative to their mean size; zeros count as 0.001."""
    before = first.astype(np.float64)
    return float(np.abs(now.astype(np.float64) - before).mean() / max(float(np.abs(before).mean()), 1e-3))


def _read_ahead(parts: Iterator[T]) -> Iterator[T]:
    """Yields the parts; a daemon thread makes the next one while one is in use."""
    results: Queue[tuple[T | None, BaseException | None]] = Queue(1)
    requested, stopped = threading.Semaphore(1), threading.Event()

    def make() -> None:
        try:
            while requested.acquire() and not stopped.is_set() and (part := next(parts, None)) is not None:
                results.put((part, None))
            if not stopped.is_set():
                results.put((None, None))
        except BaseException as exc:  # raised in the consumer
            results.put((None, exc))

    thread = threading.Thread(target=make, name="read-ahead", daemon=True)
    thread.start()
    try:
        while True:
            part, failure = results.get()
            if failure is not None:
                raise failure
            if part is None:
                return
            requested.release()
            yield part
    finally:
        stopped.set()
        requested.release()
        thread.join(_READER_SECONDS)


def _placed(saved: dict[str, NDArray[Any]], own: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Saved states of a graph by the names of another that has the same place for them; others are left out.

    Earlier releases named them as Keras does, which counts what it names in all of the process: these are known by
    their order.
    """
    if own.keys() == saved.keys():
        return saved
    ours, theirs = (sorted(names, key=_by_number) for names in (own, saved))
    pairs = [*zip(ours, theirs, strict=False)] if len(ours) == len(theirs) else [(one, one) for one in ours]
    return {
        one: saved[other]
        for one, other in pairs
        if other in saved and (saved[other].size, saved[other].dtype) == (own[one].size, own[one].dtype)
    }


def _by_number(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
