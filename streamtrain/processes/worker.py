"""The process of a worker: startup, learn, shutdown."""

import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TypeVar

from streamtrain.cluster.client import CoordinatorClient, Heartbeat, coordinator_targets
from streamtrain.cluster.copies import CopyWatch
from streamtrain.cluster.map_watch import MapWatch
from streamtrain.cluster.members import WORKER
from streamtrain.cluster.quality import QualityReporter
from streamtrain.errors import ConfigError, OffsetGone, ShardError, ShardUnavailable, SourceUnavailable
from streamtrain.incarnation import Incarnation
from streamtrain.memory import freeze_heap
from streamtrain.metrics.registry import serve
from streamtrain.metrics.worker import WorkerMetrics
from streamtrain.model.model import Model
from streamtrain.model.spec import Spec
from streamtrain.periodic import retry
from streamtrain.processes.ps import PsProcess
from streamtrain.ps.client import Client
from streamtrain.ps.clock import Clock
from streamtrain.ps.nodes.node import Node
from streamtrain.ps.nodes.shards import RunTemplate, Shards
from streamtrain.ps.nodes.topology import ShardMap, check_backups, connect_shards
from streamtrain.ps.replication.failover import TargetPair
from streamtrain.ps.rpc.control import Retry, ServerChannel, patiently
from streamtrain.ps.rpc.security import Security, metadata
from streamtrain.ps.shard import Run
from streamtrain.quality.block_writer import BlockWriter
from streamtrain.quality.blocks import Slices
from streamtrain.quality.probes import encode_probes
from streamtrain.quality.progressive import ProgressiveValidation
from streamtrain.settings.groups import Settings
from streamtrain.store.redis.blocks import BlockLog, RedisBlocks
from streamtrain.store.redis.server import RedisServer
from streamtrain.stream.buffer import PartitionBuffer
from streamtrain.stream.dead_letters import DeadLetters
from streamtrain.stream.formats.factory import format_of
from streamtrain.stream.opening import TopicWatch, open_stream, resolve_start_offsets, topic_recreated, wait_for_topic
from streamtrain.stream.standstill import StandstillWatch
from streamtrain.train.blocks import BlockTracker
from streamtrain.train.intake import StreamIntake
from streamtrain.train.loop import Loop, LoopConfig, OtherShards
from streamtrain.train.micro import describe_steps
from streamtrain.train.warmup import Warmup

if TYPE_CHECKING:
    from streamtrain.train.step import Step

logger = logging.getLogger(__name__)

T = TypeVar("T")

EXIT_NOT_DRAINED = 3


@contextmanager
def _abandoning(stopped: threading.Event) -> Iterator[None]:
    """Once stopped, an unreachable service is not an error: other workers learn what is in flight."""
    try:
        yield
    except (ShardUnavailable, SourceUnavailable) as exc:
        if not stopped.is_set():
            raise
        logger.warning("stopping without waiting: %s", exc)


def warm_up(model: Model, step: "Step", settings: Settings) -> Warmup:
    """Begins to compile the graphs of a worker; raises ConfigError as it does."""
    stream = open_stream(settings.stream)
    return Warmup(model, step, stream, format_of(settings.stream, model), settings.worker.batch_size)


