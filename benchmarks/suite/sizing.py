"""What a cluster needs, computed from measured figures: the tables of docs/sizing.md."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

PARTS = ("workers", "shards", "tables", "serving-rows", "lookup-rows", "redis")  # that the figures are of
BUSY = 0.05  # share of the machine that others may use before it is told
BATCH = 1024  # of the workers that were measured
Table = Callable[[Sequence[str], Iterable[Sequence[object]]], str]


@dataclass(frozen=True)
class Wanted:
    """What the cluster is for, and what its machines are; the figures of the page's example.

    Attributes:
        parameters: floats of all rows.
        dim: floats of a row.
        samples: that are learned a second.
        message: bytes of a sample in Kafka.
        batch: samples of a worker's step.
        busy: share of a core that is planned to be used.
        memory: bytes that a shard may fill.
        away: seconds after which a lost shard is back.
        predictions: instances that are predicted a second.
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
        """Of all tables."""
        return self.parameters / self.dim


@dataclass(frozen=True)
class Measured:
    """What was measured; units are in the names of figures.

    Attributes:
        worker: CPU seconds of a worker for a sample, without what messages cost.
        shard: CPU seconds of all shards for a sample, without what messages cost.
        message: CPU seconds of both sides for one more message to a shard and back.
        wire: bytes that cross the wire for a sample.
        row: bytes of memory for a row, at most.
        written: rows that a shard writes to a checkpoint in a second.
        restored: rows that a shard restores in a second.
        served: instances that a serving process predicts in a second.
        replica: bytes of memory for a row of a serving process.
        redis: bytes of a row of float16 in Redis, its key and its place in a hash included.
        published: rows that are written to Redis in a second.
    """

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
    """From the medians of a file of results; None: something was not measured."""
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
    """What the cluster needs.

    Attributes:
        rows: in all.
        memory: bytes of all shards.
        for_memory: shards, so that each has room for its rows.
        for_work: shards, so that each keeps up with one core.
        for_restore: shards, so that a lost one is back in time.
        shards: the most of these, of one core each.
        shard_memory: bytes of one.
        workers: of one core each.
        partitions: of the topic.
        wire: bytes a second between workers and shards.
        stream: bytes a second from Kafka.
        checkpoint: seconds of a full one, all shards at the same time.
        restore: seconds until a lost shard is back.
        redis: bytes of one version.
        replica: bytes of a serving process that holds all rows.
        servers: serving processes.
    """

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
        ValueError: batches are so small that messages alone keep shards busy.
    """
    memory = wanted.rows * of.row
    messages = wanted.samples / wanted.batch * of.message / 2  # cores, of each shard, and of all workers for one shard
    if messages >= wanted.busy:
        raise ValueError("messages alone keep shards busy: make batches larger")
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
    "worker": ("*w*: CPU of a worker, µs/sample, messages apart", 1e6),
    "shard": ("*s*: CPU of shards, µs/sample, messages apart", 1e6),
    "message": ("*m*: CPU of a message and its answer, µs", 1e6),
    "wire": ("*b*: bytes/sample between workers and shards", 1),
    "row": ("*r*: bytes/row in a shard, at most", 1),
    "written": ("*c*: rows/s that a shard writes to a checkpoint", 1),
    "restored": ("*l*: rows/s that a shard restores", 1),
    "served": ("*p*: instances/s of a serving process, 512 a request", 1),
    "replica": ("*q*: bytes/row in a serving process", 1),
    "redis": ("*h*: bytes/row in Redis, float16", 1),
    "published": ("rows/s that one shard writes to one Redis", 1),
}
OUTPUTS = {
    "rows": ("rows", "P / d", 1e6, "M"),
    "memory": ("memory of shards", "R · r", 1e9, "GB"),
    "for_memory": ("shards, for memory", "⌈R · r / M⌉", 1, ""),
    "for_work": ("shards, for work", "⌈S · s / (u - S / B · m / 2)⌉", 1, ""),
    "for_restore": ("shards, to be back in time", "⌈R / l / T⌉", 1, ""),
    "shards": ("*K*: shards, one core each", "the most of these", 1, ""),
    "shard_memory": ("memory of one", "R · r / K", 1e9, "GB"),
    "workers": ("workers, one core each", "⌈(S · w + K · S / B · m / 2) / u⌉", 1, ""),
    "partitions": ("partitions of the topic, at least", "one a worker", 1, ""),
    "wire": ("network between workers and shards", "S · b", 1e9, "GB/s"),
    "stream": ("network from Kafka", "S · j", 1e9, "GB/s"),
    "checkpoint": ("a full checkpoint, all shards at once", "R / K / c", 1, "s"),
    "restore": ("a lost shard is back after", "R / K / l", 1, "s"),
    "redis": ("Redis, one version", "R · h", 1e9, "GB"),
    "replica": ("a serving process that holds all rows", "R · q", 1e9, "GB"),
    "servers": ("serving processes", "⌈Q / p / u⌉", 1, ""),
}


def markdown(found: Mapping[str, Any], table: Table, number: Callable[[float], str]) -> str:
    """Two tables: the figures that were measured, and what follows of them."""
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
        told = f"While this was measured others used {others:.0%} of the machine"
        tables.insert(0, f"{told}: memory and bytes are right, times are not.")
    return "\n\n".join(tables)
