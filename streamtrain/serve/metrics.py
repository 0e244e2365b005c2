"""What a serving process tells Prometheus."""

import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from streamtrain.metrics import of_serving as of
from streamtrain.metrics.endpoint import process_registry

if TYPE_CHECKING:
    from streamtrain.serve.service import Service

_GATHERED = (
    *(
        of.WAITING,
        of.UNDER_WAY,
        of.SHED,
        of.CONNECTIONS,
        of.TOKENS,
        of.IDS,
        of.LOOKUPS,
        of.READY,
        of.INFO,
        of.AS_WANTED,
        of.PUBLICATION,
        of.WATERMARK,
        of.FRESHNESS,
        of.ROWS,
        of.BYTES,
    ),
    *(of.SWAPS, of.REFUSED, of.STALE, of.ROLLBACKS),
)


class ServingMetrics(Collector):
    """The metrics of one serving process.

    Args:
        service: of it.
        now: seconds since the epoch.

    Attributes:
        registry: of metrics, to be scraped.
    """

    def __init__(self, service: "Service", *, now: Callable[[], float] = time.time) -> None:
        self.registry: CollectorRegistry = process_registry()
        self._service = service
        self._publications = registry = service.registry
        self._follower = service.follower
        self._now = now
        # To find the one of some labels takes longer than to count, so they are found once.
        self._requests = cache(of.REQUESTS.counter(self.registry).labels)
        self._latency = cache(partial(of.LATENCY.histogram(self.registry, of.SECONDS).labels, registry.model.name))
        self._batch = of.BATCH.histogram(self.registry, of.INSTANCES)
        self._ids: dict[tuple[object, ...], float] = {}
        self._lookups: dict[tuple[object, ...], float] = {}
        service.batcher.observe = self._batch.observe
        self.registry.register(self)

    def answered(self, protocol: str, code: int) -> None:
        """A request for predictions was answered."""
        self._requests(protocol, code).inc()

    def predicted(self, version: str, seconds: float) -> None:
        """A request was predicted, and took so long."""
        self._latency(version).observe(seconds)

    def describe(self) -> Iterator[Metric]:
        """Without values: what a registry knows it by."""
        for definition in _GATHERED:
            yield definition.family()

    def collect(self) -> Iterator[Metric]:
        """As of now."""
        loaded = {str(version): one for version, one in self._publications.resident.items()}
        served = self._publications.served
        watermarks: dict[tuple[object, ...], float] = {
            (v,): one.publication.watermark for v, one in loaded.items() if one.publication.watermark
        }
        fresh = served is not None and served.publication.watermark > 0
        service = self._service
        yield of.WAITING.family({(): service.batcher.waiting})
        yield of.UNDER_WAY.family({(): service.admission.requests})
        yield of.SHED.family({(reason,): count for reason, count in service.admission.refused.items()})
        yield of.CONNECTIONS.family({(reason,): count for reason, count in service.connections.refused.items()})
        yield of.TOKENS.family({(kind,): count for kind, count in service.tokens.refused.items()})
        yield of.READY.family({(): served is not None})
        yield of.INFO.family({(self._publications.model.name, served.name): 1} if served else None)
        wanted = self._follower.selection.wanted if self._follower else None
        yield of.AS_WANTED.family({(): wanted in (None, self._publications.served_version)})
        yield of.PUBLICATION.family({(v,): one.publication.number for v, one in loaded.items()})
        yield of.WATERMARK.family(watermarks)
        yield of.FRESHNESS.family({(): self._now() - served.publication.watermark} if served and fresh else None)
        yield of.ROWS.family({(v, t): n for v, one in loaded.items() for t, n in one.loaded.rows.items()})
        yield of.BYTES.family({(v,): one.loaded.nbytes for v, one in loaded.items()})
        yield of.SWAPS.family({(kind,): count for kind, count in self._publications.swaps.items()})
        yield of.ROLLBACKS.family({(reason,): count for reason, count in service.watchdog.rollbacks.items()})
        yield of.REFUSED.family({(): self._publications.refused})
        yield of.STALE.family({(): self._follower.stale_seconds if self._follower else 0})
        for version, one in loaded.items():
            for table, (found, looked_up) in dict(one.found).items():
                # Of a version that is loaded again, what it counted begins anew, as after a restart.
                self._ids[version, table, "found"] = found
                self._ids[version, table, "born"] = looked_up - found
            for (table, outcome), ids in one.loaded.lookups.items():
                self._lookups[version, table, outcome] = ids
        yield of.IDS.family(self._ids)
        yield of.LOOKUPS.family(self._lookups)
