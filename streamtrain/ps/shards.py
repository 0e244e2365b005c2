"""Shards: all shards of a cluster as a worker knows them, be they in this process or behind gRPC."""

import logging
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from streamtrain.errors import ShardRefused
from streamtrain.model.features import RowType
from streamtrain.model.spec import Spec, slice_of
from streamtrain.ps import wire
from streamtrain.ps.client import Client
from streamtrain.ps.clock import Clock, Stand
from streamtrain.ps.control import Metadata, RemoteControl, Retry
from streamtrain.ps.keeping import CutAt, Frozen
from streamtrain.ps.leader import leader_of
from streamtrain.ps.node import Node
from streamtrain.ps.push import Floats
from streamtrain.ps.remote import Introduction, RemoteSession
from streamtrain.ps.route import Pair, Place, Routed, route_of
from streamtrain.ps.session import LocalSession, Session
from streamtrain.ps.shard import Initial, Row, Run
from streamtrain.ps.status import status_of

logger = logging.getLogger(__name__)


class Control(Protocol):
    """What is asked of a shard beside pulls and pushes. Any method may raise ShardError."""

    target: str

    def status(self) -> Any:
        """How the shard is, a `ShardStatus` of schemas/ps.proto."""

    def initialise(self, index: int, shards: int, initial: Initial) -> Any:
        """Gives an empty shard what it begins with; the status says what it has."""

    def freeze(self) -> Frozen:
        """See `Node.freeze`."""

    def cut(self, epoch: int, target: Clock, full: bool) -> CutAt:
        """See `Node.cut`."""

    def write(self, epoch: int) -> str:
        """See `Node.write`."""

    def publish(self, number: int, layout: str) -> str:
        """See `Node.publish`."""

    def apply(self) -> None:
        """See `Node.apply`."""

    def report(self, worker: str, windows: Sequence[Any]) -> None:
        """See `Leader.report`."""

    def publish_now(self, *, force: bool = False, timeout: float | None = None) -> str:
        """See `Leader.publish_now`; for at most `timeout` seconds, if it is far away."""

    def inspect(self, table: str, key: int) -> Row | None:
        """See `Shard.inspect`."""

    def verify(self, *, timeout: float | None = None) -> str:
        """See `Leader.verify`; `timeout` as of `publish_now`."""

    def sums(self, number: int, layout: str) -> Any:
        """See `Node.sums`."""


class LocalControl:
    """The control of a node in the same process."""

    def __init__(self, node: Node) -> None:
        self.target = f"shard {node.index} of this process"
        self._node = node
        self.freeze, self.cut, self.write = node.freeze, node.cut, node.write
        self.publish, self.apply, self.sums = node.publish, node.apply, node.sums

    def status(self) -> Any:
        """See Control."""
        return status_of(self._node, [])

    def initialise(self, index: int, shards: int, initial: Initial) -> Any:
        """See Control."""
        self._node.initialise(initial)
        return self.status()

    def report(self, worker: str, windows: Sequence[Any]) -> None:
        """See Control."""
        leader_of(self._node).report(worker, windows)

    def publish_now(self, *, force: bool = False, timeout: float | None = None) -> str:
        """See Control."""
        return leader_of(self._node).publish_now(force=force)

    def inspect(self, table: str, key: int) -> Row | None:
        """See Control."""
        return self._node.shard.inspect(table, key)

    def verify(self, *, timeout: float | None = None) -> str:
        """See Control."""
        return leader_of(self._node).verify()


@dataclass(frozen=True)
class Beginning:
    """What a run begins with, should none have begun.

    Attributes:
        spec: of the model.
        dense: float32 [P], first values of the dense parameters.
        statistics: float32 [S], those of the statistics.
        start: offsets at which learning begins.
    """

    spec: Spec
    dense: Floats
    statistics: Floats
    start: Clock


