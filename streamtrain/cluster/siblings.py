"""Siblings: processes of one kind that serve side by side, kept running without loading what they need."""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from streamtrain.errors import ConfigError, StreamtrainError
from streamtrain.logs import set_up_logs

logger = logging.getLogger(__name__)

Run = Callable[[int, bool, Callable[[], None]], None]
Log = Callable[[int], None]

_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0
_LONG = 60.0  # seconds after which what ends has not failed at its start
_CONTEXT = multiprocessing.get_context("spawn")  # TensorFlow does not survive a fork
_CONFIG = "config:"


def _log_text(index: int) -> None:
    set_up_logs(index=index)


class Siblings:
    """Starts processes, starts again those that end, after pauses that grow, and ends all when it is told to.

    Args:
        run: what a process does until SIGTERM; is called with its index, whether it takes the place of one that has
            ended, and what it calls once it has started. It is pickled.
        count: of processes.
        drain: seconds that they may take to end.
        log: has a process write its log; is called in it with its index, and pickled, too.
    """

    def __init__(self, run: Run, count: int, drain: float = 30.0, log: Log = _log_text) -> None:
        self._slots = [_Slot(run, index, log) for index in range(count)]
        self._drain = drain
        self._stopped, self._stopper = _CONTEXT.Pipe(duplex=False)
        self._has_begun = False  # whether any has ever started

    def run(self) -> None:
        """Returns after SIGTERM or SIGINT, when all have ended. Called in the main thread.

        Raises:
            ConfigError: a process cannot start for what is set.
            StreamtrainError: all have ended before any had started.
        """
        before = [
            (number, signal.signal(number, lambda *_: self._stopper.send(None)))
            for number in (signal.SIGTERM, signal.SIGINT)
        ]
        try:
            for slot in self._slots:
                slot.start()
            while not self._stopped.poll():
                self._keep()
        finally:
            self._end()
            for number, handler in before:
                signal.signal(number, handler)

    def _keep(self) -> None:
        """Waits for the next that happens, and sees to it."""
        ready = wait([self._stopped, *(one for slot in self._slots for one in slot.waited)], self._until_due())
        for slot in self._slots:
            if slot.report in ready:
                self._hear(slot)
            if slot.process is not None and slot.process.sentinel in ready:
                slot.ended()
            if slot.process is None and slot.due <= time.monotonic() and not self._stopped.poll():
                slot.start()
        if not self._has_begun and all(slot.failures for slot in self._slots):
            raise StreamtrainError(f"no process could start: {self._slots[0].trouble}")

    def _hear(self, slot: "_Slot") -> None:
        said = slot.hear()
        self._has_begun = self._has_begun or said == ""
        if said and said.startswith(_CONFIG) and slot.starts == 1:
            raise ConfigError(said.removeprefix(_CONFIG))

    def _until_due(self) -> float | None:
        due = [slot.due for slot in self._slots if slot.process is None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _end(self) -> None:
        running = [slot.process for slot in self._slots if slot.process is not None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + self._drain
        for process in running:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                logger.warning("pid %s has not ended within %g s: it is killed", process.pid, self._drain)
                process.kill()
                process.join()


class _Slot:
    """The place of one process, which others take when it has ended."""

    def __init__(self, run: Run, index: int, log: Log) -> None:
        self._run, self._index, self._log = run, index, log
        self.process: BaseProcess | None = None
        self.report: Connection | None = None
        self.starts = self.failures = 0
        self.due = 0.0
        self.trouble = ""
        self._began = 0.0
        self._pause = 0.0

    @property
    def waited(self) -> list[Connection | int]:
        of_process = [] if self.process is None else [self.process.sentinel]
        return [*of_process, *([] if self.report is None else [self.report])]

    def start(self) -> None:
        self.report, reporting = _CONTEXT.Pipe(duplex=False)
        self.process = _CONTEXT.Process(
            target=_run,
            args=(self._run, self._log, self._index, self.starts > 0, reporting),
            name=f"serving-{self._index}",
        )
        self.process.start()
        reporting.close()
        self.starts += 1
        self._began = time.monotonic()
        logger.info("process %d is pid %s", self._index, self.process.pid)

    def hear(self) -> str | None:
        """What it says: "": it has started; else why it cannot. None: it says nothing any more."""
        assert self.report is not None
        try:
            said = str(self.report.recv())
        except EOFError:
            self.report.close()
            self.report = None
            return None
        self.trouble = said.removeprefix(_CONFIG)
        return said

    def ended(self) -> None:
        """Has it started again, later."""
        assert self.process is not None
        while self.report is not None and self.report.poll():
            self.hear()
        self.process.join()
        self.failures += 1
        is_early = time.monotonic() - self._began < _LONG
        self._pause = min(max(2 * self._pause, _FIRST_PAUSE), _LONGEST_PAUSE) if is_early else _FIRST_PAUSE
        self.due = time.monotonic() + self._pause
        code = self.process.exitcode or 0
        how = f"by signal {-code}" if code < 0 else f"with code {code}"
        self.trouble = self.trouble or f"it ended {how}"
        logger.error("process %d ended %s; starts again in %g s", self._index, how, self._pause)
        self.process.close()
        self.process = None


def _run(run: Run, log: Log, index: int, is_again: bool, report: Connection) -> None:
    """What a process does."""
    log(index)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    try:
        run(index, is_again, lambda: report.send(""))
    except StreamtrainError as exc:
        logging.getLogger("streamtrain").error("%s", exc)
        report.send(f"{_CONFIG if isinstance(exc, ConfigError) else ''}{exc}")
        sys.exit(1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
