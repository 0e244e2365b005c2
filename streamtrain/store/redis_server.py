"""Servers of the Redis protocol, alone or a cluster: connections, what errors mean, and many commands at once."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import redis
from numpy.typing import NDArray

from streamtrain.errors import OriginUnavailable, PublicationError
from streamtrain.redis_client import name_of, options_of, pool_of, trouble_of
from streamtrain.store.redis_commands import Batch

_WAYS_OUT = {
    "OOM": "its memory is full: give it more (maxmemory), keep fewer versions, or rows as float16 or int8",
    "WRONGTYPE": "a key of this model is none of ours: delete it, or use another server",
    "CROSSSLOT": "it is a cluster: connect with cluster=True",
}


class RedisServer:
    """Where models are published. Thread-safe. Connects when it is first needed.

    Args:
        url: "redis://user:password@host:port/db", "rediss://…" for TLS, or "unix://path"; of any node of a cluster.
        cluster: whether it is a Redis Cluster.
        timeout: seconds that connecting, and any answer, may take.

    Attributes:
        name: for messages; without credentials.
        is_cluster: as given.

    Raises:
        ConfigError: there is no such URL.
    """

    def __init__(self, url: str, *, cluster: bool = False, timeout: float = 5.0) -> None:
        pool, options = pool_of(url, timeout), options_of(timeout)
        self.name = name_of(pool)
        self.timeout, self.is_cluster = timeout, cluster
        self._single = None if cluster else redis.Redis(connection_pool=pool)
        self._open_cluster: Callable[[], Any] = lambda: redis.RedisCluster.from_url(url, **options)
        self._lock = threading.Lock()
        self._cluster: Any = None

    def call(self, *command: Any) -> Any:
        """The answer to a command on keys of one slot.

        Raises:
            OriginUnavailable: it does not answer; whether the command was carried out is not known.
            PublicationError: it refuses.
        """
        with self.translating():
            return self._client().execute_command(*command)

    def call_all(self, commands: Iterable[tuple[Any, ...]]) -> list[Any]:
        """The answers to commands on keys of one slot, sent at once; see `call`."""
        with self.translating():
            pipeline = self._client().pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            return list(pipeline.execute())

    def wait(self, key: str, after: str, count: int, seconds: float) -> list[Any]:
        """Entries of a stream after an id, at most `count`; waits for the first for at most so long."""
        # The server must not wait for longer than the connection does.
        milliseconds = max(1, min(int(seconds * 1000), int(self.timeout * 500)))
        with self.translating():
            found = self._client().execute_command(
                "XREAD", "COUNT", count, "BLOCK", milliseconds, "STREAMS", key, after
            )
        if isinstance(found, dict):
            return [entry for entries in found.values() for entry in entries]
        return list(found[0][1]) if found else []

    def close(self) -> None:
        """Ends idle connections."""
        if self._single is not None:
            self._single.connection_pool.disconnect(inuse_connections=False)  # a client does not close a given pool
        if self._cluster is not None:
            self._cluster.close()

    def lanes(self, slots: NDArray[np.int64]) -> Iterator[tuple["Lane", NDArray[np.int64]]]:
        """For each node that has any of the slots a connection, while it is iterated, and indices of its slots."""
        with self.translating():
            client = self._client()
            parts = [(self._single, np.arange(len(slots)))] if self._single else list(self._by_node(client, slots))
        for node, indices in parts:
            with self._lane(node) as lane:
                yield lane, indices

    def _by_node(self, client: Any, slots: NDArray[np.int64]) -> Iterator[tuple[Any, NDArray[np.int64]]]:
        nodes: dict[str, Any] = {}
        names: list[str] = []
        distinct, inverse = np.unique(slots, return_inverse=True)
        for slot in distinct.tolist():
            node = client.nodes_manager.get_node_from_slot(slot)
            nodes[node.name] = node
            names.append(node.name)
        owners = np.array(names)[inverse] if names else np.empty(0, str)
        for name, node in nodes.items():
            yield client.get_redis_connection(node), np.flatnonzero(owners == name)

    @contextmanager
    def _lane(self, client: Any) -> Iterator["Lane"]:
        pool = client.connection_pool
        with self.translating():
            connection = pool.get_connection()
        lane = Lane(self, connection)
        try:
            yield lane
        finally:
            if lane.is_dirty:
                connection.disconnect()
            pool.release(connection)

    def _client(self) -> Any:
        if self._single is not None:
            return self._single
        with self._lock:
            if self._cluster is None:
                self._cluster = self._open_cluster()
            return self._cluster

    @contextmanager
    def translating(self) -> Iterator[None]:
        """Context in which errors of Redis become those of our tree."""
        try:
            yield
        except redis.RedisError as error:
            raise self._translated(error) from error

    def _translated(self, error: redis.RedisError) -> PublicationError:
        trouble = trouble_of(error, _WAYS_OUT)
        if isinstance(error, redis.exceptions.MovedError | redis.exceptions.AskError):
            if self._cluster:
                with self._lock:
                    self._cluster.close()
                    self._cluster = None  # the next one asks anew who has what
                return OriginUnavailable(f"{self.name} is moving slots: {trouble.said}")
            return PublicationError(
                f"{self.name} refuses: {trouble.said}; it is a node of a cluster: connect with cluster=True"
            )
        kind = OriginUnavailable if trouble.kind == "away" else PublicationError
        return kind(f"{self.name} {trouble.text}")


class Lane:
    """A connection for many commands.

    Attributes:
        is_dirty: whether answers may be outstanding.
    """

    def __init__(self, server: RedisServer, connection: Any) -> None:
        self._server, self._connection = server, connection
        self.is_dirty = False

    def run(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, list[Any]]]:
        """Carries out commands, and yields each batch with its answers; the next batch is on its way meanwhile.

        Raises:
            OriginUnavailable: the connection broke; which commands were carried out is not known.
            PublicationError: a command is refused.
        """
        self.is_dirty = True
        sent: Batch | None = None
        for batch in batches:
            with self._server.translating():
                self._connection.send_packed_command([batch.data.data], check_health=False)
            if sent is not None:
                yield sent, self._answers(sent.size)
            sent = batch
        if sent is not None:
            yield sent, self._answers(sent.size)
        self.is_dirty = False

    def _answers(self, count: int) -> list[Any]:
        # Of the parser, not of the connection: what that does around every answer takes twice as long as the answer.
        read = self._connection._parser.read_response
        with self._server.translating():
            answers = [read() for _ in range(count)]
            if refused := next((one for one in answers if isinstance(one, redis.ResponseError)), None):
                raise refused
        return answers
