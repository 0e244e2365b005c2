"""Promise: every sample changes every shard exactly once, whatever fails, in any order: proved by counting."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from streamtrain._core import Rows
from streamtrain.ps.clock import Cursor, Ends, Progress, PushOutcome, Span
from streamtrain.ps.push import Push
from streamtrain.ps.shard import Shard
from tests.ps.counting import assert_exact, new_shard, pushes

PARTITIONS = 3
START = {0: 0, 1: 0, 2: 0}


@dataclass
class Worker:
    """One that reads, sends and waits; it may not know that its partitions are no longer its own."""

    partitions: list[int]
    cursor: Cursor = field(default_factory=Cursor)
    unanswered: dict[int, Push] = field(default_factory=dict)  # by shard
    rejected: bool = False


class Saved(NamedTuple):
    rows: Rows
    dense: np.ndarray
    statistics: np.ndarray
    clock: dict[int, int]


def save(shard: Shard) -> Saved:
    _, rows = shard.tables[0].scan(0, 1 << 16)
    dense, statistics = np.empty(len(shard.dense), np.float32), np.empty(len(shard.statistics), np.float32)
    shard.pull_dense(dense, statistics)
    return Saved(rows, dense, statistics, shard.clock())


def load(saved: Saved, index: int, shards: int) -> Shard:
    shard = new_shard(index, shards)
    rows = saved.rows
    shard.tables[0].load(rows.keys, rows.embeddings, rows.state, rows.counts, rows.last_seen)
    none = np.empty((0, len(saved.dense)), np.float32)
    shard.dense.load(saved.dense, none, 0)
    shard.statistics.load(saved.statistics, np.empty((0, len(saved.statistics)), np.float32), 0)
    shard.resume(Progress(saved.clock, {}))
    return shard


class Cluster(RuleBasedStateMachine):
    """Rules are what happens to workers, shards and the network between them; teardown lets it come to rest."""

    def __init__(self) -> None:
        super().__init__()
        self.on_the_way: list[tuple[int, Push]] = []  # copies of pushes that may arrive at any time, or never

    @initialize(shards=st.integers(1, 3), workers=st.integers(1, 3))
    def begin(self, shards: int, workers: int) -> None:
        self.log: dict[int, list[list[int]]] = {p: [] for p in range(PARTITIONS)}
        self.shards = [new_shard(i, shards, START) for i in range(shards)]
        self.saved = [[save(shard)] for shard in self.shards]
        self.owners = {p: p % workers for p in range(PARTITIONS)}
        self.workers = [self.hire(i) for i in range(workers)]

    def hire(self, index: int) -> Worker:
        worker = Worker([p for p, owner in self.owners.items() if owner == index])
        self.rewind(worker)
        return worker

    def rewind(self, worker: Worker) -> None:
        worker.cursor.rewind(worker.partitions, [shard.clock() for shard in self.shards])
        worker.unanswered, worker.rejected = {}, False

    @rule(partition=st.integers(0, PARTITIONS - 1), ids=st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=6))
    def produce(self, partition: int, ids: list[list[int]]) -> None:
        self.log[partition] += ids

    @rule(data=st.data(), most=st.integers(1, 5))
    def start_a_batch(self, data: st.DataObject, most: int) -> None:
        idle = [w for w in self.workers if not w.unanswered and not w.rejected]
        if not idle:
            return
        worker = data.draw(st.sampled_from(range(len(idle))), "worker")
        spans = idle[worker].cursor.next(Ends({p: len(s) for p, s in self.log.items()}), most)
        if spans:
            idle[worker].unanswered = dict(enumerate(pushes(self.log, spans, len(self.shards))))

    @rule(data=st.data(), answered=st.booleans())
    def deliver(self, data: st.DataObject, answered: bool) -> None:
        """A push arrives; its answer may get lost, and then it is sent again some time."""
        waiting = [(w, s) for w in self.workers for s in w.unanswered]
        if not waiting:
            return
        worker, s = data.draw(st.sampled_from(waiting), "push")
        outcome = self.shards[s].push(worker.unanswered[s]).outcome
        if not answered:
            return
        del worker.unanswered[s]
        worker.rejected |= outcome is PushOutcome.REJECTED

    @rule(data=st.data())
    def copy_on_the_way(self, data: st.DataObject) -> None:
        waiting = [(s, push) for w in self.workers for s, push in w.unanswered.items()]
        if waiting:
            self.on_the_way.append(data.draw(st.sampled_from(waiting), "push"))

    @precondition(lambda self: bool(self.on_the_way))
    @rule(data=st.data())
    def late_arrival(self, data: st.DataObject) -> None:
        s, push = data.draw(st.sampled_from(self.on_the_way), "push")
        self.shards[s].push(push)

    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        rejected = [w for w in self.workers if w.rejected and not w.unanswered]
        if rejected:
            self.rewind(data.draw(st.sampled_from(rejected), "worker"))

    @rule(partition=st.integers(0, PARTITIONS - 1), data=st.data())
    def rebalance(self, partition: int, data: st.DataObject) -> None:
        """A partition changes hands. The old owner goes on with it until the end: a zombie."""
        index = data.draw(st.integers(0, len(self.workers) - 1), "new owner")
        self.owners[partition] = index
        self.workers.append(self.workers[index])
        self.workers[index] = self.hire(index)

    @rule(data=st.data())
    def worker_crashes(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.workers) - 1), "worker")
        self.on_the_way += self.workers[index].unanswered.items()
        if index in self.owners.values():
            self.workers[index] = self.hire(index)
        else:
            self.workers[index].unanswered = {}
            self.workers[index].rejected = True

    @rule(data=st.data())
    def checkpoint(self, data: st.DataObject) -> None:
        s = data.draw(st.integers(0, len(self.shards) - 1), "shard")
        self.saved[s].append(save(self.shards[s]))

    @rule(data=st.data())
    def shard_crashes(self, data: st.DataObject) -> None:
        """It comes back as of any of its checkpoints, or as it began."""
        s = data.draw(st.integers(0, len(self.shards) - 1), "shard")
        saved = data.draw(st.sampled_from(range(len(self.saved[s]))), "checkpoint")
        self.saved[s] = self.saved[s][: saved + 1]
        self.shards[s] = load(self.saved[s][saved], s, len(self.shards))

    def teardown(self) -> None:
        if not hasattr(self, "log"):
            return
        worker = Worker(list(range(PARTITIONS)))
        self.rewind(worker)
        ends = Ends({p: len(samples) for p, samples in self.log.items()})
        for _ in range(10_000):
            spans = worker.cursor.next(ends, 4)
            if not spans:
                break
            for shard, push in zip(self.shards, pushes(self.log, spans, len(self.shards)), strict=True):
                assert shard.push(push).outcome is not PushOutcome.REJECTED, "nobody else is there"
        else:
            raise AssertionError("it does not come to rest")
        assert_exact(self.shards, self.log)


TestCluster = Cluster.TestCase
TestCluster.settings = settings(stateful_step_count=60)


def test_the_rule_is_needed() -> None:
    """What this suite guards against: the same push twice, without the clock."""
    log = {0: [[1], [1]]}
    shard = new_shard(0, 1)
    push = pushes(log, [Span(0, 0, 2)], 1)[0]
    shard.push(push)
    shard._clock._next[0] = 0
    shard.push(push)
    try:
        assert_exact([shard], log)
    except AssertionError:
        return
    raise AssertionError("counted twice, and nobody noticed")
