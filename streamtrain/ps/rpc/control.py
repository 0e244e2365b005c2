"""Calls to shards and the coordinator over gRPC, but for the sessions of workers; retries and failover of them."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import grpc
import numpy as np
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass
from numpy.typing import NDArray

import streamtrain.ps.rpc.ps_pb2 as pb
from streamtrain.errors import CheckpointError, ShardBroken, ShardError, ShardRefused, ShardUnavailable
from streamtrain.incarnation import Incarnation
from streamtrain.periodic import Backoff, retry
from streamtrain.ps.clock import Clock
from streamtrain.ps.hooks import CutResult, FreezeResult
from streamtrain.ps.rpc import wire
from streamtrain.ps.shard import InitialState, RowInfo

T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]
ServerChannel = tuple[grpc.Channel, str]
"""The channel to a server, and its address."""

SERVICE: ServiceDescriptor = pb.DESCRIPTOR.services_by_name["ParameterServer"]

_REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT: "malformed",
    grpc.StatusCode.FAILED_PRECONDITION: "mismatch",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "limit",
    grpc.StatusCode.UNAUTHENTICATED: "unauthenticated",
    grpc.StatusCode.PERMISSION_DENIED: "unauthenticated",
    grpc.StatusCode.UNIMPLEMENTED: "mismatch",
}
_OTHERS: dict[grpc.StatusCode, type[Exception]] = {
    grpc.StatusCode.DATA_LOSS: ShardBroken,
    grpc.StatusCode.ABORTED: CheckpointError,
    grpc.StatusCode.INTERNAL: ShardError,
}

CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # that is how long connecting may take; what is refused is tried sooner
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),  # a name may be of another machine from now on; default: 30 s
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.lookahead_bytes", 4 << 20),
]


def is_gone(error: BaseException | None) -> bool:
    """Whether a call failed because nothing listens there: the process has ended."""
    if not isinstance(error, grpc.RpcError) or error.code() is not grpc.StatusCode.UNAVAILABLE:
        return False
    return any(one in (error.details() or "") for one in ("Connection refused", "No such file or directory"))


def translated(error: grpc.RpcError, target: str) -> Exception:
    """The error of ours that a gRPC status means. What may pass by itself is ShardUnavailable."""
    code, details = error.code(), f"{target}: {error.details()}"
    if code in _REFUSALS:
        return ShardRefused(details, _REFUSALS[code])  # type: ignore[arg-type]  # values of the dict are its reasons
    return _OTHERS.get(code, ShardUnavailable)(details)


@dataclass(frozen=True)
class Retry:
    """How a session deals with a shard that does not answer.

    Attributes:
        timeout: seconds of silence after which the connection is given up and made again.
        first_backoff: seconds between the first two attempts to connect; doubled up to `last_backoff`, and spread by
            a random factor of up to a half.
        last_backoff: seconds between attempts at most.
        give_up: seconds without a connection after which the error is raised; infinite: never.
    """

    timeout: float = 10.0
    first_backoff: float = 0.05
    last_backoff: float = 2.0
    give_up: float = float("inf")


def patiently(attempt: Callable[[], T], policy: Retry, stopped: threading.Event) -> T:
    """Repeats what fails with ShardUnavailable.

    Args:
        attempt: the function.
        policy: pauses, and for how long.
        stopped: once set, the error is raised.
    """
    backoff = Backoff(policy.first_backoff, policy.last_backoff)
    return retry(attempt, ShardUnavailable, stopped, backoff=backoff, give_up=policy.give_up)


class Resolver(Protocol):
    """Which of two addresses a service is at."""

    def resolve(self) -> ServerChannel:
        """Asks both.

        Raises:
            ShardUnavailable: it is at neither.
        """

    @property
    def last(self) -> ServerChannel:
        """Where it was when it was asked last, by any user of this resolver."""


class ServiceStub:
    """Calls the unary methods of a gRPC service by their names.

    Args:
        target: channel to its server, and the address, for messages.
        timeout: seconds for an answer.
        resolver: of a service with two addresses; consulted before the first call and after one without an answer.
    """

    def __init__(
        self,
        service: ServiceDescriptor,
        target: ServerChannel,
        metadata: Metadata = (),
        timeout: float = 10.0,
        resolver: Resolver | None = None,
    ) -> None:
        self._service, self._metadata, self._timeout, self._resolver = service, metadata, timeout, resolver
        self._is_lost = True
        self._connect(target)

    def _connect(self, target: ServerChannel) -> None:
        channel, self.address = target
        self._methods = {
            method.name: channel.unary_unary(
                f"/{self._service.full_name}/{method.name}",
                lambda request: request.SerializeToString(),
                GetMessageClass(method.output_type).FromString,
            )
            for method in self._service.methods
            if not method.client_streaming
        }

    def call(self, method: str, request: Any, timeout: float | None = -1.0) -> Any:
        """Calls a method.

        Args:
            method: its name.
            request: its message.
            timeout: seconds for the answer, or None for no limit; -1: the stub's.

        Raises:
            ShardError: the service refuses, or cannot be reached.
        """
        if self._resolver is not None:
            target = self._resolver.resolve() if self._is_lost else self._resolver.last
            if target[1] != self.address:
                self._connect(target)
            self._is_lost = False
        try:
            seconds = self._timeout if timeout == -1.0 else timeout
            return self._methods[method](request, timeout=seconds, metadata=self._metadata)
        except grpc.RpcError as exc:
            error = translated(exc, self.address)
            self._is_lost = isinstance(error, ShardUnavailable)
            raise error from exc

    def lose(self) -> None:
        """Has the resolver consulted before the next call."""
        self._is_lost = True


class RemoteControl:
    """Control of a shard behind gRPC. Every method may raise ShardError: the shard refuses or cannot be reached.

    Args:
        timeout: seconds for an answer; writing a checkpoint or publication has none.
        resolver: of a shard that has a backup.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        target: str,
        metadata: Metadata = (),
        timeout: float = 10.0,
        resolver: Resolver | None = None,
    ) -> None:
        self._has_backup = resolver is not None
        self._stub = ServiceStub(SERVICE, (channel, target), metadata, timeout, resolver)

    @property
    def target(self) -> str:
        return self._stub.address

    def status(self, *, predictions: bool = False) -> Any:
        status = self._stub.call("Status", pb.StatusRequest(predictions=predictions))
        if self._has_backup and status.standing.role == pb.BACKUP:
            self._stub.lose()
            raise ShardUnavailable(f"{self.target} is a backup now")
        return status

    def promote(self) -> Any:
        """Has a backup take over, see `BackupShard.promote`; returns its status."""
        return self._stub.call("Promote", pb.PromoteRequest())

    def initialise(self, index: int, shards: int, initial: InitialState, map_epoch: int = 0) -> Any:
        """Initialises an empty shard; returns the status of what it holds."""
        request = pb.InitialiseRequest(
            run=initial.run.id,
            spec=initial.spec.to_json(),
            start=wire.encode_positions(initial.run.start),
            topic=initial.run.topic,
            shard=index,
            shards=shards,
            dense=np.ascontiguousarray(initial.dense, "<f4").tobytes(),
            statistics=np.ascontiguousarray(initial.statistics, "<f4").tobytes(),
            map_epoch=map_epoch,
        )
        return self._stub.call("Initialise", request)

    def claim(self, incarnation: Incarnation) -> Any:
        """See `Node.claim`; returns the status."""
        return self._stub.call("Claim", pb.ClaimRequest(incarnation=str(incarnation)))

    def supersede(self, by: Incarnation, reason: str) -> None:
        """See `Node.supersede`."""
        self._stub.call("Claim", pb.ClaimRequest(superseded_by=str(by), reason=reason))

    def set_rates(self, rates: Mapping[str, float]) -> Any:
        """See `Shard.set_rates`; returns the status."""
        return self._stub.call("SetRates", pb.SetRatesRequest(rates=rates))

    def freeze(self) -> FreezeResult:
        answer = self._stub.call("Freeze", pb.FreezeRequest())
        return FreezeResult(wire.decode_clock(answer.clock), answer.written, answer.digest)

    def cut(self, epoch: int, target: Clock, full: bool, hold: float = 0.0) -> CutResult:
        request = pb.CutRequest(epoch=epoch, target=wire.encode_positions(target), full=full, hold=hold)
        answer = self._stub.call("Cut", request)
        return CutResult(wire.decode_clock(answer.clock), answer.reached, answer.pause_ms)

    def write(self, epoch: int) -> str:
        return str(self._stub.call("Write", pb.WriteRequest(epoch=epoch), timeout=None).part)

    def place(
        self, index: int, shards: int, run: str, map_epoch: int, *, head: str = "", pair: Sequence[str] = ()
    ) -> Any:
        """See `Node.place`, with addresses of both processes; returns the status. It takes as long as rows are read."""
        request = pb.PlaceRequest(map_epoch=map_epoch, shard=index, shards=shards, run=run, head=head, pair=pair)
        return self._stub.call("Place", request, timeout=None)

    def read_ahead(self, index: int, shards: int, *, rate: float = 0.0) -> None:
        """See `Node.read_ahead`."""
        self._stub.call("Place", pb.PlaceRequest(shard=index, shards=shards, ahead=True, rate=rate), timeout=None)

    def publish(self, number: int, layout: str, generation: int = 0) -> str:
        request = pb.PublishRequest(number=number, layout=layout, generation=generation)
        return str(self._stub.call("Publish", request, timeout=None).part)

    def apply(self) -> None:
        self._stub.call("Apply", pb.ApplyRequest(), timeout=None)

    def remove(self, table: str, keys: NDArray[np.uint64], *, dry_run: bool = False) -> NDArray[np.uint64]:
        request = pb.RemoveRequest(table=table, keys=wire.encode_keys(keys), dry_run=dry_run)
        return wire.decode_keys(self._stub.call("Remove", request, timeout=None).keys)

    def keys(self, table: str, cursor: int) -> tuple[NDArray[np.uint64], int | None]:
        answer = self._stub.call("Keys", pb.KeysRequest(table=table, cursor=cursor))
        return wire.decode_keys(answer.keys), answer.next if answer.HasField("next") else None

    def inspect(self, table: str, key: int) -> RowInfo | None:
        answer = self._stub.call("Inspect", pb.InspectRequest(table=table, key=key))
        return RowInfo(answer.count, answer.last_seen) if answer.found else None

    def sums(self, number: int, layout: str) -> Any:
        return self._stub.call("Sums", pb.SumsRequest(number=number, layout=layout), timeout=None)

    def read(self, keys: Sequence[NDArray[np.uint64]]) -> memoryview:
        """Rows of keys uint64 [n] by table, then the dense slice and that of the statistics, all as float32.

        Reads are not subject to the consistency mode.
        """
        pull = pb.Pull(rows=[len(of_table) for of_table in keys])
        bulk = b"".join(of_table.astype("<u8", copy=False).tobytes() for of_table in keys)
        return memoryview(self._stub.call("Read", pb.Request(pull=pull, bulk=bulk)).bulk)