class WorkerProcess:
    """One member of the group that learns a topic.

    Args:
        model: the model to train.
        step: its training function.
        spec: the model's spec, for the shards.
        addresses: addresses of all shards.
        settings: settings of the cluster.
        shard: index of the shard that this process also serves; None: none.
        workers: number of workers, for the shard's `bulk`.
        instance: name in its group, unique on this host: it takes the place of another of that name. None: it has none.
        warmup: the compilation that a standby has begun; None: begun here.

    Attributes:
        metrics: the worker's metrics.
        validation: progressive validation of its predictions.

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
        instance: str | None = None,
        warmup: Warmup | None = None,
    ) -> None:
        self._model, self._step, self._spec, self._settings = model, step, spec, settings
        host = socket.gethostname()
        self._stream = open_stream(settings.stream, instance and f"{host}/{instance}")
        self._format = format_of(settings.stream, model)
        check_backups(addresses, settings.ps.backups)
        if shard is not None and settings.ps.backups:
            raise ConfigError("--shard cannot be combined with ps.backups: a shard with a backup needs its own process")
        self._begin = ShardMap(0, tuple(addresses), settings.ps.backups)
        self._security = Security.from_settings(settings.security)
        self._ps = None if shard is None else PsProcess(shard, addresses, settings, workers)
        if self._ps is not None:
            self._ps.node.is_colocated = True
        self._name = f"{host}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.metrics = WorkerMetrics()
        self.validation = ProgressiveValidation(model.labels, window=settings.worker.window)
        self._slices = Slices(model, settings.compare.slices)
        self._reporter: QualityReporter | None = None
        self._loop: Loop | None = None
        self._is_learning = False
        self._stopped = threading.Event()
        self._retry = Retry(timeout=settings.ps.timeout)
        self.metrics.quality(self._quality)
        self._warmup = warmup or warm_up(model, step, settings)

    def _quality(self) -> dict[str, dict[str, float | None]]:
        """For the worker's metrics, about once a second; reported to the coordinator, too."""
        sums = self.validation.window_sums()
        if self._reporter:
            self._reporter.offer(sums, self._probes())
        return {label: of_label.metrics().as_dict() for label, of_label in sums.items()}

    def _probes(self) -> bytes:
        latest = self._loop.stats.latest if self._loop else None
        return encode_probes(self._model.schema, *latest) if latest else b""

    def run(self, stopped: threading.Event) -> None:
        """Learns until `stopped` is set, then finishes what is in flight.

        Raises:
            ShardError: a shard refuses.
            SourceError: the stream refuses, or has lost samples.
            TooManyBadSamples: the stream is broken.
        """
        finished = threading.Event()
        targets = coordinator_targets(self._settings, self._begin.shards)
        coordinator = CoordinatorClient(targets, self._security)
        self._stopped, self._map = stopped, MapWatch(coordinator.slots, self._begin, stopped)
        threading.Thread(target=self._enforce_drain, args=(stopped, finished), daemon=True).start()
        with ExitStack() as stack:
            stack.callback(finished.set)
            stack.callback(self._warmup.close)
            stack.enter_context(freeze_heap())
            stack.enter_context(_abandoning(stopped))
            if self._settings.worker.metrics:
                stack.callback(serve(self._settings.worker.metrics, self.metrics.registry, self._not_ready).close)
            if self._ps:
                self._ps.start()
                stack.callback(self._ps.stop)
            beats = Heartbeat(coordinator, WORKER, self._name, self.metrics.state, self._hear_map)
            self._hurry = stack.enter_context(beats).hurry
            self._reporter = QualityReporter(coordinator.report, self._name, self.metrics.report_failed)
            settings = self._settings.stream
            if not wait_for_topic(self._stream, settings.create, stopped):
                return
            start = retry(
                lambda: resolve_start_offsets(self._stream, settings.start, settings.group), SourceUnavailable, stopped
            )
            self._learn(start, stopped)

    def _hear_map(self) -> bool:
        heard = self._map.hear()
        if self._map.has_other and self._ps:  # whose shard is not in the map any more
            self._stopped.set()
        return heard

    def _not_ready(self) -> str:
        return "" if self._is_learning else "not yet a member of the group that learns: see the log"

    def _enforce_drain(self, stopped: threading.Event, finished: threading.Event) -> None:
        """Exits if draining takes too long. Nothing is lost: other workers learn what this one did not finish."""
        stopped.wait()
        self._map.stop()
        if not finished.wait(self._settings.worker.drain):
            logger.error("worker did not drain within %g s (worker.drain); exiting", self._settings.worker.drain)
            os._exit(EXIT_NOT_DRAINED)

    def _learn(self, start: Clock, stopped: threading.Event) -> None:
        shards = self._shards(start)
        run = self._agree(shards)
        self._warn_of_start(run.start, start)
        topic = retry(self._stream.identity, SourceUnavailable, stopped)
        if topic not in {"", run.topic}:
            if run.topic and topic != self._settings.stream.topic_id:
                raise topic_recreated(self._stream, run.topic, topic)
            self._ask(shards, lambda: shards.adopt(topic))
        copies = CopyWatch(self._stream, self._settings.stream.group, shards, stopped.set)
        self._ask(shards, lambda: retry(copies.check_now, SourceUnavailable, stopped))
        copies.check()
        client = self._client(shards, run)
        standstill = StandstillWatch(
            self._stream.ends, lambda partition: f"partition {partition} of {self._stream.name}"
        )
        self.metrics.watch(
            lambda: self._stream.unreachable,
            lambda: self._loop is not None and self._loop.away,
            lambda: standstill.stalled,
            lambda: standstill.total,
        )
        writer, tracker = self._open_blocks(topic)
        self._loop = loop = Loop(
            *(self._model, self._step, client, lambda: patiently(shards.progress, self._retry, self._map.leaving)),
            intake=self._intake(run.id, copies.incarnation, standstill, stopped),
            shards=len(self._map.in_use.shards),
            start=run.start,
            config=self._loop_config(),
            validation=self.validation,
            blocks=tracker,
            metrics=self.metrics,
            graphs=self._warmup.graphs,
            others=lambda: self._other_shards(shards),
        )
        self._warmup.graphs()  # so that no partition waits here for what others could learn
        logger.info(describe_steps(self._model))
        assert self._reporter is not None
        self._reporter.start()
        if writer is not None:
            writer.start()
        try:
            with TopicWatch(self._stream, topic, stopped.set) as watch, copies, standstill:
                try:
                    self._is_learning = True
                    loop.run(stopped)
                except OffsetGone:
                    watch.check_now()
                    watch.check()
                    raise
                watch.check()
                copies.check()
        finally:
            self._reporter.close()
            if writer is not None:
                writer.close()
        logger.info("learned %d samples", loop.stats.samples)

    def _warn_of_start(self, begun: Clock, start: Clock) -> None:
        if "start" in self._settings.stream.model_fields_set and begun != start:
            logger.info(
                "stream.start = %s has no effect: it is where a new run begins, and this run resumes from the clocks "
                "of its shards; to learn from there, begin a run with a checkpoint.url and stream.group of its own",
                self._settings.stream.start,
            )

    def _open_blocks(self, topic: str) -> tuple[BlockWriter | None, BlockTracker | None]:
        """What writes blocks of predictions and what makes them; None: none are kept."""
        publish, compare, stream = self._settings.publish, self._settings.compare, self._settings.stream
        if publish.url is None or not compare.keep:
            return None, None
        blocks = RedisBlocks(RedisServer(publish.url, cluster=publish.cluster), publish.model)
        log = BlockLog(stream.topic or "", topic, compare.block, compare.keep)
        writer = BlockWriter(blocks, log, self._model, self._slices, self.metrics.report_failed)
        identity = f"{publish.model} {log.topic} {log.id}"
        return writer, BlockTracker(self._model, compare.block, self._slices, identity, writer)

    def _shards(self, start: Clock) -> Shards:
        step = self._step
        beginning = RunTemplate(self._spec, step.initial_dense, step.initial_statistics, start)
        return Shards(self._places(self._begin), beginning, metadata(self._security))

    def _places(self, shard_map: ShardMap) -> list[Node | ServerChannel | TargetPair]:
        places: list[Node | ServerChannel | TargetPair] = [
            *connect_shards(shard_map.shards, shard_map.backups, self._security, lambda channel: None)
        ]
        if self._ps:
            places[self._ps.node.index] = self._ps.node
        return places

    def _agree(self, shards: Shards) -> Run:
        return self._ask(shards, shards.agree)

    def _ask(self, shards: Shards, ask: Callable[[], T]) -> T:
        """Asks shards until they answer, others if the cluster has others meanwhile."""
        while True:
            try:
                return patiently(ask, self._retry, self._map.leaving)
            except ShardError:
                if not self._moves(shards):
                    raise

    def _moves(self, shards: Shards) -> bool:
        """Goes by the newest map, if it has other shards."""
        if self._stopped.is_set() or self._ps or not self._map.check():
            return False
        shard_map = self._map.use_other()
        shards.move_to(self._places(shard_map), shard_map.epoch)
        return True

    def _other_shards(self, shards: Shards) -> OtherShards | None:
        if not self._moves(shards):
            return None
        return OtherShards(self._client(shards, self._agree(shards)), len(self._map.in_use.shards))

    def _client(self, shards: Shards, run: Run) -> Client:
        ps = self._settings.ps
        return shards.client(
            *(self._name, run),
            dtype=ps.wire_dtype,
            lanes=ps.lanes,
            retry=self._retry,
            stopped=self._map.leaving,
            lost=self._hurry,
        )

    def _intake(
        self,
        job: str,
        incarnation: Incarnation | None,
        standstill: StandstillWatch[int],
        stopped: threading.Event,
    ) -> StreamIntake:
        settings = self._settings.stream
        return StreamIntake(
            self._stream,
            settings.group,
            job,
            self._format,
            incarnation=incarnation,
            buffer=PartitionBuffer(settings.buffer_bytes, skip_gone=settings.gone == "skip", watch=standstill),
            dead_letters=DeadLetters(self._stream, stopped) if settings.dead_letters else None,
            policy=settings,
            sampling=self._model.sampling,
            metrics=self.metrics,
            stopped=stopped,
        )

    def _loop_config(self) -> LoopConfig:
        worker, consistency = self._settings.worker, self._settings.consistency
        most = {"async": worker.ahead, "bounded": consistency.staleness or 0, "bulk": 0}[consistency.mode]
        return LoopConfig(
            batch_size=worker.batch_size,
            batch_min=worker.batch_min,
            batch_age=worker.batch_age,
            ahead=min(worker.ahead, most),
            beat_seconds=min(1.0, consistency.lease / 4),
            commit_seconds=self._settings.stream.commit_every,
        )
