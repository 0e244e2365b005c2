"""The REST API of TensorFlow Serving and KServe's V1 protocol, so that their clients work unchanged."""

import base64
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from msgspec import UNSET, Raw, Struct, UnsetType
from starlette.routing import BaseRoute

from streamtrain.model.model import Model
from streamtrain.serve.errors import HTTPError
from streamtrain.serve.http.middleware import RawRoute
from streamtrain.serve.http.requests import UNREADABLE, answer, parse_body, read_body
from streamtrain.serve.http.responses import (
    any_of,
    documented,
    instance_schema,
    instances_schema,
    json_response,
    request_body,
)
from streamtrain.serve.predictor import Predicted
from streamtrain.serve.service.admission import Admitted, RequestLimits
from streamtrain.serve.service.protocols import (
    SIGNATURE,
    check_signature,
    describe_signatures,
    describe_status,
    outputs_of,
    version_number,
)
from streamtrain.serve.service.served import InputField, Target
from streamtrain.serve.service.service import Service
from streamtrain.store.publication import Floats

TAG = "TensorFlow Serving"
PROTOCOL = "tensorflow"


class PredictRequest(Struct):
    """Instances as rows or, in `inputs`, as columns."""

    instances: list[Raw] | UnsetType = UNSET
    inputs: Raw | UnsetType = UNSET
    signature_name: str | None = None


class PredictResponse(Struct):
    """Predictions by row or, in `outputs`, by column; those of several outputs by name."""

    predictions: list[list[float] | dict[str, list[float]]] | UnsetType = UNSET
    outputs: list[list[float]] | dict[str, list[list[float]]] | UnsetType = UNSET


class ExamplesRequest(Struct):
    """Examples to classify or regress; features in `context` belong to each of them."""

    examples: list[dict[str, Raw]]
    context: dict[str, Raw] = {}
    signature_name: str | None = None


class ClassifyResponse(Struct):
    """For each example, the score of each label."""

    results: list[list[tuple[str, float]]]


class RegressResponse(Struct):
    """The value of each example."""

    results: list[float]


class ModelStatus(Struct):
    """The loaded versions; that of a model also says whether it is ready, as in KServe's V1 protocol."""

    model_version_status: list[dict[str, Any]]
    name: str | UnsetType = UNSET
    ready: bool | UnsetType = UNSET


class ModelList(Struct):
    """The models that are served."""

    models: list[str]


BODIES = (PredictResponse, ClassifyResponse, RegressResponse, ModelStatus, ModelList)
_read_examples = msgspec.json.Decoder(ExamplesRequest).decode
_read_body = msgspec.json.Decoder(PredictRequest).decode
_read_columns = msgspec.json.Decoder(dict[str, list[Raw]]).decode
_read_column = msgspec.json.Decoder(list[Raw]).decode


def parse_messages(body: bytes, fields: Mapping[str, InputField], limits: RequestLimits) -> tuple[list[bytes], bool]:
    """The instances of a request, each as JSON, and whether they came as columns.

    Raises:
        HTTPError: 400, the body is malformed; 413, there are too many.
    """
    try:
        request = _read_body(body)
        check_signature(request.signature_name)
        if request.instances is not UNSET and request.inputs is UNSET:
            limits.check(len(request.instances))
            rows = [_decoded(bytes(one), fields) for one in _rows(request.instances, fields)]
            return _unboxed(rows, fields), False
        if request.inputs is not UNSET and request.instances is UNSET:
            return _from_columns(request.inputs, fields, limits), True
    except UNREADABLE as exc:
        raise HTTPError(400, f"the body is not a prediction request: {exc}") from exc
    raise HTTPError(400, 'the body must have either "instances" (rows) or "inputs" (columns)')


def _rows(instances: list[Raw], fields: Mapping[str, InputField]) -> Sequence[Raw | bytes]:
    """For a model with one input, an instance may be the value itself."""
    if len(fields) == 1 and instances and not bytes(instances[0]).startswith(b"{"):
        (name,) = (msgspec.json.encode(one) for one in fields)
        return [b"{%s:%s}" % (name, one) for one in instances]
    return instances


def _unboxed(rows: list[bytes], fields: Mapping[str, InputField]) -> list[bytes]:
    """Rows in which a number that came as a tensor [1] is the number itself, as in columns."""
    names = [re.escape(msgspec.json.encode(name)) for name, field in fields.items() if not field.ids]
    may_be_boxed = re.compile(rb"(?:%s)\s*:\s*\[" % b"|".join(names)).search
    return [_with_numbers(row, fields) if names and may_be_boxed(row) else row for row in rows]


def _with_numbers(row: bytes, fields: Mapping[str, InputField]) -> bytes:
    try:
        features = msgspec.json.decode(row, type=dict[str, Raw])
    except UNREADABLE:
        return row  # which the model's decoder refuses
    values = ((name, _column(fields[name], [one])[0] if name in fields else one) for name, one in features.items())
    return b"{%s}" % b",".join(msgspec.json.encode(name) + b":" + bytes(value) for name, value in values)


