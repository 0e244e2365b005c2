"""Replica: the rows and weights of one publication in this process; of the head, of one publication after another.

A reader never sees two publications mixed, and never waits for long. A step of the head may hold any number of rows,
so it is applied in parts, between which predictions continue. Before rows are overwritten, their values are put
aside, and predictions read them from there; when all parts are in, the weights, the publication and the
end of that aside come at once. A second copy of all rows would do the same for twice the memory.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtrain._core import Plan, Table
from streamtrain.disk import RowsOnDisk
from streamtrain.errors import PublicationCorrupt
from streamtrain.serve.rows.row_store import (
    Checksums,
    PublicationSchema,
    TableSum,
    View,
    describe,
    load_rows,
    split_rows,
)
from streamtrain.store.publication import Floats, Publication, PublicationStep, RowChange, Weights
from streamtrain.store.redis.codec import Codec, checksums

_SUMMED_IDS = 1 << 16
_INDEX_BYTES = 17  # of a row, be it in memory or on disk
_LEAST = 1 << 20  # bytes of memory for a table with rows on disk


class Replica:
    """A `RowStore` with all rows of a publication. One thread at a time may load or apply.

    Args:
        publication: that is going to be loaded.
        tables: names of the tables, in the order of the plans.
        convert: converts weights to what readers get.
        disk: where rows are that have no room in memory; None: all are in memory.

    Raises:
        PublicationCorrupt: its spec cannot be used.
    """

    def __init__(
        self,
        publication: Publication,
        tables: list[str],
        convert: Callable[[Weights], Any],
        disk: RowsOnDisk | None = None,
    ) -> None:
        self._shape = PublicationSchema(publication)
        self._tables = {name: self._shape.table(name) for name in tables}
        self._has_disk = disk is not None
        if disk is not None:
            of_rows = {
                name: (table.stats()["row_bytes"] + _INDEX_BYTES) * publication.rows.get(name, 0)
                for name, table in self._tables.items()
            }
            share = disk.memory / max(1, sum(of_rows.values()))
            for name, nbytes in of_rows.items():
                memory = max(_LEAST, int(share * nbytes))
                self._tables[name] = self._shape.table(name, memory=memory, folder=disk.folder)
                self._tables[name].expect(publication.rows.get(name, 0))
        self._fault = ""
        self._convert = convert
        self.publication = publication
        self._tensors: Any = None
        self._aside: dict[str, Table] = {}
        self._lock = threading.Lock()
        self._stepping = threading.Lock()  # held while a step is applied, and by readers that must not see half of one

    @property
    def fault(self) -> str:
        return self._fault

    @property
    def rows(self) -> dict[str, int]:
        return {name: len(table) for name, table in self._tables.items()}

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self._tables.values())

    @property
    def lookups(self) -> Mapping[tuple[str, str], int]:
        return {}

    def take(self, change: RowChange) -> None:
        """Loads rows of the first publication, before anything reads it.

        Raises:
            PublicationCorrupt: rows are not finite, or do not match their table.
        """
        self._shape.check(change)
        load_rows(self._tables[change.table], change.keys, change.rows, cold=True)
        self._tables[change.table].remove(change.gone)

    def complete(self, publication: Publication, weights: Weights) -> None:
        """Loads the weights of the first publication, after all of its rows.

        Raises:
            PublicationCorrupt: weights are not finite or too few, or the number of rows is not the expected one.
        """
        tensors = self._checked(publication, weights)
        for name, count in self.rows.items():
            if count != publication.rows.get(name, 0):
                raise PublicationCorrupt(
                    f"{describe(publication)}: table {name!r} should have {publication.rows.get(name, 0)} rows, "
                    f"but {count} were loaded"
                )
        self.publication, self._tensors = publication, tensors

    def apply(self, step: PublicationStep) -> None:
        tensors = self._checked(step.publication, step.weights)
        for change in step.changes:
            self._shape.check(change)
        with self._stepping:
            with self._reading():
                for change in step.changes:
                    self._write(change)
            with self._lock:
                self.publication, self._tensors, self._aside = step.publication, tensors, {}

    def read(self, plans: list[Plan]) -> View:
        with self._lock, self._reading():
            return View(self.publication, self._tensors, [self._rows(plan) for plan in plans])

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Of rows: what is damaged on disk is gone, and all has to be loaded again."""
        try:
            yield
        except RuntimeError as exc:
            self._fault = f"rows cannot be read: {exc}"
            raise PublicationCorrupt(f"{describe(self.publication)}: {self._fault}") from exc

    def read_at_once(self, plans: list[Plan]) -> View | None:
        return None if self._has_disk else self.read(plans)

    def found(self, plan: Plan) -> dict[str, tuple[int, int]]:
        keys = {name: plan.keys(t) for t, name in enumerate(self._tables)}
        return {name: (int(self._tables[name].lookup(of)[0].sum()), len(of)) for name, of in keys.items()}

    def checksums(self) -> Checksums:
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
        for keys, rows in split_rows(change.keys, change.rows):
            with self._lock:
                _put_aside(aside, table, keys)
                load_rows(table, keys, rows)
        for (keys,) in split_rows(change.gone):
            with self._lock:
                _put_aside(aside, table, keys)
                table.remove(keys)

    def _checked(self, publication: Publication, weights: Weights) -> Any:
        self._shape.check_weights(publication, weights)
        return self._convert(weights)


def _sum_of(table: Table) -> TableSum:
    count, total, codec = 0, 0, Codec("float32", table.dim)
    table.begin_snapshot()  # as reading may take rows from disk into memory meanwhile, and others the other way
    try:
        while (rows := table.read_snapshot(_SUMMED_IDS)) is not None:
            count += len(rows)
            total += int(checksums(rows.keys, codec.encode(rows.embeddings)).sum(dtype=np.uint64))
    finally:
        table.end_snapshot()
    return TableSum(count, total % 2**64)


def _put_aside(aside: Table, table: Table, keys: NDArray[np.uint64]) -> None:
    """Keeps what keys read now, row or initial value; if a step has a key twice, the first time counts."""
    new = keys[~aside.lookup(keys)[0]]
    load_rows(aside, new, table.pull(new))
