"""Shard map: which shard has which keys, and since when; kept with the checkpoints."""

import json
from collections.abc import Sequence

from streamtrain.errors import CheckpointError
from streamtrain.ps.nodes.topology import ShardMap
from streamtrain.store.files import Directory

_FILE = "slots.json"


def next_shard_map(url: str | None, shards: Sequence[str], backups: Sequence[str] = ()) -> ShardMap:
    """The map with these shards: that of before, or the next one if they are others. It is kept with checkpoints.

    Args:
        url: of checkpoints; None: nothing is kept, and every map is the first.
        shards: addresses, by slot.
        backups: of their backups; empty: they have none.

    Raises:
        CheckpointError: it cannot be read, is damaged, or cannot be written.
    """
    wanted = ShardMap(1, tuple(shards), tuple(backups))
    if url is None:
        return wanted
    place, before = Directory(url), load_shard_map(url)
    if before is not None and before.has(wanted):
        return before
    found = wanted._replace(epoch=before.epoch + 1 if before else 1)
    place.put(_FILE, json.dumps(found._asdict()).encode())
    return found


def load_shard_map(url: str) -> ShardMap | None:
    """The map that is kept with checkpoints; None: there is none.

    Raises:
        CheckpointError: it cannot be read, or is damaged.
    """
    place = Directory(url)
    return _read(place) if place.exists(_FILE) else None


def _read(place: Directory) -> ShardMap:
    try:
        given = json.loads(place.read(_FILE))
        epoch, shards, backups = given["epoch"], given["shards"], given.get("backups", [])
        if type(epoch) is not int or not isinstance(shards, list) or not isinstance(backups, list):
            raise TypeError("epoch is a number, and shards and backups are lists")
        if len(backups) not in {0, len(shards)}:
            raise ValueError(f"{len(shards)} shards have {len(backups)} backups")
        return ShardMap(epoch, tuple(map(str, shards)), tuple(map(str, backups)))
    except (KeyError, TypeError, ValueError) as exc:
        raise CheckpointError(f"{_FILE} of {place.url} is damaged, delete it: {exc}") from exc
