"""Overview: how a cluster is, as its coordinator says, or where there is none its shards."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Self

from streamtrain.cluster.coordinator_client import CoordinatorClient
from streamtrain.cluster.looks import as_json, look_at, samples_of, watermark_of
from streamtrain.cluster.membership import Cluster
from streamtrain.errors import ConfigError, ShardUnavailable
from streamtrain.ps.control import CHANNEL_OPTIONS, RemoteControl
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

    Attributes:
        note: why the last answer is not the coordinator's; "": it is.

    Raises:
        ConfigError: neither is given.
    """

    def __init__(
        self, coordinator: str | None, shards: Sequence[str], security: Security, timeout: float = _SECONDS
    ) -> None:
        if coordinator is None and not shards:
            raise ConfigError("neither coordinator.address nor ps.addresses is set: give --ps host:port,…")
        self.note = ""
        self._stack = ExitStack()
        self._client: CoordinatorClient | None = None
        if coordinator is not None:
            self._client = CoordinatorClient(coordinator, security, timeout)
            self._stack.callback(self._client.close)
        self._addresses = list(shards)
        self._controls = [self._control(address, security, timeout) for address in shards]
        self._samples: tuple[float, int] | None = None

    @classmethod
    def of(cls, settings: Settings, tf_config: str | None) -> Self:
        """Of the cluster that is set, or that TF_CONFIG names.

        Raises:
            ConfigError: neither names one, or one is wrong.
        """
        known = bool(settings.ps.addresses or (tf_config and not tf_config.isspace()))
        shards = Cluster.of(settings.ps.addresses, tf_config).ps if known else ()
        return cls(settings.coordinator.address, shards, Security.read(**settings.security.arguments()))

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
        with ThreadPoolExecutor(len(self._controls)) as pool:
            looks = list(pool.map(look_at, self._controls))
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
            "shards": [as_json(i, at, look) for i, (at, look) in enumerate(zip(self._addresses, looks, strict=True))],
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

    def _rate(self, samples: int | None) -> float | None:
        """Samples per second since the look before; None: there is none."""
        at, before = time.monotonic(), self._samples
        self._samples = None if samples is None else (at, samples)
        if samples is None or before is None or at <= before[0]:
            return None
        return max(0.0, (samples - before[1]) / (at - before[0]))
