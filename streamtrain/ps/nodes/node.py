"""Node: the one shard of a process, with its role, its checkpoints and its publications."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from streamtrain.errors import ShardRefused, ShardUnavailable, TakenOver
from streamtrain.incarnation import Incarnation
from streamtrain.ps.clock import Clock
from streamtrain.ps.consistency import Consistency
from streamtrain.ps.hooks import CheckpointStore, CutResult, FreezeResult, Publisher, RestoredShard, Snapshot
from streamtrain.ps.replication.backup import BackupShard
from streamtrain.ps.replication.roles import NodeRole, NodeState, Pairing
from streamtrain.ps.row_memory import RowMemory
from streamtrain.ps.shard import InitialState, Shard

logger = logging.getLogger(__name__)

NO_EPOCH = -1


class Node:
    """Thread-safe.

    Args:
        index: which shard it holds, 0 to shards - 1.
        shards: how many there are; 0: it holds none until it gets a `place`.
        consistency: makes the strategy of a shard.
        checkpoints: where it is saved; None: nowhere.
        publisher: of what it has learned; None: it has none.
        pairing: with the other process of the shard; None: it has no backup.
        pair: makes the pairing with the process at an address; None: other maps cannot give its shard a backup.
        freeze_patience: maximum seconds for which pushes are held back, in case the caller is gone.
        cut_patience: seconds to wait for the clock of a cut.
        write_patience: seconds for which a cut is kept without a request to write it: what changes is copied for it.

    Attributes:
        counters: what happened, by name.
        epoch: the checkpoint that was written or restored last; -1: none.
        published: number of the publication that was written last, be it committed or not; 0: none.
        lease_generation: of the lease under which it has published; 0: it has not.
        incarnation: of its cluster, as a worker told it; None: none did since it was started.
        role: whether it is empty, a backup, primary or retired; has its place, and holds the shard.
        backup: what it follows another primary with.
    """

    def __init__(
        self,
        index: int,
        shards: int,
        consistency: Callable[[Shard], Consistency],
        checkpoints: CheckpointStore | None = None,
        *,
        publisher: Publisher | None = None,
        pairing: Pairing | None = None,
        pair: Callable[[str], Pairing] | None = None,
        memory: RowMemory | None = None,
        freeze_patience: float = 2.0,
        cut_patience: float = 1.0,
        write_patience: float = 60.0,
    ) -> None:
        self.counters: dict[str, int] = {}
        self.is_colocated = False
        self.epoch = NO_EPOCH
        self.published = 0
        self.lease_generation = 0
        self.incarnation: Incarnation | None = None
        self.role = NodeRole(index, shards, consistency, pairing, self.count, memory=memory)
        self.backup = BackupShard(self.role, pair, self._forget)
        self._pair = pair
        self._checkpoints = checkpoints
        self._publisher = publisher
        self._freeze_patience = freeze_patience
        self._cut_patience = cut_patience
        self._write_patience = write_patience
        self._overdue: threading.Timer | None = None  # gives up the cut
        self._lock = threading.Lock()
        self._frozen_at = 0.0
        self._snapshot: tuple[int, Snapshot] | None = None
        self._writing: int | None = None
        self._placing = threading.Lock()

    @property
    def index(self) -> int:
        """Of its shard."""
        return self.role.index

    @property
    def shards(self) -> int:
        """How many there are; 0: it has no place among them."""
        return self.role.shards

    @property
    def map_epoch(self) -> int:
        """Of the map of shards in which it has its place; 0: it has it by its settings."""
        return self.role.map_epoch

    def start(self, *, is_first: bool = True) -> bool:
        """Restores the shard and becomes primary, unless this is the backup; True: it is not.

        A node that was primary has died, or its backup would not ask. So one that starts while the other process of
        the shard is primary, or in step, is the backup.

        Args:
            is_first: whether it is to be primary if the other is neither.

        Raises:
            CheckpointError: checkpoints cannot be read.
        """
        if not self.shards:
            logger.info("this shard has no place yet: it waits for `streamtrain scale`")
            return False
        pairing = self.role.pairing
        if pairing and (pairing.is_peer_primary() or not is_first):
            logger.info("this is the backup of shard %d; the primary is at %s", self.index, pairing.peer.target)
            return False
        self.restore()
        return True

    def end_waiting(self) -> bool:
        """Restores the shard as `start` does, if both of its processes wait for the other; True: it is no backup now.

        So it is if a primary dies before its backup is in step, and is started again as the backup that it has been
        before. For the first of the two, to be called from time to time; the second goes on waiting.

        Raises:
            CheckpointError: checkpoints cannot be read.
        """
        pairing = self.role.pairing
        if self.role.state is not NodeState.BACKUP or self.backup.has_primary or pairing is None:
            return False
        if not pairing.is_peer_waiting():
            return False
        logger.warning("shard %d has no primary, as %s waits for one, too", self.index, pairing.peer.target)
        self.restore()
        return True

    def stop(self) -> None:
        """Ends the replication. The node is not served any more."""
        if self.role.replication is not None:
            self.role.replication.stop()

    def restore(self) -> bool:
        """Takes the shard from the newest good checkpoint; False: there is none, and the shard waits for `initialise`.

        Raises:
            CheckpointError: checkpoints cannot be read.
        """
        found = self._checkpoints.restore(self.index, self.shards) if self._checkpoints else None
        if found is None:
            self.role.restored(None)
            return False
        shard, self.epoch = found.shard, found.epoch
        self.role.restored(shard)
        logger.info(
            "shard %d of %d restored from epoch %d, clock %s", *(self.index, self.shards, found.epoch), shard.clock()
        )
        return True

    @property
    def rows_ahead(self) -> int:
        """Rows that it has read so far for a place that it may get."""
        return self._checkpoints.rows_ahead if self._checkpoints is not None else 0

    def read_ahead(self, index: int, shards: int, *, rate: float = 0.0) -> None:
        """Reads what the newest checkpoint has for a place that it may get soon, and goes on as before meanwhile.

        Args:
            index: of the shard.
            shards: how many there are then; 0: it lets go of what it has read, and ends a reading that is under way.
            rate: bytes per second that it reads at most; 0: as many as it can.

        Raises:
            ShardRefused: the node has no checkpoints.
            CheckpointError: they cannot be read, or the reading was ended.
        """
        if self._checkpoints is None:
            raise ShardRefused(f"shard {self.index} has no checkpoints; set checkpoint.url")
        self._checkpoints.stop_reading()  # of whoever has asked before and may be gone; it may take for ever
        with self._placing:
            self._checkpoints.read_ahead(index, shards, self.shard if self.ready else None, rate=rate)

    def place(
        self, index: int, shards: int, run: str, map_epoch: int, *, head: str = "", peer: str | None = None
    ) -> None:
        """Gives it a place in a map of shards: it then holds what the newest checkpoint has there. Nothing, if it does.

        What it holds stays until it has that. An empty one stays empty where there is no checkpoint.

        Args:
            index: of the shard that it is to hold.
            shards: how many there are; 0: it is to hold none.
            run: of the cluster; "": not known.
            map_epoch: of the map.
            head: what the publication is known by that the shards of before have made last, see `Publisher.take_over`.
            peer: address of the other process of that shard, which then copies it anew; None: it has no backup.

        Raises:
            ShardRefused: it holds a shard of another run, goes by a later map, or can have no backup.
            ShardUnavailable: it is a backup and is to hold a shard, or there is no checkpoint.
            CheckpointError: checkpoints cannot be read.
        """
        if self._checkpoints is not None:
            self._checkpoints.stop_reading()
        with self._placing:
            if map_epoch < self.map_epoch:
                raise ShardRefused(f"the map of epoch {self.map_epoch} is in force here, not {map_epoch}", "mismatch")
            if self.ready and run not in ("", self.shard.run.id):
                raise ShardRefused(f"this is a shard of run {self.shard.run.id}, not of {run}", "mismatch")
            role, was = self.role, f"shard {self.index} of {self.shards}"
            if shards and role.state is NodeState.BACKUP:
                role.held()
            pairing = self._pairing_with(peer)
            if (index, shards, pairing) == (self.index, self.shards, role.pairing) and (
                not shards or role.state is not NodeState.SPARE
            ):
                role.confirm(map_epoch)
                if self.ready:
                    self.shard.release()
                return
            found = None
            if shards:
                self._give_up()
                held = self.shard if self.ready and self._writing is None else None
                found = self._checkpoints.restore(index, shards, held) if self._checkpoints else None
                if found is None and role.state is not NodeState.EMPTY:
                    raise ShardUnavailable(f"{was} finds no checkpoint to be shard {index} of {shards} with")
            self._give_up()
            self.backup.vacate(index, shards, map_epoch, pairing)
            if found is None:
                self._forget()
            else:
                self._publish_on(found, head)
            if shards:
                role.restored(found.shard if found else None)
                self.epoch = found.epoch if found else NO_EPOCH
            logger.info("%s is shard %d of %d by map %d", was, index, shards, map_epoch)
            if found is not None:  # rows of other shards, if it has kept its tables
                threading.Thread(target=found.shard.sweep, name="sweep", daemon=True).start()

    def _pairing_with(self, peer: str | None) -> Pairing | None:
        """That which it has, or else a new one."""
        mine = self.role.pairing
        if peer is None or (mine is not None and mine.peer.target == peer):
            return mine if peer else None
        if self._pair is None:
            raise ShardRefused(f"shard {self.index} cannot have a backup in this process", "mismatch")
        return self._pair(peer)

    def _forget(self) -> None:
        """Nothing of the shard that was here is continued."""
        self._give_up()
        self.epoch = NO_EPOCH
        if self._checkpoints is not None:
            self._checkpoints.forget()
        if self._publisher is not None:
            self._publisher.forget()

    def _publish_on(self, found: RestoredShard, head: str) -> None:
        """Has what is published from now on be of another shard."""
        if found.changed is not None:
            if self._publisher is not None and head:
                self._publisher.take_over(found.shard, found.changed, head)
                return
            for table, channel in zip(found.shard.tables, found.changed.channels, strict=False):  # none, if kept
                table.close_channel(channel)
        if self._publisher is not None:
            self._publisher.forget()

    def initialise(self, initial: InitialState) -> Shard:
        """Gives an empty shard what it begins with; see `NodeRole.initialise`."""
        return self.role.initialise(initial)

    def claim(self, incarnation: Incarnation) -> None:
        """Takes the incarnation of its cluster, unless it has a later one.

        Raises:
            ShardRefused: its cluster has been superseded by another.
            ShardUnavailable: it is empty still.
        """
        self.shard.check()
        with self._lock:
            self.incarnation = max(self.incarnation or incarnation, incarnation)

    def supersede(self, by: Incarnation, reason: str) -> None:
        """Stops learning if its cluster is of an earlier incarnation than `by`; raises ShardUnavailable as `claim`."""
        with self._lock:
            if self.incarnation is None or self.incarnation >= by:
                return
            self.incarnation = None  # shards that are restarted must not get it again
        if self.shard.fence(reason):
            logger.error("shard %d stops learning: %s", self.index, reason)

    @property
    def ready(self) -> bool:
        return self.role.ready

    @property
    def shard(self) -> Shard:
        """The shard; raises ShardUnavailable if there is none here."""
        return self.role.held()[0]

    @property
    def consistency(self) -> Consistency:
        """The strategy of the shard; raises the errors of `shard`."""
        return self.role.held()[1]

    def count(self, name: str) -> None:
        with self._lock:
            self.counters[name] = self.counters.get(name, 0) + 1

    def freeze(self) -> FreezeResult:
        """Holds pushes back, to cut a checkpoint; see `Shard.freeze`. What was cut and not written is given up.

        Raises:
            ShardRefused: the node has no checkpoints, or still writes one. Nothing is held back.
        """
        checkpoints = self._idle_checkpoints()
        self._give_up()  # not within the cut, for it may take long
        self._frozen_at = time.monotonic()
        return FreezeResult(self.shard.freeze(self._freeze_patience), self.epoch, checkpoints.digest)

    def cut(self, epoch: int, target: Clock, full: bool, hold: float = 0.0) -> CutResult:
        """Marks the moment at which the clock is `target`, and lets pushes through again, after `hold` seconds.

        Raises:
            ShardRefused: the node has no checkpoints, or still writes one.
        """
        checkpoints, shard = self._idle_checkpoints(), self.shard

        def take() -> None:
            self._give_up()
            self.epoch = NO_EPOCH  # until it is written, no delta can build on anything
            self._snapshot = epoch, checkpoints.snapshot(shard, full)
            self._overdue = threading.Timer(self._write_patience, self._give_up_overdue, (epoch,))
            self._overdue.daemon = True
            self._overdue.start()

        clock, reached = shard.cut(target, self._cut_patience, take, hold)
        return CutResult(clock, reached, (time.monotonic() - self._frozen_at) * 1000)

    def _idle_checkpoints(self) -> CheckpointStore:
        if self._checkpoints is None:
            raise ShardRefused(f"shard {self.index} has no checkpoints; set checkpoint.url")
        if self._writing is not None:
            raise ShardRefused(f"shard {self.index} is still writing epoch {self._writing}; retry later", "limit")
        return self._checkpoints

    def _give_up(self) -> None:
        """Lets go of what was cut and not written."""
        with self._lock:
            snapshot, self._snapshot = self._snapshot, None
            self._end_overdue()
        if snapshot is not None:
            snapshot[1].drop()

    def _give_up_overdue(self, epoch: int) -> None:
        with self._lock:
            if self._snapshot is None or self._snapshot[0] != epoch:
                return
            snapshot, self._snapshot = self._snapshot[1], None
        snapshot.drop()
        self.count("checkpoint_failures")
        logger.warning(
            "shard %d: no request to write epoch %d within %g s of its cut; the cut is dropped, and the next "
            "checkpoint is full",
            *(self.index, epoch, self._write_patience),
        )

    def _end_overdue(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def write(self, epoch: int) -> str:
        """Writes the snapshot that `cut` took, while training continues. Returns a description of the files, as JSON.

        Raises:
            CheckpointError: the files cannot be written; the next checkpoint will be a full one.
            ShardRefused: there was no cut for this epoch.
        """
        with self._lock:
            if self._snapshot is None or self._snapshot[0] != epoch:
                raise ShardRefused(f"shard {self.index} has not been cut for epoch {epoch}")
            (_, snapshot), self._snapshot, self._writing = self._snapshot, None, epoch
            self._end_overdue()
        try:
            part = snapshot.write(epoch)
        except Exception:
            self.count("checkpoint_failures")
            raise
        finally:
            self._writing = None
        self.shard.check_not_fenced()  # one that has been taken over from may not be part of a checkpoint
        self.epoch = epoch
        return part

    def publish(self, number: int, layout: str, generation: int = 0) -> str:
        """Writes the shard's part of a publication; see `Publisher.write`.

        Args:
            number: of the publication.
            layout: of a full one.
            generation: of the caller's lease; 0: none.

        Raises:
            ShardRefused: the node publishes nowhere.
            TakenOver: another cluster publishes; if it continues the same run, the shard is not trained any more.
            PublicationError: it cannot be written.
        """
        self._of_publisher()
        self.lease_generation = max(self.lease_generation, generation)
        try:
            self.check_lease()
            part = self._of_publisher().write(self.shard, number, layout)
            self.shard.check_not_fenced()  # as for checkpoints
            self.published = number
            return part
        except Exception:
            self.count("publication_failures")
            raise

    def check_lease(self) -> None:
        """Whether its cluster still has the lease under which it has published.

        Raises:
            TakenOver: see `publish`.
            OriginUnavailable: Redis does not answer.
        """
        if self._publisher is None or not self.ready:
            return
        try:
            self._publisher.check(self.shard, self.lease_generation)
        except TakenOver as exc:
            if exc.same_run and self.shard.fence(str(exc)):
                logger.error("shard %d stops learning: %s", self.index, exc)
            raise

    def apply(self) -> None:
        """What was published is committed; raises the errors of `publish`."""
        self._of_publisher().apply(self.shard)

    def sums(self, number: int, layout: str) -> Any:
        """Checksums of the rows that a publication has; see `Publisher.sums`. Raises the errors of `publish`."""
        return self._of_publisher().sums(self.shard, number, layout)

    def _of_publisher(self) -> Publisher:
        if self._publisher is None:
            raise ShardRefused(f"shard {self.index} does not publish; set publish.url")
        return self._publisher
