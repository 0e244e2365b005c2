"""Keeping: where a node's shard goes beside its workers: checkpoints, and those who serve it."""

from typing import Any, NamedTuple, Protocol

from streamtrain.ps.shard import Shard


class Mark(Protocol):
    """A moment of a shard, marked without copying it, to be written while training goes on."""

    def write(self, epoch: int) -> str:
        """Writes it and describes the files, as JSON.

        Raises:
            CheckpointError: they cannot be written.
        """

    def drop(self) -> None:
        """Lets go of a moment that will not be written."""


class Keeper(Protocol):
    """Keeps shards in checkpoints."""

    def restore(self, index: int, shards: int) -> tuple[Shard, int] | None:
        """The shard as of the newest good checkpoint, and that one's epoch; None: there is none."""

    def mark(self, shard: Shard, full: bool) -> Mark:
        """Marks this moment; nothing is pushed meanwhile. Not `full`: only of what changed since the mark before."""


class Publisher(Protocol):
    """Publishes shards, for those who serve them."""

    def write(self, shard: Shard, number: int, layout: str) -> str:
        """Writes a shard's part of a publication: what changed, or everything if there is a layout.

        Returns:
            JSON: the part, or that a full publication is needed.

        Raises:
            PublicationError: it cannot be written; what changed will be in the next one.
        """

    def apply(self, shard: Shard) -> None:
        """The publication that was written is committed; errors as of `write`."""

    def sums(self, shard: Shard, number: int, layout: str) -> Any:
        """Checksums of a shard's rows as they were published, `RowSums` of schemas/ps.proto; errors as of `write`."""


class Frozen(NamedTuple):
    """What a shard says when its pushes are held back.

    Attributes:
        clock: where it stands.
        written: the epoch that a delta can build on; -1: none.
    """

    clock: dict[int, int]
    written: int


class CutAt(NamedTuple):
    """Where a shard was cut.

    Attributes:
        clock: where it stood.
        reached: whether that is where it should have been.
        pause_ms: milliseconds for which pushes were held back.
    """

    clock: dict[int, int]
    reached: bool
    pause_ms: float
