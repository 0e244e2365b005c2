"""Clients of the coordinator: calls, heartbeats of workers and servers, and the status of the cluster."""

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Self, TypeVar

import streamtrain.ps.rpc.ps_pb2 as ps
from streamtrain.checkpoint.cluster_checkpoint import CheckpointInfo
from streamtrain.checkpoint.shard_map import ShardMap
from streamtrain.cluster import coordinator_pb2 as pb
from streamtrain.cluster.coordinator import SERVER, WORKER
from streamtrain.cluster.rates import rates_to_json
from streamtrain.cluster.server import SERVICE
from streamtrain.cluster.status import poll_shard, samples_of, shard_to_json, watermark_of
from streamtrain.errors import ConfigError, ShardError, ShardRefused, ShardUnavailable
from streamtrain.periodic import Backoff, PeriodicTask
from streamtrain.ps.replication.failover import FailoverResolver
from streamtrain.ps.replication.state_transfer import Generation
from streamtrain.ps.rpc.control import CHANNEL_OPTIONS, RemoteControl, Retry, ServiceStub, patiently
from streamtrain.ps.rpc.security import Security, connect, metadata
from streamtrain.ps.topology import Cluster, check_backups
from streamtrain.publish.comparison import HeadComparison
from streamtrain.settings.groups import Settings
from streamtrain.store.publication import Publication

logger = logging.getLogger(__name__)

T = TypeVar("T")
_SECONDS = 5.0  # for an answer
_KINDS = {WORKER: pb.WORKER, SERVER: pb.SERVER}


def coordinator_targets(settings: Settings, shards: Sequence[str]) -> Sequence[str]:
    """Addresses of the coordinator: its own, else that of shard 0, and of the backup of shard 0 if there is one."""
    if settings.coordinator.address is not None:
        return [settings.coordinator.address]
    return [*shards[:1], *settings.ps.backups[:1]]


class CoordinatorClient:
    """Calls a coordinator. Thread-safe; is to be closed, or used as a context.

    Every method may raise ShardUnavailable: the coordinator does not answer in time, or ShardRefused: it refuses.

    Args:
        targets: its address; of a coordinator in the process of a shard with a backup both of that shard's.
        timeout: seconds for an answer.
        promotes: whether the backup of the shard is promoted where its primary is gone.
    """

    def __init__(
        self, targets: Sequence[str], security: Security, timeout: float = _SECONDS, *, promotes: bool = True
    ) -> None:
        self._targets = [(connect(address, security, CHANNEL_OPTIONS), address) for address in targets]
        token, resolver = metadata(security), None
        if len(self._targets) > 1:
            resolver = FailoverResolver((self._targets[0], self._targets[1]), token, promotes=promotes)
        self._stub = ServiceStub(SERVICE, self._targets[0], token, timeout, resolver)

    @classmethod
    def from_settings(cls, settings: Settings, tf_config: str | None = None) -> Self:
        """The client of the coordinator of a cluster.

        Args:
            settings: of the cluster.
            tf_config: of the environment, if there is one.

        Raises:
            ConfigError: neither the coordinator nor the shards are set, or the backups do not fit the shards.
        """
        shards: Sequence[str] = ()
        if settings.coordinator.address is None:
            shards = Cluster.of(settings.ps.addresses, tf_config).ps
            check_backups(shards, settings.ps)
        return cls(coordinator_targets(settings, shards), Security.from_settings(settings.security))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for channel, _ in self._targets:
            channel.close()

    @property
    def address(self) -> str:
        """Where the coordinator is, as far as it is known."""
        return self._stub.address

    def beat(self, kind: str, name: str, about: dict[str, Any]) -> int:
        """Sends a heartbeat of a process; returns the epoch of the shard map."""
        request = pb.BeatRequest(kind=_KINDS[kind], name=name, about=json.dumps(about))
        return int(self._stub.call("Beat", request).epoch)

    def leave(self, kind: str, name: str) -> None:
        """Ends the membership of a process."""
        self._stub.call("Leave", pb.LeaveRequest(kind=_KINDS[kind], name=name))

    def slots(self) -> ShardMap:
        answer = self._stub.call("Slots", pb.SlotsRequest())
        return ShardMap(answer.epoch, tuple(answer.shards))

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self._parse(self._stub.call("Status", pb.StatusRequest()).status, dict)
        return status

    def inspect(self, table: str, key: int) -> dict[str, Any] | None:
        """`count` and `last_seen` (None where it is not kept) of a row; None: there is no such row."""
        answer = self._stub.call("Inspect", pb.InspectRequest(table=table, key=key))
        return {"count": answer.count, "last_seen": answer.last_seen or None} if answer.found else None

    def report(self, worker: str, windows: Sequence[Any], probes: bytes = b"") -> None:
        self._stub.call("Report", pb.ReportRequest(worker=worker, windows=windows, probes=probes))

    def checkpoint(self, *, full: bool = False, timeout: float | None = None) -> CheckpointInfo:
        """Takes a checkpoint, and waits for it at most `timeout` seconds, if it is not None.

        Raises:
            ShardError: nothing has been learned yet.
            CheckpointError: it cannot be written.
        """
        answer = self._stub.call("Checkpoint", pb.CheckpointRequest(full=full), timeout)
        return CheckpointInfo(answer.epoch, answer.kind, answer.aligned, answer.pause_ms, answer.seconds)

    def publish_now(self, *, force: bool = False, timeout: float | None = None) -> Publication:
        """See `Coordinator.publish_now`; waits at most `timeout` seconds, if it is not None."""
        answer = self._stub.call("PublishNow", pb.PublishNowRequest(force=force), timeout)
        return self._parse(answer.publication, Publication.from_json)

    def set_rates(
        self, changes: Mapping[str, float | None], who: str, why: str = "", *, timeout: float | None = None
    ) -> dict[str, Any]:
        """See `Coordinator.set_rates`, of whose answer this is `to_json`; for `timeout` see `publish_now`."""
        rates = {name: rate for name, rate in changes.items() if rate is not None}
        reset = [name for name, rate in changes.items() if rate is None]
        request = pb.SetRatesRequest(rates=rates, reset=reset, who=who, why=why)
        found: dict[str, Any] = self._parse(self._stub.call("SetRates", request, timeout).found, dict)
        return found

    def verify(self, *, timeout: float | None = None) -> HeadComparison:
        """See `Coordinator.verify`; for `timeout` see `publish_now`."""
        return self._parse(self._stub.call("Verify", pb.VerifyRequest(), timeout).found, HeadComparison.from_json)

    def _parse(self, text: str, parse: Callable[[Any], T]) -> T:
        try:
            return parse(json.loads(text))
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            raise ShardError(f"unexpected reply from {self.address}: it runs another release") from exc


