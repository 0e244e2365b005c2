"""`learn`: learn from a file of samples in one process, with live figures and a learning curve.

Without a model file, the model is made by what the first samples hold.
"""

import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from streamtrain.cli.options import (
    LIST_SEPARATOR,
    BatchSize,
    FileFormat,
    ListColumns,
    MaxBadRatio,
    SampleUrls,
    TextColumns,
    sample_file,
    split_names,
)
from streamtrain.cli.options import (
    Model as ModelLocation,
)
from streamtrain.cli.terminal import Curve, chart, new_table, print_json
from streamtrain.durations import parse_duration
from streamtrain.errors import BadSample, ConfigError
from streamtrain.learner import Learned, Learner
from streamtrain.model.bad_samples import BadSampleGuard, Refusals
from streamtrain.model.features import Categorical
from streamtrain.model.inferred_schema import INFERRED_SAMPLES, InferredSchema, infer_schema
from streamtrain.model.samples import Samples
from streamtrain.model.schema import Schema
from streamtrain.quality.progressive import Metrics
from streamtrain.service.start_tensorflow import load_tensorflow

if TYPE_CHECKING:
    from streamtrain.model.model import Model
    from streamtrain.stream.files import SampleFile

_REFRESH = 0.25  # seconds between updates of the screen
_FIRST_LINE = 1024  # samples; each line after it stands for twice as many
_DRAWN = {"auc": "green", "log_loss": "yellow", "mean_squared_error": "yellow", "mean_absolute_error": "green"}
_MOST_REFUSALS = 8  # kinds that are described at the end
_FIRST_SAMPLES = 1000  # in which text that looks like a list is searched for
_OFTEN = 0.02  # share of texts from which on a number of parts is not an exception


@dataclass(frozen=True)
class LearnedFiles:
    """Figures of a replay.

    Attributes:
        samples: samples learned.
        bad: samples refused, by reason.
        seconds: duration, from the first batch on.
        update_ms_p99: 99th percentile of the milliseconds from having a batch's samples to having learned them.
    """

    samples: int
    bad: dict[str, int]
    seconds: float
    update_ms_p99: float

    @property
    def samples_per_s(self) -> float:
        """Throughput; 0 if nothing was replayed."""
        return self.samples / self.seconds if self.seconds else 0.0


