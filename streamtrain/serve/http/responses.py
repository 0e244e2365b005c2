"""JSON responses, errors as status codes, and how both are documented."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response
from msgspec import UNSET, Meta, UnsetType, defstruct
from msgspec.json import schema_components
from starlette.exceptions import HTTPException

from streamtrain.errors import (
    StreamtrainError,
)
from streamtrain.logs import REQUEST
from streamtrain.model.features import MAX_FLOAT
from streamtrain.model.model import Model
from streamtrain.serve.errors import to_http_error
from streamtrain.serve.service.served import input_fields


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response of JSON; Structs are objects, and NumPy arrays lists."""
    body = orjson.dumps(content, default=msgspec.structs.asdict, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, status, headers=dict(headers) if headers else None, media_type="application/json")


def error_response(exc: StreamtrainError) -> Response:
    """The response for an error: its status code, and an object with the key "error"."""
    error = to_http_error(exc)
    return json_response({"error": str(error)}, error.status, error.headers)


def add_error_handlers(app: FastAPI) -> None:
    """Makes every error response of an application an object with the key "error"."""

    async def handle_ours(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, StreamtrainError)
        return error_response(exc)

    async def handle_starlette(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        message = f"{request.method} {request.url.path}: {exc.detail}"
        return json_response({"error": message}, exc.status_code, exc.headers)

    async def handle_bug(request: Request, exc: Exception) -> Response:
        headers = {"x-request-id": REQUEST.get()}  # this response bypasses RequestGuard, which adds it to all others
        return json_response({"error": f"internal error: {type(exc).__name__}"}, 500, headers)

    app.add_exception_handler(StreamtrainError, handle_ours)
    app.add_exception_handler(HTTPException, handle_starlette)
    app.add_exception_handler(Exception, handle_bug)


class ErrorBody(msgspec.Struct):
    """Why a request failed."""

    error: str


_MEANINGS = {
    400: "The request is malformed, or an instance violates the schema.",
    401: "The token is missing or wrong.",
    403: "Control is disabled: the server has no admin token.",
    404: "Unknown model, version or label, or it is not loaded.",
    409: "The quality gate holds it back, the server is pinned, there is nothing to roll back to, or no such arm.",
    412: "The offsets in x-min-offset were not learned in time.",
    413: "The body is too large, or has too many instances.",
    503: "No version is loaded yet, or the server is overloaded; see retry-after.",
}


_REFERENCE = "#/components/schemas/{name}"


def body_schemas(bodies: Iterable[type]) -> dict[str, Any]:
    """The JSON Schemas of bodies and of what they consist of, by name, for the components of the OpenAPI document."""
    return schema_components([*bodies, ErrorBody], ref_template=_REFERENCE)[1]


def _content(schema: type | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(schema, type):
        ((schema,), _) = schema_components([schema], ref_template=_REFERENCE)
    return {"application/json": {"schema": schema}}


def request_body(schema: type | Mapping[str, Any], *, required: bool = True) -> dict[str, Any]:
    """The `openapi_extra` of a route: its body, a Struct of `body_schemas` or a JSON Schema."""
    return {"requestBody": {"required": required, "content": _content(schema)}}


def documented(schema: type | Mapping[str, Any], *errors: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route: 200, with a Struct of `body_schemas` or a JSON Schema, and errors."""
    content = _content(ErrorBody)
    responses: dict[int | str, dict[str, Any]] = {
        status: {"description": _MEANINGS[status], "content": content} for status in errors
    }
    return {200: {"description": "OK", "content": _content(schema)}, **responses}


def instance_schema(model: Model) -> dict[str, Any]:
    """An instance as JSON Schema, for the OpenAPI document; the model's decoder is what reads instances."""
    ids = Meta(description=f"An id or a list of ids, each of at most {model.schema.max_id_bytes} bytes.")
    number = Annotated[float, Meta(ge=-MAX_FLOAT, le=MAX_FLOAT, description="A number.")]
    members: list[Any] = []
    fields = [*input_fields(model.schema).values()]
    for i, field in enumerate(fields):
        kind: Any = Annotated[str | int | list[str | int], ids] if field.ids else number
        members.append((f"f{i}", kind) if field.required else (f"f{i}", kind | UnsetType, UNSET))
    names = {f"f{i}": field.name for i, field in enumerate(fields)}
    _, schemas = schema_components([defstruct("Instance", members, kw_only=True, rename=names)])
    instance: dict[str, Any] = schemas["Instance"]
    return instance


def any_of(schemas: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The JSON Schema of a body that is as one of these says."""
    different: list[dict[str, Any]] = []
    different += (one for one in schemas if one not in different)
    return different[0] if len(different) == 1 else {"anyOf": different}


def instances_schema(model: Model, at_most: int | None = None) -> dict[str, Any]:
    """A body with instances, each as `instance_schema` says."""
    instances: dict[str, Any] = {"type": "array", "items": instance_schema(model)}
    if at_most is not None:
        instances |= {"minItems": 1, "maxItems": at_most}
    return {"type": "object", "required": ["instances"], "properties": {"instances": instances}}
