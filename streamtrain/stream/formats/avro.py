"""Avro: records whose fields are found by name, read by the schema they were written with.

A message is decoded within bounds, whatever its schema allows: types that contain themselves are followed to a depth of
64, and a message yields at most four values for each of its bytes and 1,000 more: an array of nulls, whose length takes
a few bytes, cannot fill the memory. Logical types are converted from raw values, so times go beyond the year 9999.
"""

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any
from uuid import UUID

from streamtrain.errors import BadSample, ConfigError
from streamtrain.model.batch import Batch
from streamtrain.model.model import Model
from streamtrain.stream.formats.record import (
    FEATURES,
    UNREADABLE,
    InvalidSchema,
    RecordReader,
    RefusedRecord,
    import_optional,
    merge_features,
)
from streamtrain.stream.formats.registry import HEADER_BYTES, MAGIC, SchemaRegistry, UnknownSchema

_MAX_SCHEMA_CHARACTERS = 1 << 20
_MAX_DEPTH = 64  # of types within types
_MAX_BRACKETS = 200  # of a schema's JSON within each other: several for each type
_VALUES_PER_BYTE = 4  # of a message at most, plus:
_MORE_VALUES = 1000
_MAX_DECIMAL_BYTES = 128  # 308 digits, as a double has
_MAX_SCALE = 1000
_LONG_BITS = 64
_UUID_BYTES = 16
_UNITS_PER_SECOND = {"millis": 1_000, "micros": 1_000_000, "nanos": 1_000_000_000}
_SINGLE_OBJECT = b"\xc3\x01"
_SINGLE_OBJECT_BYTES = 10  # these two, and the fingerprint of the schema

_Read = Callable[[bytes, int, int], tuple[Any, int]]
"""Reads the value that begins at a byte of a message, at a depth; returns it, and where it ends."""


