"""Shards: all shards of a cluster as a worker knows them, be they in this process or behind gRPC."""

import logging
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from streamtrain.errors import ShardRefused
from streamtrain.incarnation import Incarnation
from streamtrain.model.features import RowType
from streamtrain.model.spec import Spec, shard_slice
from streamtrain.ps.client import Client
from streamtrain.ps.clock import Clock, Progress
from streamtrain.ps.hooks import CutResult, FreezeResult
from streamtrain.ps.nodes.node import Node
from streamtrain.ps.nodes.server import status_of
from streamtrain.ps.push import Floats
from streamtrain.ps.replication.failover import ResolvedTarget, TargetPair, make_resolver
from streamtrain.ps.rpc import wire
from streamtrain.ps.rpc.control import Metadata, RemoteControl, Retry, ServerChannel
from streamtrain.ps.rpc.remote_session import JoinInfo, RemoteSession
from streamtrain.ps.session import LocalSession, Session
from streamtrain.ps.shard import InitialState, RowInfo, Run

logger = logging.getLogger(__name__)


class Control(Protocol):
    """Calls to a shard besides pulls and pushes. Every method may raise ShardError."""

    @property
    def target(self) -> str:
        """Address of the shard, for messages."""

    def status(self, *, predictions: bool = False) -> Any:
        """How the shard is, a `ShardStatus` of schemas/ps.proto; with `Position.predictions` if asked for."""

    def initialise(self, index: int, shards: int, initial: InitialState, map_epoch: int = 0) -> Any:
        """Gives an empty shard what it begins with; the status says what it has."""

    def claim(self, incarnation: Incarnation) -> Any:
        """See `Node.claim`; returns the status."""

    def supersede(self, by: Incarnation, reason: str) -> None:
        """See `Node.supersede`."""

    def set_rates(self, rates: Mapping[str, float]) -> Any:
        """See `Shard.set_rates`; returns the status."""

    def freeze(self) -> FreezeResult:
        """See `Node.freeze`."""

    def cut(self, epoch: int, target: Clock, full: bool, hold: float = 0.0) -> CutResult:
        """See `Node.cut`."""

    def write(self, epoch: int) -> str:
        """See `Node.write`."""

    def place(
        self, index: int, shards: int, run: str, map_epoch: int, *, head: str = "", pair: Sequence[str] = ()
    ) -> Any:
        """See `Node.place`, with addresses of both processes of a shard; none: it has no backup. Returns the status."""

    def read_ahead(self, index: int, shards: int, *, rate: float = 0.0) -> None:
        """See `Node.read_ahead`."""

    def publish(self, number: int, layout: str, generation: int = 0) -> str:
        """See `Node.publish`."""

    def apply(self) -> None:
        """See `Node.apply`."""

    def inspect(self, table: str, key: int) -> RowInfo | None:
        """See `Shard.inspect`."""

    def remove(self, table: str, keys: NDArray[np.uint64], *, dry_run: bool = False) -> NDArray[np.uint64]:
        """See `Shard.remove`."""

    def keys(self, table: str, cursor: int) -> tuple[NDArray[np.uint64], int | None]:
        """See `Shard.keys`."""

    def sums(self, number: int, layout: str) -> Any:
        """See `Node.sums`."""


