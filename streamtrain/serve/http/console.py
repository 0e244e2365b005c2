"""The console at `/`, the API's page at `/docs`, and what they read besides the API: the process, the cluster, rows."""

import asyncio
import html
import time
from collections.abc import Mapping
from importlib.resources import files
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from streamtrain.errors import StreamtrainError
from streamtrain.model.features import Categorical, Cross
from streamtrain.model.model import Model
from streamtrain.serve.errors import RETRY_SECONDS, HTTPError
from streamtrain.serve.http.requests import read_body
from streamtrain.serve.http.responses import any_of, documented, instances_schema, json_response, request_body
from streamtrain.serve.http.tfserving import parse_messages
from streamtrain.serve.inspector import Inspector, RowRead
from streamtrain.serve.predictor import Predictor
from streamtrain.serve.service.served import ServedModel, input_fields
from streamtrain.serve.service.service import Service
from streamtrain.store.traffic import Arm

Count = Annotated[int, Meta(ge=0)]
Time = Annotated[float, Meta(description="Seconds since the epoch.")]
Floats = Annotated[Any, Meta(extra_json_schema={"type": "array", "items": {"type": "number"}})]  # of NumPy
MetricsByLabel = Mapping[str, Mapping[str, float | None]]


class FieldInfo(Struct):
    """A field of an instance."""

    name: str
    ids: Annotated[bool, Meta(description="Holds an id or a list of ids; else a number.")]
    required: bool
    default: Annotated[Any, Meta(description="Used where the field is missing.")]
    max_ids: Annotated[Count | None, Meta(description="Only the last ones of a longer list count; null: no limit.")]
    features: Annotated[list[str], Meta(description="That read the field.")]


class CrossInfo(Struct):
    """A cross of features."""

    name: str
    of: tuple[str, ...]


class TableInfo(Struct):
    """An embedding table."""

    name: str
    dim: Count


class LoadedVersion(Struct):
    """A loaded version."""

    version: Annotated[str, Meta(description='A number, or "head".')]
    publication: Count
    published: Time
    watermark: Annotated[float | None, Meta(description="Latest event time learned, seconds since the epoch.")]
    learned: Annotated[Count, Meta(description="Samples up to its clock, over all partitions.")]
    rows: dict[str, Count]
    bytes: Count
    metrics: MetricsByLabel


class ArmInfo(Struct):
    """An arm of the traffic, and what this process knows of it."""

    name: str
    weight: Annotated[float, Meta(description="Percentage of the requests that it should get.")]
    version: Annotated[str | None, Meta(description="That predicts its requests; null: it is not loaded.")]
    requests: Annotated[Count, Meta(description="That it has predicted since weights changed.")]
    failures: Annotated[Count, Meta(description="Requests that it has not predicted, whatever the reason.")]
    checked: Annotated[
        Count | None, Meta(description="Publication that the watchdog has last found to predict samples well.")
    ]
    stopped: Annotated[str | None, Meta(description="Why the watchdog has taken all requests away from it.")]


class MirrorInfo(Struct):
    """The arm that gets a copy of all requests; its counts are those of this process."""

    name: str
    version: Annotated[str | None, Meta(description="That predicts the copies; null: it is not loaded.")]
    compared: Count
    dropped: Count
    failed: Count


class TrafficInfo(Struct):
    """How requests are divided among arms."""

    arms: list[ArmInfo]
    mirror: MirrorInfo | None


class Process(Struct):
    """What this process serves."""

    model: str
    models: Annotated[list[str], Meta(description="That this process serves.")]
    outputs: list[str]
    fields: list[FieldInfo]
    crosses: list[CrossInfo]
    tables: list[TableInfo]
    control: Annotated[bool, Meta(description="Whether there is an admin token.")]
    cluster: Annotated[bool, Meta(description="Whether a coordinator is configured.")]
    compare: Annotated[bool, Meta(description="Whether there is a Redis with figures of models to compare.")]
    time: Annotated[float, Meta(description="Now, seconds since the epoch.")]
    served: str | None
    loaded: list[LoadedVersion]
    labels: dict[str, Count]
    origin: str
    traffic: Annotated[TrafficInfo | None, Meta(description="null: all requests go to what is served.")]


