"""Protobuf: messages of one type, or in Confluent's wire format, whose types a registry or a descriptor set has."""

import re
import subprocess
import sys
from base64 import b64decode
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from streamtrain.errors import BadSample, ConfigError
from streamtrain.model.batch import Batch
from streamtrain.model.model import Model
from streamtrain.stream.formats.record import (
    FEATURES,
    UNREADABLE,
    InvalidSchema,
    RecordReader,
    RefusedRecord,
    merge_features,
)
from streamtrain.stream.formats.registry import HEADER_BYTES, MAGIC, SchemaRegistry, UnknownSchema

_WRAPPERS = {
    f"google.protobuf.{name}Value"
    for name in ("Bool", "Double", "Float", "Int32", "Int64", "String", "UInt32", "UInt64")
}
# Files that registries do not keep, because the packages of every language have them.
_WELL_KNOWN = re.compile(r"google/(protobuf|type)/\w+\.proto|confluent/(type/)?\w+\.proto")
_FIRST = (0,)  # the first message of a file, where a message's header does not name one
_MAX_DEPTH = 64  # of types within types
_MAX_WRAPPERS = 64
_PROTOC_SECONDS = 60

_Convert = Callable[[Any], Any]


class MessageTypes:
    """The message types of a .proto file.

    Args:
        files: serialized FileDescriptorProtos, each after those that it imports; the last is meant.

    Raises:
        InvalidSchema: one of them is not a FileDescriptorProto, or imports what is missing.
    """

    def __init__(self, files: Sequence[bytes]) -> None:
        self._pool = descriptor_pool.DescriptorPool()
        self._file = descriptor_pb2.FileDescriptorProto()
        try:
            for file in files:
                self._file = descriptor_pb2.FileDescriptorProto.FromString(file)
                self._pool.Add(self._file)
            if self._file.message_type:
                self.find([0])
        except (DecodeError, TypeError, LookupError) as exc:
            raise InvalidSchema(str(exc)) from exc
        if not self._file.message_type:
            raise InvalidSchema("it has no message")

    @classmethod
    def from_descriptor_set(cls, data: bytes) -> "MessageTypes":
        """The types of the last file of a serialized FileDescriptorSet; raises InvalidSchema."""
        try:
            return cls([file.SerializeToString() for file in descriptor_pb2.FileDescriptorSet.FromString(data).file])
        except DecodeError as exc:
            raise InvalidSchema(str(exc)) from exc

    def find(self, path: Sequence[int]) -> Any:
        """The descriptor of a message: position in the file, then in the message around it, and so on.

        Raises:
            IndexError: there is none.
        """
        names, types = [self._file.package] if self._file.package else [], self._file.message_type
        for position in path:
            if not 0 <= position < len(types):
                raise IndexError(path)
            names.append(types[position].name)
            types = types[position].nested_type
        try:
            return self._pool.FindMessageTypeByName(".".join(names))
        except KeyError as exc:
            raise IndexError(path) from exc


def default_types() -> MessageTypes:
    """The types of schemas/sample.proto."""
    import streamtrain.stream.formats.sample_pb2 as sample

    return MessageTypes([sample.DESCRIPTOR.serialized_pb])


def read_descriptor_set(path: Path) -> MessageTypes:
    """The types of a file that `protoc --include_imports --descriptor_set_out` has written.

    Raises:
        ConfigError: it is not a descriptor set, or cannot be read.
    """
    try:
        return MessageTypes.from_descriptor_set(path.read_bytes())
    except OSError as exc:
        raise ConfigError(f"schema file {path} cannot be read: {exc.strerror}") from exc
    except InvalidSchema as exc:
        raise ConfigError(
            f"schema file {path} is not a Protobuf descriptor set: {exc}; write one with "
            "`protoc --include_imports --descriptor_set_out=FILE`"
        ) from exc


