"""Control: which version is served. Needs the admin token."""

import asyncio
import hmac
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.routing import BaseRoute

from streamtrain.serve.answers import Refused, answer, documented
from streamtrain.serve.registry import HEAD
from streamtrain.serve.service import Service
from streamtrain.store.origin import Publication


class _Promotion(msgspec.Struct):
    version: Annotated[int, msgspec.Meta(ge=1)] | Literal["head"]


_read_promotion = msgspec.json.Decoder(_Promotion).decode
_PROMOTION = {
    "type": "object",
    "required": ["version"],
    "properties": {"version": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "enum": ["head"]}]}},
}
_SERVED = {
    "type": "object",
    "required": ["served", "publication"],
    "properties": {"served": {"type": "string"}, "publication": {"type": "object"}},
}
_SECURITY: dict[str, Any] = {"security": [{"admin token": []}]}


def routes(service: Service, admin_token: str | None) -> list[BaseRoute]:
    """The routes; None: there is no token, so nobody may use them."""
    api = APIRouter(tags=["control"])
    registry = service.registry

    def check(request: Request, name: str) -> None:
        if admin_token is None:
            raise Refused(403, "control is off: the server has no admin token")
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(token.strip().encode(), admin_token.encode())  # takes as long for any token
        if scheme.lower() != "bearer" or not same:
            message = "this needs the admin token: send it as authorization: Bearer TOKEN"
            raise Refused(401, message, {"www-authenticate": "Bearer"})
        service.check_name(name)

    def serving(publication: Publication) -> Response:
        served = registry.served
        return answer({"served": served.name if served else None, "publication": _about(publication)})

    @api.post(
        "/v1/models/{name}:promote",
        summary="Serve a version, or the head",
        responses=documented(_SERVED, 400, 401, 403, 404, 413, 503),
        openapi_extra=_SECURITY
        | {"requestBody": {"required": True, "content": {"application/json": {"schema": _PROMOTION}}}},
    )
    async def promote(name: str, request: Request) -> Response:
        check(request, name)
        try:
            version = _read_promotion(await service.body(request)).version
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
            raise Refused(400, f'the body must be {{"version": NUMBER}} or {{"version": "head"}}: {exc}') from exc
        return serving(await asyncio.to_thread(registry.promote, HEAD if version == HEAD else version))

    @api.post(
        "/v1/models/{name}:rollback",
        summary="Serve again what was served before",
        responses=documented(_SERVED, 401, 403, 404),
        openapi_extra=_SECURITY,
    )
    async def rollback(name: str, request: Request) -> Response:
        check(request, name)
        return serving(registry.rollback())

    @api.get(
        "/v1/models/{name}/versions",
        summary="Versions that can be served",
        responses=documented({"type": "object"}, 401, 403, 404, 503),
        openapi_extra=_SECURITY,
    )
    async def versions(name: str, request: Request) -> Response:
        check(request, name)
        found = await asyncio.to_thread(registry.versions)
        served, head, labels = registry.served, registry.find(HEAD), registry.labels
        listed = [
            _about(one)
            | {
                "resident": one.version in registry.resident,
                "labels": [label for label, version in labels.items() if version == one.version],
            }
            for one in found
        ]
        about_head = None if head is None else _about(head.publication)
        return answer({"served": served.name if served else None, "versions": listed, "head": about_head})

    return api.routes


def _about(publication: Publication) -> dict[str, Any]:
    return {name: value for name, value in publication.as_json().items() if name != "spec"}
