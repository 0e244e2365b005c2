"""Connections to a server of the Redis protocol: how they are made, what their errors mean, and whether it answers."""

import logging
import threading
import time
from typing import Any, NamedTuple

import redis

from streamtrain.errors import SourceError, SourceRefused, SourceUnavailable
from streamtrain.redis_client import describe_error, open_pool, server_name
from streamtrain.stream.redis.scripts import StreamKeys

logger = logging.getLogger("streamtrain.stream.redis.stream")

_REMEDIES = {
    "OOM": "its memory is full: raise maxmemory, or have writers keep fewer messages (maxlen)",
    "MOVED": "it is a node of a cluster without this topic: use the address of the node that has it",
    "WRONGTYPE": "a key of this topic was not written by streamtrain: delete it, or use another topic",
}


class StreamServer:
    """A server. Logs one line when it becomes unreachable, and one when it is reachable again. Thread-safe.

    Args:
        url: "redis://", "rediss://" (TLS) or "unix://"; with user, password and database.
        timeout: seconds that connecting, and any answer, may take.

    Attributes:
        is_unreachable: whether it did not answer the last request.

    Raises:
        ConfigError: the URL is invalid.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self._pool = open_pool(url, timeout)
        self.timeout = timeout
        self.name = server_name(self._pool)
        self._lock = threading.Lock()
        self.is_unreachable = False
        self._worked = 0.0

    def connect(self) -> "StreamConnection":
        """A new connection, on which the server has answered a PING.

        Raises:
            SourceUnavailable: it does not answer.
            SourceRefused: it refuses the credentials.
        """
        raw = self._pool.connection_class(**self._pool.connection_kwargs)
        connection = StreamConnection(self, raw)
        try:
            raw.connect()
        except redis.RedisError as error:
            raise self.translate(error) from error
        try:
            connection.call("PING")
        except SourceError:
            connection.close()
            raise
        self._mark_reachable()
        return connection

    def reconnect(self) -> "StreamConnection":
        """Connects, for callers that retry: logs that the server is unreachable."""
        began = time.monotonic()
        try:
            return self.connect()
        except SourceUnavailable as error:
            self.mark_unreachable(error, began)
            raise

    def mark_unreachable(self, reason: SourceUnavailable, since: float) -> None:
        """The server did not answer a request of the time `since`, by the monotonic clock."""
        with self._lock:
            # Another thread may have reached it after this one began to wait for nothing.
            if not self.is_unreachable and since >= self._worked:
                self.is_unreachable = True
                logger.warning("%s is unreachable: %s", self.name, reason)

    def _mark_reachable(self) -> None:
        with self._lock:
            self._worked = time.monotonic()
            if self.is_unreachable:
                self.is_unreachable = False
                logger.warning("%s is reachable again", self.name)

    def translate(self, error: redis.RedisError) -> SourceError:
        """The error of `streamtrain.errors`."""
        trouble = describe_error(error, _REMEDIES)
        if trouble.kind == "away":
            return SourceUnavailable(trouble.reply)
        return SourceRefused(f"{self.name} {trouble.text}")


class StreamConnection:
    """One connection, for one thread at a time. Requests are answered in order; answers may be waited for in parts.

    Every method that speaks to the server raises SourceUnavailable when the connection breaks, which ends it.
    """

    def __init__(self, server: StreamServer, connection: Any) -> None:
        self._server = server
        self._connection = connection
        self._replies: list[Any] = []
        self._expected = 0
        self._sent = 0.0

    @property
    def pending(self) -> bool:
        """Whether something was sent of which the answers have not been taken."""
        return self._expected > 0

    def send(self, *commands: tuple[Any, ...]) -> None:
        """Sends commands; before the next, their answers must have been taken."""
        self._replies, self._expected, self._sent = [], len(commands), time.monotonic()
        try:
            self._connection.send_packed_command(self._connection.pack_commands(commands), check_health=False)
        except redis.RedisError as error:
            raise self._broken(error) from error

    def receive(self, seconds: float, late: float) -> list[Any] | None:
        """Answers to what was sent; None: some are missing still. What the server refuses is answered with the error.

        Args:
            seconds: maximum wait.
            late: seconds after sending from which on the server counts as unreachable.
        """
        deadline = time.monotonic() + seconds
        while len(self._replies) < self._expected:
            try:
                left = max(0.0, deadline - time.monotonic())
                self._replies.append(self._connection.read_response(timeout=left, disconnect_on_error=False))
            except redis.ResponseError as error:
                self._replies.append(error)
            except redis.TimeoutError as error:
                if time.monotonic() - self._sent < late:
                    return None
                self.close()
                unavailable = SourceUnavailable(f"it has not answered for {time.monotonic() - self._sent:.1f} s")
                self._server.mark_unreachable(unavailable, self._sent)
                raise unavailable from error
            except redis.RedisError as error:
                raise self._broken(error) from error
        self._expected = 0
        return self._replies

    def call(self, *command: Any) -> Any:
        """The answer to a command; raises SourceRefused if it is refused."""
        self.send(command)
        replies = self.receive(self._server.timeout, self._server.timeout)
        assert replies is not None
        return self.checked(replies[0])

    def checked(self, reply: Any) -> Any:
        """Returns an answer; raises it if it is an error."""
        if isinstance(reply, redis.RedisError):
            raise self._server.translate(reply) from reply
        return reply

    def _broken(self, error: redis.RedisError) -> SourceError:
        self.close()
        return self._server.translate(error)

    def close(self) -> None:
        """Ends the connection."""
        self._connection.disconnect()


class StreamTopic(NamedTuple):
    """A topic that exists.

    Attributes:
        server: the Redis server.
        keys: its keys.
        partitions: their number.
        name: the topic's name, for errors.
    """

    server: StreamServer
    keys: StreamKeys
    partitions: int
    name: str