class Cluster(Struct):
    """See docs/serving.md. Any number may be null."""

    time: float | UnsetType | None = UNSET
    figures: MetricsByLabel | UnsetType = UNSET
    shards: list[dict[str, Any]] | UnsetType = UNSET
    workers: list[dict[str, Any]] | UnsetType = UNSET
    servers: list[dict[str, Any]] | UnsetType = UNSET
    log_time: float | UnsetType | None = UNSET
    workers_left: int | UnsetType | None = UNSET
    dead_letters: dict[str, float | None] | UnsetType = UNSET
    dead_letter_examples: dict[str, dict[str, Any]] | UnsetType = UNSET
    history: list[dict[str, Any]] | UnsetType = UNSET


class IdRow(Struct, kw_only=True):
    """The row that an id reads."""

    id: Annotated[str | None, Meta(description="null: of a cross, or of a cell.")]
    key: Annotated[str, Meta(description="Unsigned 64-bit, in decimal.")]
    found: Annotated[bool, Meta(description="Whether it has a row; else it reads its initial value.")]
    norm: Annotated[float | None, Meta(description="Euclidean.")]


class TableRow(IdRow, kw_only=True):
    """A row of a table."""

    table: str
    values: Floats
    count: Annotated[float | None, Meta(description="Times that it was learned; null: not known.")]
    last_seen: Annotated[
        float | None,
        Meta(description="Event time, seconds since the epoch; null: not known, or the table does not keep it."),
    ]
    cluster: Annotated[str, Meta(description='"ok", "not configured", or why the cluster is not known.')]


class ReadRow(IdRow, kw_only=True):
    """The row that an id or a cell of an instance reads."""

    cell: Annotated[str | None, Meta(description='The numbers of the cell, or "missing"; null: it is none.')]


class FeatureRows(Struct):
    """The rows that a feature of an instance reads."""

    feature: str
    table: str
    ids: list[ReadRow]


class Explanation(Struct):
    """The rows that an instance reads."""

    version: str
    publication: Count
    features: list[FeatureRows]


BODIES = (Process, Cluster, TableRow, Explanation)


def describe_model(model: Model) -> dict[str, Any]:
    """The parts of `Process` that never change: outputs, tables, and fields with the features that read them."""
    readers = [one for one in model.schema.features if not isinstance(one, Cross)]
    fields = []
    for name, field in input_fields(model.schema).items():
        reading = [feature for feature in readers if feature.field_name == name]
        lengths = [feature.max_length for feature in reading if isinstance(feature, Categorical)]
        default = next((feature.default for feature in reading if feature.default is not None), None)
        max_ids = None if None in lengths else max((length for length in lengths if length), default=None)
        names = [feature.name for feature in reading]
        fields.append(FieldInfo(name, field.ids, field.required, default, max_ids, names))
    return {
        "model": model.name,
        "outputs": [label.name for label in model.labels],
        "fields": fields,
        "crosses": [CrossInfo(one.name, one.of) for one in model.schema.crosses],
        "tables": [TableInfo(table.name, table.dim) for table in model.schema.tables],
    }


def describe_process(model: ServedModel, now: float) -> dict[str, Any]:
    """The other parts of `Process`, at the time `now`."""
    registry = model.registry
    served = registry.served
    return {
        "time": now,
        "served": served.name if served else None,
        "loaded": [_loaded(one) for one in registry.resident.values()],
        "labels": registry.labels,
        "origin": model.origin_state(),
        "traffic": _traffic(model),
    }


