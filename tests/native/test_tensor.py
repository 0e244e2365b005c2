"""Tensors of requests, against protobuf's own messages; and samples in tensors, against the same samples as JSON."""

import json
import math
import random
import resource
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import streamtrain.serve.grpc.open_inference_pb2 as oip
import streamtrain.serve.grpc.tensorflow_serving_pb2 as tfs
from hypothesis import given, settings
from hypothesis import strategies as st

from streamtrain._core import InputTensor, TensorSamples
from tests.native.examples import examples
from tests.native.test_decode import FIELDS, TEXTS, decoder_of_schema, make_decoder, schemas, seeds
from tests.oracles.decode import Schema

NUMBERS = {  # TensorFlow's type and its field, that of the Open Inference Protocol and its field
    "<f4": ("DT_FLOAT", "float_val", "FP32", "fp32_contents"),
    "<f8": ("DT_DOUBLE", "double_val", "FP64", "fp64_contents"),
    "<i1": ("DT_INT8", "int_val", "INT8", "int_contents"),
    "<i2": ("DT_INT16", "int_val", "INT16", "int_contents"),
    "<i4": ("DT_INT32", "int_val", "INT32", "int_contents"),
    "<i8": ("DT_INT64", "int64_val", "INT64", "int64_contents"),
    "<u1": ("DT_UINT8", "int_val", "UINT8", "uint_contents"),
    "<u2": ("DT_UINT16", "int_val", "UINT16", "uint_contents"),
    "<u4": ("DT_UINT32", "uint32_val", "UINT32", "uint_contents"),
    "<u8": ("DT_UINT64", "uint64_val", "UINT64", "uint64_contents"),
    "?": ("DT_BOOL", "bool_val", "BOOL", "bool_contents"),
}
WAYS = ("tensor_content", "tensorflow", "raw", "contents", "binary")


def raw_texts(texts: Sequence[str]) -> bytes:
    return b"".join(struct.pack("<I", len(one.encode())) + one.encode() for one in texts)


def tensor_of(name: str, values: Any, way: str) -> InputTensor:
    """Sent in one of the ways that there are: `values` is an array of numbers or, of texts, of objects."""
    array = np.asarray(values)
    if array.dtype == object:
        texts = [str(one) for one in array.ravel()]
        tf_type, tf_field, datatype, field = "DT_STRING", "string_val", "BYTES", "bytes_contents"
        given, raw = [one.encode() for one in texts], raw_texts(texts)
    else:
        tf_type, tf_field, datatype, field = NUMBERS[array.dtype.str.replace("|", "<").replace("<b1", "?")]
        given, raw = array.ravel().tolist(), array.tobytes()
    if way == "binary":
        return InputTensor.of_binary(name, list(array.shape), datatype, raw)
    if way in ("raw", "contents"):
        message = oip.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=array.shape)
        if way == "contents":
            getattr(message.contents, field).extend(given)
        return InputTensor.of_inference(message.SerializeToString(), raw if way == "raw" else None)
    proto = tfs.TensorProto(dtype=tf_type)
    for extent in array.shape:
        proto.tensor_shape.dim.add(size=extent, name="ignored")
    if way == "tensor_content" and datatype != "BYTES":
        proto.tensor_content = raw
    else:
        getattr(proto, tf_field).extend(given)
    return InputTensor.of_tensorflow(name, proto.SerializeToString())


# --- reading ---------------------------------------------------------------------------------------------------------


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    """Numbers of any type, or texts."""
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)))
    kind = draw(st.sampled_from([*NUMBERS, "text"]))
    size = int(np.prod(shape))
    if kind == "text":
        texts = draw(st.lists(st.sampled_from(TEXTS) | st.text(max_size=9), min_size=size, max_size=size))
        return np.array([*texts, None], object)[:-1].reshape(shape)
    if kind == "?":
        one: Any = st.booleans()
    elif kind in ("<f4", "<f8"):
        one = st.floats(allow_nan=False, allow_infinity=False, width=32 if kind == "<f4" else 64)
    else:
        limits = np.iinfo(kind)
        one = st.integers(int(limits.min), int(limits.max)) | st.sampled_from([limits.min, limits.max, 0])
    return np.array(draw(st.lists(one, min_size=size, max_size=size)), kind).reshape(shape)