class _Refused:
    """Refused samples: how many of each reason and field, and the first of each in words.

    Args:
        place: says where a sample stands, by its index.
    """

    def __init__(self, place: Callable[[int], str]) -> None:
        self._place = place
        self._first: dict[tuple[str, str], str] = {}
        self._counts: dict[tuple[str, str], int] = {}

    def add(self, bad: Iterable[BadSample]) -> None:
        for sample in bad:
            kind = (sample.reason, sample.field)
            if kind not in self._first:
                self._first[kind] = f"{self._place(sample.index)}: {sample.describe()}"
            self._counts[kind] = self._counts.get(kind, 0) + 1

    def by_reason(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for (reason, _), count in self._counts.items():
            counts[reason] = counts.get(reason, 0) + count
        return counts

    def most_common(self) -> list[tuple[int, str]]:
        """Count and first sample of each kind, the most common kind first."""
        kinds = sorted(self._counts, key=lambda kind: -self._counts[kind])
        return [(self._counts[kind], self._first[kind]) for kind in kinds]


def replay(
    learner: Learner,
    samples: Samples,
    console: Console,
    *,
    title: str,
    place: Callable[[int], str] = lambda index: f"sample {index}",
    max_bad_ratio: float = 0.1,
    seconds: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> LearnedFiles:
    """Learns from a stream, with live figures on `console`: a screen on a terminal, lines elsewhere.

    Args:
        learner: learns the samples.
        samples: the stream, as for `Learner.stream`.
        console: shows the figures.
        title: title of the figures.
        place: where a sample stands, by its index.
        max_bad_ratio: share of bad samples, over 10,000, above which the replay stops.
        seconds: duration after which it ends; None: at the end of the stream.
        clock: seconds.

    Raises:
        TooManyBadSamples: more samples are refused than `max_bad_ratio` allows.
    """
    guard, refused, spans = BadSampleGuard(max_bad_ratio), _Refused(place), list[float]()
    started = drawn = clock()
    first, lines = learner.samples, _Lines(learner, console)
    parts = _timed_parts(learner, samples, clock)
    with Live(console=console, auto_refresh=False, transient=True) as live, closing(parts):
        for part, span in parts:
            spans.append(span)
            refused.add(part.bad)
            example = refused.most_common()[0][1] if part.bad else ""
            guard.judge({0: Refusals(part.samples + len(part.bad), len(part.bad))}, part.bad, example)
            elapsed = clock() - started
            if not console.is_terminal:
                lines.print()
            elif started + elapsed - drawn >= _REFRESH:
                speed = (learner.samples - first) / elapsed
                figures = _figures(learner, title, speed, refused.by_reason())
                live.update(Group(figures, *_charts(learner, console.width, 6)), refresh=True)
                drawn = started + elapsed
            if seconds is not None and elapsed >= seconds:
                break
        else:
            guard.finish()
        elapsed = max(clock() - started, 1e-9)
    if console.is_terminal:
        console.print(*_charts(learner, min(120, console.width), 10))
    else:
        lines.print(last=True)
    console.print(_figures(learner, title, (learner.samples - first) / elapsed, refused.by_reason()))
    for count, example in refused.most_common()[:_MOST_REFUSALS]:
        console.print(Text(f"refused {count:,}, the first in {example}", "yellow"), soft_wrap=True)
    p99 = float(np.percentile(spans, 99)) * 1e3 if spans else 0.0
    return LearnedFiles(learner.samples - first, refused.by_reason(), elapsed, p99)


class _Lines:
    """Prints figures of all samples so far whenever their number has doubled."""

    def __init__(self, learner: Learner, console: Console) -> None:
        self._learner, self._console = learner, console
        self._next, self._printed = _FIRST_LINE, -1

    def print(self, *, last: bool = False) -> None:
        samples = self._learner.samples
        if samples == self._printed or not (last or samples >= self._next):
            return
        parts = [f"{samples:>13,} samples"]
        for label, figures in _shown_figures(self._learner).items():
            name = f" of {label}" if len(self._learner.model.labels) > 1 else ""
            parts += [f"{figure.replace('_', ' ')}{name} {value:.4f}" for figure, value in figures.items()]
        self._console.print(Text("   ".join(parts)), soft_wrap=True)
        self._printed, self._next = samples, 2 * samples


def _shown_figures(learner: Learner) -> dict[str, dict[str, float]]:
    metrics = {label: one.as_dict() for label, one in learner.metrics().items()}
    return {
        label: {name: value for name in _DRAWN if (value := one[name]) is not None} for label, one in metrics.items()
    }


def _charts(learner: Learner, width: int, height: int) -> list[RenderableType]:
    """The learning curves of each label, two figures side by side."""
    drawn: list[RenderableType] = []
    for label, points in learner.curve().items():
        grid, cells = Table.grid(padding=(0, 1)), []
        for figure, style in _DRAWN.items():
            values = np.array([np.nan if point[figure] is None else point[figure] for point in points], np.float64)
            lines = chart([Curve(style, values)], width=width // 2 - 1, height=height)
            if lines:
                title = Text(f"{figure.replace('_', ' ')} of {label}, by samples", style)
                end = Text(f"{points[-1]['samples']:>{width // 2 - 1},}", "dim")
                cells.append(Group(title, *lines, end))
        if cells:
            grid.add_row(*cells)
            drawn.append(grid)
    return drawn


def _timed_parts(learner: Learner, samples: Samples, clock: Callable[[], float]) -> Generator[tuple[Learned, float]]:
    """The result of each batch, and the seconds to read and learn it."""
    before = clock()
    for learned in learner.stream(samples, read_ahead=True):
        now = clock()
        yield learned, now - before
        before = clock()


def _figures(learner: Learner, title: str, samples_per_s: float, bad: Mapping[str, int]) -> Table:
    table = new_table(title, ("label", "figure", "latest", "all", "its mean"), right=("latest", "all", "its mean"))
    total, window = learner.metrics(), learner.metrics(window=True)
    for label, metrics in total.items():
        for figure, value in metrics.as_dict().items():
            latest = window[label].as_dict()[figure]
            if value is not None and figure not in ("samples", "auc_error", "label_variance", "non_finite"):
                shown = ("" if one is None else f"{one:.4f}" for one in (latest, value, _of_mean(metrics, figure)))
                table.add_row(label, figure.replace("_", " "), *shown)
    table.add_section()
    table.add_row("", "samples", "", f"{learner.samples:,}")
    table.add_row("", "samples/s", "", f"{samples_per_s:,.0f}")
    table.add_row("", "rows", "", f"{sum(learner.rows.values()):,}")
    table.add_row("", "memory of rows and weights, MB", "", f"{learner.nbytes / 1e6:,.1f}")
    for dropped in ("non_finite_rows", "non_finite_dense"):
        if count := getattr(learner.stats, dropped):
            table.add_row("", f"gradients dropped: {dropped.replace('_', ' ')}", "", f"{count:,}")
    for reason, count in sorted(bad.items()):
        table.add_row("", f"refused: {reason}", "", f"{count:,}")
    return table


def _of_mean(metrics: Metrics, figure: str) -> float | None:
    """The figure of always predicting the label's mean in hindsight; None: unknown."""
    if figure == "auc":
        return 0.5
    if figure == "mean_squared_error" and metrics.label_variance > 0:
        return metrics.label_variance
    if figure != "log_loss" or not metrics.normalized_entropy > 0:
        return None
    return metrics.log_loss / metrics.normalized_entropy


@dataclass(frozen=True)
class ModelOptions:
    """The options of `learn` that say which model.

    Attributes:
        model: location of a model file; None: the model is made by the samples.
        label: FIELD or FIELD=VALUE; only without a model.
        time: field of the event time; None: by the samples; "": none.
        write_model: path of the model file to write.
    """

    model: str | None
    label: str | None
    time: str | None
    write_model: str | None

    def check(self, *, overwrite: bool) -> None:
        """Raises ConfigError unless they go together and there is a model file, or none would be replaced unasked."""
        if self.model is not None:
            from streamtrain.model.loader import locate_model

            options = (("--label", self.label), ("--time", self.time), ("--write-model", self.write_model))
            if given := [name for name, value in options if value is not None]:
                raise ConfigError(
                    f"{given[0]} is for learning without --model: the model file says what the fields are"
                )
            locate_model(self.model)
        elif self.label is None:
            raise ConfigError(
                "say what to predict: --label FIELD, and the model is made by what the file holds; or give a model "
                "file, --model path/to/file.py:name"
            )
        elif self.write_model is not None and Path(self.write_model).exists() and not overwrite:
            raise ConfigError(f"--write-model: there is a file {self.write_model} already; replace it with --overwrite")

    def infer(
        self, file: "SampleFile", messages: Iterator[bytes], console: Console
    ) -> tuple[InferredSchema, "SampleFile", Iterator[bytes]]:
        """What the samples are, and the file and all its messages as they are to be read; shows a table.

        What `--text` and `--lists` say of a field holds.

        Raises:
            ConfigError: there is no such label, or nothing to learn from; or the model file cannot be written.
        """
        from streamtrain.stream.csv_file import Rules
        from streamtrain.stream.json_lines import converted

        first = [*islice(messages, INFERRED_SAMPLES)]
        samples: list[dict[str, Any]] = []
        for message in first:
            with suppress(msgspec.DecodeError, msgspec.ValidationError):  # refused when it is learned
                samples.append(msgspec.json.decode(message, type=dict[str, Any]))
        if not samples:
            raise ConfigError(f"none of the first {len(first):,} samples of {file.name} is a JSON object")
        label, _, positive = (self.label or "").partition("=")
        given = file.rules
        inferred = infer_schema(
            samples, label, positive=positive or None, time=self.time, text=given.text, lists=given.lists
        )
        console.print(
            Text(f"by its first {inferred.samples:,} samples, the fields of {file.name} are:"), soft_wrap=True
        )
        console.print(_inferred_table(inferred))
        if self.write_model is not None:
            try:
                Path(self.write_model).write_text(inferred.source(file.name), encoding="utf-8")
            except OSError as exc:
                raise ConfigError(f"--write-model: cannot write {self.write_model}: {exc.strerror}") from exc
        text = inferred.text
        if file.format == "csv":  # also where a later id looks like another thing, such as 12e5
            text = frozenset(one.name for one in inferred.fields if one.role == "id")
        if not text and not inferred.lists:
            return inferred, file, chain(first, messages)
        if file.format == "jsonl":  # which may be standard input
            return inferred, file, converted(chain(first, messages), Rules(text, inferred.lists))
        again = file.read_as(text, inferred.lists)
        return inferred, again, again.opened()

    def next_command(self, save: str | None) -> Text:
        """How to serve what was learned."""
        if self.write_model is None or save is None:
            return Text("to keep the model and serve it, add --write-model model.py --save learned", "bold")
        words = ("streamtrain", "serve", "--model", f"{self.write_model}:model", "--set", f"checkpoint.url={save}")
        return Text(f"to serve it: {shlex.join(words)}", "bold")


def make_model(inferred: InferredSchema) -> "Model":
    """The model that the model file would be; TensorFlow is loaded."""
    from streamtrain.model.model import Model

    return Model(inferred.schema, loss=inferred.loss)


def _inferred_table(inferred: InferredSchema) -> Table:
    table = new_table("", ("field", "is", "because", "such as"))
    table.title = None
    for one in inferred.fields:
        style = "dim" if one.role == "left out" else "bold" if one.role in ("label", "time") else ""
        table.add_row(*(Text(word, style) for word in (one.name, one.role, one.why, one.examples)))
    return table


def learn(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    files: SampleUrls,
    model: Annotated[str | None, typer.Option(help="The model: path/to/file.py:name.")] = None,
    label: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD[=VALUE]",
            help="Without a model: the field to predict; =VALUE says which of its values is the positive class.",
        ),
    ] = None,
    time_: Annotated[
        str | None,
        typer.Option(
            "--time",
            metavar="FIELD",
            help="With --label: the field of the event time; default: by its values; '': none.",
        ),
    ] = None,
    write_model: Annotated[
        str | None, typer.Option(metavar="PATH", help="With --label: where to write the model file.")
    ] = None,
    batch_size: BatchSize = 1024,
    load: Annotated[str | None, typer.Option(help="Path or URL of a checkpoint to resume from.")] = None,
    save: Annotated[str | None, typer.Option(help="Path or URL of the checkpoint to write at the end.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the checkpoint at --save, if there is one, without asking.")
    ] = False,
    max_bad_ratio: MaxBadRatio = 0.1,
    future_after: Annotated[
        str, typer.Option(help="Refuse samples whose event time is further in the future, such as 12h or 30d.")
    ] = "1d",
    for_: Annotated[
        float | None, typer.Option("--for", metavar="SECONDS", help="Stop after this many seconds.")
    ] = None,
    format_: FileFormat = None,
    text: TextColumns = "",
    lists: ListColumns = "",
) -> None:
    """Learn from files of samples, with live figures and a learning curve.

    With --label instead of --model, it decides by the first samples what their fields are, and says so in a table.

    Ends with advice if something keeps the model from learning, and with a line of JSON: samples, samples_per_s, bad
    (refused samples by reason), rows, metrics by label, and advice.
    """
    from streamtrain.learner import Learner
    from streamtrain.model.loader import load_model

    console, ahead = Console(stderr=True), parse_duration(future_after, "--future-after")
    chosen = ModelOptions(model, label, time_, write_model)
    chosen.check(overwrite=overwrite)
    samples = sample_file(files, format_, text, lists)
    if save:
        _check_save(save, load, overwrite=overwrite, asks=not samples.is_stdin and sys.stdin.isatty())
    messages = samples.opened()  # errors in the file show before TensorFlow is loaded
    first: list[bytes] = []
    if model is None:
        inferred, samples, messages = chosen.infer(samples, messages, console)
        load_tensorflow()
        made = make_model(inferred)
    else:
        load_tensorflow()
        made, messages = load_model(model), _copy_first(messages, first)
    learner = (
        Learner.load(load, made, batch_size=batch_size, future_after=ahead)
        if load
        else Learner(made, batch_size=batch_size, future_after=ahead)
    )
    done = replay(
        learner, messages, console, title=samples.name, place=samples.place, max_bad_ratio=max_bad_ratio, seconds=for_
    )
    if save:
        learner.save(save)
    advice = _advise_on_lists(made.schema, first, split_names(text)) + learner.advice()
    for one in advice:
        console.print(Text(f"advice: {one}", "bold yellow"), soft_wrap=True)
    if model is None:
        console.print(chosen.next_command(save), soft_wrap=True)
    print_json(
        {
            "samples": done.samples,
            "samples_per_s": round(done.samples_per_s),
            "bad": done.bad,
            "rows": learner.rows,
            "metrics": {
                label: {name: _rounded(value) for name, value in metrics.as_dict().items()}
                for label, metrics in learner.metrics().items()
            },
            "advice": advice,
        }
    )


def _copy_first(messages: Iterator[bytes], first: list[bytes]) -> Iterator[bytes]:
    """The messages, the first of which are also put into `first` as they are read."""
    for message in islice(messages, _FIRST_SAMPLES):
        first.append(message)
        yield message
    yield from messages


def _advise_on_lists(schema: Schema, messages: Iterable[bytes], is_text: Collection[str]) -> list[str]:
    """Advice on ids whose text looks like lists: `Comedy|Romance`, of several parts, but not always as many.

    Fields that are said to be text are left out. So are other separators: a user agent has any number of semicolons.
    """
    samples: list[dict[str, Any]] = []
    for message in messages:
        with suppress(msgspec.DecodeError, msgspec.ValidationError):  # refused when it is learned
            samples.append(msgspec.json.decode(message, type=dict[str, Any]))
    fields = {one.field_name: None for one in schema.embedded if isinstance(one, Categorical)}
    found = []
    for field in [one for one in fields if one not in is_text]:
        texts = [value for sample in samples if isinstance(value := sample.get(field), str)]
        lengths = Counter(text.count(LIST_SEPARATOR) for text in texts)
        if sum(count >= max(2, _OFTEN * len(texts)) for count in lengths.values()) < 2:
            continue
        example = next(text for text in texts if LIST_SEPARATOR in text)
        found.append(
            f"field {field!r} holds text such as {example!r}, each of which is one id. If it is a list of ids, split "
            f"it: with --lists {field}."
        )
    return found


def _check_save(save: str, load: str | None, *, overwrite: bool, asks: bool) -> None:
    """Refuses to replace a checkpoint that the user may want to keep, before anything is learned.

    A checkpoint that is also loaded may be replaced: what is saved continues it.

    Raises:
        ConfigError: there is one, and the user does not allow to replace it; or something else is there.
    """
    from streamtrain.store.checkpoint.manifest import MANIFEST
    from streamtrain.store.files import Directory

    directory = Directory(save)
    if directory.local is None:
        if directory.names():
            raise ConfigError(f"--save: {directory.url} is not empty; only a local checkpoint can be replaced")
        return
    if not directory.local.exists():
        return
    if not directory.exists(MANIFEST):
        raise ConfigError(f"--save: {save} exists and is not a checkpoint; choose another path")
    if overwrite or (load is not None and Directory(load).local == directory.local):
        return
    if not asks:
        raise ConfigError(f"--save: there is a checkpoint at {save} already; replace it with --overwrite")
    if not typer.confirm(f"There is a checkpoint at {save} already. Replace it?", err=True):
        raise typer.Exit(2)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def graph(model: ModelLocation) -> None:
    """Print a model that has no graph as a model file with the graph that it gets, to copy and change.

    What has been learned with the one fits the other, as long as the graph is as it was printed.
    """
    from streamtrain.model.loader import load_model

    typer.echo(load_model(model).source(f"{model} with its graph, to change as you like."), nl=False)
