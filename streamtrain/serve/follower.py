"""Follower: the thread that keeps a registry with its origin, and serving while the origin is away."""

import logging
import threading
import time
from collections.abc import Callable

from streamtrain.errors import OriginUnavailable, PublicationError
from streamtrain.serve.registry import HEAD, Registry, Version
from streamtrain.store.origin import Origin

logger = logging.getLogger(__name__)

_LONGEST_PAUSE = 30.0


class Follower:
    """Serves a version or the head as soon as it can be had, follows the head, and learns of labels.

    Args:
        registry: that is kept up.
        serve: what is served at first.
        fallback: where the head is loaded from if the origin has none, or is away, when serving begins.
        every: seconds between looks at labels, and after which what failed is tried again, at first.
        now: seconds of a clock that never goes back.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        serve: Version = HEAD,
        fallback: Origin | None = None,
        every: float = 1.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._serve = serve
        self._fallback = fallback
        self._every = every
        self._now = now
        self._pause = every
        self._labels_at = -every
        self._head_lost = False  # what is loaded as the head cannot be followed: it must be loaded anew
        self._answered = now()
        self._said = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follow", daemon=True)

    @property
    def stale_seconds(self) -> float:
        """For how long the origin has not answered; 0: it does."""
        silent = self._now() - self._answered
        return silent if self._said else 0.0

    @property
    def trouble(self) -> str:
        """Why what the origin has is not served, in one sentence; "": it is."""
        return self._said

    def start(self) -> None:
        """Begins, and returns at once."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; waits for a load that it may be at. May be called twice."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._keep_up()
            except PublicationError as exc:
                self._failed(exc)
            except Exception as exc:  # serving goes on without being told of news, and says so
                logger.exception("the follower of %s failed", self._registry.origin.name)
                self._failed(PublicationError(f"{type(exc).__name__}: {exc}"))
            else:
                self._answered, self._pause = self._now(), self._every
                if self._said:
                    logger.info("%s is followed again", self._registry.origin.name)
                self._said = ""

    def _keep_up(self) -> None:
        registry = self._registry
        if registry.served is None:
            registry.promote(self._serve)
        if self._head_lost:
            registry.reload_head(registry.origin)
            if self._serve != HEAD:
                registry.promote(self._serve)
            self._head_lost = False
        if self._now() - self._labels_at >= self._every:
            registry.refresh_labels()
            self._labels_at = self._now()
        if registry.find(HEAD) is None:
            self._closing.wait(self._every)
            return
        try:
            registry.follow_head(self._every)
        except OriginUnavailable:
            raise
        except PublicationError:
            self._head_lost = True
            raise

    def _failed(self, exc: PublicationError) -> None:
        """Says once what is wrong, serves what can be had instead, and waits before the next attempt."""
        if not isinstance(exc, OriginUnavailable):
            self._answered = self._now()
        if str(exc) != self._said:
            logger.warning("%s; what is loaded is served on", exc)
        self._said = str(exc) or type(exc).__name__
        if self._registry.served is None and self._fallback is not None:
            try:
                self._registry.promote(HEAD, self._fallback)
                self._head_lost = True
            except PublicationError as why:
                logger.warning("the fallback %s cannot be served: %s", self._fallback.name, why)
        self._closing.wait(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
