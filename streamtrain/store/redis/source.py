"""Models in Redis as an origin."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from streamtrain.errors import PublicationCorrupt
from streamtrain.store.publication import LookupResult, Publication, PublicationStep, RowChange, Weights, check_rows
from streamtrain.store.redis.buckets import BucketChecksums, add_rows
from streamtrain.store.redis.layout import Layout
from streamtrain.store.redis.log import Collector, CommittedPublication, decode_change
from streamtrain.store.redis.model import Head, RedisModel
from streamtrain.store.redis.versions import RedisVersions

_MOST_DIGITS = 20  # of a number of a publication


class RedisLookup:
    """Looks up rows in Redis; see RowLookup.

    The publication number is read after the rows. The rows of a version never change, and are deleted after its name.
    Rows that are read while the head is one publication include all changes of the previous one, which the commit
    ensures, and none of the next one, which shards apply only after its commit.

    A missing bucket is either empty or has lost its rows. So a lower bound of its row count is kept: the initial count
    less the rows deleted since.

    Args:
        step: a version, or the head with its changes.
        rows: lower bound of the rows of each bucket before the step, int64 [buckets], by table.
    """

    def __init__(
        self, model: RedisModel, step: PublicationStep, layout: Layout, rows: Mapping[str, NDArray[np.int64]]
    ) -> None:
        self._model, self._publication, self._layout = model, step.publication, layout
        self._rows = {table: of_table.copy() for table, of_table in rows.items()}
        self._number = step.publication.number
        self.follow(step)

    def follow(self, step: PublicationStep) -> None:
        for change in step.changes:
            at = self._layout.buckets(change.table, change.gone)
            np.subtract.at(self._rows[change.table], at, 1)
        self._number = step.publication.number

    def look_up(self, keys: Mapping[str, NDArray[np.uint64]]) -> LookupResult:
        """Looks up rows; the round trip for the rows is followed by a short one."""
        encoded = self._model.buckets(self._layout).look_up(keys)
        absent = {table: self._absent(table, keys[table], there) for table, (_, there) in encoded.items()}
        number = self._now()
        if number == self._number:  # otherwise a change not followed yet may have emptied buckets
            for table, buckets in absent.items():
                self._check(table, buckets)
        codecs = {table: self._layout.codec(table) for table in keys}
        return LookupResult(
            number, {table: (codecs[table].decode(rows), there) for table, (rows, there) in encoded.items()}
        )

    def _absent(self, table: str, keys: NDArray[np.uint64], there: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Buckets of keys [n] that should have rows but do not exist."""
        at = self._layout.buckets(table, keys)
        empty = np.setdiff1d(at[~there], at[there])
        expected = empty[self._rows[table][empty] > 0]
        return expected[~self._model.buckets(self._layout).non_empty(table, expected)]

    def _check(self, table: str, absent: NDArray[np.int64]) -> None:
        lost = absent[self._rows[table][absent] > 0]
        if len(lost):
            name = self._model.buckets(self._layout).bucket_name(table, int(lost[0]))
            raise PublicationCorrupt(
                f"{name} has lost its rows (lost buckets in this lookup: {len(lost)}): its keys cannot be predicted "
                "until the next full publication"
            )

    def _now(self) -> int:
        server, names, publication = self._model.server, self._model.keys, self._publication
        if publication.version is not None:
            if not server.call("HEXISTS", names.versions, publication.version):
                raise PublicationCorrupt(f"version {publication.version} of {self._model.name} was deleted")
            return publication.number
        number, dictionary = server.call("HMGET", names.head, "number", "dictionary")
        if number is None or dictionary != b"%d" % self._layout.dictionary:
            raise PublicationCorrupt(f"the head of {self._model.name} was replaced: load it again")
        if not number.isdigit() or len(number) > _MOST_DIGITS:
            raise PublicationCorrupt(f"the head of {self._model.name} is damaged: number {number!r}")
        return int(number)


_NO_KEYS = np.empty(0, np.uint64)


