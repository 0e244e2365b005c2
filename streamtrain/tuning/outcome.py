"""The outcome of a search, as values and as JSON."""

import math
from dataclasses import dataclass
from typing import Any

from streamtrain.quality.progressive import Metrics
from streamtrain.tuning.candidate import Candidate
from streamtrain.tuning.compare import Difference
from streamtrain.tuning.search import Search
from streamtrain.tuning.space import NEVER, changes, snippet

CONFIDENCE = 0.95


@dataclass(frozen=True)
class CandidateFigures:
    """How well one candidate predicted.

    Attributes:
        changes: differences from the model as given, as Python by option.
        loss: mean over the later half of the samples, which candidates are judged by.
        later: progressive validation by label over the later half.
        all: progressive validation by label over all samples.
        samples_per_s: its throughput, while learning side by side with others.
    """

    changes: dict[str, str]
    loss: float
    later: dict[str, Metrics]
    all: dict[str, Metrics]
    samples_per_s: float

    @classmethod
    def of(cls, search: Search, candidate: Candidate) -> "CandidateFigures":
        """Figures of a finisher."""
        decoded = search.decoded
        return cls(
            changes(search.given.model, candidate.model),
            candidate.loss(decoded, search.half, search.chunks),
            candidate.metrics(decoded, search.half, search.chunks),
            candidate.metrics(decoded, 0, search.chunks),
            len(decoded.chunks[0].batch) / candidate.seconds_per_chunk if candidate.seconds_per_chunk else math.nan,
        )

    def as_json(self) -> dict[str, Any]:
        """Values for JSON."""
        return {
            "changes": self.changes,
            "loss": _rounded(self.loss),
            "samples_per_s": _rounded(self.samples_per_s, 0),
            "later_half": _metrics(self.later),
            "metrics": _metrics(self.all),
        }


@dataclass(frozen=True)
class TuningOutcome:
    """What a search has found.

    Attributes:
        samples: number of samples that finishers learned.
        judged: number of later samples, which candidates were judged by.
        bad: samples refused, by reason.
        seconds: duration.
        given: the model as given; None: its loss is not finite.
        best: the best other candidate, which need not be better; None: no other has finished.
        better: difference of the losses of best and given; None: one is missing.
        margin: half the confidence interval of `better`, corrected for all compared candidates.
        is_better: whether the best is significantly better.
        confirmed: the difference with another seed; None: not measured.
        snippet: Python that gives the best.
        tried: number of candidates, without the model as given.
        compared: number of those that finished.
        dropped: changes of the others, and why each was dropped.
        not_tried: options that were not tried, and why.
        warnings: possible problems.
        cut: why the file was not read to its end; "": it was.
        ended: why the search ended early; "": it completed.
    """

    samples: int
    judged: int
    bad: dict[str, int]
    seconds: float
    given: CandidateFigures | None
    best: CandidateFigures | None
    better: Difference | None
    margin: float
    is_better: bool
    confirmed: Difference | None
    snippet: str
    tried: int
    compared: int
    dropped: list[tuple[dict[str, str], str]]
    not_tried: list[str]
    warnings: list[str]
    cut: str
    ended: str

    @classmethod
    def of(cls, search: Search) -> "TuningOutcome":
        """The outcome of a search so far."""
        given = None if search.given.ended or not search.chunks else search.given
        best = next((candidate for candidate in search.leaders() if candidate is not given), None)
        if search.best is not given:
            best = search.best
        better = search.difference(best, given) if best and given else None
        compared = sum(candidate.chunks == search.chunks and not candidate.ended for candidate in search.tried)
        margin = better.margin(max(1, compared), CONFIDENCE) if better else math.nan
        return cls(
            samples=search.decoded.samples(search.chunks),
            judged=search.decoded.samples(search.chunks) - search.decoded.samples(search.half),
            bad=search.bad,
            seconds=search.elapsed,
            given=CandidateFigures.of(search, given) if given else None,
            best=CandidateFigures.of(search, best) if best else None,
            better=better,
            margin=margin,
            is_better=better.mean + margin < 0 if better else best is not None,
            confirmed=search.confirmed,
            snippet=snippet(search.given.model, best.model) if best else "",
            tried=len(search.tried),
            compared=compared,
            dropped=[(changes(search.given.model, c.model), c.ended) for c in search.tried if c.ended],
            not_tried=_not_tried(search),
            warnings=_warnings(search, search.best or given) if search.chunks else [],
            cut=search.cut,
            ended=search.ended,
        )

    def as_json(self) -> dict[str, Any]:
        """Values for JSON."""
        better = self.better
        return {
            "samples": self.samples,
            "judged_by": self.judged,
            "bad": self.bad,
            "seconds": round(self.seconds, 1),
            "given": self.given and self.given.as_json(),
            "best": self.best and self.best.as_json(),
            "is_better": self.is_better,
            "better_by": None if better is None else _rounded(-better.mean),
            "margin": _rounded(self.margin),
            "confidence": CONFIDENCE,
            "better_by_with_another_seed": None if self.confirmed is None else _rounded(-self.confirmed.mean),
            "snippet": self.snippet,
            "tried": self.tried,
            "compared": self.compared,
            "dropped": [{"changes": settings, "why": why} for settings, why in self.dropped],
            "not_tried": self.not_tried,
            "warnings": self.warnings,
            "left_out": self.cut,
            "ended": self.ended,
        }


def _not_tried(search: Search) -> list[str]:
    reasons = [f"{name}: {why}" for name, why in search.skipped.items() if name not in search.varied]
    unreached = [name for name in search.settings if name not in search.varied and name not in search.skipped]
    if unreached:
        reasons.append(f"{', '.join(unreached)}: {search.ended or 'the search did not get there'}")
    if search.best is not None and search.best is not search.given and search.confirmed is None:
        reasons.append(f"the best with another seed: {search.ended or 'no time left'}")
    return [*reasons, *NEVER]


def _warnings(search: Search, best: Candidate | None) -> list[str]:
    warnings = []
    labels = search.given.model.labels
    for name in (labels[j].name for j in search.judged):
        low, high = search.mean.extremes(name)
        if low == high:
            warnings.append(f"{name} is always {low:g}: there is nothing to learn")
    if search.given.ended:
        warnings.append(f"the model as given fails: {search.given.ended}")
    if search.given.outside:
        warnings.append(
            f"{search.given.outside:,} predictions of the model as given are not probabilities: does its graph end in "
            "a sigmoid, as the loss requires?"
        )
    if best is None:
        warnings.append("no candidate has a finite loss: check the samples and the graph")
    elif (loss := search.difference(best, search.mean)).mean + loss.margin() >= 0 or math.isnan(loss.mean):
        warnings.append(
            "even the best is not significantly better than predicting the label's mean: do the "
            "features say anything about the label?"
        )
    return warnings


def _metrics(metrics: dict[str, Metrics]) -> dict[str, dict[str, float | None]]:
    return {label: {name: _rounded(value) for name, value in one.as_dict().items()} for label, one in metrics.items()}


def _rounded(value: float | None, digits: int = 5) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, digits)
