"""Acts on what is proposed: other numbers of shards or workers, within limits, and not too often."""

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from streamtrain.errors import StreamtrainError
from streamtrain.logs import counted
from streamtrain.settings.groups import ScaleSettings

logger = logging.getLogger(__name__)


class Numbers(NamedTuple):
    """How many there are.

    Attributes:
        shards: of shards.
        workers: of workers.
    """

    shards: int
    workers: int


class Autoscaler:
    """Follows proposals. For one thread.

    More are started at once, unless something was changed within the cool-down; fewer are left once fewer have been
    proposed for as long as that.

    Args:
        settings: limits.
        act: gives the service other numbers.
        report: is given a sentence about what is done.
        now: monotonic seconds.
    """

    def __init__(
        self,
        settings: ScaleSettings,
        act: Callable[[Numbers], object],
        report: Callable[[str], object],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._act, self._report, self._now = settings, act, report, now
        self._most = os.cpu_count() or 1
        self._not_before = now()
        self._fewer_since: float | None = None

    def follow(self, proposal: Mapping[str, Any] | None, numbers: Numbers) -> None:
        """Acts on a proposal, as a cluster's status has it, if its time has come."""
        now, wanted = self._now(), numbers if proposal is None else self._within_limits(proposal)
        more = Numbers(*map(max, wanted, numbers))
        if wanted == more:  # fewer of nothing
            self._fewer_since = None
        elif self._fewer_since is None:
            self._fewer_since = now
        is_long = self._fewer_since is not None and now - self._fewer_since >= self._settings.cooldown
        following = wanted if is_long else more
        if following == numbers or now < self._not_before or proposal is None:
            return
        self._fewer_since = None
        self._report(f"{_said(following)} instead of {_said(numbers)} (scale.auto): {'; '.join(proposal['why'])}")
        try:
            self._act(following)
        except (StreamtrainError, OSError) as exc:
            self._report(f"still {_said(numbers)}: {exc}")
        self._not_before = self._now() + self._settings.cooldown

    def _within_limits(self, proposal: Mapping[str, Any]) -> Numbers:
        of = self._settings
        return Numbers(
            _between(proposal["shards"], of.min_shards, of.max_shards or self._most),
            _between(proposal["workers"], of.min_workers, of.max_workers or self._most),
        )


def _between(number: int, least: int, most: int) -> int:
    return max(least, min(number, most))


def _said(numbers: Numbers) -> str:
    named = zip(numbers, numbers._fields, strict=True)
    return " and ".join(counted(many, name.removesuffix("s")) for many, name in named)
