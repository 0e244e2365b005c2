"""Dictionaries in Redis, to which shards publish: the log of changes, and the rows of the head.

A publication is written to the log before it is committed, and its rows overwrite those of the head's dictionary only
after the commit. So a failed writer leaves nothing that a reader would see, and a reader of the dictionary, then of the
log up to a commit, has exactly that publication.

A full publication writes its rows to a new dictionary, which the commit makes that of the head.
"""

import json
import logging
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from streamtrain.errors import OriginUnavailable, PublicationCorrupt, PublicationError
from streamtrain.logs import LogThrottle
from streamtrain.store.publication import Publication, RowChange, Weights
from streamtrain.store.redis.buckets import Buckets, EncodedChange
from streamtrain.store.redis.layout import FullPublicationNeeded, Layout, OutOfTurn, TableSize
from streamtrain.store.redis.log import WriteToken, parse_entry_id
from streamtrain.store.redis.model import Head, RedisModel
from streamtrain.store.redis.scripts import APPLIED, COMMIT, OWN

logger = logging.getLogger(__name__)

_REPLICATED_SECONDS = 0.5  # for which a commit waits for an acknowledgement of a replica, if there are replicas


class ShardPart(NamedTuple):
    """A shard's part of a publication; plain values.

    Attributes:
        number: publication number.
        dictionary: number of the dictionary.
        token: token of its log entries.
        size: bytes of these entries.
        rows: number of rows of the shard, by table.
    """

    number: int
    dictionary: int
    token: WriteToken
    size: int
    rows: dict[str, int]


class _Pending(NamedTuple):
    token: WriteToken
    before: str  # entry of the commit before
    changes: list[EncodedChange]


