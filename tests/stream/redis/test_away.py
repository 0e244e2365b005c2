"""A Redis that is killed, hangs, forgets everything, or cuts connections."""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import OffsetGone, SourceUnavailable, TopicMissing, WriteFailed
from streamtrain.stream.redis.stream import RedisStream
from tests.patience import PATIENCE
from tests.stream.recorded import Recorder
from tests.stream.redis_fixtures import client, recorder, redis_binary, redis_url, stream, write

__all__ = ["client", "recorder", "redis_binary", "redis_url", "stream"]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert {record.name for record in caplog.records} <= {"streamtrain.stream.redis.stream"}
    return [record.message for record in caplog.records]


@pytest.fixture
def own(redis_binary: str | None, tmp_path: Path) -> Iterator[Valkey]:
    """A server of the test's own, whose data outlives it."""
    with Valkey(tmp_path, appendonly=True, binary=redis_binary) as server:
        yield server


def test_nothing_is_lost_or_doubled_when_the_server_is_killed(own: Valkey, caplog: pytest.LogCaptureFixture) -> None:
    stream = RedisStream(own.url, "samples")
    stream.create(3)
    recorder = Recorder()
    total = 9000
    with closing(stream.writer()) as writer, closing(stream.source("group", "job", recorder)) as source:

        def produce() -> None:
            for i in range(total):
                writer.write(b"%d" % i, partition=i % 3)
                if i % 100 == 0:
                    writer.flush(PATIENCE)

        producer = threading.Thread(target=produce)
        producer.start()
        for most in (1000, 4000):
            recorder.take_until(source, lambda r, most=most: r.count > most)  # type: ignore[misc]
            own.restart()
        recorder.take_until(source, lambda r: r.count >= total)
        producer.join()
        assert writer.flush(PATIENCE) == 0
        recorder.take(source)
    assert recorder.got == {p: [b"%d" % i for i in range(p, total, 3)] for p in range(3)}
    assert [event for event, _ in recorder.events] == ["assigned", "revoked"]
    said = [line.split(" is ")[1][:4] for line in lines(caplog)]
    assert said in ([], ["unre", "reac"], ["unre", "reac"] * 2)


def test_connections_that_break_cost_nothing(stream: RedisStream, client: Any, recorder: Recorder) -> None:
    total = 20_000
    stop = threading.Event()

    def cut() -> None:
        while not stop.wait(0.01):
            for one in client.client_list():
                if one["id"] != str(client.client_id()):
                    client.client_kill_filter(_id=one["id"])

    cutter = threading.Thread(target=cut)
    with closing(stream.writer()) as writer:
        cutter.start()
        try:
            for i in range(total):
                writer.write(b"%d" % i, partition=0)
            assert writer.flush(PATIENCE) == 0
        finally:
            stop.set()
            cutter.join()
    with closing(stream.source("group", "job", recorder)) as source:
        recorder.take_until(source, lambda r: r.count >= total)
    assert recorder.got == {0: [b"%d" % i for i in range(total)]}


def test_a_server_that_is_away_is_waited_for_with_two_lines(own: Valkey, caplog: pytest.LogCaptureFixture) -> None:
    stream = RedisStream(own.url, "samples", lease=0.5)
    stream.create(3)
    recorder = Recorder()
    with closing(stream.writer()) as writer, closing(stream.source("group", "job", recorder)) as source:
        recorder.take(source)
        own.kill()
        began = time.monotonic()
        for _ in range(5):
            assert source.poll(10, 0.3) == []
        assert time.monotonic() - began > 1.0
        writer.write(b"a", partition=0)
        assert writer.flush(0.3) == 1
        with pytest.raises(SourceUnavailable, match="refused"):
            stream.bounds()
        assert stream.unreachable
        own.restart()
        recorder.take_until(source, lambda r: r.count)
        assert not stream.unreachable
        assert writer.flush(PATIENCE) == 0
    assert [re.sub(r"\d+\.\d+\.\d+\.\d+:\d+", "HOST", line).partition(": ")[0] for line in lines(caplog)] == [
        "Redis at HOST is unreachable",
        "Redis at HOST is reachable again",
    ]


def test_a_server_that_hangs_holds_nobody_longer_than_asked(own: Valkey, caplog: pytest.LogCaptureFixture) -> None:
    stream = RedisStream(own.url, "samples", timeout=8.0, buffer_bytes=2500)
    stream.create(1)
    recorder = Recorder()
    with closing(stream.writer()) as writer, closing(stream.source("group", "job", recorder)) as source:
        recorder.take(source)
        own.pause()
        polls = 0
        while not stream.unreachable:  # which it is after eight seconds
            assert source.poll(10, 0.25) == []
            polls += 1
        assert polls > 2
        writer.write(b"x" * 1000, partition=0)
        writer.write(b"x" * 1000, partition=0)
        full = threading.Thread(target=writer.write, args=(b"y" * 1000,))
        full.start()
        full.join(0.3)
        assert full.is_alive()
        own.resume()
        full.join(120)
        recorder.take_until(source, lambda r: r.count == 3)
    assert [line.split(" is ")[1][:4] for line in lines(caplog)] == ["unre", "reac"]


def test_a_server_that_forgot_everything(redis_binary: str | None) -> None:
    recorder = Recorder()
    with Valkey(binary=redis_binary) as server:
        stream = RedisStream(server.url, "samples")
        stream.create(1)
        write(stream, 0, b"a", b"b", b"c")
        with closing(stream.writer()) as writer, closing(stream.source("group", "job", recorder)) as source:
            recorder.take_until(source, lambda r: r.count == 3)
            server.restart()
            with pytest.raises(TopicMissing, match=r"topic samples of Redis at .* does not exist"):
                recorder.take_until(source, lambda r: False)
            writer.write(b"d")
            with pytest.raises(WriteFailed, match=r"topic samples .*does not exist"):
                writer.flush(120)
            with pytest.raises(WriteFailed, match=r"topic samples .*does not exist"):
                writer.write(b"e")
            stream.create(1)
            with pytest.raises(OffsetGone) as gone:
                recorder.take_until(source, lambda r: False)
            assert (gone.value.wanted, gone.value.low, gone.value.high) == (3, 0, 0)
            assert [event for event, _ in recorder.events] == ["assigned", "lost", "assigned"]
