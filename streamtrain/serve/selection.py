"""Selection: which publication a process serves, and who says so: a label for all servers, a setting, or requests."""

import threading
from collections.abc import Container
from typing import Protocol

from streamtrain.errors import PublicationError, Superseded
from streamtrain.serve.registry import HEAD, PublicationMissing, Registry, Version
from streamtrain.store.origin import Publication
from streamtrain.store.redis_scripts import ANY, PROD


class Pinned(PublicationError):
    """This server serves what its setting says."""


class Promoter(Protocol):
    """Says for all servers of a model what they serve. Thread-safe.

    Every method may raise OriginUnavailable, PublicationError: it is refused, and Superseded: not `expected` is served.
    Versions are numbers; None: the head.
    """

    def promote(
        self, version: int | None, who: str, why: str = "", *, force: bool = False, expected: int | None = ANY
    ) -> int | None:
        """From now on a version, or the head; returns it.

        Raises:
            GateClosed: it is worse than what is served; `force` has it served even so.
        """

    def rollback(self, who: str, why: str = "", *, expected: int | None = ANY) -> int | None:
        """From now on what it was before; returns it. Raises NothingBefore."""


class Selection:
    """Serves one of a registry's publications. Thread-safe.

    Args:
        registry: of publications.
        pinned: a version's number, or "head": that and nothing else; None: the version labelled "prod", else the head.
        promoter: sets that label, which is then followed; None: the label counts at first, then what is asked for here.
    """

    def __init__(self, registry: Registry, pinned: Version | None = None, promoter: Promoter | None = None) -> None:
        self.registry = registry
        self._pinned = pinned
        self._promoter = promoter
        self._begun = False  # whether what is to be served at first has been
        self._wanted: Version | None = None
        self._flipping = threading.RLock()  # between the label and what is served; never held while anything is loaded

    @property
    def wanted(self) -> Version | None:
        """What should be served, as far as is known."""
        return self._wanted

    @property
    def is_pinned(self) -> bool:
        """Whether a setting says what is served."""
        return self._pinned is not None

    def missing(self) -> Version | None:
        """What should be served and is not; None: it is.

        Raises:
            OriginUnavailable: the origin does not answer.
        """
        wanted = self._refresh()
        if wanted != self.registry.served_version:
            return wanted
        self._begun = self._begun or wanted is not None
        return None

    def keep_up(self, wanted: Version) -> None:
        """Serves what is missing, if it still is once it is loaded.

        Raises:
            OriginUnavailable, PublicationError: it cannot be loaded. What was served, still is.
        """
        predictor = self.registry.prepare(wanted)
        with self._flipping:
            if self._refresh() == wanted:
                self.registry.serve(wanted, predictor)
                self._begun = True

    def promote(
        self, version: Version, who: str, why: str = "", *, force: bool = False, expected: int | None = ANY
    ) -> Publication:
        """Serves a version, or the head; where there is a label for all servers, so do all.

        It is loaded here before anything changes.

        Args:
            version: number, or "head".
            who: asks for it.
            why: for the history.
            force: whether a closed gate does not matter.
            expected: what all servers must serve now (None: the head), or nothing changes; ANY: whatever they do.

        Raises:
            Pinned: this server serves what its setting says.
            Superseded: they do not serve that.
            GateClosed, OriginUnavailable, PublicationError: it cannot be served. Nothing has changed.
        """
        self._check()
        predictor = self.registry.prepare(version)
        with self._flipping:
            if self._promoter is not None:
                self._promoter.promote(None if version == HEAD else version, who, why, force=force, expected=expected)
            self._begun, self._wanted = True, version
            return self.registry.serve(version, predictor)

    def rollback(self, who: str, why: str = "", *, expected: int | None = ANY) -> Publication:
        """Serves again what was served before; where there is a label for all servers, so do all.

        Args:
            who: asks for it.
            why: for the history.
            expected: as for `promote`.

        Raises:
            Pinned: this server serves what its setting says.
            NothingBefore: there is nothing before.
            Superseded, OriginUnavailable, PublicationError: as for `promote`. Nothing has changed.
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

    def leave(self, bad: Version, others: Container[Version], who: str, why: str) -> Publication | None:
        """Serves something else than what has turned out to be bad, as far as this server may say: else it alone does.

        Instead of a version it is what was served before; instead of the head, which has no before, the newest version
        that is loaded.

        Args:
            bad: what is served.
            others: that are bad as well.
            who: asks for it.
            why: for the history.

        Returns:
            What is served instead; None: `bad` is not what is to be served, any more.

        Raises:
            OriginUnavailable, PublicationError: as for `rollback`.
        """
        may_say = self._promoter is not None and not self.is_pinned
        if (self._refresh() if may_say else self.registry.served_version) != bad:
            return None
        try:  # another server may have said so since
            if may_say and bad != HEAD:
                return self.rollback(who, why, expected=bad)
            version = self._instead(bad, others)
            if may_say:
                return self.promote(version, who, why, force=True, expected=None)
        except Superseded:
            return None
        self._wanted = version
        return self.registry.serve(version, self.registry.prepare(version), "rollback")

    def _instead(self, bad: Version, others: Container[Version]) -> Version:
        registry = self.registry
        loaded = sorted(one for one in registry.resident if isinstance(one, int))
        served = registry.history[:-1] if bad != HEAD else []
        good = [one for one in (*loaded, *served) if one != bad and one not in others]
        if not good:
            raise PublicationMissing(f"nothing good is loaded to be served instead of {bad}")
        return good[-1]

    def _restore(self, promoter: Promoter, version: Version, was: Version | None, why: str) -> None:
        """Has the label say again what it said, unless it says something else by now."""
        with self._flipping:
            if was is not None and self._refresh() == version:
                promoter.promote(None if was == HEAD else was, "serving", why, force=True)
                self._wanted = was

    def _check(self) -> None:
        if self.is_pinned:
            what = "the head" if self._pinned == HEAD else f"version {self._pinned}"
            raise Pinned(
                f'this server is pinned to {what}: set serve.version to "prod" to have it follow what is promoted'
            )

    def _refresh(self) -> Version | None:
        """What is to be served; None: what is served already, whatever it is."""
        labels = self.registry.refresh_labels()
        if self._begun and (self.is_pinned or self._promoter is None):
            return None
        self._wanted = labels.get(PROD, HEAD) if self._pinned is None else self._pinned
        return self._wanted
