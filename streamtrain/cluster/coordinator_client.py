"""Coordinator's client: how processes say that they are there, and how the cluster is asked for."""

import json
import logging
import threading
from collections.abc import Callable
from typing import Any

import grpc

import streamtrain.cluster.coordinator_pb2 as pb
from streamtrain.cluster.checkpoints import Taken
from streamtrain.cluster.coordinator import SERVER, WORKER
from streamtrain.cluster.coordinator_server import SERVICE
from streamtrain.cluster.slots import SlotMap
from streamtrain.errors import ShardError
from streamtrain.ps.control import CHANNEL_OPTIONS, translated
from streamtrain.ps.security import Security, connect, metadata

logger = logging.getLogger(__name__)

_KINDS = {WORKER: pb.WORKER, SERVER: pb.SERVER}
_EVERY = 1.0  # seconds between two signs of life


class CoordinatorClient:
    """Asks a coordinator. Thread-safe. Every method may raise ShardError: it does not answer, or refuses.

    Args:
        address: "host:port".
        security: of the wire.
        timeout: seconds for an answer.
    """

    def __init__(self, address: str, security: Security, timeout: float = 5.0) -> None:
        self.address = address
        self._metadata, self._timeout = metadata(security), timeout
        self._channel = connect(address, security, CHANNEL_OPTIONS)

    def beat(self, kind: str, name: str, about: dict[str, Any]) -> int:
        """Says that a process is there; returns the epoch of the slot map."""
        request = pb.BeatRequest(kind=_KINDS[kind], name=name, about=json.dumps(about))
        return int(self._call("Beat", request, pb.Beaten).epoch)

    def leave(self, kind: str, name: str) -> None:
        """Says that a process ends."""
        self._call("Leave", pb.LeaveRequest(kind=_KINDS[kind], name=name), pb.Left)

    def slots(self) -> SlotMap:
        """Which shard has which keys."""
        found = self._call("Slots", pb.SlotsRequest(), pb.SlotMap)
        return SlotMap(found.epoch, tuple(found.shards))

    def status(self) -> dict[str, Any]:
        """See `Coordinator.status`."""
        text = self._call("Status", pb.StatusRequest(), pb.ClusterStatus).status
        try:
            status: dict[str, Any] = json.loads(text)
        except ValueError as exc:
            raise ShardError(f"{self.address} does not say how the cluster is: it is of another release") from exc
        return status

    def inspect(self, table: str, key: int) -> dict[str, Any] | None:
        """`count` and `last_seen` (None where it is not kept) of a row; None: there is none."""
        found = self._call("Inspect", pb.InspectRequest(table=table, key=key), pb.Inspected)
        return {"count": found.count, "last_seen": found.last_seen or None} if found.found else None

    def checkpoint(self, *, full: bool = False, timeout: float | None = None) -> Taken:
        """Has a checkpoint taken, and waits for it; for at most `timeout` seconds, if it is not None."""
        found = self._call("Checkpoint", pb.CheckpointRequest(full=full), pb.Checkpointed, timeout)
        return Taken(found.epoch, found.kind, found.aligned, found.pause_ms, found.seconds)

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()

    def _call(self, name: str, request: Any, answer: Any, timeout: float | None = -1.0) -> Any:
        method = self._channel.unary_unary(
            f"/{SERVICE}/{name}", lambda message: message.SerializeToString(), answer.FromString
        )
        try:
            return method(request, timeout=self._timeout if timeout == -1.0 else timeout, metadata=self._metadata)
        except grpc.RpcError as exc:
            raise translated(exc, self.address) from exc


class Beats:
    """Says once a second that a process is there, in a thread of its own, from entering on.

    Args:
        client: of the coordinator.
        kind: "worker" or "server".
        name: of the process.
        about: gives what it says of itself.
        moved: is called once if the slot map changes: whoever goes by the old one has to begin anew.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        kind: str,
        name: str,
        about: Callable[[], dict[str, Any]],
        moved: Callable[[], object] = lambda: None,
    ) -> None:
        self._client, self._kind, self._name, self._about, self._moved = client, kind, name, about, moved
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beats", daemon=True)
        self._epoch: int | None = None
        self._is_away = False

    def __enter__(self) -> "Beats":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        try:
            self._client.leave(self._kind, self._name)
        except ShardError as exc:  # whose lease of us ends by itself
            logger.debug("%s", exc)
        self._client.close()

    def _run(self) -> None:
        while not self._stop.wait(0 if self._epoch is None and not self._is_away else _EVERY):
            try:
                self._beat()
            except ShardError as exc:
                if not self._is_away:
                    logger.warning("the coordinator is away, all else goes on: %s", exc)
                self._is_away = True
            except Exception:  # whatever it is: the process goes on
                logger.exception("no sign of life given")
                self._is_away = True

    def _beat(self) -> None:
        epoch = self._client.beat(self._kind, self._name, self._about())
        if self._is_away:
            logger.info("the coordinator is back")
        self._is_away = False
        if self._epoch is not None and epoch != self._epoch:
            logger.warning("the shards are others now (epoch %d of the slot map, not %d)", epoch, self._epoch)
            self._moved()
        self._epoch = epoch
