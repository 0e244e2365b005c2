"""A SavedModel that looks rows up itself: from ids and numbers to predictions, for TensorFlow Serving alone.

The hash of ids and the initial values of keys without a row are computed in TensorFlow's operations, as
`_native/hash.h` and `_native/birth.h` do; tests compare both. TensorFlow is imported when a function is called.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from streamtrain.model.features import MAX_CELL_BITS, Categorical, Cells, Cross, Embedded, Numeric
from streamtrain.model.model import Model
from streamtrain.model.schema import Schema
from streamtrain.store.publication import Floats

if TYPE_CHECKING:
    import tensorflow as tf

_PRIMES = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
_GOLDEN = 0x9E3779B97F4A7C15
_STRIPE = 32
_MAX_COMBINATIONS = 4096  # of a cross in one sample, as in `_native/cross.h`
_NO_CELL = 1  # id of the cell where a number is missing, as in `_native/cell.h`

Rows = tuple[NDArray[np.uint64], Floats]
"""Keys [n] and rows [n, dim]."""


def _u64(value: int) -> "tf.Tensor":
    import tensorflow as tf

    return tf.constant(np.uint64(value % (1 << 64)))


def _rotate(x: "tf.Tensor", bits: int) -> "tf.Tensor":
    import tensorflow as tf

    shift = tf.bitwise
    return shift.bitwise_or(shift.left_shift(x, _u64(bits)), shift.right_shift(x, _u64(64 - bits)))


def _fold(x: "tf.Tensor", bits: int) -> "tf.Tensor":
    """The exclusive or of x and x >> bits."""
    import tensorflow as tf

    return tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, _u64(bits)))


def _round(acc: "tf.Tensor", lane: "tf.Tensor") -> "tf.Tensor":
    return _rotate(acc + lane * _u64(_PRIMES[1]), 31) * _u64(_PRIMES[0])


def hash_texts(texts: "tf.Tensor", longest: int) -> "tf.Tensor":
    """XXH64 (seed 0) of texts [n], uint64 [n]. Texts of more than `longest` bytes are an error.

    Stripes of 32 bytes are hashed for all texts; those behind a text's end are discarded. Of the rest of each, words
    are hashed as far as it has them.
    """
    import tensorflow as tf

    stripes = longest // _STRIPE + 1
    sizes = tf.strings.length(texts)
    with tf.control_dependencies([tf.debugging.assert_less_equal(sizes, longest, f"ids have at most {longest} bytes")]):
        data = tf.io.decode_raw(texts, tf.uint8, fixed_length=stripes * _STRIPE)
    data = tf.reshape(data, [-1, stripes, _STRIPE])
    lanes = tf.bitcast(tf.reshape(data, [-1, stripes, 4, 8]), tf.uint64)
    full = sizes // _STRIPE
    zero = tf.zeros_like(tf.cast(sizes, tf.uint64))
    accs = _first_accs(zero)
    for i in range(stripes - 1):
        accs = [tf.where(full > i, _round(acc, lanes[:, i, j]), acc) for j, acc in enumerate(accs)]
    h = tf.where(full > 0, _merge(accs), zero + _u64(_PRIMES[4])) + tf.cast(sizes, tf.uint64)
    return _avalanche(_hash_rest(h, tf.gather(data, full, batch_dims=1), sizes % _STRIPE))


def hash_words(words: "tf.Tensor") -> "tf.Tensor":
    """XXH64 (seed 0) of the bytes of uint64 [n, k], little-endian, uint64 [n]."""
    import tensorflow as tf

    columns = tf.unstack(words, axis=1)
    zero, whole = tf.zeros_like(columns[0]), len(columns) // 4 * 4
    accs = _first_accs(zero)
    for i in range(0, whole, 4):
        accs = [_round(acc, column) for acc, column in zip(accs, columns[i : i + 4], strict=True)]
    h = (_merge(accs) if whole else zero + _u64(_PRIMES[4])) + _u64(8 * len(columns))
    for column in columns[whole:]:
        h = _hash_word(h, column)
    return _avalanche(h)


def _first_accs(zero: "tf.Tensor") -> list["tf.Tensor"]:
    return [zero + _u64(one) for one in (_PRIMES[0] + _PRIMES[1], _PRIMES[1], 0, -_PRIMES[0])]


def _merge(accs: Sequence["tf.Tensor"]) -> "tf.Tensor":
    """What stripes make, of which there was one at least."""
    import tensorflow as tf

    zero = tf.zeros_like(accs[0])
    h = sum((_rotate(acc, bits) for acc, bits in zip(accs, (1, 7, 12, 18), strict=True)), zero)
    for acc in accs:
        h = tf.bitwise.bitwise_xor(h, _round(zero, acc)) * _u64(_PRIMES[0]) + _u64(_PRIMES[3])
    return h


def _hash_word(h: "tf.Tensor", word: "tf.Tensor") -> "tf.Tensor":
    import tensorflow as tf

    mixed = tf.bitwise.bitwise_xor(h, _round(tf.zeros_like(h), word))
    return _rotate(mixed, 27) * _u64(_PRIMES[0]) + _u64(_PRIMES[3])


def _hash_rest(h: "tf.Tensor", rest: "tf.Tensor", sizes: "tf.Tensor") -> "tf.Tensor":
    """Goes on with the bytes [n, 32] behind the last whole stripe, of which `sizes` [n] count."""
    import tensorflow as tf

    xor, p = tf.bitwise.bitwise_xor, _PRIMES
    words = tf.bitcast(tf.reshape(rest, [-1, 4, 8]), tf.uint64)
    for i in range(3):
        h = tf.where(sizes // 8 > i, _hash_word(h, words[:, i]), h)
    at = sizes // 8
    halves = tf.cast(tf.bitcast(tf.reshape(rest, [-1, 8, 4]), tf.uint32), tf.uint64)
    half = tf.gather(halves, 2 * at, batch_dims=1)
    mixed = _rotate(xor(h, half * _u64(p[0])), 23) * _u64(p[1]) + _u64(p[2])
    h = tf.where(sizes % 8 >= 4, mixed, h)
    first = sizes // 4 * 4
    for i in range(3):
        byte = tf.cast(tf.gather(rest, tf.minimum(first + i, _STRIPE - 1), batch_dims=1), tf.uint64)
        h = tf.where(first + i < sizes, _rotate(xor(h, byte * _u64(p[4])), 11) * _u64(p[0]), h)
    return h


def _avalanche(h: "tf.Tensor") -> "tf.Tensor":
    return _fold(_fold(_fold(h, 33) * _u64(_PRIMES[1]), 29) * _u64(_PRIMES[2]), 32)


def _mix(z: "tf.Tensor") -> "tf.Tensor":
    return _fold(_fold(_fold(z, 30) * _u64(0xBF58476D1CE4E5B9), 27) * _u64(0x94D049BB133111EB), 31)


def initial_rows(keys: "tf.Tensor", table: Mapping[str, Any]) -> "tf.Tensor":
    """The initial values of keys [n], float32 [n, dim], of a table as a model's spec describes it."""
    import tensorflow as tf

    dim = table["dim"]
    if table["init"] == "constant":
        rows = tf.fill([tf.size(keys), dim], np.float32(table["init_scale"]))
    else:
        # As an array: of a list that mixes small and large numbers, NumPy would make floats.
        steps = tf.constant(np.array([_GOLDEN * (j + 1) % (1 << 64) for j in range(dim)], np.uint64))
        base = _mix(tf.bitwise.bitwise_xor(keys, _u64(table["seed"])))
        bits = tf.bitwise.right_shift(_mix(base[:, None] + steps), _u64(40))
        rows = (2.0 * (tf.cast(bits, tf.float32) * 2.0**-24) - 1.0) * np.float32(table["init_scale"])
    stored = tf.as_dtype(table.get("dtype", "float32"))
    return tf.cast(tf.cast(rows, stored), tf.float32)


