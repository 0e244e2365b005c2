"""The process of the coordinator: startup, serve, shutdown."""

import logging
import threading
from collections.abc import Sequence
from typing import Any

from streamtrain.cluster.coordinator import Coordinator
from streamtrain.cluster.coordinator_metrics import CoordinatorMetrics
from streamtrain.cluster.coordinator_server import CoordinatorServer
from streamtrain.cluster.lag import Lag
from streamtrain.cluster.lead import Lead, redis_of
from streamtrain.cluster.places import places_of
from streamtrain.cluster.slots import next_slots
from streamtrain.cluster.streams import open_stream
from streamtrain.errors import ConfigError
from streamtrain.metrics.endpoint import Endpoint, process_registry, serve
from streamtrain.ps.control import RemoteControl
from streamtrain.ps.route import control_of
from streamtrain.ps.security import Security, authenticate, listen, metadata
from streamtrain.settings import Settings

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 2.0


class CoordinatorProcess:
    """The coordinator, served.

    Args:
        addresses: of all shards, in order.
        settings: of the cluster.

    Raises:
        ConfigError: there are no shards, or it cannot be listened where the settings say.
        CheckpointError: the slot map cannot be read or written.
    """

    def __init__(self, addresses: Sequence[str], settings: Settings) -> None:
        if not addresses:
            raise ConfigError("ps.addresses is not set: the coordinator has to know the shards")
        if settings.coordinator.address is None:
            raise ConfigError("coordinator.address is not set: it is where others reach the coordinator")
        security = Security.read(**settings.security.arguments())
        self._channels: list[Any] = []
        places = places_of(addresses, settings.ps, security, self._channels.append)

        def controls(timeout: float) -> list[RemoteControl]:
            return [control_of(place, metadata(security), timeout) for place in places]

        self._redis = redis_of(settings.publish)
        lead = Lead(controls(settings.ps.timeout), settings, self._count, self._redis, at_end=True)
        slots = next_slots(settings.checkpoint.url, addresses)
        lag = Lag(open_stream(settings.stream).bounds) if settings.stream.topic else None
        self.coordinator = Coordinator(controls(_LOOK_SECONDS), slots, lead, lag)
        guards = (authenticate(security.token, lambda: self._count("refused_token")),) if security.token else ()
        self.server = CoordinatorServer(self.coordinator, guards)
        self.address = settings.coordinator.listen or settings.coordinator.address
        self.port = listen(self.server.grpc, self.address, security)
        self.metrics = self._serve_metrics(settings.coordinator.metrics) if settings.coordinator.metrics else None

    def _serve_metrics(self, address: str) -> Endpoint:
        registry = process_registry()
        registry.register(CoordinatorMetrics(self.coordinator, lambda: self.server.counters))
        return serve(address, registry)

    def _count(self, name: str) -> None:
        self.server.count(name)

    def run(self, stopped: threading.Event) -> None:
        """Serves until `stopped` is set."""
        self.start()
        stopped.wait()
        self.stop()

    def start(self) -> None:
        """Begins."""
        self.coordinator.start()
        self.server.start()
        logger.info("the coordinator of %d shards serves at %s", len(self.coordinator.slots.shards), self.address)

    def stop(self) -> None:
        """Ends; takes a last checkpoint, if shards answer."""
        self.coordinator.stop()
        self.server.stop()
        for channel in self._channels:
            channel.close()
        if self._redis:
            self._redis.close()
        if self.metrics:
            self.metrics.close()
