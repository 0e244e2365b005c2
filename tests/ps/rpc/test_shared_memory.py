"""Sessions through shared memory: who gets a lane, and what ends it. test_remote_session.py has the rest."""

import mmap
import multiprocessing
import os
import signal
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess

import grpc
import numpy as np
import pytest
import streamtrain.ps.rpc.ps_pb2 as pb

from streamtrain._core import Lane, Plan, Planner
from streamtrain.errors import ShardRefused
from streamtrain.periodic import PeriodicTask
from streamtrain.ps.client import Client
from streamtrain.ps.consistency import Async
from streamtrain.ps.nodes.node import Node
from streamtrain.ps.nodes.server import ShardServer
from streamtrain.ps.nodes.shards import Shards
from streamtrain.ps.rpc.control import CHANNEL_OPTIONS
from streamtrain.ps.rpc.sessions import OpenSession
from streamtrain.ps.rpc.shared_memory import create_lane, encode_offer, open_lane
from tests.patience import PATIENCE, until
from tests.ps.counting import assert_exact
from tests.ps.rpc.test_remote_session import LOG, QUICK, Worker, open_gate
from tests.ps.served import COUNTING, Served, served

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
        with PeriodicTask("heartbeat", worker.client.beat, 0.02):
            worker.begin()
            of.held[0].freeze(PATIENCE)
            learning = pool.submit(worker.learn)
            until(lambda: worker.client.reconnects)
            open_gate(of.held[0])
            learning.result(PATIENCE)
        worker.client.close()
        assert_exact(of.held, LOG)


@pytest.mark.parametrize("peer", ["ipv4:10.0.0.1:50000", "ipv6:%5B2001:db8::1%5D:50000", "nonsense", ""])
def test_who_is_far_away_gets_none(peer: str) -> None:
    lane = Lane.make()
    assert open_lane(encode_offer(lane), peer) is None


@pytest.mark.parametrize("peer", [NEAR, "ipv6:%5B::1%5D:50000", "unix:/tmp/socket", "unix:"])
def test_who_is_near_gets_one(peer: str) -> None:
    lane = Lane.make()
    taken = open_lane(encode_offer(lane), peer)
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
            assert open_lane(given, NEAR) is None
    finally:
        for fd in reading_writing:
            os.close(fd)


def test_none_is_offered_to_other_machines() -> None:
    assert create_lane("10.0.0.1:2222") is None
    assert create_lane("shard.example.org:2222") is None
    assert create_lane("127.0.0.1:2222") is not None
    assert create_lane("unix:/tmp/socket") is not None


def serve(index: int, told: Pipe) -> None:
    """A shard of two in a process of its own, until it is killed."""
    server = ShardServer(Node(index, 2, Async))
    told.send(server.grpc.add_insecure_port("127.0.0.1:0"))
    server.start()
    told.recv()


@contextmanager
def processes() -> Iterator[tuple[list[BaseProcess], Shards]]:
    """Two shards in processes of their own."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    running: list[BaseProcess] = [context.Process(target=serve, args=(i, pipes[i][1])) for i in range(2)]
    for one in running:
        one.start()
    targets = [f"127.0.0.1:{pipe.recv()}" for pipe, _ in pipes]
    channels = [grpc.insecure_channel(target, options=CHANNEL_OPTIONS) for target in targets]
    try:
        yield running, Shards(list(zip(channels, targets, strict=True)), COUNTING)
    finally:
        for channel in channels:
            channel.close()
        for one in running:
            one.kill()
            one.join()


def large_plan(keys: int) -> Plan:
    """Of one sample whose keys do not fit into a lane."""
    planner = Planner([(0, "sum", 0)], [1], 2)
    drawn = np.random.default_rng(0).integers(0, 2**64, keys, np.uint64)
    offsets = np.array([[0, keys]], np.int32)
    return planner.plan(drawn, np.array([0, keys]), offsets, np.zeros(1))


def test_a_shard_that_is_stopped_holds_nobody_up_for_longer_than_the_timeout() -> None:
    """Neither who writes to it more than a lane holds, nor what is said to other shards meanwhile."""
    with processes() as (running, shards):
        client = shards.client("worker", shards.agree(), retry=replace(QUICK, timeout=2.0))
        client.join()
        plan = large_plan(600_000)
        assert running[0].pid
        os.kill(running[0].pid, signal.SIGSTOP)
        heard = beats_to(client, 1)
        with PeriodicTask("heartbeat", client.beat, 0.05):
            began = time.monotonic()
            pulled = client.pull(plan)
            waited = time.monotonic() - began
            beats = len(heard)
            os.kill(running[0].pid, signal.SIGCONT)
            pulled.wait()
        assert client.reconnects == 1
        assert waited > 1.9
        assert beats >= 3
        client.close()


def beats_to(client: Client, index: int) -> list[float]:
    """When a client has said to a shard that it is alive, from now on."""
    connection = client._sessions[index]._connection  # type: ignore[attr-defined]
    heard, say = [], connection.try_send

    def hint(data: bytes) -> None:
        say(data)
        heard.append(time.monotonic())

    connection.try_send = hint
    return heard
