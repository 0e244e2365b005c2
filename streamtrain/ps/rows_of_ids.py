"""Rows of ids: which belong to an id that is to be forgotten, and taking them away from all shards.

A cross hashes the keys of its ids, so its rows do not show whose they are. But each of them is a combination with ids
that mostly have rows of their own: combining these with the id that is to be forgotten finds them.
"""

import ast
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from streamtrain._core import hash_bytes, shards_of
from streamtrain.errors import ShardRefused
from streamtrain.model.spec import Spec

Keys = NDArray[np.uint64]

MOST_IDS = 1000
"""At once."""

_NONE = np.empty(0, np.uint64)
_MOST_COMBINED = 3  # features of a cross
_MOST_COMBINATIONS = 1 << 28  # at once, of all ids and crosses: minutes
_TOGETHER = 1 << 16  # combinations, while a shard looks for which no push is applied: milliseconds
_P1, _P2, _P3, _P4, _P5 = (
    np.uint64(prime)
    for prime in (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
)


class HoldsRows(Protocol):
    """A shard, or the control of one."""

    def remove(self, table: str, keys: Keys, *, dry_run: bool = False) -> Keys:
        """See `Shard.remove`."""

    def keys(self, table: str, cursor: int) -> tuple[Keys, int | None]:
        """See `Shard.keys`."""


class Remaining(NamedTuple):
    """What may still hold something of forgotten ids.

    Attributes:
        where: the place.
        what: it holds.
        until: when that ends.
    """

    where: str
    what: str
    until: str


class _Crossed(NamedTuple):
    """A cross with an id that is to be forgotten.

    Attributes:
        table: of the cross.
        of: tables of its features, in order.
        at: which of these the id is of.
        key: of the id.
    """

    table: str
    of: tuple[str, ...]
    at: int
    key: int


class Sought(NamedTuple):
    """What is to be forgotten.

    Attributes:
        keys: of ids, uint64 [n], by table.
        crossed: crosses with them.
    """

    keys: dict[str, Keys]
    crossed: list[_Crossed]

    @classmethod
    def of(cls, spec: Spec, ids: Sequence[tuple[str, str]]) -> "Sought":
        """Finds out which rows that may be.

        Args:
            spec: of the model.
            ids: (feature, id) of each; the id is also that of other features that read the same field or share a table.

        Raises:
            ShardRefused: there are none or too many, or a feature is none that has ids.
        """
        if not 0 < len(ids) <= MOST_IDS:
            raise ShardRefused(f"{len(ids)} ids: 1 to {MOST_IDS} are forgotten at once", "limit")
        features = _categoricals_of(spec)
        keys: dict[str, list[int]] = {}
        for feature, one in ids:
            if feature not in features:
                raise ShardRefused(
                    f"the model has no categorical feature {feature!r}; it has {', '.join(features) or 'none'}",
                    "mismatch",
                )
            for table in _tables_with(features, feature):
                keys.setdefault(table, []).append(hash_bytes(one.encode()))
        found = {table: np.unique(np.array(of, np.uint64)) for table, of in keys.items()}
        crossed = [
            _Crossed(table, tuple(features[one].table for one in of), at, int(key))
            for table, of in _crosses_of(spec)
            for at, feature in enumerate(of)
            for key in found.get(features[feature].table, ())
        ]
        return cls(found, crossed)


def _meaning(of: Mapping[str, str], option: str) -> Any:
    return ast.literal_eval(of[option])


class _Categorical(NamedTuple):
    """A feature that has ids.

    Attributes:
        field: of the samples.
        table: of its rows.
    """

    field: str
    table: str


def _categoricals_of(spec: Spec) -> dict[str, _Categorical]:
    features: dict[str, dict[str, str]] = spec.about.get("features", {})
    return {
        name: _Categorical(_meaning(of, "field"), _meaning(of, "table"))
        for name, of in features.items()
        if of["type"] == "Categorical"
    }


def _tables_with(features: Mapping[str, _Categorical], name: str) -> list[str]:
    """The tables in which an id of a feature may have a row.

    Features that read one field have the same ids, and so do those of one table.
    """
    found = [features[name]]
    while True:
        fields, tables = {of.field for of in found}, {of.table for of in found}
        more = [of for of in features.values() if of.field in fields or of.table in tables]
        if len(more) == len(found):
            return list(dict.fromkeys(of.table for of in more))
        found = more


def _crosses_of(spec: Spec) -> list[tuple[str, tuple[str, ...]]]:
    """The table and the features of each cross."""
    features: dict[str, dict[str, str]] = spec.about.get("features", {})
    return [(_meaning(of, "table"), _meaning(of, "of")) for of in features.values() if of["type"] == "Cross"]


def take_away(shards: Sequence[HoldsRows], spec: Spec, sought: Sought) -> tuple[dict[str, Keys], list[Remaining]]:
    """Takes the rows away from all shards.

    Args:
        shards: of all shards, in order.
        spec: of the model.
        sought: what is to be forgotten.

    Returns:
        Keys of the rows that there were, uint64 [n], by table; and which may be left.

    Raises:
        ShardError: a shard does not answer; asking again goes on.
    """
    gone = {table: [_NONE] for table in [*sought.keys, *(crossed.table for crossed in sought.crossed)]}
    for table, keys in sought.keys.items():
        gone[table].append(remove(shards, table, keys))
    remains: dict[Remaining, None] = {}
    known: dict[str, Keys] = {}
    left = _MOST_COMBINATIONS
    for crossed in sought.crossed:
        others = [table for at, table in enumerate(crossed.of) if at != crossed.at]
        for table in {*others} - known.keys():  # with those that are to be forgotten, too: they may be gone already
            known[table] = np.union1d(_every(shards, table), sought.keys.get(table, _NONE))
        count = math.prod(len(known[table]) for table in others)
        is_searched = len(crossed.of) <= _MOST_COMBINED and count <= left
        if unsearched := _unsearched(spec, crossed, is_searched=is_searched):
            remains[unsearched] = None
        if not is_searched:
            continue
        left -= count
        for keys in _combined(crossed, [known[table] for table in others]):
            gone[crossed.table].append(remove(shards, crossed.table, keys))
    return {table: np.concatenate(parts) for table, parts in gone.items()}, [*remains]


def remove(shards: Sequence[HoldsRows], table: str, keys: Keys, *, dry_run: bool = False) -> Keys:
    """Has the shards that own them take rows away, unless it is a dry run; the keys of those there were, uint64 [n]."""
    owners = shards_of(keys, len(shards))
    return _on_each(shards, lambda at: shards[at].remove(table, keys[owners == at], dry_run=dry_run))


def _every(shards: Sequence[HoldsRows], table: str) -> Keys:
    """Keys of all rows of a table, at one moment or another."""

    def of_shard(at: int) -> Keys:
        parts: list[Keys] = []
        cursor: int | None = 0
        while cursor is not None:
            keys, cursor = shards[at].keys(table, cursor)
            parts.append(keys)
        return np.concatenate(parts)

    return _on_each(shards, of_shard)


def _on_each(shards: Sequence[HoldsRows], ask: Callable[[int], Keys]) -> Keys:
    return np.concatenate([ask(at) for at in range(len(shards))])


def _unsearched(spec: Spec, crossed: _Crossed, *, is_searched: bool) -> Remaining | None:
    """Why rows of a cross may be left."""
    own = next(table for table in spec.tables if table["name"] == crossed.table)
    until = f"they expire, {own['expire_after']:.0f} s after the id was last seen" if own["expire_after"] else "ever"
    where = f"shards, table {crossed.table}"
    if not is_searched:
        what = "rows of the cross: there are too many combinations to look for; give fewer ids at once"
        return Remaining(where, what, until)
    others = {table for at, table in enumerate(crossed.of) if at != crossed.at}
    losing = [
        f"{table['name']} ({', '.join(why)})"
        for table in spec.tables
        if table["name"] in others and (why := [*_losing(table)])
    ]
    if not losing:
        return None
    return Remaining(where, f"rows of the cross with an id that has no row any more in {' and '.join(losing)}", until)


def _losing(table: Mapping[str, Any]) -> Iterator[str]:
    """Settings by which an id has no row, though combinations with it may have one."""
    if table["min_count"] > 1:
        yield "min_count"
    for name in ("expire_after", "capacity"):
        if table[name]:
            yield name


def _combined(crossed: _Crossed, others: Sequence[Keys]) -> Iterator[Keys]:
    """Keys of combinations of an id with those that are known of other features, in parts."""
    *slow, fast = others
    for rest in product(*(keys.tolist() for keys in slow)):
        for start in range(0, len(fast), _TOGETHER):
            last = fast[start : start + _TOGETHER]
            lists: list[Keys | np.uint64] = [*(np.uint64(one) for one in rest), last]
            lists.insert(crossed.at, np.uint64(crossed.key))
            yield cross_keys(lists)


def cross_keys(lists: Sequence[Keys | np.uint64]) -> Keys:
    """Keys of a cross, uint64 [n]: XXH64 over the keys of 2 or 3 ids each; see `hash_cross` of _native/hash.h.

    Args:
        lists: by feature, the key of each combination uint64 [n], or one for all.
    """
    with np.errstate(over="ignore"):
        hashed: Any = _P5 + np.uint64(8 * len(lists))
        for one in lists:
            hashed = _rotated(hashed ^ (_rotated(one * _P2, 31) * _P1), 27) * _P1 + _P4
        hashed = (hashed ^ (hashed >> np.uint64(33))) * _P2
        hashed = (hashed ^ (hashed >> np.uint64(29))) * _P3
        found: Keys = hashed ^ (hashed >> np.uint64(32))
        return found


def _rotated(values: Any, bits: int) -> Any:
    return (values << np.uint64(bits)) | (values >> np.uint64(64 - bits))
