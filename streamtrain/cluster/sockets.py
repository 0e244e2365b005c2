"""Sockets that several processes take connections from."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from streamtrain.address import parse_address
from streamtrain.errors import ConfigError

_BACKLOG = 2048


@contextmanager
def listening(address: str) -> Iterator[list[socket.socket]]:
    """Sockets that all processes take connections from: one that dies leaves those that wait to the others.

    Raises:
        ConfigError: the address is wrong, in use, or not of this machine.
    """
    place = parse_address(address, "serve.listen", any_port=True)
    if place.path:
        raise ConfigError(f'predictions are served over TCP only: give "host:port", not {address!r}')
    sockets: list[socket.socket] = []
    with ExitStack() as stack:
        try:
            found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, _, _, _, where in found if place.port else found[:1]:
                one = socket.create_server(where[:2], family=family, backlog=_BACKLOG)
                sockets.append(stack.enter_context(one))
        except (OSError, UnicodeError) as exc:  # the latter of names that are none
            raise ConfigError(f"cannot serve at {address}: it is in use, or not of this machine") from exc
        yield sockets
