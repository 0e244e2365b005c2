"""Seeds: inputs to begin with, hand-made or made by the code that writes what the targets read."""

import struct
from collections.abc import Callable, Iterator

SAMPLES = [
    b'{"ts":1700000000.25,"label":1,"dwell":2.5,"user":"u\\u00e942","item":77,'
    b'"genres":["a","\xc3\xa9"],"price":-3.5e0,"age":40}',
    b'{"ts":"2024-02-29T23:59:59.25+01:30","label":true,"user":["a",1,-0],"genres":[],"price":0.1,"w":2,"more":{"a":[{}]}}',
    b' { "label" : 0 ,\n"ts" : 0, "user" : "\\ud83d\\ude00" , "genres" : "z" , "price" : 9007199254740993.0 } ',
    b'{"ts":1e9,"label":1,"user":"a","user":"b","genres":[1,2,3,4],"price":1e999,"age":null}',
    b'{"ts":253402300800,"label":2,"user":1.5,"genres":{},"price":NaN,"w":-1}',
    b'{"a":1700000000,"b":["x","y"],"":"","qu\\"ote":"\\/\\b\\f\\n\\r\\t","nul\\u0000":[[["deep"]]]}',
    b'{"a":"0001-01-02","b":77,"x":"\\ud800","y":-Infinity,"z":tru}',
    b'{"a":' + b"[" * 40 + b"]" * 40 + b"}",
    b'{"a":123456789012345678901234567890,"b":"' + b"z" * 40 + b'","c":0.000000000000000000000000000001234}',
    b"[1,2]",
    b'{"user":"\xed\xa0\x80"}',
    b"",
]


def decode() -> Iterator[bytes]:
    """Each sample by every schema with and without labels, and all of them as one batch."""
    for choice in range(4):
        for first in (bytes([choice]), bytes([128 + choice])):  # see decode.cc
            yield first + b"\xff".join(SAMPLES)
            yield from (first + sample for sample in SAMPLES)


def arrays() -> Iterator[bytes]:
    """Floats at the edges of the 16-bit formats, parts that share keys, times, and lists to cross."""
    floats = [0.0, -0.0, 1.0, 65504.0, 65520.0, 3e38, 6e-8, 3e-8, 1e-40, float("inf"), float("-inf"), float("nan")]
    for is_float16 in (0, 1):
        yield bytes([0, is_float16]) + struct.pack(f"<{len(floats)}f", *floats)
    row = bytes([3, 1, 1]) + struct.pack("<Iff", 1700000000, 0.5, -1.5)
    yield bytes([1, 2, 1]) + 2 * (struct.pack("<f", 0.5) + bytes([2]) + row + row)
    yield from (b"\x02" + text for text in (b"2024-02-29T23:59:59.25+01:30", b"0001-01-01", b"2024-01-01 10:00Z"))
    yield bytes([3, 2, 1, 3, 1, 2, 3, 2, 1, 0xFF]) + bytes(range(8)) + bytes([1, 5])


def tensors() -> Iterator[bytes]:
    """In each of the ways that a tensor is sent; see tensors.cc."""
    dim = b"\x12\x04\x12\x02\x08\x02"  # tensor_shape { dim { size: 2 } }
    proto = {
        0: b"\x08\x07" + dim + b"\x42\x02u1\x42\x02u2",  # user: DT_STRING
        3: b"\x08\x01" + dim + b"\x22\x08" + struct.pack("<2f", 0.5, -1.5),  # price: DT_FLOAT, tensor_content
        4: b"\x08\x09" + dim + b"\x52\x02\x07\x08",  # age: DT_INT64
        5: b"\x08\x02" + dim + b"\x32\x10" + struct.pack("<2d", 17e8, 1),  # ts: DT_DOUBLE
        6: b"\x08\x0a" + dim + b"\x5a\x01\x01",  # label: DT_BOOL
    }
    inference = b"\x0a\x01a\x12\x05BYTES\x1a\x01\x02\x2a\x06\x42\x01x\x42\x01y"
    raw = b"\x0a\x01a\x12\x05INT64\x1a\x02\x01\x02" + struct.pack("<2q", 7, -8)
    for choice in (0, 0x40, 0xC0, 1, 0x41, 0xC1, 2, 0x83):
        given = [(field, 0, data) for field, data in proto.items()]
        given += [
            (2, 0, b"\x08\x07\x12\x08\x12\x02\x08\x02\x12\x02\x08\x02\x42\x01a"),
            (12, 0, proto[4]),
        ]  # genres [2, 2]
        parts = [bytes([field, way]) + struct.pack("<H", len(data)) + data for field, way, data in given]
        yield bytes([choice]) + b"".join(parts)
        others = [(7, 1, inference), (8, 2, raw), (7, 9, b"\x01\x02\0\0\0hi")]
        yield bytes([choice]) + b"".join(
            bytes([field, way]) + struct.pack("<H", len(data)) + data for field, way, data in others
        )


ALL: dict[str, Callable[[], Iterator[bytes]]] = {"decode": decode, "arrays": arrays, "tensors": tensors}
