"""Promise: whatever happens to a shard and its backup, in any order, every sample changes it exactly once."""

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from streamtrain.errors import ShardUnavailable
from streamtrain.ps.clock import Span
from streamtrain.ps.consistency import Async
from streamtrain.ps.replication.backup import BackupShard
from streamtrain.ps.replication.failover import FailoverResolver
from streamtrain.ps.replication.primary import State
from streamtrain.ps.replication.roles import NodeState
from tests.patience import PATIENCE, until
from tests.ps.counting import assert_exact, new_shard, pushes
from tests.ps.paired import LOG, Paired, Place, Worker, answered, upto


def test_a_primary_that_comes_back_from_a_pause_acknowledges_nothing() -> None:
    with Paired(1) as pairs:
        worker = Worker(pairs.shards())
        worker.learn(3)
        primary = pairs.wait()
        node, backup = primary.node, pairs.other(primary)
        assert node is not None
        shard = node.shard
        backup.take_over()
        for _ in range(2):  # also when it has applied it
            with pytest.raises(ShardUnavailable):
                shard.push(pushes(LOG, [Span(0, 3, 4)], 1)[0])
        until(lambda: primary.retired, PATIENCE)
        with pytest.raises(ShardUnavailable, match="has taken over"):
            primary.control().inspect("ids", 1)
        worker.learn(9)
        assert worker.rewinds == 0
        assert backup.node is not None
        assert_exact([backup.node.shard], upto(9))
        worker.client.close()


def test_of_two_primaries_the_later_beginning_wins() -> None:
    """One came back from a checkpoint, as it could not reach the other."""
    with Paired(1) as pairs:
        worker = Worker(pairs.shards())
        worker.learn(3)
        first = pairs.wait()
        second = pairs.other(first)
        assert first.node is not None
        begun = first.node.shard.run
        first.kill()
        worker.learn(6)
        restored = new_shard(0, 1)
        restored.run = begun
        first.start_alone(restored)
        until(lambda: second.retired, PATIENCE)
        second.kill()
        worker.learn(9)
        assert worker.rewinds == 1
        assert first.node is not None
        assert_exact([first.node.shard], upto(9))
        second.start()
        assert pairs.wait() is first
        worker.client.close()


def test_the_first_of_two_that_wait_for_each_other_begins_again() -> None:
    """The primary ended before the other was in step with it, and is started again as the backup that it once was."""
    with Paired(1) as pairs:
        worker = Worker(pairs.shards())
        worker.learn(3)
        first = pairs.wait()
        second = pairs.other(first)
        first.kill()
        worker.learn(6)
        assert second.node is not None
        until(lambda: second.state is State.AWAY, PATIENCE)
        second.node.role.replication.stop()  # type: ignore[union-attr]  # it copies nothing to the other
        node = first.start()
        assert not node.end_waiting()  # there is a primary
        second.kill()
        assert not node.end_waiting()  # the other may be coming back with what it has
        other = second.start()
        assert (node.role.state, other.role.state) == (NodeState.BACKUP, NodeState.BACKUP)
        until(node.end_waiting, PATIENCE)
        assert not node.end_waiting()
        worker.learn(9)
        assert pairs.wait() is first
        assert_exact([node.shard], upto(9))
        worker.client.close()


def test_where_one_waits_for_a_place_and_the_other_has_nothing_it_gets_it() -> None:
    """Or the first one does, if both wait; the second does not while the first does not answer, and may have all."""
    with Paired(1) as pairs:
        first, second = pairs.places[0]
        resolver = FailoverResolver(pairs._pairs[0])
        for place in (first, second):
            place.kill()
        second._node = first._node = (0, 0, Async)
        second._serve()
        with pytest.raises(ShardUnavailable):
            resolver.resolve()
        waiting = first._serve()
        assert answered(resolver.resolve) == pairs._pairs[0][1]
        assert waiting.role.state is NodeState.BACKUP
        waiting.role.vacate(0, 0, 1)
        assert resolver.resolve() == pairs._pairs[0][0]


