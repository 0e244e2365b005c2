"""Control: which version is served. Needs the admin token."""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.routing import BaseRoute

from streamtrain.errors import NothingBefore
from streamtrain.serve.answers import Refused, answer, documented
from streamtrain.serve.door import client_of
from streamtrain.serve.registry import HEAD, Registry
from streamtrain.serve.selection import Pinned
from streamtrain.serve.service import Service
from streamtrain.store.gate import GateClosed
from streamtrain.store.origin import Publication

_MOST = 2**53 - 1  # a larger number is not the same to every reader of JSON
_LONGEST = 1000  # characters of a reason
Why = Annotated[str, msgspec.Meta(max_length=_LONGEST)]


class _Rollback(msgspec.Struct):
    why: Why = ""


class _Promotion(_Rollback, kw_only=True):
    version: Annotated[int, msgspec.Meta(ge=1, le=_MOST)] | Literal["head"]
    force: bool = False


_read_promotion = msgspec.json.Decoder(_Promotion).decode
_read_rollback = msgspec.json.Decoder(_Rollback).decode
_WHY = {"type": "string", "maxLength": _LONGEST, "description": "for the history"}
_VERSION = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": _MOST}, {"type": "string", "enum": ["head"]}]}
_FORCE = {"type": "boolean", "description": "whether it is served even if the gate would hold it back"}
_PROMOTION = {
    "type": "object",
    "required": ["version"],
    "properties": {"version": _VERSION, "why": _WHY, "force": _FORCE},
}
_ROLLBACK = {"type": "object", "properties": {"why": _WHY}}
_SERVED = {
    "type": "object",
    "required": ["served", "publication"],
    "properties": {"served": {"type": "string"}, "publication": {"type": "object"}},
}
_SECURITY: dict[str, Any] = {"security": [{"admin token": []}]}


def routes(service: Service) -> list[BaseRoute]:
    """The routes; without an admin token nobody may use them."""
    api = APIRouter(tags=["control"])
    registry, selection = service.registry, service.selection

    def check(request: Request, name: str) -> None:
        service.tokens.check_admin(request.headers, client_of(request.scope))
        service.check_name(name)

    async def steer(act: Callable[[], Publication]) -> Response:
        """On a thread: a version may have to be loaded, and Redis asked."""
        try:
            publication = await asyncio.to_thread(act)
        except GateClosed as exc:
            raise Refused(409, f'{exc}; to serve it even so, send "force": true') from exc
        except (NothingBefore, Pinned) as exc:
            raise Refused(409, str(exc)) from exc
        served = registry.served
        return answer({"served": served.name if served else None, "publication": _about(publication)})

    @api.post(
        "/v1/models/{name}:promote",
        summary="Serve a version, or the head",
        responses=documented(_SERVED, 400, 401, 403, 404, 409, 413, 503),
        openapi_extra=_SECURITY | _body_of(_PROMOTION, required=True),
    )
    async def promote(name: str, request: Request) -> Response:
        check(request, name)
        try:
            asked = _read_promotion(await service.body(request))
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
            raise Refused(400, f'the body must be {{"version": NUMBER}} or {{"version": "head"}}: {exc}') from exc
        version = HEAD if asked.version == HEAD else asked.version
        return await steer(lambda: selection.promote(version, _who(request), asked.why, force=asked.force))

    @api.post(
        "/v1/models/{name}:rollback",
        summary="Serve again what was served before",
        responses=documented(_SERVED, 400, 401, 403, 404, 409, 413, 503),
        openapi_extra=_SECURITY | _body_of(_ROLLBACK, required=False),
    )
    async def rollback(name: str, request: Request) -> Response:
        check(request, name)
        body = await service.body(request)
        try:
            why = _read_rollback(body).why if body else ""
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
            raise Refused(400, f'the body must be empty or {{"why": TEXT}}: {exc}') from exc
        return await steer(lambda: selection.rollback(_who(request), why))

    @api.get(
        "/v1/models/{name}/versions",
        summary="Versions that can be served",
        responses=documented({"type": "object"}, 401, 403, 404, 503),
        openapi_extra=_SECURITY,
    )
    async def versions(name: str, request: Request) -> Response:
        check(request, name)
        found = await asyncio.to_thread(registry.origin.versions)
        served, head, wanted = registry.served, registry.find(HEAD), selection.wanted
        about_head = None if head is None else _about(head.publication)
        about = {"served": served.name if served else None, "wanted": None if wanted is None else str(wanted)}
        return answer(about | {"versions": _listed(registry, found), "head": about_head})

    @api.get(
        "/v1/models/{name}/checksums",
        summary="Checksums of the rows that this process holds",
        responses=documented({"type": "object"}, 401, 403, 404),
        openapi_extra=_SECURITY,
    )
    async def checksums(name: str, request: Request) -> Response:
        check(request, name)
        return answer({"loaded": await asyncio.to_thread(_checksums, registry)})

    return api.routes


def _listed(registry: Registry, versions: list[Publication]) -> list[dict[str, Any]]:
    labels = registry.labels
    return [
        _about(one)
        | {
            "resident": one.version in registry.resident,
            "labels": [label for label, version in labels.items() if version == one.version],
        }
        for one in versions
    ]


def _checksums(registry: Registry) -> list[dict[str, Any]]:
    """Of each loaded publication, one after another; numbers of 64 bits are no numbers of JSON to every reader."""
    found = []
    for predictor in registry.resident.values():
        if (sums := predictor.loaded.checksums()) is None:
            raise Refused(404, "there are no checksums: rows are looked up in Redis, not held (serve.lookup = cache)")
        tables = {name: {"rows": one.rows, "checksum": f"{one.checksum:016x}"} for name, one in sums.tables.items()}
        found.append({"name": predictor.name, "publication": _about(sums.publication), "tables": tables})
    return found


def _who(request: Request) -> str:
    """For the history; whoever has the token is nobody in particular."""
    return f"HTTP from {client_of(request.scope)}"


def _body_of(schema: dict[str, Any], *, required: bool) -> dict[str, Any]:
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


def _about(publication: Publication) -> dict[str, Any]:
    return {name: value for name, value in publication.as_json().items() if name != "spec"}
