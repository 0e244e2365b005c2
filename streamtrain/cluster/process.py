"""The process of a parameter server: startup, serve, shutdown."""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from streamtrain.cluster.keeper import CheckpointKeeper
from streamtrain.cluster.lead import Lead, dictionaries_of, redis_of
from streamtrain.cluster.metrics import ShardMetrics
from streamtrain.cluster.publisher import ShardPublisher
from streamtrain.errors import ConfigError
from streamtrain.metrics.endpoint import Endpoint, process_registry, serve
from streamtrain.ps.bulk import Bulk
from streamtrain.ps.consistency import Async, Bounded, Consistency
from streamtrain.ps.control import CHANNEL_OPTIONS, RemoteControl
from streamtrain.ps.node import Node
from streamtrain.ps.security import Security, authenticate, connect, listen, metadata
from streamtrain.ps.server import Server
from streamtrain.ps.sessions import Limits
from streamtrain.ps.shard import Shard
from streamtrain.ps.shards import Control, LocalControl
from streamtrain.settings import ConsistencySettings, Settings
from streamtrain.store.epochs import Epochs

logger = logging.getLogger(__name__)


def strategy(settings: ConsistencySettings, workers: int) -> Callable[[Shard], Consistency]:
    """Makes the consistency of a shard.

    Args:
        settings: which one.
        workers: number of workers that `bulk` waits for before its first round.
    """
    if settings.mode == "bounded":
        return lambda shard: Bounded(shard, settings.staleness or 0, settings.lease, time.monotonic)
    if settings.mode == "bulk":
        return lambda shard: Bulk(shard, workers, settings.lease, time.monotonic)
    return Async


class PsProcess:
    """One shard, served.

    Args:
        index: of the shard.
        addresses: of all shards.
        settings: of the cluster.
        workers: number of workers, for `bulk`.

    Raises:
        ConfigError: there is no such shard, or it cannot be listened where they say.
        CheckpointError: the checkpoints cannot be read.
    """

    def __init__(self, index: int, addresses: Sequence[str], settings: Settings, workers: int = 1) -> None:
        if not 0 <= index < len(addresses):
            raise ConfigError(f"shard {index} is none of the {len(addresses)} of ps.addresses")
        security = Security.read(**settings.security.arguments())
        keeper = CheckpointKeeper(Epochs(settings.checkpoint.url)) if settings.checkpoint.url else None
        self._redis = redis_of(settings.publish)
        publisher = ShardPublisher(dictionaries_of(self._redis, settings.publish)) if self._redis else None
        make_consistency = strategy(settings.consistency, workers)
        self.node = Node(index, len(addresses), make_consistency, keeper, publisher=publisher)
        limits = Limits(settings.ps.max_message_bytes, settings.ps.max_keys, settings.ps.sessions)
        guards = (authenticate(security.token, lambda: self.node.count("refused_token")),) if security.token else ()
        self.server = Server(self.node, limits, guards)
        self.address = settings.ps.listen or addresses[index]
        self.port = listen(self.server.grpc, self.address, security)
        self.lead: Lead | None = None
        if index == 0 and settings.coordinator.address is None:
            controls = self._controls(addresses, security)
            self.lead = Lead(controls, settings, self.node.count, self._redis)
            self.node.leader = self.lead.leading
        self.metrics = self._serve_metrics(settings.ps.metrics) if settings.ps.metrics else None

    def _serve_metrics(self, address: str) -> Endpoint:
        registry = process_registry()
        registry.register(ShardMetrics(self.node, self.server.workers))
        return serve(address, registry)

    def _controls(self, addresses: Sequence[str], security: Security) -> list[Control]:
        """Of all shards; this one's needs no socket."""
        return [
            LocalControl(self.node)
            if i == self.node.index
            else RemoteControl(connect(address, security, CHANNEL_OPTIONS), address, metadata(security))
            for i, address in enumerate(addresses)
        ]

    def run(self, stopped: threading.Event) -> None:
        """Serves until `stopped` is set."""
        self.start()
        stopped.wait()
        self.stop()

    def start(self) -> None:
        """Restores what there is, and begins to serve. Metrics are served before, as restoring may take long."""
        self.node.restore()
        self.server.start()
        if self.lead:
            self.lead.start()
        logger.info("shard %d of %d serves at %s", self.node.index, self.node.shards, self.address)

    def stop(self) -> None:
        """Ends."""
        if self.lead:
            self.lead.stop()  # first: a checkpoint that is being taken needs the server
        self.server.stop()
        if self._redis:
            self._redis.close()
        if self.metrics:
            self.metrics.close()
