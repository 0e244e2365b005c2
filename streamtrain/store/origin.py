"""Origin: the contract between what keeps published models (Redis dictionaries, checkpoints) and those who serve them.

A *publication* is a state of the model that may be served: rows, dense parameters and statistics that belong together.
The *head* moves with every publication; a *version* is a publication that stays, under a number. Publications are
numbered one after another, versions too, independently.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from streamtrain.errors import PublicationCorrupt
from streamtrain.store.plain import converted

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Publication:
    """What is said of a publication; all of it plain values.

    Attributes:
        number: of the publication, from 1; later ones have learned more, or have been promoted later.
        version: its number as a version; None: it is of the head only.
        model: name of the model.
        run: what is learned from a first initialisation on (see ps/shard.py).
        spec: JSON of the model's spec (model/spec.py): tables and their widths, shapes, the schema's fingerprint.
        clock: by partition of the stream the offset of the first sample that has not been learned by all shards.
        watermark: latest event time learned, seconds since the epoch; 0: none.
        published: when, seconds since the epoch.
        dtype: of rows as they are kept: "float32", "float16" or "int8".
        rows: number of rows by table.
        metrics: by label the windowed figures of progressive validation at that moment; None where not defined.
    """

    number: int
    version: int | None
    model: str
    run: str
    spec: str
    clock: Mapping[int, int]
    watermark: float
    published: float
    dtype: str
    rows: Mapping[str, int]
    metrics: Mapping[str, Mapping[str, int | float | None]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """It as values of JSON, whose keys are texts."""
        return vars(self) | {"clock": {str(partition): at for partition, at in self.clock.items()}}

    @classmethod
    def of_json(cls, given: Mapping[str, Any]) -> "Publication":
        """What `as_json` gave; keys of later formats are passed over.

        Raises:
            ValueError: it is none.
        """
        found = converted(cls, given)
        if not (math.isfinite(found.watermark) and math.isfinite(found.published)):
            raise ValueError(f"its times are {found.watermark} and {found.published}")
        return found


class RowChange(NamedTuple):
    """Rows of one table that are there now, or are not any more.

    Attributes:
        table: its name.
        keys: uint64 [n].
        rows: float32 [n, dim], as of the publication.
        gone: uint64 [m], keys that have no row any more: they read their birth value.
    """

    table: str
    keys: NDArray[np.uint64]
    rows: Floats
    gone: NDArray[np.uint64]


class Weights(NamedTuple):
    """Of a publication: dense float32 [P] and statistics float32 [S], flat."""

    dense: Floats
    statistics: Floats


class Step(NamedTuple):
    """From one publication of the head to a later one: all changes, then what they lead to, weights included."""

    publication: Publication
    weights: Weights
    changes: list[RowChange]


class Origin(Protocol):
    """Where published models come from. Thread-safe.

    Every method may raise OriginUnavailable (it does not answer: try again) and PublicationCorrupt (what it has is
    damaged or incomplete, or is deleted meanwhile).
    """

    name: str

    def versions(self) -> list[Publication]:
        """The versions that there are, ascending."""

    def labels(self) -> dict[str, int]:
        """Version by label."""

    def find(self, version: int | None) -> Publication | None:
        """A version, or the head (None); None if there is no such."""

    def load(self, publication: Publication, take: Callable[[RowChange], object]) -> tuple[Publication, Weights]:
        """Reads all rows, in parts that are handed to `take`, and the weights.

        Of the head, which moves meanwhile, what is read is of the publication that is returned: the one asked for or
        a later one. Nothing of a version changes.
        """

    def follow(self, publication: Publication, seconds: float) -> Iterator[Step]:
        """The publications of the head after one of it, in order; waits for the first for at most so long.

        Raises:
            PublicationCorrupt: steps in between have been dropped already; load the head anew.
        """


class Found(NamedTuple):
    """What was looked up of the rows of a publication.

    Attributes:
        number: of the publication that it was afterwards. If that is also what it was before, rows are of it, but what
            it changed itself may still be as of the one before.
        tables: by name rows float32 [n, dim], zeros where there is none, and of which keys there is one, bool [n].
    """

    number: int
    tables: dict[str, tuple[Floats, NDArray[np.bool_]]]


class Lookup(Protocol):
    """Some rows at a time: of a version, or of the head, whatever it is by then. Thread-safe."""

    def look_up(self, keys: Mapping[str, NDArray[np.uint64]]) -> Found:
        """The rows of keys uint64 [n] by table; in one round trip, however many they are.

        Raises:
            OriginUnavailable: the origin does not answer.
            PublicationCorrupt: the version is deleted, or the head was replaced: load it anew.
        """


@runtime_checkable
class LookupOrigin(Origin, Protocol):
    """An origin whose rows can be looked up one by one."""

    def open(self, publication: Publication) -> tuple[Step, Lookup]:
        """A version, or the head as it is now, without its rows: for what is not to be loaded whole.

        Returns:
            The publication, its weights, and what it changed, as far as the lookup may not know that yet; and the
            lookup.

        Raises:
            OriginUnavailable, PublicationCorrupt: as of every method of an origin.
        """


def check_rows(name: str, publication: Publication, table: str, found: int) -> None:
    """Whether a table has as many rows as its publication says.

    Raises:
        PublicationCorrupt: it has not.
    """
    if publication.rows.get(table) != found:
        raise PublicationCorrupt(
            f"table {table} of publication {publication.number} of {name} has {found} rows, not "
            f"{publication.rows.get(table)}"
        )
