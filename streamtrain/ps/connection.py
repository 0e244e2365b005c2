"""Connection: how messages go between a worker and a shard, there and back."""

import queue
from collections.abc import Callable
from typing import Any

from streamtrain._core import Lane
from streamtrain.ps.control import Metadata

_MOST_BYTES = 1 << 31  # of an answer


class Connection:
    """A call of gRPC; and a lane, once the shard has taken it.

    Args:
        open_call: begins the call.
        metadata: sent with it.
        first: the first message.
    """

    def __init__(self, open_call: Callable[..., Any], metadata: Metadata, first: bytes) -> None:
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._requests.put(first)  # before any other: beats may come at any moment
        self._call = open_call(iter(self._requests.get, None), metadata=metadata)
        self._lane: Lane | None = None

    def move(self, lane: Lane) -> None:
        """From now on messages go through a lane, which ends with the call."""
        if not self._call.add_callback(lane.close):
            lane.close()
        self._lane = lane

    def say(self, data: bytes) -> None:
        """Sends a message. Thread-safe. That the other side is gone shows when it is heard."""
        if self._lane is None:
            self._requests.put(data)
            return
        try:
            self._lane.write(data)
        except ValueError:  # the other side has damaged the lane: whoever hears is told
            self._call.cancel()

    def hear(self) -> bytes:
        """Waits for the next message; used by one thread.

        Raises:
            StopIteration: the other side has ended the call.
            RpcError: the call has failed.
            ValueError: what is in the lane is no message.
        """
        data = self._lane.read(_MOST_BYTES) if self._lane is not None else None
        return bytes(next(self._call)) if data is None else data

    def cancel(self) -> None:
        """Has the call fail. Thread-safe."""
        self._call.cancel()

    def close(self) -> None:
        """Ends it."""
        self._requests.put(None)  # ends the thread of gRPC that reads it
        self._call.cancel()
