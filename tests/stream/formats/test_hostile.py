"""Avro, Protobuf and registries that mean ill: bad messages are refused by name, within bounds of time and memory."""

import json
import subprocess
import sys
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest.mock import Mock

import pytest
from google.protobuf import descriptor_pb2

from streamtrain.errors import ConfigError, SourceRefused
from streamtrain.stream.formats.avro import AvroFormat
from streamtrain.stream.formats.factory import Format
from streamtrain.stream.formats.protobuf import ProtobufFormat
from streamtrain.stream.formats.registry import SchemaRegistry
from tests.stream.written import in_avro, model

MODEL = model()
SAMPLE: dict[str, Any] = {"ts": 1.7e9, "label": 1, "user": "u1", "price": 3.5}
FIELDS: list[dict[str, Any]] = [
    {"name": "ts", "type": "double"},
    {"name": "label", "type": "int"},
    {"name": "user", "type": "string"},
]


def record(*fields: dict[str, Any], name: str = "Click") -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [*FIELDS, *fields]}


def priced(kind: Any) -> dict[str, Any]:
    return record({"name": "price", "type": kind})


def long(value: int) -> bytes:
    """As Avro writes it."""
    value, out = (value << 1) ^ (value >> 63), bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


BEGIN = in_avro(SAMPLE, record())


def reasons(one: Format, *messages: bytes) -> list[tuple[str, str]]:
    _, bad = one.decode(messages)
    return [(refused.reason, refused.field) for refused in bad]


def price(one: Format, message: bytes) -> float:
    batch, bad = one.decode([message])
    assert bad == []
    return float(batch.numeric[0, 0])


DECIMAL = {"type": "bytes", "logicalType": "decimal", "precision": 10}


@pytest.mark.parametrize("scale", [0, 2])
def test_a_decimal_of_many_digits(scale: int) -> None:
    one = AvroFormat(MODEL, schema=priced(DECIMAL | {"scale": scale}))
    assert reasons(one, BEGIN + long(1800) + b"\x7f" * 1800) == [("wrong_type", "price")]
    assert reasons(one, BEGIN + long(128) + b"\x7f" + b"\xff" * 127) == [("not_finite", "price")]
    assert price(one, BEGIN + long(1) + b"\x7d") == 125 / 10**scale


@pytest.mark.parametrize("scale", [10**9, -1, 1.5, "1", True, float("inf")])
def test_a_logical_type_that_is_not_valid_leaves_the_type(scale: Any) -> None:
    schema = json.dumps(priced(DECIMAL | {"scale": scale}))
    with registered(lambda path: (200, {"schema": schema})) as where:
        one = AvroFormat(MODEL, SchemaRegistry(where.url))
        assert reasons(one, header(1) + BEGIN + long(1) + b"\x7d") == [("wrong_type", "price")]
    if scale is not True:
        with pytest.raises(ConfigError, match="scale"):
            AvroFormat(MODEL, schema=schema)


def test_a_uuid_of_another_size() -> None:
    eight = {"type": "fixed", "name": "Id", "size": 8, "logicalType": "uuid"}
    one = AvroFormat(MODEL, schema=record({"name": "tags", "type": eight}))
    assert reasons(one, BEGIN + bytes(8)) == [("wrong_type", "tags")]


def test_a_key_of_a_map_is_a_key() -> None:
    fields = [{"name": "age", "type": DECIMAL}, {"name": "price", "type": {"type": "map", "values": "string"}}]
    one = AvroFormat(MODEL, schema=record(*fields))
    for key in (b"streamtrain_logical_0", b"a"):
        entry = long(1) + long(len(key)) + key + long(1) + b"x" + b"\0"
        assert reasons(one, BEGIN + long(1) + b"\1" + entry) == [("wrong_type", "price")]


def test_features_of_another_type_of_a_union() -> None:
    one = AvroFormat(MODEL, schema=record({"name": "features", "type": [{"type": "map", "values": "long"}, "string"]}))
    assert reasons(one, BEGIN + long(1) + long(3) + b"abc") == [("missing_field", "price")]
    assert reasons(one, BEGIN + long(0) + long(1) + long(5) + b"price" + long(7) + b"\0") == []


TREE = {
    "type": "record",
    "name": "Tree",
    "fields": [{"name": "left", "type": ["null", "Tree"]}, {"name": "right", "type": ["null", "Tree"]}],
}
HOSTILE: dict[str, tuple[dict[str, Any], bytes, str]] = {
    "deep": (priced(TREE), long(1) * 500_000, "too_deep"),
    "deep and unread": (record({"name": "comments", "type": TREE}), long(1) * 500_000, "too_deep"),
    "many nulls": (record({"name": "tags", "type": {"type": "array", "items": "null"}}), long(2**50), "too_large"),
    "unread nulls": (
        record({"name": "x", "type": {"type": "array", "items": "null"}}),
        long(-(2**50)) * 2,
        "too_large",
    ),
    "many empty records": (
        record({"name": "x", "type": {"type": "array", "items": {"type": "record", "name": "E", "fields": []}}}),
        long(2**40),
        "too_large",
    ),
    "many of no bytes": (
        record({"name": "x", "type": {"type": "array", "items": {"type": "fixed", "name": "F", "size": 0}}}),
        long(2**40),
        "too_large",
    ),
    "nulls by union": (
        record({"name": "x", "type": {"type": "map", "values": {"type": "array", "items": "null"}}}),
        (long(1) + long(1) + b"k" + long(2**40)),
        "too_large",
    ),
}


