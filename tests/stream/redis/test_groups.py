"""Groups on Redis: partitions are shared by leases, which run out when members are killed, stopped or stuck."""

import json
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from typing import Any

import pytest

from streamtrain.errors import SourceRefused
from streamtrain.stream.redis.stream import RedisStream
from streamtrain.stream.source import Source
from tests.patience import until
from tests.stream.recorded import Recorder
from tests.stream.redis_fixtures import recorder, redis_binary, redis_url, stream

__all__ = ["recorder", "redis_binary", "redis_url", "stream"]


class Member:
    """A member in a process of its own."""

    def __init__(self, url: str, topic: str, lease: float) -> None:
        command = [sys.executable, "-m", "tests.stream.recorded", url, topic, str(lease)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)

    def heard(self) -> Any:
        """The next event."""
        assert self.process.stdout
        return json.loads(self.process.stdout.readline())

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def __enter__(self) -> "Member":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def settled(*members: tuple[Recorder, Source]) -> list[list[int]]:
    """Polls members in turn until they have all partitions; returns those of each."""

    def take() -> None:
        for heard, source in members:
            heard.take(source, seconds=0.02)

    def shared() -> list[list[int]]:
        return [sorted(source.positions()) for _, source in members]

    take()
    until(lambda: sum(map(len, shared())) == 3 and all(shared()), doing=take)
    return shared()


def test_members_share_and_hand_over(stream: RedisStream) -> None:
    one, two = Recorder(), Recorder()
    with closing(stream.source("group", "job", one)) as first:
        one.take(first)
        assert one.events == [("assigned", [0, 1, 2])]
        second = stream.source("group", "job", two)
        two.take(second)
        assert two.events == []  # the first has not given any up
        assert settled((one, first), (two, second)) == [[0, 1], [2]]
        assert (one.events[1:], two.events) == ([("revoked", [2])], [("assigned", [2])])
        second.commit({2: 17, 0: 99})  # 0 is another's
        second.close()
        second.close()
        assert stream.committed("group") == {2: 17}
        assert two.events[-1] == ("revoked", [2])
        assert settled((one, first)) == [[0, 1, 2]]
        assert stream.committed("other") == {}


def test_a_listener_that_fails_is_asked_again(stream: RedisStream) -> None:
    class Failing(Recorder):
        def assigned(self, partitions: Any) -> Any:
            first = not self.events
            super().assigned(partitions)
            if first:
                raise RuntimeError("shards are away")
            return dict.fromkeys(partitions, 0)

    failing = Failing()
    with closing(stream.source("group", "job", failing)) as source:
        with pytest.raises(RuntimeError):
            failing.take(source)
        failing.take(source)
        assert failing.events == [("assigned", [0, 1, 2])] * 2
        assert source.positions() == {0: 0, 1: 0, 2: 0}


def test_another_job_is_refused(stream: RedisStream, recorder: Recorder) -> None:
    with closing(stream.source("group", "job", recorder)):
        with pytest.raises(SourceRefused, match="members of another job, job"):
            stream.source("group", "other", recorder)
        stream.source("another group", "other", recorder).close()
    stream.source("group", "other", recorder).close()


def test_of_two_jobs_at_once_one_is_refused(stream: RedisStream) -> None:
    for _ in range(5):
        sources: list[Source] = []
        refused: list[SourceRefused] = []
        barrier = threading.Barrier(4)

        def join(job: str, barrier: threading.Barrier, sources: list[Source], refused: list[SourceRefused]) -> None:
            barrier.wait()
            try:
                sources.append(stream.source("group", job, Recorder()))
            except SourceRefused as error:
                refused.append(error)

        threads = [threading.Thread(target=join, args=(f"job{i}", barrier, sources, refused)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(sources), len(refused)) == (1, 3)
        sources[0].close()


def test_a_killed_member_is_replaced_when_its_lease_runs_out(redis_url: str, stream: RedisStream) -> None:
    mine = Recorder()
    with Member(redis_url, stream.topic, 3.0) as other:
        assert other.heard() == ["assigned", [0, 1, 2]]
        with closing(stream.source("group", "job", mine)) as source:
            mine.take_until(source, lambda r: r.events)
            other.signal(signal.SIGKILL)
            began = time.monotonic()
            mine.take_until(source, lambda r: len(source.positions()) == 3)
            assert time.monotonic() - began > 0.3


def test_a_stopped_member_loses_its_partitions_and_joins_again(redis_url: str, stream: RedisStream) -> None:
    mine = Recorder()
    with Member(redis_url, stream.topic, 3.0) as other:
        assert other.heard() == ["assigned", [0, 1, 2]]
        with closing(stream.source("group", "job", mine)) as source:
            mine.take_until(source, lambda r: r.events)
            revoked = other.heard()
            assert revoked[0] == "revoked"
            kept = sorted({0, 1, 2} - set(revoked[1]))
            other.signal(signal.SIGSTOP)
            mine.take_until(source, lambda r: len(source.positions()) == 3)
            other.signal(signal.SIGCONT)
            assert other.heard() == ["lost", kept]
            mine.take_until(source, lambda r: r.events[-1][0] == "revoked")
            event, again = other.heard()
            assert event == "assigned"
            assert set(again) | set(source.positions()) == {0, 1, 2}


def test_who_does_not_poll_loses_its_lease(redis_url: str, stream: RedisStream) -> None:
    idle = Recorder()
    stuck = RedisStream(redis_url, stream.topic, lease=0.5, idle=0.5)
    with closing(stuck.source("group", "job", idle)) as source:
        idle.take(source)
        with closing(stream.source("group", "job", Recorder())) as other:
            recorder = Recorder()
            recorder.take_until(other, lambda _: len(other.positions()) == 3)
            idle.take(source)
            assert idle.events == [("assigned", [0, 1, 2]), ("lost", [0, 1, 2])]
