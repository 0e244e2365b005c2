"""How much memory the rows of a model need, what is read from disk in less, and what options that save memory cost.

A stream of samples says how many rows there will be, and how soon each is needed again (reuse.py). Options of features
that make rows smaller or fewer are applied to the large tables, one by one and together; what each costs is seen by
having the model learn the samples with it, as the model as given does, side by side.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from streamtrain._core import Table, hash_integers
from streamtrain.errors import ConfigError
from streamtrain.model.batch import Batch
from streamtrain.model.model import Model
from streamtrain.model.sampling import Sampler
from streamtrain.ps.row_memory import INDEX_BYTES, Need, shares
from streamtrain.train.micro import GraphCache
from streamtrain.tuning.candidate import CHUNK, Candidate, Decoded, Losses
from streamtrain.tuning.compare import Difference
from streamtrain.tuning.race import compare_losses
from streamtrain.tuning.reuse import Accesses, Reuse
from streamtrain.tuning.space import changes, with_features

_DISK_INDEX_BYTES = 10  # of a row on disk, in memory
_LARGE = 0.01  # of the bytes of all rows: a table in which it is worth while to save
_SAVES = 0.95  # of the bytes as given, at most, or an option is not tried
_MIN_COUNTS = (2, 5)
_EXPIRE_AFTER = {"1h": 3600, "6h": 21600, "1d": 86400, "7d": 604800, "30d": 2592000}
_LOST = 0.01  # of accesses, at most, that find a row gone
_ACCEPTED = 0.005  # of the loss, that it may be higher
_BIRTH, _PULL = 1 << 15, 1 << 12  # rows

Options = Mapping[str, Any]


class TableSize(NamedTuple):
    """Of a table, by the end of the samples that are planned for.

    Attributes:
        name: of the table.
        rows: number of rows.
        growth: exponent of their growth with the number of samples, 0 to 1.
        need: bytes of all of them in memory, and least bytes, both with the index.
        memory: bytes that it gets.
        in_memory: rows that have room there; the others are on disk.
        reads: rows that a sample reads from disk.
        accesses: rows that a sample reads.
    """

    name: str
    rows: float
    growth: float
    need: Need
    memory: float
    in_memory: float
    reads: float
    accesses: float


@dataclass(frozen=True)
class Plan:
    """A model in a memory, with options of its own.

    Attributes:
        options: of its large tables, where they save something.
        changes: what differs from the model as given, as Python by option of a feature.
        tables: by table.
        fits: whether there is memory for the index of all rows, at least.
        loss: mean loss of the samples; NaN: not measured.
        worse: how much higher it is than that of the model as given; None for that itself, and where not measured.
    """

    options: Options
    changes: dict[str, str]
    tables: list[TableSize]
    fits: bool
    loss: float = math.nan
    worse: Difference | None = None

    @property
    def name(self) -> str:
        """Its options as text."""
        return ", ".join(f"{option}={value!r}" for option, value in self.options.items()) or "as given"

    @property
    def nbytes(self) -> float:
        """Bytes of all rows in memory."""
        return sum(one.need.all for one in self.tables)

    @property
    def memory(self) -> float:
        """Bytes that it gets; more than there is if not even the index of rows on disk has room."""
        return sum(one.memory for one in self.tables)

    @property
    def reads(self) -> float:
        """Rows that a sample reads from disk."""
        return sum(one.reads for one in self.tables)

    @property
    def in_memory(self) -> float:
        """Share of the accesses that find the row in memory."""
        accesses = sum(one.accesses for one in self.tables)
        return 1 - self.reads / accesses if accesses else 1.0

    def as_json(self) -> dict[str, Any]:
        """Values for JSON."""
        worse = None if self.worse is None else {"mean": self.worse.mean, "margin": _finite(self.worse.margin())}
        return {
            "options": self.changes,
            "bytes": round(self.nbytes),
            "fits": self.fits,
            "in_memory": round(self.in_memory, 4),
            "reads_per_sample": round(self.reads, 4),
            "loss": _finite(self.loss),
            "worse": worse,
            "tables": {
                one.name: {
                    "rows": round(one.rows),
                    "growth": round(one.growth, 3),
                    "bytes": one.need.all,
                    "memory": round(one.memory),
                    "rows_in_memory": round(one.in_memory),
                    "reads_per_sample": round(one.reads, 4),
                }
                for one in self.tables
            },
        }


class Sizing:
    """Takes samples, then makes plans.

    Args:
        model: the model as given.
        batch_size: samples that are pulled at once.
        megabytes: of decoded samples that are kept to be learned; later ones count rows only.

    Attributes:
        model: as given.
        samples: number so far.
    """

    def __init__(self, model: Model, *, batch_size: int = 1024, megabytes: float = 1024.0) -> None:
        self.samples = 0
        self.model, self._specs = model, model.schema.tables
        self._batch_size, self._bytes = batch_size, megabytes * 1e6
        self._planner = model.planner(1)
        self._accesses = [Accesses() for _ in self._specs]
        self._judged = [*range(len(model.labels))]
        self._decoded, self._sampler = Decoded(model, self._judged), Sampler(model.sampling)
        self._reuse: dict[tuple[int, int, int], Reuse] = {}

    @property
    def chunk(self) -> int:
        """Samples that `add` takes at once."""
        return -(-CHUNK // self._batch_size) * self._batch_size

    def add(self, batch: Batch) -> None:
        """The next samples of the stream, at most `chunk`."""
        for part in self._sampler.take(batch).cut(self._batch_size):
            plan = self._planner.plan(part.keys, part.starts, part.offsets, part.times)
            for i, accesses in enumerate(self._accesses):
                accesses.add(plan.keys(i), plan.counts(i), plan.times(i), len(part))
        self.samples += len(batch)
        if self._decoded.nbytes < self._bytes and len(batch):
            self._decoded.add(batch)

    @property
    def learned(self) -> int:
        """Number of samples that options are judged by: the first ones."""
        return self._decoded.samples(len(self._decoded))

    def plans(
        self,
        memory: float,
        *,
        samples: float = 0.0,
        seconds: float = math.inf,
        on_progress: Callable[[str], object] = lambda option: None,
    ) -> list[Plan]:
        """The model as given, then with each option.

        Args:
            memory: bytes for the rows of all shards together.
            samples: number that is planned for, at least those that were added.
            seconds: to learn with options; those for which none are left have no loss. At least the model as given is
                learned, unless all of its rows have room.
            on_progress: called with what is being learned.

        Raises:
            ConfigError: there are no samples.
        """
        if not self.samples:
            raise ConfigError("there are no samples")
        samples, ends = max(samples, self.samples), time.monotonic() + seconds
        tables = self._tables(self.model, memory, samples)
        if all(one.memory >= one.need.all for one in tables):
            return [Plan({}, {}, tables, True)]
        learn = partial(_learned, self._decoded, Losses(self.model, self._judged), self._batch_size, GraphCache())
        on_progress(Plan({}, {}, tables, True).name)
        first, chunks = learn(self.model), len(self._decoded)
        plans = [Plan({}, {}, tables, _fit(tables, memory), first.loss(self._decoded, 0, chunks))]
        for options in self._options():
            model = self._with(options, samples)
            tables = self._tables(model, memory, samples)
            rivals = [plans[0].nbytes, *(one.nbytes for one in plans[1:] if one.options.keys() == options.keys())]
            if sum(one.need.all for one in tables) > _SAVES * min(rivals):
                continue
            plan = Plan(options, changes(self.model, model), tables, _fit(tables, memory))
            if time.monotonic() + first.seconds < ends and not first.ended:
                on_progress(plan.name)
                candidate = learn(model)
                if not candidate.ended:
                    loss = candidate.loss(self._decoded, 0, chunks)
                    worse = compare_losses(self._decoded, candidate, first, 0, chunks)
                    plan = replace(plan, loss=loss, worse=worse)
            plans.append(plan)
        return plans

    def _options(self) -> Iterator[Options]:
        fewer: list[Options] = [
            {},
            *({"min_count": k} for k in _MIN_COUNTS),
            *({"expire_after": text} for text in _EXPIRE_AFTER),
        ]
        for dtype in ({}, {"dtype": "float16"}):
            yield from ({**dtype, **one} for one in fewer)

    def _is_known(self, table: int, option: str, value: Any) -> bool:
        """Whether these samples can tell, and hardly any row would be needed again once it is gone."""
        if option != "expire_after":
            return True
        accesses, after = self._accesses[table], _EXPIRE_AFTER[value]
        return 2 * after < accesses.seconds() and self._of(table, 1, 0).lost(after) <= _LOST

    def _with(self, options: Options, samples: float) -> Model:
        """The model with options of its tables, each where it saves something."""
        settings = {one.name: one.settings(self.model.embedding_optimizer, self.model.seed) for one in self._specs}
        total = sum(self._need(i, of, samples).all for i, of in enumerate(settings.values()))
        saving: dict[str, dict[str, Any]] = {}
        for i, (table, of) in enumerate(settings.items()):
            before, fewer = self._need(i, of, samples).all, {}
            for name, value in options.items():
                changed = of | {name: _EXPIRE_AFTER.get(value, value)}
                saves = before >= _LARGE * total and self._need(i, changed, samples).all <= _SAVES * before
                if saves and self._is_known(i, name, value):
                    fewer[name] = value
            saving[table] = fewer
        return with_features(self.model, lambda feature: saving.get(feature.table_name, {}))

    def _of(self, table: int, min_count: int, expire_after: int) -> Reuse:
        key = table, min_count, expire_after
        if key not in self._reuse:
            self._reuse[key] = self._accesses[table].reuse(min_count, expire_after)
        return self._reuse[key]

    def _need(self, table: int, settings: Mapping[str, Any], samples: float) -> Need:
        shape = _Shape(settings)
        return shape.need(shape.rows_after(samples, self._of(table, shape.min_count, shape.expire_after)))

    def _tables(self, model: Model, memory: float, samples: float) -> list[TableSize]:
        """Sizes of the tables of a model, which share the memory as those of a shard do."""
        shapes = [_Shape(one.settings(model.embedding_optimizer, model.seed)) for one in model.schema.tables]
        reuse = [self._of(i, one.min_count, one.expire_after) for i, one in enumerate(shapes)]
        rows = [one.rows_after(samples, of) for one, of in zip(shapes, reuse, strict=True)]
        needs = [one.need(n) for one, n in zip(shapes, rows, strict=True)]
        bounded = sum(need.all for one, need in zip(shapes, needs, strict=True) if one.capacity)
        free = [i for i, one in enumerate(shapes) if not one.capacity]
        given = dict(zip(free, shares([needs[i] for i in free], int(memory - bounded), 0), strict=True))
        sizes = []
        for i, (shape, of, n) in enumerate(zip(shapes, reuse, rows, strict=True)):
            share = float(given.get(i, needs[i].all))
            room = n if share >= needs[i].all else shape.room(share, n)
            reads = 0.0 if shape.capacity else of.reads(room, samples)
            sizes.append(
                TableSize(self._specs[i].name, n, of.growth, needs[i], share, min(room, n), reads, of.accesses)
            )
        return sizes


class _Shape:
    """What a row of a table takes, by its settings."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.capacity, self.min_count = int(settings["capacity"]), int(settings["min_count"])
        self.expire_after = int(settings["expire_after"])
        stats = Table(**settings).stats()
        self._sketch, self._row = stats["sketch_bytes"], stats["row_bytes"] + INDEX_BYTES

    def rows_after(self, samples: float, reuse: Reuse) -> float:
        rows = reuse.rows_after(samples)
        return min(rows, self.capacity) if self.capacity else rows

    def need(self, rows: float) -> Need:
        return Need(math.ceil(self._sketch + rows * _DISK_INDEX_BYTES), math.ceil(self._sketch + rows * self._row))

    def room(self, share: float, rows: float) -> float:
        """Rows in so many bytes, if the others are on disk."""
        return max(0.0, (share - self.need(rows).least) / (self._row - _DISK_INDEX_BYTES))


