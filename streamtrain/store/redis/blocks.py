"""Blocks in Redis: figures of a model's predictions by block of offsets, the latest ones of each partition."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from streamtrain.errors import PublicationCorrupt
from streamtrain.store.json import convert, parse_json
from streamtrain.store.redis.layout import RedisKeys
from streamtrain.store.redis.server import RedisServer, parse_fields

_ABOUT = b"about"
_BATCH = 256  # blocks written by one command
# KEYS: blocks. ARGV: what they are of, then fields and values. Blocks of anything else are of no use any more.
_PUT = """
if redis.call('HGET', KEYS[1], 'about') ~= ARGV[1] then
  redis.call('DEL', KEYS[1])
  redis.call('HSET', KEYS[1], 'about', ARGV[1])
end
redis.call('HSET', KEYS[1], unpack(ARGV, 2))
"""


class BlockLog(NamedTuple):
    """What blocks are of. Blocks of two models can be compared if all but `keep` is the same.

    Attributes:
        topic: name of the topic.
        id: id of the topic; "": not known.
        size: offsets of a block.
        keep: blocks that are kept of each partition.
    """

    topic: str
    id: str
    size: int
    keep: int


class RedisBlocks:
    """The blocks of a model. Thread-safe.

    They are one hash, in which a block takes the place of the one `keep` blocks before it in its partition; so it never
    has more than `keep` blocks of a partition, and a block that is written again changes nothing.

    Raises:
        ConfigError: the name is invalid.
    """

    def __init__(self, server: RedisServer, model: str) -> None:
        self._server, self._key = server, RedisKeys(model).blocks
        self.name = f"model {model} at {server.name}"

    def put(self, log: BlockLog, blocks: Sequence[tuple[int, int, bytes]]) -> None:
        """Writes blocks. Those of another log are deleted.

        Args:
            log: what they are of.
            blocks: partition, number and content of each.

        Raises:
            OriginUnavailable, PublicationError: as `RedisServer.call`; some may have been written.
        """
        about = json.dumps(log)
        for start in range(0, len(blocks), _BATCH):
            fields: list[Any] = []
            for partition, number, content in blocks[start : start + _BATCH]:
                fields += [f"{partition}:{number % log.keep}", content]
            self._server.call("EVAL", _PUT, 1, self._key, about, *fields)

    def read(self) -> tuple[BlockLog, Mapping[int, list[bytes]]] | None:
        """What there is: contents of blocks by partition, in any order; None: nothing.

        Raises:
            OriginUnavailable, PublicationError: as `RedisServer.call`.
            PublicationCorrupt: it is damaged.
        """
        found = parse_fields(self._server.call("HGETALL", self._key))
        if not found:
            return None
        blocks: dict[int, list[bytes]] = {}
        try:
            log = _parse_log(found[_ABOUT])
            for field, content in found.items():
                if field != _ABOUT:
                    blocks.setdefault(int(field.partition(b":")[0]), []).append(content)
        except (KeyError, ValueError) as exc:
            raise PublicationCorrupt(f"the blocks of {self.name} are damaged: {exc}") from exc
        return log, blocks

    def log(self) -> BlockLog | None:
        """What its blocks are of; None: there are none; errors as `read`."""
        found = self._server.call("HGET", self._key, _ABOUT)
        try:
            return None if found is None else _parse_log(found)
        except ValueError as exc:
            raise PublicationCorrupt(f"the blocks of {self.name} are damaged: {exc}") from exc


def _parse_log(about: bytes) -> BlockLog:
    return convert(BlockLog, parse_json(about))


def models_with_blocks(server: RedisServer) -> list[str]:
    """Names of the models that have blocks; errors as `RedisServer.call`."""
    before, after = RedisKeys("*").blocks.split("*")
    return sorted(key.decode()[len(before) : -len(after)] for key in server.scan(before + "*" + after))
