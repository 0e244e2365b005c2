"""JSON responses, errors as status codes, and how both are documented."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response
from msgspec.json import schema_components
from starlette.exceptions import HTTPException

from streamtrain.errors import (
    ConfigError,
    OriginUnavailable,
    PublicationError,
    PublicationMismatch,
    PublicationMissing,
    SampleError,
    StreamtrainError,
)
from streamtrain.logs import REQUEST
from streamtrain.serve.admission import Overloaded
from streamtrain.serve.inspector import TooManyIds

RETRY_SECONDS = "1"


class HTTPError(StreamtrainError):
    """An error response.

    Attributes:
        status: its HTTP status code.
        headers: of the response.
    """

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response of JSON; Structs are objects, and NumPy arrays lists."""
    body = orjson.dumps(content, default=msgspec.structs.asdict, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, status, headers=dict(headers) if headers else None, media_type="application/json")


def error_response(exc: StreamtrainError) -> Response:
    """The response for an error: its status code, and an object with the key "error"."""
    error = to_http_error(exc)
    return json_response({"error": str(error)}, error.status, error.headers)


def to_http_error(exc: StreamtrainError) -> HTTPError:
    """The status code and message for an error."""
    return exc if isinstance(exc, HTTPError) else _translate(exc)


def _translate(exc: StreamtrainError) -> HTTPError:
    if isinstance(exc, SampleError):
        return HTTPError(400, f"instance {exc.bad[0].index}: {exc.bad[0].describe(len(exc.bad) - 1)}")
    if isinstance(exc, PublicationMissing):
        return HTTPError(404, str(exc))
    if isinstance(exc, PublicationMismatch | ConfigError):
        return HTTPError(400, str(exc))
    if isinstance(exc, TooManyIds):
        return HTTPError(413, str(exc))
    if isinstance(exc, Overloaded | OriginUnavailable | PublicationError):
        return HTTPError(503, str(exc), {"retry-after": RETRY_SECONDS})
    return HTTPError(500, str(exc))


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
