"""The metrics of a shard and of the coordinator; one of them has those of checkpoints and publications."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client.metrics_core import Metric

from streamtrain.metrics.registry import counter, gauge


class LeadState(NamedTuple):
    """The state of checkpoints and publications, of the process that makes them.

    Attributes:
        held: whether the quality gate holds a publication back.
        checkpointed: when the newest checkpoint was complete, in seconds since the epoch; None: not known.
        published: when the newest publication was made, likewise.
    """

    held: bool
    checkpointed: float | None
    published: float | None


@dataclass(frozen=True)
class ShardState:
    """The state of a shard at one moment.

    Attributes:
        shard, shards: its number, and how many there are.
        run: id of the run; "": none yet.
        ready: whether it has rows to serve.
        workers: open sessions.
        table_rows, table_bytes: by table; the latter of memory.
        table_rows_on_disk, table_disk_bytes: by table.
        dense_bytes: of its dense slice, with optimizer state.
        clock: next offset by partition.
        samples: learned from, of its state; None: it is empty.
        watermark: latest event time, in seconds since the epoch; None: none yet.
        epoch: of its newest checkpoint; None: none.
        backup_in_step: whether its backup has all that is acknowledged; None: no backup.
        counters: events, by the names in `ShardStatus.counters` of schemas/ps.proto.
        lead: if it makes checkpoints and publications for all shards.
    """

    shard: int
    shards: int
    run: str
    ready: bool
    workers: int
    table_rows: Mapping[str, int]
    table_bytes: Mapping[str, int]
    table_rows_on_disk: Mapping[str, int]
    table_disk_bytes: Mapping[str, int]
    dense_bytes: int
    clock: Mapping[int, int]
    samples: int | None
    watermark: float | None
    epoch: int | None
    backup_in_step: bool | None
    counters: Mapping[str, int]
    lead: LeadState | None


# Events that alerts look at: they are 0 before they first happen, so that the first one is an increase.
_EVENTS = (
    *("refused_malformed", "refused_mismatch", "refused_limit", "refused_unauthenticated", "refused_token"),
    *("backup_lost", "backup_took_over", "damaged_checkpoints", "failed_ShardBroken"),
    "disk_errors",
)


class ShardMetrics:
    """The metrics of a shard, as a collector of prometheus_client.

    Args:
        read: reads its state, at each scrape and in its thread.
    """

    def __init__(self, read: Callable[[], ShardState]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """All families, those without samples as well."""
        state = self._read()
        counters = dict(state.counters)
        yield from _collect_state(state)
        yield from _collect_counters(counters)
        yield from collect_lead(state.lead, counters)
        yield counter(
            "streamtrain_shard_events_total",
            "Other errors and events: refused_… (requests, by reason), failed_… (by error), broken_sessions, "
            "silent_sessions, backup_lost, backup_took_over, damaged_checkpoints (skipped during restore), disk_errors "
            "(rows that stay in memory as they could not be written).",
            dict.fromkeys(_EVENTS, 0) | counters,
            "event",
        )


def collect_lead(lead: LeadState | None, counters: dict[str, int]) -> Iterator[Metric]:
    """The families of checkpoints and publications.

    Args:
        lead: None: another process makes them.
        counters: by name; those that these families count are removed.
    """
    yield counter(
        "streamtrain_shard_checkpoints_total",
        "Checkpoints of all shards that shard 0, or the coordinator, was to take: taken or failed.",
        _take(counters, "checkpoints", "taken", "failed"),
        "outcome",
    )
    yield counter(
        "streamtrain_shard_publications_total",
        "Publications that shard 0, or the coordinator, tried: published, held (back, by the quality gate) or failed.",
        _take(counters, "publications", "published", "held", "failed"),
        "outcome",
    )
    yield counter(
        "streamtrain_shard_versions_total",
        "Versions that shard 0, or the coordinator, was to make by schedule: made or failed.",
        _take(counters, "versions", "made", "failed"),
        "outcome",
    )
    yield gauge(
        "streamtrain_shard_publication_held",
        "1 while publications are held back by the quality gate, else 0; of shard 0, or the coordinator.",
        lead and lead.held,
    )
    yield gauge(
        "streamtrain_shard_checkpoint_timestamp_seconds",
        "When the newest checkpoint was complete, in seconds since the epoch; of shard 0, or the coordinator.",
        (lead and lead.checkpointed) or None,
    )
    yield gauge(
        "streamtrain_shard_publication_timestamp_seconds",
        "When the newest publication was made, in seconds since the epoch; of shard 0, or the coordinator.",
        (lead and lead.published) or None,
    )


def _collect_state(state: ShardState) -> Iterator[Metric]:
    yield gauge(
        "streamtrain_shard_info",
        "1, with the number of the shard, the number of shards and the run.",
        {(state.shard, state.shards, state.run): 1},
        *("shard", "shards", "run"),
    )
    yield gauge(
        "streamtrain_shard_ready", "1 if the shard has rows to serve; 0 while it is restored or is empty.", state.ready
    )
    yield from _collect_tables(state)
    yield gauge(
        "streamtrain_shard_dense_bytes",
        "Memory of the shard's dense slice, optimizer state included.",
        state.dense_bytes,
    )
    yield gauge(
        "streamtrain_shard_clock_offset",
        "Offset of the first sample of a partition that the shard has not learned.",
        state.clock,
        "partition",
    )
    yield gauge(
        "streamtrain_shard_samples",
        "Samples that the shard's state has learned from; goes back when an older state is restored.",
        state.samples,
    )
    yield gauge(
        "streamtrain_shard_watermark_timestamp_seconds",
        "Latest event time that the shard has learned from, in seconds since the epoch; missing before the first.",
        state.watermark,
    )
    yield gauge(
        "streamtrain_shard_backup_in_step",
        "1 if the shard's backup has all that is acknowledged, 0 if it has not; missing where there is no backup.",
        state.backup_in_step,
    )
    yield gauge("streamtrain_shard_workers", "Workers with an open session to the shard.", state.workers)
    yield gauge(
        "streamtrain_shard_checkpoint_epoch",
        "Epoch of the newest checkpoint that the shard wrote or was restored from; missing without one and while one "
        "is being written.",
        state.epoch,
    )


def _collect_tables(state: ShardState) -> Iterator[Metric]:
    yield gauge("streamtrain_shard_table_rows", "Rows of a table on the shard.", state.table_rows, "table")
    yield gauge(
        "streamtrain_shard_table_bytes",
        "Memory of a table on the shard, its index included.",
        state.table_bytes,
        "table",
    )
    yield gauge(
        "streamtrain_shard_table_disk_rows",
        "Rows of a table on the shard that are on disk, as they have no room in ps.memory.",
        state.table_rows_on_disk,
        "table",
    )
    yield gauge(
        "streamtrain_shard_table_disk_bytes",
        "Size of a table's rows on disk, with holes that rows have left.",
        state.table_disk_bytes,
        "table",
    )


def _collect_counters(counters: dict[str, int]) -> Iterator[Metric]:
    yield counter(
        "streamtrain_shard_pushes_total",
        "Pushes of workers: applied, duplicate (acknowledged, learned before) or rejected (the worker rewinds).",
        _take(counters, "pushes", "applied", "duplicate", "rejected"),
        "outcome",
    )
    yield counter(
        "streamtrain_shard_row_gradients_total",
        "Gradients of rows on the shard: applied, unadmitted or non_finite, as for workers.",
        _take(counters, "gradients", "applied", "unadmitted")
        | {"non_finite": counters.pop("gradients_non_finite_rows", 0)},
        "outcome",
    )
    yield counter(
        "streamtrain_shard_non_finite_dense_gradients_total",
        "Gradients of the shard's dense slice that were dropped because they were not finite.",
        counters.pop("gradients_non_finite_dense", 0),
    )
    yield counter(
        "streamtrain_shard_non_finite_statistics_changes_total",
        "Changes of the shard's slice of the graph's statistics that were dropped because they were not finite.",
        counters.pop("gradients_non_finite_statistics", 0),
    )
    yield counter(
        "streamtrain_shard_dropped_rows_total",
        "Rows that the shard dropped: expired (expire_after) or evicted (capacity).",
        _take(counters, "gradients", "expired", "evicted"),
        "reason",
    )
    yield counter(
        "streamtrain_shard_disk_read_rows_total",
        "Rows that the shard read from disk, as they were not in memory.",
        counters.pop("disk_reads", 0),
    )
    yield counter(
        "streamtrain_shard_checkpoint_failures_total",
        "Checkpoints whose part of the shard could not be written.",
        counters.pop("checkpoint_failures", 0),
    )


def _take(counters: dict[str, int], prefix: str, *outcomes: str) -> dict[str, int]:
    """Removes the counts of some outcomes, by outcome; those that have not happened yet are 0."""
    return {outcome: counters.pop(f"{prefix}_{outcome}", 0) for outcome in outcomes}


@dataclass(frozen=True)
class CoordinatorState:
    """The state of a coordinator at one moment.

    Attributes:
        members, lost: processes with a lease, and leases that ended, by "worker" and "server".
        shards: by "ready", "empty" and "away".
        slot_epoch: of the slot map.
        lag: messages that not all shards have learned; None: not known.
        proposed_shards, proposed_workers: how many would be better; None: not known.
        lead: of checkpoints and publications.
        counters: events, by name.
    """

    members: Mapping[str, int]
    lost: Mapping[str, int]
    shards: Mapping[str, int]
    slot_epoch: int
    lag: int | None
    proposed_shards: int | None
    proposed_workers: int | None
    lead: LeadState
    counters: Mapping[str, int]


class CoordinatorMetrics:
    """The metrics of a coordinator, as a collector of prometheus_client.

    Args:
        read: reads its state, at each scrape and in its thread.
    """

    def __init__(self, read: Callable[[], CoordinatorState]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """All families, those without samples as well."""
        state = self._read()
        yield gauge(
            "streamtrain_coordinator_members",
            "Processes whose lease is valid: worker or server.",
            state.members,
            "kind",
        )
        yield counter(
            "streamtrain_coordinator_lost_members_total",
            "Processes whose lease expired before they left: worker or server.",
            state.lost,
            "kind",
        )
        yield gauge(
            "streamtrain_coordinator_shards",
            "Shards that are ready, empty (waiting for a worker) or away (not answering).",
            state.shards,
            "state",
        )
        yield gauge(
            "streamtrain_coordinator_slot_epoch",
            "Epoch of the shard map; grows when the set of shards changes.",
            state.slot_epoch,
        )
        yield gauge(
            "streamtrain_coordinator_lag_messages",
            "Messages of the stream that not all shards have learned; missing while it is not known.",
            state.lag,
        )
        yield gauge(
            "streamtrain_coordinator_proposed_shards",
            "Shards that would be enough and not too many for the load of the last minute; missing while it is not "
            "known.",
            state.proposed_shards,
        )
        yield gauge(
            "streamtrain_coordinator_proposed_workers",
            "Workers that would be enough and not too many for the load of the last minute; missing while it is not "
            "known.",
            state.proposed_workers,
        )
        counters = dict(state.counters)
        yield from collect_lead(state.lead, counters)
        yield counter(
            "streamtrain_coordinator_events_total",
            "Errors: refused_… (requests, by reason), failed_… (by error).",
            counters,
            "event",
        )
