"""The native embedding table against its NumPy oracle, and the properties that no oracle states."""

# The names of option types exist only in the stub, so annotations stay unevaluated.
from __future__ import annotations

from collections.abc import Iterable
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.testing import assert_array_equal
from numpy.typing import NDArray

from streamtrain import _core
from tests.native.examples import examples
from tests.oracles import table as oracle

OPTIMIZERS: list[_core.OptimizerName] = ["sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl"]
DTYPES: list[_core.Dtype] = ["float32", "bfloat16", "float16"]


def u64(values: Iterable[int]) -> NDArray[np.uint64]:
    return np.array(list(values), np.uint64)


def u32(values: Iterable[int]) -> NDArray[np.uint32]:
    return np.array(list(values), np.uint32)


def random_keys(rng: np.random.Generator, n: int) -> NDArray[np.uint64]:
    return rng.integers(0, 2**64, n, dtype=np.uint64)


def push(table: _core.Table, keys: NDArray[np.uint64], time: int = 0, value: float = -1.0) -> _core.PushResult:
    """Push the same gradient element, count 1 and time for every key."""
    n = len(keys)
    gradients = np.full((n, table.dim), value, np.float32)
    return table.push(keys, gradients, np.ones(n, np.uint32), np.full(n, time, np.uint32))


def counting_table(dim: int = 1, **options: Any) -> _core.Table:
    """Return a table whose rows count the gradients of -1 that they got."""
    return _core.Table(dim, optimizer="sgd", rate=1.0, init="constant", init_scale=0.0, **options)


def contents(table: _core.Table, max_rows: int = 1000) -> dict[int, oracle.Row]:
    rows: dict[int, oracle.Row] = {}
    cursor: int | None = 0
    while cursor is not None:
        cursor, part = table.scan(cursor, max_rows)
        collect(part, rows)
    return rows


def collect(part: _core.Rows, into: dict[int, oracle.Row]) -> None:
    for i, key in enumerate(part.keys.tolist()):
        assert key not in into, "each key once"
        into[key] = oracle.Row(part.embeddings[i], part.state[i], int(part.counts[i]), int(part.last_seen[i]))


def assert_same_rows(actual: dict[int, oracle.Row], expected: dict[int, oracle.Row]) -> None:
    assert actual.keys() == expected.keys()
    for key, row in expected.items():
        assert_same_row(actual[key], row)


def assert_same_row(actual: oracle.Row, expected: oracle.Row) -> None:
    assert_array_equal(actual.embedding, expected.embedding)
    assert_array_equal(actual.state, expected.state)
    assert (actual.count, actual.last_seen) == (expected.count, expected.last_seen)


# Few keys, so that they meet again; the last ones share segment, home and tag.
KEYS = st.sampled_from(
    [0, 1, 2**64 - 1, *(oracle.mix64(i) for i in range(36)), *_core.keys_at(np.arange(6, dtype=np.uint64)).tolist()]
)
GRADIENTS = st.floats(-100, 100, width=32) | st.sampled_from([np.inf, -np.inf, np.nan, 1e30, 1e-30, 0.0])


SLOTS = [(0, 1 << 16), (0, 1 << 15), (1 << 15, 1 << 16), (1 << 14, 3 << 14), (0, 1), ((1 << 16) - 1, 1 << 16)]


def are_of(keys: Iterable[int], slots: tuple[int, int]) -> set[int]:
    """Those keys whose hash slots are within these."""
    return {key for key in keys if slots[0] <= key >> 48 < slots[1]}


