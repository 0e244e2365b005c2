"""Columns of many samples, from pandas, Arrow or NumPy, to a batch: the same rules as for JSON, but no text between."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from streamtrain._core import TIME_RANGE, cross_ragged, hash_bytes, parse_times
from streamtrain.errors import BadSample, ConfigError
from streamtrain.model.arrow import (
    column_of,
    floats,
    has_column,
    is_list,
    is_numeric,
    is_text,
    keys_of,
    nulls_of,
    number_column,
    text_of,
)
from streamtrain.model.batch import Batch
from streamtrain.model.features import Categorical, Cross, Label, Numeric
from streamtrain.model.model import Model

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

    def report(self, start: int) -> list[BadSample]:
        return [BadSample(start + i, *self._why[i]) for i in sorted(self._why)]


class ColumnReader:
    """Makes batches of Arrow tables.

    Args:
        model: whose samples are read.
        with_labels: whether labels and weights are read.
    """

    def __init__(self, model: Model, *, with_labels: bool) -> None:
        self._model = model
        self._schema = model.schema
        self._with_labels = with_labels

    def read(self, table: pa.Table, start: int = 0) -> tuple[Batch, list[BadSample]]:
        """Reads a table as one batch; `start` is the position of its first sample.

        Raises:
            ConfigError: a column has a type that its field cannot have.
        """
        refused = _Refused(table.num_rows)
        times = self._times(table, refused)
        labels, weights = self._labels(table, refused)
        features = [self._ids(table, one, refused) for one in self._schema.categoricals]
        position = {one.name: i for i, one in enumerate(self._schema.categoricals)}
        for cross in self._schema.crosses:
            features.append(self._cross(cross, [features[position[name]] for name in cross.of], refused))
        numeric = np.zeros((table.num_rows, len(self._schema.numerics)), np.float32)
        for j, one in enumerate(self._schema.numerics):
            numeric[:, j] = self._number(table, one, refused)
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
        return (batch.select(~refused.mask) if refused.mask.any() else batch), refused.report(start)

    def _times(self, table: pa.Table, refused: _Refused) -> NDArray[np.float64]:
        name = self._schema.time
        if name is None or (not self._with_labels and not has_column(table, name)):
            return np.zeros(table.num_rows)
        column = column_of(table, name)
        if pa.types.is_date(column.type):
            column = column.cast(pa.timestamp("ms"))
        if pa.types.is_timestamp(column.type):
            missing, unit = nulls_of(column), _PER_SECOND[column.type.unit]
            ticks = pc.fill_null(column.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
            values = ticks // unit + ticks % unit / unit
        elif is_text(column.type):
            values, missing = parse_times(*text_of(column)), nulls_of(column)
        elif is_numeric(column.type) or pa.types.is_null(column.type):
            values, missing = floats(column)
            refused.add(~missing & ~np.isfinite(values), "not_finite", name)
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
        if label.optional and not has_column(table, label.name):
            return np.full(table.num_rows, np.nan, np.float32)
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

    def _number(self, table: pa.Table, feature: Numeric, refused: _Refused) -> NDArray[np.float32]:
        name = feature.field_name
        if feature.default is not None and not has_column(table, name):
            values, missing = np.zeros(table.num_rows), np.ones(table.num_rows, bool)
        else:
            values, missing = floats(number_column(table, name))
        if feature.default is None:
            refused.add(missing, "missing_field", name)
        values[missing] = feature.default or 0.0
        if feature.transform == "log1p":
            values = np.copysign(np.log1p(np.abs(values)), values)
        elif feature.transform == "standardize":
            with np.errstate(over="ignore"):
                values = (values - feature.mean) / feature.stddev
        return _stored(values, name, refused)

    def _ids(
        self, table: pa.Table, feature: Categorical, refused: _Refused
    ) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
        """Keys and offsets of one feature."""
        name, samples = feature.field_name, table.num_rows
        default = None if feature.default is None else hash_bytes(str(feature.default).encode())
        if default is not None and not has_column(table, name):
            return np.full(samples, default, np.uint64), np.arange(samples + 1, dtype=np.int32)
        column = column_of(table, name)
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        missing = nulls_of(column)
        if default is None:
            refused.add(missing, "missing_field", name)
        if not is_list(column.type):
            keys, too_long = keys_of(column, name, self._schema.max_id_bytes)
            refused.add(too_long, "id_too_long", name)
            keys[missing] = default or 0
            return keys, np.arange(samples + 1, dtype=np.int32)
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        values = pc.list_flatten(column)
        keys, too_long = keys_of(values, name, self._schema.max_id_bytes)
        owner, nulls = np.repeat(np.arange(samples), lengths), nulls_of(values)
        bad = np.flatnonzero(nulls | too_long)
        bad = bad[np.unique(owner[bad], return_index=True)[1]]  # the first of each sample
        for mask, reason in ((nulls, "wrong_type"), (too_long, "id_too_long")):
            refused.add(np.bincount(owner[bad[mask[bad]]], minlength=samples) > 0, reason, name)
        if default is not None and missing.any():
            ends = np.cumsum(lengths)
            keys = np.insert(keys, ends[missing], np.uint64(default))
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


def _stored(values: NDArray[np.float64], name: str, refused: _Refused) -> NDArray[np.float32]:
    """Values as they are stored; refused where float32 cannot hold them."""
    with np.errstate(over="ignore"):
        stored = values.astype(np.float32)
    refused.add(~np.isfinite(stored), "not_finite", name)
    return stored
