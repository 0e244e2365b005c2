"""Registry: whatever a schema registry answers, it is used, or waited for, or messages are refused by name.

Input: the format, a byte; then edits (see edits.py) of what the registry answers: the schema of an id, which refers to
two others, and those; each an HTTP status, a blank and a body. Confluent's client makes objects of them, and raises
its errors.
"""

import json
from base64 import b64encode
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from confluent_kafka.schema_registry import SchemaRegistryClient, SchemaRegistryError

from streamtrain.errors import SourceRefused, SourceUnavailable
from streamtrain.stream.formats import protobuf
from streamtrain.stream.formats.avro import AvroFormat
from streamtrain.stream.formats.protobuf import MessageTypes, ProtobufFormat
from streamtrain.stream.formats.record import InvalidSchema
from streamtrain.stream.formats.registry import SchemaRegistry
from tests.fuzz import edits
from tests.fuzz.readers import read, tried
from tests.fuzz.readers.protobuf import WRITTEN, _file
from tests.stream.formats.test_hostile import BEGIN, DECIMAL, TREE, priced, record
from tests.stream.written import model

_MODEL = model()
_HEADER = b"\0\0\0\0\7"
_OK = b"200 "
_SUCCESS = 200


def _no_protoc(*_: Any) -> MessageTypes:
    """Text of Protobuf is given to a process of its own, which is not what is tried here."""
    raise InvalidSchema("text")


class _Kept(SchemaRegistryClient):
    """Confluent's client, which finds its answers here."""

    def __init__(self) -> None:
        super().__init__({"url": "http://127.0.0.1:1", "max.retries": 0})
        self.answers: edits.Blobs = {}
        self._rest_client.get = self._get  # type: ignore[method-assign]

    def _get(self, url: str, query: Any = None) -> Any:
        if url == "subjects":
            return []
        name = "id" if url.startswith("schemas/") else url.split("/")[1]
        status, _, body = self.answers.get(name, b"404 ").partition(b" ")
        parsed = json.loads(body or b"null")
        if status.isdigit() and int(status) != _SUCCESS:
            inside = parsed if isinstance(parsed, dict) else {}
            error: tuple[Any, ...] = (inside.get("error_code"), inside.get("message"))
            raise SchemaRegistryError(int(status[:9]), *error)
        return parsed


_KEPT = _Kept()
_REGISTRY = SchemaRegistry("http://127.0.0.1:1")
_REGISTRY._make = lambda: _KEPT  # type: ignore[assignment]
_REGISTRY._connect()


def _answers(is_avro: bool) -> dict[str, bytes]:
    money = DECIMAL | {"type": "fixed", "name": "Money", "size": 2}
    if is_avro:
        texts = [priced("Money"), money, record({"name": "of", "type": TREE}, name="Other")]
        written = [json.dumps(text) for text in texts]
    else:
        written = [b64encode(_file("proto3", package)).decode() for package in "abc"]
    references = [{"name": name, "subject": name, "version": 1} for name in ("Money", "Other")]
    bodies = [
        {"schema": written[0], "schemaType": "AVRO" if is_avro else "PROTOBUF", "references": references},
        {"schema": written[1], "id": 3, "subject": "Money", "version": 1, "references": references[1:]},
        {"schema": written[2], "id": 4, "subject": "Other", "version": 1},
    ]
    return {name: _OK + json.dumps(one).encode() for name, one in zip(("id", "Money", "Other"), bodies, strict=True)}


_ANSWERS = [_answers(True), _answers(False)]
_BODIES = [BEGIN + b"\2\4", b"\0" + WRITTEN]


def run(data: bytes) -> None:
    """One input."""
    if not data:
        return
    answers = dict(_ANSWERS[data[0] % 2])
    edits.apply(data[1:], answers, dict.fromkeys(answers, _OK))
    _KEPT.answers = answers
    _REGISTRY._unknown.clear()
    one = ProtobufFormat(_MODEL, _REGISTRY) if data[0] % 2 else AvroFormat(_MODEL, _REGISTRY)
    message = _HEADER + _BODIES[data[0] % 2]
    if answers == _ANSWERS[data[0] % 2]:
        assert one.decode([message])[1] == [], "what nobody has edited is read"
    with patch.object(protobuf, "_compile", _no_protoc):
        tried(lambda: read(one, message), SourceRefused, SourceUnavailable)


def seeds() -> Iterator[bytes]:
    """Each node of each answer by some values, answers that are missing, copied, cut, or errors."""
    for form in (0, 1):
        yield bytes([form])
        for name in range(3):
            yield from (bytes([form, 3, name, node, value]) for node in range(0, 20, 3) for value in range(0, 24, 2))
            yield from (bytes([form, 4, name]), bytes([form, 2, name, 40, 0]), bytes([form, 5, name, (name + 1) % 3]))
            for status in (b"401", b"403", b"404", b"422", b"500"):
                error = status + b' {"error_code": ' + status + b'03, "message": "no"}'
                yield bytes([form]) + edits.replace(name, error)
