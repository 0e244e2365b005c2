"""`bench` and `size`: how fast a model learns on this machine, and how much memory its rows need."""

import heapq
import itertools
import statistics
import time
from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from streamtrain.cli.options import (
    BatchSize,
    Config,
    FileFormat,
    Json,
    ListColumns,
    MaxBadRatio,
    Model,
    ModelSetting,
    SampleUrls,
    Setting,
    TextColumns,
    Threads,
    load_required_model,
    read_client_settings,
    sample_file,
)
from streamtrain.cli.terminal import new_table, print_json, show
from streamtrain.errors import ConfigError
from streamtrain.service.start_tensorflow import load_tensorflow

if TYPE_CHECKING:
    from streamtrain.errors import BadSample
    from streamtrain.learner import Learner
    from streamtrain.model.batch import Batch
    from streamtrain.settings.load import Settings
    from streamtrain.tuning.sizing import Plan, Sizing

_STAGES = ("decode", "predict", "learn")


def bench(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    files: SampleUrls,
    model: Model,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per batch.")] = 1024,
    samples: Annotated[int, typer.Option(min=1, help="Samples to read from the file.")] = 100_000,
    rounds: Annotated[int, typer.Option(min=1, help="Measured passes over the samples; medians are reported.")] = 5,
    threads: Threads = 1,
    format_: FileFormat = None,
    text: TextColumns = "",
    lists: ListColumns = "",
    json: Json = False,
) -> None:
    """Measure how fast a model learns on this machine, in one process without any server.

    Reports microseconds per sample to decode, to predict (pull and graph) and to learn it. A round is a pass over all
    samples; a first round, which creates rows and builds the graph, is not measured.
    """
    from streamtrain.learner import Learner
    from streamtrain.model.loader import load_model, locate_model

    locate_model(model)
    lines = list(itertools.islice(sample_file(files, format_, text, lists).opened(), samples))
    load_tensorflow(threads)
    learner = Learner(load_model(model), batch_size=batch_size)
    rounds_us = [_measure_round(learner, lines) for _ in range(rounds + 1)][1:]
    us = {stage: statistics.median(values[stage] for values in rounds_us) for stage in _STAGES}
    figures: dict[str, Any] = {
        "samples": len(lines),
        "bad": sum(learner.bad.values()) // (rounds + 1),
        "batch_size": batch_size,
        "samples_per_s": round(1e6 / (us["decode"] + us["learn"])),
        "us_per_sample": {stage: round(value, 3) for stage, value in us.items()},
        "rows": learner.rows,
        "bytes": learner.nbytes,
    }
    if json:
        print_json(figures)
    else:
        _show_figures(figures)


def _measure_round(learner: "Learner", lines: list[bytes]) -> dict[str, float]:
    """Microseconds per sample of each stage."""
    began = time.perf_counter()
    read = list(learner.read(lines))
    seconds = {"decode": time.perf_counter() - began, "predict": 0.0, "learn": 0.0}
    for batch, bad in read:
        for sample in bad:
            learner.bad[sample.reason] = learner.bad.get(sample.reason, 0) + 1
        started = time.perf_counter()
        learner.predict(batch)
        predicted = time.perf_counter()
        learner.learn(batch)
        seconds["predict"] += predicted - started
        seconds["learn"] += time.perf_counter() - predicted
    return {stage: 1e6 * value / len(lines) for stage, value in seconds.items()}


def _show_figures(figures: dict[str, Any]) -> None:
    table = new_table("", ("measure", "value"), right=("value",))
    table.add_row("samples/s, decoded and learned", f"{figures['samples_per_s']:,}")
    for stage, value in figures["us_per_sample"].items():
        table.add_row(f"{stage}, µs/sample", f"{value:,.2f}")
    for name, rows in figures["rows"].items():
        table.add_row(f"rows of {name}", f"{rows:,}")
    table.add_row("memory of rows and weights, MB", f"{figures['bytes'] / 1e6:,.1f}")
    if figures["bad"]:
        table.add_row("refused samples", f"{figures['bad']:,}")
    show(table)


