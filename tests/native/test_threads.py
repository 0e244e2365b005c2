"""Tables and dense vectors that several threads call at once."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

import numpy as np
from numpy.testing import assert_array_equal
from numpy.typing import NDArray

from streamtrain import _core
from tests.patience import PATIENCE, until

Keys = NDArray[np.uint64]


def counting_table(dim: int) -> _core.Table:
    """Return a table whose rows count, in every element, the gradients of -1 that they got."""
    return _core.Table(dim, optimizer="sgd", rate=1.0, init="constant", init_scale=0.0)


def random_keys(seed: int, n: int) -> Keys:
    return np.random.default_rng(seed).integers(0, 2**64, n, dtype=np.uint64)


def push(table: _core.Table, keys: Keys, time: int = 0) -> _core.PushResult:
    n = len(keys)
    gradients = np.full((n, table.dim), -1, np.float32)
    return table.push(keys, gradients, np.ones(n, np.uint32), np.full(n, time, np.uint32))


@contextmanager
def meanwhile(*loops: Callable[[], object]) -> Iterator[None]:
    """Call each function over and over in a thread of its own; what they raise is raised at the end."""
    stop = Event()

    def run(loop: Callable[[], object]) -> None:
        until(stop.is_set, doing=loop, told=lambda: "nobody stopped this: someone waits for ever")

    with ThreadPoolExecutor(len(loops)) as pool:
        running = [pool.submit(run, loop) for loop in loops]
        try:
            yield
        finally:
            stop.set()
        for one in running:
            one.result()


def test_nobody_sees_half_a_row() -> None:
    table = counting_table(64)
    keys = random_keys(1, 5000)

    def pull() -> None:
        rows = table.pull(keys)
        assert_array_equal(rows, np.broadcast_to(rows[:, :1], rows.shape))

    def scan() -> None:
        _, part = table.scan(0, 10_000)
        assert_array_equal(part.embeddings[:, 0], part.counts)
        assert_array_equal(part.embeddings, np.broadcast_to(part.embeddings[:, :1], part.embeddings.shape))

    with meanwhile(pull, scan):
        for _ in range(100):
            push(table, keys)
    assert_array_equal(table.pull(keys), np.full((5000, 64), 100, np.float32))


def test_no_push_is_lost() -> None:
    table = counting_table(2)
    common, *own = random_keys(2, 40_000).reshape(4, 10_000)

    def work(mine: Keys) -> list[int]:
        return [push(table, np.concatenate([common, mine])).applied for _ in range(20)]

    with ThreadPoolExecutor(3) as pool:
        applied = list(pool.map(work, own))
    assert applied == [[20_000] * 20] * 3
    assert len(table) == 40_000
    for keys, times in [(common, 60), *((mine, 20) for mine in own)]:
        assert_array_equal(table.lookup(keys)[1], np.full(10_000, times, np.uint32))
        assert_array_equal(table.pull(keys), np.full((10_000, 2), times, np.float32))
    assert table.stats()["inserted"] == 40_000


def test_a_pull_goes_in_between_the_parts_of_a_push() -> None:
    table = counting_table(4)
    keys = random_keys(3, 1_000_000)
    ends = keys[[0, -1]]
    with ThreadPoolExecutor(1) as pool:
        pushed = pool.submit(push, table, keys)
        while not (found := table.lookup(ends)[0])[0]:
            assert not pushed.done() or pushed.result()
        assert not found[1], "the first row was seen before the last one was there"
    assert table.lookup(keys)[0].all()


def test_a_stream_of_pulls_does_not_keep_a_push_out() -> None:
    table = counting_table(8)
    keys = random_keys(4, 20_000)
    with meanwhile(*[lambda: table.pull(keys)] * 4):
        for _ in range(50):
            push(table, keys[:10])
    assert_array_equal(table.lookup(keys[:10])[1], np.full(10, 50, np.uint32))


def test_positions_and_counts_are_those_of_the_whole_call() -> None:
    table = _core.Table(1, optimizer="sgd", rate=1.0, capacity=3000)
    keys = random_keys(5, 20_000)
    gradients = np.ones((20_000, 1), np.float32)
    gradients[[0, 4095, 4096, 8192, 19_999]] = np.nan
    ones = np.ones(20_000, np.uint32)
    result = table.push(keys, gradients, ones, ones)
    assert result.non_finite.tolist() == [0, 4095, 4096, 8192, 19_999]
    assert (result.applied, result.inserted, result.evicted) == (19_995, 19_995, 16_995)
    assert len(table) == 3000


def test_a_snapshot_is_of_one_moment() -> None:
    table = counting_table(8)
    keys, others = random_keys(6, 40_000).reshape(2, 20_000)
    push(table, keys)
    some = set(keys[:100].tolist())

    def change() -> None:
        push(table, others)
        push(table, keys)
        table.remove(others)

    with meanwhile(change):
        for _ in range(5):
            table.begin_snapshot()
            seen, counts = [], []
            while (part := table.read_snapshot(10_000)) is not None:
                assert_array_equal(part.embeddings, np.broadcast_to(part.counts[:, None], part.embeddings.shape))
                seen += part.keys.tolist()
                counts += part.counts.tolist()
            table.end_snapshot()
            assert len(set(seen)) == len(seen)
            assert set(keys.tolist()) <= set(seen)
            of_keys = [count for key, count in zip(seen, counts, strict=True) if key in some]
            assert max(of_keys) - min(of_keys) <= 1, "at most one push was going on"


def test_a_consumer_of_changes_ends_up_with_the_table() -> None:
    table = counting_table(1)
    keys = random_keys(7, 12_000)
    channel = table.open_channel()
    copy: dict[int, int] = {}

    def consume() -> None:
        part = table.drain(channel, 100_000)
        changed, gone = part.rows.keys.tolist(), part.tombstones.tolist()
        assert len(set(changed + gone)) == len(changed + gone), "each key once"
        copy.update(zip(changed, part.rows.counts.tolist(), strict=True))
        for key in gone:
            copy.pop(key, None)

    with meanwhile(consume):
        for step in range(30):
            push(table, keys[step * 200 :], time=step)
            table.remove(keys[: step * 300])
    while table.pending(channel):
        consume()
    found, counts, _ = table.lookup(keys)
    assert copy == dict(zip(keys[found].tolist(), counts[found].tolist(), strict=True))


def test_channels_open_and_close_while_others_push() -> None:
    table = counting_table(1)
    keys = random_keys(8, 10_000)
    with meanwhile(lambda: push(table, keys), table.stats):
        for _ in range(50):
            channel = table.open_channel()
            assert set(table.drain(channel, 100_000).rows.keys.tolist()) <= set(keys.tolist())
            table.close_channel(channel)
    channel = table.open_channel()
    assert table.pending(channel) == 0
    push(table, keys)
    assert table.pending(channel) == 10_000


def test_dense_updates_are_seen_whole_and_none_is_lost() -> None:
    size = 20_000
    dense = _core.DenseVector(np.zeros(size, np.float32), optimizer="sgd", rate=1.0)
    gradient = np.full(size, -1, np.float32)

    def pull() -> None:
        values = dense.pull()
        assert values.min() == values.max()

    with meanwhile(pull, pull), ThreadPoolExecutor(2) as pool:
        applied = list(pool.map(lambda _: dense.apply(gradient), range(500)))
    assert all(applied)
    assert dense.pull()[0] == 500


def test_threads_that_share_a_planner_get_their_own_plans() -> None:
    planner = _core.Planner([(0, "sum", 0)], [1], 3)
    batches = [random_keys(seed, n) for seed, n in ((1, 30_000), (2, 10), (3, 5000), (4, 70_000))]

    def plan_of(keys: Keys) -> _core.Plan:
        n = len(keys)
        return planner.plan(keys, np.array([0, n]), np.arange(n + 1, dtype=np.int32)[None], np.zeros(n))

    expected = [plan_of(keys).keys(0) for keys in batches]

    def plan(i: int) -> None:
        for _ in range(30):
            assert_array_equal(plan_of(batches[i]).keys(0), expected[i])

    with ThreadPoolExecutor(4) as pool:
        for one in [pool.submit(plan, i) for i in range(4)]:
            one.result(PATIENCE)
