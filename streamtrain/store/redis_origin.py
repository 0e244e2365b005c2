"""Models in Redis as an origin for those who serve them."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from streamtrain.errors import PublicationCorrupt
from streamtrain.store.origin import Publication, RowChange, Step, Weights, check_rows
from streamtrain.store.redis_buckets import Sums, add_sums
from streamtrain.store.redis_layout import Layout
from streamtrain.store.redis_log import Collector, Committed, decoded
from streamtrain.store.redis_lookup import RedisLookup
from streamtrain.store.redis_model import Head, RedisModel
from streamtrain.store.redis_versions import RedisVersions

_NO_KEYS = np.empty(0, np.uint64)


class RedisOrigin:
    """See Origin.

    Args:
        model: whose.
        lookups: the same, by a server with a shorter timeout, for those who wait for rows that are looked up.

    Attributes:
        name: of the model.
    """

    def __init__(self, model: RedisModel, lookups: RedisModel | None = None) -> None:
        self._model, self._versions, self._lookups = model, RedisVersions(model), lookups or model
        self.name = model.keys.model

    def versions(self) -> list[Publication]:
        """See Origin."""
        return self._versions.all()

    def labels(self) -> dict[str, int]:
        """See Origin."""
        return self._versions.labels()

    def find(self, version: int | None) -> Publication | None:
        """See Origin."""
        if version is None:
            head = self._model.head()
            return head.publication if head else None
        found = self._versions.find(version)
        return found[0] if found else None

    def load(self, publication: Publication, take: Callable[[RowChange], object]) -> tuple[Publication, Weights]:
        """See Origin. Parts are of about 8192 rows; those of the head are followed by what has changed meanwhile."""
        if publication.version is not None:
            return publication, self._load_version(publication, take)
        head = self._model.head()
        if head is None or head.publication.number < publication.number:
            raise PublicationCorrupt(f"publication {publication.number} of {self._model.name} is gone")
        return self._load_head(head, take)

    def _load_version(self, publication: Publication, take: Callable[[RowChange], object]) -> Weights:
        layout = self._layout(publication.version or 0)
        expected = self._versions.sums(layout)
        weights = self._weights(publication, layout)
        buckets = self._model.buckets(layout)
        for table, one in layout.tables.items():
            codec = layout.codec(table)
            sums = Sums(np.zeros(one.buckets, np.uint32), np.zeros(one.buckets, np.uint64))
            for keys, rows, at in buckets.read(table):
                add_sums(sums, keys, rows, at)
                take(RowChange(table, keys, codec.decode(rows), _NO_KEYS))
            wrong = (sums.rows != expected[table].rows) | (sums.sums != expected[table].sums)
            if wrong.any():
                bucket = int(np.flatnonzero(wrong)[0])
                raise PublicationCorrupt(
                    f"{buckets.name_of(table, bucket)} of version {publication.version} is damaged or gone: it has "
                    f"{sums.rows[bucket]} of {expected[table].rows[bucket]} rows, or others"
                )
        return weights

    def _load_head(self, head: Head, take: Callable[[RowChange], object]) -> tuple[Publication, Weights]:
        buckets = self._model.buckets(head.layout)
        present: dict[str, list[NDArray[np.uint64]]] = {table: [] for table in head.layout.tables}
        for table in head.layout.tables:
            codec = head.layout.codec(table)
            for keys, rows, _ in buckets.read(table):
                present[table].append(keys)
                take(RowChange(table, keys, codec.decode(rows), _NO_KEYS))
        last = self._model.head()
        if last is None or last.layout.dictionary != head.layout.dictionary:
            raise PublicationCorrupt(f"the head of {self._model.name} was replaced while it was read: load it again")
        counts = {table: _Count(parts) for table, parts in present.items()}
        weights: Weights | None = None
        for step in self._model.log.between(head.before, last.id):
            weights = step.weights
            if step.layout != head.layout:
                number = step.publication.number
                raise PublicationCorrupt(f"publication {number} of {self._model.name} is of another dictionary")
            for change in [] if step.is_full else step.changes:
                counts[change.table].change(change.keys, change.gone)
                take(decoded(change, step.layout))
        for table, count in counts.items():
            check_rows(self._model.name, last.publication, table, count.rows())
        assert weights is not None  # what is between two different entries ends with one
        return last.publication, weights

    def follow(self, publication: Publication, seconds: float) -> Iterator[Step]:
        """See Origin."""
        after = self._model.log.entry_of(publication.number)
        if after is None:
            raise PublicationCorrupt(f"what came after publication {publication.number} of {self._model.name} is gone")
        there = self._model.log.publication_at(after)
        if there is not None and (there.run, there.published) != (publication.run, publication.published):
            raise PublicationCorrupt(
                f"publication {publication.number} of {self._model.name} is another one now: what was published before "
                "was lost, and numbers began again"
            )
        deadline = time.monotonic() + seconds
        collector = Collector(self._model.log.name)
        at, number = after, publication.number
        while True:
            entries = self._model.log.wait(at, max(0.0, deadline - time.monotonic()))
            self._model.log.check(after)
            for entry, fields in entries:
                at = entry
                if (found := collector.take(entry, fields)) is not None:
                    after, number = entry, number + 1
                    yield self._step(found, number)
            is_some = number > publication.number
            if (is_some and at == after) or (not entries and (is_some or time.monotonic() >= deadline)):
                return

    def _step(self, found: Committed, number: int) -> Step:
        if found.is_full or found.publication.number != number:
            raise PublicationCorrupt(f"publication {found.publication.number} of {self._model.name} is a full one")
        return Step(found.publication, found.weights, [decoded(change, found.layout) for change in found.changes])

    def open(self, publication: Publication) -> tuple[Step, RedisLookup]:
        """See LookupOrigin."""
        if publication.version is not None:
            layout = self._layout(publication.version)
            step = Step(publication, self._weights(publication, layout), [])
            return step, RedisLookup(self._lookups, publication, layout)
        head = self._model.head()
        if head is None:
            raise PublicationCorrupt(f"the head of {self._model.name} is gone")
        last = next(self._model.log.between(head.before, head.id), None)
        if last is None or last.id != head.id or last.layout != head.layout:
            raise PublicationCorrupt(f"the head of {self._model.name} is damaged: the log has another there")
        changes = [] if last.is_full else [decoded(change, last.layout) for change in last.changes]
        return Step(last.publication, last.weights, changes), RedisLookup(self._lookups, last.publication, head.layout)

    def _weights(self, publication: Publication, layout: Layout) -> Weights:
        with _reading(f"the weights of version {publication.version} of {self._model.name}"):
            return self._versions.weights(layout)

    def _layout(self, version: int) -> Layout:
        found = self._versions.find(version)
        if found is None:
            raise PublicationCorrupt(f"version {version} of {self._model.name} is deleted")
        return found[1]


@contextmanager
def _reading(what: str) -> Iterator[None]:
    try:
        yield
    except ValueError as exc:
        raise PublicationCorrupt(f"{what} are damaged: {exc}") from exc


class _Count:
    """How many rows there are after changes, some of which had been seen before."""

    def __init__(self, parts: list[NDArray[np.uint64]]) -> None:
        self._keys = np.concatenate([_NO_KEYS, *parts])
        self._there: dict[int, bool] = {}

    def change(self, keys: NDArray[np.uint64], gone: NDArray[np.uint64]) -> None:
        self._there |= dict.fromkeys(keys.tolist(), True)
        self._there |= dict.fromkeys(gone.tolist(), False)

    def rows(self) -> int:
        touched = np.fromiter(self._there, np.uint64, len(self._there))
        before = int(np.isin(self._keys, touched).sum()) if len(touched) else 0
        return len(self._keys) - before + sum(self._there.values())
