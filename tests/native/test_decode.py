"""The decoder against its oracle: random schemas and samples, broken messages, hostile input."""

import functools
import json
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamtrain import _core
from tests.native.examples import examples
from tests.oracles import decode as oracle
from tests.oracles.decode import Categorical, Cross, Label, Numeric, Refused, Sample, Schema

seeds = st.integers(0, (1 << 32) - 1)

# --- comparing -------------------------------------------------------------------------------------------------------


def make_decoder(schema: Schema) -> _core.Decoder:
    return _core.Decoder(
        labels=[_core.LabelSpec(s.field, kind=s.kind, optional=s.optional, positive=s.positive) for s in schema.labels],
        categoricals=[
            _core.CategoricalSpec(s.field, max_length=s.max_length, default=s.default) for s in schema.categoricals
        ],
        crosses=[_core.CrossSpec(s.name, s.categoricals, max_length=s.max_length) for s in schema.crosses],
        numerics=[
            _core.NumericSpec(s.field, default=s.default, transform=s.transform, mean=s.mean, stddev=s.stddev)
            for s in schema.numerics
        ],
        time=schema.time,
        weight=schema.weight,
        time_format=_core.TimeFormat(schema.per_second, schema.pattern),
        max_message_bytes=schema.max_message_bytes,
        max_id_bytes=schema.max_id_bytes,
        max_ids=schema.max_ids,
        max_depth=schema.max_depth,
    )


def assert_columns(columns: _core.Columns, schema: Schema, kept: dict[int, Sample], with_labels: bool = True) -> None:
    """Assert that the columns hold exactly the samples `kept`, by message index."""
    samples = list(kept.values())
    n, features = len(samples), len(schema.categoricals) + len(schema.crosses)
    assert columns.size == n
    assert columns.kept.tolist() == list(kept)
    lists = [[sample.keys[f] for sample in samples] for f in range(features)]
    assert columns.keys.tolist() == [key for feature in lists for keys in feature for key in keys]
    assert columns.starts.tolist() == np.cumsum([0, *(sum(map(len, feature)) for feature in lists)]).tolist()
    assert columns.offsets.shape == (features, n + 1)
    assert columns.offsets.tolist() == [np.cumsum([0, *map(len, feature)]).tolist() for feature in lists]
    assert columns.single.tolist() == [all(len(keys) == 1 for keys in feature) for feature in lists]
    numeric = np.array([sample.numeric for sample in samples], np.float32).reshape(n, len(schema.numerics))
    np.testing.assert_array_equal(columns.numeric, numeric, strict=True)
    width = len(schema.labels) if with_labels else 0
    labels = np.array([sample.labels for sample in samples], np.float32).reshape(n, width)
    np.testing.assert_array_equal(columns.labels, labels, strict=True)
    np.testing.assert_array_equal(columns.weights, np.array([s.weight for s in samples], np.float32), strict=True)
    # The decoder keeps nanoseconds of ISO 8601 text, datetime microseconds.
    times = np.array([sample.time for sample in samples], np.float64)
    np.testing.assert_allclose(columns.times, times, rtol=0, atol=2e-6)
    dtypes = [columns.kept.dtype, columns.keys.dtype, columns.starts.dtype, columns.offsets.dtype, columns.single.dtype]
    assert dtypes == [np.int32, np.uint64, np.int64, np.int32, np.bool_]


def assert_as_oracle(
    decoder: _core.Decoder, schema: Schema, messages: Sequence[bytes], with_labels: bool = True
) -> dict[str, int]:
    """Assert that decoding gives what the oracle gives; return how often each reason came up."""
    columns = decoder.decode(messages, with_labels)
    errors = {index: (reason, field, position) for index, reason, field, position in columns.errors}
    outcomes = [outcome_of(schema, message, with_labels) for message in messages]
    for i, (message, outcome) in enumerate(zip(messages, outcomes, strict=True)):
        if isinstance(outcome, Sample):
            assert i not in errors, (message, errors[i])
        else:
            assert i in errors, (message, outcome)
            reason, field, position = errors[i]
            assert reason in outcome.reasons, (message, outcome, reason)
            assert outcome.field in (field, None), (message, outcome, field)
            assert -1 <= position <= len(message)
    kept = {i: outcome for i, outcome in enumerate(outcomes) if isinstance(outcome, Sample)}
    assert_columns(columns, schema, kept, with_labels)
    return Counter(reason for reason, _, _ in errors.values())


def outcome_of(schema: Schema, message: bytes, with_labels: bool) -> Sample | Refused:
    try:
        return oracle.decode(schema, message, with_labels)
    except Refused as refused:
        return refused


# --- writing samples -------------------------------------------------------------------------------------------------

