"""Reports: how good the latest predictions of all workers are, as workers tell shard 0."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from streamtrain.errors import ShardRefused, StreamtrainError
from streamtrain.ps.shards import Control
from streamtrain.train.progressive import Sums
from streamtrain.train.windows import decode, encode, merged

logger = logging.getLogger(__name__)

Figures = dict[str, dict[str, float | None]]

_AGE = 300.0  # seconds after which a worker that says nothing counts no more
_MOST_WORKERS = 1024
_MOST_NAME = 256
_MOST_BYTES = 4 << 20  # of one report
_PATIENCE = 1.0


class _Report(NamedTuple):
    heard: float
    windows: list[Any]


class Reports:
    """The last window of every worker. Thread-safe.

    Args:
        now: monotonic seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._by_worker: dict[str, _Report] = {}  # the one that was heard last is at the end
        self._figures: Figures | None = None

    def take(self, worker: str, windows: Sequence[Any]) -> None:
        """Takes the windows of a worker; see `Leader.report`."""
        if not 0 < len(worker) <= _MOST_NAME:
            raise ShardRefused(f"a report names a worker of {len(worker)} characters, not 1 to {_MOST_NAME}")
        if (size := sum(window.ByteSize() for window in windows)) > _MOST_BYTES:
            raise ShardRefused(f"a report has {size} bytes; at most {_MOST_BYTES}", "limit")
        decode(windows)
        with self._lock:
            self._by_worker.pop(worker, None)
            self._by_worker[worker] = _Report(self._now(), [*windows])
            if len(self._by_worker) > _MOST_WORKERS:
                del self._by_worker[next(iter(self._by_worker))]
            self._figures = None

    def leave(self, worker: str) -> None:
        """Forgets a worker."""
        with self._lock:
            if self._by_worker.pop(worker, None):
                self._figures = None

    def figures(self) -> Figures:
        """By label the figures over the windows of all workers that have been heard in the last five minutes."""
        with self._lock:
            oldest = self._now() - _AGE
            for worker in [worker for worker, report in self._by_worker.items() if report.heard < oldest]:
                del self._by_worker[worker]
                self._figures = None
            if self._figures is None:
                windows = [decode(report.windows) for report in self._by_worker.values()]
                self._figures = {label: metrics.as_dict() for label, metrics in merged(windows).items()}
            return self._figures


class Reporter:
    """Tells shard 0 of a worker's window, in a thread of its own. What fails is passed over: the next one counts.

    Args:
        control: of shard 0.
        worker: its name.
        failed: called for every report that was not taken.
    """

    def __init__(self, control: Control, worker: str, failed: Callable[[], object]) -> None:
        self._control, self._worker, self._failed = control, worker, failed
        self._changed = threading.Condition()
        self._sums: Mapping[str, Sums] | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="reports", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def offer(self, sums: Mapping[str, Sums]) -> None:
        """Has a window sent, in place of one that has not been yet; returns at once. The sums stay as they are."""
        with self._changed:
            self._sums = sums
            self._changed.notify()

    def close(self) -> None:
        """Ends; for a second it is waited for what is on its way."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(_PATIENCE)

    def _next(self) -> Mapping[str, Sums] | None:
        with self._changed:
            while self._sums is None and not self._is_closed:
                self._changed.wait()
            sums, self._sums = self._sums, None
            return sums

    def _run(self) -> None:
        while (sums := self._next()) is not None:
            try:
                self._control.report(self._worker, encode(sums))
            except StreamtrainError as exc:
                self._failed()
                logger.debug("window not reported: %s", exc)
            except Exception:  # whatever it is: training goes on
                self._failed()
                logger.exception("window not reported")