def size(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILES...]", help="Samples, as for `learn`; default: the latest ones of the topic."),
    ] = None,
    model: ModelSetting = None,
    memory: Annotated[str, typer.Option(metavar="8GB", help="Memory for the rows of all shards together.")] = "8GB",
    horizon: Annotated[
        float, typer.Option(metavar="SAMPLES", help="Samples to plan for, such as 1e9; default: those that are read.")
    ] = 0.0,
    samples: Annotated[int, typer.Option(min=1, help="Samples to read at most.")] = 1_000_000,
    minutes: Annotated[float, typer.Option(min=0, help="Time to learn with options, to see what each costs.")] = 5.0,
    batch_size: BatchSize = 1024,
    disk: Annotated[
        str | None, typer.Option(help="Folder for rows on disk, whose speed is measured; default: for temporary files.")
    ] = None,
    threads: Threads = 1,
    format_: FileFormat = None,
    text: TextColumns = "",
    lists: ListColumns = "",
    max_bad_ratio: MaxBadRatio = 0.1,
    json: Json = False,
    config: Config = None,
    setting: Setting = None,
) -> None:
    """Say how many rows a model gets, what memory they need, and how to do with less.

    Reads samples, and predicts the share of rows that are found in memory, and how many are read from disk (ps.memory).
    Where they do not fit, it has the model learn the samples with options that save memory, and says what each costs.
    See docs/sizing.md.

    As JSON: samples, learned (samples that options are judged by), horizon, disk_reads_per_s, plans, best (one of the
    plans).
    """
    from streamtrain.durations import parse_size
    from streamtrain.tuning.sizing import Sizing, best

    limit, settings = parse_size(memory, "--memory"), read_client_settings(config, setting, {"model": model})
    read = sample_file(files, format_, text, lists).opened() if files else None  # errors show before TensorFlow loads
    sizing = Sizing(load_required_model(settings, threads), batch_size=batch_size)
    _add_all(sizing, _batches(sizing, settings, read, samples), max_bad_ratio)
    with Console(stderr=True).status("counting rows") as status:
        plans = sizing.plans(
            limit,
            samples=horizon,
            seconds=60 * minutes,
            on_progress=lambda option: status.update(f"learning {sizing.learned:,} samples, {option}"),
        )
    chosen, planned = best(plans), max(horizon, sizing.samples)
    reads = _disk_reads(disk or settings.ps.disk) if plans[0].reads else None
    if json:
        figures: dict[str, Any] = {"samples": sizing.samples, "learned": sizing.learned, "horizon": round(planned)}
        figures |= {"disk_reads_per_s": reads and round(reads)}
        print_json(figures | {"plans": [one.as_json() for one in plans], "best": chosen and plans.index(chosen)})
        return
    title = f"{sizing.samples:,} samples read, planned for {planned:,.0f}, in {memory} for rows"
    tables = [_plans_table(title, plans), _rows_table(chosen or plans[0])]
    show(*tables, *_advice(chosen, plans, reads, sizing.learned))


def _disk_reads(folder: str | None) -> float | None:
    """Rows that can be read from it per second; None: there can be none, as a line on standard error says."""
    from streamtrain.disk import rows_folder
    from streamtrain.tuning.sizing import disk_reads

    try:
        return disk_reads(rows_folder(folder, "--disk"))
    except ConfigError as exc:
        typer.echo(f"the speed of the disk is not known: {exc}", err=True)
        return None


def _add_all(sizing: "Sizing", batches: "Iterator[tuple[Batch, list[BadSample]]]", max_bad_ratio: float) -> None:
    from streamtrain.model.bad_samples import BadSampleGuard, Refusals

    guard = BadSampleGuard(max_bad_ratio)
    for batch, bad in batches:
        guard.judge({0: Refusals(len(batch) + len(bad), len(bad))}, bad, bad[-1].describe() if bad else "")
        sizing.add(batch)
    guard.finish()
    if not sizing.samples:
        raise ConfigError("there are no samples to plan by")