@settings(deadline=None, max_examples=examples(200))
@given(arrays(), st.sampled_from(FIELDS), st.sampled_from(WAYS))
def test_what_is_sent_is_read(array: Any, name: str, way: str) -> None:
    tensor = tensor_of(name, array, way)
    assert (tensor.name, tensor.shape, tensor.tolist()) == (name, [*array.shape], array.ravel().tolist())
    assert [*map(type, tensor.tolist())] == [*map(type, array.ravel().tolist())]


def test_fields_in_any_order_unpacked_and_unknown() -> None:
    """As protobuf reads them, whoever wrote them."""
    dim = b"\x12\x02\x08\x03"  # of a TensorShapeProto: dim { size: 3 }
    unknown = b"\xa8\x01\x07" + b"\xb1\x01" + bytes(8) + b"\xba\x01\x02hi" + b"\xc5\x01" + bytes(4)  # fields 21 to 24
    values = b"\x50\x07" + b"\x52\x0b\x08" + b"\xff" * 9 + b"\x01"  # int64_val: 7 alone, then 8 and -1 packed
    message = values + unknown + b"\x12" + bytes([len(dim)]) + dim + b"\x08\x09"
    assert [*tfs.TensorProto.FromString(message).int64_val] == [7, 8, -1]
    assert InputTensor.of_tensorflow("x", message).tolist() == [7, 8, -1]
    longer = shaped(2, dtype=tfs.DT_INT32) + b"\x38\xff\xff\xff\xff\x0f" + b"\x38\x87\x80\x80\x80\x10"  # int_val
    assert [*tfs.TensorProto.FromString(longer).int_val] == [-1, 7]
    assert InputTensor.of_tensorflow("x", longer).tolist() == [-1, 7]
    half = InputTensor.of_binary("x", [2], "FP16", np.array([0.5, -65504], "<f2").tobytes())
    assert half.tolist() == [0.5, -65504.0]


@pytest.mark.parametrize(
    ("kind", "first"), [("DT_STRING", b"u1"), ("DT_INT64", -7), ("DT_FLOAT", 0.5), ("DT_BOOL", True)]
)
def test_the_last_value_stands_for_those_that_are_missing(kind: str, first: Any) -> None:
    proto = tfs.TensorProto(dtype=kind, tensor_shape={"dim": [{"size": 3}, {"size": 2}]})
    fields = {"DT_STRING": "string_val", "DT_INT64": "int64_val", "DT_FLOAT": "float_val", "DT_BOOL": "bool_val"}
    with pytest.raises(ValueError, match=r"has 0 values, which do not fill its shape \[3, 2\]"):
        InputTensor.of_tensorflow("x", proto.SerializeToString())
    getattr(proto, fields[kind]).append(first)
    expected = first.decode() if isinstance(first, bytes) else first
    assert InputTensor.of_tensorflow("x", proto.SerializeToString()).tolist() == [expected] * 6


@settings(deadline=None, max_examples=examples(100))
@given(arrays(), st.sampled_from(["tensor_content", "contents"]), st.data())
def test_damaged_messages_are_refused_or_read(array: Any, way: str, data: st.DataObject) -> None:
    seen: list[bytes] = []

    def read(message: bytes) -> None:
        try:
            if way == "contents":
                InputTensor.of_inference(message, None).tolist()
            else:
                InputTensor.of_tensorflow("x", message).tolist()
        except (ValueError, OverflowError):
            return

    proto: Any = oip.ModelInferRequest.InferInputTensor() if way == "contents" else tfs.TensorProto()
    if way == "contents":
        proto.name, proto.datatype = "x", "BYTES"
        proto.shape.extend(array.shape)
        proto.contents.bytes_contents.extend(str(one).encode() for one in array.ravel())
    else:
        proto.dtype, proto.tensor_content = tfs.DT_INT64, str(array.tolist()).encode()
        for extent in array.shape:
            proto.tensor_shape.dim.add(size=extent)
    message = proto.SerializeToString()
    for end in range(len(message)):
        read(message[:end])
    for _ in range(20):
        at = data.draw(st.integers(0, max(0, len(message) - 1)))
        seen.append(message[:at] + bytes([data.draw(st.integers(0, 255))]) + message[at + 1 :])
        read(seen[-1])


