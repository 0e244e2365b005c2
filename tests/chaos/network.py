"""Network: a namespace and an address for each process, and what goes wrong between them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.wire import HUB, Trouble, address_of, as_line

_CONTAINED = ["--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "--propagation", "private"]


def container() -> list[str] | None:
    """What runs a command in namespaces of its own, all of whose processes, mounts and devices go with it.

    Returns:
        The words before the command; None: it cannot be had here.
    """
    words = ["unshare", *_CONTAINED]
    if os.geteuid() or not Path("/dev/net/tun").exists() or not all(map(shutil.which, ("unshare", "ip"))):
        return None
    probe = "mount -t tmpfs tmpfs /run && ip link set lo up && ip tuntap add dev probe mode tun"
    tried = subprocess.run([*words, "sh", "-c", probe], capture_output=True, check=False)
    return None if tried.returncode else words


class Loopback:
    """All processes at 127.0.0.1: nothing can go wrong between them."""

    is_wire = False
    hub = "127.0.0.1"

    def address(self, name: str) -> str:
        """Of a process."""
        return self.hub

    def within(self, name: str) -> list[str]:
        """What runs a command where the process is to be."""
        return []

    @contextmanager
    def trouble(self, *troubles: Trouble) -> Iterator[None]:
        """Cannot be."""
        raise AssertionError("there is no wire")

    def close(self) -> None:
        """Nothing is to be ended."""


class Wired:
    """Namespaces on a wire. For a container: nothing of it is taken away again.

    Args:
        names: of the processes.
    """

    is_wire = True
    hub = HUB

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)  # where namespaces have their names
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        self._wire = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.wire", *names], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._wire.stdout is not None
        if self._wire.stdout.readline() != "ready\n":
            raise SystemExit("the wire cannot be made")

    def address(self, name: str) -> str:
        """Of a process."""
        return address_of(self._names.index(name))

    def within(self, name: str) -> list[str]:
        """What runs a command where the process is to be."""
        return ["ip", "netns", "exec", name]

    @contextmanager
    def trouble(self, *troubles: Trouble) -> Iterator[None]:
        """This goes wrong meanwhile."""
        self._tell(troubles)
        try:
            yield
        finally:
            self._tell([])

    def _tell(self, troubles: Sequence[Trouble]) -> None:
        assert self._wire.stdin is not None
        self._wire.stdin.write(as_line(troubles))
        self._wire.stdin.flush()

    def close(self) -> None:
        """Ends it."""
        self._wire.communicate()


Network = Loopback | Wired
