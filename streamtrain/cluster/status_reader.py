"""The status of the whole cluster, read from shards and the coordinator."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Self

import streamtrain.ps.rpc.ps_pb2 as ps
from streamtrain.cluster.client import ANSWER_SECONDS, CoordinatorClient, coordinator_targets
from streamtrain.cluster.rates import rates_to_json
from streamtrain.cluster.status import poll_shard, samples_of, shard_to_json, watermark_of
from streamtrain.errors import ConfigError, ShardRefused, ShardUnavailable
from streamtrain.ps.nodes.topology import Cluster, check_backups
from streamtrain.ps.replication.state_transfer import Generation
from streamtrain.ps.rpc.control import CHANNEL_OPTIONS, RemoteControl
from streamtrain.ps.rpc.security import Security, connect, metadata
from streamtrain.settings.groups import Settings


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
        timeout: float = ANSWER_SECONDS,
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
            check_backups(shards, settings.ps.backups)
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
            "scaling": None,
            "proposal": None,
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