class TableMachine(RuleBasedStateMachine):
    """Random calls on both; everything that can be seen must be equal, bit for bit.

    The oracle knows no slots: what is foreign is kept beside it. A channel may also have what was foreign in between.
    """

    channels = Bundle("channels")
    changes_slots = False
    on_disk = False

    @initialize(
        optimizer=st.sampled_from(OPTIMIZERS),
        dtype=st.sampled_from(DTYPES),
        dim=st.sampled_from([1, 3, 8, 13]),
        init=st.sampled_from(["uniform", "constant"]),
        seed=st.integers(0, 2**64 - 1),
        min_count=st.sampled_from([1, 1, 2, 5]),
        expire_after=st.sampled_from([0, 10]),
        l1=st.sampled_from([0.0, 0.5]),
        decay=st.sampled_from([1.0, 0.75]),
        memory=st.sampled_from([1, 1, 28_000, 32_000]),
    )
    def start(self, memory: int, **options: Any) -> None:
        options |= {"rate": 0.5, "init_scale": 0.25, "sketch_width": 64, "l2": 0.1}
        self.options = options
        self.folder = TemporaryDirectory()
        disk: dict[str, Any] = {"memory": memory, "folder": self.folder.name, "segment_bytes": 2048}
        self.table = _core.Table(**options, **disk if self.on_disk else {})
        self.oracle = oracle.Table(**options)
        self.slots = SLOTS[0]
        self.foreign: dict[int, oracle.Row] = {}
        self.swept = True
        self.maybe: set[int] = set()  # keys that channels may have or not
        self.ids: dict[int, int] = {}
        self.snapshot: dict[int, oracle.Row] | None = None
        self.read: dict[int, oracle.Row] = {}
        self.now = 100
        self.fill()

    def fill(self) -> None:
        """What it begins with."""

    @rule(data=st.data(), rate=st.sampled_from([None, None, 0.125]))
    def push(self, data: st.DataObject, rate: float | None) -> None:
        keys = self.own(data.draw(st.lists(KEYS, max_size=12)))
        n = len(keys)
        gradients = data.draw(hnp.arrays(np.float32, (n, self.table.dim), elements=GRADIENTS, fill=st.just(0.5)))
        counts = data.draw(st.lists(st.sampled_from([0, 1, 1, 3, 300, 2**32 - 1]), min_size=n, max_size=n))
        times = data.draw(st.lists(st.integers(self.now - 10, self.now), min_size=n, max_size=n))
        self.now += 3
        result = self.table.push(u64(keys), gradients, u32(counts), u32(times), rate)
        expected = self.oracle.push(keys, gradients, counts, times, rate)
        assert (result.applied, result.inserted, result.unadmitted, result.non_finite.tolist()) == expected

    @rule(keys=st.lists(KEYS, max_size=12))
    def pull(self, keys: list[int]) -> None:
        keys = keys if self.swept else self.own(keys)
        mine, self.oracle.rows = self.oracle.rows, self.oracle.rows | self.foreign
        assert_array_equal(self.table.pull(u64(keys)), self.oracle.pull(keys))
        self.oracle.rows = mine

    def own(self, keys: Iterable[int]) -> list[int]:
        return [key for key in keys if are_of([key], self.slots)]

    @precondition(lambda self: self.changes_slots)
    @rule(slots=st.sampled_from(SLOTS), visits=st.sampled_from([0, 40, 60, 1000]))
    def set_slots(self, slots: tuple[int, int], visits: int) -> None:
        if self.snapshot is not None or any(one.sealed is not None for one in self.oracle.channels.values()):
            if slots != self.slots and self.oracle.rows:
                with pytest.raises(RuntimeError, match="snapshot"):
                    self.table.set_slots(*slots)
            return
        self.table.set_slots(*slots)
        every = self.oracle.rows | (self.foreign if self.swept else {})
        if not self.swept:  # they may be there or not: what is not own is taken away, and the rest made sure of
            self.table.remove(u64(self.foreign))
        mine = are_of(every, slots)
        self.maybe |= (every.keys() ^ mine) | are_of(self.foreign, slots)
        self.maybe |= {key for one in self.oracle.channels.values() for key in one.changed | one.tombstones}
        self.oracle.rows = {key: every[key] for key in mine}
        self.foreign = {key: every[key] for key in every.keys() - mine}
        self.slots, self.swept = slots, False
        for channel in self.ids:  # as whoever gains rows does: what is own has to come, or not to be there
            keys = self.own(self.oracle.channels[channel].changed | self.oracle.channels[channel].tombstones)
            self.table.mark_dirty(channel, u64(keys))
            self.oracle.channels[channel] = oracle.Channel()
            self.oracle.mark_dirty(channel, keys)
        self.sweep(visits)

    @precondition(lambda self: not self.swept)
    @rule(max_rows=st.sampled_from([1, 5, 20, 1000]))
    def sweep(self, max_rows: int) -> None:
        if not self.swept:
            self.maybe |= self.oracle.rows.keys()  # as rows that get other ids may count as changed
        if not self.table.sweep(max_rows) and not self.swept:
            self.swept, self.foreign = True, {}

    @rule(rows=st.integers(0, 2000))
    def expect(self, rows: int) -> None:
        self.table.expect(rows)

    @rule(keys=st.lists(KEYS, max_size=6), data=st.data(), cold=st.booleans(), only_new=st.booleans())
    def load(self, keys: list[int], data: st.DataObject, cold: bool, only_new: bool) -> None:
        keys = keys if self.swept else self.own(keys)
        n = len(keys)
        values = st.floats(-1e6, 1e6, width=32)
        embeddings = data.draw(hnp.arrays(np.float32, (n, self.table.dim), elements=values))
        state = np.abs(data.draw(hnp.arrays(np.float32, (n, self.table.state_size), elements=values)))
        if self.oracle.optimizer.name == "adam":
            state[:, -1] = np.arange(n) % 9  # a number of updates
        new = len(set(keys) - self.oracle.rows.keys() - self.foreign.keys())
        counts, times = range(7, 7 + n), range(self.now, self.now + n)
        assert (
            self.table.load(u64(keys), embeddings, state, u32(counts), u32(times), cold=cold, only_new=only_new) == new
        )
        aside = oracle.Table(**self.options)  # of what is foreign
        for key, *row in zip(keys, embeddings, state, counts, times, strict=True):
            if only_new and key in self.oracle.rows.keys() | self.foreign.keys() | aside.rows.keys():
                continue
            (self.oracle if are_of([key], self.slots) else aside).load(key, oracle.Row(*row))
        self.foreign |= aside.rows

    @rule(keys=st.lists(KEYS, max_size=6))
    def remove(self, keys: list[int]) -> None:
        keys = keys if self.swept else self.own(keys)
        gone = {key for key in keys if self.foreign.pop(key, None) is not None}
        assert self.table.remove(u64(keys)) == self.oracle.remove(set(keys) - gone) + len(gone)

    @rule()
    def expire(self) -> None:
        assert self.table.expire(self.now, 1000) == self.oracle.expire(self.now)

    @rule(target=channels)
    def open_channel(self) -> int:
        if len(self.ids) == 3:
            with pytest.raises(RuntimeError, match="open"):
                self.table.open_channel()
            return -1
        channel = self.table.open_channel()
        assert channel not in self.oracle.channels
        self.oracle.channels[channel] = oracle.Channel()
        self.ids[channel] = channel
        return channel

    @rule(channel=channels)
    def close_channel(self, channel: int) -> None:
        if channel in self.ids:
            self.table.close_channel(channel)
            del self.ids[channel], self.oracle.channels[channel]

    @rule(channel=channels)
    def seal(self, channel: int) -> None:
        if channel not in self.ids:
            return
        if self.oracle.channels[channel].sealed is not None:
            with pytest.raises(ValueError, match="sealed"):
                self.table.seal(channel)
            return
        self.table.seal(channel)
        self.oracle.seal(channel)

    @rule(channel=channels, max_rows=st.sampled_from([1, 5, 1000]), fail=st.booleans())
    def drain(self, channel: int, max_rows: int, fail: bool) -> None:
        if channel not in self.ids:
            return
        expected = self.oracle.channels[channel]
        part = self.table.drain(channel, max_rows)
        rows: dict[int, oracle.Row] = {}
        collect(part.rows, rows)
        tombstones = part.tombstones.tolist()
        assert len(rows) + len(tombstones) <= max_rows
        assert len(set(tombstones)) == len(tombstones)
        assert set(self.own([*rows, *tombstones])) == {*rows, *tombstones}
        assert set(tombstones) <= expected.tombstones | self.maybe
        assert rows.keys() <= expected.changed | self.maybe
        for key, row in rows.items():
            assert_same_row(row, (self.oracle.rows if expected.sealed is None else expected.sealed)[key])
        expected.tombstones -= set(tombstones)
        expected.changed -= rows.keys()
        if self.table.pending(channel) == 0:
            assert not expected.tombstones
            assert not expected.changed
        if fail:
            keys = [*rows, *tombstones]
            if expected.sealed is not None:
                with pytest.raises(ValueError, match="sealed"):
                    self.table.mark_dirty(channel, u64(keys))
                return
            self.table.mark_dirty(channel, u64(keys))
            self.oracle.mark_dirty(channel, keys)

    @precondition(lambda self: self.snapshot is None)
    @rule()
    def begin_snapshot(self) -> None:
        self.table.begin_snapshot()
        self.snapshot = dict(self.oracle.rows)  # the oracle replaces rows and never changes one
        self.read = {}

    @precondition(lambda self: self.snapshot is not None)
    @rule(max_rows=st.sampled_from([1, 5, 1000]))
    def read_snapshot(self, max_rows: int) -> None:
        assert self.snapshot is not None
        part = self.table.read_snapshot(max_rows)
        if part is not None:
            assert len(part) <= max_rows
            collect(part, self.read)
            return
        assert_same_rows(self.read, self.snapshot)
        self.table.end_snapshot()
        self.snapshot = None

    @precondition(lambda self: self.snapshot is not None)
    @rule()
    def abandon_snapshot(self) -> None:
        self.table.end_snapshot()
        self.snapshot = None

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "table"):
            return
        if self.swept:
            assert len(self.table) == len(self.oracle.rows)
        assert_same_rows(contents(self.table, 7), self.oracle.rows)
        if self.oracle.min_count > 1:
            assert self.table.admission().tobytes() == self.oracle.sketch.bytes()

    def teardown(self) -> None:
        if not hasattr(self, "table"):
            return
        for channel in self.ids:
            while self.table.pending(channel):
                self.drain(channel, 4, fail=False)
            left = self.oracle.channels[channel]
            assert (left.changed, left.tombstones) == (set(), set())
        while self.snapshot is not None:
            self.read_snapshot(3)
        self.folder.cleanup()


