"""Versions of a model in Redis: made of the head, labelled, held by servers, deleted."""

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamtrain.errors import LabelInUse, NothingBefore, PublicationCorrupt, PublicationError, Superseded
from streamtrain.store.json import convert, parse_json
from streamtrain.store.publication import ANY, PROD, Origin, Publication, RowChange, Weights, check_label, check_rows
from streamtrain.store.redis.buckets import BucketChecksums, Buckets
from streamtrain.store.redis.dictionary import encode_changes
from streamtrain.store.redis.layout import Layout, TableSize
from streamtrain.store.redis.model import Head, RedisModel
from streamtrain.store.redis.scripts import ADD_VERSION, DELETE, HOLD, HOLDERS, LABEL, ROLLBACK, SETTING
from streamtrain.store.redis.server import Fields, parse_fields
from streamtrain.store.traffic import Traffic

_DROP_SECONDS = 600.0  # for which no other process publishes a model that is being deleted
_ALL = 1_000_000  # entries of the history, which is shorter


class AuditEntry(NamedTuple):
    """An entry of the history of versions.

    Attributes:
        at: time, seconds since the epoch.
        what: "version", "label", "rollback", "delete", "traffic" or "setting".
        who: user or process that did it.
        why: the reason given.
        version: the version concerned; None: the label was removed, so that without "prod" the head is served.
        label: the label changed, or "".
        was: the previous version of the label; None: none.
        metrics: figures of the version, or of the head that is served from then on.
        traffic, traffic_was: shares of requests from then on and before, such as "prod=95 canary=5"; else "".
        setting, setting_was: what was set by `streamtrain set`, such as "dense_optimizer.rate=0.001"; else "".
    """

    at: float
    what: str
    who: str
    why: str
    version: int | None
    label: str
    was: int | None
    metrics: Mapping[str, Mapping[str, float | None]]
    traffic: str = ""
    traffic_was: str = ""
    setting: str = ""
    setting_was: str = ""


def _audit_entry(entry: bytes, fields: Fields) -> AuditEntry:
    try:
        text = {name.decode(): value.decode() for name, value in fields.items()}
        version, was = (int(text[name]) if text[name] else None for name in ("version", "was"))
        at = int(entry.partition(b"-")[0]) / 1000
        metrics = convert(dict[str, dict[str, int | float | None]], parse_json(text["metrics"]))
        more = (text.get(name, "") for name in ("traffic", "traffic_was", "setting", "setting_was"))
        return AuditEntry(at, text["what"], text["who"], text["why"], version, text["label"], was, metrics, *more)
    except (KeyError, ValueError) as exc:
        raise PublicationCorrupt(f"entry {entry.decode()} of the history of versions is damaged: {exc!r}") from exc


def import_version(
    model: RedisModel,
    origin: Origin,
    publication: Publication,
    widths: Mapping[str, int],
    *,
    who: str,
    why: str = "",
    dtype: str = "float32",
) -> Publication:
    """Copies a publication of another origin to a new version; the head does not change.

    Args:
        model: destination.
        origin: source.
        publication: the publication to copy; it keeps its number.
        widths: floats per row, by table.
        who: who creates the version, for the history.
        why: reason, for the history.
        dtype: type of stored rows: "float32", "float16" or "int8".

    Returns:
        The new version.

    Raises:
        OriginUnavailable: the origin or Redis does not answer. After any error there is no new version.
        PublicationCorrupt: the publication is damaged, deleted or not finite.
        PublicationError: Redis refuses.
    """
    sizes = {table: TableSize(widths[table], rows) for table, rows in publication.rows.items()}
    with model.building(Layout.from_sizes(0, dtype, 1, sizes)) as layout:
        renew, buckets = model.renewing(layout), model.buckets(layout)

        def take(change: RowChange) -> None:
            for one in encode_changes([change], layout):
                buckets.put(one, renew)

        found, weights = origin.load(publication, take)
        if not all(np.isfinite(part).all() for part in weights):
            raise PublicationCorrupt(f"publication {found.number} of {origin.name} has weights that are not finite")
        found = replace(found, model=model.keys.model, published=time.time(), dtype=dtype)
        return RedisVersions(model).add(found, layout, weights, who=who, why=why)


_TRIES = 3  # of reading the head, which may be replaced, or move on faster than it is read


