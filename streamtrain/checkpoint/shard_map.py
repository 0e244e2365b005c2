"""Shard map: which shard has which keys, and since when; kept with the checkpoints.

Beside the map in force stands that of the settings with which it was made: while a coordinator still has these, it goes
on by what `streamtrain scale` has made of them; once it has others, by these.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from streamtrain.errors import CheckpointError
from streamtrain.ps.nodes.topology import ShardMap
from streamtrain.store.files import Directory

_FILE = "slots.json"


class _Kept(NamedTuple):
    """What is kept.

    Attributes:
        in_force: the map, in which `scaled` is not said.
        settings: that of the settings, without an epoch; None: an earlier release has not written it.
    """

    in_force: ShardMap
    settings: ShardMap | None

    def at(self, given: ShardMap) -> ShardMap:
        """The map in force for a coordinator with these settings."""
        if self.in_force.has(given) or (self.settings is not None and self.settings.has(given)):
            return self.in_force
        return given._replace(epoch=self.in_force.epoch + 1)


def begin_shard_map(url: str | None, shards: Sequence[str], backups: Sequence[str] = ()) -> ShardMap:
    """The map by which a coordinator begins; it is kept with checkpoints.

    Args:
        url: of checkpoints; None: nothing is kept, and the map is that of the settings.
        shards: addresses by slot, as the settings have them.
        backups: of their backups, likewise; empty: they have none.

    Raises:
        CheckpointError: it cannot be read, is damaged, or cannot be written.
    """
    given = ShardMap(1, tuple(shards), tuple(backups))
    if url is None:
        return given
    place = Directory(url)
    kept = _read(place)
    now = _Kept(kept.at(given) if kept else given, given)
    if kept != now:
        _write(place, now)
    return now.in_force._replace(scaled=not now.in_force.has(given))


def next_shard_map(url: str, shards: Sequence[str], backups: Sequence[str] = ()) -> ShardMap:
    """The map with these shards instead of those of before, which is kept; that of before, if they are the same.

    Args:
        url: of checkpoints.
        shards: addresses, by slot.
        backups: of their backups; empty: they have none.

    Raises:
        CheckpointError: as `begin_shard_map`.
    """
    place = Directory(url)
    kept, found = _read(place), ShardMap(1, tuple(shards), tuple(backups))
    settings = kept.settings if kept else None
    if kept is not None:
        found = kept.in_force if kept.in_force.has(found) else found._replace(epoch=kept.in_force.epoch + 1)
    if kept is None or kept.in_force != found:
        _write(place, _Kept(found, settings))
    return found._replace(scaled=settings is None or not found.has(settings))


def load_shard_map(url: str, shards: Sequence[str] = (), backups: Sequence[str] = ()) -> ShardMap | None:
    """The map that is kept with checkpoints, or with which the next coordinator begins; None: there is none.

    Args:
        url: of checkpoints.
        shards: as the settings have them; empty: they say nothing.
        backups: likewise.

    Raises:
        CheckpointError: it cannot be read, or is damaged.
    """
    kept = _read(Directory(url))
    if kept is None:
        return None
    return kept.at(ShardMap(0, tuple(shards), tuple(backups))) if shards else kept.in_force


def _write(place: Directory, kept: _Kept) -> None:
    epoch, shards, backups, _ = kept.in_force
    given: dict[str, Any] = {"epoch": epoch, "shards": shards, "backups": backups}
    if kept.settings is not None:
        given["settings"] = {"shards": kept.settings.shards, "backups": kept.settings.backups}
    place.put(_FILE, json.dumps(given).encode())


def _read(place: Directory) -> _Kept | None:
    if not place.exists(_FILE):
        return None
    try:
        given = json.loads(place.read(_FILE))
        if type(epoch := given["epoch"]) is not int:
            raise TypeError("epoch is a number")
        settings = given.get("settings")
        return _Kept(_parse(given, epoch), None if settings is None else _parse({**settings}, 1))
    except (KeyError, TypeError, ValueError) as exc:
        raise CheckpointError(f"{_FILE} of {place.url} is damaged, delete it: {exc}") from exc


def _parse(given: Mapping[str, Any], epoch: int) -> ShardMap:
    shards, backups = given["shards"], given.get("backups", [])
    if not isinstance(shards, list) or not isinstance(backups, list):
        raise TypeError("shards and backups are lists")
    if len(backups) not in {0, len(shards)}:
        raise ValueError(f"{len(shards)} shards have {len(backups)} backups")
    return ShardMap(epoch, tuple(map(str, shards)), tuple(map(str, backups)))