def _batches(
    sizing: "Sizing", settings: "Settings", read: Iterator[bytes] | None, samples: int
) -> "Iterator[tuple[Batch, list[BadSample]]]":
    """Of a file, or the latest samples of the topic: of all partitions together, in the order of their times."""
    from streamtrain.model.samples import SampleReader
    from streamtrain.stream.formats.factory import format_of
    from streamtrain.stream.opening import open_stream
    from streamtrain.stream.source import Bounds

    if read is not None:
        yield from SampleReader(sizing.model).batches(itertools.islice(read, samples), sizing.chunk)
        return
    stream, format_ = open_stream(settings.stream), format_of(settings.stream, sizing.model)
    bounds = {partition: of for partition, of in stream.bounds().items() if of.high > of.low}
    each = -(-samples // max(len(bounds), 1))
    latest = [{p: Bounds(max(of.low, of.high - each), of.high)} for p, of in bounds.items()]
    records = heapq.merge(*map(stream.records, latest), key=attrgetter("time"))
    while chunk := [record.value for record in itertools.islice(records, sizing.chunk)]:
        yield format_.decode(chunk)


def _plans_table(title: str, plans: list["Plan"]) -> Any:
    columns = (
        "options",
        "rows",
        "memory of all rows",
        "found in memory",
        "read from disk per sample",
        "loss",
        "higher by",
    )
    table = new_table(title, columns, right=columns[1:])
    for one in plans:
        rows = sum(of.rows for of in one.tables)
        worse = "" if one.worse is None else f"{one.worse.mean:+.5f} ± {one.worse.margin():.5f}"
        loss = "" if one.loss != one.loss else f"{one.loss:.5f}"
        found = (f"{one.in_memory:.1%}", f"{one.reads:.2f}") if one.fits else ("", "does not fit")
        table.add_row(one.name, f"{rows:,.0f}", _megabytes(one.nbytes), *found, loss, worse)
    return table


def _rows_table(plan: "Plan") -> Any:
    columns = (
        "table",
        "rows",
        "with twice the samples",
        "memory of all",
        "rows in memory",
        "read from disk per sample",
    )
    table = new_table(f"{plan.name}, by table", columns, right=columns[1:])
    for one in sorted(plan.tables, key=lambda one: -one.need.all):
        more = f"{2**one.growth:.2f} times as many"
        cells = (f"{one.rows:,.0f}", more, _megabytes(one.need.all), f"{one.in_memory:,.0f}", f"{one.reads:.2f}")
        table.add_row(one.name, *cells)
    return table


def _advice(chosen: "Plan | None", plans: list["Plan"], reads: float | None, learned: int) -> Iterator[str]:
    """What to do, in sentences."""
    if len(plans) == 1 and chosen and not chosen.reads:
        yield "All rows have room: there is nothing to change."
        return
    if learned:
        yield f"Losses are those of the first {learned:,} samples, each predicted before it is learned."
    if chosen is None:
        yield f"Nothing fits: with all rows on disk, their index takes {_megabytes(plans[0].memory)}."
        return
    if chosen.changes:
        yield f"Best: {chosen.name}. In the model file:"
        features: dict[str, list[str]] = {}
        for name, value in chosen.changes.items():
            feature, _, option = name.rpartition(".")
            features.setdefault(feature, []).append(f"{option}={value}")
        yield from (f'  "{feature}", ..., {", ".join(options)}' for feature, options in features.items())
    else:
        yield "Best: the model as given. No option saves reads and surely costs less than half a percent of the loss."
    if chosen.reads:
        yield "Set ps.memory of each shard to its part of the memory."
    if chosen.reads and reads:
        yield f"This disk reads {reads:,.0f} rows/s: at most {reads / chosen.reads:,.0f} samples/s by all shards on it."


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
