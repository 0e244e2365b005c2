"""Writes samples to a stream at a pace, while the next ones are read, until they end or a signal comes.

History is written with new event times, as if it happened now, so that freshness and expiry mean something.
"""

import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from queue import Empty, Queue
from types import FrameType
from typing import NamedTuple, Protocol

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from streamtrain.errors import ConfigError, WriteFailed
from streamtrain.stream.event_times import EventTimes
from streamtrain.stream.files import FileBlock, FileSample, SampleFile
from streamtrain.stream.source import Writer

Shift = Callable[[bytes], bytes]
"""Gives a message with its new event time."""

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def shift_times(
    to: str,
    field: str,
    samples: SampleFile,
    limit: Callable[[Iterable[FileBlock]], Iterable[FileBlock]],
    times: EventTimes,
) -> Shift:
    """What gives messages other event times. All other fields stay as they are, byte for byte.

    Args:
        to: "last": all are moved by as much as it takes for the last event of the file to happen now. "each": an event
            happens when it is written.
        field: of the event time.
        samples: the file, with event times. For "last" it is read once before.
        limit: gives those of its blocks that are going to be written.
        times: how the field says the time.

    Raises:
        ConfigError: `to` is neither, standard input cannot be read twice, or no sample has an event time.
    """
    if to not in ("last", "each"):
        raise ConfigError(f"--shift-times must be last or each, not {to!r}")
    if to == "each":
        return lambda message: with_time(message, field, times, lambda _: time.time())
    if samples.is_stdin:
        raise ConfigError("--shift-times last cannot read standard input twice: use --shift-times each")
    last = max((at for block in limit(samples.blocks()) for _, at, _ in block.samples if at is not None), default=None)
    if last is None:
        raise ConfigError(
            f"--shift-times: no sample of {samples.name} has an event time in {field!r}; set --time or --time-format"
        )
    by = time.time() - last
    return lambda message: with_time(message, field, times, lambda at: None if at is None else at + by)


def with_time(message: bytes, field: str, times: EventTimes, new: Callable[[float | None], float | None]) -> bytes:
    """A JSON message with another event time, a number; unchanged if it is not an object, or has no event time.

    Args:
        message: the message.
        field: of its event time.
        times: how the field says it.
        new: gives the new one by the old one, which is None where there is none; None: it stays.

    >>> with_time(b'{"ts": "1970-01-01T00:01", "id": 1.50}', "ts", EventTimes(), lambda at: at + 1)
    b'{"ts":61.000000,"id":1.50}'
    """
    try:
        fields = _decode(message)
        before = times.read(msgspec.json.decode(fields[field])) if field in fields else None
    except msgspec.DecodeError:  # workers say what is wrong with it
        return message
    at = new(before)
    if at is None:
        return message
    return msgspec.json.encode(fields | {field: msgspec.Raw(times.write(at))})