def parse_registered(schemas: Mapping[str, str]) -> MessageTypes:
    """The types of .proto files as a registry has them.

    Confluent's registry gives all of them as base64 of a FileDescriptorProto. Others, such as Apicurio, give what came
    to them, and Java's serializers register text, which grpcio-tools compile.

    Args:
        schemas: the files by name, each after those that it imports; the last is meant.

    Raises:
        ConfigError: grpcio-tools are missing.
        InvalidSchema: they are not .proto files.
    """
    files: dict[str, bytes] = {}
    try:
        for name, text in schemas.items():
            file = descriptor_pb2.FileDescriptorProto.FromString(b64decode(text, validate=True))
            file.name = name
            for imported in file.dependency:
                _add_well_known(imported, files)
            files[name] = file.SerializeToString()
    except DecodeError as exc:
        raise InvalidSchema(str(exc)) from exc
    except InvalidSchema:
        raise
    except ValueError:  # it is not base64
        return _compile(schemas)
    return MessageTypes(list(files.values()))


def _add_well_known(name: str, files: dict[str, bytes]) -> None:
    """Adds a file and what it imports from the installed packages, unless it has been added already."""
    if name in files:
        return
    if not _WELL_KNOWN.fullmatch(name):
        raise InvalidSchema(f"it imports {name}, which the registry does not have")
    package = "confluent_kafka.schema_registry." if name.startswith("confluent/") else ""
    try:
        file: Any = import_module(package + name.removesuffix(".proto").replace("/", ".") + "_pb2").DESCRIPTOR
    except ImportError as exc:
        raise InvalidSchema(f"it imports {name}: {exc}") from exc
    for imported in file.dependencies:
        _add_well_known(imported.name, files)
    files[name] = file.serialized_pb


def _compile(texts: Mapping[str, str]) -> MessageTypes:
    """Compiles .proto files, given by name, of which the last is meant."""
    if find_spec("grpc_tools") is None:
        raise ConfigError(
            "the schema registry has the text of a .proto: pip install grpcio-tools to compile it, or set "
            "stream.schema_file to its descriptor set"
        )
    with TemporaryDirectory() as directory:
        root = Path(directory).resolve()
        for name, text in texts.items():
            try:
                path = (root / name).resolve()
                if not path.is_relative_to(root):
                    raise InvalidSchema(f"{name!r} is not the name of a file")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(text.encode())
            except OSError as exc:  # too long, a folder, a file where a folder is to be
                raise InvalidSchema(f"{name!r} cannot be the name of a file: {exc.strerror}") from exc
            except UnicodeEncodeError as exc:
                raise InvalidSchema(f"{name!r} is not text: {exc}") from exc
        out = root / "descriptor.set"
        options = [f"-I{root}", "--include_imports", f"--descriptor_set_out={out}"]
        command = [sys.executable, "-m", "grpc_tools.protoc", *options, str(path)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", check=False, timeout=_PROTOC_SECONDS
            )
        except subprocess.TimeoutExpired as exc:
            raise InvalidSchema(f"protoc has not compiled it within {_PROTOC_SECONDS} s") from exc
        if done.returncode:
            raise InvalidSchema(done.stderr.strip().replace(f"{root}/", ""))
        return MessageTypes.from_descriptor_set(out.read_bytes())


