"""What a shard tells Prometheus: its status, as of a scrape."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

import streamtrain.ps.ps_pb2 as pb
from streamtrain.metrics import of_shard as of
from streamtrain.metrics.definition import Definition
from streamtrain.ps import wire
from streamtrain.ps.leader import Leader
from streamtrain.ps.node import NO_EPOCH, Node
from streamtrain.ps.status import status_of

# Counters of a status that have a metric, with its labels. Others are events.
COUNTERS: dict[str, tuple[Definition, tuple[str, ...]]] = {
    "pushes_applied": (of.PUSHES, ("applied",)),
    "pushes_duplicate": (of.PUSHES, ("duplicate",)),
    "pushes_rejected": (of.PUSHES, ("rejected",)),
    "gradients_applied": (of.ROW_GRADIENTS, ("applied",)),
    "gradients_unadmitted": (of.ROW_GRADIENTS, ("unadmitted",)),
    "gradients_non_finite_rows": (of.ROW_GRADIENTS, ("non_finite",)),
    "gradients_non_finite_dense": (of.DENSE_GRADIENTS, ()),
    "gradients_expired": (of.DROPPED_ROWS, ("expired",)),
    "gradients_evicted": (of.DROPPED_ROWS, ("evicted",)),
    "checkpoints_taken": (of.CHECKPOINTS, ("taken",)),
    "checkpoints_failed": (of.CHECKPOINTS, ("failed",)),
    "checkpoint_failures": (of.CHECKPOINT_FAILURES, ()),
    "publications_published": (of.PUBLICATIONS, ("published",)),
    "publications_held": (of.PUBLICATIONS, ("held",)),
    "publications_failed": (of.PUBLICATIONS, ("failed",)),
    "versions_made": (of.VERSIONS, ("made",)),
    "versions_failed": (of.VERSIONS, ("failed",)),
}
_STATE = (
    of.INFO,
    of.READY,
    of.ROWS,
    of.BYTES,
    of.DENSE,
    of.CLOCK,
    of.SAMPLES,
    of.WATERMARK,
    of.WORKERS,
    of.EPOCH,
    of.BACKUP,
)
LED = (of.HELD, of.CHECKPOINT_TIME, of.PUBLICATION_TIME)
"""Gauges of whoever leads."""
_GAUGES = (*_STATE, *LED)
# Events that there may be and that alerts look at.
_EVENTS = (
    *("refused_malformed", "refused_mismatch", "refused_limit", "refused_unauthenticated", "refused_token"),
    *("backup_lost", "backup_took_over", "damaged_checkpoints", "failed_ShardBroken"),
)
_COUNTED = (*dict.fromkeys(definition for definition, _ in COUNTERS.values()), of.EVENTS)

_Values = dict[tuple[object, ...], float]


class ShardMetrics(Collector):
    """The metrics of a node's shard.

    Args:
        node: which.
        workers: names of those with an open session.
    """

    def __init__(self, node: Node, workers: Callable[[], Sequence[str]]) -> None:
        self._node = node
        self._workers = workers

    def describe(self) -> Iterator[Metric]:
        """Without values: what a registry knows it by."""
        for definition in (*_GAUGES, *_COUNTED):
            yield definition.family()

    def collect(self) -> Iterator[Metric]:
        """As of now."""
        status = status_of(self._node, list(self._workers()))
        counters = dict(status.counters)
        samples = counters.pop("samples", None)
        watermark = self._node.shard.watermark if status.ready else 0
        yield of.INFO.family({(status.shard, status.shards, status.run): 1})
        yield of.READY.family({(): status.ready})
        yield of.WORKERS.family({(): len(status.workers)})
        yield of.ROWS.family({(table.name,): table.rows for table in status.tables})
        yield of.BYTES.family({(table.name,): table.bytes for table in status.tables})
        yield of.DENSE.family({(): status.dense_bytes})
        yield of.CLOCK.family({(partition,): offset for partition, offset in wire.clock_of(status.clock).items()})
        yield of.SAMPLES.family(None if samples is None else {(): samples})
        yield of.WATERMARK.family({(): watermark} if watermark else None)
        yield of.EPOCH.family({(): status.epoch} if status.epoch != NO_EPOCH else None)
        paired = status.HasField("standing") and status.standing.role == pb.PRIMARY
        yield of.BACKUP.family({(): status.standing.in_step} if paired else None)
        yield from led(self._node.leader)
        yield from _counted(counters)


def led(leader: Leader | None) -> Iterator[Metric]:
    """`LED`, of who leads; None: whose they are does not."""
    yield of.HELD.family({(): leader.held} if leader else None)
    for definition, at in (
        (of.CHECKPOINT_TIME, leader and leader.checkpointed),
        (of.PUBLICATION_TIME, leader and leader.published),
    ):
        yield definition.family({(): at} if at else None)


def _counted(counters: dict[str, int]) -> Iterator[Metric]:
    """Those that have not happened yet are 0, so that the first one is an increase."""
    values: dict[Definition, _Values] = {definition: {} for definition in _COUNTED}
    for definition, labels in COUNTERS.values():
        values[definition][labels] = 0
    values[of.EVENTS] = {(name,): 0 for name in _EVENTS}
    for name, count in counters.items():
        definition, labels = COUNTERS.get(name, (of.EVENTS, (name,)))
        values[definition][labels] = count
    for definition, of_definition in values.items():
        yield definition.family(of_definition)
