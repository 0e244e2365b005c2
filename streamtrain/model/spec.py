"""Spec: what shards need to know of a model, as plain values: they hold rows for it without its code or TensorFlow."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, NotRequired, TypedDict

import msgspec
import numpy as np

from streamtrain._core import DenseVector, Table, hash_bytes, state_size
from streamtrain.errors import ConfigError, ModelMismatch

if TYPE_CHECKING:
    from streamtrain.model.model import Model


class _WeightAbout(TypedDict):
    """What a weight stands for; see `streamtrain.model.dense.WeightInfo`."""

    layer: str
    name: str
    is_numbered: bool
    inputs: list[tuple[str, int]]
    columns: list[tuple[str, int]]


class _MixAbout(TypedDict):
    """A call that mixes columns; see `streamtrain.model.dense.Mix`."""

    layer: str
    inputs: list[list[tuple[str, int]]]
    by_column: bool


class _OptimizerAbout(TypedDict):
    """The optimizer of tables without one of their own."""

    optimizer: str
    rate: float


class _About(TypedDict):
    """The values of `Spec.about`."""

    features: dict[str, dict[str, str]]
    labels: list[str]
    weights: list[_WeightAbout]
    statistics: list[_WeightAbout]
    constants: NotRequired[list[_WeightAbout]]
    mixes: NotRequired[list[_MixAbout]]
    embedding_optimizer: NotRequired[_OptimizerAbout]


_MALFORMED = (
    *(KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError),
    msgspec.ValidationError,
)

REDUCTIONS = ("row_sum", "mean", "sum")
_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


class Rates(NamedTuple):
    """The learning rates of a model, by the arguments of `Model` that they belong to.

    Features with an optimizer of their own keep its rate.
    """

    embedding_optimizer: float
    dense_optimizer: float


@dataclass(frozen=True)
class Spec:
    """What shards need to know of a model.

    Attributes:
        schema: fingerprint of the schema.
        seed: seed of birth values.
        reduction: the model's reduction of gradients.
        tables: by table "name" and the native core's settings.
        dense: shapes of the graph's trainable weights, in the order of the flat vector.
        statistics: shapes of the graph's non-trainable float weights, in their order.
        dense_optimizer: the native core's settings.
        about: what the parts of the model stand for, by which a changed model is compared with what was learned
            (checkpoint/evolution.py): "features" and "labels" of the schema, "weights", "statistics" and "mixes" of the
            graph, and "embedding_optimizer", that of tables without one of their own. Empty in what earlier releases
            wrote.
        constants: shapes of its non-trainable float weights that do not change, which shards do not keep.
        rates: learning rates that were set while the model was learning (`streamtrain set`), by the names of `Rates`;
            the others are those of `tables` and `dense_optimizer`.
    """

    schema: str
    seed: int
    reduction: str
    tables: tuple[dict[str, Any], ...]
    dense: tuple[tuple[int, ...], ...]
    statistics: tuple[tuple[int, ...], ...]
    dense_optimizer: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)
    constants: tuple[tuple[int, ...], ...] = ()
    rates: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, model: "Model") -> "Spec":
        """The spec of a model. Builds its graph, so TensorFlow is loaded."""
        tables = model.schema.tables
        return cls(
            schema=model.schema.fingerprint(),
            seed=model.seed,
            reduction=model.reduction,
            tables=tuple({"name": t.name, **t.settings(model.embedding_optimizer, model.seed)} for t in tables),
            dense=model.dense.shapes,
            statistics=model.statistics.shapes,
            dense_optimizer=model.dense_optimizer.settings(),
            about=model.about,
            constants=tuple(tuple(one.shape) for one in model.constants),
        )

    @classmethod
    def from_json(cls, text: str) -> "Spec":
        """The spec that `to_json` gave.

        Raises:
            ConfigError: the text is none, or no table or optimizer can be made of it.
        """
        try:
            given = json.loads(text)
            spec = cls(
                schema=str(given["schema"]),
                seed=int(given["seed"]),
                reduction=str(given["reduction"]),
                tables=tuple(map(_complete, given["tables"])),
                dense=_shapes(given["dense"]),
                statistics=_shapes(given["statistics"]),
                dense_optimizer=_complete(given["dense_optimizer"]),
                about=dict(given.get("about", {})),
                constants=_shapes(given.get("constants", ())),
            )
            spec.make_tables()
            spec.make_dense([])
            spec._check()
            spec = replace(spec, about=spec._fitting())
            return spec.with_rates(given.get("rates", {}))
        except _MALFORMED as exc:
            raise ConfigError(f"invalid model spec: {type(exc).__name__}: {exc}") from exc

    def _check(self) -> None:
        """What the native core does not: a shard that took it would fail much later."""
        names = [one["name"] for one in self.tables]
        if not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
            raise ValueError(f"table names must be distinct strings, not {names}")
        if not all("expire_after" in one for one in self.tables):  # the core has a default, shards have not
            raise ValueError("a table lacks 'expire_after'")
        if any(extent < 0 for shape in (*self.dense, *self.statistics) for extent in shape):
            raise ValueError(f"shapes must not be negative: {self.dense}, {self.statistics}")
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, not {self.reduction!r}")
        if self.about:
            self._check_about(msgspec.convert(self.about, _About))

    def _check_about(self, about: _About) -> None:
        for what, described, shapes in (
            ("weights", about["weights"], self.dense),
            ("statistics", about["statistics"], self.statistics),
            ("constants", about.get("constants", []), self.constants),
        ):
            if len(described) != len(shapes):
                raise ValueError(f"{len(described)} {what} are described, but there are {len(shapes)}")

    def _fitting(self) -> dict[str, Any]:
        """What the parts stand for, without descriptions that do not fit: they are advice, and some were wrong once."""
        fitting = dict(self.about)
        parts = {"weights": self.dense, "statistics": self.statistics, "constants": self.constants}
        for what, shapes in parts.items():
            if what in fitting:
                fitting[what] = [_fitted(one, shape) for one, shape in zip(fitting[what], shapes, strict=True)]
        return fitting

    def to_json(self) -> str:
        """The spec as JSON."""
        return json.dumps(asdict(self))

    @property
    def identity(self) -> str:
        """16 hex digits; shards and workers, and checkpoints and models, of another do not fit together."""
        return f"{hash_bytes(json.dumps(self.meaning(), sort_keys=True).encode()):016x}"

    def meaning(self) -> dict[str, Any]:
        """What must be the same. Rates, admission, expiry, capacity and storage may differ: they are operation."""
        return {
            "schema": self.schema,
            "seed": self.seed,
            "dense": [list(shape) for shape in self.dense],
            "dense_optimizer": self.dense_optimizer["optimizer"],
            "tables": {one["name"]: [one["dim"], one["optimizer"]] for one in self.tables},
        } | ({"constants": [list(shape) for shape in self.constants]} if self.constants else {})

    def differing(self, other: "Spec") -> list[str]:
        """Names of the parts in which two specs are incompatible; empty if they are compatible."""
        if self.identity == other.identity:
            return []
        mine, theirs = self.meaning(), other.meaning()
        return [what for what in mine | theirs if mine.get(what) != theirs.get(what)]

    def check_fit(self, wanted: "Spec", whose: str) -> None:
        """Whether a model file can continue what was learned by this one.

        Args:
            wanted: of the model file.
            whose: where it was learned, such as the address of a shard.

        Raises:
            ModelMismatch: it cannot; the message says what differs, and the way out.
        """
        parts = wanted.differing(self)
        if parts:
            details = "; ".join(self._different_tables(wanted))
            parts[-1] += f" ({details})" if details else ""
        elif self.reduction != wanted.reduction:
            parts = [f"reduction ({self.reduction!r}, but {wanted.reduction!r} in the model file)"]
        if parts:
            raise ModelMismatch(
                f"{whose} holds another model; they differ in: {', '.join(parts)}. Undo the change, or see with "
                "`streamtrain plan` what the changed model keeps, and let `streamtrain evolve` take it over",
                self.to_json(),
            )

    def _different_tables(self, wanted: "Spec") -> Iterator[str]:
        mine, theirs = self.meaning()["tables"], wanted.meaning()["tables"]
        for name in mine | theirs:
            if name not in theirs:
                yield f"table {name} is missing in the model file"
            elif name not in mine:
                yield f"table {name} is new in the model file"
            else:
                yield from (
                    f"{what} of table {name} is {old}, but {new} in the model file"
                    for what, old, new in zip(("dim", "optimizer"), mine[name], theirs[name], strict=True)
                    if old != new
                )

    @property
    def _embedding_optimizer(self) -> _OptimizerAbout:
        """The optimizer of tables without one of their own; of earlier releases, that of the first table."""
        found: _OptimizerAbout | None = self.about.get("embedding_optimizer")
        first = (self.tables or [self.dense_optimizer])[0]
        return found or {"optimizer": first["optimizer"], "rate": first["rate"]}

    @property
    def own_rates(self) -> tuple[float | None, ...]:
        """For each table, the learning rate of its own optimizer; None: it uses that of the model."""
        model = self._embedding_optimizer
        return tuple(
            None if all(one[name] == value for name, value in model.items()) else one["rate"] for one in self.tables
        )

    @property
    def first_rates(self) -> Rates:
        """The learning rates of the model file with which the run began."""
        return Rates(self._embedding_optimizer["rate"], self.dense_optimizer["rate"])

    @property
    def current_rates(self) -> Rates:
        """The learning rates that are in force."""
        return self.first_rates._replace(**self.rates)

    def with_rates(self, rates: Mapping[str, float]) -> "Spec":
        """The same spec, with other learning rates set, by the names of `Rates`; none that are as the run began.

        Raises:
            ConfigError: a name or a rate is invalid, or the optimizer's rate cannot be set.
        """
        for name, rate in rates.items():
            if name not in Rates._fields:
                raise ConfigError(f"there is no rate of {name!r}; there are those of {' and '.join(Rates._fields)}")
            if isinstance(rate, bool) or not isinstance(rate, int | float) or not _SMALLEST <= rate <= _LARGEST:
                raise ConfigError(f"{name}.rate must be a finite number > 0, not {rate!r}")
        if "embedding_optimizer" in rates:
            if None not in self.own_rates:
                raise ConfigError("embedding_optimizer.rate has no effect: no table of the model learns with it")
            if self._embedding_optimizer["optimizer"] == "ftrl":
                raise ConfigError(
                    "the rate of FTRL cannot be set: it computes rows from their state by the rate, so all of them "
                    "would jump; change the model file, and run `streamtrain evolve`"
                )
        first = self.first_rates._asdict()
        return replace(self, rates={name: float(rate) for name, rate in rates.items() if rate != first[name]})

    def keeping_rates(self, learned: "Spec") -> "Spec":
        """This spec, of a changed model, with the rates that were set for what it takes over.

        A rate stays set if the changed model has the same optimizer with the rate with which the old one began.
        """
        is_same = {
            "embedding_optimizer": None in self.own_rates and self._embedding_optimizer == learned._embedding_optimizer,
            "dense_optimizer": all(
                self.dense_optimizer[name] == learned.dense_optimizer[name] for name in ("optimizer", "rate")
            ),
        }
        return self.with_rates({name: rate for name, rate in learned.rates.items() if is_same[name]})

    def overridden(self, wanted: "Spec") -> list[str]:
        """What a model file that fits says otherwise; what is in force stays as the run began."""
        changed: dict[str, list[str]] = {}
        for mine, theirs in zip(self.tables, wanted.tables, strict=True):
            for change in _changes(mine, theirs):
                changed.setdefault(change, []).append(mine["name"])
        said = [f"of table{'s' * (len(names) > 1)} {', '.join(names)}: {change}" for change, names in changed.items()]
        return said + [
            f"of dense_optimizer: {change}" for change in _changes(self.dense_optimizer, wanted.dense_optimizer)
        ]

    @property
    def dims(self) -> list[int]:
        """Width of a row, by table."""
        return [one["dim"] for one in self.tables]

    @property
    def state_sizes(self) -> list[int]:
        """Floats of optimizer state per row, by table."""
        return [state_size(one["optimizer"], one["dim"]) for one in self.tables]

    @property
    def dense_slots(self) -> int:
        """Floats of dense optimizer state per weight."""
        kind = self.dense_optimizer["optimizer"]
        return state_size(kind, 2) - state_size(kind, 1)

    @property
    def dense_size(self) -> int:
        """Floats of the flat dense vector."""
        return _floats(self.dense)

    @property
    def statistics_size(self) -> int:
        """Floats of the flat vector of statistics."""
        return _floats(self.statistics)

    def make_tables(self, shards: int = 1, options: Sequence[Mapping[str, Any]] | None = None) -> list[Table]:
        """The empty tables of one of `shards` shards, each with its share of the capacity, and further options."""
        settings = [{name: value for name, value in one.items() if name != "name"} for one in self.tables]
        return [
            Table(**one | {"capacity": share_of_capacity(one, shards)}, **more)
            for one, more in zip(settings, options or [{}] * len(settings), strict=True)
        ]

    def make_dense(self, values: Any) -> DenseVector:
        """A slice of the dense parameters, from its first values, float32 [n]."""
        return DenseVector(np.ascontiguousarray(values, np.float32), **self.dense_optimizer)


def share_of_capacity(table: Mapping[str, Any], shards: int) -> int:
    """The most rows of a table, by its settings, in one of `shards` shards; 0: there is no limit."""
    return -(-int(table.get("capacity", 0)) // shards)


def _complete(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Settings of an optimizer with what earlier releases did not have."""
    has_decay = optimizer["optimizer"] in ("adagrad", "rowwise_adagrad")
    return {**optimizer, **({"decay": optimizer.get("decay", 1.0)} if has_decay else {})}


