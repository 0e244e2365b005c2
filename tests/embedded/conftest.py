"""Fixtures of the tests of embedded servers."""

from tests.stream.servers import kafka, own_kafka

__all__ = ["kafka", "own_kafka"]
