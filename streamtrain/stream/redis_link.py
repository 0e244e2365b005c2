"""Connections to a server of the Redis protocol: how they are made, what their errors mean, and whether it answers."""

import logging
import threading
import time
from typing import Any, NamedTuple

import redis

from streamtrain.errors import SourceError, SourceRefused, SourceUnavailable
from streamtrain.redis_client import name_of, pool_of, trouble_of
from streamtrain.stream.redis_scripts import Keys

logger = logging.getLogger("streamtrain.stream.redis_streams")

_WAYS_OUT = {
    "OOM": "its memory is full: give it more (maxmemory), or have writers keep less of the stream (maxlen)",
    "MOVED": "it is a node of a cluster that does not have this topic: use the address of the node that has",
    "WRONGTYPE": "a key of this topic is none of ours: delete it, or use another topic",
}


class Link:
    """A server: connects to it, and keeps whether it is away, of which it logs one line, and one when it is back.

    Thread-safe.

    Args:
        url: "redis://", "rediss://" (TLS) or "unix://"; with user, password and database.
        timeout: seconds that connecting, and any answer, may take.

    Attributes:
        is_away: whether it did not answer, and has not since.

    Raises:
        ConfigError: there is no such URL.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self._pool = pool_of(url, timeout)
        self.timeout = timeout
        self.name = name_of(self._pool)
        self._lock = threading.Lock()
        self.is_away = False
        self._worked = 0.0

    def connect(self) -> "Lane":
        """A new connection, on which the server has answered.

        Raises:
            SourceUnavailable: it does not.
            SourceRefused: not to these credentials.
        """
        connection = self._pool.connection_class(**self._pool.connection_kwargs)
        lane = Lane(self, connection)
        try:
            connection.connect()
        except redis.RedisError as error:
            raise self.translate(error) from error
        try:
            lane.call("PING")
        except SourceError:
            lane.close()
            raise
        self._back()
        return lane

    def reconnect(self) -> "Lane":
        """Connects for those who will try until it works: that the server is away is logged."""
        began = time.monotonic()
        try:
            return self.connect()
        except SourceUnavailable as error:
            self.away(error, began)
            raise

    def away(self, reason: SourceUnavailable, since: float) -> None:
        """It did not answer what was asked at `since` of the monotonic clock."""
        with self._lock:
            # Another thread may have reached it after this one began to wait for nothing.
            if not self.is_away and since >= self._worked:
                self.is_away = True
                logger.warning("%s is away: %s", self.name, reason)

    def _back(self) -> None:
        with self._lock:
            self._worked = time.monotonic()
            if self.is_away:
                self.is_away = False
                logger.warning("%s is back", self.name)

    def translate(self, error: redis.RedisError) -> SourceError:
        """The error of our tree."""
        trouble = trouble_of(error, _WAYS_OUT)
        if trouble.kind == "away":
            return SourceUnavailable(trouble.said)
        return SourceRefused(f"{self.name} {trouble.text}")


class Lane:
    """One connection, for one thread at a time. Requests are answered in order; answers may be waited for in parts.

    Every method that speaks to the server raises SourceUnavailable when the connection breaks, which ends it.
    """

    def __init__(self, link: Link, connection: Any) -> None:
        self._link = link
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
        """Answers to what was sent; None: not all are there yet. What the server refuses is answered with the error.

        Args:
            seconds: how long to wait.
            late: seconds after sending when the server counts as away.
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
                self._link.away(unavailable, self._sent)
                raise unavailable from error
            except redis.RedisError as error:
                raise self._broken(error) from error
        self._expected = 0
        return self._replies

    def call(self, *command: Any) -> Any:
        """The answer to a command; raises SourceRefused if it is refused."""
        self.send(command)
        replies = self.receive(self._link.timeout, self._link.timeout)
        assert replies is not None
        return self.checked(replies[0])

    def checked(self, reply: Any) -> Any:
        """An answer that is no error; else raises it."""
        if isinstance(reply, redis.RedisError):
            raise self._link.translate(reply) from reply
        return reply

    def _broken(self, error: redis.RedisError) -> SourceError:
        self.close()
        return self._link.translate(error)

    def close(self) -> None:
        """Ends the connection."""
        self._connection.disconnect()


class Topic(NamedTuple):
    """A topic that there is.

    Attributes:
        link: to its server.
        keys: its keys.
        partitions: their number.
        name: for errors.
    """

    link: Link
    keys: Keys
    partitions: int
    name: str
