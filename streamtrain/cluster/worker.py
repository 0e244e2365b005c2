"""The process of a worker: startup, learn, shutdown."""

import logging
import os
import socket
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from streamtrain.cluster.coordinator import WORKER
from streamtrain.cluster.coordinator_client import Beats, CoordinatorClient
from streamtrain.cluster.places import check_backups, places_of
from streamtrain.cluster.process import PsProcess
from streamtrain.cluster.reports import Reporter
from streamtrain.cluster.streams import open_stream
from streamtrain.cluster.topic import beginning_of, wait_for_topic
from streamtrain.errors import ConfigError, ShardUnavailable, SourceUnavailable
from streamtrain.metrics.endpoint import serve
from streamtrain.metrics.worker import WorkerMetrics
from streamtrain.model.model import Model
from streamtrain.model.spec import Spec
from streamtrain.ps.clock import Clock
from streamtrain.ps.control import CHANNEL_OPTIONS, RemoteControl, Retry, patiently
from streamtrain.ps.node import Node
from streamtrain.ps.route import Pair, Place
from streamtrain.ps.security import Security, connect, metadata
from streamtrain.ps.shards import Beginning, Control, Shards
from streamtrain.settings import Settings
from streamtrain.stream.dead import DeadLetters
from streamtrain.stream.feed import Feed
from streamtrain.stream.formats import make_format
from streamtrain.stream.waiting import available
from streamtrain.train.intake import Rules, StreamIntake
from streamtrain.train.loop import Loop
from streamtrain.train.pace import Pace
from streamtrain.train.progressive import ProgressiveValidation

if TYPE_CHECKING:
    from streamtrain.train.step import Step

logger = logging.getLogger(__name__)

EXIT_NOT_DRAINED = 3


@contextmanager
def _giving_up(stopped: threading.Event) -> Iterator[None]:
    """Once stopped, what is away is not waited for any more, and no error: others learn what is under way."""
    try:
        yield
    except (ShardUnavailable, SourceUnavailable) as exc:
        if not stopped.is_set():
            raise
        logger.warning("ends without waiting: %s", exc)


