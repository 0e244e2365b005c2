"""The Open Inference Protocol, with tensors as JSON or in its binary extension.

Tensors are the columns of instances: one of shape [n] or [n, 1] has a value for each instance, one of shape [n, k] a
list of k ids. Where lists differ in length, a tensor NAME.length of integers [n] says how many of the k count. Tensors
that the model does not read are ignored, as are such keys of samples.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response
from msgspec import UNSET, Struct, UnsetType
from starlette.routing import BaseRoute

from streamtrain._core import InputTensor
from streamtrain.serve.errors import HTTPError
from streamtrain.serve.http.middleware import RawRoute
from streamtrain.serve.http.requests import answer, read_body
from streamtrain.serve.http.responses import documented, json_response, request_body
from streamtrain.serve.service.admission import Admitted, RequestLimits
from streamtrain.serve.service.protocols import (
    LENGTH,
    check_outputs,
    describe_model,
    describe_server,
    refused_tensors,
    to_samples,
)
from streamtrain.serve.service.served import InputField, Target
from streamtrain.serve.service.service import Service
from streamtrain.store.publication import Floats

_MAX_VALUES = 1 << 22  # as in the native core


class Tensor(Struct):
    """A tensor of a request; without `data` its values follow the JSON (binary extension)."""

    name: str
    shape: list[int]
    datatype: str
    data: list[Any] | UnsetType = UNSET
    parameters: dict[str, Any] = {}


class RequestedOutput(Struct):
    """A tensor that is requested."""

    name: str
    parameters: dict[str, Any] = {}


class InferenceRequest(Struct):
    """A request of the Open Inference Protocol."""

    inputs: list[Tensor]
    id: str | None = None
    outputs: list[RequestedOutput] | None = None
    parameters: dict[str, Any] | None = None


class InferenceResponse(Struct):
    """A response of the Open Inference Protocol."""

    model_name: str
    model_version: str
    outputs: list[Tensor]
    id: str | UnsetType = UNSET


BODIES = (InferenceRequest, InferenceResponse)
_decode = msgspec.json.Decoder(InferenceRequest).decode


Values = list[Any] | InputTensor
"""Of a tensor, flat, or in the binary extension."""


def parse_request(body: bytes, json_size: str | None) -> tuple[InferenceRequest, dict[str, Values]]:
    """A request, and the values of its tensors by name.

    Args:
        body: JSON, and after it the binary data if there is some.
        json_size: the header Inference-Header-Content-Length: where the JSON ends; None: there is no binary data.

    Raises:
        HTTPError: 400, it is malformed.
    """
    try:
        end = len(body) if json_size is None else int(json_size)
        request = _decode(body[:end] if 0 <= end <= len(body) else b"")
    except (ValueError, RecursionError) as exc:  # msgspec's errors are ValueErrors
        raise HTTPError(400, f"the body is not an inference request: {exc}") from exc
    values: dict[str, Values] = {}
    for one in request.inputs:
        if one.name in values:
            raise HTTPError(400, f"input {one.name!r} appears twice")
        count = _count_values(one)  # here, as the native core's integers have 64 bits
        size = one.parameters.get("binary_data_size")
        if size is None:
            values[one.name] = flat = _flat(one)
            if len(flat) != count:
                raise HTTPError(
                    400, f"input {one.name!r} has {len(flat)} values, which do not fill its shape {one.shape}"
                )
        elif not isinstance(size, int) or not 0 <= size <= len(body) - end:
            raise HTTPError(
                400, f"input {one.name!r}: binary_data_size is {size!r}, but {len(body) - end} bytes are left"
            )
        else:
            with refused_tensors():
                values[one.name] = InputTensor.of_binary(one.name, one.shape, one.datatype, body[end : end + size])
            end += size
    check_outputs([one.name for one in request.outputs or []])
    if json_size is not None and end != len(body):
        raise HTTPError(400, f"{len(body) - end} bytes of binary data belong to no input")
    return request, values


def to_messages(
    inputs: Sequence[Tensor], values: Mapping[str, Values], fields: Mapping[str, InputField], limits: RequestLimits
) -> Sequence[bytes]:
    """The instances of a request, each as JSON.

    Args:
        inputs: its tensors, of one dimension or more.
        values: of each, by name; as many as its shape says.
        fields: of the model.
        limits: of the request.

    Raises:
        HTTPError: 400, tensors do not match each other or the model; 413, there are too many instances.
    """
    binary = [one for one in values.values() if isinstance(one, InputTensor)]
    if binary and len(binary) == len(values):
        return to_samples(binary, fields)
    lists = {name: one.tolist() if isinstance(one, InputTensor) else one for name, one in values.items()}
    shapes = {one.name: one.shape for one in inputs}
    used = [one for one in inputs if one.name in fields]
    if not used:
        raise HTTPError(400, f"the request has none of the model's inputs, which are {[*fields]}")
    if len({one.shape[0] for one in used}) > 1:
        raise HTTPError(400, f"inputs must have the same first dimension, not {shapes}")
    limits.check(used[0].shape[0])
    columns = {one.name: _column(one, lists, shapes, fields[one.name]) for one in used}
    return [orjson.dumps(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def _column(
    tensor: Tensor, values: Mapping[str, list[Any]], shapes: Mapping[str, list[int]], field: InputField
) -> Sequence[Any]:
    """A value or a list for each instance."""
    flat, (count, *rest) = values[tensor.name], tensor.shape
    lengths = values.get(tensor.name + LENGTH) if tensor.name + LENGTH in shapes else None
    if len(rest) > 1 or (rest and rest != [1] and not field.ids):
        expected = "[n], [n, 1] or [n, k]" if field.ids else "[n] or [n, 1]"
        raise HTTPError(400, f"input {tensor.name!r} must be of shape {expected}, not {tensor.shape}")
    for value in flat:
        if isinstance(value, float) and not math.isfinite(value):
            raise HTTPError(400, f"input {tensor.name!r} has a value that is not finite")
    if lengths is None and rest in ([], [1]):
        return flat
    width = rest[0] if rest else 1
    lengths = [width] * count if lengths is None else lengths
    if len(lengths) != count or not all(type(one) is int and 0 <= one <= width for one in lengths):
        raise HTTPError(400, f"input {tensor.name + LENGTH!r} must be {count} integers from 0 to {width}")
    return [flat[i * width : i * width + length] for i, length in enumerate(lengths)]


def _count_values(tensor: Tensor) -> int:
    """The number of values that a shape takes.

    Raises:
        HTTPError: 400, it is not a shape; 413, too many.
    """
    shape = tensor.shape
    if not shape or any(extent < 0 for extent in shape):
        raise HTTPError(
            400, f"input {tensor.name!r}: shape must have one or more dimensions, none negative, not {shape}"
        )
    if (count := math.prod(shape)) > _MAX_VALUES or max(shape) > _MAX_VALUES:
        raise HTTPError(413, f"input {tensor.name!r} may have at most {_MAX_VALUES} values, not those of shape {shape}")
    return count


def _flat(tensor: Tensor) -> list[Any]:
    """The values of JSON data, which may be nested like its shape."""
    if tensor.data is UNSET:
        raise HTTPError(400, f'input {tensor.name!r} has neither "data" nor a "binary_data_size"')
    values = list(tensor.data)
    for _ in tensor.shape[1:]:
        if values and all(isinstance(one, list) for one in values):
            values = [value for one in values for value in one]
    if any(isinstance(one, list | dict) for one in values):
        raise HTTPError(400, f'input {tensor.name!r}: the nesting of "data" does not match its shape {tensor.shape}')
    return values


def encode_response(
    request: InferenceRequest, response: dict[str, Any], predictions: Floats, labels: list[str]
) -> tuple[bytes, int | None]:
    """The body of a response, and the size of its JSON if binary data follows it.

    Args:
        request: the request.
        response: "model_name" and "model_version".
        predictions: float32 [n, L].
        labels: names of the outputs, by column.

    Raises:
        HTTPError: 400, there is no such output.
    """
    every = bool((request.parameters or {}).get("binary_data_output"))
    wanted = request.outputs or [RequestedOutput(name) for name in labels]
    outputs, data = [], []
    for one in wanted:
        if one.name not in labels:
            raise HTTPError(400, f"unknown output {one.name!r}; the outputs are {labels}")
        if one.parameters.get("classification"):
            raise HTTPError(
                400,
                f"output {one.name!r}: classifications (Triton's class_count) are not made here; ask for the "
                "values, or TensorFlow Serving's :classify",
            )
        values = np.ascontiguousarray(predictions[:, labels.index(one.name)])
        output: dict[str, Any] = {"name": one.name, "datatype": "FP32", "shape": [len(values), 1]}
        if one.parameters.get("binary_data", every):
            data.append(values.tobytes())
            output["parameters"] = {"binary_data_size": len(data[-1])}
        else:
            output["data"] = values
        outputs.append(output)
    head = response | ({"id": request.id} if request.id is not None else {}) | {"outputs": outputs}
    json = orjson.dumps(head, option=orjson.OPT_SERIALIZE_NUMPY)
    return b"".join([json, *data]), len(json) if data else None


TAG = "Open Inference Protocol"
PROTOCOL = "openinference"
_JSON_SIZE = "inference-header-content-length"


def routes(service: Service) -> list[BaseRoute]:
    """The routes, the most used ones first."""
    api, hot = APIRouter(tags=[TAG]), APIRouter(tags=[TAG], route_class=RawRoute)
    about: dict[str, Any] = {
        "openapi_extra": request_body(InferenceRequest),
        "responses": documented(InferenceResponse, 400, 404, 412, 413, 503),
        "response_class": Response,
    }

    async def infer(target: Target, request: Request, admitted: Admitted) -> Response:
        began = time.perf_counter()
        inference, values = parse_request(await read_body(service, request, admitted), request.headers.get(_JSON_SIZE))
        messages = to_messages(inference.inputs, values, target.fields, service.limits(admitted))
        predicted, headers = await service.predict(target, messages, request.headers, began)
        response = {"model_name": target.model.name, "model_version": headers["x-model-version"]}
        body, json_size = encode_response(inference, response, predicted.predictions, target.model.labels)
        if json_size is None:
            return Response(body, headers=headers, media_type="application/json")
        return Response(body, headers=headers | {_JSON_SIZE: str(json_size)}, media_type="application/octet-stream")

    async def handle(request: Request, name: str, version: str | None = None) -> Response:
        return await answer(
            service,
            PROTOCOL,
            lambda: service.resolve(name, version),
            lambda target, admitted: infer(target, request, admitted),
        )

    @hot.post("/v2/models/{name}/infer", summary="Predict with the served version", **about)
    async def infer_served(name: str, request: Request) -> Response:
        return await handle(request, name)

    @hot.post("/v2/models/{name}/versions/{version}/infer", summary="Predict with a version", **about)
    async def infer_version(name: str, version: str, request: Request) -> Response:
        return await handle(request, name, version)

    @api.get("/v2", summary="The server", responses=documented({"type": "object"}))
    async def server() -> Response:
        return json_response(describe_server() | {"extensions": ["binary_tensor_data"]})

    @api.get("/v2/health/live", summary="Whether the server is alive", responses=documented({"type": "object"}))
    async def live() -> Response:
        return json_response({"live": True})

    @api.get("/v2/health/ready", summary="Whether it can predict", responses=documented({"type": "object"}, 503))
    async def ready() -> Response:
        service.check_ready()
        return json_response({"ready": True})

    def model_ready(name: str, version: str | None = None) -> Response:
        predictor = service.resolve(name, version).choose()
        return json_response({"name": name, "version": predictor.name, "ready": True})

    @api.get("/v2/models/{name}/ready", summary="Whether a model is", responses=documented({}, 404, 503))
    async def ready_served(name: str) -> Response:
        return model_ready(name)

    @api.get("/v2/models/{name}/versions/{version}/ready", summary="Or a version", responses=documented({}, 404))
    async def ready_version(name: str, version: str) -> Response:
        return model_ready(name, version)

    @api.get("/v2/models/{name}", summary="Inputs and outputs", responses=documented({}, 404))
    async def metadata_of_model(name: str) -> Response:
        return json_response(describe_model(service, name))

    @api.get("/v2/models/{name}/versions/{version}", summary="Of a version", responses=documented({}, 404))
    async def metadata_of_version(name: str, version: str) -> Response:
        return json_response(describe_model(service, name, version))

    return [*hot.routes, *api.routes]
