"""The way to what is asked most: routes that are called at once, and past all others."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, request_response
from starlette.types import ASGIApp, Receive, Scope, Send


class Bare(APIRoute):
    """Documented as any of FastAPI's, but called at once, with the request and the texts of the path's parameters.

    FastAPI's own way through declared parameters takes as long as half a small prediction. The endpoint must return a
    `Response`.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)

        async def call(request: Request) -> Response:
            response: Response = await endpoint(request=request, **request.path_params)
            return response

        self.app = request_response(call)


class Direct:
    """Middleware that answers what is asked of one model by its bare routes itself.

    To search the routes, and the layers of FastAPI that lie before one, take as long as another half. What an endpoint
    raises goes where it went before: to the handler of all exceptions.

    Args:
        app: that answers everything else.
        routes: those of `app`; the bare ones of which only the model is a parameter are answered.
        name: of the model.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute], name: str) -> None:
        self._app = app
        self._endpoints = {
            route.path_format.format(name=name): partial(route.endpoint, name=name)
            for route in routes
            if isinstance(route, Bare) and {*route.param_convertors} == {"name"}
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As of ASGI."""
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self._endpoints.get(scope["path"]) if is_post else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        response: Response = await endpoint(request=Request(scope, receive))
        await response(scope, receive, send)
