"""The schema of an Avro writer, and how its records become flat samples.

A type with a logical type is put into a record of one field, which looks the same on the wire. So fastavro gives us the
raw value, and its type with it, also out of a union; its own conversions would fail for times beyond year 9999.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from io import BytesIO
from typing import Any
from uuid import UUID

from streamtrain.stream.flat import FEATURES, NOTHING_TO_READ, Refused, merged, needed

_PLAIN = {"null", "boolean", "int", "long", "float", "double", "string"}
_MARK = "streamtrain_logical_"

_PER_SECOND = {"millis": 1_000, "micros": 1_000_000, "nanos": 1_000_000_000}


class NotASchema(ValueError):
    """What is given is not a schema of Avro."""


class AvroSchema:
    """Reads what was written by one schema.

    Args:
        schema: parsed JSON.
        fields: names of the fields that are read; others are decoded and dropped.
        referred: schemas of the types that `schema` only names, each after those that it names itself.

    Raises:
        NotASchema: one of them is none.
    """

    def __init__(self, schema: Any, fields: Iterable[str], referred: Sequence[Any] = ()) -> None:
        fastavro = needed("fastavro.schema")
        self._decode = needed("fastavro").schemaless_reader
        self._meaning: dict[str, Callable[[Any], Any]] = {}
        named: dict[str, Any] = {}
        try:
            for one in referred:
                fastavro.parse_schema(self._raw(one), named_schemas=named)
            self._parsed = fastavro.parse_schema(self._raw(schema), named_schemas=named)
        except (fastavro.SchemaParseException, ValueError, LookupError, TypeError, AttributeError) as exc:
            raise NotASchema(str(exc) or type(exc).__name__) from exc
        self._is_record = isinstance(schema, Mapping) and schema.get("type") == "record"
        types = {one["name"]: one["type"] for one in schema["fields"]} if self._is_record else {}
        self._read = tuple(fields)
        self._has_map = FEATURES not in self._read and _is_map(types.get(FEATURES))
        self._drops = any(name not in self._read for name in types)
        self._kept = tuple(name for name in types if name in self._read)
        self._others = tuple(name for name in self._kept if not _is_plain(types[name]))

    def read(self, message: bytes, start: int) -> Mapping[str, Any]:
        """The fields of the record that begins at a byte of a message and ends with it; raises Refused."""
        stream = BytesIO(message)
        stream.seek(start)
        try:
            record: Any = self._decode(stream, self._parsed)
        except UnicodeDecodeError as exc:
            raise Refused("not_utf8") from exc
        except Exception as exc:  # which ones damaged bytes may give is not documented
            raise Refused("not_avro") from exc
        if stream.tell() != len(message):
            raise Refused("not_avro")
        if not isinstance(record, dict):
            raise Refused("not_an_object")
        if self._has_map:
            record = merged(record, record[FEATURES])
        if self._has_map or not self._is_record:
            return {name: self._plain(record[name]) for name in self._read if name in record}
        if self._drops:
            record = {name: record[name] for name in self._kept}
        fields: dict[str, Any] = record
        for name in self._others:
            fields[name] = self._plain(fields[name])
        return fields

    def _plain(self, value: Any) -> Any:
        """A value as JSON has it."""
        if isinstance(value, list):
            return [self._plain(one) for one in value]
        if isinstance(value, dict):
            mark, raw = next(iter(value.items()), ("", None))
            return self._meaning[mark](raw) if mark in self._meaning else NOTHING_TO_READ
        return NOTHING_TO_READ if isinstance(value, bytes) else value

    def _raw(self, schema: Any) -> Any:
        """A schema whose logical types are records of one field; the field's name is that of their meaning."""
        if isinstance(schema, list):
            return [self._raw(one) for one in schema]
        if not isinstance(schema, Mapping):
            return schema
        raw = {name: value for name, value in schema.items() if name != "logicalType"}
        raw |= {name: self._raw(raw[name]) for name in ("type", "items", "values") if name in raw}
        if isinstance(raw.get("fields"), list):
            raw["fields"] = [self._raw(one) for one in raw["fields"]]
        meaning = _meaning(schema)
        if meaning is None:
            return raw
        mark = f"{_MARK}{len(self._meaning)}"
        self._meaning[mark] = meaning
        record = {"type": "record", "name": mark}
        if "name" in raw:  # a fixed, whose name others may use: the record takes it over
            record |= {name: raw[name] for name in ("name", "namespace") if name in raw}
            raw = {"type": "fixed", "name": f"{mark}_raw", "size": raw["size"]}
        return record | {"fields": [{"name": mark, "type": raw}]}


def _is_plain(schema: Any) -> bool:
    """Whether values of a type are as JSON has them already."""
    if isinstance(schema, list):
        return all(map(_is_plain, schema))
    if not isinstance(schema, Mapping):
        return schema in _PLAIN
    if schema["type"] == "array":
        return _is_plain(schema["items"])
    return schema["type"] == "enum" or (schema["type"] in _PLAIN and "logicalType" not in schema)


def _is_map(schema: Any) -> bool:
    """Whether a type is a map, or a union with one."""
    if isinstance(schema, list):
        return any(map(_is_map, schema))
    return isinstance(schema, Mapping) and schema.get("type") == "map"


def _meaning(schema: Mapping[str, Any]) -> Callable[[Any], Any] | None:
    """What turns a raw value of a logical type into a number or text; None where it stays as it is."""
    base, logical = schema.get("type"), schema.get("logicalType")
    if not isinstance(logical, str):
        return None
    if logical == "decimal" and base in ("bytes", "fixed"):
        scale = int(schema.get("scale", 0))
        return lambda raw: _decimal(int.from_bytes(raw, "big", signed=True), scale)
    if logical == "uuid" and base == "fixed":
        return lambda raw: str(UUID(bytes=raw))
    if logical == "date" and base == "int":
        return lambda raw: raw * 86_400
    kind, _, unit = logical.rpartition("-")
    if kind in ("timestamp", "local-timestamp", "time") and unit in _PER_SECOND and base in ("int", "long"):
        per_second = _PER_SECOND[unit]
        return lambda raw: raw / per_second
    return None


def _decimal(unscaled: int, scale: int) -> int | float:
    return unscaled if scale == 0 else float(Decimal(unscaled).scaleb(-scale))


def schema_of(text: str) -> Any:
    """The JSON of a schema.

    Raises:
        NotASchema: it is not JSON.
    """
    try:
        return json.loads(text)
    except ValueError as exc:
        raise NotASchema(str(exc)) from exc
