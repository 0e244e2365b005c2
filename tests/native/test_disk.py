"""Tables with more rows than memory: what they give is what others give, in memory that is bounded."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from numpy.typing import NDArray

from streamtrain import _core

Keys = NDArray[np.uint64]
Row = tuple[bytes, bytes, int, int]

DIM = 16
IDS = 60_000


def keys_of(ids: NDArray[Any]) -> Keys:
    return _core.hash_integers(np.unique(ids).astype(np.int64))


def table_of(folder: Path | None = None, memory: int = 1_500_000, **options: Any) -> _core.Table:
    """A table whose rows are in memory, or, with a folder, for the larger part on disk."""
    disk: dict[str, Any] = {} if folder is None else {"memory": memory, "folder": str(folder), "segment_bytes": 1 << 19}
    return _core.Table(DIM, optimizer="rowwise_adagrad", rate=0.05, dtype="float16", seed=3, **options, **disk)


def push(table: _core.Table, keys: Keys, time: int = 1, value: float = 0.5) -> _core.PushResult:
    n = len(keys)
    return table.push(keys, np.full((n, DIM), value, np.float32), np.ones(n, np.uint32), np.full(n, time, np.uint32))


def collect(part: _core.Rows, into: dict[int, Row]) -> None:
    columns = part.keys.tolist(), part.embeddings, part.state, part.counts.tolist(), part.last_seen.tolist()
    for key, embedding, state, count, seen in zip(*columns, strict=True):
        assert key not in into, "each key once"
        into[key] = (embedding.tobytes(), state.tobytes(), count, seen)


def contents(table: _core.Table) -> dict[int, Row]:
    rows: dict[int, Row] = {}
    cursor: int | None = 0
    while cursor is not None:
        cursor, part = table.scan(cursor, 10_000)
        collect(part, rows)
    return rows


def drained(table: _core.Table, channel: int) -> tuple[dict[int, Row], set[int]]:
    rows: dict[int, Row] = {}
    gone: set[int] = set()
    while table.pending(channel):
        part = table.drain(channel, 5000)
        collect(part.rows, rows)
        gone |= set(part.tombstones.tolist())
    return rows, gone


def read(table: _core.Table) -> dict[int, Row]:
    rows: dict[int, Row] = {}
    while (part := table.read_snapshot(3000)) is not None:
        collect(part, rows)
    table.end_snapshot()
    return rows


def filled(folder: Path, memory: int = 1_500_000) -> _core.Table:
    """A table with rows of all ids, each used once."""
    table = table_of(folder, memory)
    for ids in np.split(np.random.default_rng(5).permutation(IDS), 20):
        push(table, keys_of(ids))
    return table


def test_all_is_as_in_memory(tmp_path: Path) -> None:
    """Rows, changes, snapshots and expiry, while segments fill, are compacted and go."""
    rng = np.random.default_rng(1)
    tables = [table_of(expire_after=500), table_of(tmp_path, expire_after=500)]
    channels = [table.open_channel() for table in tables]
    for step in range(160):
        now = 5 * step
        ids = rng.zipf(1.2, 5000) % IDS if step % 3 else rng.integers(0, IDS, 4000)
        keys = keys_of(ids)
        assert_array_equal(tables[0].pull(keys), tables[1].pull(keys))
        of_memory, of_disk = (push(table, keys, now, step / 100) for table in tables)
        assert (of_memory.applied, of_memory.inserted) == (of_disk.applied, of_disk.inserted)
        if step % 20 == 19:
            assert drained(tables[0], channels[0]) == drained(tables[1], channels[1])
        if step % 40 == 39:
            assert tables[0].expire(now, 10**9) == tables[1].expire(now, 10**9)
        if step % 50 == 20:
            for table in tables:
                table.begin_snapshot()
        if step % 50 == 30:
            assert read(tables[0]) == read(tables[1])
    assert contents(tables[0]) == contents(tables[1])
    stats = tables[1].stats()
    assert stats["disk_reads"] > 100_000
    assert stats["disk_written_bytes"] > 2 * stats["disk_bytes"], "segments went"
    assert not list(tmp_path.iterdir()), "files have no names"


def test_threads_read_where_rings_are_not_allowed(tmp_path: Path) -> None:
    program = f"""
