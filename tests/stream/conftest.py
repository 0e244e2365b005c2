"""Fixtures of the tests of streams."""

import pytest

from tests.stream.kinds import KINDS, Place
from tests.stream.redis_fixtures import redis_server, valkey
from tests.stream.servers import kafka, own_kafka

__all__ = ["kafka", "own_kafka", "place", "redis_server", "valkey"]


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest) -> Place:
    """A server of every kind of streams, and a topic there that no other test has."""
    return Place(request.param, KINDS[request.param].server(request))
