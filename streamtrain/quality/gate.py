"""The quality gate: whether a publication may be served, by its windowed figures and those of a baseline."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from streamtrain.errors import GateClosed
from streamtrain.settings.groups import GateSettings

Figures = Mapping[str, Mapping[str, float | None]]
"""Windowed figures of progressive validation by label; None where one is not defined."""


def check_gate(gate: GateSettings, name: str, figures: Figures, baseline: Figures | None = None) -> None:
    """Raises GateClosed if the quality gate holds back what is called `name`; see `gate_faults`."""
    if faults := gate_faults(gate, figures, baseline):
        raise GateClosed(f"{name} is held back: {'; '.join(faults)}")


def gate_faults(gate: GateSettings, figures: Figures, baseline: Figures | None = None) -> list[str]:
    """Why the quality gate holds a publication back, a sentence per reason; empty: it may be served.

    Args:
        gate: what is checked, and its margins.
        figures: windowed figures of the publication.
        baseline: figures to compare with; None: nothing is compared.
    """
    faults = []
    for label, now in figures.items():
        bad = now.get("non_finite") or 0
        if gate.non_finite and bad:
            faults.append(f"{label}: {bad:.0f} predictions in the window are not finite")
        before = (baseline or {}).get(label, {})
        if min(now.get("samples") or 0, before.get("samples") or 0) >= max(1, gate.min_samples):
            faults += [f"{label}: {fault}" for fault in _regressions(gate, now, before)]
    return faults


def _regressions(
    gate: GateSettings, now: Mapping[str, float | None], before: Mapping[str, float | None]
) -> Iterator[str]:
    for figure, margin in (
        ("auc", gate.auc_drop),
        ("log_loss", gate.loss_rise),
        ("mean_squared_error", gate.loss_rise),
        ("calibration", gate.calibration),
    ):
        mine, theirs = now.get(figure), before.get(figure)
        if margin is None or mine is None or theirs is None:
            continue
        if figure == "calibration":
            if abs(mine - 1) - abs(theirs - 1) > margin:
                yield f"calibration {mine:.4f} is further from 1 than {theirs:.4f} by more than {margin}"
            continue
        most = margin if figure == "auc" else margin * theirs
        if (theirs - mine if figure == "auc" else mine - theirs) > most:
            yield f"{figure} {mine:.5f} is worse than {theirs:.5f} by more than {most:.5f}"


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


class Baseline:
    """The best of each figure over the publications of an hour, so that it does not decline with the model.

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
        """The best figures by label, and the samples of the largest window among them."""
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
