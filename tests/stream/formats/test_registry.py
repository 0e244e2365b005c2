"""Messages in Confluent's wire format, written by Confluent's serializers through a real registry."""

import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import streamtrain.stream.formats.sample_pb2 as pb
from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import message_factory

from streamtrain.errors import SourceRefused, SourceUnavailable
from streamtrain.stream.formats.factory import Format, JsonFormat, make_format
from streamtrain.stream.formats.protobuf import read_descriptor_set
from tests.stream.registry import RegistryServer, answering, install
from tests.stream.written import Sample, compiled, in_avro, in_json, in_protobuf, model, same

MODEL = model()
SAMPLE: dict[str, Any] = {"ts": 1.7e9, "label": 1, "user": "u1", "tags": ["a", 2**53 + 1], "price": 3.5}
EXPECTED = JsonFormat(MODEL).decode([in_json(SAMPLE)])

FLAT = {
    "type": "record",
    "name": "Click",
    "fields": [
        {"name": "ts", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "label", "type": "int"},
        {"name": "user", "type": ["null", "string"]},
        {"name": "tags", "type": {"type": "array", "items": ["string", "long"]}},
        {"name": "price", "type": "double"},
    ],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    install()
    server = RegistryServer(tmp_path_factory.mktemp("registry"))
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def client(server: RegistryServer) -> Iterator[Any]:
    with SchemaRegistryClient({"url": server.url}) as client:
        yield client


def made(name: str, url: str, **options: Any) -> Format:
    return make_format(name, MODEL, registry=url, **options)


def reasons(one: Format, *messages: bytes) -> list[str]:
    _, bad = one.decode(messages)
    return [refused.reason for refused in bad]


def to(topic: str) -> SerializationContext:
    return SerializationContext(topic, MessageField.VALUE)


def header(number: int) -> bytes:
    return b"\0" + number.to_bytes(4)


def avro_message(client: Any, topic: str, sample: Sample = SAMPLE, schema: Any = FLAT) -> bytes:
    message: bytes = AvroSerializer(client, json.dumps(schema))(
        dict(sample) | {"ts": int(sample["ts"] * 1000)}, to(topic)
    )
    return message


def test_avro_of_several_writers(server: RegistryServer, client: Any) -> None:
    """Each message is read by the schema that it was written with."""
    later = FLAT | {"fields": [{"name": "more", "type": "string", "default": "?"}, *FLAT["fields"]]}
    messages = [avro_message(client, "clicks"), avro_message(client, "clicks", SAMPLE | {"more": "x"}, later)]
    assert messages[0][:5] != messages[1][:5]
    same(made("avro", server.url).decode(messages), JsonFormat(MODEL).decode([in_json(SAMPLE)] * 2))


def test_avro_of_a_schema_that_refers_to_others(server: RegistryServer, client: Any) -> None:
    money = {"type": "fixed", "name": "Money", "size": 4, "logicalType": "decimal", "precision": 8, "scale": 1}
    price = {"type": "record", "name": "Price", "fields": [{"name": "of", "type": "Money"}]}
    fields = [{"name": "age", "type": "Money"}, {"name": "nested", "type": "Price"}, *FLAT["fields"]]
    client.register_schema("money", Schema(json.dumps(money), "AVRO"))
    refers = [SchemaReference("Money", "money", 1)]
    client.register_schema("price", Schema(json.dumps(price), "AVRO", refers))
    whole = Schema(json.dumps(FLAT | {"fields": fields}), "AVRO", [*refers, SchemaReference("Price", "price", 1)])
    number = client.register_schema("refers-value", whole)
    body = b"\0\0\0\x19" + b"\0\0\0\x01" + avro_message(client, "clicks")[5:]
    expected = JsonFormat(MODEL).decode([in_json(SAMPLE | {"age": 2.5})])
    same(made("avro", server.url).decode([header(number) + body]), expected)


def test_protobuf(server: RegistryServer, client: Any) -> None:
    serializer = ProtobufSerializer(pb.Sample, client, {"use.deprecated.format": False})
    message = serializer(pb.Sample.FromString(in_protobuf(SAMPLE)), to("samples"))
    one = made("protobuf", server.url)
    same(one.decode([message]), EXPECTED)
    assert reasons(one, message[:5], message[:-1], b"\1" + message[1:], message[:5] + b"\2\x14") == ["not_protobuf"] * 4
    assert reasons(one, message[:5] + b"\xff\xff\xff\xff\x0f" + message[6:]) == ["not_protobuf"]


PROTO = """
syntax = "proto3";
import "google/protobuf/timestamp.proto";
message First { optional double ts = 1; message Inner { google.protobuf.Timestamp ts = 1; double label = 2;
  optional string user = 3; repeated string tags = 4; double price = 5; } }
message Second { double ts = 1; double label = 2; string user = 3; repeated string tags = 4; double price = 5; }
"""


@pytest.fixture(scope="module")
def proto(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("proto") / "click.proto"
    path.write_text(PROTO)
    return path


def protobuf_messages(client: Any, proto: Path) -> list[bytes]:
    """The same sample as two messages of one file, of which neither is the first."""
    sample = {name: SAMPLE[name] for name in ("label", "user", "price")} | {"tags": list(map(str, SAMPLE["tags"]))}
    messages = []
    for path, ts in (((0, 0), {"seconds": int(SAMPLE["ts"])}), ((1,), SAMPLE["ts"])):
        kind = message_factory.GetMessageClass(read_descriptor_set(compiled(proto)).find(path))
        serializer = ProtobufSerializer(kind, client, {"use.deprecated.format": False})
        messages.append(serializer(kind(ts=ts, **sample), to("inner")))
    return messages


def test_protobuf_by_position_in_the_file(server: RegistryServer, client: Any, proto: Path) -> None:
    messages = protobuf_messages(client, proto)
    same(made("protobuf", server.url).decode(messages), JsonFormat(MODEL).decode([in_json(SAMPLE)] * 2))


def test_protobuf_of_a_schema_that_is_registered_as_text(server: RegistryServer, client: Any, proto: Path) -> None:
    base = 'syntax = "proto3"; package base; message Base { double of = 1; }'
    client.register_schema("base", Schema(base, "PROTOBUF"))
    whole = PROTO.replace("import", 'import "deep/base.proto"; import', 1)
    refers = [SchemaReference("deep/base.proto", "base", 1)]
    number = client.register_schema("text-value", Schema(whole, "PROTOBUF", refers))
    messages = [header(number) + message[5:] for message in protobuf_messages(client, proto)]
    same(made("protobuf", server.url).decode(messages), JsonFormat(MODEL).decode([in_json(SAMPLE)] * 2))


def test_protobuf_by_a_file_does_not_need_the_registry(client: Any, proto: Path) -> None:
    messages = protobuf_messages(client, proto)
    one = made("protobuf", "http://127.0.0.1:1", schema_file=str(compiled(proto)))
    same(one.decode(messages), JsonFormat(MODEL).decode([in_json(SAMPLE)] * 2))
    assert reasons(one, b"x", header(1) + b"\2\x14") == ["not_protobuf", "not_protobuf"]


def test_json_with_a_header_and_without(server: RegistryServer, client: Any) -> None:
    schema = json.dumps({"$schema": "http://json-schema.org/draft-07/schema#", "title": "Click", "type": "object"})
    framed = JSONSerializer(schema, client)(SAMPLE, to("json"))
    assert framed[0] == 0
    messages = [framed, in_json(SAMPLE), framed[:5], framed[:3]]
    batch, bad = made("json", server.url).decode(messages)
    same(made("json", server.url).decode(messages[:2]), JsonFormat(MODEL).decode([in_json(SAMPLE)] * 2))
    assert batch.kept.tolist() == [0, 1]
    assert [one.reason for one in bad] == ["not_json", "not_json"]
    assert reasons(JsonFormat(MODEL), framed) == ["not_json"]


def test_schema_that_is_unknown_or_of_another_format(server: RegistryServer, client: Any, proto: Path) -> None:
    of_avro, of_protobuf = avro_message(client, "clicks"), protobuf_messages(client, proto)[0]
    unknown = [header(number) + b"\0" for number in (2**31 - 1, 2**31, 2**32 - 1)]
    one = made("avro", server.url)
    batch, bad = one.decode([*unknown, of_avro, of_protobuf, of_avro[5:], b"", b"\0"])
    assert batch.kept.tolist() == [3]
    assert [one.reason for one in bad] == ["unknown_schema"] * 4 + ["not_avro"] * 3
    assert reasons(made("protobuf", server.url), *unknown, of_avro[:5] + b"\0") == ["unknown_schema"] * 4


def test_outage(server: RegistryServer, client: Any, caplog: pytest.LogCaptureFixture) -> None:
    """What is known is read, what is not waits; nothing is refused."""
    known = avro_message(client, "clicks")
    new = avro_message(client, "new", schema=FLAT | {"name": "New"})
    one = made("avro", server.url)
    same(one.decode([known]), EXPECTED)
    caplog.set_level(logging.INFO, "streamtrain")
    server.kill()
    same(one.decode([known]), EXPECTED)
    for _ in range(3):
        with pytest.raises(SourceUnavailable, match=r"schema registry at http://127.0.0.1:\d+/"):
            one.decode([known, new])
    server.start()
    same(one.decode([known, new]), JsonFormat(MODEL).decode([in_json(SAMPLE)] * 2))
    lines = [(record.levelname, record.message) for record in caplog.records if record.name.startswith("streamtrain")]
    assert [level for level, _ in lines] == ["WARNING", "INFO"]
    assert "does not answer" in lines[0][1]
    assert "answers again" in lines[1][1]


MESSAGE = header(7) + b"\0"


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (401, b'{"error_code": 40101, "message": "who?"}', SourceRefused),
        (403, b"no", SourceRefused),
        (404, b"<html>not a registry</html>", SourceRefused),
        (404, b'{"error_code": 404, "message": "HTTP 404 Not Found"}', SourceRefused),
        (301, b"", SourceRefused),
        (408, b"{}", SourceUnavailable),
        (429, b"slowly", SourceUnavailable),
        (500, b'{"error_code": 50001, "message": "store"}', SourceUnavailable),
        (503, b"<html>", SourceUnavailable),
        (200, b"<html>back soon</html>", SourceUnavailable),
        (200, b"[]", SourceUnavailable),
        (200, b"{}", SourceUnavailable),
    ],
)
@pytest.mark.parametrize("name", ["avro", "protobuf"])
def test_answers_of_a_registry(name: str, status: int, body: bytes, error: type[Exception]) -> None:
    with answering(status, body) as url, pytest.raises(error, match="schema registry at") as caught:
        made(name, url.replace("//", "//user:secret@")).decode([MESSAGE])
    assert "secret" not in str(caught.value)