def _fit(tables: list[TableSize], memory: float) -> bool:
    return sum(one.memory for one in tables) <= memory + 1


def _learned(decoded: Decoded, losses: Losses, batch_size: int, graphs: GraphCache, model: Model) -> Candidate:
    """A candidate that has learned the samples."""
    candidate = Candidate(model, losses, batch_size, graphs)
    candidate.start()
    for chunk in decoded.chunks:
        if not candidate.ended:
            candidate.learn(chunk)
    candidate.finish()
    candidate.forget_predictions()
    return candidate


def best(plans: list[Plan]) -> Plan | None:
    """The plan that reads least from disk, of those that fit and are at most hardly worse than the model as given.

    None: there is none.
    """
    accepted = [
        one for one in plans[1:] if one.worse and one.worse.mean + one.worse.margin() <= _ACCEPTED * plans[0].loss
    ]
    return min(
        (one for one in [plans[0], *accepted] if one.fits),
        key=lambda one: (round(one.reads, 2), len(one.changes)),
        default=None,
    )


def disk_reads(folder: str, *, seconds: float = 1.0, rows: int = 2_000_000) -> float:
    """Rows that a shard can read from a folder per second: measured, with rows that have no room in memory.

    Args:
        folder: on the disk.
        seconds: of reading.
        rows: to read from; a block of 4 KiB has some fifty, so that a call needs hardly one twice.
    """
    table = Table(16, optimizer="adagrad", rate=0.1, dtype="float16", memory=rows * 20, folder=folder)
    generator = np.random.default_rng(0)
    for first in range(0, rows, _BIRTH):
        keys = hash_integers(np.arange(first, min(first + _BIRTH, rows)))
        ones = np.ones(len(keys), np.uint32)
        table.push(keys, np.zeros((len(keys), 16), np.float32), ones, ones)
    before, began, took = table.stats()["disk_reads"], time.monotonic(), 0.0
    while took < seconds:
        table.pull(hash_integers(np.unique(generator.integers(0, rows, _PULL))))
        took = time.monotonic() - began
    return (table.stats()["disk_reads"] - before) / took


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
