"""Loop: a thread that does one thing again and again, and says how it is with it."""

import logging
import threading
import time
from collections.abc import Callable

from streamtrain.errors import OriginUnavailable, PublicationError
from streamtrain.serve.registry import PublicationMissing

logger = logging.getLogger(__name__)

_LONGEST_PAUSE = 30.0
_LONGEST_PAUSE_WHILE_AWAY = 5.0  # to ask whether it is back costs little


class Retry:
    """Whether it is time to try again what has failed, and what was wrong.

    Args:
        every: seconds of the first pause; the next ones grow.
        now: seconds of a clock that never goes back.

    Attributes:
        trouble: why it failed the last time, in one sentence; "": it has not.
        pause: seconds until the next attempt.
    """

    def __init__(self, every: float, now: Callable[[], float] = time.monotonic) -> None:
        self.trouble = ""
        self.pause = 0.0
        self._every, self._now = every, now
        self._due = now()

    @property
    def is_due(self) -> bool:
        """Whether the pause is over."""
        return self._now() >= self._due

    def failed(self, exc: Exception) -> None:
        """It has failed; logged if it has not for the same reason before."""
        if str(exc) != self.trouble:
            logger.warning("%s; what is loaded is served on", exc)
        self.trouble = str(exc) or type(exc).__name__
        longest = _LONGEST_PAUSE_WHILE_AWAY if isinstance(exc, OriginUnavailable) else _LONGEST_PAUSE
        if isinstance(exc, PublicationMissing):
            longest = self._every
        self.pause = min(max(2 * self.pause, self._every), max(longest, self._every))
        self._due = self._now() + self.pause


class Loop:
    """Does something until it is closed; what fails is tried again after pauses that grow.

    Args:
        name: of the thread.
        origin: with what it has to do, for the log.
        step: is done again and again; may raise PublicationError.
        every: seconds of the first pause.
        now: seconds of a clock that never goes back.

    Attributes:
        closing: set once it is to end.
    """

    def __init__(
        self, name: str, origin: str, step: Callable[[], object], every: float, now: Callable[[], float]
    ) -> None:
        self.closing = threading.Event()
        self._origin, self._step, self._every, self._now = origin, step, every, now
        self._retry = Retry(every, now)
        self._answered = now()
        self._is_away = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def stale_seconds(self) -> float:
        """For how long the origin has not answered; 0: it does."""
        silent = self._now() - self._answered
        return silent if self._is_away else 0.0

    @property
    def trouble(self) -> str:
        """What is wrong, in one sentence; "": nothing."""
        return self._retry.trouble

    def start(self) -> None:
        """Begins, and returns at once."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; waits for what it is at. May be called twice."""
        self.closing.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self.closing.is_set():
            try:
                self._step()
            except PublicationError as exc:
                self._failed(exc)
            except Exception as exc:  # serving goes on without being told of news, and says so
                logger.exception("following %s failed", self._origin)
                self._failed(PublicationError(f"{type(exc).__name__}: {exc}"))
            else:
                if self._retry.trouble:
                    logger.info("%s is followed again", self._origin)
                    self._retry = Retry(self._every, self._now)
                self._answered, self._is_away = self._now(), False

    def _failed(self, exc: PublicationError) -> None:
        self._is_away = isinstance(exc, OriginUnavailable)
        if not self._is_away:
            self._answered = self._now()
        self._retry.failed(exc)
        self.closing.wait(self._retry.pause)
