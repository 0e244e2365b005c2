"""Another number of shards goes on from a publication: what changed since is published, and nothing else."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamtrain._core import shards_of
from streamtrain.checkpoint.cluster_checkpoint import Checkpointer
from streamtrain.checkpoint.shard_checkpoint import CheckpointWriter
from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import GateClosed
from streamtrain.model.spec import Spec
from streamtrain.ps.clock import Span
from streamtrain.ps.consistency import Async
from streamtrain.ps.nodes.node import Node
from streamtrain.ps.nodes.shards import Control, LocalControl
from streamtrain.ps.shard import InitialState, Run
from streamtrain.publish.cluster_publisher import Publications, PublicationSchedule
from streamtrain.publish.shard_publisher import ShardPublisher
from streamtrain.store.checkpoint.epochs import Epochs
from streamtrain.store.redis.dictionary import RedisDictionaries
from streamtrain.store.redis.model import RedisModel
from streamtrain.store.redis.source import RedisOrigin
from tests.checkpoint.saved import some_log
from tests.ps.counting import DENSE, SPEC, key, pushes
from tests.publish.published import connect, read

LOG = some_log(1, 4_000, ids=1_000)


class Moving:
    """Shards that learn a log, are saved and published, and of which there may be another number."""

    def __init__(self, url: str, place: Path, shards: int = 2, spec: Spec = SPEC) -> None:
        self.url, self.place, self.model = url, place, RedisModel(connect(url), "counted")
        self.learned, self.epoch = 0, 1
        self.nodes = [self._node(index, shards) for index in range(shards)]
        for node in self.nodes:
            zeros = [
                np.zeros(n * (node.index + 1) // shards - n * node.index // shards, np.float32) for n in (DENSE, 2)
            ]
            node.initialise(InitialState(Run("run", {}), spec, *zeros))
        self._open()

    def _node(self, index: int, shards: int) -> Node:
        publisher = ShardPublisher(RedisDictionaries(self.model))
        return Node(index, shards, Async, CheckpointWriter(Epochs(str(self.place))), publisher=publisher)

    def _open(self) -> None:
        controls: list[Control] = [LocalControl(node) for node in self.nodes]
        self.checkpointer = Checkpointer(controls, Epochs(str(self.place)), keep=100, full_every=100)
        self.publications = Publications(controls, RedisDictionaries(self.model), "counted")

    def learn(self, samples: int) -> None:
        for node, push in zip(self.nodes, pushes(LOG, [self._next(samples)], len(self.nodes)), strict=True):
            node.shard.push(push)

    def _next(self, samples: int) -> Span:
        self.learned += samples
        return Span(0, self.learned - samples, self.learned)

    def remove(self, *ids: int) -> None:
        """As rows that have expired."""
        for node in self.nodes:
            node.shard.tables[0].remove(np.array([key(one) for one in ids], np.uint64))

    def publish(self) -> int:
        """Publishes; returns the number of the dictionary, which a full publication changes."""
        assert self.publications.publish() is not None
        return self.dictionary

    @property
    def dictionary(self) -> int:
        head = self.model.head()
        assert head is not None
        return head.layout.dictionary

    def read_ahead(self, *kept: int | None) -> list[Node]:
        """Nodes for the next places, of which some may be those of before, which have read what a checkpoint has."""
        nodes = [self._node(0, 0) if one is None else self.nodes[one] for one in kept]
        for index, node in enumerate(nodes):
            node.read_ahead(index, len(nodes))
        return nodes

    def prepare(self, *kept: int | None) -> list[Node]:
        """The same, after which 10 samples are learned and published."""
        self.checkpointer.take()
        nodes = self.read_ahead(*kept)
        self.learn(10)
        self.publish()
        return nodes

    def move(self, nodes: list[Node], head: str | None = None) -> None:
        """Takes a checkpoint, and has these nodes hold the rows from then on."""
        self.checkpointer.take()
        self.epoch += 1
        head = self.publications.head_token() if head is None else head
        tables = [node.shard.tables[0] if node.ready else None for node in nodes]
        for index, node in enumerate(nodes):
            node.place(index, len(nodes), "run", self.epoch, head=head)
        self.kept = [node.shard.tables[0] is table for node, table in zip(nodes, tables, strict=True)]
        self.nodes = nodes
        self._open()

    def assert_published(self) -> None:
        """What servers load is what the shards have."""
        expected: dict[int, float] = {}
        for node in self.nodes:
            _, part = node.shard.tables[0].scan(0, 1 << 20)
            assert (shards_of(part.keys, len(self.nodes)) == node.index).all()
            expected |= dict(zip(part.keys.tolist(), part.embeddings[:, 0].tolist(), strict=True))
        publication, rows, weights = read(self.url)
        assert dict(publication.clock) == {0: self.learned}
        assert rows == expected
        assert dict(publication.rows) == {"ids": len(rows)}
        assert weights.dense.tolist() == [self.learned] * DENSE
        assert self.publications.verify().agrees


@pytest.fixture
def moving(server: Valkey, tmp_path: Path) -> Moving:
    return Moving(server.url, tmp_path / "epochs")


def test_only_what_has_changed_is_published(moving: Moving) -> None:
    """Of 2 to 3, 1, 4 and 2 shards, rows that come, change, go and come back around each step: never a full one."""
    moving.learn(300)
    dictionary = moving.publish()
    for kept in [(0, None, 1), (1,), (None, 0, None, None), (3, 1)]:
        moving.learn(20)
        moving.publish()
        moving.checkpointer.take()
        first = LOG[0][moving.learned]
        moving.learn(1)  # rows of which some are new to Redis with the next publication, and gone before the move
        nodes = moving.read_ahead(*kept)
        moving.learn(20)
        assert moving.publish() == dictionary
        moving.learn(20)
        moving.remove(*first, *range(moving.learned % 7, 1_000, 50))
        moving.move(nodes)
        assert moving.kept == [one is not None for one in kept]
        moving.learn(20)
        assert moving.publish() == dictionary
        moving.assert_published()
        moving.learn(20)
        assert moving.publish() == dictionary
        moving.assert_published()


def test_who_follows_goes_on(moving: Moving) -> None:
    """A server reads the steps of before and after from the log, and loads nothing anew."""
    moving.learn(300)
    moving.publish()
    origin = RedisOrigin(RedisModel(connect(moving.url), "counted"))
    head = origin.find(None)
    assert head is not None
    nodes = moving.prepare(0, None, 1)
    moving.move(nodes)
    moving.learn(10)
    moving.publish()
    steps = list(origin.follow(head, 5.0))
    assert [step.publication.number for step in steps] == [2, 3]
    changed = {one for change in steps[1].changes for one in change.keys.tolist()}
    assert changed >= {key(one) for sample in LOG[0][310:320] for one in sample}
    assert len(changed) < 60
    step, lookup = origin.open(steps[1].publication)
    assert step.publication.number == 3
    assert lookup is not None


def test_what_is_new_can_be_verified_before_it_is_published(moving: Moving) -> None:
    moving.learn(300)
    moving.publish()
    moving.checkpointer.take()
    moving.move(moving.read_ahead(0, None, 1))
    assert moving.publications.publish() is None  # nothing is new
    dictionary = moving.dictionary
    moving.assert_published()
    assert moving.dictionary == dictionary


def test_what_was_removed_and_not_yet_published_goes_before_the_shards_change(moving: Moving) -> None:
    """Nothing is learned with it, so that the clock does not say that it is new."""
    moving.learn(300)
    dictionary = moving.publish()
    moving.remove(*range(100))
    moving.checkpointer.take()
    nodes = moving.read_ahead(0, None, 1)
    with PublicationSchedule(moving.publications, 3600.0).hand_over() as head:
        moving.move(nodes, head=head)
    moving.learn(10)
    assert moving.publish() == dictionary
    moving.assert_published()


def test_a_part_that_was_not_committed_comes_again(moving: Moving) -> None:
    moving.learn(300)
    dictionary = moving.publish()
    nodes = moving.prepare(0, None, 1)
    moving.learn(10)
    moving.move(nodes)
    moving.learn(1)
    for node in nodes:
        assert "part" in json.loads(node.publish(3, ""))
    moving.learn(1)
    assert moving.publish() == dictionary
    moving.assert_published()


def test_a_shard_that_was_held_back_may_be_gone(moving: Moving) -> None:
    """Its index is none any more."""
    moving.learn(300)
    publications, table = moving.publications, moving.nodes[1].shard.tables[0]
    moving.publish()
    moving.checkpointer.take()
    nodes = moving.read_ahead(0)
    keys, ones = table.scan(0, 1)[1].keys.copy(), np.ones(1, np.uint32)
    moving.learn(1)
    table.push(keys, np.full((1, 1), 2.0**50, np.float32), ones, ones, 3e38)
    with pytest.raises(GateClosed, match="shard 1 has 1 rows of table ids"):
        publications.publish()
    table.remove(keys)
    moving.move(nodes, head="")
    publications._controls[:] = [LocalControl(node) for node in moving.nodes]  # type: ignore[index]
    assert publications.publish() is not None
    moving.assert_published()


@pytest.mark.parametrize("fault", ["none", "replaced", "older", "away", "restarted", "unread"])
def test_where_they_cannot_go_on_all_is_published_anew(
    moving: Moving, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    moving.learn(300)
    dictionary = moving.publish()
    moving.checkpointer.take()
    nodes: list[Any] = moving.read_ahead(0, None, 1) if fault != "unread" else [moving.nodes[0], moving._node(0, 0)]
    if fault != "older":
        moving.learn(10)
        moving.publish()
    else:  # the checkpoint that is read has what the head has not
        for node in nodes:
            node.read_ahead(0, 0)
        moving.learn(10)
        moving.checkpointer.take()
        nodes = moving.read_ahead(0, None, 1)
    if fault == "away":  # a shard of before did not hear that it was committed
        moving.model.server.call("HSET", moving.model.keys.applied, 1, "0-0")
    token = "" if fault == "none" else moving.publications.head_token()
    if fault == "replaced":
        moving.learn(10)
        moving.publish()
    moving.learn(10)
    moving.move(nodes, head=token)
    if fault == "restarted":
        again = moving._node(2, 3)
        again.restore()
        moving.nodes[2] = again
        moving._open()
    moving.learn(10)
    assert moving.publish() != dictionary
    moving.assert_published()
    assert {
        "none": "shard 0 has just started",
        "replaced": "the head's part of shard 0 was written by another process",
        "older": "the head is older than the rows from which shard 0 goes on",
        "away": "shard 1 of the 2 that model counted",
        "restarted": "shard 2 has just started",
        "unread": "has just started",
    }[fault] in caplog.text


def test_rows_that_are_zero_stay_out(server: Valkey, tmp_path: Path) -> None:
    """L1 has driven them to zero, and so they are not in Redis; the next shards find out which these are."""
    table = {**SPEC.tables[0], "optimizer": "ftrl", "l1": 1e3, "init_scale": 0.0, "init": "constant"}
    spec = Spec(**{**vars(SPEC), "tables": (table,)})
    moving = Moving(server.url, tmp_path / "epochs", spec=spec)
    moving.learn(300)
    dictionary = moving.publish()
    nodes = moving.prepare(0, None, 1)
    moving.move(nodes)
    moving.learn(10)
    assert moving.publish() == dictionary
    publication, rows, _ = read(server.url)
    assert dict(publication.rows) == {"ids": len(rows)}
    assert moving.publications.verify().agrees
