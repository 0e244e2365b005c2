"""A node gets another place in the map of shards: it holds what it held until it has what it is to hold."""

import pytest

from streamtrain.errors import ShardError, ShardRefused, ShardUnavailable
from streamtrain.ps.nodes.node import Node
from streamtrain.ps.replication.roles import NodeState
from streamtrain.store.checkpoint.epochs import Epochs
from tests.checkpoint.saved import Cluster, assert_each_exact, some_log

LOG = some_log(1, 400, ids=100)


def test_what_was_learned_stays_where_there_is_no_checkpoint(tmp_path: object) -> None:
    cluster = Cluster(str(tmp_path))
    cluster.learn(LOG, (0, 0, 100))
    node = cluster.nodes[0]
    with pytest.raises(ShardUnavailable, match="shard 0 of 2 finds no checkpoint to be shard 0 of 3 with"):
        node.place(0, 3, node.shard.run.id, 2)
    assert (node.index, node.shards, node.role.state) == (0, 2, NodeState.PRIMARY)
    cluster.learn(LOG, (0, 100, 200))
    assert_each_exact(cluster.shards, LOG)


def test_an_empty_one_stays_empty_and_may_go_back(tmp_path: object) -> None:
    node: Node = Cluster(str(tmp_path))._node(0, 2)
    for epoch, shards in enumerate((3, 2), 1):
        node.place(0, shards, "", epoch)
        assert (node.shards, node.role.state, node.map_epoch) == (shards, NodeState.EMPTY, epoch)
    with pytest.raises(ShardRefused, match="the map of epoch 2 is in force here, not 1"):
        node.place(0, 3, "", 1)


def test_a_shard_with_another_place_is_in_no_checkpoint(tmp_path: object) -> None:
    """Its rows are others than those of the shard whose part it would write."""
    cluster = Cluster(str(tmp_path))
    cluster.learn(LOG, (0, 0, 100))
    cluster.take()
    node = cluster.nodes[1]
    node.place(1, 3, node.shard.run.id, 2)
    with pytest.raises(ShardError, match="is shard 1 of 3, not 1 of 2: its rows are not those of this cluster's shard"):
        cluster.take()
    assert Epochs(str(tmp_path)).numbers() == [1]
    node.place(1, 2, node.shard.run.id, 3)
    cluster.learn(LOG, (0, 100, 200))
    cluster.take()
    assert_each_exact(cluster.shards, LOG)
