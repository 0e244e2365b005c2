"""Connections to a shard that is slow to answer, as over a long way or on a busy machine."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import grpc

from streamtrain.errors import ShardUnavailable
from streamtrain.ps.rpc.control import CHANNEL_OPTIONS, RemoteControl
from tests.patience import until
from tests.ps.served import served

SLOW = 1.5  # seconds before a connection is answered
LONG = 60.0


@contextmanager
def slow_way(address: str) -> Iterator[str]:
    """Another address of a server, at which each connection is answered late."""
    host, _, port = address.rpartition(":")
    ended = threading.Event()

    def forward(source: socket.socket, to: socket.socket) -> None:
        with suppress(OSError):  # either side has gone
            while data := source.recv(65536):
                to.sendall(data)
            to.shutdown(socket.SHUT_WR)

    def connect(client: socket.socket) -> None:
        ended.wait(SLOW)
        with client, socket.create_connection((host, int(port))) as server:
            back = threading.Thread(target=forward, args=(server, client), daemon=True)
            back.start()
            forward(client, server)
            back.join()

    def accept(listening: socket.socket) -> None:
        with suppress(OSError):  # it is closed
            while True:
                threading.Thread(target=connect, args=(listening.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, args=(listening,), daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        ended.set()
        listening.shutdown(socket.SHUT_RDWR)


def test_a_connection_may_take_longer_than_the_pause_between_two() -> None:
    with served(1) as where:
        (_, target), *_ = where.channels
        with slow_way(target) as slow, grpc.insecure_channel(slow, options=CHANNEL_OPTIONS) as channel:
            control = RemoteControl(channel, slow, (), 5.0)

            def answers() -> bool:
                try:
                    control.status()
                except ShardUnavailable:
                    return False
                return True

            until(answers, LONG)
