"""Fixtures of the tests of clusters."""

from tests.publish.published import server

__all__ = ["server"]