class StatusReader:
    """Reads the status of a cluster from its coordinator, or while that does not answer from its shards.

    For one thread; is to be closed, or used as a context. It promotes no backup.

    Args:
        coordinator: addresses of the coordinator, see `coordinator_targets`.
        shards: addresses of all shards; empty: not known.
        timeout: seconds for an answer.
        backups: addresses of the backups of all shards, if they have some.

    Attributes:
        note: why the last status is not the coordinator's; "": it is.
    """

    def __init__(
        self,
        coordinator: Sequence[str],
        shards: Sequence[str],
        security: Security,
        timeout: float = _SECONDS,
        *,
        backups: Sequence[str] = (),
    ) -> None:
        self.note = ""
        self._stack = ExitStack()
        self._client = self._stack.enter_context(CoordinatorClient(coordinator, security, timeout, promotes=False))
        self._count, self._addresses = len(shards), [*shards, *backups]
        self._controls = []
        for address in self._addresses:
            channel = connect(address, security, CHANNEL_OPTIONS)
            self._stack.callback(channel.close)
            self._controls.append(RemoteControl(channel, address, metadata(security), timeout))
        self._samples: tuple[float, int] | None = None  # of the read before

    @classmethod
    def from_settings(cls, settings: Settings, tf_config: str | None) -> Self:
        """The reader of a cluster.

        Raises:
            ConfigError: neither the coordinator nor the shards are set, or the backups do not fit the shards.
        """
        shards: Sequence[str] = ()
        if settings.ps.addresses or (tf_config and not tf_config.isspace()):
            shards = Cluster.of(settings.ps.addresses, tf_config).ps
            check_backups(shards, settings.ps)
        elif settings.coordinator.address is None:
            raise ConfigError(
                "neither coordinator.address nor ps.addresses is set, and `streamtrain up` does not run in this "
                "folder: give --ps host:port,…"
            )
        coordinator, backups = coordinator_targets(settings, shards), settings.ps.backups if shards else ()
        return cls(coordinator, shards, Security.from_settings(settings.security), backups=backups)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self) -> dict[str, Any]:
        """The status as docs/serving.md lists it. From shards alone, what they do not know is null or empty.

        Raises:
            ShardUnavailable: neither the coordinator nor a shard answers.
            ShardError: the coordinator refuses.
        """
        self.note = ""
        try:
            return self._client.status()
        except ShardUnavailable as exc:
            if not self._controls:
                raise ShardUnavailable(f"the coordinator does not answer: {exc}") from exc
            self.note = "the coordinator does not answer: this is what shards know"
        except ShardRefused as exc:
            if exc.reason != "mismatch" or not self._controls:
                raise
            self.note = f"{exc}: this is what shards know"
        return self.read_shards()

    def read_shards(self) -> dict[str, Any]:
        """The status as far as shards know it; raises the errors of `read`."""
        polled = self._poll()
        statuses = [status for _, status in polled if status is not None]
        if not statuses:
            raise ShardUnavailable(f"no shard answers, of {', '.join(self._addresses)}")
        ready = [status for status in statuses if status.ready]
        epoch = min((status.epoch for status in ready), default=-1)
        unknown = dict.fromkeys(("partitions", "stalled", "lag", "samples_per_s", "samples_per_batch", "seen"))
        return {
            "time": time.time(),
            "run": ready[0].run if ready else None,
            "slots": None,
            "figures": None,
            "samples": samples_of(ready),
            "samples_per_s": self._rate(samples_of(ready)),
            "watermark": watermark_of(ready) or None,
            "log_time": None,
            "lag": None,
            "rates": rates_to_json(next((status for status in statuses if status.shard == 0), None)),
            "shards": [shard_to_json(i, address, status) for i, (address, status) in enumerate(polled)],
            "workers": [
                {"name": name} | unknown for name in sorted({n for status in statuses for n in status.workers})
            ],
            "servers": [],
            "workers_left": None,
            "dead_letters": None,
            "dead_letter_examples": None,
            "checkpoint": {"epoch": epoch, "at": None} if epoch >= 0 else None,
            "publication": None,
            "held": None,
            "history": [],
        }

    def _poll(self) -> list[tuple[str, Any | None]]:
        """Address and status of the primary of each shard; of one without a primary, where it starts, and None."""
        with ThreadPoolExecutor(len(self._controls)) as pool:
            statuses = list(pool.map(poll_shard, self._controls))
        polled = [
            (address, None if status is not None and _is_backup(status) else status)
            for address, status in zip(self._addresses, statuses, strict=True)
        ]
        return [max(polled[i :: self._count], key=lambda place: _rank(place[1])) for i in range(self._count)]

    def _rate(self, samples: int | None) -> float | None:
        """Samples per second since the read before; None: there is none."""
        at, before = time.monotonic(), self._samples
        self._samples = None if samples is None else (at, samples)
        if samples is None or before is None or at <= before[0]:
            return None
        return max(0.0, (samples - before[1]) / (at - before[0]))


