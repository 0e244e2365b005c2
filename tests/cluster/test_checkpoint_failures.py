"""Shards that fail in the midst of checkpoints, checkpoints that are given up, and those that are damaged later."""

import threading
from typing import Any

import numpy as np
import pytest

from streamtrain.cluster.keeper import CheckpointKeeper
from streamtrain.errors import CheckpointError, ShardError, ShardRefused, ShardUnavailable
from streamtrain.ps.clock import Span
from streamtrain.ps.keeping import Mark
from streamtrain.ps.node import NO_EPOCH
from streamtrain.ps.shard import Initial, Run, Shard
from streamtrain.ps.shards import Control
from streamtrain.store.epochs import Epochs
from tests.checkpoints import content_of, set_content
from tests.cluster.saved import Cluster, around, aside, assert_each_exact, restored, some_log
from tests.ps.counting import SPEC, assert_exact, pushes

LONG = 30.0  # seconds that nothing takes, unless it hangs
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
    cluster.nodes[1]._held = None
    with pytest.raises(ShardError, match="shard 1 of this process is empty: nothing to save"):
        cluster.take()
    cluster.nodes[1].initialise(Initial(Run("other", {}), SPEC, np.zeros(3, np.float32), np.zeros(1, np.float32)))
    with pytest.raises(ShardError, match="shard 1 of this process is of another run: nothing to save"):
        cluster.take()
    assert Epochs(place).numbers() == []


class Held:
    """A mark that is written once told."""

    def __init__(self, mark: Mark) -> None:
        self.drop, self._write = mark.drop, mark.write
        self.begun, self.go_on = threading.Event(), threading.Event()

    def write(self, epoch: int) -> str:
        self.begun.set()
        self.go_on.wait(LONG)
        return self._write(epoch)


def test_no_cut_while_another_is_written(place: str) -> None:
    cluster = Cluster(place, 1)
    node, marks = cluster.nodes[0], []
    keeper = node._keeper
    assert keeper is not None
    mark = keeper.mark

    def held(shard: Shard, full: bool) -> Any:
        marks.append(Held(mark(shard, full)))
        return marks[-1]

    keeper.mark = held  # type: ignore[method-assign]
    cluster.learn(LOG, (0, 0, 100))
    first_one = aside(cluster.take)
    while not marks:
        assert not first_one.done()
    assert marks[0].begun.wait(LONG)
    with pytest.raises(ShardRefused, match="shard 0 still writes epoch 1; ask again later"):
        cluster.take()
    with pytest.raises(ShardRefused, match="shard 0 still writes epoch 1; ask again later"):
        node.cut(2, {0: 100}, True)
    cluster.learn(LOG, (0, 100, 200))  # nothing was held back: patience is longer than the test
    marks[0].go_on.set()
    assert first_one.result(LONG).epoch == 1
    assert_exact(restored(place, 1, 1), first(100))


def test_shard_without_a_place_for_checkpoints(place: str) -> None:
    cluster = Cluster(place, 1)
    cluster.nodes[0]._keeper = None
    with pytest.raises(ShardRefused, match=r"shard 0 has no place for checkpoints; set checkpoint\.url"):
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
    messages = [record.message for record in caplog.records if "is used instead" in record.message]
    assert len(messages) == (1 if whole == 3 else 2)
    assert all(f"epoch-000000003/{name}" in message and "epoch 2 is used" in message for message in messages)
    counted: list[str] = []
    CheckpointKeeper(Epochs(place), counted.append).restore(1, 2)
    assert counted == ["damaged_checkpoints"]
    assert_each_exact(again.shards, LOG)
    assert again.shards[1].clock() == {0: 200}
    again.push(pushes(LOG, [Span(0, 200, 300)], 2))
    assert_exact(again.shards, first(300))
    assert again.take().kind == "full"

    damage(place, 1, "tables/ids/shard-1.parquet")
    damage(place, 4, "shards/0.safetensors")
    damage(place, 4, "shards/1.safetensors")
    with pytest.raises(CheckpointError, match=r"no checkpoint at .* can be used: .*give checkpoint.url another place"):
        Cluster(place, 1)


# --- what is given up ---


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
