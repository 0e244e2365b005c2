"""Follower: a shard as its backup has it, until it takes over."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import streamtrain.ps.ps_pb2 as pb
from streamtrain.errors import ShardRefused, ShardUnavailable
from streamtrain.ps import wire
from streamtrain.ps.clock import Outcome
from streamtrain.ps.copying import Line, load_rows, push_of, shard_of
from streamtrain.ps.shard import Shard

logger = logging.getLogger(__name__)


class Held(Protocol):
    """The node of this process, as far as it matters here."""

    index: int
    shards: int
    line: Line

    @property
    def ready(self) -> bool:
        """Whether it is primary, and holds a shard."""

    def take(self, shard: Shard, line: Line) -> None:
        """From now on it is primary, with this shard."""

    def retire(self, why: str) -> None:
        """From now on it is not primary any more."""


class Follower:
    """Takes what a primary sends, and takes over from it. Thread-safe.

    Args:
        node: what becomes primary.
        silence: seconds without a word after which a primary that has not ended its stream counts as away.
        promoted: called once the node has become primary.
    """

    def __init__(self, node: Held, silence: float, promoted: Callable[[], object] = lambda: None) -> None:
        self._node = node
        self._silence = silence
        self._promoted = promoted
        self._lock = threading.Lock()  # what is applied, and who may take over
        self._stream: Any = None  # context of the primary's
        self._shard: Shard | None = None
        self._line = Line(0, 0)
        self._heard = 0.0
        self.in_step = False

    def release(self, shard: int, shards: int, line: Line) -> bool:
        """Gives up the claim to take over, before another copy; True: that is too late, a backup has taken over.

        Raises:
            ShardRefused: the one that asks has another shard.
            ShardUnavailable: this node is primary and is not to be: it ends.
        """
        if (shard, shards) != (self._node.index, self._node.shards):
            raise ShardRefused(
                f"this is shard {self._node.index} of {self._node.shards}, not {shard} of {shards}", "mismatch"
            )
        with self._lock:
            if self._node.ready:
                if self._node.line > line:
                    return True
                self._node.retire("another process of it has gone on")
                raise ShardUnavailable(f"shard {shard} is primary here too, by mistake, and ends")
            if line.begun == self._line.begun and line.term < self._line.term:
                return True  # by the one that this node follows
            self.in_step = False
            self._drop_stream()
            return False

    def follow(self, records: Iterable[bytes], context: Any) -> Iterator[bytes]:
        """Applies what a primary sends, until it takes over or the stream ends; tells what it has applied.

        Raises:
            ShardUnavailable: this node is primary, or follows another stream.
            ShardRefused: a record is damaged, or does not follow on those before.
        """
        with self._lock:
            if self._node.ready:
                raise ShardUnavailable(f"shard {self._node.index} is primary here")
            self._drop_stream()
            self._stream, self._heard, self.in_step = context, time.monotonic(), False
        try:
            for data in records:
                record, bulk = wire.unframe(pb.Record, data)
                with self._lock:
                    if self._stream is not context:
                        raise ShardUnavailable(f"shard {self._node.index} does not follow this stream any more")
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
            self._shard = shard_of(record.copy, bulk, self._node.index, self._node.shards)
            self._line = Line.of(record.copy.line)
            return
        if self._shard is None:
            raise ShardRefused("a stream of records begins with a copy")
        if record.HasField("rows"):
            load_rows(self._shard, record.rows, bulk)
        elif record.HasField("push"):
            outcome = self._shard.push(push_of(record.push, bulk, self._shard)).outcome
            if outcome is not Outcome.APPLIED:
                self.in_step = False
                raise ShardRefused(f"a push of the primary is {outcome.name} here, at {self._shard.clock()}")
        elif record.in_step:
            self.in_step = True
            logger.info("shard %d is in step with its primary, clock %s", self._node.index, self._shard.clock())

    def promote(self) -> None:
        """Has the node take over, if it is not primary already.

        Raises:
            ShardUnavailable: it lacks something, or the primary is there.
        """
        with self._lock:
            if self._node.ready:
                return
            if not self.in_step or self._shard is None:
                raise ShardUnavailable(f"the backup of shard {self._node.index} is not in step")
            if self._stream is not None and time.monotonic() - self._heard < self._silence:
                raise ShardUnavailable(f"the backup of shard {self._node.index} hears from its primary")
            self._drop_stream()
            shard, self._shard, self.in_step = self._shard, None, False
            line = self._line._replace(term=self._line.term + 1)
            self._node.take(shard, line)
        logger.warning("the backup of shard %d has taken over at clock %s", self._node.index, shard.clock())
        self._promoted()


class _Node(Protocol):
    index: int
    follower: Follower | None


def follower_of(node: _Node) -> Follower:
    """What a node follows with.

    Raises:
        ShardRefused: its shard has no backup.
    """
    if node.follower is None:
        raise ShardRefused(f"shard {node.index} has no backup; set ps.backups for all processes", "mismatch")
    return node.follower
