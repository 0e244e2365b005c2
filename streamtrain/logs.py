"""Logging: lines of text for people, or JSON objects for machines. Secrets in URLs are masked in both."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

from pythonjsonlogger.json import JsonFormatter

from streamtrain.address import redacted

LogFormat = Literal["text", "json"]
Level = Literal["debug", "info", "warning", "error"]

REQUEST: ContextVar[str] = ContextVar("request", default="")
"""Id of the HTTP request handled in this context; "": none."""

_handlers: list[logging.Handler] = []  # added here; handlers of others stay


def set_up_logs(
    format_: LogFormat = "text", level: Level = "info", process: str = "", index: int | None = None
) -> None:
    """Configures the root logger to write to standard error; a second call replaces the first.

    Args:
        format_: "text": `LEVEL logger: message`. "json": one object a line, with `time` (ISO 8601, UTC), `level`,
            `process`, `pid`, `logger`, `message`, and where they apply `request_id`, `batch` (offsets) and `exc_info`
            (a traceback).
        level: minimum level of streamtrain's own messages; that of libraries is warning.
        process: name of the process.
        index: index among several processes of that name; None: it is the only one.
    """
    root, name = logging.getLogger(), process if index is None else f"{process}:{index}"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(name) if format_ == "json" else _Text("" if index is None else f"process {index} "))
    for previous in _handlers:
        root.removeHandler(previous)
    _handlers[:] = [handler]
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("streamtrain").setLevel(level.upper())


class LogThrottle:
    """Limits how often recurring events are logged: the first at once, later ones summed up. Thread-safe.

    Args:
        every: minimum seconds between two lines of one kind.
        now: monotonic seconds.
    """

    def __init__(self, every: float = 60.0, now: Callable[[], float] = time.monotonic) -> None:
        self._every, self._now = every, now
        self._lock = threading.Lock()
        self._logged_at: dict[Hashable, float] = {}
        self._suppressed: dict[Hashable, int] = {}

    def allow(self, kind: Hashable = "", times: int = 1) -> int:
        """Counts events; returns their number since the last line if one may be logged now, else 0.

        Args:
            kind: kind of event, out of a few.
            times: number of new events.
        """
        if not times:
            return 0
        with self._lock:
            now, count = self._now(), self._suppressed.get(kind, 0) + times
            is_due = now - self._logged_at.get(kind, -self._every) >= self._every
            self._suppressed[kind] = 0 if is_due else count
            if is_due:
                self._logged_at[kind] = now
            return count if is_due else 0


def counted(number: int, noun: str) -> str:
    """A number of things: "1 shard", "2 shards"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def fail(message: str) -> None:
    """Reports the error that ends a process: one line, in the format of the log."""
    if any(isinstance(handler.formatter, _Json) for handler in _handlers):
        logging.getLogger("streamtrain").error("%s", message)
    else:
        sys.stderr.write(f"streamtrain: {redacted(message)}\n")


def json_line(process: str, message: str) -> str:
    """A line of text from another process as a JSON log line."""
    return _Json(process).format(logging.LogRecord(process, logging.INFO, "", 0, message, None, None))


class _Text(logging.Formatter):
    def __init__(self, prefix: str) -> None:
        super().__init__(f"%(levelname)s {prefix}%(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        request = REQUEST.get()
        return f"{super().formatMessage(record)} [request {request}]" if request else super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


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

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))
