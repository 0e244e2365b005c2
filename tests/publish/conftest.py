"""Fixtures of the tests of publishing."""

from tests.publish.published import server

__all__ = ["server"]
