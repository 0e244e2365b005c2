"""A model in Redis: its keys, its head, its lease, and dictionaries being built."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from streamtrain.errors import PublicationCorrupt, PublicationError, TakenOver
from streamtrain.store.json import convert, parse_json
from streamtrain.store.publication import Publication
from streamtrain.store.redis.buckets import Buckets
from streamtrain.store.redis.layout import Layout, RedisKeys
from streamtrain.store.redis.log import PublicationLog, WriteToken, parse_entry_id
from streamtrain.store.redis.scripts import (
    BEGIN,
    DECIDED,
    END_LEASE,
    GARBAGE,
    HOLD_LEASE,
    LEASE,
    LOST,
    RENEW,
    RESTORE,
    STATE,
    TRIM,
    VOUCH,
    script_keys,
)
from streamtrain.store.redis.server import RedisServer, parse_fields

logger = logging.getLogger(__name__)

_LEASE = 600.0  # seconds for which a dictionary being built is kept without a renewal


class LeaseHeld(NamedTuple):
    """The lease of a model's publisher.

    Attributes:
        generation: fencing number; only the latest one may publish.
        run: id of the run that is published.
        host: host of the holder.
        since: start of the generation, seconds since the epoch.
        live: whether the lease has not expired.
    """

    generation: int
    run: str
    host: str
    since: float
    live: bool


class Decided(NamedTuple):
    """What was decided to be served.

    Attributes:
        at: when it was decided, in ms of the server's clock, and when what was before, the latest first; b"": nothing
            was.
        labels: version by label.
        traffic: JSON; b"": none.
    """

    at: bytes
    labels: Mapping[str, int]
    traffic: bytes

    def is_lost_in(self, found: "Decided") -> bool:
        """Whether what is found is what was decided before this, or nothing, or only a part of this.

        Clocks do not tell: a server that takes over from one that is lost may be behind it.
        """
        times = self.at.split()
        return bool(times) and found != self and (not found.at or found.at.split()[0] in times)


@dataclass(frozen=True)
class Head:
    """The publication that is the head.

    Attributes:
        publication: its metadata.
        layout: layout of its dictionary, which has all rows except those in the log after the previous commit.
        id: id of its commit entry in the log.
        before: id of the previous commit entry, or "0-0".
        tokens: write tokens of the shards.
        nodes: Redis nodes at the time of the commit, as text to compare; "": unknown.
    """

    publication: Publication
    layout: Layout
    id: str
    before: str
    tokens: list[WriteToken]
    nodes: str = ""


class RedisModel:
    """A model in Redis. Thread-safe.

    Attributes:
        log: log of its publications.
        has_lost_decisions: whether Redis had lost what was decided when that was read last.

    Raises:
        ConfigError: the name is invalid.
    """

    def __init__(self, server: RedisServer, model: str) -> None:
        self.server, self.keys = server, RedisKeys(model)
        self.log = PublicationLog(server, self.keys)
        self.name = f"model {model} at {server.name}"
        self._version = 0  # the last that was made here
        self._lock = threading.Lock()
        self._decided: Decided | None = None
        self.has_lost_decisions = False

    def run(self, script: str, *arguments: Any, keys: tuple[str, ...] = ()) -> Any:
        every = [*script_keys(self.keys), *keys]
        return self.server.call("EVAL", script, len(every), *every, *arguments)

    def trim_log(self) -> None:
        """Has the log keep no publication but the last; a server that follows and lags loads the head again."""
        self.run(TRIM)

    def run_replicated(self, seconds: float, script: str, *arguments: Any) -> tuple[Any, int]:
        """Runs a script; returns its reply and how many replicas acknowledged it within `seconds` (0: not asked)."""
        every = script_keys(self.keys)
        command = ("EVAL", script, len(every), *every, *arguments)
        return self.server.call_replicated(*command, key=self.keys.head, seconds=seconds)

    def head(self) -> Head | None:
        """The head, if there is one.

        Raises:
            PublicationCorrupt: it is damaged.
        """
        if not (found := parse_fields(self.run(STATE))):
            return None
        try:
            return Head(
                Publication.from_json(parse_json(found[b"publication"])),
                Layout.from_json(found[b"layout"]),
                parse_entry_id(found[b"id"]),
                parse_entry_id(found[b"before"]),
                convert(list[WriteToken], parse_json(found[b"tokens"])),
                found.get(b"nodes", b"").decode(),
            )
        except (KeyError, ValueError) as exc:
            raise PublicationCorrupt(f"the head of {self.name} is damaged: {exc}") from exc

    def lease(self) -> LeaseHeld | None:
        """The publisher lease; None if it has never been held.

        Raises:
            PublicationCorrupt: it is damaged.
        """
        if not (found := parse_fields(self.run(LEASE))):
            return None
        try:
            run, host = found[b"run"].decode(), found[b"host"].decode()
            since = int(found[b"since"]) / 1000
            return LeaseHeld(int(found[b"generation"]), run, host, since, found[b"live"] == b"1")
        except (KeyError, ValueError) as exc:
            raise PublicationCorrupt(f"the lease of {self.name} is damaged: {exc}; delete {self.keys.lease}") from exc

    def acquire_lease(self, run: str, generation: int, holder: str, host: str, seconds: float) -> int:
        """Acquires or renews the lease; returns its generation.

        Args:
            run: id of the run to publish.
            generation: the cluster's last generation; 0: none.
            holder: unique id of this process.
            host: host name, for messages.
            seconds: duration of the lease.

        Raises:
            TakenOver: another cluster holds it.
        """
        found = self.run(HOLD_LEASE, generation, run, holder, host, round(seconds * 1000))
        if not found:
            raise self.taken_over(run)
        return int(found)

    def end_lease(self, holder: str) -> None:
        """Releases the lease, if this process holds it."""
        self.run(END_LEASE, holder)

    def check_lease(self, run: str, generation: int) -> None:
        """Raises TakenOver if another cluster has acquired the lease; one that merely expired still counts."""
        held = self.lease()
        if held is not None and held.generation > generation > 0:
            raise self.taken_over(run)

    def taken_over(self, run: str) -> TakenOver:
        """The error that tells why this cluster must not publish."""
        held = self.lease()
        if held is None:
            return TakenOver(f"lost the publisher lease of {self.name}: acquiring it again", same_run=False)
        since = datetime.fromtimestamp(held.since, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        who = f"{self.name} is published by another cluster (publisher on {held.host} since {since})"
        if held.run == run:
            return TakenOver(
                f"{who}, which has taken over this run: this cluster stops learning and publishing. Stop it; or, to "
                "continue with it, stop the other, then restart all shards and the coordinator of this one",
                same_run=True,
            )
        return TakenOver(
            f"{who}, with another run ({held.run}): set publish.model of one of the two to another name; or, for this "
            "cluster to replace it, stop the other: publishing starts here a few seconds later",
            same_run=False,
        )

    def keep_probes(self, groups: Mapping[int, bytes]) -> None:
        """Stores groups of probes (quality/probes.py) by position, replacing earlier ones."""
        pairs = [part for place, group in groups.items() for part in (place, group)]
        self.server.call("HSET", self.keys.probes, *pairs)

    def probes(self) -> list[bytes]:
        return list(self.server.call("HVALS", self.keys.probes))

    def lost(self) -> str:
        """The name of a key that has lost what the head needs; "": none has."""
        found = self.run(LOST)
        return "" if not found else f"streamtrain:model:{{{self.keys.model}}}:{found.decode()}"

    def decided(self) -> Decided:
        """What is decided: as it was read last where Redis has lost it since, or some of it.

        Nothing that is served changes by a loss: only what was decided later replaces what is known here.

        Raises:
            PublicationCorrupt: it is damaged.
        """
        return self._read_decided()[0]

    def _read_decided(self) -> tuple[Decided, Decided]:
        """What is decided, and what Redis has of it."""
        at, traffic, fields = self.run(DECIDED)
        try:
            labels = {label.decode(): int(version) for label, version in parse_fields(fields).items()}
            found = Decided(bytes(at), labels, bytes(traffic))
        except ValueError as exc:
            raise PublicationCorrupt(f"the labels of {self.name} are damaged: {exc}") from exc
        with self._lock:
            known, had_lost = self._decided or found, self.has_lost_decisions
            lost = known.is_lost_in(found)
            self.has_lost_decisions = lost
            if not lost:
                known = found
            self._decided = known
        if lost != had_lost:
            if lost:
                logger.warning("%s has lost labels or traffic: what was decided before is served on", self.name)
            else:
                logger.info("%s has labels and traffic again", self.name)
        return known, found

    def restore_decisions(self, who: str) -> bool:
        """Puts back what was decided, if Redis has lost it since it was read here; returns whether it had."""
        known, found = self._read_decided()
        if known == found:
            return False
        labels = [part for pair in known.labels.items() for part in pair]
        why = "put back: Redis had lost it"
        return bool(self.run(RESTORE, found.at, known.at, known.traffic, who, why, *labels))

    def vouch(self, head: Head, nodes: str) -> None:
        """Records that these Redis nodes have all of the head, unless it has moved."""
        self.run(VOUCH, head.id, nodes)

    def buckets(self, layout: Layout) -> Buckets:
        return Buckets(self.server, self.keys, layout)

    def begin(self, layout: Layout) -> Layout:
        """Creates a dictionary; it is kept for ten minutes after each renewal."""
        number = int(self.run(BEGIN, layout.to_json(), round(_LEASE * 1000)))
        return layout.numbered(number)

    @contextmanager
    def building(self, layout: Layout) -> Iterator[Layout]:
        """Creates a dictionary, which is deleted at the end of the block unless a head or version uses it by then."""
        target = self.begin(layout)
        try:
            yield target
        finally:
            with suppress(PublicationError):  # what is left is deleted when its lease has run out
                self.server.call("ZREM", self.keys.building, target.dictionary)
                self.sweep()

    def next_version(self) -> int:
        """The next version number, higher than any that there is, or that this object has returned.

        Also if Redis lost its counter: a server that still serves an old version must not confuse the two.
        """
        there = max(map(int, self.server.call("HKEYS", self.keys.versions)), default=0)
        least = max(self._version, there) + 1
        version = int(self.server.call("HINCRBY", self.keys.numbers, "version", 1))
        if version < least:
            version = int(self.server.call("HINCRBY", self.keys.numbers, "version", least - version))
        self._version = max(self._version, version)  # another thread may have been given a later one
        return version

    def renewing(self, layout: Layout) -> Callable[[], None]:
        """A function to call often while a dictionary is being built; it renews its lease when due.

        It raises PublicationError if the dictionary was deleted.
        """
        due = 0.0

        def renew() -> None:
            nonlocal due
            if time.monotonic() < due:
                return
            if not self.run(RENEW, layout.dictionary, round(_LEASE * 1000)):
                raise PublicationError(f"dictionary {layout.dictionary} of {self.name} was deleted: start again")
            due = time.monotonic() + _LEASE / 60

        return renew

    def sweep(self) -> int:
        """Deletes unused dictionaries and returns their number."""
        found = parse_fields(self.run(GARBAGE))
        for number, layout in found.items():
            try:
                self.buckets(Layout.from_json(layout).numbered(int(number))).delete()
            except ValueError as exc:
                logger.warning("cannot delete the rows of dictionary %s of %s: %s", int(number), self.name, exc)
            self.server.call("DEL", self.keys.weights(int(number)), self.keys.sums(int(number)))
            self.server.call("HDEL", self.keys.dictionaries, number)
        return len(found)
