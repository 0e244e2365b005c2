"""Holds: keep the versions that a server has loaded from being deleted."""

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from streamtrain.errors import OriginUnavailable, PublicationCorrupt, PublicationError

logger = logging.getLogger(__name__)

RENEWALS = 10  # within the time that a hold lasts


class Holder(Protocol):
    """Where versions are held. Thread-safe. Every method may raise OriginUnavailable, and PublicationError."""

    def hold(self, version: int, server: str, seconds: float) -> None:
        """Keeps a version for so long; again to prolong.

        Raises:
            PublicationCorrupt: there is no such version.
        """

    def release(self, version: int, server: str) -> None:
        """Ends a hold."""


class Holds:
    """The holds of one server, prolonged by a thread of its own: no request, and no load, waits for it or delays it.

    Args:
        holder: where.
        server: its name, different from all others'.
        seconds: that a hold lasts if it is not prolonged, as when the server is killed.
    """

    def __init__(self, holder: Holder, server: str, seconds: float = 300.0) -> None:
        self._holder, self._server, self._seconds = holder, server, seconds
        self._resident: frozenset[int] = frozenset()
        self._loading = Counter[int]()
        self._held: set[int] = set()
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._closing = False
        self._trouble = ""
        self._thread = threading.Thread(target=self._run, name="holds", daemon=True)

    @contextmanager
    def loading(self, version: int) -> Iterator[None]:
        """Holds a version while it is loaded.

        Raises:
            OriginUnavailable: it cannot be said that it is held.
            PublicationCorrupt: there is no such version.
        """
        with self._lock:
            self._loading[version] += 1
        try:
            self._hold(version)
            yield
        finally:
            with self._lock:
                self._loading[version] -= 1

    def changed(self, versions: frozenset[int]) -> None:
        """Other versions are loaded now; returns at once."""
        self._resident = versions
        self._news.set()

    def start(self) -> None:
        """Begins to prolong."""
        self._thread.start()

    def close(self) -> None:
        """Ends all holds. May be called twice."""
        self._closing = True
        self._news.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            self._renew()
            self._news.wait(self._seconds / RENEWALS)
            self._news.clear()
        self._resident = frozenset()
        self._release()

    def _renew(self) -> None:
        with self._lock:
            loading = {one for one, count in self._loading.items() if count}
        for version in self._resident | loading:
            try:
                self._hold(version)
            except PublicationCorrupt as exc:  # it was deleted while nobody could hold it; its rows are here
                self._say(str(exc))
                self._resident -= {version}
            except OriginUnavailable as exc:
                self._say(str(exc))
                return
        self._release()

    def _hold(self, version: int) -> None:
        try:
            self._holder.hold(version, self._server, self._seconds)
        except (OriginUnavailable, PublicationCorrupt):
            raise
        except PublicationError as exc:  # a server that may only read serves, too
            self._say(str(exc))
        else:
            with self._lock:
                self._held.add(version)
            self._trouble = ""

    def _release(self) -> None:
        with self._lock:  # so that nobody begins to load one meanwhile
            for version in [one for one in self._held - self._resident if not self._loading[one]]:
                try:
                    self._holder.release(version, self._server)
                except PublicationError as exc:  # it ends by itself
                    self._say(str(exc))
                self._held.remove(version)

    def _say(self, trouble: str) -> None:
        if trouble != self._trouble:
            logger.warning("versions that are loaded are not held: %s", trouble)
        self._trouble = trouble
