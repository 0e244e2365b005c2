"""A shard with a backup: what the one has the other has, and whoever of them dies, nothing is lost or doubled."""

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import streamtrain.ps.rpc.ps_pb2 as pb

from streamtrain.errors import ShardRefused, ShardUnavailable
from streamtrain.model.spec import Spec
from streamtrain.ps.bulk import BulkSynchronous
from streamtrain.ps.clock import PushOutcome, Span
from streamtrain.ps.consistency import Async, Bounded, Consistency
from streamtrain.ps.nodes.shards import RunTemplate
from streamtrain.ps.push import DenseChange, Push, RowUpdate
from streamtrain.ps.replication.primary import State
from streamtrain.ps.replication.state_transfer import Generation, change_record, copy_of, rows_of
from streamtrain.ps.row_memory import RowMemory
from streamtrain.ps.rpc import wire
from streamtrain.ps.rpc.control import RemoteControl
from streamtrain.ps.shard import InitialState, Run, Shard
from tests.checkpoint.saved import contents, dense
from tests.patience import PATIENCE, until
from tests.ps.counting import SPEC, assert_exact, new_shard, pushes
from tests.ps.paired import ENDS, LOG, Paired, Worker, answered, upto
from tests.ps.raw import Raw
from tests.ps.served import served


@pytest.mark.parametrize(
    "consistency",
    [
        Async,
        lambda shard: Bounded(shard, 1, PATIENCE, time.monotonic),
        lambda shard: BulkSynchronous(shard, 1, PATIENCE, time.monotonic),
    ],
    ids=["async", "bounded", "bulk"],
)
def test_a_backup_has_what_its_primary_has_and_takes_over(consistency: Callable[[Shard], Consistency]) -> None:
    with Paired(2, consistency=consistency) as pairs:
        worker = Worker(pairs.shards())
        worker.learn(7)
        primaries = [pairs.wait(i) for i in range(2)]
        worker.learn(15)
        for primary in primaries:
            backup = pairs.other(primary).node
            assert backup is not None
            assert not backup.ready
            primary.kill()
        worker.learn(30)
        assert worker.rewinds == 0  # nothing was learned again
        nodes = [pairs.other(primary).node for primary in primaries]
        assert_exact([node.shard for node in nodes if node], upto(30))
        assert [node.counters["backup_took_over"] for node in nodes if node] == [1, 1]
        worker.client.close()


BIG = Spec(
    schema="big",
    seed=3,
    reduction="row_sum",
    tables=(
        {"name": "adam", "dim": 3, "optimizer": "adam", "rate": 0.1, "init": "uniform", "init_scale": 0.1,
         "expire_after": 0},
        {"name": "half", "dim": 2, "optimizer": "adagrad", "rate": 0.1, "init": "uniform", "init_scale": 0.1,
         "dtype": "float16", "min_count": 2, "expire_after": 0},
    ),
    dense=((11,),),
    statistics=((2,),),
    dense_optimizer={"optimizer": "adam", "rate": 0.01},
)  # fmt: skip
SLICES = RunTemplate(BIG, np.arange(11, dtype=np.float32), np.zeros(2, np.float32), {})


def any_push(rng: np.random.Generator, partition: int, at: int) -> Push:
    """Gradients at random for rows at random; every other time those of a batch in steps, from older weights."""
    updates = []
    for table in BIG.tables:
        keys = np.unique(rng.integers(1, 20_000, 300).astype(np.uint64))
        gradients = rng.standard_normal((len(keys), table["dim"])).astype(np.float32)
        times = rng.integers(1, 1000, len(keys)).astype(np.uint32)
        updates.append(RowUpdate(keys, gradients, np.ones(len(keys), np.uint32), times))
    gradient, change = rng.standard_normal(11).astype(np.float32), rng.standard_normal(2).astype(np.float32)
    push = Push([Span(partition, at, at + 1)], 1, updates, gradient, change, at, {partition: float(at)})
    if at % 2:
        return push
    moments, decay = rng.standard_normal((2, 11)).astype(np.float32) ** 2, np.full(2, 0.5, np.float32)
    return push._replace(dense=DenseChange(gradient, moments, decay, 3.0), seen=at)


def everything(shard: Shard) -> dict[str, Any]:
    rows = {one["name"]: contents([shard], t) for t, one in enumerate(BIG.tables)}
    return {"rows": rows, "dense": dense([shard]), "stand": shard.progress()}


