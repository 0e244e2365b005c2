"""Features and labels: what a field of a sample becomes."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Literal, TypeGuard

import numpy as np
from numpy.typing import NDArray

from streamtrain.durations import parse_duration
from streamtrain.errors import ConfigError
from streamtrain.model.optimizers import Optimizer, ours

Combiner = Literal["sum", "mean", "sqrtn"]
RowType = Literal["float32", "bfloat16", "float16"]
LabelKind = Literal["binary", "real", "count"]

MAX_DIM = 4096
MAX_MICRO_BATCH = 1 << 16
MAX_MIN_COUNT = 255
MAX_CROSSED = 8
MAX_CELL_BITS = 23
MAX_LENGTH = 2**31 - 1
MAX_CAPACITY = 2**32 - 2
BLANKS = frozenset(("", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "NULL", "null", "None", "\\N", "-", "?"))
"""Texts that stand for a missing number, as the native core has them (sample.h)."""
JSON_NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"
"""Pattern of a number as JSON has it: 007 is none."""
MAX_FLOAT = 3.4028234663852886e38  # of float32


@dataclass(frozen=True)
class Uniform:
    """Birth values drawn uniformly from [-scale, scale), a pure function of (seed, table, key)."""

    scale: float = 0.05

    def __post_init__(self) -> None:
        if not is_number(self.scale) or not 0 <= self.scale <= MAX_FLOAT:
            raise ConfigError(f"Uniform: scale must be a finite number >= 0, not {self.scale!r}")


@dataclass(frozen=True)
class Constant:
    """Every birth value is `value`."""

    value: float = 0.0

    def __post_init__(self) -> None:
        if not is_number(self.value) or not abs(self.value) <= MAX_FLOAT:
            raise ConfigError(f"Constant: value must be a finite number, not {self.value!r}")


@dataclass(frozen=True)
class Embedded:
    """What `Categorical` and `Cross` share: the embedding table behind the feature.

    Options of the table (from `init` on) may be given by any of the features that share it; those that give one must
    agree, and None leaves it to the others or to the default.
    """

    name: str
    dim: int
    _: KW_ONLY
    table: str | None = None
    combiner: Combiner | None = "mean"
    max_length: int | None = None
    init: Uniform | Constant | None = None
    dtype: RowType | None = None
    min_count: int | None = None
    expire_after: str | float | None = None
    capacity: int | None = None
    optimizer: Optimizer | None = None

    def __post_init__(self) -> None:
        check_name("feature", self.name)
        check_name("table", self.table_name)
        self._check(is_count(self.dim, MAX_DIM), "dim", f"1 to {MAX_DIM}")
        self._check(self.combiner in ("sum", "mean", "sqrtn", None), "combiner", '"sum", "mean", "sqrtn" or None')
        good = self.max_length is None or is_count(self.max_length, MAX_LENGTH)
        self._check(good, "max_length", f"1 to {MAX_LENGTH} or None")
        self._check(self.init is None or isinstance(self.init, Uniform | Constant), "init", "Uniform or Constant")
        self._check(self.dtype in ("float32", "bfloat16", "float16", None), "dtype", "float32, bfloat16 or float16")
        good = self.min_count is None or is_count(self.min_count, MAX_MIN_COUNT)
        self._check(good, "min_count", f"1 to {MAX_MIN_COUNT}")
        good = self.capacity is None or is_count(self.capacity, MAX_CAPACITY)
        self._check(good, "capacity", f"1 to {MAX_CAPACITY} or None")
        if self.optimizer is not None and not isinstance(self.optimizer, Optimizer):
            raise ConfigError(f"feature {self.name!r}: optimizer must be None or {ours(self.optimizer)}")
        if self.expire_after is not None:
            parse_duration(self.expire_after, f"feature {self.name!r}: expire_after")
        if self.combiner is None and self.max_length is None:
            raise ConfigError(f"feature {self.name!r}: combiner=None (a padded sequence) needs a max_length")

    def _check(self, good: bool, option: str, expected: str) -> None:
        if not good:
            raise ConfigError(f"feature {self.name!r}: {option} must be {expected}, not {getattr(self, option)!r}")

    @property
    def table_name(self) -> str:
        """The embedding table that the feature reads: `table`, or the feature's own name."""
        return self.name if self.table is None else self.table


