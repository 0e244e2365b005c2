"""Bare: the route of what is asked most."""

from collections.abc import Callable
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.routing import request_response


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
