"""The process of a parameter server: startup, serve, shutdown."""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from streamtrain.cluster.checkpoints import Checkpointer, Schedule
from streamtrain.cluster.keeper import CheckpointKeeper
from streamtrain.cluster.leading import Leading
from streamtrain.cluster.metrics import ShardMetrics
from streamtrain.cluster.publication_schedule import PublicationSchedule
from streamtrain.cluster.publications import Publications
from streamtrain.cluster.publisher import ShardPublisher
from streamtrain.cluster.reports import Reports
from streamtrain.cluster.version_schedule import VersionSchedule
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
from streamtrain.settings import ConsistencySettings, PublishSettings, Settings
from streamtrain.store.epochs import Epochs
from streamtrain.store.gate import Gate
from streamtrain.store.redis_dictionaries import RedisDictionaries
from streamtrain.store.redis_model import RedisModel
from streamtrain.store.redis_server import RedisServer
from streamtrain.store.redis_versions import RedisVersions

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


def _redis(settings: PublishSettings) -> RedisServer | None:
    return RedisServer(settings.url, cluster=settings.cluster) if settings.url else None


def _dictionaries(server: RedisServer, settings: PublishSettings) -> RedisDictionaries:
    return RedisDictionaries(RedisModel(server, settings.model), log_bytes=settings.log_bytes)


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
        self._epochs = Epochs(settings.checkpoint.url) if settings.checkpoint.url else None
        keeper = CheckpointKeeper(self._epochs) if self._epochs else None
        self._redis = _redis(settings.publish)
        dictionaries = _dictionaries(self._redis, settings.publish) if self._redis else None
        publisher = ShardPublisher(dictionaries) if dictionaries else None
        make_consistency = strategy(settings.consistency, workers)
        self.node = Node(index, len(addresses), make_consistency, keeper, publisher=publisher)
        limits = Limits(settings.ps.max_message_bytes, settings.ps.max_keys, settings.ps.sessions)
        guards = (authenticate(security.token, lambda: self.node.count("refused_token")),) if security.token else ()
        self.server = Server(self.node, limits, guards)
        self.address = settings.ps.listen or addresses[index]
        self.port = listen(self.server.grpc, self.address, security)
        self.schedules: list[Schedule | PublicationSchedule | VersionSchedule] = []
        if index == 0:
            self._lead(self._controls(addresses, security), settings, dictionaries)
        self.metrics = self._serve_metrics(settings.ps.metrics) if settings.ps.metrics else None

    def _lead(self, controls: Sequence[Control], settings: Settings, dictionaries: RedisDictionaries | None) -> None:
        """Checkpoints, publications and versions of all shards, of which this is the first."""
        kept, publish = settings.checkpoint, settings.publish
        if self._epochs:
            checkpointer = Checkpointer(controls, self._epochs, keep=kept.keep, full_every=kept.full_every)
            self.schedules.append(Schedule(checkpointer, kept.every))
        reports = Reports()
        self.node.leader = leading = Leading(reports, self.node.count)
        if not (dictionaries and self._redis):
            return
        gate = Gate(**dict(settings.gate))
        publications = Publications(
            controls, dictionaries, publish.model, publish.dtype, gate=gate, figures=reports.figures
        )
        leading.schedule = PublicationSchedule(publications, publish.every, self.node.count)
        self.schedules.append(leading.schedule)
        if publish.version_every:
            versions = RedisVersions(RedisModel(self._redis, publish.model))
            every, keep, count = publish.version_every, publish.keep, self.node.count
            self.schedules.append(VersionSchedule(versions, dictionaries.head, every=every, keep=keep, count=count))

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
        for schedule in self.schedules:
            schedule.start()
        logger.info("shard %d of %d serves at %s", self.node.index, self.node.shards, self.address)

    def stop(self) -> None:
        """Ends."""
        # Schedules first: a checkpoint that is being taken needs the server.
        for schedule in self.schedules:
            schedule.stop()
        self.server.stop()
        if self._redis:
            self._redis.close()
        if self.metrics:
            self.metrics.close()
