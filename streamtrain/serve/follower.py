"""RegistryUpdater: keeps a registry up to date with its origin, in threads of its own; serving survives outages."""

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from streamtrain.errors import OriginUnavailable, PublicationCorrupt, PublicationError, PublicationMissing
from streamtrain.periodic import Backoff, PeriodicTask
from streamtrain.serve.leases import VersionLeases
from streamtrain.serve.registry import HEAD, Registry, Version
from streamtrain.serve.selection import Promoter, Selection
from streamtrain.store.publication import DecidingOrigin, Origin

V = TypeVar("V", int, Version)

logger = logging.getLogger(__name__)

_LONGEST_PAUSE = 30.0
_EARLY_SECONDS = 60.0  # in which nothing has to be published yet
_LONGEST_PAUSE_WHILE_AWAY = 5.0  # to ask whether it is back costs little


def _backoff(exc: Exception, every: float) -> Backoff:
    """Pauses after a failed load."""
    longest = _LONGEST_PAUSE_WHILE_AWAY if isinstance(exc, OriginUnavailable) else _LONGEST_PAUSE
    return Backoff(every, every if isinstance(exc, PublicationMissing) else max(longest, every))


def _named(version: Version) -> str:
    return version if version == HEAD else f"version {version}"


class _Retry:
    """When to load again what could not be loaded.

    Args:
        every: seconds of the first pause.
        now: monotonic clock in seconds.
        early: level of the line that says that nothing has been published yet.

    Attributes:
        trouble: why it failed the last time; "": it has not.
    """

    def __init__(self, every: float, now: Callable[[], float], early: int = logging.INFO) -> None:
        self.trouble = ""
        self._every, self._now, self._early = every, now, early
        self._pause, self._began, self._due = 0.0, now(), now()
        self._level = 0  # of the line that said so

    @property
    def is_due(self) -> bool:
        return self._now() >= self._due

    def failed(self, subject: str, exc: PublicationError, *, may_come: bool = False) -> None:
        """Takes note of a failure; what may yet be published is a warning only if it has not been for a while."""
        trouble = f"{subject} failed: {exc}"
        self._level = 0 if trouble != self.trouble else self._level
        is_early = may_come and isinstance(exc, PublicationMissing) and self._now() - self._began < _EARLY_SECONDS
        level = self._early if is_early else logging.WARNING
        if level > self._level:
            logger.log(level, "%s", f"waiting for the first publication: {exc}" if is_early else trouble)
        self.trouble, self._level = trouble, level
        self._pause = _backoff(exc, self._every).after(self._pause)
        self._due = self._now() + self._pause


class _OriginTask(PeriodicTask):
    """One thread that asks the origin, and for how long it has not been answered."""

    def __init__(
        self, name: str, run: Callable[[], float | None], subject: str, every: float, now: Callable[[], float]
    ) -> None:
        super().__init__(
            name, run, every, subject=subject, backoff=lambda exc: _backoff(exc, every), observe=self._observe_answer
        )
        self._now, self._answered, self._is_away = now, now(), False

    @property
    def stale_seconds(self) -> float:
        silent = self._now() - self._answered
        return silent if self._is_away else 0.0

    def _observe_answer(self, error: Exception | None) -> None:
        if not isinstance(error, OriginUnavailable):
            self._answered = self._now()
        self._is_away = isinstance(error, OriginUnavailable)  # last: who sees how stale it is also sees why