def write_lookup_graph(
    model: Model,
    tables: Sequence[Mapping[str, Any]],
    rows: Mapping[str, Rows],
    predict: Callable[[dict[str, Any]], dict[str, Any]],
    folder: Path,
) -> None:
    """Writes a SavedModel whose inputs are the fields of a sample.

    Args:
        model: whose weights are those of the publication.
        tables: the tables of its spec.
        rows: all rows, by table.
        predict: from the graph's named inputs to its outputs.
        folder: where it is written.
    """
    import keras
    import tensorflow as tf

    held = tf.Module()
    held.tables = {}
    for name, (keys, values) in rows.items():
        order = np.argsort(keys.view(np.int64))
        # One more, so that there is always one to gather; as the largest number it stays behind the others.
        sorted_keys = np.append(keys.view(np.int64)[order], np.iinfo(np.int64).max)
        sorted_rows = np.concatenate([values[order], np.zeros((1, values.shape[1]), np.float32)])
        held.tables[name] = [tf.Variable(one, trainable=False) for one in (sorted_keys, sorted_rows)]
    specs = {one["name"]: one for one in tables}
    fields: dict[str, Any] = {}
    for number in model.schema.numerics:
        fields[number.field_name] = tf.TensorSpec(None, tf.float32, name=number.field_name)
    for feature in model.schema.categoricals:
        fields[feature.field_name] = tf.TensorSpec(None, tf.string, name=feature.field_name)

    def look_up(feature: Embedded, keys: "tf.Tensor") -> "tf.Tensor":
        return _look_up(keys, held.tables[feature.table_name], specs[feature.table_name])

    def serve(inputs: dict[str, Any]) -> dict[str, Any]:
        named: dict[str, Any] = {}
        keys = {one.name: _keys(one, inputs[one.field_name], model.schema) for one in model.schema.categoricals}
        keys |= {one.name: _cross(one, [keys[name] for name in one.of]) for one in model.schema.crosses}
        for feature in model.schema.embedded:
            if not isinstance(feature, Cells):
                named |= _pool(feature, keys[feature.name], look_up(feature, keys[feature.name].values))
        for number in model.schema.numerics:
            values, missing = _numbers(number, inputs[number.field_name])
            named[number.name] = tf.cast(_transform(number, values), tf.float32)[:, None]
            if cells := number.cells:
                named[cells.name] = _pool_cells(cells, look_up(cells, _cell_keys(cells, values, missing)), missing)
        return predict(named)

    archive = keras.export.ExportArchive()
    archive.track(model.keras)
    archive.track(held)
    archive.add_endpoint("serve", serve, input_signature=[fields])
    archive.write_out(str(folder), verbose=False)


