"""Protobuf files, and how their messages become flat samples."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from streamtrain.stream.flat import FEATURES, NOTHING_TO_READ, Refused, merged

_WRAPPERS = {
    f"google.protobuf.{name}Value"
    for name in ("Bool", "Double", "Float", "Int32", "Int64", "String", "UInt32", "UInt64")
}


class NotASchema(ValueError):
    """What is given is not a schema of Protobuf."""


class ProtobufFile:
    """A file of message types.

    Args:
        files: serialized FileDescriptorProtos, each after those that it imports; the last is meant.

    Raises:
        NotASchema: one of them is none, or imports what is missing.
    """

    def __init__(self, files: Sequence[bytes]) -> None:
        self._pool = descriptor_pool.DescriptorPool()
        self._file = descriptor_pb2.FileDescriptorProto()
        try:
            for one in files:
                self._file = descriptor_pb2.FileDescriptorProto.FromString(one)
                self._pool.Add(self._file)
            if self._file.message_type:
                self.message([0])
        except (DecodeError, TypeError, KeyError) as exc:
            raise NotASchema(str(exc)) from exc
        if not self._file.message_type:
            raise NotASchema("it has no message")

    def message(self, path: Sequence[int]) -> Any:
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
        return self._pool.FindMessageTypeByName(".".join(names))


class MessageReader:
    """Reads messages of one type.

    Args:
        descriptor: of the type.
        fields: names of the fields that are read.
    """

    def __init__(self, descriptor: Any, fields: Iterable[str]) -> None:
        self._parse = message_factory.GetMessageClass(descriptor).FromString
        self._read = tuple(fields)
        own = [one for one in descriptor.fields if one.name in self._read]
        self._names = [one.name for one in own]
        self._values = _getter(self._names)
        self._presence = [one.name for one in own if one.has_presence]
        self._never_false = [one.name for one in own if one.has_presence and (one.message_type or one.default_value)]
        self._plain = {one.name: plain for one in own if (plain := _plain(one)) is not None}
        self._map = None
        if FEATURES not in self._read and FEATURES in descriptor.fields_by_name:
            self._map = _map_value(descriptor.fields_by_name[FEATURES])

    def read(self, data: bytes) -> Mapping[str, Any]:
        """The fields of a message: missing ones are None where that can be told from a default; raises Refused."""
        try:
            message = self._parse(data)
            sample = dict(zip(self._names, self._values(message), strict=True))
        except DecodeError as exc:
            raise Refused("not_protobuf") from exc
        if not all(sample.values()):
            for name in self._presence:
                if not sample[name] and not message.HasField(name):
                    sample[name] = None
        for name in self._never_false:
            if not message.HasField(name):
                sample[name] = None
        for name, plain in self._plain.items():
            if sample[name] is not None:
                sample[name] = plain(sample[name])
        if self._map is None:
            return sample
        plain = self._map
        features = {name: plain(value) for name, value in message.features.items() if name in self._read}
        return merged(sample, features)


def _getter(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Takes attributes in one call."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda message: tuple(getattr(message, name) for name in names)


def _map_value(field: Any) -> Callable[[Any], Any] | None:
    """What turns the values of a map from text into JSON's; None of other fields."""
    entry = field.message_type
    if entry is None or not entry.GetOptions().map_entry or entry.fields_by_name["key"].type != field.TYPE_STRING:
        return None
    value = entry.fields_by_name["value"]
    return _Wrapped(value.message_type, {}) if value.message_type else _plain_one(value) or _same


class _Wrapped:
    """Reads messages of one field: the one that is set among several types, or a list of such."""

    def __init__(self, descriptor: Any, known: "dict[str, _Wrapped]") -> None:
        known[descriptor.full_name] = self
        self._read = {field.number: self._reader(field, known) for field in descriptor.fields}

    def __call__(self, message: Any) -> Any:
        present = message.ListFields()
        if len(present) != 1:
            return NOTHING_TO_READ if present else None
        field, value = present[0]
        return self._read[field.number](value)

    @staticmethod
    def _reader(field: Any, known: "dict[str, _Wrapped]") -> Callable[[Any], Any]:
        inside = field.message_type.fields if field.message_type and not _is_repeated(field) else []
        if len(inside) != 1 or not _is_repeated(inside[0]):
            return _plain(field) or _same
        (item,) = inside
        kind = item.message_type
        one = (known.get(kind.full_name) or _Wrapped(kind, known)) if kind else _plain_one(item) or _same
        return lambda message: [one(value) for value in getattr(message, item.name)]


def _plain(field: Any) -> Callable[[Any], Any] | None:
    """What turns the values of a field into JSON's; None where they are already."""
    one = _plain_one(field)
    if not _is_repeated(field):
        return one
    if field.message_type and field.message_type.GetOptions().map_entry:
        return _nothing
    return list if one is None else lambda values: [one(value) for value in values]


def _plain_one(field: Any) -> Callable[[Any], Any] | None:
    """The same, of one of a repeated field's."""
    if field.type == field.TYPE_BYTES:
        return _nothing
    if field.type == field.TYPE_STRING:
        return None if _is_proto3(field) else _text
    if field.enum_type is not None:
        if field.enum_type.full_name == "google.protobuf.NullValue":
            return lambda _: None
        names = {value.number: value.name for value in reversed(field.enum_type.values)}  # of aliases the first
        return lambda number: names.get(number, number)
    return None if field.message_type is None else _plain_message(field.message_type.full_name)


def _plain_message(name: str) -> Callable[[Any], Any]:
    if name == "google.protobuf.Timestamp":
        return lambda moment: (moment.seconds * 10**9 + moment.nanos) / 10**9
    return attrgetter("value") if name in _WRAPPERS else _nothing


def _is_repeated(field: Any) -> bool:
    # protobuf 6.31 has a name for it, and deprecates the other.
    return bool(field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED)


def _is_proto3(field: Any) -> bool:
    file = descriptor_pb2.FileDescriptorProto()
    field.file.CopyToProto(file)
    return bool(file.syntax == "proto3")


def _text(value: Any) -> Any:
    """The text of an older syntax, which protobuf does not look at: it is bytes where it is not UTF-8."""
    if isinstance(value, bytes):
        raise Refused("not_utf8")
    return value


def _nothing(_: Any) -> Any:
    return NOTHING_TO_READ


def _same(value: Any) -> Any:
    return value
