"""What a field is, by its values; and the model file that says so is the model that learns."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

import streamtrain as st
from streamtrain.errors import ConfigError
from streamtrain.model.inferred_schema import INFERRED_SAMPLES, InferredSchema, infer_schema

COUNT = 1000


def column(values: Any) -> list[dict[str, Any]]:
    """Samples of one field of which there are `values`, and of a label."""
    return [{"x": value, "y": i % 2} for i, value in enumerate(values)]


def judged(values: Any, name: str = "x", **options: Any) -> tuple[str, str]:
    """Role and reason of a field beside one that can be learned."""
    samples = [{name: value, "other": f"o{i % 3}", "y": i % 2} for i, value in enumerate(values)]
    [found] = [one for one in infer_schema(samples, "y", **options).fields if one.name == name]
    return found.role, found.why


RANDOM = random.Random(0)
AGES = [int(RANDOM.gauss(40, 12)) for _ in range(COUNT)]
TITLES = [" ".join(RANDOM.choice(["war", "of", "the", "worlds", "in", "time"]) for _ in range(6)) for _ in range(COUNT)]


@pytest.mark.parametrize(
    ("name", "values", "role", "why"),
    [
        ("user", [f"u{i % 70}" for i in range(COUNT)], "id", "70 different values"),
        ("hour", [i % 24 for i in range(COUNT)], "id", "24 different integers"),
        ("zip", [10_000 + i % 400 for i in range(COUNT)], "id", "called an id, 400 different values"),
        ("userId", [float(i % 400) for i in range(COUNT)], "id", "called an id, 400 different values"),
        ("age", AGES, "id and number", "different integers, each"),
        ("cents", [i * i for i in range(COUNT)], "number", "1,000 different integers"),
        ("price", [i / 7 for i in range(COUNT)], "number", "numbers with fractions"),
        ("price", [None, "NA", *(i / 7 for i in range(COUNT - 2))], "number", "numbers with fractions, 0% missing"),
        ("price", [i / 7 if i % 4 else "?" for i in range(COUNT)], "number", "numbers with fractions, 25% missing"),
        ("mobile", [i % 3 == 0 for i in range(COUNT)], "number", "true or false"),
        ("tags", [[f"t{i % 5}", f"t{i % 7}"][: i % 3] for i in range(COUNT)], "list", "lists of 7 different ids"),
        ("vector", [[0.5, i] for i in range(COUNT)], "left out", "lists of what is neither text nor integers"),
        ("", [*range(COUNT)], "left out", "counts the rows"),
        ("", [i * 7919 % COUNT for i in range(COUNT)], "left out", "it has no name"),
        ("uuid", [f"{i:x}" for i in range(COUNT)], "left out", "never the same twice"),
        ("price", [f"{i}.5" for i in range(COUNT)], "left out", "never the same twice; numbers in quotes are text"),
        ("price", [f"{i % 9}.5" for i in range(COUNT)], "id", "9 different values; numbers in quotes are text"),
        ("session_id", [7 * i for i in range(COUNT)], "left out", "never the same twice"),
        ("country", ["DE"] * COUNT, "left out", "always the same"),
        ("promo", ["x", *[None] * (COUNT - 1)], "id", "1 different values, 100% missing"),
        ("number", [2**70 + i % 50 for i in range(COUNT)], "id", "50 different integers, too large for numbers"),
        ("unique", [f"{title} {i}" for i, title in enumerate(TITLES)], "words", "texts of 7 words"),
        ("empty", [None] * COUNT, "left out", "no values"),
        ("place", [{"lat": 1}] * COUNT, "left out", "objects"),
        ("title", TITLES, "words", "texts of 6 words"),
    ],
)
def test_what_a_field_is(name: str, values: list[Any], role: str, why: str) -> None:
    found = judged(values, name)
    assert found[0] == role
    assert why in found[1]


def test_text_of_several_parts_is_split() -> None:
    genres = ["Comedy", "Comedy|Drama", "Drama|War|Western"]
    samples = [{"genres": genres[i % 3], "title": TITLES[i], "y": i % 2} for i in range(COUNT)]
    found = infer_schema(samples, "y")
    assert [one.role for one in found.fields] == ["list", "words", "label"]
    assert found.lists == {"genres": "|", "title": " "}
    told = infer_schema(samples, "y", text=["genres", "title"], lists={"tags": ","})
    assert [one.role for one in told.fields] == ["id", "id", "label"]
    assert told.text == {"genres", "title"}
    assert told.lists == {"tags": ","}
    assert "read with --text genres,title --lists tags=," in told.source("films.csv")


def test_an_id_that_looks_like_something_else_is_read_as_text() -> None:
    samples = [{"seat": ["12A", 7, 12.5, True][i % 4], "row_id": float(i % 9), "y": i % 2} for i in range(COUNT)]
    found = infer_schema(samples, "y")
    assert [one.role for one in found.fields[:2]] == ["id", "id"]
    assert found.text == {"seat", "row_id"}


TIMES = [1_700_000_000 + 60 * i for i in range(COUNT)]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"ts": TIMES}, "ts"),
        ({"count": TIMES}, "count"),
        ({"count": TIMES[::-1]}, None),
        ({"when": [f"2024-01-01T00:{i // 60:02}:{i % 60:02}Z" for i in range(COUNT)]}, "when"),
        ({"seen": [f"2024-01-01 00:{i // 60:02}:{i % 60:02}" for i in range(COUNT)]}, "seen"),
        ({"birth": [f"19{i % 90 + 10}-01-01" for i in range(COUNT)]}, None),
        ({"birthday": [f"19{i * 7 % 90 + 10}-01-01" for i in range(COUNT)], "ts": TIMES}, "ts"),
        ({"ts": TIMES[::-1], "created_at": TIMES}, "created_at"),
        ({"ts": random.Random(1).sample(TIMES, COUNT)}, "ts"),
        ({"ts": [None, *TIMES[1:]]}, None),
        ({"ts": range(COUNT)}, None),
        ({"count": [1_700_000_000] * COUNT}, None),
        ({"expiry_date": ["2999-01-01"] * COUNT}, None),
        ({"ts": [1000 * one for one in TIMES]}, "ts"),
        ({"day": [f"{i // 50 + 1:02}/{i // 400 + 1:02}/2024" for i in range(COUNT)]}, "day"),
    ],
)
def test_which_field_is_the_event_time(columns: dict[str, Any], expected: str | None) -> None:
    samples = [
        {"user": i % 9, "y": i % 2} | {name: values[i] for name, values in columns.items()} for i in range(COUNT)
    ]
    assert infer_schema(samples, "y").schema.time == expected
    assert infer_schema(samples, "y", time="").schema.time is None
    assert infer_schema(samples, "y", time=next(iter(columns))).schema.time == next(iter(columns))


@pytest.mark.parametrize(
    ("times", "form"),
    [
        ([1000 * one for one in TIMES], "ms"),
        ([1e9 * one for one in TIMES], "ns"),
        ([f"{i // 100 + 1:02}/{i // 200 + 1:02}/2024 {i // 50:02}:00:00" for i in range(COUNT)], "%m/%d/%Y %H:%M:%S"),
        ([f"{i // 200 + 1:02}/{i // 100 + 1:02}/2024" for i in range(COUNT)], "%m/%d/%Y"),
        ([f"{i // 50 % 20 + 1:02}/{i // 600 + 1:02}/2024" for i in range(COUNT)], "%d/%m/%Y"),
        ([f"{i // 50 % 20 + 1}-Mar-24" for i in range(COUNT)], "%d-%b-%y"),
    ],
)
def test_how_times_are_written(times: list[Any], form: str) -> None:
    found = infer_schema([{"user": i % 9, "y": i % 2, "time": times[i]} for i in range(COUNT)], "y")
    assert (found.schema.time, found.schema.time_format) == ("time", form)
    assert f"time_format={json.dumps(form)}," in found.source("x")


@pytest.mark.parametrize(
    ("values", "positive", "expected", "why"),
    [
        ([0, 1], None, "y", "0 or 1, 50.00% are 1"),
        ([False, True], None, "y", "50.00% are 1"),
        ([0], None, "y", "0.00% are 1"),
        ([-1, 1, -1], None, st.Label("y", positive=1), "33.33% are 1"),
        (["no", "yes", "no"], None, st.Label("y", positive="yes"), "33.33% are yes; all others count as 0"),
        (["ja", "nein", "ja"], None, st.Label("y", positive="ja"), "66.67% are ja"),
        (["No"], None, st.Label("y", positive="Yes"), "0.00% are Yes"),
        (["<=50K", ">50K", "<=50K"], None, st.Label("y", positive=">50K"), "33.33% are >50K"),
        (["a", "b", "c"], "b", st.Label("y", positive="b"), "33.33% are b"),
        ([1, 2, 3], "3", st.Label("y", positive=3), "33.33% are 3"),
    ],
)
def test_what_the_label_is(values: list[Any], positive: str | None, expected: str | st.Label, why: str) -> None:
    samples = [{"user": i % 7, "y": values[i % len(values)]} for i in range(996)]
    found = infer_schema(samples, "y", positive=positive)
    assert (found.schema.label, found.loss) == (expected, "binary_crossentropy")
    assert why in found.fields[1].why
    decoded = st.Learner(st.Model(found.schema)).read(samples)
    assert sum(len(batch) for batch, _ in decoded) == 996


def test_a_boolean_may_be_named() -> None:
    found = infer_schema([{"user": i % 7, "y": i % 4 == 0} for i in range(COUNT)], "y", positive="true")
    assert found.fields[1].why == "25.00% are true; all others count as 0"


def test_what_is_the_same_in_the_first_samples_of_a_long_file_may_vary_later() -> None:
    samples = [{"month": 1, "rate": 0.5, "user": i % 7, "y": i % 2} for i in range(INFERRED_SAMPLES)]
    assert [one.role for one in infer_schema(samples, "y").fields[:2]] == ["id", "number"]
    assert [one.role for one in infer_schema(samples[:-1], "y").fields[:2]] == ["left out"] * 2


def test_names_that_the_graph_needs_are_left_to_it() -> None:
    names = ["user", "user_weight", "user_weight_", "price", "price_cells", "age", "age_number"]
    samples = [{name: i / 7 if "r" in name else AGES[i] for name in names} | {"y": i % 2} for i in range(COUNT)]
    found = infer_schema([one | {"user": i % 9} for i, one in enumerate(samples)], "y")
    model = st.Model(found.schema)
    assert {one.field_name for one in found.schema.features if not isinstance(one, st.Cross)} == {*names}
    assert {"user_weight", "price_cells", "age_number_"} <= {*model.schema.about()["features"]}


def test_numbers_of_many_values_are_regressed() -> None:
    found = infer_schema([{"user": i % 7, "y": i} for i in range(COUNT)], "y")
    assert (found.schema.label, found.loss) == ("y", "mean_squared_error")


@pytest.mark.parametrize(
    ("samples", "label", "message"),
    [
        (column(range(9)), "clicked", "--label: the samples have no field 'clicked'; they have 'x', 'y'"),
        ([{"x": 1, "y": one} for one in "abc" * 9], "y", r"3 different values, a \(33%\), .*: say .* --label y=b"),
        ([{"x": 1, "y": None}], "y", "--label: field 'y' holds no values"),
        ([{"x": 1, "y": "maybe"}] * 9, "y", "has 1 different values, maybe"),
        (column([7] * 9), "y", "no field but the label 'y' tells samples apart: 'x' is left out: always the same"),
    ],
)
def test_what_says_nothing_is_refused_with_the_fix(samples: list[Any], label: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        infer_schema(samples, label)


def everything() -> InferredSchema:
    samples = [
        {
            **{"ts": TIMES[i], 'qu"ote\\': f"u{i % 200}", "age": AGES[i], "price": i / 7, "tags": ["a", f"b{i % 5}"]},
            **{"ad_id": i % 3, "income": "<=50K" if i % 3 else ">50K"},
        }
        for i in range(COUNT)
    ]
    return infer_schema(samples, "income")


def test_the_model_file_is_the_model_that_learns(tmp_path: Path) -> None:
    found = everything()
    source = found.source('the "file"\n.csv')
    (tmp_path / "model.py").write_text(source)
    assert st.load_model(str(tmp_path / "model.py")).schema == st.Model(found.schema).schema
    assert 'st.Categorical("ad_id", 8, default=""),  # called an id, 3 different values' in source
    assert 'label=st.Label("income", positive=">50K"),' in source
    assert all(len(line) < 200 for line in source.splitlines())
    regression = infer_schema([{"user": i % 7, "label": i} for i in range(COUNT)], "label")
    (tmp_path / "model.py").write_text(regression.source("-"))
    assert st.load_model(str(tmp_path / "model.py")).losses == {"label": "mean_squared_error"}


def test_what_the_first_samples_lacked_is_not_refused() -> None:
    learner = st.Learner(st.Model(everything().schema))
    learned = learner.learn([{"ts": TIMES[-1], "income": ">50K"}, {"ts": TIMES[-1], "income": "<=50K", "price": "NA"}])
    assert (learned.samples, learned.bad) == (2, [])
