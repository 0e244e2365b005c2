"""Ports that nobody listens on, and that nobody gets by chance before a test listens there.

They lie below those that the system gives to clients and to whoever binds port 0 (net.ipv4.ip_local_port_range, from
32768 on) and below those of `streamtrain.address.free_port`. Tests that run at the same time take theirs from parts of
their own.
"""

import itertools
import os
import socket

_FIRST, _EACH, _PARTS = 10_000, 1_000, 10

_part = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _PARTS
_turns = itertools.cycle(range(_EACH))
for _ in range(os.getpid() * 37 % _EACH):
    next(_turns)


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that follow one another; each is given once, until all were."""
    ports: list[int] = []
    while len(ports) < count:
        port = _FIRST + _EACH * _part + next(_turns)
        if not _is_free(port) or (ports and port != ports[-1] + 1):
            ports.clear()
        if _is_free(port):
            ports.append(port)
    return ports


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
