"""Replica: the rows and weights of one publication in this process; of the head, of one publication after another.

A reader never sees two publications mixed, and never waits for long. A step of the head may hold any number of rows,
so it is applied in parts, between which predictions go on. Before a part of the rows is overwritten, what they were is
put aside, and whoever reads meanwhile gets them from there; when all parts are in, the weights, the publication and the
end of that aside come at once. A second copy of all rows would do the same for twice the memory.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtrain._core import Plan, Table
from streamtrain.errors import PublicationCorrupt
from streamtrain.serve.loaded import Checksums, Shape, TableSum, View, name_of, parts_of, put
from streamtrain.store.origin import Floats, Publication, RowChange, Step, Weights
from streamtrain.store.redis_codec import Codec, checksums

_SUMMED_IDS = 1 << 16


class Replica:
    """All rows and weights of a publication; see Loaded. One thread at a time may load or apply.

    Args:
        publication: that is going to be loaded.
        tables: names of the tables, in the order of the plans.
        convert: makes of weights what readers get.

    Attributes:
        publication: what is in it.

    Raises:
        PublicationCorrupt: its spec cannot be used.
    """

    def __init__(self, publication: Publication, tables: list[str], convert: Callable[[Weights], Any]) -> None:
        self._shape = Shape(publication)
        self._tables = {name: self._shape.table(name) for name in tables}
        self._convert = convert
        self.publication = publication
        self._tensors: Any = None
        self._aside: dict[str, Table] = {}
        self._lock = threading.Lock()
        self._stepping = threading.Lock()  # held by who applies a step, and by who must not see one half applied

    @property
    def rows(self) -> dict[str, int]:
        """See Loaded."""
        return {name: len(table) for name, table in self._tables.items()}

    @property
    def nbytes(self) -> int:
        """See Loaded."""
        return sum(table.nbytes for table in self._tables.values())

    @property
    def lookups(self) -> Mapping[tuple[str, str], int]:
        """See Loaded. There are none."""
        return {}

    def take(self, change: RowChange) -> None:
        """Takes rows of the first publication, before it is read by anybody.

        Raises:
            PublicationCorrupt: rows are not finite, or do not fit their table.
        """
        self._shape.check(change)
        put(self._tables[change.table], change.keys, change.rows)
        self._tables[change.table].remove(change.gone)

    def complete(self, publication: Publication, weights: Weights) -> None:
        """Takes the weights of the first publication, once all of its rows are there.

        Raises:
            PublicationCorrupt: weights are not finite or too few, or there are not as many rows as it says.
        """
        tensors = self._checked(publication, weights)
        for name, count in self.rows.items():
            if count != publication.rows.get(name, 0):
                raise PublicationCorrupt(
                    f"{name_of(publication)} says that table {name!r} has {publication.rows.get(name, 0)} rows, "
                    f"but {count} came"
                )
        self.publication, self._tensors = publication, tensors

    def apply(self, step: Step) -> None:
        """See Loaded."""
        tensors = self._checked(step.publication, step.weights)
        for change in step.changes:
            self._shape.check(change)
        with self._stepping:
            for change in step.changes:
                self._write(change)
            with self._lock:
                self.publication, self._tensors, self._aside = step.publication, tensors, {}

    def read(self, plans: list[Plan]) -> View:
        """See Loaded. Nothing raises."""
        with self._lock:
            return View(self.publication, self._tensors, [self._rows(plan) for plan in plans])

    def read_at_once(self, plans: list[Plan]) -> View:
        """See Loaded: what `read` gives."""
        return self.read(plans)

    def found(self, plan: Plan) -> dict[str, tuple[int, int]]:
        """See Loaded."""
        keys = {name: plan.keys(t) for t, name in enumerate(self._tables)}
        return {name: (int(self._tables[name].lookup(of)[0].sum()), len(of)) for name, of in keys.items()}

    def checksums(self) -> Checksums:
        """See Loaded."""
        with self._stepping:
            return Checksums(self.publication, {name: _sum_of(table) for name, table in self._tables.items()})

    def _rows(self, plan: Plan) -> Floats:
        starts = plan.row_starts
        rows = np.empty(int(starts[-1]), np.float32)
        for t, (name, table) in enumerate(self._tables.items()):
            keys = plan.keys(t)
            of_table = rows[starts[t] : starts[t + 1]].reshape(len(keys), table.dim)
            table.pull(keys, of_table)
            if name in self._aside:
                old = self._aside[name].lookup(keys)[0]
                of_table[old] = self._aside[name].pull(keys[old])
        return rows

    def _write(self, change: RowChange) -> None:
        table = self._tables[change.table]
        with self._lock:
            aside = self._aside.setdefault(change.table, self._shape.table(change.table))
        for keys, rows in parts_of(change.keys, change.rows):
            with self._lock:
                _put_aside(aside, table, keys)
                put(table, keys, rows)
        for (keys,) in parts_of(change.gone):
            with self._lock:
                _put_aside(aside, table, keys)
                table.remove(keys)

    def _checked(self, publication: Publication, weights: Weights) -> Any:
        self._shape.check_weights(publication, weights)
        return self._convert(weights)


def _sum_of(table: Table) -> TableSum:
    cursor: int | None = 0
    count, total, codec = 0, 0, Codec("float32", table.dim)
    while cursor is not None:
        cursor, rows = table.scan(cursor, _SUMMED_IDS)
        count += len(rows)
        total += int(checksums(rows.keys, codec.encode(rows.embeddings)).sum(dtype=np.uint64))
    return TableSum(count, total % 2**64)


def _put_aside(aside: Table, table: Table, keys: NDArray[np.uint64]) -> None:
    """Keeps what keys read now, be it their birth value; the first time counts, should one come twice in a step."""
    new = keys[~aside.lookup(keys)[0]]
    put(aside, new, table.pull(new))
