"""A backup goes with its primary: by a later map of shards it is the backup of another one, whatever it was."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from streamtrain.checkpoint.shard_checkpoint import CheckpointWriter
from streamtrain.errors import ShardRefused, ShardUnavailable
from streamtrain.ps.consistency import Async
from streamtrain.ps.nodes.node import NO_EPOCH, Node
from streamtrain.ps.nodes.server import ShardServer
from streamtrain.ps.replication import primary, state_transfer
from streamtrain.ps.replication.backup import Asking
from streamtrain.ps.replication.primary import Peer, State
from streamtrain.ps.replication.roles import NodeState, Pairing
from streamtrain.ps.replication.state_transfer import Generation
from streamtrain.ps.rpc.control import RemoteControl
from streamtrain.store.checkpoint.epochs import Epochs
from tests.patience import PATIENCE, until
from tests.ports import free_ports
from tests.ps.counting import assert_exact, new_shard
from tests.ps.paired import Paired, Worker, upto

LATER = Asking(1, 3, Generation(5, 1), map_epoch=2, run="run", primary="127.0.0.1:1")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


class Published:
    """A publisher that is told to forget."""

    forgotten = 0

    def forget(self) -> None:
        self.forgotten += 1


def node_of(stack: ExitStack, index: int, shards: int, checkpoints: CheckpointWriter | None = None) -> Node:
    """A node that may be paired with any address, and is with one that does not answer if it has a place."""

    def pair(address: str) -> Pairing:
        channel = stack.enter_context(grpc.insecure_channel(address))
        return Pairing(Peer(channel, address), 1.0, "own:1")

    pairing = pair(f"127.0.0.1:{free_ports(1)[0]}") if shards else None
    publisher: Any = Published()
    made = Node(index, shards, Async, checkpoints, publisher=publisher, pairing=pairing, pair=pair)
    stack.callback(made.stop)
    return made


@pytest.mark.parametrize("was", ["spare", "backup", "empty", "primary"])
def test_a_later_map_makes_it_a_backup_whatever_it_was(stack: ExitStack, was: str) -> None:
    node = node_of(stack, 0, 0 if was == "spare" else 2)
    if was == "empty":
        node.restore()
    if was == "primary":  # as it took over where the other had gone from
        node.role.take_over(new_shard(0, 2), Generation(9, 2))
    assert node.backup.release(LATER) is False
    assert (node.role.state, node.index, node.shards, node.map_epoch) == (NodeState.BACKUP, 1, 3, 2)
    assert node.role.pairing is not None
    assert node.role.pairing.peer.target == "127.0.0.1:1"
    assert node.role.replication is None
    assert node._publisher is not None
    assert node._publisher.forgotten == 1  # type: ignore[attr-defined]
    with pytest.raises(ShardUnavailable, match="this is the backup of shard 1"):
        node.role.held()


def test_only_a_later_map_of_the_same_run_does(stack: ExitStack) -> None:
    node = node_of(stack, 0, 2)
    node.role.take_over(new_shard(0, 2), Generation(9, 2))
    for asking, why in (
        (LATER._replace(map_epoch=0), "this is shard 0 of 2, not 1 of 3"),
        (LATER._replace(run="another"), "this is shard 0 of 2 of run run, not 1 of 3 of run another"),
    ):
        with pytest.raises(ShardRefused, match=why):
            node.backup.release(asking)
        assert node.ready
    assert node.backup.release(LATER._replace(shard=0, shards=2)) is True  # the same place: who took over last has it
    node.role.confirm(2)
    with pytest.raises(ShardRefused, match="this is shard 0 of 2, not 1 of 3"):
        node.backup.release(LATER)


def test_one_that_can_have_no_backup_refuses() -> None:
    node = Node(0, 0, Async)
    with pytest.raises(ShardRefused, match="this is shard 0 of 0, not 1 of 3"):
        node.backup.release(LATER)
    with pytest.raises(ShardRefused, match="shard 0 cannot have a backup in this process"):
        node.place(0, 2, "", 1, peer="127.0.0.1:1")


def test_checkpoints_go_on_once_it_takes_over_again(stack: ExitStack, tmp_path: Path) -> None:
    """Of a shard that it has not written before, whose tables know nothing of what changed since a checkpoint."""
    epochs = Epochs(tmp_path)
    node = node_of(stack, 0, 1, CheckpointWriter(epochs))
    node.role.take_over(new_shard(0, 1), Generation(1, 2))

    def write(epoch: int) -> None:
        node.freeze()
        node.cut(epoch, {}, node.epoch == NO_EPOCH)
        node.write(epoch)

    write(1)
    write(2)
    assert node.epoch == 2
    node.backup.release(LATER)
    assert node.epoch == NO_EPOCH
    node.role.take_over(new_shard(1, 3), Generation(5, 2))
    write(3)
    write(4)
    assert node.epoch == 4


def test_the_map_that_is_in_force_now_is_told_to_the_backup(stack: ExitStack) -> None:
    """Also if the primary had its place before there was that map; its backup may know a later one than it did."""
    first, second = (f"127.0.0.1:{port}" for port in free_ports(2))
    nodes = []
    for own, other in ((first, second), (second, first)):
        channel = stack.enter_context(grpc.insecure_channel(other))

        def pair(address: str, channel: grpc.Channel = channel, own: str = own) -> Pairing:
            return Pairing(Peer(channel, address), 5.0, own, pause=0.02)

        node = Node(0, 0, Async, pair=pair)
        server = ShardServer(node, own=own)
        assert server.grpc.add_insecure_port(own)
        server.start()
        stack.callback(server.stop, 0)
        stack.callback(node.stop)
        nodes.append(node)
    leader, follower = nodes
    follower.place(0, 0, "run", 3)
    leader.role.vacate(0, 1, 0, leader._pair(second) if leader._pair else None)
    leader.role.restored(new_shard(0, 1))
    channel = stack.enter_context(grpc.insecure_channel(first))
    with pytest.raises(ShardRefused, match=f"the process at {first} is not one of a:1 and b:1"):
        RemoteControl(channel, first).place(0, 1, "run", 4, pair=["a:1", "b:1"])
    RemoteControl(channel, first).place(0, 1, "run", 4, pair=[first, second])
    until(lambda: follower.backup.in_step, PATIENCE)
    assert (follower.role.state, follower.map_epoch) == (NodeState.BACKUP, 4)


def test_a_copy_under_which_rows_moved_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was scanned may miss some of them."""
    copies = []

    def counted(*args: Any) -> bytes:
        copies.append(1)
        return state_transfer.copy_of(*args)

    monkeypatch.setattr(primary, "copy_of", counted)
    with Paired(1) as pairs:
        worker = Worker(pairs.shards())
        worker.learn(5)
        first = pairs.wait()
        second = pairs.other(first)
        second.kill()
        worker.learn(10)
        assert first.node is not None
        shard = first.node.shard
        copies.clear()

        def moved(*args: Any) -> bytes:
            if len(copies) == 1:
                shard.drop_foreign()
            return state_transfer.rows_of(*args)

        monkeypatch.setattr(primary, "rows_of", moved)
        second.start()
        assert pairs.wait() is first
        assert len(copies) == 2
        first.kill()
        worker.learn(15)
        assert second.node is not None
        assert_exact([second.node.shard], upto(15))
        worker.client.close()
        assert first.state is not State.IN_STEP
