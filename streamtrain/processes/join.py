"""The process of a joiner: it joins, says how far in Redis, and serves metrics."""

import json
import logging
import math
import threading
from collections.abc import Mapping, Sequence

from streamtrain.join.joiner import Joiner, Position
from streamtrain.metrics.join import Delays, JoinMetrics, JoinState
from streamtrain.metrics.registry import process_registry, serve
from streamtrain.periodic import PeriodicTask
from streamtrain.publish.opening import open_redis
from streamtrain.settings.groups import Settings
from streamtrain.shutdown import step
from streamtrain.store.redis.layout import RedisKeys

_REPORT_SECONDS = 1.0
logger = logging.getLogger(__name__)


class JoinProcess:
    """A joiner, served.

    Args:
        settings: of the service.
        instance: name of this joiner in its group; None: any.

    Raises:
        ConfigError: nothing is to be joined, the topics do not fit, or metrics cannot be served.
    """

    def __init__(self, settings: Settings, instance: str | None = None) -> None:
        self._delays = Delays()
        self._lock = threading.Lock()
        self._positions: dict[int, Position] = {}
        self.joiner = Joiner(settings, instance, self._observe)
        publish = settings.publish
        self._redis = open_redis(publish)
        self._key = RedisKeys(publish.model).join
        self._report = PeriodicTask("positions", self._write_positions, _REPORT_SECONDS, subject="writing positions")
        registry = process_registry()
        registry.register(JoinMetrics(lambda: read_state(self.joiner), self._delays))
        address = settings.join.metrics
        self.metrics = serve(address, registry, self._not_ready) if address else None

    def _not_ready(self) -> str:
        return "" if self.joiner.is_member else "not yet a member of the group that joins: see the log"

    def _observe(self, delays: Sequence[float], positions: Mapping[int, Position]) -> None:
        self._delays.add(delays)
        with self._lock:
            self._positions.update(positions)
        self._report.wake()

    def _write_positions(self) -> None:
        """How far partitions are joined, for requests that wait for an outcome to be learned."""
        with self._lock:
            positions, self._positions = self._positions, {}
        if self._redis is None or not positions:
            return
        try:
            fields = [part for number, of in positions.items() for part in (number, json.dumps(of._asdict()))]
            self._redis.call("HSET", self._key, *fields)
        except Exception:
            with self._lock:
                self._positions = positions | self._positions
            raise

    def run(self, stopped: threading.Event) -> None:
        """Joins until `stopped` is set."""
        self._report.start()
        try:
            self.joiner.run(stopped)
        finally:
            with step("the last report"):
                self._report.close(_REPORT_SECONDS)
            if self._redis:
                self._redis.close()
            if self.metrics:
                self.metrics.close()


def read_state(joiner: Joiner) -> JoinState:
    """The state of a joiner, for its metrics."""
    totals, partitions = joiner.totals, dict(joiner.partitions)
    marks = {
        (log, number): of
        for number, partition in partitions.items()
        for log, of in zip(("impressions", "outcomes"), partition.join.watermarks, strict=True)
        if math.isfinite(of)
    }
    return JoinState(
        impressions={"sample": totals.samples, "dropped": totals.dropped, "tombstone": totals.tombstones[0]},
        outcomes={
            "attributed": totals.attributed,
            "late": totals.late,
            "orphaned": totals.orphaned,
            "ignored": totals.ignored,
            "tombstone": totals.tombstones[1],
        },
        positives=dict(totals.positives),
        dead_letters=dict(totals.dead_letters),
        waiting={number: partition.join.waiting for number, partition in partitions.items()},
        file_bytes={number: partition.buffer.file_bytes for number, partition in partitions.items()},
        lag=joiner.lag(),
        watermarks=marks,
        commits=totals.commits,
        restarts=totals.restarts,
        stalled=len(joiner.standstill.stalled),
        stalls=joiner.standstill.total,
    )
