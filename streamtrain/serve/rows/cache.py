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
from streamtrain.errors import OriginUnavailable, PublicationCorrupt
from streamtrain.serve.rows.row_store import PART_ROWS, PublicationSchema, View, describe, load_rows
from streamtrain.store.publication import Floats, LookupResult, Publication, PublicationStep, RowChange, RowLookup

Keys = NDArray[np.uint64]

PATIENCE = 2.0  # seconds that a read waits for the head
PAUSE = 1.0  # seconds without lookups after one that failed
_SEEN = 10  # seconds after which a row that is read is marked as seen again
_INDEX_BYTES = 16  # of a row, in the table's index, at most


class _Rows:
    """The cached rows of a table.

    Args:
        make: makes an empty table of some capacity.
        capacity: in rows.
    """

    def __init__(self, make: Callable[[int], Table], capacity: int) -> None:
        self._make = make
        self.kept = make(capacity)
        self.last = make(0)  # changes of the current publication, which supersede `kept`

    def read(self, keys: Keys, out: Floats, fetched: Table | None, now: int) -> Keys:
        """Reads rows into `out` [n, dim]; returns the keys that are not cached."""
        known, counts, seen = self.kept.lookup(keys)
        self.kept.pull(keys, out)
        idle = known & (seen + _SEEN <= now)
        if idle.any():
            load_rows(self.kept, keys[idle], out[idle], counts[idle], now)
        for table in (fetched, self.last):
            if table is not None and len(table):
                there = table.lookup(keys)[0]
                out[there] = table.pull(keys[there])
                known |= there
        return keys[~known]

    def build(self, changes: Sequence[RowChange]) -> Table:
        """A table of rows, and of keys that have none."""
        born, table = self._make(0), self._make(0)
        for change in changes:
            load_rows(table, change.keys, change.rows, 1)
            load_rows(table, change.gone, born.pull(change.gone))
        return table

    def keep(self, fetched: Table, now: int) -> None:
        """Caches what was fetched, evicting what was not seen for longest.

        Rows that the publication changed are left out: they may have been fetched in their former state.
        """
        cursor: int | None = 0
        while cursor is not None:
            cursor, rows = fetched.scan(cursor, PART_ROWS)
            same = ~self.last.lookup(rows.keys)[0]
            load_rows(self.kept, rows.keys[same], rows.embeddings[same], rows.counts[same], now)

    def settle(self, cursor: int) -> int | None:
        """Updates some cached rows to the changes of the publication; returns the cursor of the next ones."""
        after, rows = self.last.scan(cursor, PART_ROWS)
        kept, _, seen = self.kept.lookup(rows.keys)
        load_rows(self.kept, rows.keys[kept], rows.embeddings[kept], rows.counts[kept], seen[kept])
        return after

    def found(self, keys: Keys) -> tuple[int, int]:
        """How many keys have a row, and for how many that is known."""
        known, counts, _ = self.kept.lookup(keys)
        newer, newer_counts, _ = self.last.lookup(keys)
        has = np.where(newer, newer_counts, counts * known) > 0
        return int(has.sum()), int((known | newer).sum())


class _Fetched(NamedTuple):
    number: int
    tables: dict[str, Table]