def doubling(levels: int) -> list[dict[str, Any]]:
    """Records of two of the next: 2^levels values that take no byte."""
    kind: Any = "null"
    for level in range(levels):
        inner = kind
        kind = {
            "type": "record",
            "name": f"L{level}",
            "fields": [{"name": "a", "type": inner}, {"name": "b", "type": inner if level == 0 else f"L{level - 1}"}],
        }
    return [{"name": "x", "type": kind}]


HOSTILE["twice and twice again"] = (record(*doubling(40)), b"", "too_large")


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_message_declares_takes_neither_memory_nor_time(name: str) -> None:
    """In a process of its own, of 3 GB, as it ended it."""
    schema, more, reason = HOSTILE[name]
    script = f"""
import json, resource, sys
from tests.stream.written import model
from streamtrain.stream.formats.avro import AvroFormat
one = AvroFormat(model(), schema=json.loads(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
_, bad = one.decode([{BEGIN!r} + bytes.fromhex(sys.stdin.read())])
print(bad[0].reason)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(schema)],
        input=more.hex(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, reason), done.stderr[-2000:]


def test_a_type_that_contains_itself_is_read_where_it_is_not_deep() -> None:
    one = AvroFormat(MODEL, schema=record({"name": "price", "type": "double"}, {"name": "comments", "type": TREE}))
    begin = in_avro(SAMPLE, priced("double"))
    assert price(one, begin + b"\2\0\0\2\0\0") == 3.5
    assert price(one, begin + b"\2" * 25 + b"\0" * 27) == 3.5
    assert reasons(one, begin + b"\2" * 40 + b"\0" * 42) == [("too_deep", "")]
    assert reasons(one, begin + b"\2", begin + b"\3\0") == [("not_avro", "")] * 2


def nested(levels: int) -> str:
    return '{"type": "array", "items": ' * levels + '"int"' + "}" * levels


def chained(levels: int) -> str:
    """Records that each name the one before."""
    kinds: list[Any] = [{"type": "record", "name": "A0", "fields": []}]
    kinds += [
        {"type": "record", "name": f"A{i}", "fields": [{"name": "a", "type": f"A{i - 1}"}]} for i in range(1, levels)
    ]
    return json.dumps(record(*({"name": f"f{i}", "type": kind} for i, kind in enumerate(kinds))))


SCHEMAS = {
    "deep": nested(60_000),
    "nested": nested(100),
    "chained": chained(2000),
    "large": json.dumps(record(*({"name": f"f{i}", "type": "int"} for i in range(60_000)))),
    "wrapped": '{"type": {"type": {"type": "string"}}}',
    "digits": json.dumps(priced({"type": "fixed", "name": "F", "size": 0})).replace(
        '"size": 0', '"size": ' + "9" * 5000
    ),
    "negative": json.dumps(priced({"type": "fixed", "name": "F", "size": -4})),
    "union": "[]",
    "number": "3",
    "null": "null",
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_of_avro_that_are_none_or_too_much(name: str) -> None:
    try:
        one = AvroFormat(MODEL, schema=SCHEMAS[name])
    except ConfigError:
        return
    assert len(reasons(one, BEGIN)) == 1


class Registered:
    """A registry that answers as it is told, and knows how often it was asked.

    Attributes:
        asked: paths, in their order.
    """

    def __init__(self, answer: Callable[[str], tuple[int, Any]]) -> None:
        self.asked: list[str] = []
        registered = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                registered.asked.append(path)
                status, body = answer(path)
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                """Says nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@contextmanager
def registered(answer: Callable[[str], tuple[int, Any]]) -> Iterator[Registered]:
    found = Registered(answer)
    thread = threading.Thread(target=found.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield found
    finally:
        found.server.shutdown()
        thread.join()
        found.server.server_close()


def header(number: int) -> bytes:
    return b"\0" + number.to_bytes(4)


GOOD = json.dumps(priced("double"))
NOT_FOUND = (404, {"error_code": 40403, "message": "Schema not found"})


def made(name: str, registry: SchemaRegistry) -> Format:
    return AvroFormat(MODEL, registry) if name == "avro" else ProtobufFormat(MODEL, registry)


def test_one_schema_that_is_refused_ends_nothing() -> None:
    def answer(path: str) -> tuple[int, Any]:
        if path == "/subjects":
            return 200, []
        number = int(path.rpartition("/")[2])
        return (200, {"schema": GOOD}) if number == 7 else (number, {"error_code": number * 100 + 1, "message": "no"})

    with registered(answer) as where:
        one = AvroFormat(MODEL, SchemaRegistry(where.url))
        body = in_avro(SAMPLE, json.loads(GOOD))
        batch, bad = one.decode([header(403) + body, header(7) + body, header(422) + body, header(403) + body])
        assert batch.kept.tolist() == [1]
        assert [refused.reason for refused in bad] == ["unknown_schema"] * 3
        assert where.asked.count("/schemas/ids/403") == 1


@pytest.mark.parametrize("status", [401, 403])
def test_credentials_that_are_refused_end_it(status: int) -> None:
    with (
        registered(lambda path: (status, {"error_code": 40101, "message": "who?"})) as where,
        pytest.raises(SourceRefused, match="who"),
    ):
        AvroFormat(MODEL, SchemaRegistry(where.url)).decode([header(1) + b"\0"])


@pytest.mark.parametrize("name", ["avro", "protobuf"])
def test_ids_that_nobody_knows_cost_few_requests_and_no_client_each(name: str) -> None:
    now = [0.0]
    with registered(lambda path: NOT_FOUND) as where:
        registry = SchemaRegistry(where.url, now=lambda: now[0])
        registry._make = clients = Mock(wraps=registry._make)
        one = made(name, registry)
        assert len(reasons(one, *(header(number) + b"\0\0" for number in range(1000)))) == 1000
        assert 50 < len(where.asked) <= 100
        assert clients.call_count == 0  # it keeps that with which it began
        now[0] = 61.0
        assert reasons(one, header(1) + b"\0\0") == [("unknown_schema", "")]
        assert where.asked[-1] == "/schemas/ids/1"
        assert clients.call_count == 1


def file_of(*messages: str, package: str = "") -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="a.proto", syntax="proto3", package=package)
    for name in messages:
        file.message_type.add(name=name)
    return file


