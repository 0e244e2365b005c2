"""Schema, optimizers, durations and model options: what is refused, by which message, and what a fingerprint covers."""

import re
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest

import streamtrain as st
from streamtrain.durations import parse_duration, parse_size
from streamtrain.model.features import Feature
from streamtrain.model.optimizers import Optimizer
from streamtrain.model.samples import SampleReader


def refused(make: Callable[[], object], *parts: str) -> None:
    """Assert that `make` raises a ConfigError whose message has every part."""
    with pytest.raises(st.ConfigError) as caught:
        make()
    for part in parts:
        assert part in str(caught.value)


def schema(*features: Any, **options: Any) -> st.Schema:
    return st.Schema(features=features or (st.Categorical("user", 4),), **options)


# --- durations ---


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30d", 2_592_000),
        ("12h", 43_200),
        ("1.5h", 5_400),
        ("90s", 90),
        ("250ms", 0.25),
        (" 2 m ", 120),
        ("1w", 604_800),
    ],
)
def test_durations_have_units(text: str, seconds: float) -> None:
    assert parse_duration(text, "expire_after") == pytest.approx(seconds)


@pytest.mark.parametrize("seconds", [1, 0.5, 86400])
def test_durations_are_seconds_without_a_unit(seconds: float) -> None:
    assert parse_duration(seconds, "expire_after") == seconds


@pytest.mark.parametrize("value", ["", "30", "d", "-1d", "0s", "1y", "1e3s", "3 0d", 0, -1, float("inf"), float("nan")])
def test_what_is_no_duration(value: Any) -> None:
    refused(lambda: parse_duration(value, "expire_after"), "expire_after", repr(value))


@pytest.mark.parametrize(("text", "size"), [("1B", 1), ("50MB", 5e7), (" 1.5 GB ", 1.5e9), ("2kB", 2e3)])
def test_sizes_have_units(text: str, size: float) -> None:
    assert parse_size(text, "--rate") == size


@pytest.mark.parametrize("text", ["", "50", "MB", "0MB", "-1MB", "1e3MB", "1TB", "9" * 400 + "B"])
def test_what_is_no_size(text: str) -> None:
    refused(lambda: parse_size(text, "--rate"), "--rate", repr(text))


@pytest.mark.parametrize("value", [True, None, [1], b"1d"])
def test_what_is_no_duration_by_type(value: Any) -> None:
    refused(lambda: parse_duration(value, "publish.every"), "publish.every", repr(value))


# --- optimizers ---

OPTIMIZERS: list[type[Optimizer]] = [st.SGD, st.Adagrad, st.RowWiseAdagrad, st.Adam, st.FTRL]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "0.1", None, True])
def test_every_option_of_an_optimizer_is_a_finite_number(kind: type[Optimizer], value: Any) -> None:
    for option in fields(kind):
        refused(partial(kind, **{option.name: value}), kind.__name__, option.name, repr(value))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_rate_is_positive(kind: type[Optimizer]) -> None:
    refused(lambda: kind(0.0), kind.__name__, "rate must be > 0")


@pytest.mark.parametrize("option", ["beta1", "beta2"])
def test_betas_are_below_one(option: str) -> None:
    refused(lambda: st.Adam(**{option: 1.0}), "Adam", option)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (st.Adagrad, {"epsilon": 0.0}, "Adagrad: epsilon must be > 0"),
        (st.Adagrad, {"decay": 0.0}, "Adagrad: decay must be > 0 and at most 1"),
        (st.RowWiseAdagrad, {"decay": 1.1}, "RowWiseAdagrad: decay must be > 0 and at most 1"),
        (st.Adam, {"epsilon": 1e-45}, "Adam: epsilon must be > 0"),
        (st.SGD, {"rate": 1e-50}, "SGD: rate must be > 0"),
        (st.SGD, {"rate": 1e39}, "SGD: rate must be a finite number"),
        (st.Adam, {"beta2": 1 - 1e-9}, "Adam: beta2 must be < 1"),
        (st.FTRL, {"beta": 0.0, "initial_accumulator": 0.0}, "FTRL: beta or initial_accumulator must be > 0"),
    ],
)
def test_what_float32_cannot_hold(kind: type[Optimizer], options: dict[str, float], message: str) -> None:
    refused(partial(kind, **options), message)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_settings_make_a_table(kind: type[Optimizer]) -> None:
    from streamtrain._core import Table

    assert Table(3, **kind(0.5).settings()).dim == 3