def _from_columns(inputs: Raw, fields: Mapping[str, InputField], limits: RequestLimits) -> list[bytes]:
    if len(fields) == 1 and bytes(inputs).startswith(b"["):
        columns = {next(iter(fields)): _read_column(inputs)}
    else:
        columns = _read_columns(inputs)
    columns = {name: values for name, values in columns.items() if name in fields}
    if not columns:
        raise HTTPError(400, f'"inputs" contains none of the model\'s inputs, which are {[*fields]}')
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise HTTPError(400, f'"inputs": columns must be of the same length, not {lengths}')
    limits.check(next(iter(lengths.values())))
    parts = [
        [msgspec.json.encode(name) + b":" + one for one in _column(fields[name], columns[name])] for name in columns
    ]
    return [_decoded(b"{%s}" % b",".join(values), fields) for values in zip(*parts, strict=True)]


def _decoded(instance: bytes, fields: Mapping[str, InputField]) -> bytes:
    """With texts in place of {"b64": …}, as which TensorFlow Serving's clients may send them.

    Raises:
        HTTPError: 400, one is not base64 of UTF-8, or the instance itself is sent so.
    """
    if b'"b64"' not in instance or "b64" in fields:
        return instance
    try:
        features = msgspec.json.decode(instance, type=dict[str, Raw])
        values = {name: msgspec.json.decode(one) for name, one in features.items() if b'"b64"' in bytes(one)}
    except UNREADABLE as exc:
        raise HTTPError(400, f"an instance is malformed: {exc}") from exc
    if [*features] == ["b64"]:
        raise HTTPError(
            400,
            'an instance in "b64" is a serialized tf.train.Example, which is not read here: send its features as JSON, '
            "or by gRPC to Classify or Regress",
        )
    return msgspec.json.encode({**features} | {name: _text(name, one) for name, one in values.items()})


def _text(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_text(name, one) for one in value]
    if not isinstance(value, dict) or [*value] != ["b64"]:
        return value
    try:
        return base64.b64decode(value["b64"], validate=True).decode()
    except (TypeError, ValueError) as exc:
        raise HTTPError(400, f"{name!r} has a b64 that is not base64 of UTF-8: {exc}") from exc


def parse_examples(body: bytes, fields: Mapping[str, InputField], limits: RequestLimits) -> tuple[list[bytes], str]:
    """The instances of a request to classify or regress, each as JSON, and the name of the signature.

    Raises:
        HTTPError: 400, the body is malformed; 413, there are too many, or too large with their context.
        Overloaded: see `RequestLimits`.
    """
    request = parse_body(_read_examples, body, "the body is not a request with examples")

    def parts_of(features: dict[str, Raw]) -> dict[str, bytes]:
        return {
            name: msgspec.json.encode(name) + b":" + _column(fields[name], [value])[0]
            for name, value in features.items()
            if name in fields
        }

    shared = parts_of(request.context)
    limits.check(len(request.examples), sum(map(len, shared.values())))
    messages = [_decoded(b"{%s}" % b",".join({**shared, **parts_of(one)}.values()), fields) for one in request.examples]
    return messages, request.signature_name or ""


def _column(field: InputField, values: list[Raw]) -> list[bytes]:
    """Values of a column; numbers may come as a tensor [n, 1]."""
    column = [bytes(one) for one in values]
    if field.ids:
        return column
    return [one[1:-1].strip() or one if one.startswith(b"[") and b"," not in one else one for one in column]


def routes(service: Service) -> list[BaseRoute]:
    """The routes, the most used ones first."""
    return [*_prediction_routes(service), *_status_routes(service), *_metadata_routes(service)]


Respond = Callable[[Target, Request, Admitted], Awaitable[Response]]
_SUMMARIES = {
    "predict": "Predict with {}",
    "classify": "Score examples with {}, by label",
    "regress": "Predict one value for each example with {}",
}


