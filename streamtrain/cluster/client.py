"""Clients of the coordinator: calls, and heartbeats of workers and servers."""

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

from google.protobuf.descriptor import ServiceDescriptor

import streamtrain.cluster.coordinator_pb2 as pb
from streamtrain.checkpoint.cluster_checkpoint import CheckpointInfo
from streamtrain.cluster.members import SERVER, WORKER
from streamtrain.errors import ShardError, ShardRefused, ShardUnavailable
from streamtrain.periodic import Backoff, PeriodicTask
from streamtrain.ps.nodes.topology import Cluster, ShardMap, check_backups
from streamtrain.ps.replication.failover import FailoverResolver
from streamtrain.ps.rpc.control import CHANNEL_OPTIONS, Retry, ServiceStub, patiently
from streamtrain.ps.rpc.security import Security, connect, metadata
from streamtrain.publish.head_check import HeadComparison
from streamtrain.settings.groups import Settings
from streamtrain.store.publication import Publication

logger = logging.getLogger(__name__)

SERVICE: ServiceDescriptor = pb.DESCRIPTOR.services_by_name["Coordinator"]

T = TypeVar("T")
ANSWER_SECONDS = 5.0
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
        self, targets: Sequence[str], security: Security, timeout: float = ANSWER_SECONDS, *, promotes: bool = True
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
            check_backups(shards, settings.ps.backups)
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
        return _map_of(self._stub.call("Slots", pb.SlotsRequest()))

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

    def scale(
        self, addresses: Sequence[str], backups: Sequence[str] = (), *, rate: float = 0.0, timeout: float | None = None
    ) -> ShardMap:
        """See `Coordinator.scale`; for `timeout` see `publish_now`."""
        return _map_of(self._stub.call("Scale", pb.ScaleRequest(shards=addresses, backups=backups, rate=rate), timeout))

    def cancel_scale(self) -> None:
        """See `Coordinator.cancel_scale`."""
        self._stub.call("CancelScale", pb.CancelScaleRequest())

    def scale_back(self, addresses: Sequence[str], stopped: threading.Event) -> None:
        """Has the shards of before hold the rows, after a `scale` of which it is not known what became of it.

        The coordinator may have ended at any step, or still be at it: it is asked until it answers.

        Args:
            addresses: of the shards of before, which have no backups.
            stopped: ends the asking.

        Raises:
            ShardError: it refuses, or `stopped` is set.
        """

        def attempt() -> None:
            try:
                self.scale(addresses)
            except ShardRefused as exc:
                if exc.reason != "limit":  # which says that it is still at it
                    raise
                raise ShardUnavailable(str(exc)) from exc

        patiently(attempt, Retry(), stopped)

    def forget(self, ids: Sequence[tuple[str, str]], *, timeout: float | None = None) -> dict[str, Any]:
        """See `Coordinator.forget`, of whose receipt this is `to_json`; for `timeout` see `publish_now`."""
        request = pb.ForgetRequest(ids=[pb.Id(feature=feature, id=one) for feature, one in ids])
        found: dict[str, Any] = self._parse(self._stub.call("Forget", request, timeout).receipt, dict)
        return found

    def verify(self, *, timeout: float | None = None) -> HeadComparison:
        """See `Coordinator.verify`; for `timeout` see `publish_now`."""
        return self._parse(self._stub.call("Verify", pb.VerifyRequest(), timeout).found, HeadComparison.from_json)

    def _parse(self, text: str, parse: Callable[[Any], T]) -> T:
        try:
            return parse(json.loads(text))
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            raise ShardError(f"unexpected reply from {self.address}: it runs another release") from exc


def _map_of(answer: Any) -> ShardMap:
    return ShardMap(answer.epoch, tuple(answer.shards), tuple(answer.backups), answer.scaled)


def resolve_cluster(settings: Settings, tf_config: str | None, stopped: threading.Event) -> tuple[Cluster, Settings]:
    """The shards as they are set, else as the coordinator says once it answers; and settings with their backups.

    Args:
        settings: of the process.
        tf_config: of the environment, if there is one.
        stopped: ends the waiting.

    Raises:
        ConfigError: neither the shards nor a coordinator are set.
        ShardUnavailable: the coordinator did not answer before `stopped` was set.
    """
    if settings.ps.addresses or tf_config or settings.coordinator.address is None:
        return Cluster.of(settings.ps.addresses, tf_config), settings
    with CoordinatorClient.from_settings(settings) as client:
        shard_map = patiently(client.slots, Retry(), stopped)
    ps = settings.ps.model_copy(update={"backups": shard_map.backups})
    return Cluster(shard_map.shards), settings.model_copy(update={"ps": ps})


def known_shards(settings: Settings, tf_config: str | None) -> ShardMap:
    """The map of shards as the coordinator says, or while it does not answer as it is set.

    Args:
        settings: of the process.
        tf_config: of the environment, if there is one.

    Raises:
        ConfigError: neither the shards nor a coordinator are set.
        ShardUnavailable: the shards are not set, and the coordinator does not answer.
    """
    is_set = settings.ps.addresses or (tf_config and not tf_config.isspace())
    if settings.coordinator.address is not None:
        try:
            with CoordinatorClient.from_settings(settings) as client:
                return client.slots()
        except ShardError:
            if not is_set:
                raise
    return ShardMap(0, Cluster.of(settings.ps.addresses, tf_config).ps, settings.ps.backups)


_BEAT_EVERY = 1.0  # seconds


class Heartbeat:
    """Sends a heartbeat of a process once a second, in a thread of its own, while it is entered. Closes the client.

    Args:
        client: of the coordinator.
        kind: "worker" or "server".
        about: gives what it reports of itself.
        moved: called whenever the shard map has changed, and when the first one is known; False: it could not find out
            what it is, and is called once more with the next beat.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        kind: str,
        name: str,
        about: Callable[[], dict[str, Any]],
        moved: Callable[[], bool] = lambda: True,
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

    def hurry(self) -> None:
        """Sends one now, as the shard map may have changed; by any thread."""
        self._task.wake()

    def _observe(self, error: Exception | None) -> None:
        if isinstance(error, ShardError) and not self._is_away:
            logger.warning("the coordinator is unreachable, all else continues: %s", error)
        elif error is None and self._is_away:
            logger.info("the coordinator is reachable again")
        self._is_away = error is not None

    def _beat(self) -> None:
        epoch = self._client.beat(self._kind, self._name, self._about())
        if epoch == self._epoch or self._moved():
            self._epoch = epoch
