"""Workers that overlap: moves of weights are averaged with those that others pushed since the pull, and rows add up."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamtrain.ps.client import Client, PendingPull, RowGradients
from streamtrain.ps.clock import PushOutcome, Span
from streamtrain.ps.consistency import Async, Bounded, Consistency
from streamtrain.ps.nodes.shards import RunTemplate
from streamtrain.ps.push import DenseChange
from streamtrain.ps.shard import Shard
from tests.patience import PATIENCE
from tests.ps.counting import DENSE, SPEC, Log, key, plan_of
from tests.ps.served import COUNTING, Served, served

NO_SLOTS = np.empty((0, DENSE), np.float32), np.empty(0, np.float32)


def averaging(reduction: str) -> RunTemplate:
    return replace(COUNTING, spec=replace(SPEC, reduction=reduction))


class Worker:
    """Learns a partition of its own, each batch as one move of every weight and statistic by 1."""

    def __init__(self, of: Served, partition: int) -> None:
        shards = of.shards()
        self.client: Client = shards.client(f"worker {partition}", shards.agree())
        self.client.join()
        self.partition = partition
        self.pulled: deque[tuple[int, int, PendingPull]] = deque()
        self.log: Log = {partition: []}
        self.at = 0

    def pull(self, samples: int) -> None:
        self.log = {self.partition: [*self.log[self.partition], *[[1]] * samples]}
        plan = plan_of(self.log, [Span(self.partition, self.at, self.at + samples)], len(self.client._sessions))
        self.pulled.append((self.at, samples, self.client.pull(plan, len(self.pulled)).wait()))
        self.at += samples

    def push(self, *, pulled: bool = True) -> PushOutcome:
        start, samples, pulling = self.pulled.popleft()
        span = Span(self.partition, start, start + samples)
        plan = plan_of(self.log, [span], len(self.client._sessions))
        ones = np.ones(1, np.uint32)
        gradients = RowGradients(np.full((1, 1), -samples, np.float32), ones * samples, ones)
        change = DenseChange(np.ones(DENSE, np.float32), *NO_SLOTS, 1.0)
        pushing = self.client.push(
            *(plan, [gradients], change, np.ones(2, np.float32)),
            spans=[span],
            watermark=0,
            pulled=pulling if pulled else None,
        )
        (outcome,) = {result.outcome for result in pushing.wait()}
        return outcome


def overtaken(of: Served) -> Worker:
    """A worker that has pulled a batch, since when another has pushed one of the same size."""
    worker, other = Worker(of, 0), Worker(of, 1)
    for one in (worker, other):
        one.pull(8)
    other.push()
    return worker


def weights(of: Served) -> list[float]:
    return [weight for shard in of.held for weight in shard.dense.pull()]


def statistics(of: Served) -> list[float]:
    return [statistic for shard in of.held for statistic in shard.statistics.pull()]


def bounded(shard: Shard) -> Consistency:
    return Bounded(shard, 1 << 30, PATIENCE, lambda: 0.0)


@pytest.mark.parametrize("consistency", [Async, bounded])
@given(
    st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(1, 9)), max_size=24),
    st.sampled_from(["row_sum", "mean", "sum"]),
)
@settings(deadline=None, max_examples=25)
def test_a_move_is_averaged_with_those_since_its_pull(
    consistency: Callable[[Shard], Consistency], turns: list[tuple[int, bool, int]], reduction: str
) -> None:
    """Whoever pulls and pushes when, and up to three batches ahead."""
    with served(2, consistency, beginning=averaging(reduction)) as of:
        workers = [Worker(of, p) for p in range(3)]
        learned: Counter[int] = Counter()
        before: dict[int, deque[int]] = {p: deque() for p in range(3)}  # what others had learned at each pull
        expected = Fraction()
        for p, pulls, samples in turns:
            others = learned.total() - learned[p]
            if pulls and len(workers[p].pulled) < 3:
                workers[p].pull(samples)
                before[p].append(others)
            elif workers[p].pulled:
                size = workers[p].pulled[0][1]
                assert workers[p].push() is PushOutcome.APPLIED
                expected += Fraction(size, size + others - before[p].popleft())
                learned[p] += size
        pushes = sum(shard.pushes[PushOutcome.APPLIED] for shard in of.held) / 2
        np.testing.assert_allclose(weights(of), pushes if reduction == "sum" else float(expected), rtol=1e-5)
        np.testing.assert_allclose(statistics(of), float(expected), rtol=1e-5)
        keys, rows = np.array([key(1)], np.uint64), np.empty((1, 1), np.float32)
        (table,) = (s.tables[0] for s in of.held if s.tables[0].lookup(keys)[0][0]) if learned else (None,)
        if table is not None:
            table.pull(keys, rows)
            assert rows.tolist() == [[learned.total()]], "rows count what all have learned"
        for worker in workers:
            worker.client.close()


def test_a_shard_that_has_lost_samples_since_the_pull_takes_the_whole_move() -> None:
    """It was restored from a checkpoint, so what others learned is not there to average with."""
    with served(1, beginning=averaging("row_sum")) as of:
        worker, other = Worker(of, 0), Worker(of, 1)
        other.pull(8)
        other.push()
        worker.pull(8)
        (shard,) = of.held
        shard.resume(shard.progress()._replace(clock={}), samples=0)
        assert worker.push() is PushOutcome.APPLIED
        assert weights(of) == [2.0] * DENSE


def test_a_worker_that_does_not_say_what_it_pulled_moves_as_before() -> None:
    with served(1, beginning=averaging("row_sum")) as of:
        overtaken(of).push(pulled=False)
        assert weights(of) == [2.0] * DENSE


def test_a_push_that_is_repeated_moves_once() -> None:
    with served(1, beginning=averaging("row_sum")) as of:
        worker = overtaken(of)
        worker.pulled.append(worker.pulled[0])
        assert [worker.push(), worker.push()] == [PushOutcome.APPLIED, PushOutcome.DUPLICATE]
        assert weights(of) == [1.5] * DENSE


@pytest.mark.parametrize(("seen", "moved"), [(0, 0.5), (2**64 - 1, 1.0)])
def test_whatever_a_worker_says_that_it_has_seen_its_move_is_a_share(seen: int, moved: float) -> None:
    """A push may be of anybody: at worst it moves the weights as far as one that nobody overlaps."""
    with served(1, beginning=averaging("row_sum")) as of:
        worker = overtaken(of)
        worker.pulled[0][2].buffers[0].learned = seen
        worker.push()
        assert weights(of) == [1.0 + moved] * DENSE
