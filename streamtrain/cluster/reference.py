"""Reference: the figures that publications are compared with."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from streamtrain.store.gate import Figures

_SPAN = 3600.0
_SLOT = 60.0

# By figure what is lower for a better one.
_BADNESS: Mapping[str, Callable[[float], float]] = {
    "auc": lambda value: -value,
    "log_loss": lambda value: value,
    "mean_squared_error": lambda value: value,
    "calibration": lambda value: abs(value - 1),
}


class _Slot(NamedTuple):
    began: float
    best: dict[str, dict[str, float]]


class Reference:
    """Of each figure the best of the publications of an hour, so that it does not go downhill with a model that does.

    The hour ends with the last publication that was let through: what is held back for longer does not become good.
    Kept by the minute. Windows of fewer samples than the gate compares are left out, as a small one may be good by
    chance.

    Args:
        min_samples: of windows that count.
        now: monotonic seconds.
    """

    def __init__(self, min_samples: int, now: Callable[[], float] = time.monotonic) -> None:
        self._min_samples = max(1, min_samples)
        self._now = now
        self._slots: deque[_Slot] = deque()

    def add(self, figures: Figures) -> None:
        """A publication has been let through."""
        now = self._now()
        while self._slots and self._slots[0].began < now - _SPAN:
            self._slots.popleft()
        if not self._slots or now - self._slots[-1].began >= _SLOT:
            self._slots.append(_Slot(now, {}))
        for label, given in figures.items():
            if (given.get("samples") or 0) >= self._min_samples:
                _take_better(self._slots[-1].best.setdefault(label, {}), given)

    def begin(self, figures: Figures) -> None:
        """Nothing but this publication counts from here on."""
        self._slots.clear()
        self.add(figures)

    def figures(self) -> Figures:
        """By label the best figures, and the samples of the largest window among them."""
        found: dict[str, dict[str, float]] = {}
        for slot in self._slots:
            for label, best in slot.best.items():
                _take_better(found.setdefault(label, {}), best)
        return found


def _take_better(best: dict[str, float], given: Mapping[str, float | None]) -> None:
    best["samples"] = max(best.get("samples", 0), given.get("samples") or 0)
    for name, badness in _BADNESS.items():
        value = given.get(name)
        if value is not None and (name not in best or badness(value) < badness(best[name])):
            best[name] = value
