"""What `make bench` and `make bench-scale` measure: parts, their contestants, and ratios with their bars."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from harness.results import Ratio
from harness.runner import Contestant, Figure, Part, python

RATE: dict[str, Figure] = {"samples/s": ("samples_per_s",)}
LOADS = ("1 by 1", "1 by 16", "512 by 1", "512 by 16")  # instances by connections
ROWS = {"1M rows": 1_000_000, "10M rows": 10_000_000, "50M rows": 50_000_000, "100M rows": 100_000_000}
FULL = "50M rows, float32 and Adagrad"
SERVED = ("1M rows", "50M rows")
MOST = 4  # workers, and shards
MESSAGES = 2_500_000  # of a topic: more than is learned in one run of seconds
TOPOLOGIES = ("colocated", "dedicated")
PLACES = [(topology, count) for topology in TOPOLOGIES for count in (2, 1)]


@dataclass(frozen=True)
class Peers:
    """Where the peers are that are not part of the project.

    Attributes:
        folder: with their scripts; None: they are left out.
        environments: folder of virtual environments, by name; None: `venvs` in `folder`.
    """

    folder: Path | None = None
    environments: Path | None = None

    def contestant(self, name: str, environment: str, script: str, *arguments: object) -> Contestant:
        """A peer's script, run by the Python of an environment."""
        figures = RATE | {"memory MB": ("peak_rss_mb",)}
        if self.folder is None:
            return Contestant(name, (), figures, missing="no folder of peers is given")
        program = (self.environments or self.folder / "venvs") / environment / "bin" / "python"
        is_missing = not (program.exists() and (self.folder / script).exists())
        command = (str(program), str(self.folder / script), *map(str, arguments))
        return Contestant(name, command, figures, missing=f"{environment}: not installed" if is_missing else "")


@dataclass(frozen=True)
class Scope:
    """How much is measured.

    Attributes:
        rounds: of parts whose contestants take turns, and of scripts that make their own.
        seconds: of one run of a contestant that trains.
        peers: where they are.
    """

    rounds: int = 5
    seconds: float = 4.0
    peers: Peers = field(default_factory=Peers)


def suite(scope: Scope) -> dict[str, list[Part]]:
    """All parts, by group."""
    return {
        "bench": [*training(scope), *single(scope)],
        "freshness": [_freshness()],
        "scale": scale(scope),
    }


# Training: W1 and W2 in all topologies, and peers.

ONE = "one process"
PLAIN = "plain TensorFlow"
DENSE = "dense step only, 2 processes"
PSS = "ParameterServerStrategy"
TORCH = "TorchRec"


def label(topology: str, workers: int) -> str:
    """The name of workers in a topology."""
    return f"{topology}, {workers} worker{'s' if workers > 1 else ''}"


def over_grpc(name: str) -> str:
    """The name of the same without shared memory."""
    return f"{name}, over gRPC"


COLOCATED, DEDICATED = label("colocated", 2), label("dedicated", 2)


def training(scope: Scope) -> list[Part]:
    """W1 and W2."""
    return [_w1(scope), _w2_small(scope), _w2_large(scope)]


def _w1(scope: Scope) -> Part:
    work = ("w1", 1024)
    # ParameterServerStrategy is fastest here with one worker, one server and unique ids.
    pss = scope.peers.contestant(
        *(PSS, "tf", "pss_tf.py", "--workload", "w1", "--workers", 1, "--ps", 1, "--dedup", "--runs", 1),
        *("--min-seconds", scope.seconds, "--batches", 200, "--data-dir", "{tmp}"),
    )
    torch = scope.peers.contestant(
        *(TORCH, "torch", "torch_ebc.py", "--workload", "w1", "--mode", "torchrec", "--optimizer", "rowwise"),
        *("--threads", 2, "--runs", 1, "--min-seconds", scope.seconds, "--batches", 300),
    )
    dense = ("--workload", "w1", "--batch", 1024, "--processes", 2, "--seconds", scope.seconds)
    contestants = [
        *(_ready(scope, *work, *place) for place in PLACES),
        *(_ready(scope, *work, topology, 2, lanes=False) for topology in TOPOLOGIES),
        *(_from_kafka(scope, *work, *place) for place in PLACES),
        _alone(scope, *work, ONE, "batch"),
        _alone(scope, *work, PLAIN, "plain_tf"),
        Contestant(DENSE, python("step.py", *dense), RATE),
        *(pss, torch),
    ]
    return Part("w1", "W1, batch 1024", contestants, input=partial(_broker, "w1"))


