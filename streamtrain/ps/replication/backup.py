"""BackupShard: a shard as its backup has it, until it takes over."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import streamtrain.ps.rpc.ps_pb2 as pb
from streamtrain.errors import ShardRefused, ShardUnavailable
from streamtrain.ps.clock import PushOutcome
from streamtrain.ps.replication.roles import NodeRole, Pairing
from streamtrain.ps.replication.state_transfer import Generation, load_rows, push_of, shard_of
from streamtrain.ps.rpc import wire
from streamtrain.ps.shard import Shard

logger = logging.getLogger(__name__)


class Asking(NamedTuple):
    """Who asks a backup to give up its claim.

    Attributes:
        shard: that it has.
        shards: how many there are.
        generation: of its shard.
        map_epoch: of the map of shards in which it has that place; 0: it has it by its settings.
        run: of its shard.
        primary: its address.
    """

    shard: int
    shards: int
    generation: Generation
    map_epoch: int = 0
    run: str = ""
    primary: str = ""


class BackupShard:
    """Takes what a primary sends, and takes over from it. Thread-safe.

    Args:
        role: of the node, which becomes primary.
        pair: makes the pairing of a node with a process by its address; None: the node keeps the one that it has.
        vacated: called once the node has let go of its place, to be the backup of another shard.
    """

    def __init__(
        self,
        role: NodeRole,
        pair: Callable[[str], Pairing] | None = None,
        vacated: Callable[[], object] = lambda: None,
    ) -> None:
        self._role, self._pair, self._vacated = role, pair, vacated
        self._lock = threading.Lock()  # what is applied, and who may take over
        self._stream: Any = None  # context of the primary's
        self._shard: Shard | None = None
        self._generation = Generation(0, 0)
        self._heard = 0.0
        self.in_step = False

    @property
    def has_primary(self) -> bool:
        """Whether a primary sends it records, or it may take over from one."""
        return self._stream is not None or self.in_step

    def release(self, asking: Asking) -> bool:
        """Gives up the claim to take over, before another copy; True: that is too late, a backup has taken over.

        Who asks by a later map of shards than the node's gives it another place: that of its backup.

        Raises:
            ShardRefused: the one that asks has another shard, by no later map, or is of another run.
            ShardUnavailable: this node is primary and is not to be: it ends.
        """
        with self._lock:
            role, generation = self._role, asking.generation
            if (asking.shard, asking.shards) != (role.index, role.shards) or role.pairing is None:
                self._move(asking)
            elif role.ready:
                if role.generation > generation:
                    return True
                role.retire("the other process of it has taken over")
                raise ShardUnavailable(f"both processes of shard {asking.shard} were primary; this one ends")
            elif generation.begun == self._generation.begun and generation.term < self._generation.term:
                return True  # by the one that this node follows
            self._give_up()
            return False

    def _move(self, asking: Asking) -> None:
        role = self._role
        mine, theirs = f"shard {role.index} of {role.shards}", f"{asking.shard} of {asking.shards}"
        if asking.map_epoch <= role.map_epoch or self._pair is None:
            raise ShardRefused(f"this is {mine}, not {theirs}", "mismatch")
        held = role.held()[0] if role.ready else self._shard
        if held is not None and held.run.id != asking.run:
            raise ShardRefused(f"this is {mine} of run {held.run.id}, not {theirs} of run {asking.run}", "mismatch")
        place = asking.shard, asking.shards, asking.map_epoch, self._pair(asking.primary)
        role.vacate(*place)  # it may have taken over where the other was, as that went
        role.pair(*place)
        self._vacated()

    def vacate(self, index: int, shards: int, map_epoch: int, pairing: Pairing | None) -> None:
        """Lets go of the copy, if there is one, and see `NodeRole.vacate`."""
        with self._lock:
            self._give_up()
            self._shard = None
            self._role.vacate(index, shards, map_epoch, pairing)

    def _give_up(self) -> None:
        self.in_step = False
        self._drop_stream()

    def follow(self, records: Iterable[bytes], context: Any) -> Iterator[bytes]:
        """Applies what a primary sends, until it takes over or the stream ends; tells what it has applied.

        Raises:
            ShardUnavailable: this node is primary, or follows another stream.
            ShardRefused: a record is damaged, or does not follow on those before.
        """
        with self._lock:
            if self._role.ready:
                raise ShardUnavailable(f"shard {self._role.index} is primary here")
            self._drop_stream()
            self._stream, self._heard, self.in_step = context, time.monotonic(), False
        try:
            for data in records:
                record, bulk = wire.unframe(pb.Record, data)
                with self._lock:
                    if self._stream is not context:
                        raise ShardUnavailable(f"shard {self._role.index} no longer follows this stream")
                    self._heard = time.monotonic()
                    try:
                        self._apply(record, bulk)
                    except ValueError as exc:
                        raise ShardRefused(f"a record of the primary is damaged: {exc}") from exc
                yield pb.Recorded(number=record.number).SerializeToString()
        finally:
            with self._lock:
                if self._stream is context:
                    self._stream = None

    def _drop_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cancel()

    def _apply(self, record: Any, bulk: memoryview) -> None:
        if record.HasField("copy"):
            self._shard = None  # before there is another: there may not be memory for two
            role = self._role
            self._shard = shard_of(record.copy, bulk, role.index, role.shards, role.memory)
            self._generation = Generation.of(record.copy.line)
            return
        if self._shard is None:
            raise ShardRefused("a stream of records begins with a copy")
        if record.HasField("rows"):
            load_rows(self._shard, record.rows, bulk)
        elif record.HasField("push"):
            outcome = self._shard.push(push_of(record.push, bulk, self._shard)).outcome
            if outcome is not PushOutcome.APPLIED:
                self.in_step = False
                raise ShardRefused(f"a push of the primary is {outcome.name} here, at {self._shard.clock()}")
        elif record.HasField("rates"):
            self._shard.set_rates(dict(record.rates.rates))
        elif record.HasField("removed"):
            self._shard.remove(record.removed.table, wire.decode_keys(record.removed.keys))
        elif record.topic:
            self._shard.adopt(record.topic)
        elif record.in_step:
            self._role.follow()
            self.in_step = True
            logger.info("shard %d is in step with its primary, clock %s", self._role.index, self._shard.clock())

    def promote(self) -> None:
        """Has the node take over, if it is not primary already.

        Raises:
            ShardUnavailable: it lacks something, or the primary is up.
        """
        with self._lock:
            if self._role.ready:
                return
            if not self.in_step or self._shard is None:
                raise ShardUnavailable(f"the backup of shard {self._role.index} is not in step")
            if self._stream is not None and time.monotonic() - self._heard < self._silence():
                raise ShardUnavailable(f"the primary of shard {self._role.index} is still connected to its backup")
            self._drop_stream()
            shard, self._shard, self.in_step = self._shard, None, False
            generation = self._generation._replace(term=self._generation.term + 1)
            self._role.take_over(shard, generation)
        logger.warning("the backup of shard %d has taken over at clock %s", self._role.index, shard.clock())
        if self._role.pairing is not None:
            self._role.pairing.promoted()

    def _silence(self) -> float:
        """Seconds without a word after which a primary that has not ended its stream counts as away."""
        return self._role.pairing.patience / 2 if self._role.pairing else 0.0
