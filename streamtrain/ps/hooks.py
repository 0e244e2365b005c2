"""What a node needs of checkpoints and publications, and what it answers to them."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from streamtrain.ps.clock import Clock
from streamtrain.ps.shard import Shard


class Snapshot(Protocol):
    """A moment of a shard, taken without copying it, to be written while training continues."""

    def write(self, epoch: int) -> str:
        """Writes it and describes the files, as JSON.

        Raises:
            CheckpointError: they cannot be written.
        """

    def drop(self) -> None:
        """Lets go of a moment that will not be written."""


class ChangedRows(NamedTuple):
    """Which rows of a shard have changed since a checkpoint, and change from here on.

    Attributes:
        since: where the checkpoint stands.
        channels: by table, a change channel that holds them; none with `kept`.
        kept: the shard of before in the same process, whose tables it has; None: it has others.
        gained: with `kept`, by table the keys, uint64 [n], of those changed rows which that shard had not.
    """

    since: Clock
    channels: Sequence[int]
    kept: Shard | None = None
    gained: Sequence[NDArray[np.uint64]] = ()


class RestoredShard(NamedTuple):
    """A shard from a checkpoint.

    Attributes:
        shard: it.
        epoch: of the checkpoint; -1: no delta can build on it.
        changed: since what was read ahead; None: nothing was. The channels are to be closed by who gets them.
    """

    shard: Shard
    epoch: int
    changed: ChangedRows | None = None


class CheckpointStore(Protocol):
    """Where checkpoints of a shard are kept.

    Attributes:
        digest: of the part that was written or restored last; "": there is none.
    """

    digest: str

    @property
    def rows_ahead(self) -> int:
        """Rows that were read by `read_ahead` so far, or by the last one."""

    def stop_reading(self) -> None:
        """Ends a `read_ahead` that is under way, which raises CheckpointError."""

    def restore(self, index: int, shards: int, held: Shard | None = None) -> RestoredShard | None:
        """The shard in the newest intact checkpoint; None: there is none.

        Args:
            index: of the shard.
            shards: how many there are.
            held: the one that is here, of which no checkpoint is being written. If it was there when rows were read
                ahead, and stands where the checkpoint does, it is retired, and what is restored has its tables.
        """

    def read_ahead(self, index: int, shards: int, held: Shard | None = None, *, rate: float = 0.0) -> None:
        """Reads what the newest checkpoint has of a shard, so that `restore` need only read what has changed since.

        Again for the same place, it reads only what has changed meanwhile.

        Args:
            index: of the shard.
            shards: how many there are; 0: what was read is let go.
            held: the one that is here, and goes on meanwhile: rows that it has are not read.
            rate: bytes per second that are read at most; 0: as many as can be.

        Raises:
            CheckpointError: it cannot be read.
        """

    def forget(self) -> None:
        """The shard that was restored or written last is here no more; nor is one that was read ahead."""

    def snapshot(self, shard: Shard, full: bool) -> Snapshot:
        """Takes a snapshot; nothing is pushed meanwhile. Not `full`: only of what changed since the one before."""


class Publisher(Protocol):
    """Publishes shards, for those who serve them."""

    def check(self, shard: Shard, generation: int) -> None:
        """Whether a shard's cluster may publish.

        Args:
            shard: which one.
            generation: of the lease under which it has published; 0: none, which is not checked.

        Raises:
            TakenOver: another cluster does.
        """

    def write(self, shard: Shard, number: int, layout: str) -> str:
        """Writes a shard's part of a publication: what changed, or everything if there is a layout.

        Returns:
            JSON: the part, or that a full publication is needed.

        Raises:
            ShardRefused: the layout is none, or not of the shard's tables.
            PublicationError: it cannot be written; what changed will be in the next one.
        """

    def apply(self, shard: Shard) -> None:
        """The publication that was written is committed; raises the errors of `write`."""

    def sums(self, shard: Shard, number: int, layout: str) -> Any:
        """Checksums of a shard's published rows, `RowSums` of schemas/ps.proto; raises the errors of `write`."""

    def take_over(self, shard: Shard, changed: ChangedRows, head: str) -> None:
        """Goes on from what other shards have published: the next part has what changed since, if it is still the head.

        Of tables that are `kept`, it goes on from what it has published itself.

        Args:
            shard: which has the rows of its place from here on.
            changed: rows that the head may not have as they are.
            head: what it is known by, see `Publications.hand_over`.
        """

    def forget(self) -> None:
        """The shard is not published any more."""


class FreezeResult(NamedTuple):
    """What a shard says when its pushes are held back.

    Attributes:
        clock: where it stands.
        written: the epoch that a delta can build on; -1: none.
        digest: of the shard's part of it: another cluster may have given its number to another one; "": the shard is of
            a release that does not say.
    """

    clock: dict[int, int]
    written: int
    digest: str = ""


class CutResult(NamedTuple):
    """Where a shard was cut.

    Attributes:
        clock: where it stood.
        reached: whether that is where it should have been.
        pause_ms: milliseconds for which pushes were held back.
    """

    clock: dict[int, int]
    reached: bool
    pause_ms: float