class MessageReader:
    """Reads messages of one type.

    Args:
        descriptor: descriptor of the message type.
        fields: names of the fields that are read.
    """

    def __init__(self, descriptor: Any, fields: Iterable[str]) -> None:
        self._parse = message_factory.GetMessageClass(descriptor).FromString
        self._read = tuple(fields)
        own = [field for field in descriptor.fields if field.name in self._read]
        self._names = [field.name for field in own]
        self._values = _getter(self._names)
        self._presence = [field.name for field in own if field.has_presence]
        self._never_false = [f.name for f in own if f.has_presence and (f.message_type or f.default_value)]
        self._converters = {field.name: convert for field in own if (convert := _converter(field)) is not None}
        self._map = None
        if FEATURES not in self._read and FEATURES in descriptor.fields_by_name:
            self._map = _map_converter(descriptor.fields_by_name[FEATURES])

    def read(self, data: bytes) -> Mapping[str, Any]:
        """The fields of a message: missing ones are None where that differs from a default; raises RefusedRecord."""
        try:
            message = self._parse(data)
            sample = dict(zip(self._names, self._values(message), strict=True))
        except DecodeError as exc:
            raise RefusedRecord("not_protobuf") from exc
        if not all(sample.values()):
            for name in self._presence:
                if not sample[name] and not message.HasField(name):
                    sample[name] = None
        for name in self._never_false:
            if not message.HasField(name):
                sample[name] = None
        for name, convert in self._converters.items():
            if sample[name] is not None:
                sample[name] = convert(sample[name])
        if self._map is None:
            return sample
        # Not in the map's own order, which differs between processes, and without keys that are not read.
        convert, features = self._map, message.features
        return merge_features(sample, {name: convert(features[name]) for name in self._read if name in features})


