"""Remote session: a worker's session with a shard behind gRPC, and a reader of such a shard."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import grpc
import numpy as np
from numpy.typing import NDArray

import streamtrain.ps.rpc.ps_pb2 as pb
from streamtrain._core import Lane
from streamtrain.errors import ShardError, ShardUnavailable
from streamtrain.model.features import RowType
from streamtrain.ps.push import Push, PushResult
from streamtrain.ps.rpc import wire
from streamtrain.ps.rpc.control import Metadata, RemoteControl, Resolver, Retry, patiently, translated
from streamtrain.ps.rpc.shared_memory import create_lane, encode_offer
from streamtrain.ps.session import Pending, PullBuffers, Ready

logger = logging.getLogger(__name__)


class ReadSource:
    """A shard behind gRPC that can be read without joining it; see PullSource."""

    def __init__(self, control: RemoteControl) -> None:
        self._control = control

    def pull(self, keys: Sequence[NDArray[np.uint64]], into: PullBuffers, ahead: int) -> Pending[None]:
        """See PullSource. Waits for the reply; `ahead` is of workers."""
        floats = wire.ArrayReader(self._control.read(keys), "float32")
        for out in (*into.rows, into.dense, into.statistics):
            floats.floats_into(out)
        floats.end()
        return Ready(None)


_MAX_REPLY_BYTES = 1 << 31


class Connection:
    """A gRPC call; messages go through a lane once the shard has accepted one.

    Args:
        open_call: starts the call.
        timeout: seconds without any progress after which the peer of a lane counts as stuck.
    """

    def __init__(self, open_call: Callable[..., Any], metadata: Metadata, first: bytes, timeout: float) -> None:
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._requests.put(first)  # before any other: heartbeats may be sent at any moment
        self._call = open_call(iter(self._requests.get, None), metadata=metadata)
        self._lane: Lane | None = None
        self._timeout = timeout
        self._failure: Exception | None = None

    def use_lane(self, lane: Lane) -> None:
        """Sends and receives through a lane from now on; the lane is closed with the call."""
        if not self._call.add_callback(lane.close):
            lane.close()
        self._lane = lane

    def send(self, data: bytes) -> None:
        """Sends a message. Thread-safe. `receive` raises if the peer is gone or stuck."""
        if self._lane is None:
            self._requests.put(data)
            return
        try:
            self._lane.write(data, self._timeout)
        except (TimeoutError, ValueError) as exc:  # the peer is stuck, or has corrupted the lane
            self._failure = exc
            self._call.cancel()
        except BaseException:  # raised by a signal handler: the message may be incomplete
            self._call.cancel()
            raise

    def try_send(self, data: bytes) -> None:
        """Sends a message that may be dropped, without blocking. Thread-safe."""
        if self._lane is None:
            self._requests.put(data)
            return
        try:
            self._lane.try_write(data)
        except ValueError:
            self._call.cancel()

    def receive(self) -> bytes:
        """Waits for the next message. Used by one thread.

        Raises:
            StopIteration: the peer has closed the call.
            RpcError: the call has failed.
            TimeoutError: the peer of the lane is stuck.
            ValueError: the lane does not contain a valid message.
        """
        if self._failure is not None:
            raise self._failure
        try:
            data = self._lane.read(_MAX_REPLY_BYTES, self._timeout) if self._lane is not None else None
        except BaseException:
            self._call.cancel()
            raise
        return bytes(next(self._call)) if data is None else data

    def cancel(self) -> None:
        """Cancels the call. Thread-safe."""
        self._call.cancel()

    def close(self) -> None:
        self._requests.put(None)  # ends the thread of gRPC that reads it
        self._call.cancel()


T = TypeVar("T")


@dataclass(frozen=True)
class JoinInfo:
    """What a worker presents to a shard when it joins.

    Attributes:
        worker: name of the worker, unique in the cluster.
        run: id of the training run.
        identity: identity of the model's spec.
        shards: number of shards.
        dtype: of floats on the wire.
        lanes: whether to use shared memory with a shard on this machine.
        map_epoch: of the map of shards that it goes by; 0: it knows none but its settings.
    """

    worker: str
    run: str
    identity: str
    shards: int
    dtype: RowType = "float32"
    lanes: bool = True
    map_epoch: int = 0


@dataclass(eq=False)
class _PendingRequest(Generic[T]):
    """A request (a Push, a PullRequest or a pb.Park) that is resent after a reconnect, and its reply."""

    session: "RemoteSession"
    kind: str
    content: Any
    take: Callable[[Any, memoryview], T]
    replies: list[T] = field(default_factory=list)

    def result(self) -> T:
        while not self.replies:
            self.session.receive()
        return self.replies[0]


class RemoteSession:
    """A session with a shard behind gRPC; see Session.

    When the connection breaks or the shard does not reply in time, the session reconnects and resends all requests
    without a reply, in order. So a shard may receive a request twice.

    Args:
        info: presented to the shard on joining.
        revive: called when the shard is empty, as it replaces one that was lost.
        retry: timeouts and backoff.
        stopped: once set, connecting fails with ShardUnavailable.
        resolver: finds the current primary, if the shard has a backup.
        lost: called with every attempt to connect that fails.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        target: str,
        index: int,
        info: JoinInfo,
        revive: Callable[[], object],
        *,
        retry: Retry | None = None,
        metadata: Metadata = (),
        stopped: threading.Event | None = None,
        resolver: Resolver | None = None,
        lost: Callable[[], object] = lambda: None,
    ) -> None:
        self._resolver, self._lost = resolver, lost
        self._index = index
        self._info = info
        self._revive = revive
        self._retry = retry or Retry()
        self._metadata = metadata
        self._stopped = stopped or threading.Event()
        self._connection: Connection | None = None
        self._pending: deque[_PendingRequest[Any]] = deque()
        self._buffered_push: _PendingRequest[PushResult] | None = None
        self._progress: int | None = None
        self._waiting_since = float("inf")
        self._last_sent = 0.0
        self.reconnects = 0
        self.away = False
        self._set_target(channel, target)

    def _set_target(self, channel: grpc.Channel, target: str) -> None:
        self._open = channel.stream_stream(f"/{wire.SERVICE}/Session")
        self._control = RemoteControl(channel, target, self._metadata)
        self._target = target

    def join(self, progress: int | None) -> int:
        self._progress = progress
        self._connect()
        assert self._progress is not None
        return self._progress

    def pull(self, keys: Sequence[NDArray[np.uint64]], into: PullBuffers, ahead: int) -> _PendingRequest[None]:
        dtype = self._info.dtype

        def take(reply: Any, bulk: memoryview) -> None:
            arrays = wire.ArrayReader(bulk, dtype)
            wire.decode_pulled(reply.pulled, arrays, into)
            arrays.end()

        request = _PendingRequest(self, "pulled", wire.PullRequest(keys, ahead, into.state is not None), take)
        self._pending.append(request)
        push, self._buffered_push = self._buffered_push, None
        self._send(wire.encode_request(push.content if push else None, request.content, dtype))
        return request

    def push(self, push: Push) -> _PendingRequest[PushResult]:

        def take(reply: Any, _: memoryview) -> PushResult:
            pushed = wire.decode_pushed(reply.pushed)
            if self._progress is not None and pushed.outcome is not pushed.outcome.REJECTED:
                self._progress += 1
            return pushed

        self._flush()
        self._buffered_push = _PendingRequest(self, "pushed", push, take)
        self._pending.append(self._buffered_push)
        return self._buffered_push

    def park(self, idle: Collection[int] = ()) -> None:
        self._flush()
        request = _PendingRequest(self, "parked", pb.Park(idle=idle), lambda answer, bulk: None)
        self._pending.append(request)
        self._send(self._encode(request))
        request.result()

    def beat(self) -> None:
        """See Session. Also cancels a connection on which a reply is overdue."""
        now = time.monotonic()
        connection = self._connection
        if connection is None:
            return
        if now - self._waiting_since > self._retry.timeout:
            connection.cancel()
        elif self._waiting_since == float("inf") and now - self._last_sent > self._retry.timeout / 8:
            connection.try_send(_BEAT)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _flush(self) -> None:
        """Sends the buffered push. It was held back to share a message with the next pull, which saves a round trip."""
        push, self._buffered_push = self._buffered_push, None
        if push is not None:
            self._send(wire.encode_request(push.content, None, self._info.dtype))

    def _send(self, data: bytes) -> None:
        assert self._connection is not None
        self._last_sent = time.monotonic()
        self._connection.send(data)

    def receive(self) -> None:
        """Waits for the reply to the oldest pending request."""
        self._flush()
        try:
            reply, bulk = self._next()
        except ShardUnavailable as exc:
            self._reconnect(exc)
            return
        for kind in _REPLIES:
            if reply.HasField(kind):
                if not self._pending or self._pending[0].kind != kind:
                    raise ShardError(f"unexpected reply from {self._target}: {kind}")
                request = self._pending[0]
                request.replies.append(request.take(reply, bulk))
                self._pending.popleft()

    def _next(self) -> tuple[Any, memoryview]:
        assert self._connection is not None
        self._waiting_since = time.monotonic()
        try:
            return wire.unframe(pb.Answer, self._connection.receive())
        except (TimeoutError, ValueError) as exc:
            raise ShardUnavailable(f"{self._target}: {exc}") from exc
        except StopIteration as exc:
            raise ShardUnavailable(f"{self._target} closed the session") from exc
        except grpc.RpcError as exc:
            raise translated(exc, self._target) from exc
        finally:
            self._waiting_since = float("inf")

    def _reconnect(self, why: ShardUnavailable) -> None:
        if self._stopped.is_set():
            raise why
        logger.warning("%s; reconnecting", why)
        self.reconnects += 1
        self.away = True
        self._connect()
        logger.info("reconnected to shard %d at %s", self._index, self._target)
        self.away = False

    def _connect(self) -> None:
        patiently(self._try_to_connect, self._retry, self._stopped)

    def _try_to_connect(self) -> None:
        try:
            self._connect_once()
        except ShardUnavailable:
            self._lost()
            raise

    def _connect_once(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._resolver is not None:
            self._set_target(*self._resolver.resolve())
        if not self._control.status().ready:
            self._revive()
        info, lane = self._info, create_lane(self._target) if self._info.lanes else None
        join = pb.Join(
            worker=info.worker,
            run=info.run,
            identity=info.identity,
            shard=self._index,
            shards=info.shards,
            dtype=wire.DTYPES[info.dtype],
            progress=self._progress,
            lane=encode_offer(lane) if lane else None,
            map_epoch=info.map_epoch,
        )
        first = wire.frame(pb.Request(join=join), [])
        self._connection = Connection(self._open, self._metadata, first, self._retry.timeout)
        reply, _ = self._next()
        if lane and reply.joined.lane:
            self._connection.use_lane(lane)
        self._progress = reply.joined.progress
        self._buffered_push = None
        for request in self._pending:
            self._send(self._encode(request))

    def _encode(self, request: _PendingRequest[Any]) -> bytes:
        if request.kind == "pushed":
            return wire.encode_request(request.content, None, self._info.dtype)
        if request.kind == "pulled":
            return wire.encode_request(None, request.content, self._info.dtype)
        return wire.frame(pb.Request(park=request.content), [])


# In the order in which a shard processes them when they share a message.
_REPLIES = ("pushed", "pulled", "parked")
_BEAT = wire.frame(pb.Request(beat=pb.Beat()), [])
