"""Gate: whether a publication is good enough to be seen, by the figures of its window beside those of a good one."""

from collections.abc import Mapping
from dataclasses import dataclass

from streamtrain.errors import PublicationError

Figures = Mapping[str, Mapping[str, float | None]]
"""By label the windowed figures of progressive validation; None where one is not defined."""


class GateClosed(PublicationError):
    """A publication is held back for what its window shows."""


@dataclass(frozen=True)
class Gate:
    """What a publication must fulfil. A margin of None is not looked at.

    Attributes:
        non_finite: whether predictions that are NaN or infinite hold it back.
        auc_drop: by how much the AUC may be below the good one's.
        loss_rise: by which share of it the log loss, or the mean squared error, may be above the good one's.
        calibration: by how much the ratio of predictions to labels may be further from 1 than the good one's.
        min_samples: of both windows; smaller ones are not compared.
    """

    non_finite: bool = True
    auc_drop: float | None = None
    loss_rise: float | None = None
    calibration: float | None = None
    min_samples: int = 10_000

    def faults(self, figures: Figures, good: Figures | None = None) -> list[str]:
        """What holds a publication back, a sentence each; none: it may be seen.

        Args:
            figures: of its window.
            good: of the one that it is compared with; None: with none.
        """
        faults = []
        for label, now in figures.items():
            bad = now.get("non_finite") or 0
            if self.non_finite and bad:
                faults.append(f"{label}: {bad:.0f} predictions of its window are not finite")
            before = (good or {}).get(label, {})
            if min(now.get("samples") or 0, before.get("samples") or 0) >= max(1, self.min_samples):
                faults += [f"{label}: {fault}" for fault in self._worse(now, before)]
        return faults

    def check(self, name: str, figures: Figures, good: Figures | None = None) -> None:
        """Whether it may be seen.

        Raises:
            GateClosed: it may not; says why, of what is called `name`.
        """
        if faults := self.faults(figures, good):
            raise GateClosed(f"{name} is held back: {'; '.join(faults)}")

    def _worse(self, now: Mapping[str, float | None], good: Mapping[str, float | None]) -> list[str]:
        faults = []
        margins = {
            "auc": (self.auc_drop, -1.0),
            "log_loss": (self._share(good.get("log_loss")), 1.0),
            "mean_squared_error": (self._share(good.get("mean_squared_error")), 1.0),
        }
        for figure, (margin, sign) in margins.items():
            mine, theirs = now.get(figure), good.get(figure)
            if margin is not None and mine is not None and theirs is not None and sign * (mine - theirs) > margin:
                faults.append(f"{figure} {mine:.5f} is worse than {theirs:.5f} by more than {margin:.5f}")
        mine, theirs = now.get("calibration"), good.get("calibration")
        if self.calibration is None or mine is None or theirs is None:
            return faults
        if abs(mine - 1) - abs(theirs - 1) > self.calibration:
            faults.append(f"calibration {mine:.4f} is further from 1 than {theirs:.4f} by more than {self.calibration}")
        return faults

    def _share(self, loss: float | None) -> float | None:
        return None if self.loss_rise is None or loss is None else self.loss_rise * loss
