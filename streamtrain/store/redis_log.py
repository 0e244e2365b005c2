"""The log: a stream with what every publication of the head has changed, in order.

A shard appends entries that bear its token. The entry of the commit names the tokens that it consists of; entries of
other tokens are of writers that failed, and are passed over.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from streamtrain.errors import PublicationCorrupt
from streamtrain.store.origin import Publication, RowChange, Weights
from streamtrain.store.plain import converted, parsed
from streamtrain.store.redis_buckets import Encoded
from streamtrain.store.redis_layout import Keys, Layout
from streamtrain.store.redis_server import RedisServer

_ENTRY = re.compile(rb"\d{1,20}-\d{1,20}")
_ROWS = 1 << 13  # of an entry
_TOGETHER = 8  # entries that are written or read at once

Fields = Mapping[bytes, bytes]


class Token(NamedTuple):
    """What a shard has written for one publication, in one attempt.

    Attributes:
        shard: whose.
        name: unique.
        entries: how many there are in the log.
    """

    shard: int
    name: str
    entries: int


class Committed(NamedTuple):
    """A publication as it stands in the log.

    Attributes:
        id: of its last entry.
        publication: what is said of it.
        layout: of its dictionary.
        is_full: whether its rows are in a new dictionary, and not in the log.
        weights: of all shards.
        changes: in order of the shards.
    """

    id: str
    publication: Publication
    layout: Layout
    is_full: bool
    weights: Weights
    changes: list[Encoded]


class Collector:
    """Puts entries, given in order, together to publications.

    Args:
        name: of the log, for messages.
        shard: whose changes to collect; None: of all.
    """

    def __init__(self, name: str, shard: int | None = None) -> None:
        self._name, self._shard = name, shard
        self._entries: dict[bytes, list[Fields]] = {}

    def take(self, entry: str, fields: Fields) -> Committed | None:
        """A publication if the entry completes one.

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

    def _committed(self, entry: str, fields: Fields) -> Committed:
        layout = Layout.of_json(fields[b"l"])
        publication = Publication.of_json(parsed(fields[b"c"]))
        weights: list[Weights] = []
        changes: list[Encoded] = []
        for token in converted(list[Token], parsed(fields[b"a"])):
            found = self._entries.get(token.name.encode(), [])
            if len(found) != token.entries:
                raise PublicationCorrupt(
                    f"of publication {publication.number} {self._name} has {len(found)} entries of shard "
                    f"{token.shard}, not {token.entries}"
                )
            for one in found:
                if b"d" in one:
                    weights.append(Weights(_floats(one[b"d"]), _floats(one[b"x"])))
                elif self._shard in (None, token.shard):
                    changes.append(_change(one, layout))
        return Committed(entry, publication, layout, fields[b"f"] == b"1", together(weights), changes)