class RegistryUpdater:
    """Serves what is wanted as soon as it can be loaded, follows the head, and loads labelled versions.

    One thread polls labels and loads versions; another follows the head, independently of loads.

    Args:
        registry: that is updated.
        serve: a version or "head" that is pinned; None: what is labelled or asked for, see `Selection`.
        promoter: see `Selection`.
        fallback: where the head is loaded from if the origin has none, or is unreachable, at startup.
        leases: on the loaded versions; started and closed with the updater.
        every: seconds between polls of labels, and of the first pause after a failure.
        now: monotonic clock in seconds.

    Attributes:
        registry: as given.
        selection: of what is served.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        serve: Version | None = None,
        promoter: Promoter | None = None,
        fallback: Origin | None = None,
        leases: VersionLeases | None = None,
        every: float = 1.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.selection = Selection(registry, serve, promoter)
        self.registry = registry
        self._fallback = fallback
        self._leases = leases
        self._every = every
        self._now = now
        self._falls_back = False  # what is loaded as the head is of the fallback
        self._head_damaged = ""  # why the origin's cannot be loaded, where it has one
        self._head_lost = False  # the loaded head cannot be followed: it must be loaded again
        self._retries: dict[Version, _Retry] = {}  # of what cannot be loaded
        self._fallback_retry = _Retry(every, now, logging.DEBUG)  # the head's says so
        self._versions = _OriginTask("follow-versions", self._keep_versions, "following labels", every, now)
        self._head = _OriginTask("follow-head", self._keep_head, "following the head", every, now)

    @property
    def stale_seconds(self) -> float:
        """Seconds since the origin last answered; 0 while it answers."""
        return max(self._versions.stale_seconds, self._head.stale_seconds)

    @property
    def trouble(self) -> str:
        """Why what the origin has is not served, a sentence each; "": it is."""
        lost = "the store has lost labels or traffic: what was decided before is served on" if self.has_lost else ""
        retries = [retry.trouble for retry in [*self._retries.values()]]
        troubles = [self._versions.trouble, self._head.trouble, lost, *retries]
        return "; ".join(dict.fromkeys(trouble for trouble in troubles if trouble))

    @property
    def has_lost(self) -> bool:
        """Whether the origin has lost what was decided to be served."""
        origin = self.registry.origin
        return isinstance(origin, DecidingOrigin) and origin.has_lost_decisions

    @property
    def fault(self) -> str:
        """Why what is served is not what should be, as the origin has lost some of it, in a sentence; "": it is."""
        served = self.registry.served
        if served is None:
            return ""
        if self._falls_back and served is self.registry.find(HEAD) and self._head_damaged:
            return f"{self._head_damaged}; serving an older publication, all that could be loaded"
        return served.loaded.fault

    def start(self) -> None:
        """Begins, and returns at once."""
        for one in (self._leases, self._versions, self._head):
            if one is not None:
                one.start()

    def close(self) -> None:
        """Ends the threads; waits for a load that they may be at. May be called twice."""
        for task in (self._versions, self._head):
            task.stop()
        for one in (self._versions, self._head, self._leases):  # what is held is let go when nothing is loaded any more
            if one is not None:
                one.close()

    def _keep_versions(self) -> None:
        try:
            pending = self.selection.pending()
            labelled = [one for one in self._labelled() if self.registry.find(one) is None]
            loaded = self.registry.resident.items()
            broken = [one for one, predictor in loaded if one != HEAD and predictor.loaded.fault]
            for gone in self._retries.keys() - {pending, *labelled, *broken}:
                del self._retries[gone]
            if pending is not None:
                self._try(pending, self.selection.apply)
            for version in labelled:
                self._try(version, self.registry.keep)
            for version in broken:
                self._try(version, self.registry.reload)
        finally:
            self._fall_back()

    def _labelled(self) -> list[int]:
        """Versions to load for their labels, in addition to the served one: the lowest ones, up to the limit."""
        served = self.registry.served_version
        room = self.registry.limit - (served not in (None, HEAD))
        labelled = {*self.registry.labels.values(), *self.registry.requested}
        return sorted(one for one in labelled if one != served)[:room]

    def _try(self, version: V, load: Callable[[V], object]) -> None:
        """Loads a version; a refusal does not delay the others."""
        retry = self._retries.get(version)
        if retry is not None and not retry.is_due:
            return
        try:
            load(version)
        except OriginUnavailable:
            raise
        except PublicationError as exc:
            retry = self._retries.setdefault(version, _Retry(self._every, self._now))
            retry.failed(f"loading {_named(version)}", exc, may_come=version == HEAD)
        else:
            self._retries.pop(version, None)

    def _fall_back(self) -> None:
        fallback = self._fallback
        if fallback is None or self.registry.served is not None or not self._fallback_retry.is_due:
            return
        try:
            self.registry.promote(HEAD, fallback)
            self._head_lost = self._falls_back = True
        except PublicationError as exc:
            self._fallback_retry.failed(f"falling back to {fallback.name}", exc, may_come=True)

    def _keep_head(self) -> float:
        """Follows for up to `every` seconds; returns the seconds to wait."""
        registry = self.registry
        if registry.find(HEAD) is None:
            return self._every
        if self._head_lost:
            self._reload_head()
        try:
            registry.follow_head(self._every)
        except OriginUnavailable:
            raise
        except PublicationError:
            self._head_lost = True
            raise
        return 0.0

    def _reload_head(self) -> None:
        try:
            self.registry.reload(HEAD)
        except PublicationCorrupt as exc:
            self._head_damaged = str(exc)
            raise
        self._head_lost = self._falls_back = False
        self._head_damaged = ""
