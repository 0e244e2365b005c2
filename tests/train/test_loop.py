"""The loop on real shards and a stream in memory: what is learned, by whom, and what becomes of the rest."""

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from streamtrain.errors import OffsetGone, ShardRefused, SourceRefused, TooManyBadSamples
from streamtrain.metrics.worker import WorkerMetrics
from streamtrain.model.samples import REASONS
from streamtrain.ps.clock import Span
from streamtrain.settings.groups import PsSettings, StreamSettings
from streamtrain.stream.buffer import PartitionBuffer
from streamtrain.stream.dead_letters import DeadLetters
from streamtrain.stream.formats.factory import JsonFormat
from streamtrain.stream.source import Stream
from streamtrain.testing.stream import MemoryStream
from streamtrain.train.intake import StreamIntake
from streamtrain.train.loop import Loop, LoopConfig
from tests.cluster.counted import IDS, beginning, differences, is_bad, messages_of, stepping
from tests.patience import PATIENCE, until
from tests.ps.served import Served, served

PARTITIONS = 3
PACE = LoopConfig(batch_size=50, idle_seconds=0.01, commit_seconds=0.05)
LARGE = replace(PACE, batch_size=1000)
IN_PARTS = replace(LARGE, shard_bytes=1000)
SMALL = PsSettings.model_construct(max_message_bytes=8000)


class Running:
    """A loop in a thread of its own."""

    def __init__(
        self,
        where: Served,
        stream: Stream,
        *,
        job: str = "job",
        rules: StreamSettings = StreamSettings(),  # noqa: B008  # it is immutable
        pace: LoopConfig = PACE,
        **feed: Any,
    ) -> None:
        made, step, _ = stepping(tensorflow=False)
        self.shards = where.shards()
        self.stopped = threading.Event()
        self.metrics = WorkerMetrics()
        self.failure: BaseException | None = None
        client = self.shards.client(f"worker-{id(self)}", self.shards.agree())
        intake = StreamIntake(
            *(stream, "workers", job, JsonFormat(made)),
            buffer=PartitionBuffer(**feed),
            dead_letters=DeadLetters(stream, self.stopped),
            policy=rules,
            metrics=self.metrics,
        )
        self.loop = Loop(
            *(made, step, client, self.shards.progress),
            intake=intake,
            shards=len(where.nodes),
            config=pace,
            metrics=self.metrics,
        )
        self.spans: list[Sequence[Span]] = []
        read = intake.read
        intake.read = lambda spans: (self.spans.append(spans), read(spans))[1]  # type: ignore[method-assign, func-returns-value]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.loop.run(self.stopped)
        except BaseException as exc:
            self.failure = exc

    def join(self) -> "Running":
        """Waits until it ends by itself."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        return self

    def stop(self) -> "Running":
        self.stopped.set()
        return self.join()

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@contextmanager
def counted(count: int = 2, limits: PsSettings = PsSettings()) -> Iterator[Served]:  # noqa: B008  # it is immutable
    with served(count, beginning=beginning(tensorflow=False), limits=limits) as where:
        yield where


def message(ts: int, **more: str) -> bytes:
    return json.dumps({"label": 0, "ts": ts, "id0": ts % IDS, "id1": 1, "id2": 2, **more}).encode()


def stream_of(samples: int, *, more: bool = False) -> MemoryStream:
    return MemoryStream.of({p: messages_of(p, samples) for p in range(PARTITIONS)}, more=more)


def dead_offsets(stream: MemoryStream) -> dict[int, list[int]]:
    """Offsets of dead letters, which say of themselves where they come from."""
    dead = MemoryStream(stream.topic + ".dead", stream._service)
    found: dict[int, list[int]] = {p: [] for p in range(PARTITIONS)}
    for partition, offsets in found.items():
        for value, headers in dead.messages(partition):
            assert (headers["topic"], int(headers["partition"])) == (stream.topic.encode(), partition)
            assert headers["reason"].decode() in (*REASONS, "late")
            offset = int(headers["offset"])
            assert value == stream.messages(partition)[offset][0]
            offsets.append(offset)
    return found


def test_dead_letters_and_what_is_learned_make_up_all_that_there_is() -> None:
    stream = stream_of(3000)
    with counted() as where:
        done = Running(where, stream).join()
        assert done.failure is None
        assert differences(done.shards, PARTITIONS, 3000) == []
    bad = np.flatnonzero(is_bad(np.arange(3000))).tolist()
    assert dead_offsets(stream) == dict.fromkeys(range(PARTITIONS), bad)
    assert done.loop.stats.samples == PARTITIONS * (3000 - len(bad))
    assert done.value("streamtrain_worker_samples_total") == done.loop.stats.samples
    assert stream.committed("workers") == dict.fromkeys(range(PARTITIONS), 3000)


def test_members_come_and_go_and_nothing_is_lost_or_doubled() -> None:
    stream = stream_of(0, more=True)
    log = {p: messages_of(p, 6000) for p in range(PARTITIONS)}
    sent = 0

    def send(count: int) -> None:
        nonlocal sent
        for p, messages in log.items():
            stream.add(p, messages[sent : sent + count])
        sent += count

    def learned() -> bool:
        return where.held[0].clock() == dict.fromkeys(range(PARTITIONS), sent)

    with counted() as where:
        first = Running(where, stream)
        send(2000)
        second = Running(where, stream)
        until(learned)
        third = Running(where, stream)
        send(1000)
        assert first.stop().failure is None
        send(1000)
        fourth = Running(where, stream)
        assert second.stop().failure is None
        send(2000)
        stream.end()
        assert third.join().failure is None
        assert fourth.join().failure is None
        assert differences(fourth.shards, PARTITIONS, 6000) == []
        assert [shard.clock() for shard in where.held] == [dict.fromkeys(range(PARTITIONS), 6000)] * 2
    bad = np.flatnonzero(is_bad(np.arange(6000))).tolist()
    assert {p: sorted(set(found)) for p, found in dead_offsets(stream).items()} == dict.fromkeys(range(PARTITIONS), bad)


def test_two_members_that_believe_to_have_the_same_partitions() -> None:
    """As after a pause: groups of different names share the shards' clocks, and so everything is learned once."""
    stream = stream_of(4000)
    other = MemoryStream(stream.topic, stream._service)
    with counted() as where:
        first, second = Running(where, stream), Running(where, other)
        second.loop._intake._group = "others"  # type: ignore[attr-defined]
        assert first.join().failure is None
        assert second.join().failure is None
        assert differences(first.shards, PARTITIONS, 4000) == []