class Shards:
    """All shards of a cluster.

    Args:
        places: where each is, in order of their index: a node of this process, or a channel with its target, or two of
            them, one of its primary and one of its backup.
        beginning: what a run begins with.
        metadata: sent with every remote call, such as a token.
    """

    def __init__(self, places: Sequence[Node | Place | Pair], beginning: Beginning, metadata: Metadata = ()) -> None:
        # Routes are shared with sessions: once one finds that a backup has taken over, nobody waits for the primary.
        self._places = [place if isinstance(place, Node) else route_of(place, metadata) for place in places]
        self._beginning = beginning
        self._metadata = metadata
        self._run: Run | None = None  # as once agreed
        self.controls: list[Control] = [
            LocalControl(place) if isinstance(place, Node) else RemoteControl(*place[0], metadata, route=place[1])
            for place in self._places
        ]

    def agree(self) -> Run:
        """Finds the run that the shards have begun, or begins one, and has empty shards join it.

        Any number of workers may do so at the same time: an empty shard takes the first run that it is given, and all
        go by what shard 0 has taken. A shard that was lost without a checkpoint so starts again where the run did; also
        if all were lost, as who has agreed on a run before does not begin another one.

        Raises:
            ShardUnavailable: a shard cannot be reached: what it holds might be the run.
            ShardRefused: shards are of different runs, or of another model or number of shards.
        """
        statuses = [control.status() for control in self.controls]
        begun = next((status for status in statuses if status.ready), None)
        if begun is None:
            begun = self._initialise(0, self._run or Run(uuid.uuid4().hex, self._beginning.start))
        run = Run(begun.run, wire.clock_of(begun.start))
        for index, status in enumerate(statuses):
            if not status.ready:
                statuses[index] = self._initialise(index, run)
        for control, status in zip(self.controls, statuses, strict=True):
            if status.run != run.id:
                raise ShardRefused(
                    f"{control.target} is of run {status.run}, others are of {run.id}: "
                    "its checkpoints are not of this cluster; restore all shards from the same place",
                    "mismatch",
                )
            if status.identity != self._beginning.spec.identity:
                theirs, mine = Spec.from_json(status.spec).meaning(), self._beginning.spec.meaning()
                differing = ", ".join(what for what in mine if theirs[what] != mine[what])
                raise ShardRefused(f"{control.target} holds another model; they differ in: {differing}", "mismatch")
        self._run = run
        return run

    def _initialise(self, index: int, run: Run) -> Any:
        what, count = self._beginning, len(self._places)
        dense = what.dense[slice_of(len(what.dense), index, count)]
        statistics = what.statistics[slice_of(len(what.statistics), index, count)]
        logger.info("shard %d is empty; it begins run %s at %s", index, run.id, run.start or "offset 0")
        return self.controls[index].initialise(index, count, Initial(run, what.spec, dense, statistics))

    def clocks(self) -> list[dict[int, int]]:
        """The clock of every shard.

        Raises:
            ShardUnavailable: a shard cannot be reached, or is empty.
        """
        return [wire.clock_of(control.status().clock) for control in self.controls]

    def stands(self) -> list[Stand]:
        """Where every shard stands; errors as of `clocks`."""
        return [wire.stand_of(control.status().clock) for control in self.controls]

    def client(
        self,
        worker: str,
        run: Run,
        *,
        dtype: RowType = "float32",
        lanes: bool = True,
        retry: Retry | None = None,
        stopped: threading.Event | None = None,
    ) -> Client:
        """A client for one worker of a run.

        Args:
            worker: its name, unique in the cluster.
            run: as `agree` gave it.
            dtype: of floats on the wire.
            lanes: whether messages go through shared memory, where a shard is of this machine.
            retry: how to deal with shards that do not answer.
            stopped: once set, waiting for connections ends.
        """
        spec, count = self._beginning.spec, len(self._places)
        who = Introduction(worker, run.id, spec.identity, count, dtype, lanes)
        sessions: list[Session] = [
            LocalSession(place.shard, place.consistency, worker)
            if isinstance(place, Node)
            else self._session(i, place, who, retry, stopped)
            for i, place in enumerate(self._places)
        ]
        return Client(sessions, spec)

    def _session(
        self, index: int, place: Routed, who: Introduction, retry: Retry | None, stopped: threading.Event | None
    ) -> Session:
        first, route = place
        return RemoteSession(
            *first, index, who, self.agree, retry=retry, metadata=self._metadata, stopped=stopped, route=route
        )