def _is_backup(status: Any) -> bool:
    return status.HasField("standing") and bool(status.standing.role == ps.BACKUP)


def _rank(status: Any | None) -> tuple[int, int, int]:
    """The higher of two places of a shard is its primary: of two that believe to be, the one that took over last."""
    if status is None:
        return 0, 0, 0
    generation = Generation.of(status.standing.line)
    return (2, generation.begun, generation.term) if status.ready else (1, 0, 0)


def resolve_cluster(settings: Settings, tf_config: str | None, stopped: threading.Event) -> Cluster:
    """The shards as they are set, else as the coordinator says once it answers.

    Args:
        settings: of the process.
        tf_config: of the environment, if there is one.
        stopped: ends the waiting.

    Raises:
        ConfigError: neither the shards nor a coordinator are set.
        ShardUnavailable: the coordinator did not answer before `stopped` was set.
    """
    if settings.ps.addresses or tf_config or settings.coordinator.address is None:
        return Cluster.of(settings.ps.addresses, tf_config)
    with CoordinatorClient.from_settings(settings) as client:
        return Cluster(patiently(client.slots, Retry(), stopped).shards)


_BEAT_EVERY = 1.0  # seconds


class Heartbeat:
    """Sends a heartbeat of a process once a second, in a thread of its own, while it is entered. Closes the client.

    Args:
        client: of the coordinator.
        kind: "worker" or "server".
        about: gives what it reports of itself.
        moved: called once if the shard map changes: a process that uses the old one must start over.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        kind: str,
        name: str,
        about: Callable[[], dict[str, Any]],
        moved: Callable[[], object] = lambda: None,
    ) -> None:
        self._client, self._kind, self._name, self._about, self._moved = client, kind, name, about, moved
        self._epoch: int | None = None
        self._is_away = False
        backoff = Backoff(_BEAT_EVERY, _BEAT_EVERY)
        self._task = PeriodicTask("beats", self._beat, _BEAT_EVERY, backoff=backoff, observe=self._observe)

    def __enter__(self) -> "Heartbeat":
        self._task.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._task.close()
        try:
            self._client.leave(self._kind, self._name)
        except ShardError as exc:  # the lease expires by itself
            logger.debug("%s", exc)
        self._client.close()

    def _observe(self, error: Exception | None) -> None:
        if isinstance(error, ShardError) and not self._is_away:
            logger.warning("the coordinator is unreachable, all else continues: %s", error)
        elif error is None and self._is_away:
            logger.info("the coordinator is reachable again")
        self._is_away = error is not None

    def _beat(self) -> None:
        epoch = self._client.beat(self._kind, self._name, self._about())
        if self._epoch is not None and epoch != self._epoch:
            logger.warning("shard map changed: epoch %d -> %d", self._epoch, epoch)
            self._moved()
        self._epoch = epoch
