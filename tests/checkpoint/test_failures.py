"""Shards that fail in the midst of checkpoints, checkpoints that are given up, and those that are damaged later."""

import threading
from typing import Any

import numpy as np
import pytest

from streamtrain.checkpoint.shard_checkpoint import CheckpointWriter
from streamtrain.errors import CheckpointCorrupt, CheckpointError, ShardError, ShardRefused, ShardUnavailable
from streamtrain.ps.clock import Clock, Span
from streamtrain.ps.hooks import CutResult, Snapshot
from streamtrain.ps.nodes.node import NO_EPOCH
from streamtrain.ps.nodes.shards import Control, LocalControl
from streamtrain.ps.shard import InitialState, Run, Shard
from streamtrain.store.checkpoint.epochs import Epochs
from tests.checkpoint.saved import Cluster, around, aside, assert_each_exact, restored, some_log
from tests.patience import PATIENCE, until
from tests.ps.counting import SPEC, assert_exact, pushes
from tests.store.checkpoint.checkpoints import content_of, manifest_of, set_content, set_manifest

LOG = some_log(1, 40_000, ids=30_000)


def first(n: int) -> dict[int, Any]:
    return {0: LOG[0][:n]}


# --- shards that fail ---


def test_shard_that_dies_between_cut_and_write(place: str) -> None:
    dying = threading.Event()

    def wrap(index: int, control: Control) -> Control:
        def write(epoch: int) -> str:
            if index == 1 and dying.is_set():
                raise ShardUnavailable("shard 1: connection refused")
            return control.write(epoch)

        return around(control, write=write)  # type: ignore[no-any-return]

    cluster = Cluster(place, wrap=wrap)
    cluster.learn(LOG, (0, 0, 100))
    cluster.take()
    cluster.learn(LOG, (0, 100, 200))
    dying.set()
    with pytest.raises(ShardUnavailable, match="shard 1"):
        cluster.take()
    assert (Epochs(place).numbers(), Epochs(place).next()) == ([1], 3)
    again = Cluster(place)
    assert_exact(again.shards, first(100))
    dying.clear()
    taken = cluster.take()
    assert (taken.epoch, taken.kind) == (3, "full")
    assert_exact(restored(place, 3, 3), first(200))


def test_shard_that_comes_back_from_an_older_epoch(place: str) -> None:
    """One epoch of the two was complete only after it had been restored: no delta can build on either."""
    cluster = Cluster(place)
    for at in range(2):
        cluster.learn(LOG, (0, at * 100, at * 100 + 100))
        cluster.take()
    cluster.nodes[1].epoch = 1
    cluster.learn(LOG, (0, 200, 300))
    assert cluster.take().kind == "full"


def test_shards_that_hold_nothing_to_save(place: str) -> None:
    cluster = Cluster(place)
    cluster.nodes[1] = cluster._node(1, 2)
    cluster.controls[1] = LocalControl(cluster.nodes[1])
    with pytest.raises(ShardError, match="shard 1 of this process is empty: nothing to save"):
        cluster.take()
    cluster.nodes[1].initialise(InitialState(Run("other", {}), SPEC, np.zeros(3, np.float32), np.zeros(1, np.float32)))
    with pytest.raises(ShardError, match="shard 1 of this process is of another run: nothing to save"):
        cluster.take()
    assert Epochs(place).numbers() == []


class Held:
    """A mark that is written once told."""

    def __init__(self, mark: Snapshot) -> None:
        self.drop, self._write = mark.drop, mark.write
        self.begun, self.go_on = threading.Event(), threading.Event()

    def write(self, epoch: int) -> str:
        self.begun.set()
        self.go_on.wait(PATIENCE)
        return self._write(epoch)


def test_no_cut_while_another_is_written(place: str) -> None:
    cluster = Cluster(place, 1)
    node, marks = cluster.nodes[0], []
    checkpoints = node._checkpoints
    assert checkpoints is not None
    mark = checkpoints.snapshot

    def held(shard: Shard, full: bool) -> Any:
        marks.append(Held(mark(shard, full)))
        return marks[-1]

    checkpoints.snapshot = held  # type: ignore[method-assign]
    cluster.learn(LOG, (0, 0, 100))
    first_one = aside(cluster.take)
    while not marks:
        assert not first_one.done()
    assert marks[0].begun.wait(PATIENCE)
    with pytest.raises(ShardRefused, match="shard 0 is still writing epoch 1; retry later"):
        cluster.take()
    with pytest.raises(ShardRefused, match="shard 0 is still writing epoch 1; retry later"):
        node.cut(2, {0: 100}, True)
    cluster.learn(LOG, (0, 100, 200))  # nothing was held back: patience is longer than the test
    marks[0].go_on.set()
    assert first_one.result(PATIENCE).epoch == 1
    assert_exact(restored(place, 1, 1), first(100))


