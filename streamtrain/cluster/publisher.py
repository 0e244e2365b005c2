"""Publisher: publishes one shard while it is trained."""

import json
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

import streamtrain.ps.ps_pb2 as pb
from streamtrain.cluster.published_table import PublishedTable, scanned
from streamtrain.cluster.verify_shard import row_sums
from streamtrain.errors import PublicationError
from streamtrain.ps.shard import Shard
from streamtrain.store.origin import Floats, RowChange, Weights
from streamtrain.store.redis_dictionaries import Part, RedisDictionaries
from streamtrain.store.redis_layout import FullPublicationNeeded, Layout


class ShardPublisher:
    """See `Publisher` of ps/node.py; of one shard.

    What changes is followed from the first full publication on. What was read of it is kept in mind until the next
    publication has another number: only then is it sure that this one was committed.

    A shard that has rows or weights which are not finite writes nothing, and answers which.

    Args:
        dictionaries: where it is published.
    """

    def __init__(self, dictionaries: RedisDictionaries) -> None:
        self._dictionaries = dictionaries
        self._lock = threading.Lock()  # a second call may come while one waits that its caller has given up
        self._tables: dict[str, PublishedTable] = {}
        self._number = 0
        self._written: list[RowChange] = []

    def write(self, shard: Shard, number: int, layout: str) -> str:
        """See Publisher."""
        with self._lock:
            stand = shard.stand()  # before rows are read, which so are of this clock or a later one
            watermark = shard.watermark
            if not layout and not self._tables:
                return json.dumps({"full": f"shard {shard.index} has just begun"})
            weights = Weights(shard.dense.pull(), shard.statistics.pull())
            changes = [] if layout else self._changes(number)
            read = _scanned(shard) if layout else ((change.table, change.rows) for change in changes)
            if bad := [*_bad_weights(weights), *_bad_rows(read)]:
                found = f"shard {shard.index} has {' and '.join(bad)} that are not finite"
                return json.dumps({"bad": found, "shard": shard.index})
            try:
                part = self._write(shard, number, changes, weights, layout)
            except FullPublicationNeeded as exc:
                return json.dumps({"full": str(exc)})
            self._number = number
            return json.dumps({"part": part, "clock": list(stand.clock.items()), "watermark": watermark})

    def _write(self, shard: Shard, number: int, changes: Iterable[RowChange], weights: Weights, layout: str) -> Part:
        rows: dict[str, int] = {}
        if layout:
            changes = self._all(shard, rows)
        else:
            self._count(rows)
        full = Layout.of_json(layout) if layout else None
        # Of a full publication the rows are counted once all changes have been written.
        return self._dictionaries.write(number, shard.index, changes, weights, rows=rows, layout=full)

    def apply(self, shard: Shard) -> None:
        """See Publisher."""
        with self._lock:
            self._dictionaries.apply(shard.index)

    def sums(self, shard: Shard, number: int, layout: str) -> Any:
        """See Publisher. Needs 16 bytes a row meanwhile; what is trained on is not held back."""
        with self._lock:
            if not self._tables:
                return pb.RowSums(full=f"shard {shard.index} has just begun")
            if self._number not in (number, number + 1):  # the latter was written, and is not committed
                raise PublicationError(
                    f"shard {shard.index} wrote publication {self._number} last, and the head is {number}: "
                    "another process publishes this model"
                )
            in_vain = [] if self._number == number else self._written
            return row_sums(self._tables.values(), Layout.of_json(layout), in_vain)

    def _all(self, shard: Shard, rows: dict[str, int]) -> Iterator[RowChange]:
        """Every row; what changes from here on is of the next publication. Then tells how many rows there are."""
        for table in self._tables.values():
            table.close()
        pairs = zip(shard.spec.tables, shard.tables, strict=True)
        self._tables = {one["name"]: PublishedTable(one, table) for one, table in pairs}
        self._written = []
        for published in self._tables.values():
            yield from published.all()
            yield published.changes()
        self._count(rows)

    def _changes(self, number: int) -> list[RowChange]:
        """What has changed since the publication before."""
        if number == self._number:  # it was written, but not committed
            for change in self._written:
                self._tables[change.table].put_back(change)
        self._number, self._written = number, []
        for table in self._tables.values():
            self._written.append(table.changes())
        return self._written

    def _count(self, rows: dict[str, int]) -> None:
        rows.update({name: table.rows for name, table in self._tables.items()})


def _scanned(shard: Shard) -> Iterator[tuple[str, Floats]]:
    for one, table in zip(shard.spec.tables, shard.tables, strict=True):
        for rows in scanned(table):
            yield one["name"], rows.embeddings


def _bad_rows(read: Iterable[tuple[str, Floats]]) -> Iterator[str]:
    """How many rows of which tables are not finite."""
    counts: Counter[str] = Counter()
    for table, rows in read:
        if not np.isfinite(rows).all():
            counts[table] += len(rows) - int(np.isfinite(rows).all(axis=1).sum())
    return (f"{count} rows of table {table}" for table, count in counts.items() if count)


def _bad_weights(weights: Weights) -> Iterator[str]:
    """How many weights are not finite."""
    for name, values in (("dense weights", weights.dense), ("statistics", weights.statistics)):
        if count := len(values) - int(np.isfinite(values).sum()):
            yield f"{count} {name}"
