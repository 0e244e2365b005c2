"""Pairing: a node as one of the two of a shard that has a backup, and which of them it is."""

import logging
import threading
from collections.abc import Callable
from typing import Any

from streamtrain.errors import ShardError, ShardUnavailable
from streamtrain.ps.control import RemoteControl, is_gone
from streamtrain.ps.copying import Line
from streamtrain.ps.follower import Follower
from streamtrain.ps.node import Node
from streamtrain.ps.replication import Backup, Replication
from streamtrain.ps.shard import Shard

logger = logging.getLogger(__name__)

_TRIES = 4


class Pairing:
    """Has a node follow the other one, or be followed by it. Made before the node is served.

    Args:
        node: one of the two; it follows from now on, until `begin` says otherwise or it takes over.
        peer: the other.
        patience: seconds that the other may take to answer.
        pause: seconds between two attempts to reach the other while it is away.
        promoted: called when the node has taken over.
        retired: called with the reason once another has taken over from the node: it ends, and may be started again.
    """

    def __init__(
        self,
        node: Node,
        peer: Backup,
        patience: float,
        *,
        pause: float = 1.0,
        promoted: Callable[[], object] = lambda: None,
        retired: Callable[[str], object] = logger.error,
    ) -> None:
        self._node, self._peer, self._patience, self._pause = node, peer, patience, pause
        self._control = RemoteControl(*peer, patience)
        self._never = threading.Event()
        node.follower = Follower(node, patience / 2, promoted)
        node.follows, node.replicate, node.retired = True, self._replicate, retired

    def _replicate(self, shard: Shard, line: Line) -> Replication:
        node = self._node
        replication = Replication(
            shard, line, self._peer, self._patience, pause=self._pause, retire=node.retire, count=node.count
        )
        replication.start()
        return replication

    def begin(self, *, is_first: bool) -> bool:
        """Finds out which of the two the node is; True: primary, and restored as far as there is something.

        A node that was primary has died, or its backup would not ask. So one that starts while the other is primary
        follows, and while the other is in step has it take over first.

        Args:
            is_first: whether it is to be primary if the other is neither.

        Raises:
            CheckpointError: checkpoints cannot be read.
        """
        if self._other_leads() or not is_first:
            logger.info("this is the backup of shard %d; %s is to be primary", self._node.index, self._peer.target)
            return False
        self._node.restore()
        self._node.follows = False  # only now, or it could be initialised meanwhile
        return True

    def _other_leads(self) -> bool:
        """Whether the other one is primary, or now is."""
        for left in reversed(range(_TRIES)):
            try:
                status: Any = self._control.status()
                if status.standing.in_step and not status.ready:
                    status = self._control.promote()
                return bool(status.ready)
            except ShardUnavailable as exc:
                trouble: ShardError = exc
                if is_gone(exc.__cause__):
                    break
            if left:
                self._never.wait(self._patience / _TRIES)
        logger.info("the other place of shard %d does not lead: %s", self._node.index, trouble)
        return False

    def end(self) -> None:
        """Ends what is sent to the other. The node is not served any more."""
        if self._node.replication is not None:
            self._node.replication.stop()
