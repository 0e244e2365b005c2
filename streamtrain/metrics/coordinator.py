"""The metrics of the coordinator."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric

from streamtrain.metrics.registry import counter, gauge
from streamtrain.metrics.shard import LeadState, collect_lead


@dataclass(frozen=True)
class CoordinatorState:
    """The state of a coordinator at one moment.

    Attributes:
        members, lost: processes with a lease, and leases that ended, by "worker" and "server".
        shards: by "ready", "empty" and "away".
        slot_epoch: of the slot map.
        lag: messages that not all shards have learned; None: not known.
        lead: of checkpoints and publications.
        counters: events, by name.
    """

    members: Mapping[str, int]
    lost: Mapping[str, int]
    shards: Mapping[str, int]
    slot_epoch: int
    lag: int | None
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
        counters = dict(state.counters)
        yield from collect_lead(state.lead, counters)
        yield counter(
            "streamtrain_coordinator_events_total",
            "Errors: refused_… (requests, by reason), failed_… (by error).",
            counters,
            "event",
        )
