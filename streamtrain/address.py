"""Addresses, host names and ports; and URLs without their secrets."""

import errno
import ipaddress
import random
import re
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import unquote

from streamtrain.errors import ConfigError

_random = random.SystemRandom()  # independent of random.seed()
_UNIX, _NAMED = "unix:", "registry:"
_SHORTEST_SECRET = 4
_NAME = re.compile(r"(?!\d+\Z)[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
_LONGEST_PATH = 107  # bytes of sockaddr_un, without the terminating zero

MASK = "***"
"""Replaces secrets in output."""

_URL = re.compile(r"""(?<=://)[^\s"'<>\\]+""")
_PARAMETER = re.compile(r"([?&;#][^=?&;#]*=)[^&;#]*|(?<=[?&;])[^=?&;#]+")


def redacted(text: str) -> str:
    """Masks the secrets of all URLs in a text: credentials before an @, and values after a "?" or "#".

    >>> redacted("cannot write s3://key:secret@bucket/x?token=abc&expires=9")
    'cannot write s3://***@bucket/x?token=***&expires=***'
    """
    return _URL.sub(lambda match: _redact(match[0]), text) if "://" in text else text


def _redact(rest: str) -> str:
    _, at, location = rest.rpartition("@")
    return (MASK + at if at else "") + _PARAMETER.sub(lambda match: (match[1] or "") + MASK, location)


def secrets_of(url: str) -> set[str]:
    """The secrets of a URL, quoted and unquoted, to mask in messages of libraries; very short ones are skipped."""
    credentials, _, location = url.partition("://")[2].rpartition("@")
    values = [match[0].rpartition("=")[2] for match in _PARAMETER.finditer(location)]
    secrets = {credentials, *credentials.split(":"), *values}
    return {form for secret in secrets for form in (secret, unquote(secret)) if len(form) >= _SHORTEST_SECRET}


@dataclass(frozen=True)
class Address:
    """A TCP port, a Unix socket, or the name of a process that has registered where it is.

    Attributes:
        host: name, IPv4 address or IPv6 address without brackets, in lower case; "" for a socket or a name.
        port: 0 to 65535; 0 for a socket or a name, and for a free port chosen by the system.
        path: path of the socket; "" otherwise.
        name: by which the process is registered; "" otherwise.
    """

    host: str = ""
    port: int = 0
    path: str = ""
    name: str = ""

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine: a Unix socket, 127.0.0.0/8, ::1 or localhost."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        if self.path or self.name:
            return f"{_UNIX}{self.path}" if self.path else f"{_NAMED}{self.name}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, name: str, *, any_port: bool = False, names: bool = False) -> Address:
    """Parses "host:port", "[ipv6]:port" or "unix:path".

    Args:
        text: the address.
        name: name of the setting, for errors.
        any_port: whether port 0, a free port chosen by the system, is allowed.
        names: whether "registry:NAME" is allowed.

    Raises:
        ConfigError: text is not an address.

    >>> parse_address("[::1]:7000", "listen").is_local
    True
    """
    address = _parse(text) if isinstance(text, str) else None
    if address is not None and address.name and names:
        return address
    if address is None or (address.port == 0 and not address.path and not any_port):
        lowest = 0 if any_port else 1
        raise ConfigError(
            f'{name} must be "host:port", "[ipv6]:port" (port {lowest} to 65535) or "unix:path"'
            f"{_OR_NAME if names else ''}, not {text!r}"
        )
    return address


def parse_listener(text: str, name: str, what: str) -> Address:
    """An address to listen at, over TCP; port 0 picks a free one.

    Args:
        text: "host:port" or "[ipv6]:port".
        name: of the setting, for the message.
        what: is served there, in the plural.

    Raises:
        ConfigError: it is not a TCP address.
    """
    address = parse_address(text, name, any_port=True)
    if address.path:
        raise ConfigError(f'{what} are served over TCP only: use "host:port", not {text!r}')
    return address


@contextmanager
def binding(address: object, name: str) -> Iterator[None]:
    """A socket is bound in here.

    Args:
        address: where.
        name: of its setting.

    Raises:
        ConfigError: instead of what sockets and gRPC raise where it cannot be bound.
    """
    try:
        yield
    except (OSError, UnicodeError, RuntimeError) as exc:  # UnicodeError: the host is no name
        raise ConfigError(f"cannot bind {address} ({name}): in use, or not an address of this machine") from exc


_OR_NAME = ', or "registry:name"'


def _parse(text: str) -> Address | None:
    if text.startswith(_NAMED):
        name = text.removeprefix(_NAMED)
        return Address(name=name) if re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", name) else None
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
    if re.fullmatch(r"[0-9.]+", host):  # digits and dots only: an IPv4 address or nothing
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            return False
        return True
    return _NAME.fullmatch(host) is not None


class Hosts:
    """Allowed host names of an HTTP endpoint, so that pages of other sites cannot reach it through a browser.

    A page can resolve its own name to a loopback address (DNS rebinding) or send requests blindly, but it cannot send
    another Host than its name, nor omit its Origin. IP addresses and localhost are always allowed.

    Args:
        listen: address that the endpoint binds; None: unknown.
        names: allowed names: "ads.example.org", "*.example.org", or "*" for any. If empty, any name is allowed unless
            the endpoint binds a loopback address.

    Raises:
        ConfigError: a name is invalid.

    >>> Hosts("127.0.0.1:8501").allows("evil.example")
    False
    """

    def __init__(self, listen: str | None = None, names: Iterable[str] = ()) -> None:
        names = tuple(names)
        for name in names:
            if not isinstance(name, str) or (name != "*" and not _NAME.fullmatch(name.removeprefix("*."))):
                raise ConfigError(
                    f'hosts must be a name such as "ads.example.org", "*.example.org" or "*", not {name!r}'
                )
        self._names = tuple(name.lower() for name in names)
        address = parse_address(listen, "listen", any_port=True) if listen else None
        self._own = address.host if address else ""
        self._any = "*" in self._names or not (self._names or (address and address.is_local))

    def allows(self, host: str) -> bool:
        """Whether a Host header is allowed, with or without a port."""
        if self._any:
            return True
        name = _strip_port(host)
        return name in (self._own, "localhost") or name.endswith(".localhost") or _is_ip(name) or self._has(name)

    def allows_origin(self, origin: str, host: str) -> bool:
        """Whether an Origin header is allowed with a Host header: the endpoint's own, or one of an allowed name."""
        scheme, _, site = origin.lower().partition("://")
        port = {"http": ":80", "https": ":443"}.get(scheme)
        if port is None or not site:
            return False
        return site.removesuffix(port) == host.lower().removesuffix(port) or self._has(_strip_port(site))

    def _has(self, name: str) -> bool:
        return any(
            name == allowed or (allowed.startswith("*.") and name.endswith(allowed[1:])) for allowed in self._names
        )


def _strip_port(text: str) -> str:
    """A host without port and brackets, in lower case."""
    host, _, port = text.rpartition(":")
    name = host if host and port.isdigit() and (host.endswith("]") or ":" not in host) else text
    return name.removeprefix("[").removesuffix("]").removesuffix(".").lower()


def _is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


_FIRST_PORT, _LAST_PORT = 20_000, 32_000
_given = set[int]()


def free_port(wanted: int | None = None) -> int:
    """A free port of 127.0.0.1: the wanted one if it is free, else any that was not given to this process before.

    A server may need several ports before it listens on the first. They are below the ports that the system gives to
    clients, where a client could connect to itself.
    """
    port = wanted
    while port is None or not _is_free(port):
        if len(_given) > _LAST_PORT - _FIRST_PORT:
            _given.clear()
        port = _random.randint(_FIRST_PORT, _LAST_PORT)
        if port in _given:
            port = None
        else:
            _given.add(port)
    _given.add(port)
    return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


_reserved = set[int]()


def reserve_port(wanted: int | None = None) -> int:
    """A free port of 127.0.0.1 that no other process gets from here while this one lives.

    Between the choice of a port and its use, seconds pass in which another `up` could choose the same one. What
    reserves it is an abstract Unix socket, which ends with the process; where there are none, nothing is reserved.

    Args:
        wanted: the port to take, if it is free.
    """
    while True:
        port = free_port(wanted)
        if port in _reserved:
            if port == wanted:
                return port
            continue
        wanted = None
        holder = socket.socket(socket.AF_UNIX)
        try:
            holder.bind(f"\0streamtrain-port-{port}")
        except OSError as exc:
            holder.close()
            if exc.errno == errno.EADDRINUSE:
                continue
            return port
        holder.detach()  # it is open for as long as the process lives
        _reserved.add(port)
        return port


def check_free(host: str, port: int, name: str) -> None:
    """Checks that a port can be bound.

    Raises:
        ConfigError: it cannot; the message contains the port and the name of its setting.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            raise ConfigError(f"cannot bind {host}:{port} ({name}), choose another port: {exc}") from exc