class AvroSchema:
    """Reads what was written by one schema. Not thread-safe.

    Args:
        schema: parsed JSON.
        fields: names of the fields that are read; others are decoded and dropped.
        references: schemas of the types that `schema` only names, each after those that it names itself.

    Raises:
        InvalidSchema: one of them is not an Avro schema, or nests too deeply.
    """

    def __init__(self, schema: Any, fields: Iterable[str], references: Sequence[Any] = ()) -> None:
        self._fields = frozenset(fields)
        self._named: dict[str, _Read | None] = {}  # None: is being compiled
        self._remaining = 0  # values that the message may have
        try:
            for each in (*references, schema):
                _check_nesting(each)
                self._read = self._compile(each, "")
            self._has_map = FEATURES not in self._fields and _has_feature_map(schema)
        except InvalidSchema:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as exc:
            raise InvalidSchema(f"{type(exc).__name__}: {exc}") from exc

    def read(self, message: bytes, start: int) -> Mapping[str, Any]:
        """The fields of the record that begins at a byte of a message and ends with it; raises RefusedRecord."""
        self._remaining = _VALUES_PER_BYTE * (len(message) - start) + _MORE_VALUES
        try:
            record, end = self._read(message, start, 0)
        except UnicodeDecodeError as exc:
            raise RefusedRecord("not_utf8") from exc
        except (IndexError, struct.error) as exc:  # the message is cut off
            raise RefusedRecord("not_avro") from exc
        if end != len(message):
            raise RefusedRecord("not_avro")
        if type(record) is not dict or record is UNREADABLE:
            raise RefusedRecord("not_an_object")
        if self._has_map:
            features = record[FEATURES]  # which may be of another type of a union
            record = merge_features(record, features if isinstance(features, dict) else None)
        fields = self._fields
        return {n: UNREADABLE if type(value) is dict else value for n, value in record.items() if n in fields}

    def _compile(self, schema: Any, namespace: str) -> _Read:
        if isinstance(schema, str):
            return _PRIMITIVES.get(schema) or self._reference(schema, namespace)
        match "union" if isinstance(schema, list) else schema["type"]:
            case "union":
                return self._union([self._compile(branch, namespace) for branch in schema])
            case "array":
                return self._array(self._compile(schema["items"], namespace))
            case "map":
                return self._map(self._compile(schema["values"], namespace))
            case "record" | "error" | "fixed" | "enum":
                return self._definition(schema, namespace)
        convert = _converter(schema)
        base = _read_bytes if convert and schema["type"] == "bytes" else self._compile(schema["type"], namespace)
        return _converted(base, convert) if convert else base

    def _reference(self, name: str, namespace: str) -> _Read:
        full = _full_name(name, namespace)
        named, full = self._named, full if full in self._named else name
        if full not in named:
            raise InvalidSchema(f"unknown type {name!r}")

        def read(data: bytes, at: int, depth: int) -> tuple[Any, int]:
            definition = named[full]
            assert definition is not None
            return definition(data, at, depth)

        return named[full] or read

    def _definition(self, schema: Mapping[str, Any], namespace: str) -> _Read:
        name = _full_name(schema["name"], schema.get("namespace", namespace))
        if name in self._named:
            raise InvalidSchema(f"type {name} is defined twice")
        self._named[name] = None
        match schema["type"]:
            case "fixed":
                size = schema["size"]
                if type(size) is not int or size < 0:
                    raise InvalidSchema(f"type {name} cannot have {size!r} bytes")
                read = _converted(lambda data, at, _: _read_raw(data, at, size), _converter(schema) or _unreadable)
            case "enum":
                read = _enum([str(symbol) for symbol in schema["symbols"]])
            case _:
                inner = name.rpartition(".")[0]
                read = self._record(
                    [(str(each["name"]), self._compile(each["type"], inner)) for each in schema["fields"]]
                )
        self._named[name] = read
        return read

    def _record(self, fields: Sequence[tuple[str, _Read]]) -> _Read:
        def read(data: bytes, at: int, depth: int) -> tuple[Any, int]:
            self._descend(depth, len(fields))
            values = {}
            for name, read_field in fields:
                values[name], at = read_field(data, at, depth + 1)
            return values, at

        return read

    def _union(self, branches: Sequence[_Read]) -> _Read:
        def read(data: bytes, at: int, depth: int) -> tuple[Any, int]:
            self._descend(depth, 1)
            branch, at = _read_long(data, at)
            if not 0 <= branch < len(branches):
                raise RefusedRecord("not_avro")
            return branches[branch](data, at, depth + 1)

        return read

    def _array(self, item: _Read) -> _Read:
        def read(data: bytes, at: int, depth: int) -> tuple[Any, int]:
            values: list[Any] = []
            while True:
                count, at = _read_block(data, at)
                if not count:
                    return values, at
                for _ in range(count):
                    self._descend(depth, 1)
                    value, at = item(data, at, depth + 1)
                    values.append(UNREADABLE if type(value) is dict else value)

        return read

    def _map(self, item: _Read) -> _Read:
        def read(data: bytes, at: int, depth: int) -> tuple[Any, int]:
            values: dict[str, Any] = {}
            while True:
                count, at = _read_block(data, at)
                if not count:
                    return values, at
                for _ in range(count):
                    self._descend(depth, 1)
                    key, at = _read_string(data, at, depth)
                    value, at = item(data, at, depth + 1)
                    values[key] = UNREADABLE if type(value) is dict else value

        return read

    def _descend(self, depth: int, values: int) -> None:
        """Counts values that are about to be read."""
        self._remaining -= values
        if self._remaining < 0:
            raise RefusedRecord("too_large")
        if depth >= _MAX_DEPTH:
            raise RefusedRecord("too_deep")


def _read_long(data: bytes, at: int, _: int = 0) -> tuple[int, int]:
    byte = data[at]
    if byte < 0x80:
        return (byte >> 1) ^ -(byte & 1), at + 1
    value, shift = byte & 0x7F, 7
    while byte >= 0x80 and shift < _LONG_BITS:
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        shift += 7
    if byte >= 0x80 or value >> _LONG_BITS:
        raise RefusedRecord("not_avro")
    return (value >> 1) ^ -(value & 1), at + 1


