"""The command that measures how fast a model learns on this machine: `bench`."""

import itertools
import statistics
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from streamtrain.commands.options import Json
from streamtrain.commands.tables import new_table
from streamtrain.console import load_tensorflow, opened, print_json
from streamtrain.errors import ConfigError

if TYPE_CHECKING:
    from streamtrain.learner import Learner

_STAGES = ("decode", "predict", "learn")


def bench(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    file: Annotated[str, typer.Argument(help="Samples, a JSON object a line; .gz is unpacked; - is standard input.")],
    model: Annotated[str, typer.Option(help="The model: path/to/file.py:name.")],
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per step.")] = 1024,
    samples: Annotated[int, typer.Option(min=1, help="So many are read, and learned again and again.")] = 100_000,
    rounds: Annotated[int, typer.Option(min=1, help="Of which the medians are told.")] = 5,
    threads: Annotated[int, typer.Option(min=0, help="Of TensorFlow; 0: as many as there are cores.")] = 1,
    json: Json = False,
) -> None:
    """Measure how fast a model learns here, in one process without any server.

    Microseconds a sample to decode it, to predict it (pull and graph), and to learn it, predicted before. A round goes
    over all samples; the first one, in which rows are born and the graph is built, does not count.
    """
    from streamtrain.learner import Learner
    from streamtrain.model.load import load_model, locate_model

    locate_model(model)
    with opened(file) as stream:
        lines = list(itertools.islice((line for line in stream if not line.isspace()), samples))
    if not lines:
        raise ConfigError(f"{file} has no samples")
    load_tensorflow(threads)
    learner = Learner(load_model(model), batch_size=batch_size)
    taken = [_round(learner, lines) for _ in range(rounds + 1)][1:]
    us = {stage: statistics.median(one[stage] for one in taken) for stage in _STAGES}
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
        _show(figures)


def _round(learner: "Learner", lines: list[bytes]) -> dict[str, float]:
    """Microseconds a sample of each stage."""
    began = time.perf_counter()
    read = list(learner.read(lines))
    seconds = {"decode": time.perf_counter() - began, "predict": 0.0, "learn": 0.0}
    for batch, bad in read:
        for one in bad:
            learner.bad[one.reason] = learner.bad.get(one.reason, 0) + 1
        at = time.perf_counter()
        learner.predict(batch)
        predicted = time.perf_counter()
        learner.learn(batch)
        seconds["predict"] += predicted - at
        seconds["learn"] += time.perf_counter() - predicted
    return {stage: 1e6 * of_stage / len(lines) for stage, of_stage in seconds.items()}


def _show(figures: dict[str, Any]) -> None:
    table = new_table("", ("what", "figure"), right=("figure",))
    table.add_row("samples per second, decoded and learned", f"{figures['samples_per_s']:,}")
    for stage, value in figures["us_per_sample"].items():
        table.add_row(f"{stage}, µs a sample", f"{value:,.2f}")
    for name, rows in figures["rows"].items():
        table.add_row(f"rows of {name}", f"{rows:,}")
    table.add_row("memory of rows and weights, MB", f"{figures['bytes'] / 1e6:,.1f}")
    if figures["bad"]:
        table.add_row("samples that were refused", f"{figures['bad']:,}")
    Console().print(table)
