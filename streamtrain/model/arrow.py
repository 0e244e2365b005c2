"""Arrow columns as the NumPy arrays that a batch is made of."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from streamtrain._core import hash_integers, hash_strings
from streamtrain.errors import ConfigError

_LONGEST_INTEGER = 20  # characters of an integer of 64 bits


def as_table(samples: Any) -> pa.Table | None:
    """An Arrow table of the samples if they are columns, else None.

    Raises:
        ConfigError: the columns differ in length, or one cannot be a column.
    """
    if isinstance(samples, pa.Table):
        return samples
    if hasattr(samples, "__arrow_c_stream__") or hasattr(samples, "__arrow_c_array__"):
        return pa.table(samples)
    if not isinstance(samples, Mapping):
        return None
    columns: dict[str, pa.Array] = {}
    for name, column in samples.items():
        try:
            columns[name] = pa.array(column)
        except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError) as exc:
            raise ConfigError(f"column {name!r} is not one of samples: {exc}") from exc
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ConfigError(f"columns differ in length: {lengths}")
    return pa.table(columns)


def has_column(table: pa.Table, name: str) -> bool:
    """Whether a table has just one column of that name."""
    return bool(table.schema.get_field_index(name) >= 0)  # `table.column_names` would make a list of all, every time


def column_of(table: pa.Table, name: str) -> pa.Array:
    """A column in one piece.

    Raises:
        ConfigError: there is no such column.
    """
    if not has_column(table, name):
        raise ConfigError(f"there is no column {name!r}; columns are {table.column_names}")
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def number_column(table: pa.Table, name: str) -> pa.Array:
    """A column of numbers, booleans or nulls.

    Raises:
        ConfigError: there is none of that name, or it holds something else.
    """
    column = column_of(table, name)
    if not is_numeric(column.type) and not pa.types.is_boolean(column.type) and not pa.types.is_null(column.type):
        raise ConfigError(f"column {name!r} is {column.type}; it must be numbers")
    return column


def floats(column: pa.Array) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """A column as float64 (0 where null) and where it is null."""
    nulls = nulls_of(column)
    if pa.types.is_decimal(column.type) or pa.types.is_boolean(column.type) or pa.types.is_null(column.type):
        column = column.cast(pa.float64(), safe=False)
    if column.null_count:
        column = pc.fill_null(column, 0)
    return column.to_numpy(zero_copy_only=False).astype(np.float64), nulls


def nulls_of(column: pa.Array) -> NDArray[np.bool_]:
    """Where a column is null."""
    if column.null_count == 0:
        return np.zeros(len(column), bool)
    nulls: NDArray[np.bool_] = column.is_null().to_numpy(zero_copy_only=False)
    return nulls


def keys_of(column: pa.Array, name: str, longest: int) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
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
        text, offsets = text_of(column)
        return hash_strings(text, offsets), np.diff(offsets) > longest
    raise ConfigError(f"column {name!r} is {column.type}; ids are integers or text")


def text_of(column: pa.Array) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
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
