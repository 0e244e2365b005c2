"""Sessions through shared memory: who gets a lane, and what ends it. tests/ps/test_remote.py has the rest."""

import mmap
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import streamtrain.ps.ps_pb2 as pb

from streamtrain._core import Lane
from streamtrain.errors import ShardRefused
from streamtrain.ps.client import Client, Heartbeat
from streamtrain.ps.lane import offer, offered, take
from streamtrain.ps.sessions import OpenSession
from tests.ps.counting import assert_exact
from tests.ps.raw import SECONDS, until
from tests.ps.served import Served, served
from tests.ps.test_remote import LOG, QUICK, Worker, open_gate

NEAR = "ipv4:127.0.0.1:50000"
RING = (1 << 20) + 128  # as in lane.h: two positions on a cache line each, and the bytes
READ = 64  # where in it stands how much is read


def sessions(of: Served) -> list[OpenSession]:
    return [session for server in of.servers for session in server._sessions._open]


def client(of: Served, *, lanes: bool) -> Client:
    shards = of.shards()
    return shards.client("worker", shards.agree(), lanes=lanes)


@pytest.mark.parametrize("lanes", [True, False])
def test_a_session_has_a_lane_where_both_want_one(lanes: bool) -> None:
    with served() as of:
        one = client(of, lanes=lanes)
        one.join()
        assert [session.lane is not None for session in sessions(of)] == [lanes, lanes]
        one.close()
        until(lambda: not sessions(of))


def damage(lane: Lane, *, mine: bool) -> None:
    """Has a side say that it has read what was never written: the worker's `mine`, else the shard's."""
    ring = os.fstat(lane.fd).st_size - 2 * RING + (RING if mine else 0)
    with mmap.mmap(lane.fd, os.fstat(lane.fd).st_size) as memory:
        memory[ring + READ : ring + READ + 8] = struct.pack("<Q", 1 << 40)


def lane_of(worker: Client, index: int) -> Lane:
    connection = worker._sessions[index]._connection  # type: ignore[attr-defined]
    lane: Lane = connection._lane
    return lane


def test_a_shard_that_damages_its_lane_is_connected_to_again() -> None:
    with served() as of:
        worker = Worker(of.shards()).begin()
        worker.learn(2)
        damage(lane_of(worker.client, 0), mine=False)
        worker.learn()
        assert worker.client.reconnects == 1
        worker.client.close()
        assert_exact(of.held, LOG)


def test_a_worker_that_damages_its_lane_is_refused() -> None:
    with served() as of:
        worker = Worker(of.shards()).begin()
        worker.learn(2)
        damage(lane_of(worker.client, 0), mine=True)
        with pytest.raises(ShardRefused, match="damaged"):
            worker.learn()
        worker.client.close()
        assert of.nodes[0].counters["refused_malformed"] == 1


def test_a_shard_that_is_silent_is_connected_to_again() -> None:
    """It holds pushes back, and says nothing of it for longer than the worker waits."""
    with served() as of, ThreadPoolExecutor(1) as pool:
        worker = Worker(of.shards(), retry=replace(QUICK, timeout=0.2))
        with Heartbeat(worker.client, 0.02):
            worker.begin()
            of.held[0].freeze(SECONDS)
            learning = pool.submit(worker.learn)
            until(lambda: worker.client.reconnects)
            open_gate(of.held[0])
            learning.result(SECONDS)
        worker.client.close()
        assert_exact(of.held, LOG)


@pytest.mark.parametrize("peer", ["ipv4:10.0.0.1:50000", "ipv6:%5B2001:db8::1%5D:50000", "nonsense", ""])
def test_who_is_far_away_gets_none(peer: str) -> None:
    lane = Lane.make()
    assert take(offered(lane), peer) is None


@pytest.mark.parametrize("peer", [NEAR, "ipv6:%5B::1%5D:50000", "unix:/tmp/socket", "unix:"])
def test_who_is_near_gets_one(peer: str) -> None:
    lane = Lane.make()
    taken = take(offered(lane), peer)
    assert taken is not None
    assert lane.write(b"there")
    assert taken.read(100) == b"there"


def test_what_is_no_lane_is_not_taken() -> None:
    lane, reading_writing = Lane.make(), os.pipe()
    try:
        for given in (
            pb.LaneOffer(),
            pb.LaneOffer(pid=os.getpid(), fd=lane.fd, nonce=bytes(16)),
            pb.LaneOffer(pid=os.getpid(), fd=1 << 20, nonce=lane.nonce),
            pb.LaneOffer(pid=1 << 30, fd=lane.fd, nonce=lane.nonce),
            *(pb.LaneOffer(pid=os.getpid(), fd=fd, nonce=lane.nonce) for fd in reading_writing),
        ):
            assert take(given, NEAR) is None
    finally:
        for fd in reading_writing:
            os.close(fd)


def test_none_is_offered_to_other_machines() -> None:
    assert offer("10.0.0.1:2222") is None
    assert offer("shard.example.org:2222") is None
    assert offer("127.0.0.1:2222") is not None
    assert offer("unix:/tmp/socket") is not None
