"""Addresses of processes as people write them."""

import ipaddress
import random
import re
import socket
from contextlib import suppress
from dataclasses import dataclass

from streamtrain.errors import ConfigError

_UNIX = "unix:"
_NAME = re.compile(r"(?!\d+\Z)[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
_LONGEST_PATH = 107  # what the kernel's sockaddr_un holds beside the terminating zero


@dataclass(frozen=True)
class Address:
    """A TCP port or a Unix socket.

    Attributes:
        host: name, IPv4 address or IPv6 address without brackets, in lower case; "" for a socket.
        port: 0 to 65535; 0 for a socket, and for a port that the system is to choose.
        path: of the socket; "" for TCP.
    """

    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def is_local(self) -> bool:
        """Whether nothing said to it leaves the machine: a socket, 127.0.0.0/8, ::1 or localhost."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        if self.path:
            return f"{_UNIX}{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, name: str, *, any_port: bool = False) -> Address:
    """Reads "host:port", "[ipv6]:port" or "unix:path".

    Args:
        text: the address.
        name: what is being set, for the error.
        any_port: whether port 0, a free port of the system's choice, is an address.

    Raises:
        ConfigError: text is none of these.

    >>> parse_address("[::1]:7000", "listen").is_local
    True
    """
    address = _parse(text) if isinstance(text, str) else None
    if address is None or (address.port == 0 and not address.path and not any_port):
        lowest = 0 if any_port else 1
        raise ConfigError(
            f'{name} must be "host:port", "[ipv6]:port" (port {lowest} to 65535) or "unix:path", not {text!r}'
        )
    return address


def _parse(text: str) -> Address | None:
    if text.startswith(_UNIX):
        path = text.removeprefix(_UNIX)
        path = path.removeprefix("//") if path.startswith("///") else path
        fits = 0 < len(path.encode(errors="replace")) <= _LONGEST_PATH
        return Address(path=path) if fits and path.isprintable() else None
    host, _, port = text.rpartition(":")
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        return None
    if host.startswith("[") and host.endswith("]"):
        return Address(host[1:-1].lower(), int(port)) if _is_ipv6(host[1:-1]) else None
    return Address(host.lower(), int(port)) if _is_name_or_ipv4(host) else None


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return host.isprintable()


def _is_name_or_ipv4(host: str) -> bool:
    if re.fullmatch(r"[0-9.]+", host):  # looks like numbers, so it must be the four of an address
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            return False
        return True
    return _NAME.fullmatch(host) is not None


def free_port(wanted: int | None = None) -> int:
    """A port of 127.0.0.1 that nobody has at the moment: the wanted one, or any other.

    Others are below those that the system gives to clients: one that knocks at a closed port of those may reach itself.
    """
    while True:
        port, wanted = wanted or random.randint(20000, 32000), None
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port


def check_free(host: str, port: int, whose: str) -> None:
    """Whether a port can be listened at.

    Raises:
        ConfigError: it cannot; names the port and `whose` it was to be.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            raise ConfigError(f"port {port} of {host} cannot be had for {whose}, choose another: {exc}") from exc
