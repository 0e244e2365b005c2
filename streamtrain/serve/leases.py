"""Version leases: keep the versions that a server has loaded from being deleted."""

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from streamtrain.errors import OriginUnavailable, PublicationCorrupt, PublicationError
from streamtrain.periodic import PeriodicTask

logger = logging.getLogger(__name__)

RENEWALS = 10  # within the duration of a lease


class LeaseStore(Protocol):
    """Stores the leases of versions. Thread-safe. Every method may raise OriginUnavailable, and PublicationError."""

    def acquire(self, version: int, server: str, seconds: float) -> None:
        """Acquires or renews a lease on a version for `seconds`.

        Raises:
            PublicationCorrupt: there is no such version.
        """

    def release(self, version: int, server: str) -> None:
        """Releases a lease."""


class VersionLeases:
    """The leases of one server, renewed by a thread of its own: independently of requests and loads.

    Args:
        store: of the leases.
        server: its name, different from all others'.
        seconds: that a lease lasts without renewal, for example after the server is killed.
    """

    def __init__(self, store: LeaseStore, server: str, seconds: float = 300.0) -> None:
        self._store, self._server, self._seconds = store, server, seconds
        self._resident: frozenset[int] = frozenset()
        self._resident_lock = threading.Lock()  # held briefly, unlike the other: swaps must not wait for the store
        self._loading = Counter[int]()
        self._held: set[int] = set()
        self._lock = threading.Lock()
        self._trouble = ""
        self._task = PeriodicTask("version-leases", self._renew, seconds / RENEWALS, subject="renewing version leases")

    @contextmanager
    def loading(self, version: int) -> Iterator[None]:
        """Leases a version while it is loaded.

        Raises:
            OriginUnavailable: the store does not answer.
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
        """Takes note of the versions that are loaded now; returns at once."""
        with self._resident_lock:
            self._resident = versions
        self._task.wake()

    def start(self) -> None:
        """Starts to renew."""
        self._task.start()

    def close(self) -> None:
        """Releases all leases. May be called twice."""
        self._task.close()
        with self._resident_lock:
            self._resident = frozenset()
        self._release()

    def _renew(self) -> None:
        with self._lock:
            loading = {one for one, count in self._loading.items() if count}
        for version in self._resident | loading:
            try:
                self._hold(version)
            except PublicationCorrupt as exc:  # deleted while the store was unreachable; its rows are loaded
                self._log(str(exc))
                with self._resident_lock:
                    self._resident -= {version}
            except OriginUnavailable as exc:
                self._log(str(exc))
                return
        self._release()

    def _hold(self, version: int) -> None:
        try:
            self._store.acquire(version, self._server, self._seconds)
        except (OriginUnavailable, PublicationCorrupt):
            raise
        except PublicationError as exc:  # a server with read-only access serves, too
            self._log(str(exc))
        else:
            with self._lock:
                self._held.add(version)
            self._trouble = ""

    def _release(self) -> None:
        with self._lock:  # no load may begin in the meantime
            for version in [one for one in self._held - self._resident if not self._loading[one]]:
                try:
                    self._store.release(version, self._server)
                except PublicationError as exc:  # the lease expires by itself
                    self._log(str(exc))
                self._held.remove(version)

    def _log(self, trouble: str) -> None:
        if trouble != self._trouble:
            logger.warning("cannot renew the leases of loaded versions: %s", trouble)
        self._trouble = trouble
