"""The process of a parameter server: startup, serve, shutdown."""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from streamtrain.cluster.keeper import CheckpointKeeper
from streamtrain.cluster.lead import Lead, dictionaries_of, redis_of
from streamtrain.cluster.metrics import ShardMetrics
from streamtrain.cluster.places import check_backups, places_of
from streamtrain.cluster.publisher import ShardPublisher
from streamtrain.errors import ConfigError, ShardError
from streamtrain.metrics.endpoint import Endpoint, process_registry, serve
from streamtrain.ps.bulk import Bulk
from streamtrain.ps.consistency import Async, Bounded, Consistency
from streamtrain.ps.control import CHANNEL_OPTIONS
from streamtrain.ps.node import Node
from streamtrain.ps.pairing import Pairing
from streamtrain.ps.replication import Backup
from streamtrain.ps.route import control_of
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
        backup: whether this is the second of its two places.

    Attributes:
        ended: is set when another process of the shard has taken over from this one.

    Raises:
        ConfigError: there is no such shard, it has no backup, or it cannot be listened where they say.
        CheckpointError: the checkpoints cannot be read.
    """

    def __init__(
        self, index: int, addresses: Sequence[str], settings: Settings, workers: int = 1, *, backup: bool = False
    ) -> None:
        if not 0 <= index < len(addresses):
            raise ConfigError(f"shard {index} is none of the {len(addresses)} of ps.addresses")
        check_backups(addresses, settings.ps)
        if backup and not settings.ps.backups:
            raise ConfigError("--backup needs ps.backups, the addresses of the backups of all shards")
        security = Security.read(**settings.security.arguments())
        kept = settings.checkpoint.url
        keeper = CheckpointKeeper(Epochs(kept), self._count) if kept else None
        self._redis = redis_of(settings.publish)
        publisher = ShardPublisher(dictionaries_of(self._redis, settings.publish)) if self._redis else None
        make_consistency = strategy(settings.consistency, workers)
        self.node = Node(index, len(addresses), make_consistency, keeper, publisher=publisher)
        limits = Limits(settings.ps.max_message_bytes, settings.ps.max_keys, settings.ps.sessions)
        guards = (authenticate(security.token, lambda: self.node.count("refused_token")),) if security.token else ()
        self.server = Server(self.node, limits, guards)
        self._is_first = not backup
        self.ended = threading.Event()
        self._why_retired = ""
        self._leads = False
        self._pairing: Pairing | None = None
        if settings.ps.backups:
            peer = (addresses if backup else settings.ps.backups)[index]
            self._pairing = self._pair(peer, settings, security)
        self.address = settings.ps.listen or (settings.ps.backups if backup else addresses)[index]
        self.port = listen(self.server.grpc, self.address, security)
        self.lead: Lead | None = None
        if index == 0 and settings.coordinator.address is None:
            controls = self._controls(addresses, settings, security)
            self.lead = Lead(controls, settings, self.node.count, self._redis)
        self.metrics = self._serve_metrics(settings.ps.metrics) if settings.ps.metrics else None

    def _count(self, name: str) -> None:
        self.node.count(name)

    def _serve_metrics(self, address: str) -> Endpoint:
        registry = process_registry()
        registry.register(ShardMetrics(self.node, self.server.workers))
        return serve(address, registry)

    def _pair(self, address: str, settings: Settings, security: Security) -> Pairing:
        peer = Backup(connect(address, security, CHANNEL_OPTIONS), address, metadata(security))
        patience = settings.ps.backup_patience
        return Pairing(self.node, peer, patience, promoted=self._begin_to_lead, retired=self._retire)

    def _retire(self, why: str) -> None:
        self._why_retired = why
        self.ended.set()

    def _controls(self, addresses: Sequence[str], settings: Settings, security: Security) -> list[Control]:
        """Of all shards; this one's needs no socket."""
        places = places_of(addresses, settings.ps, security, lambda channel: None)
        return [
            LocalControl(self.node) if i == self.node.index else control_of(place, metadata(security))
            for i, place in enumerate(places)
        ]

    def run(self, stopped: threading.Event) -> None:
        """Serves until `stopped` is set.

        Raises:
            ShardError: another process of the shard has taken over from this one.
        """
        self.ended = stopped
        self.start()
        stopped.wait()
        self.stop()
        if self._why_retired:
            raise ShardError(f"shard {self.node.index} ends here: {self._why_retired}; started again, it is the backup")

    def start(self) -> None:
        """Restores what there is, and begins to serve. Metrics are served before, as restoring may take long."""
        if self._pairing:
            self.server.start()  # first, as the other place may ask at the same time
            try:
                is_primary = self._pairing.begin(is_first=self._is_first)
            except BaseException:
                self.stop()
                raise
            if is_primary:
                self._begin_to_lead()
        else:
            self.node.restore()
            self.server.start()
            self._begin_to_lead()
        logger.info("shard %d of %d serves at %s", self.node.index, self.node.shards, self.address)

    def _begin_to_lead(self) -> None:
        if self.lead and not self._leads:
            self._leads = True
            self.node.leader = self.lead.leading
            self.lead.start()

    def stop(self) -> None:
        """Ends."""
        if self.lead and self._leads:
            self.lead.stop()  # first: a checkpoint that is being taken needs the server
        self.server.stop()
        if self._pairing:
            self._pairing.end()
        if self._redis:
            self._redis.close()
        if self.metrics:
            self.metrics.close()