def test_registry_that_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        one = made("avro", f"http://127.0.0.1:{silent.getsockname()[1]}", registry_config={"timeout": 0.2})
        with pytest.raises(SourceUnavailable):
            one.decode([MESSAGE])


def test_unknown_schema_is_asked_for_once() -> None:
    with answering(404, b'{"error_code": 40403, "message": "Schema 7 not found"}') as url:
        one = made("avro", url)
        assert reasons(one, MESSAGE) == ["unknown_schema"]
    assert reasons(one, MESSAGE, MESSAGE) == ["unknown_schema"] * 2
    with pytest.raises(SourceUnavailable):
        one.decode([header(8)])


def test_what_is_no_schema_of_the_format() -> None:
    for text in (
        "{",
        '{"type": "record"}',
        "[3]",
        '{"type": "record", "name": "A", "fields": [{"name": "b", "type": "c"}]}',
    ):
        with answering(200, json.dumps({"schema": text}).encode()) as url:
            for name in ("avro", "protobuf"):
                assert reasons(made(name, url), MESSAGE) == ["unknown_schema"]
    with answering(200, json.dumps({"schema": json.dumps(FLAT)}).encode()) as url:
        same(made("avro", url).decode([header(7) + in_avro(SAMPLE | {"ts": int(1.7e12)}, FLAT)]), EXPECTED)
