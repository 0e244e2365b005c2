"""Incarnation: tells apart the copies of a cluster that learn the same run, such as both sides of a failover.

A copy has an incarnation from the moment its first worker finds all of its shards without one, until all of its shards
have been restarted. Shards keep it in memory only: a copy that starts from the same checkpoint must not have the same.
The consumer group keeps the latest one, and only that one learns (see cluster/copies.py).
"""

import re
import secrets
import socket
from typing import NamedTuple, Self

_PATTERN = re.compile(r"(\d{1,18})-([0-9a-f]{8}-[\w.-]*)", re.ASCII)


class Incarnation(NamedTuple):
    """The incarnation of a cluster; the greater one is the later.

    As text it is `number-name`, of characters that Kafka allows in names.

    Attributes:
        number: one more than that of the latest incarnation in the consumer group.
        name: random, and the host on which it began.
    """

    number: int
    name: str

    @classmethod
    def after(cls, latest: "Incarnation | None") -> Self:
        """A new one, later than `latest`."""
        host = re.sub(r"[^\w.-]", "_", socket.gethostname(), flags=re.ASCII)
        return cls((latest.number if latest else 0) + 1, f"{secrets.token_hex(4)}-{host}")

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The incarnation that a text is; None: it is none."""
        found = _PATTERN.fullmatch(text)
        return cls(int(found[1]), found[2]) if found else None

    @property
    def host(self) -> str:
        """Where it began."""
        return self.name.partition("-")[2]

    def __str__(self) -> str:
        return f"{self.number}-{self.name}"
