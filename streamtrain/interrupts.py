"""Signals that are deferred while something runs that must not be left half done."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)

_Handler = Callable[[int, FrameType | None], Any]


class _DeferredSignals:
    """Stands in for signal handlers; one that is left behind acts as they do."""

    def __init__(self) -> None:
        self.is_deferring = False
        self.handlers: dict[int, _Handler] = {}
        self._pending: list[tuple[int, FrameType | None]] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_deferring:
            self._pending.append((number, frame))
        else:
            self.handlers[number](number, frame)

    def take_over(self, number: int) -> None:
        """Stands in for the handler of a signal, if it is one in Python: others cannot raise."""
        handler = signal.getsignal(number)
        if isinstance(handler, _DeferredSignals):  # left there by an interrupt that came just then
            handler = handler.handlers[number]
        if callable(handler):
            self.handlers[number] = handler
            signal.signal(number, self)

    def deliver(self) -> None:
        """Calls the handlers of all pending signals, whichever raises."""
        while self._pending:
            number, frame = self._pending.pop(0)
            try:
                self.handlers[number](number, frame)
            finally:
                self.deliver()


@contextmanager
def defer_signals() -> Iterator[None]:
    """Defers signals such as Ctrl-C to the end of the block.

    Handlers in Python may raise, KeyboardInterrupt above all, and do so anywhere in the main thread. In other threads
    this does nothing: nothing is interrupted there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    deferred = _DeferredSignals()
    for number in _SIGNALS:
        deferred.take_over(number)
    deferred.is_deferring = True  # from here on nothing is raised
    try:
        yield
    finally:
        deferred.is_deferring = False  # and from here on anything may be, anywhere
        try:
            deferred.deliver()
        finally:
            for taken, handler in deferred.handlers.items():
                signal.signal(taken, handler)
