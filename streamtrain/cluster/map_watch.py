"""MapWatch: whether a cluster still has the shards that a worker learns with."""

import logging
import threading
from collections.abc import Callable

from streamtrain.errors import ShardError
from streamtrain.ps.nodes.topology import ShardMap

logger = logging.getLogger(__name__)


class MapWatch:
    """Compares the map that a worker goes by with the coordinator's. Thread-safe.

    The first map that the coordinator tells is taken for that of the settings, which may name shards otherwise, unless
    it has another number of them or of their backups, or `streamtrain scale` has changed it. While the coordinator does
    not answer, the map stays as it is.

    Args:
        ask: `CoordinatorClient.slots`.
        begin: the map of the settings, of epoch 0.
        stopped: set once the worker is to end.

    Attributes:
        leaving: set once the worker is to leave the shards of `in_use`, as it ends or the cluster has others.
    """

    def __init__(self, ask: Callable[[], ShardMap], begin: ShardMap, stopped: threading.Event) -> None:
        self._ask, self._stopped = ask, stopped
        self._lock = threading.Lock()
        self._in_use, self._heard = begin, begin
        self.leaving = threading.Event()

    @property
    def in_use(self) -> ShardMap:
        """The map that the worker goes by; its epoch is 0 until the coordinator has told one."""
        return self._in_use

    def check(self) -> bool:
        """Asks the coordinator; returns whether the cluster has other shards than those of `in_use`."""
        self.hear()
        return self.has_other

    def hear(self) -> bool:
        """Asks the coordinator; returns whether it has answered."""
        try:
            heard = self._ask()
        except ShardError as exc:
            logger.debug("the map of shards is not known: %s", exc)
            return False
        with self._lock:
            is_newer, self._heard = heard.epoch > self._heard.epoch, max(heard, self._heard)
            mine = self._in_use
            if not mine.epoch and (heard.has(mine) or (not heard.scaled and _are_as_many(mine, heard))):
                self._in_use = mine._replace(epoch=heard.epoch)
            elif is_newer:  # also if it has the shards of `in_use` again: they hold pushes of this worker no more
                logger.info("the cluster has %d shards by map %d", len(heard.shards), heard.epoch)
                self.leaving.set()
        return True

    @property
    def has_other(self) -> bool:
        """Whether the cluster is known to have other shards than those of `in_use`."""
        return self._heard.epoch > self._in_use.epoch

    def use_other(self) -> ShardMap:
        """The worker goes by the newest map from now on."""
        with self._lock:
            self._in_use, self.leaving = self._heard, threading.Event()
        if self._stopped.is_set():
            self.leaving.set()
        return self._in_use

    def stop(self) -> None:
        """The worker ends: `stopped` is set."""
        with self._lock:
            self.leaving.set()


def _are_as_many(one: ShardMap, other: ShardMap) -> bool:
    return (len(one.shards), len(one.backups)) == (len(other.shards), len(other.backups))