# --- features ---


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("dim", 0),
        ("dim", 4097),
        ("dim", "8"),
        ("dim", 8.0),
        ("dim", True),
        ("combiner", "max"),
        ("max_length", 0),
        ("max_length", 2.5),
        ("max_length", 2**31),
        ("init", 0.1),
        ("dtype", "float64"),
        ("min_count", 0),
        ("min_count", 256),
        ("min_count", True),
        ("capacity", 0),
        ("capacity", 1.5),
        ("capacity", 2**32 - 1),
        ("optimizer", "adam"),
        ("expire_after", "soon"),
        ("expire_after", 0),
        ("default", 1.5),
        ("default", True),
    ],
)
def test_option_of_a_categorical_out_of_range(option: str, value: Any) -> None:
    options = {"dim": 4, option: value}
    refused(lambda: st.Categorical("user", **options), "feature 'user'", option, repr(value))


@pytest.mark.parametrize("name", ["", None, 3])
def test_names_are_texts(name: Any) -> None:
    refused(lambda: st.Categorical(name, 4), "feature must have a name", repr(name))
    refused(lambda: st.Cross(name, 4, of=("a", "b")), "feature must have a name", repr(name))
    refused(lambda: st.Numeric(name), "feature must have a name", repr(name))
    refused(lambda: st.Label(name), "label must have a name", repr(name))


@pytest.mark.parametrize("name", ["", 3])
def test_fields_and_tables_have_names(name: Any) -> None:
    refused(lambda: st.Categorical("user", 4, table=name), "table must have a name", repr(name))
    refused(lambda: st.Categorical("user", 4, field=name), "field must have a name", repr(name))
    refused(lambda: st.Numeric("price", field=name), "field must have a name", repr(name))


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -0.1, "x", True])
def test_scale_of_birth_values_is_a_finite_number(scale: Any) -> None:
    refused(lambda: st.Uniform(scale), "Uniform", "scale", repr(scale))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39, "x", True])
def test_birth_value_is_a_finite_number(value: Any) -> None:
    refused(lambda: st.Constant(value), "Constant", "value", repr(value))


def test_sequence_needs_a_max_length() -> None:
    refused(lambda: st.Categorical("history", 4, combiner=None), "feature 'history'", "max_length")


@pytest.mark.parametrize("of", [(), ("a",), "ab", tuple("abcdefghi")])
def test_cross_is_of_two_to_eight(of: Any) -> None:
    refused(lambda: st.Cross("c", 4, of=of), "feature 'c'", "of must name 2 to 8 features", repr(of))


def test_cross_of_a_list_is_kept_as_a_tuple() -> None:
    of: Any = ["a", "b"]
    assert st.Cross("c", 4, of=of).of == ("a", "b")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("transform", "log"),
        ("default", float("nan")),
        ("default", "0"),
        ("default", True),
        ("mean", float("inf")),
        ("mean", None),
        ("stddev", 0.0),
        ("stddev", -1.0),
        ("stddev", float("nan")),
        ("stddev", None),
    ],
)
def test_option_of_a_numeric_out_of_range(option: str, value: Any) -> None:
    refused(lambda: st.Numeric("price", **{option: value}), "feature 'price'", option, repr(value))


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        (st.Numeric("price", default=1e39, transform=None), 'default of numeric "price" is not finite'),
        (st.Numeric("p", default=1.0, transform="standardize", stddev=1e-300), 'default of numeric "p" is not finite'),
        (st.Categorical("user", 4, default="u" * 300), 'default id of "user" is longer than max_id_bytes'),
    ],
)
def test_default_that_a_sample_could_not_have(feature: Feature, message: str) -> None:
    refused(lambda: SampleReader(model(schema=schema(feature))), message)


