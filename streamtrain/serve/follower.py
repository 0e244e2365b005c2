"""Follower: keeps a registry with its origin, and serving while the origin is away, in threads of its own."""

import time
from collections.abc import Callable
from typing import TypeVar

from streamtrain.errors import OriginUnavailable, PublicationError
from streamtrain.serve.holds import Holds
from streamtrain.serve.loop import Loop, Retry
from streamtrain.serve.registry import HEAD, Registry, Version
from streamtrain.serve.selection import Promoter, Selection
from streamtrain.store.origin import Origin

V = TypeVar("V", int, Version)


class Follower:
    """Serves what is to be served as soon as it can be had, follows the head, and loads what labels name.

    One thread looks at labels and loads versions; another follows the head, which does not wait for that.

    Args:
        registry: that is kept up.
        serve: a version or "head" that is pinned; None: what is labelled or asked for, see `Selection`.
        promoter: see `Selection`.
        fallback: where the head is loaded from if the origin has none, or is away, when serving begins.
        holds: of the versions that are loaded; begun and ended with the follower.
        every: seconds between looks at labels, and after which what failed is tried again, at first.
        now: seconds of a clock that never goes back.

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
        holds: Holds | None = None,
        every: float = 1.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.selection = Selection(registry, serve, promoter)
        self.registry = registry
        self._fallback = fallback
        self._holds = holds
        self._every = every
        self._now = now
        self._head_lost = False  # what is loaded as the head cannot be followed: it must be loaded anew
        self._retries: dict[Version, Retry] = {}  # of what cannot be loaded
        self._fallback_retry = Retry(every, now)
        name = registry.origin.name
        self._versions = Loop("follow-versions", name, self._keep_versions, every, now)
        self._head = Loop("follow-head", name, self._keep_head, every, now)

    @property
    def stale_seconds(self) -> float:
        """For how long the origin has not answered; 0: it does."""
        return max(self._versions.stale_seconds, self._head.stale_seconds)

    @property
    def trouble(self) -> str:
        """Why what the origin has is not served, a sentence each; "": it is."""
        found = [self._versions.trouble, self._head.trouble, *(one.trouble for one in [*self._retries.values()])]
        return "; ".join(dict.fromkeys(one for one in found if one))

    def start(self) -> None:
        """Begins, and returns at once."""
        for one in (self._holds, self._versions, self._head):
            if one is not None:
                one.start()

    def close(self) -> None:
        """Ends the threads; waits for a load that they may be at. May be called twice."""
        for loop in (self._versions, self._head):
            loop.closing.set()
        for one in (self._versions, self._head, self._holds):  # what is held is let go when nothing is loaded any more
            if one is not None:
                one.close()

    def _keep_versions(self) -> None:
        try:
            missing = self.selection.missing()
            labelled = [one for one in self._labelled() if self.registry.find(one) is None]
            for gone in self._retries.keys() - {missing, *labelled}:
                del self._retries[gone]
            if missing is not None:
                self._try(missing, self.selection.keep_up)
            for version in labelled:
                self._try(version, self.registry.keep)
        finally:
            self._fall_back()
        self._versions.closing.wait(self._every)

    def _labelled(self) -> list[int]:
        """What is loaded for its label beside what is served: the lowest versions, if they are too many."""
        served = self.registry.served_version
        room = self.registry.limit - (served not in (None, HEAD))
        return sorted({one for one in self.registry.labels.values() if one != served})[:room]

    def _try(self, version: V, load: Callable[[V], object]) -> None:
        """Loads what may be refused: others are not to wait for it."""
        retry = self._retries.get(version)
        if retry is not None and not retry.is_due:
            return
        try:
            load(version)
        except OriginUnavailable:
            raise
        except PublicationError as exc:
            self._retries.setdefault(version, Retry(self._every, self._now)).failed(exc)
        else:
            self._retries.pop(version, None)

    def _fall_back(self) -> None:
        fallback = self._fallback
        if fallback is None or self.registry.served is not None or not self._fallback_retry.is_due:
            return
        try:
            self.registry.promote(HEAD, fallback)
            self._head_lost = True
        except PublicationError as exc:
            self._fallback_retry.failed(PublicationError(f"the fallback {fallback.name} cannot be served: {exc}"))

    def _keep_head(self) -> None:
        registry = self.registry
        if registry.find(HEAD) is None:
            self._head.closing.wait(self._every)
            return
        if self._head_lost:
            registry.reload_head(registry.origin)
            self._head_lost = False
        try:
            registry.follow_head(self._every)
        except OriginUnavailable:
            raise
        except PublicationError:
            self._head_lost = True
            raise