def _prediction_routes(service: Service) -> list[BaseRoute]:
    """Those of requests for predictions."""
    api = APIRouter(tags=[TAG], route_class=RawRoute)

    async def predict(target: Target, request: Request, admitted: Admitted) -> Response:
        began = time.perf_counter()
        body = await read_body(service, request, admitted)
        messages, columns = parse_messages(body, target.fields, service.limits(admitted))
        predicted, headers = await service.predict(target, messages, request.headers, began)
        return json_response(_predictions(predicted, target.model.labels, columns), 200, headers)

    async def classify(target: Target, request: Request, admitted: Admitted) -> Response:
        began = time.perf_counter()
        body = await read_body(service, request, admitted)
        messages, signature = parse_examples(body, target.fields, service.limits(admitted))
        outputs = outputs_of(signature, target.model.labels)
        predicted, headers = await service.predict(target, messages, request.headers, began)
        names = [target.model.labels[j] for j in outputs]
        results = [[*zip(names, row, strict=True)] for row in predicted.predictions[:, outputs].tolist()]
        return json_response({"results": results}, 200, headers)

    async def regress(target: Target, request: Request, admitted: Admitted) -> Response:
        began = time.perf_counter()
        body = await read_body(service, request, admitted)
        messages, signature = parse_examples(body, target.fields, service.limits(admitted))
        (output,) = outputs_of(signature, target.model.labels, single=True)
        predicted, headers = await service.predict(target, messages, request.headers, began)
        return json_response({"results": predicted.predictions[:, output].copy()}, 200, headers)

    async def handle(
        respond: Respond, request: Request, name: str, version: str | None = None, label: str | None = None
    ) -> Response:
        return await answer(
            service,
            PROTOCOL,
            lambda: service.resolve(name, version, label),
            lambda target, admitted: respond(target, request, admitted),
        )

    def add(respond: Respond, request: dict[str, Any], response: type) -> None:
        verb = respond.__name__
        for path, what in (
            ("", "the served version"),
            ("/versions/{version}", "a version"),
            ("/labels/{label}", "the version of a label"),
        ):
            api.add_api_route(
                f"/v1/models/{{name}}{path}:{verb}",
                partial(handle, respond),
                methods=["POST"],
                name=f"{verb} with {what}",
                summary=_SUMMARIES[verb].format(what),
                openapi_extra=request_body(request),
                responses=documented(response, 400, 404, 412, 413, 503),
                response_class=Response,
            )

    models = [one.model for one in service.models.values()]
    add(predict, any_of(map(_request_schema, models)), PredictResponse)
    add(classify, any_of(map(_examples_schema, models)), ClassifyResponse)
    add(regress, any_of(map(_examples_schema, models)), RegressResponse)
    return api.routes


def _status_routes(service: Service) -> list[BaseRoute]:
    """Those that say what is loaded."""
    api = APIRouter(tags=[TAG])

    @api.get("/v1/models", summary="The models that are served", responses=documented(ModelList))
    async def models() -> Response:
        return json_response(ModelList([*service.models]))

    @api.get("/v1/models/{name}", summary="Loaded versions", responses=documented(ModelStatus, 404))
    async def status(name: str) -> Response:
        check_verb(name)
        return json_response(describe_status(service, name) | {"name": name, "ready": service.find(name).is_ready})

    @api.get("/v1/models/{name}/versions/{version}", summary="One version", responses=documented(ModelStatus, 404))
    async def status_of_version(name: str, version: str) -> Response:
        check_verb(version)
        return json_response(describe_status(service, name, version))

    @api.get("/v1/models/{name}/labels/{label}", summary="A label's version", responses=documented(ModelStatus, 404))
    async def status_of_label(name: str, label: str) -> Response:
        check_verb(label)
        return json_response(describe_status(service, name, label=label))

    return api.routes


def check_verb(name: str) -> None:
    """Raises HTTPError 405 for the last part of a path that means a request for predictions, which is not a GET."""
    _, _, verb = name.rpartition(":")
    if verb != name and verb in _SUMMARIES:
        raise HTTPError(405, f":{verb} requires POST", {"allow": "POST"})


def _metadata_routes(service: Service) -> list[BaseRoute]:
    """Those that describe inputs and outputs."""
    api = APIRouter(tags=[TAG])

    def metadata(target: Target) -> Response:
        model, version = target.model, target.choose().name
        spec = {"name": model.name, "signature_name": "", "version": version_number(version)}
        return json_response({"model_spec": spec, "metadata": {"signature_def": describe_signatures(model.model)}})

    @api.get("/v1/models/{name}/metadata", summary="Inputs and outputs", responses=documented({}, 404, 503))
    async def metadata_of_served(name: str) -> Response:
        return metadata(service.resolve(name))

    @api.get(
        "/v1/models/{name}/versions/{version}/metadata",
        summary="Inputs and outputs of a version",
        responses=documented({}, 404),
    )
    async def metadata_of_version(name: str, version: str) -> Response:
        return metadata(service.resolve(name, version=version))

    @api.get(
        "/v1/models/{name}/labels/{label}/metadata",
        summary="Inputs and outputs of the version of a label",
        responses=documented({}, 404),
    )
    async def metadata_of_label(name: str, label: str) -> Response:
        return metadata(service.resolve(name, label=label))

    return api.routes


def _predictions(predicted: Predicted, labels: list[str], columns: bool) -> dict[str, Any]:
    """A single output is a tensor [n, 1]; several are named, within each row or as columns."""
    values: Floats = predicted.predictions
    if len(labels) == 1:
        return {"outputs" if columns else "predictions": values}
    if columns:
        return {"outputs": {name: values[:, [j]].copy() for j, name in enumerate(labels)}}
    return {"predictions": [{name: row[[j]] for j, name in enumerate(labels)} for row in values]}


def _request_schema(model: Model) -> dict[str, Any]:
    schema = instances_schema(model)
    schema["properties"]["signature_name"] = {"type": "string", "enum": [SIGNATURE]}
    return schema


def _examples_schema(model: Model) -> dict[str, Any]:
    example = instance_schema(model)
    properties = {
        "examples": {"type": "array", "items": example},
        "context": {"type": "object", "description": "Features of every example."},
        "signature_name": {"type": "string", "enum": [SIGNATURE, *(one.name for one in model.labels)]},
    }
    return {"type": "object", "required": ["examples"], "properties": properties}
