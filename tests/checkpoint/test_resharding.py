"""Checkpoints restored to other numbers of shards, and by a learner in one process."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamtrain as stm
from streamtrain._core import shards_of
from streamtrain.checkpoint.cluster_checkpoint import Checkpointer
from streamtrain.checkpoint.shard_checkpoint import CheckpointWriter
from streamtrain.checkpoint.shard_state import restore_shard, source_shards
from streamtrain.errors import CheckpointError
from streamtrain.model.spec import Spec, shard_slice
from streamtrain.ps.clock import PushOutcome, Span
from streamtrain.ps.consistency import Async
from streamtrain.ps.nodes.node import Node
from streamtrain.ps.nodes.shards import LocalControl, RunTemplate, Shards
from streamtrain.ps.push import Push, RowUpdate
from streamtrain.store.checkpoint.epochs import Epochs
from tests.checkpoint.saved import Cluster, assert_each_exact, contents, dense, some_log
from tests.models import clicks, dense_of, two_towers
from tests.ps.counting import assert_exact, pushes
from tests.ps.served import beginning_of

OPTIMIZERS = ("sgd", "adagrad", "adam")
COUNTS = ((2, 3), (3, 1), (1, 4))
DIM, DENSE, STATISTICS = 3, 11, 4
KEYS = np.random.default_rng(0).integers(0, 2**64, 100, dtype=np.uint64)


def beginning(optimizer: str) -> RunTemplate:
    common = {"optimizer": optimizer, "rate": 0.1}
    tables = tuple({"name": name, "dim": DIM, "seed": 7, "expire_after": 0, **common} for name in ("user", "item"))
    spec = Spec("any", 7, "mean", tables, ((DENSE,),), ((STATISTICS,),), common)
    return RunTemplate(spec, np.linspace(-1, 1, DENSE, dtype=np.float32), np.ones(STATISTICS, np.float32), {0: 3})


def learn(cluster: Cluster, *batches: int) -> None:
    """Gradients that depend on nothing but the number of the batch."""
    count = len(cluster.nodes)
    for number in batches:
        rng = np.random.default_rng(number)
        updates = [
            RowUpdate(
                rng.choice(KEYS, 40, replace=False),
                rng.normal(size=(40, DIM)).astype(np.float32),
                rng.integers(1, 5, 40, dtype=np.uint32),
                np.full(40, number, np.uint32),
            )
            for _ in range(2)
        ]
        gradient, change = rng.normal(size=DENSE).astype(np.float32), rng.normal(size=STATISTICS).astype(np.float32)
        for s, shard in enumerate(cluster.shards):
            owned = [shards_of(update.keys, count) == s for update in updates]
            mine = [
                RowUpdate(one.keys[own], one.gradients[own], one.counts[own], one.times[own])
                for one, own in zip(updates, owned, strict=True)
            ]
            slices = gradient[shard_slice(DENSE, s, count)], change[shard_slice(STATISTICS, s, count)]
            push = Push([Span(0, number * 5 + 3, number * 5 + 8)], 5, mine, *slices, number)
            assert shard.push(push).outcome is PushOutcome.APPLIED


def assert_same(one: Cluster, other: Cluster) -> None:
    for table in range(2):
        assert len(contents(one.shards, table)) >= 20
        assert contents(one.shards, table) == contents(other.shards, table)
    assert dense(one.shards) == dense(other.shards)
    told = {
        (str(shard.clock()), shard.samples, shard.watermark, str(shard.run.start))
        for c in (one, other)
        for shard in c.shards
    }
    assert len(told) == 1


@pytest.mark.parametrize("counts", COUNTS, ids=lambda counts: f"{counts[0]}to{counts[1]}")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_other_numbers_of_shards(place: str, optimizer: str, counts: tuple[int, int]) -> None:
    """All is there, and learning goes on as if it had always been so many; so does taking checkpoints."""
    began = beginning(optimizer)
    steady = Cluster(f"{place}-steady", 1, began)
    cluster = Cluster(place, counts[0], began)
    for number in range(3):
        learn(cluster, number)
        assert cluster.take().kind == ("delta" if number else "full")
    learn(steady, 0, 1, 2)
    again = Cluster(place, counts[1], began)
    assert again.restored == [True] * counts[1]
    assert_same(again, cluster)
    assert_same(again, steady)

    learn(again, 3)
    learn(steady, 3)
    assert_same(again, steady)
    assert again.take().kind == "full", "no chain holds two numbers of shards"
    learn(again, 4)
    learn(steady, 4)
    assert again.take().kind == "delta"
    assert_same(Cluster(place, counts[0], began), steady)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**64 - 1), st.integers(1, 100))
def test_sources_hold_all_that_a_shard_needs(shards: int, written: int, key: int, size: int) -> None:
    keys = np.array([key], np.uint64)
    owner, writer = int(shards_of(keys, shards)[0]), int(shards_of(keys, written)[0])
    assert writer in source_shards(owner, shards, written)
    for index in range(shards):
        sources, mine = source_shards(index, shards, written), shard_slice(size, index, shards)
        assert 0 <= sources.start < sources.stop <= written
        assert shard_slice(size, sources[0], written).start <= mine.start or mine.start == mine.stop
        assert shard_slice(size, sources[-1], written).stop >= mine.stop
        assert len(sources) <= -(-written // shards) + 1


def test_unaligned_epoch_is_not_split(place: str, caplog: pytest.LogCaptureFixture) -> None:
    log = some_log(1, 20)
    cluster = Cluster(place, cut_patience=0.01)
    cluster.learn(log, (0, 0, 10))
    cluster.shards[0].push(pushes(log, [Span(0, 10, 15)], 2)[0])
    assert not cluster.take().aligned
    refusal = r"epoch-000000001 has 2 shards at different clocks and cannot be split into 3; use one that is aligned"
    with pytest.raises(CheckpointError, match=refusal):
        restore_shard(Epochs(place).open(1), 0, 3)
    with pytest.raises(CheckpointError, match=r"no usable checkpoint at .*different clocks and their number is not 3"):
        Cluster(place, 3)

    cluster.shards[1].push(pushes(log, [Span(0, 10, 15)], 2)[1])
    assert cluster.take().aligned, "a delta on one that is not"
    cluster.shards[0].push(pushes(log, [Span(0, 15, 20)], 2)[0])
    assert not cluster.take().aligned
    caplog.clear()
    again = Cluster(place, 3)
    assert "epoch-000000003 has 2 shards at different clocks and cannot be split into 3" in caplog.text
    assert_exact(again.shards, {0: log[0][:15]})
    again.learn(log, (0, 15, 20))
    assert_exact(again.shards, log)
    assert (again.take().kind, Epochs(place).numbers()) == ("full", [1, 2, 3, 4])
    assert_each_exact(Cluster(place, 2).shards, log)


@pytest.mark.parametrize("count", [1, 3])
def test_learner_opens_what_a_cluster_wrote(tmp_path: Path, count: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = two_towers()
    cluster = stm.Learner(model, shards=count)
    nodes = [Node(i, count, Async, CheckpointWriter(Epochs(tmp_path))) for i in range(count)]
    Shards(nodes, beginning_of(model, cluster._step)).agree()
    cluster._use([node.shard for node in nodes], begins=False)
    checkpointer = Checkpointer([LocalControl(node) for node in nodes], Epochs(tmp_path))
    for number, kind in ((1, "full"), (2, "delta")):
        cluster.learn(clicks(300, number))
        assert checkpointer.take().kind == kind
        place = tmp_path / f"epoch-{number:09d}" if kind == "full" else tmp_path  # whose newest epoch it is
        learner = stm.Learner.load(place, model, shards=2)
        assert (learner.samples, learner.rows) == (300 * number, cluster.rows)
        users: list[Any] = [f"u{i}" for i in range(40)]
        np.testing.assert_array_equal(learner.embeddings("user", users), cluster.embeddings("user", users))
        np.testing.assert_array_equal(dense_of(learner), dense_of(cluster))
        unlabelled = [{k: v for k, v in s.items() if k != "label"} for s in clicks(50, 9)]
        np.testing.assert_allclose(learner.predict(unlabelled), cluster.predict(unlabelled), atol=1e-6)
        if kind == "full":
            frame = pd.read_parquet(tmp_path / "epoch-000000001" / "tables" / "item")
            assert list(frame) == ["key", "embedding", "state", "count", "last_seen"]
            expected = contents([node.shard for node in nodes], 1)
            found = {key: (list(e), list(s), count, seen) for key, e, s, count, seen in frame.itertuples(index=False)}
            assert found == expected
    np.testing.assert_allclose(
        learner.learn(clicks(300, 3)).predictions, cluster.learn(clicks(300, 3)).predictions, atol=1e-6
    )
