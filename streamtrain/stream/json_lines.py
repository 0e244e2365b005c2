"""JSON lines: the lines of a stream, one field of theirs, and their fields as text and lists (`Rules`)."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec
import pyarrow as pa

from streamtrain.errors import ConfigError
from streamtrain.stream.csv_file import BLOCK, Rules, make_lists

_MAX_LINE = 16 << 20  # bytes
_EXACT = 1 << 53  # up to which a double is any integer
_PART = 256  # messages that are converted together
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


def read_lines(read: Callable[[int], bytes]) -> Iterator[list[bytes]]:
    """The lines of a stream, many at once.

    Args:
        read: reads up to a number of bytes; b"" at the end.

    Raises:
        ConfigError: a line has more than 16 MiB.
    """
    rest = b""
    while chunk := read(BLOCK):
        lines = (rest + chunk).replace(b"\r\n", b"\n").split(b"\n")
        rest = lines.pop()
        if len(rest) > _MAX_LINE:
            raise ConfigError(f"a line has more than {_MAX_LINE:,} bytes: these are not JSON lines")
        yield lines
    yield [rest]


def field_reader(name: str | None) -> Callable[[bytes], int | float | str | None] | None:
    """Reads one field of a JSON message; None where it is missing, of another type, or the message is malformed."""
    if name is None:
        return None
    try:
        struct = msgspec.defstruct("Field", [("value", int | float | str | None, None)], rename={"value": name})
    except ValueError as exc:
        raise ConfigError(f"a field cannot be named {name!r}: {exc}") from exc
    decode: Callable[[bytes], Any] = msgspec.json.Decoder(struct).decode

    def read(message: bytes) -> int | float | str | None:
        try:
            value: int | float | str | None = decode(message).value
            return value
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return None  # the worker that reads the message refuses it

    return read


def convert(messages: list[bytes], rules: Rules, *, checked: bool) -> list[bytes]:
    """The messages with the fields of `rules` as text and lists. One that is malformed stays as it is.

    Args:
        messages: JSON objects.
        rules: what is text, and what is a list.
        checked: whether it is an error if none of the messages has one of the fields.

    Raises:
        ConfigError: no message has a field that `rules` names.
    """
    samples = [_fields(message) for message in messages]
    changed: set[int] = set()
    for name in dict.fromkeys(rules.names):
        if checked and not any(sample and name in sample for sample in samples):
            raise ConfigError(f"none of the first {len(samples):,} samples has a field {name!r}")
        texts = [_text(sample[name]) if sample and name in sample else None for sample in samples]
        if name in rules.lists:
            values = make_lists(name, pa.array(texts, pa.string()), rules).to_pylist()
        else:
            values = [None if text is None else _encode(text).decode() for text in texts]
        for i, (sample, text, value) in enumerate(zip(samples, texts, values, strict=True)):
            if sample and text is not None and value.encode() != bytes(sample[name]):
                sample[name] = msgspec.Raw(value.encode())
                changed.add(i)
    return [_encode(samples[i]) if i in changed else message for i, message in enumerate(messages)]


def converted(messages: Iterable[bytes], rules: Rules) -> Iterator[bytes]:
    """All messages as `convert` has them, read no further ahead than a few."""
    left = iter(messages)
    while part := [*islice(left, _PART)]:
        yield from convert(part, rules, checked=False)


def _fields(message: bytes) -> dict[str, msgspec.Raw] | None:
    try:
        return _decode(message)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None  # whoever learns the message refuses it


def _text(raw: msgspec.Raw) -> str | None:
    """A text, number or boolean as text; None: another value, or a malformed one."""
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT:
        return str(int(value))  # what pandas makes of integers with gaps
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return str(raw, "utf-8") if isinstance(value, bool | float) else None
