"""Publisher: publishes one shard while it is trained."""

import json
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

import streamtrain.ps.rpc.ps_pb2 as pb
from streamtrain.errors import PublicationCorrupt, ShardRefused, StreamtrainError
from streamtrain.ps.clock import Clock
from streamtrain.ps.hooks import ChangedRows
from streamtrain.ps.shard import Shard, scan_rows
from streamtrain.publish.published_table import PublishedTable, row_sums
from streamtrain.store.publication import Floats, RowChange, Weights
from streamtrain.store.redis.dictionary import RedisDictionaries, ShardPart
from streamtrain.store.redis.layout import FullPublicationNeeded, Layout

logger = logging.getLogger(__name__)

_MOST_TOKENS = 1000


class ShardPublisher:
    """See `Publisher` of ps/nodes/node.py; of one shard.

    What changes is followed from the first full publication on. What was read of it is kept in mind until the head
    names the token under which it was written: only that says that it was committed. A number does not, as several
    attempts may bear it, of which an earlier one may be committed late.

    A shard that has rows or weights which are not finite writes nothing, and answers which.

    Args:
        dictionaries: where it is published.
    """

    def __init__(self, dictionaries: RedisDictionaries) -> None:
        self._dictionaries = dictionaries
        self._lock = threading.Lock()  # a second call may come while one waits that its caller has given up
        self._tables: dict[str, PublishedTable] = {}
        self._written: list[RowChange] = []  # what was read of the changes last
        self._token = ""  # under which it was written; "": it was not
        self._tokens: list[str] = []  # that the head may name: of the last one that it did, and of all attempts since
        self._others = ""  # the first of these, if other shards wrote it
        self._since: Clock = {}  # what it must have then

    def check(self, shard: Shard, generation: int) -> None:
        self._dictionaries.check_lease(shard.run.id, generation)

    def write(self, shard: Shard, number: int, layout: str) -> str:
        full = _parse_layout(layout, shard) if layout else None
        if full is not None and full.shards != shard.shards:
            raise ShardRefused(f"the layout is of {full.shards} shards, this is one of {shard.shards}")
        with self._lock:
            moved = shard.moved
            shard.sweep()  # which has to do with the number of rows, and gives some other ids
            progress = shard.progress()  # before rows are read, which so are of this clock or a later one
            watermark = shard.watermark
            if not layout and (why := self._why_full(shard)):
                return json.dumps({"full": why})
            weights = Weights(shard.dense.pull(), shard.statistics.pull())
            changes = [] if layout else self._changes(shard)
            read = _scan_tables(shard) if layout else ((change.table, change.rows) for change in changes)
            if bad := [*_bad_weights(weights), *_bad_rows(read)]:
                found = f"shard {shard.index} has {' and '.join(bad)} that are not finite"
                return json.dumps({"bad": found, "shard": shard.index})
            try:
                part = self._write(shard, number, changes, weights, full)
            except (FullPublicationNeeded, PublicationCorrupt) as exc:
                return json.dumps({"full": str(exc)})
            if full is not None and shard.moved != moved:
                return json.dumps({"full": f"rows of shard {shard.index} have moved while they were read"})
            self._token = part.token.name
            self._tokens.append(self._token)
            del self._tokens[1:-_MOST_TOKENS]  # should one of these be committed now, everything is written anew
            return json.dumps({"part": part, "clock": list(progress.clock.items()), "watermark": watermark})

    def _write(
        self, shard: Shard, number: int, changes: Iterable[RowChange], weights: Weights, full: Layout | None
    ) -> ShardPart:
        rows: dict[str, int] = {}
        if full is not None:
            changes = self._all(shard, rows)
        else:
            self._count(rows)
        # Of a full publication the rows are counted once all changes have been written.
        shards = shard.shards if full is None and self._others else None
        return self._dictionaries.write(number, shard.index, changes, weights, rows=rows, layout=full, shards=shards)

    def apply(self, shard: Shard) -> None:
        with self._lock:
            if not self._others or self._dictionaries.token(0) != self._others:  # others have applied what is theirs
                self._dictionaries.apply(shard.index)

    def sums(self, shard: Shard, number: int, layout: str) -> Any:
        """Needs 16 bytes a row meanwhile; what is trained on is not held back."""
        of_head = _parse_layout(layout, shard)
        with self._lock:
            if why := self._why_full(shard):
                return pb.RowSums(full=why)
            in_vain = [] if self._token == self._tokens[0] else self._written
            return row_sums(self._tables.values(), of_head, in_vain)

    def take_over(self, shard: Shard, changed: ChangedRows, head: str) -> None:
        with self._lock:
            channels = changed.channels if changed.kept is None else self._release(changed.kept)
            self._forget()
            if not channels:
                return
            self._others, self._since, self._token, self._tokens = head, changed.since, head, [head]
            of_tables = zip(shard.spec.tables, shard.tables, channels, strict=True)
            self._tables = {one["name"]: PublishedTable(one, table, channel) for one, table, channel in of_tables}
            for table, channel, keys in zip(shard.tables, channels, changed.gained, strict=False):
                table.mark_dirty(channel, keys)

    def _release(self, kept: Shard) -> list[int]:
        """The channels of a shard, with all that the head does not have of it; none if it has nothing to do with it."""
        try:
            if why := self._why_full(kept):
                logger.info("everything is published anew: %s", why)
                return []
        except StreamtrainError as exc:
            logger.warning("everything is published anew: %s", exc)
            return []
        self._put_back()
        published, self._tables = self._tables, {}
        return [table.release() for table in published.values()]

    def forget(self) -> None:
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        self._token, self._tokens, self._written, self._others = "", [], [], ""
        for table in self._tables.values():
            table.close()
        self._tables = {}

    def _all(self, shard: Shard, rows: dict[str, int]) -> Iterator[RowChange]:
        """Every row; what changes from here on is of the next publication. Then tells how many rows there are."""
        self._forget()
        pairs = zip(shard.spec.tables, shard.tables, strict=True)
        self._tables = {one["name"]: PublishedTable(one, table) for one, table in pairs}
        with shard.reading():
            for published in self._tables.values():
                yield from published.all()
                yield published.changes()
        self._count(rows)

    def _why_full(self, shard: Shard) -> str:
        """Why changes cannot follow the head: it has not what they would build on; "": they can."""
        if not self._tables:
            return f"shard {shard.index} has just started"
        if self._others:
            return self._why_not_theirs(shard)
        return self._why_not_mine(shard)

    def _why_not_theirs(self, shard: Shard) -> str:
        """The same, of a shard that goes on from what others have written, until the head has its own part."""
        if self._dictionaries.token(0) != self._others:
            self._others = ""
            return self._why_not_mine(shard)
        head = self._dictionaries.head()
        if head is None or any(head.clock.get(partition, 0) < at for partition, at in self._since.items()):
            return f"the head is older than the rows from which shard {shard.index} goes on"
        del self._tokens[: self._tokens.index(self._others)]
        return ""

    def _why_not_mine(self, shard: Shard) -> str:
        committed = self._dictionaries.token(shard.index)
        if committed is None:
            return f"there is no head, or it has no part of shard {shard.index}"
        if committed not in self._tokens:
            return f"the head's part of shard {shard.index} was written by another process"
        del self._tokens[: self._tokens.index(committed)]
        return ""

    def _changes(self, shard: Shard) -> list[RowChange]:
        """What has changed since the head."""
        self._put_back()
        self._token, self._written = "", []
        with shard.reading():
            self._written.extend(table.changes() for table in self._tables.values())
        return self._written

    def _put_back(self) -> None:
        """Has come again what was read last, if it is not in the head."""
        if self._token != self._tokens[0]:
            for change in self._written:
                self._tables[change.table].put_back(change)

    def _count(self, rows: dict[str, int]) -> None:
        rows.update({name: table.rows for name, table in self._tables.items()})


