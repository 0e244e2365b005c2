"""Writes samples to a stream at a pace, while the next ones are read, until they end or a signal comes."""

import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from streamtrain.errors import ConfigError, WriteFailed
from streamtrain.stream.files import Block, Sample
from streamtrain.stream.pace import Pace
from streamtrain.stream.source import Writer

OnProgress = Callable[[int, float | None], None]
"""Is told how many messages are handed over, and which share of the file that is, 0 to 1; None: unknown."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_AHEAD = 2  # blocks that are read and not written
_PIECE = 1024  # messages between two looks at whether to stop
_REFRESH = 0.1  # seconds between two drawings
_LOOK = 0.25  # seconds between two looks at how many messages are written
_GRACE = 10.0  # seconds that what is queued has to be written once a signal has come


class Produced(NamedTuple):
    """What was written.

    Attributes:
        messages: number.
        bytes: of their values.
        seconds: from the start until the last was written.
    """

    messages: int
    bytes: int
    seconds: float

    def as_dict(self) -> dict[str, object]:
        """As the command line prints it."""
        per_second = round(self.messages / self.seconds) if self.seconds else 0
        return self._asdict() | {"seconds": round(self.seconds, 3), "messages_per_s": per_second}


class Stop:
    """A wish to end, and what it wakes.

    Signal handlers may call `set`: it takes no lock that the code which they interrupt may hold, as `threading.Event`
    does.

    Attributes:
        wanted: whether there is the wish.
        signal: number of the signal that brought it; None: none did.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.signal: int | None = None
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._bells: list[SimpleQueue[Any]] = [self._bell]

    def set(self) -> None:
        """Wishes to end."""
        self.wanted = True
        for bell in self._bells:
            bell.put(None)

    def wakes(self, bell: SimpleQueue[Any]) -> None:
        """Has `set` put None into a queue, also when it was called before."""
        self._bells.append(bell)
        if self.wanted:
            bell.put(None)

    def wait(self, seconds: float) -> None:
        """Waits for so long, or until there is the wish."""
        with suppress(Empty):
            self._bell.get(timeout=seconds)

    def listen(self) -> None:
        """Takes SIGINT and SIGTERM for the wish; a second one ends the process as if nobody listened."""
        for number in _SIGNALS:
            signal.signal(number, self._signalled)

    def _signalled(self, number: int, _: FrameType | None) -> None:
        for one in _SIGNALS:
            signal.signal(one, signal.SIG_DFL)
        self.signal = number
        self.set()


def produce(
    blocks: Iterable[Block],
    writer: Writer,
    *,
    pace: Pace | None = None,
    stop: Stop | None = None,
    on_progress: OnProgress = lambda messages, share: None,
) -> Produced:
    """Writes samples in their order, by their keys, until all are written.

    Args:
        blocks: the samples; they are read in a thread of its own.
        writer: where they go.
        pace: when; None: as fast as they are taken.
        stop: ends it early; what is queued then has ten seconds to be written.
        on_progress: is told how far it is.

    Raises:
        ConfigError: reading fails; all that was read before is written, and the message says how many.
        WriteFailed: a message cannot be written; the message says how many are.
    """
    stop = stop or Stop()
    started, run, schedule, unreadable = time.monotonic(), _Run(writer, on_progress), _Schedule(pace, stop), None
    try:
        try:
            with closing(_read_ahead(blocks, stop)) as ahead:
                for block in ahead:
                    run.write(block, schedule.pieces(block.samples))
        except ConfigError as exc:
            unreadable = exc
        run.finish(stop)
    except WriteFailed as exc:
        raise WriteFailed(f"{exc}; {run.rescue()}") from exc
    if unreadable:
        raise ConfigError(f"{unreadable}; the {run.messages:,} messages before it are written") from unreadable
    return Produced(run.messages, run.bytes, time.monotonic() - started)