OnProgress = Callable[[int, float | None], None]
"""Called with the number of messages handed over, and the share of the file that is, 0 to 1; None: unknown."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_BLOCKS_AHEAD = 2  # that are read and not written
_PIECE = 1024  # messages between two checks for a stop
_POLL_SECONDS = 0.05  # between two checks for a stop while waiting
_REFRESH_SECONDS = 0.1  # between two updates of the progress bar
_FLUSH_SECONDS = 0.25  # between two checks of how many messages are written
_GRACE_SECONDS = 10.0  # in which queued messages must be written once a signal has come


class Pace(Protocol):
    """When messages are due. For one run."""

    def due(self, event_time: float | None) -> float:
        """Seconds from the first message to the next one, which has this event time."""

    def restart(self) -> None:
        """Event time begins anew with the next message, which is due at once."""


class Rate:
    """Evenly spaced; catches up after a stall.

    Args:
        rate: messages per second.
    """

    def __init__(self, rate: float) -> None:
        if not rate > 0:
            raise ConfigError(f"a rate must be above 0 messages per second, not {rate:g}")
        self._rate = rate
        self._before = 0

    def due(self, event_time: float | None) -> float:
        self._before += 1
        return (self._before - 1) / self._rate

    def restart(self) -> None:
        """A rate does not depend on event time."""


class EventTime:
    """Messages as far apart as the events were; late ones, and those without a time, at once.

    Args:
        speed: seconds of event time that pass in a second.
        max_gap: longest wait between two messages, in seconds.
    """

    def __init__(self, speed: float, max_gap: float) -> None:
        if not speed > 0:
            raise ConfigError(f"a speed must be above 0, not {speed:g}; 1 is as fast as it happened")
        self._speed, self._max_gap = speed, max_gap
        self._latest: float | None = None
        self._due = 0.0

    def due(self, event_time: float | None) -> float:
        if event_time is not None and self._latest is None:
            self._latest = event_time
        elif event_time is not None and self._latest is not None and event_time > self._latest:
            self._due += min((event_time - self._latest) / self._speed, self._max_gap)
            self._latest = event_time
        return self._due

    def restart(self) -> None:
        self._latest = None


def make_pace(rate: float | None, speed: float | None, max_gap: float) -> Pace | None:
    """The pace by a rate in messages per second, or by event time at a speed; None: as fast as possible.

    Raises:
        ConfigError: both are given, or one of them is not above 0.
    """
    if rate is not None and speed is not None:
        raise ConfigError("a rate and a speed exclude each other: give one of --rate and --speed")
    if speed is not None:
        return EventTime(speed, max_gap)
    return None if rate is None else Rate(rate)


class Produced(NamedTuple):
    """What was written.

    Attributes:
        messages: number.
        bytes: total size of their values.
        seconds: time from the start until the last was written.
    """

    messages: int
    bytes: int
    seconds: float

    def as_dict(self) -> dict[str, object]:
        """The figures that the command line prints."""
        per_second = round(self.messages / self.seconds) if self.seconds else 0
        return self._asdict() | {"seconds": round(self.seconds, 3), "messages_per_s": per_second}


class Stop:
    """A request to end. It is an attribute that is polled: a signal handler may not take the lock of an Event.

    Attributes:
        requested: whether it was made.
        signal: number of the signal that made it; None: none did.
    """

    def __init__(self) -> None:
        self.requested = False
        self.signal: int | None = None

    def set(self) -> None:
        """Requests to end."""
        self.requested = True

    def wait_until(self, due: float) -> None:
        """Waits until a time of the monotonic clock, or the request."""
        while not self.requested and (left := due - time.monotonic()) > 0:
            time.sleep(min(left, _POLL_SECONDS))

    def listen(self) -> None:
        """Has SIGINT and SIGTERM make the request; a second one ends the process as if nothing listened."""
        for number in _SIGNALS:
            signal.signal(number, self._signalled)

    def _signalled(self, number: int, _: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        self.signal = number
        self.set()


def produce(
    blocks: Iterable[FileBlock],
    writer: Writer,
    *,
    pace: Pace | None = None,
    stop: Stop | None = None,
    shift: Shift | None = None,
    on_progress: OnProgress = lambda messages, share: None,
) -> Produced:
    """Writes samples in their order, by their keys, until all are written.

    Args:
        blocks: the samples; they are read in a thread of its own.
        writer: writer to the topic.
        pace: when messages are due; None: as fast as the writer takes them.
        shift: gives messages other event times as they are written; None: they stay.
        stop: ends it early; what is queued then has ten seconds to be written.
        on_progress: see `OnProgress`.

    Raises:
        ConfigError: reading fails; all that was read before is written, and the message says how many.
        WriteFailed: a message cannot be written; the message says how many are.
    """
    stop = stop or Stop()
    started, run, unreadable = time.monotonic(), _Run(writer, on_progress, shift), None
    try:
        try:
            with closing(_read_ahead(blocks, stop)) as ahead:
                first: float | None = None
                for block in ahead:
                    first = time.monotonic() if first is None else first
                    run.write(block, _pieces(block, stop) if pace is None else _paced(block, pace, first, stop))
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

    def __init__(self, writer: Writer, on_progress: OnProgress, shift: Shift | None) -> None:
        self._writer, self._on_progress, self._shift = writer, on_progress, shift
        self.messages = self.bytes = self.written = 0
        self._share = 0.0
        self._flushed = time.monotonic()

    def write(self, block: FileBlock, pieces: Iterable[list[FileSample]]) -> None:
        before, first, write = self._share, self.messages, self._writer.write
        for piece in pieces:
            for sample, _, key in piece:
                value = sample if self._shift is None else self._shift(sample)
                write(value, key=key)
                self.messages += 1
                self.bytes += len(value)
            if block.share is not None:
                self._share = before + (block.share - before) * (self.messages - first) / len(block.samples)
            self._on_progress(self.messages, self._share or None)
            if time.monotonic() - self._flushed >= _FLUSH_SECONDS:
                self._flush(0)

    def finish(self, stop: Stop) -> None:
        """Returns once all is written."""
        deadline = None
        while left := self._flush(_FLUSH_SECONDS):
            if stop.requested and deadline is None:
                deadline = time.monotonic() + _GRACE_SECONDS
            if deadline is not None and time.monotonic() > deadline:
                raise WriteFailed(f"{left:,} messages were not written within {_GRACE_SECONDS:g} s of the signal")

    def rescue(self) -> str:
        """Flushes what is queued after a failure, if possible; says what became of the messages before it."""
        known, deadline = self.written, time.monotonic() + _GRACE_SECONDS
        with suppress(WriteFailed):
            while self._flush(_FLUSH_SECONDS) and time.monotonic() < deadline:
                pass
            if self.written == self.messages:
                return f"the {self.messages:,} messages before it are written, except any that failed likewise"
        return f"of the {self.messages:,} messages before it at least {known:,} are written"

    def _flush(self, seconds: float) -> int:
        left = self._writer.flush(seconds)
        self.written = self.messages - left
        self._flushed = time.monotonic()
        return left


def _read_ahead(blocks: Iterable[FileBlock], stop: Stop) -> Generator[FileBlock]:
    """The same blocks, read in another thread, until a stop is requested."""
    ready: Queue[FileBlock | Exception | None] = Queue(_BLOCKS_AHEAD)
    closed = threading.Event()

    def read() -> None:
        try:
            for block in blocks:
                ready.put(block)
                if closed.is_set():
                    return
            ready.put(None)
        except Exception as exc:
            ready.put(exc)

    # A daemon, and not joined for long: standard input may be silent for ever.
    thread = threading.Thread(target=read, name="read-ahead", daemon=True)
    thread.start()
    try:
        while not stop.requested:
            try:
                block = ready.get(timeout=_POLL_SECONDS)
            except Empty:
                continue
            if block is None:
                return
            if isinstance(block, Exception):
                raise block
            yield block
    finally:
        closed.set()
        while not ready.empty():
            ready.get()
        thread.join(_FLUSH_SECONDS if stop.requested else _GRACE_SECONDS)


def _pieces(block: FileBlock, stop: Stop) -> Iterator[list[FileSample]]:
    """Cuts a block, until a stop is requested."""
    for start in range(0, len(block.samples), _PIECE):
        if stop.requested:
            return
        yield block.samples[start : start + _PIECE]


def _paced(block: FileBlock, pace: Pace, first: float, stop: Stop) -> Iterator[list[FileSample]]:
    """Cuts a block into what is due at the same time, and waits for each piece.

    Args:
        block: samples to split.
        pace: when messages are due.
        first: time of the first message of the run, by the monotonic clock.
        stop: ends it early.
    """
    if block.restarts:
        pace.restart()
    piece: list[FileSample] = []
    for sample in block.samples:
        due = first + pace.due(sample[1])
        if due > time.monotonic():
            yield piece
            piece = []
            stop.wait_until(due)
            if stop.requested:
                return
        piece.append(sample)
    if not stop.requested:
        yield piece


class _PerSecond(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed or 0:,.0f}/s")


@contextmanager
def progress_bar(console: Console, total: int | None = None) -> Iterator[OnProgress]:
    """A progress bar, if the console is a terminal.

    Args:
        console: console that it is drawn on.
        total: messages at most; None: as many as the file has.
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
            if now - drawn >= _REFRESH_SECONDS:
                expected = messages / share if share else None
                bar.update(task, completed=messages, total=min(filter(None, (expected, total)), default=None))
                drawn = now

        yield draw
