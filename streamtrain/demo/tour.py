"""What an operator does with versions, shown once."""

import threading
from collections.abc import Callable

from streamtrain.demo.endpoint import Endpoint, EndpointAway
from streamtrain.errors import StreamtrainError

_AGAIN = 1.0


class TourFailed(StreamtrainError):
    """A version could not be promoted, or not rolled back."""


def tour(
    make: Callable[[], int | None],
    endpoint: Endpoint,
    say: Callable[[str], object],
    stopped: threading.Event,
    pause: float,
) -> int | None:
    """Makes a version, promotes it, and rolls back, with pauses before each of the latter.

    Args:
        make: makes a version; returns its number, or None if there is to be none.
        endpoint: with a token.
        say: is told what was done.
        stopped: ends it early.
        pause: seconds.

    Returns:
        The version's number; None: it was ended before.

    Raises:
        TourFailed: the endpoint refuses.
    """
    if stopped.wait(pause):
        return None
    version = make()
    if version is None:
        return None
    say(f"made version {version}: it stays as it is, while the head goes on learning")
    try:
        if _did(endpoint, "promote", {"version": version, "why": "the demo shows it"}, stopped):
            say(f"promoted version {version}: predictions are of it from now on")
        if not stopped.wait(pause) and _did(endpoint, "rollback", {"why": "the demo shows it"}, stopped):
            say("rolled back: predictions are of the head again, as it learns")
    finally:
        endpoint.close()
    return version


def _did(endpoint: Endpoint, what: str, body: dict[str, object], stopped: threading.Event) -> bool:
    """Whether it was done before the end; tries again while nobody answers, or it cannot be had just now."""
    while not stopped.is_set():
        try:
            answer = endpoint.control(what, body)
        except EndpointAway:
            stopped.wait(_AGAIN)
            continue
        if answer.status == 200:
            return True
        if answer.status != 503:
            raise TourFailed(f"{what}: {answer.body}")
        stopped.wait(_AGAIN)
    return False
