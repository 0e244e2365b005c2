"""Fixtures of the tests of the join."""

from tests.stream.servers import kafka

__all__ = ["kafka"]
