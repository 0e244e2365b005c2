"""Checkpoints of a cluster at work: every epoch is exactly what was learned up to its clock."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from streamtrain.checkpoint.cluster_checkpoint import Checkpointer
from streamtrain.checkpoint.shard_checkpoint import CheckpointWriter
from streamtrain.ps.clock import PushOutcome, Span
from streamtrain.ps.nodes.shards import Control
from streamtrain.ps.push import Push, RowUpdate
from streamtrain.ps.shard import Shard
from streamtrain.store.checkpoint.checkpoint import CheckpointReader
from streamtrain.store.checkpoint.epochs import Epochs
from tests.checkpoint.saved import (
    Cluster,
    around,
    aside,
    assert_each_exact,
    contents,
    restored,
    some_log,
    until,
    with_table,
)
from tests.patience import PATIENCE
from tests.ps.counting import Log, assert_exact, key, plan_of, pushes
from tests.ps.served import COUNTING, Served, served

# --- while training goes on ---

LOG = some_log(3, 200_000)
Learn = Callable[[int, int, int], None]


@contextmanager
def learning(learn: Callable[[int], Learn]) -> Iterator[None]:
    """Three threads learn the log, each its partition, until the block ends; `learn` makes the way each does so."""
    stopped, failed, begun = threading.Event(), [], threading.Barrier(4)

    def run(partition: int) -> None:
        rng, at = np.random.default_rng(partition), 0
        try:
            push = learn(partition)
            push(partition, 0, 1)
            begun.wait(PATIENCE)
            at = 1
            while not stopped.is_set():
                end = at + int(rng.integers(1, 40))
                push(partition, at, end)
                at = end
        except BaseException as exc:
            failed.append(exc)

    threads = [threading.Thread(target=run, args=(p,)) for p in LOG]
    for thread in threads:
        thread.start()
    try:
        begun.wait(PATIENCE)
        yield
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
    assert not failed


def take_some(checkpointer: Checkpointer, shards: Callable[[], list[Shard]]) -> None:
    """Full and deltas; something is learned between any two of them."""
    for number in range(1, 9):
        before = [shard.samples for shard in shards()]
        taken = checkpointer.take(full=number == 5)
        assert (taken.epoch, taken.kind, taken.aligned) == (number, "full" if number in (1, 5) else "delta", True)
        assert 0 < taken.pause_ms < taken.seconds * 1000
        deadline = time.monotonic() + PATIENCE
        while any(shard.samples < n + 30 for shard, n in zip(shards(), before, strict=True)):
            assert time.monotonic() < deadline


def assert_all_epochs(place: str, shards: list[Shard]) -> None:
    assert_each_exact(shards, LOG)
    clocks = []
    for number in range(1, 9):
        found = restored(place, number, 2)
        assert found[0].clock() == found[1].clock()
        assert_exact(found, until(LOG, found[0].clock()))
        assert found[0].samples == sum(found[0].clock().values())
        clocks.append(sum(found[0].clock().values()))
    assert clocks == sorted(set(clocks)), "something was learned from one epoch to the next"


def test_every_epoch_is_what_was_learned_until_then(place: str) -> None:
    cluster = Cluster(place)
    with learning(lambda _: lambda *span: cluster.learn(LOG, span)):
        take_some(cluster.checkpointer, lambda: cluster.shards)
    assert_all_epochs(place, cluster.shards)


def test_every_epoch_of_shards_behind_grpc(place: str) -> None:
    with served(stores=[CheckpointWriter(Epochs(place)) for _ in range(2)]) as cluster:
        shards = cluster.shards()
        run = shards.agree()

        def learn(partition: int) -> Learn:
            client = shards.client(f"w{partition}", run)
            client.join()

            def push(*span: int) -> None:
                plan = plan_of(LOG, spans := [Span(*span)], 2)
                gradients = -plan.counts(0).astype(np.float32)
                ones = np.full(7, plan.samples, np.float32)
                pushing = client.push(plan, gradients, -ones[:5], ones[:2], spans=spans, watermark=0)
                assert [one.outcome for one in pushing.wait()] == [PushOutcome.APPLIED] * 2

            return push

        checkpointer = Checkpointer(shards.controls, Epochs(place), keep=100, full_every=100)
        with learning(learn):
            take_some(checkpointer, lambda: cluster.held)
        assert_all_epochs(place, cluster.held)
        assert restart(place, cluster).epoch == 8


def restart(place: str, cluster: Served) -> Any:
    """The status of shard 0, restored and served anew."""
    with served(beginning=cluster.beginning, stores=[CheckpointWriter(Epochs(place)) for _ in range(2)]) as again:
        for node in again.nodes:
            assert node.restore()
        again.shards().agree()
        assert_each_exact(again.held, LOG)
        return again.shards().controls[0].status()


# --- rows that go away ---


def touch(cluster: Cluster, ids: list[int], now: int) -> None:
    """Learn each id once, at a time."""
    keys = np.array([key(one) for one in ids], np.uint64)
    ones = np.ones(len(ids), np.uint32)
    update = RowUpdate(keys, -ones.astype(np.float32)[:, None], ones, np.full(len(ids), now, np.uint32))
    at = cluster.shards[0].clock().get(0, 0)
    push = Push([Span(0, at, at + 1)], 1, [update], np.zeros(5, np.float32), np.zeros(2, np.float32), now)
    assert cluster.push([push])[0].outcome is PushOutcome.APPLIED


def assert_saved(cluster: Cluster, place: str, kind: str, *, rows: dict[int, float]) -> None:
    taken = cluster.take()
    assert taken.kind == kind
    found = restored(place, taken.epoch, 1)
    assert contents(found) == contents(cluster.shards)
    assert {k: row[0][0] for k, row in contents(found).items()} == {key(one): n for one, n in rows.items()}


def test_expired_rows_are_gone_and_may_come_again(place: str) -> None:
    expiring = with_table(COUNTING, expire_after=10)
    cluster = Cluster(place, 1, expiring)
    touch(cluster, [1, 2, 3], 1)
    touch(cluster, [1], 6)
    assert_saved(cluster, place, "full", rows={1: 2, 2: 1, 3: 1})
    touch(cluster, [4], 13)
    assert_saved(cluster, place, "delta", rows={1: 2, 4: 1})
    assert CheckpointReader(Epochs(place).directory(2)).row_counts == {"ids": 1}
    touch(cluster, [2], 14)  # born again
    assert_saved(cluster, place, "delta", rows={1: 2, 4: 1, 2: 1})
    touch(cluster, [5], 31)
    touch(cluster, [1, 5], 32)  # gone and born again between two epochs
    assert_saved(cluster, place, "delta", rows={1: 1, 5: 2})
    again = Cluster(place, 1, expiring)
    touch(again, [1], 33)
    touch(again, [6], 51)
    assert_saved(again, place, "delta", rows={6: 1})


def test_rows_beyond_the_capacity_are_gone(place: str, caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(place, 1, with_table(COUNTING, capacity=100))
    expected: dict[int, float] = {}
    for now in range(6):
        touch(cluster, list(range(now * 60, now * 60 + 90)), now)
        rows = contents(cluster.shards)
        expected = {one: rows[key(one)][0][0] for one in range(400) if key(one) in rows}
        assert len(expected) <= 100
        assert_saved(cluster, place, "delta" if now else "full", rows=expected)
    full = [one.getMessage() for one in caplog.records if one.name == "streamtrain.ps.shard"]
    assert full == ["table ids of shard 0 is full: evicting least recently seen rows"]


def test_the_capacity_is_that_of_all_shards_together(place: str) -> None:
    cluster = Cluster(place, 3, with_table(COUNTING, capacity=100))
    log = {0: [[one] for one in range(2000)]}
    for at in range(0, 2000, 20):
        assert {one.outcome for one in cluster.push(pushes(log, [Span(0, at, at + 20)], 3))} == {PushOutcome.APPLIED}
    rows = contents(cluster.shards)
    assert 80 < len(rows) <= 102
    assert contents(restored(place, cluster.take().epoch, 3)) == rows
    assert 20 < len(contents(restored(place, 1, 1))) <= 102


# --- the moment of the cut ---


class Frozen:
    """Tells when shards hold pushes back, and has them do so until told."""

    def __init__(self) -> None:
        self._frozen = threading.Semaphore(0)
        self.go_on = threading.Event()

    def wrap(self, _: int, control: Control) -> Control:
        def freeze() -> Any:
            answer = control.freeze()
            self._frozen.release()
            self.go_on.wait(PATIENCE)
            return answer

        return around(control, freeze=freeze)  # type: ignore[no-any-return]

    def wait(self, shards: int) -> None:
        for _ in range(shards):
            assert self._frozen.acquire(timeout=PATIENCE)


def test_push_on_its_way_is_let_through(place: str) -> None:
    """One shard has applied it and the other not: both are cut behind it, and before the next."""
    log: Log = {0: [[1, 2, 3], [4, 5], [1, 6]], 1: [[7], [8]]}
    frozen = Frozen()
    cluster = Cluster(place, wrap=frozen.wrap)
    cluster.learn(log, (0, 0, 1))
    second, third = (pushes(log, [Span(0, i, i + 1)], 2) for i in (1, 2))
    cluster.shards[1].push(second[1])
    taking = aside(cluster.take)
    frozen.wait(2)
    later = aside(lambda: cluster.shards[1].push(third[1]))
    other = aside(lambda: cluster.learn(log, (1, 0, 2)))
    missing = aside(lambda: cluster.shards[0].push(second[0]))
    frozen.go_on.set()
    assert missing.result(PATIENCE).outcome is PushOutcome.APPLIED
    taken = taking.result(PATIENCE)
    assert taken.aligned
    assert later.result(PATIENCE).outcome is PushOutcome.APPLIED
    other.result(PATIENCE)
    cluster.shards[0].push(third[0])
    found = restored(place, taken.epoch, 2)
    assert [shard.clock() for shard in found] == [{0: 2}] * 2
    assert_exact(found, {0: log[0][:2]})
    assert_exact(cluster.shards, log)


def test_push_that_never_comes_is_not_waited_for(place: str) -> None:
    log = some_log(1, 12)
    cluster = Cluster(place, cut_patience=0.05)
    cluster.learn(log, (0, 0, 4))
    cluster.shards[1].push(pushes(log, [Span(0, 4, 9)], 2)[1])
    taken = cluster.take()
    assert not taken.aligned
    assert taken.pause_ms >= 50

    again = Cluster(place)
    assert [shard.clock() for shard in again.shards] == [{0: 4}, {0: 9}]
    assert_each_exact(again.shards, log)
    again.push(pushes(log, [Span(0, 4, 9)], 2))  # the worker went back to the oldest clock
    again.learn(log, (0, 9, 12))
    assert_exact(again.shards, log)
    taken = again.take()
    assert (taken.kind, taken.aligned) == ("delta", True)
    assert_exact(restored(place, taken.epoch, 3), log)


def test_clock_past_the_cut_is_not_waited_for(place: str) -> None:
    log = some_log(1, 4)
    cluster = Cluster(place, 1, freeze_patience=0.0, cut_patience=PATIENCE)
    node = cluster.nodes[0]
    frozen = node.freeze()
    cluster.learn(log, (0, 0, 4))
    began = time.monotonic()
    at = node.cut(1, frozen.clock, True)
    assert time.monotonic() - began < PATIENCE / 2
    assert (at.clock, at.reached) == ({0: 4}, False)


def test_pushes_go_on_when_nobody_comes_to_cut(place: str) -> None:
    log = some_log(1, 4)
    cluster = Cluster(place, 1, freeze_patience=0.1)
    began = time.monotonic()
    cluster.nodes[0].freeze()
    cluster.learn(log, (0, 0, 4))
    assert 0.1 <= time.monotonic() - began < PATIENCE
    assert_exact(cluster.shards, log)


def test_pushes_are_held_back_until_the_cut(place: str) -> None:
    log = some_log(1, 4)
    frozen = Frozen()
    cluster = Cluster(place, 1, wrap=frozen.wrap)
    taking = aside(cluster.take)
    frozen.wait(1)
    push = aside(lambda: cluster.learn(log, (0, 0, 4)))
    frozen.go_on.set()
    push.result(PATIENCE)
    assert taking.result(PATIENCE).aligned
    assert not contents(restored(place, 1, 1)), "the push was held back until after the cut"
