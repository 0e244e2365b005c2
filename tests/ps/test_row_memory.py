"""Shards with more rows than memory: how memory is divided, and that all of a shard's work sees all rows."""

import logging
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from streamtrain._core import hash_integers
from streamtrain.errors import ShardBroken, ShardRefused
from streamtrain.model.spec import Spec
from streamtrain.ps.clock import PushOutcome, Span
from streamtrain.ps.row_memory import Need, RowMemory, shares
from streamtrain.ps.shard import InitialState, Run, Shard, scan_rows
from tests.checkpoint.saved import Cluster, assert_each_exact
from tests.patience import until
from tests.ps.counting import DENSE, SPEC, assert_exact, key, pushes

MB = 1 << 20
IDS = 60_000
LOG = {0: np.random.default_rng(0).integers(0, IDS, (100_000, 1)).tolist()}


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[RowMemory]:
    """So little that most rows are on disk."""
    made = RowMemory(1, str(tmp_path), least=1)
    yield made
    made.close()


def shard_with(memory: RowMemory, spec: Spec = SPEC) -> Shard:
    initial = InitialState(Run("run", {}), spec, np.zeros(DENSE, np.float32), np.zeros(2, np.float32))
    return Shard(initial, 0, 1, memory=memory)


def learn(shard: Shard, begin: int, end: int, batch: int = 5000) -> None:
    for at in range(begin, end, batch):
        (push,) = pushes(LOG, [Span(0, at, min(at + batch, end))], 1)
        assert shard.push(push).outcome is PushOutcome.APPLIED


def test_small_tables_get_all_that_they_need_and_large_ones_share_the_rest() -> None:
    small, large, larger = Need(MB, 2 * MB), Need(2 * MB, 50 * MB), Need(3 * MB, 900 * MB)
    assert shares([larger, small, large], 42 * MB) == [20 * MB, 2 * MB, 20 * MB]


def test_what_is_left_is_there_for_growth() -> None:
    assert shares([Need(MB, 10 * MB), Need(MB, 20 * MB)], 50 * MB) == [20 * MB, 30 * MB]


def test_a_table_gets_what_it_cannot_be_without() -> None:
    assert shares([Need(30 * MB, 90 * MB), Need(0, 10), Need(0, 90 * MB)], 20 * MB) == [30 * MB, MB, MB]
    assert shares([Need(0, 90 * MB), Need(0, 80 * MB)], -5) == [MB, MB]
    assert shares([], 10) == []


def test_counts_are_exact(memory: RowMemory) -> None:
    shard = shard_with(memory)
    learn(shard, 0, len(LOG[0]))
    assert shard.tables[0].stats()["rows_on_disk"] > IDS // 2
    assert_exact([shard], LOG)


