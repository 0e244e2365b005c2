"""Settings of learning: shards, workers, their stream and checkpoints."""

from typing import Annotated, Literal

from pydantic import Field

from streamtrain.setting_types import Addresses, Count, Flag, Group, Listen, Options, Ratio, Seconds, Start, Text


class PsSettings(Group):
    """The shards and how workers talk with them.

    Attributes:
        addresses: of all shards, in order of their index: "host:port", "[ipv6]:port" or "unix:path"; as text,
            separated by commas.
        backups: of the backups of all shards, likewise; none: shards have none.
        backup_patience: seconds that a shard waits for its backup before it asks whether that has taken over.
        listen: address that this process binds; None: its own of `addresses`, or of `backups`.
        max_message_bytes: of one request or answer, in bytes; gRPC allows less than 2 GiB.
        max_keys: of one request, summed over tables.
        wire_dtype: of rows and gradients on their way.
        lanes: whether workers and shards of one machine exchange messages through shared memory.
        timeout: deadline of a call, in seconds.
        sessions: of workers with one shard, open at once; each holds a thread.
        metrics: address of a shard's Prometheus metrics; None: they are not served.
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


class ConsistencySettings(Group):
    """How far workers may run apart.

    Attributes:
        mode: "async": not at all held back; "bounded": by `staleness`; "bulk": in step.
        staleness: steps that the fastest worker may be ahead of the slowest; given exactly where mode is "bounded".
        lease: seconds after which a silent worker counts as dead.
    """

    mode: Literal["async", "bounded", "bulk"] = "async"
    staleness: Annotated[Count, Field(ge=0)] | None = None
    lease: Seconds = 10.0


class StreamSettings(Group):
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
    kafka: Options = Field(default={})
    start: Start = "earliest"
    format: Literal["json", "avro", "protobuf"] = "json"
    registry: Text | None = None
    registry_config: Options = Field(default={})
    schema_file: Text | None = None
    create: Annotated[Count, Field(ge=0, le=100_000)] = 0
    gone: Literal["fail", "skip"] = "fail"
    dead_letters: Flag = True
    max_bad_ratio: Ratio = 0.1
    late_after: Seconds | None = None
    late: Literal["learn", "dead"] = "dead"
    buffer_bytes: Annotated[Count, Field(ge=1 << 20)] = 64 << 20
    commit_every: Seconds = 5.0


class WorkerSettings(Group):
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


class CheckpointSettings(Group):
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
