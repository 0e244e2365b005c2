"""Dictionaries of Redis, to which shards publish: a log of what changed, and the head's rows.

A publication is in the log before it is committed, and its rows are written over those of the head's dictionary only
afterwards. So a writer that fails leaves nothing behind that anybody would read; and whoever reads the dictionary, and
then the log up to a commit, has exactly that publication.

A full publication writes its rows into a new dictionary instead, which its commit makes the head's.
"""

import json
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamtrain.errors import PublicationCorrupt, PublicationError
from streamtrain.store.origin import Publication, RowChange, Weights
from streamtrain.store.redis_buckets import Buckets, Encoded
from streamtrain.store.redis_layout import FullPublicationNeeded, Layout, OutOfTurn, TableSize
from streamtrain.store.redis_log import Token, entry_in
from streamtrain.store.redis_model import Head, RedisModel
from streamtrain.store.redis_scripts import APPLIED, COMMIT, OWN


class Part(NamedTuple):
    """What a shard has written for a publication; plain values.

    Attributes:
        number: of the publication.
        dictionary: to which it belongs.
        token: of its entries in the log.
        size: bytes of those.
        rows: by table, how many the shard has in all.
    """

    number: int
    dictionary: int
    token: Token
    size: int
    rows: dict[str, int]


class _Pending(NamedTuple):
    token: Token
    before: str  # entry of the commit before
    changes: list[Encoded]


