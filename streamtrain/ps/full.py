"""Full: says once that a table has come to its capacity."""

import logging

logger = logging.getLogger(__name__)


class Full:
    """Of the tables of one shard; used by one thread at a time.

    Args:
        index: of the shard.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._said: set[str] = set()

    def note(self, table: str, evicted: int) -> None:
        """So many rows of a table went because there were too many."""
        if evicted and table not in self._said:
            self._said.add(table)
            logger.warning(
                "table %s of shard %d is at its capacity: rows go that were not seen for longest", table, self._index
            )
