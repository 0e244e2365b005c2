"""Fixtures of the tests of verification."""

from tests.publish.published import server
from tests.serve.conftest import published, redis_binary, redis_url, valkey

__all__ = ["published", "redis_binary", "redis_url", "server", "valkey"]