def _w2_small(scope: Scope) -> Part:
    work = ("w2", 64)
    contestants = [
        *(_ready(scope, *work, *place) for place in PLACES),
        *(_ready(scope, *work, topology, 2, lanes=False) for topology in TOPOLOGIES),
        *(_from_kafka(scope, *work, topology, 2) for topology in TOPOLOGIES),
        _alone(scope, *work, ONE, "batch"),
        _alone(scope, *work, PLAIN, "plain_tf"),
        _pss_w2(scope, 64, "--workers", 2, "--ps", 2, "--inner-steps", 10, "--steps", 3000, "--batches", 2000),
    ]
    return Part("w2-64", "W2, batch 64", contestants, input=partial(_broker, "w2"))


def _w2_large(scope: Scope) -> Part:
    work = ("w2", 1024)
    contestants = [
        *(_ready(scope, *work, topology, 2) for topology in TOPOLOGIES),
        _ready(scope, *work, "dedicated", 2, lanes=False),
        _alone(scope, *work, ONE, "batch"),
        _alone(scope, *work, PLAIN, "plain_tf"),
        _pss_w2(scope, 1024, "--workers", 1, "--ps", 1, "--steps", 1000, "--batches", 400),
    ]
    return Part("w2-1024", "W2, batch 1024", contestants)


def _broker(workload: str) -> AbstractContextManager[str]:
    from harness.training import filled_broker

    return filled_broker(workload, MESSAGES)


def _ready(scope: Scope, workload: str, batch: int, topology: str, count: int, *, lanes: bool = True) -> Contestant:
    """Workers on ready batches and as many shards; through shared memory, or over gRPC as between machines."""
    options: list[Any] = ["--workload", workload, "--batch", batch, "--topologies", topology]
    options += ["--workers", count, "--shards", count, *_run(scope)]
    figures: dict[str, Figure] = {**RATE, "memory MB": ("peak_mb",)}
    if lanes:
        return Contestant(label(topology, count), python("cluster.py", *options), figures)
    figures |= {"bytes/sample": ("wire_bytes_per_sample",)}
    return Contestant(over_grpc(label(topology, count)), python("cluster.py", *options, "--no-lanes"), figures)


def _from_kafka(scope: Scope, workload: str, batch: int, topology: str, count: int) -> Contestant:
    """Workers on JSON in Kafka."""
    options: list[Any] = ["--workload", workload, "--batch", batch, "--topology", topology, "--broker", "{input}"]
    options += ["--workers", count, "--shards", count, *_run(scope)]
    return Contestant(f"{label(topology, count)}, from Kafka", python("stream.py", *options), RATE)


def _run(scope: Scope) -> tuple[object, ...]:
    return ("--seconds", scope.seconds, "--warmup", 3, "--rounds", 1)


def _alone(scope: Scope, workload: str, batch: int, name: str, contestant: str) -> Contestant:
    """A contestant of step.py: one process, two threads."""
    batches = 200 if batch >= 1024 else 2000
    options: list[Any] = ["--workload", workload, "--batch", batch, "--batches", batches, "--only", contestant]
    options += ["--rounds", 1, "--seconds", scope.seconds, "--threads", 2]
    figures: dict[str, Figure] = {"samples/s": ("samples_per_s", contestant), "memory MB": ("peak_mb",)}
    return Contestant(name, python("step.py", *options), figures)


def _pss_w2(scope: Scope, batch: int, *arguments: object) -> Contestant:
    """In the configuration that is its fastest here."""
    common = ("--workload", "w2", "--batch", batch, "--runs", 1, "--min-seconds", scope.seconds, "--data-dir", "{tmp}")
    return scope.peers.contestant(PSS, "tf", "pss_tf.py", *common, *arguments)


# Scripts that make rounds of their own.


