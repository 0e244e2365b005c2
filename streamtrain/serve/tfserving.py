"""TensorFlow Serving's REST API, so that its clients work unchanged."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from msgspec import UNSET, Raw, UnsetType
from starlette.routing import BaseRoute

from streamtrain.errors import StreamtrainError
from streamtrain.model.model import Model
from streamtrain.serve.admission import Admitted
from streamtrain.serve.answers import Refused, answer, documented
from streamtrain.serve.fields import InputField, fields_of, instance_schema
from streamtrain.serve.predictor import Predicted
from streamtrain.serve.registry import HEAD
from streamtrain.serve.route import Bare
from streamtrain.serve.service import Choose, Service
from streamtrain.store.origin import Floats

SIGNATURE = "serving_default"
TAG = "TensorFlow Serving"
PROTOCOL = "tensorflow"


class _Body(msgspec.Struct):
    instances: list[Raw] | UnsetType = UNSET
    inputs: Raw | UnsetType = UNSET
    signature_name: str | None = None


_read_body = msgspec.json.Decoder(_Body).decode
_read_columns = msgspec.json.Decoder(dict[str, list[Raw]]).decode
_read_column = msgspec.json.Decoder(list[Raw]).decode


def messages_of(body: bytes, fields: dict[str, InputField]) -> tuple[list[bytes], bool]:
    """The instances of a request, each as JSON, and whether they came as columns.

    Raises:
        Refused: 400, the body is no request.
    """
    try:
        request = _read_body(body)
        if request.signature_name not in (None, "", SIGNATURE):
            raise Refused(400, f"there is no signature {request.signature_name!r}; the signature is {SIGNATURE!r}")
        if request.instances is not UNSET and request.inputs is UNSET:
            return [bytes(one) for one in _rows(request.instances, fields)], False
        if request.inputs is not UNSET and request.instances is UNSET:
            return _from_columns(request.inputs, fields), True
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
        raise Refused(400, f"the body is no request for predictions: {exc}") from exc
    raise Refused(400, 'the body must have either "instances" (rows) or "inputs" (columns)')


def _rows(instances: list[Raw], fields: dict[str, InputField]) -> Sequence[Raw | bytes]:
    """Of a model with one input, an instance may be the value itself."""
    if len(fields) == 1 and instances and not bytes(instances[0]).startswith(b"{"):
        (name,) = (msgspec.json.encode(one) for one in fields)
        return [b"{%s:%s}" % (name, one) for one in instances]
    return instances


def _from_columns(inputs: Raw, fields: dict[str, InputField]) -> list[bytes]:
    if len(fields) == 1 and bytes(inputs).startswith(b"["):
        columns = {next(iter(fields)): _read_column(inputs)}
    else:
        columns = _read_columns(inputs)
    columns = {name: values for name, values in columns.items() if name in fields}
    if not columns:
        raise Refused(400, f'"inputs" has none of the model\'s inputs, which are {[*fields]}')
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise Refused(400, f'"inputs": columns must be of the same length, not {lengths}')
    parts = [
        [msgspec.json.encode(name) + b":" + one for one in _column(fields[name], columns[name])] for name in columns
    ]
    return [b"{%s}" % b",".join(values) for values in zip(*parts, strict=True)]


def _column(field: InputField, values: list[Raw]) -> list[bytes]:
    """Values of a column; numbers may come as a tensor [n, 1]."""
    column = [bytes(one) for one in values]
    if field.ids:
        return column
    return [one[1:-1] if one.startswith(b"[") and b"," not in one else one for one in column]


def routes(service: Service) -> list[BaseRoute]:
    """The routes, those that are asked most first."""
    api, hot = APIRouter(tags=[TAG]), APIRouter(tags=[TAG], route_class=Bare)
    model = service.registry.model
    fields = fields_of(model.schema)
    labels = [label.name for label in model.labels]
    about: dict[str, Any] = {
        "openapi_extra": {
            "requestBody": {"required": True, "content": {"application/json": {"schema": _body_schema(model)}}}
        },
        "responses": documented(_ANSWER, 400, 404, 412, 413, 503),
        "response_class": Response,
    }

    async def predict(choose: Choose, request: Request, admitted: Admitted) -> Response:
        began = time.perf_counter()
        messages, columns = messages_of(await service.body(request, admitted), fields)
        predicted, headers = await service.predict(choose, messages, request.headers, began)
        return answer(_predictions(predicted, labels, columns), 200, headers)

    async def counted(request: Request, name: str, version: str | None = None, label: str | None = None) -> Response:
        try:
            with service.admission.admit() as admitted:
                response = await predict(service.chosen(name, version, label), request, admitted)
        except StreamtrainError as exc:
            response = service.refusal(exc)
        service.metrics.answered(PROTOCOL, response.status_code)
        return response

    @hot.post("/v1/models/{name}:predict", summary="Predict by what is served", **about)
    async def predict_served(name: str, request: Request) -> Response:
        return await counted(request, name)

    @hot.post("/v1/models/{name}/versions/{version}:predict", summary="Predict by a version", **about)
    async def predict_version(name: str, version: str, request: Request) -> Response:
        return await counted(request, name, version=version)

    @hot.post("/v1/models/{name}/labels/{label}:predict", summary="Predict by a label's version", **about)
    async def predict_label(name: str, label: str, request: Request) -> Response:
        return await counted(request, name, label=label)

    @api.get("/v1/models/{name}", summary="Versions that are loaded", responses=documented(_STATUS, 404))
    async def status(name: str) -> Response:
        service.check_name(name)
        resident = [str(one) for one in service.registry.resident]
        return answer({"model_version_status": [_state(one) for one in resident] or [_state(HEAD, "LOADING")]})

    @api.get("/v1/models/{name}/versions/{version}", summary="One version", responses=documented(_STATUS, 404))
    async def status_of_version(name: str, version: str) -> Response:
        return answer({"model_version_status": [_state(service.chosen(name, version=version)().name)]})

    @api.get("/v1/models/{name}/labels/{label}", summary="A label's version", responses=documented(_STATUS, 404))
    async def status_of_label(name: str, label: str) -> Response:
        return answer({"model_version_status": [_state(service.chosen(name, label=label)().name)]})

    def metadata(version: str) -> Response:
        spec = {"name": model.name, "signature_name": "", "version": _number(version)}
        signature = {
            "inputs": {name: _tensor(name, "DT_STRING" if one.ids else "DT_FLOAT") for name, one in fields.items()},
            "outputs": {name: _tensor(name, "DT_FLOAT", "1") for name in labels},
            "method_name": "tensorflow/serving/predict",
        }
        return answer({"model_spec": spec, "metadata": {"signature_def": {"signature_def": {SIGNATURE: signature}}}})

    @api.get("/v1/models/{name}/metadata", summary="Inputs and outputs", responses=documented({}, 404, 503))
    async def metadata_of_served(name: str) -> Response:
        return metadata(service.chosen(name)().name)

    @api.get(
        "/v1/models/{name}/versions/{version}/metadata",
        summary="Inputs and outputs of a version",
        responses=documented({}, 404),
    )
    async def metadata_of_version(name: str, version: str) -> Response:
        return metadata(service.chosen(name, version=version)().name)

    return [*hot.routes, *api.routes]


def _predictions(predicted: Predicted, labels: list[str], columns: bool) -> dict[str, Any]:
    """One output is a tensor [n, 1]; several are named, in each row or each a column."""
    values: Floats = predicted.predictions
    if len(labels) == 1:
        return {"outputs" if columns else "predictions": values}
    if columns:
        return {"outputs": {name: values[:, [j]].copy() for j, name in enumerate(labels)}}
    return {"predictions": [{name: row[[j]] for j, name in enumerate(labels)} for row in values]}


def _number(version: str) -> str:
    """TensorFlow Serving's versions are integers, and its own begin at 1."""
    return "0" if version == HEAD else version


def _state(version: str, state: str = "AVAILABLE") -> dict[str, Any]:
    return {"version": _number(version), "state": state, "status": {"error_code": "OK", "error_message": ""}}


def _tensor(name: str, dtype: str, *extents: str) -> dict[str, Any]:
    dims = [{"size": extent, "name": ""} for extent in ("-1", *extents)]
    return {"dtype": dtype, "tensor_shape": {"dim": dims, "unknown_rank": False}, "name": name}


_VALUES = {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}
_ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "predictions": {"type": "array", "items": {"anyOf": [_VALUES["items"], {"type": "object"}]}},
        "outputs": {"anyOf": [_VALUES, {"type": "object", "additionalProperties": _VALUES}]},
    },
}
_STATUS: dict[str, Any] = {
    "type": "object",
    "required": ["model_version_status"],
    "properties": {"model_version_status": {"type": "array", "items": {"type": "object"}}},
}


def _body_schema(model: Model) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["instances"],
        "properties": {
            "instances": {"type": "array", "items": instance_schema(model)},
            "signature_name": {"type": "string", "enum": [SIGNATURE]},
        },
    }
