"""Sessions: those that a server has open, and the end of those that only hold a thread."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from streamtrain._core import Lane
from streamtrain.errors import ShardRefused
from streamtrain.model.features import RowType
from streamtrain.periodic import PeriodicTask


@dataclass(frozen=True)
class SessionTimeouts:
    """How long a server has patience with a session, in seconds.

    Attributes:
        join: after which a session that has not joined is ended.
        idle: after which a session without any request is ended.
        waiting: between two words that a request still waits for other workers.
    """

    join: float = 5.0
    idle: float = 60.0
    waiting: float = 1.0


class Sessions:
    """The open sessions; ends those that hold a thread and say nothing.

    Args:
        most: how many there may be; each holds a thread.
        timeouts: for how long they may be silent.
        count: called with "silent_sessions" for each that is ended.
    """

    def __init__(self, most: int, timeouts: SessionTimeouts, count: Callable[[str], object]) -> None:
        self._most, self._timeouts = most, timeouts
        self._count = count
        self._lock = threading.Lock()
        self._open: set[OpenSession] = set()
        self._calls: set[OpenSession] = set()
        every = timeouts.join / 4
        self._reaper = PeriodicTask("ps-reaper", self._reap, every, delay=every, subject="ending silent sessions")

    def start(self) -> None:
        """Begins to look for silent ones."""
        self._reaper.start()

    def stop(self) -> None:
        self._reaper.stop()
        with self._lock:
            for session in self._open | self._calls:
                session.context.cancel()

    def workers(self) -> list[str]:
        with self._lock:
            return sorted(session.worker for session in self._open if session.worker)

    @contextmanager
    def open(self, context: Any) -> Iterator["OpenSession"]:
        """A session, while within.

        Raises:
            ShardRefused: there are too many.
        """
        session = OpenSession(context)
        with self._lock:
            if len(self._open) >= self._most:
                raise ShardRefused(f"{len(self._open)} sessions are open already, and no more are taken", "limit")
            self._open.add(session)
        try:
            yield session
        finally:
            with self._lock:
                self._open.remove(session)

    @contextmanager
    def call(self, context: Any) -> Iterator[None]:
        """Another call that has yet to say what it asks, while within: it holds a thread as a session does."""
        call = OpenSession(context)
        with self._lock:
            self._calls.add(call)
        try:
            yield
        finally:
            with self._lock:
                self._calls.remove(call)

    def _reap(self) -> None:
        with self._lock:
            for session in self._open | self._calls:
                limit = self._timeouts.idle if session.worker else self._timeouts.join
                if session.listening and time.monotonic() - session.heard > limit:
                    session.listening = False
                    session.context.cancel()
                    self._count("silent_sessions")


class OpenSession:
    """One session, or another call that is still silent.

    Attributes:
        worker: whose it is; "" before it has joined.
        dtype: of floats on the wire.
        lane: through which messages go from its join on; None: over gRPC.
        heard: when its turn began, monotonic seconds.
        listening: whether it is the client's turn, to ask or to read.
    """

    def __init__(self, context: Any) -> None:
        self.context = context
        self.worker = ""
        self.dtype: RowType = "float32"
        self.lane: Lane | None = None
        self.listen()

    def requests(self, called: Iterator[bytes], limit: int) -> Iterator[bytes]:
        """What the client says, in messages of at most `limit` bytes: by its call, or through the lane if there is one.

        Raises:
            ShardRefused: what is in the lane is not a message.
        """
        while self.lane is None:
            data = next(called, None)
            if data is None:
                return
            yield data
        try:
            while (data := self.lane.read(limit)) is not None:
                yield data
        except ValueError as exc:
            raise ShardRefused(str(exc), "limit") from exc

    def answer(self, lane: Lane, data: bytes) -> None:
        """Says something through the lane; raises the errors of `requests`."""
        try:
            lane.write(data)
        except ValueError as exc:
            raise ShardRefused(str(exc)) from exc

    def use(self, lane: Lane) -> None:
        """Sends further messages through a lane, which ends with the call."""
        if not self.context.add_callback(lane.close):
            lane.close()
        self.lane = lane

    def listen(self) -> None:
        """It is the client's turn, from now on."""
        self.heard = time.monotonic()
        self.listening = True
