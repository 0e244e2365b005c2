"""Cache: some rows of a publication in this process, the others in the origin, for tables that do not fit.

A row that is looked up is used with one publication only: the one that was followed before it was asked for, and was
still the head afterwards. If the head has moved on meanwhile, it is followed so far and asked again. What a publication
has changed itself may not be in the origin's dictionary yet, and comes with the step to it: until the next step it is
held whole, in front of all else, so that a step is one exchange of references.

Whether an id has a row is known by its count: 1; it is 0 of one that has none, and is kept with its birth value.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamtrain._core import Plan, Table
from streamtrain.errors import OriginUnavailable
from streamtrain.serve.loaded import PART_ROWS, Shape, View, name_of, put
from streamtrain.store.origin import Floats, Found, Lookup, Publication, RowChange, Step

Keys = NDArray[np.uint64]

PATIENCE = 2.0  # seconds that a read waits for the head, at most
PAUSE = 1.0  # seconds that an origin which did not answer is left alone
_SEEN = 10  # seconds that a row which is read again need not be marked as seen
_INDEX_BYTES = 16  # of a row, in the table's index, at most


class _Rows:
    """What is known of one table.

    Args:
        make: gives an empty table with a capacity.
        capacity: rows that are kept.
    """

    def __init__(self, make: Callable[[int], Table], capacity: int) -> None:
        self._make = make
        self.kept = make(capacity)
        self.last = make(0)  # what the publication has changed: truer than what is kept

    def read(self, keys: Keys, out: Floats, fetched: Table | None, now: int) -> Keys:
        """Reads rows into `out` [n, dim]; returns the keys of which nothing is known."""
        known, counts, seen = self.kept.lookup(keys)
        self.kept.pull(keys, out)
        idle = known & (seen + _SEEN <= now)
        if idle.any():
            put(self.kept, keys[idle], out[idle], counts[idle], now)
        for table in (fetched, self.last):
            if table is not None and len(table):
                there = table.lookup(keys)[0]
                out[there] = table.pull(keys[there])
                known |= there
        return keys[~known]

    def made(self, changes: Sequence[RowChange]) -> Table:
        """A table of rows, and of keys that have none."""
        born, table = self._make(0), self._make(0)
        for change in changes:
            put(table, change.keys, change.rows, 1)
            put(table, change.gone, born.pull(change.gone))
        return table

    def keep(self, fetched: Table, now: int) -> None:
        """Keeps what was fetched; what was not seen for longest goes.

        But not what the publication has changed: that may have been fetched as it was before, after `settle` was there.
        """
        cursor: int | None = 0
        while cursor is not None:
            cursor, rows = fetched.scan(cursor, PART_ROWS)
            same = ~self.last.lookup(rows.keys)[0]
            put(self.kept, rows.keys[same], rows.embeddings[same], rows.counts[same], now)

    def settle(self, cursor: int) -> int | None:
        """Brings some of what is kept up to what the publication has changed; returns where to go on."""
        after, rows = self.last.scan(cursor, PART_ROWS)
        kept, _, seen = self.kept.lookup(rows.keys)
        put(self.kept, rows.keys[kept], rows.embeddings[kept], rows.counts[kept], seen[kept])
        return after

    def found(self, keys: Keys) -> tuple[int, int]:
        """How many have a row, and of how many that is known."""
        known, counts, _ = self.kept.lookup(keys)
        newer, newer_counts, _ = self.last.lookup(keys)
        has = np.where(newer, newer_counts, counts * known) > 0
        return int(has.sum()), int((known | newer).sum())


class _Fetched(NamedTuple):
    number: int
    tables: dict[str, Table]


class Cache:
    """Rows of a publication that were asked for lately; see Loaded. One thread at a time may apply.

    Args:
        first: the publication, its weights and what it changed.
        lookup: for all other rows.
        tables: names of the tables, in the order of the plans.
        convert: makes of weights what readers get.
        nbytes: bytes of rows that are kept, with their indexes. The tables share them as their rows would fill them
            now. What one publication changed comes on top.
        patience: seconds that a read waits for the head to be followed, or asks again because it moved on, at most.
        now: seconds of a clock that never goes back.

    Attributes:
        publication: what is read now.
        lookups: by table and outcome how many ids were looked up: "hit" (known here), "miss" (the origin was asked) or
            "failed" (it did not answer).

    Raises:
        PublicationCorrupt: the publication cannot be used.
    """

    def __init__(
        self,
        first: Step,
        lookup: Lookup,
        tables: list[str],
        convert: Callable[[Any], Any],
        *,
        nbytes: int,
        patience: float = PATIENCE,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shape = Shape(first.publication)
        self._lookup, self._convert, self._patience, self._now = lookup, convert, patience, now
        capacities = _capacities(self._shape, first.publication, tables, nbytes)
        self._tables = {
            name: _Rows(partial(self._shape.table, name), capacity) for name, capacity in capacities.items()
        }
        self._moved = threading.Condition()
        self._away_until = now()
        self._why_away = ""
        self.lookups: dict[tuple[str, str], int] = {
            (name, outcome): 0 for name in tables for outcome in ("hit", "miss", "failed")
        }
        self._exchange(first, self._checked(first))

    @property
    def rows(self) -> dict[str, int]:
        """See Loaded. Ids that are known to have no row count as well."""
        return {name: len(table.kept) for name, table in self._tables.items()}

    @property
    def nbytes(self) -> int:
        """See Loaded."""
        return sum(table.kept.nbytes + table.last.nbytes for table in self._tables.values())

    def apply(self, step: Step) -> None:
        """See Loaded."""
        tensors = self._checked(step)
        self._settle()
        self._exchange(step, tensors)

    def read(self, plans: list[Plan]) -> View:
        """See Loaded. Waits for a round trip to the origin if there are rows to be fetched."""
        until = self._now() + self._patience
        wanted: dict[str, Keys] = {}
        view, missing = self._read(plans, None)
        while view is None:
            # What was wanted before, too: others may have needed its place meanwhile, and the read is to end.
            for name, keys in missing.items():
                wanted[name] = np.union1d(wanted.get(name, keys), keys)
            before = self.publication.number
            fetched = self._fetch(wanted)
            if fetched.number == before:  # if it were later, rows may be of any publication in between
                view, missing = self._read(plans, fetched)
            if view is None:
                self._reach(fetched.number, until)
        return view

    def read_at_once(self, plans: list[Plan]) -> View | None:
        """See Loaded."""
        return self._read(plans, None)[0]

    def found(self, plan: Plan) -> dict[str, tuple[int, int]]:
        """See Loaded. Rows may have been dropped since they were read."""
        with self._moved:
            return {name: table.found(plan.keys(t)) for t, (name, table) in enumerate(self._tables.items())}

    def checksums(self) -> None:
        """See Loaded. There are none."""

    def _read(self, plans: list[Plan], fetched: _Fetched | None) -> tuple[View | None, dict[str, Keys]]:
        """What plans need; without it, the keys of which nothing is known, by table."""
        with self._moved:
            new = fetched.tables if fetched and fetched.number == self.publication.number else {}
            read = [self._of_plan(plan, new) for plan in plans]
            missing = {name: np.concatenate([keys[name] for _, keys in read]) for name in self._tables}
            if any(map(len, missing.values())):
                return None, {name: np.unique(keys) for name, keys in missing.items() if len(keys)}
            for name, table in new.items():
                self._tables[name].keep(table, int(self._now()))
            for t, name in enumerate(self._tables):
                self._count(name, "hit", sum(len(plan.keys(t)) for plan in plans) - len(new.get(name, ())))
            return View(self.publication, self._tensors, [rows for rows, _ in read]), {}

    def _of_plan(self, plan: Plan, new: Mapping[str, Table]) -> tuple[Floats, dict[str, Keys]]:
        starts, now = plan.row_starts, int(self._now())
        rows = np.empty(int(starts[-1]), np.float32)
        missing: dict[str, Keys] = {}
        for t, (name, table) in enumerate(self._tables.items()):
            keys = plan.keys(t)
            of_table = rows[starts[t] : starts[t + 1]].reshape(len(keys), table.kept.dim)
            missing[name] = table.read(keys, of_table, new.get(name), now)
        return rows, missing

    def _fetch(self, wanted: dict[str, Keys]) -> _Fetched:
        try:
            found = self._ask(wanted)
        except OriginUnavailable:
            self._count_all(wanted, "failed")
            raise
        self._count_all(wanted, "miss")
        tables = {}
        for name, (rows, there) in found.tables.items():
            change = RowChange(name, wanted[name][there], rows[there], wanted[name][~there])
            self._shape.check(change)
            tables[name] = self._tables[name].made([change])
        return _Fetched(found.number, tables)

    def _ask(self, wanted: dict[str, Keys]) -> Found:
        """Asks the origin, but for a while not if it did not answer: reads that need it must not pile up."""
        if self._now() < self._away_until:
            raise OriginUnavailable(self._why_away)
        try:
            return self._lookup.look_up(wanted)
        except OriginUnavailable as exc:
            self._why_away, self._away_until = str(exc), self._now() + PAUSE
            raise

    def _reach(self, number: int, until: float) -> None:
        """Waits until a publication has been followed.

        Raises:
            OriginUnavailable: it has not been in time, or whatever rows were fetched of was overtaken again and again.
        """
        with self._moved:
            left = until - self._now()
            self._moved.wait_for(lambda: self.publication.number >= number, left)
            if self._now() >= until:
                raise OriginUnavailable(
                    f"the head moves on while rows are looked up: it was publication {number}, and "
                    f"{name_of(self.publication)} is what is followed: try again"
                )

    def _checked(self, step: Step) -> Any:
        self._shape.check_weights(step.publication, step.weights)
        for change in step.changes:
            self._shape.check(change)
        return self._convert(step.weights)

    def _settle(self) -> None:
        """Brings what is kept up to what the publication has changed, some rows at a time."""
        for table in self._tables.values():
            cursor: int | None = 0
            while cursor is not None:
                with self._moved:
                    cursor = table.settle(cursor)

    def _exchange(self, step: Step, tensors: Any) -> None:
        """Goes on to a publication, once what is kept is up to the one before."""
        last = {
            name: table.made([change for change in step.changes if change.table == name])
            for name, table in self._tables.items()
        }
        with self._moved:
            self.publication, self._tensors = step.publication, tensors
            for name, table in self._tables.items():
                table.last = last[name]
            self._moved.notify_all()

    def _count_all(self, wanted: dict[str, Keys], outcome: str) -> None:
        with self._moved:
            for name, keys in wanted.items():
                self._count(name, outcome, len(keys))

    def _count(self, table: str, outcome: str, ids: int) -> None:
        self.lookups[table, outcome] += ids


def _capacities(shape: Shape, publication: Publication, tables: list[str], nbytes: int) -> dict[str, int]:
    """By table how many rows fit."""
    sizes = {name: shape.table(name).stats()["row_bytes"] + _INDEX_BYTES for name in tables}
    whole = {name: size * max(1, publication.rows.get(name, 0)) for name, size in sizes.items()}
    share = nbytes / max(1, sum(whole.values()))
    return {name: max(1, int(share * whole[name] / size)) for name, size in sizes.items()}
