"""Logs: how a process says what happens: lines of text for people, or JSON objects for machines."""

import logging
import sys
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
