"""The registry of loaded publications, and which of them is served.

A publication is loaded, checked and warmed while another one serves; then one reference changes. Requests keep the
predictor that they began with, so the previous one completes its requests, and is freed with the last of them.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal
from weakref import WeakValueDictionary

from streamtrain.disk import RowsOnDisk
from streamtrain.errors import ConfigError, NothingBefore, PublicationCorrupt, PublicationMismatch, PublicationMissing
from streamtrain.logs import LogThrottle
from streamtrain.model.model import Model
from streamtrain.model.spec import Spec
from streamtrain.serve.graph import Graph
from streamtrain.serve.predictor import Predictor
from streamtrain.store.publication import Origin, Publication

logger = logging.getLogger(__name__)

HEAD: Literal["head"] = "head"
Version = int | Literal["head"]
SwapKind = Literal["promote", "rollback"]


class Registry:
    """Publications of one model, loaded from an origin. Thread-safe.

    Args:
        model: to serve; TensorFlow is loaded.
        origin: where publications come from.
        limit: versions that are loaded at the same time, in addition to the head; those served longest ago are dropped.
        hold: a context that keeps a version from being deleted while it is loaded.
        cache_bytes: memory for cached rows of each, the others being looked up; None: all rows are loaded.
        disk: for rows of each that have no room in memory, if all are loaded; None: they are in memory.
        resident_changed: called with the numbers of the loaded versions when they change, 0 for the head; it blocks
            swaps.
        graph: of the model, if it is traced already; None: it is built and traced here.
    """

    def __init__(
        self,
        model: Model,
        origin: Origin,
        *,
        limit: int = 2,
        hold: Callable[[int], AbstractContextManager[object]] = contextlib.nullcontext,
        cache_bytes: int | None = None,
        disk: RowsOnDisk | None = None,
        resident_changed: Callable[[frozenset[int]], object] = lambda versions: None,
        graph: Graph | None = None,
    ) -> None:
        if limit < 1:
            raise ConfigError(f"the limit of loaded versions must be at least 1, not {limit}")
        self.model = model
        self.origin = origin
        self.limit = limit
        self._cache_bytes, self._disk = cache_bytes, disk
        self.swaps = {"promote": 0, "rollback": 0, "step": 0, "reload": 0}
        self.refused = 0
        self._throttle, self._logged = LogThrottle(), ""
        self.graph = graph or Graph(model)
        self._spec = Spec.of(model)
        self._resident: dict[Version, Predictor] = {}
        self._labels: dict[str, int] = {}
        self.requested: frozenset[int] = frozenset()  # versions that requests are routed to, kept like labelled ones
        self._served: Predictor | None = None
        self._history: list[Version] = []  # what was served, the current one last; each once
        self._loading = threading.Lock()  # one load at a time; the head is followed meanwhile
        self._flipping = threading.Lock()  # held briefly; readers do not need it
        self._alive = WeakValueDictionary[Version, Predictor]()  # versions, which are immutable
        self._hold = hold
        self._resident_changed = resident_changed
        self._listeners: list[Callable[[], object]] = []

    @property
    def served(self) -> Predictor | None:
        """The predictor of requests that name no version; None: nothing is loaded yet."""
        return self._served

    @property
    def served_version(self) -> Version | None:
        """The version of `served`."""
        history = self._history
        return history[-1] if history else None

    @property
    def history(self) -> list[Version]:
        """Versions that were served and are still loaded, the current one last."""
        return list(self._history)

    @property
    def resident(self) -> dict[Version, Predictor]:
        """The loaded predictors, by version."""
        return dict(self._resident)

    @property
    def labels(self) -> dict[str, int]:
        """Version by label, at the last `refresh_labels`."""
        return dict(self._labels)

    def find(self, version: Version) -> Predictor | None:
        """The predictor of a version or of the head, if it is loaded."""
        return self._resident.get(version)

    def find_label(self, label: str) -> Predictor | None:
        """The predictor of a label's version, or for "head" that of the head, if it is loaded."""
        return self._resident.get(HEAD if label == HEAD else self._labels.get(label, -1))

    def listen(self, changed: Callable[[], object]) -> None:
        """Calls `changed`, in any thread, whenever other publications are loaded or served."""
        self._listeners.append(changed)

    def unlisten(self, changed: Callable[[], object]) -> None:
        """Removes a listener."""
        self._listeners.remove(changed)

    def prepare(self, version: Version, origin: Origin | None = None) -> Predictor:
        """Loads, checks and warms a version, or the head, without serving it; immediate if it is loaded already.

        Args:
            version: number, or "head".
            origin: where to load it from, if not the registry's.

        Raises:
            OriginUnavailable: the origin does not answer.
            PublicationMissing: there is no such version.
            PublicationMismatch, PublicationCorrupt: it cannot be served.
        """
        if found := self._resident.get(version):
            return found
        with self._loading:
            found = self._resident.get(version) or self._alive.get(version)
            return found or self._load(version, origin or self.origin)

    def serve(self, version: Version, predictor: Predictor, kind: SwapKind = "promote") -> Publication:
        """Serves a predictor from `prepare`."""
        with self._flipping:
            publication = self._flip(version, predictor, kind)
        self._changed()
        return publication

    def promote(self, version: Version, origin: Origin | None = None) -> Publication:
        """Serves a version, or the head; loads it first if necessary.

        Raises:
            OriginUnavailable, PublicationError: as for `prepare`. What is served stays the same.
        """
        return self.serve(version, self.prepare(version, origin))

    def rollback(self) -> Publication:
        """Serves the previous version, which is still loaded.

        Raises:
            NothingBefore: none is loaded.
        """
        with self._flipping:
            if len(self._history) < 2:
                raise NothingBefore("nothing that was served before is loaded: promote a version")
            before = self._history[-2]
            publication = self._flip(before, self._resident[before], "rollback")
        self._changed()
        return publication

    def keep(self, version: int) -> None:
        """Loads a version for requests by its number or label.

        Raises:
            OriginUnavailable, PublicationError: as for `prepare`.
        """
        predictor = self.prepare(version)
        with self._flipping:
            self._resident = {**self._resident, version: predictor}
            self._drop_oldest()
        self._changed()

    def _flip(self, version: Version, predictor: Predictor, kind: SwapKind) -> Publication:
        before, predictor = self._served, self._resident.get(version, predictor)
        others = [one for one in self._history if one != version]
        if kind == "rollback" and before is not None and before is not predictor:
            others.insert(0, others.pop())  # rolling back again goes further back
        self._resident = {**self._resident, version: predictor}
        self._served, self._history = predictor, [*others, version]
        self._drop_oldest()
        if before is not predictor:
            self.swaps[kind] += 1
            logger.info("%s: serving %s (publication %d)", kind, predictor.name, predictor.publication.number)
        return predictor.publication

    def reload(self, version: Version) -> None:
        """Loads a version, or the head, again, and replaces the loaded one by it, if it is still there.

        Raises:
            OriginUnavailable, PublicationError: as for `promote`.
        """
        with self._loading:
            fresh = self._load(version, self.origin)
            with self._flipping:
                if version not in self._resident:
                    return
                self._resident = {**self._resident, version: fresh}
                if self.served_version == version:
                    self._served = fresh
        self.swaps["reload"] += 1
        what = "the head" if version == HEAD else f"version {version}"
        logger.info("reloaded %s (publication %d)", what, fresh.publication.number)
        self._changed()

    def follow_head(self, seconds: float) -> None:
        """Applies what has been published since, waiting for at most `seconds` for the first step.

        Called by one thread at a time.

        Raises:
            OriginUnavailable: the origin does not answer.
            PublicationError: the head must be reloaded.
        """
        head = self._resident[HEAD]
        if head.loaded.fault:
            raise PublicationCorrupt(head.loaded.fault)
        for step in self.origin.follow(head.publication, seconds):
            with self._counting_refusals():
                self._check(step.publication)
                if step.publication.run != head.publication.run:
                    raise PublicationCorrupt(f"the head continues with another run, {step.publication.run!r}")
                head.apply(step)
            self.swaps["step"] += 1
            self._changed()

    def refresh_labels(self) -> dict[str, int]:
        """Reads the version of each label from the origin.

        Raises:
            OriginUnavailable: the origin does not answer.
        """
        self._labels = self.origin.labels()
        return dict(self._labels)

    def _load(self, version: Version, origin: Origin) -> Predictor:
        with self._counting_refusals():
            publication = origin.find(None if version == HEAD else version)
            if publication is None:
                what = "nothing has been published" if version == HEAD else f"there is no version {version}"
                raise PublicationMissing(f"{what} in {origin.name}")
            self._check(publication)
            with contextlib.nullcontext() if version == HEAD else self._hold(version):
                holds: Any = {"cache_bytes": self._cache_bytes, "disk": self._disk}
                predictor = Predictor.load(self.model, self.graph, origin, publication, str(version), **holds)
            if version != HEAD:
                self._alive[version] = predictor
            return predictor

    @contextlib.contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except (PublicationCorrupt, PublicationMismatch) as exc:
            self.refused += 1
            if self._throttle.allow() or str(exc) != self._logged:  # it is retried again and again
                logger.error("publication refused: %s", exc)
                self._logged = str(exc)
            raise
        except ConfigError as exc:
            self.refused += 1
            raise PublicationCorrupt(f"a publication has no usable spec: {exc}") from exc

    def _check(self, publication: Publication) -> None:
        """Raises PublicationMismatch for another model: its rows and weights would mean something else."""
        if differing := self._spec.differing(Spec.from_json(publication.spec)):
            name = "the head" if publication.version is None else f"version {publication.version}"
            raise PublicationMismatch(f"{name} is of another model: different {', '.join(differing)}")

    def _drop_oldest(self) -> None:
        """Drops versions beyond the limit, but never the one that is served."""
        served = self.served_version
        labelled = {*self._labels.values(), *self.requested}
        order = [one for one in self._resident if one not in self._history] + self._history
        versions = [one for one in order if one not in (HEAD, served)]
        versions.sort(key=lambda one: one in labelled)  # stable: those without a label go first
        count = sum(one != HEAD for one in self._resident)
        for one in versions[: max(0, count - self.limit)]:
            self._resident = {kept: predictor for kept, predictor in self._resident.items() if kept != one}
            self._history = [kept for kept in self._history if kept != one]
            logger.info("dropped version %s", one)
        self._resident_changed(frozenset(0 if one == HEAD else one for one in self._resident))

    def _changed(self) -> None:
        for listener in [*self._listeners]:
            listener()
