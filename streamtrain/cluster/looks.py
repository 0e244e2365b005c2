"""Looks: how shards are, by what they say of themselves, as plain values."""

from collections.abc import Sequence
from typing import Any

from streamtrain.errors import ShardError
from streamtrain.ps import wire
from streamtrain.ps.shards import Control


def look_at(control: Control) -> Any | None:
    """The status of a shard; None: it is away."""
    try:
        return control.status()
    except ShardError:  # which is what its state says
        return None


def as_json(index: int, address: str, status: Any | None) -> dict[str, Any]:
    """A shard as the status of a cluster has it, see docs/serving.md."""
    about = {"index": index, "address": address}
    if status is None:
        return about | {"state": "away"}
    return about | {
        "state": "ready" if status.ready else "empty",
        "rows": {table.name: table.rows for table in status.tables},
        "bytes": sum(table.bytes for table in status.tables) + status.dense_bytes,
        "clock": {str(partition): at for partition, at in wire.clock_of(status.clock).items()},
        "samples": status.counters["samples"] if status.ready else None,
        "epoch": status.epoch if status.epoch >= 0 else None,
        "backup_in_step": status.standing.in_step if status.HasField("standing") else None,
    }


def samples_of(ready: Sequence[Any]) -> int | None:
    """Samples that were learned, by the shard that is farthest; None: none is ready."""
    return max((status.counters["samples"] for status in ready), default=None)


def watermark_of(ready: Sequence[Any]) -> float:
    """Latest event time that all shards have learned, seconds since the epoch; 0: none."""
    latest = [max(wire.stand_of(status.clock).watermarks.values(), default=0.0) for status in ready]
    return min(latest, default=0.0)
