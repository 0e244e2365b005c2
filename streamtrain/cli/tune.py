"""`tune`: search settings of a model, with live curves and a report."""

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import FrameType
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from streamtrain.cli.options import (
    BatchSize,
    FileFormat,
    ListColumns,
    MaxBadRatio,
    SampleUrls,
    TextColumns,
    Threads,
    sample_file,
    split_names,
)
from streamtrain.cli.options import Model as ModelOption
from streamtrain.cli.terminal import WIDE, Curve, chart, new_table, print_json
from streamtrain.quality.progressive import Metrics
from streamtrain.service.start_tensorflow import load_tensorflow
from streamtrain.tuning.candidate import Candidate, Mean
from streamtrain.tuning.outcome import CandidateFigures, TuningOutcome
from streamtrain.tuning.search import Search
from streamtrain.tuning.space import changes

_REFRESH = 0.25  # seconds between updates of the screen
_STYLES = ("green", "cyan", "magenta")
_GIVEN, _MEAN = "yellow", "bright_black"
_POINTS = 40  # per curve; more would show noise
_NAMED = 4  # features listed of a group
_ROWS = 8  # of the table that replaces the curves if there is no terminal


class Screen:
    """Live progress of a search, if the console is a terminal.

    Args:
        console: where it is shown.
        title: name of the samples.
    """

    def __init__(self, console: Console, title: str) -> None:
        self._console, self._title = console, title
        self._updated_at = 0.0
        self._live: Live | None = None
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(None), TextColumn("{task.fields[time]}"), console=console
        )
        self._task = self._bar.add_task("", total=1.0, time="")

    @contextmanager
    def live(self) -> Iterator["Screen"]:
        """Shows progress within the block."""
        if not self._console.is_terminal:
            yield self
            return
        with Live(console=self._console, auto_refresh=False, transient=True) as self._live:
            yield self
        self._live = None

    def __call__(self, search: Search) -> None:
        """Updates the screen, unless it was updated just now."""
        now = time.monotonic()
        if self._live is None or now - self._updated_at < _REFRESH:
            return
        self._updated_at = now
        task = f"{self._title}: {search.heat or 'the model as given'}"
        left = f"{_clock(search.elapsed)} of at most {_clock(search.seconds)}"
        self._bar.update(self._task, completed=search.elapsed / search.seconds, description=task, time=left)
        self._live.update(Group(self._bar, *self._lines(search)), refresh=True)

    def _lines(self, search: Search) -> Iterator[RenderableType]:
        samples = search.decoded.samples(search.chunks)
        yield Text(f"{samples:,} samples, {len(search.alive)} candidates learning, {len(search.tried)} started", "dim")
        yield from _draw(search, (self._console.width, 10), search.alive[:1])
        if search.best is not None and search.best is not search.given:
            yield Text(f"best so far: {_listed(changes(search.given.model, search.best.model))}", _STYLES[0])


def show(search: Search, outcome: TuningOutcome, console: Console) -> None:
    """Prints the outcome of a search: curves, figures, settings to paste, and what was not tried."""
    console = console if console.is_terminal else Console(stderr=True, width=WIDE, markup=False, highlight=False)
    if console.is_terminal:
        for line in _draw(search, (min(100, console.width), 12), []):
            console.print(line)
    elif search.chunks:
        console.print(_curve_table(search))
    if search.chunks:
        console.print(_figures(search))
    _report(outcome, console)


def _report(outcome: TuningOutcome, console: Console) -> None:
    def say(text: str, style: str = "") -> None:
        console.print(Text(text, style))

    tried = f"{outcome.tried:,} candidates in {outcome.seconds:,.0f} s over {outcome.samples:,} samples"
    say(f"{tried}, judged by the last {outcome.judged:,}; {outcome.compared:,} finished.")
    if outcome.cut:
        say(f"Not all samples of the file were used: {outcome.cut}.")
    if outcome.ended:
        say(f"The search ended early: {outcome.ended}.")
    for reason, count in sorted(outcome.bad.items()):
        say(f"refused: {reason}: {count:,}")
    for warning in outcome.warnings:
        say(f"warning: {warning}", "yellow")
    say(verdict(outcome), "bold")
    if outcome.is_better:
        say(outcome.snippet)
    say("Not tried:")
    for text in outcome.not_tried:
        say(f"  {text}")


