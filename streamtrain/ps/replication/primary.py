"""Replication: a primary has its backup apply what it applies, and acknowledges nothing that the backup lacks."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, NamedTuple

import grpc

import streamtrain.ps.rpc.ps_pb2 as pb
from streamtrain._core import Rows
from streamtrain.errors import ShardUnavailable
from streamtrain.periodic import FailureLog
from streamtrain.ps.push import Push
from streamtrain.ps.replication.state_transfer import Change, Generation, change_record, copy_of, rows_of
from streamtrain.ps.rpc import wire
from streamtrain.ps.rpc.control import Metadata, is_gone, translated
from streamtrain.ps.shard import Removal, Shard

logger = logging.getLogger(__name__)

_BEATS = 8  # in the patience, so that silence means something
_SILENT = 2  # calls in a row: a pause of this process spoils one
_ROWS = 1 << 12  # read while pushes wait
_BEHIND = 32  # records that may be under way while the backup is not in step
_SOON = 0.05  # seconds between two calls of which the first had no answer
_BEAT = wire.frame(pb.Record(), [])


class State(Enum):
    """How the backup is.

    Attributes:
        ASKING: it is being asked whether it has taken over; nothing is acknowledged.
        AWAY: it has no claim, or does not answer.
        COPYING: it is sent everything, and has no claim until it learns that this was all.
        IN_STEP: it has all that is acknowledged.
        RETIRED: it has taken over, or this process ends.
    """

    ASKING = "asking"
    AWAY = "away"
    COPYING = "copying"
    IN_STEP = "in step"
    RETIRED = "retired"


class Peer(NamedTuple):
    """Where a backup is.

    Attributes:
        channel: to its server.
        target: its address, for messages.
        metadata: sent with every call.
    """

    channel: grpc.Channel
    target: str
    metadata: Metadata = ()


class Place(NamedTuple):
    """What a primary says of itself.

    Attributes:
        generation: of its shard.
        map_epoch: of the map of shards in which it has its place; 0: it has it by its settings.
        address: its own.
    """

    generation: Generation
    map_epoch: int = 0
    address: str = ""


class Replication:
    """See `Replicator`. docs/design.md says why it is done this way.

    Args:
        shard: what is replicated.
        place: of the primary; kept as the attribute `place`, which may be replaced.
        backup: where it is.
        patience: seconds that an answer may take before the backup is asked whether it still follows.
        retire: called with the reason when it has taken over.
        pause: seconds between two attempts while the backup is away.
        count: called with "backup_lost" each time that the primary continues alone after they were in sync.
    """

    def __init__(
        self,
        shard: Shard,
        place: Place,
        backup: Peer,
        patience: float,
        *,
        retire: Callable[[str], object],
        pause: float = 1.0,
        count: Callable[[str], object] = lambda name: None,
    ) -> None:
        self._shard, self.place = shard, place
        channel, self._target, self._metadata = backup
        self._patience, self._pause = patience, pause
        self._retire, self._count = retire, count
        self._release = channel.unary_unary(
            f"/{wire.SERVICE}/Release",
            lambda request: request.SerializeToString(),
            pb.Released.FromString,
        )
        self._follow = channel.stream_stream(f"/{wire.SERVICE}/Follow", response_deserializer=pb.Recorded.FromString)
        self._changed = threading.Condition()
        self._queue: deque[tuple[int, Change]] | None = None  # of the stream that is connected
        self._recorded = self._applied = 0  # numbers of the last record, and of the last that the backup has applied
        self._in_step_from: int | None = None  # number of the record that says so
        self._call: Any = None
        self._topic = ""  # as the backup knows it
        self._rates: dict[str, float] = {}  # as the backup knows those that were set
        self._heard = 0.0
        self._failures = FailureLog()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replication", daemon=True)
        # Whoever has taken over has done so from the other, which so has no claim.
        self.state = State.ASKING if place.generation.term == 1 else State.AWAY

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends. Pushes that wait raise ShardUnavailable."""
        self.retire()
        self._thread.join()

    def retire(self) -> None:
        self._stop.set()
        with self._changed:
            self._become(State.RETIRED)
            if self._call is not None:
                self._call.cancel()

    def record(self, change: Push | Removal) -> None:
        with self._changed:
            self._put(change)

    def _put(self, change: Change) -> None:
        if self._queue is not None:
            self._recorded += 1
            self._queue.append((self._recorded, change))
            self._changed.notify_all()

    def wait_acked(self) -> None:
        with self._changed:
            number, began = self._recorded, time.monotonic()
            while not self._is_settled(number):
                if time.monotonic() - max(began, self._heard) > self._patience:
                    if self.state is State.COPYING and self._in_step_from is None:
                        return  # it has no claim, and is slow
                    self._doubt()
                self._changed.wait(self._patience / _BEATS)

    def check_not_fenced(self) -> None:
        with self._changed:
            self._put(None)
        self.wait_acked()

    def _is_settled(self, number: int) -> bool:
        if self.state is State.RETIRED:
            raise ShardUnavailable(f"shard {self._shard.index} is shutting down, or its backup has taken over")
        if self.state is State.COPYING and self._in_step_from is None:
            return self._recorded - self._applied <= _BEHIND
        # Also while copying: a backup that has been told that it is in step may take over before that is heard of here.
        may_take_over = self.state in (State.COPYING, State.IN_STEP)
        return self.state is State.AWAY or (may_take_over and self._applied >= number)

    def _doubt(self) -> None:
        """The backup has not answered for too long: has the stream end, upon which it is asked."""
        if self.state in (State.COPYING, State.IN_STEP):
            self._become(State.ASKING)
            self._call.cancel()

    def _become(self, state: State) -> None:
        if self.state is not State.RETIRED:
            self.state = state
        self._changed.notify_all()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                if not self._ask():
                    return
                self._stream()
            except Exception as exc:  # whatever it is: nothing would be acknowledged any more
                self._ended(exc)
            if self.state is State.AWAY:
                self._stop.wait(self._pause)

    def _ask(self) -> bool:
        """Has the backup give up its claim, for a new copy; False: it has taken over.

        Raises:
            grpc.RpcError: it does not answer. The primary continues alone.
        """
        generation, map_epoch, address = self.place
        request = pb.ReleaseRequest(
            shard=self._shard.index,
            shards=self._shard.shards,
            line=generation.message(),
            map_epoch=map_epoch,
            run=self._shard.run.id,
            primary=address,
        )
        for left in reversed(range(_SILENT)):
            try:
                answer = self._release(request, timeout=self._patience, metadata=self._metadata)
                break
            except grpc.RpcError as exc:
                if self._stop.is_set() or is_gone(exc) or not left:
                    raise
                self._stop.wait(_SOON)
        if answer.taken_over:
            with self._changed:
                self._become(State.RETIRED)
            self._retire(f"its backup at {self._target} has taken over")
        return not answer.taken_over

    def _stream(self) -> None:
        """Sends the copy, and what is applied from there on, until the stream breaks."""
        with self._changed:
            self._call = self._follow(self._records(), metadata=self._metadata)
            self._applied, self._heard = self._recorded, time.monotonic()
            self._become(State.COPYING)
        for answer in self._call:
            with self._changed:
                self._heard = time.monotonic()
                self._applied = max(self._applied, answer.number)
                if self.state is State.COPYING and answer.number and answer.number == self._in_step_from:
                    self._become(State.IN_STEP)
                    self._failures.end()
                    logger.info("the backup of shard %d at %s is in step", self._shard.index, self._target)
                self._changed.notify_all()
        raise ShardUnavailable(f"{self._target} ended the stream")

    def _ended(self, exc: Exception) -> None:
        """A stream has ended, upon which the backup is asked; or asking has failed, upon which there is none."""
        reason = str(translated(exc, self._target) if isinstance(exc, grpc.RpcError) else exc)
        with self._changed:
            had_claim, self._in_step_from = self._in_step_from is not None, None
            self._queue = None
            if self._call is not None:
                self._call.cancel()
            self._call = None
            self._become(State.ASKING if had_claim else State.AWAY)
        if self._stop.is_set():
            return
        if had_claim:
            self._count("backup_lost")
            logger.warning(
                "shard %d has lost its backup, asking whether it has taken over: %s", self._shard.index, reason
            )
        elif line := self._failures.line(reason):
            logger.warning("shard %d continues without a backup: %s", self._shard.index, line)

    def _records(self) -> Iterator[bytes]:
        """What the backup is sent; read by a thread of gRPC, which drops it when the stream ends."""
        queue: deque[tuple[int, Change]] = deque()
        with self._shard.paused():
            with self._changed:
                if self.state is not State.COPYING or self._queue is not None:  # the stream has ended already
                    return
                self._queue = queue
            self._topic, self._rates, moved = self._shard.run.topic, self._shard.spec.rates, self._shard.moved
            copy = copy_of(self._shard, self.place.generation)
        yield copy
        self._shard.sweep()  # which gives rows other ids
        for t, table in enumerate(self._shard.tables):
            scan = table.rows(_ROWS)
            rows: Rows | None = None
            while True:
                # What is read follows on exactly the pushes that were recorded before.
                with self._shard.paused(), self._shard.reading():
                    before = self._taken(queue)
                    rows = next(scan, None)
                yield from (change_record(*one) for one in before)
                if rows is None:
                    break
                yield rows_of(t, rows)
        with self._shard.paused():
            if self._shard.moved != moved:
                raise ShardUnavailable("rows have moved while they were copied, which begins anew")
        with self._changed:
            before = self._taken(queue)
            self._recorded += 1
            number = self._recorded
            if self._queue is queue:
                self._in_step_from = number
        yield from (change_record(*one) for one in before)
        yield wire.frame(pb.Record(number=number, in_step=True), [])
        while True:
            yield from self._next(queue)

    def _next(self, queue: deque[tuple[int, Change]]) -> list[bytes]:
        """What was recorded; or that the primary is alive, once it has been silent for a while."""
        with self._changed:
            if not queue:
                self._changed.wait(self._patience / _BEATS)
            if time.monotonic() - self._heard > self._patience and self._queue is queue:
                self._doubt()
            before = self._taken(queue)
        adopted = []
        if self._topic != (topic := self._shard.run.topic):  # since the copy; what is recorded later comes after it
            self._topic = topic
            adopted = [wire.frame(pb.Record(topic=topic), [])]
        if self._rates != (rates := self._shard.spec.rates):
            self._rates = rates
            adopted.append(wire.frame(pb.Record(rates=pb.SetRatesRequest(rates=rates)), []))
        return [*adopted, *(change_record(*one) for one in before)] or [_BEAT]

    def _taken(self, queue: deque[tuple[int, Change]]) -> list[tuple[int, Change]]:
        with self._changed:
            taken = [*queue]
            queue.clear()
            return taken
