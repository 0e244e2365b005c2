"""Console: the page at `/` for people, and what it reads besides the API: this process, the cluster, single rows."""

import asyncio
import html
import time
from importlib.resources import files
from typing import Any, Protocol

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from streamtrain.errors import StreamtrainError
from streamtrain.serve import about
from streamtrain.serve.answers import RETRY_SECONDS, Refused, answer, documented
from streamtrain.serve.fields import fields_of
from streamtrain.serve.inspector import Inspector, Row
from streamtrain.serve.service import Service
from streamtrain.serve.tfserving import messages_of

RECENT_SECONDS = 1.0
_AT_ONCE = 2  # looks at single rows in the cluster; the others wait for their turn
_HEADERS = {
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",  # for browsers that do not know frame-ancestors
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # asked again each time, by its etag: a new release shows at once
}


class ClusterView(Protocol):
    """What a coordinator knows of the cluster. Thread-safe.

    Calls may take their time, and raise StreamtrainError while it is away.
    """

    def status(self) -> dict[str, Any]:
        """The cluster as values of JSON; docs/serving.md lists them. Any number may be None."""

    def inspect(self, table: str, key: int) -> dict[str, Any] | None:
        """`count` and `last_seen` (seconds since the epoch) of a row, from the shard that has it; None: there is none.

        `last_seen` is None in a table without `expire_after` and `capacity`, which does not keep it.

        Args:
            table: name of the table.
            key: of the id, unsigned.
        """


class RecentStatus:
    """The status of a cluster, asked for at most once a second, however many want it. All calls from one event loop.

    Args:
        cluster: that is asked, on a thread.
    """

    def __init__(self, cluster: ClusterView) -> None:
        self._cluster = cluster
        self._asked: asyncio.Task[bytes] | None = None
        self._until = 0.0

    async def get(self) -> bytes:
        """The status as JSON.

        Raises:
            StreamtrainError: the coordinator is away; also that holds for a second.
        """
        if self._asked is None or (self._asked.done() and time.monotonic() >= self._until):
            self._asked = asyncio.create_task(self._ask())
        return await asyncio.shield(self._asked)  # whoever goes away leaves the others their answer

    async def _ask(self) -> bytes:
        try:
            return msgspec.json.encode(await asyncio.to_thread(self._cluster.status))
        finally:
            self._until = time.monotonic() + RECENT_SECONDS


class _Files(StaticFiles):
    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(_HEADERS)
        return response


def routes(service: Service, cluster: ClusterView | None) -> list[BaseRoute]:
    """The routes of the page and of what it reads.

    Args:
        service: of the model.
        cluster: a coordinator's; None: there is none.
    """
    api = APIRouter(tags=["console"])
    model = service.registry.model
    inspector = Inspector(model)
    recent = RecentStatus(cluster) if cluster else None
    reading, inspecting = asyncio.Semaphore(1), asyncio.Semaphore(_AT_ONCE)  # threads are for others as well
    fields, tables = fields_of(model.schema), [one.name for one in model.schema.tables]
    fixed = about.of_model(model) | {"control": service.tokens.has_admin, "cluster": cluster is not None}
    asked = about.instances(model)
    page = (files("streamtrain.serve") / "static" / "index.html").read_text("utf-8")
    page = page.replace("{model}", html.escape(model.name))

    async def show(request: Request) -> Response:
        return HTMLResponse(page, headers=_HEADERS)

    @api.get("/v1/models/{name}/process", summary="What this process serves", responses=documented(about.PROCESS, 404))
    async def process(name: str) -> Response:
        service.check_name(name)
        return answer(fixed | about.of_process(service, time.time()))

    @api.get("/v1/models/{name}/cluster", summary="What learns it", responses=documented(about.CLUSTER, 404, 503))
    async def status(name: str) -> Response:
        service.check_name(name)
        if recent is None:
            raise Refused(404, "no coordinator is configured, so nothing is known of the cluster")
        try:
            return Response(await recent.get(), media_type="application/json")
        except StreamtrainError as exc:
            raise Refused(503, f"the coordinator is away: {exc}", {"retry-after": RETRY_SECONDS}) from exc

    @api.get(
        "/v1/models/{name}/rows/{table}/{id:path}",
        summary="The row that an id reads",
        responses=documented(about.ROW, 400, 404, 503),
    )
    async def row(name: str, table: str, id: str) -> Response:
        predictor = service.chosen(name)()
        if table not in tables:
            raise Refused(404, f"there is no table {table!r}; the tables are {', '.join(tables)}")
        if len(id.encode("utf-8", "surrogatepass")) > model.schema.max_id_bytes:
            raise Refused(400, f"an id may have {model.schema.max_id_bytes} bytes")
        key = inspector.key_of(id)
        async with reading:
            read = await asyncio.to_thread(inspector.row, predictor, table, key)
        async with inspecting:
            seen = await _seen(cluster, table, key)
        return answer({"table": table, "id": id} | _about(read) | {"values": read.values} | seen)

    @api.post(
        "/v1/models/{name}:explain",
        summary="Which rows an instance reads",
        responses=documented(about.HITS, 400, 404, 413, 503),
        openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": asked}}}},
    )
    async def explain(name: str, request: Request) -> Response:
        choose = service.chosen(name)
        with service.admission.admit() as admitted:
            messages, _ = messages_of(await service.body(request, admitted), fields)
            if len(messages) != 1:
                raise Refused(400, f"one instance is explained at a time, not {len(messages)}")
            predictor = choose()
            async with reading:
                hits, publication = await asyncio.to_thread(inspector.explain, predictor, messages[0])
        ids: dict[str, list[dict[str, Any]]] = {one.name: [] for one in model.schema.embedded}
        for hit in hits:
            ids[hit.feature].append({"id": hit.id} | _about(hit.row))
        read = [{"feature": one.name, "table": one.table_name, "ids": ids[one.name]} for one in model.schema.embedded]
        return answer({"version": predictor.name, "publication": publication.number, "features": read})

    static = Mount("/console", _Files(packages=[("streamtrain.serve", "static")]))
    return [Route("/", show, methods=["GET"]), static, *api.routes]


def _about(row: Row) -> dict[str, Any]:
    """A row without its values; its key is text, as JSON's numbers end at 2**53 for many."""
    return {"key": str(row.key), "found": row.found, "norm": float(np.linalg.norm(row.values))}


async def _seen(cluster: ClusterView | None, table: str, key: int) -> dict[str, Any]:
    """What only the cluster knows of a row, and how that could be had."""
    unknown = {"count": None, "last_seen": None}
    if cluster is None:
        return unknown | {"cluster": "not configured"}
    try:
        told = await asyncio.to_thread(cluster.inspect, table, key)
    except StreamtrainError as exc:
        return unknown | {"cluster": f"away: {exc}"}
    return unknown | {what: told[what] for what in unknown if told and what in told} | {"cluster": "ok"}
