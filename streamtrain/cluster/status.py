"""Status of a cluster: polls of its shards, and its lag behind the stream."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from streamtrain.errors import ShardError, TopicMissing
from streamtrain.periodic import Backoff, PeriodicTask
from streamtrain.ps.nodes.shards import Control
from streamtrain.ps.rpc import wire
from streamtrain.stream.source import Bounds

POLL_SECONDS = 2.0

"""Timeout of a poll: a shard that does not answer within it is `away`."""


logger = logging.getLogger(__name__)


def poll_shard(control: Control) -> Any | None:
    """The status of a shard; None: it does not answer."""
    try:
        return control.status()
    except ShardError:
        return None


def shard_to_json(index: int, address: str, status: Any | None) -> dict[str, Any]:
    """A shard in the status of a cluster, see docs/serving.md."""
    about = {"index": index, "address": address}
    if status is None:
        return about | {"state": "away"}
    return about | {
        "state": "ready" if status.ready else "empty",
        "rows": {table.name: table.rows for table in status.tables},
        "bytes": sum(table.bytes for table in status.tables) + status.dense_bytes,
        "clock": {str(partition): at for partition, at in wire.decode_clock(status.clock).items()},
        "samples": status.counters["samples"] if status.ready else None,
        "epoch": status.epoch if status.epoch >= 0 else None,
        "backup_in_step": status.standing.in_step if status.HasField("standing") else None,
    }


def samples_of(ready: Sequence[Any]) -> int | None:
    """Samples that were learned, by the shard that is farthest; None: none is ready."""
    return max((status.counters["samples"] for status in ready), default=None)


def watermark_of(ready: Sequence[Any]) -> float:
    """Latest event time that all shards have learned, seconds since the epoch; 0: none."""
    latest = [max(wire.decode_progress(status.clock).watermarks.values(), default=0.0) for status in ready]
    return min(latest, default=0.0)


_EVERY = 2.0  # seconds
_MAX_ENDS = 5000  # nearly three hours


class StreamLag:
    """Lag of the shards behind a stream, which it polls in a thread of its own. Thread-safe.

    Args:
        bounds: `Stream.bounds`.
        every: seconds between polls.
    """

    def __init__(self, bounds: Callable[[], Mapping[int, Bounds]], every: float = _EVERY) -> None:
        self._ask = bounds
        self._bounds: Mapping[int, Bounds] | None = None
        self._ends: deque[tuple[float, dict[int, int]]] = deque(maxlen=_MAX_ENDS)  # of partitions, by time
        self._learned_through: float | None = None
        self._lock = threading.Lock()
        self._is_missing = False  # the topic, as was said
        self._task = PeriodicTask(
            "lag", self._poll, every, subject="polling the stream for its lag", backoff=Backoff(every, every)
        )
        self.start, self.stop = self._task.start, self._task.stop

    def behind(self, ready: Sequence[Any]) -> int | None:
        """How many offsets lie between what all shards have learned and the ends; None: the stream does not answer.

        Args:
            ready: status of all shards that hold something; if none does, it is not known where the run began either.
        """
        bounds = self._bounds
        if bounds is None or not ready:
            return None
        clocks = [wire.decode_clock(status.start) | wire.decode_clock(status.clock) for status in ready]
        learned = {one: min(clock.get(one, of.low) for clock in clocks) for one, of in bounds.items()}
        return sum(max(0, of.high - max(learned[one], of.low)) for one, of in bounds.items())

    def learned_through(self, ready: Sequence[Any]) -> float | None:
        """A time, in seconds since the epoch, by which all that was in the stream is learned; None: not known.

        It is exact to the interval between polls, and later than the time of a message only if that has been learned.

        Args:
            ready: as for `behind`.
        """
        if not ready:
            return None
        clocks = [wire.decode_clock(status.start) | wire.decode_clock(status.clock) for status in ready]
        with self._lock:
            while self._ends and all(
                clock.get(one, 0) >= end for one, end in self._ends[0][1].items() for clock in clocks
            ):
                self._learned_through = self._ends.popleft()[0]
            return self._learned_through

    def _poll(self) -> None:
        try:
            at = time.time()
            self._bounds, self._is_missing = self._ask(), False
            ends = {one: of.high for one, of in self._bounds.items() if of.high > of.low}
            with self._lock:
                if self._ends and self._ends[-1][1] == ends:  # nothing has come: the same is known of a later time
                    self._ends.pop()
                self._ends.append((at, ends))
        except TopicMissing as exc:  # workers create it, or say that they wait for it
            self._bounds = None
            if not self._is_missing:
                logger.info("the lag is not known yet: %s", exc)
            self._is_missing = True
        except Exception:
            self._bounds = None
            raise
