"""Remote: a shard behind gRPC, as a session for a worker and as a control for who runs the cluster."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import grpc
import numpy as np
from numpy.typing import NDArray

import streamtrain.ps.ps_pb2 as pb
from streamtrain.errors import ShardError, ShardUnavailable
from streamtrain.model.features import RowType
from streamtrain.ps import wire
from streamtrain.ps.connection import Connection
from streamtrain.ps.control import Metadata, RemoteControl, Retry, Route, patiently, translated
from streamtrain.ps.lane import offer, offered
from streamtrain.ps.push import Push, Pushed
from streamtrain.ps.session import Into

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Introduction:
    """Who talks to which shard about what.

    Attributes:
        worker: name of the worker, unique in the cluster.
        run: what is learned.
        identity: of the model.
        shards: number of shards.
        dtype: of floats on the wire.
        lanes: whether messages go through shared memory, where the shard is of this machine.
    """

    worker: str
    run: str
    identity: str
    shards: int
    dtype: RowType = "float32"
    lanes: bool = True


@dataclass(eq=False)
class _Asked(Generic[T]):
    """A request (a Push, a Pull or nothing) that may have to be sent again, and its answer once it is there."""

    session: "RemoteSession"
    kind: str
    request: Any
    take: Callable[[Any, memoryview], T]
    answers: list[T] = field(default_factory=list)

    def result(self) -> T:
        while not self.answers:
            self.session.receive()
        return self.answers[0]


class RemoteSession:
    """A session with a shard behind gRPC; see Session.

    Whatever is sent may be sent twice: when the connection breaks or the shard is silent for too long, a new one is
    made, and all requests without an answer are sent again, in their order.

    Args:
        channel: to the shard's server.
        target: its address, for messages.
        index: of the shard.
        who: what the shard is told in the beginning.
        revive: called when the shard is empty: a new one in the place of one that was lost.
        retry: how to deal with silence.
        metadata: sent with the call, such as a token.
        stopped: once set, waiting for a connection ends with ShardUnavailable.
        route: to the shard, if it has a backup: who is connected to.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        target: str,
        index: int,
        who: Introduction,
        revive: Callable[[], object],
        *,
        retry: Retry | None = None,
        metadata: Metadata = (),
        stopped: threading.Event | None = None,
        route: Route | None = None,
    ) -> None:
        self._route = route
        self._index = index
        self._who = who
        self._revive = revive
        self._retry = retry or Retry()
        self._metadata = metadata
        self._stopped = stopped or threading.Event()
        self._connection: Connection | None = None
        self._asked: deque[_Asked[Any]] = deque()
        self._held: _Asked[Pushed] | None = None
        self._progress: int | None = None
        self._waiting_since = float("inf")
        self._said = 0.0
        self.reconnects = 0
        self.away = False
        self._go_to(channel, target)

    def _go_to(self, channel: grpc.Channel, target: str) -> None:
        self._open = channel.stream_stream(f"/{wire.SERVICE}/Session")
        self._control = RemoteControl(channel, target, self._metadata)
        self._target = target

    def join(self, progress: int | None) -> int:
        """See Session."""
        self._progress = progress
        self._connect()
        assert self._progress is not None
        return self._progress

    def pull(self, keys: Sequence[NDArray[np.uint64]], into: Into, ahead: int) -> _Asked[None]:
        """See Session."""
        dtype = self._who.dtype

        def take(answer: Any, bulk: memoryview) -> None:
            floats = wire.Bulk(bulk, dtype)
            for out in (*into.rows, into.dense, into.statistics):
                floats.floats_into(out)
            floats.end()

        asked = _Asked(self, "pulled", wire.Pull(keys, ahead), take)
        self._asked.append(asked)
        push, self._held = self._held, None
        self._say(wire.encode_request(push.request if push else None, asked.request, dtype))
        return asked

    def push(self, push: Push) -> _Asked[Pushed]:
        """See Session."""

        def take(answer: Any, _: memoryview) -> Pushed:
            pushed = wire.decode_pushed(answer.pushed)
            if self._progress is not None and pushed.outcome is not pushed.outcome.REJECTED:
                self._progress += 1
            return pushed

        self._flush()
        self._held = _Asked(self, "pushed", push, take)
        self._asked.append(self._held)
        return self._held

    def park(self) -> None:
        """See Session."""
        self._flush()
        asked = _Asked(self, "parked", None, lambda answer, bulk: None)
        self._asked.append(asked)
        self._say(_PARK)
        asked.result()

    def beat(self) -> None:
        """See Session. Also gives up a connection on which an answer is overdue."""
        now = time.monotonic()
        connection = self._connection
        if connection is None:
            return
        if now - self._waiting_since > self._retry.timeout:
            connection.cancel()
        elif self._waiting_since == float("inf") and now - self._said > self._retry.timeout / 8:
            connection.say(_BEAT)

    def close(self) -> None:
        """See Session."""
        if self._connection is not None:
            self._connection.close()

    def _flush(self) -> None:
        """Sends a push that was held back to go together with a pull: a message costs more than what is in it."""
        push, self._held = self._held, None
        if push is not None:
            self._say(wire.encode_request(push.request, None, self._who.dtype))

    def _say(self, data: bytes) -> None:
        assert self._connection is not None
        self._said = time.monotonic()
        self._connection.say(data)

    def receive(self) -> None:
        """Waits for the answer to the first request that has none."""
        self._flush()
        try:
            answer, bulk = self._next()
        except ShardUnavailable as exc:
            self._reconnect(exc)
            return
        for kind in _ANSWERS:
            if answer.HasField(kind):
                if not self._asked or self._asked[0].kind != kind:
                    raise ShardError(f"{self._target} answers {kind}, which is not what it was asked")
                asked = self._asked[0]
                asked.answers.append(asked.take(answer, bulk))
                self._asked.popleft()

    def _next(self) -> tuple[Any, memoryview]:
        assert self._connection is not None
        self._waiting_since = time.monotonic()
        try:
            return wire.unframe(pb.Answer, self._connection.hear())
        except ValueError as exc:
            raise ShardUnavailable(f"{self._target}: {exc}") from exc
        except StopIteration as exc:
            raise ShardUnavailable(f"{self._target} ended the session") from exc
        except grpc.RpcError as exc:
            raise translated(exc, self._target) from exc
        finally:
            self._waiting_since = float("inf")

    def _reconnect(self, why: ShardUnavailable) -> None:
        if self._stopped.is_set():
            raise why
        logger.warning("%s; connecting again", why)
        self.reconnects += 1
        self.away = True
        self._connect()
        logger.info("shard %d is reached again, at %s", self._index, self._target)
        self.away = False

    def _connect(self) -> None:
        """Joins, and sends again what has no answer."""
        patiently(self._try_to_connect, self._retry, self._stopped)

    def _try_to_connect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._route is not None:
            self._go_to(*self._route.find())
        if not self._control.status().ready:
            self._revive()
        who, lane = self._who, offer(self._target) if self._who.lanes else None
        join = pb.Join(
            worker=who.worker,
            run=who.run,
            identity=who.identity,
            shard=self._index,
            shards=who.shards,
            dtype=wire.DTYPES[who.dtype],
            progress=self._progress,
            lane=offered(lane) if lane else None,
        )
        self._connection = Connection(self._open, self._metadata, wire.frame(pb.Request(join=join), []))
        answer, _ = self._next()
        if lane and answer.joined.lane:
            self._connection.move(lane)
        self._progress = answer.joined.progress
        self._held = None
        for asked in self._asked:
            self._say(self._again(asked))

    def _again(self, asked: _Asked[Any]) -> bytes:
        if asked.kind == "pushed":
            return wire.encode_request(asked.request, None, self._who.dtype)
        return wire.encode_request(None, asked.request, self._who.dtype) if asked.kind == "pulled" else _PARK


# In the order in which they are taken up where they come together.
_ANSWERS = ("pushed", "pulled", "parked")
_PARK = wire.frame(pb.Request(park=pb.Park()), [])
_BEAT = wire.frame(pb.Request(beat=pb.Beat()), [])
