"""The HTTP endpoint that Prometheus scrapes, and what every process has there."""

import logging
import threading
from dataclasses import replace
from importlib.metadata import version
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

from streamtrain.address import Address, parse_address
from streamtrain.errors import ConfigError
from streamtrain.metrics.definition import BUILD

logger = logging.getLogger(__name__)


def process_registry() -> CollectorRegistry:
    """A registry with what every process has: the version of streamtrain, and its own memory, CPU time and files."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    BUILD.gauge(registry).labels(version("streamtrain")).set(1)
    return registry


class Endpoint:
    """Serves metrics, by threads of its own, until it is closed.

    Attributes:
        port: it is bound to.
        url: of the metrics.
    """

    def __init__(self, server: WSGIServer, thread: threading.Thread, address: Address) -> None:
        self.port = server.server_port
        self.url = f"http://{replace(address, port=self.port)}/metrics"
        self._server = server
        self._thread = thread

    def close(self) -> None:
        """Stops, and gives the port free. May be called twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(address: str, registry: CollectorRegistry) -> Endpoint:
    """Serves metrics over HTTP, to anybody and unencrypted.

    Args:
        address: "host:port" or "[ipv6]:port"; port 0 is a free one.
        registry: whose metrics.

    Raises:
        ConfigError: it cannot be bound; the message names it.
    """
    place = parse_address(address, "the address of metrics", any_port=True)
    if place.path:
        raise ConfigError(f'metrics are served over TCP only: give "host:port", not {address!r}')
    try:
        endpoint = Endpoint(*start_http_server(place.port, place.host, registry), place)
    except (OSError, UnicodeError) as exc:  # the latter of names that are none
        why = (exc.strerror if isinstance(exc, OSError) else None) or exc
        raise ConfigError(f"cannot serve metrics at {place}: {why}; every process needs an address of its own") from exc
    logger.info("metrics at %s", endpoint.url)
    return endpoint