def _read_block(data: bytes, at: int) -> tuple[int, int]:
    """The number of items of a block of an array or a map, and where these begin."""
    count, at = _read_long(data, at)
    return (count, at) if count >= 0 else (-count, _read_long(data, at)[1])  # -count, size


def _read_raw(data: bytes, at: int, size: int) -> tuple[bytes, int]:
    end = at + size
    if size < 0 or end > len(data):
        raise RefusedRecord("not_avro")
    return data[at:end], end


def _read_string(data: bytes, at: int, _: int) -> tuple[str, int]:
    byte = data[at]
    size, at = (byte >> 1, at + 1) if byte < 0x80 and not byte & 1 else _read_long(data, at)
    raw, at = _read_raw(data, at, size)
    return raw.decode(), at


def _read_bytes(data: bytes, at: int, _: int) -> tuple[bytes, int]:
    size, at = _read_long(data, at)
    return _read_raw(data, at, size)


def _enum(symbols: Sequence[str]) -> _Read:
    def read(data: bytes, at: int, _: int) -> tuple[Any, int]:
        index, at = _read_long(data, at)
        if not 0 <= index < len(symbols):
            raise RefusedRecord("not_avro")
        return symbols[index], at

    return read


def _converted(read_raw: _Read, convert: Callable[[Any], Any]) -> _Read:
    def read(data: bytes, at: int, depth: int) -> tuple[Any, int]:
        raw, at = read_raw(data, at, depth)
        return convert(raw), at

    return read


def _unreadable(_: bytes) -> Any:
    return UNREADABLE


def _number(format: str) -> _Read:
    packed = struct.Struct(format)
    unpack, size = packed.unpack_from, packed.size
    return lambda data, at, _: (unpack(data, at)[0], at + size)


_PRIMITIVES: dict[str, _Read] = {
    "null": lambda data, at, _: (None, at),
    "boolean": lambda data, at, _: (data[at] != 0, at + 1),
    "int": _read_long,
    "long": _read_long,
    "float": _number("<f"),
    "double": _number("<d"),
    "string": _read_string,
    "bytes": _converted(_read_bytes, _unreadable),
}


def _full_name(name: str, namespace: str) -> str:
    return name if "." in name or not namespace else f"{namespace}.{name}"


def _has_feature_map(schema: Any) -> bool:
    """Whether the record has a field of features that is a map, or a union with one."""
    if not isinstance(schema, Mapping) or schema.get("type") != "record":
        return False
    kinds = [each["type"] for each in schema["fields"] if each["name"] == FEATURES]
    branches = kinds[0] if kinds and isinstance(kinds[0], list) else kinds
    return any(isinstance(kind, Mapping) and kind.get("type") == "map" for kind in branches)


def _converter(schema: Mapping[str, Any]) -> Callable[[Any], Any] | None:
    """Turns a raw value of a logical type into a number or text; None where it stays as it is."""
    base, logical = schema["type"], schema.get("logicalType")
    if not isinstance(logical, str):
        return None
    scale = schema.get("scale", 0)
    # A logical type that is not valid leaves the type as it is, as Avro says, and a field of it is refused.
    if logical == "decimal" and base in ("bytes", "fixed") and type(scale) is int and 0 <= scale <= _MAX_SCALE:
        return lambda raw: _decimal(raw, scale)
    if logical == "uuid" and base == "fixed" and schema.get("size") == _UUID_BYTES:
        return lambda raw: str(UUID(bytes=raw))
    if logical == "date" and base == "int":
        return lambda raw: raw * 86_400
    kind, _, unit = logical.rpartition("-")
    if kind in ("timestamp", "local-timestamp", "time") and unit in _UNITS_PER_SECOND and base in ("int", "long"):
        per_second = _UNITS_PER_SECOND[unit]
        return lambda raw: raw / per_second
    return None


