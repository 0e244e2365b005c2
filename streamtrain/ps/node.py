"""Node: the process's one shard from its beginning on: empty, then initialised or restored, and saved now and then."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from streamtrain.errors import ShardRefused, ShardUnavailable
from streamtrain.model.spec import slice_of
from streamtrain.ps.clock import Clock
from streamtrain.ps.consistency import Consistency
from streamtrain.ps.leader import Leader
from streamtrain.ps.shard import Initial, Shard

logger = logging.getLogger(__name__)

NO_EPOCH = -1


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


class Node:
    """Thread-safe.

    Args:
        index: which shard it holds, 0 to shards - 1.
        shards: how many there are.
        consistency: makes the strategy of a shard.
        keeper: of its checkpoints; None: it has none.
        publisher: of what it has learned; None: it has none.
        freeze_patience: seconds for which pushes are held back at most, should who asked for it be gone.
        cut_patience: seconds to wait for the clock of a cut.

    Attributes:
        counters: what happened, by name.
        epoch: the checkpoint that was written or restored last; -1: none.
        leader: of all shards, if this one is; set before it is served.
    """

    def __init__(
        self,
        index: int,
        shards: int,
        consistency: Callable[[Shard], Consistency],
        keeper: Keeper | None = None,
        *,
        publisher: Publisher | None = None,
        freeze_patience: float = 2.0,
        cut_patience: float = 1.0,
    ) -> None:
        self.index = index
        self.shards = shards
        self.counters: dict[str, int] = {}
        self.epoch = NO_EPOCH
        self.leader: Leader | None = None
        self._make_consistency = consistency
        self._keeper = keeper
        self._publisher = publisher
        self._freeze_patience = freeze_patience
        self._cut_patience = cut_patience
        self._lock = threading.Lock()
        self._held: tuple[Shard, Consistency] | None = None
        self._frozen_at = 0.0
        self._marked: tuple[int, Mark] | None = None
        self._writing: int | None = None

    def restore(self) -> bool:
        """Takes the shard from the newest good checkpoint; False: there is none, and the shard waits for `initialise`.

        Raises:
            CheckpointError: checkpoints cannot be read.
        """
        found = self._keeper.restore(self.index, self.shards) if self._keeper else None
        if found is None:
            return False
        shard, self.epoch = found
        self._hold(shard)
        logger.info(
            "shard %d of %d restored from epoch %d, clock %s", *(self.index, self.shards), *found[1:], shard.clock()
        )
        return True

    def initialise(self, initial: Initial) -> Shard:
        """Gives an empty shard what it begins with. Any other is left as it is: compare its `run`.

        Raises:
            ShardRefused: the slices do not have the sizes that the spec says.
        """
        spec = initial.spec
        for what, slice_, size in (
            ("dense", initial.dense, spec.dense_size),
            ("statistics", initial.statistics, spec.statistics_size),
        ):
            mine = slice_of(size, self.index, self.shards)
            if len(slice_) != (expected := mine.stop - mine.start):
                raise ShardRefused(f"the {what} slice of shard {self.index} has {len(slice_)} floats, not {expected}")
        with self._lock:
            if self._held is None:
                self._hold(Shard(initial, self.index, self.shards))
                logger.info("shard %d of %d begins run %s", self.index, self.shards, initial.run.id)
        return self.shard

    def _hold(self, shard: Shard) -> None:
        self._held = shard, self._make_consistency(shard)

    @property
    def ready(self) -> bool:
        """Whether there is a shard."""
        return self._held is not None

    @property
    def shard(self) -> Shard:
        """The shard.

        Raises:
            ShardUnavailable: it is empty still.
        """
        return self._of_held()[0]

    @property
    def consistency(self) -> Consistency:
        """The strategy of the shard; errors as of `shard`."""
        return self._of_held()[1]

    def _of_held(self) -> tuple[Shard, Consistency]:
        if self._held is None:
            raise ShardUnavailable(f"shard {self.index} is empty: it found no checkpoint and waits to be initialised")
        return self._held

    def count(self, name: str) -> None:
        """Counts what happened."""
        with self._lock:
            self.counters[name] = self.counters.get(name, 0) + 1

    def freeze(self) -> Frozen:
        """Holds pushes back, to cut a checkpoint; see `Shard.freeze`. What was cut and not written is given up.

        Raises:
            ShardRefused: the node has no checkpoints, or still writes one. Nothing is held back.
        """
        self._idle_keeper()
        self._give_up()  # not within the cut, for it may take long
        self._frozen_at = time.monotonic()
        return Frozen(self.shard.freeze(self._freeze_patience), self.epoch)

    def cut(self, epoch: int, target: Clock, full: bool) -> CutAt:
        """Marks the moment at which the clock is `target`, and lets pushes through again.

        Raises:
            ShardRefused: the node has no checkpoints, or still writes one.
        """
        keeper, shard = self._idle_keeper(), self.shard

        def mark() -> None:
            self._give_up()
            self.epoch = NO_EPOCH  # until it is written, no delta can build on anything
            self._marked = epoch, keeper.mark(shard, full)

        clock, reached = shard.cut(target, self._cut_patience, mark)
        return CutAt(clock, reached, (time.monotonic() - self._frozen_at) * 1000)

    def _idle_keeper(self) -> Keeper:
        if self._keeper is None:
            raise ShardRefused(f"shard {self.index} has no place for checkpoints; set checkpoint.url")
        if self._writing is not None:
            raise ShardRefused(f"shard {self.index} still writes epoch {self._writing}; ask again later", "limit")
        return self._keeper

    def _give_up(self) -> None:
        """Lets go of what was cut and not written."""
        with self._lock:
            marked, self._marked = self._marked, None
        if marked is not None:
            marked[1].drop()

    def write(self, epoch: int) -> str:
        """Writes what `cut` marked; training goes on meanwhile. Returns a description of the files, as JSON.

        Raises:
            CheckpointError: the files cannot be written; the next checkpoint will be a full one.
            ShardRefused: there was no cut for this epoch.
        """
        with self._lock:
            if self._marked is None or self._marked[0] != epoch:
                raise ShardRefused(f"shard {self.index} has not been cut for epoch {epoch}")
            (_, mark), self._marked, self._writing = self._marked, None, epoch
        try:
            part = mark.write(epoch)
        except Exception:
            self.count("checkpoint_failures")
            raise
        finally:
            self._writing = None
        self.epoch = epoch
        return part

    def publish(self, number: int, layout: str) -> str:
        """Writes the shard's part of a publication; see `Publisher.write`.

        Raises:
            ShardRefused: the node publishes nowhere.
            PublicationError: it cannot be written.
        """
        try:
            return self._of_publisher().write(self.shard, number, layout)
        except Exception:
            self.count("publication_failures")
            raise

    def apply(self) -> None:
        """What was published is committed; errors as of `publish`."""
        self._of_publisher().apply(self.shard)

    def sums(self, number: int, layout: str) -> Any:
        """Checksums of the rows that a publication has; see `Publisher.sums`. Errors as of `publish`."""
        return self._of_publisher().sums(self.shard, number, layout)

    def _of_publisher(self) -> Publisher:
        if self._publisher is None:
            raise ShardRefused(f"shard {self.index} publishes nowhere; set publish.url")
        return self._publisher
