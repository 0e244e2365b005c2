"""Origin: the contract between stores of published models (Redis dictionaries, checkpoints) and their readers.

A *publication* is a servable state of the model: rows, dense parameters and statistics that belong together. The *head*
is the latest publication; a *version* is a publication that is kept under a number of its own. Publications and
versions are numbered consecutively and independently.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from streamtrain.errors import ConfigError, PublicationCorrupt
from streamtrain.store.json import convert

Floats = NDArray[np.float32]

PROD = "prod"
"""Label of the version that all servers serve; while no version has it, they serve the head."""

MOST_LABEL_CHARACTERS = 128
_MOST_DIGITS = 19  # of what has 64 bits


def check_label(name: str) -> None:
    """Whether a label may have this name: one that no version, arm of the traffic or path could be taken for.

    Raises:
        ConfigError: it may not.
    """
    is_text = name.isprintable() and name.strip() == name and 0 < len(name) <= MOST_LABEL_CHARACTERS
    if not is_text or name.isnumeric() or set(name) & set("@=/{}") or name in ("head", "none"):
        raise ConfigError(
            f"a label must have a name of at most {MOST_LABEL_CHARACTERS} printable characters, such as canary: no "
            f"number, neither head nor none, and without @ = / {{ }} or a blank at an end; not {name!r}"
        )


def parse_version_number(text: str) -> int | None:
    """The number of a version; None: it is not one. Digits of other scripts, such as ², are none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < _MOST_DIGITS else None


ANY = -1
"""Passed as `expected` when a label is to be changed whatever version has it now."""


@dataclass(frozen=True)
class Publication:
    """Metadata of a publication; plain values.

    Attributes:
        number: publication number, from 1, ascending.
        version: version number; None: a publication of the head only.
        model: name of the model.
        run: id of the training run, which begins with an initialisation (see ps/shard.py).
        spec: JSON of the model's spec (model/spec.py): tables and their widths, shapes, the schema's fingerprint.
        clock: by partition, the offset of the first sample that not all shards have learned.
        watermark: latest event time learned, seconds since the epoch; 0: none.
        published: time of publication, seconds since the epoch.
        dtype: type of stored rows: "float32", "float16" or "int8".
        rows: number of rows by table.
        metrics: windowed figures of progressive validation by label; None where undefined.
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

    def to_json(self) -> dict[str, Any]:
        """JSON-able values; all keys are strings."""
        return vars(self) | {"clock": {str(partition): at for partition, at in self.clock.items()}}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> "Publication":
        """The inverse of `to_json`; unknown keys are ignored.

        Raises:
            ValueError: the value is not a publication.
        """
        found = convert(cls, given)
        if not (math.isfinite(found.watermark) and math.isfinite(found.published)):
            raise ValueError(f"watermark {found.watermark} or published {found.published} is not finite")
        return found


class RowChange(NamedTuple):
    """Written and deleted rows of one table.

    Attributes:
        table: name of the table.
        keys: uint64 [n].
        rows: float32 [n, dim], as of the publication.
        gone: uint64 [m], keys of deleted rows; these keys read their initial value.
    """

    table: str
    keys: NDArray[np.uint64]
    rows: Floats
    gone: NDArray[np.uint64]


class Weights(NamedTuple):
    """Dense parameters float32 [P] and statistics float32 [S] of a publication, flat."""

    dense: Floats
    statistics: Floats


class PublicationStep(NamedTuple):
    """The changes from one publication of the head to a later one, and the weights of the later one."""

    publication: Publication
    weights: Weights
    changes: list[RowChange]


class Origin(Protocol):
    """A store of published models, for reading. Thread-safe.

    Every method may raise OriginUnavailable (no answer: retry) and PublicationCorrupt (the data is damaged, incomplete
    or deleted meanwhile).
    """

    name: str

    def versions(self) -> list[Publication]:
        """All versions, ascending."""

    def labels(self) -> dict[str, int]:
        """Version by label."""

    def find(self, version: int | None) -> Publication | None:
        """A version, or the head (None); returns None if it does not exist."""

    def load(self, publication: Publication, take: Callable[[RowChange], object]) -> tuple[Publication, Weights]:
        """Reads all rows, which are passed to `take` in parts, and the weights.

        The head may move meanwhile: the rows read are those of the returned publication, which is the requested one or
        a later one. Versions never change.
        """

    def follow(self, publication: Publication, seconds: float) -> Iterator[PublicationStep]:
        """Publications of the head after the given one, in order; waits up to `seconds` for the first.

        Raises:
            PublicationCorrupt: the log no longer has the steps in between: load the head again.
        """


@runtime_checkable
class DecidingOrigin(Origin, Protocol):
    """An origin whose labels may be lost; then it tells those that it had."""

    @property
    def has_lost_decisions(self) -> bool:
        """Whether they were lost when they were read last."""


@runtime_checkable
class ProbedOrigin(Origin, Protocol):
    """An origin that also keeps samples of the stream, with which servers probe what they serve."""

    def probes(self) -> list[bytes]:
        """Groups of samples, in the format of quality/probes.py."""


class LookupResult(NamedTuple):
    """Rows that were looked up.

    Attributes:
        number: publication number after the lookup. If it is the number before it too, the rows are of that
            publication, except that rows which it changed may still be those of the previous one.
        tables: by name, rows float32 [n, dim], zeros for keys without a row, and which keys have one, bool [n].
    """

    number: int
    tables: dict[str, tuple[Floats, NDArray[np.bool_]]]


class RowLookup(Protocol):
    """Looks up some rows of a version, or of the head as it moves. Thread-safe."""

    def look_up(self, keys: Mapping[str, NDArray[np.uint64]]) -> LookupResult:
        """Looks up the rows of keys uint64 [n] by table, in one round trip.

        Raises:
            OriginUnavailable: the origin does not answer.
            PublicationCorrupt: the version was deleted, the head was replaced, or rows were lost: load it again.
        """

    def follow(self, step: PublicationStep) -> None:
        """Moves on to a later publication of the head; called before its rows are looked up."""


@runtime_checkable
class LookupOrigin(Origin, Protocol):
    """An origin whose rows can be looked up by key."""

    def open(self, publication: Publication) -> tuple[PublicationStep, RowLookup]:
        """Opens a version, or the current head, for lookups instead of loading it whole.

        Returns:
            The publication with its weights and those changes that the lookup may not see yet; and the lookup.
        """


def check_rows(name: str, publication: Publication, table: str, found: int) -> None:
    """Raises PublicationCorrupt unless a table has as many rows as its publication declares."""
    if publication.rows.get(table) != found:
        raise PublicationCorrupt(
            f"table {table} of publication {publication.number} of {name} has {found} rows, not "
            f"{publication.rows.get(table)}"
        )
