"""The process of a parameter server: startup, serve, shutdown."""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from streamtrain.cluster.checkpoints import Checkpointer, Schedule
from streamtrain.cluster.keeper import CheckpointKeeper
from streamtrain.errors import ConfigError
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
        self._epochs = Epochs(settings.checkpoint.url) if settings.checkpoint.url else None
        keeper = CheckpointKeeper(self._epochs) if self._epochs else None
        self.node = Node(index, len(addresses), strategy(settings.consistency, workers), keeper)
        limits = Limits(settings.ps.max_message_bytes, settings.ps.max_keys, settings.ps.sessions)
        guards = (authenticate(security.token, lambda: self.node.count("refused_token")),) if security.token else ()
        self.server = Server(self.node, limits, guards)
        self.address = settings.ps.listen or addresses[index]
        self.port = listen(self.server.grpc, self.address, security)
        self.schedule: Schedule | None = None
        if self._epochs and index == 0:
            controls = self._controls(addresses, security)
            kept = settings.checkpoint
            checkpointer = Checkpointer(controls, self._epochs, keep=kept.keep, full_every=kept.full_every)
            self.schedule = Schedule(checkpointer, kept.every)

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
        self.node.restore()
        self.server.start()
        if self.schedule:
            self.schedule.start()
        logger.info("shard %d of %d serves at %s", self.node.index, self.node.shards, self.address)
        stopped.wait()
        # The schedule first: a checkpoint that is being taken needs the server.
        if self.schedule:
            self.schedule.stop()
        self.server.stop()
