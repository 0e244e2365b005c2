"""Control: what is asked of a shard behind gRPC beside pulls and pushes; and how to go on asking."""

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import grpc
import numpy as np
from numpy.typing import NDArray

import streamtrain.ps.ps_pb2 as pb
from streamtrain.errors import CheckpointError, ShardBroken, ShardError, ShardRefused, ShardUnavailable
from streamtrain.ps import wire
from streamtrain.ps.clock import Clock
from streamtrain.ps.keeping import CutAt, Frozen
from streamtrain.ps.shard import Initial, Row

logger = logging.getLogger(__name__)

T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]

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
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.lookahead_bytes", 4 << 20),
]


def is_gone(error: BaseException | None) -> bool:
    """Whether a call failed as nobody listens there: the process that did has ended."""
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


def patiently(attempt: Callable[[], T], retry: Retry, stopped: threading.Event) -> T:
    """Repeats what fails with ShardUnavailable, with growing pauses.

    Args:
        attempt: what is tried.
        retry: how often and how long.
        stopped: once set, the error is raised.
    """
    give_up, backoff, told = time.monotonic() + retry.give_up, retry.first_backoff, ""
    while True:
        try:
            return attempt()
        except ShardUnavailable as exc:
            if time.monotonic() > give_up or stopped.wait(backoff * random.uniform(0.5, 1.0)):
                raise
            if str(exc) != told:
                logger.info("%s; trying again", exc)
            told = str(exc)
        backoff = min(2 * backoff, retry.last_backoff)


class Route(Protocol):
    """Where a shard is that may be at one of two places."""

    def find(self) -> tuple[grpc.Channel, str]:
        """The channel to it, and its address.

        Raises:
            ShardUnavailable: it is at neither.
        """

    def found(self) -> tuple[grpc.Channel, str]:
        """Where it was found last, by whoever shares the route."""