class SlotsMachine(TableMachine):
    """The same, of a table that begins full, gets other slots and is swept."""

    changes_slots = True

    def fill(self) -> None:
        keys = [oracle.mix64(i) for i in range(36)]
        embeddings, state = (np.ones((36, width), np.float32) for width in (self.table.dim, self.table.state_size))
        self.table.load(u64(keys), embeddings, state, u32([2] * 36), u32([100] * 36))
        for key in keys:
            self.oracle.load(key, oracle.Row(embeddings[0], state[0], 2, 100))
        self.ids[0] = self.table.open_channel()
        self.oracle.channels[0] = oracle.Channel()


class DiskMachine(TableMachine):
    """The same, of a table with most of its rows on disk."""

    on_disk = True


class SlotsOnDiskMachine(SlotsMachine):
    """Slots that change in a table with most of its rows on disk."""

    on_disk = True


TestTableMachine = TableMachine.TestCase
TestSlotsMachine = SlotsMachine.TestCase
TestDiskMachine = DiskMachine.TestCase
TestSlotsOnDiskMachine = SlotsOnDiskMachine.TestCase
for machine in (TestTableMachine, TestSlotsMachine, TestDiskMachine, TestSlotsOnDiskMachine):
    machine.settings = settings(
        max_examples=examples(60), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )
