"""The memory that the rows of a process may take, divided between its tables; all other rows are on disk."""

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from streamtrain._core import Table
from streamtrain.disk import rows_folder
from streamtrain.memory import all_megabytes, free_megabytes
from streamtrain.periodic import FailureLog, PeriodicTask

if TYPE_CHECKING:
    from streamtrain.ps.shard import Shard
    from streamtrain.settings.groups import PsSettings

logger = logging.getLogger(__name__)

_SECONDS = 0.5  # between two divisions
_LEAST = 1 << 20  # bytes of a table
INDEX_BYTES = 8  # of a row in memory, with what the clock algorithm needs


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
        budget: in bytes; "auto": what the tables have, and what is free on the machine or in the container, but for a
            tenth of its memory. All processes of a machine can have that: none takes what another one has.
        folder: where rows are that have no room. Files there have no names: they go with the process.
        least: bytes that a table gets in any case.
        free: megabytes that are free.
        everything: megabytes that there are.
    """

    def __init__(
        self,
        budget: float | Literal["auto"],
        folder: str,
        *,
        least: int = _LEAST,
        free: Callable[[], int] = free_megabytes,
        everything: Callable[[], int] = all_megabytes,
    ) -> None:
        self._budget, self._folder, self._least = budget, folder, least
        self._free, self._kept_free = free, everything() // 10
        self._shards: weakref.WeakSet[Shard] = weakref.WeakSet()
        self._failures = FailureLog()
        self._errors = 0
        self._task = PeriodicTask("row memory", self.divide, _SECONDS, subject="dividing memory between tables")
        self._task.start()

    @classmethod
    def from_settings(cls, settings: "PsSettings") -> "RowMemory | None":
        """As `ps.memory` and `ps.disk` say; None: all rows are in memory."""
        return cls(settings.memory, rows_folder(settings.disk, "ps.disk")) if settings.memory else None

    def options(self, tables: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Options of new tables, by their settings: even shares of the budget."""
        share = max(self._bytes(0) // max(1, sum(map(_has_disk, tables))), self._least)
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
        sizes = {i: table.nbytes for i, (table, _) in tables.items()}
        left = self._bytes(sum(sizes.values())) - sum(sizes[i] for i, (_, has_disk) in tables.items() if not has_disk)
        divided = [table for table, has_disk in tables.values() if has_disk]
        for table, share in zip(divided, shares([_need(table) for table in divided], left, self._least), strict=True):
            table.set_memory(share)
        self._report(divided)

    def _bytes(self, used: int) -> int:
        """The budget, of tables that have `used` bytes now."""
        if self._budget != "auto":
            return int(self._budget)
        return max(0, used + ((self._free() - self._kept_free) << 20))

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
    of_all = others + stats["rows"] * (stats["row_bytes"] + INDEX_BYTES)
    return Need(others + stats["index_bytes"] + stats["disk_index_bytes"], of_all)


def shares(needs: Sequence[Need], budget: int, least: int = _LEAST) -> list[int]:
    """Bytes of each table: what it needs, or as much as the others that need more.

    If there is enough for all, the rest is spread evenly. None gets less than `least`, and than its own, even if that
    is more than there is.
    """

    def given(level: int) -> list[int]:
        return [max(min(need.all, level), need.least, least) for need in needs]

    low, high = 0, max(budget, 0)
    while low < high:
        level = (low + high + 1) // 2
        low, high = (level, high) if sum(given(level)) <= budget else (low, level - 1)
    left = max(0, budget - sum(given(low)))
    return [share + left // len(needs) for share in given(low)]