def test_kind_of_label() -> None:
    kind: Any = "clicks"
    refused(lambda: st.Label("click", kind=kind), "label 'click'", "kind", "'clicks'")


# --- schema ---


@pytest.mark.parametrize("option", ["time", "weight"])
@pytest.mark.parametrize("value", ["", 3])
def test_time_and_weight_are_fields(option: str, value: Any) -> None:
    refused(lambda: schema(**{option: value}), f"{option} must have a name", repr(value))


@pytest.mark.parametrize("option", ["max_message_bytes", "max_id_bytes", "max_ids", "max_depth"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None, 2**31])
def test_limits_are_positive_integers(option: str, value: Any) -> None:
    refused(lambda: schema(**{option: value}), option, repr(value))


def test_schema_needs_label_and_features() -> None:
    refused(lambda: schema(label=[]), "label must name at least one")
    refused(lambda: st.Schema(features=[]), "features must not be empty")
    given: Any = ["user"]
    refused(lambda: st.Schema(features=given), "features must be Categorical, Cross or Numeric", "'user'")


def test_names_are_unique() -> None:
    refused(lambda: schema(label=["a", st.Label("a")]), "label 'a' appears twice")
    refused(lambda: schema(st.Numeric("x"), st.Categorical("x", 4)), "feature 'x' appears twice")
    history = st.Categorical("h", 4, combiner=None, max_length=3)
    refused(lambda: schema(history, st.Numeric("h_mask")), "feature 'h_mask' appears twice")


def test_cross_names_categoricals() -> None:
    user, price = st.Categorical("user", 4), st.Numeric("price")
    cross = st.Cross("c", 4, of=("user", "price"))
    refused(lambda: schema(user, price, cross), "feature 'c'", "'price'", "not a Categorical")
    refused(lambda: schema(user, replace(cross, of=("user", "item"))), "feature 'c'", "'item'", "not a Categorical")
    refused(lambda: schema(user, replace(cross, of=("user", "c"))), "feature 'c'", "'c'", "not a Categorical")


def test_labels_may_be_texts_or_labels() -> None:
    rating = st.Label("rating", kind="real", optional=True)
    assert schema(label="y").labels == (st.Label("y"),)
    assert schema(label=rating).labels == (rating,)
    assert schema(label=["click", rating]).labels == (st.Label("click"), rating)


def test_inputs_are_categoricals_then_crosses() -> None:
    cross = st.Cross("c", 4, of=("a", "b"))
    made = schema(cross, st.Numeric("x"), st.Categorical("b", 2), st.Categorical("a", 2))
    assert [one.name for one in made.embedded] == ["b", "a", "c"]
    assert [one.name for one in made.numerics] == ["x"]
    assert [table.name for table in made.tables] == ["b", "a", "c"]


# --- tables ---

OPTIONS: list[tuple[str, Any, Any]] = [
    ("init", st.Constant(1.0), st.Uniform(0.1)),
    ("dtype", "float16", "bfloat16"),
    ("min_count", 2, 3),
    ("expire_after", "30d", "1d"),
    ("capacity", 10, 20),
    ("optimizer", st.SGD(0.1), st.SGD(0.2)),
]


@pytest.mark.parametrize(("option", "value", "other"), OPTIONS)
def test_option_of_a_table_may_be_given_by_any_feature(option: str, value: Any, other: Any) -> None:
    plain = st.Categorical("item", 4)
    last = st.Categorical("last", 4, table="item", **{option: value})
    agreeing = st.Categorical("next", 4, table="item", **{option: value})
    (first,) = schema(last, plain, time="ts").tables
    (second,) = schema(plain, last, agreeing, time="ts").tables
    assert first == second
    assert getattr(first, option) == (2_592_000 if option == "expire_after" else value)


@pytest.mark.parametrize(("option", "value", "other"), OPTIONS)
def test_features_of_a_table_must_agree(option: str, value: Any, other: Any) -> None:
    features = [
        st.Categorical("item", 4, **{option: value}),
        st.Categorical("last", 4, table="item", **{option: other}),
    ]
    refused(lambda: schema(*features), "feature 'last'", option, "feature 'item'", "table 'item'", repr(other))


