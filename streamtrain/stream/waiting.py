"""Waiting for a service that does not answer."""

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from streamtrain.errors import SourceUnavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")
_PAUSE_SECONDS = 1.0


def available(ask: Callable[[], T], stopped: threading.Event) -> T:
    """Asks a service until it answers.

    Raises:
        SourceUnavailable: it does not, and `stopped` is set. Other errors as of `ask`.
    """
    told = False
    while True:
        try:
            return ask()
        except SourceUnavailable as exc:
            if stopped.is_set():
                raise
            if not told:
                logger.warning("%s; goes on asking", exc)
            told = True
            stopped.wait(_PAUSE_SECONDS)
