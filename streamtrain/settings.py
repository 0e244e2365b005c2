"""Settings of a cluster's processes: what each may be, and is by default; docs/configuration.md has their meaning."""

from typing import Annotated, Any, Literal

from pydantic import Field

from streamtrain.setting_types import Count, Flag, Group, Listen, Secret, Text
from streamtrain.settings_learning import (
    CheckpointSettings,
    ConsistencySettings,
    PsSettings,
    StreamSettings,
    WorkerSettings,
)
from streamtrain.settings_serving import GateSettings, PublishSettings, ServeSettings, WatchdogSettings

__all__ = [
    "GROUPS",
    "KEYS",
    "SECRETS",
    "CheckpointSettings",
    "ConsistencySettings",
    "CoordinatorSettings",
    "GateSettings",
    "LogSettings",
    "PsSettings",
    "PublishSettings",
    "SecuritySettings",
    "ServeSettings",
    "Settings",
    "StreamSettings",
    "UpSettings",
    "WatchdogSettings",
    "WorkerSettings",
]

SECRETS = frozenset(
    {"security.token", "serve.admin_token", "serve.read_token", "stream.kafka", "stream.registry_config"}
)


class CoordinatorSettings(Group):
    """Who knows the whole cluster, and sees to its checkpoints and publications.

    Attributes:
        address: where others reach it; None: there is none, and shard 0 sees to them.
        listen: address that it binds; None: that one.
        metrics: address of its Prometheus metrics; None: they are not served.
    """

    address: Listen | None = None
    listen: Listen | None = None
    metrics: Listen | None = None


class UpSettings(Group):
    """What `streamtrain up` starts on one machine.

    Attributes:
        ps: shards, where `ps.addresses` names none.
        workers: workers.
        data: folder of embedded servers and, unless `checkpoint.url` is set, of checkpoints.
    """

    ps: Annotated[Count, Field(ge=1, le=256)] = 2
    workers: Annotated[Count, Field(ge=1, le=256)] = 2
    data: Text = ".streamtrain"


class LogSettings(Group):
    """What processes write to their log, which is standard error: `streamtrain.logs.set_up_logs`.

    Attributes:
        format: of a line.
        level: from which on streamtrain's own messages are written.
        process: what the process is called; None: by its command.
    """

    format: Literal["text", "json"] = "text"
    level: Literal["debug", "info", "warning", "error"] = "info"
    process: Text | None = None


class SecuritySettings(Group):
    """What the processes trust; `streamtrain.ps.security.Security` says what each does.

    Attributes:
        certificate: path of a PEM file.
        key: path of a PEM file.
        ca: path of a PEM file.
        token: the shared secret.
        token_file: path of a file that holds it.
        insecure: whether plaintext may leave the machine.
    """

    certificate: Text | None = None
    key: Text | None = None
    ca: Text | None = None
    token: Secret | None = None
    token_file: Text | None = None
    insecure: Flag = False

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `streamtrain.ps.security.Security.read`; the token is among them in the clear."""
        values = dict(self)
        return values | {"token": None if self.token is None else self.token.get_secret_value()}


class Settings(Group):
    """All settings, by concern.

    Attributes:
        model: "path/to/file.py:name"; None: the command names it.
        stream: the samples.
        worker: how they are learned.
        ps: the shards.
        consistency: of workers.
        checkpoint: when and where.
        publish: where it is published.
        gate: what a publication must fulfil.
        serve: how predictions are served.
        watchdog: when a server rolls back by itself.
        coordinator: who knows the whole cluster.
        security: of the wire.
        log: what processes say.
        up: what one machine runs.
    """

    model: Text | None = None
    stream: StreamSettings = StreamSettings()
    worker: WorkerSettings = WorkerSettings()
    ps: PsSettings = PsSettings()
    consistency: ConsistencySettings = ConsistencySettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    publish: PublishSettings = PublishSettings()
    gate: GateSettings = GateSettings()
    serve: ServeSettings = ServeSettings()
    watchdog: WatchdogSettings = WatchdogSettings()
    coordinator: CoordinatorSettings = CoordinatorSettings()
    security: SecuritySettings = SecuritySettings()
    log: LogSettings = LogSettings()
    up: UpSettings = UpSettings()


GROUPS = frozenset(name for name, field in Settings.model_fields.items() if isinstance(field.default, Group))
KEYS = tuple(
    sorted(
        [name for name in Settings.model_fields if name not in GROUPS]
        + [f"{group}.{name}" for group in GROUPS for name in type(Settings.model_fields[group].default).model_fields]
    )
)
