"""Replays a stream of samples through a Learner, with live figures."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.table import Table

from streamtrain.learner import Learned, Learner
from streamtrain.model.guard import BadSampleGuard
from streamtrain.model.samples import Samples

_REFRESH = 0.25  # seconds between two drawings


@dataclass(frozen=True)
class Replayed:
    """Figures of a replay.

    Attributes:
        samples: samples learned from.
        bad: samples refused, by reason.
        seconds: how long it took, from the first batch on.
        update_ms_p99: milliseconds from having a batch's samples to a model that has learned from them,
            99th percentile.
    """

    samples: int
    bad: dict[str, int]
    seconds: float
    update_ms_p99: float

    @property
    def samples_per_s(self) -> float:
        """Throughput, 0 where nothing was replayed."""
        return self.samples / self.seconds if self.seconds else 0.0


def replay(
    learner: Learner,
    samples: Iterable[Samples],
    console: Console,
    *,
    title: str,
    max_bad_ratio: float = 0.1,
    seconds: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Replayed:
    """Learns from a stream, showing progress on `console`.

    Args:
        learner: what learns.
        samples: the stream, in pieces that `Learner.stream` takes.
        console: where figures are drawn while it runs.
        title: of the figures.
        max_bad_ratio: share of bad samples, over 10,000, above which the replay stops.
        seconds: end after so long; None: at the end of the stream.
        clock: seconds, for tests.

    Raises:
        TooManyBadSamples: more samples are refused than `max_bad_ratio` allows.
    """
    guard, bad, spans = BadSampleGuard(max_bad_ratio), dict[str, int](), list[float]()
    started = drawn = clock()
    first = learner.samples
    with Live(console=console, auto_refresh=False, transient=True) as live:
        for part, span in _timed_parts(learner, samples, clock):
            spans.append(span)
            for one in part.bad:
                bad[one.reason] = bad.get(one.reason, 0) + 1
            guard.count(part.samples, part.bad)
            elapsed = clock() - started
            if console.is_terminal and started + elapsed - drawn >= _REFRESH:
                live.update(_figures(learner, title, (learner.samples - first) / elapsed, bad), refresh=True)
                drawn = started + elapsed
            if seconds is not None and elapsed >= seconds:
                break
        else:
            guard.finish()
        elapsed = max(clock() - started, 1e-9)
    console.print(_figures(learner, title, (learner.samples - first) / elapsed, bad))
    p99 = float(np.percentile(spans, 99)) * 1e3 if spans else 0.0
    return Replayed(learner.samples - first, bad, elapsed, p99)


def _timed_parts(
    learner: Learner, samples: Iterable[Samples], clock: Callable[[], float]
) -> Iterator[tuple[Learned, float]]:
    """What was learned of each batch, and the seconds that reading and learning it took."""
    for piece in samples:
        before = clock()
        for part in learner.stream(piece):
            now = clock()
            yield part, now - before
            before = clock()


def _figures(learner: Learner, title: str, samples_per_s: float, bad: dict[str, int]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("label", "figure", "latest", "all"):
        table.add_column(column, justify="left" if column in ("label", "figure") else "right")
    total, window = learner.metrics(), learner.metrics(window=True)
    for label, metrics in total.items():
        for figure, value in metrics.as_dict().items():
            latest = window[label].as_dict()[figure]
            if value is not None and figure not in ("samples", "auc_error", "non_finite"):
                table.add_row(
                    label, figure.replace("_", " "), f"{latest:.4f}" if latest is not None else "", f"{value:.4f}"
                )
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