def _fitted(described: dict[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    """A description of a weight of this shape, with what does not fit replaced by what says nothing."""

    def fits(segments: list[list[Any]], extent: int) -> bool:
        widths = [width for _, width in segments]
        return not widths or (min(widths) >= 0 and sum(widths) == extent)

    rows, columns = (shape or (1,))[0], (shape or (1,))[-1]
    inputs = described["inputs"] if fits(described["inputs"], rows) else []
    whole = [[described["layer"], columns]]
    return described | {
        "inputs": inputs,
        "columns": described["columns"] if fits(described["columns"], columns) else whole,
    }


def _changes(mine: dict[str, Any], theirs: dict[str, Any]) -> Iterator[str]:
    for name, value in mine.items():
        if name != "name" and theirs.get(name) != value:
            yield f"{name} {value}, not {theirs.get(name)}"


def _floats(shapes: tuple[tuple[int, ...], ...]) -> int:
    total = 0
    for shape in shapes:
        size = 1
        for extent in shape:
            size *= extent
        total += size
    return total


def _shapes(given: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(extent) for extent in shape) for shape in given)


def shard_slice(size: int, part: int, parts: int) -> slice:
    """The part of a flat vector that a shard holds; sizes differ by at most one."""
    return slice(size * part // parts, size * (part + 1) // parts)
