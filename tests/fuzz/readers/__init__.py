"""Readers under atheris: each module has `run`, which raises on what must not be, and `seeds`."""

from collections.abc import Callable


def tried(what: Callable[[], object], *refusals: type[Exception]) -> None:
    """What refuses, refuses by a documented error with a message."""
    try:
        what()
    except refusals as exc:
        if not str(exc):
            raise AssertionError("the refusal does not say why") from exc
