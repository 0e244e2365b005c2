"""A race: candidates learn the same samples side by side, and hopeless ones are dropped early.

Candidates are halved after an eighth, a quarter and half of the samples: successive halving (Jamieson & Talwalkar,
Non-stochastic best arm identification and hyperparameter optimization, AISTATS 2016). They are judged by the samples
since the last halving, so that a fast start counts less and less. From the second halving on, candidates are also
dropped if their loss exceeds that of the best by more than three standard errors of the paired difference (Maron &
Moore, Hoeffding races, NIPS 1993); the best may be the rival, which has learned all samples before. The finishers are
judged by the later half of the samples, which no halving has used.
"""

import math
from collections.abc import Callable

from streamtrain.tuning.candidate import Candidate, Decoded, Mean
from streamtrain.tuning.compare import Difference, difference

HOPELESS = 3.0  # standard errors
_SHARES = (8, 4, 2)  # candidates are halved after 1/8, 1/4 and 1/2 of the samples
_WARM_UP = 3  # chunks before the speed of a candidate is judged; the first includes compilation


class Race:
    """Candidates that learn side by side.

    Args:
        decoded: the samples.
        chunks: number of chunks to learn.
        rival: finished candidate to beat; None: there is none.
        remaining: seconds left for the race.
        budget: bytes that candidates may use together.
        on_step: called after each step; an exception from it ends the race.

    Attributes:
        alive: candidates that have not been dropped.
    """

    def __init__(
        self,
        decoded: Decoded,
        chunks: int,
        *,
        rival: Candidate | None,
        remaining: Callable[[], float],
        budget: Callable[[], float],
        on_step: Callable[[], None],
    ) -> None:
        self.alive: list[Candidate] = []
        self._decoded, self._chunks, self._rival = decoded, chunks, rival
        self._remaining, self._budget, self._on_step = remaining, budget, on_step

    def run(self) -> list[Candidate]:
        """Runs the race; returns the finishers, the best by the later half of the samples first."""
        first, many, cuts = 0, len(self.alive), rungs(self._chunks)
        for k, last in enumerate(cuts):
            self._learn(first, last)
            if last < self._chunks:
                self._halve(first, last, -(-many // 2 ** (k + 1)), is_race=k > 0)
            first = last
        finishers, self.alive = self._rank(self.alive, later_half(cuts), cuts[-1]), []
        for candidate in finishers:
            candidate.finish()
        return finishers

    def _rank(self, candidates: list[Candidate], first: int, last: int) -> list[Candidate]:
        return sorted(candidates, key=lambda candidate: score(self._decoded, candidate, first, last))

    def _learn(self, first: int, last: int) -> None:
        for chunk in self._decoded.chunks[first:last]:
            for candidate in list(self.alive):
                if candidate.ended:
                    continue
                candidate.learn(chunk)
                needed, remaining = self._needed(candidate), self._remaining()
                if candidate.chunks >= _WARM_UP and needed > remaining:
                    candidate.drop(f"too slow: it needs {needed:,.0f} s more, but only {remaining:,.0f} s remain")
                self._limit_memory()
                self.alive = [other for other in self.alive if not other.ended]
                self._on_step()

    def _halve(self, first: int, last: int, most: int, *, is_race: bool) -> None:
        """Drops candidates that are hopeless by a range of chunks, then all but the best `most`."""
        samples = f"after {self._decoded.samples(last):,} samples"
        ranking = self._rank(self.alive, first, last)
        leaders = self._rank([*ranking[:1], *([self._rival] if self._rival else [])], first, last)
        for place, candidate in enumerate(ranking):
            loss = compare_losses(self._decoded, candidate, leaders[0], first, last)
            if is_race and loss.mean > HOPELESS * loss.error:
                candidate.drop(f"hopeless {samples}: {loss.mean:+.5f} ± {loss.error:.5f}")
            elif place >= most:
                candidate.drop(f"not among the best {most} of its heat {samples}")
        self.alive, remaining = [], self._remaining()
        for candidate in ranking:
            if not candidate.ended:
                remaining -= self._needed(candidate)
                if remaining < 0:
                    candidate.drop(f"no time to continue {samples}")
                else:
                    self.alive.append(candidate)

    def _needed(self, candidate: Candidate) -> float:
        """Seconds that a candidate needs for the rest of the samples."""
        return candidate.seconds_per_chunk * (self._chunks - candidate.chunks)

    def _limit_memory(self) -> None:
        used, budget = sum(candidate.nbytes for candidate in self.alive), self._budget()
        while used > budget and self.alive:
            largest = max(self.alive, key=lambda candidate: candidate.nbytes)
            used -= largest.nbytes
            largest.drop(f"out of memory: it used {largest.nbytes / 1e6:,.0f} MB")
            self.alive.remove(largest)


def rungs(chunks: int) -> list[int]:
    """Numbers of chunks after which candidates are halved, and the total."""
    return sorted({*(math.ceil(chunks / share) for share in _SHARES), chunks})


def later_half(cuts: list[int]) -> int:
    """First chunk of the later half, given `rungs`."""
    return cuts[-2] if len(cuts) > 1 else 0


def score(decoded: Decoded, candidate: Candidate, first: int, last: int) -> float:
    """The loss over a range of chunks, to rank candidates by; infinite if no sample counts."""
    loss = candidate.loss(decoded, first, last)
    return math.inf if math.isnan(loss) else loss


def compare_losses(
    decoded: Decoded, ours: Candidate | Mean, theirs: Candidate | Mean, first: int, last: int
) -> Difference:
    """The difference of two losses over a range of chunks."""
    return difference(ours.blocks(first, last), theirs.blocks(first, last), decoded.weights(first, last))
