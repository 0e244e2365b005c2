"""Which publication a process serves: chosen by a label for all servers, by a setting, or by requests."""

import threading
from collections.abc import Container
from typing import Protocol

from streamtrain.errors import Pinned, PublicationError, PublicationMissing, Superseded
from streamtrain.serve.registry import HEAD, Registry, Version
from streamtrain.store.publication import ANY, PROD, Publication


class Promoter(Protocol):
    """Chooses what all servers of a model serve. Thread-safe.

    Every method may raise OriginUnavailable, PublicationError, and Superseded if `expected` is not what is served.
    Versions are numbers; None: the head.
    """

    def promote(
        self, version: int | None, who: str, why: str = "", *, force: bool = False, expected: int | None = ANY
    ) -> int | None:
        """Has all servers serve a version or the head; returns it.

        Raises:
            GateClosed: the quality gate holds it back; `force` overrides that.
        """

    def rollback(self, who: str, why: str = "", *, expected: int | None = ANY) -> int | None:
        """Has all servers serve the previous version again; returns it. Raises NothingBefore."""

    def has_demoted(self, version: int, who: str) -> bool:
        """Whether `who` has rolled all servers back from a version before."""


class Selection:
    """Serves one of a registry's publications. Thread-safe.

    Args:
        registry: of publications.
        pinned: number of the only version to serve, or "head"; None: the version labelled "prod", else the head.
        promoter: sets that label, which is then followed; None: the label applies at start, then requests to this
            process.
    """

    def __init__(self, registry: Registry, pinned: Version | None = None, promoter: Promoter | None = None) -> None:
        self.registry = registry
        self._pinned = pinned
        self._promoter = promoter
        self._started = False  # whether the first version has been served
        self._wanted: Version | None = None
        self._flipping = threading.RLock()  # held while label and served version change together, never during a load

    @property
    def wanted(self) -> Version | None:
        """What should be served, as last known."""
        return self._wanted

    @property
    def is_pinned(self) -> bool:
        """Whether a setting fixes what is served."""
        return self._pinned is not None

    def pending(self) -> Version | None:
        """What should be served and is not yet; None: it is.

        Raises:
            OriginUnavailable: the origin does not answer.
        """
        wanted = self._refresh()
        if wanted != self.registry.served_version:
            return wanted
        self._started = self._started or wanted is not None
        return None

    def apply(self, wanted: Version) -> None:
        """Serves a pending version, unless another one is wanted once it is loaded.

        Raises:
            OriginUnavailable, PublicationError: it cannot be loaded. What is served stays the same.
        """
        predictor = self.registry.prepare(wanted)
        with self._flipping:
            if self._refresh() == wanted:
                self.registry.serve(wanted, predictor)
                self._started = True

    def promote(
        self, version: Version, who: str, why: str = "", *, force: bool = False, expected: int | None = ANY
    ) -> Publication:
        """Serves a version, or the head; with a promoter, on all servers.

        It is loaded here before anything changes.

        Args:
            version: number, or "head".
            who: for the history.
            why: for the history.
            force: whether to override the quality gate.
            expected: nothing changes unless all servers serve this now (None: the head); ANY: unconditionally.

        Raises:
            Pinned: a setting fixes what is served.
            Superseded: `expected` is not what is served.
            GateClosed, OriginUnavailable, PublicationError: it cannot be served. Nothing has changed.
        """
        self._check()
        predictor = self.registry.prepare(version)
        with self._flipping:
            if self._promoter is not None:
                self._promoter.promote(None if version == HEAD else version, who, why, force=force, expected=expected)
            self._started, self._wanted = True, version
            return self.registry.serve(version, predictor)

    def rollback(self, who: str, why: str = "", *, expected: int | None = ANY) -> Publication:
        """Serves the previous version again; with a promoter, on all servers. Arguments and errors as for `promote`.

        Raises:
            NothingBefore: there is no previous version.
        """
        self._check()
        if self._promoter is None:
            publication = self.registry.rollback()
            self._wanted = self.registry.served_version
            return publication
        with self._flipping:
            was = self._refresh()
            number = self._promoter.rollback(who, why, expected=expected)
            version = self._wanted = HEAD if number is None else number
            if loaded := self.registry.find(version):
                return self.registry.serve(version, loaded, "rollback")
        try:
            predictor = self.registry.prepare(version)
        except PublicationError as exc:
            self._restore(self._promoter, version, was, f"{version} cannot be served: {exc}")
            raise
        with self._flipping:
            return self.registry.serve(version, predictor, "rollback")

    def demote(self, bad: Version, others: Container[Version], who: str, why: str) -> Publication | None:
        """Serves something else than a bad version, on all servers or, if this one is pinned, on it alone.

        A version is replaced by the one served before; the head, which has none, by the newest loaded version.

        Args:
            bad: what is served.
            others: versions that are bad as well.
            who: for the history.
            why: for the history.

        Returns:
            What is served instead; None: `bad` is no longer what should be served, or `who` has demoted it before:
            promoting it again is taken as intent.

        Raises:
            OriginUnavailable, PublicationError: as for `rollback`.
        """
        for_all = self._promoter is not None and not self.is_pinned
        if (self._refresh() if for_all else self.registry.served_version) != bad:
            return None
        try:  # another server may have done so since
            if for_all and bad != HEAD and self._promoter is not None:
                if self._promoter.has_demoted(bad, who):
                    return None
                return self.rollback(who, why, expected=bad)
            version = self._replacement(bad, others)
            if for_all:
                return self.promote(version, who, why, force=True, expected=None)
        except Superseded:
            return None
        self._wanted = version
        return self.registry.serve(version, self.registry.prepare(version), "rollback")

    def _replacement(self, bad: Version, others: Container[Version]) -> Version:
        registry = self.registry
        loaded = sorted(one for one in registry.resident if isinstance(one, int))
        served = registry.history[:-1] if bad != HEAD else []
        good = [one for one in (*loaded, *served) if one != bad and one not in others]
        if not good:
            raise PublicationMissing(f"no good version is loaded to replace {bad}")
        return good[-1]

    def _restore(self, promoter: Promoter, version: Version, was: Version | None, why: str) -> None:
        """Resets the label to `was`, unless it has changed since."""
        with self._flipping:
            if was is not None and self._refresh() == version:
                promoter.promote(None if was == HEAD else was, "serving", why, force=True)
                self._wanted = was

    def _check(self) -> None:
        if self.is_pinned:
            what = "the head" if self._pinned == HEAD else f"version {self._pinned}"
            raise Pinned(f'this server is pinned to {what}: set serve.version to "prod" to follow promotions')

    def _refresh(self) -> Version | None:
        """What should be served; None: whatever is served already."""
        labels = self.registry.refresh_labels()
        if self._started and (self.is_pinned or self._promoter is None):
            return None
        self._wanted = labels.get(PROD, HEAD) if self._pinned is None else self._pinned
        return self._wanted
