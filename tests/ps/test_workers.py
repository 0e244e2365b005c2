"""Several workers with their graphs learn together what one learns alone."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest

import streamtrain as stm
from streamtrain.model.optimizers import Optimizer
from streamtrain.ps.bulk import BulkSynchronous
from streamtrain.ps.clock import PushOutcome
from streamtrain.ps.consistency import Async, Bounded, Consistency
from streamtrain.ps.shard import Shard
from streamtrain.stream.formats.factory import JsonFormat
from streamtrain.stream.source import Listener
from streamtrain.testing.stream import MemoryStream
from streamtrain.train.intake import StreamIntake
from streamtrain.train.loop import Loop, LoopConfig
from streamtrain.train.step import Step
from tests.models import Sample, clicks, make
from tests.patience import PATIENCE
from tests.ps.served import Served, beginning_of, served

IDS: list[str | int] = [f"u{i}" for i in range(40)]


class Together(StreamIntake):
    """Polls once all workers have joined, so that each has its partition from the first step on."""

    def __init__(self, all_here: threading.Barrier, stream: MemoryStream, format: JsonFormat) -> None:
        super().__init__(stream, "workers", "job", format)
        self._all_here = all_here

    def open(self, listener: Listener) -> None:
        super().open(listener)
        self._all_here.wait(PATIENCE)


def learn(model: stm.Model, log: Mapping[int, Sequence[Sample]], where: Served, pace: LoopConfig) -> list[Loop]:
    """One worker per partition, each in a thread of its own."""
    shards = where.shards()
    workers = []
    all_here = threading.Barrier(len(log))
    stream = MemoryStream.of(log)
    for partition in log:
        step = Step(model)
        client = shards.client(f"worker-{partition}", shards.agree())
        workers.append(
            Loop(
                *(model, step, client, shards.progress),
                intake=Together(all_here, stream, JsonFormat(model)),
                shards=len(where.nodes),
                config=pace,
            )
        )
    stopped = threading.Event()
    failures: list[BaseException] = []

    def run(worker: Loop) -> None:
        try:
            worker.run(stopped)
        except BaseException as exc:
            failures.append(exc)
            stopped.set()

    threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE)
        assert not thread.is_alive()
    assert not failures, failures
    return workers


def rows_of(where: Served, model: stm.Model, table: str) -> dict[int, np.ndarray[Any, Any]]:
    t = [one.name for one in model.schema.tables].index(table)
    found: dict[int, np.ndarray[Any, Any]] = {}
    for shard in where.held:
        _, rows = shard.tables[t].scan(0, 1 << 20)
        found |= dict(zip(rows.keys.tolist(), rows.embeddings, strict=True))
    return found


def dense_of(shards: Sequence[Shard]) -> np.ndarray[Any, Any]:
    return np.concatenate([shard.dense.pull() for shard in shards])


def normed(inputs: dict[str, Any]) -> Any:
    x = keras.layers.Concatenate()(list(inputs.values()))
    return keras.layers.Dense(1, activation="sigmoid")(keras.layers.Dense(8, activation="tanh")(x))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("rows", "dense"),
    [(stm.SGD(0.1), stm.SGD(0.1)), (stm.Adagrad(0.1), stm.Adagrad(0.1)), (stm.Adam(0.01), stm.Adam(0.01))],
    ids=lambda one: one.kind,
)
@pytest.mark.parametrize("count", [2, 3])
def test_bulk_is_learning_alone(count: int, rows: Optimizer, dense: Optimizer, reduction: Any) -> None:
    """K workers with batches of b against one with batches of k * b, over the same samples in the same order."""
    features: Any = [stm.Categorical("user", dim=4), stm.Categorical("item", dim=4), stm.Numeric("price")]
    if reduction == "sum":  # a step is that much longer, and rounding errors grow with it
        rows, dense = (replace(one, rate=one.rate / (10 * count)) for one in (rows, dense))
    model = make(features, normed, embedding_optimizer=rows, dense_optimizer=dense, reduction=reduction)
    each, rounds = 10, 12
    samples = clicks(each * count * rounds)
    log = {p: [one for r in range(rounds) for one in samples[(r * count + p) * each :][:each]] for p in range(count)}
    alone = stm.Learner(model, batch_size=each * count)
    alone.learn(samples)

    def bulk(shard: Shard) -> Consistency:
        return BulkSynchronous(shard, count, 60.0, lambda: 0.0)

    with served(2, bulk, beginning=beginning_of(model, Step(model))) as where:
        learn(model, log, where, LoopConfig(batch_size=each, ahead=0))
        assert [shard.pushes[PushOutcome.APPLIED] for shard in where.held] == [rounds, rounds]
        for table in ("user", "item"):
            mine, theirs = rows_of(where, model, table), scan(alone, table)
            assert mine.keys() == theirs.keys()
            for key, row in mine.items():
                np.testing.assert_allclose(row, theirs[key], atol=1e-5)
        np.testing.assert_allclose(dense_of(where.held), dense_of(alone._shards), atol=1e-5)


@pytest.mark.parametrize("workers", [1, 3])
def test_outputs_of_a_cluster_begin_at_the_log_odds(workers: int) -> None:
    """Also if several workers begin at the same time, each of which moves the bias."""
    model = make([stm.Categorical("user", dim=4)], normed, micro_batch_size=8)
    [place] = model.output_biases.values()
    rare = [{**one, "label": int(i % 400 == 399)} for i, one in enumerate(clicks(1200))]
    with served(2, beginning=beginning_of(model, Step(model))) as where:
        loops = learn(model, dict.fromkeys(range(workers), rare), where, LoopConfig(batch_size=256, ahead=1))
        learned = sum(loop.stats.samples for loop in loops)
        assert learned == 1200 * workers
        assert -9 < dense_of(where.held)[place] < -4  # log(1 / 400) is -6


def scan(learner: stm.Learner, table: str) -> dict[int, np.ndarray[Any, Any]]:
    t = [one.name for one in learner.model.schema.tables].index(table)
    found: dict[int, np.ndarray[Any, Any]] = {}
    for shard in learner._shards:
        _, rows = shard.tables[t].scan(0, 1 << 20)
        found |= dict(zip(rows.keys.tolist(), rows.embeddings, strict=True))
    return found


class Watched:
    """A consistency that notes how far apart workers start batches.

    A push counts as the other workers' progress once it is made, as it may be applied before its worker hears of it,
    and as its own worker's once that has heard.
    """

    def __init__(self, inner: Consistency) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self.pushed: dict[str, int] = {}
        self.finished: dict[str, int] = {}
        self.apart = 0
        self.leave, self.park, self.beat = inner.leave, inner.park, inner.beat

    def join(self, worker: str, progress: int | None) -> int:
        with self._lock:
            self.pushed[worker] = self.finished[worker] = 0
        return self._inner.join(worker, progress)

    def pull(self, worker: str, ahead: int, patience: float) -> bool:
        if not self._inner.pull(worker, ahead, patience):
            return False
        with self._lock:
            self.apart = max(self.apart, self.finished[worker] + ahead - min(self.pushed.values()))
        return True

    def push(self, worker: str, push: Any) -> Any:
        with self._lock:
            self.pushed[worker] += 1
        pending = self._inner.push(worker, push)

        class Noted:
            def result(_, patience: float) -> Any:
                pushed = pending.result(patience)
                if pushed is not None:
                    with self._lock:
                        self.finished[worker] += 1
                return pushed

        return Noted()


@pytest.mark.parametrize(
    ("make_consistency", "ahead", "most"),
    [
        (lambda shard: Bounded(shard, 0, 60.0, lambda: 0.0), 0, 0),
        (lambda shard: Bounded(shard, 2, 60.0, lambda: 0.0), 1, 2),
        (lambda shard: BulkSynchronous(shard, 3, 60.0, lambda: 0.0), 0, 0),
    ],
    ids=["bounded-0", "bounded-2", "bulk"],
)
def test_workers_stay_together(make_consistency: Callable[[Shard], Consistency], ahead: int, most: int) -> None:
    model = make([stm.Categorical("user", dim=4), stm.Numeric("price")])
    samples = clicks(900)
    log = {p: samples[p::3] for p in range(3)}
    watched: list[Watched] = []

    def watch(shard: Shard) -> Consistency:
        watched.append(Watched(make_consistency(shard)))
        return watched[-1]

    with served(2, watch, beginning=beginning_of(model, Step(model))) as where:
        workers = learn(model, log, where, LoopConfig(batch_size=10, ahead=ahead))
        assert sum(worker.stats.samples for worker in workers) == 900
        assert [shard.samples for shard in where.held] == [900, 900]
    assert all(0 <= one.apart <= most for one in watched)


def test_statistics_of_batch_norm_are_shared() -> None:
    def graph(inputs: dict[str, Any]) -> Any:
        x = keras.layers.BatchNormalization(momentum=0.95)(keras.layers.Concatenate()(list(inputs.values())))
        return keras.layers.Dense(1, activation="sigmoid")(x)

    model = make([stm.Categorical("user", dim=3), stm.Numeric("price")], graph)
    samples = clicks(600)
    with served(2, Async, beginning=beginning_of(model, Step(model))) as where:
        learn(model, {0: samples[::2], 1: samples[1::2]}, where, LoopConfig(batch_size=20))
        shared = np.concatenate([shard.statistics.pull() for shard in where.held])
    alone = stm.Learner(model, batch_size=20)
    alone.learn(samples)
    by_itself = np.concatenate([shard.statistics.pull() for shard in alone._shards])
    means = [i for i, path in enumerate(model.statistics.names) if "moving_mean" in path]
    assert means
    np.testing.assert_allclose(shared, by_itself, rtol=0.3, atol=0.3)
    assert not np.allclose(shared, Step(model).initial_statistics, atol=0.1)
