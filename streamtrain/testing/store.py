"""MemoryOrigin: published models in the memory of this process, for notebooks and tests."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from streamtrain.errors import PublicationCorrupt
from streamtrain.store.publication import Floats, Publication, PublicationStep, RowChange, Weights

Rows = Mapping[str, tuple[NDArray[np.uint64], Floats]]
_NONE = np.empty(0, np.uint64)


@dataclass(frozen=True)
class _State:
    """A publication with all that belongs to it; nothing of it is ever changed."""

    publication: Publication
    weights: Weights
    rows: Rows


@dataclass
class MemoryOrigin:
    """Keeps what is published to it until the process ends. Thread-safe.

    Args:
        spec: JSON of the model's spec, as `Spec.of(model).to_json()` gives it.
        model: name of the model.
        run: what is learned from a first initialisation on.
        kept_steps: steps of the head that can be followed; a follower that is further behind must load the head again.

    Example:
        >>> origin = MemoryOrigin(Spec.of(model).to_json())                                  # doctest: +SKIP
        >>> origin.publish({"user": (keys, rows)}, Weights(dense, statistics)).number       # doctest: +SKIP
        1
        >>> origin.keep("stable").version                                                    # doctest: +SKIP
        1
    """

    spec: str
    model: str = "model"
    run: str = "memory"
    kept_steps: int = 64
    name: str = "memory"
    _probes: list[bytes] = field(default_factory=list, init=False, repr=False)
    _published: threading.Condition = field(default_factory=threading.Condition, init=False, repr=False)
    _states: dict[int | None, _State] = field(default_factory=dict, init=False, repr=False)
    _labels: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    _steps: deque[PublicationStep] = field(default_factory=deque, init=False, repr=False)

    def probes(self) -> list[bytes]:
        return [*self._probes]

    def keep_probes(self, groups: Sequence[bytes]) -> None:
        """Keeps groups of probes (quality/probes.py), in place of those before."""
        self._probes = [*groups]

    def publish(
        self,
        rows: Rows,
        weights: Weights,
        *,
        gone: Mapping[str, NDArray[np.uint64]] | None = None,
        clock: Mapping[int, int] | None = None,
        watermark: float = 0.0,
    ) -> Publication:
        """Makes a publication of the head out of the one before.

        Args:
            rows: by table keys uint64 [n] and rows float32 [n, dim] that are new or have changed.
            weights: all weights of the graph.
            gone: by table the keys uint64 [m] that have no row any more.
            clock: by partition the offset of the first sample that has not been learned; default: as before.
            watermark: latest event time learned, seconds since the epoch.
        """
        with self._published:
            before = self._states.get(None)
            changes = _changes(rows, gone or {})
            tables = dict(before.rows) if before else {}
            for change in changes:
                tables[change.table] = _changed(tables.get(change.table), change)
            publication = Publication(
                number=before.publication.number + 1 if before else 1,
                version=None,
                model=self.model,
                run=self.run,
                spec=self.spec,
                clock=dict(clock if clock is not None else before.publication.clock if before else {}),
                watermark=watermark,
                published=time.time(),
                dtype="float32",
                rows={name: len(keys) for name, (keys, _) in tables.items()},
            )
            self._states[None] = _State(publication, weights, tables)
            self._steps.append(PublicationStep(publication, weights, changes))
            while len(self._steps) > self.kept_steps:
                self._steps.popleft()
            self._published.notify_all()
            return publication

    def keep(self, label: str | None = None) -> Publication:
        """Makes the head a version, with a label if one is given.

        Raises:
            PublicationCorrupt: nothing has been published.
        """
        with self._published:
            if None not in self._states:
                raise PublicationCorrupt(f"{self.name}: nothing has been published")
            version = max((one for one in self._states if one is not None), default=0) + 1
            head = self._states[None]
            self._states[version] = replace(head, publication=replace(head.publication, version=version))
            if label is not None:
                self._labels[label] = version
            return self._states[version].publication

    def drop(self, version: int) -> None:
        """Forgets a version and its labels; nothing happens if there is none."""
        with self._published:
            self._states.pop(version, None)
            for label in [one for one, at in self._labels.items() if at == version]:
                del self._labels[label]

    def versions(self) -> list[Publication]:
        with self._published:
            return [self._states[one].publication for one in sorted(v for v in self._states if v is not None)]

    def labels(self) -> dict[str, int]:
        with self._published:
            return dict(self._labels)

    def find(self, version: int | None) -> Publication | None:
        with self._published:
            state = self._states.get(version)
            return None if state is None else state.publication

    def load(self, publication: Publication, take: Callable[[RowChange], object]) -> tuple[Publication, Weights]:
        with self._published:
            state = self._states.get(publication.version)
        if state is None:
            raise PublicationCorrupt(f"{self.name}: version {publication.version} is gone")
        for table, (keys, rows) in state.rows.items():
            take(RowChange(table, keys, rows, _NONE))
        return state.publication, state.weights

    def follow(self, publication: Publication, seconds: float) -> Iterator[PublicationStep]:
        with self._published:
            self._published.wait_for(lambda: self._at() > publication.number, seconds)
            steps = [one for one in self._steps if one.publication.number > publication.number]
            if steps and steps[0].publication.number != publication.number + 1:
                raise PublicationCorrupt(f"{self.name}: steps after publication {publication.number} have been dropped")
        yield from steps

    def _at(self) -> int:
        head = self._states.get(None)
        return head.publication.number if head else 0


def _changes(rows: Rows, gone: Mapping[str, NDArray[np.uint64]]) -> list[RowChange]:
    changes = []
    for table in {**rows, **gone}:
        keys, values = rows.get(table, (_NONE, np.empty((0, 0), np.float32)))
        changes.append(RowChange(table, keys.copy(), values.copy(), gone.get(table, _NONE).copy()))
    return changes


def _changed(before: tuple[NDArray[np.uint64], Floats] | None, change: RowChange) -> tuple[NDArray[np.uint64], Floats]:
    """The rows of a table after a change: of a key that occurs twice, the later one."""
    keys, rows = change.keys, change.rows
    if before is not None:
        keys = np.concatenate([before[0], keys])
        rows = np.concatenate([before[1], rows]) if len(change.rows) else before[1]
    unique, from_end = np.unique(keys[::-1], return_index=True)
    there = ~np.isin(unique, change.gone)
    return unique[there], np.ascontiguousarray(rows[len(keys) - 1 - from_end[there]])
