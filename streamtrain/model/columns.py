"""Columns of many samples, from pandas, Arrow or NumPy, to a batch: the same rules as for JSON, but no text between.

And what is wrong with a refused sample, of columns or of JSON, in words: its value is looked up here, as the native
decoder reports a reason, a field and a position.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Set
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from streamtrain._core import (
    TIME_RANGE,
    cross_ragged,
    hash_bytes,
    hash_cells,
    hash_integers,
    hash_strings,
    parse_times,
)
from streamtrain.errors import BadSample, ConfigError
from streamtrain.model.batch import Batch
from streamtrain.model.features import BLANKS, Categorical, Cells, Cross, Label, Numeric
from streamtrain.model.model import Model
from streamtrain.model.schema import TIME_UNITS, find_time_formats, time_format

DETAILED = 64
"""Refused samples of a batch that are described; the others would cost time, and say the same."""
DETAILED_BYTES = 1 << 18
"""Size of the messages of a batch that are parsed again for that."""

_NUMBER, _ID = "a number", "an id (text or an integer) or a list of ids"
_UNITS = (("milliseconds", 1e3), ("microseconds", 1e6), ("nanoseconds", 1e9))
_UNIT = {per_second: unit for unit, per_second in TIME_UNITS.items()}
_YEAR_2100 = 4_102_444_800
_SHOWN = 60  # characters of a value
_NAMES = 20  # fields that are listed
_NEAR = 16  # bytes shown around a position
_SINGLE = str | int | float | np.generic


class Describer:
    """Describes refused samples of one model."""

    def __init__(self, model: Model) -> None:
        self._model, self._schema = model, model.schema
        schema = model.schema
        named = [*((one.field_name, _ID) for one in schema.categoricals)]
        named += [(one.field_name, _NUMBER) for one in schema.numerics]
        named += [(one.name, _NUMBER) for one in model.labels]
        named += [(schema.weight, _NUMBER)] if schema.weight else []
        named += [(schema.time, "seconds since the epoch or ISO 8601 text")] if schema.time else []
        self._binary = {one.name for one in model.labels if one.kind == "binary"}
        self._expected: dict[str, list[str]] = {}
        for name, kind in named:
            kinds = self._expected.setdefault(name, [])
            kinds += [] if kind in kinds else [kind]

    def message(self, reason: str, field: str, message: bytes, at: int) -> str:
        """What is wrong with a JSON message; `at` is the byte of the problem, or -1."""
        near = _shown_bytes(message, max(0, at - _NEAR), max(0, at) + _NEAR)
        match reason:
            case "too_large":
                return f"it has {len(message):,} bytes; max_message_bytes is {self._schema.max_message_bytes:,}"
            case "too_deep":
                text = f"objects and lists are nested more than {self._schema.max_depth} deep (max_depth)"
            case "not_an_object":
                text = f'it is {_shown_bytes(message, 0, _SHOWN)}; a sample is an object such as {{"user": "u42"}}'
            case "not_json" | "not_utf8" | "bad_escape":
                text = f"at byte {max(0, at)}, near {near}" if message.strip() else "it is empty"
            case "not_finite" if at >= 0:
                text = f"at byte {at}, near {near}; JSON has no NaN or Infinity, write null for a missing number"
            case _:
                text = self._of_field(reason, field, message)
        return text

    def _of_field(self, reason: str, field: str, message: bytes) -> str:
        try:
            sample = json.loads(message)
        except (ValueError, RecursionError):  # such as an integer of thousands of digits
            return ""
        return self.value(reason, field, sample) if isinstance(sample, Mapping) else ""

    def value(self, reason: str, field: str, sample: Mapping[str, Any]) -> str:
        """What is wrong with a field of a sample."""
        value = sample.get(field)
        match reason:
            case "missing_field":
                if value is not None:
                    return f"it is {_shown(value)}, which stands for a missing number"
                return "it is null" if field in sample else self._missing(field, sample)
            case "wrong_type":
                expected = " and ".join(self._expected.get(field, ()))
                why = f"expected {expected}" if expected else ""
                if isinstance(value, str) and field in self._binary:
                    why += f"; if it is the positive class, say so: Label({field!r}, positive={value!r})"
            case "bad_label":
                why = self._label(field)
            case "bad_time":
                why = _time(value, self._schema.time_format)
            case "bad_weight":
                why = "a weight is a number >= 0"
            case "not_finite":
                why = "a number must be finite and fit into float32"
            case "id_too_long":
                why = f"max_id_bytes is {self._schema.max_id_bytes:,}"
            case "too_many_ids":
                return f"the sample has more than {self._schema.max_ids:,} ids (max_ids); limit lists with max_length"
            case "cross_too_large":
                return "it has more than 4,096 combinations; limit the lists that it crosses with max_length"
            case _:
                return ""
        return f"it is {_shown(value)}" + (f"; {why}" if why else "")

    def _missing(self, field: str, names: Iterable[str]) -> str:
        found = list(names)
        if not found:
            return "the sample has no fields"
        listed = ", ".join(repr(name) for name in found[:_NAMES])
        more = f" and {len(found) - _NAMES:,} more" if len(found) > _NAMES else ""
        near = get_close_matches(field, [name for name in found if name not in self._expected], 1)
        return f"the sample has {listed}{more}" + (f"; if {near[0]!r} is meant, name it {field!r}" if near else "")

    def _label(self, name: str) -> str:
        kind = next((one.kind for one in self._model.labels if one.name == name), None)
        loss = self._model.losses.get(name)
        of = f"loss {loss!r} needs" if isinstance(loss, str) else "it must be"
        if kind == "count":
            return f"{of} a number >= 0"
        other = "; for other numbers, use 'mean_squared_error', " if isinstance(loss, str) else "; "
        return f"{of} 0 or 1{other}or say which is positive: Label({name!r}, positive=1)"


def describe_future(time: float, latest: float) -> str:
    """What is wrong with an event time, in seconds since the epoch, after the latest one that is accepted."""
    return f"its event time is {_iso(time)}; the latest that is accepted now is {_iso(latest)}"


def _iso(seconds: float) -> str:
    begin, end = TIME_RANGE
    clipped = min(max(seconds, begin), end - 1)
    return datetime.fromtimestamp(clipped, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _time(value: Any, form: str | None) -> str:
    if form is not None and form != "s":
        kind = (
            f"{form} since the epoch" if form in TIME_UNITS else f"text of the form {form}, or seconds since the epoch"
        )
        return f"expected {kind}, as time_format says"
    expected = "expected seconds since the epoch, or ISO 8601 text such as 2026-05-31T12:00:00Z"
    if isinstance(value, int | float) and not isinstance(value, bool):
        for unit, per_second in _UNITS:
            if _YEAR_2100 <= value < _YEAR_2100 * per_second:
                return f"expected seconds since the epoch; of {unit}, say so: Schema(time_format={_UNIT[per_second]!r})"
    if isinstance(value, str) and (found := next(find_time_formats([value]), None)):
        return f"{expected}; to read it as it is, say so: Schema(time_format={found[0]!r})"
    return expected


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "an object"
    text = json.dumps(value, ensure_ascii=False, default=str)
    cut = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    return f"the list {cut}" if isinstance(value, list) else cut


def _shown_bytes(message: bytes, first: int, last: int) -> str:
    return repr(message[first:last].decode("utf-8", "backslashreplace"))


_LONGEST_INTEGER = 20  # characters of an integer of 64 bits


def _readable(dtype: Any) -> np.dtype[Any] | None:
    """What Arrow reads numbers of a dtype as, in another byte order or of more than 64 bits; None: as they are."""
    if not isinstance(dtype, np.dtype) or dtype.kind not in "iuf" or (dtype.isnative and dtype.itemsize <= 8):
        return None
    return np.dtype(np.float64) if dtype.itemsize > 8 else dtype.newbyteorder("=")


def _table_of_frame(frame: Any, fields: Set[str]) -> pa.Table:
    """The columns and the levels of the index of a pandas frame that are among `fields`."""
    if not frame.columns.is_unique:  # Arrow refuses all of it, also if nobody reads what is there twice
        frame = frame.loc[:, frame.columns.isin(fields)]
    read = [name for name in frame.columns if name in fields] or frame.columns[:1]  # one tells how many samples
    kinds = zip(frame.columns, frame.dtypes, strict=True)
    changed = {name: other for name, kind in kinds if name in read and (other := _readable(kind)) is not None}
    try:
        frame = frame.astype(changed) if changed else frame
        return pa.Table.from_pandas(frame, columns=read, preserve_index=not fields.isdisjoint(frame.index.names))
    except (ValueError, TypeError, pa.ArrowNotImplementedError) as exc:
        raise ConfigError(f"a column cannot hold samples: {'; '.join(map(str, exc.args))}") from exc


def _table_of_arrow(samples: Any) -> pa.Table:
    """Of anything that gives Arrow data."""
    try:
        return pa.table(samples)
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError) as exc:
        raise TypeError(
            f"samples must be a list of samples or a table, not a {type(samples).__name__} ({exc}); of a pandas frame, "
            "frame.iloc[[0]] is a table of one sample"
        ) from exc


def _table_of_mapping(samples: Mapping[str, Any], fields: Set[str]) -> pa.Table:
    """The columns of a mapping that are among `fields`."""
    read = [name for name in samples if name in fields]
    given = {name: samples[name] for name in read or [*samples][:1]}  # one tells how many samples
    single = [name for name, value in given.items() if value is None or isinstance(value, _SINGLE)]
    if single:
        raise TypeError(
            f"samples must be a list of samples or a dict of columns, but {single[0]!r} is the single value "
            f"{samples[single[0]]!r}; put a single sample in a list: [sample]"
        )
    columns: dict[str, pa.Array] = {}
    for name, column in given.items():
        try:
            other = _readable(column.dtype) if isinstance(column, np.ndarray) else None
            columns[name] = pa.array(column if other is None else column.astype(other))
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, TypeError) as exc:
            kind = f" ({column.dtype}, of shape {column.shape})" if isinstance(column, np.ndarray) else ""
            raise ConfigError(f"column {name!r} cannot hold samples: {exc}{kind}") from exc
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ConfigError(f"columns differ in length: {lengths}")
    return pa.table(columns)


def has_column(table: pa.Table, name: str) -> bool:
    """Whether a table has just one column of that name."""
    return bool(table.schema.get_field_index(name) >= 0)  # `table.column_names` would make a list of all, every time


def get_column(table: pa.Table, name: str) -> pa.Array:
    """A column in one piece."""
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def number_column(table: pa.Table, name: str) -> pa.Array:
    """A column of numbers, booleans or nulls.

    Raises:
        ConfigError: the column has another type.
    """
    column = get_column(table, name)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if not is_numeric(column.type) and not pa.types.is_boolean(column.type) and not pa.types.is_null(column.type):
        raise ConfigError(f"column {name!r} is {column.type}; it must be numbers")
    return column


def floats(column: pa.Array) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """A column as float64 (0 where null or NaN) and where it is so."""
    nulls = null_mask(column)
    if pa.types.is_decimal(column.type) or pa.types.is_boolean(column.type) or pa.types.is_null(column.type):
        column = column.cast(pa.float64(), safe=False)
    if column.null_count:
        column = pc.fill_null(column, 0)
    values = column.to_numpy(zero_copy_only=False).astype(np.float64)
    if np.isnan(values).any():
        nulls = nulls | np.isnan(values)
        values = np.where(nulls, 0.0, values)
    return values, nulls


def _classes(column: pa.Array, positive: str, name: str) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """1 where a column of texts, numbers or booleans is `positive`, else 0, and where it is missing.

    Raises:
        ConfigError: the column has another type.
    """
    column = column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column
    if is_text(column.type):
        found, blank = pc.equal(column, positive), pc.is_in(column, pa.array(sorted(BLANKS), column.type))
        missing = null_mask(column) | pc.fill_null(pc.and_not(blank, found), True).to_numpy(zero_copy_only=False)
        return pc.fill_null(found, False).to_numpy(zero_copy_only=False).astype(np.float64), missing
    is_boolean = pa.types.is_boolean(column.type)
    if not is_boolean and not is_numeric(column.type) and not pa.types.is_null(column.type):
        raise ConfigError(f"column {name!r} is {column.type}; a label is text, a number or a boolean")
    values, missing = floats(column)
    try:
        number = float(positive)
    except ValueError:
        number = {"true": 1.0, "false": 0.0}.get(positive, np.nan) if is_boolean else np.nan
    return np.where(np.isfinite(values), values == number, values).astype(np.float64), missing


def null_mask(column: pa.Array) -> NDArray[np.bool_]:
    """Where a column is null."""
    if column.null_count == 0:
        return np.zeros(len(column), bool)
    nulls: NDArray[np.bool_] = column.is_null().to_numpy(zero_copy_only=False)
    return nulls


def hash_ids(column: pa.Array, name: str, longest: int) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Keys of a column of ids (any value where null), and which ids have more than `longest` bytes.

    Raises:
        ConfigError: the column holds neither integers nor text.
    """
    none = np.zeros(len(column), bool)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_null(column.type):
        return np.zeros(len(column), np.uint64), none
    if pa.types.is_integer(column.type):
        wide = pa.uint64() if pa.types.is_uint64(column.type) else pa.int64()
        column = column if column.type == wide else column.cast(wide)
        column = pc.fill_null(column, 0) if column.null_count else column
        too_long = none
        if longest < _LONGEST_INTEGER:
            too_long = pc.greater(pc.binary_length(column.cast(pa.string())), longest).to_numpy(zero_copy_only=False)
        return hash_integers(column.to_numpy(zero_copy_only=False)), too_long
    if is_text(column.type):
        text, offsets = text_buffers(column)
        return hash_strings(text, offsets), np.diff(offsets) > longest
    hint = ""
    if pa.types.is_floating(column.type):  # what pandas makes of integers if one is missing
        hint = "; if they are integers of a pandas frame, some of them missing, use .astype('Int64')"
    raise ConfigError(f"column {name!r} is {column.type}; ids are integers or text{hint}")


