"""PeriodicTask runs a function again and again in a thread of its own; retry calls one until it succeeds."""

import logging
import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from streamtrain.errors import StreamtrainError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NUMBER = re.compile(r"\d+")
_DURATION = re.compile(r"\d+(\.\d+)?(?= ?(ms|s|seconds|minutes)\b)")
_CHANGED, _SAME = 60.0, 600.0  # seconds between two lines
_WORDS = 16  # lines that are remembered
_JITTER = random.Random()  # its own: the state of the module belongs to whoever seeds it


@dataclass(frozen=True)
class Backoff:
    """Pauses between attempts: they double, and are shortened by a random factor of up to a half.

    Attributes:
        first: seconds of the first pause.
        longest: seconds of any pause at most.
    """

    first: float
    longest: float

    def after(self, pause: float) -> float:
        """The pause that follows one of `pause` seconds; 0: there was none yet. Without the random factor."""
        return min(max(2 * pause, self.first), self.longest)


def _with_jitter(pause: float) -> float:
    """Processes that lost the same server at the same time do not come back at the same time."""
    return min(pause * _JITTER.uniform(0.5, 1.0), threading.TIMEOUT_MAX)


class FailureLog:
    """Which failures of something that is retried are logged.

    The first one is, and each in other words than any line before. A failure in the words of an earlier line is logged
    if that line is a minute old, as what differs may be counters, a port, or which of two errors comes first; else, and
    where nothing but durations differ from the last line, if it is ten minutes old, with the number of failures since.

    Args:
        now: monotonic seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lines: dict[str, tuple[str, float]] = {}  # by words: the line and when it was; the last one last
        self._count = 0

    def line(self, reason: str, kind: str | None = None) -> str:
        """What to log of a failure; "": nothing.

        Args:
            reason: of the failure.
            kind: what is compared with lines before; None: the reason.
        """
        kind, now = _DURATION.sub("", reason if kind is None else kind), self._now()
        words = _NUMBER.sub("", kind)
        self._count += 1
        if (earlier := self._lines.get(words)) is not None:
            is_last = words == next(reversed(self._lines))
            if now - earlier[1] < (_SAME if is_last and kind == earlier[0] else _CHANGED):
                return ""
            del self._lines[words]
        count, self._count = self._count, 0
        self._lines[words] = kind, now
        if len(self._lines) > _WORDS:
            del self._lines[next(iter(self._lines))]
        return reason if earlier is None or count == 1 else f"{reason} ({count} failures since the last such line)"

    def end(self) -> bool:
        """Notices a success; True: it is the first one after a failure."""
        had, self._count = bool(self._lines), 0
        self._lines.clear()
        return had


def retry(
    attempt: Callable[[], T],
    errors: type[Exception] | tuple[type[Exception], ...],
    stopped: threading.Event,
    *,
    backoff: Backoff = Backoff(0.05, 2.0),
    give_up: float = float("inf"),
) -> T:
    """Calls a function until it succeeds; failures are logged as `FailureLog` says.

    Args:
        attempt: the function.
        errors: after which it is called again; others are raised at once.
        stopped: ends the pauses: the last error is raised.
        backoff: pauses between calls.
        give_up: seconds after which the last error is raised.
    """
    deadline, pause, failures = time.monotonic() + give_up, 0.0, FailureLog()
    while True:
        try:
            return attempt()
        except errors as exc:
            if time.monotonic() > deadline or stopped.is_set():
                raise
            if line := failures.line(str(exc)):
                logger.warning("%s; retrying", line)
            pause = backoff.after(pause)
            if stopped.wait(_with_jitter(pause)):
                raise


class PeriodicTask:
    """Runs a function in a thread of its own until it is closed, whatever the function raises.

    Failures are logged as `FailureLog` says, an error that is not a StreamtrainError with its traceback; so is the
    first success after them. After a failure the function runs again after pauses that grow.

    Args:
        name: of the thread.
        run: the function; may return the seconds until it is to run again, None: `every`.
        every: seconds between the end of a run and the next one.
        subject: of log lines, as in "publishing failed"; "": failures are not logged, `run` or `observe` does that.
        delay: seconds before the first run.
        backoff: pauses after failures, or what gives those of an error; by default from `every` on, up to 30 s.
        observe: called after each run with its error, or None; in the thread.

    Attributes:
        closing: set once it is to end.
        trouble: why the last run failed, in one sentence; "": it did not.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[], float | None],
        every: float,
        *,
        subject: str = "",
        delay: float = 0.0,
        backoff: Backoff | Callable[[Exception], Backoff] | None = None,
        observe: Callable[[Exception | None], object] = lambda error: None,
    ) -> None:
        self.closing = threading.Event()
        self.trouble = ""
        self._run, self._every, self._subject, self._delay = run, every, subject, delay
        self._backoff = backoff or Backoff(every, max(every, 30.0))
        self._observe = observe
        self._pause = 0.0
        self._failures = FailureLog()
        self._wakeup = threading.Event()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Has the function run now, or as soon as the current run, or the pause after a failure, is over."""
        self._wakeup.set()

    def stop(self) -> None:
        """Lets the current run be the last; returns at once. May be called in `run`."""
        self.closing.set()
        self._wakeup.set()

    def close(self, timeout: float | None = None) -> None:
        """Stops it and waits for the current run. May be called twice, and before `start`.

        Args:
            timeout: seconds to wait; None: as long as it takes.
        """
        self.stop()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def __enter__(self) -> "PeriodicTask":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run_once(self) -> float:
        """Runs the function once, as the thread does; returns the seconds until the next run."""
        try:
            pause = self._run()
        except Exception as exc:  # whatever it is: the next run may succeed
            self._failed(exc)
            self._observe(exc)
            return _with_jitter(self._pause)
        if self._failures.end() and self._subject:
            logger.info("%s works again", self._subject)
        self.trouble, self._pause = "", 0.0
        self._observe(None)
        return self._every if pause is None else pause

    def _main(self) -> None:
        pause = self._delay
        while not self._is_closing_after(min(max(pause, 0.0), threading.TIMEOUT_MAX)):
            pause = self.run_once()

    def _is_closing_after(self, seconds: float) -> bool:
        if self.trouble:
            return self.closing.wait(seconds)
        self._wakeup.wait(seconds)
        self._wakeup.clear()
        return self.closing.is_set()

    def _failed(self, exc: Exception) -> None:
        is_expected = isinstance(exc, StreamtrainError)
        reason = str(exc) if is_expected and str(exc) else f"{type(exc).__name__}: {exc}"
        if (line := self._failures.line(reason)) and (self._subject or not is_expected):
            subject = self._subject or self._thread.name
            logger.warning("%s failed, retrying: %s", subject, line, exc_info=None if is_expected else exc)
        self.trouble = reason
        backoff = self._backoff if isinstance(self._backoff, Backoff) else self._backoff(exc)
        self._pause = backoff.after(self._pause)
