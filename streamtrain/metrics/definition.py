"""What a metric is. Every one is declared once: here, in of_worker.py or in of_shard.py, and in docs/metrics.md.

Names follow Prometheus' conventions: base units, the unit at the end of the name, and `_total` after it where a number
only grows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric


@dataclass(frozen=True)
class Definition:
    """A metric.

    Attributes:
        name: as it is scraped.
        kind: "counter" only grows while the process lives; "gauge" goes up and down.
        labels: names of its labels.
        unit: which its name ends with, before "_total"; "": a flag, or in the unit of what it is about.
        help: what it means, in one sentence.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    unit: str
    help: str

    def counter(self, registry: CollectorRegistry) -> Counter:
        """It as an object that is counted up."""
        return Counter(self.name, self.help, self.labels, registry=registry)

    def gauge(self, registry: CollectorRegistry) -> Gauge:
        """It as an object that is set."""
        return Gauge(self.name, self.help, self.labels, registry=registry)

    def histogram(self, registry: CollectorRegistry, buckets: tuple[float, ...]) -> Histogram:
        """It as an object that observes values, with the upper bounds of their buckets."""
        return Histogram(self.name, self.help, self.labels, registry=registry, buckets=buckets)

    def family(self, values: Mapping[tuple[object, ...], float] | None = None) -> Metric:
        """It with its values at one moment, by values of its labels: a counter or a gauge that others keep."""
        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = kind(self.name, self.help, labels=self.labels)
        for labels, value in (values or {}).items():
            family.add_metric([str(label) for label in labels], value)
        return family


BUILD = Definition("streamtrain_build_info", "gauge", ("version",), "", "1, with the version of streamtrain.")
