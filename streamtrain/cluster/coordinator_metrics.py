"""What the coordinator tells Prometheus, as of a scrape."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from streamtrain.cluster.coordinator import SERVER, WORKER, Coordinator
from streamtrain.cluster.metrics import COUNTERS, LED, led
from streamtrain.metrics import of_coordinator as of
from streamtrain.metrics import of_shard

_STATES = ("ready", "empty", "away")
_COUNTED = (of_shard.CHECKPOINTS, of_shard.PUBLICATIONS, of_shard.VERSIONS)


class CoordinatorMetrics(Collector):
    """The metrics of a coordinator.

    Args:
        coordinator: whose.
        counters: gives what happened in its process, by name.
    """

    def __init__(self, coordinator: Coordinator, counters: Callable[[], Mapping[str, int]]) -> None:
        self._coordinator, self._counters = coordinator, counters

    def describe(self) -> Iterator[Metric]:
        """Without values: what a registry knows it by."""
        for definition in (of.MEMBERS, of.LOST, of.SHARDS, of.SLOT_EPOCH, of.LAG, of.EVENTS, *LED, *_COUNTED):
            yield definition.family()

    def collect(self) -> Iterator[Metric]:
        """As of now."""
        members = self._coordinator.members
        states = Counter(shard["state"] for shard in self._coordinator.shards())
        yield of.MEMBERS.family({(kind,): len(members.of(kind)) for kind in (WORKER, SERVER)})
        yield of.LOST.family({(kind,): members.lost[kind] for kind in (WORKER, SERVER)})
        yield of.SHARDS.family({(state,): states[state] for state in _STATES})
        yield of.SLOT_EPOCH.family({(): self._coordinator.slots.epoch})
        lag = self._coordinator.lag()
        yield of.LAG.family(None if lag is None else {(): lag})
        yield from led(self._coordinator.lead.leading)
        counters = dict(self._counters())
        for definition in _COUNTED:
            names = {name: labels for name, (of_name, labels) in COUNTERS.items() if of_name is definition}
            yield definition.family({labels: counters.pop(name, 0) for name, labels in names.items()})
        yield of.EVENTS.family({(name,): count for name, count in counters.items()})
