"""The log: a Redis stream with the changes of every publication of the head, in order.

A shard appends entries that carry its write token. The commit entry names the tokens that belong to the publication;
entries with other tokens are left over from failed writers and are skipped.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from streamtrain.errors import PublicationCorrupt
from streamtrain.store.json import convert, parse_json
from streamtrain.store.publication import Publication, RowChange, Weights
from streamtrain.store.redis.buckets import EncodedChange
from streamtrain.store.redis.layout import Layout, RedisKeys
from streamtrain.store.redis.server import Fields, RedisServer, parse_fields

_ENTRY = re.compile(rb"\d{1,20}-\d{1,20}")
_ROWS = 1 << 13  # of an entry
_TOGETHER = 8  # entries that are written or read at once


class WriteToken(NamedTuple):
    """Marks what a shard has written for a publication in one attempt.

    Attributes:
        shard: index of the shard.
        name: unique name.
        entries: number of entries in the log.
    """

    shard: int
    name: str
    entries: int


class CommittedPublication(NamedTuple):
    """A publication in the log.

    Attributes:
        id: id of its commit entry.
        publication: its metadata.
        layout: layout of its dictionary.
        is_full: whether its rows are in a new dictionary instead of the log.
        weights: weights of all shards.
        changes: changes, in order of the shards.
    """

    id: str
    publication: Publication
    layout: Layout
    is_full: bool
    weights: Weights
    changes: list[EncodedChange]


class Collector:
    """Assembles publications from entries, which are passed in order.

    Args:
        name: name of the log, for messages.
        shard: the shard whose changes to collect; None: all.
    """

    def __init__(self, name: str, shard: int | None = None) -> None:
        self._name, self._shard = name, shard
        self._entries: dict[bytes, list[Fields]] = {}

    def take(self, entry: str, fields: Fields) -> CommittedPublication | None:
        """Takes an entry; returns the publication that it completes, if any.

        Raises:
            PublicationCorrupt: entries are missing or damaged.
        """
        try:
            if b"c" not in fields:
                self._entries.setdefault(fields[b"a"], []).append(fields)
                return None
            committed = self._committed(entry, fields)
        except (KeyError, TypeError, ValueError) as exc:
            raise PublicationCorrupt(f"entry {entry} of {self._name} is damaged: {exc}") from exc
        self._entries = {}
        return committed

    def _committed(self, entry: str, fields: Fields) -> CommittedPublication:
        layout = Layout.from_json(fields[b"l"])
        publication = Publication.from_json(parse_json(fields[b"c"]))
        weights: list[Weights] = []
        changes: list[EncodedChange] = []
        for token in convert(list[WriteToken], parse_json(fields[b"a"])):
            found = self._entries.get(token.name.encode(), [])
            if len(found) != token.entries:
                raise PublicationCorrupt(
                    f"{self._name} has {len(found)} of {token.entries} entries of shard {token.shard} for publication "
                    f"{publication.number}"
                )
            for one in found:
                if b"d" in one:
                    weights.append(Weights(_floats(one[b"d"]), _floats(one[b"x"])))
                elif self._shard in (None, token.shard):
                    changes.append(_change(one, layout))
        return CommittedPublication(entry, publication, layout, fields[b"f"] == b"1", concat_weights(weights), changes)


class PublicationLog:
    """The log of a model. Thread-safe."""

    def __init__(self, server: RedisServer, keys: RedisKeys) -> None:
        self._server, self._keys = server, keys
        self.name = f"the log of {keys.model} at {server.name}"

    def append(self, name: str, changes: Sequence[EncodedChange], weights: Weights) -> tuple[int, int]:
        """Appends the changes of a shard under a token name; returns the number of entries and bytes."""
        entries = size = 0
        waiting: list[tuple[Any, ...]] = []
        for fields in _entries(changes, weights):
            waiting.append(("XADD", self._keys.log, "*", "a", name, *fields))
            entries += 1
            size += sum(map(len, fields[1::2]))
            if len(waiting) == _TOGETHER:
                self._server.call_all(waiting)
                waiting.clear()
        if waiting:
            self._server.call_all(waiting)
        return entries, size

    def between(self, after: str, last: str, shard: int | None = None) -> Iterator[CommittedPublication]:
        """Publications after one commit entry up to another; with `shard`, only the changes of that shard.

        Raises:
            PublicationCorrupt: the log no longer has them, or they are damaged.
        """
        if after == last:
            raise PublicationCorrupt(f"{self.name} is damaged: entry {last} follows itself")
        collector = Collector(self.name, shard)
        at = after
        while after != last:
            entries = self._server.call("XRANGE", self._keys.log, f"({at}", last, "COUNT", _TOGETHER)
            if not entries:
                raise PublicationCorrupt(f"{self.name} ends before entry {last}, or that entry is not a commit")
            self.check(after)
            for entry, fields in entries:
                at = entry.decode()
                if found := collector.take(at, parse_fields(fields)):
                    yield found
                    after = at

    def check(self, after: str) -> None:
        """Raises PublicationCorrupt unless the log still has all entries after this one."""
        oldest = self._server.call("ZRANGE", self._keys.steps, 0, 0)
        first = parse_entry_id(oldest[0].partition(b":")[0]) if oldest else ""
        is_first = after == "0-0" and oldest and self._server.call("ZCARD", self._keys.steps) == 1
        if not oldest or (_order(first) > _order(after) and not is_first):
            raise PublicationCorrupt(f"{self.name} no longer has the entries after {after}")

    def entry_of(self, number: int) -> str | None:
        """The id of the commit entry of a publication; None if the log no longer has it."""
        found = self._server.call("ZRANGEBYSCORE", self._keys.steps, number, number)
        return parse_entry_id(found[0].partition(b":")[0]) if found else None

    def publication_at(self, entry: str) -> Publication | None:
        """The publication of a commit entry; None if the entry was dropped or is damaged."""
        found = self._server.call("XRANGE", self._keys.log, entry, entry)
        try:
            return Publication.from_json(parse_json(parse_fields(found[0][1])[b"c"]))
        except (IndexError, KeyError, ValueError):
            return None

    def wait(self, after: str, seconds: float) -> list[tuple[str, Fields]]:
        """Some entries after an id; waits up to `seconds`, or about half the timeout, for the first."""
        found = self._server.wait(self._keys.log, after, _TOGETHER, seconds)
        return [(entry.decode(), parse_fields(fields)) for entry, fields in found]


def parse_entry_id(data: bytes) -> str:
    """Parses the id of a log entry.

    Raises:
        PublicationCorrupt: the text is not an id.
    """
    if not _ENTRY.fullmatch(data):
        raise PublicationCorrupt(f"{data!r} is not the id of a log entry")
    return data.decode()


def concat_weights(weights: Sequence[Weights]) -> Weights:
    """Concatenates the slices of the shards, in their order."""
    return Weights(*(np.concatenate([np.empty(0, np.float32), *slices]) for slices in zip(*weights, strict=True)))


def decode_change(change: EncodedChange, layout: Layout) -> RowChange:
    """Decodes the rows of a change to float32."""
    return RowChange(change.table, change.keys, layout.codec(change.table).decode(change.rows), change.gone)


def _entries(changes: Sequence[EncodedChange], weights: Weights) -> Iterator[tuple[bytes, ...]]:
    for change in changes:
        table = change.table.encode()
        for at in range(0, max(len(change.keys), len(change.gone)), _ROWS):
            keys, rows, gone = (part[at : at + _ROWS] for part in (change.keys, change.rows, change.gone))
            packed = keys.astype("<u8").tobytes(), rows.tobytes(), gone.astype("<u8").tobytes()
            yield b"t", table, b"k", packed[0], b"v", packed[1], b"g", packed[2]
    yield b"d", weights.dense.astype("<f4").tobytes(), b"x", weights.statistics.astype("<f4").tobytes()


def _change(fields: Fields, layout: Layout) -> EncodedChange:
    table = fields[b"t"].decode()
    keys = np.frombuffer(fields[b"k"], "<u8").astype(np.uint64, copy=False)
    rows = np.frombuffer(fields[b"v"], np.uint8).reshape(len(keys), layout.codec(table).width)
    return EncodedChange(table, keys, rows, np.frombuffer(fields[b"g"], "<u8").astype(np.uint64, copy=False))


def _floats(data: bytes) -> Any:
    return np.frombuffer(data, "<f4").astype(np.float32, copy=False)


def _order(entry: str) -> tuple[int, int]:
    time, _, number = entry.partition("-")
    return int(time), int(number)
