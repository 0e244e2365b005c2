"""Versions from settings on: which one all servers serve, as far as the gate lets it; and those of checkpoints."""

import logging
import time
from collections.abc import Callable

from streamtrain.errors import ConfigError, PublicationCorrupt
from streamtrain.model.spec import Spec
from streamtrain.periodic import Backoff, PeriodicTask
from streamtrain.quality.gate import Figures, check_gate, gate_faults
from streamtrain.settings.groups import GateSettings
from streamtrain.store.checkpoint.source import CheckpointOrigin
from streamtrain.store.publication import ANY, PROD, Publication
from streamtrain.store.redis.model import RedisModel
from streamtrain.store.redis.versions import RedisVersions, import_version

logger = logging.getLogger(__name__)


def import_checkpoint(model: RedisModel, url: str, dtype: str, who: str, why: str = "") -> Publication:
    """Writes the newest epoch that is not damaged as a new version, without any trainer; the head stays as it is.

    Args:
        model: of which it becomes a version.
        url: the root of the epochs, or one checkpoint.
        dtype: of rows as they are published.
        who: makes it.
        why: for the history.

    Raises:
        CheckpointError: the URL cannot be used.
        PublicationCorrupt: there is no such epoch.
        OriginUnavailable: the epochs cannot be reached, or Redis does not answer.
        PublicationError: Redis refuses. In any case there is no new version.
    """
    origin = CheckpointOrigin(url, model.keys.model)
    for publication in origin.newest_first():
        try:
            widths = row_widths(publication)
            return import_version(model, origin, publication, widths, who=who, why=why, dtype=dtype)
        except PublicationCorrupt as exc:
            logger.warning("%s; trying the epoch before", exc)
    raise PublicationCorrupt(f"no epoch at {origin.url} can be imported as a version")


def row_widths(publication: Publication) -> dict[str, int]:
    """Floats of a row, by table.

    Raises:
        PublicationCorrupt: it does not say what it is of.
    """
    try:
        return {one["name"]: int(one["dim"]) for one in Spec.from_json(publication.spec).tables}
    except ConfigError as exc:
        raise PublicationCorrupt(f"publication {publication.number} of {publication.model}: {exc}") from exc


class VersionControl:
    """What is served by all servers of a model. Thread-safe.

    Args:
        gate: what a version must meet to be promoted.
    """

    def __init__(self, versions: RedisVersions, gate: GateSettings) -> None:
        self._versions, self._gate = versions, gate

    def promote(
        self, version: int | None, who: str, why: str = "", *, force: bool = False, expected: int | None = ANY
    ) -> int | None:
        """Has all servers serve a version, or the head (None).

        Args:
            version: its number.
            who: does it.
            why: for the history.
            force: whether it is served even if the gate would hold it back; the history says why it would have.
            expected: what must be served now (None: the head), or nothing changes; ANY: whatever is.

        Returns:
            The version that is served from now on; None: the head.

        Raises:
            GateClosed: its figures are worse than those of what is served now.
            PublicationCorrupt: there is no such version, or no head.
            Superseded: not `expected` is served.
            PublicationError: Redis refuses; OriginUnavailable: it does not answer.
        """
        figures = (self._found(version).metrics, self._good())
        if not force:
            check_gate(self._gate, "the head" if version is None else f"version {version}", *figures)
        elif faults := gate_faults(self._gate, *figures):
            why = f"{why} (forced: {'; '.join(faults)})".lstrip()
        self._versions.promote(version, who, why, expected=expected)
        return version

    def rollback(self, who: str, why: str = "", *, expected: int | None = ANY) -> int | None:
        """Has all servers serve what they did before, of what is still there; the gate does not matter.

        Args:
            who: does it.
            why: for the history.
            expected: as for `promote`.

        Returns:
            The version that is served from now on; None: the head.

        Raises:
            NothingBefore: there is nothing before.
            Superseded, PublicationError, OriginUnavailable: as for `promote`.
        """
        return self._versions.rollback(who, why, expected=expected)

    def has_demoted(self, version: int, who: str) -> bool:
        """Whether somebody has had all servers leave a version before, of the last deeds of the history.

        Raises:
            PublicationError: Redis refuses; OriginUnavailable: it does not answer.
        """
        deeds = self._versions.history()
        return any((deed.what, deed.who, deed.was) == ("rollback", who, version) for deed in deeds)

    def label(self) -> int | None:
        """The version that is labelled to be served; None: the head is, if there is one."""
        return self._versions.labels().get(PROD)

    def served(self) -> Publication | None:
        """What is served: the version that is labelled so, else the head, if there is one."""
        version = self.label()
        return self._versions.head() if version is None else self._found(version)

    def _good(self) -> Figures | None:
        """The figures of what is served; None if that is damaged, so that it can be replaced."""
        try:
            served = self.served()
        except PublicationCorrupt as exc:
            logger.warning("%s; the quality gate does not compare with it", exc)
            return None
        return served.metrics if served else None

    def _found(self, version: int | None) -> Publication:
        if version is None:
            head = self._versions.head()
            if head is None:
                raise PublicationCorrupt(f"{self._versions.name} has no head")
            return head
        found = self._versions.find(version)
        if found is None:
            raise PublicationCorrupt(f"{self._versions.name} has no version {version}")
        return found[0]


