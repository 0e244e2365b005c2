"""The gRPC server of a shard (schemas/ps.proto)."""

import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from typing import Any

import grpc
import numpy as np
from google.protobuf.descriptor import ServiceDescriptor
from numpy.typing import NDArray

import streamtrain.ps.rpc.ps_pb2 as pb
from streamtrain._core import shards_of
from streamtrain.errors import ShardRefused, ShardUnavailable
from streamtrain.incarnation import Incarnation
from streamtrain.memory import free_megabytes
from streamtrain.model.spec import Spec
from streamtrain.ps.consistency import Consistency
from streamtrain.ps.nodes.node import Node
from streamtrain.ps.push import Floats, PushResult
from streamtrain.ps.replication.backup import Asking, BackupShard
from streamtrain.ps.replication.primary import State
from streamtrain.ps.replication.roles import NodeState
from streamtrain.ps.replication.state_transfer import Generation
from streamtrain.ps.rpc import wire
from streamtrain.ps.rpc.control import SERVICE
from streamtrain.ps.rpc.services import answering, server_options, service_handler
from streamtrain.ps.rpc.sessions import OpenSession, Sessions, SessionTimeouts
from streamtrain.ps.rpc.shared_memory import open_lane
from streamtrain.ps.shard import InitialState, Run, Shard
from streamtrain.settings.groups import PsSettings


def status_of(node: Node, workers: list[str], *, predictions: bool = False) -> Any:
    """The status of a node as a message; with predictions that are not stored yet, if they are asked for."""
    status = pb.ShardStatus(shard=node.index, shards=node.shards, ready=node.ready, workers=workers)
    status.epoch, status.published, status.generation = node.epoch, node.published, node.lease_generation
    status.incarnation, status.map_epoch = str(node.incarnation or ""), node.map_epoch
    status.counters.update(dict(node.counters))  # a copy: other threads add to it
    status.rows_ahead, status.free_memory = node.rows_ahead, max(0, free_megabytes()) << 20
    status.cpu_ms = 0 if node.is_colocated else int(1000 * time.process_time())
    if node.role.pairing is not None:
        status.standing.CopyFrom(_standing_of(node, node.backup))
    if not node.ready:
        return status
    shard = node.shard
    status.run, status.identity, status.spec = shard.run.id, shard.spec.identity, shard.spec.to_json()
    status.topic = shard.run.topic
    status.start.extend(wire.encode_positions(shard.run.start))
    progress = shard.progress()
    status.clock.extend(wire.encode_positions(*progress if predictions else progress[:3]))
    for settings, table in zip(shard.spec.tables, shard.tables, strict=True):
        stats = table.stats()
        on_disk, of_disk = stats["rows_on_disk"], stats["disk_bytes"]
        status.tables.add(
            name=settings["name"], rows=len(table), bytes=table.nbytes, rows_on_disk=on_disk, disk_bytes=of_disk
        )
        for name in ("disk_reads", "disk_errors"):
            status.counters[name] += stats[name]
    status.dense_bytes = shard.dense.nbytes
    status.counters.update({f"pushes_{outcome.name.lower()}": n for outcome, n in shard.pushes.items()})
    status.counters.update({f"gradients_{name}": n for name, n in vars(shard.totals).items()})
    status.counters["samples"] = shard.samples
    return status


def _standing_of(node: Node, backup: BackupShard) -> Any:
    role = node.role
    if role.state is NodeState.BACKUP:
        return pb.Standing(role=pb.BACKUP, in_step=backup.in_step)
    in_step = role.replication is not None and role.replication.state is State.IN_STEP
    return pb.Standing(role=pb.PRIMARY, line=role.generation.message(), in_step=in_step)


_WAITING = wire.frame(pb.Answer(waiting=pb.Waiting()), [])