del machine


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dim", [1, 7, 16, 40])
def test_many_updates_equal_the_oracle(optimizer: _core.OptimizerName, dtype: _core.Dtype, dim: int) -> None:
    options: dict[str, Any] = {"optimizer": optimizer, "rate": 0.05, "seed": 5, "dtype": dtype, "l1": 0.01, "l2": 0.01}
    table, expected = _core.Table(dim, **options), oracle.Table(dim, **options)
    rng = np.random.default_rng(dim)
    keys = random_keys(rng, 20)
    for step in range(20):
        chosen = rng.choice(keys, 10)  # with duplicates
        scale = 10.0 ** rng.integers(-6, 6)
        gradients = (rng.standard_normal((10, dim)) * scale).astype(np.float32)
        counts, times = rng.integers(0, 5, 10), np.full(10, step)
        table.push(chosen, gradients, counts.astype(np.uint32), times.astype(np.uint32))
        expected.push(chosen.tolist(), gradients, counts.tolist(), times.tolist())
    assert_same_rows(contents(table), expected.rows)


def test_adam_long_after_the_corrections_have_become_one() -> None:
    options: dict[str, Any] = {"optimizer": "adam", "rate": 0.05, "beta1": 0.5, "beta2": 0.75}
    table, expected = _core.Table(2, **options), oracle.Table(2, **options)
    gradients = np.linspace(-1, 1, 400, dtype=np.float32).reshape(200, 2)
    table.push(np.full(200, 9, np.uint64), gradients, np.ones(200, np.uint32), np.ones(200, np.uint32))
    expected.push([9] * 200, gradients, [1] * 200, [1] * 200)
    assert_same_rows(contents(table), expected.rows)


# First values


def test_birth_golden_values() -> None:
    """These values are a contract: published dictionaries and running models agree on them."""
    keys = u64([0, 1, 0x9E3779B97F4A7C15, 2**64 - 1])
    expected = [
        [0.1922377347946167, -0.6792693138122559, -0.6672044992446899],
        [0.9325690269470215, -0.4766498804092407, -0.3554729223251343],
        [-0.3134162425994873, 0.9114934206008911, -0.02730095386505127],
        [0.07318782806396484, 0.44108426570892334, 0.1054377555847168],
    ]
    assert_array_equal(_core.birth(keys, 3, seed=42, init_scale=1.0), np.array(expected, np.float32))


