"""Quality: how good the latest predictions of all workers are, as workers report it to the coordinator."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import streamtrain.cluster.coordinator_pb2 as pb
from streamtrain.errors import PublicationError, ShardRefused, StreamtrainError
from streamtrain.logs import LogThrottle
from streamtrain.quality.probes import MOST_BYTES as MOST_PROBE_BYTES
from streamtrain.quality.progressive import BINS, Metrics, Sums
from streamtrain.store.redis.model import RedisModel

logger = logging.getLogger(__name__)

_PROBES_EVERY = 10.0  # seconds
_PROBE_GROUPS = 16  # kept in Redis

WindowFigures = dict[str, dict[str, float | None]]

_EXPIRES = 300.0  # seconds after which the last report of a worker no longer counts
_MAX_WORKERS = 1024
_MAX_NAME = 256
_MAX_REPORT_BYTES = 4 << 20
_CLOSE_SECONDS = 1.0


class _Report(NamedTuple):
    received: float
    windows: list[Any]


class QualityAggregator:
    """Merges the latest windows of all workers. Thread-safe.

    Args:
        now: monotonic seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._reports: dict[str, _Report] = {}  # by worker, the latest last
        self._figures: WindowFigures | None = None
        self._probes: dict[str, bytes] = {}  # by worker, the latest last

    def add(self, worker: str, windows: Sequence[Any], probes: bytes = b"") -> None:
        """Replaces the report of a worker.

        Args:
            worker: its name.
            windows: a `LabelWindow` of schemas/coordinator.proto for each label.
            probes: samples that it has learned (quality/probes.py), for servers to try what they serve with; b"": none.

        Raises:
            ShardRefused: they are damaged, or too large.
        """
        if not 0 < len(worker) <= _MAX_NAME:
            raise ShardRefused(f"a worker's name must have 1 to {_MAX_NAME} characters, not {len(worker)}")
        if (size := sum(window.ByteSize() for window in windows)) > _MAX_REPORT_BYTES:
            raise ShardRefused(f"a report has {size} bytes; at most {_MAX_REPORT_BYTES}", "limit")
        if len(probes) > MOST_PROBE_BYTES:
            raise ShardRefused(f"probes have {len(probes)} bytes; at most {MOST_PROBE_BYTES}", "limit")
        decode_windows(windows)
        with self._lock:
            _put(self._reports, worker, _Report(self._now(), [*windows]))
            self._figures = None
            if probes:
                _put(self._probes, worker, probes)

    def leave(self, worker: str) -> None:
        with self._lock:
            if self._reports.pop(worker, None):
                self._figures = None

    def take_probes(self, most: int) -> list[bytes]:
        """Removes the probes received since the last call, and returns those of the latest `most` workers."""
        with self._lock:
            probes, self._probes = self._probes, {}
        return [*probes.values()][-most:]

    def figures(self) -> WindowFigures:
        """Figures by label over the windows of all workers that have reported within five minutes."""
        with self._lock:
            oldest = self._now() - _EXPIRES
            for worker in [worker for worker, report in self._reports.items() if report.received < oldest]:
                del self._reports[worker]
                self._figures = None
            if self._figures is None:
                windows = [decode_windows(report.windows) for report in self._reports.values()]
                self._figures = {label: metrics.as_dict() for label, metrics in merge_windows(windows).items()}
            return self._figures


def _put(by_worker: dict[str, Any], worker: str, value: Any) -> None:
    by_worker.pop(worker, None)
    by_worker[worker] = value
    if len(by_worker) > _MAX_WORKERS:
        del by_worker[next(iter(by_worker))]


class QualityReporter:
    """Reports a worker's window in a thread of its own. A report that fails is dropped: the next one replaces it.

    Args:
        report: `CoordinatorClient.report`.
        failed: called for every report that fails.
    """

    def __init__(
        self, report: Callable[[str, list[Any], bytes], object], worker: str, failed: Callable[[], object]
    ) -> None:
        self._report, self._worker, self._failed = report, worker, failed
        self._changed = threading.Condition()
        self._next_report: tuple[Mapping[str, Sums], bytes] | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="reports", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def offer(self, sums: Mapping[str, Sums], probes: bytes = b"") -> None:
        """Queues a report in place of one that was not sent yet; `sums` must not change any more."""
        with self._changed:
            self._next_report = sums, probes
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread; waits at most a second for a report under way."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(_CLOSE_SECONDS)

    def _next(self) -> tuple[Mapping[str, Sums], bytes] | None:
        with self._changed:
            while self._next_report is None and not self._is_closed:
                self._changed.wait()
            report, self._next_report = self._next_report, None
            return report

    def _run(self) -> None:
        while (report := self._next()) is not None:
            sums, probes = report
            try:
                self._report(self._worker, encode_windows(sums), probes)
            except StreamtrainError as exc:
                self._failed()
                logger.debug("report failed: %s", exc)
            except Exception:  # training must continue
                self._failed()
                logger.exception("report failed")