class Log:
    """The log of a model. Thread-safe.

    Args:
        server: that has it.
        keys: of the model.
    """

    def __init__(self, server: RedisServer, keys: Keys) -> None:
        self._server, self._keys = server, keys
        self.name = f"the log of {keys.model} at {server.name}"

    def append(self, name: str, changes: Sequence[Encoded], weights: Weights) -> tuple[int, int]:
        """Writes what a shard has changed under the name of its token; returns the number of entries, and bytes."""
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

    def between(self, after: str, last: str, shard: int | None = None) -> Iterator[Committed]:
        """Publications after one entry up to another, that of a commit; changes of one shard only, if it is given.

        Raises:
            PublicationCorrupt: they are not there any more, or are damaged.
        """
        if after == last:
            raise PublicationCorrupt(f"{self.name} is damaged: entry {last} is said to follow on itself")
        collector = Collector(self.name, shard)
        at = after
        while after != last:
            entries = self._server.call("XRANGE", self._keys.log, f"({at}", last, "COUNT", _TOGETHER)
            if not entries:
                raise PublicationCorrupt(f"{self.name} ends before entry {last}, or that is of no commit")
            self.check(after)
            for entry, fields in entries:
                at = entry.decode()
                if found := collector.take(at, as_fields(fields)):
                    yield found
                    after = at

    def check(self, after: str) -> None:
        """Whether all entries after this one are still there.

        Raises:
            PublicationCorrupt: they are not.
        """
        oldest = self._server.call("ZRANGE", self._keys.steps, 0, 0)
        first = entry_in(oldest[0].partition(b":")[0]) if oldest else ""
        is_first = after == "0-0" and oldest and self._server.call("ZCARD", self._keys.steps) == 1
        if not oldest or (_order(first) > _order(after) and not is_first):
            raise PublicationCorrupt(f"{self.name} has dropped what came after entry {after}")

    def entry_of(self, number: int) -> str | None:
        """The entry of the commit of a publication, if it is still there."""
        found = self._server.call("ZRANGEBYSCORE", self._keys.steps, number, number)
        return entry_in(found[0].partition(b":")[0]) if found else None

    def publication_at(self, entry: str) -> Publication | None:
        """What an entry of a commit says; None: the entry has been dropped, or is damaged."""
        found = self._server.call("XRANGE", self._keys.log, entry, entry)
        try:
            return Publication.of_json(parsed(as_fields(found[0][1])[b"c"]))
        except (IndexError, KeyError, ValueError):
            return None

    def wait(self, after: str, seconds: float) -> list[tuple[str, Fields]]:
        """Some entries after one; waits for the first for at most so long, or about half the timeout."""
        found = self._server.wait(self._keys.log, after, _TOGETHER, seconds)
        return [(entry.decode(), as_fields(fields)) for entry, fields in found]


def entry_in(data: bytes) -> str:
    """The id of an entry, as a key of ours names it.

    Raises:
        PublicationCorrupt: it is none.
    """
    if not _ENTRY.fullmatch(data):
        raise PublicationCorrupt(f"{data!r} is no entry of a log: it is damaged")
    return data.decode()


def together(weights: Sequence[Weights]) -> Weights:
    """The whole from slices in order of the shards."""
    return Weights(*(np.concatenate([np.empty(0, np.float32), *slices]) for slices in zip(*weights, strict=True)))


def decoded(change: Encoded, layout: Layout) -> RowChange:
    """A change with rows as float32."""
    return RowChange(change.table, change.keys, layout.codec(change.table).decode(change.rows), change.gone)


def as_fields(flat: Any) -> Fields:
    """Fields of an entry, which come flat, or as a dictionary."""
    return flat if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))


def _entries(changes: Sequence[Encoded], weights: Weights) -> Iterator[tuple[bytes, ...]]:
    for change in changes:
        table = change.table.encode()
        for at in range(0, max(len(change.keys), len(change.gone)), _ROWS):
            keys, rows, gone = (part[at : at + _ROWS] for part in (change.keys, change.rows, change.gone))
            packed = keys.astype("<u8").tobytes(), rows.tobytes(), gone.astype("<u8").tobytes()
            yield b"t", table, b"k", packed[0], b"v", packed[1], b"g", packed[2]
    yield b"d", weights.dense.astype("<f4").tobytes(), b"x", weights.statistics.astype("<f4").tobytes()


def _change(fields: Fields, layout: Layout) -> Encoded:
    table = fields[b"t"].decode()
    keys = np.frombuffer(fields[b"k"], "<u8").astype(np.uint64, copy=False)
    rows = np.frombuffer(fields[b"v"], np.uint8).reshape(len(keys), layout.codec(table).width)
    return Encoded(table, keys, rows, np.frombuffer(fields[b"g"], "<u8").astype(np.uint64, copy=False))


def _floats(data: bytes) -> Any:
    return np.frombuffer(data, "<f4").astype(np.float32, copy=False)


def _order(entry: str) -> tuple[int, int]:
    time, _, number = entry.partition("-")
    return int(time), int(number)