def verdict(outcome: TuningOutcome) -> str:
    """How much better the best candidate is than the model as given, in a sentence or two."""
    better, given = outcome.better, outcome.given
    if given is None and outcome.best is None:
        return "No result: no candidate has learned all samples."
    if given is None and outcome.best:
        return f"The model as given fails; the best other candidate has loss {outcome.best.loss:.5f}. To paste:"
    assert given is not None
    if better is None or outcome.best is None:
        return f"No candidate is known to be better than the model as given, which has loss {given.loss:.5f}."
    losses = f"loss {outcome.best.loss:.5f} instead of {given.loss:.5f}"
    sure = f"{-better.mean:.5f} ± {outcome.margin:.5f} (95%, corrected for {outcome.compared} comparisons)"
    if not outcome.is_better:
        return (
            "No candidate is significantly better than the model as given: the best, "
            f"{_listed(outcome.best.changes)}, has {losses}: lower by {sure}."
        )
    again = f" With another seed: by {-outcome.confirmed.mean:.5f}." if outcome.confirmed else ""
    speed = f"{outcome.best.samples_per_s:,.0f} samples/s instead of {given.samples_per_s:,.0f}"
    return f"Better than the model as given: {losses}, lower by {sure}.{again} It learned {speed}. To paste:"


def _figures(search: Search) -> Table:
    judged = [search.given.model.labels[j] for j in search.judged]
    columns = ["", "settings", "loss"]
    columns += [
        name.replace("_", " ") + (f" of {label.name}" if len(judged) > 1 else "")
        for label in judged
        for name in _named(label.kind)
    ]
    table = new_table("later half of the samples", (*columns, "samples/s"), right=(*columns[2:], "samples/s"))
    table.columns[1].overflow = "fold"
    for mark, style, one in _best(search):
        if not isinstance(one, Candidate):
            continue
        figures = CandidateFigures.of(search, one)
        cells = [_shown(figures.later[label.name], name) for label in judged for name in _named(label.kind)]
        settings = "as given" if one is search.given else _listed(figures.changes)
        speed = f"{figures.samples_per_s:,.0f}"
        table.add_row(Text(mark, style), settings, f"{figures.loss:.5f}", *cells, speed)
    weights = search.decoded.weights(search.half, search.chunks).sum()
    mean = search.mean.blocks(search.half, search.chunks).sum() / weights if weights else np.nan
    table.add_row(Text(*_MARK_OF_MEAN), "the label's mean", f"{mean:.5f}")
    return table


def _curve_table(search: Search) -> Table:
    """Losses and AUC by part of the samples, of the candidates that a chart would show."""
    best, cuts = _best(search), np.unique(np.linspace(0, search.chunks, _ROWS + 1).astype(int))
    auc = next((one.name for one in search.given.model.labels if one.kind == "binary"), None)
    candidates = [(mark, one) for mark, _, one in best if isinstance(one, Candidate)]
    columns = [f"loss {mark}" for mark, _, _ in best] + ([f"auc {mark}" for mark, _ in candidates] if auc else [])
    table = new_table("by part of the samples", ("to sample", *columns), right=("to sample", *columns))
    for first, last in pairwise(cuts.tolist()):
        weights = search.decoded.weights(first, last).sum()
        cells = [f"{one.blocks(first, last).sum() / weights:.4f}" if weights else "" for _, _, one in best]
        if auc:
            cells += [_shown(one.metrics(search.decoded, first, last)[auc], "auc") for _, one in candidates]
        table.add_row(f"{search.decoded.samples(last):,}", *cells)
    return table


_MARK_OF_MEAN = ("mean", _MEAN)


def _best(search: Search) -> list[tuple[str, str, Candidate | Mean]]:
    """Mark and style of the best few candidates, the model as given, and the label's mean."""
    order = [one for one in search.leaders() if one is not search.given]
    found: list[tuple[str, str, Candidate | Mean]] = [
        (str(place), style, one) for place, (one, style) in enumerate(zip(order, _STYLES, strict=False), 1)
    ]
    if not search.given.ended:
        found.append(("given", _GIVEN, search.given))
    return [*found, (*_MARK_OF_MEAN, search.mean)]


def _draw(search: Search, size: tuple[int, int], more: list[Candidate]) -> list[RenderableType]:
    """The chart of losses, with its legend."""
    drawn = [*((mark, style, one, search.chunks) for mark, style, one in _best(search))]
    drawn += [("now", "blue", one, one.chunks) for one in more if one.chunks]
    curves = [Curve(style, _smooth(search, one, chunks)) for _, style, one, chunks in drawn]
    lines = chart(curves, width=size[0], height=size[1])
    if not lines:
        return []
    legend = Text()
    legend.append("loss   ", "dim")
    for mark, style, _, _ in drawn:
        legend.append(f"── {mark}   ", style)
    samples = f"{search.decoded.samples(search.chunks):,} samples"
    return [legend, *lines, Text(f"{samples:>{size[0]}}", "dim")]