def _decimal(raw: bytes, scale: int) -> Any:
    if len(raw) > _MAX_DECIMAL_BYTES:
        return UNREADABLE
    unscaled = int.from_bytes(raw, "big", signed=True)
    return unscaled if scale == 0 else unscaled / 10**scale


def _parse_schema(text: str) -> Any:
    if len(text) > _MAX_SCHEMA_CHARACTERS:
        raise InvalidSchema(f"it has {len(text):,} characters; at most {_MAX_SCHEMA_CHARACTERS:,} are read")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise InvalidSchema(str(exc)) from exc


def _check_nesting(schema: Any) -> None:
    """Raises InvalidSchema for JSON too deep for recursive functions."""
    level = [schema]
    for _ in range(_MAX_BRACKETS):
        inside = [each for each in level if isinstance(each, list | Mapping)]
        level = [value for each in inside for value in (each.values() if isinstance(each, Mapping) else each)]
        if not level:
            return
    raise InvalidSchema(f"its JSON nests deeper than {_MAX_BRACKETS} brackets")


class AvroFormat:
    """Samples in Avro. Not thread-safe.

    Args:
        model: the model whose samples are read.
        registry: has the schemas; messages are in Confluent's wire format.
        schema: without a registry, that of all messages, as JSON or parsed; None: the one in schemas/sample.avsc.
            Messages may be in Avro's single-object encoding, too.

    Raises:
        ConfigError: schema is not an Avro schema, it is given in addition to a registry, or a package is missing.
    """

    def __init__(
        self, model: Model, registry: SchemaRegistry | None = None, schema: str | Mapping[str, Any] | None = None
    ) -> None:
        import_optional("fastavro")
        self._reader = RecordReader(model)
        self._registry = registry
        self._schemas: dict[int, AvroSchema] = {}
        if registry is not None and schema is not None:
            raise ConfigError("Avro with a registry uses the registry's schemas: do not give a schema as well")
        if registry is None:
            self._schema, self._prefix = self._single(schema)

    def decode(self, messages: Sequence[bytes]) -> tuple[Batch, list[BadSample]]:
        return self._reader.decode(messages, self._by_schema if self._registry is None else self._by_id)

    def _single(self, schema: str | Mapping[str, Any] | None) -> tuple[AvroSchema, bytes]:
        """The schema of all messages, and what they begin with in the single-object encoding."""
        fastavro = import_optional("fastavro.schema")
        if schema is None:
            schema = files("streamtrain.stream.formats").joinpath("sample.avsc").read_text()
        try:
            parsed = _parse_schema(schema) if isinstance(schema, str) else schema
            reader = AvroSchema(parsed, self._reader.fields)
            fingerprint = fastavro.fingerprint(fastavro.to_parsing_canonical_form(parsed), "CRC-64-AVRO")
        except (fastavro.SchemaParseException, ValueError, LookupError, TypeError, AttributeError) as exc:
            raise ConfigError(f"not an Avro schema: {exc}") from exc
        return reader, _SINGLE_OBJECT + bytes.fromhex(fingerprint)

    def _by_schema(self, message: bytes) -> Mapping[str, Any]:
        return self._schema.read(message, _SINGLE_OBJECT_BYTES if message.startswith(self._prefix) else 0)

    def _by_id(self, message: bytes) -> Mapping[str, Any]:
        if len(message) < HEADER_BYTES or message[0] != MAGIC:
            raise RefusedRecord("not_avro")
        schema_id = int.from_bytes(message[1:HEADER_BYTES])
        schema = self._schemas.get(schema_id)
        if schema is None:
            schema = self._schemas[schema_id] = self._fetch(schema_id)
        return schema.read(message, HEADER_BYTES)

    def _fetch(self, schema_id: int) -> AvroSchema:
        assert self._registry is not None
        try:
            *references, schema = [_parse_schema(text) for text in self._registry.fetch(schema_id).values()]
            return AvroSchema(schema, self._reader.fields, references)
        except (UnknownSchema, InvalidSchema) as exc:
            self._registry.mark_unusable(schema_id, exc)
            raise RefusedRecord("unknown_schema") from exc
