"""Limits of connections: slow clients, large headers, unread responses.

Uvicorn has no time limit for receiving a request or for a client that does not read, and none on the size of headers
with httptools; without them a client can hold connections and memory for as long as it likes (tests/serve/
test_doors_slow.py, tests/chaos/test_slow_connections.py). So its protocol is extended here, in the one module that
relies on its internals; pyproject.toml has the upper bound of its version.
"""

import json
import logging
import sys
from asyncio import BaseTransport, TimerHandle
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Literal, get_args

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from streamtrain.logs import LogThrottle

logger = logging.getLogger(__name__)

CloseReason = Literal["many", "slow", "headers", "unread"]
_REASONS: dict[CloseReason, str] = {
    "many": "too many connections (serve.max_connections)",
    "slow": "requests were not complete in time",
    "headers": "request lines or headers too large",
    "unread": "clients did not read the responses",
}


@dataclass
class Connections:
    """Limits of connections, and how many were closed because of them.

    Args:
        max_connections: open at once; further ones are answered with 503 and closed.
        receive_timeout: seconds to receive a whole request, from its first byte or from the start of the connection;
            and for a client to read a response that is larger than the buffers.
        max_header_bytes: of the request line and headers.
        max_headers: of a request.

    Attributes:
        refused: connections that were closed, by reason: too "many", too "slow" to send, too many or large "headers",
            responses left "unread".
    """

    max_connections: int = 4096
    receive_timeout: float = 30.0
    max_header_bytes: int = 64 << 10
    max_headers: int = 100
    refused: dict[CloseReason, int] = field(
        default_factory=lambda: dict.fromkeys(get_args(CloseReason), 0), init=False, repr=False
    )
    throttle: LogThrottle = field(default_factory=LogThrottle, init=False, repr=False, compare=False)

    def count(self, reason: CloseReason) -> None:
        """Counts a connection that is closed; logged at most once a minute for each reason."""
        self.refused[reason] += 1
        if times := self.throttle.allow(reason):
            logger.warning("%d connections closed: %s", times, _REASONS[reason])

    def protocol(self) -> type[HttpToolsProtocol]:
        """The class of uvicorn's protocol that enforces these limits."""

        class Limited(_Connection):
            limits = self

        return Limited


class _Connection(HttpToolsProtocol):
    limits: Connections
    _receiving: TimerHandle | None = None  # runs while a request is incomplete
    _unread: TimerHandle | None = None  # runs while the client does not read
    _is_complete = False  # the request that is being received
    _in_head = True  # the request line or headers are being received
    _head_bytes = 0

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        if len(self.connections) > self.limits.max_connections:
            self._refuse("many", 503, f"{self.limits.max_connections} connections are open; try again later")
        else:
            self._receiving = self.loop.call_later(self.limits.receive_timeout, self._time_out)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_head and self._head_bytes > self.limits.max_header_bytes:
            self._refuse(
                "headers", 431, f"request line and headers may have at most {self.limits.max_header_bytes} bytes"
            )
        elif not self._is_complete and self._receiving is None:  # most requests arrive at once and need no timer
            self._receiving = self.loop.call_later(self.limits.receive_timeout, self._time_out)

    def on_message_begin(self) -> None:
        self._is_complete = False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if len(self.headers) > self.limits.max_headers:
            raise _HeadersTooLarge(f"a request may have at most {self.limits.max_headers} headers")
        if size > self.limits.max_header_bytes:
            raise _HeadersTooLarge(f"request line and headers may have at most {self.limits.max_header_bytes} bytes")
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._disarm()
        self._is_complete, self._in_head, self._head_bytes = True, True, 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Called for malformed HTTP, and for what a callback of the parser raises: that is in the context."""
        error = sys.exc_info()[1]
        if error is not None and isinstance(error.__context__, _HeadersTooLarge):
            self._refuse("headers", 431, str(error.__context__))
        else:
            self._respond(400, "not an HTTP/1.1 request")

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self.limits.receive_timeout, self._abandon)

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

    def _time_out(self) -> None:
        self._receiving = None
        if self.transport.is_closing():
            return
        if self.flow.read_paused:  # it is the server that does not read
            self._receiving = self.loop.call_later(self.limits.receive_timeout, self._time_out)
        elif self._in_head and not self._head_bytes:
            self._refuse("slow", 0, "")  # the client has sent nothing at all
        else:
            self._refuse("slow", 408, f"the request was not complete within {self.limits.receive_timeout:g} s")

    def _abandon(self) -> None:
        self.limits.count("unread")
        self.transport.abort()

    def _disarm(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _refuse(self, reason: CloseReason, status: int, message: str) -> None:
        self.limits.count(reason)
        self._disarm()
        # While a head is being received, the cycle is that of the request before.
        may_respond = self.cycle is None or (
            self.cycle.response_complete if self._in_head else not self.cycle.response_started
        )
        if status and may_respond:
            self._respond(status, message)
        else:
            self.transport.close()

    def _respond(self, status: int, message: str) -> None:
        body = json.dumps({"error": message}).encode()
        head = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", "content-type: application/json"]
        head += [f"content-length: {len(body)}", "connection: close", *(["retry-after: 1"] if status == 503 else [])]
        self.transport.write("\r\n".join([*head, "", ""]).encode() + body)
        self.transport.close()


class _HeadersTooLarge(Exception):
    """Ends the parser, which reports it as malformed HTTP."""