class RedisVersions:
    """The versions of a model. Thread-safe.

    Every method may raise OriginUnavailable, and PublicationError.

    Attributes:
        name: of the model and its server, for messages.
    """

    def __init__(self, model: RedisModel) -> None:
        self._model, self.name = model, model.name

    def all(self) -> list[Publication]:
        """All versions, ascending."""
        return [publication for publication, _ in sorted(self._placed(), key=lambda one: one[0].version or 0)]

    def head(self) -> Publication | None:
        """The head's publication, if there is one."""
        head = self._model.head()
        return head.publication if head else None

    def find(self, version: int) -> tuple[Publication, Layout] | None:
        """A version and the layout of its dictionary; None if it does not exist."""
        found = self._model.server.call("HGET", self._model.keys.versions, version)
        return None if found is None else self._parsed(found)

    def _placed(self) -> list[tuple[Publication, Layout]]:
        found = self._model.server.call("HVALS", self._model.keys.versions)
        return [self._parsed(one) for one in found]

    def _parsed(self, manifest: bytes) -> tuple[Publication, Layout]:
        try:
            given = convert(dict[str, Any], parse_json(manifest.partition(b" ")[2]))
            return Publication.from_json(given["publication"]), Layout.from_json(json.dumps(given["layout"]))
        except (KeyError, ValueError) as exc:
            raise PublicationCorrupt(f"a version of {self._model.name} is damaged: {exc}") from exc

    def make(self, who: str, why: str = "", *, expected: Mapping[str, NDArray[np.uint64]] | None = None) -> Publication:
        """Copies the head to a new version; the head may move meanwhile, and the version is its state at the end.

        Args:
            who: who creates it, for the history.
            why: reason, for the history.
            expected: by table, the checksums that the shards report for exactly this head; only for a head that does
                not move meanwhile.

        Raises:
            PublicationCorrupt: the head does not have the rows that its publication declares.
            PublicationError: there is no head, or the checksums differ.
        """
        for _ in range(_TRIES):
            head = self._model.head()
            if head is None:
                raise PublicationError(f"cannot make a version: {self._model.name} has no head")
            with self._model.building(head.layout) as target:
                found = self._copied(head, target)
                if found is not None:
                    return self.add(*found, who=who, why=why, expected=expected)
        raise PublicationError(
            f"the head of {self._model.name} was replaced {_TRIES} times while it was copied: try again later"
        )

    def _copied(self, head: Head, target: Layout) -> tuple[Publication, Layout, Weights] | None:
        """Returns None if the head was replaced meanwhile."""
        renew = self._model.renewing(target)
        self._model.buckets(head.layout).copy(target, renew)
        last = self._model.head()
        if last is None or last.layout.dictionary != head.layout.dictionary:
            return None
        buckets = self._model.buckets(target)
        weights: Weights | None = None
        for step in self._model.log.between(head.before, last.id):
            for change in () if step.is_full else step.changes:
                buckets.put(change, renew)
            weights = step.weights
        assert weights is not None  # what is between two different entries ends with one
        return last.publication, target, weights

    def add(
        self,
        publication: Publication,
        layout: Layout,
        weights: Weights,
        *,
        who: str,
        why: str = "",
        expected: Mapping[str, NDArray[np.uint64]] | None = None,
    ) -> Publication:
        """Adds a complete dictionary as a new version; returns the publication with its version number.

        Args:
            publication: its metadata.
            layout: layout of the dictionary.
            weights: its weights.
            who: who creates it, for the history.
            why: reason, for the history.
            expected: see `make`.

        Raises:
            PublicationCorrupt: the dictionary does not have the rows that the publication declares.
            PublicationError: the checksums differ, or the dictionary was deleted.
        """
        keys, number = self._model.keys, layout.dictionary
        sums = self._checked(publication, self._model.buckets(layout), expected)
        fields = [part for table, one in sums.items() for part in _packed(table, one)]
        self._model.server.call("HSET", keys.sums(number), b"format", 1, *fields)
        dense, statistics = (part.astype("<f4").tobytes() for part in weights)
        self._model.server.call("HSET", keys.weights(number), "dense", dense, "statistics", statistics)
        version = self._model.next_version()
        publication = replace(publication, version=version)
        manifest = json.dumps({"publication": publication.to_json(), "layout": json.loads(layout.to_json())})
        extra = (keys.weights(number), keys.sums(number))
        if not self._model.run(ADD_VERSION, number, version, manifest, who, why, keys=extra):
            raise PublicationError(
                f"version {version} of {self._model.name} was deleted before it was complete: try again"
            )
        return publication

    def _checked(
        self, publication: Publication, buckets: Buckets, expected: Mapping[str, Any] | None
    ) -> dict[str, BucketChecksums]:
        found = {table: buckets.sums(table) for table in buckets.layout.tables}
        for table, sums in found.items():
            check_rows(self._model.name, publication, table, int(sums.rows.sum(dtype=np.int64)))
            if expected is not None and sums.sums.sum(dtype=np.uint64) != np.sum(expected[table], dtype=np.uint64):
                raise PublicationError(
                    f"table {table} of {self._model.name} does not have the checksum that its shards report"
                )
        return found

    def sums(self, layout: Layout) -> dict[str, BucketChecksums]:
        """Rows and checksums of a version's buckets, by table.

        Raises:
            PublicationCorrupt: they are gone.
        """
        found = parse_fields(self._model.server.call("HGETALL", self._model.keys.sums(layout.dictionary)))
        try:
            return {
                table: BucketChecksums(
                    np.frombuffer(found[f"rows:{table}".encode()], "<u4", one.buckets),
                    np.frombuffer(found[f"sums:{table}".encode()], "<u8", one.buckets),
                )
                for table, one in layout.tables.items()
            }
        except (KeyError, ValueError) as exc:
            raise PublicationCorrupt(
                f"the checksums of a version of {self._model.name} are missing or damaged"
            ) from exc

    def weights(self, layout: Layout) -> Weights:
        """A version's weights.

        Raises:
            PublicationCorrupt: they are gone.
        """
        found = self._model.server.call("HMGET", self._model.keys.weights(layout.dictionary), "dense", "statistics")
        if None in found:
            raise PublicationCorrupt(f"the weights of a version of {self._model.name} are missing")
        return Weights(*(np.frombuffer(part, "<f4").astype(np.float32, copy=False) for part in found))

    # --- labels ---

    def labels(self) -> dict[str, int]:
        """Version by label; where Redis has lost them, as they were read last.

        Raises:
            PublicationCorrupt: they are damaged.
        """
        return dict(self._model.decided().labels)

    def set_label(
        self,
        label: str,
        version: int | None,
        who: str,
        why: str = "",
        *,
        expected: int | None = ANY,
        force: bool = False,
    ) -> None:
        """Moves a label to a version; None removes it, with `force` also if requests are divided by it.

        Raises:
            ConfigError: no label may have this name.
            PublicationCorrupt: the version does not exist.
            LabelInUse: requests are divided by it.
            Superseded: the label is not at `expected` (None: at no version).
        """
        if version is not None:
            check_label(label)
        elif label != PROD and not force and (use := self._use_of(label)):
            raise LabelInUse(f"the label {label} of {self._model.name} {use}: change the traffic before it is removed")
        self._change(LABEL, label, "" if version is None else version, who, why, expected=expected)

    def promote(self, version: int | None, who: str, why: str = "", *, expected: int | None = ANY) -> None:
        """Has all servers serve a version, or the head (None): sets or removes the label "prod".

        Raises:
            PublicationCorrupt: the version or the head does not exist.
            Superseded: `expected` (None: the head) is not what is served.
        """
        if version is None and self.head() is None:
            raise PublicationCorrupt(f"{self._model.name} has no head")
        self.set_label(PROD, version, who, why, expected=expected)

    def rollback(self, who: str, why: str = "", label: str = PROD, *, expected: int | None = ANY) -> int | None:
        """Moves a label back to its previous version that still exists.

        Returns:
            The version that has the label now; None: none, so that without "prod" the head is served.

        Raises:
            NothingBefore: no earlier version exists.
            Superseded: see `set_label`.
        """
        found = self._change(ROLLBACK, label, who, why, expected=expected)
        if found is None:
            raise NothingBefore(f"{self._model.name} has no earlier {label} version to roll back to")
        return int(found) if found else None

    def _use_of(self, at: str) -> str:
        """What the traffic does with a label or a version, in words; "": nothing."""
        text, own = self._model.decided().traffic, self._model.keys.model
        traffic = Traffic.from_json(text) if text else None
        if traffic is None:
            return ""
        weight = sum(weight for arm, weight in traffic.arms if (arm.model, arm.at) == (own, at))
        is_mirror = traffic.mirror is not None and (traffic.mirror.model, traffic.mirror.at) == (own, at)
        return f"has {weight:g}% of the traffic" if weight else "is the mirror of the traffic" if is_mirror else ""

    def _change(self, script: str, label: str, *given: Any, expected: int | None) -> Any:
        if expected != ANY:
            given += ("" if expected is None else expected,)
        found = self._model.run(script, label, *given, keys=(self._model.keys.before(label),))
        if type(found) is int and found == 2:
            raise Superseded(f"the label {label} of {self._model.name} was changed meanwhile")
        if type(found) is int and not found:
            raise PublicationCorrupt(f"{self._model.name} has no version {given[0]}")
        return found

    def history(self, count: int = 100) -> list[AuditEntry]:
        """The latest `count` entries, newest first; about ten thousand are kept."""
        entries = self._model.server.call("XREVRANGE", self._model.keys.history, "+", "-", "COUNT", count)
        return [_audit_entry(entry, parse_fields(fields)) for entry, fields in entries]

    def note_setting(self, setting: str, was: str, who: str, why: str = "") -> None:
        """Adds to the history what was set of the cluster that publishes the model."""
        self._model.run(SETTING, who, why, setting, was)

    # --- retention ---

    def acquire(self, version: int, server: str, seconds: float) -> None:
        """Keeps a version from being deleted for `seconds`, because a server uses it; call again to renew.

        Raises:
            PublicationCorrupt: the version does not exist.
        """
        if not self._model.run(HOLD, version, server, round(seconds * 1000)):
            raise PublicationCorrupt(f"{self._model.name} has no version {version}")

    def release(self, version: int, server: str) -> None:
        """Ends a hold."""
        self._model.server.call("ZREM", self._model.keys.holds, f"{version}:{server}")

    def holders(self) -> dict[int, list[str]]:
        """Servers that use a version now, by version; those that use the head by 0."""
        found: dict[int, list[str]] = {}
        for one in self._model.run(HOLDERS):
            version, _, server = one.decode().partition(":")
            found.setdefault(int(version), []).append(server)
        return found

    def delete(self, version: int, who: str, why: str = "") -> None:
        """Deletes a version, if it exists.

        Raises:
            PublicationError: a label or a server uses it.
        """
        if use := self._use_of(str(version)):
            raise PublicationError(f"version {version} of {self._model.name} {use}: change the traffic before")
        if users := self._users_unless_deleted(version, who, why):
            raise PublicationError(f"version {version} of {self._model.name} is in use by {', '.join(users)}")
        self._model.sweep()

    def retain(self, keep: int, who: str, why: str = "") -> list[int]:
        """Deletes all but the last `keep` versions and those that a label or a server uses; returns their numbers."""
        self._model.restore_decisions(who)  # labels that Redis has lost count as well
        versions = [version for one in self.all() if (version := one.version) is not None]
        deleted = [
            version
            for version in versions[: max(0, len(versions) - keep)]
            if not self._use_of(str(version)) and not self._users_unless_deleted(version, who, why)
        ]
        self._model.sweep()
        return deleted

    def drop(self, host: str) -> None:
        """Deletes all that Redis has of the model. If it ends half way, as it may, it can be done again.

        Args:
            host: of this process, for messages.

        Raises:
            TakenOver: a cluster publishes it.
            PublicationError: there is no such model, or a server uses a version.
        """
        model = self._model
        if model.lease() is None and self.head() is None and not self.all():
            raise PublicationError(f"there is no {model.name}")
        if users := sorted({server for servers in self.holders().values() for server in servers}):
            raise PublicationError(f"{model.name} is in use by {', '.join(users)}")
        holder = secrets.token_hex(8)
        model.acquire_lease("dropped", 0, holder, host, _DROP_SECONDS)
        labels = {PROD, *self.labels(), *(entry.label for entry in self.history(_ALL) if entry.label)}
        keys = model.keys
        model.server.call("DEL", keys.head, keys.versions, keys.building, *map(keys.before, sorted(labels)))
        model.sweep()
        model.server.call("DEL", *keys.all())

    def _users_unless_deleted(self, version: int, who: str, why: str) -> list[str]:
        return [user.decode() for user in self._model.run(DELETE, version, who, why)]


def _packed(table: str, sums: BucketChecksums) -> list[Any]:
    return [f"rows:{table}", sums.rows.astype("<u4").tobytes(), f"sums:{table}", sums.sums.astype("<u8").tobytes()]
