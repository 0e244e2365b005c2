"""Errors of requests, and their status codes."""

from collections.abc import Mapping
from typing import Literal

from streamtrain.errors import (
    ConfigError,
    OriginUnavailable,
    PublicationError,
    PublicationMismatch,
    PublicationMissing,
    SampleError,
    StreamtrainError,
)

RETRY_SECONDS = "1"
OverloadReason = Literal["requests", "bodies", "instances", "wait", "offsets"]


class Overloaded(StreamtrainError):
    """A request exceeds a limit of the process.

    Attributes:
        reason: which: "requests" in flight, bytes of their "bodies", waiting "instances", their "wait", or requests
            that wait for "offsets".
    """

    def __init__(self, reason: OverloadReason, message: str) -> None:
        super().__init__(f"{message}; try again later")
        self.reason: OverloadReason = reason


class TooManyIds(StreamtrainError):
    """A sample has too many ids to be explained."""


class HTTPError(StreamtrainError):
    """An error response.

    Attributes:
        status: its HTTP status code.
        headers: of the response.
    """

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})


def to_http_error(exc: StreamtrainError) -> HTTPError:
    """The status code and message for an error."""
    return exc if isinstance(exc, HTTPError) else _translate(exc)


def _translate(exc: StreamtrainError) -> HTTPError:
    if isinstance(exc, SampleError):
        return HTTPError(400, f"instance {exc.bad[0].index}: {exc.bad[0].describe(len(exc.bad) - 1)}")
    if isinstance(exc, PublicationMissing):
        return HTTPError(404, str(exc))
    if isinstance(exc, PublicationMismatch | ConfigError):
        return HTTPError(400, str(exc))
    if isinstance(exc, TooManyIds):
        return HTTPError(413, str(exc))
    if isinstance(exc, Overloaded | OriginUnavailable | PublicationError):
        return HTTPError(503, str(exc), {"retry-after": RETRY_SECONDS})
    return HTTPError(500, str(exc))