def single(scope: Scope) -> list[Part]:
    """All of them but freshness."""
    serving = python("serving.py", "--rounds", scope.rounds, "--seconds", min(2.0, scope.seconds))
    lookup = python("lookup.py", "--rows", 1_000_000, "--rounds", scope.rounds)
    publish = ("--topology", "colocated", "--rounds", scope.rounds, "--warmup", 4, "--seconds", 6)
    return [
        _once(
            *("serving", "Predictions over HTTP, instances by connections"),
            Contestant("predict", serving, _serving_figures() | {"memory MB": ("memory_mb",)}, timeout=600),
        ),
        _once(
            *("lookup", "A prediction without HTTP, by instances"),
            Contestant("1M rows", lookup, _lookup_figures(1) | _lookup_figures(512), timeout=600),
        ),
        _core(scope),
        _checkpoint(),
        _swaps(scope),
        _once(
            *("publish", "What publishing every second costs training"),
            Contestant("colocated", python("publish.py", *publish), {"samples/s, on / off": ("ratio",)}, timeout=900),
        ),
    ]


def _once(name: str, title: str, *contestants: Contestant) -> Part:
    return Part(name, title, contestants, once=True)


def _serving_figures() -> dict[str, Figure]:
    names = {"requests/s": "requests_per_s", "p99 ms": "p99_ms", "rate / empty": "ratio", "p99 / empty": "p99_ratio"}
    return {f"{load}, {name}": ("by_load", load, key) for load in LOADS for name, key in names.items()}


def _lookup_figures(instances: int) -> dict[str, Figure]:
    at = 0 if instances == 1 else 1
    stages = ("whole", "decode", "plan", "pull", "graph")
    figures: dict[str, Figure] = {f"{instances}, {name} µs": ("results", at, "us", name) for name in stages}
    return figures | {f"{instances}, pull / numpy.take": ("results", at, "pull_to_take")}


def _core(scope: Scope) -> Part:
    names = {
        "pull / numpy.take": "pull / numpy.take",
        "push / NumPy": "push / NumPy gather-update-scatter",
        "peak memory / payload": "peak memory / payload, growth included",
        "insert / pull": "insert / pull, growth included, median push",
        "longest / median push": "longest / median push of a growth, without new memory",
    }
    table = python("core.py", "table", "--growths", 1, "--rounds", scope.rounds, "--json")
    decode = python("core.py", "decode", "--ids", "text", "--rounds", max(9, scope.rounds))
    return _once(
        *("core", "The native core, one thread"),
        Contestant("table of 10M rows", table, {name: (key,) for name, key in names.items()}, timeout=900),
        Contestant("decoder", decode, {"decode / msgspec and xxhash": ("ratio",), "MB/s": ("native_mb_per_s",)}),
    )


def _checkpoint() -> Part:
    restore: dict[str, Figure] = {
        "write MB/s": ("full_mb_per_s",),
        "restore rows/s": ("restore_rows_per_s",),
        "restore / what it has to do": ("restore_over_limits",),
    }
    pause: dict[str, Figure] = {
        "full, pause p99 ms": ("full", "pause_ms", "p99"),
        "delta, pause p99 ms": ("delta", "pause_ms", "p99"),
        "delta, push p99 / without": ("push_p99_ratio", "delta"),
    }
    return _once(
        *("checkpoint", "Checkpoints"),
        Contestant("restore", python("checkpoint.py", "restore", "--rows", 5_000_000), restore, timeout=600),
        Contestant("pause", python("checkpoint.py", "pause", "--seconds", 15), pause, timeout=600),
    )


def _swaps(scope: Scope) -> Part:
    figures: dict[str, Figure] = {
        "p99 during / before": ("ratio_p99",),
        "failed": ("failed",),
        "mixed": ("mixed",),
        "rollback ms": ("large", "rollback_resident_ms"),
        "promotion from Redis s": ("large", "promote_from_redis_s"),
    }
    options = ("--rounds", scope.rounds, "--seconds", 5, "--swaps", 20 * scope.rounds)
    contestant = Contestant("swaps", python("swaps.py", *options), figures)
    return _once("swaps", "Swaps of versions under load", contestant)


def _freshness() -> Part:
    contestants = []
    for every in ("1s", "100ms"):
        figures: dict[str, Figure] = {}
        for form, key in (("asked again", "asked_again"), ("x-min-offset", "x_min_offset")):
            names = {"p50 ms": "p50_ms", "p99 ms": "p99_ms", "longest ms": "max_ms"}
            figures |= {f"{form}, {name}": (key, of_form) for name, of_form in names.items()}
        command = python("freshness.py", "--every", every)
        contestants.append(Contestant(f"published every {every}", command, figures, timeout=600))
    return _once("freshness", "From a sample written to a prediction that has learned it", *contestants)