FIELDS = [
    "a",
    "b",
    "user",
    "item",
    "prix €",
    "",
    'qu"ote',
    "tab\t",
    "\U0001f600",
    "nul\0",
    "x" * 40,
    "y" * 25,
    "y" * 26,
]
TEXTS = [
    "",
    "u42",
    "77",
    "c7_83a1f2",
    "Żubrówka",
    "日本語",
    "\U0001f600",
    '"',
    "\\",
    "a\nb",
    "\0",
    "/",
    "z" * 31,
    "z" * 40,
    "NA",
    "-",
    "\\N",
    "true",
]
INTEGERS = ["0", "-0", "7", "-1", "77", str(2**53 + 1), str(2**63), str(2**64), "9" * 30, "-" + "8" * 19]
REALS = ["0.0", "-0.0", "77.0", "1e3", "1.5E+2", "-2.5e-1", "0.1", "1e-400", "123456.789012", "1e22", "1e23", "0e999"]
REALS += ["2.2250738585072011e-308", "9007199254740993.0", "0.000000000000000000000000000001234", "3.4028235e38"]
TOO_LARGE = ["1e999", "-1e309", "3.5e38", "1" + "0" * 400, "1e99999999999999999999"]
TIMES = ["1700000000", "1700000000.25", "0", "-1", "253402300799", "-62135596800", "1e9"]
TIMES += [f'"{day}{rest}"' for day in ["2024-02-29", "1969-12-31", "0001-01-02"] for rest in ["", "T23:59:59.25+01:30"]]
BAD_TIMES = ["253402300800", "-62135596801", "1700000000000", '"2023-02-29"', '"yesterday"', '""', '"2024-01-01T25:00"']
SPACE = ["", "", "", " ", "\n", "\t\r ", "    "]


class Writer:
    """Writes JSON in all the ways it can be written."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def string(self, text: str) -> str:
        style = self.rng.choice(["plain", "plain", "ascii", "mixed"])
        if style == "plain":
            return json.dumps(text, ensure_ascii=False)
        if style == "ascii":
            return json.dumps(text)
        units = [json.dumps(c, ensure_ascii=False)[1:-1] if self.rng.random() < 0.5 else self.escape(c) for c in text]
        return '"' + "".join(units) + '"'

    def escape(self, c: str) -> str:
        if c == "/":
            return "\\/"
        data = c.encode("utf-16-be")
        digits = "".join(f"\\u{data[i] << 8 | data[i + 1]:04x}" for i in range(0, len(data), 2))
        return digits.upper().replace("\\U", "\\u") if self.rng.random() < 0.5 else digits

    def space(self) -> str:
        return self.rng.choice(SPACE)

    def list(self, items: Sequence[str]) -> str:
        return "[" + self.space() + f"{self.space()},{self.space()}".join(items) + self.space() + "]"

    def object(self, members: Sequence[tuple[str, str]]) -> str:
        parts = [f"{self.string(name)}{self.space()}:{self.space()}{value}" for name, value in members]
        return "{" + self.space() + f"{self.space()},{self.space()}".join(parts) + self.space() + "}"

    def anything(self, depth: int = 0) -> str:
        kind = self.rng.randrange(4 if depth > 3 else 6)
        if kind == 4:
            return self.list([self.anything(depth + 1) for _ in range(self.rng.randrange(4))])
        if kind == 5:
            names = [self.rng.choice(FIELDS) for _ in range(self.rng.randrange(4))]
            return self.object([(name, self.anything(depth + 1)) for name in names])
        return [
            lambda: self.rng.choice(["true", "false", "null"]),
            lambda: self.rng.choice(INTEGERS + REALS + TOO_LARGE),
            lambda: self.string(self.rng.choice(TEXTS)),
            self.id,
        ][kind]()

    def id(self) -> str:
        if self.rng.random() < 0.3:
            return self.rng.choice(INTEGERS)
        return self.string(self.rng.choice(TEXTS) if self.rng.random() < 0.5 else f"id{self.rng.randrange(1000)}")

    def ids(self) -> str:
        if self.rng.random() < 0.6:
            return self.id()
        return self.list([self.id() for _ in range(self.rng.choice([0, 1, 2, 3, 5, 20]))])

    def number(self) -> str:
        if self.rng.random() < 0.5:
            return self.rng.choice([*INTEGERS[:5], *REALS, "true", "false"])
        return repr(self.rng.choice([self.rng.random(), self.rng.uniform(-1e6, 1e6), self.rng.randrange(10**6)]))

    def value(self, role: str, bad: float) -> str:
        if self.rng.random() < bad:
            return self.rng.choice([self.anything(), self.rng.choice(BAD_TIMES + TOO_LARGE + ["-1", "2", "null"])])
        writers: dict[str, Callable[[], str]] = {
            "time": lambda: self.rng.choice(TIMES),
            "binary": lambda: self.rng.choice(["0", "1", "true", "false", "1.0", "0e5"]),
            "count": lambda: self.rng.choice(["0", "3", "2.5", "true"]),
            "ids": self.ids,
        }
        return writers.get(role, self.number)()

    def sample(self, schema: Schema, bad: float) -> bytes:
        """Write a sample; each value is unusable with probability `bad`."""
        members = [
            (name, self.value(role, bad)) for name, role in roles_of(schema).items() if self.rng.random() > bad / 2
        ]
        members += [(self.rng.choice([f"?{i}", "?long" * 9]), self.anything()) for i in range(self.rng.randrange(3))]
        if self.rng.random() < 0.3:
            self.rng.shuffle(members)
        if members and self.rng.random() < 0.3:  # the last of duplicate keys wins
            name, _ = self.rng.choice(members)
            members.insert(0, (name, self.anything()))
        return (self.space() + self.object(members) + self.space()).encode()


def roles_of(schema: Schema) -> dict[str, str]:
    """Return what each field is read for; if for several things, the last of them."""
    roles = {s.field: "number" for s in schema.numerics}
    roles |= {s.field: "ids" for s in schema.categoricals}
    roles |= {s.field: s.kind for s in schema.labels}
    roles |= {schema.weight: "count"} if schema.weight is not None else {}
    return roles | ({schema.time: "time"} if schema.time is not None else {})


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    """Draw a schema; now and then several of its parts read one field."""
    fields = st.sampled_from(FIELDS)
    lengths = st.sampled_from([0, 0, 1, 2, 7])
    kinds = st.sampled_from(["binary", "real", "count"])
    positives = st.none() | st.sampled_from(["u42", "1", "-1", "1.0", "", "true", "NA"])
    labels = st.builds(Label, fields, kinds, st.booleans())
    labels |= st.builds(Label, fields, st.just("binary"), st.booleans(), positives)
    transforms = st.sampled_from(["none", "log1p", "standardize"])
    defaults = st.none() | st.sampled_from([0.0, -1.5])
    stddevs = st.sampled_from([0.5, 3.0, 1e-30])
    numerics = st.builds(Numeric, fields, defaults, transforms, st.sampled_from([0.0, 2.5]), stddevs)
    defaults_of_ids = st.none() | st.lists(st.sampled_from(TEXTS[:6]), max_size=1).map(tuple)
    categoricals = draw(st.lists(st.builds(Categorical, fields, lengths, defaults_of_ids), max_size=5))
    crosses: list[Cross] = []
    if categoricals:
        indices = st.lists(st.integers(0, len(categoricals) - 1), min_size=2, max_size=4).map(tuple)
        crosses = draw(st.lists(st.builds(Cross, st.sampled_from(["x1", "x2"]), indices, lengths), max_size=2))
    return Schema(
        labels=tuple(draw(st.lists(labels, max_size=2))),
        categoricals=tuple(categoricals),
        crosses=tuple(crosses),
        numerics=tuple(draw(st.lists(numerics, max_size=4))),
        time=draw(st.none() | fields),
        per_second=draw(st.sampled_from([1.0, 1.0, 1e3, 1e9])),
        weight=draw(st.none() | fields),
        max_id_bytes=draw(st.sampled_from([256, 40, 14])),
        max_ids=draw(st.sampled_from([10_000, 10_000, 7, 2])),
        max_depth=draw(st.sampled_from([32, 5, 3])),
    )


SCHEMA = Schema(
    labels=(Label("label"), Label("dwell", "count", optional=True)),
    categoricals=(Categorical("user"), Categorical("item", default=("none",)), Categorical("genres", max_length=3)),
    crosses=(Cross("user_x_genres", (0, 2)),),
    numerics=(Numeric("price"), Numeric("age", default=30, transform="log1p")),
    time="ts",
    weight="w",
    max_message_bytes=1000,
    max_id_bytes=64,
    max_depth=5,
)
GOOD = (
    b'{"ts":1700000000.25,"label":1,"dwell":2.5,"user":"u\\u00e942","item":77,'
    b'"genres":["a","\xc3\xa9"],"price":-3.5e0,"age":40}'
)


@functools.cache
def decoder_of_schema() -> _core.Decoder:
    return make_decoder(SCHEMA)


def errors_of(message: bytes, schema: Schema = SCHEMA) -> tuple[str, str, int] | None:
    """Return reason, field and position of a message's refusal; None when it is not refused. The oracle agrees."""
    decoder = decoder_of_schema() if schema is SCHEMA else make_decoder(schema)
    assert_as_oracle(decoder, schema, [message])
    errors = decoder.decode([message]).errors
    return errors[0][1:] if errors else None


