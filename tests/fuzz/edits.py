"""Edits: what is done to files and values that were written well, as a fuzzer's bytes say.

So few bytes change the meaning of JSON in depth, and the bytes of everything else anywhere.
"""

import json
import struct
from collections.abc import MutableMapping
from typing import Any

_DEEP, _LONG = "@deep@", "@long@"  # in the text instead: json writes neither
_INSTEAD = {f'"{_DEEP}"': "[" * 20_000 + "]" * 20_000, f'"{_LONG}"': "9" * 5000}
# Inputs name them by position, so further ones come last.
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 1 << 16, (1 << 31) - 1, 1 << 32, (1 << 63) - 1, 1 << 64, 1 << 70),
    *(-(1 << 63), 0.5, -0.0, 1e-320, 1e20, 1e308, float("inf"), float("-inf"), float("nan")),
    *("", "x", "0", "1", "-1", "NaN", "..", "/", "{", "\0", "\ud800", "é" * 300, "9" * 5000, _DEEP, _LONG),
    *([], {}, [[]], [0], [1, 2, 3], [""], {"": 0}, {"0": 1}, {"x": {}}),
]
Blobs = MutableMapping[Any, bytes]


def edited_json(data: bytes, node: int, chosen: int) -> bytes:
    """JSON with the value of one of its nodes, in order of the text, replaced by one of `VALUES`, or deleted.

    The nodes of JSON that is a text in it count too.
    """
    try:
        value = _opened(json.loads(data))
    except (ValueError, RecursionError):
        return data
    places = [*_places(value)]
    if not places:
        return _text(VALUES[chosen % len(VALUES)])
    container, at = places[node % len(places)]
    if chosen == 0xFF:
        del container[at]
    elif chosen == 0xFE and isinstance(container, dict):
        container[_key(VALUES[node % len(VALUES)])] = container.pop(at)
    else:
        container[at] = VALUES[chosen % len(VALUES)]
    return _text(value)


class _Inner(dict[str, Any]):
    """JSON that is a text within JSON."""


def _opened(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("{"):
        try:
            return _Inner(_opened(json.loads(value)))
        except (ValueError, RecursionError):
            return value
    if isinstance(value, dict):
        return {key: _opened(inner) for key, inner in value.items()}
    return [_opened(inner) for inner in value] if isinstance(value, list) else value


def _closed(value: Any) -> Any:
    if isinstance(value, _Inner):
        return _text({**value}).decode()
    if isinstance(value, dict):
        return {key: _closed(inner) for key, inner in value.items()}
    return [_closed(inner) for inner in value] if isinstance(value, list) else value


def _places(value: Any) -> Any:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for at, inner in [*inside]:
        yield value, at
        yield from _places(inner)


def _key(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _text(value: Any) -> bytes:
    text = json.dumps(_closed(value))
    for mark, instead in _INSTEAD.items():
        text = text.replace(mark, instead)
    return text.encode()


def apply(data: bytes, blobs: Blobs, prefixes: MutableMapping[Any, bytes] | None = None) -> None:
    """Edits blobs in place; those that are deleted are no longer there.

    An edit is an operation and a blob's position, a byte each, then: 0: a size of two bytes, and the bytes to be there
    instead; 1: where, two bytes, a size of one byte, and the bytes that are there then; 2: where to cut it off, two
    bytes; 3: node and value as of `edited_json`; 4: nothing, it is deleted; 5: another blob's position, of which it
    becomes a copy.

    Args:
        data: the edits.
        blobs: by name.
        prefixes: by name, what stands before the JSON of a blob.
    """
    names = [*blobs]
    at = 0
    while at + 2 <= len(data) and names:
        operation, name = data[at] % 6, names[data[at + 1] % len(names)]
        at += 2
        blob = blobs.get(name, b"")
        if operation == 0:
            size = int.from_bytes(data[at : at + 2], "little")
            blobs[name] = data[at + 2 : at + 2 + size]
            at += 2 + size
        elif operation == 1 and at + 3 <= len(data):
            where, size = struct.unpack_from("<HB", data, at)
            where %= len(blob) + 1
            part = data[at + 3 : at + 3 + size]
            blobs[name] = blob[:where] + part + blob[where + len(part) :]
            at += 3 + size
        elif operation == 2:
            where = int.from_bytes(data[at : at + 2], "little")
            blobs[name] = blob[: where % (len(blob) + 1)]
            at += 2
        elif operation == 3 and at + 2 <= len(data):
            before = (prefixes or {}).get(name, b"")
            blobs[name] = before + edited_json(blob.removeprefix(before), data[at], data[at + 1])
            at += 2
        elif operation == 4:
            blobs.pop(name, None)
        elif operation == 5 and at < len(data):
            blobs[name] = blobs.get(names[data[at] % len(names)], b"")
            at += 1
        else:
            return


def replace(name: int, content: bytes) -> bytes:
    """The edit that puts bytes in place of a blob."""
    return bytes([0, name]) + struct.pack("<H", len(content)) + content


def in_json(name: int, node: int, value: Any) -> bytes:
    """The edit that puts a value in place of a node of a blob."""
    chosen = next(i for i, one in enumerate(VALUES) if one is value or (type(one) is type(value) and one == value))
    return bytes([3, name, node, chosen])