class _Run:
    """What is handed over to a writer, and how many of it are known to be written."""

    def __init__(self, writer: Writer, on_progress: OnProgress) -> None:
        self._writer, self._on_progress = writer, on_progress
        self.messages = self.bytes = self.written = 0
        self._share = 0.0
        self._looked = time.monotonic()

    def write(self, block: Block, pieces: Iterable[list[Sample]]) -> None:
        before, first, write = self._share, self.messages, self._writer.write
        for piece in pieces:
            for value, _, key in piece:
                write(value, key=key)
                self.messages += 1
                self.bytes += len(value)
            if block.share is not None:
                self._share = before + (block.share - before) * (self.messages - first) / len(block.samples)
            self._on_progress(self.messages, self._share or None)
            if time.monotonic() - self._looked >= _LOOK:
                self._look(0)

    def finish(self, stop: Stop) -> None:
        """Returns once all is written."""
        deadline = None
        while left := self._look(_LOOK):
            if stop.wanted and deadline is None:
                deadline = time.monotonic() + _GRACE
            if deadline is not None and time.monotonic() > deadline:
                raise WriteFailed(f"{left:,} messages could not be written within {_GRACE:g} s of the signal")

    def rescue(self) -> str:
        """Has what is queued written after a failure, if that can be; says what became of the messages before it."""
        known, deadline = self.written, time.monotonic() + _GRACE
        with suppress(WriteFailed):
            while self._look(_LOOK) and time.monotonic() < deadline:
                pass
            if self.written == self.messages:
                return f"the {self.messages:,} messages before it are written, but for any that failed likewise"
        return f"of the {self.messages:,} messages before it at least {known:,} are written"

    def _look(self, seconds: float) -> int:
        left = self._writer.flush(seconds)
        self.written = self.messages - left
        self._looked = time.monotonic()
        return left


def _read_ahead(blocks: Iterable[Block], stop: Stop) -> Generator[Block]:
    """The same blocks, read in another thread, until there is a wish to stop."""
    ready: SimpleQueue[Block | Exception | None] = SimpleQueue()
    room = threading.Semaphore(_AHEAD)
    ended = threading.Event()

    def read() -> None:
        try:
            for block in blocks:
                ready.put(block)
                room.acquire()
                if ended.is_set():
                    return
            ready.put(None)
        except Exception as exc:
            ready.put(exc)

    stop.wakes(ready)
    thread = threading.Thread(target=read, name="read-ahead")
    thread.start()
    try:
        while (block := ready.get()) is not None and not stop.wanted:
            if isinstance(block, Exception):
                raise block
            yield block
            room.release()
    finally:
        ended.set()
        room.release()
        thread.join(_LOOK)  # not for longer: a file may be slow, and standard input silent


class _Schedule:
    """Cuts samples into pieces that are due, and waits for each."""

    def __init__(self, pace: Pace | None, stop: Stop) -> None:
        self._pace, self._stop = pace, stop
        self._started: float | None = None

    def pieces(self, samples: list[Sample]) -> Iterator[list[Sample]]:
        pieces = self._cut(samples) if self._pace is None else self._wait(samples, self._pace)
        for piece in pieces:
            if self._stop.wanted:
                return
            yield piece

    @staticmethod
    def _cut(samples: list[Sample]) -> Iterator[list[Sample]]:
        for start in range(0, len(samples), _PIECE):
            yield samples[start : start + _PIECE]

    def _wait(self, samples: list[Sample], pace: Pace) -> Iterator[list[Sample]]:
        piece: list[Sample] = []
        if self._started is None:
            self._started = time.monotonic()
        for sample in samples:
            due = self._started + pace.due(sample[1])
            if due > time.monotonic():
                yield piece
                piece = []
                self._stop.wait(max(0.0, due - time.monotonic()))
            piece.append(sample)
        yield piece


class _PerSecond(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed or 0:,.0f}/s")


@contextmanager
def progress_bar(console: Console, total: int | None = None) -> Iterator[OnProgress]:
    """Draws how far it is, if the console is a terminal.

    Args:
        console: where.
        total: messages that there will be at most; None: as many as the file has.
    """
    if not console.is_terminal:
        yield lambda messages, share: None
        return
    columns = (
        TextColumn("{task.completed:,.0f} messages"),
        _PerSecond(),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task, drawn = bar.add_task("", total=total), 0.0

        def draw(messages: int, share: float | None) -> None:
            nonlocal drawn
            now = time.monotonic()
            if now - drawn >= _REFRESH:
                expected = messages / share if share else None
                bar.update(task, completed=messages, total=min(filter(None, (expected, total)), default=None))
                drawn = now

        yield draw