def with_value(field: str, value: str, base: bytes = GOOD) -> bytes:
    """Return a message in which the field has the value, written last."""
    return base[:-1] + f',"{field}":{value}}}'.encode()


# --- random samples --------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=examples(150))
@given(schemas(), seeds, st.booleans(), st.sampled_from([0.0, 0.01, 0.1]))
def test_random_samples_of_random_schemas(schema: Schema, seed: int, with_labels: bool, bad: float) -> None:
    writer = Writer(seed)
    decoder = make_decoder(schema)
    for count in (20, 0, 5):  # the second and third call meet the scratch space of those before
        assert_as_oracle(decoder, schema, [writer.sample(schema, bad) for _ in range(count)], with_labels)


@pytest.mark.parametrize("bad", [0.01, 0.5, 1.0])
@given(seed=seeds)
@settings(deadline=None, max_examples=examples(20))
def test_bad_messages_leave_the_others_of_their_batch_alone(bad: float, seed: int) -> None:
    rng = random.Random(seed)
    writer = Writer(seed)
    breakers: list[Callable[[bytes], bytes]] = [
        lambda m: m.strip()[: rng.randrange(len(m.strip()))],
        lambda m: with_value("user", "1.5", m.strip()),
        lambda m: with_value("price", '"1"', m.strip()),
        lambda m: m + b"}",
        lambda m: m + b" " * 1000,
        lambda m: m.replace(b'"', b"\xff", 1),
    ]
    good = [writer.sample(SCHEMA, 0.0) for _ in range(100)]
    broken = [rng.choice(breakers)(m) if rng.random() < bad else m for m in good]
    columns = decoder_of_schema().decode(broken)
    spoiled = {error[0] for error in columns.errors}
    assert spoiled >= {i for i, (a, b) in enumerate(zip(good, broken, strict=True)) if a != b}
    assert_as_oracle(decoder_of_schema(), SCHEMA, broken)


