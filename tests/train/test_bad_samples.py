"""The brake for broken streams: what it remembers, over restarts, and what mends it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from streamtrain.errors import BadSample, ShardRefused, TooManyBadSamples
from streamtrain.model.bad_samples import WINDOW, BadSampleGuard, Refusals
from streamtrain.ps.clock import Span, refusals_at
from streamtrain.ps.nodes.shards import Shards
from streamtrain.ps.rpc import wire
from streamtrain.settings.groups import StreamSettings
from streamtrain.testing.stream import MemoryStream
from tests.checkpoint.saved import Cluster
from tests.cluster.counted import IDS
from tests.ps.served import COUNTING, Served
from tests.train.test_loop import PACE, Running, counted

BAD = BadSample(0, "not_json", "")


def good(ts: int) -> bytes:
    return json.dumps({"label": 0, "ts": ts, "id0": ts % IDS, "id1": 1, "id2": 2}).encode()


def judged(guard: BadSampleGuard, seen: int, refused: int, partition: int = 0) -> None:
    guard.judge({partition: Refusals(seen, refused)}, [BAD] * refused, "offset 7 of partition 0: not_json")


def until_it_stops(guard: BadSampleGuard, seen: int, refused: int, partition: int = 0) -> int:
    for batch in range(100_000):
        try:
            judged(guard, seen, refused, partition)
        except TooManyBadSamples:
            return batch * seen
    raise AssertionError("it does not stop")


@pytest.mark.parametrize("seen", [1, 50, 1024])
def test_another_goes_on_where_one_has_stopped(seen: int) -> None:
    """Each is given what the one before it had at its last batch that passed."""
    passed, remembered = 0, Refusals(0, 0)
    for _ in range(50):
        guard = BadSampleGuard(0.1)
        guard.restore({0: remembered})
        for batch in range(3):
            try:
                judged(guard, seen, seen)
            except TooManyBadSamples:
                assert batch == 0 or passed >= WINDOW - 2 * seen
                break
            passed, remembered = passed + seen, guard.remembered(0)
    assert passed < WINDOW


def test_it_stops_at_a_share_and_not_below() -> None:
    assert until_it_stops(BadSampleGuard(0.1), 100, 12) <= WINDOW
    guard = BadSampleGuard(0.1)
    for _ in range(1000):
        judged(guard, 100, 10)
    assert guard.remembered(0).seen == pytest.approx(WINDOW)
    assert until_it_stops(guard, 100, 100) < 0.2 * WINDOW


def test_a_mended_stream_goes_on_and_forgets() -> None:
    guard = BadSampleGuard(0.1)
    until_it_stops(guard, 100, 100)
    for _ in range(25):
        judged(guard, 100, 0)
    for _ in range(1000):
        judged(guard, 1, 1)  # which would have stopped it
        judged(guard, 49, 0)
    assert guard.remembered(0).refused == pytest.approx(0.02 * WINDOW, rel=0.1)


def test_a_stream_that_is_half_mended_does_not_go_on() -> None:
    guard = BadSampleGuard(0.1)
    until_it_stops(guard, 10, 4)
    for _ in range(300):
        judged(guard, 1, 0)
        with pytest.raises(TooManyBadSamples):
            judged(guard, 1, 1)


def test_partitions_count_together_but_one_that_is_good_is_not_stopped_for_others() -> None:
    guard = BadSampleGuard(0.1)
    judged(guard, 4000, 0, partition=1)
    assert until_it_stops(guard, 10, 10, partition=0) <= 6000
    judged(guard, 1, 1, partition=1)
    with pytest.raises(TooManyBadSamples, match=r"of 1\d{4} samples were refused \(not_json [\d,]+\), such as"):
        judged(guard, 10, 10, partition=0)


def clock_of(stream: MemoryStream, where: Served, restarts: int, rules: StreamSettings, batches: Sequence[int]) -> int:
    for restart in range(restarts):
        pace = replace(PACE, batch_size=batches[restart % len(batches)])
        failed = Running(where, stream, rules=rules, pace=pace).join()
        assert isinstance(failed.failure, TooManyBadSamples)
    return sum(where.held[0].clock().values())


@pytest.mark.parametrize("partitions", [1, 3])
def test_workers_that_are_started_again_do_not_eat_a_broken_stream(partitions: int) -> None:
    rules = StreamSettings(max_bad_ratio=0.1)
    stream = MemoryStream.of({p: [b"{"] * 30_000 for p in range(partitions)}, more=True)
    with counted() as where:
        assert clock_of(stream, where, 12, rules, [1000, 50, 7]) <= WINDOW
        clock = where.held[0].clock()
        failed = Running(where, stream, rules=rules).join()
        said = str(failed.failure)
        for words in ("samples were refused (not_json", "partition", "stream.max_bad_ratio", "streamtrain deadletters"):
            assert words in said
        assert where.held[0].clock() == clock
    dead = MemoryStream(stream.topic + ".dead", stream._service)
    letters = {one.key for one in dead.records(dead.bounds())}
    assert sum(clock.values()) <= len(letters) <= WINDOW + 100  # those of a batch that was read ahead among them


def test_what_is_set_takes_it_further_and_good_messages_do() -> None:
    stream = MemoryStream.of({0: [b"{"] * 20_000}, more=True)
    rules = StreamSettings(max_bad_ratio=0.1)
    with counted() as where:
        clock_of(stream, where, 2, rules, [500])
        stream.end()
        assert Running(where, stream, rules=StreamSettings(max_bad_ratio=1)).join().failure is None
        assert where.held[0].clock() == {0: 20_000}
        after = MemoryStream(stream.topic, stream._service)
        after.add(0, [good(ts) for ts in range(3000)] + [b"{", *(good(ts) for ts in range(3000))])
        assert Running(where, after, rules=rules).join().failure is None
        assert where.held[0].clock() == {0: 26_001}


def test_a_checkpoint_keeps_what_the_brake_remembers(tmp_path: Path) -> None:
    place = str(tmp_path)
    first = Cluster(place, 2)
    remembered = {0: Refusals(9876.5, 987.25), 3: Refusals(1, 1)}
    shards = Shards(first.nodes, COUNTING)
    client = shards.client("worker", shards.agree())
    client.join()
    client.skip([Span(0, 0, 10), Span(3, 0, 1)], 0, {}, remembered).wait()
    client.close()
    assert [node.shard.progress().refusals for node in first.nodes] == [remembered] * 2
    first.checkpointer.take()
    again = Cluster(place, 3)
    assert [node.shard.progress().refusals for node in again.nodes] == [remembered] * 3
    assert refusals_at({0: 10, 1: 0, 3: 5}, [node.shard.progress() for node in again.nodes]) == {0: remembered[0]}
    copied = wire.decode_progress(wire.encode_positions(*again.nodes[0].shard.progress()))
    assert copied == again.nodes[0].shard.progress()


@pytest.mark.parametrize(("seen", "refused"), [(1.0, 2.0), (float("nan"), 0.0), (float("inf"), 1.0), (2.0, -1.0)])
def test_what_cannot_be_is_refused_by_shards(seen: float, refused: float) -> None:
    with pytest.raises(ShardRefused, match="messages cannot have been refused"):
        wire._check_refusals({0: Refusals(seen, refused)})
