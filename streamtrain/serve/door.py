"""Door: what every request and every answer over HTTP passes, whatever it is about."""

import logging
import os
import re
import time
from collections.abc import Iterator

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from streamtrain.logs import REQUEST
from streamtrain.serve.answers import Refused, answer_refusal
from streamtrain.serve.tokens import Tokens

logger = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")

_OPEN = ("/", "/healthz/live", "/healthz/ready", "/v2/health/live", "/v2/health/ready")  # and what is below:
_OPEN_FILES = "/console/"


class Door:
    """Middleware: gives each request an id, and lets only those in that may read.

    The id is the request's own `x-request-id`, if it is of letters, digits and `._:/+=-`, or a new one; it is in the
    answer, and in what the log says meanwhile. Answers are not to be taken for another type than theirs, and may not be
    read by pages of another origin, as nothing says so.

    Args:
        app: that answers.
        tokens: who may read.
    """

    def __init__(self, app: ASGIApp, tokens: Tokens) -> None:
        self._app, self._tokens = app, tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As of ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = _id_of(scope)
        REQUEST.set(request.decode())  # of this request's task alone
        status, began = 0, time.perf_counter()

        async def pass_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *_added(message, request)]
            await send(message)

        try:
            self._check(scope)
        except Refused as exc:
            await answer_refusal(exc)(scope, receive, pass_on)
        else:
            await self._app(scope, receive, pass_on)
        if logger.isEnabledFor(logging.DEBUG):
            took = 1000 * (time.perf_counter() - began)
            logger.debug("%s %r for %s: %d in %.1f ms", scope["method"], scope["path"], client_of(scope), status, took)

    def _check(self, scope: Scope) -> None:
        if not self._tokens.has_read or _path_of(scope) in _OPEN or _path_of(scope).startswith(_OPEN_FILES):
            return
        self._tokens.check_read(Headers(scope=scope).get("authorization", ""), client_of(scope))


def client_of(scope: Scope) -> str:
    """Who asks, for log and history."""
    client = scope.get("client")
    return str(client[0]) if client else "nowhere"


def _path_of(scope: Scope) -> str:
    """Below where the application is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _id_of(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _ID.fullmatch(value):
            return bytes(value)
    return os.urandom(8).hex().encode()


def _added(message: Message, request: bytes) -> Iterator[tuple[bytes, bytes]]:
    yield b"x-request-id", request
    if not any(name == b"x-content-type-options" for name, _ in message.get("headers", ())):
        yield b"x-content-type-options", b"nosniff"
