"""Control of the version that is served. Requires the admin token."""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from msgspec import Meta, Struct
from starlette.routing import BaseRoute

from streamtrain.errors import ArmNotLoaded, GateClosed, NothingBefore, Pinned, Superseded, TrafficRefused
from streamtrain.serve.errors import HTTPError
from streamtrain.serve.http.requests import client_address, parse_body, read_body
from streamtrain.serve.http.responses import documented, json_response, request_body
from streamtrain.serve.registry import HEAD, Registry
from streamtrain.serve.routing.router import Router
from streamtrain.serve.service.served import ServedModel
from streamtrain.serve.service.service import Service
from streamtrain.store.publication import Publication
from streamtrain.store.traffic import Traffic

_MAX_VERSION = 2**53 - 1  # beyond it many clients round numbers of JSON
Why = Annotated[str, Meta(max_length=1000, description="For the history.")]


class Rollback(Struct):
    """Why to roll back."""

    why: Why = ""


class Promotion(Struct):
    """Which version to serve."""

    version: Annotated[int, Meta(ge=1, le=_MAX_VERSION)] | Literal["head"]
    why: Why = ""
    force: Annotated[bool, Meta(description="Serve it even if the quality gate would hold it back.")] = False


class TrafficChange(Struct):
    """How to divide requests among arms."""

    weights: Annotated[dict[str, float], Meta(description="Percentages by arm, which add up to 100.")] = {}
    mirror: Annotated[
        str | None, Meta(description='An arm that gets a copy of all requests; "none": nothing does.')
    ] = None
    why: Why = ""
    force: Annotated[bool, Meta(description="Even if a living server has not loaded an arm.")] = False


class TrafficShares(Struct):
    """How requests are divided among arms."""

    weights: Annotated[dict[str, float], Meta(description="Percentages by arm; empty: all go to what is served.")]
    mirror: str | None
    stopped: Annotated[
        dict[str, str], Meta(description="Arms that the watchdog has taken all requests away from, and why.")
    ]
    missing: Annotated[
        list[str], Meta(description="Arms that this server has not loaded: what is served gets their requests.")
    ]


class ServedVersion(Struct):
    """What is served now."""

    served: str | None
    publication: dict[str, Any]


class PublicationSums(Struct):
    """The checksums of a loaded publication, by table; they are 64-bit, in hexadecimal."""

    name: str
    publication: dict[str, Any]
    tables: dict[str, dict[str, Any]]


class Checksums(Struct):
    """Checksums of all loaded publications."""

    loaded: list[PublicationSums]


class Versions(Struct):
    """The versions that can be served, and what is served."""

    served: str | None
    wanted: str | None
    versions: list[dict[str, Any]]
    head: dict[str, Any] | None


BODIES = (Rollback, Promotion, TrafficChange, TrafficShares, ServedVersion, Versions, Checksums)
_read_promotion = msgspec.json.Decoder(Promotion).decode
_read_rollback = msgspec.json.Decoder(Rollback).decode
_read_traffic = msgspec.json.Decoder(TrafficChange).decode
_SECURITY: dict[str, Any] = {"security": [{"admin token": []}]}