import numpy as np
from tests.native.test_disk import *
table = filled(Path({str(tmp_path)!r}))
assert (table.pull(keys_of(np.arange(IDS))) != table_of().pull(keys_of(np.arange(IDS)))).any(axis=1).all()
print(table.stats()["disk_reads"])
"""
    environment = os.environ | {"STREAMTRAIN_NO_IO_URING": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) > IDS // 2


def test_memory_and_disk_are_bounded(tmp_path: Path) -> None:
    """However often rows come and leave."""
    budget = 2_000_000
    table = filled(tmp_path, budget)
    rng = np.random.default_rng(2)
    for _ in range(100):
        push(table, keys_of(rng.integers(0, IDS, 3000)))
        assert table.nbytes < 1.15 * budget
    stats = table.stats()
    assert len(table) == stats["rows"] == IDS
    assert IDS / 2 < stats["rows_on_disk"] < IDS
    assert stats["disk_bytes"] < 1.6 * IDS * stats["row_bytes"] + 2 * (1 << 19)
    assert stats["disk_written_bytes"] > 3 * stats["disk_bytes"]


def test_rows_in_memory_become_fewer_as_the_index_of_the_others_grows(tmp_path: Path) -> None:
    table = table_of(tmp_path, memory=8_000_000)
    most = 0
    for first in range(0, 600_000, 20_000):
        push(table, keys_of(np.arange(first, first + 20_000)))
        most = max(most, table.stats()["rows_bytes"])
    stats = table.stats()
    assert stats["rows_bytes"] < 0.6 * most
    assert table.nbytes < 9_500_000
    assert stats["rows"] == 600_000


def test_another_budget_takes_rows_out_of_memory_or_lets_more_in(tmp_path: Path) -> None:
    table = filled(tmp_path, 8_000_000)
    assert table.stats()["rows_on_disk"] == 0
    table.set_memory(2_000_000)
    few = table.stats()["rows_on_disk"]
    assert few > IDS / 2
    table.set_memory(8_000_000)
    table.pull(keys_of(np.arange(IDS)))
    assert table.stats()["rows_on_disk"] == 0
    for one, memory in ((table, 0), (table_of(), 1000)):
        with pytest.raises(ValueError, match="only a table that began with a budget of memory can get another one"):
            one.set_memory(memory)


def load(table: _core.Table, ids: NDArray[Any], times: int, *, cold: bool = True) -> int:
    keys, n = _core.hash_integers(ids.astype(np.int64)), len(ids)
    rows = np.repeat(ids[:, None], DIM, axis=1).astype(np.float32)
    return table.load(keys, rows, rows[:, :1].copy(), np.ones(n, np.uint32), np.full(n, times, np.uint32), cold=cold)


def test_cold_rows_go_straight_to_disk_once_memory_is_full(tmp_path: Path) -> None:
    tables = [table_of(), table_of(tmp_path)]
    tables[1].expect(IDS)
    for first in range(0, IDS, 10_000):
        ids = np.arange(first, first + 10_000)
        assert [load(table, ids, 1) for table in tables] == [10_000, 10_000]
    assert tables[1].nbytes < 1.15 * 1_500_000
    assert tables[1].stats()["rows_on_disk"] > IDS / 2
    frequent = keys_of(np.arange(10_000))
    assert_array_equal(tables[0].pull(frequent), tables[1].pull(frequent))
    assert tables[1].stats()["disk_reads"] < 5000, "most of those that came first are in memory"
    twice = np.concatenate([np.arange(IDS - 500, IDS + 1000), np.arange(IDS + 500, IDS + 1000)[::-1]])
    assert [load(table, twice, 2) for table in tables] == [1000, 1000]
    assert [load(table, np.arange(0, IDS + 2000, 3), 3) for table in tables] == [333, 333]
    assert contents(tables[0]) == contents(tables[1])


def test_cold_rows_are_seen_by_channels_and_snapshots(tmp_path: Path) -> None:
    tables = [table_of(), table_of(tmp_path)]
    for table in tables:
        load(table, np.arange(IDS), 1)
        table.begin_snapshot()
        load(table, np.arange(IDS, IDS + 5000), 2)
    assert read(tables[0]) == read(tables[1])
    channels = [table.open_channel() for table in tables]
    for table in tables:
        load(table, np.arange(IDS + 4000, IDS + 9000), 3)
    assert drained(tables[0], channels[0]) == drained(tables[1], channels[1])
    assert contents(tables[0]) == contents(tables[1])


def test_cold_rows_do_not_pile_up_while_the_disk_is_full(tmp_path: Path) -> None:
    reference, table = table_of(), table_of(tmp_path)
    load(reference, np.arange(4 * IDS), 1)
    with small_files():
        for ids in np.split(np.arange(4 * IDS), 20):
            load(table, ids, 1)
    stats = table.stats()
    assert stats["disk_bytes"] == 0
    assert stats["rows_on_disk"] < IDS, "there are few chunks that wait to be written"
    assert contents(table) == contents(reference)


def test_segments_without_old_rows_are_not_read_for_expiry(tmp_path: Path) -> None:
    table = table_of(tmp_path, expire_after=50)
    for now in range(100, 200):
        push(table, keys_of(np.arange(300 * now, 300 * now + 300)), now)

    def expired(now: int, most: int) -> int:
        """How many of so many visits, after all that have been before."""
        return sum(table.expire(now, most) for _ in range(3))

    assert table.stats()["rows_on_disk"] > 10_000
    assert expired(140, 1000) == 0
    assert expired(150, 2000) == 0
    gone = 0
    for _ in range(30):  # 30,000 rows in all: one round in memory and on disk
        gone += table.expire(160, 1000)
    assert gone == 10 * 300
    assert len(table) == 90 * 300
    assert expired(160, 30_000) == 0
    for file in files_of(tmp_path):
        os.truncate(f"/proc/self/fd/{file}", 0)
    assert expired(160, 10**6) == 0, "nothing is read"
    with pytest.raises(RuntimeError, match="has become shorter"):
        table.expire(260, 10**6)


def test_rows_used_often_stay_in_memory(tmp_path: Path) -> None:
    table = filled(tmp_path, 2_500_000)
    often, rng = keys_of(np.arange(8000)), np.random.default_rng(3)
    for _ in range(10):
        push(table, often)
        push(table, keys_of(rng.integers(8000, IDS, 2000)))
    before = table.stats()["disk_reads"]
    table.pull(often)
    assert table.stats()["disk_reads"] - before < len(often) / 20


def test_threads_count_exactly(tmp_path: Path) -> None:
    """Each gradient once, whichever thread brings a row into memory or lets it go."""
    table = _core.Table(
        1,
        optimizer="sgd",
        rate=1.0,
        init="constant",
        init_scale=0.0,
        memory=1,
        folder=str(tmp_path),
        segment_bytes=8192,
    )
    keys = keys_of(np.arange(3000))
    rounds, threads = 30, 4

    def run(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(rounds):
            some = rng.permutation(keys)
            for part in np.split(some, 6):
                table.pull(part)
                n = len(part)
                table.push(part, np.full((n, 1), -1, np.float32), np.ones(n, np.uint32), np.ones(n, np.uint32))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, range(threads)))
    assert_array_equal(table.pull(keys), np.full((len(keys), 1), rounds * threads))
    assert_array_equal(table.lookup(keys)[1], np.full(len(keys), rounds * threads))


def files_of(folder: Path) -> list[int]:
    """Descriptors of this process' files without names in a folder."""
    found = []
    for one in Path("/proc/self/fd").iterdir():
        try:
            if one.readlink().is_relative_to(folder):
                found.append(int(one.name))
        except FileNotFoundError:  # the directory itself, as it was listed
            continue
    return found