class Servicer:
    """The methods of the service.

    Args:
        node: what is served.
        limits: of requests.
        waiting: seconds between two words that a request still waits for other workers.
        sessions: where they are known.
        own: address of this process, as others know it.
    """

    def __init__(self, node: Node, limits: PsSettings, waiting: float, sessions: Sessions, own: str = "") -> None:
        self._node, self._own = node, own
        self._limits, self._waiting = limits, waiting
        self._sessions = sessions

    def session(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        with answering(context, self._node.count), self._sessions.open(context) as session:
            shard, consistency = self._node.shard, self._node.consistency
            try:
                for data in session.requests(requests, self._limits.max_message_bytes):
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

    def _join(self, join: Any, session: OpenSession, shard: Shard, c: Consistency) -> bytes:
        self._check_map(join)
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
        shard.check()
        session.dtype = wire.parse_dtype(join.dtype)
        progress = c.join(join.worker, join.progress if join.HasField("progress") else None)
        session.worker = join.worker
        lane = open_lane(join.lane, session.context.peer()) if join.HasField("lane") else None
        if lane is not None:
            session.use(lane)
        return wire.frame(pb.Answer(joined=pb.Joined(progress=progress, lane=lane is not None)), [])

    def _check_map(self, request: Any) -> None:
        """Refuses for now who has another place for the shard by another map: it is about to get the shard's map.

        Raises:
            ShardUnavailable: that is so, or the shard has no place.
        """
        node = self._node
        if node.role.state is NodeState.SPARE:
            node.role.held()
        if (request.shard, request.shards) != (node.index, node.shards) and request.map_epoch != node.map_epoch:
            raise ShardUnavailable(
                f"this is shard {node.index} of {node.shards} by map {node.map_epoch}, not {request.shard} of "
                f"{request.shards} as by map {request.map_epoch} of the worker: one is about to get the newer map"
            )

    def _answers(self, data: bytes, session: OpenSession, shard: Shard, c: Consistency) -> Iterator[bytes]:
        if len(data) > self._limits.max_message_bytes:
            raise ShardRefused(f"the request has {len(data)} bytes; at most {self._limits.max_message_bytes}", "limit")
        request, bulk = wire.unframe(pb.Request, data)
        given = {field.name for field, _ in request.ListFields()} - {"padding", "bulk"}
        this = " and ".join(sorted(given)) or "nothing"
        if (given == {"join"}) == bool(session.worker):
            raise ShardRefused(
                f"a session must start with join and contain no other join; this request contains {this}"
            )
        if given == {"join"}:
            yield self._join(request.join, session, shard, c)
        elif given == {"park"}:
            shard.check()  # one without samples is to notice, too, that it has to be elsewhere
            c.park(session.worker)
            shard.idle(request.park.idle)
            yield wire.frame(pb.Answer(parked=pb.Parked()), [])
        elif given == {"beat"}:
            c.beat(session.worker)
        elif given and given <= {"pull", "push"}:
            yield from self._exchange(request, bulk, session, shard, c)
        else:
            raise ShardRefused(
                f"a request must contain push, pull, or both, or another single message; it contains {this}"
            )

    def _exchange(
        self, request: Any, bulk: memoryview, session: OpenSession, shard: Shard, c: Consistency
    ) -> Iterator[bytes]:
        """Takes a push, then a pull."""
        rows = max(sum(request.push.rows), sum(request.push.gradients))
        self._check_count(sum(request.pull.rows) + rows)
        sizes = wire.Sizes.of(shard)
        push, pull = wire.decode_request(request, bulk, sizes, session.dtype)
        pushed: PushResult | None = None
        if pull is not None:
            _check_owner(pull.keys, shard)
        if push is not None:
            _check_owner([update.keys for update in push.updates], shard)
            pending = c.push(session.worker, push)
            while (pushed := pending.result(self._waiting)) is None:
                yield _WAITING
        if pull is None:
            yield wire.encode_answer(pushed, None, session.dtype)
            return
        if not c.pull(session.worker, pull.ahead, 0.0):
            if pushed is not None:
                yield wire.encode_answer(pushed, None, session.dtype)
                pushed = None
            while not c.pull(session.worker, pull.ahead, self._waiting):
                yield _WAITING
        yield wire.encode_answer(pushed, wire.PullResult.of(shard, pull), session.dtype)

    def _check_count(self, keys: int) -> None:
        if keys > self._limits.max_keys:
            raise ShardRefused(
                f"the request has {keys} keys; at most {self._limits.max_keys} are taken at once", "limit"
            )

    def status(self, request: Any) -> Any:
        return status_of(self._node, self._sessions.workers(), predictions=request.predictions)

    def initialise(self, request: Any) -> Any:
        node = self._node
        self._check_map(request)
        if (request.shard, request.shards) != (node.index, node.shards):
            raise ShardRefused(
                f"this is shard {node.index} of {node.shards}, not {request.shard} of {request.shards}", "mismatch"
            )
        run = Run(request.run, wire.decode_clock(request.start), request.topic)
        spec = Spec.from_json(request.spec)
        node.initialise(InitialState(run, spec, _floats(request.dense), _floats(request.statistics)))
        return status_of(node, self._sessions.workers())

    def claim(self, request: Any) -> Any:
        """Takes the incarnation of its cluster, or stops as another cluster has superseded it."""
        if request.superseded_by:
            self._node.supersede(_parse_incarnation(request.superseded_by), request.reason)
        else:
            self._node.claim(_parse_incarnation(request.incarnation))
        return status_of(self._node, self._sessions.workers())

    def set_rates(self, request: Any) -> Any:
        self._node.shard.set_rates(dict(request.rates))
        return status_of(self._node, self._sessions.workers())

    def freeze(self, _: Any) -> Any:
        """Begins a checkpoint."""
        frozen = self._node.freeze()
        return pb.FrozenAt(clock=wire.encode_positions(frozen.clock), written=frozen.written, digest=frozen.digest)

    def cut(self, request: Any) -> Any:
        at = self._node.cut(request.epoch, wire.decode_clock(request.target), request.full, request.hold)
        return pb.CutAt(clock=wire.encode_positions(at.clock), reached=at.reached, pause_ms=at.pause_ms)

    def write(self, request: Any) -> Any:
        return pb.Written(part=self._node.write(request.epoch))

    def place(self, request: Any) -> Any:
        if request.ahead:
            self._node.read_ahead(request.shard, request.shards, rate=request.rate)
        else:
            where = request.shard, request.shards, request.run, request.map_epoch
            self._node.place(*where, head=request.head, peer=self._peer(request.pair) if request.pair else None)
        return status_of(self._node, self._sessions.workers())

    def publish(self, request: Any) -> Any:
        return pb.Published(part=self._node.publish(request.number, request.layout, request.generation))

    def apply(self, _: Any) -> Any:
        self._node.apply()
        return pb.Applied()

    def inspect(self, request: Any) -> Any:
        """Returns what is known of one row besides its values."""
        row = self._node.shard.inspect(request.table, request.key)
        return pb.Inspected() if row is None else pb.Inspected(found=True, count=row.learned, last_seen=row.last_seen)

    def remove(self, request: Any) -> Any:
        """Takes rows away that this shard has."""
        keys, shard = wire.decode_keys(request.keys), self._node.shard
        if foreign := int((shards_of(keys, shard.shards) != shard.index).sum()):
            raise ShardRefused(f"{foreign} of the keys are not of shard {shard.index} of {shard.shards}", "mismatch")
        return pb.Removed(keys=wire.encode_keys(shard.remove(request.table, keys, dry_run=request.dry_run)))

    def keys(self, request: Any) -> Any:
        keys, after = self._node.shard.keys(request.table, request.cursor)
        return pb.SomeKeys(keys=wire.encode_keys(keys), next=after)

    def sums(self, request: Any) -> Any:
        return self._node.sums(request.number, request.layout)

    def read(self, request: Any) -> Any:
        """Reads rows and slices for a caller that is not a worker."""
        self._check_count(sum(request.pull.rows))
        shard = self._node.shard
        push, pull = wire.decode_request(request, memoryview(request.bulk), wire.Sizes.of(shard), "float32")
        if pull is None or push is not None or pull.state:
            raise ShardRefused("a read must contain a pull without state, and nothing else")
        floats = b"".join(one.astype("<f4", copy=False).tobytes() for one in wire.PullResult.of(shard, pull).floats)
        return pb.Answer(pulled=pb.Pulled(), bulk=floats)

    def _peer(self, pair: Sequence[str]) -> str:
        """The other one of the processes of a shard."""
        others = [address for address in pair if address != self._own]
        if len(pair) != 2 or len(others) != 1:
            raise ShardRefused(f"the process at {self._own} is not one of {' and '.join(pair)}", "mismatch")
        return others[0]

    def release(self, request: Any) -> Any:
        asking = Asking(
            request.shard,
            request.shards,
            Generation.of(request.line),
            request.map_epoch,
            request.run,
            request.primary,
        )
        return pb.Released(taken_over=self._backup().release(asking))

    def follow(self, records: Iterator[bytes], context: Any) -> Iterator[bytes]:
        with answering(context, self._node.count):
            yield from self._backup().follow(records, context)

    def promote(self, _: Any) -> Any:
        self._backup().promote()
        return status_of(self._node, self._sessions.workers())

    def _backup(self) -> BackupShard:
        if self._node.role.pairing is None and self._node.shards:
            raise ShardRefused(f"shard {self._node.index} has no backup; set ps.backups for all processes", "mismatch")
        return self._node.backup


def _parse_incarnation(text: str) -> Incarnation:
    if (incarnation := Incarnation.parse(text)) is None:
        raise ShardRefused(f"an incarnation must be text like 1-0123abcd-host, not {text!r}")
    return incarnation


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
        raise ShardRefused(f"{len(data)} bytes are not a float32 array")
    return np.frombuffer(data, "<f4")


_CONTROL_THREADS = 6  # two of them for the streams of a primary to its backup, of which one may be dying


class ShardServer:
    """Serves a node until it is stopped.

    Args:
        node: what is served.
        limits: of requests and sessions.
        interceptors: of gRPC, such as one that authenticates.
        timeouts: for how long sessions may be silent.
        own: address of this process, as others know it.
    """

    def __init__(
        self,
        node: Node,
        limits: PsSettings = PsSettings(),  # noqa: B008  # it is immutable
        interceptors: tuple[grpc.ServerInterceptor, ...] = (),
        timeouts: SessionTimeouts = SessionTimeouts(),  # noqa: B008  # it is immutable
        own: str = "",
    ) -> None:
        self.grpc = grpc.server(
            futures.ThreadPoolExecutor(limits.sessions + _CONTROL_THREADS, "ps"),
            interceptors=interceptors,
            options=server_options(limits.max_message_bytes),
        )
        self._node, self._sessions = node, Sessions(limits.sessions, timeouts, node.count)
        self.register(SERVICE, Servicer(node, limits, timeouts.waiting, self._sessions, own))

    def register(self, service: ServiceDescriptor, servicer: object) -> None:
        """Serves another service too, see `service_handler`; its errors are counted by the node."""
        handler = service_handler(service, servicer, self._node.count, self._sessions.call)
        self.grpc.add_generic_rpc_handlers((handler,))

    def workers(self) -> list[str]:
        return self._sessions.workers()

    def start(self) -> None:
        """Begins to serve, on the ports that were added to `grpc`."""
        self.grpc.start()
        self._sessions.start()

    def stop(self, grace: float = 1.0) -> None:
        self._sessions.stop()
        self.grpc.stop(grace).wait()
