"""Lane: the messages of a session through shared memory, if worker and shard are on the same machine.

The session remains a gRPC call, which opens, authenticates and closes it. The lane carries the same bytes without a
socket and without handing them from thread to thread.
"""

import os
from urllib.parse import unquote

import streamtrain.ps.rpc.ps_pb2 as pb
from streamtrain._core import Lane
from streamtrain.address import parse_address
from streamtrain.errors import ConfigError


def create_lane(target: str) -> Lane | None:
    """A new lane to the shard at an address; None if it is on another machine, or shared memory is not available."""
    if not _is_local(target):
        return None
    try:
        return Lane.make()
    except OSError:  # the lane is optional
        return None


def encode_offer(lane: Lane) -> pb.LaneOffer:
    """The message that offers a lane to a shard."""
    return pb.LaneOffer(pid=os.getpid(), fd=lane.fd, nonce=lane.nonce)


def open_lane(offer: pb.LaneOffer, peer: str) -> Lane | None:
    """The lane that a worker offers; None if it is on another machine or of another user.

    Args:
        offer: the result of `encode_offer`.
        peer: address of the worker, as reported by gRPC.
    """
    kind, _, where = peer.partition(":")
    if not (kind.startswith("unix") or _is_local(unquote(where))):
        return None
    try:
        # The kernel allows this to processes of the same user only; the nonce proves that it is the right file.
        fd = os.open(f"/proc/{offer.pid}/fd/{offer.fd}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return Lane.take(fd, offer.nonce)
    except (ValueError, OSError):
        return None
    finally:
        os.close(fd)


def _is_local(address: str) -> bool:
    try:
        return parse_address(address, "the shard", names=True).is_local
    except ConfigError:
        return False
