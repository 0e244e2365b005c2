"""Messages through shared memory: between two threads, which is as good as between two processes, and with a liar."""

import mmap
import os
import signal
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamtrain._core import Lane
from tests.patience import PATIENCE

RING = 1 << 20
LIMIT = 64 << 20


def both() -> tuple[Lane, Lane]:
    lane = Lane.make()
    return lane, Lane.take(lane.fd, lane.nonce)


@pytest.fixture
def aside() -> Iterator[Callable[..., Future[Any]]]:
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


SIZES = st.one_of(
    st.integers(0, 200), st.integers(RING - 64, RING + 64), st.sampled_from([RING // 4, 2 * RING, 3 * RING + 5])
)


@given(st.lists(SIZES, max_size=6), st.lists(SIZES, max_size=6))
def test_messages_arrive_whole_and_in_order_both_ways(there: list[int], back: list[int]) -> None:
    maker, taker = both()

    def message(at: int, size: int) -> bytes:
        return bytes([at + 1]) * size

    def write(lane: Lane, sizes: list[int]) -> None:
        assert all(lane.write(message(*one)) for one in enumerate(sizes))

    def read(lane: Lane, sizes: list[int]) -> None:
        assert [lane.read(LIMIT) == message(*one) for one in enumerate(sizes)] == [True] * len(sizes)

    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(write, maker, there), pool.submit(read, taker, there)]
        jobs += [pool.submit(write, taker, back), pool.submit(read, maker, back)]
        for job in jobs:
            job.result(PATIENCE)


def test_two_that_write_before_they_read_do_not_wait_for_each_other(aside: Callable[..., Future[Any]]) -> None:
    maker, taker = both()
    large = os.urandom(5 * RING)
    answering = aside(lambda: (taker.write(large), taker.read(LIMIT)))  # as a server does, which answers in turn
    assert maker.write(large)
    assert maker.write(b"more")
    assert maker.read(LIMIT) == large
    assert answering.result(PATIENCE) == (True, large)
    assert taker.read(LIMIT) == b"more"


def test_several_threads_write(aside: Callable[..., Future[Any]]) -> None:
    maker, taker = both()
    messages = [bytes([i]) * 1000 for i in range(200)]
    writing = [aside(lambda part: [maker.write(one) for one in part], messages[i::3]) for i in range(3)]
    read = [taker.read(LIMIT) for _ in messages]
    assert all(all(one.result(PATIENCE)) for one in writing)
    assert sorted(one or b"" for one in read) == sorted(messages)


@pytest.mark.parametrize("side", [0, 1])
def test_close_ends_those_who_wait(side: int, aside: Callable[..., Future[Any]]) -> None:
    lane = both()[side]
    reading = aside(lane.read, LIMIT)
    lane.close()
    assert reading.result(PATIENCE) is None
    assert lane.read(LIMIT) is None
    assert not lane.write(b"x")


def test_close_ends_who_finds_no_room(aside: Callable[..., Future[Any]]) -> None:
    _, taker = both()
    began = threading.Event()

    def write() -> bool:
        began.set()
        return taker.write(bytes(4 * RING))

    writing = aside(write)
    assert began.wait(PATIENCE)
    taker.close()
    assert writing.result(PATIENCE) is False


def test_nothing_is_read_after_close(aside: Callable[..., Future[Any]]) -> None:
    maker, taker = both()
    assert maker.write(b"whole")
    taker.close()
    assert taker.read(LIMIT) is None
    maker, taker = both()
    raw = mapped(maker)
    position = positions_of(raw)[0]
    raw[position : position + 8] = struct.pack("<Q", 8)  # a length that says 0, and no more
    assert taker.read(LIMIT) == b""
    reading = aside(taker.read, LIMIT)  # half a length, for ever
    raw[position : position + 8] = struct.pack("<Q", 12)
    taker.close()
    assert reading.result(PATIENCE) is None


def test_messages_over_the_limit_are_refused() -> None:
    maker, taker = both()
    maker.write(b"12345")
    with pytest.raises(ValueError, match="a message of 5 bytes; at most 4"):
        taker.read(4)


def mapped(lane: Lane) -> mmap.mmap:
    """The memory of a lane, as the other side may write whatever it likes there."""
    return mmap.mmap(lane.fd, os.fstat(lane.fd).st_size)


def positions_of(raw: mmap.mmap) -> list[int]:
    """Where the maker's ring says how much is written and read: behind the nonce and both sides, on cache lines."""
    rings = 64 + 2 * 64
    return [rings, rings + 64]


@pytest.mark.parametrize("which", [0, 1])
def test_positions_that_cannot_be_are_refused(which: int) -> None:
    maker, taker = both()
    position = positions_of(raw := mapped(maker))[which]
    raw[position : position + 8] = struct.pack("<Q", 1 << 40)
    with pytest.raises(ValueError, match="has damaged it"):
        taker.read(LIMIT) if which == 0 else maker.write(b"x")


def test_only_this_lane_is_taken() -> None:
    lane = Lane.make()
    with pytest.raises(ValueError, match="another lane"):
        Lane.take(lane.fd, bytes(16))
    with pytest.raises(ValueError, match="16 bytes"):
        Lane.take(lane.fd, b"short")
    with pytest.raises(ValueError, match="no such file"):
        Lane.take(1 << 20, lane.nonce)


def test_files_that_could_be_cut_short_are_not_taken() -> None:
    lane = Lane.make()
    size = os.fstat(lane.fd).st_size
    reading, writing = os.pipe()
    open_to_changes = os.memfd_create("lane", os.MFD_ALLOW_SEALING)
    os.truncate(open_to_changes, size)
    try:
        for fd in (reading, writing, open_to_changes):
            with pytest.raises(ValueError, match="not a lane"):
                Lane.take(fd, lane.nonce)
    finally:
        for fd in (reading, writing, open_to_changes):
            os.close(fd)
    with pytest.raises(PermissionError):
        os.truncate(lane.fd, 0)


def test_each_lane_has_its_nonce() -> None:
    assert len({Lane.make().nonce for _ in range(100)}) == 100


SOON = 0.05


def announce(maker: Lane, size: int) -> None:
    """Writes the length of a message, the first one, and nothing else of it."""
    raw = mapped(maker)
    ring = positions_of(raw)[0]
    raw[ring + 128 : ring + 136] = struct.pack("<Q", size)
    raw[ring : ring + 8] = struct.pack("<Q", 8)


def test_nobody_writes_for_ever_to_who_does_not_read() -> None:
    for lane in both():
        with pytest.raises(TimeoutError, match=r"neither read nor written anything for 0\.05 seconds"):
            lane.write(bytes(2 * RING), SOON)
        assert not lane.write(b"after half a message")  # which would be taken for the rest of it


def test_nobody_reads_for_ever_from_who_does_not_write() -> None:
    maker, taker = both()
    with pytest.raises(TimeoutError):
        taker.read(LIMIT, SOON)
    assert maker.write(b"late")
    assert taker.read(LIMIT, SOON) == b"late"  # nothing was lost
    maker, taker = both()
    announce(maker, 100)
    with pytest.raises(TimeoutError):
        taker.read(LIMIT, SOON)
    assert taker.read(LIMIT, SOON) is None  # the rest would be taken for a message


def test_who_is_slow_is_waited_for(aside: Callable[..., Future[Any]]) -> None:
    maker, taker = both()
    large = os.urandom(5 * RING)
    slow = threading.Event()

    def read() -> bytes | None:
        raw = mapped(maker)
        position = positions_of(raw)[0]
        while struct.unpack("<Q", raw[position : position + 8])[0] < RING:
            slow.wait(0.001)
        slow.wait(0.2)
        return taker.read(LIMIT)

    reading = aside(read)
    assert maker.write(large, PATIENCE)
    assert reading.result(PATIENCE) == large


def test_what_is_tried_never_waits(aside: Callable[..., Future[Any]]) -> None:
    maker, taker = both()
    assert maker.try_write(b"fits")
    assert not maker.try_write(bytes(RING))
    assert maker.try_write(b"too")
    writing = aside(maker.write, bytes(2 * RING))
    assert [taker.read(LIMIT), taker.read(LIMIT)] == [b"fits", b"too"]
    assert taker.read(LIMIT) == bytes(2 * RING)
    assert writing.result(PATIENCE)
    stuck = aside(taker.write, bytes(8 * RING))
    raw = mapped(maker)
    position = positions_of(raw)[0] + 128 + RING  # of the other ring
    while struct.unpack("<Q", raw[position : position + 8])[0] < RING:
        assert not stuck.done()
    assert not taker.try_write(b"while another message is half there")
    taker.close()
    assert not stuck.result(PATIENCE)
    assert not taker.try_write(b"closed")


class Rung(Exception):
    """An alarm, as a handler of signals may raise."""


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Rung

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("side", [0, 1])
def test_who_finds_no_room_hears_signals(side: int) -> None:
    lane = both()[side]
    with pytest.raises(Rung), alarm(SOON):
        lane.write(bytes(2 * RING), PATIENCE)
    assert not lane.write(b"after half a message")


def test_who_waits_for_the_rest_of_a_message_hears_signals() -> None:
    maker, taker = both()
    announce(maker, 100)
    with pytest.raises(Rung), alarm(SOON):
        taker.read(LIMIT, PATIENCE)


def test_one_thread_reads(aside: Callable[..., Future[Any]]) -> None:
    maker, taker = both()
    reading = [aside(taker.read, LIMIT) for _ in range(2)]
    refused = next(one for one in as_completed(reading, PATIENCE))
    with pytest.raises(RuntimeError, match="another thread is reading"):
        refused.result()
    assert maker.write(b"for the other")
    assert {one.result(PATIENCE) for one in reading if one is not refused} == {b"for the other"}
