"""Servers of the Redis protocol for tests: the embedded Valkey, and the system's Redis where it is installed."""

import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import closing

import pytest
import redis

from streamtrain.embedded.valkey import Valkey
from streamtrain.stream.redis.stream import RedisStream
from tests.stream.recorded import Recorder

SERVERS = ("valkey", "redis")
_topics = itertools.count()


def server_binary(server: str) -> str | None:
    """Path of a server's program, None for the embedded one. Skips where it is missing, unless it must be there."""
    if server == "valkey":
        return None
    path = shutil.which("redis-server")
    if path is None:
        missing = "there is no redis-server: apt-get install redis-server"
        if "redis" in os.environ.get("STREAMTRAIN_REQUIRE", "").split(","):
            pytest.fail(missing)
        pytest.skip(missing)
    return path


@pytest.fixture(params=SERVERS, scope="session")
def redis_binary(request: pytest.FixtureRequest) -> str | None:
    """The program of each server, for tests that kill, stop or set up their own."""
    return server_binary(request.param)


@pytest.fixture(scope="session")
def redis_url(redis_binary: str | None) -> Iterator[str]:
    """A server that all tests share: use topics of your own."""
    with Valkey(binary=redis_binary) as server:
        yield server.url


@pytest.fixture(scope="session")
def valkey() -> Iterator[str]:
    """The embedded server, for tests that are not repeated on the other."""
    with Valkey() as server:
        yield server.url


@pytest.fixture(scope="session")
def redis_server() -> Iterator[str]:
    """The system's Redis, for tests that are not repeated on the other."""
    with Valkey(binary=server_binary("redis")) as server:
        yield server.url


@pytest.fixture
def stream(redis_url: str) -> RedisStream:
    """A topic of three partitions on the shared server."""
    stream = RedisStream(redis_url, f"topic{next(_topics)}", lease=3.0)
    stream.create(3)
    return stream


@pytest.fixture
def client(redis_url: str) -> Iterator["redis.Redis"]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def write(stream: RedisStream, partition: int, *values: bytes) -> None:
    with closing(stream.writer()) as writer:
        for value in values:
            writer.write(value, partition=partition)
        assert writer.flush(120) == 0


def key_of(stream: RedisStream, partition: int) -> str:
    return f"streamtrain:{{{stream.topic}}}:stream:{partition}"
