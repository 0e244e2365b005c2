"""Middleware that every request passes, and the fast path of predictions."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from typing import Any
from urllib.parse import quote

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.routing import BaseRoute, request_response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from streamtrain.address import Hosts
from streamtrain.logs import REQUEST
from streamtrain.serve.errors import HTTPError
from streamtrain.serve.http.requests import client_address
from streamtrain.serve.http.responses import error_response
from streamtrain.serve.service.service import request_id
from streamtrain.serve.service.tokens import Tokens

logger = logging.getLogger(__name__)


_HEALTH = ("/healthz/live", "/healthz/ready", "/v2/health/live", "/v2/health/ready")
_PUBLIC = ("/", "/docs", *_HEALTH)  # pages that ask for a token themselves
_PUBLIC_FILES = "/console/"
_OTHER_SITES = (b"cross-site", b"same-site")  # same-site: another port of this machine, or name of its domain
_NOT_ALLOWED, _NO_CONTENT, _REDIRECT = 405, 204, 307
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_CACHED_HOSTS = 64


class RequestGuard:
    """Middleware that gives each request an id, and checks the read token, the host and the origin.

    The id is the request's own `x-request-id`, if it consists of letters, digits and `._:/+=-`, or a new one; it is in
    the response and in log lines of the request. There are no CORS headers, so pages of other origins cannot read
    responses; requests that they send are refused. HEAD is answered wherever GET is, and OPTIONS everywhere.

    Args:
        app: the application.
        tokens: for reading.
        hosts: host names that requests may use.
    """

    def __init__(self, app: ASGIApp, tokens: Tokens, hosts: Hosts) -> None:
        self._app, self._tokens, self._hosts = app, tokens, hosts
        self._allows = lru_cache(_CACHED_HOSTS)(hosts.allows)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        identity = request_id(next((value for name, value in scope["headers"] if name == b"x-request-id"), b""))
        REQUEST.set(identity.decode())  # in the task of this request
        status, began = 0, time.perf_counter()

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                if scope["method"] == "OPTIONS" and message["status"] == _NOT_ALLOWED:
                    message = {**message, "status": _NO_CONTENT, "headers": [*_allowed(message)]}
                status = message["status"]
                headers = message.get("headers", ())
                if status == _REDIRECT:
                    headers = [_relative(scope, one) if one[0] == b"location" else one for one in headers]
                message["headers"] = [*headers, *_extra_headers(message, identity)]
            elif status == _NO_CONTENT:
                message = {**message, "body": b""}
            await send(message)

        try:
            self._check(scope)
        except HTTPError as exc:
            await error_response(exc)(scope, receive, send_with_headers)
        else:
            # The server sends no body in answer to HEAD.
            asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            await self._app(asked, receive, send_with_headers)
        if logger.isEnabledFor(logging.DEBUG):
            took = 1000 * (time.perf_counter() - began)
            logger.debug(
                "%s %r for %s: %d in %.1f ms", scope["method"], scope["path"], client_address(scope), status, took
            )

    def _check(self, scope: Scope) -> None:
        host = origin = site = b""
        for name, value in scope["headers"]:
            if name == b"host":
                host = value
            elif name == b"origin":
                origin = value
            elif name == b"sec-fetch-site":
                site = value
        if host and not self._allows(host.decode("latin-1")) and _path(scope) not in _HEALTH:
            raise HTTPError(403, f"unknown host {host.decode('latin-1')!r}: add it to serve.hosts")
        if origin and not self._hosts.allows_origin(origin.decode("latin-1"), host.decode("latin-1")):
            page = origin.decode("latin-1")
            raise HTTPError(
                403, f"requests from pages of {page!r} are refused: if they are yours, add their host to serve.hosts"
            )
        if not origin and site in _OTHER_SITES and scope["method"] not in _SAFE_METHODS:
            raise HTTPError(403, "requests from pages of other sites are refused")
        if not self._tokens.has_read or _path(scope) in _PUBLIC or _path(scope).startswith(_PUBLIC_FILES):
            return
        self._tokens.check_read(Headers(scope=scope).get("authorization", ""), client_address(scope))


def _relative(scope: Scope, location: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    """Where a path with or without a slash at its end is, from here: scheme and prefix of a proxy are not known."""
    path: str = scope["path"]
    *_, last = path.rstrip("/").split("/")
    _, mark, query = location[1].partition(b"?")
    place = f"../{last}" if path.endswith("/") else f"{last}/"
    return b"location", quote(place).encode() + mark + query


def _allowed(refusal: Message) -> Iterator[tuple[bytes, bytes]]:
    """The header of an answer to OPTIONS, of a refusal that says what is allowed."""
    given = next((value for name, value in refusal.get("headers", ()) if name == b"allow"), b"")
    methods = [one.strip() for one in given.split(b",") if one.strip()]
    yield b"allow", b", ".join([*methods, *([b"HEAD"] if b"GET" in methods else []), b"OPTIONS"])


def _path(scope: Scope) -> str:
    """The path below the mount point of the application."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _extra_headers(message: Message, identity: bytes) -> Iterator[tuple[bytes, bytes]]:
    yield b"x-request-id", identity
    if not any(name == b"x-content-type-options" for name, _ in message.get("headers", ())):
        yield b"x-content-type-options", b"nosniff"


class RawRoute(APIRoute):
    """A route of FastAPI whose endpoint is called directly, with the request and the path parameters as strings.

    FastAPI's resolution of parameters takes half as long as a small prediction. The endpoint must return a `Response`.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)

        async def call(request: Request) -> Response:
            response: Response = await endpoint(request=request, **request.path_params)
            return response

        self.app = request_response(call)


class FastPath:
    """Middleware that calls the raw routes of some models directly.

    Searching the routes and passing FastAPI's layers takes half as long as a small prediction, too. Exceptions of an
    endpoint reach the same handlers as otherwise.

    Args:
        app: handles everything else.
        routes: those of `app`; the raw ones whose only parameter is the model are called.
        names: of the models.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute], names: Iterable[str]) -> None:
        self._app = app
        self._endpoints = {
            route.path_format.format(name=name): partial(route.endpoint, name=name)
            for name in names
            for route in routes
            if isinstance(route, RawRoute) and {*route.param_convertors} == {"name"}
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self._endpoints.get(scope["path"]) if is_post else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        response: Response = await endpoint(request=Request(scope, receive))
        await response(scope, receive, send)
