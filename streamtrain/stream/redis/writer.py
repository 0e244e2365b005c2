"""Writes to Redis Streams.

Messages go in batches, one script call each, which the server carries out whole or not at all. With a batch it stores
the batch's number under the writer's name. So a batch of which the answer was lost with the connection is sent again as
it is, and the server answers without adding it twice. Ids chosen by the writer would do the same only as long as nobody
else writes to the stream.
"""

import secrets
import threading
import zlib
from collections import deque
from collections.abc import Mapping
from itertools import count
from typing import Any, NamedTuple

from streamtrain.errors import SourceError, SourceUnavailable, WriteFailed
from streamtrain.stream.redis.connection import StreamConnection, StreamTopic
from streamtrain.stream.redis.group import RETRY
from streamtrain.stream.redis.scripts import WRITE

_BATCH_BYTES = 1 << 20  # of values, keys and headers in one call
_BATCH_MESSAGES = 1000  # in one call: the server does nothing else for some milliseconds
_REMEMBERED = 7 * 86_400_000  # ms after its last batch, within which a batch may be repeated


class _Message(NamedTuple):
    partition: int
    fields: tuple[Any, ...]  # number of those after the value, the value, those
    size: int


class RedisWriter:
    """Writes messages in batches, from a thread of its own.

    Args:
        topic: the topic to write to.
        maxlen: messages that a partition keeps, approximately, older ones being deleted; 0: all.
        buffer_bytes: maximum size of messages that wait to be written.
    """

    def __init__(self, topic: StreamTopic, maxlen: int, buffer_bytes: int) -> None:
        self._server, self._keys, self._partitions, self._name = topic
        self._maxlen, self._buffer_bytes = maxlen, buffer_bytes
        self._key = self._keys.writer(secrets.token_hex(8))
        self.partitions = self._partitions
        self._changed = threading.Condition()
        self._queue: deque[_Message] = deque()
        self._size = self._unwritten = 0  # bytes and messages, of the queue and the batch under way
        self._turn, self._batches = count(), count(1)
        self._failure: WriteFailed | None = None
        self._closed = False
        self._connection: StreamConnection | None = None
        self._thread = threading.Thread(target=self._run, name=f"redis-writer-{topic.keys.topic}", daemon=True)
        self._thread.start()

    def max_value_bytes(self, key: bytes | None = None, headers: Mapping[str, bytes] = {}) -> int:
        """A message cannot be larger than the buffer."""
        return self._buffer_bytes - sum(map(len, _fields(key, headers)))

    def write(
        self, value: bytes, *, partition: int | None = None, key: bytes | None = None, headers: Mapping[str, bytes] = {}
    ) -> None:
        if partition is None:
            partition = (next(self._turn) if key is None else zlib.crc32(key)) % self._partitions
        elif not 0 <= partition < self._partitions:
            raise WriteFailed(f"{self._name} has partitions 0 to {self._partitions - 1}, but not {partition}")
        more = _fields(key, headers)
        size = len(value) + sum(map(len, more))
        if size > self._buffer_bytes:
            raise WriteFailed(
                f"a message for {self._name} has {size} bytes, more than buffer_bytes, {self._buffer_bytes}"
            )
        message = _Message(partition, (len(more), value, *more), size)
        with self._changed:
            if self._size + size > self._buffer_bytes:
                self._changed.wait_for(lambda: self._size + size <= self._buffer_bytes or self._is_over())
            if self._is_over():
                raise self._failure or WriteFailed(f"the writer to {self._name} is closed")
            self._queue.append(message)
            self._size += size
            self._unwritten += 1
            if len(self._queue) == 1:
                self._changed.notify_all()

    def _is_over(self) -> bool:
        return self._closed or self._failure is not None

    def flush(self, seconds: float) -> int:
        with self._changed:
            self._changed.wait_for(lambda: not self._unwritten or self._is_over(), seconds)
            if self._failure:
                raise self._failure
            return self._unwritten

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            while batch := self._next():
                self._send(batch)
                with self._changed:
                    self._size -= sum(message.size for message in batch)
                    self._unwritten -= len(batch)
                    self._changed.notify_all()
        except SourceError as error:
            with self._changed:
                self._failure = error if isinstance(error, WriteFailed) else WriteFailed(str(error))
                self._failure.__cause__ = error
                self._changed.notify_all()
        finally:
            self._disconnect()

    def _next(self) -> list[_Message]:
        """The next messages, as many as wait; none once it is closed."""
        batch: list[_Message] = []
        size = 0
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            while self._queue and not self._closed and len(batch) < _BATCH_MESSAGES and size < _BATCH_BYTES:
                batch.append(self._queue.popleft())
                size += batch[-1].size
        return batch

    def _send(self, batch: list[_Message]) -> None:
        """Returns once the batch is written, or the writer closed."""
        index = {partition: i for i, partition in enumerate(dict.fromkeys(m.partition for m in batch), 1)}
        streams = [self._keys.stream(partition) for partition in index]
        command: list[Any] = ["EVAL", WRITE, 2 + len(streams), self._keys.partitions, self._key, *streams]
        command += (next(self._batches), _REMEMBERED, self._maxlen)
        for message in batch:
            command.append(index[message.partition])
            command += message.fields
        is_again = False
        while not self._closed:
            try:
                # A broken connection says little: only if a new one fails, the server is unreachable.
                self._connection = self._connection or (
                    self._server.reconnect() if is_again else self._server.connect()
                )
                if self._connection.call(*command) is None:
                    raise WriteFailed(f"{self._name} does not exist any more")
                return
            except SourceUnavailable:
                self._disconnect()
                if is_again:
                    self._pause()
                is_again = True

    def _pause(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed, RETRY)

    def _disconnect(self) -> None:
        if self._connection:
            self._connection.close()
            self._connection = None


def _fields(key: bytes | None, headers: Mapping[str, bytes]) -> list[Any]:
    """Fields and values of an entry, in turns, but those of the value."""
    more: list[Any] = [] if key is None else ["k", key]
    for name, content in headers.items():
        more += (f"h.{name}", content)
    return more
