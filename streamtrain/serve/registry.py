"""Registry: which publications are loaded, and which of them is served.

A publication is loaded, checked and warmed beside the one that serves; then one reference changes. Requests hold the
predictor that they began with, so the one before answers those that it has, and its memory goes with the last of them.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Literal
from weakref import WeakValueDictionary

from streamtrain.errors import ConfigError, NothingBefore, PublicationCorrupt, PublicationError
from streamtrain.logs import Seldom
from streamtrain.model.model import Model
from streamtrain.model.spec import Spec
from streamtrain.serve.graph import Graph
from streamtrain.serve.predictor import Predictor
from streamtrain.store.origin import Origin, Publication

logger = logging.getLogger(__name__)

HEAD: Literal["head"] = "head"
Version = int | Literal["head"]
Kind = Literal["promote", "rollback"]


class PublicationMissing(PublicationError):
    """There is no such version, or nothing has been published yet."""


class PublicationMismatch(PublicationError):
    """A publication is of another model than the one that is served."""


class Registry:
    """Publications of one model, loaded from an origin. Thread-safe.

    Args:
        model: that is served. Its graph is built, so TensorFlow is loaded.
        origin: where publications come from.
        limit: versions that are loaded at the same time, beside the head; those served longest ago go first.
        hold: gives a context in which a version is loaded, that keeps it from being deleted meanwhile.
        cache_bytes: of rows that are kept of each, the others being looked up; None: all rows are loaded.
        resident_changed: is told the numbers of the loaded versions whenever they change, while flips wait for it.
    """

    def __init__(
        self,
        model: Model,
        origin: Origin,
        *,
        limit: int = 2,
        hold: Callable[[int], AbstractContextManager[object]] = contextlib.nullcontext,
        cache_bytes: int | None = None,
        resident_changed: Callable[[frozenset[int]], object] = lambda versions: None,
    ) -> None:
        if limit < 1:
            raise ConfigError(f"the limit of loaded versions must be at least 1, not {limit}")
        self.model = model
        self.origin = origin
        self.limit = limit
        self._cache_bytes = cache_bytes
        self.swaps = {"promote": 0, "rollback": 0, "step": 0, "reload": 0}
        self.refused = 0
        self._seldom, self._told = Seldom(), ""
        self._graph = Graph(model)
        self._spec = Spec.of(model)
        self._resident: dict[Version, Predictor] = {}
        self._labels: dict[str, int] = {}
        self._served: Predictor | None = None
        self._history: list[Version] = []  # what was served, the last one now; each once
        self._loading = threading.Lock()  # one at a time loads; the head goes on meanwhile
        self._flipping = threading.Lock()  # held for moments; readers need none
        self._alive = WeakValueDictionary[Version, Predictor]()  # versions: nothing changes them
        self._hold = hold
        self._resident_changed = resident_changed
        self._listeners: list[Callable[[], object]] = []

    @property
    def served(self) -> Predictor | None:
        """What answers requests that name no version; None: nothing is loaded yet."""
        return self._served

    @property
    def served_version(self) -> Version | None:
        """Of `served`."""
        history = self._history
        return history[-1] if history else None

    @property
    def history(self) -> list[Version]:
        """What has been served and is still loaded, what is served now last."""
        return list(self._history)

    @property
    def resident(self) -> dict[Version, Predictor]:
        """What is loaded."""
        return dict(self._resident)

    @property
    def labels(self) -> dict[str, int]:
        """Version by label, as of the last `refresh_labels`."""
        return dict(self._labels)

    def find(self, version: Version) -> Predictor | None:
        """The predictor of a version or of the head, if it is loaded."""
        return self._resident.get(version)

    def find_label(self, label: str) -> Predictor | None:
        """The predictor of a label's version, or for "head" that of the head, if it is loaded."""
        return self._resident.get(HEAD if label == HEAD else self._labels.get(label, -1))

    def listen(self, changed: Callable[[], object]) -> None:
        """Has `changed` called, by any thread, whenever other publications are loaded or served."""
        self._listeners.append(changed)

    def unlisten(self, changed: Callable[[], object]) -> None:
        """Ends what `listen` began."""
        self._listeners.remove(changed)

    def prepare(self, version: Version, origin: Origin | None = None) -> Predictor:
        """Loads, checks and warms a version, or the head, beside what is served; at once if it is loaded already.

        Args:
            version: number, or "head".
            origin: where to load it from, if not the registry's.

        Raises:
            OriginUnavailable: it must be loaded and the origin does not answer.
            PublicationMissing: there is no such version.
            PublicationMismatch, PublicationCorrupt: it cannot be served.
        """
        if found := self._resident.get(version):
            return found
        with self._loading:
            found = self._resident.get(version) or self._alive.get(version)
            return found or self._load(version, origin or self.origin)

    def serve(self, version: Version, predictor: Predictor, kind: Kind = "promote") -> Publication:
        """Serves what `prepare` gave, from now on."""
        with self._flipping:
            publication = self._flip(version, predictor, kind)
        self._changed()
        return publication

    def promote(self, version: Version, origin: Origin | None = None) -> Publication:
        """Serves a version, or the head; it is loaded first if it is not yet.

        Raises:
            OriginUnavailable, PublicationError: as for `prepare`. What was served, still is.
        """
        return self.serve(version, self.prepare(version, origin))

    def rollback(self) -> Publication:
        """Serves again what was served before; it is still loaded.

        Raises:
            NothingBefore: nothing else that was served is loaded.
        """
        with self._flipping:
            if len(self._history) < 2:
                raise NothingBefore("nothing that was served before is loaded: promote a version")
            before = self._history[-2]
            publication = self._flip(before, self._resident[before], "rollback")
        self._changed()
        return publication

    def keep(self, version: int) -> None:
        """Loads a version, to be asked for by its number or label.

        Raises:
            OriginUnavailable, PublicationError: as for `prepare`.
        """
        predictor = self.prepare(version)
        with self._flipping:
            self._resident = {**self._resident, version: predictor}
            self._drop_oldest()
        self._changed()

    def _flip(self, version: Version, predictor: Predictor, kind: Kind) -> Publication:
        before, predictor = self._served, self._resident.get(version, predictor)
        others = [one for one in self._history if one != version]
        if kind == "rollback" and before is not None and before is not predictor:
            others.insert(0, others.pop())  # to roll back again leads further back
        self._resident = {**self._resident, version: predictor}
        self._served, self._history = predictor, [*others, version]
        self._drop_oldest()
        if before is not predictor:
            self.swaps[kind] += 1
            logger.info("%s: serving %s (publication %d)", kind, predictor.name, predictor.publication.number)
        return predictor.publication

    def reload_head(self, origin: Origin) -> None:
        """Loads the head anew, beside the one that is loaded, and puts it in its place.

        Raises:
            OriginUnavailable, PublicationError: as for `promote`.
        """
        with self._loading:
            head = self._load(HEAD, origin)
            with self._flipping:
                self._resident = {**self._resident, HEAD: head}
                if self.served_version == HEAD:
                    self._served = head
        self.swaps["reload"] += 1
        logger.info("loaded the head anew (publication %d)", head.publication.number)
        self._changed()

    def follow_head(self, seconds: float) -> None:
        """Applies what has been published since, and waits for the first for at most so long.

        One thread at a time may do so.

        Raises:
            OriginUnavailable: the origin does not answer.
            PublicationError: the head can only be loaded anew.
        """
        head = self._resident[HEAD]
        for step in self.origin.follow(head.publication, seconds):
            with self._counting_refusals():
                self._check(step.publication)
                if step.publication.run != head.publication.run:
                    raise PublicationCorrupt(f"the head goes on with another run, {step.publication.run!r}")
                head.apply(step)
            self.swaps["step"] += 1
            self._changed()

    def refresh_labels(self) -> dict[str, int]:
        """Asks the origin for the version of each label.

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
                predictor = Predictor.load(
                    self.model, self._graph, origin, publication, str(version), cache_bytes=self._cache_bytes
                )
            if version != HEAD:
                self._alive[version] = predictor
            return predictor

    @contextlib.contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except (PublicationCorrupt, PublicationMismatch) as exc:
            self.refused += 1
            if self._seldom.due() or str(exc) != self._told:  # it is tried again and again
                logger.error("refused: %s", exc)
                self._told = str(exc)
            raise
        except ConfigError as exc:
            self.refused += 1
            raise PublicationCorrupt(f"a publication has no usable spec: {exc}") from exc

    def _check(self, publication: Publication) -> None:
        """Refuses what is of another model: its rows and weights would mean something else."""
        if differing := self._spec.differing(Spec.from_json(publication.spec)):
            name = "the head" if publication.version is None else f"version {publication.version}"
            raise PublicationMismatch(
                f"{name} is of another model: its {', '.join(differing)} differ from what is served"
            )

    def _drop_oldest(self) -> None:
        """Forgets versions beyond the limit, but never what is served."""
        served = self.served_version
        labelled = set(self._labels.values())
        order = [one for one in self._resident if one not in self._history] + self._history
        versions = [one for one in order if one not in (HEAD, served)]
        versions.sort(key=lambda one: one in labelled)  # stable: those without a label go first
        count = sum(one != HEAD for one in self._resident)
        for one in versions[: max(0, count - self.limit)]:
            self._resident = {kept: predictor for kept, predictor in self._resident.items() if kept != one}
            self._history = [kept for kept in self._history if kept != one]
            logger.info("dropped version %s", one)
        self._resident_changed(frozenset(one for one in self._resident if one != HEAD))

    def _changed(self) -> None:
        for listener in [*self._listeners]:
            listener()
