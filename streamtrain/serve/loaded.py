"""Loaded: the contract between predictors and what holds the rows and weights of a publication in this process."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from streamtrain._core import Plan, Table
from streamtrain.errors import ConfigError, PublicationCorrupt
from streamtrain.model.spec import Spec
from streamtrain.store.origin import Floats, Publication, RowChange, Step, Weights

Integers = NDArray[np.uint32]

PART_ROWS = 4096  # a part keeps readers waiting for about a tenth of a millisecond
_KEPT = ("dim", "seed", "init", "init_scale", "dtype")  # what a row's birth value and storage depend on


class View(NamedTuple):
    """What was read at one moment.

    Attributes:
        publication: that it is all of.
        tensors: its weights, in whatever form the holder was given them.
        rows: for each plan its rows, flat.
    """

    publication: Publication
    tensors: Any
    rows: list[Floats]


class TableSum(NamedTuple):
    """Of one table.

    Attributes:
        rows: how many there are.
        checksum: the sum, modulo 2^64, of the checksums of their float32 (`checksums` of store/redis_codec.py).
    """

    rows: int
    checksum: int


class Checksums(NamedTuple):
    """What is held of a publication.

    Attributes:
        publication: that it is all of.
        tables: by name.
    """

    publication: Publication
    tables: dict[str, TableSum]


class Loaded(Protocol):
    """A publication; of the head, one after another. Any thread may read; one at a time may apply.

    No reader sees two publications mixed, not even while a step is applied.
    """

    @property
    def publication(self) -> Publication:
        """What is read now."""

    @property
    def rows(self) -> dict[str, int]:
        """Number of rows that are held by table."""

    @property
    def nbytes(self) -> int:
        """Bytes of all rows and their indexes."""

    @property
    def lookups(self) -> Mapping[tuple[str, str], int]:
        """By table and outcome how many ids were looked up, if not all rows are held: see `Cache`."""

    def read(self, plans: list[Plan]) -> View:
        """What batches need, all of one publication.

        Raises:
            OriginUnavailable, PublicationCorrupt: rows that are not held cannot be had.
        """

    def read_at_once(self, plans: list[Plan]) -> View | None:
        """The same; None if the origin has to be asked."""

    def apply(self, step: Step) -> None:
        """Goes on to the publication after.

        Raises:
            PublicationCorrupt: something of it cannot be used; nothing has changed.
        """

    def found(self, plan: Plan) -> dict[str, tuple[int, int]]:
        """By table how many of a plan's keys have a row, and of how many that is known."""

    def checksums(self) -> Checksums | None:
        """Of all rows; no step is applied meanwhile. None: not all are held."""


class Shape:
    """What the rows and weights of a publication must be like.

    Args:
        publication: whose spec says so.

    Raises:
        PublicationCorrupt: the spec cannot be used.
    """

    def __init__(self, publication: Publication) -> None:
        try:
            self._spec = Spec.from_json(publication.spec)
        except ConfigError as exc:
            raise PublicationCorrupt(f"{name_of(publication)}: {exc}") from exc
        self._tables = {one["name"]: {name: one[name] for name in _KEPT if name in one} for one in self._spec.tables}

    def table(self, name: str, capacity: int = 0) -> Table:
        """An empty table without optimizer state: rows only. It gives the birth value of what is not in it."""
        return Table(**self._tables[name], optimizer="sgd", rate=1.0, capacity=capacity)

    def check(self, change: RowChange) -> None:
        """Refuses rows that are not finite, or do not fit their table."""
        if change.table not in self._tables:
            raise PublicationCorrupt(f"there are rows of a table {change.table!r}, which the model has not")
        dim = self._tables[change.table]["dim"]
        if len(change.keys) and change.rows.shape != (len(change.keys), dim):
            raise PublicationCorrupt(f"table {change.table!r}: rows are {change.rows.shape}, not [n, {dim}]")
        if not np.isfinite(change.rows).all():
            raise PublicationCorrupt(f"table {change.table!r}: rows are not finite")

    def check_weights(self, publication: Publication, weights: Weights) -> None:
        """Refuses weights that are not finite or too few."""
        sizes = {"dense": self._spec.dense_size, "statistics": self._spec.statistics_size}
        for (what, size), values in zip(sizes.items(), weights, strict=True):
            if values.shape != (size,):
                raise PublicationCorrupt(f"{name_of(publication)} has {what} {values.shape}, not [{size}]")
            if not np.isfinite(values).all():
                raise PublicationCorrupt(f"{name_of(publication)}: {what} weights are not finite")


def name_of(publication: Publication) -> str:
    """A publication, for messages."""
    at = f"publication {publication.number}"
    return at if publication.version is None else f"version {publication.version} ({at})"


def parts_of(*arrays: NDArray[Any]) -> Iterator[tuple[NDArray[Any], ...]]:
    """Arrays of equal length, some rows at a time."""
    for start in range(0, len(arrays[0]), PART_ROWS):
        yield tuple(one[start : start + PART_ROWS] for one in arrays)


def put(
    table: Table, keys: NDArray[np.uint64], rows: Floats, counts: Integers | int = 0, seen: Integers | int = 0
) -> None:
    """Writes rows [n, dim] into a table of `Shape`, with their counts and when they were seen [n], or of all."""
    counts, seen = (np.full(len(keys), one, np.uint32) for one in (counts, seen))
    table.load(keys, rows.reshape(len(keys), table.dim), np.empty((len(keys), 0), np.float32), counts, seen)