class Cache:
    """A `RowStore` with the recently used rows of a publication. One thread at a time may apply.

    Args:
        first: the publication, its weights and what it changed.
        lookup: for all other rows.
        tables: names of the tables, in the order of the plans.
        convert: converts weights to what readers get.
        nbytes: memory of cached rows and their indexes, shared by the tables in proportion to their size. The changes
            of one publication come on top.
        patience: seconds that a read waits for the head to be followed, or retries because it has moved.
        now: seconds of a monotonic clock.

    Attributes:
        lookups: ids by table and outcome: "hit" (cached), "miss" (the origin was queried) or "failed" (it did not
            answer).

    Raises:
        PublicationCorrupt: the publication cannot be used.
    """

    def __init__(
        self,
        first: PublicationStep,
        lookup: RowLookup,
        tables: list[str],
        convert: Callable[[Any], Any],
        *,
        nbytes: int,
        patience: float = PATIENCE,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shape = PublicationSchema(first.publication)
        self._lookup, self._convert, self._patience, self._now = lookup, convert, patience, now
        capacities = _capacities(self._shape, first.publication, tables, nbytes)
        self._tables = {
            name: _Rows(partial(self._shape.table, name), capacity) for name, capacity in capacities.items()
        }
        self._moved = threading.Condition()
        self._away_until = now()
        self._why_away = ""
        self.fault = ""
        self.lookups: dict[tuple[str, str], int] = {
            (name, outcome): 0 for name in tables for outcome in ("hit", "miss", "failed")
        }
        self._exchange(first, self._checked(first))

    @property
    def rows(self) -> dict[str, int]:
        """Includes ids that are known to have no row."""
        return {name: len(table.kept) for name, table in self._tables.items()}

    @property
    def nbytes(self) -> int:
        return sum(table.kept.nbytes + table.last.nbytes for table in self._tables.values())

    def apply(self, step: PublicationStep) -> None:
        tensors = self._checked(step)
        self._settle()
        self._lookup.follow(step)
        self._exchange(step, tensors)

    def read(self, plans: list[Plan]) -> View:
        """Waits for a round trip to the origin if rows have to be fetched."""
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
                self._wait_followed(fetched.number, until)
        return view

    def read_at_once(self, plans: list[Plan]) -> View | None:
        return self._read(plans, None)[0]

    def found(self, plan: Plan) -> dict[str, tuple[int, int]]:
        """Rows may have been dropped since they were read."""
        with self._moved:
            return {name: table.found(plan.keys(t)) for t, (name, table) in enumerate(self._tables.items())}

    def checksums(self) -> None:
        """There are none, as not all rows are held."""

    def _read(self, plans: list[Plan], fetched: _Fetched | None) -> tuple[View | None, dict[str, Keys]]:
        """The rows of plans; or None and, by table, the keys that are not cached."""
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
            found = self._look_up(wanted)
        except OriginUnavailable:
            self._count_all(wanted, "failed")
            raise
        self._count_all(wanted, "miss")
        tables = {}
        for name, (rows, there) in found.tables.items():
            change = RowChange(name, wanted[name][there], rows[there], wanted[name][~there])
            self._shape.check(change)
            tables[name] = self._tables[name].build([change])
        return _Fetched(found.number, tables)

    def _look_up(self, wanted: dict[str, Keys]) -> LookupResult:
        """Queries the origin, but not for a while after it failed: reads must not pile up."""
        if self._now() < self._away_until:
            raise OriginUnavailable(self._why_away)
        try:
            return self._lookup.look_up(wanted)
        except OriginUnavailable as exc:
            self._why_away, self._away_until = str(exc), self._now() + PAUSE
            raise
        except PublicationCorrupt as exc:
            self.fault = str(exc)
            raise

    def _wait_followed(self, number: int, until: float) -> None:
        """Waits until a publication has been followed.

        Raises:
            OriginUnavailable: it has not been in time, or newer publications kept overtaking the lookups.
        """
        with self._moved:
            left = until - self._now()
            self._moved.wait_for(lambda: self.publication.number >= number, left)
            if self._now() >= until:
                raise OriginUnavailable(
                    f"the head moved during the lookup of rows: they are of publication {number}, but "
                    f"{describe(self.publication)} is loaded; try again"
                )

    def _checked(self, step: PublicationStep) -> Any:
        self._shape.check_weights(step.publication, step.weights)
        for change in step.changes:
            self._shape.check(change)
        return self._convert(step.weights)

    def _settle(self) -> None:
        """Updates cached rows to the changes of the publication, some rows at a time."""
        for table in self._tables.values():
            cursor: int | None = 0
            while cursor is not None:
                with self._moved:
                    cursor = table.settle(cursor)

    def _exchange(self, step: PublicationStep, tensors: Any) -> None:
        """Switches to a publication, once cached rows are those of the one before."""
        last = {
            name: table.build([change for change in step.changes if change.table == name])
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


def _capacities(shape: PublicationSchema, publication: Publication, tables: list[str], nbytes: int) -> dict[str, int]:
    """Number of rows that fit, by table."""
    sizes = {name: shape.table(name).stats()["row_bytes"] + _INDEX_BYTES for name in tables}
    whole = {name: size * max(1, publication.rows.get(name, 0)) for name, size in sizes.items()}
    share = nbytes / max(1, sum(whole.values()))
    return {name: max(1, int(share * whole[name] / size)) for name, size in sizes.items()}