def _traffic(model: ServedModel) -> TrafficInfo | None:
    router, traffic = model.router, model.router.traffic
    if traffic is None:
        return None

    def version(arm: Arm) -> str | None:
        return predictor.name if (predictor := router.find(arm)) else None

    stopped = dict(traffic.stopped)
    arms = [
        ArmInfo(
            name=arm.name,
            weight=weight,
            version=version(arm),
            requests=router.requests[arm.name],
            failures=router.failures[arm.name],
            checked=model.guard.checked(arm) if model.guard else None,
            stopped=stopped.get(arm.name),
        )
        for arm, weight in traffic.arms
    ]
    if (mirror := traffic.mirror) is None:
        return TrafficInfo(arms, None)
    return TrafficInfo(arms, MirrorInfo(mirror.name, version(mirror), **model.mirror.state().requests))


def _loaded(predictor: Predictor) -> LoadedVersion:
    publication = predictor.publication
    return LoadedVersion(
        version=predictor.name,
        publication=publication.number,
        published=publication.published,
        watermark=publication.watermark or None,
        learned=sum(publication.clock.values()),
        rows=predictor.loaded.rows,
        bytes=predictor.loaded.nbytes,
        metrics=publication.metrics,
    )


RECENT_SECONDS = 1.0
_CONCURRENT_LOOKUPS = 2  # of single rows in the cluster
_HEADERS = {
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",  # for browsers that do not know frame-ancestors
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # revalidated by its etag, so that a new release shows at once
}


class ClusterView(Protocol):
    """What the coordinator knows. Thread-safe. Calls may block, and raise StreamtrainError while it is away."""

    def status(self) -> dict[str, Any]:
        """The status of the cluster as JSON values, see docs/serving.md. Any number may be None."""

    def inspect(self, table: str, key: int) -> dict[str, Any] | None:
        """`count` and `last_seen` (seconds since the epoch) of a row, from its shard; None: there is no such row.

        `last_seen` is None in a table without `expire_after` and `capacity`, which does not keep it.
        """


class RecentStatus:
    """The status of a cluster, cached for a second. All calls come from one event loop, and one is made at a time."""

    def __init__(self, cluster: ClusterView) -> None:
        self._cluster = cluster
        self._asked: asyncio.Task[bytes] | None = None
        self._until = 0.0

    async def get(self) -> bytes:
        """The status as JSON.

        Raises:
            StreamtrainError: the coordinator is away; this is cached, too.
        """
        if self._asked is None or (self._asked.done() and time.monotonic() >= self._until):
            self._asked = asyncio.create_task(self._ask())
        return await asyncio.shield(self._asked)  # a client that disconnects does not cancel it for the others

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