def test_deleted_samples_stop_it_or_are_passed_over_and_counted() -> None:
    stream = stream_of(1000)
    stream.delete(1, 300)
    with counted() as where:
        failed = Running(where, stream).join()
        assert isinstance(failed.failure, OffsetGone)
        assert "partition 1 has offsets 300 to 999, but 0 is the next" in str(failed.failure)
        done = Running(where, stream, skip_gone=True).join()
        assert done.failure is None
        assert done.value("streamtrain_worker_skipped_samples_total") == 300
        assert [shard.clock() for shard in where.held] == [dict.fromkeys(range(PARTITIONS), 1000)] * 2
        good = int((~is_bad(np.arange(1000))).sum()) * 2 + int((~is_bad(np.arange(300, 1000))).sum())
        assert [shard.samples for shard in where.held] == [good, good]


def test_a_stream_that_begins_anew_is_refused_even_if_deleted_samples_are_not() -> None:
    stream = stream_of(100)
    with counted() as where:
        assert Running(where, stream).join().failure is None
        failed = Running(where, stream_of(50), skip_gone=True).join()
    assert isinstance(failed.failure, OffsetGone)
    assert "offsets 0 to 49, but 100 is the next to be read" in str(failed.failure)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_broken_stream_stops_it_and_is_not_eaten(share: float) -> None:
    rng = np.random.default_rng(1)
    messages = [b"{" if bad else message(1) for bad in rng.random(30_000) < share]
    with counted() as where:
        failed = Running(where, MemoryStream.of({0: messages}), rules=StreamSettings(max_bad_ratio=0.4)).join()
        assert isinstance(failed.failure, TooManyBadSamples)
        assert "samples were refused" in str(failed.failure)
        assert where.held[0].clock()[0] < 10_500


def test_another_job_in_the_group_is_refused() -> None:
    stream = stream_of(100, more=True)
    with counted() as where:
        first = Running(where, stream)
        until(lambda: where.held[0].clock().get(0) == 100)
        second = Running(where, stream, job="another").join()
        assert isinstance(second.failure, SourceRefused)
        assert first.stop().failure is None


def late_log() -> list[bytes]:
    rng = np.random.default_rng(5)
    times = (np.arange(4000) + rng.integers(-60, 60, 4000)).clip(0).tolist()
    return [message(ts) for ts in times]


def late_of(messages: Sequence[bytes], after: float) -> list[int]:
    """Of old data without a jump ahead."""
    latest, late = 0.0, []
    for offset, message in enumerate(messages):
        ts = json.loads(message)["ts"]
        if ts < latest - after:
            late.append(offset)
            latest -= min(after / 256, latest - ts)
        latest = max(latest, ts)
    return late


