"""Comparison of two models that learn from the same log, by their figures of the same blocks of offsets.

If you check an interval of fixed size again and again until it excludes 0, you are wrong sooner or later. A confidence
sequence may be checked after every block: the probability that it ever excludes the truth is at most 5 %.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from streamtrain.durations import parse_duration
from streamtrain.errors import ConfigError, NothingToCompare, PublicationCorrupt
from streamtrain.quality.blocks import BLOCK_BINS, BlockFigures, GroupFigures
from streamtrain.quality.progressive import Metrics, Sums
from streamtrain.store.redis.blocks import BlockLog, RedisBlocks, models_with_blocks
from streamtrain.store.redis.server import RedisServer

FEWEST_BLOCKS = 16
"""With fewer, the variance of block means is not known well enough for an interval."""
ALPHA = 0.05
TUNED_FOR = 32
"""Number of blocks for which the interval is about as narrow as it can be; it is valid for any number."""

_MOST_RANGES = 5  # of offsets, in an error

Doubles = NDArray[np.float64]
BlockPlace = tuple[int, int]
"""Partition and number of a block."""


class Interval(NamedTuple):
    """A mean and what it lies between."""

    mean: float
    low: float
    high: float


def confidence_sequence(
    means: Doubles, weights: Doubles, *, alpha: float = ALPHA, tuned_for: float = TUNED_FOR
) -> Interval:
    """The mean with an interval of a confidence sequence, which is valid at all numbers of blocks at once.

    The two-sided asymptotic confidence sequence of Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas, Time-uniform
    central limit theory and asymptotic confidence sequences (arXiv:2103.06476, theorem 2.2): with t blocks and their
    standard deviation s, the mean

        +- s * sqrt(2 (t rho^2 + 1) / (t^2 rho^2) * log(sqrt(t rho^2 + 1) / alpha))
        rho = sqrt((-2 log alpha + log(-2 log alpha + 1)) / tuned_for)

    As blocks may have different weights, the mean is weighted, and s is that of the weighted residuals. Where
    differences of neighbouring blocks are correlated, s is the long-run deviation, if that is larger (Newey and West,
    Econometrica 55, 1987, with t^(1/3) lags).

    Args:
        means: float64 [t], one of each block, such as of differences of two losses.
        weights: float64 [t], above 0.
        alpha: probability that any of the intervals misses the truth.
        tuned_for: number of blocks for which the interval is about as narrow as it can be.

    Returns:
        The mean and the interval; infinite with fewer than `FEWEST_BLOCKS` blocks, NaN without any.
    """
    count, total = len(means), float(weights.sum())
    if not total:
        return Interval(math.nan, -math.inf, math.inf)
    mean = float(means @ weights) / total
    if count < FEWEST_BLOCKS:
        return Interval(mean, -math.inf, math.inf)
    residuals = (means - mean) * weights * (count / total)
    deviation = math.sqrt(_long_run_variance(residuals))
    level = -2 * math.log(alpha)
    spread = count * (level + math.log(level + 1)) / tuned_for  # t rho^2
    margin = deviation * math.sqrt(2 * (spread + 1) / (count * spread) * math.log(math.sqrt(spread + 1) / alpha))
    return Interval(mean, mean - margin, mean + margin)


def _long_run_variance(residuals: Doubles) -> float:
    count = len(residuals)
    plain = long_run = float(residuals @ residuals)
    lags = int(count ** (1 / 3))
    for lag in range(1, lags + 1):
        long_run += 2 * (1 - lag / (lags + 1)) * float(residuals[lag:] @ residuals[:-lag])
    return max(plain, long_run) / (count - 1)


class LabelComparison(NamedTuple):
    """Two models compared by one label, over all samples or a slice.

    Attributes:
        label: name of the label.
        slice: name of the slice; "": all samples.
        loss: "log loss", or "squared error" if the label is not binary.
        blocks: number of blocks that both have.
        ours: figures of the first model over these blocks.
        theirs: figures of the second one.
        difference: the first one's mean loss minus the second one's: above 0 if the second is better.
        means, weights: float64 [blocks], what the difference is computed from: by block, in the order of their time.
    """

    label: str
    slice: str
    loss: str
    blocks: int
    ours: Metrics
    theirs: Metrics
    difference: Interval
    means: Doubles
    weights: Doubles

    def sentence(self, first: str, second: str) -> str:
        """What came out, in a sentence."""
        mean, low, high = self.difference
        if self.blocks < FEWEST_BLOCKS:
            return f"no difference yet: {self.blocks} blocks in common, and an interval needs {FEWEST_BLOCKS}"
        if low == high == 0:
            return "no difference: the losses of both are the same in every block"
        if low <= 0 <= high:
            return f"no difference yet: the interval contains 0 ({low:+.4f} to {high:+.4f} {self.loss})"
        better = second if mean > 0 else first
        near, far = sorted((abs(low), abs(high)))
        return f"{better} is better by {abs(mean):.4f} ({near:.4f} to {far:.4f}) {self.loss}"

    def course(self, most: int) -> list[dict[str, float]]:
        """The difference after the first blocks and more and more of them, at `most` places; the last is that of all.

        Each has `blocks`, their number, and `difference`, `low` and `high`.
        """
        if self.blocks < FEWEST_BLOCKS:
            return []
        counts = np.unique(np.linspace(FEWEST_BLOCKS, self.blocks, most).round().astype(int))
        intervals = [(int(n), confidence_sequence(self.means[:n], self.weights[:n])) for n in counts]
        return [{"blocks": n, "difference": mean, "low": low, "high": high} for n, (mean, low, high) in intervals]

    def to_json(self, first: str, second: str) -> dict[str, Any]:
        """For JSON, with the names of both models; undefined figures are None."""
        mean, low, high = (value if math.isfinite(value) else None for value in self.difference)
        return {
            "label": self.label,
            "slice": self.slice or None,
            "loss": self.loss,
            "blocks": self.blocks,
            "figures_a": self.ours.as_dict(),
            "figures_b": self.theirs.as_dict(),
            "difference": mean,
            "low": low,
            "high": high,
            "sentence": self.sentence(first, second),
        }


class StoredBlocks(NamedTuple):
    """The blocks of a model.

    Attributes:
        model: its name.
        log: what they are of.
        blocks: by place.
    """

    model: str
    log: BlockLog
    blocks: Mapping[BlockPlace, BlockFigures]

    @property
    def is_full(self) -> bool:
        """Whether older blocks have been dropped, as only some are kept."""
        counts = np.bincount([partition for partition, _ in self.blocks]) if self.blocks else np.zeros(1)
        return int(counts.max()) >= self.log.keep

    def ranges(self) -> str:
        """The offsets of its blocks, for messages."""
        size, ends = self.log.size, dict[int, tuple[int, int]]()
        for partition, number in self.blocks:
            low, high = ends.get(partition, (number, number))
            ends[partition] = min(low, number), max(high, number)
        texts = [f"{low * size} to {(high + 1) * size - 1} of partition {p}" for p, (low, high) in sorted(ends.items())]
        more = [f"and {len(texts) - _MOST_RANGES} more"] if len(texts) > _MOST_RANGES else []
        return ", ".join(texts[:_MOST_RANGES] + more) or "none"


def read_blocks(server: RedisServer, model: str) -> StoredBlocks:
    """The blocks of a model.

    Raises:
        ConfigError: there are none of this model; the message names the models that have some.
        OriginUnavailable, PublicationError: Redis does not answer, or refuses.
        PublicationCorrupt: they are damaged.
    """
    if (found := find_blocks(server, model)) is None:
        known = ", ".join(models_with_blocks(server)) or "none"
        raise ConfigError(
            f"nothing to compare: model {model} at {server.name} has no figures; models that have some: {known}. "
            "Workers write them to the Redis of publish.url, under publish.model, once they have learned a block of "
            "offsets (compare.block)"
        )
    return found


def find_blocks(server: RedisServer, model: str) -> StoredBlocks | None:
    """The blocks of a model; None: there are none.

    Raises:
        ConfigError: it is not the name of a model.
        OriginUnavailable, PublicationError: Redis does not answer, or refuses.
        PublicationCorrupt: they are damaged.
    """
    where = RedisBlocks(server, model)
    if (found := where.read()) is None:
        return None
    log, contents = found
    blocks: dict[BlockPlace, BlockFigures] = {}
    try:
        for partition, of_partition in contents.items():
            for content in of_partition:
                figures = BlockFigures.decode(content)
                blocks[partition, figures.number] = figures
    except (ValueError, msgspec.MsgspecError) as exc:
        raise PublicationCorrupt(f"a block of {where.name} is damaged: {exc}") from exc
    return StoredBlocks(model, log, blocks)


def parse_last(text: str | None) -> tuple[float | None, int | None]:
    """The seconds or the number of blocks that "1h" or "100" stands for; None: all.

    Raises:
        ConfigError: it is neither.
    """
    if text is None:
        return None, None
    if re.fullmatch(r"[1-9][0-9]{0,8}", text, re.ASCII):
        return None, int(text)
    return parse_duration(text, "last"), None


class Comparison(NamedTuple):
    """Two models compared.

    Attributes:
        ours: blocks of the first model.
        theirs: blocks of the second one.
        places: the blocks that are compared, by their time.
        results: by label and slice.
    """

    ours: StoredBlocks
    theirs: StoredBlocks
    places: Sequence[BlockPlace]
    results: Sequence[LabelComparison]

    @property
    def times(self) -> tuple[float, float]:
        """Event times of the first and the last block; 0: samples have none."""
        blocks = self.ours.blocks
        return blocks[self.places[0]].time, blocks[self.places[-1]].time

    @property
    def is_windowed(self) -> bool:
        """Whether older blocks are gone, so that the interval is one of a window that moves."""
        return self.ours.is_full or self.theirs.is_full

    def to_json(self) -> dict[str, Any]:
        """For JSON, see docs/compare.md."""
        first, last = self.times
        names = self.ours.model, self.theirs.model
        return {
            "a": names[0],
            "b": names[1],
            "blocks": len(self.places),
            "from": first,
            "to": last,
            "dropped": self.is_windowed,
            "results": [result.to_json(*names) for result in self.results],
        }


def compare_blocks(
    ours: StoredBlocks,
    theirs: StoredBlocks,
    *,
    label: str | None = None,
    slice_of: str | None = None,
    last_seconds: float | None = None,
    last_blocks: int | None = None,
) -> Comparison:
    """Compares two models over the blocks that both have.

    Args:
        ours: blocks of the first model.
        theirs: blocks of the second one.
        label: the only label to compare; None: all that both have.
        slice_of: feature whose slices are compared, too.
        last_seconds: only blocks that end at most this many seconds of event time before the latest one.
        last_blocks: at most this many blocks, the latest ones.

    Raises:
        ConfigError: there is no such label, or no slice of the feature; or samples have no event time.
        NothingToCompare: the message says why.
    """
    _check_logs(ours, theirs)
    times = {place: ours.blocks[place].time for place in ours.blocks.keys() & theirs.blocks.keys()}
    # By time where there is one; else all partitions side by side, as they are learned.
    places = sorted(times, key=lambda place: (times[place], place[1], place[0]))
    if last_seconds is not None and places:
        latest = times[places[-1]]
        if not latest:
            raise ConfigError("last: samples have no event time (Schema.time); give a number of blocks instead")
        places = [place for place in places if times[place] >= latest - last_seconds]
    if last_blocks is not None:
        places = places[-last_blocks:]
    if not places:
        raise NothingToCompare(
            f"nothing to compare: no block in common. {ours.model} has offsets {ours.ranges()}; {theirs.model} has "
            f"{theirs.ranges()}. Wait until the one that is behind has learned a block that the other one has"
        )
    names = _groups(ours, theirs, places)
    if label is not None and (label, "") not in names:
        known = [name for name, of in names if not of]
        raise ConfigError(f"no label {label!r} that both models have: they have {', '.join(known) or 'none'}")
    if slice_of is not None and not any(of.partition("=")[0] == slice_of for _, of in names):
        known = sorted({of for _, of in names if of})
        raise ConfigError(
            f"no slice of {slice_of!r} that both models have: they have {', '.join(known) or 'none'} (compare.slices)"
        )
    wanted = [(name, of) for name, of in names if label in (None, name) and of.partition("=")[0] in ("", slice_of)]
    if not wanted:
        raise NothingToCompare(f"nothing to compare: {ours.model} and {theirs.model} have no label in common")
    return Comparison(ours, theirs, places, [_compare(ours, theirs, places, name, of) for name, of in wanted])


def _check_logs(ours: StoredBlocks, theirs: StoredBlocks) -> None:
    if (ours.log.topic, ours.log.id) != (theirs.log.topic, theirs.log.id):
        raise NothingToCompare(
            f"nothing to compare: {ours.model} learns from topic {ours.log.topic} ({ours.log.id or 'no id'}), and "
            f"{theirs.model} from topic {theirs.log.topic} ({theirs.log.id or 'no id'})"
        )
    if ours.log.size != theirs.log.size:
        raise NothingToCompare(
            f"nothing to compare: {ours.model} has blocks of {ours.log.size} offsets and {theirs.model} of "
            f"{theirs.log.size}; set compare.block of both to the same"
        )


def _groups(ours: StoredBlocks, theirs: StoredBlocks, places: Sequence[BlockPlace]) -> list[tuple[str, str]]:
    """Label and slice of all groups that both have, in their order."""
    of_both: list[dict[tuple[str, str], None]] = []
    for stored in (ours, theirs):
        of_both.append({(g.label, g.slice): None for place in places for g in stored.blocks[place].groups})
    return sorted((one for one in of_both[0] if one in of_both[1]), key=lambda one: (bool(one[1]), one))


def _compare(
    ours: StoredBlocks, theirs: StoredBlocks, places: Sequence[BlockPlace], label: str, slice_of: str
) -> LabelComparison:
    pairs = []
    for place in places:
        pair = [_group(stored.blocks[place], label, slice_of) for stored in (ours, theirs)]
        if pair[0] is not None and pair[1] is not None and min(pair[0].weight, pair[1].weight) > 0:
            pairs.append((pair[0], pair[1]))
    is_binary = all(group.binary for pair in pairs for group in pair)
    metrics = _metrics([a for a, _ in pairs], is_binary), _metrics([b for _, b in pairs], is_binary)
    means = np.array([a.loss / a.weight - b.loss / b.weight for a, b in pairs], np.float64)
    weights = np.array([(a.weight + b.weight) / 2 for a, b in pairs], np.float64)
    loss = "log loss" if is_binary else "squared error"
    interval = confidence_sequence(means, weights)
    return LabelComparison(label, slice_of, loss, len(pairs), *metrics, interval, means, weights)


def _group(block: BlockFigures, label: str, slice_of: str) -> GroupFigures | None:
    return next((group for group in block.groups if (group.label, group.slice) == (label, slice_of)), None)


def _metrics(groups: Sequence[GroupFigures], is_binary: bool) -> Metrics:
    sums = Sums(is_binary, BLOCK_BINS)
    for group in groups:
        group.add_to(sums)
    return sums.metrics()


class ComparisonReader:
    """Comparisons of the models whose blocks are in a Redis. Thread-safe.

    Every method may raise OriginUnavailable, PublicationError and PublicationCorrupt.

    Args:
        server: the Redis.
    """

    def __init__(self, server: RedisServer) -> None:
        self._server = server

    def others(self, model: str) -> list[str]:
        """Names of the models that can be compared with a model: they have blocks of the same log. Reads all keys."""
        of = RedisBlocks(self._server, model).log()
        if of is None:
            return []
        logs = {name: RedisBlocks(self._server, name).log() for name in models_with_blocks(self._server)}
        return [name for name, log in logs.items() if log and name != model and log._replace(keep=of.keep) == of]

    def compare(
        self, model: str, other: str, *, label: str | None, slice_of: str | None, last: str | None, points: int
    ) -> dict[str, Any]:
        """Two models compared, as `Comparison.to_json`; each result with its `course` at `points` points.

        Raises:
            ConfigError: it is one model, or there is no such label, slice or time.
            NothingToCompare: the message says why.
        """
        seconds, blocks = parse_last(last)
        if model == other:
            raise ConfigError(f"{model!r} is the model itself: name another one to compare it with")
        found = [find_blocks(self._server, name) for name in (model, other)]
        for name, one in zip((model, other), found, strict=True):
            if one is None:
                raise NothingToCompare(
                    f"nothing to compare: {name} has no figures. Workers write them once they have learned a block of "
                    "offsets (compare.block)"
                )
        ours, theirs = (one for one in found if one is not None)
        compared = compare_blocks(
            ours, theirs, label=label, slice_of=slice_of, last_seconds=seconds, last_blocks=blocks
        )
        answer = compared.to_json()
        for result, described in zip(compared.results, answer["results"], strict=True):
            described["course"] = result.course(points)
        return answer