class RedisDictionaries:
    """Publishes a model. Thread-safe, but a shard is to be written by one thread at a time.

    Every method may raise OriginUnavailable, after which it may be called again, and PublicationError.

    Args:
        model: where it is published.
        log_bytes: what the log keeps for those who follow; the last two publications in any case.
    """

    def __init__(self, model: RedisModel, *, log_bytes: int = 256 << 20) -> None:
        self._model, self._log_bytes = model, log_bytes
        self._owner = secrets.token_hex(8)
        self._pending: dict[int, _Pending] = {}
        self._lock = threading.Lock()

    def head(self) -> Publication | None:
        """The publication that is the head; the next one is to have the number after it."""
        head = self._model.head()
        return head.publication if head else None

    def begin(self, tables: Mapping[str, TableSize], *, dtype: str = "float32", shards: int) -> Layout:
        """Begins a full publication, to be written with the layout that is returned.

        Abandoned ones are deleted ten minutes after they were last written to.

        Args:
            tables: by name; their expected numbers of rows decide how they are kept until the next full publication.
            dtype: of rows as they are kept: "float32", "float16" or "int8".
            shards: how many write.

        Raises:
            ConfigError: there are no such types or widths.
        """
        self._model.sweep()
        return self._model.begin(Layout.of_sizes(0, dtype, shards, dict(tables)))

    def write(
        self,
        number: int,
        shard: int,
        changes: Iterable[RowChange],
        weights: Weights,
        *,
        rows: Mapping[str, int],
        layout: Layout | None = None,
    ) -> Part:
        """A shard's part of a publication. May be repeated; only the part that is committed counts.

        Args:
            number: of the publication.
            shard: which one.
            changes: since the head's publication; of a full one all rows, one after another.
            weights: the shard's slices.
            rows: by table, how many rows the shard has now.
            layout: of a full publication.

        Raises:
            FullPublicationNeeded: there is no head, or it was written by another number of shards.
            OutOfTurn: the next publication has another number, or another process writes this shard.
        """
        if layout is not None:
            self._fill(changes, layout)
            return self._log(Part(number, layout.dictionary, self._token(shard), 0, dict(rows)), [], weights)
        head = self._apply(shard)
        if head is None:
            raise FullPublicationNeeded(f"there is no head of {self._model.name}: write a full publication")
        self._expect(number, head.publication.number)
        written = list(encoded(changes, head.layout))
        part = Part(number, head.layout.dictionary, self._token(shard), 0, dict(rows))
        part = self._log(part, written, weights)
        with self._lock:
            self._pending[shard] = _Pending(part.token, head.id, written)
        return part

    def _fill(self, changes: Iterable[RowChange], layout: Layout) -> None:
        renew = self._model.renewing(layout)
        renew()
        buckets = self._model.buckets(layout)
        for change in encoded(changes, layout):
            buckets.put(change, renew)

    def _token(self, shard: int) -> Token:
        return Token(shard, secrets.token_hex(8), 0)

    def _log(self, part: Part, changes: Sequence[Encoded], weights: Weights) -> Part:
        entries, size = self._model.log.append(part.token.name, changes, weights)
        return part._replace(token=part.token._replace(entries=entries), size=size)

    def commit(self, publication: Publication, parts: Sequence[Part], layout: Layout | None = None) -> None:
        """Makes a publication the head, with what all shards have written; it may be repeated after an error.

        Afterwards shards should `apply`; else they do when they write next.

        Args:
            publication: what is said of it. Its rows by table are the sums of those of the parts.
            parts: one of every shard, for this publication.
            layout: of a full publication.

        Raises:
            OutOfTurn: another publication of this number, or a later one, has been committed, or, but for a full
                publication, the one before is missing.
            FullPublicationNeeded: the head is gone, or the dictionary of the full publication is.
            PublicationError: parts are missing, or do not fit the publication.
        """
        head = self._model.head()
        if layout is None and head is None:
            raise FullPublicationNeeded(f"the head of {self._model.name} is gone: write a full publication")
        wanted = layout or (head.layout if head else Layout(0, "", 0))
        parts = sorted(parts, key=lambda part: part.token.shard)
        self._check(publication, parts, wanted)
        answer, current = self._model.run(
            COMMIT,
            publication.number,
            wanted.dictionary,
            json.dumps(publication.as_json()),
            wanted.as_json(),
            json.dumps([part.token for part in parts]),
            int(layout is not None),
            sum(part.size for part in parts),
            self._log_bytes,
            wanted.shards,
        )
        if answer == b"turn":
            self._expect(publication.number, int(current))
        if answer == b"gone":
            raise FullPublicationNeeded(f"the dictionary of {self._model.name} is gone: write a full publication anew")
        if answer == b"behind":
            raise OutOfTurn(f"shard {int(current)} of {self._model.name} has not applied the head: write again", 0)
        if layout is not None:
            with suppress(PublicationError):  # it is committed; what is left of the old head is deleted next time
                self._model.sweep()

    def _check(self, publication: Publication, parts: Sequence[Part], layout: Layout) -> None:
        shards = [part.token.shard for part in parts]
        if shards != list(range(layout.shards)):
            raise PublicationError(f"{self._model.name} has {layout.shards} shards, but the parts are of {shards}")
        for part in parts:
            if (part.number, part.dictionary) != (publication.number, layout.dictionary):
                raise PublicationError(
                    f"the part of shard {part.token.shard} is of publication {part.number}, or of another dictionary"
                )
        rows = {table: sum(part.rows.get(table, 0) for part in parts) for table in layout.tables}
        if dict(publication.rows) != rows or publication.dtype != layout.dtype:
            raise PublicationError(
                f"publication {publication.number} says {publication.dtype} and {dict(publication.rows)} rows, but its "
                f"parts are {layout.dtype} and {rows}"
            )

    def _expect(self, number: int, head: int) -> None:
        if number != head + 1:
            raise OutOfTurn(f"publication {head + 1} of {self._model.name} is the next, not {number}", head)

    def apply(self, shard: int) -> None:
        """Writes what a shard has changed for the head over the rows of its dictionary, if it has not been yet.

        Raises:
            OutOfTurn: another process writes this shard.
        """
        self._apply(shard)

    def _apply(self, shard: int) -> Head | None:
        # Whoever applied before may do so until here, but not afterwards: what the head is comes second.
        answer = self._model.run(OWN, shard, self._owner)
        applied = entry_in(answer) if answer else None
        head = self._model.head()
        if head is None or applied == head.id:
            return head
        if not 0 <= shard < head.layout.shards:
            raise FullPublicationNeeded(f"{self._model.name} is of {head.layout.shards} shards, without shard {shard}")
        buckets = self._model.buckets(head.layout)
        for change in self._unapplied(head, shard, applied):
            buckets.put(change, lambda: self._own(head, shard))
        self._own(head, shard, head.id)
        with self._lock:
            self._pending.pop(shard, None)
        return head

    def checksums(self, table: str) -> NDArray[np.uint64]:
        """By bucket the checksum of the head's rows, uint64 [buckets]; exact if all is applied and nobody publishes.

        Raises:
            FullPublicationNeeded: there is no head.
        """
        return self.stored()[1].sums(table).sums

    def stored(self) -> tuple[Publication, Buckets]:
        """The head, and its buckets, whose rows are exactly the publication's if all is applied and nobody publishes.

        Raises:
            FullPublicationNeeded: there is no head.
        """
        head = self._model.head()
        if head is None:
            raise FullPublicationNeeded(f"there is no head of {self._model.name}")
        return head.publication, self._model.buckets(head.layout)

    def _unapplied(self, head: Head, shard: int, applied: str | None) -> Iterator[Encoded]:
        """From memory, if this process has written it; else from the log."""
        pending = self._pending.get(shard)
        if applied is None:
            raise PublicationCorrupt(f"{self._model.name} has lost what shard {shard} has applied")
        if pending and pending.token in head.tokens and pending.before == applied:
            yield from pending.changes
            return
        for step in self._model.log.between(applied, head.id, shard):
            if step.layout != head.layout:
                number = step.publication.number
                raise PublicationCorrupt(f"publication {number} of {self._model.name} is of another dictionary")
            yield from step.changes

    def _own(self, head: Head, shard: int, applied: str = "") -> None:
        if not self._model.run(APPLIED, shard, self._owner, head.layout.dictionary, applied):
            raise OutOfTurn(
                f"shard {shard} of {self._model.name} is written by another process, or its head was replaced",
                head.publication.number,
            )


def encoded(changes: Iterable[RowChange], layout: Layout) -> Iterator[Encoded]:
    """Changes as a dictionary keeps them.

    Raises:
        PublicationError: rows are not finite, or do not fit their table.
    """
    for change in changes:
        try:
            rows = layout.codec(change.table).encode(change.rows)
        except PublicationError as error:
            raise PublicationError(f"table {change.table} cannot be published: {error}") from error
        if len(change.keys) != len(rows):
            raise PublicationError(f"table {change.table} has {len(change.keys)} keys, but {len(rows)} rows")
        yield Encoded(change.table, change.keys, rows, change.gone)