def routes(service: Service) -> list[BaseRoute]:
    """The routes; without an admin token they are refused."""
    api = APIRouter(tags=["control"])

    def find(request: Request, name: str) -> ServedModel:
        service.tokens.check_admin(request.headers, client_address(request.scope))
        return service.find(name)

    async def run(model: ServedModel, act: Callable[[], Publication]) -> Response:
        """In a thread, because it may load a version and query Redis."""
        try:
            publication = await asyncio.to_thread(act)
        except GateClosed as exc:
            raise HTTPError(409, f'{exc}; to serve it anyway, send "force": true') from exc
        except (NothingBefore, Pinned) as exc:
            raise HTTPError(409, str(exc)) from exc
        served = model.registry.served
        return json_response(ServedVersion(served.name if served else None, _to_json(publication)))

    @api.post(
        "/v1/models/{name}:promote",
        summary="Serve a version, or the head",
        responses=documented(ServedVersion, 400, 401, 403, 404, 409, 413, 503),
        openapi_extra=_SECURITY | request_body(Promotion),
    )
    async def promote(name: str, request: Request) -> Response:
        model = find(request, name)
        expected = 'the body must be {"version": NUMBER} or {"version": "head"}'
        body = parse_body(_read_promotion, await read_body(service, request), expected)
        return await run(
            model, lambda: model.selection.promote(body.version, _who(request), body.why, force=body.force)
        )

    @api.post(
        "/v1/models/{name}:rollback",
        summary="Serve the previous version again",
        responses=documented(ServedVersion, 400, 401, 403, 404, 409, 413, 503),
        openapi_extra=_SECURITY | request_body(Rollback, required=False),
    )
    async def rollback(name: str, request: Request) -> Response:
        model = find(request, name)
        body = await read_body(service, request)
        why = parse_body(_read_rollback, body, 'the body must be empty or {"why": TEXT}').why if body else ""
        return await run(model, lambda: model.selection.rollback(_who(request), why))

    @api.get(
        "/v1/models/{name}/versions",
        summary="Versions that can be served",
        responses=documented(Versions, 401, 403, 404, 503),
        openapi_extra=_SECURITY,
    )
    async def versions(name: str, request: Request) -> Response:
        model = find(request, name)
        registry = model.registry
        published = await asyncio.to_thread(registry.origin.versions)
        served, head, wanted = registry.served, registry.find(HEAD), model.selection.wanted
        listed = Versions(
            served=served.name if served else None,
            wanted=None if wanted is None else str(wanted),
            versions=_listed(registry, published),
            head=None if head is None else _to_json(head.publication),
        )
        return json_response(listed)

    @api.get(
        "/v1/models/{name}/checksums",
        summary="Checksums of the rows that this process holds",
        responses=documented(Checksums, 401, 403, 404),
        openapi_extra=_SECURITY,
    )
    async def checksums(name: str, request: Request) -> Response:
        return json_response(await asyncio.to_thread(_checksums, find(request, name).registry))

    _add_traffic(api, service, find)
    return api.routes


def _add_traffic(api: APIRouter, service: Service, find: Callable[[Request, str], ServedModel]) -> None:
    @api.post(
        "/v1/models/{name}:traffic",
        summary="Divide requests among arms",
        responses=documented(TrafficShares, 400, 401, 403, 404, 409, 413, 503),
        openapi_extra=_SECURITY | request_body(TrafficChange),
    )
    async def change(name: str, request: Request) -> Response:
        model = find(request, name)
        control = model.control
        expected = 'the body must be like {"weights": {"prod": 95, "canary": 5}}'
        body = parse_body(_read_traffic, await read_body(service, request), expected)
        if control is None:
            raise HTTPError(409, "there is no Redis in which the traffic could be set for all servers: set publish.url")
        try:
            traffic = await asyncio.to_thread(
                control.change, body.weights, _who(request), body.why, mirror=body.mirror, force=body.force
            )
        except ArmNotLoaded as exc:
            raise HTTPError(409, f'{exc}; to set it anyway, send "force": true') from exc
        except (TrafficRefused, Superseded) as exc:
            raise HTTPError(409, str(exc)) from exc
        model.follow_traffic(traffic)
        return json_response(_shares(traffic, model.router))

    @api.get(
        "/v1/models/{name}/traffic",
        summary="How requests are divided among arms",
        responses=documented(TrafficShares, 401, 403, 404),
        openapi_extra=_SECURITY,
    )
    async def shares(name: str, request: Request) -> Response:
        router = find(request, name).router
        return json_response(_shares(router.traffic, router))


def _shares(traffic: Traffic | None, router: Router) -> TrafficShares:
    if traffic is None:
        return TrafficShares({}, None, {}, [])
    missing = [arm.name for arm in traffic.every_arm if router.find(arm) is None]
    mirror = traffic.mirror.name if traffic.mirror else None
    return TrafficShares(traffic.weights(), mirror, dict(traffic.stopped), missing)


def _listed(registry: Registry, versions: list[Publication]) -> list[dict[str, Any]]:
    labels = registry.labels
    return [
        _to_json(one)
        | {
            "resident": one.version in registry.resident,
            "labels": [label for label, version in labels.items() if version == one.version],
        }
        for one in versions
    ]


def _checksums(registry: Registry) -> Checksums:
    loaded = []
    for predictor in registry.resident.values():
        if (sums := predictor.loaded.checksums()) is None:
            raise HTTPError(404, "no checksums: rows are looked up in Redis and not held here (serve.lookup = cache)")
        tables = {name: {"rows": one.rows, "checksum": f"{one.checksum:016x}"} for name, one in sums.tables.items()}
        loaded.append(PublicationSums(predictor.name, _to_json(sums.publication), tables))
    return Checksums(loaded)


def _who(request: Request) -> str:
    """For the history; the token does not identify a person."""
    return f"HTTP from {client_address(request.scope)}"


def _to_json(publication: Publication) -> dict[str, Any]:
    return {name: value for name, value in publication.to_json().items() if name != "spec"}
