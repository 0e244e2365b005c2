"""The demo from processes that have been started to figures."""

import json
import shlex
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from streamtrain.cluster.client import CoordinatorClient
from streamtrain.demo.clients import ClientStats, FreshnessProbe, predict
from streamtrain.demo.stream import FLIGHTS, LiveFlights, blocks, flights, instance
from streamtrain.errors import PublicationError, ShardError, SourceUnavailable, StreamtrainError
from streamtrain.ps.rpc.security import Security
from streamtrain.publish.opening import open_published_model
from streamtrain.serve.client import Endpoint, EndpointError
from streamtrain.settings.groups import Settings
from streamtrain.store.redis.versions import RedisVersions
from streamtrain.stream.opening import open_stream, open_writer
from streamtrain.stream.producer import Rate, Stop, produce
from streamtrain.stream.source import Writer

LABEL = "label"
NOTHING: dict[str, object] = dict.fromkeys(("samples", "samples_per_s", "auc", "freshness_ms_p99", "version"))
"""Figures of a demo that was stopped before it began."""


class ShownFigures:
    """Figures from the coordinator, the stream and the clients. Belongs to one thread.

    Args:
        traffic: the flights.
        stats: by clients.
    """

    def __init__(self, traffic: LiveFlights, stats: ClientStats) -> None:
        self._traffic, self._stats = traffic, stats
        self._status: dict[str, Any] = {}
        self._seconds = 0.0

    @property
    def has_learned(self) -> bool:
        """Whether anything has been learned."""
        return bool(self._status)

    def take(self, status: dict[str, Any], seconds: float | None) -> None:
        """Takes a status of the cluster, `seconds` after the first flight; None: the time does not count."""
        if status.get("samples"):  # none while shards restart
            self._status, self._seconds = status, seconds or self._seconds

    def as_json(self, version: int | None) -> dict[str, object]:
        """For scripts; see the command."""
        auc, samples, fresh = self._auc(), self._status.get("samples", 0), self._stats.learned_ms(0.99)
        return {
            "samples": samples,
            "samples_per_s": round(samples / self._seconds) if self._seconds else 0,
            "auc": None if auc is None else round(auc, 4),
            "freshness_ms_p99": None if fresh is None else round(fresh),
            "version": version,
        }

    def line(self) -> str:
        """For a log."""
        return "; ".join(f"{name} {value}" for name, value in self._rows().items())

    def table(self) -> Table:
        """For a terminal."""
        table = Table(show_header=False, box=None, padding=(0, 2))
        for name, value in self._rows().items():
            table.add_row(name, f"[bold]{value}[/]")
        return table

    def _rows(self) -> dict[str, str]:
        status, stats, last = self._status, self._stats, self._stats.last
        rows = sum(sum(shard.get("rows", {}).values()) for shard in status.get("shards", []))
        per_second, header = status.get("samples_per_s"), last.get("x-freshness-ms")
        return {
            "day": self._day(),
            "flights": f"{status.get('samples', 0):,} learned of {self._traffic.written:,}, of {FLIGHTS:,} in the year",
            "samples/s": _number(per_second, ",.0f"),
            "AUC": _number(self._auc(), ".4f"),
            "lag": _number(status.get("lag"), ",d", " samples"),
            "freshness": f"{_ms(stats.learned_ms(0.5))} from a flight to a prediction that has learned it, "
            f"{_ms(stats.learned_ms(0.99))} at the 99th percentile; of the last prediction "
            f"{_ms(float(header) if header else None)}",
            "rows": f"{rows:,}",
            "version": f"{last.get('x-model-version', '-')}, publication {last.get('x-publication', '-')}",
            "predictions": f"{stats.predictions:,} in {_ms(stats.answer_ms(0.5))}, {_ms(stats.answer_ms(0.99))} at the "
            f"99th percentile; {stats.failures:,} failed",
        }

    def _auc(self) -> float | None:
        auc = self._status.get("figures", {}).get(LABEL, {}).get("auc")
        return None if auc is None else float(auc)

    def _day(self) -> str:
        latest = self._traffic.latest
        return (
            "-" if latest is None else datetime.fromtimestamp(json.loads(latest)["departs"], UTC).strftime("%-d %B %Y")
        )


