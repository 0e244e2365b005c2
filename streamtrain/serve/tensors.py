"""Tensors of the Open Inference Protocol, as JSON or in its binary extension, and what they are as instances.

Tensors are the columns of instances: one of shape [n] or [n, 1] has a value for each, one of shape [n, k] a list of k
ids for each. Where lists differ in length, a tensor NAME.length of integers [n] says how many of the k count. Tensors
that the model does not read are ignored, as keys of samples are.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import orjson

from streamtrain.serve.answers import Refused
from streamtrain.serve.fields import InputField
from streamtrain.store.origin import Floats

LENGTH = ".length"
_DTYPES = {
    **{f"INT{bits}": f"<i{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": f"<u{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": f"<f{bits // 8}" for bits in (16, 32, 64)},
    "BOOL": "?",
}
_MOST_VALUES = 1 << 22


class Tensor(msgspec.Struct):
    """A tensor of a request; its data may come after the JSON instead."""

    name: str
    shape: list[int]
    datatype: str
    data: list[Any] | msgspec.UnsetType = msgspec.UNSET
    parameters: dict[str, Any] = {}


class Wanted(msgspec.Struct):
    """A tensor that is asked for."""

    name: str
    parameters: dict[str, Any] = {}


class Inference(msgspec.Struct):
    """A request of the protocol."""

    inputs: list[Tensor]
    id: str | None = None
    outputs: list[Wanted] = []
    parameters: dict[str, Any] = {}


_read = msgspec.json.Decoder(Inference).decode


def read_request(body: bytes, json_size: str | None) -> tuple[Inference, dict[str, list[Any]]]:
    """A request, and the values of its tensors by name, flat.

    Args:
        body: JSON, and after it the binary data if there is some.
        json_size: of the header Inference-Header-Content-Length: where the JSON ends; None: nothing is binary.

    Raises:
        Refused: 400, it is no request.
    """
    try:
        end = len(body) if json_size is None else int(json_size)
        request = _read(body[:end] if 0 <= end <= len(body) else b"")
    except (ValueError, RecursionError) as exc:  # msgspec's errors are ValueErrors
        raise Refused(400, f"the body is no inference request: {exc}") from exc
    values: dict[str, list[Any]] = {}
    for one in request.inputs:
        if one.name in values:
            raise Refused(400, f"input {one.name!r} appears twice")
        size = one.parameters.get("binary_data_size")
        if size is None:
            values[one.name] = _flat(one)
        elif not isinstance(size, int) or not 0 <= size <= len(body) - end:
            raise Refused(
                400, f"input {one.name!r}: binary_data_size is {size!r}, but {len(body) - end} bytes are left"
            )
        else:
            values[one.name] = _of_bytes(one, body[end : end + size])
            end += size
        if len(values[one.name]) != _count(one):
            have, shape = len(values[one.name]), one.shape
            raise Refused(400, f"input {one.name!r} has {have} values, which do not fill its shape {shape}")
    if json_size is not None and end != len(body):
        raise Refused(400, f"{len(body) - end} bytes of binary data belong to no input")
    return request, values


def messages_of(request: Inference, values: Mapping[str, list[Any]], fields: Mapping[str, InputField]) -> list[bytes]:
    """The instances of a request, each as JSON.

    Raises:
        Refused: 400, tensors do not fit each other or the model.
    """
    shapes = {one.name: one.shape for one in request.inputs}
    used = [one for one in request.inputs if one.name in fields]
    if not used:
        raise Refused(400, f"the request has none of the model's inputs, which are {[*fields]}")
    if len({one.shape[0] for one in used}) > 1:
        raise Refused(400, f"inputs must have the same first extent, not {shapes}")
    columns = {one.name: _column(one, values, shapes, fields[one.name]) for one in used}
    return [orjson.dumps(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def _column(
    tensor: Tensor, values: Mapping[str, list[Any]], shapes: Mapping[str, list[int]], field: InputField
) -> Sequence[Any]:
    """A value or a list for each instance."""
    flat, (count, *rest) = values[tensor.name], tensor.shape
    lengths = values.get(tensor.name + LENGTH) if tensor.name + LENGTH in shapes else None
    if len(rest) > 1 or (rest and rest != [1] and not field.ids):
        expected = "[n], [n, 1] or [n, k]" if field.ids else "[n] or [n, 1]"
        raise Refused(400, f"input {tensor.name!r} must be of shape {expected}, not {tensor.shape}")
    for value in flat:
        if isinstance(value, float) and not math.isfinite(value):
            raise Refused(400, f"input {tensor.name!r} has a value that is not finite")
    if lengths is None and rest in ([], [1]):
        return flat
    width = rest[0] if rest else 1
    lengths = [width] * count if lengths is None else lengths
    if len(lengths) != count or not all(type(one) is int and 0 <= one <= width for one in lengths):
        raise Refused(400, f"input {tensor.name + LENGTH!r} must be {count} integers from 0 to {width}")
    return [flat[i * width : i * width + length] for i, length in enumerate(lengths)]


def _count(tensor: Tensor) -> int:
    if not tensor.shape or any(extent < 0 for extent in tensor.shape):
        raise Refused(400, f"input {tensor.name!r}: shape must be of one or more extents, not {tensor.shape}")
    count = math.prod(tensor.shape)
    if count > _MOST_VALUES or max(tensor.shape) > _MOST_VALUES:
        raise Refused(413, f"input {tensor.name!r} may have {_MOST_VALUES} values, not {count}")
    return count


def _flat(tensor: Tensor) -> list[Any]:
    """The values of JSON data, which may be nested as its shape is."""
    if tensor.data is msgspec.UNSET:
        raise Refused(400, f'input {tensor.name!r} has neither "data" nor a "binary_data_size"')
    values = list(tensor.data)
    for _ in tensor.shape[1:]:
        if values and all(isinstance(one, list) for one in values):
            values = [value for one in values for value in one]
    if any(isinstance(one, list | dict) for one in values):
        raise Refused(400, f'input {tensor.name!r}: "data" is nested otherwise than its shape {tensor.shape}')
    return values


def _of_bytes(tensor: Tensor, data: bytes) -> list[Any]:
    if tensor.datatype == "BYTES":
        return _texts(tensor.name, data)
    dtype = _DTYPES.get(tensor.datatype)
    if dtype is None:
        raise Refused(
            400, f"input {tensor.name!r}: datatype {tensor.datatype!r} is none of BYTES, {', '.join(_DTYPES)}"
        )
    if len(data) % np.dtype(dtype).itemsize:
        raise Refused(400, f"input {tensor.name!r}: {len(data)} bytes are no {tensor.datatype} values")
    values: list[Any] = np.frombuffer(data, dtype).tolist()
    return values


def _texts(name: str, data: bytes) -> list[Any]:
    """Each is a length of four bytes, little endian, and so many bytes of UTF-8."""
    texts, at = [], 0
    try:
        while at < len(data):
            (size,) = struct.unpack_from("<I", data, at)
            if at + 4 + size > len(data):
                raise Refused(400, f"input {name!r}: the last text is cut off")
            texts.append(data[at + 4 : at + 4 + size].decode())
            at += 4 + size
    except (struct.error, UnicodeDecodeError) as exc:
        raise Refused(400, f"input {name!r}: bytes must be texts in UTF-8, each after its length: {exc}") from exc
    return texts


def answer_of(
    request: Inference, about: dict[str, Any], predictions: Floats, labels: list[str]
) -> tuple[bytes, int | None]:
    """The body of an answer, and where its JSON ends if there is binary data after it.

    Args:
        request: that is answered.
        about: "model_name" and "model_version".
        predictions: float32 [n, L].
        labels: names of the outputs, by column.

    Raises:
        Refused: 400, an output is asked for that there is not.
    """
    every = bool(request.parameters.get("binary_data_output"))
    wanted = request.outputs or [Wanted(name) for name in labels]
    outputs, data = [], []
    for one in wanted:
        if one.name not in labels:
            raise Refused(400, f"there is no output {one.name!r}; outputs are {labels}")
        values = np.ascontiguousarray(predictions[:, labels.index(one.name)])
        output: dict[str, Any] = {"name": one.name, "datatype": "FP32", "shape": [len(values), 1]}
        if one.parameters.get("binary_data", every):
            data.append(values.tobytes())
            output["parameters"] = {"binary_data_size": len(data[-1])}
        else:
            output["data"] = values
        outputs.append(output)
    head = about | ({"id": request.id} if request.id is not None else {}) | {"outputs": outputs}
    json = orjson.dumps(head, option=orjson.OPT_SERIALIZE_NUMPY)
    return b"".join([json, *data]), len(json) if data else None