class RedisOrigin:
    """A model in Redis as an Origin.

    Args:
        lookups: the same model, through a server with a shorter timeout, for row lookups.
    """

    def __init__(self, model: RedisModel, lookups: RedisModel | None = None) -> None:
        self._model, self._versions, self._lookups = model, RedisVersions(model), lookups or model
        self.name = model.keys.model

    def versions(self) -> list[Publication]:
        return self._versions.all()

    def labels(self) -> dict[str, int]:
        return self._versions.labels()

    @property
    def has_lost_decisions(self) -> bool:
        return self._model.has_lost_decisions

    def probes(self) -> list[bytes]:
        return self._model.probes()

    def find(self, version: int | None) -> Publication | None:
        if version is None:
            head = self._model.head()
            return head.publication if head else None
        found = self._versions.find(version)
        return found[0] if found else None

    def load(self, publication: Publication, take: Callable[[RowChange], object]) -> tuple[Publication, Weights]:
        """Loads parts of about 8192 rows; those of the head are followed by its changes meanwhile."""
        if publication.version is not None:
            return publication, self._load_version(publication, take)
        head = self._model.head()
        if head is None or head.publication.number < publication.number:
            raise PublicationCorrupt(f"publication {publication.number} of {self._model.name} no longer exists")
        return self._load_head(head, take)

    def _load_version(self, publication: Publication, take: Callable[[RowChange], object]) -> Weights:
        layout = self._layout(publication.version or 0)
        expected = self._versions.sums(layout)
        weights = self._weights(publication, layout)
        buckets = self._model.buckets(layout)
        for table, one in layout.tables.items():
            codec = layout.codec(table)
            sums = BucketChecksums(np.zeros(one.buckets, np.uint32), np.zeros(one.buckets, np.uint64))
            for keys, rows, at in buckets.read(table):
                add_rows(sums, keys, rows, at)
                take(RowChange(table, keys, codec.decode(rows), _NO_KEYS))
            wrong = (sums.rows != expected[table].rows) | (sums.sums != expected[table].sums)
            if wrong.any():
                bucket = int(np.flatnonzero(wrong)[0])
                raise PublicationCorrupt(
                    f"{buckets.bucket_name(table, bucket)} of version {publication.version} is damaged or missing: it "
                    f"has {sums.rows[bucket]} of {expected[table].rows[bucket]} rows, or its checksum differs"
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
                raise PublicationCorrupt(f"publication {number} of {self._model.name} belongs to another dictionary")
            for change in [] if step.is_full else step.changes:
                counts[change.table].change(change.keys, change.gone)
                take(decode_change(change, step.layout))
        for table, count in counts.items():
            check_rows(self._model.name, last.publication, table, count.rows())
        assert weights is not None  # what is between two different entries ends with one
        return last.publication, weights

    def follow(self, publication: Publication, seconds: float) -> Iterator[PublicationStep]:
        after = self._model.log.entry_of(publication.number)
        if after is None:
            raise PublicationCorrupt(
                f"the log no longer has what follows publication {publication.number} of {self._model.name}"
            )
        there = self._model.log.publication_at(after)
        if there is not None and (there.run, there.published) != (publication.run, publication.published):
            raise PublicationCorrupt(
                f"publication {publication.number} of {self._model.name} was replaced: Redis lost the earlier "
                "publications, and their numbers are used again"
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

    def _step(self, found: CommittedPublication, number: int) -> PublicationStep:
        if found.is_full or found.publication.number != number:
            raise PublicationCorrupt(
                f"publication {found.publication.number} of {self._model.name} is a full one: load the head again"
            )
        return PublicationStep(
            found.publication, found.weights, [decode_change(change, found.layout) for change in found.changes]
        )

    def open(self, publication: Publication) -> tuple[PublicationStep, RedisLookup]:
        if publication.version is not None:
            layout = self._layout(publication.version)
            step = PublicationStep(publication, self._weights(publication, layout), [])
            rows = {table: sums.rows.astype(np.int64) for table, sums in self._versions.sums(layout).items()}
            return step, RedisLookup(self._lookups, step, layout, rows)
        head = self._model.head()
        if head is None:
            raise PublicationCorrupt(f"{self._model.name} no longer has a head")
        last = next(self._model.log.between(head.before, head.id), None)
        if last is None or last.id != head.id or last.layout != head.layout:
            raise PublicationCorrupt(f"the head of {self._model.name} is damaged: its log entry is another publication")
        changes = [] if last.is_full else [decode_change(change, last.layout) for change in last.changes]
        step = PublicationStep(last.publication, last.weights, changes)
        return step, RedisLookup(self._lookups, step, head.layout, self._counted(head, last))

    def _counted(self, head: Head, last: CommittedPublication) -> dict[str, NDArray[np.int64]]:
        """Row counts by table and bucket of the head's dictionary, int64 [buckets].

        Changes of recent publications may or may not be applied yet; apart from these, the counts must be those that
        the head declares.
        """
        buckets = self._model.buckets(head.layout)
        found = {table: buckets.counts(table) for table in head.layout.tables}
        now = self._model.head()
        if now is None or now.layout.dictionary != head.layout.dictionary:
            raise PublicationCorrupt(f"the head of {self._model.name} was replaced while it was counted: load it again")
        steps = [last, *(self._model.log.between(head.id, now.id) if now.id != head.id else ())]
        changes = [change for step in steps if not step.is_full for change in step.changes]
        for table, rows in found.items():
            moving = sum(len(change.keys) + len(change.gone) for change in changes if change.table == table)
            if abs(int(rows.sum()) - head.publication.rows.get(table, 0)) > moving:
                check_rows(self._model.name, head.publication, table, int(rows.sum()))
        return found

    def _weights(self, publication: Publication, layout: Layout) -> Weights:
        with _reading(f"the weights of version {publication.version} of {self._model.name}"):
            return self._versions.weights(layout)

    def _layout(self, version: int) -> Layout:
        found = self._versions.find(version)
        if found is None:
            raise PublicationCorrupt(f"version {version} of {self._model.name} was deleted")
        return found[1]


@contextmanager
def _reading(what: str) -> Iterator[None]:
    try:
        yield
    except ValueError as exc:
        raise PublicationCorrupt(f"{what} are damaged: {exc}") from exc


class _Count:
    """Counts rows after changes, some of which were already in the rows read."""

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