@dataclass(frozen=True)
class Categorical(Embedded):
    """A single id or a list of ids, each a row of an embedding table.

    The graph gets `[batch, dim]` float32, the rows of the sample's ids combined ("sum", "mean", or "sqrtn": sum / √n;
    no ids give zeros), or with `combiner=None` a padded sequence `[batch, max_length, dim]` and, under
    `name + "_mask"`, its mask `[batch, max_length]` (bool, True where there is an id).

    Args:
        name: name of the input; also of the field and of the table unless those are given.
        dim: width of a row, 1 to 4096.
        field: key of the sample to read; default: name.
        table: table to share with other features; default: name.
        combiner: how several rows become one; None: a padded sequence.
        max_length: ids per sample at most; of a longer list the last ones are kept. None: no limit.
        default: id to use where the field is missing or null; []: there are no ids; None: such a sample is refused.
        init: birth values of rows; default `Uniform(0.05)`.
        dtype: storage of embeddings; default float32. 16-bit rows are rounded stochastically.
        min_count: occurrences before a row is stored; until then its birth value is read. Default 1.
        expire_after: rows not seen for so long, in event time, are dropped: "30d", or seconds. Default: never.
        capacity: rows at most, of all shards together; the least recently seen go first. Default: no limit.
        optimizer: the table's optimizer; default: the model's `embedding_optimizer`.

    Raises:
        ConfigError: an option is out of its range.
    """

    _: KW_ONLY
    field: str | None = None
    default: str | int | Sequence[str | int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("field", self.field_name)
        if isinstance(self.default, list | tuple):
            self._check(not self.default, "default", "an id (text or integer), [] or None")
            object.__setattr__(self, "default", ())  # features are hashed
            return
        good = self.default is None or (isinstance(self.default, str | int) and not isinstance(self.default, bool))
        self._check(good, "default", "an id (text or integer), [] or None")

    @property
    def default_ids(self) -> list[str] | None:
        """The ids of a sample that lacks the field, one or none; None: it is refused."""
        if self.default is None:
            return None
        return [] if self.default == () else [str(self.default)]

    @property
    def field_name(self) -> str:
        """The key of the sample that holds the ids."""
        return self.name if self.field is None else self.field


@dataclass(frozen=True)
class Cross(Embedded):
    """The combinations of the ids of several `Categorical` features, each a row of a table of its own.

    Lists cross as a product. The other options are those of `Categorical`.

    Args:
        of: names of 2 to 8 `Categorical` features of the schema, in order.
    """

    _: KW_ONLY
    of: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.of, str) or not 2 <= len(tuple(self.of)) <= MAX_CROSSED:
            raise ConfigError(f"feature {self.name!r}: of must name 2 to {MAX_CROSSED} features, not {self.of!r}")
        object.__setattr__(self, "of", tuple(self.of))


@dataclass(frozen=True)
class Grid:
    """Embedding rows for the cells in which a number lies, so that a graph learns any function of it.

    A cell of b bits holds the numbers that, as float32, share their sign, exponent and first b bits of the mantissa:
    from one power of two to the next there are 2^b of them. Large cells learn from few samples, small ones tell numbers
    apart that differ little, such as latitudes of one city or times; a sample reads a row of each size, and the graph
    gets their sum / √n. Cells are the same for every stream and never move. Their rows begin at zero, so that one that
    nothing was learned of says nothing.

    Args:
        dim: width of a row, 1 to 4096.
        bits: sizes of cells, each from 0 to 23, in ascending order. The default has from 1 cell between two powers of
            two to 65,536: a table that has seen all numbers of ten powers has at most some 700,000 rows.
        dtype: as for `Categorical`, as are those that follow.
        min_count: occurrences before a row is stored.
        expire_after: rows not seen for so long are dropped.
        capacity: rows at most.
        optimizer: the table's optimizer.

    Raises:
        ConfigError: an option is out of its range.
    """

    dim: int = 8
    bits: tuple[int, ...] = (0, 4, 8, 12, 16)
    _: KW_ONLY
    dtype: RowType | None = None
    min_count: int | None = None
    expire_after: str | float | None = None
    capacity: int | None = None
    optimizer: Optimizer | None = None

    def __post_init__(self) -> None:
        bits = tuple(self.bits) if isinstance(self.bits, Iterable) else ()
        good = [one for one in bits if isinstance(one, int) and not isinstance(one, bool) and 0 <= one <= MAX_CELL_BITS]
        if not bits or len(good) < len(bits) or sorted({*bits}) != list(bits):
            raise ConfigError(f"Grid: bits must ascend, each from 0 to {MAX_CELL_BITS}, not {self.bits!r}")
        object.__setattr__(self, "bits", bits)
        self.cells("number")

    def cells(self, number: str) -> "Cells":
        """The feature that these rows are."""
        options = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "bits"}
        return Cells(f"{number}_cells", combiner="sqrtn", init=Constant(0.0), of=number, bits=self.bits, **options)


@dataclass(frozen=True)
class Cells(Embedded):
    """The cells in which a `Numeric` lies, of which each has a row of a table of its own; see `Grid`.

    Args:
        of: name of the `Numeric`.
        bits: sizes of cells.
    """

    _: KW_ONLY
    of: str = ""
    bits: tuple[int, ...] = ()


