"""Forgetting ids, wherever a service has them, with a receipt that says where something may be left."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from streamtrain.address import redacted
from streamtrain.checkpoint.cluster_checkpoint import CheckpointSchedule
from streamtrain.cluster.members import Member
from streamtrain.errors import GateClosed, ShardUnavailable
from streamtrain.model.spec import Spec
from streamtrain.ps.nodes.shards import Control
from streamtrain.ps.rows_of_ids import Keys, Remaining, Sought, remove, take_away
from streamtrain.publish.cluster_publisher import PublicationSchedule
from streamtrain.settings.groups import Settings
from streamtrain.store.checkpoint.epochs import Epochs
from streamtrain.store.redis.model import RedisModel
from streamtrain.store.redis.versions import RedisVersions
from streamtrain.stream.dead_letters import SUFFIX

logger = logging.getLogger(__name__)

_PUBLISHING_SECONDS = 600.0  # that a publication may take which is under way
_SERVERS_SECONDS = 15.0  # for which those that follow are waited for
_POLL_SECONDS = 0.2


class Receipt(NamedTuple):
    """What was forgotten.

    Attributes:
        time: seconds since the epoch.
        ids: "feature=id" of each.
        rows: how many were taken away, by table.
        again: rows that are there again, by table: samples of these ids were learned meanwhile, or a shard has started
            again from an earlier checkpoint. Whoever wants them away, too, asks once more.
        checkpoint: epoch of a full checkpoint without the rows; None: there are no checkpoints.
        publication: number of the publication in Redis from which on they are not there; None: nothing is published.
        servers: those that follow it, and the publication that each has.
        remains: what may hold them still.
    """

    time: float
    ids: list[str]
    rows: dict[str, int]
    again: dict[str, int]
    checkpoint: int | None
    publication: int | None
    servers: dict[str, int | None]
    remains: list[Remaining]

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "remains": [one._asdict() for one in self.remains]}


@dataclass(frozen=True)
class Forgetting:
    """What forgets ids, wherever a service has them.

    Attributes:
        controls: of all shards, in order.
        settings: of the service.
        checkpoints: their schedule; None: there are none.
        publications: their schedule; None: nothing is published.
        model: where it is published; None: nowhere.
        servers: tells those that serve it, as they last reported.
        now: seconds since the epoch.
    """

    controls: Sequence[Control]
    settings: Settings
    checkpoints: CheckpointSchedule | None
    publications: PublicationSchedule | None
    model: RedisModel | None
    servers: Callable[[], list[Member]]
    now: Callable[[], float] = time.time

    def forget(self, ids: Sequence[tuple[str, str]]) -> Receipt:
        """See `Coordinator.forget`."""
        status = self.controls[0].status()
        if not status.ready:
            raise ShardUnavailable("nothing has been learned yet")
        spec = Spec.from_json(status.spec)
        sought = Sought.of(spec, ids)
        gone, remains = take_away(self.controls, spec, sought)
        epoch = self.checkpoints.now(full=True).epoch if self.checkpoints is not None else None
        number = self._publish(remains)
        servers = self._await_servers(number) if number is not None else {}
        wanted = {table: np.union1d(sought.keys.get(table, of), of) for table, of in gone.items()}
        again = {table: len(remove(self.controls, table, keys, dry_run=True)) for table, keys in wanted.items()}
        remains += [*self._checkpoints_with(epoch), *self._versions_with(sought, wanted), *self._topics()]
        rows = {table: len(keys) for table, keys in gone.items()}
        counts = len(ids), sum(rows.values()), sum(again.values())
        logger.info("ids forgotten: %d; rows deleted: %d; rows there again: %d", *counts)  # never which ids
        named = [f"{feature}={one}" for feature, one in ids]
        return Receipt(self.now(), named, rows, again, epoch, number, servers, remains)

    def _publish(self, remains: list[Remaining]) -> int | None:
        """The number of a publication without the rows, after which Redis has nothing of those before."""
        if self.publications is None or self.model is None:
            return None
        where = f"Redis and servers, model {self.model.keys.model}"
        try:
            number = self.publications.now(removed=True, patience=_PUBLISHING_SECONDS).number
            self.model.trim_log()
        except GateClosed as exc:
            remains.append(Remaining(where, f"all rows, as {exc}", "the next publication"))
            return None
        return number

    def _await_servers(self, number: int) -> dict[str, int | None]:
        """What those that follow the head have of it, once it is this publication, or after a while."""
        deadline, never = time.monotonic() + _SERVERS_SECONDS, threading.Event()
        while True:
            servers = (server for server in self.servers() if server.about.get("version") == "head")
            found = {server.name: server.about.get("publication") for server in servers}
            if all(has is not None and has >= number for has in found.values()) or time.monotonic() > deadline:
                return found
            never.wait(_POLL_SECONDS)

    def _checkpoints_with(self, epoch: int | None) -> Iterator[Remaining]:
        url, keep = self.settings.checkpoint.url, self.settings.checkpoint.keep
        if epoch is None or url is None:
            return
        older = [one for one in Epochs(url).numbers() if one < epoch]
        if older:
            until = f"{keep} later ones are written (checkpoint.keep), or you delete them"
            yield Remaining(f"checkpoints at {redacted(url)}", f"epochs {', '.join(map(str, older))}", until)

    def _versions_with(self, sought: Sought, keys: Mapping[str, Keys]) -> Iterator[Remaining]:
        if self.model is None:
            return
        least = "at least " if sought.crossed else ""  # of crosses, only those rows are known that shards still had
        versions = RedisVersions(self.model)
        for version in versions.all():
            found = versions.find(version.version or 0)
            if found is None:
                continue
            of_version = {table: of for table, of in keys.items() if table in found[1].tables}
            there = self.model.buckets(found[1]).look_up(of_version)
            if count := sum(int(is_there.sum()) for _, is_there in there.values()):
                where = f"version {version.version} in Redis, and servers that serve it"
                keep = self.settings.publish.keep
                yield Remaining(
                    where, f"{least}{count} rows", f"no label names it and {keep} later ones exist (publish.keep)"
                )

    def _topics(self) -> Iterator[Remaining]:
        if self.settings.stream.url is not None:
            topic = self.settings.stream.topic
            what = "samples, which are learned again if they are read again"
            yield Remaining(f"topics {topic} and {topic}{SUFFIX}", what, "their retention ends")
