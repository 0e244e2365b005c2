"""Figures: contestants that take turns, medians of ratios, percentiles and Markdown tables."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

WARMUP = 20  # steps of a contestant before the first round


class Contestant(NamedTuple):
    """One of those that are timed in turns in this process.

    Attributes:
        samples: of one step.
        step: does the next step.
        finish: waits until all steps are done.
    """

    samples: int
    step: Callable[[], object]
    finish: Callable[[], object] = lambda: None


def in_turns(contestants: Mapping[str, Contestant], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Samples per second by contestant and round; a contestant steps for `seconds` in each round."""
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for one in contestants.values():
        for _ in range(WARMUP):
            one.step()
    for _ in range(rounds):
        for name, (samples, step, finish) in contestants.items():
            began, steps = time.perf_counter(), 0
            while time.perf_counter() - began < seconds:
                step()
                steps += 1
            finish()
            rates[name].append(steps * samples / (time.perf_counter() - began))
    return rates


def numbered(step: Callable[[int], object], count: int) -> Callable[[], object]:
    """Calls a step with 0, 1, … `count` - 1, and from 0 again."""
    done = -1

    def following() -> object:
        nonlocal done
        done += 1
        return step(done % count)

    return following


def median_ratio(over: Iterable[float], under: Iterable[float]) -> float:
    """The median of ratios of the same round."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def percentiles(values: Sequence[float], scale: float = 1.0, digits: int = 2) -> dict[str, float]:
    """Median, 99th percentile and maximum, 0 if there are no values."""
    found = np.percentile(values, [50, 99, 100]) * scale if len(values) else np.zeros(3)
    return {name: round(float(one), digits) for name, one in zip(("p50", "p99", "max"), found, strict=True)}


def number(value: float) -> str:
    """With thousands separators and about three significant digits."""
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def table_row(cells: Iterable[object]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def table_header(names: Sequence[object]) -> str:
    """The first two lines of a Markdown table."""
    return f"{table_row(names)}\n|{'---|' * len(names)}"


def table(names: Sequence[object], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    return "\n".join([table_header(names), *map(table_row, rows)])
