"""Layouts of dictionaries: which key of Redis a row is under. schemas/README.md describes all keys.

A dictionary is a set of rows of all tables, under a number. The head names one, and so does every version. A table is
divided into buckets, each one hash. What makes the hash tag is the model and the bucket, so a bucket is on the same
node of a cluster in all dictionaries, and buckets are spread over the nodes.
"""

import binascii
import json
import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamtrain.errors import ConfigError, PublicationError
from streamtrain.store.plain import converted, parsed
from streamtrain.store.redis_codec import Codec
from streamtrain.store.redis_commands import HEX_DIGITS, KeyNames

_FIRST_BIT = 10  # of a key: those below choose the segment of a native table, those far above its slot and the shard
_MOST_BUCKETS = 1 << 22
_MOST_ELEMENTS = 1 << 12  # of a row: as of the native core
_ROWS = 64  # of a bucket: by measurement, see schemas/README.md
_SLOTS = 1 << 14  # of a Redis Cluster


class FullPublicationNeeded(PublicationError):
    """The head is gone, or is divided among another number of shards: begin anew and write everything."""


class OutOfTurn(PublicationError):
    """Another publication has been committed, or another process writes: look at the head and write again.

    Attributes:
        number: of the head's publication.
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


class TableSize(NamedTuple):
    """What the buckets of a table are chosen by.

    Attributes:
        dim: floats of a row.
        rows: how many are expected. With eight times as many, memory per row grows by a third.
    """

    dim: int
    rows: int


class TableLayout(NamedTuple):
    """How a table is kept.

    Attributes:
        dim: floats of a row.
        buckets: their number, a power of two.
    """

    dim: int
    buckets: int


@dataclass(frozen=True)
class Layout:
    """How a dictionary is kept.

    Attributes:
        dictionary: its number.
        dtype: of rows as they are kept: "float32", "float16" or "int8".
        shards: among how many its keys are divided.
        tables: by name.
    """

    dictionary: int
    dtype: str
    shards: int
    tables: dict[str, TableLayout] = field(default_factory=dict)

    @classmethod
    def of_sizes(cls, dictionary: int, dtype: str, shards: int, tables: dict[str, TableSize]) -> "Layout":
        """The layout of tables of such sizes."""
        for size in tables.values():
            Codec(dtype, size.dim)  # which knows what is possible
        return cls(dictionary, dtype, shards, {t: TableLayout(s.dim, buckets_for(s.rows)) for t, s in tables.items()})

    @classmethod
    def of_json(cls, text: str | bytes) -> "Layout":
        """What `as_json` gave.

        Raises:
            ValueError: it is none.
        """
        layout = converted(cls, parsed(text))
        for name, table in layout.tables.items():
            Codec(layout.dtype, table.dim)  # which knows what is possible
            if table.dim > _MOST_ELEMENTS or not 1 <= table.buckets <= _MOST_BUCKETS or table.buckets.bit_count() != 1:
                raise ValueError(f"table {name} cannot have rows of {table.dim} elements in {table.buckets} buckets")
        return layout

    def as_json(self) -> str:
        """It as JSON."""
        return json.dumps(vars(self))

    def numbered(self, dictionary: int) -> "Layout":
        """The same of another dictionary."""
        return Layout(dictionary, self.dtype, self.shards, self.tables)

    def table(self, name: str) -> TableLayout:
        """Of a table.

        Raises:
            PublicationError: there is no such table.
        """
        if name not in self.tables:
            raise PublicationError(f"there is no table {name!r}, only {', '.join(self.tables)}")
        return self.tables[name]

    def codec(self, table: str) -> Codec:
        """Of a table's rows; errors as of `table`."""
        return Codec(self.dtype, self.table(table).dim)

    def buckets(self, table: str, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The bucket int64 [n] of each key uint64 [n]; errors as of `table`."""
        return bucket_of(keys, self.table(table).buckets)


class Keys:
    """Names of a model's keys.

    Raises:
        ConfigError: the model cannot be a hash tag.
    """

    def __init__(self, model: str) -> None:
        if not model or not model.isprintable() or set("{}") & set(model):
            raise ConfigError(f"the name of a model in Redis must be printable text without {{ and }}, not {model!r}")
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
        self.history = f"{prefix}history"
        self._prefix = prefix

    def before(self, label: str) -> str:
        """What a label was before, the last first."""
        return f"{self._prefix}before:{label}"

    def weights(self, dictionary: int) -> str:
        """Weights of a version's dictionary."""
        return f"{self._prefix}weights:{dictionary}"

    def sums(self, dictionary: int) -> str:
        """Rows and checksums by bucket of a version's dictionary."""
        return f"{self._prefix}sums:{dictionary}"

    def rows(self, table: str, dictionary: int) -> KeyNames:
        """Buckets of a table."""
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
    """How many buckets a table of so many rows gets: a power of two."""
    return min(1 << max(0, round(math.log2(max(rows, 1) / _ROWS))), _MOST_BUCKETS)


def bucket_of(keys: NDArray[np.uint64], buckets: int) -> NDArray[np.int64]:
    """Bits 10 and up of keys uint64 [n]: buckets int64 [n], below `buckets`, a power of two."""
    return ((keys >> np.uint64(_FIRST_BIT)) & np.uint64(buckets - 1)).astype(np.int64)