def text_buffers(column: pa.Array) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The bytes of a column of texts (empty where null), and the offsets [n + 1] of each in them."""
    column = pc.fill_null(column.cast(pa.large_string()), "")
    _, offsets, data = column.buffers()
    text = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return text, np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]


def is_numeric(kind: pa.DataType) -> bool:
    """Whether a type is of numbers."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def is_text(kind: pa.DataType) -> bool:
    """Whether a type is of text."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_list(kind: pa.DataType) -> bool:
    """Whether a type is of lists."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}


class _Refused:
    """The first reason for which each sample is refused."""

    def __init__(self, samples: int) -> None:
        self.mask = np.zeros(samples, bool)
        self._why: dict[int, tuple[str, str]] = {}

    def add(self, mask: NDArray[np.bool_], reason: str, field: str) -> None:
        if not mask.any():
            return
        for i in np.flatnonzero(mask & ~self.mask):
            self._why[int(i)] = (reason, field)
        self.mask |= mask

    def report(self, start: int, describe: Callable[[int, str, str], str]) -> list[BadSample]:
        return [
            BadSample(start + i, *self._why[i], describe(i, *self._why[i]) if n < DETAILED else "")
            for n, i in enumerate(sorted(self._why))
        ]


class ColumnReader:
    """Makes batches of Arrow tables.

    Args:
        model: the model whose samples are read.
        describer: of the same model.
        with_labels: whether labels and weights are read.
    """

    def __init__(self, model: Model, describer: Describer, *, with_labels: bool) -> None:
        self._model, self._describer = model, describer
        self._schema = model.schema
        self._time_format = time_format(model.schema.time_format)
        self._with_labels = with_labels
        inputs: tuple[Categorical | Numeric, ...] = (*self._schema.categoricals, *self._schema.numerics)
        fields, required = {one.field_name for one in inputs}, {one.field_name for one in inputs if one.default is None}
        if (time := self._schema.time) is not None:
            fields.add(time)
            required |= {time} if with_labels else set()
        if with_labels:
            fields |= {one.name for one in model.labels}
            fields |= {self._schema.weight} if self._schema.weight is not None else set()
            required |= {one.name for one in model.labels if not one.optional}
        self._fields, self._required = fields, required

    def as_table(self, samples: Any) -> pa.Table | None:
        """An Arrow table of the samples if they are columns, else None.

        Columns of pandas and of a mapping that the model does not read are left out, so that they can hold anything.

        Raises:
            ConfigError: a column is missing or cannot be one, or columns differ in length.
            TypeError: it is a single sample, or a single column.
        """
        pandas = sys.modules.get("pandas")  # who has a frame has imported it
        if isinstance(samples, pa.Table):
            table, names = samples, samples.column_names
        elif pandas is not None and isinstance(samples, pandas.DataFrame):
            table = _table_of_frame(samples, self._fields)
            names = list(dict.fromkeys([*map(str, samples.columns), *table.column_names]))
        elif hasattr(samples, "__arrow_c_stream__") or hasattr(samples, "__arrow_c_array__"):
            table = _table_of_arrow(samples)
            names = table.column_names
        elif isinstance(samples, Mapping):
            table, names = _table_of_mapping(samples, self._fields), [*samples]
        else:
            return None
        for name in sorted(self._required):
            if not has_column(table, name):
                raise ConfigError(f"missing column {name!r}; the columns are {names}")
        return table

    def read(self, table: pa.Table, start: int = 0) -> tuple[Batch, list[BadSample]]:
        """Reads a table as one batch; `start` is the position of its first sample.

        Raises:
            ConfigError: a column has a type that its field cannot have.
        """
        refused = _Refused(table.num_rows)
        times = self._times(table, refused)
        labels, weights = self._labels(table, refused)
        features: list[tuple[NDArray[np.uint64], NDArray[np.int32]]] = []
        ids = np.zeros(table.num_rows, np.int64)
        for one in self._schema.categoricals:
            features.append(self._ids(table, one, refused))
            ids += np.diff(features[-1][1])
            refused.add(ids > self._schema.max_ids, "too_many_ids", one.field_name)
        position = {one.name: i for i, one in enumerate(self._schema.categoricals)}
        for cross in self._schema.crosses:
            features.append(self._cross(cross, [features[position[name]] for name in cross.of], refused))
            ids += np.diff(features[-1][1])
            refused.add(ids > self._schema.max_ids, "too_many_ids", cross.name)
        numeric = np.zeros((table.num_rows, len(self._schema.numerics)), np.float32)
        for j, number in enumerate(self._schema.numerics):
            values, missing = self._number(table, number, refused)
            numeric[:, j] = _stored(number.transformed(values), number.field_name, refused)
            if number.cells:
                features.append(_cells(number.cells, values, missing))
        offsets = np.zeros((len(features), table.num_rows + 1), np.int32)
        for f, (_, of_feature) in enumerate(features):
            offsets[f] = of_feature
        batch = Batch(
            keys=np.concatenate([np.empty(0, np.uint64), *(keys for keys, _ in features)]),
            starts=np.concatenate([[0], np.cumsum([len(keys) for keys, _ in features])]).astype(np.int64),
            offsets=offsets,
            numeric=numeric,
            labels=labels,
            weights=weights,
            times=times,
            kept=np.arange(start, start + table.num_rows, dtype=np.int32),
        )

        def describe(place: int, reason: str, field: str) -> str:
            sample = {field: table.column(field)[place].as_py()} if has_column(table, field) else {}
            return self._describer.value(reason, field, sample)

        return (batch.select(~refused.mask) if refused.mask.any() else batch), refused.report(start, describe)

    def _times(self, table: pa.Table, refused: _Refused) -> NDArray[np.float64]:
        name = self._schema.time
        if name is None or not has_column(table, name):
            return np.zeros(table.num_rows)
        column = get_column(table, name)
        if pa.types.is_date(column.type):
            column = column.cast(pa.timestamp("ms"))
        if pa.types.is_timestamp(column.type):
            missing, unit = null_mask(column), _PER_SECOND[column.type.unit]
            ticks = pc.fill_null(column.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
            values = ticks // unit + ticks % unit / unit
        elif is_text(column.type):
            values, missing = parse_times(*text_buffers(column), self._time_format), null_mask(column)
        elif is_numeric(column.type) or pa.types.is_null(column.type):
            values, missing = floats(column)
            refused.add(~missing & ~np.isfinite(values), "not_finite", name)
            values /= TIME_UNITS.get(self._schema.time_format or "s", 1.0)
        else:
            raise ConfigError(f"column {name!r} is {column.type}; event times are numbers, timestamps or ISO 8601 text")
        if self._with_labels:
            refused.add(missing, "missing_field", name)
        begin, end = TIME_RANGE
        refused.add(~missing & ~((values >= begin) & (values < end)), "bad_time", name)
        return np.where(missing, 0.0, values)

    def _labels(self, table: pa.Table, refused: _Refused) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        if not self._with_labels:
            return np.zeros((table.num_rows, 0), np.float32), np.ones(table.num_rows, np.float32)
        labels = np.zeros((table.num_rows, len(self._model.labels)), np.float32)
        for j, one in enumerate(self._model.labels):
            labels[:, j] = self._label(table, one, refused)
        name = self._schema.weight
        if name is None or not has_column(table, name):
            return labels, np.ones(table.num_rows, np.float32)
        weights, missing = floats(number_column(table, name))
        weights[missing] = 1.0
        stored = _stored(weights, name, refused)
        refused.add(weights < 0, "bad_weight", name)
        return labels, stored

    def _label(self, table: pa.Table, label: Label, refused: _Refused) -> NDArray[np.float32]:
        if not has_column(table, label.name):
            return np.full(table.num_rows, np.nan, np.float32)
        column = get_column(table, label.name)
        if label.positive is not None:
            values, missing = _classes(column, str(label.positive), label.name)
        elif is_text(getattr(column.type, "value_type", column.type)):
            raise ConfigError(
                f"column {label.name!r} is {column.type}; a label is numbers, or say which of its values is the "
                f"positive class: Label({label.name!r}, positive=…)"
            )
        else:
            values, missing = floats(number_column(table, label.name))
        if not label.optional:
            refused.add(missing, "missing_field", label.name)
        stored = _stored(values, label.name, refused)
        if label.kind == "binary":
            refused.add(~missing & (values != 0) & (values != 1), "bad_label", label.name)
        elif label.kind == "count":
            refused.add(~missing & (values < 0), "bad_label", label.name)
        stored[missing] = np.nan
        return stored

    def _number(
        self, table: pa.Table, feature: Numeric, refused: _Refused
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Its numbers, and which of them are its default."""
        name = feature.field_name
        if not has_column(table, name):
            values, missing = np.zeros(table.num_rows), np.ones(table.num_rows, bool)
        else:
            values, missing = floats(number_column(table, name))
        if feature.default is None:
            refused.add(missing, "missing_field", name)
        values[missing] = feature.default or 0.0
        return values, missing

    def _ids(
        self, table: pa.Table, feature: Categorical, refused: _Refused
    ) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
        """Keys and offsets of one feature."""
        name, samples = feature.field_name, table.num_rows
        default = [hash_bytes(one.encode()) for one in feature.default_ids or ()]
        if not has_column(table, name):
            return np.array(default * samples, np.uint64), np.arange(samples + 1, dtype=np.int32) * len(default)
        column = get_column(table, name)
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        missing = null_mask(column)
        if feature.default_ids is None:
            refused.add(missing, "missing_field", name)
        if not is_list(column.type):
            keys, too_long = hash_ids(column, name, self._schema.max_id_bytes)
            refused.add(too_long, "id_too_long", name)
            if feature.default == ():
                return keys[~missing], np.cumsum([0, *~missing], dtype=np.int32)
            keys[missing] = default or 0
            return keys, np.arange(samples + 1, dtype=np.int32)
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        values = pc.list_flatten(column)
        keys, too_long = hash_ids(values, name, self._schema.max_id_bytes)
        owner, nulls = np.repeat(np.arange(samples), lengths), null_mask(values)
        bad = np.flatnonzero(nulls | too_long)
        bad = bad[np.unique(owner[bad], return_index=True)[1]]  # the first of each sample
        for mask, reason in ((nulls, "wrong_type"), (too_long, "id_too_long")):
            refused.add(np.bincount(owner[bad[mask[bad]]], minlength=samples) > 0, reason, name)
        if default and missing.any():
            ends = np.cumsum(lengths)
            keys = np.insert(keys, ends[missing], np.uint64(default[0]))
            lengths = lengths + missing
        return _truncate(keys, lengths, feature.max_length)

    def _cross(
        self, cross: Cross, parts: list[tuple[NDArray[np.uint64], NDArray[np.int32]]], refused: _Refused
    ) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
        keys, offsets, too_large = cross_ragged(
            [keys for keys, _ in parts], [offsets for _, offsets in parts], cross.max_length or 0
        )
        refused.add(too_large.astype(bool), "cross_too_large", cross.name)
        return keys, offsets


def _truncate(
    keys: NDArray[np.uint64], lengths: NDArray[np.int64], longest: int | None
) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    """Keeps the last `longest` keys of every list."""
    ends = np.cumsum(lengths)
    if longest is not None and len(lengths) and lengths.max() > longest:
        from_end = np.repeat(ends, lengths) - np.arange(len(keys))
        keys = keys[from_end <= longest]
        ends = np.cumsum(np.minimum(lengths, longest))
    return keys, np.concatenate([[0], ends]).astype(np.int32)


def _cells(
    cells: Cells, values: NDArray[np.float64], missing: NDArray[np.bool_]
) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    """Keys and offsets of the cells of numbers; a missing one has one."""
    with np.errstate(over="ignore"):
        numbers = np.where(missing, np.nan, values).astype(np.float32)
    keys = hash_cells(numbers, cells.bits).reshape(len(values), len(cells.bits))
    lengths = np.where(missing, 1, len(cells.bits))
    kept = np.arange(len(cells.bits)) < lengths[:, None]
    return keys[kept], np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _stored(values: NDArray[np.float64], name: str, refused: _Refused) -> NDArray[np.float32]:
    """Values as they are stored; refused where float32 cannot hold them."""
    with np.errstate(over="ignore"):
        stored = values.astype(np.float32)
    refused.add(~np.isfinite(stored), "not_finite", name)
    return stored
