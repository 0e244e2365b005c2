"""Refusals in words: value, expectation and way out, the same for messages and columns."""

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import streamtrain as st
from streamtrain.model.columns import DETAILED
from streamtrain.model.features import Feature
from streamtrain.model.samples import SampleReader
from tests.models import make

SCHEMA: dict[str, Any] = {"label": "clicked", "weight": "w"}
FEATURES: list[Feature] = [
    st.Categorical("item", dim=2),
    st.Categorical("tags", dim=2, default="none"),
    st.Numeric("price"),
]
GOOD: dict[str, Any] = {"ts": 1_700_000_000, "clicked": 1, "item": "a", "price": 3, "w": 1}


def reader(**options: Any) -> SampleReader:
    return SampleReader(make(FEATURES, **SCHEMA, **options), future_after=86_400, now=lambda: 1_800_000_000)


def refused(samples: Any, **options: Any) -> list[str]:
    return [one.describe() for _, bad in reader(**options).batches(samples, 1000) for one in bad]


FIELDS: list[tuple[dict[str, Any], str]] = [
    (
        {"clicked": 5},
        "bad_label in field 'clicked': it is 5; loss 'binary_crossentropy' needs 0 or 1; for other numbers",
    ),
    (
        {"ts": 1_700_000_000_000},
        "bad_time in field 'ts': it is 1700000000000; expected seconds since the epoch; of millisec",
    ),
    ({"ts": 1_700_000_000_000_000}, "of microseconds, say so: Schema(time_format='us')"),
    (
        {"ts": "31.05.2026 12:00"},
        "such as 2026-05-31T12:00:00Z; to read it as it is, say so: Schema(time_format='%d.%m.%Y %H:%M')",
    ),
    ({"ts": 4e9}, "future: its event time is 2096-10-02T07:06:40Z; the latest that is accepted now is 2027-01-16T08:"),
    ({"w": -1}, "bad_weight in field 'w': it is -1; a weight is a number >= 0"),
    ({"item": None}, "missing_field in field 'item': it is null"),
    ({"item": "x" * 300}, "id_too_long in field 'item': it is \"xxx"),
    ({"price": 1e300}, ""),
]


@pytest.mark.parametrize(("change", "message"), FIELDS, ids=[str(change)[:40] for change, _ in FIELDS])
def test_values_are_named_alike_in_messages_and_columns(change: dict[str, Any], message: str) -> None:
    sample = GOOD | change
    of_messages = refused([sample])
    of_columns = refused(pd.DataFrame([sample]))
    if not message:
        assert of_messages == of_columns == []
        return
    assert message in of_messages[0]
    assert [text.replace(".0;", ";") for text in of_columns] == of_messages


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"price": "12 EUR"}, "wrong_type in field 'price': it is \"12 EUR\"; expected a number"),
        ({"item": 1.5}, "wrong_type in field 'item': it is 1.5; expected an id (text or an integer) or a list of ids"),
        ({"tags": ["a", None]}, "wrong_type in field 'tags': it is the list [\"a\", null]; expected an id"),
        ({"item": {"id": 1}}, "wrong_type in field 'item': it is an object; expected an id"),
        ({"ts": "31.05.2026"}, 'it is "31.05.2026"; expected seconds since the epoch, or ISO 8601 text such as 2026-'),
        ({"price": math.nan}, "missing_field in field 'price': it is null"),
        ({"price": math.inf}, "near '"),
        (
            {"clicked": "yes"},
            "expected a number; if it is the positive class, say so: Label('clicked', positive='yes')",
        ),
        ({"price": "NA"}, "missing_field in field 'price': it is \"NA\", which stands for a missing number"),
        ({"tags": ["x"] * 10_001}, "the sample has more than 10,000 ids (max_ids); limit lists with max_length"),
    ],
)
def test_types_and_times(sample: dict[str, Any], message: str) -> None:
    (found,) = refused([GOOD | sample])
    assert message in found


def test_a_missing_field_says_what_is_there() -> None:
    sample = {name: value for name, value in GOOD.items() if name != "item"}
    (found,) = refused([sample | {"itm": 3}])
    assert found == (
        "missing_field in field 'item': the sample has 'ts', 'clicked', 'price', 'w', 'itm'; "
        "if 'itm' is meant, name it 'item'"
    )
    assert refused([{}]) == ["missing_field in field 'ts': the sample has no fields"]
    (found,) = refused([{f"field{i}": i for i in range(30)}])
    assert found.endswith("'field19' and 10 more")


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (b"ts,clicked,item", "not_json: at byte 0, near 'ts,clicked,item'"),
        (b" ", "not_json: it is empty"),
        (b"[1]", "not_an_object: it is '[1]'; a sample is an object"),
        (b"\xff", "not_utf8: at byte 0, near '\\\\xff'"),
        (b'{"a": "\\q"}', "bad_escape: at byte"),
        (b"[" * 40 + b"]" * 40, "too_deep: objects and lists are nested more than 32 deep"),
        (b'"' + b"a" * (1 << 20) + b'"', "too_large: it has 1,048,578 bytes; max_message_bytes is 1,048,576"),
    ],
)
def test_messages_that_are_no_samples(message: bytes, text: str) -> None:
    (found,) = refused([message])
    assert text in found


def test_only_the_first_of_a_batch_are_described() -> None:
    bad = [one for _, refused in reader().batches([{}] * 100, 1000) for one in refused]
    assert [bool(one.detail) for one in bad] == [True] * DETAILED + [False] * (100 - DETAILED)
    huge = json.dumps(GOOD | {"item": 1.5, "note": "x" * 200_000}).encode()
    details = [one.detail for _, refused in reader().batches([huge] * 3, 10) for one in refused]
    assert details == [details[0], "", ""]
    assert details[0]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ("clicks.jsonl", "not the path 'clicks.jsonl'; read the file first, such as with open"),
        (Path("clicks.csv"), "not the path 'clicks.csv'"),
        ('{"item": 1}', "put a single one in a list"),
        (GOOD, "but 'ts' is the single value 1700000000; put a single sample in a list"),
    ],
)
def test_what_is_no_list_of_samples(samples: Any, message: str) -> None:
    with pytest.raises(TypeError, match="samples must be a list of samples") as caught:
        refused(samples)
    assert message in str(caught.value)
