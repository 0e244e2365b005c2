"""How large a cluster has to be, computed from measured figures: the tables of docs/sizing.md."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from harness.figures import number, table
from harness.results import BUSY

PARTS = ("workers", "shards", "tables", "serving-rows", "lookup-rows", "redis")  # that figures are taken from
BATCH = 1024  # of the workers that were measured


@dataclass(frozen=True)
class Wanted:
    """The load of a cluster and its machines; the defaults are the example of the page.

    Attributes:
        parameters: floats of all rows.
        dim: floats of a row.
        samples: learned per second.
        message: bytes of a sample in Kafka.
        batch: samples of a worker's step.
        busy: planned utilization of a core, 0 to 1.
        memory: bytes that a shard may use.
        away: seconds within which a lost shard has to be restored.
        predictions: instances predicted per second.
    """

    parameters: float = 10e9
    dim: int = 16
    samples: float = 1e6
    message: float = 670
    batch: int = 8192
    busy: float = 0.7
    memory: float = 24e9
    away: float = 120
    predictions: float = 1e6

    @property
    def rows(self) -> float:
        """Rows of all tables."""
        return self.parameters / self.dim


@dataclass(frozen=True)
class Measured:
    """Measured figures: `INPUTS` says what they are. CPU is in seconds."""

    worker: float
    shard: float
    message: float
    wire: float
    row: float
    written: float
    restored: float
    served: float
    replica: float
    redis: float
    published: float


def measured(medians: Mapping[str, Any]) -> Measured | None:
    """From the medians of a file of results; None if something was not measured."""
    try:
        two, shards = medians["workers"]["2 workers, 2 shards"], medians["shards"]
        one, most = shards["2 workers, 1 shard"], shards["2 workers, 4 shards"]
        more = (_cpu(most) - _cpu(one)) / 3
        large = medians["tables"]["50M rows"]
        replicas, redis = medians["lookup-rows"], medians["redis"]["1M rows"]
        return Measured(
            worker=max(two["worker CPU µs/sample"] - more, 0.0) / 1e6,  # two shards' messages, half of each here
            shard=max(two["shard CPU µs/sample"] - more, 0.0) / 1e6,
            message=max(more, 0.0) * BATCH / 1e6,
            wire=two["bytes/sample"],
            row=large["peak bytes/row"],
            written=50e6 / large["checkpoint s"],
            restored=large["restore rows/s"],
            served=512 * medians["serving-rows"]["1M rows"]["512 by 16, requests/s"],
            replica=(replicas.get("50M rows") or replicas["1M rows"])["bytes/row"],
            redis=redis["float16, bytes/row"],
            published=redis["float16, published rows/s"],
        )
    except KeyError:
        return None


def _cpu(figures: Mapping[str, float]) -> float:
    return figures["worker CPU µs/sample"] + figures["shard CPU µs/sample"]


@dataclass(frozen=True)
class Needed:
    """What the cluster needs: `OUTPUTS` says what it is. Memory and bytes are in bytes, times in seconds."""

    rows: float
    memory: float
    for_memory: int
    for_work: int
    for_restore: int
    shards: int
    shard_memory: float
    workers: int
    partitions: int
    wire: float
    stream: float
    checkpoint: float
    restore: float
    redis: float
    replica: float
    servers: int


def needed(of: Measured, wanted: Wanted) -> Needed:
    """The formulas of the page, in its order.

    Raises:
        ValueError: batches are so small that messages alone use all of the planned CPU.
    """
    memory = wanted.rows * of.row
    messages = wanted.samples / wanted.batch * of.message / 2  # cores, of each shard, and of all workers for one shard
    if messages >= wanted.busy:
        raise ValueError("messages alone use all of the planned CPU of shards: make batches larger")
    for_memory = math.ceil(memory / wanted.memory)
    for_work = math.ceil(wanted.samples * of.shard / (wanted.busy - messages))
    for_restore = math.ceil(wanted.rows / of.restored / wanted.away)
    shards = max(for_memory, for_work, for_restore)
    workers = math.ceil((wanted.samples * of.worker + shards * messages) / wanted.busy)
    return Needed(
        rows=wanted.rows,
        memory=memory,
        for_memory=for_memory,
        for_work=for_work,
        for_restore=for_restore,
        shards=shards,
        shard_memory=memory / shards,
        workers=workers,
        partitions=workers,
        wire=wanted.samples * of.wire,
        stream=wanted.samples * wanted.message,
        checkpoint=wanted.rows / shards / of.written,
        restore=wanted.rows / shards / of.restored,
        redis=wanted.rows * of.redis,
        replica=wanted.rows * of.replica,
        servers=math.ceil(wanted.predictions / of.served / wanted.busy),
    )


INPUTS = {
    "worker": ("*w*: CPU of a worker, µs/sample, without messages", 1e6),
    "shard": ("*s*: CPU of shards, µs/sample, without messages", 1e6),
    "message": ("*m*: CPU of a message and its reply, µs", 1e6),
    "wire": ("*b*: bytes/sample between workers and shards", 1),
    "row": ("*r*: bytes/row in a shard, at most", 1),
    "written": ("*c*: rows/s that a shard writes to a checkpoint", 1),
    "restored": ("*l*: rows/s that a shard restores", 1),
    "served": ("*p*: instances/s of a serving process, 512 per request", 1),
    "replica": ("*q*: bytes/row in a serving process", 1),
    "redis": ("*h*: bytes/row in Redis, float16", 1),
    "published": ("rows/s that one shard writes to one Redis", 1),
}
OUTPUTS = {
    "rows": ("rows", "P / d", 1e6, "M"),
    "memory": ("memory of shards", "R · r", 1e9, "GB"),
    "for_memory": ("shards, for memory", "⌈R · r / M⌉", 1, ""),
    "for_work": ("shards, for work", "⌈S · s / (u - S / B · m / 2)⌉", 1, ""),
    "for_restore": ("shards, for restore in time", "⌈R / l / T⌉", 1, ""),
    "shards": ("*K*: shards, one core each", "the maximum of these", 1, ""),
    "shard_memory": ("memory of one shard", "R · r / K", 1e9, "GB"),
    "workers": ("workers, one core each", "⌈(S · w + K · S / B · m / 2) / u⌉", 1, ""),
    "partitions": ("partitions of the topic, at least", "one per worker", 1, ""),
    "wire": ("network between workers and shards", "S · b", 1e9, "GB/s"),
    "stream": ("network from Kafka", "S · j", 1e9, "GB/s"),
    "checkpoint": ("full checkpoint, all shards at once", "R / K / c", 1, "s"),
    "restore": ("restore of a lost shard", "R / K / l", 1, "s"),
    "redis": ("Redis, one version", "R · h", 1e9, "GB"),
    "replica": ("serving process that holds all rows", "R · q", 1e9, "GB"),
    "servers": ("serving processes", "⌈Q / p / u⌉", 1, ""),
}


def markdown(found: Mapping[str, Any]) -> str:
    """Two tables: measured figures, and what follows from them."""
    of = measured(found["medians"])
    if of is None:
        return "Not measured yet: `make bench-scale`."
    inputs = [(name, number(getattr(of, key) * scale)) for key, (name, scale) in INPUTS.items()]
    result = needed(of, Wanted())
    outputs = []
    for one in fields(result):
        name, formula, scale, unit = OUTPUTS[one.name]
        outputs.append((name, f"`{formula}`", f"{number(getattr(result, one.name) / scale)} {unit}".strip()))
    tables = [table(("measured", ""), inputs), table(("needed", "formula", "example"), outputs)]
    others = max(
        (statistics.median(found["parts"].get(part, {}).get("others") or [0.0]) for part in PARTS), default=0.0
    )
    if others > BUSY:
        used = f"Other processes used {others:.0%} of the machine during the measurement"
        tables.insert(0, f"{used}: memory and bytes are right, times are not.")
    return "\n\n".join(tables)
