"""The server of predictions: HTTP and gRPC of one process."""

import signal
import socket
import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue
from types import FrameType

import uvicorn
from fastapi import FastAPI

from streamtrain.address import parse_listener
from streamtrain.errors import ConfigError
from streamtrain.memory import freeze_heap
from streamtrain.serve.grpc.openinference import OpenInference
from streamtrain.serve.grpc.server import GrpcServer
from streamtrain.serve.grpc.tfserving import TensorFlowServing
from streamtrain.serve.http.connection import Connections
from streamtrain.serve.service.service import Service
from streamtrain.shutdown import SHUTDOWN_SECONDS, end_in_time

DRAIN_SECONDS = 10

KEEP_ALIVE_SECONDS = 75

"""How long an idle connection stays open: longer than clients and load balancers keep theirs, by default 60 s at most.

Otherwise some requests arrive just as the server closes their connection; the client cannot know whether they count.
"""


def configure(app: FastAPI, address: str, *, log_level: str = "warning") -> uvicorn.Config:
    """The configuration of uvicorn for an application.

    Args:
        app: from `make_app`, or one that mounts such an application: then with default limits of connections.
        address: "host:port" or "[ipv6]:port"; port 0 picks a free one.
        log_level: of uvicorn.

    Raises:
        ConfigError: the address is not a TCP address.
    """
    target = parse_listener(address, "the address to serve at", "predictions")
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


class PredictionServer(uvicorn.Server):
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
    server = PredictionServer(configure(app, address))
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
