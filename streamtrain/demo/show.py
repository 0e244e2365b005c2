"""The demo from processes that have been started to figures."""

import json
import shlex
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from rich.console import Console
from rich.live import Live

from streamtrain.cluster.coordinator_client import CoordinatorClient
from streamtrain.cluster.streams import open_stream, open_writer
from streamtrain.cluster.versions import published_model
from streamtrain.demo.endpoint import Endpoint
from streamtrain.demo.figures import NOTHING, Figures
from streamtrain.demo.stream import flights
from streamtrain.demo.tour import tour
from streamtrain.demo.traffic import Traffic, blocks, instance
from streamtrain.demo.visitors import Follower, Seen, predict
from streamtrain.errors import PublicationError, ShardError, SourceUnavailable, StreamtrainError
from streamtrain.ps.security import Security
from streamtrain.settings import Settings
from streamtrain.store.redis_versions import RedisVersions
from streamtrain.stream.pace import Rate
from streamtrain.stream.producer import Stop, produce
from streamtrain.stream.source import Writer

_BEGIN = 600.0  # seconds within which each part must have begun
_LOOK = 0.5
_LINE_EVERY = 10.0  # seconds, where there is no terminal
_FOLLOWERS = 2
_PAUSE = 15.0  # seconds before a version is made, and before it is rolled back


class DemoFailed(StreamtrainError):
    """A part of the demo does not begin."""


class Show:
    """Streams flights, asks for predictions, and shows what becomes of it.

    Args:
        settings: of the processes.
        console: where it is shown.
        stopped: ends it.
        check: raises an error if the processes cannot go on.
    """

    def __init__(
        self, settings: Settings, console: Console, stopped: threading.Event, check: Callable[[], object]
    ) -> None:
        assert settings.coordinator.address is not None
        self._settings, self._console, self._stopped, self._check = settings, console, stopped, check
        security = Security.read(**settings.security.arguments())
        self._coordinator = CoordinatorClient(settings.coordinator.address, security, timeout=2.0)
        self._token = settings.serve.admin_token.get_secret_value() if settings.serve.admin_token else ""
        self._seen = Seen()
        self._started = self._first = time.monotonic()
        self._ended = threading.Event()  # for what runs beside
        self._beside: list[Future[Any]] = []

    def run(self, rate: float, seconds: float | None) -> dict[str, object]:
        """Until it is stopped, or for so many seconds from the first prediction on.

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
            traffic = Traffic(writer)
            figures = Figures(traffic, self._seen)
            with self._console.status("workers begin"):
                self._until(self._is_shared_out, "workers")
            pool = stack.enter_context(ThreadPoolExecutor(2 + 1 + _FOLLOWERS, "demo"))
            stop = Stop()
            stack.callback(stop.set)
            stack.callback(self._ended.set)
            began = time.monotonic()
            streaming = pool.submit(produce, blocks(flights()), traffic, pace=Rate(rate), stop=stop)
            self._beside = [streaming, pool.submit(predict, traffic, self._endpoint(), self._seen, self._ended)]
            for _ in range(_FOLLOWERS):
                stream = open_stream(self._settings.stream)
                follower = Follower(traffic, stream, self._endpoint(), self._seen)
                self._beside.append(pool.submit(follower.run, self._ended))
            with self._console.status("the first flights are learned"):
                self._until(lambda: self._seen.predictions > 0, "predictions")
            if not self._seen.predictions or traffic.latest is None:  # it was stopped
                return figures.as_json(None)
            self._tell(traffic.latest)
            pause = _PAUSE if seconds is None else min(_PAUSE, seconds / 3)
            touring = pool.submit(tour, self._make_version, self._endpoint(), self._say, self._ended, pause)
            self._beside.append(touring)
            self._show(figures, began, lambda: self._is_over(seconds, touring), streaming)
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

        with self._console.status("the stream begins"):
            self._until(is_open, "the stream")
        return opened[0] if opened else None

    def _until(self, is_so: Callable[[], bool], what: str) -> None:
        """Returns once something is so, or all is stopped."""
        deadline = time.monotonic() + _BEGIN
        while not is_so() and not self._stopped.wait(_LOOK / 2):
            self._check_all()
            if time.monotonic() > deadline:
                raise DemoFailed(f"{what}: not there within {_BEGIN:g} s")

    def _check_all(self) -> None:
        self._check()
        for one in self._beside:
            if one.done():
                one.result()

    def _is_shared_out(self) -> bool:
        """Whether all partitions have their worker."""
        try:
            workers = self._coordinator.status()["workers"]
        except ShardError:
            return False
        return sum(len(one["partitions"]) for one in workers) >= len(open_stream(self._settings.stream).bounds())

    def _is_over(self, seconds: float | None, touring: "Future[Any]") -> bool:
        return seconds is not None and time.monotonic() > self._first + seconds and touring.done()

    def _endpoint(self) -> Endpoint:
        return Endpoint(self._settings.serve.listen, self._settings.publish.model, self._token)

    def _make_version(self) -> int | None:
        """None: it was ended before there was one."""
        with published_model(self._settings.publish) as model:
            while not self._ended.wait(_LOOK):
                try:
                    return RedisVersions(model).make("demo", "to show it").version
                except PublicationError as exc:  # Redis may be being started again
                    self._say(f"no version yet: {exc}")
        return None

    def _tell(self, flight: bytes) -> None:
        self._first = time.monotonic()
        url = f"http://{self._settings.serve.listen}"
        body = shlex.quote(json.dumps({"instances": [instance(flight)]}))
        self._say(f"first prediction {self._first - self._started:.0f} s after the start")
        for line in (
            f"endpoint: {url}, its API: {url}/docs",
            f"console:  {url}/ (to promote and roll back there: {self._token})",
            f"curl -s {url}/v1/models/{self._settings.publish.model}:predict -d {body}",
        ):
            self._console.print(line, markup=False, soft_wrap=True)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def _show(self, figures: Figures, began: float, is_over: Callable[[], bool], streaming: "Future[Any]") -> None:
        """Figures, twice a second, until it is over or stopped."""
        has_ended, line_due = False, time.monotonic()
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            while not self._stopped.wait(_LOOK) and not is_over():
                self._check_all()
                try:
                    figures.take(self._coordinator.status(), None if has_ended else time.monotonic() - began)
                except ShardError:
                    continue  # it is being started again; all else goes on
                if streaming.done() and not has_ended:
                    has_ended = True
                    self._say("the year is over; predictions go on until Ctrl-C")
                if self._console.is_terminal:
                    live.update(figures.table(), refresh=True)
                elif time.monotonic() >= line_due:
                    line_due = time.monotonic() + _LINE_EVERY
                    self._say(figures.line())
        self._console.print(figures.table())
