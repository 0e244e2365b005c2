"""A client that says whatever it is told to, for what no client of ours would say; and patience with a deadline."""

import queue
from collections import deque
from typing import Any

import grpc
import numpy as np
import pytest
import streamtrain.ps.rpc.ps_pb2 as pb

from streamtrain.ps.rpc import wire
from tests.patience import PATIENCE
from tests.ps.counting import SPEC


class Raw:
    """A session that sends bytes as they are.

    Args:
        channel: to the server.
        metadata: of the call.
        method: any other is called as if it took a stream, too.
    """

    def __init__(self, channel: Any, metadata: tuple[tuple[str, str], ...] = (), method: str = "Session") -> None:
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        call = channel.stream_stream(f"/{wire.SERVICE}/{method}")
        self._call = call(iter(self._queue.get, None), timeout=PATIENCE, metadata=metadata)

    def say(self, *data: bytes) -> "Raw":
        """Sends messages."""
        for one in data:
            self._queue.put(one)
        return self

    def hear(self) -> tuple[Any, memoryview]:
        """The next answer and its bulk."""
        return wire.unframe(pb.Answer, next(self._call))

    def hear_what(self) -> str:
        """What the next answer is."""
        return " and ".join(
            field.name for field, _ in self.hear()[0].ListFields() if field.name not in ("padding", "bulk")
        )

    def refusal(self) -> tuple[grpc.StatusCode, str]:
        """The status with which the server ends the session; answers before it are skipped."""
        with pytest.raises(grpc.RpcError) as caught:
            deque(self._call, maxlen=0)
        self._queue.put(None)
        return caught.value.code(), caught.value.details()

    def end(self) -> None:
        """Says that there is nothing more to say, and waits for the server to end the session."""
        self._queue.put(None)
        deque(self._call, maxlen=0)

    def vanish(self) -> None:
        """Ends the session without a word."""
        self._call.cancel()
        self._queue.put(None)


def join_of(**changed: Any) -> bytes:
    """A join of the counting model's only shard, but for what is changed."""
    fields = {"worker": "raw", "run": "run", "identity": SPEC.identity, "shard": 0, "shards": 1, **changed}
    return wire.frame(pb.Request(join=pb.Join(**fields)), [])


def pull_of(rows: list[int], keys: Any = ()) -> bytes:
    return wire.frame(pb.Request(pull=pb.Pull(rows=rows)), [np.asarray(keys, np.uint64)])


def push_of(spans: list[tuple[int, int, int]], bulk: Any = (), **fields: Any) -> bytes:
    """A push with any bulk, an array."""
    push = pb.Push(spans=[pb.Span(partition=p, start=s, end=e) for p, s, e in spans], **fields)
    return wire.frame(pb.Request(push=push), [np.asarray(bulk)])
