"""Fixtures of the tests of serving."""

from collections.abc import Iterator

import pytest

from tests.serve.in_redis import InRedis
from tests.stream.redis_fixtures import redis_binary, redis_url, valkey

__all__ = ["redis_binary", "redis_url", "valkey"]


@pytest.fixture
def published(redis_url: str) -> Iterator[InRedis]:
    """A model of its own on the shared server."""
    published = InRedis(redis_url)
    yield published
    published.server.close()
