"""A shard whose rows were read ahead is the one that is restored, bit for bit."""

from typing import Any

import pytest

from streamtrain.checkpoint.shard_checkpoint import CheckpointWriter
from streamtrain.checkpoint.shard_state import shard_arrays
from streamtrain.errors import CheckpointError
from streamtrain.ps.shard import Shard
from streamtrain.store.checkpoint.epochs import Epochs
from tests.checkpoint.saved import Cluster, assert_each_exact, contents, some_log, with_table
from tests.ps.served import COUNTING

LOG = some_log(1, 4_000, ids=1_000)


def everything(shard: Shard) -> Any:
    """All that a checkpoint has of a shard."""
    arrays = {name: values.tolist() for name, values in shard_arrays(shard).items()}
    return arrays, contents([shard]), shard.progress(), shard.samples, shard.watermark


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
    cluster.learn(LOG, *((0, at, at + 50) for at in range(1_300, 2_000, 50)))
    assert cluster.take().kind == "delta"
    for index, writer in enumerate(ahead):
        opened: list[int] = []
        writer._epochs.newest_good = opened.append  # type: ignore[method-assign,assignment]  # must not be needed
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
