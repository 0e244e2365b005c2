"""Whether one candidate is better than another: paired differences of losses, and their standard errors.

Samples of a stream are correlated: a user rates in bursts, a night follows a day. The standard error of independent
samples would be far too small, so it is estimated from the means of at most 32 long runs of consecutive samples
("batch means": Conway 1963; Schmeiser, Batch size effects in the analysis of simulation output, Operations Research 30,
1982).
"""

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK = 16  # consecutive samples whose losses are summed
GROUPS = 32  # runs of consecutive samples
FEWEST_GROUPS = 8  # with fewer, the error is infinite

Sums = NDArray[np.float64]


class Difference(NamedTuple):
    """Mean difference of two losses per sample.

    Attributes:
        mean: negative if the first is better.
        error: standard error of the mean; infinite if there are too few samples.
        groups: runs of samples that the error was estimated from.
    """

    mean: float
    error: float
    groups: int

    def margin(self, comparisons: int = 1, confidence: float = 0.95) -> float:
        """Half the width of the confidence interval.

        Args:
            comparisons: number of simultaneous comparisons (Bonferroni correction).
            confidence: of all comparisons together.
        """
        return self.error * _student_quantile(1 - (1 - confidence) / (2 * comparisons), self.groups - 1)


def difference(ours: Sums, theirs: Sums, weights: Sums) -> Difference:
    """Mean difference of two losses.

    Args:
        ours: float64 [b], weighted sums of the first loss over blocks of consecutive samples.
        theirs: float64 [b], the same for the second loss.
        weights: float64 [b], sums of weights over the blocks.
    """
    total, groups = float(weights.sum()), min(GROUPS, len(weights))
    if not total:
        return Difference(math.nan, math.inf, groups)
    differences = ours - theirs
    mean = float(differences.sum()) / total
    if groups < FEWEST_GROUPS:
        return Difference(mean, math.inf, groups)
    firsts = np.linspace(0, len(weights), groups, endpoint=False).astype(np.int64)
    residuals = np.add.reduceat(differences - mean * weights, firsts)
    error = math.sqrt(groups / (groups - 1) * float(residuals @ residuals)) / total
    return Difference(mean, error, groups)


def block_sums(values: NDArray[np.float64]) -> Sums:
    """Sums of float64 [n] over blocks of consecutive samples."""
    return np.add.reduceat(values, np.arange(0, len(values), BLOCK)) if len(values) else np.empty(0)


def _student_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t distribution, by its expansion around the normal one (Abramowitz & Stegun 26.7.5)."""
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**i for i, term in enumerate(terms, 1)) if freedom > 0 else math.inf
