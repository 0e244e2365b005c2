"""Leader: what shard 0 does for all of them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from streamtrain.errors import ShardRefused, ShardUnavailable

if TYPE_CHECKING:
    from streamtrain.ps.node import Node


class Leader(Protocol):
    """Hears how good workers' predictions are, and publishes. Thread-safe."""

    @property
    def held(self) -> bool:
        """Whether a publication is held back."""

    @property
    def checkpointed(self) -> float | None:
        """When the newest checkpoint was complete, seconds since the epoch; None: it is not known."""

    @property
    def published(self) -> float | None:
        """When the newest publication was; as for checkpoints."""

    def report(self, worker: str, windows: Sequence[Any]) -> None:
        """Takes the windows of a worker, `LabelWindow` of schemas/ps.proto, in place of those before.

        Raises:
            ShardRefused: they are damaged, or too large.
        """

    def leave(self, worker: str) -> None:
        """Forgets the windows of a worker."""

    def publish_now(self, *, force: bool = False) -> str:
        """Publishes what is new, and describes the head, as JSON.

        Args:
            force: whatever the quality gate says.

        Raises:
            ShardUnavailable: nothing has been learned yet.
            ShardRefused: it is published nowhere.
            ShardError: it is held back, or cannot be published; says why.
        """

    def verify(self) -> str:
        """Publishes what is new, then compares what is published with what shards have, as JSON.

        Raises:
            ShardRefused: it is published nowhere.
            ShardError: it cannot be compared; says why.
        """


def leader_of(node: "Node") -> Leader:
    """The leader that a node is.

    Raises:
        ShardRefused: it is none.
        ShardUnavailable: it is the backup of shard 0.
    """
    if node.follows:
        raise ShardUnavailable(f"this is the backup of shard {node.index}; ask the other of the two")
    if node.leader is None:
        raise ShardRefused(f"shard {node.index} does not lead the others; ask shard 0", "mismatch")
    return node.leader
