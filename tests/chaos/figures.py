"""Figures of processes over time: memory and open files."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.chaos.looking import Looking


class Figure(NamedTuple):
    """Of a process at a moment.

    Attributes:
        at: seconds since the start.
        mb: memory that it has to itself or shares, MB.
        files: open file descriptors.
    """

    at: float
    mb: float
    files: int


class Figures(Looking):
    """A thread that looks at processes.

    Args:
        pids: gives them, by name.
        every: seconds.

    Attributes:
        of: by name, in order.
    """

    def __init__(self, pids: Callable[[], Mapping[str, int]], every: float) -> None:
        super().__init__("figures", every)
        self._pids = pids
        self.began = time.monotonic()
        self.of: dict[str, list[Figure]] = {}

    def look(self) -> None:
        """At all processes."""
        for name, pid in self._pids().items():
            figure = figure_of(pid, time.monotonic() - self.began)
            if figure is not None:
                self.of.setdefault(name, []).append(figure)


def figure_of(pid: int, at: float) -> Figure | None:
    """Of a process; None: it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return None
    kb = next((int(line.split()[1]) for line in lines if line.startswith("VmRSS:")), None)
    return None if kb is None else Figure(at, kb / 1024, files)


def slope(points: list[tuple[float, float]]) -> float:
    """Change per hour of values at seconds, by least squares; 0 of less than three.

    >>> slope([(0, 1.0), (1800, 2.0), (3600, 3.0)])
    2.0
    """
    if len(points) < 3:
        return 0.0
    at, values = np.array(points, float).T
    return round(float(np.polyfit(at - at[0], values, 1)[0]) * 3600, 6)