def _number(value: float | None, spec: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{spec}}{unit}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f} ms"


_BEGIN = 600.0  # seconds within which each part must have begun
_LOOK = 0.5
_ANSWER_SECONDS = 30.0  # a promotion loads a version before it answers
_AGAIN = 1.0  # seconds before a promotion is tried again
_LINE_EVERY = 10.0  # seconds, where there is no terminal
_PROBES = 2
_PAUSE = 15.0  # seconds before a version is made, and before it is rolled back


class DemoFailed(StreamtrainError):
    """A part of the demo does not start, or a version cannot be promoted or rolled back."""


class Show:
    """Streams flights, requests predictions, and shows the figures.

    Args:
        settings: of the processes.
        console: where it is shown.
        stopped: ends it.
        check: raises an error if the processes cannot continue.
    """

    def __init__(
        self, settings: Settings, console: Console, stopped: threading.Event, check: Callable[[], object]
    ) -> None:
        assert settings.coordinator.address is not None
        self._settings, self._console, self._stopped, self._check = settings, console, stopped, check
        security = Security.from_settings(settings.security)
        self._coordinator = CoordinatorClient([settings.coordinator.address], security, timeout=2.0)
        self._token = settings.serve.admin_token.get_secret_value() if settings.serve.admin_token else ""
        self._model = settings.publish.model
        self._stats = ClientStats()
        self._started = self._first = time.monotonic()
        self._ended = threading.Event()  # for the tasks
        self._tasks: list[Future[Any]] = []

    def run(self, rate: float, seconds: float | None) -> dict[str, object]:
        """Runs until it is stopped, or for `seconds` from the first prediction.

        Args:
            rate: flights per second.
            seconds: None: until it is stopped.

        Returns:
            The figures; those that are not known are None.

        Raises:
            DemoFailed: a part does not begin.
            StreamtrainError: the flights cannot be read or written, or a version not be promoted.
        """
        with ExitStack() as stack:
            stack.callback(self._coordinator.close)
            writer = self._open(stack)
            if writer is None:
                return NOTHING
            traffic = LiveFlights(writer)
            figures = ShownFigures(traffic, self._stats)
            with self._console.status("starting the workers"):
                self._until(self._is_shared_out, "the workers")
            pool = stack.enter_context(ThreadPoolExecutor(2 + 1 + _PROBES, "demo"))
            stop = Stop()
            stack.callback(stop.set)
            stack.callback(self._ended.set)
            began = time.monotonic()
            streaming = pool.submit(produce, blocks(flights()), traffic, pace=Rate(rate), stop=stop)
            self._tasks = [
                streaming,
                pool.submit(predict, traffic, self._endpoint(), self._model, self._stats, self._ended),
            ]
            for _ in range(_PROBES):
                stream = open_stream(self._settings.stream)
                probe = FreshnessProbe(traffic, stream, self._endpoint(), self._model, self._stats)
                self._tasks.append(pool.submit(probe.run, self._ended))
            with self._console.status("waiting for the first prediction"):
                self._until(lambda: self._stats.predictions > 0, "serving")
            if not self._stats.predictions or traffic.latest is None:  # it was stopped
                return figures.as_json(None)
            self._tell(traffic.latest)
            pause = _PAUSE if seconds is None else min(_PAUSE, seconds / 3)
            touring = pool.submit(self._tour, pause)
            self._tasks.append(touring)
            self._show(figures, began, lambda: self._is_over(seconds, touring, figures), streaming)
            self._ended.set()
            return figures.as_json(touring.result())

    def _open(self, stack: ExitStack) -> Writer | None:
        """A writer to the topic, once the stream answers; None: it was stopped before."""
        opened: list[Writer] = []

        def is_open() -> bool:
            try:
                opened.append(stack.enter_context(open_writer(self._settings.stream)))
            except SourceUnavailable:
                return False
            return True

        with self._console.status("starting the stream"):
            self._until(is_open, "the stream")
        return opened[0] if opened else None

    def _until(self, is_so: Callable[[], bool], what: str) -> None:
        """Returns once a condition holds, or the demo is stopped."""
        deadline = time.monotonic() + _BEGIN
        while not is_so() and not self._stopped.wait(_LOOK / 2):
            self._check_all()
            if time.monotonic() > deadline:
                raise DemoFailed(f"{what} did not start within {_BEGIN:g} s; the log says why")

    def _check_all(self) -> None:
        self._check()
        for task in self._tasks:
            if task.done():
                task.result()

    def _is_shared_out(self) -> bool:
        """Whether all partitions have their worker, and all workers partitions: the first one has all at first."""
        try:
            workers = self._coordinator.status()["workers"]
        except ShardError:
            return False
        shares = [len(one["partitions"]) for one in workers if one["partitions"]]
        partitions = len(open_stream(self._settings.stream).bounds())
        return sum(shares) == partitions and len(shares) >= min(self._settings.up.workers, partitions)

    def _is_over(self, seconds: float | None, touring: "Future[Any]", figures: ShownFigures) -> bool:
        if seconds is None or not touring.done():
            return False
        since = time.monotonic() - self._first
        return since > seconds and (figures.has_learned or since > _BEGIN)  # else there is nothing to show

    def _endpoint(self) -> Endpoint:
        return Endpoint(f"http://{self._settings.serve.listen}", self._token or None, _ANSWER_SECONDS)

    def _tour(self, pause: float) -> int | None:
        """Makes a version, promotes it and rolls back; its number, or None: the demo ended before.

        Raises:
            DemoFailed: the endpoint refuses.
        """
        with self._endpoint() as endpoint:
            if self._ended.wait(pause) or (version := self._make_version()) is None:
                return None
            self._say(f"created version {version}, a snapshot of the model; the head keeps learning")
            if self._control(endpoint, "promote", {"version": version, "why": "the demo shows it"}):
                self._say(f"promoted version {version}: it makes the predictions from now on")
            if not self._ended.wait(pause) and self._control(endpoint, "rollback", {"why": "the demo shows it"}):
                self._say("rolled back: the head, which keeps learning, makes the predictions again")
            return version

    def _make_version(self) -> int | None:
        with open_published_model(self._settings.publish) as model:
            while not self._ended.wait(_LOOK):
                try:
                    return RedisVersions(model).make("demo", "to show it").version
                except PublicationError as exc:  # Redis may be restarting
                    self._say(f"no version yet: {exc}")
        return None

    def _control(self, endpoint: Endpoint, action: str, body: dict[str, object]) -> bool:
        """Whether it was done before the end; retries while the server is unreachable or cannot do it yet."""
        while not self._ended.is_set():
            try:
                endpoint.control(self._model, action, body)
                return True
            except EndpointError as exc:
                if exc.status not in {0, 503}:
                    raise DemoFailed(f"{action} failed: {exc}") from exc
            self._ended.wait(_AGAIN)
        return False

    def _tell(self, flight: bytes) -> None:
        self._first = time.monotonic()
        url = f"http://{self._settings.serve.listen}"
        body = shlex.quote(f'{{"instances": [{instance(flight).decode()}]}}')
        self._say(f"first prediction {self._first - self._started:.0f} s after the start")
        for line in (
            f"endpoint: {url} (API: {url}/docs)",
            f"console:  {url}/ (admin token: {self._token})",
            f"curl -s {url}/v1/models/{self._model}:predict -d {body}",
        ):
            self._console.print(line, markup=False, soft_wrap=True)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def _show(self, figures: ShownFigures, began: float, is_over: Callable[[], bool], streaming: "Future[Any]") -> None:
        """Shows figures twice a second until it is over or stopped."""
        has_ended, line_due = False, time.monotonic()
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            while not self._stopped.wait(_LOOK) and not is_over():
                self._check_all()
                try:
                    figures.take(self._coordinator.status(), None if has_ended else time.monotonic() - began)
                except ShardError:
                    continue  # it is restarting; everything else continues
                if streaming.done() and not has_ended:
                    has_ended = True
                    self._say("all flights of the year have been streamed; predictions continue until Ctrl-C")
                if self._console.is_terminal:
                    live.update(figures.table(), refresh=True)
                elif time.monotonic() >= line_due:
                    line_due = time.monotonic() + _LINE_EVERY
                    self._say(figures.line())
        self._console.print(figures.table())