_SUMS = ("weight", "labels", "predictions", "loss", "absolute")
_MOST_SAMPLES = 1 << 53  # beyond it not every integer is a float64
_ROUNDING = 1e-6


def encode_windows(sums: Mapping[str, Sums]) -> list[Any]:
    """A `LabelWindow` message for each label."""
    return [_encode(label, window) for label, window in sums.items()]


def _encode(label: str, sums: Sums) -> Any:
    flat = sums.counts.ravel()
    bins = np.flatnonzero(flat)
    return pb.LabelWindow(
        label=label,
        binary=sums.binary,
        samples=sums.samples,
        non_finite=sums.non_finite,
        **{name: getattr(sums, name) for name in _SUMS},
        bins=bins.astype("<u2").tobytes(),
        counts=flat[bins].astype("<f8").tobytes(),
    )


def decode_windows(windows: Iterable[Any]) -> dict[str, Sums]:
    """Sums by label from `LabelWindow` messages.

    Raises:
        ShardRefused: a message is damaged.
    """
    sums: dict[str, Sums] = {}
    for window in windows:
        if not window.label or window.label in sums:
            raise ShardRefused(f"missing or duplicate label {window.label!r} in a window")
        try:
            sums[window.label] = _decode(window)
        except ValueError as exc:
            raise ShardRefused(f"the window of label {window.label!r} is invalid: {exc}") from exc
    return sums


def _decode(window: Any) -> Sums:
    sums = Sums(window.binary)
    sums.samples, sums.non_finite = window.samples, window.non_finite
    for name in _SUMS:
        setattr(sums, name, getattr(window, name))
    sums.spread = 0.0 if window.binary else math.nan  # which is not sent
    given = np.array([getattr(sums, name) for name in _SUMS])
    if max(sums.samples, sums.non_finite) > _MOST_SAMPLES or not np.isfinite(given).all():
        raise ValueError(f"its sums are {given.tolist()} of {sums.samples} samples")
    if min(sums.weight, sums.absolute) < 0:
        raise ValueError("its weights or errors are negative")
    bins, counts = np.frombuffer(window.bins, "<u2"), np.frombuffer(window.counts, "<f8")
    if len(bins) != len(counts) or (len(bins) and not sums.binary):
        raise ValueError(f"it has {len(bins)} bins and {len(counts)} counts")
    if (np.diff(bins.astype(np.int64)) <= 0).any() or (bins >= 2 * BINS).any():
        raise ValueError(f"its bins do not ascend to at most {2 * BINS - 1}")
    if not (np.isfinite(counts) & (counts > 0)).all():
        raise ValueError("its counts are not finite and above 0")
    if sums.binary and abs(counts.sum() - sums.weight) > _ROUNDING * sums.weight:
        raise ValueError(f"its counts add up to {counts.sum()}, not to {sums.weight}")
    sums.counts.ravel()[bins] = counts
    return sums


def merge_windows(windows: Iterable[Mapping[str, Sums]]) -> dict[str, Metrics]:
    """Metrics by label over all samples of several windows."""
    merged: dict[tuple[str, bool], Sums] = {}
    for window in windows:
        for label, sums in window.items():
            merged.setdefault((label, sums.binary), Sums(sums.binary)).merge(sums)
    return {label: sums.metrics() for (label, _), sums in merged.items()}


class ProbePublisher:
    """Publishes the probes of workers next to the model: the latest groups, in a ring. Used by one thread at a time.

    Args:
        quality: receives them.
        model: where they are published.
        now: monotonic seconds.
    """

    def __init__(
        self, quality: QualityAggregator, model: RedisModel, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._quality, self._model, self._now = quality, model, now
        self._throttle = LogThrottle()
        self._due, self._next = now(), 0

    def publish(self) -> None:
        """Publishes what has been received, if it is due. After a failure, what is received later is published."""
        if self._now() < self._due:
            return
        probes = self._quality.take_probes(_PROBE_GROUPS)
        if not probes:
            return
        self._due = self._now() + _PROBES_EVERY
        try:
            self._model.keep_probes({(self._next + i) % _PROBE_GROUPS: group for i, group in enumerate(probes)})
        except PublicationError as exc:  # what was published before is still there
            if times := self._throttle.allow():
                logger.warning("publishing samples for the watchdogs of servers failed %d times: %s", times, exc)
            return
        self._next += len(probes)