def _keys(feature: Categorical, ids: "tf.Tensor", schema: Schema) -> "tf.RaggedTensor":
    """The keys of a feature by sample, of ids [n] or [n, k]; of the latter, empty ones are padding."""
    import tensorflow as tf

    is_one = tf.rank(ids) == 1
    ids = tf.reshape(ids, [tf.shape(ids)[0], tf.reduce_prod(tf.shape(ids)[1:])])
    lists = tf.ragged.boolean_mask(ids, (ids != "") | is_one)
    if feature.max_length is not None:
        lists = lists[:, -feature.max_length :]
    return lists.with_values(hash_texts(lists.values, schema.max_id_bytes))


def _cross(cross: Cross, lists: Sequence["tf.RaggedTensor"]) -> "tf.RaggedTensor":
    """The keys of a cross by sample; the last list varies fastest."""
    import tensorflow as tf

    most = tf.reduce_prod([one.row_lengths() for one in lists], 0)
    said = f"cross {cross.name!r} has at most {_MAX_COMBINATIONS} combinations"
    with tf.control_dependencies([tf.debugging.assert_less_equal(most, tf.cast(_MAX_COMBINATIONS, most.dtype), said)]):
        owners = tf.identity(lists[0].value_rowids())
    words = lists[0].values[:, None]
    for one in lists[1:]:
        times = tf.gather(one.row_lengths(), owners)
        of = tf.repeat(tf.range(tf.size(times)), times)
        owners = tf.gather(owners, of)
        within = tf.range(tf.size(of, tf.int64)) - tf.gather(tf.cumsum(times, exclusive=True), of)
        last = tf.gather(one.values, tf.gather(one.row_starts(), owners) + within)
        words = tf.concat([tf.gather(words, of), last[:, None]], 1)
    keys = tf.RaggedTensor.from_value_rowids(hash_words(words), owners, lists[0].nrows())
    return keys if cross.max_length is None else keys[:, -cross.max_length :]


