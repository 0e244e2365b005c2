"""Which rows are published, and how many it says there are: exactly, while they change, and without zeros of L1."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamtrain._core import Table, hash_integers, shards_of
from streamtrain.embedded.valkey import Valkey
from streamtrain.model.spec import Spec
from streamtrain.ps.clock import Span
from streamtrain.ps.row_memory import RowMemory
from streamtrain.ps.shard import scan_rows
from streamtrain.store.redis.versions import RedisVersions
from tests.patience import until
from tests.ps.counting import SPEC, key, pushes
from tests.publish.published import Cluster, read

L1 = {"optimizer": "ftrl", "rate": 1.0, "l1": 1.5}  # with gradients of -1: zero until an id was seen twice


def spec(**changes: Any) -> Spec:
    return Spec(**{**vars(SPEC), "tables": ({**SPEC.tables[0], **changes},)})


def rows_of(cluster: Cluster) -> dict[int, float]:
    found: dict[int, float] = {}
    for node in cluster.nodes:
        _, rows = node.shard.tables[0].scan(0, 1 << 20)
        found |= dict(zip(rows.keys.tolist(), rows.embeddings[:, 0].tolist(), strict=True))
    return found


def assert_same(url: str, expected: dict[int, float]) -> None:
    publication, rows, _ = read(url)
    assert rows == expected
    assert dict(publication.rows) == {"ids": len(expected)}


def without_zeros(rows: dict[int, float]) -> dict[int, float]:
    return {one: value for one, value in rows.items() if value}


def push(cluster: Cluster, one: int, gradient: float) -> None:
    """Changes the row of an id on the shard that has it."""
    keys, ones = np.array([key(one)], np.uint64), np.ones(1, np.uint32)
    table_of(cluster, one).push(keys, np.full((1, 1), gradient, np.float32), ones, ones)


def table_of(cluster: Cluster, one: int) -> Table:
    keys = np.array([key(one)], np.uint64)
    (table,) = (node.shard.tables[0] for node in cluster.nodes if node.shard.tables[0].lookup(keys)[0].all())
    return table


def test_zeros_of_l1_are_not_published(server: Valkey) -> None:
    cluster = Cluster(server.url, spec=spec(**L1))
    for samples in (4, 2):  # in full, then what changed
        cluster.learn(samples)
        cluster.publish()
        assert_same(server.url, without_zeros(rows_of(cluster)))
    rows = rows_of(cluster)
    assert 0 < len(without_zeros(rows)) < len(rows)
    assert rows[key(1)]
    push(cluster, 1, 1.0)
    assert rows_of(cluster)[key(1)] == 0
    cluster.learn(1)
    cluster.publish()
    assert key(1) not in read(server.url)[1]
    assert_same(server.url, without_zeros(rows_of(cluster)))
    assert RedisVersions(cluster.model).make("test").rows == {"ids": len(without_zeros(rows_of(cluster)))}
    push(cluster, 1, -3.0)
    cluster.learn(1)
    cluster.publish()
    assert read(server.url)[1][key(1)]
    assert_same(server.url, without_zeros(rows_of(cluster)))


@pytest.mark.parametrize(
    "changes", [L1 | {"init_scale": 0.5}, L1 | {"l1": 0.0}, {"rate": 0.5}], ids=["born otherwise", "l2 only", "sgd"]
)
def test_other_zeros_are_rows_like_others(server: Valkey, changes: dict[str, Any]) -> None:
    cluster = Cluster(server.url, spec=spec(**changes))
    cluster.learn(4)
    table, one = table_of(cluster, 1), np.ones(1, np.uint32)
    state = np.zeros((1, table.state_size), np.float32)
    table.load(np.array([key(1)], np.uint64), np.zeros((1, 1), np.float32), state, one, one)
    cluster.publish()
    assert read(server.url)[1][key(1)] == 0
    assert_same(server.url, rows_of(cluster))


class Endless:
    """Samples with one new id each, and one that was seen before."""

    def __getitem__(self, at: slice) -> list[list[int]]:
        return [[number, number // 2] for number in range(at.start, at.stop)]


@pytest.mark.parametrize("changes", [{}, L1], ids=["sgd", "l1"])
def test_rows_are_counted_exactly_while_they_change(server: Valkey, changes: dict[str, Any]) -> None:
    """Loading checks the number, and so does a version."""
    cluster = Cluster(server.url, spec=spec(**changes))
    log: Any = {0: Endless()}
    stopped = threading.Event()

    def learn() -> None:
        at = 0
        while not stopped.wait(0.001):  # else it learns more than is ever published
            for node, one in zip(cluster.nodes, pushes(log, [Span(0, at, at + 20)], len(cluster.nodes)), strict=True):
                node.shard.push(one)
            at += 20

    learning = threading.Thread(target=learn)
    learning.start()
    try:
        for number in range(1, 21):
            cluster.publications._full = number == 10  # once more
            until(lambda: cluster.publications.publish() is not None, 60)
            publication, rows, _ = read(server.url)
            assert publication.number == number
            assert dict(publication.rows) == {"ids": len(rows)}
        RedisVersions(cluster.model).make("test")
    finally:
        stopped.set()
        learning.join()


def test_all_rows_are_published_while_they_leave_memory_and_return(server: Valkey, tmp_path: Path) -> None:
    memory = RowMemory(1, str(tmp_path), least=1)
    cluster = Cluster(server.url, memory=memory)
    cluster.learn(2)
    keys = hash_integers(np.arange(20_000))
    owners, stopped = shards_of(keys, 2), threading.Event()

    def push_all(gradient: float, many: int) -> None:
        for node in cluster.nodes:
            mine = keys[owners == node.index][:many]
            ones = np.ones(len(mine), np.uint32)
            node.shard.tables[0].push(mine, np.full((len(mine), 1), gradient, np.float32), ones, ones)

    def look() -> None:
        rng = np.random.default_rng(0)
        while not stopped.is_set():
            for node in cluster.nodes:
                node.shard.tables[0].pull(rng.permutation(keys[owners == node.index])[:2000])

    push_all(-1.0, len(keys))
    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        try:
            for many in (len(keys), 3000, 10):
                push_all(-2.0, many)
                cluster.learn(1)
                cluster.publish()
                assert_same(server.url, rows_of_all(cluster))
        finally:
            stopped.set()
        looking.result()
    tables = [node.shard.tables[0] for node in cluster.nodes]
    # Rows stay in memory for as long as the disk has not taken those before them, and leave with the next batch.
    until(lambda: all(table.stats()["rows_on_disk"] > 5000 for table in tables), doing=lambda: push_all(0.0, 10))
    memory.close()


def rows_of_all(cluster: Cluster) -> dict[int, float]:
    """By key, while rows leave memory and return."""
    parts = [rows for node in cluster.nodes for rows in scan_rows(node.shard.tables[0])]
    return {
        key: value
        for rows in parts
        for key, value in zip(rows.keys.tolist(), rows.embeddings[:, 0].tolist(), strict=True)
    }
