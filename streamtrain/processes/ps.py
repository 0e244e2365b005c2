"""The process of a parameter server: startup, serve, shutdown."""

import logging
import threading
import time
from collections.abc import Callable, Sequence

import streamtrain.ps.rpc.ps_pb2 as pb
from streamtrain.checkpoint.shard_checkpoint import CheckpointWriter
from streamtrain.cluster.client import SERVICE as COORDINATOR_SERVICE
from streamtrain.cluster.coordinator import Coordinator
from streamtrain.cluster.server import CoordinatorServicer
from streamtrain.cluster.status import POLL_SECONDS
from streamtrain.errors import ConfigError, ShardError, ShardRefused, ShardUnavailable
from streamtrain.memory import freeze_heap
from streamtrain.metrics.cluster import LeadState, ShardMetrics, ShardState
from streamtrain.metrics.registry import MetricsEndpoint, process_registry, serve
from streamtrain.periodic import PeriodicTask
from streamtrain.ps.bulk import BulkSynchronous
from streamtrain.ps.consistency import Async, Bounded, Consistency
from streamtrain.ps.nodes.node import NO_EPOCH, Node
from streamtrain.ps.nodes.server import ShardServer, status_of
from streamtrain.ps.nodes.shards import Control, LocalControl
from streamtrain.ps.nodes.topology import ShardMap, check_backups, connect_shards
from streamtrain.ps.replication.failover import open_control
from streamtrain.ps.replication.primary import Peer
from streamtrain.ps.replication.roles import NodeState, Pairing
from streamtrain.ps.row_memory import RowMemory
from streamtrain.ps.rpc import wire
from streamtrain.ps.rpc.control import CHANNEL_OPTIONS
from streamtrain.ps.rpc.registry import register
from streamtrain.ps.rpc.security import Security, authenticate, connect, listen, metadata
from streamtrain.ps.shard import Shard
from streamtrain.publish.lease import LeaseWatch
from streamtrain.publish.opening import open_dictionaries, open_redis
from streamtrain.publish.shard_publisher import ShardPublisher
from streamtrain.settings.groups import ConsistencySettings, Settings
from streamtrain.shutdown import step
from streamtrain.store.checkpoint.epochs import Epochs

logger = logging.getLogger(__name__)

_WAITING_SECONDS = 1.0  # between two looks at whether both processes of the shard wait


def read_state(node: Node, workers: Sequence[str], coordinator: Coordinator | None = None) -> ShardState:
    """The state of a node's shard, and of the coordinator if it is in the same process, for its metrics."""
    status = status_of(node, list(workers))
    counters = dict(status.counters)
    paired = status.HasField("standing") and status.standing.role == pb.PRIMARY
    return ShardState(
        shard=status.shard,
        shards=status.shards,
        run=status.run,
        ready=status.ready,
        workers=len(status.workers),
        table_rows={table.name: table.rows for table in status.tables},
        table_bytes={table.name: table.bytes for table in status.tables},
        table_rows_on_disk={table.name: table.rows_on_disk for table in status.tables},
        table_disk_bytes={table.name: table.disk_bytes for table in status.tables},
        dense_bytes=status.dense_bytes,
        clock=wire.decode_clock(status.clock),
        samples=counters.pop("samples", None),
        watermark=(node.shard.watermark or None) if status.ready else None,
        epoch=status.epoch if status.epoch != NO_EPOCH else None,
        backup_in_step=status.standing.in_step if paired else None,
        counters=counters,
        lead=read_lead(coordinator) if coordinator else None,
    )


def read_lead(coordinator: Coordinator) -> LeadState:
    """The state of checkpoints and publications, for the metrics of the process that makes them."""
    checkpoints, publications = coordinator.checkpoints, coordinator.publications
    return LeadState(
        bool(publications and publications.held),
        checkpoints.last.at if checkpoints and checkpoints.last else None,
        publications.last.published if publications and publications.last else None,
    )