def test_shard_without_a_place_for_checkpoints(place: str) -> None:
    cluster = Cluster(place, 1)
    cluster.nodes[0]._checkpoints = None
    with pytest.raises(ShardRefused, match=r"shard 0 has no checkpoints; set checkpoint\.url"):
        cluster.take()
    cluster.learn(LOG, (0, 0, 100))


# --- damage ---


def damage(place: str, epoch: int, name: str) -> None:
    url = f"{place}/epoch-{epoch:09d}"
    content = bytearray(content_of(url, name))
    content[len(content) // 2] ^= 1
    set_content(url, name, bytes(content))


@pytest.mark.parametrize("name", ["tables/ids/shard-1.parquet", "shards/1.safetensors", "manifest.json"])
def test_damaged_epoch_is_named_and_the_one_before_is_used(
    place: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster(place)
    for at in range(3):
        cluster.learn(LOG, (0, at * 100, at * 100 + 100))
        assert cluster.take().kind == ("delta" if at else "full")
    damage(place, 3, name)
    caplog.clear()
    again = Cluster(place)
    whole = 3 if name != "manifest.json" else 2
    assert [node.epoch for node in again.nodes] == [whole, 2], "each reads what it needs"
    messages = [record.message for record in caplog.records if "instead" in record.message]
    assert len(messages) == (1 if whole == 3 else 2)
    assert all(f"epoch-000000003/{name}" in message and "using epoch 2 instead" in message for message in messages)
    counted: list[str] = []
    CheckpointWriter(Epochs(place), counted.append).restore(1, 2)
    assert counted == ["damaged_checkpoints"]
    assert_each_exact(again.shards, LOG)
    assert again.shards[1].clock() == {0: 200}
    again.push(pushes(LOG, [Span(0, 200, 300)], 2))
    assert_exact(again.shards, first(300))
    assert again.take().kind == "full"

    damage(place, 1, "tables/ids/shard-1.parquet")
    damage(place, 4, "shards/0.safetensors")
    damage(place, 4, "shards/1.safetensors")
    with pytest.raises(CheckpointError, match=r"no usable checkpoint at .*set checkpoint.url to another place"):
        Cluster(place, 1)


def test_parts_that_another_cut_has_replaced_are_not_aligned(place: str) -> None:
    """Another process that leads has had one shard cut once more, for the same epoch."""
    cut_again = threading.Event()

    def wrap(index: int, control: Control) -> Control:
        def cut(epoch: int, target: Clock, full: bool, hold: float) -> CutResult:
            answer = control.cut(epoch, target, full, hold)
            if index == 1 and cut_again.is_set():
                cluster.shards[1].push(pushes(LOG, [Span(0, 100, 150)], 2)[1])
                control.cut(epoch, {0: 150}, full, hold)
            return answer

        return around(control, cut=cut)  # type: ignore[no-any-return]

    cluster = Cluster(place, wrap=wrap)
    cluster.learn(LOG, (0, 0, 100))
    cut_again.set()
    taken = cluster.take()
    assert not taken.aligned
    assert [shard.clock() for shard in restored(place, 1, 2)] == [{0: 100}, {0: 150}]
    assert CheckpointWriter(Epochs(place)).restore(0, 2) is not None
    with pytest.raises(CheckpointError, match="different clocks and their number is not 3"):
        CheckpointWriter(Epochs(place)).restore(0, 3)


def test_what_says_to_be_aligned_and_is_not(place: str) -> None:
    cluster = Cluster(place)
    cluster.learn(LOG, (0, 0, 100))
    cluster.shards[1].push(pushes(LOG, [Span(0, 100, 150)], 2)[1])
    cluster.nodes[0]._cut_patience = 0.01
    assert not cluster.take().aligned
    where = Epochs(place).directory(1).url
    set_manifest(where, about=manifest_of(where)["about"] | {"aligned": True})
    with pytest.raises(CheckpointError, match="different clocks and their number is not 3"):
        CheckpointWriter(Epochs(place)).restore(0, 3)


# --- deltas on another epoch than they were written for ---


def test_an_epoch_of_another_cluster_is_no_base(place: str) -> None:
    """Both give the same number; what one has written another has made complete."""
    first = Cluster(place)
    first.learn(LOG, (0, 0, 100))
    first.take()
    second = Cluster(place)
    second.learn(LOG, (0, 100, 300))
    first.learn(LOG, (0, 100, 200))
    for node in first.nodes:
        node.cut(2, node.freeze().clock, False)
        node.write(2)
    second.epochs.next = lambda: 2  # type: ignore[method-assign]
    assert second.take().epoch == 2
    first.learn(LOG, (0, 200, 400))
    taken = first.take()
    assert (taken.epoch, taken.kind) == (3, "full")
    assert_exact(restored(place, 3, 2), {0: LOG[0][:400]})
    first.learn(LOG, (0, 400, 500))
    assert first.take().kind == "delta"
    assert_exact(restored(place, 4, 2), {0: LOG[0][:500]})


def test_a_delta_whose_base_is_another_one_now_is_not_used(place: str) -> None:
    cluster = Cluster(place)
    for at in range(2):
        cluster.learn(LOG, (0, at * 100, at * 100 + 100))
        cluster.take()
    base, delta = (Epochs(place).directory(epoch).url for epoch in (1, 2))
    said = manifest_of(delta)["base_digest"]
    assert said == manifest_of(base)["sha256"]
    set_manifest(base, about=manifest_of(base)["about"] | {"time": 0})
    with pytest.raises(CheckpointCorrupt, match="builds on epoch 1, which was replaced by another"):
        Epochs(place).open(2)
    assert_exact(restored(place, 2, 2), first(100))
    set_manifest(delta, without="base_digest")  # as releases before wrote it
    assert_exact(restored(place, 2, 2), first(200))
    again = Cluster(place)
    again.learn(LOG, (0, 200, 300))
    assert again.take().kind == "delta"


# --- what is given up ---


def test_a_cut_that_nobody_asks_to_write_is_given_up_in_time(place: str, caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(place, 1, write_patience=0.05)
    cluster.learn(LOG, (0, 0, 500))
    cluster.take()
    node, table = cluster.nodes[0], cluster.shards[0].tables[0]
    node.cut(2, node.freeze().clock, True)
    cluster.learn(LOG, (0, 500, 700))
    until(lambda: "no request to write epoch 2 within 0.05 s of its cut" in caplog.text)
    assert not table.stats()["snapshot_bytes"]
    with pytest.raises(ShardRefused, match="has not been cut for epoch 2"):
        node.write(2)
    node._write_patience = PATIENCE
    assert cluster.take().kind == "full"
    assert_exact(restored(place, 3, 1), first(700))


@pytest.mark.parametrize("full", [True, False])
def test_what_was_cut_and_never_written_is_let_go_of(place: str, full: bool) -> None:
    log = some_log(1, 3_000, ids=1_000)
    cluster = Cluster(place, 1)
    cluster.learn(log, (0, 0, 500))
    cluster.take()
    node, table = cluster.nodes[0], cluster.shards[0].tables[0]
    for epoch in range(2, 8):  # more than there are channels
        cluster.learn(log, (0, epoch * 250, (epoch + 1) * 250))
        node.cut(epoch, node.freeze().clock, full)
    cluster.learn(log, (0, 2_000, 3_000))
    held = table.stats()
    with pytest.raises(ShardRefused, match="has not been cut for epoch 6"):
        node.write(6)
    node.freeze()
    let_go = table.stats()
    assert held["snapshot_bytes"] + held["dirty_bytes"] > 2 * let_go["dirty_bytes"] > 0
    assert let_go["snapshot_bytes"] == 0
    with pytest.raises(ShardRefused, match="has not been cut for epoch 7"):
        node.write(7)
    assert node.epoch == NO_EPOCH
    taken = cluster.take()
    assert taken.kind == "full", "what changed before the cut that was given up is in no delta"
    assert_exact(restored(place, taken.epoch, 1), log)
