"""BackupShard: a shard as its backup has it, until it takes over."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import streamtrain.ps.rpc.ps_pb2 as pb
from streamtrain.errors import ShardRefused, ShardUnavailable
from streamtrain.ps.clock import PushOutcome
from streamtrain.ps.replication.roles import NodeRole
from streamtrain.ps.replication.state_transfer import Generation, load_rows, push_of, shard_of
from streamtrain.ps.rpc import wire
from streamtrain.ps.shard import Shard

logger = logging.getLogger(__name__)


class BackupShard:
    """Takes what a primary sends, and takes over from it. Thread-safe.

    Args:
        role: of the node, which becomes primary.
        silence: seconds without a word after which a primary that has not ended its stream counts as away.
        promoted: called once the node has become primary.
    """

    def __init__(self, role: NodeRole, silence: float, promoted: Callable[[], object] = lambda: None) -> None:
        self._role = role
        self._silence = silence
        self._promoted = promoted
        self._lock = threading.Lock()  # what is applied, and who may take over
        self._stream: Any = None  # context of the primary's
        self._shard: Shard | None = None
        self._generation = Generation(0, 0)
        self._heard = 0.0
        self.in_step = False

    def release(self, shard: int, shards: int, generation: Generation) -> bool:
        """Gives up the claim to take over, before another copy; True: that is too late, a backup has taken over.

        Raises:
            ShardRefused: the one that asks has another shard.
            ShardUnavailable: this node is primary and is not to be: it ends.
        """
        if (shard, shards) != (self._role.index, self._role.shards):
            raise ShardRefused(
                f"this is shard {self._role.index} of {self._role.shards}, not {shard} of {shards}", "mismatch"
            )
        with self._lock:
            if self._role.ready:
                if self._role.generation > generation:
                    return True
                self._role.retire("the other process of it has taken over")
                raise ShardUnavailable(f"both processes of shard {shard} were primary; this one ends")
            if generation.begun == self._generation.begun and generation.term < self._generation.term:
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
            self._shard = shard_of(record.copy, bulk, self._role.index, self._role.shards)
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
            if self._stream is not None and time.monotonic() - self._heard < self._silence:
                raise ShardUnavailable(f"the primary of shard {self._role.index} is still connected to its backup")
            self._drop_stream()
            shard, self._shard, self.in_step = self._shard, None, False
            generation = self._generation._replace(term=self._generation.term + 1)
            self._role.take_over(shard, generation)
        logger.warning("the backup of shard %d has taken over at clock %s", self._role.index, shard.clock())
        self._promoted()
