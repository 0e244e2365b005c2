"""A model that counts, without a graph: gradient -1 per occurrence under SGD with rate 1, rows born zero.

So the row of an id is the number of times that it was learned, and every dense weight the number of samples.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from streamtrain._core import Planner, hash_bytes, shards_of
from streamtrain.model.spec import Spec, shard_slice
from streamtrain.ps.clock import Span
from streamtrain.ps.push import Push, RowUpdate
from streamtrain.ps.shard import InitialState, Run, Shard

DENSE = 5
SPEC = Spec(
    schema="counting",
    seed=0,
    reduction="sum",
    tables=({"name": "ids", "dim": 1, "optimizer": "sgd", "rate": 1.0, "init": "constant", "init_scale": 0.0,
             "expire_after": 0},),
    dense=((DENSE,),),
    statistics=((2,),),
    dense_optimizer={"optimizer": "sgd", "rate": 1.0},
)  # fmt: skip

Log = Mapping[int, Sequence[Sequence[int]]]
"""By partition its samples, each a list of ids."""


def key(one: int) -> int:
    return hash_bytes(str(one).encode())


def new_shard(index: int, shards: int, start: Mapping[int, int] | None = None) -> Shard:
    dense = shard_slice(DENSE, index, shards)
    statistics = shard_slice(2, index, shards)
    zeros = (np.zeros(part.stop - part.start, np.float32) for part in (dense, statistics))
    return Shard(InitialState(Run("run", dict(start or {})), SPEC, *zeros), index, shards)


def plan_of(log: Log, spans: Sequence[Span], shards: int):  # type: ignore[no-untyped-def]  # a Plan
    samples = [sample for p, start, end in spans for sample in log[p][start:end]]
    keys = np.array([key(one) for sample in samples for one in sample], np.uint64)
    offsets = np.concatenate([[0], np.cumsum([len(sample) for sample in samples])]).astype(np.int32)
    planner = Planner([(0, "sum", 0)], [1], shards)
    return planner.plan(keys, np.array([0, len(keys)], np.int64), offsets[None, :], np.zeros(len(samples)))


def pushes(log: Log, spans: Sequence[Span], shards: int) -> list[Push]:
    """What each shard is to learn of some ranges of the log."""
    plan = plan_of(log, spans, shards)
    starts = plan.shard_starts(0).tolist()
    made = []
    for s in range(shards):
        part = slice(starts[s], starts[s + 1])
        counts = plan.counts(0)[part]
        update = RowUpdate(plan.keys(0)[part], -counts.astype(np.float32)[:, None], counts, plan.times(0)[part])
        dense, statistics = (
            np.full(at.stop - at.start, value * plan.samples, np.float32)
            for at, value in ((shard_slice(DENSE, s, shards), -1.0), (shard_slice(2, s, shards), 1.0))
        )
        made.append(Push(spans, plan.samples, [update], dense, statistics, 0))
    return made


def assert_exact(shards: Sequence[Shard], log: Log, *, averaged: bool = False) -> None:
    """Assert that every occurrence in the log was learned once, by every shard that it concerns.

    Args:
        shards: all shards, or some of them.
        log: what was learned.
        averaged: whether the change of statistics is the average of several workers' (bulk), and so no count.
    """
    expected = Counter(one for samples in log.values() for sample in samples for one in sample)
    samples = sum(len(samples) for samples in log.values())
    ids = sorted(expected)
    keys = np.array([key(one) for one in ids], np.uint64)
    for shard in shards:
        mine = shards_of(keys, shard.shards) == shard.index
        counted = shard.tables[0].pull(keys[mine])[:, 0]
        assert dict(zip(np.array(ids)[mine], counted, strict=True)) == {
            one: expected[one] for one in np.array(ids)[mine]
        }
        assert len(shard.tables[0]) == mine.sum()
        assert {p: at for p, at in shard.clock().items() if at} == {p: len(s) for p, s in log.items() if s}
        dense = np.empty(len(shard.dense), np.float32)
        statistics = np.empty(len(shard.statistics), np.float32)
        shard.pull_dense(dense, statistics)
        assert dense.tolist() == [samples] * len(dense)
        assert averaged or statistics.tolist() == [samples] * len(statistics)
