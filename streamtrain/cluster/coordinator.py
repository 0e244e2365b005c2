"""Coordinator: what is known of the whole cluster. It is on no hot path: while it is away all else goes on."""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from streamtrain._core import shards_of
from streamtrain.cluster.lag import Lag
from streamtrain.cluster.lead import Lead
from streamtrain.cluster.looks import as_json, look_at, samples_of, watermark_of
from streamtrain.cluster.members import Member, Members
from streamtrain.cluster.slots import SlotMap
from streamtrain.ps.shard import Row
from streamtrain.ps.shards import Control

logger = logging.getLogger(__name__)

WORKER, SERVER = "worker", "server"
_EVERY = 1.0  # seconds between two looks at the shards
_POINT_EVERY = 2.0
_POINTS = 300  # ten minutes
_RATE_SECONDS = 10.0  # over which samples per second are counted
_MOST_GONE = 4096  # workers whose dead letters are kept apart, in case that they come back


class Coordinator:
    """Thread-safe.

    Args:
        controls: of all shards, in order; their timeouts are how long a look may take.
        slots: which shard has which keys.
        lead: what it does for all shards.
        lag: how far the shards are behind the stream; None: the workers' own lags are all that is known.
        now: seconds since the epoch.
    """

    def __init__(
        self,
        controls: Sequence[Control],
        slots: SlotMap,
        lead: Lead,
        lag: Lag | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.slots, self.lead = slots, lead
        self._stream_lag = lag
        self.members = Members(self._left)
        self._controls, self._now = controls, now
        self._looks: list[Any] = [None] * len(controls)  # what shards said last; None: they are away
        self._away: set[int] = set()  # shards that had answered and do not
        self._samples: deque[tuple[float, int]] = deque()
        self._points: deque[dict[str, Any]] = deque(maxlen=_POINTS)
        self._gone: dict[str, Mapping[str, int]] = {}  # dead letters of workers that are gone, by name
        self._forgotten: Counter[str] = Counter()  # of those that have been gone for long
        self._point_due = 0.0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(max(len(controls), 1), "looks")
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)

    def start(self) -> None:
        """Begins."""
        self.lead.start()
        if self._stream_lag:
            self._stream_lag.start()
        self._thread.start()

    def stop(self) -> None:
        """Ends, with a last checkpoint if the shards answer still."""
        self._stop.set()
        if self._stream_lag:
            self._stream_lag.stop()
        self._thread.join()
        self.lead.stop()
        self._pool.shutdown()

    def inspect(self, table: str, key: int) -> Row | None:
        """What the shard that has a row knows of it; None: there is no such row.

        Raises:
            ShardError: the shard does not answer, or there is no such table.
        """
        owner = int(shards_of(np.array([key], np.uint64), len(self._controls))[0])
        return self._controls[owner].inspect(table, key)

    def status(self) -> dict[str, Any]:
        """The cluster, as plain values; docs/serving.md lists them."""
        workers, servers = self.members.of(WORKER), self.members.of(SERVER)
        letters = self._dead_letters(workers)
        with self._lock:
            looks, points = [*self._looks], [*self._points]
        checkpoints, publications = self.lead.checkpoints, self.lead.publications
        published = publications.last if publications else None
        ready = [look for look in looks if look is not None and look.ready]
        return {
            "time": self._now(),
            "run": ready[0].run if ready else None,
            "slots": self.slots._asdict(),
            "figures": self.lead.reports.figures(),
            "samples": samples_of(ready),
            "samples_per_s": self._rate(),
            "watermark": watermark_of(ready) or None,
            "lag": self.lag(),
            "shards": self.shards(),
            "workers": [_worker(one) for one in workers],
            "servers": [one.about | {"name": one.name, "seen": one.seen} for one in servers],
            "dead_letters": dict(letters),
            "checkpoint": None if checkpoints is None or checkpoints.last is None else checkpoints.last._asdict(),
            "publication": None
            if published is None
            else {"number": published.number, "published": published.published, "watermark": published.watermark},
            "held": publications.held if publications else "",
            "history": points,
        }

    def lag(self) -> int | None:
        """Messages that are not learned yet; where the stream does not tell, of those that workers have."""
        with self._lock:
            ready = [look for look in self._looks if look is not None and look.ready]
        behind = self._stream_lag.behind(ready) if self._stream_lag else None
        return _lag(self.members.of(WORKER)) if behind is None else behind

    def shards(self) -> list[dict[str, Any]]:
        """The shards, as plain values."""
        with self._lock:
            looks = [*self._looks]
        return [as_json(i, self.slots.shards[i], look) for i, look in enumerate(looks)]

    def _left(self, member: Member) -> None:
        """What a worker has counted stays counted."""
        if member.kind == WORKER:
            with self._lock:
                self._gone.pop(member.name, None)
                self._gone[member.name] = _counts(member.about.get("dead_letters"))
                if len(self._gone) > _MOST_GONE:
                    self._forgotten.update(self._gone.pop(next(iter(self._gone))))
            self.lead.leading.leave(member.name)

    def _dead_letters(self, workers: Sequence[Member]) -> Counter[str]:
        """Of all workers, each once: one that was taken for gone, and is back, tells all that it has counted again."""
        with self._lock:
            letters, by_worker = Counter(self._forgotten), dict(self._gone)
        by_worker |= {worker.name: _counts(worker.about.get("dead_letters")) for worker in workers}
        for counts in by_worker.values():
            letters.update(counts)
        return letters

    def _run(self) -> None:
        while True:
            try:
                self._look()
            except Exception:  # whatever it is: the next look may be better
                logger.exception("the shards were not looked at")
            if self._stop.wait(_EVERY):
                return

    def _look(self) -> None:
        looks = list(self._pool.map(look_at, self._controls))
        ready = [look for look in looks if look is not None and look.ready]
        at = time.monotonic()
        for index, (before, now) in enumerate(zip(self._looks, looks, strict=True)):
            self._note(index, before, now)
        with self._lock:
            self._looks = looks
            if (samples := samples_of(ready)) is not None:
                self._samples.append((at, samples))
            while self._samples and self._samples[0][0] < at - _RATE_SECONDS:
                self._samples.popleft()
        if at >= self._point_due:
            self._point_due = at + _POINT_EVERY
            self._add_point(ready)

    def _note(self, index: int, before: Any | None, now: Any | None) -> None:
        """Says that a shard has gone, and that it is back; not what the first look finds."""
        was_away = index in self._away
        if before is not None and now is None:
            logger.warning("shard %d at %s does not answer", index, self.slots.shards[index])
            self._away.add(index)
        elif was_away and now is not None:
            logger.info("shard %d at %s answers again", index, self.slots.shards[index])
            self._away.discard(index)

    def _add_point(self, ready: Sequence[Any]) -> None:
        figures, rate = self.lead.reports.figures(), self._rate()
        lag = self.lag()
        watermark = watermark_of(ready)
        point = {
            "time": self._now(),
            "samples_per_s": rate,
            "lag": lag,
            "freshness_ms": 1000 * (self._now() - watermark) if watermark else None,
            "auc": {label: of.get("auc") for label, of in figures.items()},
            "log_loss": {label: of.get("log_loss") for label, of in figures.items()},
        }
        with self._lock:
            self._points.append(point)

    def _rate(self) -> float | None:
        with self._lock:
            if len(self._samples) < 2:
                return None
            (began, first), (ended, last) = self._samples[0], self._samples[-1]
        return max(0.0, (last - first) / (ended - began))


def _lag(workers: Sequence[Member]) -> int | None:
    lags = [_counts(worker.about.get("lag")) for worker in workers]
    return sum(sum(lag.values()) for lag in lags) if lags else None


def _worker(member: Member) -> dict[str, Any]:
    about = member.about
    partitions, rate = about.get("partitions"), about.get("samples_per_s")
    return {
        "name": member.name,
        "partitions": [one for one in partitions if isinstance(one, int)] if isinstance(partitions, list) else [],
        "lag": sum(_counts(about.get("lag")).values()),
        "samples_per_s": rate if isinstance(rate, int | float) else None,
        "seen": member.seen,
    }


def _counts(given: object) -> Mapping[str, int]:
    """Counts by name, of what a process said of itself."""
    return {str(k): v for k, v in given.items() if isinstance(v, int)} if isinstance(given, dict) else {}
