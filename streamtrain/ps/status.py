"""Status of a node, as a message of schemas/ps.proto."""

from typing import Any

import streamtrain.ps.ps_pb2 as pb
from streamtrain.ps import wire
from streamtrain.ps.follower import Follower
from streamtrain.ps.node import Node
from streamtrain.ps.replication import State


def status_of(node: Node, workers: list[str]) -> Any:
    """The status of a node as a message."""
    status = pb.ShardStatus(shard=node.index, shards=node.shards, ready=node.ready, workers=workers)
    status.epoch, status.published = node.epoch, node.published
    status.counters.update(dict(node.counters))  # a copy: other threads add to it
    if node.follower is not None:
        status.standing.CopyFrom(_standing_of(node, node.follower))
    if not node.ready:
        return status
    shard = node.shard
    status.run, status.identity, status.spec = shard.run.id, shard.spec.identity, shard.spec.to_json()
    status.start.extend(wire.positions(shard.run.start))
    status.clock.extend(wire.positions(*shard.stand()))
    for settings, table in zip(shard.spec.tables, shard.tables, strict=True):
        status.tables.add(name=settings["name"], rows=len(table), bytes=table.nbytes)
    status.dense_bytes = shard.dense.nbytes
    status.counters.update({f"pushes_{outcome.name.lower()}": n for outcome, n in shard.pushes.items()})
    status.counters.update({f"gradients_{name}": n for name, n in vars(shard.totals).items()})
    status.counters["samples"] = shard.samples
    return status


def _standing_of(node: Node, follower: Follower) -> Any:
    if node.follows:
        return pb.Standing(role=pb.BACKUP, in_step=follower.in_step)
    replication = node.replication
    in_step = replication is not None and replication.state is State.IN_STEP
    return pb.Standing(role=pb.PRIMARY, line=node.line.message(), in_step=in_step)
