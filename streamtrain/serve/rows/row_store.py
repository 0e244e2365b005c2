"""The contract between predictors and what holds the rows and weights of a publication in this process."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from streamtrain._core import Plan, Table
from streamtrain.errors import ConfigError, PublicationCorrupt
from streamtrain.model.spec import Spec
from streamtrain.store.publication import Floats, Publication, PublicationStep, RowChange, Weights

Integers = NDArray[np.uint32]

PART_ROWS = 4096  # a part blocks readers for about 0.1 ms
_ROW_OPTIONS = ("dim", "seed", "init", "init_scale", "dtype")  # what a row's initial value and storage depend on


class View(NamedTuple):
    """A consistent read of one publication.

    Attributes:
        publication: which one.
        tensors: its weights, as converted when it was loaded.
        rows: for each plan its rows, flat.
    """

    publication: Publication
    tensors: Any
    rows: list[Floats]


class TableSum(NamedTuple):
    """The checksum of a table.

    Attributes:
        rows: number of rows.
        checksum: the sum, modulo 2^64, of the checksums of their float32 (`checksums` of store/redis/codec.py).
    """

    rows: int
    checksum: int


class Checksums(NamedTuple):
    """The checksums of a publication, by table."""

    publication: Publication
    tables: dict[str, TableSum]


class RowStore(Protocol):
    """The rows and weights of a publication, or of the head, whose publications follow one another.

    Any thread may read; one at a time may apply. A read is never a mix of two publications.
    """

    @property
    def publication(self) -> Publication:
        """The publication that is read now."""

    @property
    def fault(self) -> str:
        """Why rows cannot be looked up until all is reloaded, as a sentence; "": they can."""

    @property
    def rows(self) -> dict[str, int]:
        """Number of rows that are held, by table."""

    @property
    def nbytes(self) -> int:
        """Bytes of all rows and their indexes."""

    @property
    def lookups(self) -> Mapping[tuple[str, str], int]:
        """Number of ids looked up by table and outcome, if not all rows are held: see `Cache`."""

    def read(self, plans: list[Plan]) -> View:
        """The rows and weights for some batches.

        Raises:
            OriginUnavailable, PublicationCorrupt: rows that are not held cannot be looked up.
        """

    def read_at_once(self, plans: list[Plan]) -> View | None:
        """The same without blocking; None: rows would have to be looked up."""

    def apply(self, step: PublicationStep) -> None:
        """Applies the step to the next publication.

        Raises:
            PublicationCorrupt: the step is damaged; nothing has changed.
        """

    def found(self, plan: Plan) -> dict[str, tuple[int, int]]:
        """For each table, how many of a plan's keys have a row, and for how many that is known."""

    def checksums(self) -> Checksums | None:
        """Checksums of all rows; blocks steps meanwhile. None: not all rows are held."""


class PublicationSchema:
    """Validates the rows and weights of a publication against its spec.

    Raises:
        PublicationCorrupt: the spec cannot be used.
    """

    def __init__(self, publication: Publication) -> None:
        try:
            self._spec = Spec.from_json(publication.spec)
        except ConfigError as exc:
            raise PublicationCorrupt(f"{describe(publication)}: {exc}") from exc
        self._tables = {
            one["name"]: {name: one[name] for name in _ROW_OPTIONS if name in one} for one in self._spec.tables
        }

    def table(self, name: str, capacity: int = 0, **disk: Any) -> Table:
        """An empty table without optimizer state; it returns the initial value of missing rows.

        Args:
            name: of the table.
            capacity: rows at most; 0: any number.
            disk: options of a table with rows on disk.
        """
        return Table(**self._tables[name], optimizer="sgd", rate=1.0, capacity=capacity, **disk)

    def check(self, change: RowChange) -> None:
        """Raises PublicationCorrupt for rows that are not finite, or do not match their table."""
        if change.table not in self._tables:
            raise PublicationCorrupt(f"unknown table {change.table!r}")
        dim = self._tables[change.table]["dim"]
        if len(change.keys) and change.rows.shape != (len(change.keys), dim):
            raise PublicationCorrupt(f"table {change.table!r}: rows are {change.rows.shape}, not [n, {dim}]")
        if not np.isfinite(change.rows).all():
            raise PublicationCorrupt(f"table {change.table!r}: rows are not finite")

    def check_weights(self, publication: Publication, weights: Weights) -> None:
        """Raises PublicationCorrupt for weights that are not finite or too few."""
        sizes = {"dense": self._spec.dense_size, "statistics": self._spec.statistics_size}
        for (what, size), values in zip(sizes.items(), weights, strict=True):
            if values.shape != (size,):
                raise PublicationCorrupt(f"{describe(publication)} has {what} {values.shape}, not [{size}]")
            if not np.isfinite(values).all():
                raise PublicationCorrupt(f"{describe(publication)}: {what} weights are not finite")


def describe(publication: Publication) -> str:
    """A publication, for messages."""
    number = f"publication {publication.number}"
    return number if publication.version is None else f"version {publication.version} ({number})"


def split_rows(*arrays: NDArray[Any]) -> Iterator[tuple[NDArray[Any], ...]]:
    """Arrays of equal length, `PART_ROWS` rows at a time."""
    for start in range(0, len(arrays[0]), PART_ROWS):
        yield tuple(one[start : start + PART_ROWS] for one in arrays)


def load_rows(
    table: Table,
    keys: NDArray[np.uint64],
    rows: Floats,
    counts: Integers | int = 0,
    seen: Integers | int = 0,
    *,
    cold: bool = False,
) -> None:
    """Writes rows [n, dim] into a table, with their counts and the times [n] at which they were last seen.

    New ones that are `cold` go straight to disk where memory is full.
    """
    counts, seen = (np.full(len(keys), one, np.uint32) for one in (counts, seen))
    table.load(keys, rows.reshape(len(keys), table.dim), np.empty((len(keys), 0), np.float32), counts, seen, cold=cold)
