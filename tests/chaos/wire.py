"""A wire between network namespaces that can be cut, and made slow and lossy, between any two of them.

    python -m tests.chaos.wire ps0 ps1 …

Makes a namespace of each name, with an address of 10.77.0.0/24, and hands packets on between them and the namespace
in which it runs, the hub. It does by itself what `tc netem` does, so it runs on kernels without that. Prints a line
when it is ready; then each line of its input is a list of what is wrong with the wire, `Trouble` as JSON, instead of
the line before. Ends with its input. Needs root and /dev/net/tun; meant for a network namespace of its own.
"""

import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count

NETWORK = "10.77.0"
HUB = f"{NETWORK}.1"
_MTU = 9000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_BURST = 64  # packets of one device before it is the others' turn


@dataclass(frozen=True)
class Trouble:
    """What is wrong between two, in both directions.

    Attributes:
        one: name of a namespace.
        other: another one; None: all others.
        delay: seconds that a packet takes longer.
        loss: share of the packets that are lost, 0 to 1; 1 is a cut.
    """

    one: str
    other: str | None = None
    delay: float = 0.0
    loss: float = 1.0


def address_of(index: int) -> str:
    """Address of the namespace of the index-th name."""
    return f"{NETWORK}.{index + 2}"


class Wire:
    """The devices, and the packets on their way.

    Args:
        names: of the namespaces to be made.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._hosts = {name: index + 2 for index, name in enumerate(names)}  # last byte of the address
        self._devices = {1: _device("hub", None, HUB)}
        for index, name in enumerate(names):
            _run("ip", "netns", "add", name)
            self._devices[index + 2] = _device(f"to{index}", name, address_of(index))
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._numbers = count()
        self._troubles: list[tuple[int, int | None, Trouble]] = []
        self._random = random.Random(0)

    def run(self) -> None:
        """Hands packets on until its input ends."""
        poll = select.poll()
        of_fd = {fd: host for host, fd in self._devices.items()}
        for fd in [*of_fd, sys.stdin.fileno()]:
            poll.register(fd, select.POLLIN)
        while True:
            wait = 1000 * (self._under_way[0][0] - time.monotonic()) if self._under_way else None
            for fd, _ in poll.poll(None if wait is None else max(0.0, wait)):
                if fd in of_fd:
                    self._read(fd)
                elif not self._hear(sys.stdin.readline()):
                    return
            while self._under_way and self._under_way[0][0] <= time.monotonic():
                _, _, to, packet = heapq.heappop(self._under_way)
                self._deliver(to, packet)

    def _hear(self, line: str) -> bool:
        if not line:
            return False
        found = [Trouble(**one) for one in json.loads(line)]
        self._troubles = [(self._hosts[t.one], None if t.other is None else self._hosts[t.other], t) for t in found]
        return True

    def _read(self, fd: int) -> None:
        for _ in range(_BURST):
            try:
                packet = os.read(fd, 65536)
            except BlockingIOError:
                return
            if packet[0] >> 4 == 4:
                self._take(packet[15], packet[19], packet)

    def _take(self, source: int, to: int, packet: bytes) -> None:
        delay = 0.0
        for one, other, trouble in self._troubles:
            if (source == one and other in (None, to)) or (to == one and other in (None, source)):
                if self._random.random() < trouble.loss:
                    return
                delay += trouble.delay
        if delay:
            heapq.heappush(self._under_way, (time.monotonic() + delay, next(self._numbers), to, packet))
        else:
            self._deliver(to, packet)

    def _deliver(self, to: int, packet: bytes) -> None:
        if to in self._devices:
            with suppress(OSError):  # no room: a packet may be lost, TCP sends it again
                os.write(self._devices[to], packet)


def _device(name: str, namespace: str | None, address: str) -> int:
    """A TUN device that is up in a namespace; its file descriptor."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    within = ["ip"]
    if namespace is not None:
        _run("ip", "link", "set", name, "netns", namespace)
        within = ["ip", "-n", namespace]
        _run(*within, "link", "set", "lo", "up")
    _run(*within, "addr", "add", f"{address}/24", "dev", name)
    _run(*within, "link", "set", name, "mtu", str(_MTU), "up")
    return fd


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def main() -> None:
    """Runs it."""
    wire = Wire(sys.argv[1:])
    # A wire does not wait for a turn on a busy machine.
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    print("ready", flush=True)
    wire.run()


def as_line(troubles: Sequence[Trouble]) -> str:
    """What it is told."""
    return json.dumps([asdict(one) for one in troubles]) + "\n"


if __name__ == "__main__":
    main()
