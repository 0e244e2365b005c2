"""Fixtures of the tests of clusters."""

from tests.cluster.published import server

__all__ = ["server"]