def test_every_truncation_is_refused() -> None:
    assert errors_of(GOOD) is None
    messages = [GOOD[:i] for i in range(len(GOOD))]
    counts = assert_as_oracle(decoder_of_schema(), SCHEMA, messages)
    assert sum(counts.values()) == len(messages)


def test_every_flip_of_a_bit_agrees_with_the_oracle() -> None:
    messages = [GOOD[:i] + bytes([GOOD[i] ^ 1 << bit]) + GOOD[i + 1 :] for i in range(len(GOOD)) for bit in range(8)]
    counts = assert_as_oracle(decoder_of_schema(), SCHEMA, messages)
    assert counts.keys() >= {"not_json", "not_utf8", "bad_escape", "missing_field"}


@settings(deadline=None, max_examples=examples(100))
@given(seeds)
def test_random_mutations_agree_with_the_oracle(seed: int) -> None:
    rng = random.Random(seed)
    writer = Writer(seed)
    pieces = [
        b'"',
        b"\\",
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"-",
        b".",
        b"e",
        b"0",
        b"\\ud83d",
        b"\\u00",
        b"NaN",
        b"\0",
    ]
    pieces += [b"\xef\xbb\xbf", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"null", b"-Infinity", b"\x1f", b" "]
    messages = []
    for _ in range(40):
        message = bytearray(writer.sample(SCHEMA, 0.02))
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(message))
            length = rng.choice([0, 0, 1, 1, 4])
            message[at : at + length] = rng.choice([rng.choice(pieces), rng.randbytes(1), b"", message[:length]])
        messages.append(bytes(message))
    assert_as_oracle(decoder_of_schema(), SCHEMA, messages)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40)))
def test_random_bytes_agree_with_the_oracle(messages: list[bytes]) -> None:
    assert_as_oracle(decoder_of_schema(), SCHEMA, messages)


# --- one thing at a time ---------------------------------------------------------------------------------------------

REFUSED = [
    (GOOD + b" " * 1000, "too_large", ""),
    (b'{"\xc0\x80":1}', "not_utf8", ""),
    (b'{"\xed\xa0\x80":1}', "not_utf8", ""),
    (b'{"\xf4\x90\x80\x80":1}', "not_utf8", ""),
    (GOOD + b"\xe2\x82", "not_utf8", ""),
    (b"", "not_json", ""),
    (b"\xef\xbb\xbf" + GOOD, "not_json", ""),
    (GOOD + b"x", "not_json", ""),
    (GOOD + b"\0", "not_json", ""),
    (GOOD + GOOD, "not_json", ""),
    (GOOD[:-1] + b",}", "not_json", ""),
    (b'{"?":"a\nb"}', "not_json", ""),
    (b'{"?":"a\0b"}', "not_json", ""),
    (with_value("price", "01"), "not_json", "price"),
    (with_value("price", "+1"), "not_json", "price"),
    (with_value("price", ".5"), "not_json", "price"),
    (with_value("price", "1."), "not_json", "price"),
    (with_value("price", "1e"), "not_json", "price"),
    (with_value("price", "-"), "not_json", "price"),
    (with_value("price", "0x10"), "not_json", ""),
    (with_value("price", "True"), "not_json", "price"),
    (with_value("?", '{"a":[1,]}'), "not_json", ""),
    (with_value("?", '{"a" 1}'), "not_json", ""),
    (with_value("?", "{1:1}"), "not_json", ""),
    (with_value("?", '"\\x"'), "bad_escape", ""),
    (with_value("user", '"\\u12g4"'), "bad_escape", "user"),
    (with_value("?", '"\\ud83d"'), "bad_escape", ""),
    (with_value("?", '"\\ude00\\ud83d"'), "bad_escape", ""),
    (with_value("?", '"\\ud83d\\u0041"'), "bad_escape", ""),
    (with_value("\\ud83d", "1"), "bad_escape", ""),
    (with_value("?", "[[[[[]]]]]"), "too_deep", ""),
    (with_value("genres", "[[[[[]]]]]"), "too_deep", "genres"),
    (b"[" * 900, "too_deep", ""),
    (b'{"a":' * 190, "too_deep", ""),
    (b"[1]", "not_an_object", ""),
    (b' "x" ', "not_an_object", ""),
    (b"null", "not_an_object", ""),
    (with_value("?", "NaN"), "not_finite", ""),
    (with_value("price", "NaN"), "not_finite", "price"),
    (with_value("price", "Infinity"), "not_finite", "price"),
    (with_value("price", "-Infinity"), "not_finite", "price"),
    (with_value("price", "1e999"), "not_finite", "price"),
    (with_value("price", "-1e39"), "not_finite", "price"),
    (with_value("price", "9" * 400), "not_finite", "price"),
    (with_value("label", "1e999"), "not_finite", "label"),
    (with_value("dwell", "1e39"), "not_finite", "dwell"),
    (with_value("w", "1e39"), "not_finite", "w"),
    (with_value("ts", "1e999"), "not_finite", "ts"),
    (b"{}", "missing_field", "ts"),
    (with_value("ts", "null"), "missing_field", "ts"),
    (with_value("label", "null"), "missing_field", "label"),
    (with_value("user", "null"), "missing_field", "user"),
    (with_value("price", "null"), "missing_field", "price"),
    (with_value("price", '"1"'), "wrong_type", "price"),
    (with_value("price", "[1]"), "wrong_type", "price"),
    (with_value("label", '"1"'), "wrong_type", "label"),
    (with_value("w", "true"), "wrong_type", "w"),
    (with_value("ts", "true"), "wrong_type", "ts"),
    (with_value("ts", "{}"), "wrong_type", "ts"),
    (with_value("user", "77.0"), "wrong_type", "user"),
    (with_value("user", "1e3"), "wrong_type", "user"),
    (with_value("user", "true"), "wrong_type", "user"),
    (with_value("user", "{}"), "wrong_type", "user"),
    (with_value("genres", '["a",null]'), "wrong_type", "genres"),
    (with_value("genres", '["a",["b"]]'), "wrong_type", "genres"),
    (with_value("genres", '[1.5,"a","b","c"]'), "wrong_type", "genres"),
    (with_value("ts", '"now"'), "bad_time", "ts"),
    (with_value("ts", "1700000000000"), "bad_time", "ts"),
    (with_value("label", "2"), "bad_label", "label"),
    (with_value("label", "0.5"), "bad_label", "label"),
    (with_value("dwell", "-1"), "bad_label", "dwell"),
    (with_value("w", "-0.1"), "bad_weight", "w"),
    (with_value("user", '"' + "é" * 33 + '"'), "id_too_long", "user"),
    (with_value("user", "1" * 65), "id_too_long", "user"),
    (with_value("genres", '["a","' + "b" * 65 + '"]'), "id_too_long", "genres"),
]