def test_batches_that_shards_do_not_take_at_once_are_learned_in_parts() -> None:
    stream = stream_of(2000)
    with counted(2, SMALL) as where:
        refused = Running(where, stream, pace=LARGE).join()
        assert isinstance(refused.failure, ShardRefused)
        done = Running(where, stream, pace=IN_PARTS).join()
        assert done.failure is None
        assert differences(done.shards, PARTITIONS, 2000) == []
        assert sum(where.held[0].pushes.values()) > 2 * len(done.spans)
    bad = np.flatnonzero(is_bad(np.arange(2000))).tolist()
    assert {p: sorted(set(found)) for p, found in dead_offsets(stream).items()} == dict.fromkeys(range(PARTITIONS), bad)


def test_parts_of_two_members_with_the_same_partitions() -> None:
    """What one has pushed of a batch, the other has pushed too: both go back to the middle of it."""
    stream = stream_of(1000)
    other = MemoryStream(stream.topic, stream._service)
    with counted(2, SMALL) as where:
        first, second = Running(where, stream, pace=IN_PARTS), Running(where, other, pace=replace(IN_PARTS, ahead=0))
        second.loop._intake._group = "others"  # type: ignore[attr-defined]
        assert first.join().failure is None
        assert second.join().failure is None
        assert differences(first.shards, PARTITIONS, 1000) == []


@pytest.mark.parametrize("pace", [PACE, IN_PARTS])
@pytest.mark.parametrize("is_dead", [True, False])
def test_late_samples(is_dead: bool, pace: LoopConfig) -> None:
    stream = MemoryStream.of({0: late_log(), 1: [], 2: []})
    late = late_of(late_log(), 50)
    assert 100 < len(late) < 2000
    with counted() as where:
        done = Running(
            where, stream, rules=StreamSettings(late_after=50, late="dead" if is_dead else "learn"), pace=pace
        ).join()
        assert done.failure is None
        assert where.held[0].samples == 4000 - len(late) * is_dead
    assert done.value("streamtrain_worker_late_samples_total") == len(late)
    if is_dead:
        assert dead_offsets(stream)[0] == late


@pytest.mark.parametrize("pace", [PACE, IN_PARTS])
def test_what_is_late_is_the_same_after_any_restart(pace: LoopConfig) -> None:
    """Ten workers after another, each begins somewhere: the shards keep the watermark that belongs to their clock."""
    messages, clocks = late_log(), []
    stream = MemoryStream.of({0: [], 1: [], 2: []}, more=True)
    with counted() as where:
        for part in range(10):
            running = Running(where, stream, rules=StreamSettings(late_after=50), pace=pace)
            stream.add(0, messages[part * 400 : part * 400 + 400])
            until(lambda part=part: where.held[0].clock().get(0) == part * 400 + 400)  # type: ignore[misc]
            clocks.append(running.stop().shards.progress()[0].clock)
        assert where.held[0].samples == 4000 - len(late_of(messages, 50))
    assert dead_offsets(stream)[0] == late_of(messages, 50)


def test_what_is_ahead_of_the_time_of_its_message_is_refused() -> None:
    """And makes nothing late, nor anything fresher, however often it is read."""
    log, ahead = [message(1000 + i) for i in range(100)], message(4_102_358_400)  # the last day of 2099
    stream = MemoryStream.of({0: [*log, ahead, *log], 1: [message(99_999)], 2: []})
    with counted() as where:
        done = Running(where, stream, rules=StreamSettings(late_after=150)).join()
        assert done.failure is None
        assert [shard.samples for shard in where.held] == [201, 201]
        assert [shard.watermark for shard in where.held] == [99_999] * 2
        assert {stand.watermarks[0] for stand in done.shards.progress()} == {1099}
    assert done.value("streamtrain_worker_bad_samples_total", reason="future") == 1
    assert done.value("streamtrain_worker_watermark_timestamp_seconds") == 99_999
    assert dead_offsets(stream) == {0: [100], 1: [], 2: []}


@pytest.mark.parametrize(
    ("ahead", "rules", "refused"),
    [
        (86_400, StreamSettings(), 0),
        (86_401, StreamSettings(), 1),
        (10, StreamSettings(future_after=10), 0),
        (11, StreamSettings(future_after=10), 1),
        (4_000_000_000, StreamSettings(future_after=None), 0),
    ],
)
def test_how_far_ahead_a_sample_may_be_goes_by_its_message(ahead: int, rules: StreamSettings, refused: int) -> None:
    stream = MemoryStream.of({0: [], 1: [], 2: []}, more=True)
    stream.add(0, [message(5_000 + ahead)], at=5_000)
    stream.end()
    with counted(1) as where:
        done = Running(where, stream, rules=rules).join()
        assert done.failure is None
        assert where.held[0].samples == 1 - refused
        assert where.held[0].clock()[0] == 1
    assert done.value("streamtrain_worker_bad_samples_total", reason="future") == refused


