"""The application with all routes, and the server that runs it."""

import asyncio
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from queue import SimpleQueue
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import Response
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from streamtrain.address import parse_address
from streamtrain.errors import ConfigError
from streamtrain.garbage import freeze_heap
from streamtrain.serve.feedback.feedback import Feedback
from streamtrain.serve.follower import RegistryUpdater
from streamtrain.serve.grpc.openinference import OpenInference
from streamtrain.serve.grpc.server import GrpcServer
from streamtrain.serve.grpc.tfserving import TensorFlowServing
from streamtrain.serve.http import comparison, console, control, openinference, outcomes, tfserving
from streamtrain.serve.http.connection import Connections
from streamtrain.serve.http.middleware import FastPath, RequestGuard
from streamtrain.serve.http.responses import add_error_handlers, body_schemas, documented, json_response
from streamtrain.serve.http.served import ServedModel
from streamtrain.serve.http.service import Service, ServingConfig
from streamtrain.serve.registry import Registry
from streamtrain.serve.routing.router import TrafficControl
from streamtrain.shutdown import SHUTDOWN_SECONDS, end_in_time

DRAIN_SECONDS = 10
KEEP_ALIVE_SECONDS = 75
"""How long an idle connection stays open: longer than clients and load balancers keep theirs, by default 60 s at most.

Otherwise some requests arrive just as the server closes their connection; the client cannot know whether they count.
"""


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
        for one in updaters:
            await asyncio.to_thread(one.close)
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


def configure(app: FastAPI, address: str, *, log_level: str = "warning") -> uvicorn.Config:
    """The configuration of uvicorn for an application.

    Args:
        app: from `make_app`, or one that mounts such an application: then with default limits of connections.
        address: "host:port" or "[ipv6]:port"; port 0 picks a free one.
        log_level: of uvicorn.

    Raises:
        ConfigError: the address is not a TCP address.
    """
    target = parse_address(address, "the address to serve at", any_port=True)
    if target.path:
        raise ConfigError(f'predictions are served over TCP only: use "host:port", not {address!r}')
    connections: Connections = getattr(app.state, "connections", None) or Connections()
    return uvicorn.Config(
        app,
        host=target.host,
        port=target.port,
        loop="uvloop",
        http=connections.protocol(),
        ws="none",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=DRAIN_SECONDS,
        log_config=None,  # that of the process
        log_level=log_level,
    )


class Server(uvicorn.Server):
    """Runs an application from `make_app`, and its gRPC endpoint if it has one.

    Attributes:
        grpc_port: where gRPC is served; 0: it is not.
        failure: why it has ended before it served.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._service: Service = config.app.state.service  # type: ignore[union-attr]
        self._grpc: GrpcServer | None = None
        self.grpc_port = 0
        self.failure: ConfigError | None = None
        self._signals = SimpleQueue[int]()  # its put may be interrupted by another one

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Also stops waiting for a version to be loaded."""
        self._signals.put(sig)
        super().handle_exit(sig, frame)
        self._service.stop()

    def watch_exit(self) -> None:
        """Ends the process `SHUTDOWN_SECONDS` after the first signal, if it has not ended by then."""
        first = self._signals.get()
        end_in_time(first, lambda _: time.sleep(SHUTDOWN_SECONDS), SHUTDOWN_SECONDS)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Binds HTTP, then gRPC, so that neither is reachable before something is loaded."""
        await super().startup(sockets)
        address = self._service.config.grpc_listen
        if address is None or self.should_exit:
            return
        services = {**TensorFlowServing(self._service).services(), **OpenInference(self._service).services()}
        self._grpc = GrpcServer(self._service, services)
        try:
            self.grpc_port = await self._grpc.start(address)
        except ConfigError as exc:
            self.failure, self.should_exit = exc, True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Completes calls in flight, then requests."""
        if self._grpc is not None:
            await self._grpc.stop(DRAIN_SECONDS)
        await super().shutdown(sockets)


def serve(app: FastAPI, address: str, sockets: Sequence[socket.socket] | None = None) -> None:
    """Serves an application until SIGTERM or SIGINT; then completes the requests in flight, and returns.

    Args:
        app: from `make_app`.
        address: see `configure`.
        sockets: that listen there already; None: it is bound here.

    Raises:
        ConfigError: the address, or that of gRPC, is invalid or cannot be bound.
    """
    server = Server(configure(app, address))
    threading.Thread(target=server.watch_exit, name="signals", daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):
        # Uvicorn raises the signal again once it has restored this handler; that is not an error.
        signal.signal(number, server.handle_exit)
    try:
        with freeze_heap():
            server.run(None if sockets is None else [*sockets])
    except SystemExit as exc:  # uvicorn could not bind it, and has logged why
        raise ConfigError(f"cannot bind {address} (serve.listen): in use, or not an address of this machine") from exc
    if server.failure is not None:
        raise server.failure
