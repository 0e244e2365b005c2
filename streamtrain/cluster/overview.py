"""Overview: how a cluster is, as its coordinator says, or where there is none its shards."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Self

import streamtrain.ps.ps_pb2 as pb
from streamtrain.cluster.coordinator_client import CoordinatorClient
from streamtrain.cluster.looks import as_json, look_at, samples_of, watermark_of
from streamtrain.cluster.membership import Cluster
from streamtrain.cluster.places import check_backups
from streamtrain.errors import ConfigError, ShardUnavailable
from streamtrain.ps.control import CHANNEL_OPTIONS, RemoteControl
from streamtrain.ps.copying import Line
from streamtrain.ps.security import Security, connect, metadata
from streamtrain.settings import Settings

_SECONDS = 5.0  # for an answer


class Overview:
    """Asks how a cluster is. For one thread; is to be closed, or used as a context.

    Args:
        coordinator: its address; None: there is none.
        shards: addresses of all shards, which are asked where the coordinator does not answer; empty: not known.
        security: of the wire.
        timeout: seconds for an answer.
        backups: addresses of the backups of all shards, if they have some: one that has taken over is the shard.

    Attributes:
        note: why the last answer is not the coordinator's; "": it is.

    Raises:
        ConfigError: neither is given.
    """

    def __init__(
        self,
        coordinator: str | None,
        shards: Sequence[str],
        security: Security,
        timeout: float = _SECONDS,
        *,
        backups: Sequence[str] = (),
    ) -> None:
        if coordinator is None and not shards:
            raise ConfigError("neither coordinator.address nor ps.addresses is set: give --ps host:port,…")
        self.note = ""
        self._stack = ExitStack()
        self._client: CoordinatorClient | None = None
        if coordinator is not None:
            self._client = CoordinatorClient(coordinator, security, timeout)
            self._stack.callback(self._client.close)
        self._count = len(shards)
        self._addresses = [*shards, *backups]
        self._controls = [self._control(address, security, timeout) for address in self._addresses]
        self._samples: tuple[float, int] | None = None

    @classmethod
    def of(cls, settings: Settings, tf_config: str | None) -> Self:
        """Of the cluster that is set, or that TF_CONFIG names.

        Raises:
            ConfigError: neither names one, or one is wrong.
        """
        known = bool(settings.ps.addresses or (tf_config and not tf_config.isspace()))
        shards = Cluster.of(settings.ps.addresses, tf_config).ps if known else ()
        security = Security.read(**settings.security.arguments())
        if shards:
            check_backups(shards, settings.ps)
        backups = settings.ps.backups if shards else ()
        return cls(settings.coordinator.address, shards, security, backups=backups)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connections."""
        self._stack.close()

    def read(self) -> dict[str, Any]:
        """The cluster as docs/serving.md lists it; what shards do not know is null, and servers and history are empty.

        Raises:
            ShardUnavailable: nobody answers.
            ShardError: the coordinator refuses.
        """
        self.note = "there is no coordinator: this is what shards know"
        if self._client:
            try:
                status = self._client.status()
            except ShardUnavailable as exc:
                if not self._controls:
                    raise ShardUnavailable(f"the coordinator does not answer: {exc}") from exc
                self.note = "the coordinator does not answer: this is what shards know"
            else:
                self.note = ""
                return status
        return self._of_shards()

    def _control(self, address: str, security: Security, timeout: float) -> RemoteControl:
        channel = connect(address, security, CHANNEL_OPTIONS)
        self._stack.callback(channel.close)
        return RemoteControl(channel, address, metadata(security), timeout)

    def _of_shards(self) -> dict[str, Any]:
        found = self._looked()
        looks = [look for _, look in found]
        if all(look is None for look in looks):
            raise ShardUnavailable(f"no shard answers, of {', '.join(self._addresses)}")
        ready = [look for look in looks if look is not None and look.ready]
        samples = samples_of(ready)
        epochs = [look.epoch for look in ready]
        workers = sorted({name for look in looks if look is not None for name in look.workers})
        saved = min(epochs, default=-1)
        return {
            "time": time.time(),
            "run": ready[0].run if ready else None,
            "slots": None,
            "figures": None,
            "samples": samples,
            "samples_per_s": self._rate(samples),
            "watermark": watermark_of(ready) or None,
            "lag": None,
            "shards": [as_json(i, at, look) for i, (at, look) in enumerate(found)],
            "workers": [
                {"name": name, "partitions": None, "lag": None, "samples_per_s": None, "seen": None} for name in workers
            ],
            "servers": [],
            "dead_letters": None,
            "checkpoint": {"epoch": saved, "at": None} if saved >= 0 else None,
            "publication": None,
            "held": None,
            "history": [],
        }

    def _looked(self) -> list[tuple[str, Any | None]]:
        """By shard the address of its primary and how that is; of one that has none, where it starts, and None."""
        with ThreadPoolExecutor(len(self._controls)) as pool:
            looks = list(pool.map(look_at, self._controls))
        places = [
            (address, None if look is not None and _is_backup(look) else look)
            for address, look in zip(self._addresses, looks, strict=True)
        ]
        return [max(places[i :: self._count], key=lambda one: _rank(one[1])) for i in range(self._count)]

    def _rate(self, samples: int | None) -> float | None:
        """Samples per second since the look before; None: there is none."""
        at, before = time.monotonic(), self._samples
        self._samples = None if samples is None else (at, samples)
        if samples is None or before is None or at <= before[0]:
            return None
        return max(0.0, (samples - before[1]) / (at - before[0]))


def _is_backup(look: Any) -> bool:
    return look.HasField("standing") and bool(look.standing.role == pb.BACKUP)


def _rank(look: Any | None) -> tuple[int, int, int]:
    """The greater of two places of a shard is its primary: of two that believe to be so the one that took over last."""
    if look is None:
        return 0, 0, 0
    line = Line.of(look.standing.line)
    return (2, line.begun, line.term) if look.ready else (1, 0, 0)
