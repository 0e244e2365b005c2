"""How a process ends: told by a signal, in steps that have names, within one deadline for all of them.

Signals wait while something runs that must not be left half done.
"""

import faulthandler
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

logger = logging.getLogger(__name__)


SHUTDOWN_SECONDS = 40.0
"""Deadline of a process that a supervisor kills after 45 s; see `processes.supervisor.Program`."""

EXIT_GAVE_UP = 1
_FROZEN_SECONDS = 2.0

SIGNALS = (signal.SIGTERM, signal.SIGINT)

_STANDARD_ERROR = 2

_steps: list[str] = []


@contextmanager
def step(name: str) -> Iterator[None]:
    """Names what a process that ends is waiting for, for the lines of `end_in_time`; may be nested.

    Args:
        name: such as "the last checkpoint".
    """
    _steps.append(name)
    try:
        yield
    finally:
        _steps.remove(name)


def stop_on_signals(deadline: float | None = None) -> threading.Event:
    """An event that SIGTERM and SIGINT set. For the main thread.

    A thread sets it. A handler would run between any two instructions of the main thread, which may hold the event's
    lock, and wait for it forever.

    Args:
        deadline: see `end_in_time`.
    """
    stopped = threading.Event()
    received, wakeup = socket.socketpair()
    wakeup.setblocking(False)
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)

    def receive(timeout: float | None) -> int | None:
        received.settimeout(timeout)
        try:
            while (number := received.recv(1)[0]) not in SIGNALS:
                continue
        except TimeoutError:
            return None
        return number

    def wait() -> None:
        with received, wakeup:
            first = receive(None)
            assert first is not None
            end_if_frozen(deadline)
            stopped.set()
            end_in_time(first, receive, deadline)

    threading.Thread(target=wait, name="signals", daemon=True).start()
    return stopped


def end_if_frozen(deadline: float | None) -> None:
    """Has a process end, with the stacks of all threads, whose interpreter stands still after its deadline.

    A library may wait for ever while it holds the lock of the interpreter, so that no line of Python runs any more,
    `end_in_time` included: https://github.com/confluentinc/librdkafka/issues/4884.

    Args:
        deadline: see `end_in_time`.
    """
    if deadline is not None:
        faulthandler.dump_traceback_later(deadline + _FROZEN_SECONDS, file=_STANDARD_ERROR, exit=True)


def end_in_time(first: int, receive: Callable[[float | None], int | None], deadline: float | None) -> NoReturn:
    """Watches, in a daemon thread, that the process ends, and says what it waits for when another signal comes.

    Args:
        first: number of the signal that told the process to end.
        receive: waits for another one, for some seconds or, None, for ever; returns its number, or None: none came.
        deadline: seconds after which the process ends itself with exit code 1, as if it were killed, and says what it
            was waiting for, with the stacks of all threads, which another signal shows as well; None: it may take as
            long as it likes.
    """
    end = None if deadline is None else time.monotonic() + deadline
    while True:
        again = receive(None if end is None else max(end - time.monotonic(), 0.001))
        waiting_for = ", ".join(_steps) or "its threads"
        if again is None:
            name = signal.Signals(first).name
            logger.error("did not end within %g s of %s: gave up waiting for %s", deadline, name, waiting_for)
            faulthandler.dump_traceback(_STANDARD_ERROR)
            os._exit(EXIT_GAVE_UP)
        logger.warning("%s: still waiting for %s", signal.Signals(again).name, waiting_for)
        if deadline is not None:
            faulthandler.dump_traceback(_STANDARD_ERROR)


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