@pytest.mark.parametrize(("message", "reason", "field"), REFUSED)
def test_reasons_of_refusal(message: bytes, reason: str, field: str) -> None:
    refusal = errors_of(message)
    assert refusal is not None
    assert refusal[:2] == (reason, field)


def test_cross_of_long_lists_is_refused() -> None:
    schema = Schema(
        categoricals=(Categorical("a"), Categorical("b"), Categorical("c")),
        crosses=(Cross("x", (0, 1, 2), max_length=2),),
        max_ids=1 << 20,
    )
    sixteen, many = list(range(16)), list(range(5000))
    for lists, refused in [
        ((sixteen, sixteen, sixteen), False),
        ((sixteen, sixteen, [*sixteen, 1]), True),
        ((many, many, many), True),
        ((many, many, []), False),
    ]:
        message = json.dumps(dict(zip("abc", lists, strict=True))).encode()
        assert errors_of(message, schema) == (("cross_too_large", "x", -1) if refused else None)


@pytest.mark.parametrize(
    ("a", "b", "field"),
    [
        (9_998, 0, None),
        (9_000, 998, None),
        (10_001, 0, "a"),
        (9_000, 1_001, "b"),
        (10_000, 0, "cut"),
        (9_999, 0, "d"),
    ],
)
def test_more_ids_than_a_sample_may_have_are_refused(a: int, b: int, field: str | None) -> None:
    """All count that are asked for: of a list as many as max_length leaves, and a default."""
    of_list = Categorical("cut", max_length=1)
    categoricals = (Categorical("a"), Categorical("b"), of_list, Categorical("d", default=("",)))
    message = json.dumps({"a": list(range(a)), "b": list(range(b)), "cut": list(range(20_000))}).encode()
    assert errors_of(message, Schema(categoricals=categoricals)) == (field and ("too_many_ids", field, -1))


@pytest.mark.parametrize(("max_ids", "refused"), [(3_720, False), (3_719, True)])
def test_ids_of_a_cross_count_like_others(max_ids: int, refused: bool) -> None:
    schema = Schema(categoricals=(Categorical("a"), Categorical("b")), crosses=(Cross("x", (0, 1)),), max_ids=max_ids)
    message = json.dumps({"a": list(range(60)), "b": list(range(60))}).encode()
    assert errors_of(message, schema) == (("too_many_ids", "x", -1) if refused else None)


def test_a_refused_list_leaves_no_ids_behind() -> None:
    schema = Schema(categoricals=(Categorical("a"), Categorical("b")), max_ids=4)
    messages = [json.dumps({"a": a, "b": b}).encode() for a, b in (([1], [2]), ([3, 4], [5, 6, 7]), ([8], [9]))]
    assert_as_oracle(make_decoder(schema), schema, messages)
    assert make_decoder(schema).decode(messages).keys.size == 4


def test_every_reason_is_tested_and_named() -> None:
    assert {reason for _, reason, _ in REFUSED} | {"cross_too_large", "too_many_ids"} == set(_core.DECODE_REASONS)
    assert len(set(_core.DECODE_REASONS)) == len(_core.DECODE_REASONS)