def test_checkpoints_have_all_rows_and_are_restored_to_disk(memory: RowMemory, tmp_path: Path) -> None:
    """In full and what has changed since, by the same shards and by more of them."""
    cluster = Cluster(str(tmp_path / "epochs"), memory=memory)
    cluster.learn(LOG, *((0, at, at + 5000) for at in range(0, 60_000, 5000)))
    cluster.take()
    cluster.learn(LOG, *((0, at, at + 5000) for at in range(60_000, 80_000, 5000)))
    cluster.take()
    cluster.crash(1)
    cluster.learn(LOG, *((0, at, at + 5000) for at in range(80_000, 100_000, 5000)))
    memory.divide()  # the room of the changes that a checkpoint took is given to rows until then
    assert all(shard.tables[0].stats()["rows_on_disk"] > IDS // 3 for shard in cluster.shards)
    assert_exact(cluster.shards, LOG)
    more = Cluster(str(tmp_path / "epochs"), 3, memory=memory)
    assert_each_exact(more.shards, LOG)
    assert all(shard.tables[0].stats()["rows_on_disk"] > IDS // 5 for shard in more.shards)


def test_all_rows_are_met_while_others_are_used(memory: RowMemory) -> None:
    """Rows that come into memory, or leave it, while somebody goes through all of them."""
    shard = shard_with(memory)
    learn(shard, 0, len(LOG[0]))
    table, rng = shard.tables[0], np.random.default_rng(1)
    every = {key(one) for (one,) in LOG[0]}
    met: set[int] = set()
    for rows in scan_rows(table):
        met |= set(rows.keys.tolist())
        table.pull(rng.permutation(np.array([*every], np.uint64))[:10_000])
    assert met == every
    keys: set[int] = set()
    cursor: int | None = 0
    while cursor is not None:
        part, cursor = shard.keys("ids", cursor)
        keys |= set(part.tolist())
        table.pull(rng.permutation(np.array([*every], np.uint64))[:10_000])
    assert keys == every


def test_a_scan_that_nobody_goes_on_with_is_given_up(memory: RowMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then, rows do not leave memory that it has not met."""
    monkeypatch.setattr("streamtrain.ps.shard._SCANNED_KEYS", 100)
    shard = shard_with(memory)
    learn(shard, 0, 50_000)
    begun, others = (shard.keys("ids", 0)[1] for _ in range(2))
    assert begun is not None
    assert others is not None
    monkeypatch.setattr("streamtrain.ps.shard._SCAN_SECONDS", -1.0)
    _, going_on = shard.keys("ids", begun)
    learn(shard, 50_000, len(LOG[0]))
    with pytest.raises(ShardRefused, match=f"there is no scan at {going_on}; begin again"):
        shard.keys("ids", going_on or 0)
    assert shard.keys("ids", others)[1] is not None


def test_memory_moves_to_the_table_that_needs_it(tmp_path: Path) -> None:
    two = {**vars(SPEC), "tables": (SPEC.tables[0], {**SPEC.tables[0], "name": "others"})}
    memory = RowMemory(3 * MB, str(tmp_path))
    shard = shard_with(memory, Spec(**two))
    keys = np.array(sorted({key(one) for (one,) in LOG[0]}), np.uint64)
    ones = np.ones(len(keys), np.uint32)
    shard.tables[0].push(keys, np.ones((len(keys), 1), np.float32), ones, ones)
    memory.divide()
    shard.tables[0].pull(keys)
    assert shard.tables[0].stats()["rows_on_disk"] == 0, "it has more than half of the memory"
    shard.tables[1].push(keys, np.ones((len(keys), 1), np.float32), ones, ones)
    until(lambda: all(table.nbytes < 1.8 * MB for table in shard.tables), told=lambda: [t.nbytes for t in shard.tables])
    memory.close()


def test_with_auto_a_tenth_of_the_machine_stays_free(tmp_path: Path) -> None:
    machine: dict[str, int] = {"other": 0}
    shards: list[Shard] = []

    def free() -> int:
        return 40 - machine["other"] - (sum(table.nbytes for shard in shards for table in shard.tables) >> 20)

    memory = RowMemory("auto", str(tmp_path), free=free, everything=lambda: 40)
    shards += [shard_with(memory), shard_with(memory)]
    learned = 0

    def learn_more() -> int:
        nonlocal learned
        keys = hash_integers(np.arange(learned, learned + 50_000))
        ones = np.ones(len(keys), np.uint32)
        for shard in shards:
            shard.tables[0].push(keys, np.ones((len(keys), 1), np.float32), ones, ones)
        learned += 50_000
        memory.divide()
        return shards[0].tables[0].stats()["rows_on_disk"]

    while not learn_more():
        assert free() >= 0
    assert free() < 10, "rows go to disk when nearly all is taken"
    machine["other"] = -10
    memory.divide()
    table = shards[1].tables[0]
    table.pull(hash_integers(np.arange(learned)))
    assert table.stats()["rows_on_disk"] == 0, "what others give back is for rows"
    machine["other"] = 0
    while learned < 600_000:
        learn_more()
    for shard in shards:
        found, counts, _ = shard.tables[0].lookup(hash_integers(np.arange(learned)))
        assert found.all()
        assert (counts == 1).all()
    memory.close()


def test_a_table_with_a_capacity_stays_in_memory(memory: RowMemory) -> None:
    spec = Spec(**{**vars(SPEC), "tables": ({**SPEC.tables[0], "capacity": 30_000},)})
    shard = shard_with(memory, spec)
    learn(shard, 0, len(LOG[0]))
    memory.divide()
    assert len(shard.tables[0]) == 30_000
    assert shard.tables[0].stats()["rows_on_disk"] == 0


ALL = np.array([key(one) for one in range(IDS)], np.uint64)
READERS: dict[str, Callable[[Cluster], object]] = {
    "pull": lambda of: of.shards[0].pull_rows([ALL], [np.empty((IDS, 1), np.float32)]),
    "look at": lambda of: [of.shards[0].inspect("ids", one) for one in ALL.tolist()],
    "forget": lambda of: of.shards[0].remove("ids", ALL),
    "list": lambda of: of.shards[0].keys("ids", 0),
    "write a checkpoint": lambda of: of.take(full=True),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS.keys())
def test_a_shard_whose_rows_cannot_be_read_has_to_be_restored(
    memory: RowMemory, tmp_path: Path, read: Callable[[Cluster], object]
) -> None:
    cluster = Cluster(str(tmp_path / "epochs"), 1, memory=memory)
    learn(cluster.shards[0], 0, len(LOG[0]))
    for one in Path("/proc/self/fd").iterdir():
        if os.path.lexists(one) and str(one.readlink()).startswith(str(tmp_path)):
            os.truncate(one, 0)
    with pytest.raises(ShardBroken, match=r"must be restarted from a checkpoint: rows cannot be read: .* shorter"):
        read(cluster)
    with pytest.raises(ShardBroken, match="rows cannot be read"):
        cluster.shards[0].check()


def test_rows_that_cannot_be_written_are_said_once(
    memory: RowMemory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shard = shard_with(memory)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with caplog.at_level(logging.INFO):
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            learn(shard, 0, 50_000)
            memory.divide()
            learn(shard, 50_000, 60_000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, handler)
        memory.divide()
        learn(shard, 60_000, len(LOG[0]))
        until(lambda: "again" in caplog.messages[-1], doing=memory.divide, told=lambda: caplog.messages)
    said = f"rows stay in memory, as they cannot be written to {tmp_path}: writing rows to disk: File too large"
    assert caplog.messages == [said, f"rows are written to {tmp_path} again"]
    assert_exact([shard], LOG)
