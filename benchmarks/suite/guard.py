"""The guard: ratios beside those that were accepted."""

from collections.abc import Mapping
from dataclasses import dataclass

LOSS = 0.2  # of an accepted ratio that is too much


@dataclass(frozen=True)
class Verdict:
    """One ratio.

    Attributes:
        name: of the ratio.
        now: measured; None: it was not, or failed.
        accepted: what it is compared with; None: nothing was accepted yet.
    """

    name: str
    now: float | None
    accepted: float | None

    @property
    def lost(self) -> bool:
        """Whether it is a loss of more than is allowed: also if it was accepted, and is not there any more."""
        if self.accepted is None:
            return False
        return self.now is None or self.now < (1 - LOSS) * self.accepted

    def __str__(self) -> str:
        now = "not measured" if self.now is None else f"{self.now:.3f}"
        if self.accepted is None:
            return f"{self.name}: {now}, nothing accepted yet"
        change = "" if self.now is None else f" ({self.now / self.accepted - 1:+.0%})"
        return f"{'LOST ' if self.lost else ''}{self.name}: {now}, accepted {self.accepted:.3f}{change}"


def compare(now: Mapping[str, float | None], accepted: Mapping[str, float]) -> list[Verdict]:
    """Of every ratio that is measured or was accepted; more is better in all."""
    return [Verdict(name, now.get(name), accepted.get(name)) for name in dict.fromkeys((*now, *accepted))]
