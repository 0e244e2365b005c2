"""The application with all routes, and the server that runs it."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from streamtrain.serve.feedback.feedback import Feedback
from streamtrain.serve.follower import RegistryUpdater
from streamtrain.serve.http import comparison, console, control, openinference, outcomes, tfserving
from streamtrain.serve.http.connection import Connections
from streamtrain.serve.http.middleware import FastPath, RequestGuard
from streamtrain.serve.http.responses import add_error_handlers, body_schemas, documented, json_response
from streamtrain.serve.registry import Registry
from streamtrain.serve.routing.router import TrafficControl
from streamtrain.serve.service.served import ServedModel
from streamtrain.serve.service.service import Service, ServingConfig


def make_app(
    registry: Registry,
    updater: RegistryUpdater | None = None,
    config: ServingConfig | None = None,
    *,
    cluster: console.ClusterView | None = None,
    others: Sequence[RegistryUpdater] = (),
    traffic: Mapping[str, TrafficControl] | None = None,
    feedback: Feedback | None = None,
    comparisons: comparison.ComparisonView | None = None,
) -> FastAPI:
    """The application that serves a registry's model, and maybe others.

    Args:
        registry: of publications.
        updater: keeps the registry up to date; started and closed with the application. None: nothing does.
        config: how to serve; None: with defaults and without tokens.
        cluster: the coordinator, for the console; None: there is none.
        others: of further models, with their registries; likewise started and closed.
        traffic: of models, by name; None: requests to this application are divided as `config` says.
        feedback: where impressions and outcomes go, closed with the application; None: nowhere.
        comparisons: of models that learn from the same topic; None: nothing is known of them.

    Raises:
        ConfigError: a token is empty, or both are the same.
    """
    config = config or ServingConfig()
    updaters = [one for one in (updater, *others) if one is not None]
    served = [(registry, updater), *((one.registry, one) for one in others)]
    controls = traffic or {}
    models = [ServedModel(one, of, config.watchdog, controls.get(one.model.name)) for one, of in served]
    connections = Connections(config.max_connections, config.receive_timeout)
    service = Service(models, config, feedback, refused_connections=connections.refused)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.open()
        for one in updaters:
            one.start()
        await service.wait_loaded()
        yield
        await asyncio.gather(*(asyncio.to_thread(one.close) for one in updaters))
        service.close()
        await asyncio.to_thread(service.feedback.close)

    app = FastAPI(
        title=f"streamtrain: {', '.join(service.models)}",
        version=version("streamtrain"),
        description="Predictions by a model that learns from events seconds after they happened.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service, app.state.connections = service, connections
    add_error_handlers(app)
    # Not as included routers: those would be searched one after another, and after FastAPI's own routes.
    app.router.routes[:0] = [
        *tfserving.routes(service),
        *openinference.routes(service),
        *outcomes.routes(service),
        *control.routes(service),
        *comparison.routes(service, comparisons),
        *console.routes(service, cluster, comparisons is not None),
    ]
    app.add_middleware(FastPath, routes=app.router.routes, names=[*service.models])
    app.add_middleware(RequestGuard, tokens=service.tokens, hosts=config.hosts)  # runs first, as it is added last
    _add_health(app, service)
    _document(app)
    return app


def _add_health(app: FastAPI, service: Service) -> None:
    @app.get("/healthz/live", tags=["health"], summary="Whether the process is alive", responses=documented({}))
    async def live() -> Response:
        return json_response({"status": "live"})

    @app.get("/healthz/ready", tags=["health"], summary="Whether it can predict", responses=documented({}, 503))
    async def ready() -> Response:
        service.check_ready()
        described = [_describe(model) for model in service.models.values()]
        more = {"models": described} if len(described) > 1 else {}
        return json_response({"status": "ready"} | described[0] | more)

    @app.get("/metrics", tags=["health"], summary="For Prometheus", response_class=Response)
    async def metrics() -> Response:
        text = await asyncio.to_thread(generate_latest, service.metrics.registry)
        return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _describe(model: ServedModel) -> dict[str, Any]:
    """What a model that is ready serves, as JSON."""
    predictor, wanted = model.ready(), model.selection.wanted
    return {
        "model": model.name,
        "version": predictor.name,
        "wanted": predictor.name if wanted is None else str(wanted),
        "publication": predictor.publication.number,
        "origin": model.origin_state(),
    }


def _document(app: FastAPI) -> None:
    """Adds the schemas of bodies and the admin token, which routes refer to, to the OpenAPI document."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        document = make()
        components = document.setdefault("components", {})
        routed = (tfserving, openinference, outcomes, control, comparison, console)
        bodies = [body for module in routed for body in module.BODIES]
        components.setdefault("schemas", {}).update(body_schemas(bodies))
        components["securitySchemes"] = {"admin token": {"type": "http", "scheme": "bearer"}}
        return document

    app.openapi = openapi  # type: ignore[method-assign]
