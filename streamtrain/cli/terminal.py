"""What commands share at the terminal: files of lines, TensorFlow's greeting, tables, charts and JSON."""

import errno
import json
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from streamtrain.quality.gate import Figures


def print_json(figures: dict[str, object]) -> None:
    """Prints one line of JSON, for scripts; to standard error if standard output cannot take it."""
    line = json.dumps(figures) + "\n"
    try:
        sys.stdout.write(line)
        sys.stdout.flush()
    except OSError as exc:
        if exc.errno != errno.EPIPE:
            sys.stderr.write(line)
        raise


def output_failed() -> bool:
    """After an error, whether standard output cannot be written; if so, what is left for it is dropped."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python tries again at its end
        return True
    return False


FIGURES = ("auc", "log_loss", "mean_squared_error", "calibration")
WIDE = 200
"""Characters of a line when the output is not a terminal."""


def show(*parts: RenderableType) -> None:
    """Prints tables and text, without markup and colours of their own."""
    width = None if sys.stdout.isatty() else WIDE
    Console(width=width, markup=False, highlight=False).print(*parts, sep="\n")


def new_table(title: str, columns: tuple[str, ...], *, right: tuple[str, ...] = ()) -> Table:
    """An empty table; columns named in `right` are aligned to the right."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table


def format_time(seconds: float) -> str:
    """Seconds since the epoch as date and time in UTC; "-" for 0."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(" ", "seconds").removesuffix("+00:00") if seconds else "-"


def format_count(value: object) -> str:
    """A number with separators; "-" for anything else."""
    return f"{value:,.0f}" if isinstance(value, int | float) else "-"


def format_span(value: object, unit: float = 1.0) -> str:
    """A span of time with a unit, as the console shows it; "-" for what is not a number.

    Args:
        value: how many units; below 0 counts as 0.
        unit: seconds.

    >>> [format_span(seconds) for seconds in (0.0307, 59.94, 90, 7200, 912771217.4)]
    ['31 ms', '59.9 s', '2 min', '2.0 h', '10,564.5 d']
    """
    if not isinstance(value, int | float):
        return "-"
    seconds = max(0.0, value * unit)
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 86400 else f"{seconds / 86400:,.1f} d"


def count_rows(rows: Mapping[str, int]) -> str:
    """Rows by table as a phrase: "1,234 rows of user, 5 rows of item"."""
    return ", ".join(f"{count:,} rows of {table}" for table, count in rows.items())


def list_rows(rows: Mapping[str, int]) -> str:
    """Rows by table for a cell, a table per line; "-" if there are none."""
    return "\n".join(f"{table} {count:,}" for table, count in rows.items()) or "-"


def format_figures(figures: Figures) -> str:
    """Quality figures, a line per label."""
    lines = []
    for label, values in figures.items():
        shown = [f"{name} {value:.4f}" for name in FIGURES if (value := values.get(name)) is not None]
        lines += [f"{label}: {', '.join(shown)}"] if shown else []
    return "\n".join(lines)


_DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])  # by row and column of a character
_LABEL = 9  # characters of the numbers to the left


class Curve(NamedTuple):
    """A line of a chart.

    Attributes:
        style: a style of rich, such as "green".
        values: float64 [n], at equal distances; NaN for gaps.
    """

    style: str
    values: NDArray[np.float64]


def chart(curves: Sequence[Curve], *, width: int = 72, height: int = 12) -> list[Text]:
    """Lines of text that show curves, the first one in front; empty if there is nothing to draw.

    Args:
        curves: they share the range; a shorter one ends earlier.
        width: characters per line, nine of them for the scale.
        height: number of lines.
    """
    known = np.concatenate([one.values[np.isfinite(one.values)] for one in curves] or [np.empty(0)])
    most = max((len(one.values) for one in curves), default=0)
    if most < 2 or not len(known) or width <= _LABEL:
        return []
    # A first value far above all others, before anything is learned, would press the rest into a line.
    low, high = float(known.min()), float(np.quantile(known, 0.98))
    if high <= low:
        low, high = low - 0.5, low + 0.5
    cells = np.zeros((height, width - _LABEL), np.int64)
    styles = np.full(cells.shape, "", object)
    for one in reversed(curves):
        # A curve that is shorter than others ends where its last value belongs.
        columns = round(2 * cells.shape[1] * (len(one.values) - 1) / (most - 1))
        for column, row in _dots((high - one.values) / (high - low), columns, 4 * height):
            at = row // 4, column // 2
            cells[at] |= _DOTS[row % 4, column % 2]
            styles[at] = one.style
    lines = []
    for y in range(height):
        value = high - (high - low) * y / max(1, height - 1)
        line = Text()
        line.append(f"{value:>{_LABEL - 1}.4f} " if y % 3 == 0 or y == height - 1 else " " * _LABEL, "dim")
        for x in range(cells.shape[1]):
            line.append(chr(0x2800 + int(cells[y, x])), styles[y, x])
        lines.append(line)
    return lines


def _dots(depths: NDArray[np.float64], columns: int, rows: int) -> list[tuple[int, int]]:
    """Columns and rows of a curve's dots, with those between neighbours; a depth is 0 at the top, 1 at the bottom."""
    at = np.linspace(0, len(depths) - 1, columns) if columns > 0 else np.empty(0)
    places = np.interp(at, np.arange(len(depths)), depths) if len(at) else at
    dots: list[tuple[int, int]] = []
    last: int | None = None
    for column, place in enumerate(places):
        if not np.isfinite(place):
            last = None
            continue
        row = round(float(np.clip(place, 0, 1)) * (rows - 1))
        between = (row,) if last is None else range(min(row, last), max(row, last) + 1)
        dots += [(column, one) for one in between]
        last = row
    return dots