def shaped(*extents: int, dtype: int = tfs.DT_FLOAT, **values: Any) -> bytes:
    proto = tfs.TensorProto(dtype=dtype, **values)
    for extent in extents:
        proto.tensor_shape.dim.add(size=extent)
    return bytes(proto.SerializeToString())


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (b"\xff", "input 'x' is not a TensorProto"),
        (b"\x0b", "input 'x' is not a TensorProto"),  # a group
        (b"\x00\x00", "input 'x' is not a TensorProto"),  # field 0
        (b"\x22\x05abc", "input 'x' is not a TensorProto"),
        (b"\x0d\x00", "input 'x' is not a TensorProto"),
        (b"\x08" + b"\xff" * 10 + b"\x01", "input 'x' is not a TensorProto"),
        (shaped(1, dtype=19), "input 'x': dtype 19 is not one of DT_FLOAT, DT_DOUBLE"),
        (shaped(float_val=[1.0]), r"shape must have one or more dimensions, none negative, not \[\]"),
        (shaped(-1, float_val=[1.0]), r"none negative, not \[-1\]"),
        (shaped(2, float_val=[1.0] * 3), r"input 'x' has 3 values, which do not fill its shape \[2\]"),
        (shaped(1, tensor_content=b"abc"), "input 'x': 3 bytes are not a whole number of DT_FLOAT values"),
        (shaped(2, dtype=tfs.DT_STRING, string_val=[b"a", b"\xff"]), "input 'x' has a value that is not UTF-8"),
        # Parts that are UTF-8 together only.
        (shaped(2, dtype=tfs.DT_STRING, string_val=["é".encode()[:1], "é".encode()[1:]]), "is not UTF-8"),
    ],
)
def test_what_is_wrong_is_said(message: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        InputTensor.of_tensorflow("x", message)


@pytest.mark.parametrize("shape", [(1 << 40,), (1 << 12, 1 << 12), (1 << 62, 4), (0, 1 << 40), (1 << 32, 1 << 32, 0)])
def test_a_tensor_that_is_too_large(shape: tuple[int, ...]) -> None:
    with pytest.raises(OverflowError, match="input 'x' may have at most 4194304 values, not those of shape"):
        InputTensor.of_tensorflow("x", shaped(*shape, float_val=[1.0]))


def test_few_bytes_that_stand_for_millions_of_values_take_no_memory() -> None:
    millions, text = (1 << 22,), shaped(1 << 22, dtype=tfs.DT_STRING, string_val=[b"u1"])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tensors = [InputTensor.of_tensorflow(str(i), text) for i in range(100)]
    tensors += [InputTensor.of_tensorflow(f"n{i}", shaped(*millions, float_val=[0.5, 1.5])) for i in range(100)]
    tensors += [InputTensor.of_tensorflow("0.length", shaped(*millions, dtype=tfs.DT_INT64, int64_val=[1, 0]))]
    samples = TensorSamples(tensors, {"0": True, "1": True, "n0": False})
    assert (len(samples), samples[0]) == (1 << 22, b'{"0":["u1"],"1":"u1","n0":0.5}')
    assert samples[1] == samples[-1] == b'{"0":[],"1":"u1","n0":1.5}'
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10  # KiB


def test_a_sample_that_is_too_large() -> None:
    wide = [InputTensor.of_tensorflow(f"u{i}", shaped(1, 1 << 18, dtype=tfs.DT_INT64, int64_val=[7])) for i in range(3)]
    fields = dict.fromkeys(("u0", "u1", "u2"), True)
    columns = decoder_of_schema().decode([TensorSamples(wide[:2], fields)])
    assert columns.errors == [(0, "missing_field", "ts", -1)]
    with pytest.raises(OverflowError, match="input 'u2': a sample may have at most 524288 values"):
        TensorSamples(wide, fields)


@pytest.mark.parametrize(
    ("datatype", "raw", "said"),
    [
        ("BYTES", b"\3\0\0\0u1", "the last text is truncated"),
        ("BYTES", b"\2\0\0\0u1\0\0", "the last text is truncated"),
        ("BYTES", b"\xff\xff\xff\xffu1", "the last text is truncated"),
        ("BYTES", b"\2\0\0\0\xff1", "a value that is not UTF-8"),
        ("INT32", b"\0\0\0", "3 bytes are not a whole number of INT32 values"),
        ("FP8", b"\0", "datatype 'FP8' is not one of BYTES, INT8"),
    ],
)
def test_what_is_wrong_with_binary_values_is_said(datatype: str, raw: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        InputTensor.of_binary("x", [1], datatype, raw)
    message = oip.ModelInferRequest.InferInputTensor(name="x", datatype=datatype, shape=[1]).SerializeToString()
    with pytest.raises(ValueError, match=said):
        InputTensor.of_inference(message, raw)


def test_half_precision_must_be_raw() -> None:
    message = oip.ModelInferRequest.InferInputTensor(name="x", datatype="FP16", shape=[1]).SerializeToString()
    with pytest.raises(ValueError, match="FP16 values must be raw"):
        InputTensor.of_inference(message, None)


# --- samples ---------------------------------------------------------------------------------------------------------


def random_values(rng: random.Random, shape: tuple[int, ...]) -> Any:
    """Numbers of any type, or texts."""
    kind, size = rng.choice([*NUMBERS, "text", "text", "text"]), math.prod(shape)
    if kind == "text":
        return np.array([*rng.choices([*TEXTS, "2024-02-29"], k=size), None], object)[:-1].reshape(shape)
    usual = np.array(rng.choices([0, 1, 1, 2.5, 77], k=size)).astype(kind)
    anything = np.frombuffer(rng.randbytes(size * usual.itemsize), "u1" if kind == "?" else kind)
    anything = np.where(np.isfinite(anything), anything, 1).astype(kind)
    return np.where([rng.random() < 0.8 for _ in range(size)], usual, anything).astype(kind).reshape(shape)


def tabular(rng: random.Random, names: Sequence[str]) -> tuple[TensorSamples, list[bytes]]:
    """Samples in tensors, and the same as JSON."""
    count = rng.randrange(6)
    columns: dict[str, Any] = {}
    lengths: dict[str, list[int]] = {}
    for name in [one for one in dict.fromkeys(names) if rng.random() < 0.9] or ["?"]:
        width = rng.choice([None, None, None, 1, 2, 3, 0])
        columns[name] = random_values(rng, (count,) if width is None else (count, width))
        if rng.random() < 0.3:
            lengths[name] = [rng.randint(0, 1 if width is None else width) for _ in range(count)]
    tensors = [tensor_of(name, array, rng.choice(WAYS)) for name, array in columns.items()]
    tensors += [tensor_of(f"{name}.length", np.array(one, "<i8"), rng.choice(WAYS)) for name, one in lengths.items()]
    rows: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, array in columns.items():
        for row, values in zip(rows, array.reshape(count, math.prod(array.shape[1:])).tolist(), strict=True):
            row[name] = values[0] if array.shape[1:] in ((), (1,)) and name not in lengths else values
    for name, one in lengths.items():
        for row, length in zip(rows, one, strict=True):
            row[name] = row[name][:length]
    return (
        TensorSamples(tensors, dict.fromkeys(columns, True)),
        [json.dumps(row, ensure_ascii=False).encode() for row in rows],
    )


def assert_same(decoder: Any, sources: Sequence[Any], messages: Sequence[bytes], with_labels: bool) -> None:
    found, expected = decoder.decode(sources, with_labels), decoder.decode(messages, with_labels)
    for name in ("kept", "keys", "starts", "offsets", "single", "numeric", "labels", "weights", "times"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), strict=True)
    assert [one[:3] for one in found.errors] == [one[:3] for one in expected.errors]


@settings(deadline=None, max_examples=examples(200))
@given(schemas(), seeds, st.booleans())
def test_samples_in_tensors_are_those_in_json(schema: Schema, seed: int, with_labels: bool) -> None:
    rng = random.Random(seed)
    read = [one.field for one in schema.categoricals]
    read += [one.field for one in schema.numerics] + [one.field for one in schema.labels]
    read += [one for one in (schema.time, schema.weight) if one is not None]
    decoder = make_decoder(schema)
    for _ in range(5):
        (first, as_json), (second, more) = tabular(rng, read), tabular(rng, read)
        assert [json.loads(one) for one in first] == [json.loads(one) for one in as_json]
        assert_same(decoder, [first], as_json, with_labels)
        messages = [b"{}", *as_json, *more, b"x", *as_json]
        assert_same(decoder, [b"{}", first, second, b"x", first], messages, with_labels)


def test_items() -> None:
    prices = tensor_of("price", np.array([0.5, 1.0, -2.0], "<f4"), "raw")
    samples = TensorSamples(
        [tensor_of("user", np.array(["a", 'q"\\\n\x1fé', ""], object), "raw"), prices], {"user": True}
    )
    assert len(samples) == 3
    assert samples[1] == '{"user":"q\\"\\\\\\u000a\\u001fé"}'.encode()
    assert (samples[-1], next(iter(samples))) == (samples[2], b'{"user":"a"}')
    for index in (3, -4):
        with pytest.raises(IndexError):
            samples[index]
    assert [*TensorSamples([prices], {"price": False})] == [b'{"price":0.5}', b'{"price":1.0}', b'{"price":-2.0}']


def test_what_a_decoder_takes() -> None:
    for other in ("{}", None, InputTensor.of_binary("x", [0], "INT8", b"")):
        with pytest.raises(TypeError, match="messages must be bytes, or TensorSamples"):
            decoder_of_schema().decode([b"{}", other])  # type: ignore[list-item]


USERS, PAIRS = tensor_of("user", np.array(["a", "b"], object), "raw"), np.array([["a", "b"], ["c", "d"]], object)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (lambda: [], r"none of the model's inputs, which are \['user', 'price'\]"),
        (lambda: [tensor_of("other", np.zeros(2), "raw")], "none of the model's inputs"),
        (lambda: [USERS, USERS], "input 'user' appears twice"),
        (
            lambda: [USERS, tensor_of("price", np.zeros(1), "raw")],
            r"same first dimension: 'user' has \[2\], 'price' \[1\]",
        ),
        (lambda: [tensor_of("user", PAIRS[None], "raw")], r"\[n\], \[n, 1\] or \[n, k\], not \[1, 2, 2\]"),
        (lambda: [tensor_of("price", np.zeros((2, 2)), "raw")], r"must be of shape \[n\] or \[n, 1\], not \[2, 2\]"),
        (lambda: [tensor_of("price", np.array([0.0, np.nan]), "raw")], "'price' has a value that is not finite"),
        (lambda: [tensor_of("price", np.array([-np.inf], "<f4"), "raw")], "'price' has a value that is not finite"),
        *(
            (
                lambda lengths=lengths: [USERS, tensor_of("user.length", np.array(lengths), "raw")],
                "2 integers from 0 to 1",
            )
            for lengths in ([1], [1, 2], [-1, 1], [0.0, 1.0], [True, True])
        ),
    ],
)
def test_tensors_that_make_no_samples(tensors: Callable[[], list[InputTensor]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TensorSamples(tensors(), {"user": True, "price": False})
