"""`bench`: how fast a model learns on this machine."""

import itertools
import statistics
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamtrain.cli.options import (
    FileFormat,
    Json,
    ListColumns,
    Model,
    SampleUrls,
    TextColumns,
    Threads,
    sample_file,
)
from streamtrain.cli.terminal import new_table, print_json, show
from streamtrain.service.start_tensorflow import load_tensorflow

if TYPE_CHECKING:
    from streamtrain.learner import Learner

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