class RemoteControl:
    """What is asked of a shard beside pulls and pushes.

    Args:
        channel: to the shard's server.
        target: its address, for messages.
        metadata: sent with every call.
        timeout: seconds for an answer; writing a checkpoint has none.
        route: to the shard, if it has a backup: where it is asked, and looked for once there is no answer.

    Raises:
        ShardError: the shard refuses or cannot be reached; from every method.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        target: str,
        metadata: Metadata = (),
        timeout: float = 10.0,
        route: Route | None = None,
    ) -> None:
        self._metadata = metadata
        self._timeout = timeout
        self._route = route
        self._is_lost = route is not None
        self._go_to(channel, target)

    def _go_to(self, channel: grpc.Channel, target: str) -> None:
        def method(name: str, answer: Any) -> Any:
            return channel.unary_unary(
                f"/{wire.SERVICE}/{name}", lambda request: request.SerializeToString(), answer.FromString
            )

        self.target = target
        self._methods = {
            "status": method("Status", pb.ShardStatus),
            "initialise": method("Initialise", pb.ShardStatus),
            "freeze": method("Freeze", pb.FrozenAt),
            "cut": method("Cut", pb.CutAt),
            "write": method("Write", pb.Written),
            "publish": method("Publish", pb.Published),
            "apply": method("Apply", pb.Applied),
            "report": method("Report", pb.Reported),
            "publish_now": method("PublishNow", pb.PublishedNow),
            "inspect": method("Inspect", pb.Inspected),
            "verify": method("Verify", pb.Verified),
            "sums": method("Sums", pb.RowSums),
            "read": method("Read", pb.Answer),
            "promote": method("Promote", pb.ShardStatus),
        }

    def status(self) -> Any:
        """How the shard is, a `ShardStatus`."""
        status = self._call("status", pb.StatusRequest())
        if self._route is not None and status.standing.role == pb.BACKUP:
            self._is_lost = True
            raise ShardUnavailable(f"{self.target} is a backup now")
        return status

    def promote(self) -> Any:
        """Has a backup take over, see `Follower.promote`; the status says what it has."""
        return self._call("promote", pb.PromoteRequest())

    def initialise(self, index: int, shards: int, initial: Initial) -> Any:
        """Gives an empty shard what it begins with; the status says what it has."""
        request = pb.InitialiseRequest(
            run=initial.run.id,
            spec=initial.spec.to_json(),
            start=wire.positions(initial.run.start),
            shard=index,
            shards=shards,
            dense=np.ascontiguousarray(initial.dense, "<f4").tobytes(),
            statistics=np.ascontiguousarray(initial.statistics, "<f4").tobytes(),
        )
        return self._call("initialise", request)

    def freeze(self) -> Frozen:
        """See `Node.freeze`."""
        answer = self._call("freeze", pb.FreezeRequest())
        return Frozen(wire.clock_of(answer.clock), answer.written)

    def cut(self, epoch: int, target: Clock, full: bool) -> CutAt:
        """See `Node.cut`."""
        answer = self._call("cut", pb.CutRequest(epoch=epoch, target=wire.positions(target), full=full))
        return CutAt(wire.clock_of(answer.clock), answer.reached, answer.pause_ms)

    def write(self, epoch: int) -> str:
        """See `Node.write`."""
        return str(self._call("write", pb.WriteRequest(epoch=epoch), timeout=None).part)

    def publish(self, number: int, layout: str) -> str:
        """See `Node.publish`."""
        return str(self._call("publish", pb.PublishRequest(number=number, layout=layout), timeout=None).part)

    def apply(self) -> None:
        """See `Node.apply`."""
        self._call("apply", pb.ApplyRequest(), timeout=None)

    def report(self, worker: str, windows: Sequence[Any]) -> None:
        """See `Leader.report`."""
        self._call("report", pb.ReportRequest(worker=worker, windows=windows))

    def publish_now(self, *, force: bool = False, timeout: float | None = None) -> str:
        """See `Leader.publish_now`.

        Args:
            force: whatever the quality gate says.
            timeout: seconds for the answer; None: as long as it takes.
        """
        return str(self._call("publish_now", pb.PublishNowRequest(force=force), timeout=timeout).publication)

    def inspect(self, table: str, key: int) -> Row | None:
        """See `Shard.inspect`."""
        answer = self._call("inspect", pb.InspectRequest(table=table, key=key))
        return Row(answer.count, answer.last_seen) if answer.found else None

    def verify(self, *, timeout: float | None = None) -> str:
        """See `Leader.verify`; `timeout` as of `publish_now`."""
        return str(self._call("verify", pb.VerifyRequest(), timeout=timeout).found)

    def sums(self, number: int, layout: str) -> Any:
        """See `Node.sums`."""
        return self._call("sums", pb.SumsRequest(number=number, layout=layout), timeout=None)

    def read(self, keys: Sequence[NDArray[np.uint64]]) -> memoryview:
        """Rows of keys uint64 [n] by table, then the dense slice and that of the statistics, all as float32.

        Nobody waits for whoever reads, and it waits for nobody.
        """
        pull = pb.Pull(rows=[len(one) for one in keys])
        request = pb.Request(pull=pull, bulk=b"".join(one.astype("<u8", copy=False).tobytes() for one in keys))
        return memoryview(self._call("read", request).bulk)

    def _call(self, method: str, request: Any, timeout: float | None = -1.0) -> Any:
        if self._route is not None:
            place = self._route.find() if self._is_lost else self._route.found()
            if place[1] != self.target:
                self._go_to(*place)
            self._is_lost = False
        call, seconds = self._methods[method], self._timeout if timeout == -1.0 else timeout
        try:
            return call(request, timeout=seconds, metadata=self._metadata)
        except grpc.RpcError as exc:
            error = translated(exc, self.target)
            self._is_lost = isinstance(error, ShardUnavailable)
            raise error from exc
