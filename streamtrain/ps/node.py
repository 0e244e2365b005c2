"""Node: the process's one shard from its beginning on: empty, then initialised or restored, and saved now and then."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from streamtrain.errors import ShardRefused, ShardUnavailable
from streamtrain.model.spec import slice_of
from streamtrain.ps.clock import Clock
from streamtrain.ps.consistency import Consistency
from streamtrain.ps.copying import Line
from streamtrain.ps.follower import Follower
from streamtrain.ps.keeping import CutAt, Frozen, Keeper, Mark, Publisher
from streamtrain.ps.leader import Leader
from streamtrain.ps.replication import Replication
from streamtrain.ps.shard import Initial, Shard

logger = logging.getLogger(__name__)

NO_EPOCH = -1


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
        published: number of the publication that was written last, be it committed or not; 0: none.
        leader: of all shards, if this one is; set before it is served.
        follower: what the node is while another of the same shard is primary, or may be; set before it is served.
        follows: whether another is primary, or is to be: this one takes no shard but from there.
        replicate: begins to send a shard to the node's backup; set before it is served.
        replication: of the shard to the backup; None: there is no backup, or the node is no primary.
        line: of the shard, where it has a backup.
        retired: called with the reason once the node is not primary any more; set before it is served.
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
        self.published = 0
        self.leader: Leader | None = None
        self.follower: Follower | None = None
        self.follows = False
        self.replicate: Callable[[Shard, Line], Replication] | None = None
        self.replication: Replication | None = None
        self.line = Line(0, 0)
        self.retired: Callable[[str], object] = logger.error
        self._retired: str | None = None
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
                if self.follows or self._retired is not None:
                    self._of_held()
                self._hold(Shard(initial, self.index, self.shards))
                logger.info("shard %d of %d begins run %s", self.index, self.shards, initial.run.id)
        return self.shard

    def _hold(self, shard: Shard, line: Line | None = None) -> None:
        self.line = line or Line(time.time_ns(), 1)
        if self.replicate is not None:
            self.replication = shard.mirror = self.replicate(shard, self.line)
        self._held = shard, self._make_consistency(shard)

    def take(self, shard: Shard, line: Line) -> None:
        """Becomes primary with a shard that it has followed."""
        with self._lock:
            self.follows = False
            self._hold(shard, line)
        self.count("backup_took_over")

    def retire(self, why: str) -> None:
        """Is not primary any more: nothing of its shard is told to anybody."""
        with self._lock:
            held, self._held, self._retired = self._held, None, why
        if held is not None:
            held[0].retire(why)
            if self.replication is not None:
                self.replication.retire()
            self.retired(why)

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
        held = self._held
        if held is not None:
            return held
        if self._retired is not None:
            raise ShardUnavailable(f"shard {self.index} is not here any more: {self._retired}")
        if self.follows:
            raise ShardUnavailable(f"this is the backup of shard {self.index}")
        raise ShardUnavailable(f"shard {self.index} is empty: it found no checkpoint and waits to be initialised")

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
        self.shard.confirm()  # one that has been taken over from may not be part of a checkpoint
        self.epoch = epoch
        return part

    def publish(self, number: int, layout: str) -> str:
        """Writes the shard's part of a publication; see `Publisher.write`.

        Raises:
            ShardRefused: the node publishes nowhere.
            PublicationError: it cannot be written.
        """
        try:
            part = self._of_publisher().write(self.shard, number, layout)
            self.shard.confirm()  # as of checkpoints
            self.published = number
            return part
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
