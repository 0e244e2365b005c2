"""Logs: how a process says what happens: lines of text for people, or JSON objects for machines."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

from pythonjsonlogger.json import JsonFormatter

Format = Literal["text", "json"]
Level = Literal["debug", "info", "warning", "error"]

REQUEST: ContextVar[str] = ContextVar("request", default="")
"""Id of the request over HTTP that is answered in this context; "": there is none."""

_handlers: list[logging.Handler] = []  # ours, so that others' of the same interpreter stay


def set_up_logs(format_: Format = "text", level: Level = "info", process: str = "", index: int | None = None) -> None:
    """Has the root logger write to standard error, and nowhere where it wrote before by this.

    Args:
        format_: "text": `LEVEL logger: message`. "json": one object a line, with `time` (ISO 8601, UTC), `level`,
            `process`, `pid`, `logger`, `message`, and where there are such `request_id`, `batch` (offsets) and
            `exc_info` (a traceback).
        level: from which on streamtrain's own messages are written; those of libraries are from warnings on.
        process: what it is called.
        index: which of several of that name; None: there is one.
    """
    root, name = logging.getLogger(), process if index is None else f"{process}:{index}"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(name) if format_ == "json" else _Text("" if index is None else f"process {index} "))
    for one in _handlers:
        root.removeHandler(one)
    _handlers[:] = [handler]
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("streamtrain").setLevel(level.upper())


class Seldom:
    """What may happen again and again, and is to be logged at once, then now and then. Thread-safe.

    Args:
        every: seconds between two lines of one kind, at least.
        now: seconds of a clock that never goes back.
    """

    def __init__(self, every: float = 60.0, now: Callable[[], float] = time.monotonic) -> None:
        self._every, self._now = every, now
        self._lock = threading.Lock()
        self._said: dict[Hashable, float] = {}
        self._unsaid: dict[Hashable, int] = {}

    def due(self, kind: Hashable = "", times: int = 1) -> int:
        """It has happened so many times more.

        Args:
            kind: what, of a few.
            times: how often.

        Returns:
            How often since it was due last: to be logged now; 0: not yet.
        """
        if not times:
            return 0
        with self._lock:
            now, count = self._now(), self._unsaid.get(kind, 0) + times
            is_due = now - self._said.get(kind, -self._every) >= self._every
            self._unsaid[kind] = 0 if is_due else count
            if is_due:
                self._said[kind] = now
            return count if is_due else 0


def fail(message: str) -> None:
    """The last words of a process that ends for an error: one line, as the log has it."""
    if any(isinstance(one.formatter, _Json) for one in _handlers):
        logging.getLogger("streamtrain").error("%s", message)
    else:
        sys.stderr.write(f"streamtrain: {message}\n")


def line_of(process: str, message: str) -> str:
    """What another process has said as plain text, as a line of JSON."""
    return _Json(process).format(logging.LogRecord(process, logging.INFO, "", 0, message, None, None))


class _Text(logging.Formatter):
    def __init__(self, whose: str) -> None:
        super().__init__(f"%(levelname)s {whose}%(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        request = REQUEST.get()
        return f"{super().formatMessage(record)} [request {request}]" if request else super().formatMessage(record)


class _Json(JsonFormatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def add_fields(self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]) -> None:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        log_data |= {"time": when, "level": record.levelname.lower(), "process": self._process, "pid": record.process}
        log_data |= {"logger": record.name}
        super().add_fields(log_data, record, message_dict)
        if request := REQUEST.get():
            log_data["request_id"] = request