def test_mix64_is_the_finaliser_of_splitmix64() -> None:
    """The first outputs of the reference generator for seed 0."""
    outputs = [oracle.mix64((i * oracle.GOLDEN) % 2**64) for i in (1, 2)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


@given(
    key=st.integers(0, 2**64 - 1),
    seed=st.integers(0, 2**64 - 1),
    scale=st.floats(0, 10, width=32),
    dtype=st.sampled_from(DTYPES),
    init=st.sampled_from(["uniform", "constant"]),
)
def test_birth_equals_the_oracle_and_is_what_pull_reads(
    key: int, seed: int, scale: float, dtype: _core.Dtype, init: _core.Init
) -> None:
    expected = oracle.birth(key, 9, seed=seed, init=init, init_scale=scale, dtype=dtype)
    born = _core.birth(u64([key]), 9, seed=seed, init=init, init_scale=scale, dtype=dtype)
    assert_array_equal(born[0], expected)
    table = _core.Table(9, optimizer="sgd", rate=0.0, seed=seed, init=init, init_scale=scale, dtype=dtype)
    assert_array_equal(table.pull(u64([key])), born)
    assert len(table) == 0, "reading inserts nothing"
    push(table, u64([key]))  # with rate zero
    assert_array_equal(table.pull(u64([key])), born)


def test_stochastic_rounding_keeps_the_mean() -> None:
    """4096 steps of 2^-10 are lost by rounding to nearest bfloat16 once the sum is 1; on average they must add up."""
    for dtype in DTYPES[1:]:
        table = counting_table(64, dtype=dtype)
        for _ in range(4096):
            push(table, u64([5]), value=-(2.0**-10 if dtype == "bfloat16" else 2.0**-13))
        goal = 4.0 if dtype == "bfloat16" else 0.5
        assert abs(float(table.pull(u64([5])).mean()) / goal - 1) < 0.02


def test_float16_saturates() -> None:
    table = _core.Table(2, optimizer="sgd", rate=1.0, dtype="float16")
    table.push(u64([1]), np.array([[1e6, -1e6]], np.float32), u32([1]), u32([1]))
    assert_array_equal(table.pull(u64([1])), [[-65504, 65504]])


def test_every_half_survives_loading() -> None:
    for dtype in DTYPES[1:]:
        bits = np.arange(2**16, dtype=np.uint32)
        values = (bits << 16).view(np.float32) if dtype == "bfloat16" else bits.astype(np.uint16).view(np.float16)
        finite = values[np.isfinite(values)].astype(np.float32)[:, None]
        n = len(finite)
        table = _core.Table(1, optimizer="sgd", rate=0.0, dtype=dtype)
        keys = np.arange(n, dtype=np.uint64) * np.uint64(oracle.GOLDEN)
        table.load(keys, finite, np.zeros((n, 0), np.float32), np.ones(n, np.uint32), np.ones(n, np.uint32))
        assert_array_equal(table.pull(keys).view(np.uint32), finite.view(np.uint32))
        push(table, keys)  # rate zero: stochastic rounding must keep what needs no rounding
        assert_array_equal(table.pull(keys), finite)


# A counting model: what a stream does to the rows must not depend on how it is cut


@given(
    st.lists(st.integers(0, 50), max_size=200),
    st.integers(1, 40),
    st.sampled_from([1, 2, 7]),
)
def test_split_invariance(stream: list[int], batch: int, shards: int) -> None:
    keys = u64(oracle.mix64(i) for i in stream)
    tables = [counting_table() for _ in range(shards)]
    for start in range(0, len(keys), batch):
        part = keys[start : start + batch]
        owners = _core.shards_of(part, shards)
        for shard, table in enumerate(tables):
            push(table, part[owners == shard], time=start)
    merged: dict[int, oracle.Row] = {}
    for table in tables:
        for key, row in contents(table).items():
            assert key not in merged
            merged[key] = row
    counts = {key: keys.tolist().count(key) for key in set(keys.tolist())}
    assert {key: row.count for key, row in merged.items()} == counts
    assert {key: float(row.embedding[0]) for key, row in merged.items()} == counts


def test_growth_equals_a_dict() -> None:
    """Through many sizes of every segment, with removals in between."""
    rng = np.random.default_rng(1)
    table = counting_table()
    expected: dict[int, int] = {}
    universe = random_keys(rng, 150_000)
    for step in range(40):
        keys = rng.choice(universe, 10_000)
        push(table, keys)
        for key in keys.tolist():
            expected[key] = expected.get(key, 0) + 1
        gone = rng.choice(universe, 2_000)
        removed = sum(expected.pop(key, None) is not None for key in gone.tolist())
        assert table.remove(gone) == removed, step
    assert len(table) == len(expected)
    found, counts, _ = table.lookup(universe)
    assert_array_equal(found, [key in expected for key in universe.tolist()])
    assert_array_equal(counts, [expected.get(key, 0) for key in universe.tolist()])
    assert_array_equal(table.pull(universe)[:, 0], counts.astype(np.float32))
    assert {k: r.count for k, r in contents(table).items()} == expected


def test_memory_of_small_and_large_tables() -> None:
    rng = np.random.default_rng(2)
    table = _core.Table(16, optimizer="adagrad", rate=0.1)
    push(table, random_keys(rng, 100))
    assert table.nbytes < 100_000
    for _ in range(30):
        push(table, random_keys(rng, 10_000))
    assert table.nbytes / len(table) <= 1.25 * (8 + 64 + 64)
    stats = table.stats()
    assert table.nbytes == sum(stats[part + "_bytes"] for part in ("rows", "index", "dirty", "sketch", "snapshot"))


def test_pull_into_a_slice() -> None:
    table = counting_table(4)
    push(table, u64([1, 2]))
    out = np.full((6, 4), 9, np.float32)
    result = table.pull(u64([2, 3, 1]), out=out[2:5])
    assert np.shares_memory(result, out)
    assert_array_equal(out[:, 0], [9, 9, 1, 0, 1, 9])
    assert_array_equal(_core.birth(u64([5]), 4, seed=0, init="constant", init_scale=2.0, out=out[:1]), [[2] * 4])


def test_empty_calls() -> None:
    table = _core.Table(3, optimizer="adam", rate=0.1, min_count=2)
    none = u64([])
    assert table.pull(none).shape == (0, 3)
    result = push(table, none)
    assert (result.applied, result.inserted, result.unadmitted, len(result.non_finite)) == (0, 0, 0, 0)
    assert table.remove(none) == 0
    assert [len(column) for column in table.lookup(none)] == [0, 0, 0]
    cursor, rows = table.scan(0, 10)
    assert cursor is None
    assert (rows.embeddings.shape, rows.state.shape) == ((0, 3), (0, 7))
    assert table.load(none, rows.embeddings, rows.state, rows.counts, rows.last_seen) == 0
    channel = table.open_channel()
    table.mark_dirty(channel, none)
    assert len(table.drain(channel, 10).rows) == 0
    table.begin_snapshot()
    assert table.read_snapshot(5) is None
    table.end_snapshot()
    assert table.expire(100, 10) == 0


# Admission


def test_admission_drops_rare_keys_only() -> None:
    table = counting_table(min_count=3, sketch_width=1 << 12)
    rare, common = random_keys(np.random.default_rng(3), 200).reshape(2, 100)
    for _ in range(4):
        push(table, common)
    result = push(table, rare)
    assert len(table) == 100
    assert (result.applied, result.unadmitted) == (0, 100)
    found, counts, _ = table.lookup(common)
    assert found.all()
    assert_array_equal(counts, np.full(100, 2, np.uint32))
    assert_array_equal(table.pull(rare), np.zeros((100, 1), np.float32))
    assert table.stats()["unadmitted"] == 300


def test_sketch_ages_without_stalling_and_as_the_oracle_does() -> None:
    table = counting_table(min_count=200, sketch_width=128)
    expected = oracle.Sketch(128)
    keys = random_keys(np.random.default_rng(4), 5000)
    halved = False
    for part in keys.reshape(50, 100):
        push(table, part)
        for key in part.tolist():
            expected.add(key, 1)
            halved |= expected.total < 8 * 64 + 8 and expected.cursor == 64
        assert table.admission().tobytes() == expected.bytes()
    assert halved


def test_sketches_merge() -> None:
    rng = np.random.default_rng(5)
    keys = random_keys(rng, 300)
    first, second, copy = (counting_table(min_count=250, sketch_width=256) for _ in range(3))
    for _ in range(3):
        push(first, keys)
        push(second, keys)
    copy.merge_admission(first.admission())
    assert_array_equal(copy.admission(), first.admission())
    copy.merge_admission(second.admission())
    merged = copy.admission()[16:].astype(int)
    one, two = (table.admission()[16:].astype(int) for table in (first, second))
    assert np.all(np.abs(merged - (one + two)) <= 255)
    assert np.all(merged <= one + two), "unfinished ageing only makes counters smaller"
    for _ in range(300):
        copy.merge_admission(second.admission())
    assert copy.admission()[16:].max() == 255
    with pytest.raises(ValueError, match="width"):
        copy.merge_admission(first.admission()[:-1].copy())
    assert counting_table().admission().size == 0
    with pytest.raises(ValueError, match="sketch"):
        counting_table().merge_admission(first.admission())


# Expiry and capacity


def test_expiry_visits_only_so_many_rows_a_call() -> None:
    table = counting_table(expire_after=10)
    keys = random_keys(np.random.default_rng(6), 1000)
    push(table, keys[:500], time=100)
    push(table, keys[500:], time=105)
    channel = table.open_channel()
    assert table.expire(110, 10_000) == 0, "seen exactly expire_after seconds ago is not too old"
    removed = [table.expire(111, 100) for _ in range(10)]
    assert sum(removed) == 500
    assert max(removed) <= 100
    assert set(table.drain(channel, 10_000).tombstones.tolist()) == set(keys[:500].tolist())
    assert len(table) == 500


def test_rows_whose_time_was_not_kept_expire_from_their_first_visit_on() -> None:
    keys = random_keys(np.random.default_rng(6), 100)
    before = counting_table()
    push(before, keys, time=100)
    _, rows = before.scan(0, 100)
    assert not rows.last_seen.any()
    assert not before.lookup(keys)[2].any()
    table = counting_table(expire_after=10)
    table.load(rows.keys, rows.embeddings, rows.state, rows.counts, rows.last_seen)
    channel = table.open_channel()
    table.begin_snapshot()
    assert table.expire(200, 1000) == 0
    assert {row.last_seen for row in contents(table).values()} == {200}
    seen: dict[int, oracle.Row] = {}
    collect(table.drain(channel, 1000).rows, seen)
    assert_same_rows(seen, contents(table))  # so that a checkpoint has it
    part = table.read_snapshot(1000)
    assert part is not None
    assert not part.last_seen.any()
    table.end_snapshot()
    push(table, keys[:40], time=205)
    assert table.expire(210, 1000) == 0
    assert table.expire(211, 1000) == 60
    assert set(contents(table)) == set(keys[:40].tolist())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 3, 16])
