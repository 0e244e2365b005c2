"""Avro: whatever the schema and the bytes are, a message is read or refused by name, alone as in a batch.

Input: which schema, a byte; how many edits of it, a byte, and those, two bytes each, see `edited_json`; then a message.
"""

import json
from collections.abc import Iterator
from typing import Any

from streamtrain.errors import ConfigError
from streamtrain.stream.formats.avro import AvroFormat
from tests.fuzz import edits
from tests.fuzz.readers import read, tried
from tests.stream.formats.test_hostile import BEGIN, HOSTILE, TREE, priced, record
from tests.stream.written import AVRO_OF_ANYTHING, in_avro, model

_MODEL = model()
_MOST_EDITS = 3
_LOGICAL: list[dict[str, Any]] = [
    {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
    {"type": "fixed", "name": "Money", "size": 4, "logicalType": "decimal", "precision": 8},
    {"type": "fixed", "name": "Id", "size": 16, "logicalType": "uuid"},
    {"type": "long", "logicalType": "timestamp-nanos"},
    {"type": "int", "logicalType": "date"},
    {"type": "enum", "name": "Colour", "symbols": ["red", "green"]},
]
_SCHEMAS: list[dict[str, Any]] = [
    AVRO_OF_ANYTHING,
    *(priced(kind) for kind in _LOGICAL),
    priced(["null", *_LOGICAL]),
    record({"name": "tags", "type": {"type": "array", "items": [*_LOGICAL, TREE, "string"]}}),
    record({"name": "features", "type": [{"type": "map", "values": ["null", "double", "string", TREE]}, "string"]}),
    *(schema for schema, _, _ in HOSTILE.values()),
]
_READY = [AvroFormat(_MODEL, schema=schema) for schema in _SCHEMAS]
_TEXTS = [json.dumps(schema).encode() for schema in _SCHEMAS]


def run(data: bytes) -> None:
    """One input."""
    if len(data) < 2:
        return
    which, count = data[0] % len(_SCHEMAS), min(data[1], _MOST_EDITS)
    chosen, message = data[2 : 2 + 2 * count], data[2 + 2 * count :]
    if not count:
        read(_READY[which], message)
        return
    text = _TEXTS[which]
    for node, value in zip(chosen[::2], chosen[1::2], strict=False):
        text = edits.edited_json(text, node, value)
    tried(lambda: read(AvroFormat(_MODEL, schema=text.decode()), message), ConfigError)


def seeds() -> Iterator[bytes]:
    """Each schema with a message, as it is and edited."""
    anything = in_avro({"ts": 1.7e9, "label": 1, "user": "u", "tags": ["a", 3, None], "price": 3.5})
    endings = [b"", *(more[:500] for _, more, _ in HOSTILE.values()), b"\x08\x01\x02\x03\x04", b"\2\2\0\0\0"]
    for which in range(len(_SCHEMAS)):
        yield bytes([which, 0]) + anything
        for ending in endings:
            yield bytes([which, 0]) + BEGIN + ending
        for node in range(0, 60, 7):
            yield bytes([which, 1, node, node]) + BEGIN + endings[-1]