def test_a_damaged_block_is_found(tmp_path: Path) -> None:
    table = filled(tmp_path)
    files = files_of(tmp_path)
    assert files
    for file in files:
        with open(f"/proc/self/fd/{file}", "r+b", buffering=0) as opened:
            for at in range(100, os.fstat(file).st_size, 4096):
                byte = os.pread(opened.fileno(), 1, at)
                os.pwrite(opened.fileno(), bytes([byte[0] ^ 4]), at)
    keys = keys_of(np.arange(IDS))
    with pytest.raises(RuntimeError, match=r"rows on disk are damaged: block \d+ of a file of \d+ rows"):
        table.pull(keys)
    with pytest.raises(RuntimeError, match="damaged"):
        push(table, keys)
    with pytest.raises(RuntimeError, match="damaged"):
        contents(table)


def test_a_file_that_became_shorter_is_found(tmp_path: Path) -> None:
    table = filled(tmp_path)
    for file in files_of(tmp_path):
        os.truncate(f"/proc/self/fd/{file}", 4096)
    with pytest.raises(RuntimeError, match="has become shorter"):
        table.pull(keys_of(np.arange(IDS)))


@contextmanager
def small_files() -> Iterator[None]:
    """No file can be larger than 25 blocks: neither can what pytest writes, so never for longer than needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (25 * 4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_rows_stay_in_memory_while_the_disk_is_full(tmp_path: Path) -> None:
    with small_files():
        table = filled(tmp_path)
        keys = keys_of(np.arange(IDS))
        rows = table.pull(keys)
    reference = table_of()
    push(reference, keys)
    assert_array_equal(rows, reference.pull(keys))
    assert "File too large" in table.disk_error
    stats = table.stats()
    assert stats["disk_errors"] > 0
    assert stats["disk_bytes"] == 0
    push(table, keys)
    push(reference, keys)
    after = table.stats()
    assert after["disk_bytes"] > 0, "there is room again"
    assert after["disk_errors"] == stats["disk_errors"]
    assert_array_equal(table.pull(keys), reference.pull(keys))


def test_a_fork_reads_what_its_parent_wrote_and_writes_nothing_there(tmp_path: Path) -> None:
    program = f"""
import os
from tests.native.test_disk import *
table, reference, keys = filled(Path({str(tmp_path)!r})), table_of(), keys_of(np.arange(IDS))
push(reference, keys)
if (child := os.fork()) == 0:
    for part in np.split(keys, 6):
        assert_array_equal(table.pull(part), reference.pull(part))
        push(table, part)
        push(reference, part)
    assert_array_equal(table.pull(keys), reference.pull(keys))
    assert table.disk_error in ("", "this is a fork of the process whose file it is"), table.disk_error
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert_array_equal(table.pull(keys), reference.pull(keys))
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    table = filled(tmp_path / "none")
    assert table.disk_error == f"a new file in {tmp_path / 'none'}: No such file or directory"
    assert len(table) == IDS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": 1000}, "a budget of memory needs a folder"),
        ({"memory": 1000, "folder": "/tmp", "capacity": 5}, "a capacity or a budget of memory, not both"),
    ],
)
def test_bad_configurations(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _core.Table(4, optimizer="sgd", rate=0.1, **options)
