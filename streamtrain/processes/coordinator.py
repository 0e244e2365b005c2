"""The process of the coordinator: startup, serve, shutdown."""

import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from streamtrain.checkpoint.shard_map import begin_shard_map
from streamtrain.cluster.coordinator import Coordinator
from streamtrain.cluster.members import SERVER, WORKER
from streamtrain.cluster.scaling import OpenedShards
from streamtrain.cluster.server import CoordinatorServer
from streamtrain.cluster.status import POLL_SECONDS, StreamLag
from streamtrain.errors import ConfigError
from streamtrain.logs import counted
from streamtrain.memory import freeze_heap
from streamtrain.metrics.cluster import CoordinatorMetrics, CoordinatorState
from streamtrain.metrics.registry import MetricsEndpoint, process_registry, serve
from streamtrain.processes.ps import read_lead
from streamtrain.ps.nodes.topology import connect_shards
from streamtrain.ps.replication.failover import open_control
from streamtrain.ps.rpc.registry import register
from streamtrain.ps.rpc.security import Security, authenticate, listen, metadata
from streamtrain.publish.opening import open_redis
from streamtrain.settings.groups import Settings
from streamtrain.shutdown import step
from streamtrain.stream.opening import open_stream

logger = logging.getLogger(__name__)


def read_state(coordinator: Coordinator, counters: Mapping[str, int]) -> CoordinatorState:
    """The state of a coordinator, for its metrics."""
    members, states = coordinator.members, Counter(shard["state"] for shard in coordinator.shards())
    return CoordinatorState(
        members={kind: len(members.of(kind)) for kind in (WORKER, SERVER)},
        lost={kind: members.lost[kind] for kind in (WORKER, SERVER)},
        shards={state: states[state] for state in ("ready", "empty", "away")},
        slot_epoch=coordinator.shard_map.epoch,
        lag=coordinator.lag(),
        proposed_shards=proposal.shards if (proposal := coordinator.proposal) else None,
        proposed_workers=proposal.workers if proposal else None,
        lead=read_lead(coordinator),
        counters=counters,
    )


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
        security = Security.from_settings(settings.security)
        self._channels: list[Any] = []

        def open_shards(addresses: Sequence[str], backups: Sequence[str]) -> OpenedShards:
            places = connect_shards(addresses, backups, security, self._channels.append)
            controls, polled = (
                [open_control(place, metadata(security), timeout) for place in places]
                for timeout in (settings.ps.timeout, POLL_SECONDS)
            )
            return OpenedShards([*controls], [*polled])

        shard_map = begin_shard_map(settings.checkpoint.url, addresses, settings.ps.backups)
        if shard_map.scaled:
            logger.info(
                "going on with %s by map %d, as `streamtrain scale` has changed those of ps.addresses: %s",
                *(counted(len(shard_map.shards), "shard"), shard_map.epoch, ", ".join(shard_map.shards)),
            )
        opened = open_shards(shard_map.shards, shard_map.backups)
        self._redis = open_redis(settings.publish)
        self.coordinator = Coordinator(
            *opened,
            shard_map,
            settings,
            self._count,
            redis=self._redis,
            lag=StreamLag(open_stream(settings.stream).bounds) if settings.stream.topic else None,
            final_checkpoint=True,
            open_shards=open_shards,
        )
        guards = (authenticate(security.token, lambda: self._count("refused_token")),) if security.token else ()
        self.server = CoordinatorServer(self.coordinator, guards)
        self._own = settings.coordinator.address
        self.address = settings.coordinator.listen or self._own
        self.port = listen(self.server.grpc, self.address, security)
        self._is_serving = False
        self.metrics = self._serve_metrics(settings.coordinator.metrics) if settings.coordinator.metrics else None

    def _serve_metrics(self, address: str) -> MetricsEndpoint:
        registry = process_registry()
        registry.register(CoordinatorMetrics(lambda: read_state(self.coordinator, self.server.counters)))
        return serve(address, registry, lambda: "" if self._is_serving else "the coordinator is starting")

    def _count(self, name: str) -> None:
        self.server.count(name)

    def run(self, stopped: threading.Event) -> None:
        """Serves until `stopped` is set."""
        with freeze_heap():
            self.start()
            stopped.wait()
            self.stop()

    def start(self) -> None:
        """Begins."""
        self.coordinator.start()
        self.server.start()
        register(self._own, self.address, self.port)
        self._is_serving = True
        shards = counted(len(self.coordinator.shard_map.shards), "shard")
        logger.info("coordinator of %s serves at %s", shards, self.address)

    def stop(self) -> None:
        """Ends; takes a last checkpoint, if shards answer."""
        self.coordinator.stop()
        with step("calls in progress"):
            self.server.stop()
        for channel in self._channels:
            channel.close()
        if self._redis:
            self._redis.close()
        if self.metrics:
            self.metrics.close()