def test_nothing_is_acknowledged_that_a_backup_lacks_which_may_take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in step as soon as it has been told so, before its primary knows."""
    answer, follow = threading.Event(), BackupShard.follow

    def hesitate(follower: BackupShard, records: Iterable[bytes], context: Any) -> Iterator[bytes]:
        for one in follow(follower, records, context):
            if follower.in_step:
                answer.wait(PATIENCE)
            yield one

    with Paired(1) as pairs, ThreadPoolExecutor(1) as pool:
        worker = Worker(pairs.shards())
        worker.learn(3)
        primary = pairs.wait()
        backup = pairs.other(primary)
        assert primary.node is not None
        shard = primary.node.shard
        backup.kill()
        until(lambda: primary.state is State.AWAY, PATIENCE)
        monkeypatch.setattr(BackupShard, "follow", hesitate)
        follower = backup.start().backup
        assert follower is not None
        until(lambda: follower.in_step, PATIENCE)
        pushing = pool.submit(shard.push, pushes(LOG, [Span(0, 3, 4)], 1)[0])
        until(lambda: shard.clock()[0] == 4, PATIENCE)
        assert primary.state is State.COPYING
        primary.kill()
        with pytest.raises(ShardUnavailable):
            pushing.result(PATIENCE)
        answer.set()
        worker.learn(9)
        assert worker.rewinds == 0
        assert backup.node is not None
        assert_exact([backup.node.shard], upto(9))
        worker.client.close()


class Pair(RuleBasedStateMachine):
    """A shard and its backup, killed, started, cut off from each other and taken for dead at random."""

    @initialize()
    def begin(self) -> None:
        self.pairs = Paired(1)
        self.pairs.__enter__()
        self.worker = Worker(self.pairs.shards())
        self.places = self.pairs.places[0]
        self.learned = 0

    @rule(samples=st.integers(1, 4), batch=st.integers(1, 3))
    def learn(self, samples: int, batch: int) -> None:
        self.learned = min(self.learned + samples, len(LOG[0]))
        self.worker.learn(self.learned, batch)

    @rule()
    def kill_the_primary(self) -> None:
        self.alive()
        self.pairs.wait().kill()

    @rule()
    def kill_the_backup(self) -> None:
        """Whether or not it is in step."""
        if primary := self.primary():
            self.pairs.other(primary).kill()

    @rule(batch=st.integers(1, 3))
    def kill_the_primary_as_its_backup_comes_into_step(self, batch: int) -> None:
        """While it is pushed to: what it has acknowledged by then, its backup has."""
        self.alive()
        primary = self.pairs.wait()
        other = self.pairs.other(primary)
        other.kill()
        until(lambda: primary.state is State.AWAY, PATIENCE)
        follower = other.start().backup
        assert follower is not None
        self.learned = min(self.learned + 6, len(LOG[0]))
        with ThreadPoolExecutor(1) as pool:
            learning = pool.submit(self.worker.learn, self.learned, batch)
            until(lambda: follower.in_step, PATIENCE)
            primary.kill()
            learning.result(PATIENCE)

    @rule()
    def start_what_is_dead(self) -> None:
        self.alive()

    @rule()
    def cut(self) -> None:
        """The stream between them breaks."""
        primary = self.primary()
        if primary and primary.node and primary.node.role.replication:
            call = primary.node.role.replication._call
            if call is not None:
                call.cancel()

    @rule(more=st.booleans())
    def pause_the_primary(self, more: bool) -> None:
        """For so long that its backup takes over; then it goes on, with a push that had reached it before."""
        self.alive()
        primary = self.pairs.wait()
        node, other = primary.node, self.pairs.other(primary)
        assert node is not None
        shard = node.shard
        other.take_over()
        if more and self.learned < len(LOG[0]):
            late = pushes(LOG, [Span(0, shard.clock().get(0, 0), len(LOG[0]))], 1)[0]
            with pytest.raises(ShardUnavailable):
                shard.push(late)
        until(lambda: primary.retired, PATIENCE)
        primary.kill()

    def primary(self) -> Place | None:
        return next((place for place in self.places if place.state is not None), None)

    def alive(self) -> None:
        for place in self.places:
            if place.node is None:
                place.start()

    def teardown(self) -> None:
        if not hasattr(self, "pairs"):
            return
        try:
            self.alive()
            self.worker.learn(len(LOG[0]))
            shards = []
            for _ in range(2):
                primary = self.pairs.wait()
                assert primary.node is not None
                shards.append(primary.node.shard)
                primary.kill()
                answered(self.worker.shards.clocks)
                primary.start()
            assert_exact(shards[:1], LOG)
            assert_exact(shards[1:], LOG)
            assert self.worker.rewinds == 0
            self.worker.client.close()
        finally:
            self.pairs.__exit__(None, None, None)


TestPair = Pair.TestCase
TestPair.settings = settings(max_examples=6, stateful_step_count=12)