def _smooth(search: Search, one: Candidate | Mean, chunks: int) -> NDArray[np.float64]:
    """Mean losses over parts of the samples of equal size."""
    size = -(-search.chunks // _POINTS)
    values = []
    for first in range(0, chunks - size + 1, size):
        weights = search.decoded.weights(first, first + size).sum()
        values.append(one.blocks(first, first + size).sum() / weights if weights else np.nan)
    return np.array(values)


def _named(kind: str | None) -> tuple[str, ...]:
    return ("auc",) if kind == "binary" else ("mean_squared_error", "mean_absolute_error")


def _shown(metrics: Metrics, name: str) -> str:
    value = metrics.as_dict()[name]
    return "" if value is None else f"{value:.4f}"


def _listed(settings: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in _grouped(settings).items())


def _grouped(settings: dict[str, str]) -> dict[str, str]:
    """Merges options of features that have the same value."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, value in settings.items():
        feature, _, option = name.rpartition(".")
        groups.setdefault((option, value), []).append(feature)
    return {
        f"{'/'.join(names[:_NAMED])}{'/…' * (len(names) > _NAMED)}.{option}" if names[0] else option: value
        for (option, value), names in groups.items()
    }


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def tune(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    files: SampleUrls,
    model: ModelOption,
    batch_size: BatchSize = 1024,
    label: Annotated[str | None, typer.Option(help="Label to judge by; default: the model's total loss.")] = None,
    minutes: Annotated[float, typer.Option(help="Time limit.")] = 5.0,
    memory: Annotated[
        float,
        typer.Option(metavar="MB", help="Memory limit of samples, rows and predictions, without TensorFlow's own."),
    ] = 2048.0,
    without: Annotated[
        str, typer.Option(metavar="SETTINGS", help="Settings to leave unchanged: micro_batch_size,dim")
    ] = "",
    threads: Threads = 1,
    format_: FileFormat = None,
    text: TextColumns = "",
    lists: ListColumns = "",
    max_bad_ratio: MaxBadRatio = 0.1,
) -> None:
    """Search for learning rates, optimizers, dims and micro-batch sizes with which a model predicts a file better.

    Candidates learn the same samples side by side, and predict each sample before they learn it; hopeless ones are
    dropped early. Ends with settings to paste, how much better they are, and a line of JSON. SIGINT and SIGTERM end the
    search early, with what is known.
    """
    from streamtrain.model.loader import load_model, locate_model
    from streamtrain.tuning.outcome import TuningOutcome
    from streamtrain.tuning.search import Search

    locate_model(model)
    samples = sample_file(files, format_, text, lists)
    messages = samples.opened()  # errors in the file show before TensorFlow is loaded
    load_tensorflow(threads)
    console, interrupt = Console(stderr=True), _Interrupt()
    screen = Screen(console, samples.name)
    with _divergence_unlogged(), interrupt, screen.live():
        search = Search(
            load_model(model),
            batch_size=batch_size,
            label=label,
            minutes=minutes,
            megabytes=memory,
            without=split_names(without),
            on_progress=screen,
        )
        try:
            search.read(messages, place=samples.place, max_bad_ratio=max_bad_ratio)
            search.run()
        except KeyboardInterrupt:
            search.ended = "interrupted"
    outcome = TuningOutcome.of(search)
    show(search, outcome, console)
    print_json(outcome.as_json())
    if interrupt.signal is not None:
        sys.stderr.flush()
        os._exit(128 + interrupt.signal)  # a reader thread of Arrow would abort an interpreter that shuts down


@contextmanager
def _divergence_unlogged() -> Iterator[None]:
    """Candidates that diverge are expected."""
    logger = logging.getLogger("streamtrain.learner")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


class _Interrupt:
    """Within the block, the first SIGINT or SIGTERM raises KeyboardInterrupt; a second one ends the process.

    Attributes:
        signal: number of the signal received; None: none was.
    """

    def __init__(self) -> None:
        self.signal: int | None = None

    def __enter__(self) -> "_Interrupt":
        self._before = {number: signal.signal(number, self._interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _interrupt(self, number: int, _: FrameType | None) -> None:
        for caught in self._before:
            signal.signal(caught, signal.SIG_DFL)
        self.signal = number
        raise KeyboardInterrupt
