"""The application: all protocols over HTTP, and the server that runs it."""

import asyncio
import gc
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import Response
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from streamtrain.address import parse_address
from streamtrain.errors import ConfigError
from streamtrain.serve import console, control, openinference, tfserving
from streamtrain.serve.answers import answer, documented, install
from streamtrain.serve.batcher import Batcher
from streamtrain.serve.connection import Connections
from streamtrain.serve.door import Door
from streamtrain.serve.follower import Follower
from streamtrain.serve.page import page_of
from streamtrain.serve.registry import Registry
from streamtrain.serve.route import Direct
from streamtrain.serve.service import Limits, Service
from streamtrain.serve.tokens import Tokens
from streamtrain.serve.watchdog import Watch

DRAIN_SECONDS = 10
_WATCH = Watch()


def make_app(
    registry: Registry,
    follower: Follower | None = None,
    *,
    admin_token: str | None = None,
    read_token: str | None = None,
    limits: Limits | None = None,
    connections: Connections | None = None,
    max_batch: int = 512,
    max_queue: int = 8192,
    max_wait: float = 1.0,
    watch: Watch = _WATCH,
    patience: float = 0.0,
    cluster: console.ClusterView | None = None,
) -> FastAPI:
    """The application that serves a registry's model.

    Args:
        registry: of publications.
        follower: that keeps the registry up; started and closed with the application. None: somebody else does.
        admin_token: that control needs; None: control is refused.
        read_token: that all else but health and the console's page needs; None: nothing.
        limits: of requests.
        connections: what clients may take.
        max_batch: instances that are predicted together at most; a single request may have more.
        max_queue: instances that may wait; more are refused with 503.
        max_wait: seconds for which a request may wait to be predicted; then it is refused with 503.
        watch: what is watched for in predictions.
        patience: seconds for which it takes no requests while nothing is loaded; then it answers that it is not ready.
        cluster: what a coordinator tells of the cluster, for the console; None: there is none.

    Raises:
        ConfigError: a token is empty, or both are the same.
    """
    tokens = Tokens(admin_token, read_token)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.open()
        if follower is not None:
            follower.start()
        await service.begun(patience)
        yield
        if follower is not None:
            await asyncio.to_thread(follower.close)
        service.close()

    service = Service(
        registry,
        follower,
        Batcher(max_batch, max_queue, max_wait),
        limits or Limits(),
        watch,
        tokens=tokens,
        connections=connections or Connections(),
    )
    app = FastAPI(
        title=f"streamtrain: {registry.model.name}",
        version=version("streamtrain"),
        description="Predictions by a model that learns from events seconds after they happened.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    install(app)
    # Not as routers that are included: they would be searched one after another, and after FastAPI's own routes.
    app.router.routes[:0] = [
        *tfserving.routes(service),
        *openinference.routes(service),
        *control.routes(service),
        *console.routes(service, cluster),
        page_of(app),
    ]
    app.add_middleware(Direct, routes=app.router.routes, name=registry.model.name)
    app.add_middleware(Door, tokens=tokens)  # which is before the other, as it is added later
    _add_health(app, service)
    _document_token(app)
    return app


def _add_health(app: FastAPI, service: Service) -> None:
    @app.get("/healthz/live", tags=["health"], summary="Whether the process runs", responses=documented({}))
    async def live() -> Response:
        return answer({"status": "live"})

    @app.get("/healthz/ready", tags=["health"], summary="Whether it can predict", responses=documented({}, 503))
    async def ready() -> Response:
        name = service.registry.model.name
        predictor = service.chosen(name)()
        number = predictor.publication.number
        wanted = service.selection.wanted
        about = {
            "status": "ready",
            "model": name,
            "version": predictor.name,
            "wanted": predictor.name if wanted is None else str(wanted),
        }
        return answer(about | {"publication": number, "origin": service.origin_state()})

    @app.get("/metrics", tags=["health"], summary="For Prometheus", response_class=Response)
    async def metrics() -> Response:
        text = await asyncio.to_thread(generate_latest, service.metrics.registry)
        return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _document_token(app: FastAPI) -> None:
    """Names the tokens in the OpenAPI page, where routes refer to them."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        page = make()
        page.setdefault("components", {})["securitySchemes"] = {"admin token": {"type": "http", "scheme": "bearer"}}
        return page

    app.openapi = openapi  # type: ignore[method-assign]


def configure(app: FastAPI, address: str, *, log_level: str = "warning") -> uvicorn.Config:
    """How uvicorn runs an application.

    Args:
        app: the application.
        address: "host:port" or "[ipv6]:port"; port 0 is a free one.
        log_level: of uvicorn.

    Raises:
        ConfigError: the address is none of TCP.
    """
    place = parse_address(address, "the address to serve at", any_port=True)
    if place.path:
        raise ConfigError(f'predictions are served over TCP only: give "host:port", not {address!r}')
    return uvicorn.Config(
        app,
        host=place.host,
        port=place.port,
        loop="uvloop",
        http=_connections_of(app).protocol(),
        ws="none",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=DRAIN_SECONDS,
        log_config=None,  # as all others of the process
        log_level=log_level,
    )


def _connections_of(app: FastAPI) -> Connections:
    """Of an application of `make_app`; another one, that has it within, has those by default."""
    service: Service | None = getattr(app.state, "service", None)
    return Connections() if service is None else service.connections


class _Server(uvicorn.Server):
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Also ends the wait for something to serve."""
        super().handle_exit(sig, frame)
        self.config.app.state.service.end()  # type: ignore[union-attr]  # it is one of `make_app`


def serve(app: FastAPI, address: str, sockets: Sequence[socket.socket] | None = None) -> None:
    """Serves an application until the process is told to end; then answers what it has, and returns.

    Args:
        app: what `make_app` gave.
        address: as for `configure`.
        sockets: of that address, that listen already; None: it is bound here.

    Raises:
        ConfigError: the address is wrong, or cannot be bound.
    """
    server = _Server(configure(app, address))
    for number in (signal.SIGTERM, signal.SIGINT):
        # Uvicorn sends itself what ended it once more when this handler is back: to end so is no failure.
        signal.signal(number, server.handle_exit)
    gc.collect()
    gc.freeze()  # TensorFlow's hundred thousands of objects need not be looked at again while requests wait
    try:
        server.run(None if sockets is None else [*sockets])
    except SystemExit as exc:  # uvicorn's way to say that it cannot be bound; its log says why
        raise ConfigError(f"cannot serve at {address}: it is in use, or not of this machine") from exc
    finally:
        gc.unfreeze()
