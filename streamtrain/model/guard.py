"""Guard: stops a stream of which too much is refused."""

from collections.abc import Sequence

from streamtrain.errors import BadSample, TooManyBadSamples

WINDOW = 10_000


class BadSampleGuard:
    """Watches the share of bad samples.

    Args:
        limit: highest share, 0 to 1, over a window of 10,000 samples.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._good = self._bad = 0
        self._last: BadSample | None = None

    def count(self, good: int, bad: Sequence[BadSample]) -> None:
        """Counts one batch.

        Raises:
            TooManyBadSamples: the share of bad samples in the window is above the limit.
        """
        self._good += good
        self._bad += len(bad)
        self._last = bad[-1] if bad else self._last
        seen = self._good + self._bad
        if seen >= WINDOW:
            self._check(seen)
            self._good, self._bad = self._good // 2, self._bad // 2

    def finish(self) -> None:
        """Checks what is left of a stream that has ended.

        Raises:
            TooManyBadSamples: as `count`.
        """
        if self._good + self._bad:
            self._check(self._good + self._bad)

    def _check(self, seen: int) -> None:
        if self._bad > self._limit * seen:
            example = f", such as {self._last}" if self._last else ""
            raise TooManyBadSamples(
                f"{self._bad} of {seen} samples were refused{example}; at most {self._limit:.0%} are accepted"
            )