@pytest.mark.parametrize(
    ("duration", "seconds"), [(None, 0), ("1ms", 1), ("1.4s", 1), ("1d", 86400), ("99999w", 2**32 - 1)]
)
def test_durations_reach_the_core_in_whole_seconds(duration: Any, seconds: int) -> None:
    (table,) = schema(st.Categorical("item", 4, expire_after=duration), time="ts").tables
    assert table.settings(st.SGD(), 0)["expire_after"] == seconds


def test_same_duration_in_other_words_agrees() -> None:
    month, hours = st.Categorical("a", 4, table="t", expire_after="30d"), 720 * 3600
    hourly = st.Categorical("b", 4, table="t", expire_after=hours)
    assert schema(month, hourly, time="ts").tables[0].expire_after == hours


def test_rows_expire_by_a_time_that_samples_have() -> None:
    for expiring in (st.Categorical("item", 4, expire_after="1d"), st.Categorical("b", 4, table="t", expire_after=60)):
        refused(partial(schema, expiring), f"feature {expiring.name!r}", "expire_after", "set the schema's time")


def test_features_of_a_table_have_one_dim() -> None:
    features = st.Categorical("item", 4), st.Categorical("last", 8, table="item")
    refused(lambda: schema(*features), "feature 'last'", "dim is 8", "table 'item'", "dim 4")


def test_cross_may_share_a_table() -> None:
    user, item = st.Categorical("user", 4), st.Categorical("item", 4)
    made = schema(user, item, st.Cross("c", 4, of=("user", "item"), table="item", min_count=2))
    assert [(table.name, table.min_count) for table in made.tables] == [("user", 1), ("item", 2)]


# --- fingerprint ---

BASE: list[Feature] = [
    st.Categorical("user", 4, max_length=3, default="nobody", combiner="mean"),
    st.Categorical("item", 4),
    st.Cross("both", 4, of=("user", "item")),
    st.Numeric("price", default=0.0, transform="standardize", mean=1.0, stddev=2.0),
]


def changed(position: int, **options: Any) -> str:
    features = list(BASE)
    features[position] = replace(features[position], **options)
    return schema(*features, time="ts" if "expire_after" in options else None).fingerprint()


def test_fingerprint_is_16_hex_digits_and_stays() -> None:
    assert re.fullmatch("[0-9a-f]{16}", schema(*BASE).fingerprint())
    assert schema(*BASE).fingerprint() == schema(*map(replace, BASE)).fingerprint()


@pytest.mark.parametrize(
    ("position", "options"),
    [
        (1, {"name": "thing", "field": "item", "table": "item"}),
        (0, {"field": "u"}),
        (0, {"table": "item"}),
        (0, {"dim": 5}),
        (0, {"combiner": "sum"}),
        (0, {"combiner": None}),
        (0, {"max_length": 4}),
        (0, {"default": "somebody"}),
        (0, {"default": None}),
        (0, {"init": st.Uniform(0.1)}),
        (0, {"init": st.Constant(0.0)}),
        (2, {"of": ("item", "user")}),
        (2, {"max_length": 9}),
        (3, {"field": "p"}),
        (3, {"default": 1.0}),
        (3, {"transform": None}),
        (3, {"mean": 0.0}),
        (3, {"stddev": 1.0}),
    ],
)
def test_fingerprint_changes_with_meaning(position: int, options: dict[str, Any]) -> None:
    if "name" in options:
        features = [replace(one, of=("user", "thing")) if isinstance(one, st.Cross) else one for one in BASE]
        features[position] = replace(features[position], **options)
        assert schema(*features).fingerprint() != schema(*BASE).fingerprint()
    else:
        assert changed(position, **options) != schema(*BASE).fingerprint()


def test_fingerprint_changes_with_labels_and_order() -> None:
    base = schema(*BASE).fingerprint()
    assert schema(*BASE, label="other").fingerprint() != base
    assert schema(*BASE, label=["label", "other"]).fingerprint() != base
    assert schema(*BASE[::-1]).fingerprint() != base


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float16"},
        {"min_count": 2},
        {"expire_after": "1d"},
        {"capacity": 10},
        {"optimizer": st.SGD(0.1)},
        {"init": st.Uniform(0.05)},
    ],
)
def test_fingerprint_does_not_change_with_operation(options: dict[str, Any]) -> None:
    time = "ts" if "expire_after" in options else None
    assert changed(0, **options) == schema(*BASE, time=time).fingerprint()


