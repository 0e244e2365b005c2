"""BadSampleGuard: stops training when too many samples of a stream are refused."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from streamtrain.errors import BadSample, TooManyBadSamples

WINDOW = 10_000
_FORGIVEN = 1000  # messages, few of them bad, after which about a third of earlier refusals is left
_MAX_REASONS = 5  # listed in an error


class Refusals(NamedTuple):
    """Decaying counts of a partition's messages: older ones count less.

    Attributes:
        seen: number of messages.
        refused: number of bad ones among them.
    """

    seen: float
    refused: float

    def exceeds(self, limit: float) -> bool:
        """Whether the share of bad messages is above `limit`."""
        return self.refused > limit * self.seen


class BadSampleGuard:
    """Watches the share of bad samples in about the last 10,000 of all its partitions.

    Its state can be saved and restored by partition, so that a restarted worker continues with it. A restored state
    alone does not stop a stream again: only a batch that is itself above the limit does.

    Args:
        limit: maximum share, 0 to 1.
        way_out: appended to the error message: what the operator can do.
    """

    def __init__(self, limit: float, way_out: str = "") -> None:
        self._limit = limit
        self._way_out = way_out
        self._of: dict[int, Refusals] = {}
        self._reasons: Counter[str] = Counter()
        self._last = ""

    def judge(self, batch: Mapping[int, Refusals], bad: Sequence[BadSample], last: str) -> None:
        """Counts one batch.

        Args:
            batch: counts of the batch, by partition.
            bad: the refused samples.
            last: description of the last one, for the error.

        Raises:
            TooManyBadSamples: the share of bad samples is above the limit over all partitions, over those of the batch,
                and in the batch itself.
        """
        for partition, of_batch in batch.items():
            self._of[partition] = _sum([self._of.get(partition, _NONE), of_batch])
        self._reasons.update(one.reason for one in bad)
        self._last = last or self._last
        total = _sum(self._of.values())
        if total.seen < WINDOW:
            return
        if total.exceeds(self._limit):
            around = _sum(map(self._of.__getitem__, batch))
            if around.exceeds(self._limit) and _sum(batch.values()).exceeds(self._limit):
                self._stop(total)
            for partition, of_batch in batch.items():
                if not of_batch.exceeds(self._limit):
                    seen, refused = self._of[partition]
                    self._of[partition] = Refusals(seen, refused * max(0.0, 1 - of_batch.seen / _FORGIVEN))
        scale = WINDOW / total.seen
        self._of = {partition: Refusals(of[0] * scale, of[1] * scale) for partition, of in self._of.items()}

    def remembered(self, partition: int) -> Refusals:
        """The state of a partition."""
        return self._of.get(partition, _NONE)

    def restore(self, remembered: Mapping[int, Refusals]) -> None:
        """Replaces the state of all partitions."""
        self._of = dict(remembered)

    def finish(self) -> None:
        """Checks the counts at the end of a stream.

        Raises:
            TooManyBadSamples: the share of bad samples is above the limit.
        """
        total = _sum(self._of.values())
        if total.exceeds(self._limit):
            self._stop(total)

    def _stop(self, total: Refusals) -> None:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in self._reasons.most_common(_MAX_REASONS))
        raise TooManyBadSamples(
            f"{total.refused:.0f} of {total.seen:.0f} samples were refused ({reasons}), such as {self._last}; "
            f"at most {self._limit:.0%} are accepted{self._way_out}"
        )


_NONE = Refusals(0.0, 0.0)


def _sum(several: Iterable[Refusals]) -> Refusals:
    seen = refused = 0.0
    for one in several:
        seen, refused = seen + one.seen, refused + one.refused
    return Refusals(seen, refused)
