"""Parts that show cost as work grows: workers, shards, rows of a table, rows that are served."""

from suite.bars import FULL
from suite.parts import RATE, Contestant, Figure, Part, Scope, label
from suite.running import python
from suite.single import lookup_figures, serving_figures

ROWS = {"1M rows": 1_000_000, "10M rows": 10_000_000, "50M rows": 50_000_000, "100M rows": 100_000_000}
SERVED = ("1M rows", "50M rows")
MOST = 4  # workers, and shards


def parts(scope: Scope) -> list[Part]:
    """The large ones last."""
    return [
        Part("workers", "W1 by workers, 2 dedicated shards", [_cluster(scope, n, 2) for n in range(1, MOST + 1)]),
        Part("shards", "W1 by dedicated shards, 2 workers", [_cluster(scope, 2, n) for n in range(1, MOST + 1)]),
        Part("colocated", "W1 by colocated workers, a shard each", [_colocated(scope, n) for n in range(1, MOST + 1)]),
        Part("redis", "Rows of 16 in Redis, by their type", [_redis(scope)], once=True),
        Part("serving-rows", "Predictions over HTTP by rows", [_serving(scope, name) for name in SERVED], once=True),
        Part("lookup-rows", "A prediction without HTTP, by rows", [_lookup(scope, name) for name in SERVED], once=True),
        Part(
            "tables",
            "A shard's table: rows of 16, float16 with row-wise Adagrad",
            [*map(_table, (*ROWS, FULL))],
            once=True,
        ),
    ]


def _cluster(scope: Scope, workers: int, shards: int) -> Contestant:
    figures: dict[str, Figure] = {
        **RATE,
        "bytes/sample": ("wire_bytes_per_sample",),
        "worker CPU µs/sample": ("worker_cpu_us_per_sample",),
        "shard CPU µs/sample": ("shard_cpu_us_per_sample",),
        "memory MB": ("peak_mb",),
    }
    options = ("--workload", "w1", "--topologies", "dedicated", "--workers", workers, "--shards", shards)
    command = python("cluster.py", *options, "--dtype", "float16", "--no-lanes", *_run(scope))
    name = f"{label('dedicated', workers).partition(', ')[2]}, {shards} shard{'s' if shards > 1 else ''}"
    return Contestant(name, command, figures)


def _colocated(scope: Scope, workers: int) -> Contestant:
    options = (
        "--workload",
        "w1",
        "--topologies",
        "colocated",
        "--workers",
        workers,
        "--dtype",
        "float16",
        "--no-lanes",
    )
    figures: dict[str, Figure] = {
        **RATE,
        "bytes/sample": ("wire_bytes_per_sample",),
        "CPU µs/sample": ("worker_cpu_us_per_sample",),
        "memory MB": ("peak_mb",),
    }
    name = label("colocated", workers).partition(", ")[2]
    return Contestant(name, python("cluster.py", *options, *_run(scope)), figures)


def _run(scope: Scope) -> tuple[object, ...]:
    return ("--batches", 100, "--seconds", scope.seconds, "--warmup", 3, "--rounds", 1)


def _redis(scope: Scope) -> Contestant:
    figures: dict[str, Figure] = {}
    for dtype in ("float32", "float16", "int8"):
        names = {"bytes/row": "bytes_per_row", "published rows/s": "rows_per_s"}
        figures |= {f"{dtype}, {name}": ("results", dtype, key) for name, key in names.items()}
    return Contestant("1M rows", python("dictionaries.py", "--rounds", scope.rounds), figures, timeout=900)


def _serving(scope: Scope, rows: str) -> Contestant:
    command = python("serving.py", "--rows", ROWS[rows], "--rounds", scope.rounds, "--seconds", min(2.0, scope.seconds))
    return Contestant(rows, command, serving_figures() | {"memory MB": ("memory_mb",)}, timeout=1200)


def _lookup(scope: Scope, rows: str) -> Contestant:
    command = python("lookup.py", "--rows", ROWS[rows], "--rounds", scope.rounds)
    figures = lookup_figures(1) | lookup_figures(512) | {"bytes/row": ("results", 0, "bytes_per_row")}
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
