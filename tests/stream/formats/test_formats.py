"""A sample means the same in every format, and what cannot be read is refused with the same reasons."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import fastavro.schema
import pytest
from google.protobuf import descriptor_pb2, message_factory
from hypothesis import given
from hypothesis import strategies as some

import streamtrain as st
from streamtrain.errors import BadSample, ConfigError
from streamtrain.model.batch import Batch
from streamtrain.stream.formats.avro import AvroFormat
from streamtrain.stream.formats.factory import Format, JsonFormat, make_format
from streamtrain.stream.formats.protobuf import MessageTypes, ProtobufFormat, read_descriptor_set
from tests.stream.written import AVRO_OF_ANYTHING, FIELDS, Sample, compiled, in_avro, in_json, in_protobuf, model, same

ROOT = Path(__file__).parents[3]
GOOD: dict[str, Any] = {
    "ts": 1.7e9,
    "label": 1.0,
    "stars": 4.5,
    "w": 2.0,
    "user": "u1",
    "tags": ["a", "b"],
    "price": 3.5,
}

MODEL = model(max_id_bytes=8, max_ids=5)
IN_JSON = JsonFormat(MODEL)
ANY_AVRO = AvroFormat(MODEL, schema=AVRO_OF_ANYTHING)
SAMPLE_AVRO = AvroFormat(MODEL)
SAMPLE_PROTOBUF = ProtobufFormat(MODEL)

TEXTS = some.text(some.characters(exclude_categories=["Cs"]), max_size=10) | some.sampled_from(
    ["null", "77", "2024-02-29T12:00:00.25+01:00", "2024-02-29"]
)
INTEGERS = some.integers(-(2**63), 2**63 - 1) | some.integers(-2, 2) | some.sampled_from([2**53 + 1, -(2**53) - 1])
NUMBERS = some.floats() | some.sampled_from([0.0, -0.0, 1e-320, 1e300, 77.0])
ITEMS = some.none() | some.booleans() | INTEGERS | NUMBERS | TEXTS
ANY_VALUES = ITEMS | some.lists(ITEMS, max_size=5)
ANY_SAMPLES = some.lists(
    some.fixed_dictionaries(
        {},
        optional={
            **dict.fromkeys(FIELDS, ANY_VALUES),
            "ts": some.floats(-1e11, 1e12) | some.just(GOOD["ts"]) | TEXTS,
            "label": some.sampled_from([0, 1, True, 1.0, 0.5, None]),
            "user": INTEGERS | TEXTS | some.lists(INTEGERS | TEXTS, max_size=4),
            "unread": some.just({"a": "b"}) | some.lists(TEXTS),
        },
    ).map(lambda changes: GOOD | changes),
    max_size=6,
)


def assert_as_in_json(decoded: tuple[Batch, list[BadSample]], samples: list[Sample]) -> None:
    """Assert that what was decoded is what JSON says; of several faults of a sample, either may be the one named."""
    batch, bad = IN_JSON.decode([in_json(one) for one in samples])
    for i, (one, other) in enumerate(zip(decoded[1], bad, strict=True)):
        if one != other and one.field in samples[one.index]:
            with_it_first = {one.field: samples[one.index][one.field], **samples[one.index]}
            [named] = IN_JSON.decode([in_json(with_it_first)])[1]
            bad[i] = replace(named, index=other.index)
    same(decoded, (batch, bad))


@given(ANY_SAMPLES)
def test_anything_means_the_same_in_all_formats(samples: list[Sample]) -> None:
    in_order = [{name: one.get(name) for name in (*FIELDS, "unread")} for one in samples]
    assert_as_in_json(ANY_AVRO.decode([in_avro(one) for one in in_order]), samples)
    without_map = [{name: one[name] for name in one if name != "unread"} for one in samples]
    assert_as_in_json(SAMPLE_PROTOBUF.decode([in_protobuf(one) for one in without_map]), samples)


IDS = INTEGERS | TEXTS
TYPED_SAMPLES = some.lists(
    some.fixed_dictionaries(
        {"ts": some.none() | some.floats() | TEXTS, "label": some.none() | some.floats()},
        optional={
            "user": some.none() | IDS | some.lists(IDS),
            "price": some.none() | INTEGERS | NUMBERS | some.booleans(),
        },
    ).map(lambda changes: GOOD | changes),
    max_size=5,
)


@given(TYPED_SAMPLES)
def test_the_schema_that_is_there_takes_samples_of_any_model(samples: list[Sample]) -> None:
    schema = json.loads((ROOT / "schemas" / "sample.avsc").read_text())
    own = ("ts", "label", "weight")
    written = [
        {name: one.get(name) for name in own} | {"features": {n: v for n, v in one.items() if n not in own}}
        for one in samples
    ]
    assert_as_in_json(SAMPLE_AVRO.decode([in_avro(one, schema) for one in written]), samples)


# --- Avro ---


def avro(name: str, kind: Any) -> dict[str, Any]:
    """A schema like that of GOOD, but for one field."""
    kinds = {"ts": "double", "label": "double", "user": "string", "price": "double"} | {name: kind}
    return {"type": "record", "name": "Click", "fields": [{"name": n, "type": k} for n, k in kinds.items()]}


def small(**changes: Any) -> dict[str, Any]:
    return {name: GOOD[name] for name in ("ts", "label", "user", "price")} | changes


def logical(base: str, kind: str, **options: Any) -> dict[str, Any]:
    return {"type": base, "logicalType": kind, **options}


MOMENT = datetime(2024, 2, 29, 12, 0, 0, 250_000, UTC)
DECIMAL = logical("bytes", "decimal", precision=9, scale=2)
FIXED = {"type": "fixed", "name": "Money", "size": 6, "logicalType": "decimal", "precision": 9, "scale": 2}


@pytest.mark.parametrize(
    ("name", "kind", "value", "in_words_of_json"),
    [
        ("ts", logical("long", "timestamp-millis"), MOMENT, MOMENT.timestamp()),
        ("ts", ["null", logical("long", "timestamp-micros")], MOMENT, MOMENT.timestamp()),
        ("ts", logical("int", "date"), MOMENT.date(), "2024-02-29"),
        ("ts", "string", MOMENT.isoformat(), MOMENT.isoformat()),
        ("ts", "long", 1_700_000_000, 1_700_000_000),
        ("price", DECIMAL, Decimal("-12.34"), -12.34),
        ("price", ["null", FIXED], Decimal("12.34"), 12.34),
        ("price", logical("bytes", "decimal", precision=38), Decimal(10**30), 10**30),
        ("price", "float", 0.1, 0.1),
        ("price", "int", 3, 3),
        ("price", "boolean", True, True),
        ("user", {"type": "enum", "name": "Color", "symbols": ["RED", "BLUE"]}, "BLUE", "BLUE"),
        (
            "user",
            logical("string", "uuid"),
            "7d0e8a62-2b6c-4d0e-9d0c-1f6f2a3b4c5d",
            "7d0e8a62-2b6c-4d0e-9d0c-1f6f2a3b4c5d",
        ),
        ("user", {"type": "array", "items": "long"}, [2**53 + 1, 7], [2**53 + 1, "7"]),
        ("user", ["string", "null", "long"], 77, "77"),
        ("user", "double", 77.0, 77.0),
        ("user", {"type": "array", "items": ["null", "long"]}, [None], [None]),
        ("user", "bytes", b"u1", {}),
        ("user", {"type": "fixed", "name": "Id", "size": 2}, b"u1", {}),
        ("user", {"type": "map", "values": "string"}, {"a": "b"}, {"a": "b"}),
        ("price", avro("price", "double") | {"name": "Inner"}, small(), {}),
    ],
)
def test_types_of_avro(name: str, kind: Any, value: Any, in_words_of_json: Any) -> None:
    options = model()
    expected = JsonFormat(options).decode([in_json(small(**{name: in_words_of_json}))])
    schema = avro(name, kind)
    same(AvroFormat(options, schema=schema).decode([in_avro(small(**{name: value}), schema)]), expected)


def test_time_beyond_what_python_knows_is_a_bad_time() -> None:
    schema = avro("ts", logical("long", "timestamp-millis"))
    raw = avro("ts", "long")
    _, bad = AvroFormat(MODEL, schema=schema).decode([in_avro(small(ts=2**60), raw)])
    assert [(one.reason, one.field) for one in bad] == [("bad_time", "ts")]


def test_type_that_is_named_again_keeps_its_meaning() -> None:
    schema = avro("price", FIXED)
    schema["fields"].append({"name": "age", "type": ["null", "Money"]})
    written = in_avro(small(price=Decimal("1.25"), age=Decimal("2.50")), schema)
    same(AvroFormat(MODEL, schema=schema).decode([written]), IN_JSON.decode([in_json(small(price=1.25, age=2.5))]))


def test_map_of_features_stands_behind_the_fields_of_the_record() -> None:
    schema = avro("features", {"type": "map", "values": ["string", "double"]})
    record = small(features={"user": "other", "age": 3.0})
    same(AvroFormat(MODEL, schema=schema).decode([in_avro(record, schema)]), IN_JSON.decode([in_json(small(age=3.0))]))


def test_single_object_encoding() -> None:
    schema = avro("price", "double")
    canonical = fastavro.schema.to_parsing_canonical_form(schema)
    head = b"\xc3\x01" + bytes.fromhex(fastavro.schema.fingerprint(canonical, "CRC-64-AVRO"))
    one = AvroFormat(MODEL, schema=json.dumps(schema))
    same(one.decode([head + in_avro(small(), schema)]), IN_JSON.decode([in_json(small())]))
    assert reasons(one, head + b"x") == ["not_avro"]


@given(some.binary(max_size=60))
def test_any_bytes_are_refused_or_read(message: bytes) -> None:
    for one in (ANY_AVRO, SAMPLE_AVRO, SAMPLE_PROTOBUF):
        batch, bad = one.decode([message, message])
        assert len(batch) + len(bad) == 2
        assert all(refused.reason in st.REASONS for refused in bad)


@pytest.mark.parametrize("cut", [0, 1, 9, -1])
def test_cut_off_and_followed_by_something(cut: int) -> None:
    schema = avro("price", "double")
    whole = in_avro(small(), schema)
    assert reasons(AvroFormat(MODEL, schema=schema), whole[:cut], whole + b"\0") == ["not_avro", "not_avro"]
    assert reasons(SAMPLE_PROTOBUF, in_protobuf(GOOD)[:-1], b"\xff") == ["not_protobuf", "not_protobuf"]


def test_text_that_is_not_utf8() -> None:
    schema = avro("user", "bytes")
    written = in_avro(small(user=b"\xff\xfe"), schema)
    assert reasons(AvroFormat(MODEL, schema=avro("user", "string")), written) == ["not_utf8"]


def reasons(one: Format, *messages: bytes) -> list[str]:
    _, bad = one.decode(messages)
    return [refused.reason for refused in bad]


@pytest.mark.parametrize(
    ("make", "write"),
    [(partial(AvroFormat, schema=AVRO_OF_ANYTHING), in_avro), (ProtobufFormat, in_protobuf), (JsonFormat, in_json)],
)
def test_limit_is_on_the_message(make: Callable[[st.Model], Format], write: Callable[[Sample], bytes]) -> None:
    sample = dict.fromkeys((*FIELDS, "unread")) | GOOD | {"tags": [1 + 2**60] * 4000}
    message = write(sample)
    limited = [model(max_message_bytes=len(message) - spare) for spare in (0, 1)]
    for schema, expected in zip(limited, ([], ["too_large"]), strict=True):
        assert reasons(make(schema), message) == expected


def test_positions_count_all_messages() -> None:
    schema = avro("price", "double")
    messages = [b"", *(in_avro(small(ts=ts), schema) for ts in (1.0, 1e18, 2.0)), b"x"]
    batch, bad = AvroFormat(MODEL, schema=schema).decode(messages)
    assert batch.kept.tolist() == [1, 3]
    assert [(one.index, one.reason) for one in bad] == [(0, "not_avro"), (2, "bad_time"), (4, "not_avro")]
    batch, bad = AvroFormat(MODEL, schema=schema).decode([])
    assert (len(batch), bad) == (0, [])


# --- Protobuf ---

CLICK = """
syntax = "proto3";
import "google/protobuf/timestamp.proto";
import "google/protobuf/wrappers.proto";
message Click {
  google.protobuf.Timestamp ts = 1;
  int32 label = 2;
  optional string user = 3;
  repeated uint64 tags = 4;
  google.protobuf.DoubleValue price = 5;
  optional float age = 6;
  optional bytes w = 7;
  optional Color stars = 8;
  message View { optional double ts = 1; double label = 2; optional string user = 3; double price = 4; }
}
message Other {
  optional double ts = 1;
  double label = 2;
  Color user = 3;
  double price = 4;
  map<string, double> tags = 5;
}
enum Color { RED = 0; BLUE = 1; }
"""


@pytest.fixture(scope="module")
def proto(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("proto") / "click.proto"
    path.write_text(CLICK)
    return path


def message_of(types: MessageTypes, path: list[int], **fields: Any) -> bytes:
    data: bytes = message_factory.GetMessageClass(types.find(path))(**fields).SerializeToString()
    return data


def test_types_of_protobuf(proto: Path) -> None:
    types = read_descriptor_set(compiled(proto))
    simple = st.Model(
        st.Schema(
            label="label",
            time="ts",
            features=[st.Categorical(n, 4, default=d) for n, d in (("user", "?"), ("tags", None))]
            + [st.Numeric("price", default=-1.0, transform=None), st.Numeric("age", default=-1.0, transform=None)],
        ),
        lambda inputs: None,
    )
    samples = [
        {"ts": MOMENT.timestamp(), "label": 0, "user": "", "tags": [2**64 - 1, 5], "price": 0.0, "age": 0.0},
        {"ts": MOMENT.timestamp(), "label": 1, "tags": []},
        {"label": 1, "tags": []},
    ]
    messages = [
        message_of(types, [0], ts=MOMENT, user="", tags=[2**64 - 1, 5], price={"value": 0.0}, age=0.0),
        message_of(types, [0], ts=MOMENT, label=1),
        message_of(types, [0], label=1),
    ]
    same(ProtobufFormat(simple, types=types).decode(messages), JsonFormat(simple).decode(list(map(in_json, samples))))


@pytest.mark.parametrize(("field", "value"), [("stars", 1), ("w", b"\1")])
def test_bytes_and_names_are_no_numbers(proto: Path, field: str, value: Any) -> None:
    types = read_descriptor_set(compiled(proto))
    message = message_of(types, [0], ts=MOMENT, user="u1", price={"value": 1.0}, tags=[1], **{field: value})
    _, bad = ProtobufFormat(MODEL, types=types).decode([message])
    assert [(one.reason, one.field) for one in bad] == [("wrong_type", field)]


def test_names_of_enums_are_ids(proto: Path) -> None:
    types = read_descriptor_set(compiled(proto))
    view = MessageTypes([_without_first_message(one) for one in _files_of(proto)])
    messages = [message_of(view, [0], ts=1.0, user=user, price=2.0) for user in (1, 7)]
    expected = [in_json({"ts": 1.0, "label": 0, "user": user, "price": 2.0, "tags": {}}) for user in ("BLUE", 7)]
    assert types.find([1]).full_name == view.find([0]).full_name == "Other"
    same(ProtobufFormat(MODEL, types=view).decode(messages), IN_JSON.decode(expected))


def test_unsigned_ids_keep_all_digits() -> None:
    sample = GOOD | {"user": 2**64 - 1, "tags": [2**63]}
    expected = IN_JSON.decode([in_json(sample)])
    one = ProtobufFormat(model())
    same(one.decode([in_protobuf(sample)]), JsonFormat(model()).decode([in_json(sample)]))
    assert len(expected[1]) == 1  # the digits are more than MODEL takes


def test_empty_message_is_a_sample_without_fields() -> None:
    _, bad = SAMPLE_PROTOBUF.decode([b""])
    assert [(one.reason, one.field) for one in bad] == [("missing_field", "ts")]


def test_text_of_proto2_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "old.proto"
    path.write_text('syntax = "proto2"; message Old { optional double ts = 1; optional string user = 3; }')
    types = read_descriptor_set(compiled(path))
    message = message_of(types, [0], ts=1.0, user="ab").replace(b"ab", b"\xff\xfe")
    assert reasons(ProtobufFormat(MODEL, types=types), message) == ["not_utf8"]


def test_default_of_proto2_is_not_a_value(tmp_path: Path) -> None:
    path = tmp_path / "old.proto"
    path.write_text(
        'syntax = "proto2"; message Old { optional double ts = 1 [default = 7]; required double label = 3; '
        'optional string user = 2 [default = "x"]; }'
    )
    types = read_descriptor_set(compiled(path))
    one = ProtobufFormat(MODEL, types=types)
    same(one.decode([message_of(types, [0], label=1.0)]), IN_JSON.decode([in_json({"label": 1.0})]))


def _files_of(proto: Path) -> list[bytes]:
    return [
        one.SerializeToString()
        for one in descriptor_pb2.FileDescriptorSet.FromString(compiled(proto).read_bytes()).file
    ]


def _without_first_message(file: bytes) -> bytes:
    parsed = descriptor_pb2.FileDescriptorProto.FromString(file)
    if parsed.message_type[0].name == "Click":
        del parsed.message_type[0]
    data: bytes = parsed.SerializeToString()
    return data


# --- settings ---


def made(name: str, **options: Any) -> Format:
    return make_format(name, MODEL, **options)


def test_formats_by_name(tmp_path: Path, proto: Path) -> None:
    (tmp_path / "click.avsc").write_text(json.dumps(avro("price", "double")))
    sample = {name: GOOD[name] for name in ("ts", "label", "user", "price")}
    expected = IN_JSON.decode([in_json(sample)])
    same(made("json").decode([in_json(sample)]), expected)
    same(
        made("avro", schema_file=str(tmp_path / "click.avsc")).decode([in_avro(sample, avro("price", "double"))]),
        expected,
    )
    same(made("protobuf").decode([in_protobuf(sample)]), expected)
    types = read_descriptor_set(compiled(proto))
    message = message_of(types, [0], ts=MOMENT, label=1)
    one = made("protobuf", schema_file=str(compiled(proto)))
    assert reasons(one, message, b"\xff") == ["missing_field", "not_protobuf"]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("xml", {}, ["json, avro, protobuf", "'xml'"]),
        ("json", {"schema_file": "a.avsc"}, ["schema_file", "JSON"]),
        ("avro", {"registry": "http://localhost:1", "schema_file": "a.avsc"}, ["registry", "schema_file"]),
        ("avro", {"registry_config": {"timeout": 1}}, ["registry_config", "address"]),
        ("avro", {"registry": "localhost:1"}, ["Invalid url"]),
        (
            "avro",
            {"registry": "http://u:secret@localhost:1", "registry_config": {"colour": 1}},
            ["localhost:1", "colour"],
        ),
        (
            "protobuf",
            {"registry": "http://h:1", "registry_config": {"ssl.ca.location": "/none.pem"}},
            ["registry at http://h:1"],
        ),
        ("avro", {"schema_file": "/none.avsc"}, ["/none.avsc", "No such file"]),
        ("protobuf", {"schema_file": "/none.desc"}, ["/none.desc", "No such file"]),
    ],
)
def test_settings_that_do_not_go_together(name: str, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        made(name, **options)
    assert all(word in str(caught.value) for word in words)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "file", "content"),
    [
        ("avro", "a.avsc", b"{"),
        ("avro", "a.avsc", b"\xff"),
        ("avro", "a.avsc", b'{"type": "record"}'),
        ("avro", "a.avsc", b'{"type": "record", "name": "A", "fields": [{"name": "b", "type": "colour"}]}'),
        ("avro", "a.avsc", b'{"type": "record", "name": "A", "fields": 3}'),
        ("avro", "a.avsc", b"[3]"),
        ("protobuf", "a.proto", b'syntax = "proto3"; message A {}'),
        ("protobuf", "a.desc", b"\xff"),
        ("protobuf", "a.pb", b""),
    ],
)
def test_file_that_is_no_schema(tmp_path: Path, name: str, file: str, content: bytes) -> None:
    path = tmp_path / file
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        made(name, schema_file=str(path))


def test_descriptor_set_without_imports(proto: Path) -> None:
    with pytest.raises(ConfigError, match="include_imports"):
        made("protobuf", schema_file=str(compiled(proto, "--retain_options")))


def test_package_that_is_missing(tmp_path: Path) -> None:
    """In a process that cannot import them."""
    program = (
        "import sys\n"
        "from tests.stream.written import model\n"
        "from streamtrain.stream.formats.factory import make_format\n"
        "sys.modules |= dict.fromkeys(['fastavro', 'msgspec.json', 'confluent_kafka.schema_registry'])\n"
        "make_format('json', model())\n"
        "for name, registry in (('avro', None), ('protobuf', None), ('protobuf', 'http://localhost:1')):\n"
        "    try:\n        make_format(name, model(), registry=registry)\n"
        "    except ValueError as exc:\n        print(exc)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.count("pip install 'streamtrain[formats]'") == 3, done.stderr


# --- documents ---


def test_every_reason_is_documented() -> None:
    text = (ROOT / "docs" / "samples.md").read_text()
    assert tuple(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == st.REASONS
