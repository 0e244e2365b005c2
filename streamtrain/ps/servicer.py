"""Servicer: what a server does with requests (schemas/ps.proto)."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

import streamtrain.ps.ps_pb2 as pb
from streamtrain._core import shards_of
from streamtrain.errors import ShardRefused
from streamtrain.model.spec import Spec
from streamtrain.ps import wire
from streamtrain.ps.answering import answering, request_of
from streamtrain.ps.consistency import Consistency
from streamtrain.ps.copying import Line
from streamtrain.ps.follower import follower_of
from streamtrain.ps.lane import take
from streamtrain.ps.leader import leader_of
from streamtrain.ps.node import Node
from streamtrain.ps.push import Floats, Pushed
from streamtrain.ps.sessions import Limits, OpenSession, Sessions
from streamtrain.ps.shard import Initial, Run, Shard
from streamtrain.ps.status import status_of

_WAITING = wire.frame(pb.Answer(waiting=pb.Waiting()), [])


class Servicer:
    """The methods of the service.

    Args:
        node: what is served.
        limits: what is taken of clients.
        sessions: where they are known.
    """

    def __init__(self, node: Node, limits: Limits, sessions: Sessions) -> None:
        self._node = node
        self._limits = limits
        self._sessions = sessions

    def session(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Answers a worker's requests in their order."""
        with self._translated(context), self._sessions.open(context) as session:
            shard, consistency = self._node.shard, self._node.consistency
            try:
                for data in session.requests(requests, self._limits.message_bytes):
                    session.listening = False
                    lane = session.lane  # a join is answered where it came from
                    for answer in self._answers(data, session, shard, consistency):
                        session.listen()  # a client that does not read is as silent as one that says nothing
                        if lane is None:
                            yield answer
                        else:
                            session.answer(lane, answer)
                        session.listening = False
                    session.listen()
            finally:
                # A worker that has come again through another session is known by that one.
                if session.worker and self._sessions.workers().count(session.worker) == 1:
                    consistency.leave(session.worker)
                    if self._node.leader is not None:
                        self._node.leader.leave(session.worker)

    def _join(self, join: Any, session: OpenSession, shard: Shard, c: Consistency) -> bytes:
        for what, theirs, mine in (
            ("index", join.shard, shard.index),
            ("number of shards", join.shards, shard.shards),
            ("model", join.identity, shard.spec.identity),
            ("run", join.run, shard.run.id),
        ):
            if theirs != mine:
                raise ShardRefused(
                    f"shard {shard.index} has {what} {mine!r}, but the worker expects {theirs!r}", "mismatch"
                )
        if not join.worker:
            raise ShardRefused("join names no worker")
        session.dtype = wire.dtype_of(join.dtype)
        progress = c.join(join.worker, join.progress if join.HasField("progress") else None)
        session.worker = join.worker
        lane = take(join.lane, session.context.peer()) if join.HasField("lane") else None
        if lane is not None:
            session.use(lane)
        return wire.frame(pb.Answer(joined=pb.Joined(progress=progress, lane=lane is not None)), [])

    def _answers(self, data: bytes, session: OpenSession, shard: Shard, c: Consistency) -> Iterator[bytes]:
        if len(data) > self._limits.message_bytes:
            raise ShardRefused(f"the request has {len(data)} bytes; at most {self._limits.message_bytes}", "limit")
        request, bulk = wire.unframe(pb.Request, data)
        given = {field.name for field, _ in request.ListFields()} - {"padding", "bulk"}
        this = " and ".join(sorted(given)) or "nothing"
        if (given == {"join"}) == bool(session.worker):
            raise ShardRefused(f"a session begins with join, and has no other; this is {this}")
        if given == {"join"}:
            yield self._join(request.join, session, shard, c)
        elif given == {"park"}:
            c.park(session.worker)
            yield wire.frame(pb.Answer(parked=pb.Parked()), [])
        elif given == {"beat"}:
            c.beat(session.worker)
        elif given and given <= {"pull", "push"}:
            yield from self._exchange(request, bulk, session, shard, c)
        else:
            raise ShardRefused(f"a request is a push, a pull or both, or one other thing; this is {this}")

    def _exchange(
        self, request: Any, bulk: memoryview, session: OpenSession, shard: Shard, c: Consistency
    ) -> Iterator[bytes]:
        """Takes a push, then a pull."""
        self._check_count(sum(request.pull.rows) + sum(request.push.rows))
        sizes = wire.Sizes(shard.spec.dims, len(shard.dense), len(shard.statistics))
        push, pull = wire.decode_request(request, bulk, sizes, session.dtype)
        pushed: Pushed | None = None
        if pull is not None:
            _check_owner(pull.keys, shard)
        if push is not None:
            _check_owner([update.keys for update in push.updates], shard)
            pending = c.push(session.worker, push)
            while (pushed := pending.result(self._limits.waiting_seconds)) is None:
                yield _WAITING
        if pull is None:
            yield wire.encode_answer(pushed, None, session.dtype)
            return
        if not c.pull(session.worker, pull.ahead, 0.0):
            if pushed is not None:
                yield wire.encode_answer(pushed, None, session.dtype)
                pushed = None
            while not c.pull(session.worker, pull.ahead, self._limits.waiting_seconds):
                yield _WAITING
        yield wire.encode_answer(pushed, _pulled(shard, pull), session.dtype)

    def _check_count(self, keys: int) -> None:
        if keys > self._limits.keys:
            raise ShardRefused(f"the request has {keys} keys; at most {self._limits.keys} are taken at once", "limit")

    def asked(self, kind: Any, requests: Iterator[bytes], context: Any) -> Any:
        """The one request, a message of `kind`, of a call that is no session."""
        with self._translated(context), self._sessions.call(context):
            return request_of(kind, requests)

    def status(self, _: Any, context: Any) -> Any:
        """Tells how the shard is."""
        with self._translated(context):
            return status_of(self._node, self._sessions.workers())

    def initialise(self, request: Any, context: Any) -> Any:
        """Gives an empty shard what it begins with."""
        with self._translated(context):
            node = self._node
            if (request.shard, request.shards) != (node.index, node.shards):
                raise ShardRefused(
                    f"this is shard {node.index} of {node.shards}, not {request.shard} of {request.shards}", "mismatch"
                )
            run = Run(request.run, wire.clock_of(request.start))
            spec = Spec.from_json(request.spec)
            node.initialise(Initial(run, spec, _floats(request.dense), _floats(request.statistics)))
            return status_of(node, self._sessions.workers())

    def freeze(self, _: Any, context: Any) -> Any:
        """Begins a checkpoint."""
        with self._translated(context):
            frozen = self._node.freeze()
            return pb.FrozenAt(clock=wire.positions(frozen.clock), written=frozen.written)

    def cut(self, request: Any, context: Any) -> Any:
        """Marks the moment of a checkpoint."""
        with self._translated(context):
            at = self._node.cut(request.epoch, wire.clock_of(request.target), request.full)
            return pb.CutAt(clock=wire.positions(at.clock), reached=at.reached, pause_ms=at.pause_ms)

    def write(self, request: Any, context: Any) -> Any:
        """Writes the shard's part of a checkpoint."""
        with self._translated(context):
            return pb.Written(part=self._node.write(request.epoch))

    def publish(self, request: Any, context: Any) -> Any:
        """Writes the shard's part of a publication."""
        with self._translated(context):
            return pb.Published(part=self._node.publish(request.number, request.layout))

    def apply(self, _: Any, context: Any) -> Any:
        """What was published is committed."""
        with self._translated(context):
            self._node.apply()
            return pb.Applied()

    def report(self, request: Any, context: Any) -> Any:
        """Hears how good a worker's predictions are."""
        with self._translated(context):
            leader_of(self._node).report(request.worker, request.windows)
            return pb.Reported()

    def publish_now(self, request: Any, context: Any) -> Any:
        """Publishes what all shards have learned."""
        with self._translated(context):
            return pb.PublishedNow(publication=leader_of(self._node).publish_now(force=request.force))

    def inspect(self, request: Any, context: Any) -> Any:
        """Tells what is known of one row beside its values."""
        with self._translated(context):
            row = self._node.shard.inspect(request.table, request.key)
            return (
                pb.Inspected() if row is None else pb.Inspected(found=True, count=row.learned, last_seen=row.last_seen)
            )

    def verify(self, _: Any, context: Any) -> Any:
        """Compares what is published with what all shards have."""
        with self._translated(context):
            return pb.Verified(found=leader_of(self._node).verify())

    def sums(self, request: Any, context: Any) -> Any:
        """Checksums of what the shard has published."""
        with self._translated(context):
            return self._node.sums(request.number, request.layout)

    def read(self, request: Any, context: Any) -> Any:
        """Reads rows and slices for who is no worker."""
        with self._translated(context):
            self._check_count(sum(request.pull.rows))
            shard = self._node.shard
            sizes = wire.Sizes(shard.spec.dims, len(shard.dense), len(shard.statistics))
            push, pull = wire.decode_request(request, memoryview(request.bulk), sizes, "float32")
            if pull is None or push is not None:
                raise ShardRefused("what is read is a pull, and nothing else")
            floats = b"".join(one.astype("<f4", copy=False).tobytes() for one in _pulled(shard, pull))
            return pb.Answer(pulled=pb.Pulled(), bulk=floats)

    def release(self, request: Any, context: Any) -> Any:
        """Gives up the claim to take over."""
        with self._translated(context):
            line = Line.of(request.line)
            return pb.Released(taken_over=follower_of(self._node).release(request.shard, request.shards, line))

    def follow(self, records: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Applies what a primary sends."""
        with self._translated(context):
            yield from follower_of(self._node).follow(records, context)

    def promote(self, _: Any, context: Any) -> Any:
        """Takes over."""
        with self._translated(context):
            follower_of(self._node).promote()
            return status_of(self._node, self._sessions.workers())

    def _translated(self, context: Any) -> AbstractContextManager[None]:
        return answering(context, self._node.count)


def _pulled(shard: Shard, pull: wire.Pull) -> list[Floats]:
    """Rows by table, then the slices."""
    rows = [np.empty((len(k), table.dim), np.float32) for k, table in zip(pull.keys, shard.tables, strict=True)]
    dense, statistics = np.empty(len(shard.dense), np.float32), np.empty(len(shard.statistics), np.float32)
    shard.pull_rows(pull.keys, rows)
    shard.pull_dense(dense, statistics)
    return [*rows, dense, statistics]


def _check_owner(keys: Sequence[NDArray[np.uint64]], shard: Shard) -> None:
    if shard.shards == 1:
        return
    for settings, of_table in zip(shard.spec.tables, keys, strict=True):
        foreign = np.flatnonzero(shards_of(of_table, shard.shards) != shard.index)
        if len(foreign):
            raise ShardRefused(
                f"key {int(of_table[foreign[0]]):#x} of table {settings['name']!r} is not of shard {shard.index} of "
                f"{shard.shards} ({len(foreign)} such keys); do worker and shard agree on the number of shards?",
                "mismatch",
            )


def _floats(data: bytes) -> Floats:
    if len(data) % 4:
        raise ShardRefused(f"{len(data)} bytes are no float32 array")
    return np.frombuffer(data, "<f4")