@pytest.mark.parametrize("on_disk", [False, True], ids=["in memory", "on disk"])
def test_all_is_equal_to_the_bit_though_it_was_pushed_to_while_it_was_copied(tmp_path: Path, on_disk: bool) -> None:
    memory = RowMemory(1, str(tmp_path), least=1) if on_disk else None
    with Paired(1, beginning=SLICES, memory=memory) as pairs:
        answered(pairs.shards().agree)
        primary = pairs.wait()
        primary_node, backup = primary.node, pairs.other(primary)
        assert primary_node is not None
        shard, stop = primary_node.shard, threading.Event()

        def learn(partition: int) -> int:
            rng, at = np.random.default_rng(partition), 0
            while not stop.is_set():
                assert shard.push(any_push(rng, partition, at)).outcome is PushOutcome.APPLIED
                if at % 5 == 0:
                    shard.remove(BIG.tables[at % 2]["name"], rng.integers(1, 20_000, 100).astype(np.uint64))
                at += 1
            return at

        with ThreadPoolExecutor(2) as pool:
            pushed = [pool.submit(learn, partition) for partition in range(2)]
            until(lambda: shard.clock().get(1, 0) > 100, PATIENCE)
            for _ in range(3):
                backup.kill()
                until(lambda: primary.state is State.AWAY, PATIENCE)
                node = backup.start()
                pairs.wait()
            stop.set()
            clock = {partition: one.result() for partition, one in enumerate(pushed)}
        mirrored = everything(shard)
        primary.kill()
        answered(pairs.shards().clocks)
        assert everything(node.shard) == mirrored
        assert node.shard.clock() == clock
        assert all((table.stats()["rows_on_disk"] > 10_000) == on_disk for table in node.shard.tables)
    if memory is not None:
        memory.close()


def test_a_backup_knows_the_topic_that_its_primary_adopted_after_it_was_copied() -> None:
    with Paired(2) as pairs:
        worker = Worker(pairs.shards())
        primaries = [pairs.wait(i) for i in range(2)]
        pairs.shards().adopt("a topic")
        worker.learn(3)
        for primary in primaries:
            primary.kill()
        worker.learn(5)
        nodes = [pairs.other(primary).node for primary in primaries]
        assert [node.shard.run.topic for node in nodes if node] == ["a topic", "a topic"]
        worker.client.close()


def test_what_is_no_backup_is_not_asked_to_follow() -> None:
    with served(1) as of, pytest.raises(ShardRefused, match=r"has no backup; set ps\.backups"):
        RemoteControl(*of.channels[0]).promote()


def test_a_backup_serves_nothing_and_does_not_take_over_from_a_primary_that_is_there() -> None:
    with Paired(1) as pairs:
        worker = Worker(pairs.shards())
        worker.learn(3)
        primary = pairs.wait()
        backup = pairs.other(primary).control()
        with pytest.raises(ShardUnavailable, match="is still connected to its backup"):
            backup.promote()
        with pytest.raises(ShardUnavailable, match="this is the backup of shard 0"):
            backup.inspect("ids", 1)
        with pytest.raises(ShardUnavailable, match="this is the backup of shard 0"):
            backup.initialise(
                0, 1, InitialState(Run("other", {}), SPEC, np.zeros(5, np.float32), np.zeros(2, np.float32))
            )
        worker.learn(5)
        assert pairs.wait() is primary
        worker.client.close()


def test_nobody_waits_for_a_primary_that_another_has_found_to_be_away() -> None:
    """Something listens at its address, and never answers, as if it were paused."""
    with Paired(1) as pairs:
        worker = Worker(pairs.shards())
        worker.learn(3)
        primary = pairs.wait()
        host, _, port = primary.control().target.partition(":")
        primary.kill()
        with socket.create_server((host, int(port))):
            worker.learn(5)
            assert worker.shards.clocks() == [dict.fromkeys(ENDS, 5)]
            worker.client.close()


def test_damaged_records_are_refused() -> None:
    copied = copy_of(new_shard(0, 1), Generation(1, 1))
    other = copy_of(new_shard(1, 2), Generation(1, 1))
    rows = rows_of(0, new_shard(0, 1).tables[0].scan(0, 10)[1])
    no_table = wire.frame(pb.Record(rows=pb.CopiedRows(table=7, rows=0)), [])
    late = change_record(1, pushes(LOG, [Span(0, 3, 4)], 1)[0])
    copy, bulk = wire.unframe(pb.Record, copied)
    copy.copy.admission.append(3)
    for records, why in (
        ([b"\xff"], "are not a valid Record"),
        ([rows], "begins with a copy"),
        ([other], "not 1 of 2"),
        ([wire.frame(copy, [np.frombuffer(bulk, np.uint8)])], "is damaged"),
        ([copied, no_table], "unknown table 7"),
        ([copied, late], "is REJECTED here"),
    ):
        with Paired(1) as pairs:
            first, second = pairs.places[0]
            first.kill()
            raw = Raw(second.channel, method="Follow").say(*records)
            code, said = raw.refusal()
            assert why in said
            assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
            with pytest.raises(ShardUnavailable, match="is not in step"):
                second.control().promote()
