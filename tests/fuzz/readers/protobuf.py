"""Protobuf: whatever the file of types and the bytes are, a message is read or refused by name, alone as in a batch.

Input: which file, a byte; of an even one the rest is a message. Of an odd one two bytes are the size of what stands
instead of its descriptor, then that, then a message.
"""

import struct
from collections.abc import Iterator
from functools import cache

from google.protobuf import descriptor_pb2

from streamtrain.stream.formats.protobuf import MessageTypes, ProtobufFormat, default_types
from streamtrain.stream.formats.record import InvalidSchema
from tests.fuzz.readers import read, tried
from tests.stream.written import in_protobuf, model

_MODEL = model()
_SAMPLE = {"ts": 1.7e9, "label": 1, "user": "u", "tags": ["a", 3, None], "price": 3.5, "age": [1, 2.5, True]}
_KINDS = descriptor_pb2.FieldDescriptorProto


def _file(syntax: str, package: str = "a") -> bytes:
    """A message with fields of every kind, of itself, in a map and repeated."""
    file = descriptor_pb2.FileDescriptorProto(name="a.proto", package=package, syntax=syntax)
    kind = file.message_type.add(name="A")
    names = ["ts", "label", "stars", "w", "user", "tags", "price", "age"]
    types = [_KINDS.TYPE_DOUBLE, _KINDS.TYPE_BOOL, _KINDS.TYPE_FLOAT, _KINDS.TYPE_SINT64, _KINDS.TYPE_ENUM]
    types += [_KINDS.TYPE_STRING, _KINDS.TYPE_DOUBLE, _KINDS.TYPE_MESSAGE]
    for number, (name, of) in enumerate(zip(names, types, strict=True), 1):
        label = _KINDS.LABEL_REPEATED if name == "tags" else _KINDS.LABEL_OPTIONAL
        field = kind.field.add(name=name, number=number, type=of, label=label)
        if of in (_KINDS.TYPE_ENUM, _KINDS.TYPE_MESSAGE):
            field.type_name = f".{package}.E" if of == _KINDS.TYPE_ENUM else f".{package}.A"
    entry = kind.nested_type.add(name="FeaturesEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=_KINDS.TYPE_STRING, label=_KINDS.LABEL_OPTIONAL)
    entry.field.add(
        name="value", number=2, type=_KINDS.TYPE_MESSAGE, type_name=f".{package}.A", label=_KINDS.LABEL_OPTIONAL
    )
    kind.field.add(
        name="features",
        number=9,
        type=_KINDS.TYPE_MESSAGE,
        type_name=f".{package}.A.FeaturesEntry",
        label=_KINDS.LABEL_REPEATED,
    )
    numbers = file.enum_type.add(name="E")
    for number, name in enumerate(("zero", "one")):
        numbers.value.add(name=name, number=number)
    written: bytes = file.SerializeToString()
    return written


WRITTEN = b"\x09" + struct.pack("<d", 1.7e9) + b"\x10\x01\x28\x01\x32\x01a\x39" + struct.pack("<d", 3.5)
"""A sample of these files."""

_FILES = [_file("proto3"), _file("proto2")]


@cache
def _ready(which: int) -> ProtobufFormat:
    return ProtobufFormat(_MODEL, types=MessageTypes([_FILES[which]]) if which < len(_FILES) else default_types())


def run(data: bytes) -> None:
    """One input."""
    if len(data) < 3:
        return
    if not data[0] % 2:
        read(_ready(data[0] // 2 % (len(_FILES) + 1)), data[1:])
        return
    (size,) = struct.unpack_from("<H", data, 1)
    file, message = data[3 : 3 + size], data[3 + size :]
    tried(lambda: read(ProtobufFormat(_MODEL, types=MessageTypes([file])), message), InvalidSchema)


def seeds() -> Iterator[bytes]:
    """Each file with messages, and as it is described."""
    messages = [
        in_protobuf(_SAMPLE),
        WRITTEN,
        b"\x4a\x0b\x0a\x05price\x12\x02\x20\x06" * 3,
        b"\x42" * 90 + b"\0",
        b"\x2a\x02\xff\xfe",
    ]
    for message in messages:
        yield from (bytes([which]) + message for which in (0, 2, 4))
        yield from (b"\1" + struct.pack("<H", len(file)) + file + message for file in _FILES)
