"""Coordinator: takes checkpoints, publishes, and knows the whole cluster. It is on no hot path.

Training and serving continue while it is unreachable. It runs in a process of its own at `coordinator.address`; if that
is not set, in the process of shard 0, and once the backup of shard 0 has taken over, in the backup's.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from streamtrain._core import shards_of
from streamtrain.checkpoint.cluster_checkpoint import Checkpointer, CheckpointInfo, CheckpointSchedule
from streamtrain.checkpoint.shard_map import next_shard_map
from streamtrain.cluster.autoscale import LoadWatch, Proposal, share
from streamtrain.cluster.forgetting import Forgetting, Receipt
from streamtrain.cluster.history import History
from streamtrain.cluster.members import SERVER, WORKER, Member, Members
from streamtrain.cluster.quality import ProbePublisher, QualityAggregator
from streamtrain.cluster.rates import RateChange, change_rates, rates_to_json
from streamtrain.cluster.scaling import (
    HOLD,
    MOST_SHARDS,
    OpenedShards,
    OpenShards,
    Progress,
    check_map,
    check_next,
    forget_ahead,
    place_all,
    place_strays,
    read_ahead,
    rows_to_read,
    vacate,
)
from streamtrain.cluster.status import StreamLag, poll_shard, samples_of, shard_to_json, watermark_of
from streamtrain.errors import CheckpointError, PublicationError, ShardError, ShardRefused
from streamtrain.logs import counted
from streamtrain.periodic import Backoff, PeriodicTask
from streamtrain.ps.nodes.shards import Control
from streamtrain.ps.nodes.topology import ShardMap
from streamtrain.ps.shard import RowInfo
from streamtrain.publish.cluster_publisher import Publications, PublicationSchedule
from streamtrain.publish.head_check import HeadComparison
from streamtrain.publish.lease import Lease
from streamtrain.publish.opening import open_dictionaries
from streamtrain.publish.versions import DecisionKeeper, VersionSchedule
from streamtrain.settings.groups import Settings
from streamtrain.shutdown import step
from streamtrain.store.checkpoint.epochs import Epochs
from streamtrain.store.publication import Publication
from streamtrain.store.redis.model import RedisModel
from streamtrain.store.redis.server import RedisServer
from streamtrain.store.redis.versions import RedisVersions

logger = logging.getLogger(__name__)


_PUBLISHING_SECONDS = 600.0  # that a publication may take which is under way when the shards are to change
_MOST_ROUNDS = 3  # of reading what changes meanwhile
_ROUND_SECONDS = 1.0  # in which little changes
_CANCELLED = "the change of shards was cancelled: those of before go on"
_POLL_EVERY = 1.0
_POINT_EVERY = 2.0
_RATE_SECONDS = 10.0  # over which samples per second are counted
_MAX_REASONS = 100  # of dead letters; there are fewer
_LATELY_SECONDS = 120.0
_MAX_GONE = 4096  # workers that left whose dead letters are kept by name, in case they come back


class Coordinator:
    """Thread-safe.

    Args:
        controls: of all shards, in order.
        polled: the same with a timeout of `POLL_SECONDS`.
        shard_map: addresses of the shards, and its epoch.
        count: called with names of events.
        redis: where the model is published; None: nowhere.
        lag: of the shards behind the stream; None: the lag is what workers report.
        final_checkpoint: whether `stop` takes a last checkpoint, if anything has been learned since the one before.
        open_shards: opens shards by their addresses; None: it stays with those that it was given.
        now: seconds since the epoch.

    Attributes:
        quality: reports of workers.
        checkpoints: their schedule; None: checkpoint.url is not set.
        publications: their schedule; None: publish.url is not set.
    """

    def __init__(
        self,
        controls: Sequence[Control],
        polled: Sequence[Control],
        shard_map: ShardMap,
        settings: Settings,
        count: Callable[[str], object],
        *,
        redis: RedisServer | None = None,
        lag: StreamLag | None = None,
        final_checkpoint: bool = False,
        open_shards: OpenShards | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.shard_map, self.members, self.quality = shard_map, Members(self._member_left), QualityAggregator()
        self._count, self._stream_lag, self._now = count, lag, now
        # Those of the map in force. Changed in place, as checkpoints and publications go by them, too.
        self._controls, self._polled = [*controls], [*polled]
        self._open_shards, self._strays = open_shards, list[str]()
        self._scaling, self._placing = threading.Lock(), threading.Lock()  # who changes the map; who gives places
        self._progress: Progress | None = None
        self._reading: Sequence[Control] = ()  # shards that read rows for it
        self._is_cancelled = False
        self._told: set[int] = set()  # shards that have their places from here
        self.checkpoints: CheckpointSchedule | None = None
        self.publications: PublicationSchedule | None = None
        self._versions: VersionSchedule | None = None
        self._decisions: DecisionKeeper | None = None
        self._settings, self._model = settings, RedisModel(redis, settings.publish.model) if redis else None
        self._audit = RedisVersions(self._model) if self._model else None
        self._setting = threading.Lock()
        if settings.checkpoint.url:
            kept = settings.checkpoint
            checkpointer = Checkpointer(
                self._controls, Epochs(settings.checkpoint.url), keep=kept.keep, full_every=kept.full_every
            )
            self.checkpoints = CheckpointSchedule(checkpointer, kept.every, at_end=final_checkpoint, count=count)
        if redis:
            self._schedule_publications(redis, settings)
        self._statuses: list[Any] = [None] * len(controls)  # of the last poll; None: the shard did not answer
        self._asked_again = [0] * len(controls)  # how often each was polled by itself, which no older answer replaces
        self._away: set[int] = set()  # shards that have answered before and do not now
        self._samples: deque[tuple[float, int]] = deque()
        self._history, self._load = History(settings.checkpoint.url, now), LoadWatch()
        self._examples: dict[str, Any] = {}  # of dead letters, by reason
        self._left: deque[float] = deque(maxlen=_MAX_GONE)  # when workers left, by the monotonic clock
        self._gone: dict[str, Mapping[str, int]] = {}  # dead letters of workers that left, by name
        self._forgotten: Counter[str] = Counter()  # of those that left before
        self._point_due = 0.0
        self._lock = threading.Lock()
        self._checkpoint_url = settings.checkpoint.url
        self._pool = ThreadPoolExecutor(MOST_SHARDS, "polls")  # of which there are as many as are needed at once
        backoff = Backoff(_POLL_EVERY, _POLL_EVERY)
        self._task = PeriodicTask("coordinator", self._poll, _POLL_EVERY, subject="polling shards", backoff=backoff)

    def _schedule_publications(self, redis: RedisServer, settings: Settings) -> None:
        publish, model = settings.publish, RedisModel(redis, settings.publish.model)
        dictionaries = open_dictionaries(redis, publish)
        publications = Publications(
            *(self._controls, dictionaries, publish.model, publish.dtype),
            gate=settings.gate,
            figures=self.quality.figures,
            lease=Lease(model),
        )
        probes = ProbePublisher(self.quality, model)
        self._decisions = DecisionKeeper(RedisModel(redis, publish.model))
        self.publications = PublicationSchedule(publications, publish.every, self._count, after=probes.publish)
        if publish.version_every:
            self._versions = VersionSchedule(
                RedisVersions(model),
                dictionaries.head,
                every=publish.version_every,
                keep=publish.keep,
                count=self._count,
            )

    def start(self) -> None:
        schedules = (self.checkpoints, self.publications, self._versions, self._decisions)
        for schedule in (*schedules, self._stream_lag, self._history):
            if schedule:
                schedule.start()
        self._task.start()

    def stop(self) -> None:
        """Stops, after a checkpoint and a publication under way; for a last checkpoint the shards must still answer."""
        with step("the poll of shards and stream"):
            if self._stream_lag:
                self._stream_lag.stop()
            self._task.close()
        steps = (
            ("the version under way", self._versions),
            ("labels and traffic", self._decisions),
            ("the publication under way", self.publications),
            ("the last checkpoint", self.checkpoints),
            ("the history of the console", self._history),
        )
        for name, schedule in steps:
            if schedule:
                with step(name):
                    schedule.stop()
        with step("calls to shards"):
            self._pool.shutdown()

    def report(self, worker: str, windows: Sequence[Any], probes: bytes = b"") -> None:
        """Takes the report of a worker, see `QualityAggregator.add`."""
        try:
            self.quality.add(worker, windows, probes)
        except ShardRefused:
            self._count("refused_reports")
            raise

    def checkpoint(self, *, full: bool = False) -> CheckpointInfo:
        """Takes a checkpoint now.

        Raises:
            ShardRefused: checkpoint.url is not set.
            ShardError: nothing has been learned yet, or a shard cannot be reached.
            CheckpointError: it cannot be written.
        """
        if self.checkpoints is None:
            raise ShardRefused("the cluster has no checkpoints; set checkpoint.url where the coordinator runs")
        return self.checkpoints.now(full=full)

    def publish_now(self, *, force: bool = False) -> Publication:
        """Publishes what is new, and returns the head.

        Args:
            force: publish even if the quality gate would hold it back.

        Raises:
            ShardUnavailable: nothing has been learned yet.
            ShardRefused: publish.url is not set.
            ShardError: it is held back, or cannot be published; says why.
        """
        with _as_shard_error():
            return self._publishing().now(force=force)

    def verify(self) -> HeadComparison:
        """Publishes what is new, and compares what is published with what the shards have; errors as `publish_now`."""
        with _as_shard_error():
            return self._publishing().verify()

    def set_rates(self, changes: Mapping[str, float | None], who: str, why: str) -> RateChange:
        """Sets learning rates, see `change_rates`, and takes a checkpoint with them; without changes, tells them.

        The change is logged, and in the history of versions if publish.url is set.
        """
        with self._setting:
            change = change_rates(self._controls[0], changes)
        if not changes:
            return change
        self._poll_again(0)
        now, was = change.describe(change.now), change.describe(change.was)
        logger.info("%s set %s, was %s%s", who, now, was, f": {why}" if why else "")
        try:
            if self._audit is not None:
                self._audit.note_setting(now, was, who, why)
        except PublicationError as exc:
            logger.warning("%s is in force, but is not in the history of versions: %s", now, exc)
        try:
            return change._replace(epoch=self.checkpoint().epoch if self.checkpoints else None)
        except (ShardError, CheckpointError) as exc:
            logger.warning("%s is in force, but no checkpoint has it yet: %s", now, exc)
            return change

    def scale(self, addresses: Sequence[str], backups: Sequence[str] = (), *, rate: float = 0.0) -> ShardMap:
        """Has other shards hold the rows from now on, see scaling.py; returns their map.

        Args:
            addresses: of all of them, in order.
            backups: of their backups, if the shards of before have some.
            rate: bytes per second that each shard reads at most meanwhile; 0: as many as it can.

        Raises:
            ShardRefused: there is no checkpoint.url, or no process of the coordinator alone; the shards are being
                changed already; or the errors of `check_map` and `check_next`.
            ShardError: nothing has been learned yet, a shard cannot be reached, or it was cancelled.
            CheckpointError: the checkpoint or the map cannot be written.
        """
        if self._open_shards is None or self.checkpoints is None or self._checkpoint_url is None:
            raise ShardRefused("to change the number of shards, set checkpoint.url and coordinator.address")
        if not self._scaling.acquire(blocking=False):
            raise ShardRefused("shards are being changed in number, or ids are being forgotten; retry later", "limit")
        try:
            with self._placing:
                after = ShardMap(0, tuple(addresses), tuple(backups))
                return self._scale(self._open_shards, self._checkpoint_url, self.checkpoints, after, rate)
        finally:
            self._end_progress()
            self._scaling.release()

    def cancel_scale(self) -> None:
        """Gives up a change of shards that is under way: `scale` raises ShardError, and the shards of before go on.

        Raises:
            ShardRefused: there is none, or the shards change just now.
        """
        with self._lock:
            progress, reading = self._progress, self._reading
            if progress is None:
                raise ShardRefused("the shards are not being changed", "limit")
            if progress.step == "switch":
                raise ShardRefused("it is too late to cancel: the shards change just now", "limit")
            self._is_cancelled = True
        for control in reading:
            forget_ahead(control)

    def _scale(
        self, open_shards: OpenShards, url: str, checkpoints: CheckpointSchedule, after: ShardMap, rate: float
    ) -> ShardMap:
        before = self.shard_map
        if before.has(after):
            return before
        check_map(before, after)
        addresses, backups = after.shards, after.backups
        opened = open_shards(addresses, backups)
        added = [address for address in after.addresses if address not in before.addresses]
        left = [address for address in before.addresses if address not in after.addresses]
        joining, leaving = (open_shards(some, ()).controls for some in (added, left))
        run = check_next(self._controls, joining)
        vacate(before, joining, run)  # one that was started again by its settings holds what is old
        try:
            self._step(addresses, "checkpoint")
            checkpoints.now()
            self._step(addresses, "rows", opened.controls)
            rows = sum(sum(table.rows for table in control.status().tables) for control in self._controls)
            read_ahead(opened, rate=rate, observe=partial(self._show_rows, rows_to_read(before, after, rows)))
            self._catch_up(checkpoints, opened, addresses)
            self._step(addresses, "publication")
            with self.publications.hand_over(_PUBLISHING_SECONDS) if self.publications else nullcontext("") as head:
                self._step(addresses, "switch")
                began = time.monotonic()
                with checkpoints.held(HOLD):
                    after = next_shard_map(url, addresses, backups)
                    place_all(after, opened.controls, run, head)
                    self._go_by(after, opened.controls, opened.polled)
                    paused = time.monotonic() - began
        except BaseException as exc:
            for control in opened.controls:
                forget_ahead(control)
            if self._is_cancelled and isinstance(exc, CheckpointError):  # as a shard that was reading says it
                raise ShardError(_CANCELLED) from exc
            raise
        self._end_progress()
        logger.info(
            "%s instead of %d by map %d; pushes were held back for %.2f s at most",
            *(counted(len(after.shards), "shard"), len(before.shards), after.epoch, paused),
        )
        vacate(after, leaving, run)
        return after

    def _catch_up(self, checkpoints: CheckpointSchedule, opened: OpenedShards, addresses: Sequence[str]) -> None:
        """Has the next shards read what changes meanwhile, until that takes no time: what is left is waited for."""
        for _ in range(_MOST_ROUNDS):
            self._step(addresses, "changes", opened.controls)
            began = time.monotonic()
            checkpoints.now(delta=True)
            read_ahead(opened)
            if time.monotonic() - began < _ROUND_SECONDS:
                return

    def _step(self, addresses: Sequence[str], step: str, reading: Sequence[Control] = ()) -> None:
        with self._lock:
            if self._is_cancelled:
                raise ShardError(_CANCELLED)
            self._progress, self._reading = Progress(len(addresses), step, self._now()), reading

    def _show_rows(self, total: int, rows: int) -> None:
        with self._lock:
            if self._progress is not None:
                self._progress = self._progress._replace(rows=rows, total=max(rows, total))

    def _end_progress(self) -> None:
        with self._lock:
            self._progress, self._reading, self._is_cancelled = None, (), False

    def forget(self, ids: Sequence[tuple[str, str]]) -> Receipt:
        """Takes the rows of ids, and those of crosses with them, away for good.

        Shards and their backups, the head in Redis with its log, servers that follow it, and a full checkpoint that is
        taken now are without them afterwards. The receipt tells what is not. It may be repeated, also after an error.

        Args:
            ids: (feature, id) of each.

        Raises:
            ShardRefused: there are none or too many, a feature is none that has ids; or rows are being forgotten
                already, or the number of shards is being changed.
            ShardError: nothing has been learned yet, or a shard or Redis cannot be reached.
            CheckpointError: the checkpoint cannot be written.
        """
        if not self._scaling.acquire(blocking=False):
            raise ShardRefused("shards are being changed in number, or ids are being forgotten; retry later", "limit")
        try:
            servers = partial(self.members.of, SERVER)
            forgetting = Forgetting(
                *(self._controls, self._settings, self.checkpoints, self.publications, self._model), servers, self._now
            )
            with _as_shard_error():
                return forgetting.forget(ids)
        finally:
            self._scaling.release()

    def _go_by(self, shard_map: ShardMap, controls: Sequence[Control], polled: Sequence[Control]) -> None:
        with self._lock:
            self.shard_map, self._told = shard_map, set()
            self._controls[:], self._polled[:] = controls, polled
            self._statuses, self._asked_again = [None] * len(polled), [0] * len(polled)
            self._away.clear()

    def _publishing(self) -> PublicationSchedule:
        if self.publications is None:
            raise ShardRefused("the cluster does not publish; set publish.url where the coordinator runs")
        return self.publications

    def inspect(self, table: str, key: int) -> RowInfo | None:
        """What the shard that owns a row knows of it; None: there is no such row.

        Raises:
            ShardError: the shard does not answer, or there is no such table.
        """
        owner = int(shards_of(np.array([key], np.uint64), len(self._polled))[0])
        return self._polled[owner].inspect(table, key)

    def status(self) -> dict[str, Any]:
        """The status of the cluster, as JSON values; docs/serving.md lists them."""
        workers, servers = self.members.of(WORKER), self.members.of(SERVER)
        letters, examples = self._dead_letters(workers), self._dead_letter_examples(workers)
        ready = self._ready()
        checkpoint = self.checkpoints.last if self.checkpoints else None
        published = self.publications.last if self.publications else None
        return {
            "time": self._now(),
            "run": ready[0].run if ready else None,
            "slots": self.shard_map._asdict(),
            "scaling": progress._asdict() if (progress := self._progress) else None,
            "proposal": proposal._asdict() if (proposal := self.proposal) else None,
            "figures": self.quality.figures(),
            "samples": samples_of(ready),
            "samples_per_s": self._rate(),
            "watermark": watermark_of(ready) or None,
            "log_time": self._log_time(),
            "lag": self.lag(),
            "rates": self._rates(),
            "shards": self.shards(),
            "workers": [_worker_to_json(worker) for worker in workers],
            "servers": [server.about | {"name": server.name, "seen": server.seen} for server in servers],
            "workers_left": self._count_left(),
            "dead_letters": dict(letters),
            "dead_letter_examples": examples,
            "checkpoint": checkpoint._asdict() if checkpoint else None,
            "publication": published
            and {"number": published.number, "published": published.published, "watermark": published.watermark},
            "held": self.publications.held if self.publications else "",
            "history": self._history.points(),
        }

    @property
    def proposal(self) -> Proposal | None:
        """Which numbers of shards and workers would be better; None: that is not known yet."""
        return self._load.proposal

    def lag(self) -> int | None:
        """Messages that are not learned yet; where the stream does not tell, what workers report."""
        behind = self._stream_lag.behind(self._ready()) if self._stream_lag else None
        return _reported_lag(self.members.of(WORKER)) if behind is None else behind

    def shards(self) -> list[dict[str, Any]]:
        with self._lock:
            statuses, polled = [*self._statuses], [*self._polled]
        return [
            shard_to_json(i, control.target, status)
            for i, (control, status) in enumerate(zip(polled, statuses, strict=True))
        ]

    def _rates(self) -> dict[str, Any] | None:
        with self._lock:
            return rates_to_json(self._statuses[0])

    def _ready(self) -> list[Any]:
        with self._lock:
            return [status for status in self._statuses if status is not None and status.ready]

    def _member_left(self, member: Member) -> None:
        """Keeps what a worker has counted."""
        if member.kind != WORKER:
            return
        self._dead_letter_examples([member])
        with self._lock:
            self._left.append(time.monotonic())
            self._gone.pop(member.name, None)
            self._gone[member.name] = _counts(member.about.get("dead_letters"))
            if len(self._gone) > _MAX_GONE:
                self._forgotten.update(self._gone.pop(next(iter(self._gone))))
        self.quality.leave(member.name)

    def _dead_letters(self, workers: Sequence[Member]) -> Counter[str]:
        """Dead letters of all workers, each once: a worker that rejoins still reports all that it has counted."""
        with self._lock:
            letters, by_worker = Counter(self._forgotten), dict(self._gone)
        by_worker |= {worker.name: _counts(worker.about.get("dead_letters")) for worker in workers}
        for counts in by_worker.values():
            letters.update(counts)
        return letters

    def _dead_letter_examples(self, workers: Sequence[Member]) -> dict[str, Any]:
        """An example of each reason: field and place of a message that was refused."""
        for worker in workers:
            found = worker.about.get("dead_letter_examples")
            if isinstance(found, dict):
                with self._lock:
                    self._examples.update(list(found.items())[:_MAX_REASONS])
        with self._lock:
            return dict(list(self._examples.items())[:_MAX_REASONS])

    def _count_left(self) -> int:
        """Workers that have left, or were lost, lately."""
        with self._lock:
            return sum(at > time.monotonic() - _LATELY_SECONDS for at in self._left)

    def _log_time(self) -> float | None:
        """All that was in the stream by then has been learned, in seconds since the epoch; None: not known."""
        return self._stream_lag.learned_through(self._ready()) if self._stream_lag else None

    def _poll(self) -> None:
        with self._lock:
            asked_again, polled, controls = [*self._asked_again], [*self._polled], [*self._controls]
            shard_map = self.shard_map
        statuses = list(self._pool.map(poll_shard, polled))
        at = time.monotonic()
        self._place_strays(shard_map, controls, statuses)
        with self._lock:
            if self.shard_map is not shard_map:
                return
            before = self._statuses
            is_newer = [one == now for one, now in zip(asked_again, self._asked_again, strict=True)]
            statuses = [new if newer else old for newer, new, old in zip(is_newer, statuses, before, strict=True)]
            self._statuses = statuses
        for index, (old, new) in enumerate(zip(before, statuses, strict=True)):
            self._log_change(index, old, new)
        samples = samples_of(self._ready())
        with self._lock:
            if samples is not None:
                self._samples.append((at, samples))
            while self._samples and self._samples[0][0] < at - _RATE_SECONDS:
                self._samples.popleft()
        by_address = {control.target: status for control, status in zip(polled, statuses, strict=True)}
        workers = [worker.about for worker in self.members.of(WORKER)]
        self._load.look(at, by_address, workers, self.lag(), self._rate() or 0.0)
        if at >= self._point_due:
            self._point_due = at + _POINT_EVERY
            self._add_point()

    def _place_strays(self, shard_map: ShardMap, controls: Sequence[Control], statuses: Sequence[Any | None]) -> None:
        if self._open_shards is None or not self._placing.acquire(blocking=False):
            return
        try:
            if shard_map is not self.shard_map:
                return
            strays = place_strays(shard_map, controls, statuses, self._told)
        finally:
            self._placing.release()
        for fault in strays if strays != self._strays else ():
            logger.warning("a shard has not got its place yet: %s", fault)
        self._strays = strays

    def _poll_again(self, index: int) -> None:
        """Polls one shard now: the status then has what was just changed there."""
        status = poll_shard(self._polled[index])
        with self._lock:
            self._asked_again[index] += 1
            self._statuses = [*self._statuses[:index], status, *self._statuses[index + 1 :]]

    def _log_change(self, index: int, before: Any | None, status: Any | None) -> None:
        """Logs that a shard is unreachable, and that it is back; not what the first poll finds."""
        address = self._polled[index].target
        if before is not None and status is None:
            logger.warning("shard %d at %s does not answer", index, address)
            self._away.add(index)
        elif index in self._away and status is not None:
            logger.info("shard %d at %s answers again", index, address)
            self._away.discard(index)

    def _add_point(self) -> None:
        figures, log_time = self.quality.figures(), self._log_time()
        point = {
            "time": self._now(),
            "samples_per_s": self._rate(),
            "lag": self.lag(),
            "freshness_ms": _freshness_ms(self.members.of(SERVER), self._now()),
            "log_delay_ms": 1000 * max(0.0, self._now() - log_time) if log_time else None,
            "auc": {label: of_label.get("auc") for label, of_label in figures.items()},
            "log_loss": {label: of_label.get("log_loss") for label, of_label in figures.items()},
        }
        self._history.add(point)

    def _rate(self) -> float | None:
        with self._lock:
            if len(self._samples) < 2:
                return None
            (began, first), (ended, last) = self._samples[0], self._samples[-1]
        return max(0.0, (last - first) / (ended - began))


@contextmanager
def _as_shard_error() -> Iterator[None]:
    """Raises errors of publishing as ShardError, which clients know."""
    try:
        yield
    except PublicationError as exc:
        raise ShardError(str(exc)) from exc


def _freshness_ms(servers: Sequence[Member], now: float) -> float | None:
    """Freshness of the server with the oldest model; None: no server serves anything."""
    watermarks = [server.about.get("watermark") for server in servers]
    known = [one for one in watermarks if isinstance(one, int | float)]
    return 1000 * (now - min(known)) if known else None


def _reported_lag(workers: Sequence[Member]) -> int | None:
    lags = [_counts(worker.about.get("lag")) for worker in workers]
    return sum(sum(lag.values()) for lag in lags) if lags else None


def _worker_to_json(member: Member) -> dict[str, Any]:
    about = member.about
    partitions, rate, size = (about.get(name) for name in ("partitions", "samples_per_s", "samples_per_batch"))
    return {
        "name": member.name,
        "partitions": _numbers(partitions),
        "lag": sum(_counts(about.get("lag")).values()),
        "stalled": _numbers(about.get("stalled")),
        "samples_per_s": rate if isinstance(rate, int | float) else None,
        "samples_per_batch": size if isinstance(size, int | float) else None,
        **{name: share(about, name) for name in ("waits_for_samples", "waits_for_shards")},
        "seen": member.seen,
    }


def _numbers(value: object) -> list[int]:
    """Numbers of partitions, from what a process reports of itself."""
    return [number for number in value if isinstance(number, int)] if isinstance(value, list) else []


def _counts(value: object) -> Mapping[str, int]:
    """Counts by name, from what a process reports of itself."""
    return {str(k): v for k, v in value.items() if isinstance(v, int)} if isinstance(value, dict) else {}
