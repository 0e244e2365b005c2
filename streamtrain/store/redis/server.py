"""Servers of the Redis protocol, alone or a cluster: connections, error translation, and pipelining."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import redis
from numpy.typing import NDArray

from streamtrain.errors import OriginUnavailable, PublicationError
from streamtrain.redis_client import connection_options, describe_error, open_pool, server_name
from streamtrain.store.redis.commands import CommandBatch

Fields = Mapping[bytes, bytes]

_INFO = ("server", "replication", "memory")
_WAYS_OUT = {
    "OOM": "its memory is full: give it more (maxmemory), keep fewer versions, or rows as float16 or int8",
    "WRONGTYPE": "a key of this model was not written by streamtrain: delete it, or use another server",
    "CROSSSLOT": "it is a cluster: connect with cluster=True",
}


class NodeInfo(NamedTuple):
    """State of a server, or of a primary of a cluster, from INFO.

    Attributes:
        name: its address.
        life: changes when the server restarts or fails over to a replica, so that it may have lost data.
        policy: its `maxmemory-policy`.
        replicas: number of connected replicas.
    """

    name: str
    life: str
    policy: str
    replicas: int

    @property
    def evicts(self) -> bool:
        """Whether it may evict keys without an expiry."""
        return self.policy.startswith("allkeys")


class RedisServer:
    """A Redis server or cluster. Thread-safe. Connects at first use.

    Args:
        url: "redis://user:password@host:port/db", "rediss://…" for TLS, or "unix://path"; of any node of a cluster.
        cluster: whether it is a Redis Cluster.
        timeout: seconds allowed for connecting and for each reply.

    Attributes:
        name: name for messages, without credentials.

    Raises:
        ConfigError: the URL is invalid.
    """

    def __init__(self, url: str, *, cluster: bool = False, timeout: float = 5.0) -> None:
        pool, options = open_pool(url, timeout), connection_options(timeout)
        self.name = server_name(pool)
        self.timeout, self.is_cluster = timeout, cluster
        self._single = None if cluster else redis.Redis(connection_pool=pool)
        self._open_cluster: Callable[[], Any] = lambda: redis.RedisCluster.from_url(url, **options)
        self._lock = threading.Lock()
        self._cluster: Any = None

    def call(self, *command: Any) -> Any:
        """Runs a command on keys of one slot.

        Raises:
            OriginUnavailable: no reply; the command may or may not have run.
            PublicationError: the server refuses the command.
        """
        with self.translating():
            return self._client().execute_command(*command)

    def call_all(self, commands: Iterable[tuple[Any, ...]]) -> list[Any]:
        """Runs commands on keys of one slot in a pipeline; see `call`."""
        with self.translating():
            pipeline = self._client().pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            return list(pipeline.execute())

    def scan(self, pattern: str) -> list[bytes]:
        """Names of keys that match a glob pattern, of all nodes; see `call`. It reads the names of all keys."""
        with self.translating():
            return list(self._client().scan_iter(match=pattern, count=1000))

    def nodes(self) -> list[NodeInfo]:
        """State of the server, or of every primary of the cluster; errors as for `call`."""
        with self.translating():
            client = self._client()
            if self._single is not None:
                return [_node_info(self.name, client.execute_command("INFO", *_INFO))]
            primaries = sorted(client.get_primaries(), key=lambda node: str(node.name))
            return [
                _node_info(node.name, client.get_redis_connection(node).execute_command("INFO", *_INFO))
                for node in primaries
            ]

    def call_replicated(self, *command: Any, key: str, seconds: float) -> tuple[Any, int]:
        """Runs a command; returns its reply and the number of replicas that acknowledged it within `seconds`.

        Args:
            command: a command on keys of one slot.
            key: one of these keys.
            seconds: how long to wait for one replica, at most about half the timeout; 0: do not wait.

        Raises:
            OriginUnavailable, PublicationError: see `call`.
        """
        milliseconds = int(min(seconds, self.timeout / 2) * 1000)
        if not milliseconds:
            return self.call(*command), 0
        with self.translating():
            client = self._client()
            if self._single is None:
                client = client.get_redis_connection(client.get_node_from_key(key))
            pipeline = client.pipeline(transaction=False)
            pipeline.execute_command(*command)
            pipeline.execute_command("WAIT", 1, milliseconds)
            answer, acknowledged = pipeline.execute()
            return answer, int(acknowledged)

    def wait(self, key: str, after: str, count: int, seconds: float) -> list[Any]:
        """At most `count` entries of a stream after an id; waits up to `seconds` for the first."""
        # The server must not wait for longer than the connection does. Any wait may take it a tenth of a second.
        milliseconds = min(int(seconds * 1000), int(self.timeout * 500))
        block = ("BLOCK", milliseconds) if milliseconds > 0 else ()
        with self.translating():
            found = self._client().execute_command("XREAD", "COUNT", count, *block, "STREAMS", key, after)
        if isinstance(found, dict):
            return [entry for entries in found.values() for entry in entries]
        return list(found[0][1]) if found else []

    def close(self) -> None:
        if self._single is not None:
            self._single.connection_pool.disconnect(inuse_connections=False)  # a client does not close a given pool
        if self._cluster is not None:
            self._cluster.close()

    def connections(self, slots: NDArray[np.int64]) -> Iterator[tuple["PipelinedConnection", NDArray[np.int64]]]:
        """Yields, for each node that owns some of the slots, a connection and the indices of these slots."""
        with self.translating():
            client = self._client()
            parts = [(self._single, np.arange(len(slots)))] if self._single else list(self._by_node(client, slots))
        for node, indices in parts:
            with self._connection_to(node) as lane:
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
    def _connection_to(self, client: Any) -> Iterator["PipelinedConnection"]:
        pool = client.connection_pool
        with self.translating():
            connection = pool.get_connection()
        lane = PipelinedConnection(self, connection)
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
        try:
            yield
        except redis.RedisError as error:
            raise self._translated(error) from error

    def _translated(self, error: redis.RedisError) -> PublicationError:
        trouble = describe_error(error, _WAYS_OUT)
        if isinstance(error, redis.exceptions.MovedError | redis.exceptions.AskError):
            if self._cluster:
                with self._lock:
                    self._cluster.close()
                    self._cluster = None  # the next one asks anew who has what
                return OriginUnavailable(f"{self.name} is moving slots: {trouble.reply}")
            return PublicationError(
                f"{self.name} refused: {trouble.reply}; it is a node of a cluster: connect with cluster=True"
            )
        kind = OriginUnavailable if trouble.kind == "away" else PublicationError
        return kind(f"{self.name} {trouble.text}")


def parse_fields(reply: Any) -> Fields:
    """Fields of a hash or of a stream's entry, which the client returns flat or as a dictionary."""
    return reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2], strict=True))


def _node_info(name: str, info: Mapping[str, Any]) -> NodeInfo:
    life = f"{info.get('run_id', '')} {info.get('master_replid', '')}"
    return NodeInfo(name, life, str(info.get("maxmemory_policy", "")), int(info.get("connected_slaves", 0)))


class PipelinedConnection:
    """A connection for many commands.

    Attributes:
        is_dirty: whether replies may be outstanding.
    """

    def __init__(self, server: RedisServer, connection: Any) -> None:
        self._server, self._connection = server, connection
        self.is_dirty = False

    def run(self, batches: Iterable[CommandBatch]) -> Iterator[tuple[CommandBatch, list[Any]]]:
        """Runs batches of commands and yields each with its replies; the next batch is sent before they are read.

        Raises:
            OriginUnavailable: the connection broke; any of the commands may have run.
            PublicationError: the server refuses a command.
        """
        self.is_dirty = True
        sent: CommandBatch | None = None
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
        # The parser directly: what Connection.read_response does around each reply doubles its cost.
        read = self._connection._parser.read_response
        with self._server.translating():
            answers = [read() for _ in range(count)]
            if refused := next((one for one in answers if isinstance(one, redis.ResponseError)), None):
                raise refused
        return answers
