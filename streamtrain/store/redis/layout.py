"""Layouts of dictionaries: which key of Redis a row is under. schemas/README.md describes all keys.

A dictionary is a set of rows of all tables, under a number. The head names one, and so does every version. A table is
divided into buckets, each one hash. What makes the hash tag is the model and the bucket, so a bucket is on the same
node of a cluster in all dictionaries, and buckets are spread over the nodes.
"""

import binascii
import json
import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamtrain.errors import ConfigError, PublicationError
from streamtrain.store.json import convert, parse_json
from streamtrain.store.redis.codec import Codec
from streamtrain.store.redis.commands import HEX_DIGITS, KeyNames

_FIRST_BIT = 10  # of a key: those below choose the segment of a native table, those far above its slot and the shard
_MOST_BUCKETS = 1 << 22
_MOST_ELEMENTS = 1 << 12  # of a row: as of the native core
_ROWS = 64  # of a bucket: by measurement, see schemas/README.md
_SLOTS = 1 << 14  # of a Redis Cluster


class FullPublicationNeeded(PublicationError):
    """There is no head, or it is not one that these shards can go on from: write a full publication."""


class OutOfTurn(PublicationError):
    """Another publication has been committed, or another process writes: read the head and write again.

    Attributes:
        number: publication number of the head.
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


class TableSize(NamedTuple):
    """Size of a table, which determines its number of buckets.

    Attributes:
        dim: floats per row.
        rows: expected number of rows. With eight times as many, memory per row grows by a third.
    """

    dim: int
    rows: int


class TableLayout(NamedTuple):
    """Storage of a table.

    Attributes:
        dim: floats per row.
        buckets: number of buckets, a power of two.
    """

    dim: int
    buckets: int


@dataclass(frozen=True)
class Layout:
    """Storage of a dictionary.

    Attributes:
        dictionary: number of the dictionary.
        dtype: type of stored rows: "float32", "float16" or "int8".
        shards: number of shards that write it; another number may go on with it, so it makes no layout another one.
        tables: layouts by table.
    """

    dictionary: int
    dtype: str
    shards: int = field(compare=False)
    tables: dict[str, TableLayout] = field(default_factory=dict)

    @classmethod
    def from_sizes(cls, dictionary: int, dtype: str, shards: int, tables: dict[str, TableSize]) -> "Layout":
        for size in tables.values():
            Codec(dtype, size.dim)  # which knows what is possible
        return cls(dictionary, dtype, shards, {t: TableLayout(s.dim, buckets_for(s.rows)) for t, s in tables.items()})

    @classmethod
    def from_json(cls, text: str | bytes) -> "Layout":
        """The inverse of `to_json`.

        Raises:
            ValueError: the text is not a layout.
        """
        layout = convert(cls, parse_json(text))
        if layout.dictionary < 0 or layout.shards < 1:
            raise ValueError(f"invalid dictionary {layout.dictionary} or number of shards {layout.shards}")
        for name, table in layout.tables.items():
            Codec(layout.dtype, table.dim)  # which knows what is possible
            if table.dim > _MOST_ELEMENTS or not 1 <= table.buckets <= _MOST_BUCKETS or table.buckets.bit_count() != 1:
                raise ValueError(f"table {name} cannot have rows of {table.dim} elements in {table.buckets} buckets")
        return layout

    def to_json(self) -> str:
        return json.dumps(vars(self))

    def written_by(self, shards: int) -> "Layout":
        """The same layout with another number of shards."""
        return replace(self, shards=shards)

    def numbered(self, dictionary: int) -> "Layout":
        """The same layout for another dictionary."""
        return replace(self, dictionary=dictionary)

    def table(self, name: str) -> TableLayout:
        """The layout of a table.

        Raises:
            PublicationError: the table does not exist.
        """
        if name not in self.tables:
            raise PublicationError(f"unknown table {name!r}; the tables are {', '.join(self.tables)}")
        return self.tables[name]

    def codec(self, table: str) -> Codec:
        """Codec of a table's rows; errors as for `table`."""
        return Codec(self.dtype, self.table(table).dim)

    def buckets(self, table: str, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The bucket int64 [n] of each key uint64 [n]; errors as for `table`."""
        return bucket_of(keys, self.table(table).buckets)


class RedisKeys:
    """Names of a model's keys in Redis.

    Raises:
        ConfigError: the model name is not usable as a hash tag.
    """

    def __init__(self, model: str) -> None:
        if not model or not model.isprintable() or set("{}") & set(model):
            raise ConfigError(f"invalid model name {model!r}: expected printable text without {{ and }}")
        self.model = model
        prefix = f"streamtrain:model:{{{model}}}:"
        self.head, self.log, self.steps = f"{prefix}head", f"{prefix}log", f"{prefix}steps"
        self.applied, self.writers = f"{prefix}applied", f"{prefix}writers"
        self.numbers, self.dictionaries, self.building = (
            f"{prefix}numbers",
            f"{prefix}dictionaries",
            f"{prefix}building",
        )
        self.versions, self.labels, self.holds = f"{prefix}versions", f"{prefix}labels", f"{prefix}holds"
        self.history, self.lease = f"{prefix}history", f"{prefix}lease"
        self.probes, self.blocks = f"{prefix}probes", f"{prefix}blocks"
        self.traffic, self.decided, self.join = f"{prefix}traffic", f"{prefix}decided", f"{prefix}join"
        self.places = f"{prefix}places"
        self._prefix = prefix

    def all(self) -> list[str]:
        """The names that are the same for every version and label."""
        return [name for name in vars(self).values() if name not in (self.model, self._prefix)]

    def before(self, label: str) -> str:
        """Earlier versions of a label, latest first."""
        return f"{self._prefix}before:{label}"

    def weights(self, dictionary: int) -> str:
        return f"{self._prefix}weights:{dictionary}"

    def sums(self, dictionary: int) -> str:
        """Rows and checksums by bucket of a version's dictionary."""
        return f"{self._prefix}sums:{dictionary}"

    def rows(self, table: str, dictionary: int) -> KeyNames:
        return KeyNames(f"streamtrain:rows:{{{self.model}/".encode(), f"}}:{table}:{dictionary}".encode())

    def slots(self, buckets: NDArray[np.int64]) -> NDArray[np.int64]:
        """The slots of a cluster, int64 [n], that buckets are in: CRC-16 of the hash tag."""
        crcs = np.full(len(buckets), binascii.crc_hqx(f"{self.model}/".encode(), 0), np.int64)
        for shift in range(4 * (HEX_DIGITS - 1), -1, -4):
            digits = np.frombuffer(b"0123456789abcdef", np.uint8)[(buckets >> shift) & 15]
            crcs = ((crcs << 8) & 0xFFFF) ^ _CRCS[(crcs >> 8) ^ digits]
        return crcs % _SLOTS


_CRCS = np.array([binascii.crc_hqx(bytes([byte]), 0) for byte in range(256)], np.int64)


def buckets_for(rows: int) -> int:
    """Number of buckets for a table of `rows` rows: a power of two."""
    return min(1 << max(0, round(math.log2(max(rows, 1) / _ROWS))), _MOST_BUCKETS)


def bucket_of(keys: NDArray[np.uint64], buckets: int) -> NDArray[np.int64]:
    """Bits 10 and up of keys uint64 [n]: buckets int64 [n], below `buckets`, a power of two."""
    return ((keys >> np.uint64(_FIRST_BIT)) & np.uint64(buckets - 1)).astype(np.int64)