def _getter(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Takes attributes in one call."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda message: tuple(getattr(message, name) for name in names)


def _map_converter(field: Any) -> _Convert | None:
    """Converts the values of a map from text to JSON; None of other fields."""
    entry = field.message_type
    if entry is None or not entry.GetOptions().map_entry or not {"key", "value"} <= {*entry.fields_by_name.keys()}:
        return None  # a descriptor that protoc has not written may call anything an entry
    value = entry.fields_by_name["value"]
    if entry.fields_by_name["key"].type != field.TYPE_STRING or _is_repeated(value) or not _is_repeated(field):
        return None
    return _Wrapped(value.message_type, {}) if value.message_type else _item_converter(value) or _same


class _Wrapped:
    """Reads messages of one field: the one that is set among several types, or a list of such."""

    def __init__(self, descriptor: Any, known: "dict[str, _Wrapped]") -> None:
        known[descriptor.full_name] = self
        if len(known) > _MAX_WRAPPERS:
            raise InvalidSchema(f"the values of {FEATURES} wrap more than {_MAX_WRAPPERS} types in each other")
        self._converters = {field.number: self._converter(field, known) for field in descriptor.fields}

    def __call__(self, message: Any) -> Any:
        present = message.ListFields()
        if len(present) != 1:
            return UNREADABLE if present else None
        field, value = present[0]
        return self._converters[field.number](value)

    @staticmethod
    def _converter(field: Any, known: "dict[str, _Wrapped]") -> _Convert:
        inside = field.message_type.fields if field.message_type and not _is_repeated(field) else []
        if len(inside) != 1 or not _is_repeated(inside[0]):
            return _converter(field) or _same
        (item,) = inside
        kind = item.message_type
        convert = (known.get(kind.full_name) or _Wrapped(kind, known)) if kind else _item_converter(item) or _same
        return lambda message: [convert(value) for value in getattr(message, item.name)]


def _converter(field: Any) -> _Convert | None:
    """Converts the values of a field to JSON; None where they need no conversion."""
    convert = _item_converter(field)
    if not _is_repeated(field):
        return convert
    if field.message_type and field.message_type.GetOptions().map_entry:
        return _unreadable
    return list if convert is None else lambda values: [convert(value) for value in values]


def _item_converter(field: Any) -> _Convert | None:
    """The same for one value of a field that may be repeated."""
    if field.type == field.TYPE_BYTES:
        return _unreadable
    if field.type == field.TYPE_STRING and _syntax(field.file) != "proto3":
        return _text
    if field.enum_type is not None:
        is_null = field.enum_type.full_name == "google.protobuf.NullValue"
        names = {value.number: value.name for value in reversed(field.enum_type.values)}  # of aliases the first
        return lambda number: None if is_null else names.get(number, number)
    if field.message_type is None:
        return None
    if field.message_type.full_name == "google.protobuf.Timestamp":
        return lambda time: (time.seconds * 10**9 + time.nanos) / 10**9
    return attrgetter("value") if field.message_type.full_name in _WRAPPERS else _unreadable


def _is_repeated(field: Any) -> bool:
    # protobuf 6.31 has a name for it, and deprecates the other.
    return bool(field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED)


@lru_cache(maxsize=16)
def _syntax(file: Any) -> str:
    proto = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(proto)
    return str(proto.syntax)


def _text(value: Any) -> Any:
    """Text of proto2, which protobuf does not check: it is bytes where it is not UTF-8."""
    if isinstance(value, bytes):
        raise RefusedRecord("not_utf8")
    return value


def _unreadable(_: Any) -> Any:
    return UNREADABLE


def _same(value: Any) -> Any:
    return value


class ProtobufFormat:
    """Samples in Protobuf. Not thread-safe.

    Args:
        model: the model whose samples are read.
        registry: messages are in Confluent's wire format; the registry has their types, unless `types` is given.
        types: without a registry all messages are of the first. None: those of schemas/sample.proto.

    Raises:
        ConfigError: a package is missing.
    """

    def __init__(self, model: Model, registry: SchemaRegistry | None = None, types: MessageTypes | None = None) -> None:
        self._reader = RecordReader(model)
        self._registry, self._types = registry, types
        self._registered: dict[int, MessageTypes] = {}
        self._readers: dict[tuple[int, tuple[int, ...]], MessageReader] = {}
        if registry is None:
            self._only = MessageReader((types or default_types()).find(_FIRST), self._reader.fields)

    def decode(self, messages: Sequence[bytes]) -> tuple[Batch, list[BadSample]]:
        return self._reader.decode(messages, self._only.read if self._registry is None else self._by_id)

    def _by_id(self, message: bytes) -> Mapping[str, Any]:
        schema_id, path, start = _parse_header(message)
        reader = self._readers.get((schema_id, path))
        if reader is None:
            reader = self._readers[schema_id, path] = self._make_reader(schema_id, path)
        return reader.read(message[start:])

    def _make_reader(self, schema_id: int, path: tuple[int, ...]) -> MessageReader:
        types = self._types or self._registered.get(schema_id) or self._fetch(schema_id)
        try:
            return MessageReader(types.find(path), self._reader.fields)
        except IndexError as exc:
            raise RefusedRecord("not_protobuf") from exc
        except InvalidSchema as exc:
            raise RefusedRecord("unknown_schema") from exc

    def _fetch(self, schema_id: int) -> MessageTypes:
        assert self._registry is not None
        try:
            types = parse_registered(self._registry.fetch(schema_id, "serialized"))
        except (UnknownSchema, InvalidSchema) as exc:
            self._registry.mark_unusable(schema_id, exc)
            raise RefusedRecord("unknown_schema") from exc
        self._registered[schema_id] = types
        return types


def _parse_header(message: bytes) -> tuple[int, tuple[int, ...], int]:
    """The id of the schema, the path of the message's type in its file, and where the message begins."""
    if len(message) <= HEADER_BYTES or message[0] != MAGIC:
        raise RefusedRecord("not_protobuf")
    schema_id = int.from_bytes(message[1:HEADER_BYTES])
    count, at = _read_varint(message, HEADER_BYTES)
    if not 0 <= count <= _MAX_DEPTH:
        raise RefusedRecord("not_protobuf")
    path = []
    for _ in range(count):
        position, at = _read_varint(message, at)
        path.append(position)
    return schema_id, tuple(path) or _FIRST, at


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """A zigzag varint, and where it ends."""
    value = shift = 0
    for byte in message[at : at + 5]:
        value |= (byte & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), at
    raise RefusedRecord("not_protobuf")