def strategy(settings: ConsistencySettings, workers: int) -> Callable[[Shard], Consistency]:
    """Makes the consistency of a shard.

    Args:
        settings: which one.
        workers: number of workers that `bulk` waits for before its first round.
    """
    if settings.mode == "bounded":
        return lambda shard: Bounded(shard, settings.staleness or 0, settings.lease, time.monotonic)
    if settings.mode == "bulk":
        return lambda shard: BulkSynchronous(shard, workers, settings.lease, time.monotonic)
    return Async


class PsProcess:
    """One shard, served.

    Args:
        index: of the shard; None: it has no place among the shards yet, and `addresses` is its own.
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
        self, index: int | None, addresses: Sequence[str], settings: Settings, workers: int = 1, *, backup: bool = False
    ) -> None:
        is_spare, index = index is None, index or 0
        if is_spare and settings.coordinator.address is None:
            raise ConfigError("--spare needs coordinator.address: that is where its place comes from")
        if not 0 <= index < len(addresses):
            raise ConfigError(f"shard {index} does not exist: ps.addresses has {len(addresses)}, counted from 0")
        backups = () if is_spare else settings.ps.backups
        check_backups(addresses, backups)
        if backup and not backups:
            raise ConfigError("--backup needs ps.backups, the addresses of the backups of all shards")
        security = Security.from_settings(settings.security)
        kept = settings.checkpoint.url
        self._memory = memory = RowMemory.from_settings(settings.ps)
        checkpoints = CheckpointWriter(Epochs(kept), self._count, memory) if kept else None
        self._redis = open_redis(settings.publish)
        publisher = ShardPublisher(open_dictionaries(self._redis, settings.publish)) if self._redis else None
        make_consistency = strategy(settings.consistency, workers)
        self._own = (backups if backup else addresses)[index]
        self._security, self._patience = security, settings.ps.backup_patience
        self.node = Node(
            *(index, 0 if is_spare else len(addresses), make_consistency, checkpoints),
            publisher=publisher,
            pairing=self._pair((addresses if backup else backups)[index]) if backups else None,
            pair=self._pair,
            memory=memory,
        )
        guards = (authenticate(security.token, lambda: self.node.count("refused_token")),) if security.token else ()
        self.server = ShardServer(self.node, settings.ps, guards, own=self._own)
        self._is_first = not backup
        self.ended = threading.Event()
        self._why_retired = ""
        self.address = settings.ps.listen or self._own
        self.port = listen(self.server.grpc, self.address, security)
        self._coordinator_address = settings.coordinator.address
        self._coordinator: Coordinator | None = None
        if index == 0 and settings.coordinator.address is None:
            self._coordinator = Coordinator(
                self._controls(addresses, settings, security),
                self._controls(addresses, settings, security, POLL_SECONDS),
                ShardMap(1, tuple(addresses), settings.ps.backups),  # as every process knows them from the settings
                settings,
                self.node.count,
                redis=self._redis,
            )
        self._coordinates = False
        self._is_serving = False
        self.server.register(COORDINATOR_SERVICE, CoordinatorServicer(self._get_coordinator))
        self._lease = LeaseWatch(self.node.check_lease) if publisher else None
        self._waiting = PeriodicTask("waiting", self._end_waiting, _WAITING_SECONDS, subject="waiting for a primary")
        self._may_lead = bool(backups) and not backup
        self.metrics = self._serve_metrics(settings.ps.metrics) if settings.ps.metrics else None

    def _count(self, name: str) -> None:
        self.node.count(name)

    def _serve_metrics(self, address: str) -> MetricsEndpoint:
        registry = process_registry()
        registry.register(ShardMetrics(self._read_state))
        return serve(address, registry, self._not_ready)

    def _not_ready(self) -> str:
        """Why neither workers nor the shard's primary can use this process, for probes."""
        node = self.node
        if not self._is_serving:
            return f"shard {node.index} is being restored"
        if node.role.state is NodeState.EMPTY:
            return ""  # the first worker gives it what it begins with
        if node.backup.in_step:
            return ""
        try:
            node.shard.check()
        except ShardError as exc:
            return str(exc)
        return ""

    def _read_state(self) -> ShardState:
        coordinator = self._coordinator if self._coordinates else None
        return read_state(self.node, self.server.workers(), coordinator)

    def _pair(self, peer: str) -> Pairing:
        """With the other process of its shard."""
        security = self._security
        where = Peer(connect(peer, security, CHANNEL_OPTIONS), peer, metadata(security))
        return Pairing(where, self._patience, self._own, promoted=self._start_coordinator, retired=self._retire)

    def _retire(self, why: str) -> None:
        self._why_retired = why
        self.ended.set()

    def _controls(
        self, addresses: Sequence[str], settings: Settings, security: Security, timeout: float = 10.0
    ) -> list[Control]:
        """Controls of all shards; that of this process needs no socket."""
        places = connect_shards(addresses, settings.ps.backups, security, lambda channel: None)
        return [
            LocalControl(self.node, self._own)
            if i == self.node.index
            else open_control(place, metadata(security), timeout)
            for i, place in enumerate(places)
        ]

    def _get_coordinator(self) -> Coordinator:
        """The coordinator of the cluster, if it is in this process.

        Raises:
            ShardRefused: it is elsewhere.
            ShardUnavailable: this is the backup of shard 0, or it is starting.
        """
        if self._coordinator is None:
            where = f"it is at {self._coordinator_address}" if self._coordinator_address else "shard 0 is"
            raise ShardRefused(f"shard {self.node.index} is not the coordinator; {where}", "mismatch")
        if self.node.role.state is NodeState.BACKUP:
            raise ShardUnavailable("this is the backup of shard 0; ask the primary")
        if not self._coordinates:
            raise ShardUnavailable("shard 0 is starting")
        return self._coordinator

    def run(self, stopped: threading.Event) -> None:
        """Serves until `stopped` is set.

        Raises:
            ShardError: another process of the shard has taken over from this one.
        """
        self.ended = stopped
        with freeze_heap():
            self.start()
            stopped.wait()
            self.stop()
        if self._why_retired:
            raise ShardError(f"shard {self.node.index} ends here: {self._why_retired}; started again, it is the backup")

    def start(self) -> None:
        """Restores what there is, and begins to serve. Metrics are served before, as restoring may take long."""
        is_paired = self.node.role.pairing is not None
        if is_paired:
            self._serve()  # first, as the other place may ask at the same time
        try:
            is_primary = self.node.start(is_first=self._is_first)
        except BaseException:
            self.stop()
            raise
        if not is_paired:
            self._serve()
        self._is_serving = True
        if is_primary:
            self._start_coordinator()
        if self._lease:
            self._lease.start()
        if self._may_lead:
            self._waiting.start()
        logger.info("shard %d of %d serves at %s", self.node.index, self.node.shards, self.address)

    def _start_coordinator(self) -> None:
        if self._coordinator and not self._coordinates:
            self._coordinates = True
            self._coordinator.start()

    def _end_waiting(self) -> None:
        if self.node.end_waiting():
            self._start_coordinator()

    def _serve(self) -> None:
        self.server.start()
        register(self._own, self.address, self.port)

    def stop(self) -> None:
        """Ends."""
        if self._coordinator and self._coordinates:
            self._coordinator.stop()  # first: a checkpoint that is being taken needs the server
        if self._lease:
            self._lease.stop()
        self._waiting.close()
        with step("calls in progress"):
            self.server.stop()
        with step("the replication to its backup"):
            self.node.stop()
        if self._memory:
            self._memory.close()
        if self._redis:
            self._redis.close()
        if self.metrics:
            self.metrics.close()