class LocalControl:
    """The control of a node in the same process.

    Args:
        target: its address, for messages; None: it has none.
    """

    def __init__(self, node: Node, target: str | None = None) -> None:
        self.target = target or f"shard {node.index} of this process"
        self._node = node
        self.freeze, self.cut, self.write = node.freeze, node.cut, node.write
        self.publish, self.apply, self.sums = node.publish, node.apply, node.sums
        self.supersede, self.read_ahead = node.supersede, node.read_ahead

    def status(self, *, predictions: bool = False) -> Any:
        return status_of(self._node, [], predictions=predictions)

    def initialise(self, index: int, shards: int, initial: InitialState, map_epoch: int = 0) -> Any:
        self._node.initialise(initial)
        return self.status()

    def claim(self, incarnation: Incarnation) -> Any:
        """See Control."""
        self._node.claim(incarnation)
        return self.status()

    def place(
        self, index: int, shards: int, run: str, map_epoch: int, *, head: str = "", pair: Sequence[str] = ()
    ) -> Any:
        """See Control; a shard in the process of its caller has no backup."""
        self._node.place(index, shards, run, map_epoch, head=head)
        return self.status()

    def set_rates(self, rates: Mapping[str, float]) -> Any:
        self._node.shard.set_rates(rates)
        return self.status()

    def inspect(self, table: str, key: int) -> RowInfo | None:
        return self._node.shard.inspect(table, key)

    def remove(self, table: str, keys: NDArray[np.uint64], *, dry_run: bool = False) -> NDArray[np.uint64]:
        return self._node.shard.remove(table, keys, dry_run=dry_run)

    def keys(self, table: str, cursor: int) -> tuple[NDArray[np.uint64], int | None]:
        return self._node.shard.keys(table, cursor)


