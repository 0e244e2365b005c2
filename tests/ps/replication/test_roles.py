"""Promise: a node is empty, a backup, primary or retired, and changes only as `NodeState` says."""

import time
from collections.abc import Callable

import grpc
import pytest

from streamtrain.errors import ShardUnavailable
from streamtrain.ps.consistency import Async
from streamtrain.ps.replication.primary import Peer, State
from streamtrain.ps.replication.roles import NodeRole, NodeState, Pairing
from streamtrain.ps.replication.state_transfer import Generation
from streamtrain.ps.shard import InitialState, Run
from tests.patience import PATIENCE, until
from tests.ports import free_ports
from tests.ps.counting import assert_exact, new_shard
from tests.ps.paired import Paired, Worker, upto
from tests.ps.served import COUNTING

INITIAL = InitialState(Run("run", {}), COUNTING.spec, COUNTING.dense, COUNTING.statistics)
TRANSITIONS: dict[str, Callable[[NodeRole], object]] = {
    "restored": lambda role: role.restored(new_shard(0, 1)),
    "restored nothing": lambda role: role.restored(None),
    "initialise": lambda role: role.initialise(INITIAL),
    "follow": lambda role: role.follow(),
    "take_over": lambda role: role.take_over(new_shard(0, 1), Generation(time.time_ns(), 2)),
    "retire": lambda role: role.retire("the other process of it has taken over"),
}
EMPTY, BACKUP, PRIMARY, RETIRED, SPARE = NodeState
NEXT = {
    EMPTY: {
        "restored": PRIMARY, "restored nothing": EMPTY, "initialise": PRIMARY, "follow": BACKUP, "retire": EMPTY
    },
    BACKUP: {"restored": PRIMARY, "restored nothing": EMPTY, "follow": BACKUP, "take_over": PRIMARY, "retire": BACKUP},
    PRIMARY: {"restored nothing": PRIMARY, "initialise": PRIMARY, "retire": RETIRED},
    RETIRED: {"restored nothing": RETIRED, "retire": RETIRED},
}  # fmt: skip
PATHS = {EMPTY: ["restored nothing"], BACKUP: [], PRIMARY: ["restored"], RETIRED: ["restored", "retire"]}
WAYS = {EMPTY: ["restored nothing"], PRIMARY: ["restored"], RETIRED: ["restored", "retire"]}
REFUSALS = {
    EMPTY: "shard 0 is empty",
    BACKUP: "this is the backup of shard 0",
    PRIMARY: "shard 0 is primary here",
    RETIRED: "shard 0 has moved: the other process of it has taken over",
}


def bring(role: NodeRole, state: NodeState) -> None:
    """A role with a backup to a state."""
    for name in WAYS.get(state, []):
        TRANSITIONS[name](role)


@pytest.mark.parametrize("name", TRANSITIONS)
@pytest.mark.parametrize("state", NEXT)
def test_a_transition_is_made_or_refused(state: NodeState, name: str) -> None:
    address, retired = f"127.0.0.1:{free_ports(1)[0]}", list[str]()
    with grpc.insecure_channel(address) as channel:
        role = NodeRole(0, 1, Async, Pairing(Peer(channel, address), 1.0, retired=retired.append), lambda _: None)
        bring(role, state)
        assert role.state is state
        known = [*retired]
        if name in NEXT[state]:
            TRANSITIONS[name](role)
        else:
            with pytest.raises(ShardUnavailable, match=REFUSALS[state]):
                TRANSITIONS[name](role)
        assert role.state is NEXT[state].get(name, state)
        assert role.ready is (role.state is PRIMARY)
        assert len(retired) - len(known) == (state is PRIMARY and role.state is RETIRED)  # told once
        if role.replication:
            role.replication.stop()


@pytest.mark.parametrize("state", NEXT)
def test_one_with_a_backup_gets_another_place(state: NodeState) -> None:
    """The copy goes to the backup of that place from then on, and none to that of before."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with grpc.insecure_channel(address) as channel:
        pairing = Pairing(Peer(channel, address), 1.0)
        role = NodeRole(0, 1, Async, pairing, lambda _: None)
        bring(role, state)
        replication, other = role.replication, Pairing(Peer(channel, address), 1.0)
        if state is RETIRED:
            with pytest.raises(ShardUnavailable, match=REFUSALS[state]):
                role.vacate(1, 2, 3, other)
            assert (role.index, role.shards, role.map_epoch) == (0, 1, 0)
        else:
            role.vacate(1, 2, 3, other)
            assert (role.state, role.index, role.shards, role.map_epoch) == (SPARE, 1, 2, 3)
            assert role.pairing is other
            assert role.replication is None
            role.restored(new_shard(1, 2))
            assert role.replication is not None
            assert role.replication is not replication
            role.replication.stop()
        if replication is not None:
            replication.stop()
            assert replication.state is State.RETIRED


@pytest.mark.parametrize("state", NEXT)
def test_a_later_map_makes_it_the_backup_of_another_shard(state: NodeState) -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with grpc.insecure_channel(address) as channel:
        role = NodeRole(0, 1, Async, Pairing(Peer(channel, address), 1.0), lambda _: None)
        bring(role, state)
        other = Pairing(Peer(channel, address), 1.0)
        if state in (PRIMARY, RETIRED):
            with pytest.raises(ShardUnavailable, match=REFUSALS[state]):
                role.pair(2, 3, 4, other)
            assert (role.state, role.index, role.shards, role.map_epoch) == (state, 0, 1, 0)
        else:
            role.pair(2, 3, 4, other)
            assert (role.state, role.index, role.shards, role.map_epoch) == (BACKUP, 2, 3, 4)
            assert role.pairing is other
        if role.replication:
            role.replication.stop()


def test_a_shard_without_a_backup_gets_another_place() -> None:
    """What it held is refused from then on, and it is nothing until it is restored."""
    role = NodeRole(0, 0, Async, None, lambda _: None)
    for path in ([], ["restored"], ["restored nothing"]):
        for name in path:
            TRANSITIONS[name](role)
        held = role.held()[0] if role.ready else None
        role.vacate(1, 3, 2)
        assert (role.state, role.index, role.shards, role.ready) == (SPARE, 1, 3, False)
        for name in ("initialise", "follow", "take_over"):
            with pytest.raises(ShardUnavailable, match="this shard has no place yet"):
                TRANSITIONS[name](role)
        if held is not None:
            with pytest.raises(ShardUnavailable, match="its process has another place in the map of shards"):
                held.pull_dense(COUNTING.dense, COUNTING.statistics)
    role.restored(new_shard(1, 3))
    assert role.state is PRIMARY


def test_an_empty_node_that_is_sent_a_copy_is_a_backup_and_takes_over() -> None:
    """It started while it did not reach the primary, and found no checkpoint: it waits to be initialised."""
    with Paired(1) as pairs:
        worker = Worker(pairs.shards())
        worker.learn(3)
        first = pairs.wait()
        second = pairs.other(first)
        first.kill()
        worker.learn(6)
        node = first.start_empty()
        assert pairs.wait() is second
        until(lambda: node.role.state is BACKUP, PATIENCE)
        with pytest.raises(ShardUnavailable, match="this is the backup of shard 0"):
            first.control().initialise(0, 1, INITIAL)
        second.kill()
        worker.learn(9)
        assert worker.rewinds == 0
        assert_exact([node.shard], upto(9))
        worker.client.close()