def serialized(file: descriptor_pb2.FileDescriptorProto) -> str:
    return b64encode(file.SerializeToString()).decode()


def test_a_message_that_its_file_lacks_costs_no_request() -> None:
    with registered(lambda path: (200, {"schema": serialized(file_of("A"))})) as where:
        one = ProtobufFormat(MODEL, SchemaRegistry(where.url))
        messages = [header(1) + bytes([2, 2 * at]) for at in range(1, 50)]
        assert reasons(one, *messages) == [("not_protobuf", "")] * 49
        assert reasons(one, header(1) + b"\xff\xff\xff\xff\x0f" + b"\2" * 100_000) == [("not_protobuf", "")]
        assert len(where.asked) == 1


def references(*names: Any) -> list[Mapping[str, Any]]:
    return [{"name": name, "subject": f"s{at}", "version": 1} for at, name in enumerate(names)]


CIRCLE = {"schema": GOOD, "references": references("other.proto")}
ODD: dict[str, Callable[[str], tuple[int, Any]]] = {
    "itself": lambda path: (200, CIRCLE),
    "two of each other": lambda path: (
        200,
        {"schema": GOOD, "references": references("b.proto" if "ids" in path or "a" in path else "a.proto")},
    ),
    "endless": lambda path: (200, {"schema": GOOD, "references": references(f"{hash(path)}{len(path)}")}),
    "wide": lambda path: (
        200,
        {"schema": GOOD, "references": references(*(f"n{at}" for at in range(500))) if "ids" in path else []},
    ),
    "large": lambda path: (200, {"schema": "x" * (5 << 20)}),
    **{
        f"name {name!r}": lambda path, name=name: (  # type: ignore[misc]
            200,
            {"schema": 'syntax = "proto3"; message A {}', "references": references(name) if "ids" in path else []},
        )
        for name in (
            "",
            None,
            7,
            "a\0b",
            "/etc/passwd",
            "../../x",
            "x" * 5000,
            "a/" * 3000,
            ".",
            "\ud800",
            "a\nb",
        )
    },
    "version": lambda path: (200, {"schema": GOOD, "references": [{"name": "a", "subject": "b", "version": "../.."}]}),
    "reference of nothing": lambda path: (200, {"schema": GOOD, "references": [{}]}),
    "broken": lambda path: (200, {"schema": "\ud800\0"}),
    "file in a file": lambda path: (
        200,
        {"schema": "syntax = 'proto3';", "references": references("a", "a/b") if "ids" in path else []},
    ),
    "deep descriptor": lambda path: (200, {"schema": b64encode(b"\x22\x80\x80\x01" * 2000).decode()}),
    "twice the same": lambda path: (200, {"schema": serialized(file_of("A", "A"))}),
    "import": lambda path: (200, {"schema": serialized(file_of("A", package="..."))}),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", ["avro", "protobuf"])
def test_odd_schemas_are_unknown(name: str, odd: str) -> None:
    with registered(ODD[odd]) as where:
        one = made(name, SchemaRegistry(where.url))
        assert [reason for reason, _ in reasons(one, header(9) + b"\0\0")] == ["unknown_schema"]
        asked = len(where.asked)
        assert asked <= 110
        assert len(reasons(one, header(9) + b"\0\0")) == 1
        assert len(where.asked) == asked