def test_every_reason_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "samples.md").read_text()
    documented = tuple(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert documented[: len(_core.DECODE_REASONS)] == _core.DECODE_REASONS  # those of other formats follow


def test_positions_of_refusals() -> None:
    bad = with_value("genres", '["a", null]')
    assert errors_of(bad) == ("wrong_type", "genres", bad.index(b"null"))
    bad = with_value("price", '  "1"')
    assert errors_of(bad) == ("wrong_type", "price", bad.index(b'"1"'))
    assert errors_of(GOOD + b"x") == ("not_json", "", len(GOOD))
    assert errors_of(b'{"a": "\xff"}') == ("not_utf8", "", 7)
    assert errors_of(b'{"a": "b\\x"}') == ("bad_escape", "", 8)
    assert errors_of(b"{}") == ("missing_field", "ts", -1)


def test_first_failure_in_the_order_of_the_schema_stands() -> None:
    bad = {"price": "x", "age": "x", "genres": {}, "item": {}, "user": {}, "w": -1, "dwell": -1, "label": 2, "ts": ""}
    good = {"ts": 1, "label": 1, "dwell": 1, "w": 1, "user": "u", "item": "i", "genres": [], "price": 1, "age": 1}
    for field, value in good.items():
        refusal = errors_of(json.dumps(bad).encode())
        assert refusal is not None
        assert refusal[1] == field
        bad[field] = value
    assert errors_of(json.dumps(bad).encode()) is None


def test_an_overwritten_value_does_not_matter() -> None:
    values = [("user", "{}", '"u"'), ("price", "1e999", "2"), ("ts", '"x"', "3"), ("label", "null", "true")]
    values += [("genres", "[1.5]", "[]"), ("genres", "[]", '"a"'), ("genres", '["a","b"]', '["c"]')]
    good = [with_value(field, f'{bad},"{field}":{fine}') for field, bad, fine in values]
    assert assert_as_oracle(decoder_of_schema(), SCHEMA, good) == {}
    assert errors_of(with_value("price", 'NaN,"price":1')) is not None


def test_an_integer_and_its_text_are_one_id() -> None:
    schema = Schema(categoricals=(Categorical("a"),))
    texts = ["77", "0", "-5", str(2**64), "9" * 256]
    message = json.dumps({"a": texts}).encode()
    numbers = message.replace(b'"', b"").replace(b"a", b'"a"').replace(b"[77, 0", b"[77, -0")
    columns = make_decoder(schema).decode([message, numbers])
    assert columns.errors == []
    assert columns.keys[: len(texts)].tolist() == columns.keys[len(texts) :].tolist()
    assert columns.keys[0] == _core.hash_integers(np.array([77]))[0]


def test_without_labels_neither_label_nor_weight_is_read() -> None:
    message = b'{"label":"?","w":-1,"user":"u","genres":[],"price":1}'
    columns = decoder_of_schema().decode([message, GOOD, with_value("ts", "null"), with_value("ts", "{}")], False)
    assert columns.labels.shape == (3, 0)
    assert columns.weights.tolist() == [1, 1, 1]
    assert columns.times.tolist() == [0, 1700000000.25, 0]
    assert columns.errors == [(3, "wrong_type", "ts", len(GOOD) + 5)]


def test_a_refused_weight_does_not_stay() -> None:
    schema = Schema(weight="w", numerics=(Numeric("x"),))
    messages = [b'{"w":5,"x":"?"}', b'{"x":1}', b'{"w":-5,"x":1}', b'{"x":2}']
    assert make_decoder(schema).decode(messages).weights.tolist() == [1, 1]
    assert make_decoder(schema).decode(messages, False).weights.tolist() == [1, 1, 1]


number_texts = st.from_regex(
    re.compile(r"-?(0|[1-9]\d{0,25})(\.\d{1,25})?([eE][+-]?\d{1,3})?", re.ASCII), fullmatch=True
)


@given(st.floats(allow_nan=False, allow_infinity=False) | number_texts)
@settings(deadline=None, max_examples=examples(1000))
def test_numbers_are_correctly_rounded(number: float | str) -> None:
    text = repr(number) if isinstance(number, float) else number
    value = float(text)
    # The only column of doubles is the time: look at what is beyond its range through the float32 of numerics.
    columns = make_decoder(Schema(time="t", numerics=(Numeric("t", transform="log1p"),))).decode(
        [f'{{"t":{text}}}'.encode()]
    )
    if columns.size:
        assert columns.times[0] == value
    else:
        assert columns.errors[0][1] == ("not_finite" if abs(value) == float("inf") else "bad_time")
    errors_of(f'{{"x":{text}}}'.encode(), Schema(numerics=(Numeric("x"), Numeric("x", transform="log1p"))))


dates = st.datetimes().map(lambda d: d.isoformat(sep="T" if d.second % 2 else " "))
offsets = st.sampled_from(["", "Z", "+00:00", "-23:59", "+0530", "+07", "+24:00", "z", "+5", "+05:", "+05:60", "UTC"])
forms = st.from_regex(r"\d{4}-[01]\d-[0-3]\d([T ][012]\d:[0-6]\d(:[0-6]\d([.,]\d{0,12})?)?)?", fullmatch=True)


@settings(deadline=None, max_examples=examples(500))
@given(dates | forms, offsets)
def test_iso_8601_times(date: str, offset: str) -> None:
    errors_of(json.dumps({"t": date + offset}).encode(), Schema(time="t"))


@settings(deadline=None, max_examples=examples(300))
@given(st.text(st.characters(max_codepoint=0x2FF) | st.sampled_from("0123456789-:TZ+. "), max_size=30))
def test_other_texts_are_no_times(text: str) -> None:
    errors_of(json.dumps({"t": text}).encode(), Schema(time="t"))


# --- hostile input ---------------------------------------------------------------------------------------------------


def test_large_messages() -> None:
    schema = Schema(categoricals=(Categorical("a", max_length=2),), max_message_bytes=16 << 20, max_depth=256)
    decoder = make_decoder(schema)
    pad = b"x" * (10 << 20)
    many = b'{"a":[' + b"1," * (1 << 20) + b"2]}"
    messages = [b'{"b":"' + pad + b'"}', b'{"a":"u","b":"' + pad + b'"}', many, b'{"a":3}', b'{"a":"' + pad + b'"}']
    messages += [b"[" * (10 << 20), b"1" * (10 << 20), b'{"a":1' + b"0" * (1 << 20) + b"}", b" " * (10 << 20)]
    columns = decoder.decode(messages)
    assert columns.kept.tolist() == [1, 2, 3]
    assert columns.offsets.tolist() == [[0, 1, 3, 4]]
    reasons = [error[1] for error in columns.errors]
    assert reasons == ["missing_field", "id_too_long", "too_deep", "not_an_object", "id_too_long", "not_json"]


def test_a_message_over_the_limit_is_not_read() -> None:
    columns = decoder_of_schema().decode([b"\xff" * 1001, GOOD])
    assert columns.errors == [(0, "too_large", "", -1)]
    assert columns.kept.tolist() == [1]


def test_strings_end_anywhere_in_a_block_of_bytes() -> None:
    schema = Schema(categoricals=(Categorical("a"),))
    messages = [
        f'{{"{"k" * key}":0,"a":"{"v" * size}{tail}"}}'.encode()
        for key in range(36)
        for size in range(60)
        for tail in ["", "\\n", "é", '\\"' * 3]
    ]
    assert assert_as_oracle(make_decoder(schema), schema, messages) == {}


def test_depth_is_counted_from_the_sample() -> None:
    for depth in (1, 2, 3, 256):
        schema = Schema(max_depth=depth)
        for kind in ("[]", "{}"):
            for levels in (depth - 1, depth):
                inner = "1"
                for _ in range(levels):
                    inner = f"[{inner}]" if kind == "[]" else f'{{"k":{inner}}}'
                refusal = errors_of(f'{{"x":{inner}}}'.encode(), schema)
                assert (refusal is None) == (levels < depth)


def test_threads_may_share_a_decoder() -> None:
    messages = [Writer(i).sample(SCHEMA, 0.1) for i in range(300)]
    expected = make_decoder(SCHEMA).decode(messages)
    shared = make_decoder(SCHEMA)
    same: list[bool] = []

    def run() -> None:
        for _ in range(20):
            columns = shared.decode(messages)
            same.append(columns.keys.tolist() == expected.keys.tolist() and columns.errors == expected.errors)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same == [True] * 80


# --- the interface ---------------------------------------------------------------------------------------------------


def test_nothing_to_decode() -> None:
    columns = decoder_of_schema().decode([])
    assert_columns(columns, SCHEMA, {})
    assert_columns(make_decoder(Schema()).decode((b"{}",)), Schema(), {0: Sample()})


@pytest.mark.parametrize("messages", [["{}"], [bytearray(b"{}")], [None], [b"{}", 1], b"{}"])
def test_messages_are_bytes(messages: Any) -> None:
    with pytest.raises(TypeError, match="messages must be bytes"):
        decoder_of_schema().decode(messages)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: _core.LabelSpec("x", kind="ordinal"), "kind must be"),  # type: ignore[arg-type]
        (lambda: _core.NumericSpec("x", transform="sqrt"), "transform must be"),  # type: ignore[arg-type]
        (lambda: make_decoder(Schema(numerics=(Numeric("x", transform="standardize", stddev=0),))), "positive"),
        (lambda: make_decoder(Schema(numerics=(Numeric("x", default=float("nan")),))), "not finite"),
        (lambda: make_decoder(Schema(numerics=(Numeric("x", default=1e39),))), "not finite"),
        (
            lambda: make_decoder(Schema(categoricals=(Categorical("x", default=("y" * 257,)),))),
            "longer than max_id_bytes",
        ),
        (
            lambda: make_decoder(Schema(categoricals=(Categorical("x"),), crosses=(Cross("c", (0,)),))),
            "between 2 and 8",
        ),
        (lambda: make_decoder(Schema(categoricals=(Categorical("x"),), crosses=(Cross("c", (0,) * 9),))), "between 2"),
        (lambda: make_decoder(Schema(categoricals=(Categorical("x"),), crosses=(Cross("c", (0, 1)),))), "not there"),
        (lambda: make_decoder(Schema(max_depth=0)), "max_depth"),
        (lambda: make_decoder(Schema(max_depth=257)), "max_depth"),
        (lambda: make_decoder(Schema(max_message_bytes=1 << 31)), "max_message_bytes"),
    ],
)
def test_specs_are_checked(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_arrays_outlive_their_decoder() -> None:
    columns = make_decoder(SCHEMA).decode([GOOD])
    keys = columns.keys
    del columns
    assert keys[1] == _core.hash_bytes(b"77")


# --- labels of other classes, missing numbers, times of other forms --------------------------------------------------


@pytest.mark.parametrize(
    ("positive", "values", "expected"),
    [
        ("yes", ['"yes"', '"no"', '"Yes"', "1", "true"], [1, 0, 0, 0, 0]),
        ("1", ["1", "-1", "1.0", '"1"', "2", "1e0", "true", "false"], [1, 0, 1, 1, 0, 1, 1, 0]),
        ("0", ["0", "false", "1", "true"], [1, 1, 0, 0]),
        ("true", ["true", "false", '"true"', '"True"'], [1, 0, 1, 0]),
        (">50K", ['">50K"', '"<=50K"'], [1, 0]),
        ("-", ['"-"', '"+"'], [1, 0]),
    ],
)
def test_a_label_has_a_positive_class(positive: str, values: list[str], expected: list[float]) -> None:
    schema = Schema(labels=(Label("y", positive=positive),))
    decoder = make_decoder(schema)
    messages = [f'{{"y": {value}}}'.encode() for value in values]
    assert_as_oracle(decoder, schema, messages)
    assert decoder.decode(messages).labels[:, 0].tolist() == expected


def test_only_a_binary_label_has_a_positive_class() -> None:
    with pytest.raises(ValueError, match='label "y" has a positive class and is not binary'):
        make_decoder(Schema(labels=(Label("y", "real", positive="1"),)))


@pytest.mark.parametrize("text", oracle.BLANKS)
def test_texts_that_stand_for_a_missing_number(text: str) -> None:
    given = json.dumps(text)
    assert errors_of(with_value("age", given)) is None
    assert errors_of(with_value("w", given)) is None
    assert errors_of(with_value("dwell", given)) is None
    assert errors_of(with_value("item", given)) is None  # an id as any other
    assert errors_of(with_value("price", given)) == ("missing_field", "price", -1)
    assert errors_of(with_value("label", given)) == ("missing_field", "label", -1)
    decoded = decoder_of_schema().decode(
        [with_value("age", given), with_value("age", "null"), with_value("item", given)]
    )
    assert decoded.numeric[0].tolist() == decoded.numeric[1].tolist()
    assert errors_of(with_value("age", json.dumps(f"{text} "))) == ("wrong_type", "age", len(GOOD) + 6)


FORMS = [
    ("%m/%d/%Y %H:%M:%S", ["01/31/2024 00:00:00", "1/3/2024 7:05:09", "02/30/2024 00:00:00", "13/01/2024 00:00:00"]),
    ("%m/%d/%Y %H:%M", ["01/31/2024 23:59", "01/31/2024", "01/31/2024 24:00", "01/31/2024 00:00 ", "", "2024-01-31"]),
    ("%d.%m.%Y", ["31.01.2024", "1.2.2024", "31.02.2024", "31.01.24"]),
    ("%m/%d/%y %I:%M %p", ["01/31/24 12:00 AM", "01/31/68 12:30 pm", "01/31/69 01:30 PM", "01/31/24 13:00 PM"]),
    (
        "%d/%b/%Y:%H:%M:%S %z",
        ["31/Jan/2024:23:59:59 +0130", "01/feb/2024:00:00:00 -0800", "01/Foo/2024:00:00:00 +0000"],
    ),
    ("%Y%m%d%H%M%S", ["20240131235959", "20240231235959"]),
    ("%Y-%m-%d %H:%M:%S.%f %z", ["2024-01-31 01:02:03.250000 +00:00", "2024-01-31 01:02:03. +00:00"]),
]


@pytest.mark.parametrize(("pattern", "texts"), FORMS)
def test_times_of_other_forms(pattern: str, texts: list[str]) -> None:
    schema = Schema(time="ts", pattern=pattern)
    messages = [json.dumps({"ts": text}).encode() for text in texts]
    reasons = assert_as_oracle(make_decoder(schema), schema, [*messages, b'{"ts": 1700000000}'])
    assert reasons.keys() <= {"bad_time"}
    assert sum(reasons.values()) < len(texts)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("%Y-%j", "%j is not one of"),
        ("%Y-%m-%d%", "% is not one of"),
        ("%Y-%m", "it needs a year"),
        ("%H:%M", "it needs a year"),
        ("%Y-%m-%d %Y", "%Y is there twice"),
    ],
)
def test_patterns_that_say_no_time(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        _core.TimeFormat(pattern=pattern)


@given(st.text("%YmdybHIpMSfz /:.-", max_size=20), st.text("0123456789/:. -APMJanFeb+Z", max_size=30))
def test_no_pattern_and_no_text_do_harm(pattern: str, text: str) -> None:
    try:
        decoder = make_decoder(Schema(time="ts", pattern=pattern))
    except ValueError:
        return
    columns = decoder.decode([json.dumps({"ts": text}).encode()])
    begin, end = _core.TIME_RANGE
    assert all(begin <= one < end for one in columns.times)
