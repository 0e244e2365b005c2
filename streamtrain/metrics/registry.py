"""The HTTP endpoint that Prometheus scrapes and orchestrators probe, and the metrics that every process has."""

import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import Any
from wsgiref.simple_server import WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, make_wsgi_app, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from streamtrain.address import Address, Hosts, parse_listener
from streamtrain.errors import ConfigError

logger = logging.getLogger(__name__)


Values = Mapping[Any, float] | float | None
"""Values of a metric: one, none yet, or one for each value of its label (a tuple if it has several labels)."""


NotReady = Callable[[], str]
"""Says why a process cannot do its work yet; "": it can."""


def gauge(name: str, documentation: str, values: Values, *labels: str) -> Metric:
    """A gauge as it is at a scrape, for a collector."""
    return _fill(GaugeMetricFamily(name, documentation, labels=labels), values)


def counter(name: str, documentation: str, values: Values, *labels: str) -> Metric:
    """A counter as it is at a scrape, for a collector."""
    return _fill(CounterMetricFamily(name, documentation, labels=labels), values)


def _fill(family: CounterMetricFamily | GaugeMetricFamily, values: Values) -> Metric:
    if not isinstance(values, Mapping):
        values = {} if values is None else {(): values}
    for labels, value in values.items():
        family.add_metric([str(label) for label in (labels if isinstance(labels, tuple) else (labels,))], value)
    return family


def process_registry() -> CollectorRegistry:
    """A registry with what every process has: the version of streamtrain, and its memory, CPU time and open files."""
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    build = Gauge("streamtrain_build_info", "1, with the version of streamtrain.", ["version"], registry=registry)
    build.labels(version("streamtrain")).set(1)
    return registry


class MetricsEndpoint:
    """An HTTP server for metrics, in threads of its own.

    Attributes:
        port: the port it listens on.
        url: of the metrics.
    """

    def __init__(self, server: WSGIServer, thread: threading.Thread, address: Address) -> None:
        self.port = server.server_port
        self.url = f"http://{replace(address, port=self.port)}/metrics"
        self._server = server
        self._thread = thread

    def close(self) -> None:
        """Stops the server and frees its port. May be called twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(address: str, registry: CollectorRegistry, not_ready: NotReady = lambda: "") -> MetricsEndpoint:
    """Serves metrics over HTTP, unencrypted and without authentication; also /healthz/live and /healthz/ready.

    Args:
        address: "host:port" or "[ipv6]:port"; port 0 picks a free one.
        registry: whose metrics.
        not_ready: why /healthz/ready answers 503.

    Raises:
        ConfigError: it cannot listen there.
    """
    target = parse_listener(address, "the address of metrics", "metrics")
    try:
        server, thread = start_http_server(target.port, target.host, registry)
    except (OSError, UnicodeError) as exc:  # UnicodeError: the host cannot be encoded as a name
        why = (exc.strerror if isinstance(exc, OSError) else None) or exc
        raise ConfigError(
            f"cannot serve metrics at {target}: {why}; every process needs an address of its own"
        ) from exc
    server.set_app(_check_host(Hosts(str(target)), _add_health(make_wsgi_app(registry), not_ready)))
    endpoint = MetricsEndpoint(server, thread, target)
    logger.info("serving metrics at %s", endpoint.url)
    return endpoint


def _check_host(hosts: Hosts, app: WSGIApplication) -> WSGIApplication:
    """Refuses requests of web pages whose own host name resolves to this endpoint (DNS rebinding)."""

    def checked(request: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        host = request.get("HTTP_HOST", "")
        if host and not hosts.allows(host):
            start("403 Forbidden", [("content-type", "text/plain")])
            return [b"this endpoint listens on a loopback address: use an IP address or localhost\n"]
        return app(request, start)

    return checked


def _add_health(metrics: WSGIApplication, not_ready: NotReady) -> WSGIApplication:
    """Answers the two paths of probes, and leaves all others to `metrics`."""

    def healthy(request: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path = request.get("PATH_INFO")
        if path not in {"/healthz/live", "/healthz/ready"}:
            return metrics(request, start)
        why = not_ready() if path == "/healthz/ready" else ""
        body = {"status": "not ready", "error": why} if why else {"status": path.rpartition("/")[2]}
        start("503 Service Unavailable" if why else "200 OK", [("content-type", "application/json")])
        return [json.dumps(body).encode()]

    return healthy