def _pool(feature: Embedded, keys: "tf.RaggedTensor", rows: "tf.Tensor") -> dict[str, Any]:
    """The inputs of a feature, of the rows of all its keys."""
    import tensorflow as tf

    lengths = keys.row_lengths()
    if feature.combiner is None:
        assert feature.max_length is not None  # the schema requires it
        padded_rows = keys.with_values(rows).to_tensor(shape=[None, feature.max_length, feature.dim])
        return {feature.name: padded_rows, f"{feature.name}_mask": tf.sequence_mask(lengths, feature.max_length)}
    total = tf.math.unsorted_segment_sum(rows, keys.value_rowids(), keys.nrows())
    count = tf.maximum(tf.cast(lengths, tf.float32), 1.0)[:, None]
    scale = {"sum": tf.ones_like(count), "mean": count, "sqrtn": tf.sqrt(count)}[feature.combiner]
    return {feature.name: tf.ensure_shape(total / scale, [None, feature.dim])}


def _numbers(number: Numeric, given: "tf.Tensor") -> tuple["tf.Tensor", "tf.Tensor"]:
    """The numbers [n], float64, of a field [n] or [n, 1] that may also be one of ids, and which are missing."""
    import tensorflow as tf

    given = tf.reshape(given, [-1])
    if given.dtype == tf.string:
        values = tf.strings.to_number(tf.where(given == "", "nan", given), tf.float64)
    else:
        values = tf.cast(given, tf.float64)
    missing = tf.math.is_nan(values)
    if number.default is not None:
        values = tf.where(missing, tf.cast(number.default, tf.float64), values)
    return values, missing


def _cell_keys(cells: Cells, values: "tf.Tensor", missing: "tf.Tensor") -> "tf.Tensor":
    """The keys of the cells of numbers [n], as many for each as there are sizes."""
    import tensorflow as tf

    shift = tf.bitwise
    numbers = tf.cast(values, tf.float32)
    raw = tf.cast(tf.bitcast(tf.where(numbers == 0.0, 0.0, numbers), tf.uint32), tf.uint64)  # -0 is 0
    ids = [
        shift.bitwise_or(_u64(1 << (9 + bits)), shift.right_shift(raw, _u64(MAX_CELL_BITS - bits)))
        for bits in cells.bits
    ]
    words = tf.where(missing[:, None], _u64(_NO_CELL), tf.stack(ids, 1))
    return hash_words(tf.reshape(words, [-1, 1]))


def _pool_cells(cells: Cells, rows: "tf.Tensor", missing: "tf.Tensor") -> "tf.Tensor":
    """The input of the cells of numbers [n], of which one that is missing has one row, and others one of each size."""
    import tensorflow as tf

    by_number = tf.reshape(rows, [-1, len(cells.bits), cells.dim])
    pooled = tf.reduce_sum(by_number, 1) / np.float32(math.sqrt(len(cells.bits)))
    return tf.where(missing[:, None], by_number[:, 0], pooled)


def _look_up(keys: "tf.Tensor", held: Sequence[Any], table: Mapping[str, Any]) -> "tf.Tensor":
    """The rows of keys [n], float32 [n, dim]."""
    import tensorflow as tf

    known, values = held
    signed = tf.bitcast(keys, tf.int64)
    at = tf.searchsorted(known, signed)
    found = (at < tf.size(known) - 1) & (tf.gather(known, at) == signed)
    return tf.where(found[:, None], tf.gather(values, at), initial_rows(keys, table))


def _transform(number: Numeric, values: "tf.Tensor") -> "tf.Tensor":
    import tensorflow as tf

    if number.transform == "log1p":
        return tf.sign(values) * tf.math.log1p(tf.abs(values))
    if number.transform == "standardize":
        return (values - number.mean) / number.stddev
    return values
