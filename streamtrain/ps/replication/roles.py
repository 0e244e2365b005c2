"""Roles: what the node of a shard is, empty, primary, backup or retired, and how it comes to be."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import streamtrain.ps.rpc.ps_pb2 as pb
from streamtrain.errors import ShardError, ShardRefused, ShardUnavailable
from streamtrain.model.spec import shard_slice
from streamtrain.ps.consistency import Consistency
from streamtrain.ps.replication.primary import Peer, Place, Replication
from streamtrain.ps.replication.state_transfer import Generation
from streamtrain.ps.row_memory import RowMemory
from streamtrain.ps.rpc.control import RemoteControl, is_gone
from streamtrain.ps.shard import InitialState, Shard

logger = logging.getLogger(__name__)

_TRIES = 4


@dataclass(frozen=True)
class Pairing:
    """The other process of a shard with a backup.

    Attributes:
        peer: where it is.
        patience: seconds that it may take to answer.
        own: address of this process, as others know it.
        pause: seconds between two attempts to reach it while it is away.
        promoted: called when this node has taken over from it.
        retired: called with the reason once it has taken over from this node, whose process is to end; started again,
            that is the backup.
    """

    peer: Peer
    patience: float
    own: str = ""
    pause: float = 1.0
    promoted: Callable[[], object] = lambda: None
    retired: Callable[[str], object] = logger.error

    def is_peer_primary(self) -> bool:
        """Whether the peer is primary; a backup in step is promoted, so that it is from now on."""
        control, never = RemoteControl(*self.peer, self.patience), threading.Event()
        for left in reversed(range(_TRIES)):
            try:
                status: Any = control.status()
                if status.standing.in_step and not status.ready:
                    status = control.promote()
                return bool(status.ready)
            except ShardUnavailable as exc:
                trouble: ShardError = exc
                if is_gone(exc.__cause__):
                    break
            if left:
                never.wait(self.patience / _TRIES)
        logger.info("%s is not primary: %s", self.peer.target, trouble)
        return False

    def is_peer_waiting(self) -> bool:
        """Whether the peer is a backup that has nothing: it waits for this one."""
        try:
            status: Any = RemoteControl(*self.peer, self.patience).status()
        except ShardError:
            return False
        return status.standing.role == pb.BACKUP and not status.standing.in_step


class NodeState(Enum):
    """State of a node.

    | state | holds a shard | entered from, by |
    |---|---|---|
    | EMPTY | no | the beginning, without a pairing; BACKUP, SPARE by `restored`, without a checkpoint |
    | BACKUP | no: `BackupShard` has it | the beginning, with a pairing; EMPTY by `follow`; EMPTY, SPARE by `pair` |
    | PRIMARY | yes | EMPTY, BACKUP, SPARE by `restored`; EMPTY by `initialise`; BACKUP by `take_over` |
    | RETIRED | no more | PRIMARY by `retire`: the other process of the shard has taken over |
    | SPARE | no: it has no place | the beginning, without a place; EMPTY, BACKUP, PRIMARY by `vacate` |
    """

    EMPTY = "empty"
    BACKUP = "backup"
    PRIMARY = "primary"
    RETIRED = "retired"
    SPARE = "spare"


class NodeRole:
    """The state machine of a node; see NodeState. Thread-safe.

    Args:
        consistency: makes the strategy of a shard.
        pairing: with the other process of the shard; None: it has no backup.
        count: called with the names of events.
        memory: what the rows of its shards may take; None: all that they need.

    Attributes:
        index: of its shard.
        shards: how many there are; 0: it has no place among them.
        map_epoch: of the map of shards in which it has its place; 0: it has it by its settings.
        pairing: with the other process of its shard; None: it has no backup.
        generation: of the shard that it holds.
        replication: of that shard to the backup; None: there is no backup, or nothing to replicate yet.
    """

    def __init__(
        self,
        index: int,
        shards: int,
        consistency: Callable[[Shard], Consistency],
        pairing: Pairing | None,
        count: Callable[[str], object],
        *,
        memory: RowMemory | None = None,
    ) -> None:
        self.index, self.shards, self.map_epoch, self.pairing = index, shards, 0, pairing
        self.memory = memory
        self.state = NodeState.BACKUP if pairing else NodeState.EMPTY if shards else NodeState.SPARE
        self.generation = Generation(0, 0)
        self.replication: Replication | None = None
        self._make_consistency, self._count = consistency, count
        self._lock = threading.Lock()
        self._held: tuple[Shard, Consistency] | None = None
        self._why_retired = ""

    @property
    def ready(self) -> bool:
        return self._held is not None

    def held(self) -> tuple[Shard, Consistency]:
        """The shard and its strategy.

        Raises:
            ShardUnavailable: the node is not primary.
        """
        if (held := self._held) is not None:
            return held
        if self.state is NodeState.RETIRED:
            raise ShardUnavailable(f"shard {self.index} has moved: {self._why_retired}")
        if self.state is NodeState.BACKUP:
            raise ShardUnavailable(f"this is the backup of shard {self.index}")
        if self.state is NodeState.SPARE:
            raise ShardUnavailable("this shard has no place yet: it waits for `streamtrain scale`")
        raise ShardUnavailable(f"shard {self.index} is empty: it found no checkpoint and waits to be initialised")

    def restored(self, shard: Shard | None) -> None:
        """EMPTY, BACKUP or SPARE to PRIMARY with a shard from a checkpoint. None: there is none, and they are EMPTY.

        Raises:
            ShardUnavailable: there is a shard already, or the node is retired.
        """
        with self._lock:
            if shard is not None:
                self._check(NodeState.EMPTY, NodeState.BACKUP, NodeState.SPARE)
                self._lead(shard, Generation(time.time_ns(), 1))
            elif self.state in (NodeState.BACKUP, NodeState.SPARE):
                self.state = NodeState.EMPTY

    def initialise(self, initial: InitialState) -> Shard:
        """EMPTY to PRIMARY. A primary stays as it is, but takes over the topic of the same run; compare its `run`.

        Raises:
            ShardRefused: the slices do not have the sizes that the spec says.
            ShardUnavailable: the node is a backup, retired, or has no place.
        """
        if self.state is NodeState.SPARE:
            self.held()
        spec = initial.spec
        for what, slice_, size in (
            ("dense", initial.dense, spec.dense_size),
            ("statistics", initial.statistics, spec.statistics_size),
        ):
            mine = shard_slice(size, self.index, self.shards)
            if len(slice_) != (expected := mine.stop - mine.start):
                raise ShardRefused(f"the {what} slice of shard {self.index} has {len(slice_)} floats, not {expected}")
        with self._lock:
            if self.state is NodeState.EMPTY:
                shard = Shard(initial, self.index, self.shards, memory=self.memory)
                self._lead(shard, Generation(time.time_ns(), 1))
                logger.info("shard %d of %d starts run %s", self.index, self.shards, initial.run.id)
            shard, run = self.held()[0], initial.run
            if shard.run.id == run.id and run.topic not in {"", shard.run.topic}:
                shard.adopt(run.topic)
                logger.info("shard %d of %d has the clock of topic %s", self.index, self.shards, run.topic)
            return shard

    def follow(self) -> None:
        """EMPTY to BACKUP, with a copy that is in step; a backup stays one.

        Raises:
            ShardUnavailable: the node is primary, or retired.
        """
        with self._lock:
            self._check(NodeState.EMPTY, NodeState.BACKUP)
            self.state = NodeState.BACKUP

    def take_over(self, shard: Shard, generation: Generation) -> None:
        """BACKUP to PRIMARY with the shard that it has followed; raises ShardUnavailable in other states."""
        with self._lock:
            self._check(NodeState.BACKUP)
            self._lead(shard, generation)
        self._count("backup_took_over")

    def retire(self, why: str) -> None:
        """PRIMARY to RETIRED: it answers nothing about its shard any more. No effect in other states."""
        with self._lock:
            held, self._held = self._held, None
            if held is None:
                return
            self.state, self._why_retired = NodeState.RETIRED, why
        held[0].retire(why)
        if self.replication is not None:
            self.replication.retire()
        if self.pairing is not None:
            self.pairing.retired(why)

    def vacate(self, index: int, shards: int, map_epoch: int, pairing: Pairing | None = None) -> None:
        """To SPARE, of all states but RETIRED: what it held is refused from now on. `restored` gives it the new place.

        Args:
            index: of the shard that it is to hold next.
            shards: how many there are then; 0: it is to hold none.
            map_epoch: of the map that says so.
            pairing: with the other process of that shard.

        Raises:
            ShardUnavailable: it is retired.
        """
        with self._lock:
            self._move(index, shards, map_epoch, pairing)
            held, self._held = self._held, None
            replication, self.replication = self.replication, None
            self.state = NodeState.SPARE
        if held is not None:
            held[0].retire("its process has another place in the map of shards")
        if replication is not None:
            replication.retire()

    def pair(self, index: int, shards: int, map_epoch: int, pairing: Pairing) -> None:
        """EMPTY, BACKUP or SPARE to BACKUP of another shard.

        Raises:
            ShardUnavailable: it is primary, or retired.
        """
        with self._lock:
            self._check(NodeState.EMPTY, NodeState.BACKUP, NodeState.SPARE)
            self._move(index, shards, map_epoch, pairing)
            self.state = NodeState.BACKUP
        logger.info("this is the backup of shard %d of %d by map %d", index, shards, map_epoch)

    def confirm(self, map_epoch: int) -> None:
        """It has the same place by a later map."""
        with self._lock:
            self.map_epoch = map_epoch
            if self.replication is not None:
                self.replication.place = self.replication.place._replace(map_epoch=map_epoch)

    def _move(self, index: int, shards: int, map_epoch: int, pairing: Pairing | None) -> None:
        if self.state is NodeState.RETIRED:
            self.held()
        self.index, self.shards, self.map_epoch, self.pairing = index, shards, map_epoch, pairing

    def _check(self, *states: NodeState) -> None:
        if self.state not in states:
            self.held()
            raise ShardUnavailable(f"shard {self.index} is primary here")

    def _lead(self, shard: Shard, generation: Generation) -> None:
        if self.pairing is not None:
            place = Place(generation, self.map_epoch, self.pairing.own)
            peer, patience, pause = self.pairing.peer, self.pairing.patience, self.pairing.pause
            self.replication = shard.replicator = Replication(
                shard, place, peer, patience, pause=pause, retire=self.retire, count=self._count
            )
            self.replication.start()
        self.generation, self._held = generation, (shard, self._make_consistency(shard))
        self.state = NodeState.PRIMARY
