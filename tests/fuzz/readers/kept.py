"""Kept: a model as it is in Redis, as values by name, and the answers of a server that has just these.

A stand-in, for a real server takes longer to be given values than all readers take to read them. It answers the
commands that readers send as schemas/README.md describes the keys; tests/store holds readers against real servers.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtrain.errors import PublicationError
from streamtrain.store.redis.commands import CommandBatch
from streamtrain.store.redis.layout import RedisKeys
from streamtrain.store.redis.scripts import DECIDED, GARBAGE, OWN, STATE
from streamtrain.store.redis.server import PipelinedConnection, RedisServer

_BUCKET = re.compile(rb"streamtrain:rows:\{[^/]*/([0-9a-f]{6})\}:(.*):[^:]*", re.DOTALL)
_MOST_SLOTS = 1 << 12  # of many more buckets, which a layout may have, all are as empty as these
Entry = tuple[bytes, list[bytes]]


def packed(rows: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A bucket's fields and values as one value: each after its length in a byte."""
    return b"".join(bytes([len(part)]) + part for row in rows for part in row)


def unpacked(data: bytes) -> list[bytes]:
    """Fields and values, flat; an even number of them."""
    found, at = [], 0
    while at < len(data):
        found.append(data[at + 1 : at + 1 + data[at]])
        at += 1 + data[at]
    return found[: len(found) // 2 * 2]


class KeptServer(RedisServer):
    """Answers of a server.

    Args:
        model: whose keys are there.
        values: by "key/field" of hashes and scripts, "log/entry/field", "history/entry/field", "steps/score" and
            "rows/table/bucket".

    Attributes:
        values: as given; others may take their place.
    """

    def __init__(self, model: str, values: Mapping[str, bytes]) -> None:
        super().__init__("redis://127.0.0.1:1")
        keys = RedisKeys(model)
        self.values = values
        self._prefix = keys.head.removesuffix("head")

    def call(self, *command: Any) -> Any:
        """See RedisServer."""
        answer: Callable[..., Any] = getattr(self, f"_{command[0].lower()}")
        return answer(*command[1:])

    def wait(self, key: str, after: str, count: int, seconds: float) -> list[Entry]:
        """See RedisServer."""
        return self._xrange(key, f"({after}", "+", "COUNT", count)

    def connections(self, slots: NDArray[np.int64]) -> Iterator[tuple[PipelinedConnection, NDArray[np.int64]]]:
        """See RedisServer."""
        yield KeptLane(self, self.values), np.arange(min(len(slots), _MOST_SLOTS))

    def _of(self, key: str) -> dict[str, bytes]:
        """Values by field of what a key has."""
        name = key.removeprefix(self._prefix).partition(":")[0] + "/"
        return {one.removeprefix(name): value for one, value in self.values.items() if one.startswith(name)}

    def _eval(self, script: str, keys: int, *arguments: Any) -> Any:
        if script == STATE:
            return self._hgetall(self._prefix + "head")
        if script == GARBAGE:
            return self._hgetall(self._prefix + "garbage")
        if script == OWN:
            return self.values.get("applied/0")
        if script == DECIDED:
            decided, traffic = self.values.get("decided/0", b""), self.values.get("traffic/0", b"")
            return [decided, traffic, self._hgetall(self._prefix + "labels")]
        return 1

    def _hgetall(self, key: str) -> list[bytes]:
        return [part for field, value in self._of(key).items() for part in (field.encode(), value)]

    def _hget(self, key: str, field: Any) -> bytes | None:
        return self._of(key).get(str(field))

    def _hmget(self, key: str, *fields: Any) -> list[bytes | None]:
        return [self._hget(key, field) for field in fields]

    def _hvals(self, key: str) -> list[bytes]:
        return [*self._of(key).values()]

    def _hexists(self, key: str, field: Any) -> int:
        return int(str(field) in self._of(key))

    def _del(self, *_: Any) -> int:
        return 1

    _hdel = _del

    def _zcard(self, key: str) -> int:
        return len(self._of(key))

    def _zrange(self, key: str, first: int, last: int) -> list[bytes]:
        return self._hvals(key)[first : last + 1]

    def _zrangebyscore(self, key: str, low: Any, high: Any) -> list[bytes]:
        found = self._hget(key, low)
        return [] if found is None else [found]

    def _xrange(self, key: str, start: str, end: str, *count: Any) -> list[Entry]:
        low, high = _order(start.removeprefix("(")), (1 << 64, 0) if end == "+" else _order(end)
        entries: dict[str, list[bytes]] = {}
        for name, value in self._of(key).items():
            entry, _, field = name.partition("/")
            entries.setdefault(entry, []).extend([field.encode(), value])
        found = [
            (entry.encode(), fields)
            for entry, fields in entries.items()
            if (*low, start.startswith("(")) <= (*_order(entry), 0) and _order(entry) <= high
        ]
        return found[: count[1]] if count else found

    def _xrevrange(self, key: str, *_: Any) -> list[Entry]:
        return self._xrange(key, "0-0", "+")[::-1]


def _order(entry: str) -> tuple[int, int]:
    """As a server orders entries; it refuses what is no id."""
    if not re.fullmatch(r"\d{1,19}(-\d{1,19})?", entry, re.ASCII):
        raise PublicationError(f"ERR Invalid stream ID specified as stream command argument: {entry!r}")
    time, _, number = entry.partition("-")
    return int(time), int(number or 0)


class KeptLane(PipelinedConnection):
    """Answers to commands on buckets."""

    def __init__(self, server: RedisServer, values: Mapping[str, bytes]) -> None:
        super().__init__(server, None)
        self._values = values

    def run(self, batches: Iterable[CommandBatch]) -> Iterator[tuple[CommandBatch, list[Any]]]:
        """See Lane."""
        for batch in batches:
            yield batch, [self._answer(*command) for command in commands(batch.data.tobytes())]

    def _answer(self, verb: bytes, key: bytes, *fields: bytes) -> Any:
        match = _BUCKET.fullmatch(key)
        assert match, key
        flat = unpacked(self._values.get(f"rows/{match[2].decode()}/{int(match[1], 16)}", b""))
        there = dict(zip(flat[::2], flat[1::2], strict=True))
        if verb == b"HGETALL":
            return [part for row in there.items() for part in row]
        return [there.get(field) for field in fields] if verb == b"HMGET" else len(fields)


def commands(data: bytes) -> Iterator[list[bytes]]:
    """Commands of the protocol, as of what a client sends."""
    at = 0

    def number(mark: bytes) -> int:
        nonlocal at
        end = data.index(b"\r\n", at)
        assert data[at : at + 1] == mark
        value, at = int(data[at + 1 : end]), end + 2
        return value

    while at < len(data):
        command = []
        for _ in range(number(b"*")):
            size = number(b"$")
            command.append(data[at : at + size])
            assert data[at + size : at + size + 2] == b"\r\n"
            at += size + 2
        yield command