@pytest.mark.parametrize(
    "options", [{"max_message_bytes": 10}, {"max_id_bytes": 10}, {"max_ids": 10}, {"max_depth": 3}]
)
def test_fingerprint_does_not_change_with_limits(options: dict[str, Any]) -> None:
    assert schema(*BASE, **options).fingerprint() == schema(*BASE).fingerprint()


@pytest.mark.parametrize(
    ("position", "options"),
    [
        (0, {"field": "user"}),
        (0, {"table": "user"}),
        (3, {"field": "price"}),
        (3, {"default": 0, "mean": 1, "stddev": 2}),
    ],
)
def test_fingerprint_does_not_change_with_the_way_of_writing(position: int, options: dict[str, Any]) -> None:
    assert changed(position, **options) == schema(*BASE).fingerprint()


def test_default_is_the_id_that_it_spells() -> None:
    assert changed(0, default=77) == changed(0, default="77")
    assert changed(0, default=None) != changed(0, default="None")
    assert changed(0, default=[]) == changed(0, default=())
    assert changed(0, default=[]) not in (changed(0, default=None), changed(0, default=""), changed(0, default="()"))


# --- model ---


def model(**options: Any) -> st.Model:
    return st.Model(options.pop("schema", schema()), options.pop("graph", lambda inputs: None), **options)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("schema", "user"),
        ("graph", "graph"),
        ("embedding_optimizer", "adam"),
        ("dense_optimizer", 0.1),
        ("dense_optimizer", st.FTRL()),
        ("dense_optimizer", st.RowWiseAdagrad()),
        ("reduction", "none"),
        ("name", ""),
        ("name", "a b"),
        ("name", "a/b"),
        ("name", 3),
        ("seed", 1.5),
        ("seed", True),
        ("loss", "categorical_crossentropy"),
        ("loss", None),
        ("loss", ["huber"]),
    ],
)
def test_option_of_a_model_out_of_range(option: str, value: Any) -> None:
    refused(lambda: model(**{option: value}), option, repr(value))


def test_loss_per_label() -> None:
    two = schema(label=["click", "rating"])
    made = model(schema=two, loss={"click": "binary_crossentropy", "rating": "mean_squared_error"})
    assert [label.kind for label in made.labels] == ["binary", "real"]
    refused(lambda: model(schema=two, loss={"click": "huber"}), "loss", "'rating'")
    refused(lambda: model(loss={"label": "huber", "stars": "huber"}), "loss", "'stars'", "label")


def test_loss_weights_per_label() -> None:
    two = schema(label=["click", "rating"])
    assert model(schema=two, loss_weights={"rating": 0.5}).loss_weights == {"click": 1.0, "rating": 0.5}
    assert model(schema=two).loss_weights == {"click": 1.0, "rating": 1.0}
    refused(lambda: model(loss_weights={"stars": 1.0}), "loss_weights", "'stars'")
    for bad in (float("nan"), float("inf"), "1", None, True):
        refused(partial(model, loss_weights={"label": bad}), "loss_weights", "'label'", repr(bad))


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        ("binary_crossentropy", "binary"),
        ("fake_negative_weighted", "binary"),
        ("mean_squared_error", "real"),
        ("mean_absolute_error", "real"),
        ("huber", "real"),
        ("poisson", "count"),
        (lambda y, p: p, "real"),
    ],
)
def test_kind_of_label_follows_the_loss(loss: Any, kind: str) -> None:
    assert model(loss=loss).labels == (st.Label("label", kind=kind),)  # type: ignore[arg-type]


def test_label_that_does_not_fit_its_loss() -> None:
    counts = schema(label=st.Label("clicks", kind="count"))
    refused(lambda: model(schema=counts), "label 'clicks' is count", "'binary_crossentropy'", "binary")
    assert model(schema=counts, loss=lambda y, p: p).labels[0].kind == "count"
