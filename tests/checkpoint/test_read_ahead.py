"""A shard whose rows were read ahead is the one that is restored, bit for bit."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamtrain.checkpoint.shard_checkpoint import CheckpointWriter
from streamtrain.checkpoint.shard_state import shard_arrays
from streamtrain.errors import CheckpointError, ShardUnavailable
from streamtrain.ps.clock import Span
from streamtrain.ps.consistency import Async
from streamtrain.ps.nodes.node import Node
from streamtrain.ps.shard import Shard
from streamtrain.store.checkpoint.epochs import Epochs
from tests.checkpoint.saved import Cluster, assert_each_exact, contents, some_log, with_table
from tests.patience import PATIENCE, until
from tests.ps.counting import assert_exact, pushes
from tests.ps.served import COUNTING

LOG = some_log(1, 4_000, ids=1_000)


def everything(shard: Shard) -> Any:
    """All that a checkpoint has of a shard."""
    arrays = {name: values.tolist() for name, values in shard_arrays(shard).items()}
    return arrays, contents([shard]), shard.progress(), shard.samples, shard.watermark


def must_not_be_read(*_: Any) -> Any:
    """In the place of what looks for a whole checkpoint."""
    raise AssertionError("all is read anew")


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("options", [{}, {"min_count": 3}, {"capacity": 300}])
def test_it_is_as_if_it_were_restored(place: str, shards: int, options: dict[str, Any]) -> None:
    cluster = Cluster(place, beginning=with_table(COUNTING, **options))
    cluster.learn(LOG, *((0, at, at + 50) for at in range(0, 1_000, 50)))
    cluster.take()
    cluster.learn(LOG, (0, 1_000, 1_300))
    cluster.take()
    ahead = [CheckpointWriter(Epochs(place)) for _ in range(shards)]
    for index, writer in enumerate(ahead):
        writer.read_ahead(index, shards)
        writer._epochs.newest_good = must_not_be_read  # type: ignore[method-assign,assignment]
    cluster.learn(LOG, (0, 1_300, 1_400))
    cluster.take()
    ahead[0].read_ahead(0, shards)
    cluster.learn(LOG, *((0, at, at + 50) for at in range(1_400, 2_000, 50)))
    assert cluster.take().kind == "delta"
    for index, writer in enumerate(ahead):
        got, restored = writer.restore(index, shards), CheckpointWriter(Epochs(place)).restore(index, shards)
        assert got is not None
        assert restored is not None
        assert everything(got[0]) == everything(restored[0])
        assert got[1] == restored[1]


def test_where_the_newest_checkpoint_does_not_build_on_it(place: str) -> None:
    """It is read as a whole: it is full, damaged, or for another place."""
    cluster = Cluster(place)
    cluster.learn(LOG, (0, 0, 100))
    cluster.take()
    writers = [CheckpointWriter(Epochs(place)) for _ in range(3)]
    for writer in writers:
        writer.read_ahead(0, 3)
    cluster.learn(LOG, (0, 100, 200))
    cluster.take(full=True)
    found = writers[0].restore(0, 3)
    assert found is not None
    assert found[0].clock() == {0: 200}
    assert_each_exact([found[0]], LOG)
    found = writers[1].restore(1, 3)
    assert found is not None
    assert_each_exact([found[0]], LOG)
    writers[2].read_ahead(0, 3)
    cluster.learn(LOG, (0, 200, 300))
    epoch = cluster.take().epoch
    directory = Epochs(place).directory(epoch)
    for name in directory.sizes():
        if name.endswith(".parquet"):
            directory.put(name, b"damaged")
    found = writers[2].restore(0, 3)
    assert found is not None
    assert found[0].clock() == {0: 200}
    assert_each_exact([found[0]], LOG)


def test_what_was_read_is_let_go(place: str) -> None:
    cluster = Cluster(place)
    writer = CheckpointWriter(Epochs(place))
    with pytest.raises(CheckpointError, match=r"there is no checkpoint at .*: do all shards reach that place\?"):
        writer.read_ahead(0, 3)
    cluster.learn(LOG, (0, 0, 100))
    cluster.take()
    writer.read_ahead(0, 3)
    assert writer._ahead is not None
    writer.read_ahead(0, 0)
    assert writer._ahead is None


def place_all(nodes: list[Node]) -> None:
    for index, node in enumerate(nodes):
        node.place(index, len(nodes), "", 2)


def tables(nodes: list[Node]) -> list[Any]:
    return [node.shard.tables[0] for node in nodes]


@pytest.mark.parametrize("options", [{}, {"min_count": 3}, {"capacity": 1_500}, {"expire_after": 5_000}])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (2, 4), (3, 2), (4, 3)])
def test_who_has_a_shard_keeps_its_rows(place: str, before: int, after: int, options: dict[str, Any]) -> None:
    """It reads only what it gains, and is what a new process restores, bit for bit."""
    cluster = Cluster(place, before, with_table(COUNTING, **options))
    cluster.learn(LOG, *((0, at, at + 50) for at in range(0, 1_000, 50)))
    cluster.take()
    cluster.learn(LOG, (0, 1_000, 1_300))
    cluster.take()
    nodes = [*cluster.nodes[:after], *(cluster._node(0, 0) for _ in range(after - before))]
    old, kept = cluster.shards, tables(cluster.nodes)
    counts = [len(table) for table in kept]
    for index, node in enumerate(nodes):
        node.read_ahead(index, after)
    assert [len(table) for table in kept] == counts  # what is read is not theirs yet
    cluster.learn(LOG, (0, 1_300, 1_400))
    cluster.take()
    for index, node in enumerate(nodes):
        writer: Any = node._checkpoints
        writer._epochs.newest_good = must_not_be_read
        node.read_ahead(index, after)
    cluster.learn(LOG, *((0, at, at + 50) for at in range(1_400, 2_000, 50)))
    gone = next(iter(contents(cluster.shards)))
    for shard in cluster.shards:
        shard.tables[0].remove(np.array([gone], np.uint64))
    assert cluster.take().kind == "delta"
    place_all(nodes)
    same = min(before, after)
    assert [one is other for one, other in zip(tables(nodes), kept, strict=False)] == [True] * same
    for index, node in enumerate(nodes):
        restored = CheckpointWriter(Epochs(place)).restore(index, after)
        assert restored is not None
        assert everything(node.shard) == everything(restored[0])
        found, expected = (shard.tables[0].stats() for shard in (node.shard, restored[0]))
        assert found["rows_bytes"] <= expected["rows_bytes"]  # the memory of lost rows is let go
    for shard in old[:same]:
        with pytest.raises(ShardUnavailable, match="its process has another place"):
            shard.check()
    cluster.nodes[:] = nodes
    cluster.learn({0: [*LOG[0][:2_000], *some_log(1, 2_000, ids=9_000)[0]]}, (0, 2_000, 4_000))
    most = -(-options.get("capacity", 1 << 30) // after)
    assert all(len(table) <= most for table in tables(nodes))
    assert sum(map(len, tables(nodes))) > (1_300 if "capacity" in options else 0)


def test_who_has_learned_on_is_restored_as_a_whole(place: str) -> None:
    """As pushes are held back only for so long; what is in the checkpoint decides."""
    cluster = Cluster(place)
    cluster.learn(LOG, (0, 0, 1_000))
    cluster.take()
    for index, node in enumerate(cluster.nodes):
        node.read_ahead(1 - index, 2)
    cluster.learn(LOG, (0, 1_000, 1_300))
    cluster.take()
    old = tables(cluster.nodes)
    cluster.nodes[1].shard.push(pushes(LOG, [Span(0, 1_300, 1_400)], 2)[1])
    for index, node in enumerate(cluster.nodes):
        node.place(1 - index, 2, "", 2)
    assert [one is other for one, other in zip(tables(cluster.nodes), old, strict=True)] == [True, False]
    cluster.nodes.reverse()
    cluster.learn(LOG, (0, 1_300, 1_500))
    assert_exact(cluster.shards, {0: LOG[0][:1_500]})


def test_nothing_is_of_a_shard_until_it_has_its_place(place: str) -> None:
    """What is read ahead is in no checkpoint, and what is not needed any more is let go."""
    cluster = Cluster(place)
    cluster.learn(LOG, (0, 0, 1_000))
    cluster.take()
    before = contents(cluster.shards)
    sizes = [table.stats()["rows_bytes"] for table in tables(cluster.nodes)]
    cluster.nodes[0].read_ahead(0, 1)
    assert contents(cluster.shards) == before
    assert tables(cluster.nodes)[0].stats()["rows_bytes"] > sizes[0]
    assert cluster.take(full=True).kind == "full"
    again = [CheckpointWriter(Epochs(place)).restore(index, 2) for index in range(2)]
    assert contents([one.shard for one in again if one]) == before
    cluster.learn(LOG, (0, 1_000, 1_100))
    cluster.take()
    cluster.nodes[0].read_ahead(0, 1)  # once more
    cluster.nodes[0].read_ahead(0, 0)
    assert tables(cluster.nodes)[0].stats()["rows_bytes"] < 1.2 * sizes[0]
    found = CheckpointWriter(Epochs(place)).restore(0, 1)
    assert found is not None
    assert_exact([found.shard], {0: LOG[0][:1_100]})
    cluster.learn(LOG, (0, 1_100, 1_200))
    assert_exact(cluster.shards, {0: LOG[0][:1_200]})


def test_a_reading_is_counted_limited_and_stopped(tmp_path: Path) -> None:
    """What was read is let go of, and it can be read again."""
    cluster = Cluster(str(tmp_path), 2)
    cluster.learn(LOG, (0, 0, 400))
    cluster.take()
    writer = CheckpointWriter(Epochs(tmp_path))
    node = Node(0, 0, Async, writer)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(node.read_ahead, 0, 3, rate=1e-3)  # a row would take hours
        until(lambda: node.rows_ahead > 0, PATIENCE)
        node.read_ahead(0, 0)
        with pytest.raises(CheckpointError, match="the reading of rows was stopped"):
            reading.result(PATIENCE)
    assert writer._ahead is None
    node.read_ahead(0, 3)
    node.place(0, 3, "", 1)
    assert sum(map(len, node.shard.tables)) == node.rows_ahead > 0


@pytest.mark.parametrize("later", ["place", "read ahead"])
def test_a_reading_of_whom_nobody_hears_any_more_is_in_nobodys_way(tmp_path: Path, later: str) -> None:
    """A coordinator may end while shards read for it, slowly; the next one gives them places, or has others read."""
    cluster = Cluster(str(tmp_path), 2)
    cluster.learn(LOG, (0, 0, 400))
    cluster.take()
    node = Node(0, 0, Async, CheckpointWriter(Epochs(tmp_path)))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(node.read_ahead, 0, 3, rate=1e-3)
        until(lambda: node.rows_ahead > 0, PATIENCE)
        if later == "read ahead":
            node.read_ahead(1, 3)
        node.place(1, 3, "", 1)
        with pytest.raises(CheckpointError, match="the reading of rows was stopped"):
            reading.result(PATIENCE)
    assert (node.index, node.shards, node.ready) == (1, 3, True)