def routes(service: Service, cluster: ClusterView | None, can_compare: bool = False) -> list[BaseRoute]:
    """The routes of the console, and of what it reads; those of `comparison` are apart."""
    api = APIRouter(tags=["console"])
    inspectors = {name: Inspector(one.model) for name, one in service.models.items()}
    recent = RecentStatus(cluster) if cluster else None
    # Leave threads of the pool to other requests.
    reading, inspecting = asyncio.Semaphore(1), asyncio.Semaphore(_CONCURRENT_LOOKUPS)
    about = {
        "control": service.tokens.has_admin,
        "cluster": cluster is not None,
        "compare": can_compare,
        "models": [*service.models],
    }
    fixed = {name: describe_model(one.model) | about for name, one in service.models.items()}

    @api.get("/v1/models/{name}/process", summary="What this process serves", responses=documented(Process, 404))
    async def process(name: str) -> Response:
        model = service.find(name)
        return json_response(Process(**fixed[name], **describe_process(model, time.time())))

    @api.get("/v1/models/{name}/cluster", summary="The cluster that trains it", responses=documented(Cluster, 404, 503))
    async def status(name: str) -> Response:
        service.find(name)
        if recent is None:
            raise HTTPError(404, "no coordinator is configured, so the status of the cluster is not known")
        try:
            return Response(await recent.get(), media_type="application/json")
        except StreamtrainError as exc:
            raise HTTPError(503, f"the coordinator is unreachable: {exc}", {"retry-after": RETRY_SECONDS}) from exc

    @api.get(
        "/v1/models/{name}/rows/{table}/{id:path}",
        summary="The row that an id reads",
        responses=documented(TableRow, 400, 404, 503),
    )
    async def row(name: str, table: str, id: str) -> Response:
        target = service.resolve(name)
        predictor, schema = target.choose(), target.model.model.schema
        tables = [one.name for one in schema.tables]
        if table not in tables:
            raise HTTPError(404, f"unknown table {table!r}; the tables are {', '.join(tables)}")
        if len(id.encode("utf-8", "surrogatepass")) > schema.max_id_bytes:
            raise HTTPError(400, f"an id may have at most {schema.max_id_bytes} bytes")
        key = inspectors[name].key_of(id)
        async with reading:
            read = await asyncio.to_thread(inspectors[name].row, predictor, table, key)
        async with inspecting:
            seen = await _seen(cluster, table, key)
        return json_response(TableRow(table=table, id=id, values=read.values, **_key_of(read), **seen))

    @api.post(
        "/v1/models/{name}:explain",
        summary="Which rows an instance reads",
        responses=documented(Explanation, 400, 404, 413, 503),
        openapi_extra=request_body(any_of(instances_schema(one.model, at_most=1) for one in service.models.values())),
    )
    async def explain(name: str, request: Request) -> Response:
        target = service.resolve(name)
        with service.admission.admit() as admitted:
            body = await read_body(service, request, admitted)
            messages, _ = parse_messages(body, target.fields, service.limits(admitted))
            if len(messages) != 1:
                raise HTTPError(400, f"one instance is explained at a time, not {len(messages)}")
            predictor = target.choose()
            async with reading:
                hits, publication = await asyncio.to_thread(inspectors[name].explain, predictor, messages[0])
        embedded = target.model.model.schema.embedded
        features = {one.name: FeatureRows(one.name, one.table_name, []) for one in embedded}
        for hit in hits:
            features[hit.feature].ids.append(ReadRow(id=hit.id, cell=hit.cell, **_key_of(hit.row)))
        return json_response(Explanation(predictor.name, publication.number, [*features.values()]))

    static = Mount("/console", _Files(packages=[("streamtrain.serve", "static")]))
    return [_page("/", "index.html", service), _page("/docs", "apidocs.html", service), static, *api.routes]


def _page(path: str, name: str, service: Service) -> Route:
    """A page of the package, which loads nothing from elsewhere; of the first model, or the one that ?model= names."""
    text = (files("streamtrain.serve") / "static" / name).read_text("utf-8")

    async def show(request: Request) -> Response:
        model = request.query_params.get("model", service.default.name)
        page = text.replace("{model}", html.escape(service.find(model).name))
        # At /, a client of KServe's V1 protocol asks whether the server is alive.
        if path == "/" and "text/html" not in request.headers.get("accept", ""):
            return json_response({"status": "alive"}, headers={"vary": "accept"})
        return HTMLResponse(page, headers=_HEADERS | {"vary": "accept"})

    return Route(path, show, methods=["GET"])


def _key_of(row: RowRead) -> dict[str, Any]:
    """The key, as text because many clients read JSON numbers as doubles, with whether it has a row and its norm."""
    return {"key": str(row.key), "found": row.found, "norm": float(np.linalg.norm(row.values))}


async def _seen(cluster: ClusterView | None, table: str, key: int) -> dict[str, Any]:
    """What only the cluster knows of a row, and whether it answered."""
    unknown = {"count": None, "last_seen": None}
    if cluster is None:
        return unknown | {"cluster": "not configured"}
    try:
        row = await asyncio.to_thread(cluster.inspect, table, key)
    except StreamtrainError as exc:
        return unknown | {"cluster": f"away: {exc}"}
    return unknown | {name: row[name] for name in unknown if row and name in row} | {"cluster": "ok"}
