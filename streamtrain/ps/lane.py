"""Lane: how the messages of a session go through shared memory, where worker and shard are of one machine.

The session stays a call of gRPC, which begins it, guards it and ends it. Through the lane go the same bytes, without a
socket, and without handing them from thread to thread.
"""

import os
from urllib.parse import unquote

import streamtrain.ps.ps_pb2 as pb
from streamtrain._core import Lane
from streamtrain.address import parse_address
from streamtrain.errors import ConfigError


def offer(target: str) -> Lane | None:
    """A new lane to the shard at an address; None: it is not of this machine, or there can be none."""
    if not _is_local(target):
        return None
    try:
        return Lane.make()
    except OSError:  # it is a shortcut: without it all is as before
        return None


def offered(lane: Lane) -> pb.LaneOffer:
    """What a shard is told of a lane."""
    return pb.LaneOffer(pid=os.getpid(), fd=lane.fd, nonce=lane.nonce)


def take(given: pb.LaneOffer, peer: str) -> Lane | None:
    """The lane that a worker offers; None: it cannot be had, as the worker is of another machine or user.

    Args:
        given: what `offered` gave.
        peer: who gives it, as gRPC says.
    """
    kind, _, where = peer.partition(":")
    if not (kind.startswith("unix") or _is_local(unquote(where))):
        return None
    try:
        # The kernel lets only processes of the same user do so; the nonce tells whether it is the one that was meant.
        fd = os.open(f"/proc/{given.pid}/fd/{given.fd}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return Lane.take(fd, given.nonce)
    except (ValueError, OSError):
        return None
    finally:
        os.close(fd)


def _is_local(address: str) -> bool:
    try:
        return parse_address(address, "the shard").is_local
    except ConfigError:
        return False
