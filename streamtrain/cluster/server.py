"""gRPC service of the coordinator (schemas/coordinator.proto)."""

import json
import threading
from collections import Counter
from collections.abc import Callable
from concurrent import futures
from typing import Any

import grpc

import streamtrain.cluster.coordinator_pb2 as pb
from streamtrain.cluster.client import SERVICE
from streamtrain.cluster.coordinator import Coordinator
from streamtrain.cluster.members import LEASE, SERVER, WORKER
from streamtrain.errors import ShardRefused
from streamtrain.ps.rpc.services import server_options, service_handler

_THREADS = 16
_MESSAGE_BYTES = 8 << 20
_KINDS = {pb.WORKER: WORKER, pb.SERVER: SERVER}


class CoordinatorServicer:
    """The methods of the service.

    Args:
        coordinator: returns the coordinator of this process, or raises ShardError if another one answers.
    """

    def __init__(self, coordinator: Callable[[], Coordinator]) -> None:
        self._coordinator = coordinator

    def beat(self, request: Any) -> Any:
        coordinator = self._coordinator()
        coordinator.members.beat(_kind(request), request.name, request.about)
        return pb.Beaten(lease=LEASE, epoch=coordinator.shard_map.epoch)

    def leave(self, request: Any) -> Any:
        self._coordinator().members.leave(_kind(request), request.name)
        return pb.Left()

    def slots(self, _: Any) -> Any:
        return pb.SlotMap(**self._coordinator().shard_map._asdict())

    def status(self, _: Any) -> Any:
        return pb.ClusterStatus(status=json.dumps(self._coordinator().status()))

    def inspect(self, request: Any) -> Any:
        row = self._coordinator().inspect(request.table, request.key)
        return pb.Inspected() if row is None else pb.Inspected(found=True, count=row.learned, last_seen=row.last_seen)

    def checkpoint(self, request: Any) -> Any:
        return pb.Checkpointed(**vars(self._coordinator().checkpoint(full=request.full)))

    def report(self, request: Any) -> Any:
        self._coordinator().report(request.worker, request.windows, request.probes)
        return pb.Reported()

    def publish_now(self, request: Any) -> Any:
        publication = self._coordinator().publish_now(force=request.force)
        return pb.PublishedNow(publication=json.dumps(publication.to_json()))

    def set_rates(self, request: Any) -> Any:
        changes = {**request.rates, **dict.fromkeys(request.reset)}
        change = self._coordinator().set_rates(changes, request.who, request.why)
        return pb.RatesSet(found=json.dumps(change.to_json()))

    def scale(self, request: Any) -> Any:
        return pb.SlotMap(**self._coordinator().scale(request.shards, request.backups, rate=request.rate)._asdict())

    def cancel_scale(self, _: Any) -> Any:
        self._coordinator().cancel_scale()
        return pb.ScaleCancelled()

    def forget(self, request: Any) -> Any:
        receipt = self._coordinator().forget([(one.feature, one.id) for one in request.ids])
        return pb.Forgotten(receipt=json.dumps(receipt.to_json()))

    def verify(self, _: Any) -> Any:
        return pb.Verified(found=json.dumps(self._coordinator().verify().to_json()))


def _kind(request: Any) -> str:
    kind = _KINDS.get(request.kind)
    if kind is None:
        raise ShardRefused(f"unknown kind of process {request.kind}: expected WORKER or SERVER")
    return kind


class CoordinatorServer:
    """gRPC server of a coordinator that has a process of its own.

    Args:
        coordinator: what is served.
        interceptors: of gRPC, such as one that authenticates.
    """

    def __init__(self, coordinator: Coordinator, interceptors: tuple[grpc.ServerInterceptor, ...] = ()) -> None:
        self._counters: Counter[str] = Counter()
        self._lock = threading.Lock()
        pool = futures.ThreadPoolExecutor(_THREADS, "coordinator")
        self.grpc = grpc.server(pool, interceptors=interceptors, options=server_options(_MESSAGE_BYTES))
        servicer = CoordinatorServicer(lambda: coordinator)
        self.grpc.add_generic_rpc_handlers((service_handler(SERVICE, servicer, self.count),))

    def start(self) -> None:
        """Starts serving, on the ports that were added to `grpc`."""
        self.grpc.start()

    def stop(self, grace: float = 1.0) -> None:
        self.grpc.stop(grace).wait()

    def count(self, name: str) -> None:
        """Counts an event. Thread-safe."""
        with self._lock:
            self._counters[name] += 1

    @property
    def counters(self) -> Counter[str]:
        with self._lock:
            return Counter(self._counters)
