"""Publisher: publishes one shard while it is trained."""

import json
import threading
from collections.abc import Iterator

from streamtrain._core import Table
from streamtrain.ps.shard import Shard
from streamtrain.store.origin import RowChange, Weights
from streamtrain.store.redis_dictionaries import RedisDictionaries
from streamtrain.store.redis_layout import FullPublicationNeeded, Layout

_READ_ROWS = 1 << 12  # in one turn, as pushes wait meanwhile
_SCANNED_IDS = 1 << 16


class ShardPublisher:
    """See `Publisher` of ps/node.py; of one shard.

    What changes goes into a channel of each table from the first full publication on. What was taken out of it is kept
    in mind until the next publication has another number: only then is it sure that this one was committed.

    Args:
        dictionaries: where it is published.
    """

    def __init__(self, dictionaries: RedisDictionaries) -> None:
        self._dictionaries = dictionaries
        self._lock = threading.Lock()  # a second call may come while one waits that its caller has given up
        self._channels: list[int] = []
        self._number = 0
        self._written: list[RowChange] = []

    def write(self, shard: Shard, number: int, layout: str) -> str:
        """See Publisher."""
        with self._lock:
            stand = shard.stand()  # before rows are read, which so are of this clock or a later one
            watermark = shard.watermark
            if not layout and not self._channels:
                return json.dumps({"full": f"shard {shard.index} has just begun"})
            changes = self._all(shard) if layout else self._changes(shard, number)
            weights = Weights(shard.dense.pull(), shard.statistics.pull())
            rows = {one["name"]: len(table) for one, table in zip(shard.spec.tables, shard.tables, strict=True)}
            try:
                part = self._dictionaries.write(
                    number, shard.index, changes, weights, rows=rows, layout=Layout.of_json(layout) if layout else None
                )
            except FullPublicationNeeded as exc:
                return json.dumps({"full": str(exc)})
            self._number = number
            return json.dumps({"part": part, "clock": list(stand.clock.items()), "watermark": watermark})

    def apply(self, shard: Shard) -> None:
        """See Publisher."""
        with self._lock:
            self._dictionaries.apply(shard.index)

    def _all(self, shard: Shard) -> Iterator[RowChange]:
        """Every row; what changes from here on is of the next publication."""
        for table, channel in zip(shard.tables, self._channels, strict=False):
            table.close_channel(channel)
        self._channels, self._written = [table.open_channel() for table in shard.tables], []
        return (
            change
            for one, table in zip(shard.spec.tables, shard.tables, strict=True)
            for change in _rows(one["name"], table)
        )

    def _changes(self, shard: Shard, number: int) -> list[RowChange]:
        """What has changed since the publication before."""
        names = [one["name"] for one in shard.spec.tables]
        if number == self._number:  # it was written, but not committed
            for change in self._written:
                t = names.index(change.table)
                for keys in (change.keys, change.gone):
                    shard.tables[t].mark_dirty(self._channels[t], keys)
        self._number, self._written = number, []
        for name, table, channel in zip(names, shard.tables, self._channels, strict=True):
            while table.pending(channel):
                drained = table.drain(channel, _READ_ROWS)
                self._written.append(RowChange(name, drained.rows.keys, drained.rows.embeddings, drained.tombstones))
        return self._written


def _rows(name: str, table: Table) -> Iterator[RowChange]:
    cursor: int | None = 0
    while cursor is not None:
        cursor, rows = table.scan(cursor, _SCANNED_IDS)
        yield RowChange(name, rows.keys, rows.embeddings, rows.keys[:0])
