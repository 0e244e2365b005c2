"""The real server on a real port, in a thread of the test."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from streamtrain.processes.server import PredictionServer, configure
from streamtrain.serve.follower import RegistryUpdater
from streamtrain.serve.http.app import make_app
from streamtrain.serve.http.console import ClusterView
from streamtrain.serve.registry import Registry
from streamtrain.serve.service.service import ServingConfig
from tests.patience import PATIENCE, until

TOKEN = "secret"


@contextmanager
def running(app: FastAPI) -> Iterator[str]:
    """The URL of a running application."""
    with running_server(uvicorn.Server(configure(app, "127.0.0.1:0"))) as url:
        yield url


@contextmanager
def running_grpc(registry: Registry, updater: RegistryUpdater | None = None, **config: Any) -> Iterator[str]:
    """The address of a running gRPC endpoint."""
    options = ServingConfig(admin_token=TOKEN, grpc_listen="127.0.0.1:0", **{"max_wait": PATIENCE} | config)
    server = PredictionServer(configure(make_app(registry, updater, options), "127.0.0.1:0"))
    with running_server(server):
        until(lambda: server.grpc_port)
        yield f"127.0.0.1:{server.grpc_port}"


@contextmanager
def running_server(server: uvicorn.Server) -> Iterator[str]:
    """The URL of a server, which runs in a thread."""
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive())
        assert thread.is_alive()
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()


@contextmanager
def serving(
    registry: Registry, updater: RegistryUpdater | None = None, cluster: ClusterView | None = None, **config: Any
) -> Iterator[httpx.Client]:
    """A client of a running server, which `config` is of; requests wait for as long as tests do."""
    chosen: dict[str, Any] = {"admin_token": TOKEN, "max_wait": PATIENCE} | config
    app = make_app(registry, updater, ServingConfig(**chosen), cluster=cluster)
    with running(app) as url, client_of(url) as client:
        yield client


def client_of(url: str) -> httpx.Client:
    """A client; certificates that it verified would take 40 ms to read."""
    return httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False, verify=False)
