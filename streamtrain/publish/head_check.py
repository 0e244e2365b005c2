"""Compares the published rows of the head in Redis with those that shards have published."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from streamtrain.errors import ShardError
from streamtrain.publish.published_table import empty_checksums, isin_sorted
from streamtrain.store.publication import Publication
from streamtrain.store.redis.buckets import BucketChecksums, Buckets, add_rows

_NAMED = 5  # buckets that differ


class TableComparison(NamedTuple):
    """How the rows of one table compare.

    Attributes:
        rows: that were compared, as many as shards have.
        changing: keys that were left out, as their rows have changed since they were published.
        buckets: of the dictionary.
        differing: of these, how many have other rows than shards.
        first: of these, the first few: which and how.
        published: rows that the publication says.
        there: rows that are in Redis, of all keys.
    """

    rows: int
    changing: int
    buckets: int
    differing: int
    first: list[str]
    published: int
    there: int

    @property
    def agrees(self) -> bool:
        return not self.faults

    @property
    def faults(self) -> str:
        """What differs, in a sentence; "": nothing."""
        found = []
        if self.differing:
            found.append(f"{self.differing} of {self.buckets} buckets differ, such as: {self.first[0]}")
        if self.published != self.there:
            found.append(f"Redis has {self.there} rows, the publication declares {self.published}")
        return ", and ".join(found)


class HeadComparison(NamedTuple):
    """How the head compares with the shards.

    Attributes:
        publication: number of the head's.
        tables: by name.
    """

    publication: int
    tables: dict[str, TableComparison]

    @property
    def agrees(self) -> bool:
        return all(table.agrees for table in self.tables.values())

    @property
    def faults(self) -> str:
        """What differs, in a sentence; "": nothing."""
        return "; ".join(f"table {name}: {table.faults}" for name, table in self.tables.items() if table.faults)

    def to_json(self) -> dict[str, Any]:
        return {
            "publication": self.publication,
            "tables": {name: table._asdict() for name, table in self.tables.items()},
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Self:
        """What `to_json` gave.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it is none.
        """
        tables = {str(name): TableComparison(**table) for name, table in given["tables"].items()}
        return cls(int(given["publication"]), tables)


def compare(publication: Publication, buckets: Buckets, answers: Sequence[Any]) -> HeadComparison:
    """Compares the rows of the head's dictionary, to which everything is applied, with those of the shards.

    Args:
        publication: the head's.
        buckets: of its dictionary.
        answers: of all shards, `RowSums` of schemas/ps.proto.

    Raises:
        ShardError: an answer does not fit the dictionary.
        OriginUnavailable: Redis does not answer.
        PublicationCorrupt: a bucket holds what are not rows.
    """
    tables = {}
    for table, layout in buckets.layout.tables.items():
        theirs, changing = _sum_shards(table, layout.buckets, answers)
        mine, there = empty_checksums(layout.buckets), 0
        for keys, rows, at in buckets.read(table):
            stands = ~isin_sorted(keys, changing)
            add_rows(mine, keys[stands], rows[stands], at[stands])
            there += len(keys)
        wrong = np.flatnonzero((mine.rows != theirs.rows) | (mine.sums != theirs.sums))
        tables[table] = TableComparison(
            rows=int(theirs.rows.sum(dtype=np.int64)),
            changing=len(changing),
            buckets=layout.buckets,
            differing=len(wrong),
            first=[
                f"{buckets.bucket_name(table, int(one))} has {mine.rows[one]} rows, shards have "
                f"{'others' if mine.rows[one] == theirs.rows[one] else theirs.rows[one]}"
                for one in wrong[:_NAMED]
            ],
            published=publication.rows.get(table, 0),
            there=there,
        )
    return HeadComparison(publication.number, tables)


def _sum_shards(table: str, buckets: int, answers: Sequence[Any]) -> tuple[BucketChecksums, NDArray[np.uint64]]:
    """The sums of a table over all shards, and the keys that are in none of them, ascending."""
    total = empty_checksums(buckets)
    changing = [np.empty(0, np.uint64)]
    for shard, answer in enumerate(answers):
        try:
            (one,) = (one for one in answer.tables if one.name == table)
            total.rows[:] += np.frombuffer(one.rows, "<u4")
            total.sums[:] += np.frombuffer(one.sums, "<u8")
            changing.append(np.frombuffer(one.changing, "<u8").astype(np.uint64))
        except ValueError as exc:
            raise ShardError(f"shard {shard} returned invalid checksums of table {table}: {exc}") from exc
    return total, np.unique(np.concatenate(changing))