def test_bytes_of_a_row(dim: int, dtype: _core.Dtype) -> None:
    size = 8 + 4 + dim * (4 if dtype == "float32" else 2)
    optimizers: list[tuple[int, _core.OptimizerName]] = [(0, "sgd"), (4, "rowwise_adagrad")]
    for state, optimizer in optimizers:
        choices: list[tuple[int, dict[str, Any]]] = [(0, {}), (4, {"expire_after": 9}), (4, {"capacity": 9})]
        for time, options in choices:
            table = _core.Table(dim, optimizer=optimizer, rate=0.1, dtype=dtype, **options)
            assert table.stats()["row_bytes"] == -(-size // 4) * 4 + state + time


def test_capacity_takes_the_oldest_of_a_small_table_first() -> None:
    """Up to 4096 rows the sample is the table: what goes is among the oldest eighth (or more if it must)."""
    rng = np.random.default_rng(7)
    table = counting_table(capacity=2000)
    channel = table.open_channel()
    alive: dict[int, int] = {}
    for time in range(1, 100):
        keys = random_keys(rng, 100)
        excess = max(0, len(alive) + 100 - 2000)
        alive |= dict.fromkeys(keys.tolist(), time)
        result = push(table, keys, time=time)
        assert result.evicted == excess
        assert len(table) == min(len(alive), 2000)
        gone = table.drain(channel, 100_000).tombstones.tolist()
        threshold = sorted(alive.values())[len(alive) // 8]
        assert all(alive.pop(key) <= threshold for key in gone)
        assert contents(table).keys() == alive.keys()
    assert table.stats()["evicted"] == 99 * 100 - 2000


def test_capacity_of_a_larger_table_keeps_the_young() -> None:
    rng = np.random.default_rng(8)
    table = counting_table(capacity=50_000)
    for time in range(1, 41):
        push(table, random_keys(rng, 5_000), time=time)
    ages = 40 - np.array([row.last_seen for row in contents(table).values()])
    assert len(table) == 50_000
    assert np.mean(ages < 8) > 0.75, "exact LRU would keep ages 0 to 9"
    assert ages.max() < 25


def test_capacity_when_all_rows_were_seen_at_the_same_time() -> None:
    table = counting_table(capacity=1000)
    keys = random_keys(np.random.default_rng(9), 100_000)
    assert push(table, keys, time=5).evicted == 99_000
    assert len(table) == 1000
    push(table, keys, time=4)  # times going back make no row qualify for long
    assert len(table) == 1000
    with pytest.raises(ValueError, match="finite"):
        table.load(keys[:1], np.array([[np.nan]], np.float32), np.zeros((1, 0), np.float32), u32([1]), u32([1]))


# Snapshots and channels


def test_snapshot_is_the_table_at_its_beginning() -> None:
    rng = np.random.default_rng(10)
    table = _core.Table(4, optimizer="adagrad", rate=0.1, dtype="bfloat16")
    keys = random_keys(rng, 5000)
    push(table, keys, time=1)
    table.remove(keys[::7].copy())
    before = contents(table)
    table.begin_snapshot()
    with pytest.raises(RuntimeError, match="open"):
        table.begin_snapshot()
    read: dict[int, oracle.Row] = {}
    time = 2
    while (part := table.read_snapshot(300)) is not None:
        collect(part, read)
        time += 1
        push(table, rng.choice(keys, 200), time=time)
        table.remove(rng.choice(keys, 200))
        push(table, random_keys(rng, 300), time=time)  # which use the ids of the removed ones
    table.end_snapshot()
    assert_same_rows(read, before)
    assert table.stats()["snapshot_bytes"] == 0


def test_channels_are_independent_and_end_when_closed() -> None:
    table = counting_table()
    push(table, u64([1]))
    first, second = table.open_channel(), table.open_channel()
    push(table, u64([2, 3]))
    assert table.drain(first, 100).rows.keys.tolist() == [2, 3]
    push(table, u64([2]))
    table.remove(u64([3]))
    assert table.drain(first, 100).rows.keys.tolist() == [2]
    part = table.drain(second, 100)
    assert (part.rows.keys.tolist(), part.tombstones.tolist()) == ([2], [3])
    push(table, u64([4]))
    table.close_channel(first)
    with pytest.raises(ValueError, match="channel"):
        table.drain(first, 1)
    assert table.open_channel() == first
    assert table.pending(first) == 0
    push(table, u64([4]))
    assert table.drain(first, 100).rows.keys.tolist() == [4]


def test_changes_put_back_are_not_lost() -> None:
    table = counting_table()
    channel = table.open_channel()
    push(table, u64([1, 2, 3]))
    part = table.drain(channel, 100)
    table.remove(u64([2]))
    table.drain(channel, 100)  # lost as well
    push(table, u64([3]))
    table.mark_dirty(channel, part.rows.keys)
    again = table.drain(channel, 100)
    assert sorted(again.rows.keys.tolist()) == [1, 3]
    assert again.tombstones.tolist() == [2]


# Slots


def halves(n: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Keys of the lower and the upper half of all slots, n each."""
    keys = random_keys(np.random.default_rng(3), n)
    return keys >> np.uint64(1), keys | np.uint64(1 << 63)


def swept(table: _core.Table, slots: tuple[int, int], visits: int = 100) -> None:
    table.set_slots(*slots)
    while table.sweep(visits):
        pass


def test_rows_of_lost_slots_go_with_their_memory() -> None:
    table = counting_table(16)
    lower, upper = halves(20_000)
    push(table, np.stack([lower, upper], 1).ravel().copy())
    before = table.stats()["rows_bytes"]
    channel = table.open_channel()
    push(table, lower[:100])
    push(table, upper[:100])
    swept(table, (0, 1 << 15))
    assert len(table) == 20_000
    assert table.stats()["rows_bytes"] < before * 0.51
    part = table.drain(channel, 1_000_000)
    assert set(lower.tolist()) >= set(part.rows.keys.tolist()) >= set(lower[:100].tolist())
    assert len(part.rows) <= 200  # a row that comes to the place of one that had changed counts as changed
    assert not len(part.tombstones)
    assert not table.lookup(upper)[0].any()
    push(table, lower)
    assert {row.count for key, row in contents(table).items() if key not in set(lower[:100].tolist())} == {2}


def test_new_rows_do_not_come_faster_than_gaps_are_closed() -> None:
    table = counting_table()
    lower, upper = halves(20_000)
    push(table, np.concatenate([upper, lower]))
    table.set_slots(0, 1 << 15)
    more, sweeps = lower.astype(np.uint64) ^ np.uint64(0xFFFF), 0
    while table.sweep(100):
        push(table, more[(sweeps * 200) % 20_000 :][:200].copy())
        table.remove(more[(sweeps * 200 + 10_000) % 20_000 :][:200].copy())
        sweeps += 1
        assert sweeps < 1_000
    assert table.stats()["rows_bytes"] < (len(table) + 1_000) * table.stats()["row_bytes"]
    assert contents(table).keys() <= set(lower.tolist()) | set(more.tolist())


def test_rows_of_slots_to_come_are_nowhere_until_then() -> None:
    """They are brought beside what is trained, and belong to the table at once; nothing else tells of them."""
    table = counting_table(capacity=150, expire_after=10)
    lower, upper = halves(100)
    swept(table, (0, 1 << 15))
    channel = table.open_channel()
    push(table, lower, time=100)
    gained = counting_table(expire_after=10)
    push(gained, upper, time=1)
    _, rows = gained.scan(0, 1000)
    table.load(rows.keys, rows.embeddings, rows.state, rows.counts, rows.last_seen)
    assert len(table) == table.stats()["rows"] == table.pending(channel) == 100
    assert contents(table).keys() == set(lower.tolist())
    assert table.expire(100, 1000) == 0
    assert table.remove(upper[:10].copy()) == 10
    table.begin_snapshot()
    part = table.read_snapshot(1000)
    assert part is not None
    assert set(part.keys.tolist()) == set(lower.tolist())
    table.end_snapshot()
    drained = table.drain(channel, 1000)
    assert (set(drained.rows.keys.tolist()), len(drained.tombstones)) == (set(lower.tolist()), 0)
    table.set_slots(0, 1 << 16)
    assert contents(table).keys() == set(lower.tolist()) | set(upper[10:].tolist())
    table.mark_dirty(channel, upper)
    drained = table.drain(channel, 1000)
    assert set(drained.rows.keys.tolist()) == set(upper[10:].tolist())
    assert set(drained.tombstones.tolist()) == set(upper[:10].tolist())
    assert push(table, lower, time=100).evicted == 0  # nothing goes until it is known how many there are
    swept(table, (0, 1 << 16))
    assert push(table, lower, time=100).evicted == 40
    assert len(table) == 150


def test_a_row_that_moves_is_not_taken_for_one_that_was_there() -> None:
    """A removed row leaves its mark in a channel; the row that comes to its place has not changed for that."""
    table = counting_table()
    lower, upper = halves(50)
    push(table, upper)
    push(table, lower)
    channel = table.open_channel()
    push(table, upper)
    table.set_slots(0, 1 << 15)
    assert table.sweep(100)  # all are visited, and none has moved
    table.seal(channel)
    swept(table, (0, 1 << 15))
    assert not len(table.drain(channel, 1000).rows)
    assert len(table) == 50


def test_slots_that_cannot_be() -> None:
    table = counting_table()
    for slots in [(0, 0), (5, 4), (0, (1 << 16) + 1)]:
        with pytest.raises(ValueError, match="slots must be from 0 to 65536, and some"):
            table.set_slots(*slots)
    push(table, u64([1]))
    table.begin_snapshot()
    with pytest.raises(RuntimeError, match="a snapshot is open, or a channel is sealed"):
        table.set_slots(0, 10)
    table.set_slots(0, 1 << 16)  # as they are
    with pytest.raises(ValueError, match="a capacity needs last_seen"):
        table.set_capacity(5)


def test_columns_outlive_table_and_part() -> None:
    table = counting_table(3)
    push(table, u64([7]))
    embeddings = table.scan(0, 10)[1].embeddings
    del table
    assert_array_equal(embeddings, [[1, 1, 1]])
    assert not embeddings.flags.writeable


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 0}, "dim"),
        ({"dim": 4097}, "dim"),
        ({"rate": -0.1}, "rate"),
        ({"rate": float("nan")}, "rate"),
        ({"optimizer": "ftrl", "rate": 0.0}, "rate"),
        ({"optimizer": "lion"}, "optimizer"),
        ({"dtype": "int8"}, "dtype"),
        ({"init": "zeros"}, "init"),
        ({"init_scale": float("inf")}, "init_scale"),
        ({"init_scale": -1.0}, "init_scale"),
        ({"min_count": 0}, "min_count"),
        ({"min_count": 256}, "min_count"),
        ({"min_count": 2, "sketch_width": 1000}, "sketch_width"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"beta1": 1.0}, "beta1"),
        ({"l1": -1.0}, "l1"),
        ({"initial_accumulator": float("nan")}, "initial_accumulator"),
        ({"decay": 0.0}, "decay must be above 0 and at most 1"),
        ({"decay": 1.5}, "decay"),
        ({"optimizer": "ftrl", "beta": 0.0, "initial_accumulator": 0.0}, "ftrl"),
    ],
)
def test_bad_configurations(options: dict[str, Any], message: str) -> None:
    defaults: dict[str, Any] = {"dim": 2, "optimizer": "sgd", "rate": 0.1}
    with pytest.raises(ValueError, match=message):
        _core.Table(**(defaults | options))


def test_bad_arguments() -> None:
    table = counting_table(2)
    key, one, row = u64([1]), u32([1]), np.ones((1, 2), np.float32)
    with pytest.raises(ValueError, match="gradients"):
        table.push(key, np.ones((1, 3), np.float32), one, one)
    with pytest.raises(ValueError, match="gradients"):
        table.push(u64([1, 2]), row, one, one)
    with pytest.raises(ValueError, match="counts"):
        table.push(key, row, u32([1, 2]), one)
    with pytest.raises(ValueError, match="times"):
        table.push(key, row, one, u32([]))
    with pytest.raises(ValueError, match="rate"):
        table.push(key, row, one, one, -1.0)
    with pytest.raises(ValueError, match="out"):
        table.pull(key, out=np.ones((2, 2), np.float32))
    with pytest.raises(ValueError, match="state"):
        table.load(key, row, np.ones((1, 1), np.float32), one, one)
    with pytest.raises(ValueError, match="channel"):
        table.drain(7, 1)
    with pytest.raises(ValueError, match="max_rows"):
        table.scan(0, 0)
    with pytest.raises(RuntimeError, match="snapshot"):
        table.read_snapshot(1)
    with pytest.raises(TypeError):
        table.pull(np.array([-1], np.int64))
    with pytest.raises(TypeError):
        table.pull(key, out=np.ones((1, 2), np.float64))
    assert len(table) == 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dim", [1, 7, 4096])
def test_the_size_of_the_state_is_known_without_a_table(optimizer: _core.OptimizerName, dim: int) -> None:
    assert _core.state_size(optimizer, dim) == _core.Table(dim, optimizer=optimizer, rate=0.1).state_size


def test_no_optimizer_has_no_size() -> None:
    with pytest.raises(ValueError, match="optimizer must be sgd, adagrad, rowwise_adagrad, adam or ftrl"):
        _core.state_size("rmsprop", 1)  # type: ignore[arg-type]
    for dim in (0, 4097):
        with pytest.raises(ValueError, match="dim must be between 1 and 4096"):
            _core.state_size("adam", dim)
