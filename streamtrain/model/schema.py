"""Schema: which fields of a sample are label, time, weight and features, and what each feature becomes.

The same schema reads samples in training and in serving, so a feature cannot mean two things.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtrain._core import TimeFormat, hash_bytes, parse_times
from streamtrain.durations import parse_duration
from streamtrain.errors import ConfigError
from streamtrain.model.features import (
    Categorical,
    Cells,
    Constant,
    Cross,
    Embedded,
    Feature,
    Label,
    Numeric,
    RowType,
    Uniform,
    check_name,
    is_count,
    is_number,
)
from streamtrain.model.optimizers import Optimizer

_DEFAULT_INIT = Uniform()


@dataclass(frozen=True)
class TableSpec:
    """One embedding table, as all features that share it agree on it.

    Attributes:
        name: the table's name.
        dim: width of a row.
        init: birth values.
        dtype: storage of embeddings.
        min_count: occurrences before a row is stored.
        expire_after: seconds of event time without being seen after which a row is dropped; None: never.
        capacity: rows at most, of all shards together; None: no limit.
        optimizer: the table's own optimizer; None: the model's.
    """

    name: str
    dim: int
    init: Uniform | Constant = _DEFAULT_INIT
    dtype: RowType = "float32"
    min_count: int = 1
    expire_after: float | None = None
    capacity: int | None = None
    optimizer: Optimizer | None = None

    def settings(self, default: Optimizer, seed: int) -> dict[str, Any]:
        """The keyword arguments by which the native core makes this table; its seed is that of (seed, name)."""
        return {
            "dim": self.dim,
            **(self.optimizer or default).settings(),
            **birth_settings(self, seed),
            "dtype": self.dtype,
            "min_count": self.min_count,
            "expire_after": 0 if self.expire_after is None else min(max(1, round(self.expire_after)), 2**32 - 1),
            "capacity": self.capacity or 0,
        }


def birth_settings(table: TableSpec, seed: int) -> dict[str, Any]:
    """What a birth value depends on besides the key, as keyword arguments of the native core."""
    uniform = isinstance(table.init, Uniform)
    return {
        "seed": hash_bytes(f"{seed}/{table.name}".encode()),
        "init": "uniform" if uniform else "constant",
        "init_scale": float(table.init.scale if isinstance(table.init, Uniform) else table.init.value),
    }


@dataclass(frozen=True)
class Schema:
    """Which fields of a sample mean what.

    Args:
        features: the model's inputs, in the order in which the graph gets them.
        label: the key of the label, a `Label`, or a sequence of either for several tasks.
        time: key of the event time (seconds since the epoch, or ISO 8601); None: samples have none.
        time_format: how it is written otherwise: "ms", "us" or "ns" since the epoch, or text of the form of a pattern
            such as "%m/%d/%Y %H:%M:%S", of Python's directives %Y %m %d %y %b %H %I %p %M %S %f %z.
        weight: key of the sample weight (>= 0; 1 where missing); None: all weigh 1.
        max_message_bytes: longest message accepted.
        max_id_bytes: longest id accepted, in bytes of UTF-8.
        max_ids: ids that a sample may have, over all features and crosses, after `max_length`.
        max_depth: deepest nesting accepted, in fields that the model does not read.

    Raises:
        ConfigError: names repeat, a cross names no feature, features of one table disagree, or rows are to expire but
            samples have no time; the message names it.
    """

    _: KW_ONLY
    features: Sequence[Feature]
    label: str | Label | Sequence[str | Label] = "label"
    time: str | None = None
    time_format: str | None = None
    weight: str | None = None
    max_message_bytes: int = 1 << 20
    max_id_bytes: int = 256
    max_ids: int = 10_000
    max_depth: int = 32
    labels: tuple[Label, ...] = field(init=False)
    tables: tuple[TableSpec, ...] = field(init=False)

    def __post_init__(self) -> None:
        given = [self.label] if isinstance(self.label, str | Label) else list(self.label)
        labels = tuple(one if isinstance(one, Label) else Label(one) for one in given)
        object.__setattr__(self, "features", tuple(self.features))
        object.__setattr__(self, "labels", labels)
        for option in ("time", "weight"):
            if getattr(self, option) is not None:
                check_name(option, getattr(self, option))
        time_format(self.time_format)
        for option, most in _LIMITS.items():
            if not is_count(getattr(self, option), most):
                raise ConfigError(f"{option} must be an integer from 1 to {most}, not {getattr(self, option)!r}")
        if not labels:
            raise ConfigError("label must name at least one field")
        if not self.features:
            raise ConfigError("features must not be empty")
        for one in self.features:
            if not isinstance(one, Categorical | Cross | Numeric):
                raise ConfigError(f"features must be Categorical, Cross or Numeric, not {one!r}")
        _check_unique("label", [one.name for one in labels])
        _check_unique("feature", list(self._input_names()))
        self._check_crosses()
        object.__setattr__(self, "tables", _tables(self.embedded))
        if self.time is None and (expiring := [one.name for one in self.embedded if one.expire_after is not None]):
            raise ConfigError(
                f"feature {expiring[0]!r}: expire_after goes by event time, but samples have none: set the schema's "
                "time to their field with it"
            )

    def _input_names(self) -> Iterator[str]:
        for one in self.features:
            yield one.name
            if isinstance(one, Categorical | Cross) and one.combiner is None:
                yield f"{one.name}_mask"
            if isinstance(one, Numeric) and one.cells:
                yield one.cells.name

    def _check_crosses(self) -> None:
        names = {one.name for one in self.categoricals}
        for cross in self.crosses:
            for name in cross.of:
                if name not in names:
                    raise ConfigError(f"feature {cross.name!r}: of names {name!r}, which is not a Categorical feature")

    @property
    def categoricals(self) -> list[Categorical]:
        """The categorical features, in order."""
        return [one for one in self.features if isinstance(one, Categorical)]

    @property
    def crosses(self) -> list[Cross]:
        """The crosses, in order."""
        return [one for one in self.features if isinstance(one, Cross)]

    @property
    def cells(self) -> list[Cells]:
        """The cells of numeric features with a grid, in order."""
        return [one.cells for one in self.numerics if one.cells]

    @property
    def embedded(self) -> list[Categorical | Cross | Cells]:
        """What has an embedding table: categoricals, crosses, then cells, the order of columns of a batch."""
        return [*self.categoricals, *self.crosses, *self.cells]

    @property
    def numerics(self) -> list[Numeric]:
        """The numeric features, in order."""
        return [one for one in self.features if isinstance(one, Numeric)]

    def fingerprint(self) -> str:
        """16 hex digits that change when a change of the schema makes learned rows or inputs mean something else.

        Covered: features with their fields, tables, dims, combiners, lengths, defaults, transforms and birth values,
        and labels. Not covered: limits, admission, expiry, capacity, storage and optimizers.
        """
        described = [[type(one).__name__, *_described(one).values()] for one in (*self.features, *self.cells)]
        births = [[table.name, table.dim, birth_settings(table, 0)] for table in self.tables]
        text = json.dumps([described, births, [one.name for one in self.labels]])
        return f"{hash_bytes(text.encode()):016x}"

    def about(self) -> dict[str, Any]:
        """What the fingerprint covers, as JSON-able values: "features" by name, and the names of "labels"."""
        return {
            "features": {
                one.name: {"type": type(one).__name__, **_described(one)} for one in (*self.features, *self.cells)
            },
            "labels": [one.name for one in self.labels],
        }


TIME_UNITS = {"s": 1e0, "ms": 1e3, "us": 1e6, "ns": 1e9}
"""Of numbers that are event times, by name how many make a second."""


def time_format(given: str | None) -> TimeFormat:
    """How event times are written, by a schema's `time_format`.

    Raises:
        ConfigError: it is neither a unit nor a pattern.
    """
    try:
        if given is None or given in TIME_UNITS:
            return TimeFormat(TIME_UNITS[given or "s"])
        if isinstance(given, str) and "%" in given:
            return TimeFormat(pattern=given)
        why = "expected one of s, ms, us and ns, or a pattern such as %d.%m.%Y"
    except ValueError as exc:
        why = str(exc)
    raise ConfigError(f"time_format {given!r}: {why}")


_DATES = (
    *("%m/%d/%Y", "%d/%m/%Y", "%Y/%m/%d", "%d.%m.%Y", "%d-%m-%Y", "%m-%d-%Y", "%m/%d/%y", "%d/%m/%y", "%d.%m.%y"),
    *("%d %b %Y", "%d-%b-%Y", "%d-%b-%y", "%d/%b/%Y", "%b %d, %Y", "%b %d %Y", "%Y%m%d"),
)
_TIMES = ("", " %H:%M", " %H:%M:%S", " %H:%M:%S.%f", " %I:%M %p", " %I:%M:%S %p", ":%H:%M:%S %z", "T%H:%M:%S")
_PATTERNS = (None, *(f"{date}{time}" for time in _TIMES for date in _DATES))


def find_time_formats(texts: Sequence[str]) -> Iterator[tuple[str | None, NDArray[np.float64]]]:
    """Each `time_format` that all of some texts have, of those that are usual, with their seconds since the epoch."""
    text = "".join(texts).encode("utf-8", "replace")
    offsets = np.cumsum([0, *(len(one.encode("utf-8", "replace")) for one in texts)])
    data = np.frombuffer(text, np.uint8)
    for pattern in _PATTERNS:
        head = parse_times(data, offsets[:2], time_format(pattern))
        if np.isfinite(head).all():
            seconds = parse_times(data, offsets, time_format(pattern))
            if np.isfinite(seconds).all():
                yield pattern, seconds


_LIMITS = {"max_message_bytes": 1 << 30, "max_id_bytes": 1 << 30, "max_ids": 1 << 30, "max_depth": 256}
_NOT_MEANING = {"dtype", "min_count", "expire_after", "capacity", "optimizer", "init", "grid"}
_TABLE_OPTIONS = ("init", "dtype", "min_count", "expire_after", "capacity", "optimizer")


def _described(feature: Feature | Cells) -> dict[str, str]:
    """The options of a feature that decide what it means, as text."""
    return {one.name: repr(_meaning(feature, one.name)) for one in fields(feature) if one.name not in _NOT_MEANING}


def _meaning(feature: Feature | Cells, option: str) -> object:
    """The value of an option, however it is written: a default that is written out, 77 for "77", 1 for 1.0."""
    if option in ("field", "table"):
        return getattr(feature, f"{option}_name")
    value = getattr(feature, option)
    if isinstance(feature, Numeric):
        return float(value) if is_number(value) else value
    return str(value) if option == "default" and value not in (None, ()) else value


def _tables(features: Sequence[Embedded]) -> tuple[TableSpec, ...]:
    tables: dict[str, TableSpec] = {}
    given: dict[tuple[str, str], str] = {}
    for one in features:
        table = tables.setdefault(one.table_name, TableSpec(one.table_name, one.dim))
        if table.dim != one.dim:
            raise ConfigError(f"feature {one.name!r}: dim is {one.dim}, but table {table.name!r} has dim {table.dim}")
        for option in _TABLE_OPTIONS:
            value = getattr(one, option)
            if value is None:
                continue
            if option == "expire_after":
                value = parse_duration(value, option)
            first = given.setdefault((table.name, option), one.name)
            if first != one.name and getattr(table, option) != value:
                raise ConfigError(
                    f"feature {one.name!r}: {option} is {getattr(one, option)!r}, but feature {first!r} of the same "
                    f"table {table.name!r} has {getattr(table, option)!r}"
                )
            table = replace(table, **{option: value})
        tables[table.name] = table
    return tuple(tables.values())


def _check_unique(what: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{what} {name!r} appears twice; give one of them another name")
