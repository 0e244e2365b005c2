"""Columns of samples: from NumPy, lists, pandas and Arrow, and that they mean what the same samples mean as JSON."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

import streamtrain as stm
from streamtrain._core import hash_bytes
from streamtrain.model.batch import Batch
from streamtrain.model.features import Feature
from streamtrain.model.samples import SampleReader


def reader(
    *features: Feature, with_labels: bool = True, loss: Any = "binary_crossentropy", **options: Any
) -> SampleReader:
    schema = stm.Schema(features=features or [stm.Numeric("x", transform=None)], **options)
    return SampleReader(stm.Model(schema, lambda inputs: None, loss=loss), with_labels=with_labels)


def read(reader: SampleReader, samples: Any) -> tuple[Batch, list[tuple[int, str, str]]]:
    """The batch, and index, reason and field of what is refused."""
    batches = list(reader.batches(samples, 1000))
    assert len(batches) <= 1
    batch, bad = batches[0]
    return batch, [(one.index, one.reason, one.field) for one in bad]


def key(text: str | int) -> int:
    return hash_bytes(str(text).encode())


def ids(batch: Batch, feature: int = 0) -> list[list[int]]:
    """The keys of a feature by sample."""
    keys = batch.keys[batch.starts[feature] : batch.starts[feature + 1]]
    return [part.tolist() for part in np.split(keys, batch.offsets[feature][1:-1])] if len(batch) else []


def keys(*samples: Sequence[str | int]) -> list[list[int]]:
    return [[key(one) for one in sample] for sample in samples]


def assert_same(one: Batch, other: Batch) -> None:
    for field in fields(Batch):
        assert_array_equal(getattr(one, field.name), getattr(other, field.name), err_msg=field.name, strict=True)


# --- what may hold columns ---

TABLE = {"label": [0, 1, 1], "user": ["a", "b", "a"], "tags": [["x"], [], ["y", "z"]], "price": [1.5, 2.0, -3.25]}
READER = reader(stm.Categorical("user", 4), stm.Categorical("tags", 4), stm.Numeric("price", transform=None))


@pytest.mark.parametrize(
    "samples",
    [
        TABLE,
        {name: np.array(column, object) if name == "tags" else np.array(column) for name, column in TABLE.items()},
        {name: pa.array(column) for name, column in TABLE.items()},
        {name: pd.Series(column) for name, column in TABLE.items()},
        pa.table(TABLE),
        pa.RecordBatch.from_pydict(TABLE),
        pa.concat_tables([pa.table(TABLE).slice(0, 1), pa.table(TABLE).slice(1)]),
        pd.DataFrame(TABLE),
        pd.DataFrame(TABLE, index=[7, "a", None]),
        pd.DataFrame(TABLE).astype({"user": "category", "label": "Int8", "price": "float32"}),
        pd.DataFrame(TABLE).convert_dtypes(),
        pd.DataFrame(TABLE).set_index("label"),
        pd.DataFrame(TABLE).set_index(["label", "price"]),
        pd.DataFrame({**TABLE, "unread": [object(), None, 3j]}),
        pd.concat([pd.DataFrame({**TABLE, "unread": 1}), pd.DataFrame({"unread": [1, 2, 3]})], axis=1),
        pd.DataFrame(TABLE).set_index(pd.Index([1, 2, 3], name="user")),
        {**TABLE, "label": [False, True, True], "unread": [object(), None, 3j]},
        {**TABLE, "unread": "for all", "of another length": [1]},
    ],
    ids=lambda samples: type(samples).__name__,
)
def test_everything_that_holds_columns(samples: Any) -> None:
    batch, bad = read(READER, samples)
    assert not bad
    assert ids(batch, 0) == keys(["a"], ["b"], ["a"])
    assert ids(batch, 1) == keys(["x"], [], ["y", "z"])
    assert batch.numeric.tolist() == [[1.5], [2.0], [-3.25]]
    assert batch.labels.tolist() == [[0], [1], [1]]
    assert batch.weights.tolist() == [1, 1, 1]
    assert batch.times.tolist() == [0, 0, 0]
    assert batch.kept.tolist() == [0, 1, 2]


def test_large_tables_are_read_in_batches() -> None:
    rng = np.random.default_rng(0)
    table = pa.table(
        {"label": rng.integers(0, 2, 103), "user": rng.integers(0, 9, 103), "tags": [[i] for i in range(103)]}
    )
    table = table.append_column("price", pa.array(rng.normal(size=103)))
    whole, _ = read(READER, table)
    parts = [batch for batch, _ in READER.batches(table, 10)]
    assert [len(part) for part in parts] == [10] * 10 + [3]
    for i, part in enumerate(parts):
        assert_same(part, whole.select((whole.kept >= 10 * i) & (whole.kept < 10 * i + 10)))


def test_no_samples() -> None:
    assert list(READER.batches(pa.table(TABLE).slice(0, 0), 10)) == []
    assert list(READER.batches({name: [] for name in TABLE}, 10)) == []


def test_columns_of_other_lengths() -> None:
    with pytest.raises(stm.ConfigError, match=r"columns differ in length: .*'user': 2"):
        read(READER, {**TABLE, "user": ["a", "b"]})


def test_column_that_is_none() -> None:
    with pytest.raises(stm.ConfigError, match="column 'user' cannot hold samples"):
        read(READER, {**TABLE, "user": [1, "a", object()]})


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (np.array([1j, 2, 3]), r"column 'price' cannot hold samples: .* \(complex128, of shape \(3,\)\)"),
        (np.zeros(3, [("a", "i4")]), r"column 'price' cannot hold samples: .* of shape \(3,\)\)"),
        (np.zeros((3, 2)), r"column 'price' cannot hold samples: .* \(float64, of shape \(3, 2\)\)"),
    ],
)
def test_arrays_that_arrow_does_not_take(column: Any, message: str) -> None:
    with pytest.raises(stm.ConfigError, match=message):
        read(READER, {**TABLE, "price": column})
    if column.dtype.kind == "c":
        with pytest.raises(stm.ConfigError, match="a column cannot hold samples: "):
            read(READER, pd.DataFrame({**TABLE, "price": column}))


@pytest.mark.parametrize("kind", [">f4", ">f8", ">f2", ">i8", "longdouble"])
def test_numbers_of_another_byte_order_or_of_more_bits(kind: str) -> None:
    expected, _ = read(READER, {**TABLE, "price": np.array([1.0, 2.0, 3.0])})
    column = np.array([1, 2, 3], kind)
    for samples in ({**TABLE, "price": column}, pd.DataFrame({**TABLE, "price": column})):
        assert_same(read(READER, samples)[0], expected)


def test_column_that_is_missing() -> None:
    for name in TABLE:
        with pytest.raises(stm.ConfigError, match=f"missing column '{name}'; the columns are"):
            read(READER, {other: column for other, column in TABLE.items() if other != name})


@pytest.mark.parametrize("samples", [{"unread": [1, 2]}, pd.DataFrame({"unread": [1, 2]}, index=["a", 7])])
def test_where_all_fields_may_be_missing_columns_tell_how_many_samples_there_are(samples: Any) -> None:
    number = stm.Numeric("x", default=2.0, transform=None)
    of_defaults = reader(stm.Categorical("user", 4, default="?"), number, with_labels=False)
    batch, bad = read(of_defaults, samples)
    assert not bad
    assert batch.numeric.tolist() == [[2.0]] * 2


def test_columns_that_are_missing_are_told_with_all_that_there_are() -> None:
    frame = pd.DataFrame({**TABLE, "unread": [1, "a", object()]}).drop(columns="user").set_index("label")
    with pytest.raises(
        stm.ConfigError, match=r"missing column 'user'; the columns are \['tags', 'price', 'unread', 'label'\]"
    ):
        read(READER, frame)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (
            pd.DataFrame(TABLE).iloc[0],
            r"not a Series \(.*; of a pandas frame, frame.iloc\[\[0\]\] is a table of one sample",
        ),
        (pd.DataFrame(TABLE)["price"], "not a Series"),
        (pa.array([1, 2]), "not a Int64Array"),
        (None, "not None"),
        (7, "not 7"),
    ],
)
def test_what_is_no_table(samples: Any, message: str) -> None:
    with pytest.raises(TypeError, match="samples must be a list of samples or a table, " + message):
        read(READER, samples)


def test_a_frame_whose_column_is_none() -> None:
    with pytest.raises(stm.ConfigError, match=r"a column cannot hold samples: .*column user"):
        read(READER, pd.DataFrame({**TABLE, "user": [1, "a", object()]}))
    with pytest.raises(stm.ConfigError, match="a column cannot hold samples: Duplicate column names found"):
        read(READER, pd.concat([pd.DataFrame(TABLE), pd.DataFrame({"user": ["a"] * 3})], axis=1))


@pytest.mark.parametrize(
    ("name", "column", "message"),
    [
        ("user", [1.5, 2.0, 3.0], r"column 'user' is double; ids are integers or text; .* use .astype\('Int64'\)"),
        ("user", [True, False, True], "column 'user' is bool; ids are integers or text"),
        ("tags", [[1.5], [], []], "column 'tags' is double; ids are integers or text"),
        ("tags", [[["x"]], [], []], "column 'tags' is .*; ids are integers or text"),
        ("price", ["1", "2", "3"], "column 'price' is string; it must be numbers"),
        ("label", ["1", "0", "1"], "column 'label' is string; a label is numbers, or say which"),
    ],
)
def test_column_of_a_type_that_its_field_cannot_have(name: str, column: Any, message: str) -> None:
    with pytest.raises(stm.ConfigError, match=message):
        read(READER, {**TABLE, name: column})


# --- ids ---

TEXTS = ["a", "", "żó", "77", "x" * 300]


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
)
@pytest.mark.parametrize("skip", [0, 2])
def test_texts_of_every_kind(kind: pa.DataType, skip: int) -> None:
    """Also when they are part of a longer column."""
    column = (
        pa.array(TEXTS, pa.string()).cast(kind)
        if not pa.types.is_dictionary(kind)
        else pa.array(TEXTS).dictionary_encode()
    )
    batch, bad = read(reader(stm.Categorical("u", 4), with_labels=False), pa.table({"u": column}).slice(skip))
    assert ids(batch) == keys(*([text] for text in TEXTS[skip:4]))
    assert bad == [(4 - skip, "id_too_long", "u")]


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_integers_of_every_kind(kind: str) -> None:
    info = np.iinfo(kind)
    column = np.array([info.min, 0, 77, info.max], kind)
    batch, _ = read(reader(stm.Categorical("u", 4), with_labels=False), {"u": column})
    assert ids(batch) == keys(*([int(one)] for one in column))


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list, lambda of: pa.list_(of, 2)])
@pytest.mark.parametrize("of", [pa.string(), pa.int32(), pa.large_string()])
@pytest.mark.parametrize("skip", [0, 1])
def test_lists_of_every_kind(kind: Callable[[Any], Any], of: pa.DataType, skip: int) -> None:
    lists = [[1, 2], [3, 4], [5, 6]]
    column = pa.array([[str(i) if of != pa.int32() else i for i in one] for one in lists], kind(of))
    batch, bad = read(reader(stm.Categorical("u", 4), with_labels=False), pa.table({"u": column}).slice(skip))
    assert ids(batch) == keys(*lists[skip:])
    assert not bad


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list, lambda of: pa.list_(of, 2)])
@pytest.mark.parametrize("default", [None, "nobody", []])
def test_null_lists(kind: Callable[[Any], Any], default: Any) -> None:
    column = pa.array([["a", "b"], None, ["c", "d"], None], kind(pa.string()))
    batch, bad = read(reader(stm.Categorical("u", 4, default=default), with_labels=False), {"u": column})
    if default is None:
        assert ids(batch) == keys(["a", "b"], ["c", "d"])
        assert bad == [(1, "missing_field", "u"), (3, "missing_field", "u")]
    else:
        filled = [default] if default else []
        assert ids(batch) == keys(["a", "b"], filled, ["c", "d"], filled)
        assert not bad


@pytest.mark.parametrize("kind", [pa.string(), pa.int64(), pa.dictionary(pa.int32(), pa.string()), pa.null()])
@pytest.mark.parametrize("default", [None, "nobody", 5, []])
def test_null_ids(kind: pa.DataType, default: Any) -> None:
    column = pa.nulls(2, kind)
    batch, bad = read(reader(stm.Categorical("u", 4, default=default), with_labels=False), {"u": column})
    if default is None:
        assert len(batch) == 0
        assert bad == [(0, "missing_field", "u"), (1, "missing_field", "u")]
    else:
        assert ids(batch) == (keys([default], [default]) if default else keys([], []))


def test_an_id_beside_those_that_are_missing() -> None:
    batch, bad = read(reader(stm.Categorical("u", 4, default=[]), with_labels=False), {"u": [None, "a", None, "b"]})
    assert ids(batch) == keys([], ["a"], [], ["b"])
    assert not bad


def test_nulls_in_dictionaries() -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 0]), pa.array(["a", None]))
    batch, bad = read(reader(stm.Categorical("u", 4, default="nobody"), with_labels=False), {"u": column})
    assert ids(batch) == keys(["a"], ["nobody"], ["nobody"], ["a"])
    assert not bad


def test_dictionaries_of_integers() -> None:
    column = pa.array([7, 8, 7]).dictionary_encode()
    assert ids(read(reader(stm.Categorical("u", 4), with_labels=False), {"u": column})[0]) == keys([7], [8], [7])


def test_lists_of_dictionaries() -> None:
    column = pa.array([["a", "b"], [], ["a"]], pa.list_(pa.dictionary(pa.int32(), pa.string())))
    assert ids(read(reader(stm.Categorical("u", 4), with_labels=False), {"u": column})[0]) == keys(
        ["a", "b"], [], ["a"]
    )


def test_null_within_a_list_is_no_id() -> None:
    column = pa.array([["a", None], ["b"]])
    batch, bad = read(reader(stm.Categorical("u", 4, default="nobody"), with_labels=False), {"u": column})
    assert ids(batch) == keys(["b"])
    assert bad == [(0, "wrong_type", "u")]


def test_lists_keep_their_last_ids() -> None:
    column = [list("abcd"), list("ab"), [], list("xyz")]
    batch, _ = read(reader(stm.Categorical("u", 4, max_length=2), with_labels=False), {"u": column})
    assert ids(batch) == keys("cd", "ab", [], "yz")


def test_id_too_long_within_a_list_that_is_cut() -> None:
    """All of a list must be ids, also those that max_length leaves out."""
    column = [["x" * 300, "a"], ["b"]]
    _, bad = read(reader(stm.Categorical("u", 4, max_length=1), with_labels=False), {"u": column})
    assert bad == [(0, "id_too_long", "u")]


@pytest.mark.parametrize("default", [77, []])
def test_missing_column_with_a_default(default: Any) -> None:
    features = (stm.Categorical("u", 4, default=default), stm.Numeric("x", default=2.5, transform=None))
    batch, bad = read(reader(*features, with_labels=False), {"other": [1, 2]})
    assert ids(batch) == (keys([77], [77]) if default else keys([], []))
    assert batch.numeric.tolist() == [[2.5], [2.5]]
    assert not bad


def test_crosses_are_products() -> None:
    made = reader(
        stm.Categorical("a", 4),
        stm.Categorical("b", 4),
        stm.Cross("c", 4, of=("b", "a"), max_length=3),
        with_labels=False,
    )
    batch, bad = read(made, {"a": [["x", "y"], ["x"], [str(i) for i in range(5000)]], "b": [[1, 2], [], [3]]})

    def crossed(b: str, a: str) -> int:
        return hash_bytes(np.array([key(b), key(a)], "<u8").tobytes())

    assert ids(batch, 2) == [[crossed("1", "y"), crossed("2", "x"), crossed("2", "y")], []]
    assert bad == [(2, "cross_too_large", "c")]


def test_more_ids_than_a_sample_may_have_are_refused() -> None:
    made = reader(
        stm.Categorical("a", 4),
        stm.Categorical("b", 4, max_length=1),
        stm.Cross("c", 4, of=("b", "a")),
        with_labels=False,
        max_ids=5,
    )
    columns = {"a": [["x"], ["x", "y"], list("uvwxyz"), list("vwxyz")], "b": [list("abc"), ["a", "b"], ["a"], ["a"]]}
    batch, bad = read(made, columns)
    assert batch.kept.tolist() == [0, 1]
    assert bad == [(2, "too_many_ids", "a"), (3, "too_many_ids", "b")]
    assert read(made, {"a": [["x", "y", "z"]], "b": [["a"]]})[1] == [(0, "too_many_ids", "c")]


# --- numbers, labels, weights ---


@pytest.mark.parametrize(
    "column",
    [
        np.array([1, 0], np.float16),
        np.array([1, 0], np.uint8),
        pa.array([1, 0], pa.decimal128(5, 2)),
        pa.array([True, False]),
        pa.chunked_array([[1.0], [0.0]]),
    ],
    ids=str,
)
def test_numbers_of_every_kind(column: Any) -> None:
    assert read(reader(stm.Numeric("x", transform=None), with_labels=False), {"x": column})[0].numeric.tolist() == [
        [1],
        [0],
    ]


def test_numbers_that_are_missing_or_not_finite() -> None:
    column = pa.array([1.0, None, math.nan, math.inf, 1e39])
    batch, bad = read(reader(stm.Numeric("x", transform=None), with_labels=False), {"x": column})
    assert batch.numeric.tolist() == [[1.0]]
    assert bad == [*((i, "missing_field", "x") for i in (1, 2)), *((i, "not_finite", "x") for i in (3, 4))]
    batch, bad = read(reader(stm.Numeric("x", default=5, transform=None), with_labels=False), {"x": column})
    assert batch.numeric.tolist() == [[1.0], [5.0], [5.0]]
    assert batch.kept.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("column", "positive"),
    [
        (["yes", "no", None, "NA", "Yes"], "yes"),
        (pa.array(["yes", "no", None, "NA", "Yes"]).dictionary_encode(), "yes"),
        (np.array([1.0, -1.0, math.nan, math.nan, 2.0]), 1),
        ([1, -1, None, None, 0], 1),
        ([True, False, None, None, False], "true"),
        ([True, False, None, None, False], 1),
    ],
)
def test_a_positive_class(column: Any, positive: str | int) -> None:
    label = stm.Label("y", positive=positive, optional=True)
    batch, bad = read(reader(stm.Numeric("x"), label=label), {"x": [0] * 5, "y": column})
    assert not bad
    np.testing.assert_array_equal(batch.labels[:, 0], np.array([1, 0, math.nan, math.nan, 0], np.float32))
    with pytest.raises(stm.ConfigError, match="only a binary label has a positive class"):
        stm.Label("y", positive=positive, kind="real")


@pytest.mark.parametrize(
    ("form", "times"),
    [("ms", [1_700_000_000_250, 1.70000000025e12]), ("%d.%m.%Y %H:%M:%S.%f", ["14.11.2023 22:13:20.25"] * 2)],
)
def test_times_of_another_format(form: str, times: list[Any]) -> None:
    made = reader(time="ts", time_format=form)
    batch, bad = read(made, pa.table({"x": [0, 0], "label": [0, 0], "ts": pa.array(times)}))
    assert (batch.times.tolist(), bad) == ([1_700_000_000.25] * 2, [])
    _, [refused] = made.decode([b'{"x": 0, "label": 0, "ts": "2023-11-14 22:13:20 h"}'])
    assert f"expected {'ms since' if form == 'ms' else 'text of the form'}" in refused.detail
    assert "as time_format says" in refused.detail
    with pytest.raises(stm.ConfigError, match="time_format 'min': expected one of s, ms, us and ns, or a pattern"):
        reader(time="ts", time_format="min")


def test_transforms_are_made_in_double() -> None:
    made = reader(
        stm.Numeric("log", field="x", transform="log1p"),
        stm.Numeric("std", field="x", transform="standardize", mean=1e9, stddev=0.5),
        with_labels=False,
    )
    batch, bad = read(made, {"x": np.array([1e9 + 1, -1e9, 1e300])})
    assert batch.numeric.tolist() == [[np.float32(math.log1p(1e9 + 1)), 2.0], [-np.float32(math.log1p(1e9)), -4e9]]
    assert bad == [(2, "not_finite", "x")]


@pytest.mark.parametrize(
    ("loss", "good", "bad"),
    [
        ("binary_crossentropy", [0, 1], [0.5, 2, -1]),
        ("poisson", [0, 0.5, 1e30], [-0.5, -1]),
        ("mean_squared_error", [-1e30, 0, 0.5], []),
    ],
)
def test_labels_have_a_domain(loss: str, good: list[float], bad: list[float]) -> None:
    column = [*good, *bad, math.inf, None]
    batch, refused = read(reader(loss=loss), pa.table({"x": [0] * len(column), "label": column}))
    assert_array_equal(batch.labels[:, 0], np.array(good, np.float32))
    n = len(good)
    assert refused == [
        *((n + i, "bad_label", "label") for i in range(len(bad))),
        (len(column) - 2, "not_finite", "label"),
        (len(column) - 1, "missing_field", "label"),
    ]


def test_label_that_no_float_can_hold() -> None:
    _, refused = read(reader(loss="mean_squared_error"), {"x": [0, 0], "label": [1e39, 1.0]})
    assert refused == [(0, "not_finite", "label")]


def test_optional_labels_are_nan_where_missing() -> None:
    made = reader(label=["a", stm.Label("b", optional=True)])
    batch, bad = read(made, {"x": [0, 0], "a": [1, 0], "b": pa.array([None, 1])})
    assert_array_equal(batch.labels, np.array([[1, np.nan], [0, 1]], np.float32))
    assert_array_equal(read(made, {"x": [0, 0], "a": [1, 0]})[0].labels[:, 1], np.full(2, np.nan, np.float32))
    assert not bad


def test_a_label_of_text_needs_a_positive_class() -> None:
    for column in (["yes", "no"], pa.array(["yes", "no"]).dictionary_encode()):
        with pytest.raises(stm.ConfigError, match=r"say which of its values .*Label\('label', positive=…\)"):
            read(reader(), {"x": [0, 1], "label": column})
    numbers = pd.DataFrame({"x": [0, 1], "label": pd.Categorical([0, 1])})
    assert read(reader(), numbers)[0].labels[:, 0].tolist() == [0, 1]


def test_weights_default_to_one() -> None:
    made = reader(weight="w")
    column = pa.array([0.0, None, 2.5, -1.0, math.nan, 1e39])
    batch, bad = read(made, {"x": [0] * 6, "label": [1] * 6, "w": column})
    assert batch.weights.tolist() == [0, 1, 2.5, 1]
    assert bad == [(3, "bad_weight", "w"), (5, "not_finite", "w")]
    assert read(made, {"x": [0], "label": [1]})[0].weights.tolist() == [1]


def test_labels_weights_and_times_are_not_needed_to_predict() -> None:
    made = reader(weight="w", time="ts", with_labels=False)
    batch, bad = read(made, {"x": [1.0]})
    assert batch.labels.shape == (1, 0)
    assert (batch.weights.tolist(), batch.times.tolist()) == ([1], [0])
    assert not bad
    assert read(made, {"x": [1.0], "w": ["junk"], "label": ["junk"]})[0].numeric.tolist() == [[1.0]]


# --- event time ---

MOMENT = datetime(2023, 11, 14, 22, 13, 20, 250_000, UTC)
SECONDS = 1_700_000_000.25


@pytest.mark.parametrize(
    "column",
    [
        pa.array([SECONDS]),
        pa.array([MOMENT]),
        pa.array([MOMENT], pa.timestamp("us", "America/New_York")),
        pa.array([MOMENT.replace(tzinfo=None)], pa.timestamp("ms")),
        pa.array([MOMENT.replace(tzinfo=None)], pa.timestamp("ns")),
        np.array(["2023-11-14T22:13:20.250"], "datetime64[ms]"),
        pd.to_datetime(pd.Series(["2023-11-14T22:13:20.250Z"])),
        ["2023-11-14T22:13:20.250Z"],
        ["2023-11-14 22:13:20,25"],
        pa.array(["2023-11-15T00:13:20.25+02:00"], pa.string_view()),
    ],
    ids=lambda column: f"{type(column).__name__}-{getattr(column, 'type', '')}",
)
def test_times_of_every_kind(column: Any) -> None:
    batch, bad = read(reader(time="ts"), {"x": [0], "label": [0], "ts": column})
    assert batch.times.tolist() == [SECONDS]
    assert not bad


def test_times_in_whole_units() -> None:
    made = reader(time="ts")
    for column in (pa.array([1_700_000_000], pa.timestamp("s")), pa.array([1_700_000_000])):
        assert read(made, {"x": [0], "label": [0], "ts": column})[0].times.tolist() == [1_700_000_000]
    assert read(made, {"x": [0], "label": [0], "ts": pa.array([19675], pa.date32())})[0].times.tolist() == [
        19675 * 86400
    ]


def test_timestamps_finer_than_a_microsecond() -> None:
    column = pa.array([1_700_000_000_250_000_001], pa.timestamp("ns"))
    batch, bad = read(reader(time="ts"), {"x": [0], "label": [0], "ts": column})
    assert batch.times.tolist() == [SECONDS]
    assert not bad


@pytest.mark.parametrize(
    ("time", "reason"),
    [
        (1.7e12, "bad_time"),
        (-1e12, "bad_time"),
        ("yesterday", "bad_time"),
        ("2023-02-30", "bad_time"),
        ("", "bad_time"),
        (math.nan, "missing_field"),
        (math.inf, "not_finite"),
        (None, "missing_field"),
    ],
)
def test_times_that_are_none(time: Any, reason: str) -> None:
    made = reader(time="ts")
    _, bad = read(made, pa.table({"x": [0], "label": [0], "ts": pa.array([time])}))
    assert bad == [(0, reason, "ts")]


def test_time_of_a_type_that_it_cannot_have() -> None:
    with pytest.raises(
        stm.ConfigError, match="column 'ts' is bool; event times are numbers, timestamps or ISO 8601 text"
    ):
        read(reader(time="ts"), {"x": [0], "label": [0], "ts": [True]})


# --- the same as JSON ---

SHAPE: list[Feature] = [
    stm.Categorical("user", 4),
    stm.Categorical("item", 4, default="none", max_length=2),
    stm.Categorical("again", 4, field="item", max_length=1),
    stm.Cross("both", 4, of=("user", "item"), max_length=3),
    stm.Numeric("price", transform=None),
    stm.Numeric("age", default=3, transform="log1p"),
    stm.Numeric("score", field="price", transform="standardize", mean=2, stddev=0.5),
]
OPTIONS: dict[str, Any] = {
    "label": ["click", stm.Label("stars", kind="count", optional=True)],
    "loss": {"click": "binary_crossentropy", "stars": "poisson"},
    "time": "ts",
    "weight": "w",
    "max_id_bytes": 5,
    "max_ids": 8,
}
READERS = {with_labels: reader(*SHAPE, **OPTIONS, with_labels=with_labels) for with_labels in (True, False)}

texts = st.sampled_from(["a", "b", "", "żółw", "toolong", "77"])
numbers = st.none() | st.sampled_from([0, 1, 1.0, 0.5, -1, 2, 1e39, 1e308, -0.0, 1e-320]) | st.floats(-1e3, 1e3)


def column_of(one: st.SearchStrategy[Any], n: int) -> st.SearchStrategy[list[Any]]:
    return st.lists(one, min_size=n, max_size=n)


@st.composite
def tables(draw: st.DrawFn) -> dict[str, list[Any]]:
    n = draw(st.integers(1, 6))
    id_or_null = st.none() | draw(st.sampled_from([texts, st.integers(-(2**63), 2**63 - 1)]))
    lists = st.none() | st.lists(st.none() | texts if draw(st.booleans()) else texts, max_size=4)
    return {
        "ts": draw(column_of(draw(st.sampled_from([numbers, st.none() | TIMES])), n)),
        "click": draw(column_of(st.sampled_from([0, 1, 1, 0.5, None]) | st.booleans(), n)),
        "stars": draw(column_of(numbers, n)),
        "w": draw(column_of(numbers, n)),
        "user": draw(column_of(id_or_null, n)),
        "item": draw(column_of(lists, n)),
        "price": draw(column_of(numbers, n)),
        "age": draw(column_of(numbers, n)),
    }


TIMES = st.sampled_from(
    ["2024-02-29", "2023-02-29", "2024-01-01T10:20", "2024-01-01 10:20:30.5+01:30", "", "soon", "9999-12-31"]
)


def arrow(table: dict[str, list[Any]]) -> pa.Table:
    """Booleans and numbers cannot share an Arrow column; JSON takes either."""
    numeric = ("click", "stars", "w", "price", "age")
    columns = {}
    for name, column in table.items():
        plain = name in numeric or (name == "ts" and not any(isinstance(one, str) for one in column))
        columns[name] = pa.array([None if v is None else float(v) for v in column] if plain else column)
    return pa.table(columns)


@given(tables(), st.booleans())
def test_columns_and_json_give_the_same(table: dict[str, list[Any]], with_labels: bool) -> None:
    n = len(table["user"])
    messages = [json.dumps({name: column[i] for name, column in table.items()}).encode() for i in range(n)]
    from_columns, bad_columns = read(READERS[with_labels], arrow(table))
    from_json, bad_json = read(READERS[with_labels], messages)
    assert bad_columns == bad_json
    assert_same(from_columns, from_json)


@given(tables(), st.integers(1, 3))
def test_the_same_in_any_batches(table: dict[str, list[Any]], size: int) -> None:
    whole, bad = read(READERS[True], arrow(table))
    parts = list(READERS[True].batches(arrow(table), size))
    assert [(one.index, one.reason, one.field) for _, refused in parts for one in refused] == bad
    assert np.concatenate([part.kept for part, _ in parts]).tolist() == whole.kept.tolist()
    for part, _ in parts:
        if len(part):
            assert_same(part, whole.select(np.isin(whole.kept, part.kept)))


# --- batches ---


@given(st.lists(st.lists(texts, max_size=3), min_size=1, max_size=8), st.data())
def test_selecting_samples_of_a_batch(lists: list[list[str]], data: st.DataObject) -> None:
    mask = np.array(data.draw(column_of(st.booleans(), len(lists))))
    made = reader(stm.Categorical("a", 4), stm.Categorical("b", 4), stm.Numeric("x", transform=None), with_labels=False)
    table = {
        "a": pa.array(lists, pa.list_(pa.string())),
        "b": [str(i) for i in range(len(lists))],
        "x": range(len(lists)),
    }
    chosen = read(made, table)[0].select(mask)
    assert chosen.kept.tolist() == np.flatnonzero(mask).tolist()
    assert chosen.numeric[:, 0].tolist() == np.flatnonzero(mask).tolist()
    assert ids(chosen, 0) == keys(*(one for one, is_chosen in zip(lists, mask, strict=True) if is_chosen))
    assert ids(chosen, 1) == keys(*([str(i)] for i in np.flatnonzero(mask)))
    assert chosen.starts[-1] == len(chosen.keys)