@dataclass(frozen=True)
class Numeric:
    """A number; the graph gets it as `[batch, 1]` float32.

    With a `grid` it also gets, under `name + "_cells"`, the rows of the cells in which the number lies, combined:
    `[batch, dim]` float32.

    Args:
        name: name of the input; also of the field unless that is given.
        field: key of the sample to read; default: name.
        default: number to use where the field is missing or null; None: such a sample is refused.
        transform: "log1p" for sign(x) * log(1 + |x|), which a network bears whatever the unit is; "standardize" for
            (x - mean) / stddev; None for x itself.
        mean: subtracted by "standardize".
        stddev: divided by in "standardize", > 0.
        grid: rows for cells of the number as it is in the sample, whatever the transform; a missing one has a row of
            its own. None: there are none.

    Raises:
        ConfigError: an option is out of its range.
    """

    name: str
    _: KW_ONLY
    field: str | None = None
    default: float | None = None
    transform: Literal["log1p", "standardize"] | None = "log1p"
    mean: float = 0.0
    stddev: float = 1.0
    grid: Grid | None = None

    def __post_init__(self) -> None:
        check_name("feature", self.name)
        check_name("field", self.field_name)
        if self.grid is not None and not isinstance(self.grid, Grid):
            raise ConfigError(f"feature {self.name!r}: grid must be a Grid or None, not {self.grid!r}")
        if self.transform not in ("log1p", "standardize", None):
            raise ConfigError(
                f'feature {self.name!r}: transform must be "log1p", "standardize" or None, not {self.transform!r}'
            )
        for option in ("default", "mean", "stddev"):
            value = getattr(self, option)
            if value is None and option == "default":
                continue
            if not is_number(value) or not math.isfinite(value):
                raise ConfigError(f"feature {self.name!r}: {option} must be a finite number, not {value!r}")
        if self.stddev <= 0:
            raise ConfigError(f"feature {self.name!r}: stddev must be > 0, not {self.stddev!r}")

    @property
    def field_name(self) -> str:
        """The key of the sample that holds the number."""
        return self.name if self.field is None else self.field

    @property
    def cells(self) -> Cells | None:
        """The feature that the rows of its grid are; None: it has none."""
        return None if self.grid is None else self.grid.cells(self.name)

    @property
    def blank(self) -> float:
        """What the graph sees where the number is missing; 1 for one without a default, which never is."""
        return 1.0 if self.default is None else float(self.transformed(np.array(self.default, np.float64)))

    def transformed(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """What the graph sees of numbers."""
        if self.transform == "log1p":
            return np.copysign(np.log1p(np.abs(values)), values)
        if self.transform == "standardize":
            with np.errstate(over="ignore"):
                return (values - self.mean) / self.stddev
        return values


@dataclass(frozen=True)
class Label:
    """A label of a sample.

    Args:
        name: key of the sample, and name of the task.
        kind: "binary" (0 or 1, true or false), "real" (any finite number) or "count" (a finite number >= 0);
            None: what the model's loss for this label needs.
        optional: whether it may be missing or null; such a sample does not count for this task.
        positive: of a binary label that is not 0 or 1, the value that is the positive class: "yes", or 1 of -1 and 1.
            All others are negative, but texts that stand for a missing number (docs/samples.md) are missing.
    """

    name: str
    _: KW_ONLY
    kind: LabelKind | None = None
    optional: bool = False
    positive: str | int | None = None

    def __post_init__(self) -> None:
        check_name("label", self.name)
        if self.kind not in ("binary", "real", "count", None):
            raise ConfigError(f'label {self.name!r}: kind must be "binary", "real" or "count", not {self.kind!r}')
        if self.positive is not None:
            if not isinstance(self.positive, str | int) or isinstance(self.positive, bool):
                raise ConfigError(f"label {self.name!r}: positive must be text or an integer, not {self.positive!r}")
            if self.kind in ("real", "count"):
                raise ConfigError(
                    f"label {self.name!r}: only a binary label has a positive class, not a {self.kind} one"
                )


Feature = Categorical | Cross | Numeric


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is an int or float, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_count(value: object, most: int) -> bool:
    """Whether a value is an int, no bool, from 1 to `most`."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def pool_sequence(sequence: Any, mask: Any, combiner: Combiner = "mean") -> Any:
    """Combines a padded sequence into one row per sample: zeros where a sample has no ids, as pooled features have.

    It consists of Keras operations, so an exported graph needs nothing of streamtrain. `GlobalAveragePooling1D` with a
    mask gives NaN, 0 / 0, for an empty sequence.

    Args:
        sequence: Keras tensor [batch, length, dim] of a feature with `combiner=None`, or what layers make of it.
        mask: its mask [batch, length] (bool), the input named `name + "_mask"`.
        combiner: "sum", "mean" or "sqrtn" (sum / √n) over the n ids of a sample.

    Returns:
        Keras tensor [batch, dim].

    Raises:
        ValueError: the combiner is none of these.
    """
    from keras import ops

    if combiner not in ("sum", "mean", "sqrtn"):
        raise ValueError(f'combiner must be "sum", "mean" or "sqrtn", not {combiner!r}')
    present = ops.expand_dims(ops.cast(mask, sequence.dtype), -1)
    total = ops.sum(sequence * present, axis=1)
    if combiner == "sum":
        return total
    count = ops.maximum(ops.sum(present, axis=1), 1.0)
    return total / (count if combiner == "mean" else ops.sqrt(count))


def check_name(what: str, name: object) -> None:
    """Raises ConfigError unless `name`, of a `what`, is a non-empty string."""
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{what} must have a name that is a non-empty string, not {name!r}")
