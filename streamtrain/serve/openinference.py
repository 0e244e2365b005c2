"""The Open Inference Protocol, version 2, over HTTP."""

import time
from importlib.metadata import version as version_of_package
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.routing import BaseRoute

from streamtrain.errors import StreamtrainError
from streamtrain.serve.admission import Admitted
from streamtrain.serve.answers import answer, documented
from streamtrain.serve.fields import fields_of
from streamtrain.serve.route import Bare
from streamtrain.serve.service import Choose, Service
from streamtrain.serve.tensors import LENGTH, answer_of, messages_of, read_request

TAG = "Open Inference Protocol"
PROTOCOL = "openinference"
_SIZE = "inference-header-content-length"


def routes(service: Service) -> list[BaseRoute]:
    """The routes, those that are asked most first."""
    api, hot = (
        APIRouter(tags=["Open Inference Protocol"]),
        APIRouter(tags=["Open Inference Protocol"], route_class=Bare),
    )
    model = service.registry.model
    fields = fields_of(model.schema)
    labels = [label.name for label in model.labels]
    about: dict[str, Any] = {
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": {"schema": _REQUEST}}}},
        "responses": documented(_ANSWER, 400, 404, 412, 413, 503),
        "response_class": Response,
    }

    async def infer(choose: Choose, request: Request, admitted: Admitted) -> Response:
        began = time.perf_counter()
        inference, values = read_request(await service.body(request, admitted), request.headers.get(_SIZE))
        messages = messages_of(inference, values, fields)
        predicted, headers = await service.predict(choose, messages, request.headers, began)
        named = {"model_name": model.name, "model_version": headers["x-model-version"]}
        body, json_size = answer_of(inference, named, predicted.predictions, labels)
        if json_size is None:
            return Response(body, headers=headers, media_type="application/json")
        return Response(body, headers=headers | {_SIZE: str(json_size)}, media_type="application/octet-stream")

    async def counted(request: Request, name: str, version: str | None = None) -> Response:
        try:
            with service.admission.admit() as admitted:
                response = await infer(service.chosen(name, version), request, admitted)
        except StreamtrainError as exc:
            response = service.refusal(exc)
        service.metrics.answered(PROTOCOL, response.status_code)
        return response

    @hot.post("/v2/models/{name}/infer", summary="Predict by what is served", **about)
    async def infer_served(name: str, request: Request) -> Response:
        return await counted(request, name)

    @hot.post("/v2/models/{name}/versions/{version}/infer", summary="Predict by a version", **about)
    async def infer_version(name: str, version: str, request: Request) -> Response:
        return await counted(request, name, version)

    @api.get("/v2", summary="The server", responses=documented({"type": "object"}))
    async def server() -> Response:
        about_server = {"name": "streamtrain", "version": version_of_package("streamtrain")}
        return answer(about_server | {"extensions": ["binary_tensor_data"]})

    @api.get("/v2/health/live", summary="Whether the server runs", responses=documented({"type": "object"}))
    async def live() -> Response:
        return answer({"live": True})

    @api.get("/v2/health/ready", summary="Whether it can predict", responses=documented({"type": "object"}, 503))
    async def ready() -> Response:
        service.chosen(model.name)()
        return answer({"ready": True})

    def model_ready(name: str, version: str | None = None) -> Response:
        predictor = service.chosen(name, version)()
        return answer({"name": name, "version": predictor.name, "ready": True})

    @api.get("/v2/models/{name}/ready", summary="Whether a model is", responses=documented({}, 404, 503))
    async def ready_served(name: str) -> Response:
        return model_ready(name)

    @api.get("/v2/models/{name}/versions/{version}/ready", summary="Or a version", responses=documented({}, 404))
    async def ready_version(name: str, version: str) -> Response:
        return model_ready(name, version)

    def metadata(name: str, version: str | None = None) -> Response:
        if version is None:
            service.check_name(name)
        else:
            service.chosen(name, version)()
        inputs: list[dict[str, Any]] = []
        for one in fields.values():
            inputs.append({"name": one.name, "datatype": "BYTES" if one.ids else "FP32", "shape": [-1, 1]})
            if one.ids:
                inputs[-1]["shape"] = [-1, -1]
                inputs.append({"name": one.name + LENGTH, "datatype": "INT64", "shape": [-1], "optional": True})
        described = {
            "name": name,
            "versions": [str(one) for one in service.registry.resident],
            "platform": "streamtrain_tensorflow",
            "inputs": inputs,
            "outputs": [{"name": label, "datatype": "FP32", "shape": [-1, 1]} for label in labels],
        }
        return answer(described)

    @api.get("/v2/models/{name}", summary="Inputs and outputs", responses=documented({}, 404))
    async def metadata_of_model(name: str) -> Response:
        return metadata(name)

    @api.get("/v2/models/{name}/versions/{version}", summary="Of a version", responses=documented({}, 404))
    async def metadata_of_version(name: str, version: str) -> Response:
        return metadata(name, version)

    return [*hot.routes, *api.routes]


_TENSOR: dict[str, Any] = {
    "type": "object",
    "required": ["name", "shape", "datatype", "data"],
    "properties": {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        "datatype": {"type": "string"},
        "data": {"type": "array"},
    },
}
_REQUEST: dict[str, Any] = {
    "type": "object",
    "required": ["inputs"],
    "properties": {"id": {"type": "string"}, "inputs": {"type": "array", "items": _TENSOR}},
}
_ANSWER: dict[str, Any] = {
    "type": "object",
    "required": ["model_name", "model_version", "outputs"],
    "properties": {
        "model_name": {"type": "string"},
        "model_version": {"type": "string"},
        "outputs": {"type": "array", "items": _TENSOR},
    },
}
