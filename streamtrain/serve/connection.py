"""Connection: HTTP as uvicorn speaks it, with an end to the patience for clients that are slow or say too much."""

import json
import logging
import sys
from asyncio import BaseTransport, TimerHandle
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Literal, get_args

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from streamtrain.logs import Seldom

logger = logging.getLogger(__name__)

Reason = Literal["many", "slow", "headers", "unread"]
_REASONS: dict[Reason, str] = {
    "many": "too many are open (serve.max_connections)",
    "slow": "their requests did not come whole in time",
    "headers": "their first lines or headers are too large",
    "unread": "their clients do not read the answers",
}


@dataclass
class Connections:
    """What one connection, and all together, may take.

    Args:
        most: connections at once; more are told to come again, and closed.
        receive_seconds: in which a request has come whole, from its first byte or the connection's beginning; and in
            which a client has read an answer that is more than what is buffered.
        header_bytes: of the first line and headers of a request.
        headers: of a request.

    Attributes:
        refused: connections that were closed, by reason: too "many"; too "slow" to send; too many or large "headers";
            answers that were "unread".
    """

    most: int = 4096
    receive_seconds: float = 30.0
    header_bytes: int = 64 << 10
    headers: int = 100
    refused: dict[Reason, int] = field(
        default_factory=lambda: dict.fromkeys(get_args(Reason), 0), init=False, repr=False
    )
    seldom: Seldom = field(default_factory=Seldom, init=False, repr=False, compare=False)

    def count(self, reason: Reason) -> None:
        """A connection is closed; said at most once a minute of each reason."""
        self.refused[reason] += 1
        if times := self.seldom.due(reason):
            logger.warning("%d connections closed: %s", times, _REASONS[reason])

    def protocol(self) -> type[HttpToolsProtocol]:
        """The protocol that keeps to it, for uvicorn."""

        class Limited(_Connection):
            limits = self

        return Limited


class _Connection(HttpToolsProtocol):
    limits: Connections
    _coming: TimerHandle | None = None  # runs while a request is not there whole
    _unread: TimerHandle | None = None  # runs while the client does not read
    _is_whole = False  # what is coming is there
    _is_head = True  # what comes is first line or headers
    _bytes = 0  # of these

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        if len(self.connections) > self.limits.most:
            self._refuse("many", 503, f"{self.limits.most} connections are open already; try again")
        else:
            self._coming = self.loop.call_later(self.limits.receive_seconds, self._slow)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._is_head:
            self._bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._is_head and self._bytes > self.limits.header_bytes:
            self._refuse("headers", 431, f"first line and headers may have {self.limits.header_bytes} bytes")
        elif not self._is_whole and self._coming is None:  # few do not come at once: those alone cost a timer
            self._coming = self.loop.call_later(self.limits.receive_seconds, self._slow)

    def on_message_begin(self) -> None:
        self._is_whole = False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if len(self.headers) > self.limits.headers:
            raise _TooMuch(f"a request may have {self.limits.headers} headers")
        if size > self.limits.header_bytes:
            raise _TooMuch(f"first line and headers may have {self.limits.header_bytes} bytes")
        self._is_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._disarm()
        self._is_whole, self._is_head, self._bytes = True, True, 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """For what is no HTTP, and what a callback of the parser refuses: of these it is in the context."""
        refused = sys.exc_info()[1]
        if refused is not None and isinstance(refused.__context__, _TooMuch):
            self._refuse("headers", 431, str(refused.__context__))
        else:
            self._say(400, "this is no request of HTTP/1.1")

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self.limits.receive_seconds, self._abandon)

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

    def _slow(self) -> None:
        self._coming = None
        if self.transport.is_closing():
            return
        if self.flow.read_paused:  # it is we who do not read
            self._coming = self.loop.call_later(self.limits.receive_seconds, self._slow)
        elif self._is_head and not self._bytes:
            self._refuse("slow", 0, "")  # has said nothing at all
        else:
            self._refuse("slow", 408, f"the request did not come whole within {self.limits.receive_seconds:g} s")

    def _abandon(self) -> None:
        self.limits.count("unread")
        self.transport.abort()

    def _disarm(self) -> None:
        if self._coming is not None:
            self._coming.cancel()
            self._coming = None

    def _refuse(self, reason: Reason, status: int, message: str) -> None:
        self.limits.count(reason)
        self._disarm()
        # The cycle is of the request that comes or, while that is a head, of the one before.
        may_answer = self.cycle is None or (
            self.cycle.response_complete if self._is_head else not self.cycle.response_started
        )
        if status and may_answer:
            self._say(status, message)
        else:
            self.transport.close()

    def _say(self, status: int, message: str) -> None:
        body = json.dumps({"error": message}).encode()
        head = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", "content-type: application/json"]
        head += [f"content-length: {len(body)}", "connection: close", *(["retry-after: 1"] if status == 503 else [])]
        self.transport.write("\r\n".join([*head, "", ""]).encode() + body)
        self.transport.close()


class _TooMuch(Exception):
    """Ends the parser, which takes it for what is no HTTP."""