@dataclass(frozen=True)
class RunTemplate:
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

    Attributes:
        controls: of all shards, in order.
    """

    def __init__(
        self, places: Sequence[Node | ServerChannel | TargetPair], beginning: RunTemplate, metadata: Metadata = ()
    ) -> None:
        self._beginning = beginning
        self._metadata = metadata
        self.move_to(places, 0)
        self._run: Run | None = None  # as once agreed
        self._spec = beginning.spec  # of the run
        self._incarnation: Incarnation | None = None  # as once claimed

    def move_to(self, places: Sequence[Node | ServerChannel | TargetPair], map_epoch: int) -> None:
        """The cluster has these shards from now on, by a map of that epoch. Clients of before keep those of before."""
        # Sessions share the resolvers: once one finds that a backup has taken over, none waits for the primary.
        made = [place if isinstance(place, Node) else make_resolver(place, self._metadata) for place in places]
        self._places, self._map_epoch = made, map_epoch
        self.controls: list[Control] = [
            LocalControl(place)
            if isinstance(place, Node)
            else RemoteControl(*place[0], self._metadata, resolver=place[1])
            for place in made
        ]

    def agree(self) -> Run:
        """Finds the run that the shards have begun, or begins one, and has empty shards join it.

        Any number of workers may do so at the same time: an empty shard takes the first run that it is given, and all
        go by what shard 0 has taken. A shard that was lost without a checkpoint so starts again where the run did; also
        if all were lost, as a process that has agreed on a run before does not begin another one.

        Raises:
            ShardUnavailable: a shard cannot be reached: what it holds might be the run.
            ShardRefused: shards are of different runs, or of another number of shards.
            ModelMismatch: they hold another model.
        """
        statuses = [control.status() for control in self.controls]
        index, begun = next(((i, status) for i, status in enumerate(statuses) if status.ready), (0, None))
        if begun is None:
            begun = self._initialise(0, self._run or Run(uuid.uuid4().hex, self._beginning.start))
        self._spec = self._held(index, begun)
        topic = next((status.topic for status in statuses if status.topic), "")
        run = Run(begun.run, wire.decode_clock(begun.start), topic)
        for index, status in enumerate(statuses):
            if not status.ready or (status.run == run.id and not status.topic and topic):
                statuses[index] = self._initialise(index, run)
            if not status.ready:
                logger.info("shard %d was empty; it begins run %s at %s", index, run.id, run.start or "offset 0")
        for control, status in zip(self.controls, statuses, strict=True):
            if status.run != run.id:
                raise ShardRefused(
                    f"{control.target} is of run {status.run}, others are of {run.id}: "
                    "its checkpoints are not of this cluster; restore all shards from the same place",
                    "mismatch",
                )
        held = [self._held(index, status) for index, status in enumerate(statuses)]
        if self._run is None and (overridden := held[0].overridden(self._beginning.spec)):
            logger.warning(
                "the model file has changed, but what the run began with stays in force: %s; to change it, stop "
                "the cluster and run `streamtrain evolve`. `streamtrain set` changes learning rates at once",
                "; ".join(overridden),
            )
        if self._run is None and (set_rates := held[0].rates):
            listed = ", ".join(f"{name}.rate={rate:g}" for name, rate in set_rates.items())
            logger.info("learning rates as set by `streamtrain set`, instead of those of the model file: %s", listed)
        self._run = run
        if self._incarnation is not None and any(one.incarnation != str(self._incarnation) for one in statuses):
            self.claim(self._incarnation)  # shards have been restarted
        return run

    def _held(self, index: int, status: Any) -> Spec:
        """What a shard holds; raises ModelMismatch."""
        held = Spec.from_json(status.spec)
        held.check_fit(self._beginning.spec, self.controls[index].target)
        return held

    def adopt(self, topic: str) -> None:
        """Binds the offsets and clocks of all shards to a topic; raises the errors of `agree`."""
        run = self.agree()._replace(topic=topic)
        for index in range(len(self.controls)):
            self._initialise(index, run)
        self._run = run

    def claim(self, latest: Incarnation | None) -> Incarnation:
        """The incarnation of this cluster, which all its shards then have.

        If they have none, all have been restarted: a new one begins. Where several workers begin one, the latest holds.

        Args:
            latest: the latest incarnation of any copy of this cluster; None: there was none.

        Raises:
            ShardRefused: another copy has superseded this one.
            ShardUnavailable: a shard cannot be reached, or is empty.
        """
        known = [Incarnation.parse(control.status().incarnation) for control in self.controls]
        claimed = max((one for one in [self._incarnation, *known] if one), default=None) or Incarnation.after(latest)
        for control in self.controls:
            claimed = Incarnation.parse(control.claim(claimed).incarnation) or claimed
        self._incarnation = claimed
        return claimed

    def supersede(self, by: Incarnation, reason: str) -> None:
        """Stops all shards, as another copy of the cluster continues; raises ShardUnavailable as `claim`."""
        for control in self.controls:
            control.supersede(by, reason)

    def _initialise(self, index: int, run: Run) -> Any:
        what, count = self._beginning, len(self._places)
        dense = what.dense[shard_slice(len(what.dense), index, count)]
        statistics = what.statistics[shard_slice(len(what.statistics), index, count)]
        initial = InitialState(run, self._spec, dense, statistics)
        return self.controls[index].initialise(index, count, initial, self._map_epoch)

    def clocks(self) -> list[dict[int, int]]:
        """The clock of every shard.

        Raises:
            ShardUnavailable: a shard cannot be reached, or is empty.
        """
        return [wire.decode_clock(control.status().clock) for control in self.controls]

    def progress(self) -> list[Progress]:
        """Where every shard stands; raises the errors of `clocks`."""
        return [wire.decode_progress(control.status(predictions=True).clock) for control in self.controls]

    def client(
        self,
        worker: str,
        run: Run,
        *,
        dtype: RowType = "float32",
        lanes: bool = True,
        retry: Retry | None = None,
        stopped: threading.Event | None = None,
        lost: Callable[[], object] = lambda: None,
    ) -> Client:
        """A client for one worker of a run.

        Args:
            worker: its name, unique in the cluster.
            run: as `agree` gave it.
            dtype: of floats on the wire.
            lanes: whether messages go through shared memory, where a shard is of this machine.
            retry: how to deal with shards that do not answer.
            stopped: once set, waiting for connections ends.
            lost: called with every attempt to reach a shard that fails.
        """
        spec, count = self._spec, len(self._places)
        who = JoinInfo(worker, run.id, spec.identity, count, dtype, lanes, self._map_epoch)
        sessions: list[Session] = [
            LocalSession(place.shard, place.consistency, worker)
            if isinstance(place, Node)
            else self._session(i, place, who, retry, stopped=stopped, lost=lost)
            for i, place in enumerate(self._places)
        ]
        return Client(sessions, spec)

    def _session(
        self,
        index: int,
        place: ResolvedTarget,
        who: JoinInfo,
        retry: Retry | None,
        *,
        stopped: threading.Event | None,
        lost: Callable[[], object],
    ) -> Session:
        first, resolver = place
        return RemoteSession(
            *(*first, index, who, self.agree),
            retry=retry,
            metadata=self._metadata,
            stopped=stopped,
            resolver=resolver,
            lost=lost,
        )
