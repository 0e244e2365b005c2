"""Protobuf: messages of one type, or in Confluent's wire format, whose types a registry or a file has."""

from collections.abc import Mapping, Sequence
from typing import Any

from streamtrain.errors import BadSample
from streamtrain.model.batch import Batch
from streamtrain.model.model import Model
from streamtrain.stream.flat import FlatReader, Refused
from streamtrain.stream.protobuf_files import default_file, from_texts
from streamtrain.stream.protobuf_schema import MessageReader, NotASchema, ProtobufFile
from streamtrain.stream.registry import HEADER_BYTES, MAGIC, Registry, UnknownSchema

_FIRST = (0,)  # where a message's type is not said, it is the first of the file
_MAIN = "streamtrain_main.proto"  # the file of a schema has no name in the registry


class ProtobufFormat:
    """Samples in Protobuf. Not thread-safe.

    Args:
        model: whose samples are read.
        registry: messages are in Confluent's wire format; the registry has their types, if no file has.
        file: has the types. Without a registry all messages are of its first. None: the one in schemas/sample.proto.

    Raises:
        ConfigError: a package is missing.
    """

    def __init__(self, model: Model, registry: Registry | None = None, file: ProtobufFile | None = None) -> None:
        self._reader = FlatReader(model)
        self._registry = registry
        self._file = file
        self._readers: dict[tuple[int, tuple[int, ...]], MessageReader] = {}
        if registry is None:
            types = file or default_file()
            self._only = MessageReader(types.message(_FIRST), self._reader.fields)

    def decode(self, messages: Sequence[bytes]) -> tuple[Batch, list[BadSample]]:
        """See Format."""
        if self._registry is None:
            return self._reader.decode(messages, self._only.read)
        return self._reader.decode(messages, self._by_id)

    def _by_id(self, message: bytes) -> Mapping[str, Any]:
        number, path, start = _header(message)
        reader = self._readers.get((number, path))
        if reader is None:
            reader = self._readers[number, path] = self._fetch(number, path)
        return reader.read(message[start:])

    def _fetch(self, number: int, path: tuple[int, ...]) -> MessageReader:
        assert self._registry is not None
        try:
            types = self._file or self._load(self._registry.schema(number, "serialized"))
        except (UnknownSchema, NotASchema) as exc:
            self._registry.forget(number)
            raise Refused("unknown_schema") from exc
        try:
            return MessageReader(types.message(path), self._reader.fields)
        except IndexError as exc:
            raise Refused("not_protobuf") from exc

    def _load(self, schema: Any) -> ProtobufFile:
        texts: dict[str, str] = {}
        self._add(_MAIN, schema, texts)
        return from_texts(texts)

    def _add(self, name: str, schema: Any, texts: dict[str, str]) -> None:
        """Adds the files that a file imports, then itself."""
        assert self._registry is not None
        for other, its in self._registry.referenced(schema, "serialized").items():
            if other not in texts:
                self._add(other, its, texts)
        texts[name] = schema.schema_str


def _header(message: bytes) -> tuple[int, tuple[int, ...], int]:
    """The id of the schema, the path of the message's type in its file, and where the message begins."""
    if len(message) <= HEADER_BYTES or message[0] != MAGIC:
        raise Refused("not_protobuf")
    number = int.from_bytes(message[1:HEADER_BYTES])
    count, at = _varint(message, HEADER_BYTES)
    if count < 0:
        raise Refused("not_protobuf")
    path = []
    for _ in range(count):
        position, at = _varint(message, at)
        path.append(position)
    return number, tuple(path) or _FIRST, at


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A zigzag varint, and where it ends."""
    value = shift = 0
    for byte in message[at : at + 5]:
        value |= (byte & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), at
    raise Refused("not_protobuf")
