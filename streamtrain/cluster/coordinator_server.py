"""Coordinator's server: schemas/coordinator.proto, and the calls of shard 0 that it answers in its place."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc

import streamtrain.cluster.coordinator_pb2 as pb
import streamtrain.ps.ps_pb2 as ps
from streamtrain.cluster.coordinator import SERVER, WORKER, Coordinator
from streamtrain.cluster.members import LEASE
from streamtrain.errors import ShardRefused
from streamtrain.ps import wire
from streamtrain.ps.answering import answering, request_of, unary
from streamtrain.ps.server import server_options

SERVICE = "streamtrain.coordinator.v1.Coordinator"
_THREADS = 16
_MESSAGE_BYTES = 8 << 20
_KINDS = {pb.WORKER: WORKER, pb.SERVER: SERVER}


class CoordinatorServer:
    """Serves a coordinator until it is stopped.

    Args:
        coordinator: what is served.
        interceptors: of gRPC, such as one that authenticates.

    """

    def __init__(self, coordinator: Coordinator, interceptors: tuple[grpc.ServerInterceptor, ...] = ()) -> None:
        self._coordinator = coordinator
        self._counters: Counter[str] = Counter()
        self._lock = threading.Lock()
        options = server_options(_MESSAGE_BYTES)
        pool = futures.ThreadPoolExecutor(_THREADS, "coordinator")
        self.grpc = grpc.server(pool, interceptors=interceptors, options=options)
        of_shard_0 = {
            "Report": self._asked(ps.ReportRequest, self._report),
            "PublishNow": self._asked(ps.PublishNowRequest, self._publish_now),
            "Verify": self._asked(ps.VerifyRequest, self._verify),
        }
        own = {
            "Beat": self._asked(pb.BeatRequest, self._beat),
            "Leave": self._asked(pb.LeaveRequest, self._leave),
            "Slots": self._asked(pb.SlotsRequest, self._slots),
            "Status": self._asked(pb.StatusRequest, self._status),
            "Inspect": self._asked(pb.InspectRequest, self._inspect),
            "Checkpoint": self._asked(pb.CheckpointRequest, self._checkpoint),
        }
        self.grpc.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(SERVICE, own),
                grpc.method_handlers_generic_handler(wire.SERVICE, of_shard_0),
            )
        )

    def start(self) -> None:
        """Begins to serve, on the ports that were added to `grpc`."""
        self.grpc.start()

    def stop(self, grace: float = 1.0) -> None:
        """Ends."""
        self.grpc.stop(grace).wait()

    def count(self, name: str) -> None:
        """Counts what happened. Thread-safe."""
        with self._lock:
            self._counters[name] += 1

    @property
    def counters(self) -> Counter[str]:
        """What happened until now, by name."""
        with self._lock:
            return Counter(self._counters)

    def _asked(self, kind: Any, answer: Callable[[Any], Any]) -> grpc.RpcMethodHandler:
        def handle(requests: Iterator[bytes], context: Any) -> Any:
            with answering(context, self.count):
                return answer(request_of(kind, requests))

        return unary(handle)

    def _report(self, request: Any) -> Any:
        self._coordinator.lead.leading.report(request.worker, request.windows)
        return ps.Reported()

    def _publish_now(self, request: Any) -> Any:
        return ps.PublishedNow(publication=self._coordinator.lead.leading.publish_now(force=request.force))

    def _verify(self, _: Any) -> Any:
        return ps.Verified(found=self._coordinator.lead.leading.verify())

    def _beat(self, request: Any) -> Any:
        self._coordinator.members.beat(_kind(request), request.name, request.about)
        return pb.Beaten(lease=LEASE, epoch=self._coordinator.slots.epoch)

    def _leave(self, request: Any) -> Any:
        self._coordinator.members.leave(_kind(request), request.name)
        return pb.Left()

    def _slots(self, _: Any) -> Any:
        epoch, shards = self._coordinator.slots
        return pb.SlotMap(epoch=epoch, shards=shards)

    def _status(self, _: Any) -> Any:
        return pb.ClusterStatus(status=json.dumps(self._coordinator.status()))

    def _inspect(self, request: Any) -> Any:
        row = self._coordinator.inspect(request.table, request.key)
        return pb.Inspected() if row is None else pb.Inspected(found=True, count=row.learned, last_seen=row.last_seen)

    def _checkpoint(self, request: Any) -> Any:
        schedule = self._coordinator.lead.checkpoints
        if schedule is None:
            raise ShardRefused("there is no place for checkpoints; set checkpoint.url where the coordinator runs")
        return pb.Checkpointed(**vars(schedule.now(full=request.full)))


def _kind(request: Any) -> str:
    kind = _KINDS.get(request.kind)
    if kind is None:
        raise ShardRefused(f"a process is a worker or a server, not of kind {request.kind}")
    return kind
