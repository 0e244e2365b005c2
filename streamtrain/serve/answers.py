"""Answers: JSON as clients get it, and errors as status codes."""

from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from streamtrain.errors import ConfigError, OriginUnavailable, PublicationError, SampleError, StreamtrainError
from streamtrain.logs import REQUEST
from streamtrain.serve.admission import Overloaded
from streamtrain.serve.registry import PublicationMismatch, PublicationMissing

RETRY_SECONDS = "1"


class Refused(StreamtrainError):
    """A request that cannot be answered.

    Attributes:
        status: of HTTP.
        headers: of the answer.
    """

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})


def answer(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer of JSON."""
    body = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, status, headers=dict(headers) if headers else None, media_type="application/json")


def refusal_of(exc: StreamtrainError) -> Refused:
    """What a client is told of an error."""
    if isinstance(exc, Refused):
        return exc
    if isinstance(exc, SampleError):
        first, more = exc.bad[0], len(exc.bad) - 1
        at = f" in field {first.field!r}" if first.field else ""
        others = f" (and {more} more)" if more else ""
        return Refused(400, f"instance {first.index}: {first.reason}{at}{others}")
    if isinstance(exc, PublicationMissing):
        return Refused(404, str(exc))
    if isinstance(exc, PublicationMismatch | ConfigError):
        return Refused(400, str(exc))
    if isinstance(exc, Overloaded | OriginUnavailable | PublicationError):
        return Refused(503, str(exc), {"retry-after": RETRY_SECONDS})
    return Refused(500, str(exc))


def answer_refusal(exc: StreamtrainError) -> Response:
    """The answer to a request that cannot be answered."""
    refused = refusal_of(exc)
    return answer({"error": str(refused)}, refused.status, refused.headers)


def install(app: FastAPI) -> None:
    """Makes every error of an app an object with the key "error"."""

    async def refused(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, StreamtrainError)
        return answer_refusal(exc)

    async def of_http(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        message = f"{request.method} {request.url.path}: {exc.detail}"
        return answer({"error": message}, exc.status_code, exc.headers)

    async def failed(request: Request, exc: Exception) -> Response:
        about = {"x-request-id": REQUEST.get()}  # past what adds it to all others
        return answer({"error": f"internal error: {type(exc).__name__}"}, 500, about)

    app.add_exception_handler(StreamtrainError, refused)
    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(Exception, failed)


ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string"}},
}
_MEANINGS = {
    400: "The request cannot be understood, or an instance breaks the schema.",
    401: "The token that this needs is missing or wrong.",
    403: "No admin token is set, so nobody may.",
    404: "There is no such model, version or label, or it is not loaded.",
    409: "The gate holds it back, the server is pinned, or there is nothing to roll back to.",
    412: "What x-min-offset asks for has not been learned in time.",
    413: "The body is too large, or has too many instances.",
    503: "Nothing is served yet, or too much waits; see retry-after.",
}


def documented(schema: Mapping[str, Any], *errors: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route: 200 with a JSON Schema, and errors."""
    responses: dict[int | str, dict[str, Any]] = {
        status: {"description": _MEANINGS[status], "content": {"application/json": {"schema": ERROR_SCHEMA}}}
        for status in errors
    }
    return {200: {"description": "OK", "content": {"application/json": {"schema": dict(schema)}}}, **responses}
