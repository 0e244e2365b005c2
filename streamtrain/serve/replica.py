"""Replica: the rows and weights of one publication in this process; of the head, of one publication after another.

A reader never sees two publications mixed, and never waits for long. A step of the head may hold any number of rows,
so it is applied in parts, between which predictions go on. Before a part of the rows is overwritten, what they were is
put aside, and whoever reads meanwhile gets them from there; when all parts are in, the weights, the publication and the
end of that aside come at once. A second copy of all rows would do the same for twice the memory.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamtrain._core import Plan, Table
from streamtrain.errors import ConfigError, PublicationCorrupt
from streamtrain.model.spec import Spec
from streamtrain.store.origin import Floats, Publication, RowChange, Step, Weights

PART_ROWS = 4096  # a part keeps readers waiting for about a tenth of a millisecond
_KEPT = ("name", "dim", "seed", "init", "init_scale", "dtype")  # what a row's birth value and storage depend on


class View(NamedTuple):
    """What was read at one moment.

    Attributes:
        publication: that it is all of.
        tensors: its weights, in whatever form the replica was given them.
        rows: for each plan its rows, flat.
    """

    publication: Publication
    tensors: Any
    rows: list[Floats]


class Replica:
    """The rows and weights of a publication. Any thread may read; one at a time may load or apply.

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
        try:
            self._spec = Spec.from_json(publication.spec)
        except ConfigError as exc:
            raise PublicationCorrupt(f"{_name(publication)}: {exc}") from exc
        settings = {one["name"]: one for one in self._spec.tables}
        self._tables = {name: _table(settings[name]) for name in tables}
        self._convert = convert
        self.publication = publication
        self._tensors: Any = None
        self._aside: dict[str, Table] = {}
        self._lock = threading.Lock()

    @property
    def rows(self) -> dict[str, int]:
        """Number of rows by table."""
        return {name: len(table) for name, table in self._tables.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all rows and their indexes."""
        return sum(table.nbytes for table in self._tables.values())

    def take(self, change: RowChange) -> None:
        """Takes rows of the first publication, before it is read by anybody.

        Raises:
            PublicationCorrupt: rows are not finite, or do not fit their table.
        """
        self._check(change)
        _load(self._tables[change.table], change.keys, change.rows)
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
                    f"{_name(publication)} says that table {name!r} has {publication.rows.get(name, 0)} rows, "
                    f"but {count} came"
                )
        self.publication, self._tensors = publication, tensors

    def apply(self, step: Step) -> None:
        """Goes on to the publication after.

        Raises:
            PublicationCorrupt: something of it cannot be used; nothing has changed.
        """
        tensors = self._checked(step.publication, step.weights)
        for change in step.changes:
            self._check(change)
        for change in step.changes:
            self._write(change)
        with self._lock:
            self.publication, self._tensors, self._aside = step.publication, tensors, {}

    def read(self, plans: list[Plan]) -> View:
        """What batches need, all of one publication."""
        with self._lock:
            return View(self.publication, self._tensors, [self._rows(plan) for plan in plans])

    def found(self, plan: Plan) -> dict[str, tuple[int, int]]:
        """By table how many of a plan's keys have a row, and how many there are."""
        keys = {name: plan.keys(t) for t, name in enumerate(self._tables)}
        return {name: (int(self._tables[name].lookup(of)[0].sum()), len(of)) for name, of in keys.items()}

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
            aside = self._aside.setdefault(change.table, _aside(table.dim))
        for start in range(0, len(change.keys), PART_ROWS):
            keys, rows = change.keys[start : start + PART_ROWS], change.rows[start : start + PART_ROWS]
            with self._lock:
                _put_aside(aside, table, keys)
                _load(table, keys, rows)
        for start in range(0, len(change.gone), PART_ROWS):
            keys = change.gone[start : start + PART_ROWS]
            with self._lock:
                _put_aside(aside, table, keys)
                table.remove(keys)

    def _check(self, change: RowChange) -> None:
        if change.table not in self._tables:
            raise PublicationCorrupt(f"there are rows of a table {change.table!r}, which the model has not")
        dim = self._tables[change.table].dim
        if len(change.keys) and change.rows.shape != (len(change.keys), dim):
            raise PublicationCorrupt(f"table {change.table!r}: rows are {change.rows.shape}, not [n, {dim}]")
        if not np.isfinite(change.rows).all():
            raise PublicationCorrupt(f"table {change.table!r}: rows are not finite")

    def _checked(self, publication: Publication, weights: Weights) -> Any:
        sizes = {"dense": self._spec.dense_size, "statistics": self._spec.statistics_size}
        for (what, size), values in zip(sizes.items(), weights, strict=True):
            if values.shape != (size,):
                raise PublicationCorrupt(f"{_name(publication)} has {what} {values.shape}, not [{size}]")
            if not np.isfinite(values).all():
                raise PublicationCorrupt(f"{_name(publication)}: {what} weights are not finite")
        return self._convert(weights)


def _name(publication: Publication) -> str:
    at = f"publication {publication.number}"
    return at if publication.version is None else f"version {publication.version} ({at})"


def _table(settings: dict[str, Any]) -> Table:
    """An empty table without optimizer state: rows only."""
    return Table(**{name: settings[name] for name in _KEPT if name in settings and name != "name"}, **_ROWS_ONLY)


_ROWS_ONLY: dict[str, Any] = {"optimizer": "sgd", "rate": 1.0}


def _aside(dim: int) -> Table:
    return Table(dim, **_ROWS_ONLY)


def _put_aside(aside: Table, table: Table, keys: NDArray[np.uint64]) -> None:
    """Keeps what keys read now, be it their birth value; the first time counts, should one come twice in a step."""
    new = keys[~aside.lookup(keys)[0]]
    _load(aside, new, table.pull(new))


def _load(table: Table, keys: NDArray[np.uint64], rows: Floats) -> None:
    none = np.zeros(len(keys), np.uint32)
    table.load(keys, rows.reshape(len(keys), table.dim), np.empty((len(keys), 0), np.float32), none, none)