class RedisDictionaries:
    """Publishes a model. Thread-safe, but only one thread at a time may write a shard.

    Every method may raise OriginUnavailable, after which the call may be repeated, and PublicationError.

    Args:
        log_bytes: size of the log that is kept for followers; it keeps at least the last two publications.
    """

    def __init__(self, model: RedisModel, *, log_bytes: int = 256 << 20) -> None:
        self._model, self._log_bytes = model, log_bytes
        self._owner = secrets.token_hex(8)
        self._pending: dict[int, _Pending] = {}
        self._seen, self._nodes = "", ""  # nodes of Redis, and those that have all that was published
        self._replicas, self._seldom = 0, LogThrottle()
        self._lock = threading.Lock()

    def head(self) -> Publication | None:
        """The head; the next publication must have the number after it."""
        head = self._model.head()
        return head.publication if head else None

    def token(self, shard: int) -> str | None:
        """Token name of a shard's part of the head; None if there is no head or no such part."""
        head = self._model.head()
        return next((token.name for token in head.tokens if token.shard == shard), None) if head else None

    def look(self) -> bool:
        """Whether Redis should still have all that was published.

        False: a node has restarted, or failed over to a replica, since the head was committed.

        Raises:
            PublicationError: the eviction policy of a node may drop rows.
        """
        try:
            nodes = self._model.server.nodes()
        except OriginUnavailable:
            raise
        except PublicationError as exc:
            if self._seldom.allow("nodes"):
                logger.warning("cannot read INFO from Redis, so a restart of it is noticed late: %s", exc)
            self._seen, self._nodes, self._replicas = "", "", 0
            return True
        for node in nodes:
            if node.evicts:
                raise PublicationError(
                    f"{node.name} has maxmemory-policy {node.policy}, which evicts published rows when its memory is "
                    "full: set it to noeviction"
                )
        self._seen = json.dumps({node.name: node.life for node in nodes}, sort_keys=True)
        self._replicas = min(node.replicas for node in nodes)
        head = self._model.head()
        self._nodes = head.nodes if head else self._seen
        return self._nodes == self._seen

    def lost(self) -> str:
        """The name of a key in Redis that has lost what the head needs; "": none has."""
        return self._model.lost()

    def vouch(self) -> None:
        """Records the nodes that `look` last saw as those that have all of the head."""
        head, self._nodes = self._model.head(), self._seen
        if head is not None:
            self._model.vouch(head, self._nodes)

    def counts(self) -> dict[str, int]:
        """Number of rows in the head's dictionary, by table.

        Raises:
            FullPublicationNeeded: there is no head.
        """
        buckets = self.stored()[1]
        return {table: int(buckets.counts(table).sum()) for table in buckets.layout.tables}

    def begin(self, tables: Mapping[str, TableSize], *, dtype: str = "float32", shards: int) -> Layout:
        """Begins a full publication, to be written with the returned layout.

        An abandoned one is deleted ten minutes after the last write to it.

        Args:
            tables: sizes by table; they determine the buckets until the next full publication.
            dtype: type of stored rows: "float32", "float16" or "int8".
            shards: number of shards that write.

        Raises:
            ConfigError: the type or a width is invalid.
        """
        self._model.sweep()
        return self._model.begin(Layout.from_sizes(0, dtype, shards, dict(tables)))

    def write(
        self,
        number: int,
        shard: int,
        changes: Iterable[RowChange],
        weights: Weights,
        *,
        rows: Mapping[str, int],
        layout: Layout | None = None,
        shards: int | None = None,
    ) -> ShardPart:
        """Writes a shard's part of a publication. May be repeated; only the part that is committed counts.

        Args:
            number: publication number.
            shard: index of the shard.
            changes: changes since the head; for a full publication, all rows.
            weights: the shard's slices of the weights.
            rows: number of rows of the shard, by table; may be filled while `changes` is consumed.
            layout: layout of a full publication.
            shards: number of shards that go on from a head which others have written; None: those that wrote it.

        Raises:
            FullPublicationNeeded: there is no head, or it was written by another number of shards.
            OutOfTurn: the next publication has another number, or another process writes this shard.
        """
        token = WriteToken(shard, secrets.token_hex(8), 0)
        if layout is not None:
            self._fill(changes, layout)
            return self._log(ShardPart(number, layout.dictionary, token, 0, dict(rows)), [], weights)
        head = self.apply(shard) if shards is None else self._taken_over(shard, shards)
        if head is None:
            raise FullPublicationNeeded(f"{self._model.name} has no head: write a full publication")
        self._expect(number, head.publication.number)
        written = list(encode_changes(changes, head.layout))
        part = self._log(ShardPart(number, head.layout.dictionary, token, 0, dict(rows)), written, weights)
        with self._lock:
            self._pending[shard] = _Pending(part.token, head.id, written)
        return part

    def _fill(self, changes: Iterable[RowChange], layout: Layout) -> None:
        renew = self._model.renewing(layout)
        renew()
        buckets = self._model.buckets(layout)
        for change in encode_changes(changes, layout):
            buckets.put(change, renew)

    def _log(self, part: ShardPart, changes: Sequence[EncodedChange], weights: Weights) -> ShardPart:
        entries, size = self._model.log.append(part.token.name, changes, weights)
        return part._replace(token=part.token._replace(entries=entries), size=size)

    def check_lease(self, run: str, generation: int) -> None:
        """Raises TakenOver if another cluster has acquired the lease; with generation 0 there is no lease to check."""
        self._model.check_lease(run, generation)

    def commit(
        self,
        publication: Publication,
        parts: Sequence[ShardPart],
        layout: Layout | None = None,
        *,
        shards: int | None = None,
        generation: int = 0,
    ) -> None:
        """Commits a publication of all shards as the head; may be repeated after an error.

        Shards should `apply` afterwards; otherwise they do so at their next write.

        Args:
            publication: its metadata; its rows by table must be the sums over the parts.
            parts: one part of every shard.
            layout: layout of a full publication.
            shards: number of shards that go on from a head which others have written; None: those that wrote it.
            generation: generation of the publisher's lease; 0: there is no lease to check.

        Raises:
            TakenOver: another cluster has the lease.
            OutOfTurn: another publication with this or a later number has been committed, or, unless this is a full
                publication, the previous one is missing.
            FullPublicationNeeded: the head, or the dictionary of the full publication, was deleted; or other shards
                have not applied the head that is theirs.
            PublicationError: parts are missing or do not match the publication.
        """
        head = self._model.head()
        if layout is None and head is None:
            raise FullPublicationNeeded(f"{self._model.name} no longer has a head: write a full publication")
        before = head.layout if head else Layout(0, "", 0)
        wanted = layout or before.written_by(shards or before.shards)
        parts = sorted(parts, key=lambda part: part.token.shard)
        self._check(publication, parts, wanted)
        (answer, current), replicas = self._model.run_replicated(
            _REPLICATED_SECONDS if self._replicas else 0.0,
            COMMIT,
            publication.number,
            wanted.dictionary,
            json.dumps(publication.to_json()),
            wanted.to_json(),
            json.dumps([part.token for part in parts]),
            int(layout is not None),
            sum(part.size for part in parts),
            self._log_bytes,
            wanted.shards,
            generation,
            self._nodes if layout is None else self._seen,
        )
        if self._replicas and not replicas and self._seldom.allow("replicas"):
            logger.warning(
                "no replica of %s acknowledged publication %d within %g s; after a failover it is published again",
                *(self._model.server.name, publication.number, _REPLICATED_SECONDS),
            )
        if answer == b"lease":
            raise self._model.taken_over(publication.run)
        if answer == b"turn":
            self._expect(publication.number, int(current))
        if answer == b"gone":
            raise FullPublicationNeeded(
                f"the dictionary of {self._model.name} was deleted: write a full publication again"
            )
        if answer == b"behind":
            raise self._behind(int(current), None if wanted.shards == before.shards else before.shards)
        if layout is not None:
            with suppress(PublicationError):  # it is committed; what is left of the old head is deleted next time
                self._model.sweep()

    def _behind(self, shard: int, others: int | None) -> PublicationError:
        """`others`: how many wrote the head, if they are not those that go on."""
        if others is None:
            return OutOfTurn(f"shard {shard} of {self._model.name} has not applied the head: write again", 0)
        return FullPublicationNeeded(
            f"shard {shard} of the {others} that {self._model.name} had has not applied the head"
        )

    def _check(self, publication: Publication, parts: Sequence[ShardPart], layout: Layout) -> None:
        shards = [part.token.shard for part in parts]
        if shards != list(range(layout.shards)):
            raise PublicationError(
                f"{self._model.name} has {layout.shards} shards, but the parts are from shards {shards}"
            )
        for part in parts:
            if (part.number, part.dictionary) != (publication.number, layout.dictionary):
                raise PublicationError(
                    f"the part of shard {part.token.shard} is for publication {part.number}, or another dictionary"
                )
        rows = {table: sum(part.rows.get(table, 0) for part in parts) for table in layout.tables}
        if dict(publication.rows) != rows or publication.dtype != layout.dtype:
            raise PublicationError(
                f"publication {publication.number} declares {publication.dtype} and {dict(publication.rows)} rows, but "
                f"its parts have {layout.dtype} and {rows}"
            )

    def _expect(self, number: int, head: int) -> None:
        if number != head + 1:
            raise OutOfTurn(f"the next publication of {self._model.name} is {head + 1}, not {number}", head)

    def apply(self, shard: int) -> Head | None:
        """Applies a shard's changes of the head to its dictionary, unless already done; returns the head.

        Raises:
            OutOfTurn: another process writes this shard.
        """
        # Whoever applied before may do so until here, but not afterwards: what the head is comes second.
        answer = self._model.run(OWN, shard, self._owner)
        applied = parse_entry_id(answer) if answer else None
        head = self._model.head()
        if head is None or applied == head.id:
            return head
        if not 0 <= shard < head.layout.shards:
            raise FullPublicationNeeded(f"{self._model.name} has {head.layout.shards} shards, so no shard {shard}")
        buckets = self._model.buckets(head.layout)
        for change in self._unapplied(head, shard, applied):
            buckets.put(change, lambda: self._own(head, shard))
        self._own(head, shard, head.id)
        with self._lock:
            self._pending.pop(shard, None)
        return head

    def _taken_over(self, shard: int, shards: int) -> Head | None:
        """The head, from which another number of shards goes on than wrote it; `commit` sees to it that it is applied.

        Of as many shards, one that does not go on may have left that to the one that takes its place.
        """
        self._model.run(OWN, shard, self._owner)
        head = self._model.head()
        return head if head is not None and head.layout.shards != shards else self.apply(shard)

    def stored(self) -> tuple[Publication, Buckets]:
        """The head and its buckets, which are exact once all is applied and while nothing is published.

        Raises:
            FullPublicationNeeded: there is no head.
        """
        head = self._model.head()
        if head is None:
            raise FullPublicationNeeded(f"{self._model.name} has no head")
        return head.publication, self._model.buckets(head.layout)

    def _unapplied(self, head: Head, shard: int, applied: str | None) -> Iterator[EncodedChange]:
        """Changes not yet applied: from memory if this process wrote them, else from the log."""
        pending = self._pending.get(shard)
        if applied is None:
            raise PublicationCorrupt(f"{self._model.name} no longer knows what shard {shard} has applied")
        if pending and pending.token in head.tokens and pending.before == applied:
            yield from pending.changes
            return
        for step in self._model.log.between(applied, head.id, shard):
            if step.layout != head.layout:
                number = step.publication.number
                raise PublicationCorrupt(f"publication {number} of {self._model.name} belongs to another dictionary")
            yield from step.changes

    def _own(self, head: Head, shard: int, applied: str = "") -> None:
        if not self._model.run(APPLIED, shard, self._owner, head.layout.dictionary, applied):
            raise OutOfTurn(
                f"shard {shard} of {self._model.name} is written by another process, or its head was replaced",
                head.publication.number,
            )


def encode_changes(changes: Iterable[RowChange], layout: Layout) -> Iterator[EncodedChange]:
    """Encodes the rows of changes as a dictionary stores them.

    Raises:
        PublicationError: rows are not finite, or do not match their table.
    """
    for change in changes:
        try:
            rows = layout.codec(change.table).encode(change.rows)
        except PublicationError as error:
            raise PublicationError(f"table {change.table} cannot be published: {error}") from error
        if len(change.keys) != len(rows):
            raise PublicationError(f"table {change.table} has {len(change.keys)} keys, but {len(rows)} rows")
        yield EncodedChange(change.table, change.keys, rows, change.gone)
