"""Sealed channels: what changed up to one moment, read while the table goes on changing."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from streamtrain import _core

Keys = NDArray[np.uint64]
Row = tuple[tuple[float, ...], tuple[float, ...], int, int]
Contents = dict[int, Row]


def u64(values: list[int]) -> Keys:
    return np.array(values, np.uint64)


def some_table(capacity: int = 0) -> _core.Table:
    return _core.Table(3, optimizer="adagrad", rate=0.1, dtype="bfloat16", capacity=capacity, expire_after=5)


def push(table: _core.Table, keys: Keys, time: int = 0) -> None:
    n = len(keys)
    table.push(keys, np.ones((n, table.dim), np.float32), np.ones(n, np.uint32), np.full(n, time, np.uint32))


def as_dict(part: _core.Rows) -> Contents:
    columns = (part.embeddings.tolist(), part.state.tolist(), part.counts.tolist(), part.last_seen.tolist())
    rows = [(tuple(e), tuple(s), c, t) for e, s, c, t in zip(*columns, strict=True)]
    assert len(set(part.keys.tolist())) == len(rows), "each key once"
    return dict(zip(part.keys.tolist(), rows, strict=True))


def contents(table: _core.Table) -> Contents:
    return as_dict(table.scan(0, 1_000_000)[1])


class Drain:
    """What has come out of a channel; each key may come once."""

    def __init__(self, table: _core.Table, channel: int) -> None:
        self.table, self.channel = table, channel
        self.rows: Contents = {}
        self.tombstones: set[int] = set()

    def some(self, max_rows: int) -> None:
        part = self.table.drain(self.channel, max_rows)
        rows, gone = as_dict(part.rows), part.tombstones.tolist()
        assert len(rows) + len(gone) <= max_rows
        assert not (rows.keys() | set(gone)) & (self.rows.keys() | self.tombstones)
        assert len(set(gone)) == len(gone)
        self.rows |= rows
        self.tombstones |= set(gone)

    def all(self, max_rows: int = 100_000) -> "Drain":
        while self.table.pending(self.channel):
            self.some(max_rows)
        return self

    def apply(self, to: Contents) -> None:
        to.update(self.rows)
        for key in self.tombstones:
            to.pop(key, None)


@given(seed=st.integers(0, 2**32), capacity=st.sampled_from([0, 60]), max_rows=st.sampled_from([3, 17, 1000]))
def test_a_sealed_channel_holds_what_changed_until_then(seed: int, capacity: int, max_rows: int) -> None:
    rng = np.random.default_rng(seed)
    table = some_table(capacity)
    universe = rng.integers(0, 2**64, 100, dtype=np.uint64)
    touched: set[int] = set()
    now = 0

    def change() -> None:
        nonlocal now
        now += 1
        keys = rng.choice(universe, 15)
        match rng.integers(0, 5):
            case 0:
                table.remove(keys)
            case 1:
                table.expire(now, 1000)
            case 2:
                values, ones = rng.random((15, 3), np.float32), np.full(15, now, np.uint32)
                table.load(keys, values, values, ones, ones)
                touched.update(keys.tolist())
            case _:
                push(table, keys, now)
                touched.update(keys.tolist())

    def changes() -> None:
        for _ in range(rng.integers(0, 12)):
            change()

    changes()
    channel = table.open_channel()
    before = contents(table)
    touched.clear()
    changes()
    following = table.open_channel()
    table.seal(channel)
    sealed = contents(table)
    expected = {key: row for key, row in sealed.items() if key in touched}
    gone = (before.keys() | touched) - sealed.keys()
    table.begin_snapshot()

    touched.clear()
    drain = Drain(table, channel)
    for _ in range(rng.integers(0, 15)):
        change()
        drain.some(max_rows)
    drain.all(max_rows)
    assert drain.rows == expected
    assert drain.tombstones == gone

    table.close_channel(channel)
    snapshot: Contents = {}
    while (part := table.read_snapshot(max_rows)) is not None:
        snapshot |= as_dict(part)
    assert snapshot == sealed, "a snapshot beside it is its own"
    after = Drain(table, following).all(max_rows)
    now_there = contents(table)
    assert after.rows == {key: row for key, row in now_there.items() if key in touched}
    assert after.tombstones == (sealed.keys() | touched) - now_there.keys()


def test_a_chain_of_checkpoints_gives_the_table() -> None:
    rng = np.random.default_rng(1)
    table = some_table(capacity=3000)
    universe = rng.integers(0, 2**64, 10_000, dtype=np.uint64)
    push(table, universe[:2000])
    channel = table.open_channel()
    copy = contents(table)
    for step in range(1, 6):
        push(table, rng.choice(universe, 1500), step)
        table.remove(rng.choice(universe, 300))
        following = table.open_channel()
        table.seal(channel)
        sealed = contents(table)
        drain = Drain(table, channel)
        drain.some(700)
        push(table, rng.choice(universe, 1500), step)
        table.remove(rng.choice(universe, 300))
        drain.all(700).apply(copy)
        table.close_channel(channel)
        assert copy == sealed
        channel = following


def test_a_row_that_takes_the_place_of_a_removed_one_is_not_reported() -> None:
    table = some_table()
    channel = table.open_channel()
    push(table, u64([1, 2, 3]))
    table.remove(u64([1]))  # before the seal: its place in the queue is free for others
    table.seal(channel)
    table.remove(u64([2]))
    push(table, u64([4, 5, 6]))
    table.remove(u64([4]))
    push(table, u64([1]))
    drain = Drain(table, channel).all(2)
    assert drain.rows.keys() == {2, 3}
    assert drain.tombstones == {1}


def test_channels_sealed_one_after_another() -> None:
    table = some_table()
    channels = []
    for time in (1, 2, 3):
        channels.append(table.open_channel())
        push(table, u64([7, 7 + time]), time)
        table.seal(channels[-1])
    push(table, u64([7, 8, 9, 10]), 4)
    for time, channel in enumerate(channels, 1):
        rows = Drain(table, channel).all().rows
        assert {key: (count, seen) for key, (_, _, count, seen) in rows.items()} == {
            7: (time, time),
            7 + time: (1, time),
        }
        table.close_channel(channel)
    channel = table.open_channel()
    assert table.pending(channel) == 0
    push(table, u64([8]))
    assert Drain(table, channel).all().rows.keys() == {8}


def test_what_is_put_aside_is_counted_as_memory() -> None:
    table = some_table()
    channel = table.open_channel()
    keys = np.arange(1000, dtype=np.uint64)
    push(table, keys)
    table.seal(channel)
    before = table.nbytes
    push(table, keys)
    assert table.nbytes >= before + 1000 * table.stats()["row_bytes"]
    assert table.nbytes == sum(
        table.stats()[part + "_bytes"] for part in ("rows", "index", "dirty", "sketch", "snapshot")
    )
    table.close_channel(channel)
    assert table.stats()["dirty_bytes"] == 0


def test_a_sealed_channel_refuses_changes() -> None:
    table = some_table()
    channel = table.open_channel()
    table.seal(channel)
    with pytest.raises(ValueError, match="sealed"):
        table.mark_dirty(channel, u64([1]))
    with pytest.raises(ValueError, match="sealed"):
        table.seal(channel)
    with pytest.raises(ValueError, match="no such open channel"):
        table.seal(2)
    push(table, u64([1]))
    assert table.pending(channel) == 0


def test_draining_while_others_push() -> None:
    table = some_table()
    keys = np.random.default_rng(2).integers(0, 2**64, 30_000, dtype=np.uint64)
    channel = table.open_channel()
    push(table, keys)
    table.remove(keys[:1000])
    table.seal(channel)
    sealed = contents(table)

    def change() -> None:
        for time in range(5):
            push(table, keys[::-1].copy(), time)
            table.remove(keys[time::7].copy())

    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(change)
        drain = Drain(table, channel).all(10_000)
        changing.result()
    assert drain.rows == sealed
    assert drain.tombstones == set(keys[:1000].tolist())


ONE, OTHER = 1, 2


def happen(table: _core.Table, event: str) -> None:
    if event in ("remove", "another at its id", "again"):
        table.remove(u64([ONE]))
    if event in ("change", "again"):
        push(table, u64([ONE]))
    if event == "another at its id":
        push(table, u64([OTHER]))


EVENTS = ("nothing", "change", "remove", "another at its id", "again")
NONE: set[int] = set()


@pytest.mark.parametrize(
    ("sealed", "begin", "event", "rows", "gone"),
    [
        (False, "clear", "nothing", NONE, NONE),
        (False, "clear", "change", {ONE}, NONE),
        (False, "clear", "remove", NONE, {ONE}),
        (False, "clear", "another at its id", {OTHER}, {ONE}),
        (False, "clear", "again", {ONE}, NONE),
        (False, "set", "nothing", {ONE}, NONE),
        (False, "set", "change", {ONE}, NONE),
        (False, "set", "remove", NONE, {ONE}),
        (False, "set", "another at its id", {OTHER}, {ONE}),
        (False, "set", "again", {ONE}, NONE),
        (False, "removed", "nothing", NONE, {ONE}),
        (False, "removed", "change", {ONE}, NONE),
        *((True, "clear", event, NONE, NONE) for event in EVENTS),
        *((True, "set", event, {ONE}, NONE) for event in EVENTS),
        *((True, "removed", event, NONE, {ONE}) for event in EVENTS),
    ],
)
def test_every_event_in_every_state(sealed: bool, begin: str, event: str, rows: set[int], gone: set[int]) -> None:
    """As the table in dirty.h says; of a sealed channel the row is that of before, of an open one that of after."""
    table = some_table()
    push(table, u64([ONE]))
    channel = table.open_channel()
    if begin == "set":
        push(table, u64([ONE]))
    if begin == "removed":
        push(table, u64([ONE]))
        table.remove(u64([ONE]))
    before = contents(table)
    if sealed:
        table.seal(channel)
    happen(table, event)
    drained = Drain(table, channel).all()
    source = before if sealed else contents(table)
    assert (drained.rows, drained.tombstones) == ({key: source[key] for key in rows}, gone)
    table.close_channel(channel)
    assert [table.open_channel() for _ in range(3)] == [0, 1, 2]
