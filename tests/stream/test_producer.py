"""The producer on a stream in memory: what is written and when, and how it ends."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from io import StringIO
from itertools import count
from pathlib import Path

import pytest
from rich.console import Console

from streamtrain.errors import ConfigError, WriteFailed
from streamtrain.stream.files import FileBlock, FileSample, SampleFile
from streamtrain.stream.producer import EventTime, Pace, Produced, Rate, Stop, make_pace, produce, progress_bar
from streamtrain.testing.stream import MemoryStream, MemoryWriter


class TimedWriter(MemoryWriter):
    """Knows when each message came, in seconds since the first."""

    def __init__(self, stream: MemoryStream) -> None:
        super().__init__(stream)
        self.times: list[float] = []

    def write(
        self, value: bytes, *, partition: int | None = None, key: bytes | None = None, headers: Mapping[str, bytes] = {}
    ) -> None:
        super().write(value, partition=partition, key=key, headers=headers)
        self.times.append(time.monotonic())

    def since_first(self) -> list[float]:
        return [one - self.times[0] for one in self.times]


@pytest.fixture
def stream() -> MemoryStream:
    made = MemoryStream()
    made.create(3)
    return made


def numbers(amount: int, size: int = 5000) -> Iterator[FileBlock]:
    for start in range(0, amount, size):
        samples: list[FileSample] = [
            (b"%d" % i, float(i), b"%d" % (i % 10)) for i in range(start, min(amount, start + size))
        ]
        yield FileBlock(samples, (start + len(samples)) / amount)


def endless() -> Iterator[FileBlock]:
    return (FileBlock([(b"%d" % i, float(i), None)], None) for i in count())


def values(stream: MemoryStream) -> list[list[bytes]]:
    return [[value for value, _ in stream.messages(partition)] for partition in stream.bounds()]


# --- what is written ---


def test_samples_of_one_key_stay_in_one_partition_in_order(stream: MemoryStream) -> None:
    done = produce(numbers(20_000), stream.writer())
    assert (done.messages, done.bytes) == (20_000, sum(len(str(i)) for i in range(20_000)))
    home: dict[int, int] = {}
    for partition, found in enumerate(values(stream)):
        offsets = [int(value) for value in found]
        assert offsets == sorted(offsets)
        assert all(home.setdefault(number % 10, partition) == partition for number in offsets)
    assert sum(map(len, values(stream))) == 20_000
    assert len(set(home.values())) > 1


def test_without_keys_partitions_take_turns(stream: MemoryStream, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"user": 1, "i": i}) + "\n" for i in range(300)))
    produce(SampleFile(str(file)).blocks(), stream.writer())
    assert [len(found) for found in values(stream)] == [100, 100, 100]
    produce(SampleFile(str(file), key="user").blocks(), stream.writer())
    assert sorted(len(found) for found in values(stream)) == [100, 100, 400]


def test_figures() -> None:
    assert Produced(10, 200, 0.5).as_dict() == {"messages": 10, "bytes": 200, "seconds": 0.5, "messages_per_s": 20}
    assert Produced(0, 0, 0.0).as_dict()["messages_per_s"] == 0


# --- pace ---


def in_one_of_many_runs(run: Callable[[], bool]) -> bool:
    """Whether the times are right once: a busy machine may hold up some messages of many runs."""
    return any(run() for _ in range(10))


def test_a_rate_is_even_and_does_not_drift(stream: MemoryStream) -> None:
    def run() -> bool:
        writer = TimedWriter(stream)
        done = produce(numbers(600), writer, pace=Rate(1000))
        assert done.seconds >= 0.599
        late = [at - i / 1000 for i, at in enumerate(writer.since_first())]
        return done.seconds < 1.5 and min(late) > -0.05 and sorted(late)[len(late) // 2] < 0.05

    assert in_one_of_many_runs(run)


def test_a_stall_is_made_up_for(stream: MemoryStream) -> None:
    def stalling() -> Iterator[FileBlock]:
        blocks = numbers(400, size=100)
        yield next(blocks)
        time.sleep(0.3)  # what reads is slow: this is not waiting for anything
        yield from blocks

    def run() -> bool:
        writer = TimedWriter(stream)
        produce(stalling(), writer, pace=Rate(1000))
        return writer.since_first()[-1] == pytest.approx(0.4, abs=0.15)

    assert in_one_of_many_runs(run)


@pytest.mark.parametrize(
    ("times", "due"),
    [
        ([100.0, 101.0, 103.0], [0, 0.1, 0.3]),
        ([100.0, 102.0, 101.0, 103.0], [0, 0.2, 0.2, 0.3]),
        ([None, 100.0, None, 101.0], [0, 0, 0, 0.1]),
        ([100.0, 1000.0, 1001.0], [0, 5, 5.1]),
    ],
)
def test_event_time(times: list[float | None], due: list[float]) -> None:
    pace = EventTime(speed=10, max_gap=5)
    assert [pace.due(at) for at in times] == pytest.approx(due)


def test_gaps_of_event_time_are_waited_out(stream: MemoryStream) -> None:
    samples: list[FileSample] = [(b"a", 0.0, None), (b"b", 30.0, None), (b"late", 10.0, None), (b"c", 10_000.0, None)]

    def run() -> bool:
        writer = TimedWriter(stream)
        produce([FileBlock(samples, None)], writer, pace=EventTime(speed=100, max_gap=0.2))
        return writer.since_first() == pytest.approx([0, 0.2, 0.2, 0.4], abs=0.1)

    assert in_one_of_many_runs(run)


def test_paces() -> None:
    assert make_pace(None, None, 1) is None
    assert isinstance(make_pace(5, None, 1), Rate)
    assert isinstance(make_pace(None, 5, 1), EventTime)
    with pytest.raises(ConfigError, match="exclude each other"):
        make_pace(5, 5, 1)
    for rate, speed in ((0, None), (-1, None), (None, 0), (float("nan"), None)):
        with pytest.raises(ConfigError, match="must be above 0"):
            make_pace(rate, speed, 1)


# --- how it ends ---


def test_what_was_read_before_an_error_is_written(stream: MemoryStream) -> None:
    def breaking() -> Iterator[FileBlock]:
        yield from numbers(7000)
        raise ConfigError("cannot read a.csv: Row #7002: nonsense")

    with pytest.raises(ConfigError, match=r"Row #7002: nonsense; the 7,000 messages before it are written"):
        produce(breaking(), stream.writer())
    assert sum(map(len, values(stream))) == 7000


class Failing(MemoryWriter):
    """Refuses one message; as `broken`, everything from then on."""

    broken = failed = False

    def write(
        self, value: bytes, *, partition: int | None = None, key: bytes | None = None, headers: Mapping[str, bytes] = {}
    ) -> None:
        if value == b"1234":
            self.failed = self.broken
            raise WriteFailed("message too large")
        super().write(value, partition=partition, key=key, headers=headers)

    def flush(self, seconds: float) -> int:
        if self.failed:
            raise WriteFailed("message too large")
        return super().flush(seconds)


class Broken(Failing):
    broken = True


@pytest.mark.parametrize(
    ("writer", "message"),
    [
        (Failing, r"too large; the 1,234 messages before it are written, except any that failed likewise"),
        (Broken, r"too large; of the 1,234 messages before it at least [\d,]+ are written"),
    ],
)
def test_a_failed_write_ends_it_and_the_reading(stream: MemoryStream, writer: type[Failing], message: str) -> None:
    with pytest.raises(WriteFailed, match=message):
        produce(endless(), writer(stream))
    assert sum(map(len, values(stream))) == 1234
    assert "read-ahead" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("pace", [None, Rate(0.001), EventTime(0.001, 1000)])
def test_stop_ends_it_at_once(stream: MemoryStream, pace: Pace | None) -> None:
    stop = Stop()
    begun = threading.Event()

    def stop_soon() -> None:
        begun.wait()
        stop.set()

    other = threading.Thread(target=stop_soon)
    other.start()
    done = produce(endless(), stream.writer(), pace=pace, stop=stop, on_progress=lambda messages, _: begun.set())
    other.join()
    assert done.messages == sum(map(len, values(stream)))
    assert done.seconds < 60
    if pace:
        assert done.messages == 1


def test_stop_does_not_wait_for_a_sample(stream: MemoryStream) -> None:
    stop, release = Stop(), threading.Event()

    def silent() -> Iterator[FileBlock]:
        yield from numbers(10)
        stop.set()
        release.wait()

    assert produce(silent(), stream.writer(), stop=stop).messages in (0, 10)
    release.set()


def test_a_stop_from_before_counts(stream: MemoryStream) -> None:
    stop = Stop()
    stop.set()
    assert produce(endless(), stream.writer(), stop=stop).messages == 0


def test_signals(stream: MemoryStream) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    stop = Stop()
    try:
        stop.listen()
        produce(endless(), stream.writer(), pace=Rate(1), stop=stop, on_progress=lambda *_: os.kill(os.getpid(), 15))
        assert stop.signal == signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_signals_in_their_thousands_never_lock(stream: MemoryStream) -> None:
    """The handler runs wherever the code happens to be: also within the wait that it is to end."""
    stop = Stop()
    before = signal.signal(signal.SIGALRM, lambda *_: stop.set())
    signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0001)
    try:
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            stop.wait_until(time.monotonic() + 0.0001)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert stop.requested


# --- progress ---


def test_progress_is_told(stream: MemoryStream) -> None:
    told: list[tuple[int, float | None]] = []
    produce(numbers(12_000), stream.writer(), on_progress=lambda *one: told.append(one))
    assert told == sorted(told)
    assert told[-1] == (12_000, 1)
    for messages, share in told:
        assert share == pytest.approx(messages / 12_000)


def test_a_bar_on_terminals_only(stream: MemoryStream) -> None:
    for is_terminal in (False, True):
        out = StringIO()
        with progress_bar(Console(file=out, force_terminal=is_terminal, width=100), 8000) as on_progress:
            produce(numbers(12_000), stream.writer(), on_progress=on_progress)
        assert bool(out.getvalue()) == is_terminal
        assert ("messages" in out.getvalue()) == is_terminal
