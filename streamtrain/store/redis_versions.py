"""Versions of a model in Redis: made of the head, labelled, held by servers, deleted."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtrain.errors import NothingBefore, PublicationCorrupt, PublicationError, Superseded
from streamtrain.store.origin import Publication, Weights, check_rows
from streamtrain.store.plain import converted, parsed
from streamtrain.store.redis_buckets import Buckets, Sums
from streamtrain.store.redis_history import Deed, deed_of
from streamtrain.store.redis_layout import Layout
from streamtrain.store.redis_model import Head, RedisModel
from streamtrain.store.redis_scripts import ADD_VERSION, ANY, DELETE, HOLD, HOLDERS, LABEL, PROD, ROLLBACK

_TRIES = 3  # of reading the head, which may be replaced, or move on faster than it is read


class RedisVersions:
    """The versions of a model. Thread-safe.

    Every method may raise OriginUnavailable, and PublicationError.

    Args:
        model: whose.

    Attributes:
        name: of the model and its server, for messages.
    """

    def __init__(self, model: RedisModel) -> None:
        self._model, self.name = model, model.name

    def all(self) -> list[Publication]:
        """The versions that there are, ascending."""
        return [publication for publication, _ in sorted(self._placed(), key=lambda one: one[0].version or 0)]

    def head(self) -> Publication | None:
        """The head's publication, if there is one."""
        head = self._model.head()
        return head.publication if head else None

    def find(self, version: int) -> tuple[Publication, Layout] | None:
        """A version and the layout of its dictionary, if it is there."""
        found = self._model.server.call("HGET", self._model.keys.versions, version)
        return None if found is None else self._parsed(found)

    def _placed(self) -> list[tuple[Publication, Layout]]:
        found = self._model.server.call("HVALS", self._model.keys.versions)
        return [self._parsed(one) for one in found]

    def _parsed(self, manifest: bytes) -> tuple[Publication, Layout]:
        try:
            given = converted(dict[str, Any], parsed(manifest.partition(b" ")[2]))
            return Publication.of_json(given["publication"]), Layout.of_json(json.dumps(given["layout"]))
        except (KeyError, ValueError) as exc:
            raise PublicationCorrupt(f"a version of {self._model.name} is damaged: {exc}") from exc

    def make(self, who: str, why: str = "", *, expected: Mapping[str, NDArray[np.uint64]] | None = None) -> Publication:
        """Copies the head to a new version, while it may go on. It is of the last publication at the copy's end.

        Args:
            who: makes it.
            why: for the history.
            expected: by table the sums of checksums of all rows as shards know them, of exactly the head as it is;
                only for a head that stands still meanwhile.

        Raises:
            PublicationCorrupt: the head has not the rows that its publication says.
            PublicationError: there is no head, or not these checksums.
        """
        for _ in range(_TRIES):
            head = self._model.head()
            if head is None:
                raise PublicationError(f"there is no head of {self._model.name} of which to make a version")
            with self._model.building(head.layout) as target:
                found = self._copied(head, target)
                if found is not None:
                    return self.add(*found, who=who, why=why, expected=expected)
        raise PublicationError(f"the head of {self._model.name} was replaced again and again: try later")

    def _copied(self, head: Head, target: Layout) -> tuple[Publication, Layout, Weights] | None:
        """None if the head was replaced meanwhile."""
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
        """Makes a dictionary that has been built a new version, which is returned with its number.

        Args:
            publication: what it is of.
            layout: of the dictionary.
            weights: that belong to it.
            who: makes it.
            why: for the history.
            expected: as for `make`.

        Raises:
            PublicationCorrupt: the dictionary has not the rows that the publication says.
            PublicationError: it has not these checksums, or is gone.
        """
        keys, number = self._model.keys, layout.dictionary
        sums = self._checked(publication, self._model.buckets(layout), expected)
        fields = [part for table, one in sums.items() for part in _packed(table, one)]
        self._model.server.call("HSET", keys.sums(number), b"format", 1, *fields)
        dense, statistics = (part.astype("<f4").tobytes() for part in weights)
        self._model.server.call("HSET", keys.weights(number), "dense", dense, "statistics", statistics)
        version = self._model.next_version()
        publication = replace(publication, version=version)
        manifest = json.dumps({"publication": publication.as_json(), "layout": json.loads(layout.as_json())})
        extra = (keys.weights(number), keys.sums(number))
        if not self._model.run(ADD_VERSION, number, version, manifest, who, why, keys=extra):
            raise PublicationError(
                f"version {version} of {self._model.name} was lost before it was complete: try again"
            )
        return publication

    def _checked(
        self, publication: Publication, buckets: Buckets, expected: Mapping[str, Any] | None
    ) -> dict[str, Sums]:
        found = {table: buckets.sums(table) for table in buckets.layout.tables}
        for table, sums in found.items():
            check_rows(self._model.name, publication, table, int(sums.rows.sum(dtype=np.int64)))
            if expected is not None and sums.sums.sum(dtype=np.uint64) != np.sum(expected[table], dtype=np.uint64):
                raise PublicationError(f"table {table} of {self._model.name} has not the checksum of its shards")
        return found

    def sums(self, layout: Layout) -> dict[str, Sums]:
        """By table the rows and checksums of a version's buckets.

        Raises:
            PublicationCorrupt: they are gone.
        """
        flat = self._model.server.call("HGETALL", self._model.keys.sums(layout.dictionary))
        found = flat if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))
        try:
            return {
                table: Sums(
                    np.frombuffer(found[f"rows:{table}".encode()], "<u4", one.buckets),
                    np.frombuffer(found[f"sums:{table}".encode()], "<u8", one.buckets),
                )
                for table, one in layout.tables.items()
            }
        except (KeyError, ValueError) as exc:
            raise PublicationCorrupt(f"the checksums of a version of {self._model.name} are gone or damaged") from exc

    def weights(self, layout: Layout) -> Weights:
        """A version's weights.

        Raises:
            PublicationCorrupt: they are gone.
        """
        found = self._model.server.call("HMGET", self._model.keys.weights(layout.dictionary), "dense", "statistics")
        if None in found:
            raise PublicationCorrupt(f"the weights of a version of {self._model.name} are gone")
        return Weights(*(np.frombuffer(part, "<f4").astype(np.float32, copy=False) for part in found))

    # --- labels ---

    def labels(self) -> dict[str, int]:
        """Version by label.

        Raises:
            PublicationCorrupt: they are damaged.
        """
        flat = self._model.server.call("HGETALL", self._model.keys.labels)
        found = flat if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))
        try:
            return {label.decode(): int(version) for label, version in found.items()}
        except ValueError as exc:
            raise PublicationCorrupt(f"the labels of {self._model.name} are damaged: {exc}") from exc

    def set_label(
        self, label: str, version: int | None, who: str, why: str = "", *, expected: int | None = ANY
    ) -> None:
        """Gives a label to a version, and takes it from another; None: to none.

        Raises:
            PublicationCorrupt: there is no such version.
            Superseded: not `expected` has the label, but something else (None: no version).
        """
        self._change(LABEL, label, "" if version is None else version, who, why, expected=expected)

    def promote(self, version: int | None, who: str, why: str = "", *, expected: int | None = ANY) -> None:
        """Makes a version what all servers serve, or the head (None): labels it "prod", or takes that label away.

        Raises:
            PublicationCorrupt: there is no such version, or no head.
            Superseded: not `expected` is served, but something else (None: the head).
        """
        if version is None and self.head() is None:
            raise PublicationCorrupt(f"there is no head of {self._model.name}")
        self.set_label(PROD, version, who, why, expected=expected)

    def rollback(self, who: str, why: str = "", label: str = PROD, *, expected: int | None = ANY) -> int | None:
        """Gives a label back to what it was before, of what is still there.

        Returns:
            The version that has it again; None: no version had it before, so that of "prod" the head is served.

        Raises:
            NothingBefore: there is nothing before.
            Superseded: as for `set_label`.
        """
        found = self._change(ROLLBACK, label, who, why, expected=expected)
        if found is None:
            raise NothingBefore(f"there is nothing of {self._model.name} that was {label} before and is still there")
        return int(found) if found else None

    def _change(self, script: str, label: str, *given: Any, expected: int | None) -> Any:
        if expected != ANY:
            given += ("" if expected is None else expected,)
        found = self._model.run(script, label, *given, keys=(self._model.keys.before(label),))
        if type(found) is int and found == 2:
            raise Superseded(f"{label} of {self._model.name} is not what was to be replaced, any more")
        if type(found) is int and not found:
            raise PublicationCorrupt(f"there is no version {given[0]} of {self._model.name}")
        return found

    def history(self, count: int = 100) -> list[Deed]:
        """What was done, the last first; about ten thousand deeds are kept."""
        entries = self._model.server.call("XREVRANGE", self._model.keys.history, "+", "-", "COUNT", count)
        return [deed_of(entry, fields) for entry, fields in entries]

    # --- retention ---

    def hold(self, version: int, server: str, seconds: float) -> None:
        """Keeps a version from being deleted for so long, since a server uses it; again to prolong.

        Raises:
            PublicationCorrupt: there is no such version.
        """
        if not self._model.run(HOLD, version, server, round(seconds * 1000)):
            raise PublicationCorrupt(f"there is no version {version} of {self._model.name}")

    def release(self, version: int, server: str) -> None:
        """Ends a hold."""
        self._model.server.call("ZREM", self._model.keys.holds, f"{version}:{server}")

    def holders(self) -> dict[int, list[str]]:
        """Servers that use a version now, by version."""
        found: dict[int, list[str]] = {}
        for one in self._model.run(HOLDERS):
            version, _, server = one.decode().partition(":")
            found.setdefault(int(version), []).append(server)
        return found

    def delete(self, version: int, who: str, why: str = "") -> None:
        """Deletes a version; nothing happens if there is none.

        Raises:
            PublicationError: a label or a server uses it.
        """
        if users := self._users_unless_deleted(version, who, why):
            raise PublicationError(f"version {version} of {self._model.name} is in use by {', '.join(users)}")
        self._model.sweep()

    def retain(self, keep: int, who: str, why: str = "") -> list[int]:
        """Deletes all versions but the last so many, and those that a label or a server uses; returns their numbers."""
        versions = [version for one in self.all() if (version := one.version) is not None]
        deleted = [
            version
            for version in versions[: max(0, len(versions) - keep)]
            if not self._users_unless_deleted(version, who, why)
        ]
        self._model.sweep()
        return deleted

    def _users_unless_deleted(self, version: int, who: str, why: str) -> list[str]:
        return [user.decode() for user in self._model.run(DELETE, version, who, why)]


def _packed(table: str, sums: Sums) -> list[Any]:
    return [f"rows:{table}", sums.rows.astype("<u4").tobytes(), f"sums:{table}", sums.sums.astype("<u8").tobytes()]