# Cost as work grows: workers, shards, rows of a table, rows that are served.


def scale(scope: Scope) -> list[Part]:
    """The longest last."""
    counts = range(1, MOST + 1)
    return [
        Part("workers", "W1 by workers, 2 dedicated shards", [_dedicated(scope, n, 2) for n in counts]),
        Part("shards", "W1 by dedicated shards, 2 workers", [_dedicated(scope, 2, n) for n in counts]),
        Part("colocated", "W1 by colocated workers, a shard each", [_colocated(scope, n) for n in counts]),
        _once("redis", "Rows of 16 in Redis, by their type", _redis(scope)),
        _once("serving-rows", "Predictions over HTTP by rows", *(_serving_rows(scope, name) for name in SERVED)),
        _once("lookup-rows", "A prediction without HTTP, by rows", *(_lookup_rows(scope, name) for name in SERVED)),
        _once("tables", "A shard's table: rows of 16, float16 with row-wise Adagrad", *map(_table, (*ROWS, FULL))),
    ]


def _dedicated(scope: Scope, workers: int, shards: int) -> Contestant:
    figures: dict[str, Figure] = {
        **RATE,
        "bytes/sample": ("wire_bytes_per_sample",),
        "worker CPU µs/sample": ("worker_cpu_us_per_sample",),
        "shard CPU µs/sample": ("shard_cpu_us_per_sample",),
        "memory MB": ("peak_mb",),
    }
    name = f"{label('dedicated', workers).partition(', ')[2]}, {shards} shard{'s' if shards > 1 else ''}"
    return Contestant(name, _float16(scope, "dedicated", "--workers", workers, "--shards", shards), figures)


def _colocated(scope: Scope, workers: int) -> Contestant:
    figures: dict[str, Figure] = {
        **RATE,
        "bytes/sample": ("wire_bytes_per_sample",),
        "CPU µs/sample": ("worker_cpu_us_per_sample",),
        "memory MB": ("peak_mb",),
    }
    name = label("colocated", workers).partition(", ")[2]
    return Contestant(name, _float16(scope, "colocated", "--workers", workers), figures)


def _float16(scope: Scope, topology: str, *options: object) -> tuple[str, ...]:
    common = ("--workload", "w1", "--topologies", topology, "--dtype", "float16", "--no-lanes", "--batches", 100)
    return python("cluster.py", *common, *options, *_run(scope))


def _redis(scope: Scope) -> Contestant:
    figures: dict[str, Figure] = {}
    for dtype in ("float32", "float16", "int8"):
        names = {"bytes/row": "bytes_per_row", "published rows/s": "rows_per_s"}
        figures |= {f"{dtype}, {name}": ("results", dtype, key) for name, key in names.items()}
    return Contestant("1M rows", python("publisher.py", "redis", "--rounds", scope.rounds), figures, timeout=900)


def _serving_rows(scope: Scope, rows: str) -> Contestant:
    command = python("serving.py", "--rows", ROWS[rows], "--rounds", scope.rounds, "--seconds", min(2.0, scope.seconds))
    return Contestant(rows, command, _serving_figures() | {"memory MB": ("memory_mb",)}, timeout=1200)


def _lookup_rows(scope: Scope, rows: str) -> Contestant:
    command = python("lookup.py", "--rows", ROWS[rows], "--rounds", scope.rounds)
    figures = _lookup_figures(1) | _lookup_figures(512) | {"bytes/row": ("results", 0, "bytes_per_row")}
    return Contestant(rows, command, figures | {"load s": ("results", 0, "load_seconds")}, timeout=1200)


def _table(rows: str) -> Contestant:
    figures: dict[str, Figure] = {
        "samples/s": ("samples_per_s",),
        "pulled rows/s": ("pulled_rows_per_s",),
        "pushed rows/s": ("pushed_rows_per_s",),
        "born rows/s": ("born_rows_per_s",),
        "bytes/row": ("bytes_per_row",),
        "peak bytes/row": ("peak_bytes_per_row",),
        "memory / payload": ("memory_over_payload",),
        "peak memory / payload": ("peak_memory_over_payload",),
        "checkpoint s": ("checkpoint_s",),
        "checkpoint GB": ("checkpoint_gb",),
        "restore s": ("restore_s",),
        "restore rows/s": ("restore_rows_per_s",),
    }
    name, _, full = rows.partition(",")
    command = python("scale_table.py", "--rows", ROWS[name], *(["--float32"] if full else []))
    return Contestant(rows, command, figures, timeout=3600)