def test_without_a_time_of_its_message_a_sample_may_be_ahead_of_the_clock() -> None:
    stream = MemoryStream.of({0: [], 1: [], 2: []}, more=True)
    stream.add(0, [message(int(time.time()) + 80_000), message(int(time.time()) + 90_000)], at=-1)
    stream.end()
    with counted(1) as where:
        assert Running(where, stream).join().failure is None
    assert dead_offsets(stream)[0] == [1]


def test_too_much_of_the_future_stops_it() -> None:
    with counted(1) as where:
        failed = Running(
            where, MemoryStream.of({0: [message(4_102_358_400)] * 10_001}), rules=StreamSettings(max_bad_ratio=0.4)
        )
        assert isinstance(failed.join().failure, TooManyBadSamples)


def test_a_partition_that_lags_keeps_rows_alive_and_one_without_traffic_does_not() -> None:
    """The shards hear of it from a worker that learns other partitions, and from one that learns nothing."""
    stream = MemoryStream.of({0: [message(1)], 1: [], 2: []}, more=True)
    with counted() as where:
        running = Running(where, stream)
        until(lambda: all(shard._idle >= {0} for shard in where.held))
        stream.add(1, [message(2)])
        until(lambda: all(shard._idle >= {0, 1} for shard in where.held))
        assert all(not shard._idle & {2} or shard.clock().get(2, 0) == 0 for shard in where.held)
        assert running.stop().failure is None


def test_it_waits_for_enough_but_not_longer_than_it_may() -> None:
    stream = MemoryStream.of({0: []}, more=True)
    with counted(1) as where:
        running = Running(where, stream, pace=replace(PACE, batch_min=50, batch_age=2.0))
        until(lambda: running.loop._partitions == [0])
        for one in messages_of(0, 70):
            stream.add(0, [one])
        until(lambda: where.held[0].clock().get(0) == 70)
        assert running.stop().failure is None
    assert [(one.start, one.end) for given in running.spans for one in given] == [(0, 50), (50, 70)]


def test_at_the_head_it_takes_what_is_there_and_behind_all_that_it_may() -> None:
    stream = MemoryStream.of({0: messages_of(0, 205)[:200]}, more=True)
    with counted(1) as where:
        running = Running(where, stream, pace=replace(PACE, batch_age=2 * PATIENCE))  # nobody waits for it
        until(lambda: where.held[0].clock().get(0) == 200)
        for at, one in enumerate(messages_of(0, 205)[200:], 200):
            stream.add(0, [one])
            until(lambda at=at: where.held[0].clock().get(0) == at + 1)  # type: ignore[misc]
        assert running.stop().failure is None
    sizes = [one.end - one.start for given in running.spans for one in given]
    assert sizes == [50] * 4 + [1] * 5


def test_it_tells_the_partitions_that_it_has_and_none_once_they_are_gone() -> None:
    with counted(1) as where:
        running = Running(where, MemoryStream.of({0: []}, more=True))
        until(lambda: running.metrics.state()["partitions"] == [0])
        assert running.stop().failure is None
    assert running.metrics.state()["partitions"] == []


def test_memory_of_messages_is_bounded() -> None:
    """Large messages are fetched as fast as they are learned, however many there are."""
    big = [message(1, text="x" * 100_000)] * 400
    stream = MemoryStream.of({0: big})
    seen: list[int] = []
    with counted(1) as where:
        running = Running(where, stream, max_bytes=2 << 20)
        feed: PartitionBuffer = running.loop._intake._buffer  # type: ignore[attr-defined]
        count = running.loop.stats.learned
        running.loop.stats.learned = lambda *args: (seen.append(feed.nbytes), count(*args))  # type: ignore[method-assign, func-returns-value, assignment]
        assert running.join().failure is None
        assert where.held[0].samples == 400
    assert max(seen) < (2 << 20) + 2 * 50 * 100_100


def values_of(metrics: WorkerMetrics, name: str) -> Mapping[str, float]:
    return {
        "/".join(sample.labels.values()): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == name
    }


def test_metrics_tell_what_happened() -> None:
    stream = stream_of(1000)
    with counted() as where:
        done = Running(where, stream).join()
    bad = values_of(done.metrics, "streamtrain_worker_bad_samples_total")
    assert sum(bad.values()) == 3 * is_bad(np.arange(1000)).sum()
    stages = values_of(done.metrics, "streamtrain_worker_stage_seconds_count")
    assert stages["decode"] == stages["plan"] >= stages["step"] > 0
