"""Status of a node, as a message of schemas/ps.proto."""

from typing import Any

import streamtrain.ps.ps_pb2 as pb
from streamtrain.ps import wire
from streamtrain.ps.node import Node


def status_of(node: Node, workers: list[str]) -> Any:
    """The status of a node as a message."""
    status = pb.ShardStatus(shard=node.index, shards=node.shards, ready=node.ready, workers=workers, epoch=node.epoch)
    status.counters.update(dict(node.counters))  # a copy: other threads add to it
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
