"""A shard with a backup: what the one has the other has, and whoever of them dies, nothing is lost or doubled."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from streamtrain.errors import ShardRefused, ShardUnavailable
from streamtrain.model.spec import Spec
from streamtrain.ps.bulk import Bulk
from streamtrain.ps.client import Client
from streamtrain.ps.clock import Cursor, Ends, Outcome, Span
from streamtrain.ps.consistency import Async, Bounded, Consistency
from streamtrain.ps.control import RemoteControl, Retry, patiently
from streamtrain.ps.push import Push, Pushed, RowUpdate
from streamtrain.ps.replication import State
from streamtrain.ps.shard import Initial, Run, Shard
from streamtrain.ps.shards import Beginning, Shards
from tests.cluster.saved import contents, dense
from tests.ps.counting import SPEC, Log, assert_exact, new_shard, pushes
from tests.ps.paired import SECONDS, Paired, Place
from tests.ps.raw import until
from tests.ps.served import push, served

T = TypeVar("T")
LOG: Log = {0: [[1, 2], [2], [3], [1]] * 10, 1: [[1], [4], [4], [2, 5]] * 10}
ENDS = {p: len(samples) for p, samples in LOG.items()}
RETRY = Retry(timeout=5.0, first_backoff=0.01, last_backoff=0.1, give_up=SECONDS)


def answered(ask: Callable[[], T]) -> T:
    return patiently(ask, RETRY, threading.Event())


class Worker:
    """Learns the log, one batch at a time, and goes back when it must."""

    def __init__(self, shards: Shards, name: str = "worker") -> None:
        self.shards = shards
        self.client: Client = shards.client(name, answered(shards.agree), retry=RETRY)
        self.client.join()
        self.rewinds = -1
        self.rewind()

    def rewind(self) -> None:
        self.rewinds += 1
        self.cursor = Cursor()
        self.cursor.rewind(LOG, answered(self.shards.clocks))

    def learn(self, most: int, batch: int = 2) -> None:
        """All partitions, up to an offset."""
        while spans := self.cursor.next(Ends(dict.fromkeys(LOG, most)), batch):
            if any(one.outcome is Outcome.REJECTED for one in self.push(spans)):
                self.rewind()

    def push(self, spans: list[Span]) -> list[Pushed]:
        return push(self.client, LOG, spans).wait()


def upto(most: int) -> Log:
    return {p: samples[:most] for p, samples in LOG.items()}


@pytest.mark.parametrize(
    "consistency",
    [
        Async,
        lambda shard: Bounded(shard, 1, SECONDS, time.monotonic),
        lambda shard: Bulk(shard, 1, SECONDS, time.monotonic),
    ],
    ids=["async", "bounded", "bulk"],
)
def test_a_backup_has_what_its_primary_has_and_takes_over(consistency: Callable[[Shard], Consistency]) -> None:
    with Paired(2, consistency=consistency) as pairs:
        worker = Worker(pairs.shards())
        worker.learn(7)
        primaries = [pairs.wait(i) for i in range(2)]
        worker.learn(15)
        for primary in primaries:
            backup = pairs.other(primary).node
            assert backup is not None
            assert not backup.ready
            primary.kill()
        worker.learn(30)
        assert worker.rewinds == 0  # nothing was learned again
        nodes = [pairs.other(primary).node for primary in primaries]
        assert_exact([node.shard for node in nodes if node], upto(30))
        worker.client.close()


BIG = Spec(
    schema="big",
    seed=3,
    reduction="sum",
    tables=(
        {"name": "adam", "dim": 3, "optimizer": "adam", "rate": 0.1, "init": "uniform", "init_scale": 0.1,
         "expire_after": 0},
        {"name": "half", "dim": 2, "optimizer": "adagrad", "rate": 0.1, "init": "uniform", "init_scale": 0.1,
         "dtype": "float16", "min_count": 2, "expire_after": 0},
    ),
    dense=((11,),),
    statistics=((2,),),
    dense_optimizer={"optimizer": "adam", "rate": 0.01},
)  # fmt: skip
SLICES = Beginning(BIG, np.arange(11, dtype=np.float32), np.zeros(2, np.float32), {})


def any_push(rng: np.random.Generator, partition: int, at: int) -> Push:
    """Gradients at random for rows at random."""
    updates = []
    for table in BIG.tables:
        keys = np.unique(rng.integers(1, 20_000, 300).astype(np.uint64))
        gradients = rng.standard_normal((len(keys), table["dim"])).astype(np.float32)
        times = rng.integers(1, 1000, len(keys)).astype(np.uint32)
        updates.append(RowUpdate(keys, gradients, np.ones(len(keys), np.uint32), times))
    gradient, change = rng.standard_normal(11).astype(np.float32), rng.standard_normal(2).astype(np.float32)
    return Push([Span(partition, at, at + 1)], 1, updates, gradient, change, at, {partition: float(at)})


def everything(shard: Shard) -> dict[str, Any]:
    rows = {one["name"]: contents([shard], t) for t, one in enumerate(BIG.tables)}
    return {"rows": rows, "dense": dense([shard]), "stand": shard.stand()}


def test_all_is_equal_to_the_bit_though_it_was_pushed_to_while_it_was_copied() -> None:
    with Paired(1, beginning=SLICES) as pairs:
        answered(pairs.shards().agree)
        primary = pairs.wait()
        primary_node, backup = primary.node, pairs.other(primary)
        assert primary_node is not None
        shard, stop = primary_node.shard, threading.Event()

        def learn(partition: int) -> int:
            rng, at = np.random.default_rng(partition), 0
            while not stop.is_set():
                assert shard.push(any_push(rng, partition, at)).outcome is Outcome.APPLIED
                at += 1
            return at

        with ThreadPoolExecutor(2) as pool:
            pushed = [pool.submit(learn, partition) for partition in range(2)]
            until(lambda: shard.clock().get(1, 0) > 100, SECONDS)
            for _ in range(3):
                backup.kill()
                until(lambda: primary.state is State.AWAY, SECONDS)
                node = backup.start()
                pairs.wait()
            stop.set()
            clock = {partition: one.result() for partition, one in enumerate(pushed)}
        mirrored = everything(shard)
        primary.kill()
        answered(pairs.shards().clocks)
        assert everything(node.shard) == mirrored
        assert node.shard.clock() == clock


def test_what_is_no_backup_is_not_asked_to_follow() -> None:
    with served(1) as of, pytest.raises(ShardRefused, match=r"has no backup; set ps\.backups"):
        RemoteControl(*of.channels[0]).promote()


def test_a_backup_serves_nothing_and_does_not_take_over_from_a_primary_that_is_there() -> None:
    with Paired(1) as pairs:
        worker = Worker(pairs.shards())
        worker.learn(3)
        primary = pairs.wait()
        backup = pairs.other(primary).control()
        with pytest.raises(ShardUnavailable, match="hears from its primary"):
            backup.promote()
        with pytest.raises(ShardUnavailable, match="this is the backup of shard 0"):
            backup.inspect("ids", 1)
        with pytest.raises(ShardUnavailable, match="this is the backup of shard 0"):
            backup.initialise(0, 1, Initial(Run("other", {}), SPEC, np.zeros(5, np.float32), np.zeros(2, np.float32)))
        worker.learn(5)
        assert pairs.wait() is primary
        worker.client.close()


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
        until(lambda: primary.retired, SECONDS)
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
        until(lambda: second.retired, SECONDS)
        second.kill()
        worker.learn(9)
        assert worker.rewinds == 1
        assert first.node is not None
        assert_exact([first.node.shard], upto(9))
        second.start()
        assert pairs.wait() is first
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

    @rule()
    def start_what_is_dead(self) -> None:
        self.alive()

    @rule()
    def cut(self) -> None:
        """The stream between them breaks."""
        primary = self.primary()
        if primary and primary.node and primary.node.replication:
            call = primary.node.replication._call
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
        until(lambda: primary.retired, SECONDS)
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