class DecisionKeeper:
    """Puts back labels and traffic that Redis has lost, as long as this process knows them, in a thread of its own.

    Args:
        model: nobody else needs to read what is decided of it.
        every: seconds between two looks.
    """

    def __init__(self, model: RedisModel, every: float = 1.0) -> None:
        self._model = model
        self._task = PeriodicTask(
            "decisions", self._look, every, subject="reading labels and traffic", backoff=Backoff(every, every)
        )
        self.start = self._task.start

    def stop(self) -> None:
        """Ends."""
        self._task.close(_PATIENCE)

    def _look(self) -> None:
        if self._model.restore_decisions("coordinator"):
            logger.warning("%s had lost labels or traffic: they are put back", self._model.name)


_WHO = "schedule"
_AGAIN = 10.0  # seconds after a failure, or while there is no head
_PATIENCE = 10.0


class VersionSchedule:
    """Makes versions in a thread of its own, as to copy a head may take long; what fails is tried again.

    The interval begins with the last version, however it was made, or with the start where there is none. A head that
    has a version already gets no other.

    Args:
        versions: where they are made.
        head: gives what is published last.
        every: seconds from one to the next.
        keep: of them are kept, in addition to those that labels and servers use.
        count: called with "versions_made" or "versions_failed" for each.
        now: seconds since the epoch.
    """

    def __init__(
        self,
        versions: RedisVersions,
        head: Callable[[], Publication | None],
        *,
        every: float,
        keep: int,
        count: Callable[[str], object] = lambda name: None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._versions, self._head = versions, head
        self._every, self._keep = every, keep
        self._count, self._now = count, now
        self._began = now()
        self._made: float | None = None
        self._again = min(_AGAIN, every)
        self._task = PeriodicTask(
            "versions",
            self._make_if_due,
            every,
            subject="making a version",
            backoff=Backoff(self._again, self._again),
            observe=lambda error: error and count("versions_failed"),
        )

    def start(self) -> None:
        self._task.start()

    def stop(self) -> None:
        """Ends; waits briefly for a version that is being made; a part of one is never visible."""
        self._task.close(_PATIENCE)

    def _make_if_due(self) -> float:
        """Makes a version if it is time; returns the seconds until it may be time again."""
        left = self._left()
        if left > 0:
            return left
        return self._every if self._make() else self._again

    def _left(self) -> float:
        last = self._made
        if last is None:
            last = max((one.published for one in self._versions.all()), default=self._began)
        return min(last + self._every - self._now(), self._every)

    def _make(self) -> bool:
        head, versions = self._head(), self._versions.all()
        if head is None or any(one.number == head.number for one in versions):
            return False
        made = self._versions.make(_WHO, f"every {self._every:g} s")
        self._made = self._now()
        self._count("versions_made")
        logger.info("version %d created from publication %d", made.version or 0, made.number)
        if deleted := self._versions.retain(self._keep, _WHO, f"the last {self._keep} are kept"):
            logger.info("deleted versions %s", deleted)
        return True
