"""Settings of a cluster's processes: what each may be, and is by default; docs/configuration.md has their meaning."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from streamtrain.setting_types import (
    Addresses,
    Count,
    Flag,
    Listen,
    Margin,
    Options,
    Ratio,
    Seconds,
    Secret,
    Start,
    Text,
    masked,
)

SECRETS = frozenset({"security.token", "serve.admin_token", "stream.kafka", "stream.registry_config"})


class _Group(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, masked(value)


class PsSettings(_Group):
    """The shards and how workers talk with them.

    Attributes:
        addresses: of all shards, in order of their index: "host:port", "[ipv6]:port" or "unix:path"; as text,
            separated by commas.
        listen: address that this process binds; None: its own of `addresses`.
        max_message_bytes: of one request or answer, in bytes; gRPC allows less than 2 GiB.
        max_keys: of one request, summed over tables.
        wire_dtype: of rows and gradients on their way.
        timeout: deadline of a call, in seconds.
        sessions: of workers with one shard, open at once; each holds a thread.
        metrics: address of a shard's Prometheus metrics; None: they are not served.
    """

    addresses: Addresses = ()
    listen: Listen | None = None
    max_message_bytes: Annotated[Count, Field(ge=65_536, le=2_147_483_647)] = 268_435_456
    max_keys: Annotated[Count, Field(ge=1)] = 4_000_000
    wire_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    timeout: Seconds = 10.0
    sessions: Annotated[Count, Field(ge=1, le=4096)] = 256
    metrics: Listen | None = None


class ConsistencySettings(_Group):
    """How far workers may run apart.

    Attributes:
        mode: "async": not at all held back; "bounded": by `staleness`; "bulk": in step.
        staleness: steps that the fastest worker may be ahead of the slowest; given exactly where mode is "bounded".
        lease: seconds after which a silent worker counts as dead.
    """

    mode: Literal["async", "bounded", "bulk"] = "async"
    staleness: Annotated[Count, Field(ge=0)] | None = None
    lease: Seconds = 10.0


class StreamSettings(_Group):
    """The samples, and how they are read.

    Attributes:
        url: "kafka://host:port,…", "redis://…", "rediss://…" or "unix://…". Credentials in it are masked.
        topic: its name; None: nothing is streamed.
        group: of the workers that share it.
        kafka: settings of librdkafka by its names, beside what `url` says; as text, JSON.
        start: where a new run begins: "earliest", "latest", "committed" (by `group`; else earliest), or an ISO 8601
            time at which the service got the message.
        format: of messages.
        registry: URL of a Confluent schema registry; None: `schema_file`, or the schema that comes with streamtrain.
        registry_config: settings of its client, by their names; as text, JSON.
        schema_file: of Avro or Protobuf messages that bear no schema id.
        create: partitions with which a missing topic is made; 0: it is waited for.
        gone: what becomes of samples that were deleted before they were learned: "fail" or "skip".
        dead_letters: whether bad messages go to "{topic}.dead"; else they are only counted.
        max_bad_ratio: share of bad messages, over 10,000, above which a worker stops.
        late_after: seconds that a sample may be behind the watermark of its partition; None: any.
        late: what becomes of samples later than that: "learn" or "dead".
        buffer_bytes: of messages fetched and not learned, per worker.
        commit_every: seconds between two commits of positions.
    """

    url: Text = "kafka://localhost:9092"
    topic: Text | None = None
    group: Text = "streamtrain"
    kafka: Options = {}
    start: Start = "earliest"
    format: Literal["json", "avro", "protobuf"] = "json"
    registry: Text | None = None
    registry_config: Options = {}
    schema_file: Text | None = None
    create: Annotated[Count, Field(ge=0, le=100_000)] = 0
    gone: Literal["fail", "skip"] = "fail"
    dead_letters: Flag = True
    max_bad_ratio: Ratio = 0.1
    late_after: Seconds | None = None
    late: Literal["learn", "dead"] = "dead"
    buffer_bytes: Annotated[Count, Field(ge=1 << 20)] = 64 << 20
    commit_every: Seconds = 5.0


class WorkerSettings(_Group):
    """How a worker goes about it.

    Attributes:
        batch_size: samples of a step at most.
        batch_age: seconds that the first sample of a batch waits for others.
        ahead: batches that are pulled while one is in its step; lower where the consistency asks for it.
        threads: of TensorFlow; 0: as many as there are cores.
        metrics: address of its Prometheus metrics; None: they are not served.
        drain: seconds that finishing what is under way may take when it is stopped.
        window: samples of its windowed metrics.
    """

    batch_size: Annotated[Count, Field(ge=1, le=1 << 20)] = 1024
    batch_age: Seconds = 0.1
    ahead: Annotated[Count, Field(ge=0, le=64)] = 1
    threads: Annotated[Count, Field(ge=0, le=1024)] = 1
    metrics: Listen | None = None
    drain: Seconds = 30.0
    window: Annotated[Count, Field(ge=1)] = 100_000


class CheckpointSettings(_Group):
    """When state is saved, and where.

    Attributes:
        url: folder or object store; None: nothing is saved. Credentials in it are masked wherever it is shown.
        every: seconds between two.
        keep: epochs that are kept.
        full_every: deltas after which a full one is written; 0: every one is full.
    """

    url: Text | None = None
    every: Seconds = 60.0
    keep: Annotated[Count, Field(ge=1)] = 3
    full_every: Annotated[Count, Field(ge=0)] = 10


class PublishSettings(_Group):
    """Where the model is published for serving.

    Attributes:
        url: of Redis or Valkey; None: it is not published. Credentials in it are masked.
        cluster: whether it is a node of a Redis Cluster.
        model: the name under which it is published.
        every: seconds between two publications.
        dtype: of rows as they are published.
        log_bytes: of changes that are kept for servers that follow.
        version_every: seconds between two versions; None: no version is made by itself.
        keep: versions that are kept, beside those that labels and servers use.
    """

    url: Text | None = None
    cluster: Flag = False
    model: Text = "model"
    every: Seconds = 1.0
    dtype: Literal["float32", "float16", "int8"] = "float32"
    log_bytes: Annotated[Count, Field(ge=1 << 20)] = 256 << 20
    version_every: Seconds | None = None
    keep: Annotated[Count, Field(ge=1)] = 10


class GateSettings(_Group):
    """What a publication must fulfil: `Gate(**dict(settings.gate))` of streamtrain/store/gate.py.

    Attributes:
        non_finite: whether predictions that are not finite hold it back.
        auc_drop: of the AUC; None: it is not looked at.
        loss_rise: of the loss, as a share of it; None: it is not looked at.
        calibration: of the calibration's distance from 1; None: it is not looked at.
        min_samples: of windows that are compared.
    """

    non_finite: Flag = True
    auc_drop: Margin | None = None
    loss_rise: Margin | None = None
    calibration: Margin | None = None
    min_samples: Annotated[Count, Field(ge=0)] = 10_000


class ServeSettings(_Group):
    """How predictions are served.

    Attributes:
        listen: address of the HTTP endpoint.
        version: "prod": what has this label, else the head; a number or "head": that version, whatever is promoted.
        resident: versions that are loaded at the same time, beside the head.
        admin_token: that promote and rollback need; None: they are refused.
        max_batch: instances that are predicted together at most.
        max_queue: instances that may wait; more are refused.
        lookup: where rows are: all in the process (replica), or those asked for lately (cache).
        cache_bytes: of a cache's rows, of the head and of each version.
        processes: that serve at the same address.
        threads: of TensorFlow in each; 0: as many as there are cores.
        metrics: address of the first process's Prometheus metrics, the next ones' ports follow; None: all share the
            endpoint's.
    """

    listen: Listen = "127.0.0.1:8501"
    version: Annotated[Text, Field(pattern=r"^(prod|head|[1-9][0-9]{0,17})$")] = "prod"
    resident: Annotated[Count, Field(ge=1)] = 2
    admin_token: Secret | None = None
    max_batch: Annotated[Count, Field(ge=1, le=1 << 16)] = 512
    max_queue: Annotated[Count, Field(ge=1)] = 8192
    lookup: Literal["replica", "cache"] = "replica"
    cache_bytes: Annotated[Count, Field(ge=1 << 20)] = 1 << 30
    processes: Annotated[Count, Field(ge=1, le=1024)] = 1
    threads: Annotated[Count, Field(ge=0, le=1024)] = 1
    metrics: Listen | None = None


class UpSettings(_Group):
    """What `streamtrain up` starts on one machine.

    Attributes:
        ps: shards, where `ps.addresses` names none.
        workers: workers.
        data: folder of embedded servers and, unless `checkpoint.url` is set, of checkpoints.
    """

    ps: Annotated[Count, Field(ge=1, le=256)] = 2
    workers: Annotated[Count, Field(ge=1, le=256)] = 2
    data: Text = ".streamtrain"


class WatchdogSettings(_Group):
    """When a server rolls back by itself: `Watch(**dict(settings.watchdog))` of streamtrain/serve/watchdog.py.

    Attributes:
        non_finite: share of predictions that are not finite, above which; 1: never.
        mean_factor: by which the mean prediction may change; None: it is not looked at.
        predictions: over so many both are taken.
        window: seconds after a change for which a version is watched.
    """

    non_finite: Ratio = 0.5
    mean_factor: Annotated[Margin, Field(gt=1)] | None = None
    predictions: Annotated[Count, Field(ge=1)] = 1000
    window: Seconds = 600.0


class SecuritySettings(_Group):
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


class Settings(_Group):
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
        security: of the wire.
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
    security: SecuritySettings = SecuritySettings()
    up: UpSettings = UpSettings()


GROUPS = frozenset(name for name, field in Settings.model_fields.items() if isinstance(field.default, _Group))
KEYS = tuple(
    sorted(
        [name for name in Settings.model_fields if name not in GROUPS]
        + [f"{group}.{name}" for group in GROUPS for name in type(Settings.model_fields[group].default).model_fields]
    )
)
