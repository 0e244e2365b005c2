"""Entries, offsets and writers of Redis Streams, as far as they are Redis' own."""

import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from streamtrain.errors import ConfigError, OffsetGone, SourceRefused, TopicMissing, WriteFailed
from streamtrain.stream.redis.stream import RedisStream
from tests.patience import PATIENCE
from tests.stream.recorded import Recorder
from tests.stream.redis_fixtures import client, key_of, recorder, redis_binary, redis_url, stream, write

__all__ = ["client", "recorder", "redis_binary", "redis_url", "stream"]


def test_entries_are_as_documented(stream: RedisStream, client: Any) -> None:
    with closing(stream.writer()) as writer:
        writer.write(b"one", partition=0)
        writer.write(b"two", key=b"a key", headers={"why": b"no reason"}, partition=0)
        assert writer.flush(120) == 0
    (id1, one), (id2, two) = client.xrange(key_of(stream, 0))
    assert (id1, id2) == (b"0-1", b"0-2")
    assert one.keys() == {b"v", b"t"}
    assert two | {b"t": b""} == {b"v": b"two", b"t": b"", b"k": b"a key", b"h.why": b"no reason"}
    assert abs(int(two[b"t"]) / 1000 - time.time()) < 60
    assert client.get(f"streamtrain:{{{stream.topic}}}:partitions") == b"3"
    stream.create(7)
    assert len(stream.bounds()) == 3


def test_offsets_never_restart(stream: RedisStream, client: Any) -> None:
    write(stream, 0, b"a", b"b", b"c")
    client.xtrim(key_of(stream, 0), maxlen=0, approximate=False)
    assert stream.bounds()[0] == (3, 3)
    write(stream, 0, b"d")
    client.xdel(key_of(stream, 0), "0-4")
    assert stream.bounds()[0] == (4, 4)
    write(stream, 0, b"e")
    assert stream.bounds()[0] == (4, 5)


def test_gaps_are_passed(stream: RedisStream, client: Any, recorder: Recorder) -> None:
    write(stream, 0, *b"0 1 2 3 4 5".split())
    client.xdel(key_of(stream, 0), "0-3", "0-5")
    with closing(stream.source("group", "job", recorder)) as source:
        recorder.take_until(source, lambda r: r.count == 4)
        assert recorder.offsets == {0: [0, 1, 3, 5]}
        assert recorder.got == {0: [b"0", b"1", b"3", b"5"]}
        assert source.positions()[0] == 6
        assert source.lag() == {0: 0, 1: 0, 2: 0}


def test_what_is_deleted_is_gone_and_the_others_go_on(stream: RedisStream, client: Any, recorder: Recorder) -> None:
    write(stream, 0, b"a", b"b", b"c")
    write(stream, 1, b"x", b"y")
    client.xtrim(key_of(stream, 0), minid="0-3", approximate=False)
    with closing(stream.source("group", "job", recorder)) as source:
        with pytest.raises(OffsetGone) as gone:
            recorder.take(source, seconds=5)
        assert (gone.value.partition, gone.value.wanted, gone.value.low, gone.value.high) == (0, 0, 2, 3)
        recorder.take_until(source, lambda r: r.got == {1: [b"x", b"y"]})
        with pytest.raises(OffsetGone):
            recorder.take(source)
        assert source.positions()[0] == 0
        source.seek(0, 2)
        recorder.take_until(source, lambda r: r.got == {0: [b"c"], 1: [b"x", b"y"]})
        client.delete(key_of(stream, 0))  # as good as another stream: its offsets begin anew
        with pytest.raises(OffsetGone) as gone:
            recorder.take(source, seconds=5)
        assert (gone.value.wanted, gone.value.low, gone.value.high) == (3, 0, 0)
        source.seek(0, 9)
        source.pause()
        assert recorder.take(source) == 0
        source.resume()
        with pytest.raises(OffsetGone):
            recorder.take(source, seconds=5)


