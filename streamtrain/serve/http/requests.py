"""Requests for predictions over HTTP: their bodies, and how they are admitted and counted."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.types import Scope

from streamtrain.errors import StreamtrainError
from streamtrain.serve.errors import HTTPError, Overloaded
from streamtrain.serve.http.responses import error_response
from streamtrain.serve.service.admission import Admitted
from streamtrain.serve.service.served import Target
from streamtrain.serve.service.service import Service

T = TypeVar("T")
UNREADABLE = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
"""What msgspec raises for bytes that it cannot read."""


async def answer(
    service: Service,
    protocol: str,
    resolve: Callable[[], Target],
    respond: Callable[[Target, Admitted], Awaitable[Response]],
) -> Response:
    """Answers a request for predictions under admission control, and counts its response by protocol."""
    try:
        with service.admission.admit() as admitted:
            response = await respond(resolve(), admitted)
    except StreamtrainError as exc:
        if isinstance(exc, Overloaded):
            service.admission.count(exc)
        response = error_response(exc)
    service.metrics.answered(protocol, response.status_code)
    return response


def parse_body(read: Callable[[bytes], T], body: bytes, expected: str) -> T:
    """What a body says.

    Args:
        read: a decoder of msgspec, with what it calls.
        body: the body.
        expected: what it must be, for the message.

    Raises:
        HTTPError: 400, it is something else.
    """
    try:
        return read(body)
    except UNREADABLE as exc:
        raise HTTPError(400, f"{expected}: {exc}") from exc


async def read_body(service: Service, request: Request, admitted: Admitted | None = None) -> bytes:
    """Reads the body of a request.

    Args:
        service: says how large it may be.
        request: the request.
        admitted: its admission, which counts the bytes; None: it needs none.

    Raises:
        HTTPError: 413, it is too large; 400, it is compressed; 408, the client disconnected.
        Overloaded: the bodies of all requests together are too large.
    """
    headers, most = request.headers, service.config.max_body
    if headers.get("content-encoding", "identity") != "identity":
        raise HTTPError(
            400, f"content-encoding {headers['content-encoding']!r} is not supported; send the body uncompressed"
        )
    size, chunks = 0, []
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size <= most:
                if admitted is not None:
                    admitted.take(len(chunk))
                chunks.append(chunk)
            elif size > 16 * most:
                break  # up to here the rest is read, so that the client gets to read the response
    except ClientDisconnect as exc:
        raise HTTPError(408, "the client disconnected before the request was complete") from exc
    if size > most:
        raise HTTPError(413, f"the body is larger than {most} bytes")
    return b"".join(chunks)


def client_address(scope: Scope) -> str:
    """The address of the client, for log and history."""
    client = scope.get("client")
    return str(client[0]) if client else "unknown"
