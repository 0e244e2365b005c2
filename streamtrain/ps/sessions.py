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


@dataclass(frozen=True)
class Limits:
    """What a server takes.

    Attributes:
        message_bytes: of one request.
        keys: of one request.
        sessions: open at once; each holds a thread.
        join_seconds: after which a session that has not joined is ended.
        idle_seconds: after which a session without any request is ended.
        waiting_seconds: between two words that a request still waits for other workers.
    """

    message_bytes: int = 256 << 20
    keys: int = 4 << 20
    sessions: int = 256
    join_seconds: float = 5.0
    idle_seconds: float = 60.0
    waiting_seconds: float = 1.0


class Sessions:
    """The open sessions; ends those that hold a thread and say nothing.

    Args:
        limits: how many there may be, and for how long they may be silent.
        count: called with "silent_sessions" for each that is ended.
    """

    def __init__(self, limits: Limits, count: Callable[[str], object]) -> None:
        self._limits = limits
        self._count = count
        self._lock = threading.Lock()
        self._open: set[OpenSession] = set()
        self._calls: set[OpenSession] = set()
        self._stop = threading.Event()
        self._reaper = threading.Thread(target=self._reap, name="ps-reaper", daemon=True)

    def start(self) -> None:
        """Begins to look for silent ones."""
        self._reaper.start()

    def stop(self) -> None:
        """Ends all sessions."""
        self._stop.set()
        with self._lock:
            for session in self._open | self._calls:
                session.context.cancel()

    def workers(self) -> list[str]:
        """Names of the workers that have joined."""
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
            if len(self._open) >= self._limits.sessions:
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
        while not self._stop.wait(self._limits.join_seconds / 4):
            with self._lock:
                for session in self._open | self._calls:
                    limit = self._limits.idle_seconds if session.worker else self._limits.join_seconds
                    if session.listening and time.monotonic() - session.heard > limit:
                        session.listening = False
                        session.context.cancel()
                        self._count("silent_sessions")


class OpenSession:
    """One session, or another call that is still silent.

    Attributes:
        context: gRPC's.
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
            ShardRefused: what is in the lane is no message.
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
        """Says something through the lane; errors as of `requests`."""
        try:
            lane.write(data)
        except ValueError as exc:
            raise ShardRefused(str(exc)) from exc

    def use(self, lane: Lane) -> None:
        """From now on messages go through a lane, which ends with the call."""
        if not self.context.add_callback(lane.close):
            lane.close()
        self.lane = lane

    def listen(self) -> None:
        """It is the client's turn, from now on."""
        self.heard = time.monotonic()
        self.listening = True