class WorkerProcess:
    """One member of the group that learns a topic.

    Args:
        model: what is learned.
        step: its training function.
        spec: what shards need to know of it.
        addresses: of all shards.
        settings: of the cluster.
        shard: index of the shard that this process also serves; None: none.
        workers: number of workers, for the shard's `bulk`.

    Attributes:
        metrics: of the worker.
        validation: of its predictions.

    Raises:
        ConfigError: settings are wrong, or do not fit the model.
    """

    def __init__(
        self,
        model: Model,
        step: "Step",
        spec: Spec,
        addresses: Sequence[str],
        settings: Settings,
        *,
        shard: int | None = None,
        workers: int = 1,
    ) -> None:
        self._model, self._step, self._spec, self._settings = model, step, spec, settings
        self._stream = open_stream(settings.stream)
        stream = settings.stream
        self._format = make_format(
            stream.format,
            model,
            registry=stream.registry,
            registry_config=stream.registry_config,
            schema_file=stream.schema_file,
        )
        check_backups(addresses, settings.ps)
        if shard is not None and settings.ps.backups:
            raise ConfigError("a shard with a backup is a process of its own: leave --shard away, or ps.backups")
        self._addresses = addresses
        self._security = Security.read(**settings.security.arguments())
        self._ps = None if shard is None else PsProcess(shard, addresses, settings, workers)
        self._name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.metrics = WorkerMetrics()
        self.validation = ProgressiveValidation(model.labels, window=settings.worker.window)
        self._leader: Control | None = None  # who hears of predictions, if not shard 0
        self._reporter: Reporter | None = None
        self.metrics.quality(self._quality)

    def _quality(self) -> dict[str, dict[str, float | None]]:
        """For the worker's metrics, about once a second; who leads the shards is told, too."""
        sums = self.validation.window_sums()
        if self._reporter:
            self._reporter.offer(sums)
        return {label: of_label.metrics().as_dict() for label, of_label in sums.items()}

    def run(self, stopped: threading.Event) -> None:
        """Learns until `stopped` is set, and finishes what is under way then.

        Raises:
            ShardError: a shard refuses.
            SourceError: the stream refuses, or has lost samples.
            TooManyBadSamples: the stream is broken.
        """
        finished = threading.Event()
        threading.Thread(target=self._enforce_drain, args=(stopped, finished), daemon=True).start()
        with ExitStack() as stack:
            stack.callback(finished.set)
            stack.enter_context(_giving_up(stopped))
            if self._settings.worker.metrics:
                stack.callback(serve(self._settings.worker.metrics, self.metrics.registry).close)
            if self._ps:
                self._ps.start()
                stack.callback(self._ps.stop)
            self._begin_beats(stack, stopped)
            settings = self._settings.stream
            if not wait_for_topic(self._stream, settings.create, stopped):
                return
            start = available(lambda: beginning_of(self._stream, settings.start, settings.group), stopped)
            self._learn(start, stopped)

    def _begin_beats(self, stack: ExitStack, stopped: threading.Event) -> None:
        address = self._settings.coordinator.address
        if address is None:
            return
        client = CoordinatorClient(address, self._security)
        stack.enter_context(Beats(client, WORKER, self._name, self.metrics.state, stopped.set))
        channel = connect(address, self._security, CHANNEL_OPTIONS)
        stack.callback(channel.close)
        self._leader = RemoteControl(channel, address, metadata(self._security))

    def _enforce_drain(self, stopped: threading.Event, finished: threading.Event) -> None:
        """Ends the process if it is not done in time. Nothing is lost: others learn what this one did not finish."""
        stopped.wait()
        if not finished.wait(self._settings.worker.drain):
            logger.error("not drained within %g s (worker.drain); ends", self._settings.worker.drain)
            os._exit(EXIT_NOT_DRAINED)

    def _learn(self, start: Clock, stopped: threading.Event) -> None:
        shards = self._shards(start)
        retry = Retry(timeout=self._settings.ps.timeout)
        run = patiently(shards.agree, retry, stopped)
        ps = self._settings.ps
        client = shards.client(self._name, run, dtype=ps.wire_dtype, lanes=ps.lanes, retry=retry, stopped=stopped)
        self.metrics.watch(lambda: self._stream.away, lambda: client.away)
        self._reporter = Reporter(self._leader or shards.controls[0], self._name, self.metrics.report_failed)
        loop = Loop(
            *(self._model, self._step, client, lambda: patiently(shards.stands, retry, stopped)),
            intake=self._intake(run.id, stopped),
            shards=len(self._addresses),
            pace=self._pace(),
            validation=self.validation,
            metrics=self.metrics,
        )
        self._reporter.start()
        try:
            loop.run(stopped)
        finally:
            self._reporter.close()
        logger.info("learned %d samples", loop.tally.samples)

    def _shards(self, start: Clock) -> Shards:
        places: list[Node | Place | Pair] = [
            *places_of(self._addresses, self._settings.ps, self._security, lambda channel: None)
        ]
        if self._ps:
            places[self._ps.node.index] = self._ps.node
        step = self._step
        beginning = Beginning(self._spec, step.initial_dense, step.initial_statistics, start)
        return Shards(places, beginning, metadata(self._security))

    def _intake(self, job: str, stopped: threading.Event) -> StreamIntake:
        settings = self._settings.stream
        return StreamIntake(
            self._stream,
            settings.group,
            job,
            self._format,
            feed=Feed(settings.buffer_bytes, skip_gone=settings.gone == "skip"),
            letters=DeadLetters(self._stream, stopped) if settings.dead_letters else None,
            rules=Rules(settings.late_after, settings.late == "dead", settings.max_bad_ratio),
            sampling=self._model.sampling,
            metrics=self.metrics,
            stopped=stopped,
        )

    def _pace(self) -> Pace:
        worker, consistency = self._settings.worker, self._settings.consistency
        most = {"async": worker.ahead, "bounded": consistency.staleness or 0, "bulk": 0}[consistency.mode]
        return Pace(
            batch_size=worker.batch_size,
            batch_age=worker.batch_age,
            ahead=min(worker.ahead, most),
            beat_seconds=min(1.0, consistency.lease / 4),
            commit_seconds=self._settings.stream.commit_every,
        )
