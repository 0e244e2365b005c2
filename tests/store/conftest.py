"""Fixtures of the tests of what keeps published models."""

from collections.abc import Iterator

import pytest

from tests.store.published import Published
from tests.stream.redis_fixtures import client, redis_binary, redis_url

__all__ = ["client", "redis_binary", "redis_url"]


@pytest.fixture
def published(redis_url: str) -> Iterator[Published]:
    """A model of its own on the shared server."""
    published = Published(redis_url)
    yield published
    published.close()
