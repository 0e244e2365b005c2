"""Versions from settings on: which one all servers serve, as far as the gate lets it; and those of checkpoints."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from streamtrain.errors import ConfigError, PublicationCorrupt
from streamtrain.model.spec import Spec
from streamtrain.settings import PublishSettings
from streamtrain.store.checkpoint_origin import CheckpointOrigin
from streamtrain.store.gate import Figures, Gate
from streamtrain.store.origin import Publication
from streamtrain.store.redis_import import import_version
from streamtrain.store.redis_model import RedisModel
from streamtrain.store.redis_scripts import ANY, PROD
from streamtrain.store.redis_server import RedisServer
from streamtrain.store.redis_versions import RedisVersions

logger = logging.getLogger(__name__)


@contextmanager
def published_model(settings: PublishSettings) -> Iterator[RedisModel]:
    """The model in Redis that settings name; its connections end with the block.

    Raises:
        ConfigError: they name none.
    """
    if settings.url is None:
        raise ConfigError("publish.url is not set: give --set publish.url=redis://host:port")
    server = RedisServer(settings.url, cluster=settings.cluster)
    try:
        yield RedisModel(server, settings.model)
    finally:
        server.close()


def version_of_checkpoint(model: RedisModel, url: str, dtype: str, who: str, why: str = "") -> Publication:
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
            widths = widths_of(publication)
            return import_version(model, origin, publication, widths, who=who, why=why, dtype=dtype)
        except PublicationCorrupt as exc:
            logger.warning("%s; the epoch before it is tried", exc)
    raise PublicationCorrupt(f"there is no epoch at {origin.url} of which a version can be made")


def widths_of(publication: Publication) -> dict[str, int]:
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
        versions: of the model.
        gate: what a version must fulfil to be promoted.
    """

    def __init__(self, versions: RedisVersions, gate: Gate) -> None:
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
            self._gate.check("the head" if version is None else f"version {version}", *figures)
        elif faults := self._gate.faults(*figures):
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

    def label(self) -> int | None:
        """The version that is labelled to be served; None: the head is, if there is one."""
        return self._versions.labels().get(PROD)

    def served(self) -> Publication | None:
        """What is served: the version that is labelled so, else the head, if there is one."""
        version = self.label()
        return self._versions.head() if version is None else self._found(version)

    def _good(self) -> Figures | None:
        """Of what is served, unless that is damaged: then there must be a way out."""
        try:
            served = self.served()
        except PublicationCorrupt as exc:
            logger.warning("%s; nothing is compared with it", exc)
            return None
        return served.metrics if served else None

    def _found(self, version: int | None) -> Publication:
        if version is None:
            head = self._versions.head()
            if head is None:
                raise PublicationCorrupt(f"there is no head of {self._versions.name}")
            return head
        found = self._versions.find(version)
        if found is None:
            raise PublicationCorrupt(f"there is no version {version} of {self._versions.name}")
        return found[0]