def _parse_layout(text: str, shard: Shard) -> Layout:
    """What the cluster's publisher has sent.

    Raises:
        ShardRefused: it is not a layout, or its tables are not the shard's.
    """
    try:
        layout = Layout.from_json(text)
    except ValueError as exc:
        raise ShardRefused(f"invalid layout of a dictionary: {exc}") from exc
    mine = {one["name"]: one["dim"] for one in shard.spec.tables}
    theirs = {name: table.dim for name, table in layout.tables.items()}
    if theirs != mine:
        raise ShardRefused(f"the layout has tables {theirs}, this shard has {mine}")
    return layout


def _scan_tables(shard: Shard) -> Iterator[tuple[str, Floats]]:
    with shard.reading():
        for one, table in zip(shard.spec.tables, shard.tables, strict=True):
            for rows in scan_rows(table):
                yield one["name"], rows.embeddings


def _bad_rows(read: Iterable[tuple[str, Floats]]) -> Iterator[str]:
    """How many rows of which tables are not finite."""
    counts: Counter[str] = Counter()
    for table, rows in read:
        if not np.isfinite(rows).all():
            counts[table] += len(rows) - int(np.isfinite(rows).all(axis=1).sum())
    return (f"{count} rows of table {table}" for table, count in counts.items())


def _bad_weights(weights: Weights) -> Iterator[str]:
    """How many weights are not finite."""
    for name, values in (("dense weights", weights.dense), ("statistics", weights.statistics)):
        if count := len(values) - int(np.isfinite(values).sum()):
            yield f"{count} {name}"