def test_times_are_found(stream: RedisStream, client: Any) -> None:
    write(stream, 0, *(b"%d" % i for i in range(20)))
    for i in range(100):
        client.xadd(key_of(stream, 1), {"v": f"{i}", "t": 1000 * (i // 10)}, id="0-*")
    client.xdel(key_of(stream, 1), *(f"0-{i}" for i in range(41, 54)))
    assert stream.at(0.0) == {0: 0, 1: 0, 2: 0}
    assert [stream.at(t)[1] for t in (0.5, 1, 1.001, 3.5, 4, 5, 8.5, 9, 9.5)] == [10, 10, 20, 53, 53, 53, 90, 90, 100]
    assert stream.at(time.time() + 60) == {0: 20, 1: 100, 2: 0}
    client.xadd(key_of(stream, 1), {"v": "x"}, id="0-*")
    with pytest.raises(SourceRefused, match="a field t"):
        stream.at(9.5)


def test_others_may_write(stream: RedisStream, client: Any, recorder: Recorder) -> None:
    client.xadd(key_of(stream, 0), {"x": "1", "v": "last"}, id="0-*")
    client.xadd(key_of(stream, 0), {"x": "1"}, id="0-*")
    with closing(stream.source("group", "job", recorder)) as source:
        recorder.take_until(source, lambda r: r.got == {0: [b"last", b""]})
        client.xadd(key_of(stream, 1), {"v": "ids of the clock"})
        with pytest.raises(SourceRefused, match=r"XADD .* 0-\*"):
            recorder.take_until(source, lambda r: False)
    with pytest.raises(SourceRefused, match="0-n"):
        stream.bounds()


def test_times_of_what_others_write(stream: RedisStream, client: Any, recorder: Recorder) -> None:
    """Also where field t stands elsewhere, or is none; the stream is read in any case."""
    fields: list[dict[str, str]] = [
        {"v": "a", "t": "1700000000000"},
        {"t": "1700000000001", "v": "b"},
        {"v": "c"},
        {"v": "d", "t": "yesterday"},
        {"v": "e", "t": "9" * 5000},
        {"v": "f", "t": "-5"},
        {"v": "g", "x": "1", "t": "7"},
    ]
    for one in fields:
        client.xadd(key_of(stream, 0), one, id="0-*")
    with closing(stream.source("group", "job", recorder)) as source:
        fetched = [one for _ in range(20) for one in source.poll(10, 0.1)]
    assert [at for one in fetched for at in one.times] == [1700000000000, 1700000000001, -1, -1, -1, -1, 7]


def test_a_poll_wakes_when_messages_come(stream: RedisStream, recorder: Recorder) -> None:
    with closing(stream.source("group", "job", recorder)) as source:
        recorder.take(source)
        timer = threading.Timer(0.3, write, (stream, 2, b"late"))
        timer.start()
        began = time.monotonic()
        assert [one[:3] for one in source.poll(10, PATIENCE)] == [(2, [0], [b"late"])]
        assert 0.2 < time.monotonic() - began < PATIENCE / 2
        timer.join()


def test_most_is_over_all_partitions(stream: RedisStream, recorder: Recorder) -> None:
    for partition in range(3):
        write(stream, partition, *(b"%d" % i for i in range(100)))
    with closing(stream.source("group", "job", recorder)) as source:
        while recorder.count < 300:
            assert 0 < recorder.take(source, 7, 5.0) <= 7
        assert all(recorder.offsets[p] == list(range(100)) for p in range(3))


def test_a_missing_topic_is_said(stream: RedisStream, redis_url: str, client: Any, recorder: Recorder) -> None:
    missing = RedisStream(redis_url, "nothing")
    calls: list[Callable[[], Any]] = [
        missing.bounds,
        missing.writer,
        lambda: missing.at(0),
        lambda: missing.committed("group"),
        lambda: missing.source("group", "job", recorder),
    ]
    for call in calls:
        with pytest.raises(TopicMissing, match=r"topic nothing of Redis at .* does not exist"):
            call()
    client.set("streamtrain:{nothing}:partitions", "many")
    with pytest.raises(SourceRefused, match="not written by streamtrain"):
        missing.bounds()
    client.delete("streamtrain:{nothing}:partitions")
    with pytest.raises(ConfigError, match="at least one partition"):
        missing.create(0)


def test_keys_and_turns_choose_partitions(stream: RedisStream) -> None:
    with closing(stream.writer()) as writer:
        for i in range(9):
            writer.write(b"%d" % i)
        for i in range(50):
            writer.write(b"%d" % i, key=b"always the same")
        assert writer.flush(120) == 0
    assert sorted(bounds.high for bounds in stream.bounds().values()) == [3, 3, 53]


def test_another_topic_is_made(stream: RedisStream, redis_url: str) -> None:
    with closing(stream.writer(f"{stream.topic}.dead")) as writer:
        writer.write(b"bad", partition=2)
        assert writer.flush(120) == 0
    assert RedisStream(redis_url, f"{stream.topic}.dead").bounds() == {0: (0, 0), 1: (0, 0), 2: (0, 1)}


def test_writers_refuse_what_cannot_be_written(redis_url: str, stream: RedisStream, client: Any) -> None:
    small = RedisStream(redis_url, stream.topic, buffer_bytes=1000)
    writer = small.writer()
    with pytest.raises(WriteFailed, match=r"partitions 0 to 2, but not 3"):
        writer.write(b"a", partition=3)
    with pytest.raises(WriteFailed, match=r"1001 bytes, more than buffer_bytes, 1000"):
        writer.write(b"x" * 1001)
    client.set(key_of(stream, 0), "not a stream")
    writer.write(b"a", partition=0)
    with pytest.raises(WriteFailed, match="not written by streamtrain"):
        writer.flush(120)
    writer.close()
    writer.close()
    closed = small.writer()
    closed.close()
    with pytest.raises(WriteFailed, match="is closed"):
        closed.write(b"a")


def test_old_messages_go_where_maxlen_says_so(redis_url: str, stream: RedisStream) -> None:
    write(RedisStream(redis_url, stream.topic, maxlen=500), 0, *(b"%d" % i for i in range(3000)))
    low, high = stream.bounds()[0]
    assert high == 3000
    assert 500 <= high - low <= 1000
