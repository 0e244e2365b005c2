"""Failover: resolves which of its two addresses a shard is at, and promotes its backup once the primary is gone."""

import threading
from typing import Any

import streamtrain.ps.rpc.ps_pb2 as pb
from streamtrain.errors import ShardError, ShardUnavailable
from streamtrain.ps.replication.state_transfer import Generation
from streamtrain.ps.rpc.control import Metadata, RemoteControl, ServerChannel

TargetPair = tuple[ServerChannel, ServerChannel]

_SECONDS = 1.0  # a server that does not answer within it counts as unreachable


class FailoverResolver:
    """Resolver of a shard with a backup. Thread-safe.

    Args:
        pair: the two targets, first the one where the primary starts.
        promotes: whether a backup in step is promoted if there is no primary.
    """

    def __init__(self, pair: TargetPair, metadata: Metadata = (), *, promotes: bool = True) -> None:
        self._pair, self._promotes = pair, promotes
        self._controls = [RemoteControl(*target, metadata, _SECONDS) for target in pair]
        self._lock = threading.Lock()
        self._last = 0

    def resolve(self) -> ServerChannel:
        with self._lock:
            self._last = self._find()
            return self._pair[self._last]

    @property
    def last(self) -> ServerChannel:
        return self._pair[self._last]

    def _find(self) -> int:
        statuses: list[Any] = [None, None]
        reason = ""
        for i in (self._last, 1 - self._last):
            try:
                statuses[i] = self._controls[i].status()
            except ShardError as exc:
                reason = reason or str(exc)
                continue
            if _is_primary(statuses[i]) and i == self._last:
                return i
        primaries = [i for i, status in enumerate(statuses) if _is_primary(status)]
        if primaries:
            return max(primaries, key=lambda i: Generation.of(statuses[i].standing.line))
        for i, status in enumerate(statuses):
            if self._promotes and status is not None and status.standing.in_step:
                self._controls[i].promote()
                return i
        if statuses[0] is not None and statuses[0].standing.role == pb.PRIMARY:
            return 0  # it is empty, and waits to be initialised, or for a place
        if None not in statuses and not statuses[1].shards:
            return 1  # it waits for a place, and the other one has nothing that it could take over with
        raise ShardUnavailable(reason or f"no primary at {self._pair[0][1]} or {self._pair[1][1]}")


def _is_primary(status: Any) -> bool:
    return status is not None and status.ready


def open_control(target: ServerChannel | TargetPair, metadata: Metadata = (), timeout: float = 10.0) -> RemoteControl:
    """The control of a shard.

    Args:
        target: where it is, or both targets of a shard with a backup.
        metadata: sent with every call, such as a token.
        timeout: seconds for an answer.
    """
    first, resolver = make_resolver(target, metadata)
    return RemoteControl(*first, metadata, timeout, resolver)


ResolvedTarget = tuple[ServerChannel, FailoverResolver | None]
"""The target to ask first, and the resolver of a shard with two."""


def make_resolver(target: ServerChannel | TargetPair, metadata: Metadata = ()) -> ResolvedTarget:
    """The target to ask first, and the resolver of a shard with two."""
    if isinstance(target[0], tuple):
        pair: Any = target
        return pair[0], FailoverResolver(pair, metadata)
    only: Any = target
    return only, None
