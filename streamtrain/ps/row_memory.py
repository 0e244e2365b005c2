"""The memory that the rows of a process may take, divided between its tables; all other rows are on disk."""

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from streamtrain._core import Table
from streamtrain.periodic import FailureLog, PeriodicTask

if TYPE_CHECKING:
    from streamtrain.ps.shard import Shard

logger = logging.getLogger(__name__)

_SECONDS = 0.5  # between two divisions
_LEAST = 1 << 20  # bytes of a table
_INDEX_BYTES = 8  # of a row in memory, with what the clock algorithm needs


class Need(NamedTuple):
    """Of a table.

    Attributes:
        least: bytes without which it cannot be: the index of rows on disk, changes, and so on.
        all: bytes with all of its rows in memory.
    """

    least: int
    all: int


class RowMemory:
    """The budget of a process for rows, their indexes and changes. Thread-safe.

    Each table gets what it needs for all of its rows, as long as there is enough; the larger ones share the rest evenly
    (max-min fairness), again and again as tables grow. Tables with a capacity are bounded by that: they are in memory
    and count, but get no share.

    Args:
        budget: in bytes.
        folder: where rows are that have no room. Files there have no names: they go with the process.
        least: bytes that a table gets in any case.
    """

    def __init__(self, budget: float, folder: str, *, least: int = _LEAST) -> None:
        self._budget, self._folder, self._least = int(budget), folder, least
        self._shards: weakref.WeakSet[Shard] = weakref.WeakSet()
        self._failures = FailureLog()
        self._errors = 0
        self._task = PeriodicTask("row memory", self.divide, _SECONDS, subject="dividing memory between tables")
        self._task.start()

    def options(self, tables: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Options of new tables, by their settings: even shares of the budget."""
        share = max(self._budget // max(1, sum(map(_has_disk, tables))), self._least)
        return [{"memory": share, "folder": self._folder} if _has_disk(one) else {} for one in tables]

    def add(self, shard: "Shard") -> None:
        """Its tables take part from now on, for as long as it is there."""
        self._shards.add(shard)

    def close(self) -> None:
        """Ends."""
        self._task.close()

    def divide(self) -> None:
        """Gives each table its share, and logs rows that could not be written to disk."""
        tables: dict[int, tuple[Table, bool]] = {}  # shards that follow one another have the same ones
        for shard in [*self._shards]:
            for settings, table in zip(shard.spec.tables, shard.tables, strict=True):
                tables[id(table)] = table, _has_disk(settings)
        left = self._budget - sum(table.nbytes for table, has_disk in tables.values() if not has_disk)
        divided = [table for table, has_disk in tables.values() if has_disk]
        for table, share in zip(divided, shares([_need(table) for table in divided], left, self._least), strict=True):
            table.set_memory(share)
        self._report(divided)

    def _report(self, tables: Sequence[Table]) -> None:
        errors = sum(table.stats()["disk_errors"] for table in tables)
        if errors > self._errors:
            why = next(table.disk_error for table in tables if table.disk_error)
            if line := self._failures.line(f"rows stay in memory, as they cannot be written to {self._folder}: {why}"):
                logger.error(line)
        elif self._failures.end():
            logger.info("rows are written to %s again", self._folder)
        self._errors = errors


def _has_disk(settings: Mapping[str, Any]) -> bool:
    return not settings.get("capacity")


def _need(table: Table) -> Need:
    stats = table.stats()
    others = stats["dirty_bytes"] + stats["sketch_bytes"]
    of_all = others + stats["rows"] * (stats["row_bytes"] + _INDEX_BYTES)
    return Need(others + stats["index_bytes"] + stats["disk_index_bytes"], of_all)


def shares(needs: Sequence[Need], budget: int, least: int = _LEAST) -> list[int]:
    """Bytes of each table: what it needs, or an even part of what those who need less leave.

    If there is enough for all, the rest is spread evenly. None gets less than `least`, and than its own.
    """
    given = [0] * len(needs)
    left, many = budget, len(needs)
    for i in sorted(range(len(needs)), key=lambda i: needs[i].all):
        given[i] = max(min(needs[i].all, left // many), needs[i].least, least)
        left, many = max(0, left - given[i]), many - 1
    return [share + left // len(needs) for share in given]
