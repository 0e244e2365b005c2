"""Control of versions: which one all servers serve, as far as the gate lets it."""

from streamtrain.errors import PublicationCorrupt
from streamtrain.store.gate import Gate
from streamtrain.store.origin import Publication
from streamtrain.store.redis_scripts import PROD
from streamtrain.store.redis_versions import RedisVersions


class VersionControl:
    """What is served by all servers of a model. Thread-safe.

    Args:
        versions: of the model.
        gate: what a version must fulfil to be promoted.
    """

    def __init__(self, versions: RedisVersions, gate: Gate) -> None:
        self._versions, self._gate = versions, gate

    def promote(self, version: int | None, who: str, why: str = "", *, force: bool = False) -> int | None:
        """Has all servers serve a version, or the head (None).

        Args:
            version: its number.
            who: does it.
            why: for the history.
            force: whether it is served even if the gate would hold it back; the history says why it would have.

        Returns:
            The version that is served from now on; None: the head.

        Raises:
            GateClosed: its figures are worse than those of what is served now.
            PublicationCorrupt: there is no such version, or no head.
            PublicationError: Redis refuses; OriginUnavailable: it does not answer.
        """
        publication = self._found(version)
        served = self.served()
        figures = (publication.metrics, served.metrics if served else None)
        if not force:
            self._gate.check("the head" if version is None else f"version {version}", *figures)
        elif faults := self._gate.faults(*figures):
            why = f"{why} (forced: {'; '.join(faults)})".lstrip()
        self._versions.promote(version, who, why)
        return version

    def rollback(self, who: str, why: str = "") -> int | None:
        """Has all servers serve what they did before, of what is still there; the gate does not matter.

        Returns:
            The version that is served from now on; None: the head.

        Raises:
            PublicationError: there is nothing before; OriginUnavailable: Redis does not answer.
        """
        return self._versions.rollback(who, why)

    def served(self) -> Publication | None:
        """What is served: the version that is labelled so, else the head, if there is one."""
        version = self._versions.labels().get(PROD)
        return self._versions.head() if version is None else self._found(version)

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