# Ratios that the suite is judged by.


def _ratios(part: str, what: str, over: str, bars: Sequence[tuple[str, float | None]]) -> list[Ratio]:
    return [Ratio(f"{what} / {under}", part, over, under, bar=bar) for under, bar in bars]


def _kafka(part: str, what: str, over: str, bar: float | None = None) -> Ratio:
    return Ratio(f"{what}: JSON from Kafka / ready batches", part, f"{over}, from Kafka", over, bar=bar)


def _predict(load: str, connections: str) -> list[Ratio]:
    what = f"predict 1 instance, {connections}"
    return [
        Ratio(f"{what}: requests/s / empty FastAPI", "serving", "predict", figure=f"{load}, rate / empty", bar=0.5),
        Ratio(f"{what}: p99 / its p99", "serving", "predict", figure=f"{load}, p99 / empty", bar=3, most=True),
    ]


def _fresh(every: str, bar: float) -> list[Ratio]:
    name = f"published every {every}"
    return [
        Ratio(f"{name}, {form}: p99, ms", "freshness", name, figure=f"{form}, p99 ms", bar=bar, most=True)
        for form in ("asked again", "x-min-offset")
    ]


RATIOS: tuple[Ratio, ...] = (
    *_ratios("w1", "W1 colocated", COLOCATED, [(PSS, 3), (DENSE, 0.6), (TORCH, 1.6), (PLAIN, 1.8)]),
    *_ratios("w1", "W1 dedicated", DEDICATED, [(PSS, 1.7)]),
    *_ratios("w1", "W1 dedicated, over gRPC", over_grpc(DEDICATED), [(PSS, 1.7)]),
    *_ratios("w1", f"W1 {ONE}", ONE, [(PLAIN, None)]),
    *_ratios("w2-64", "W2 batch 64, dedicated", DEDICATED, [(PSS, 5)]),
    *_ratios("w2-64", "W2 batch 64, dedicated, over gRPC", over_grpc(DEDICATED), [(PSS, 5)]),
    *_ratios("w2-64", "W2 batch 64, colocated", COLOCATED, [(PSS, 8)]),
    *_ratios("w2-64", f"W2 batch 64, {ONE}", ONE, [(PLAIN, None)]),
    *_ratios("w2-1024", "W2 batch 1024, colocated", COLOCATED, [(PSS, 4), (PLAIN, 1)]),
    *_ratios("w2-1024", f"W2 batch 1024, {ONE}", ONE, [(PLAIN, None)]),
    *(_kafka("w1", f"W1 {name.partition(',')[0]}", name, 0.6) for name in (COLOCATED, DEDICATED)),
    *(_kafka("w2-64", f"W2 batch 64, {name.partition(',')[0]}", name) for name in (COLOCATED, DEDICATED)),
    Ratio("decode / msgspec and xxhash", "core", "decoder", figure="decode / msgspec and xxhash", bar=5),
    Ratio("pull / numpy.take, 10M rows", "core", "table of 10M rows", figure="pull / numpy.take", bar=0.5),
    Ratio("push / NumPy, 10M rows", "core", "table of 10M rows", figure="push / NumPy", bar=0.5),
    Ratio("peak memory / payload, 10M rows", "core", "table of 10M rows", "", "peak memory / payload", 1.25, True),
    Ratio("peak memory / payload, 50M float16 rows", "tables", "50M rows", "", "peak memory / payload", 1.25, True),
    Ratio("peak memory / payload, 50M float32 rows", "tables", FULL, "", "peak memory / payload", 1.25, True),
    *_predict("1 by 1", "1 connection"),
    *_predict("1 by 16", "16 connections"),
    *_fresh("1s", 2000),
    *_fresh("100ms", 500),
    Ratio("p99 while versions swap / before", "swaps", "swaps", figure="p99 during / before", bar=2, most=True),
    Ratio("samples/s while publishing every second / without", "publish", "colocated", "", "samples/s, on / off", 0.9),
)
