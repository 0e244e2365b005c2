"""What the tests of published models share: a model whose rows and weights all tell the publication they are of."""

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtrain.store.publication import Publication, RowChange, Weights
from streamtrain.store.redis.dictionary import RedisDictionaries, ShardPart
from streamtrain.store.redis.layout import Layout, TableSize
from streamtrain.store.redis.model import RedisModel
from streamtrain.store.redis.server import RedisServer
from streamtrain.store.redis.source import RedisOrigin
from streamtrain.store.redis.versions import RedisVersions

SHARDS = 2
DIM = 4
SIZES = {"item": TableSize(DIM, 2000), "user": TableSize(2 * DIM, 100)}
NO_KEYS = np.empty(0, np.uint64)
_models = itertools.count()

Rows = dict[str, dict[int, tuple[float, ...]]]


class Published:
    """A model and what it should be.

    A publication sets some rows to its number and the key's number, and removes some others; its weights are its
    number.
    """

    def __init__(self, url: str, *, cluster: bool = False, dtype: str = "float32", log_bytes: int = 64 << 20) -> None:
        self.url = url
        self.server = RedisServer(url, cluster=cluster, timeout=20)
        self.model = RedisModel(self.server, f"model{next(_models)}")
        self.dictionaries = RedisDictionaries(self.model, log_bytes=log_bytes)
        self.versions = RedisVersions(self.model)
        self.origin = RedisOrigin(self.model)
        self.dtype = dtype
        self.rows: Rows = {table: {} for table in SIZES}
        self.by_number: dict[int, Rows] = {}

    def keys(self, table: str, count: int) -> NDArray[np.uint64]:
        """Keys of table, of either shard half."""
        rng = np.random.default_rng(len(table))
        return rng.integers(0, 2**64, count, dtype=np.uint64)

    def changes(self, number: int) -> dict[int, list[RowChange]]:
        """By shard what publication `number` changes; `rows` are as of it afterwards."""
        rng = np.random.default_rng(number)
        found: dict[int, list[RowChange]] = {shard: [] for shard in range(SHARDS)}
        state: Rows = {table: dict(rows) for table, rows in self.rows.items()}
        for table, size in SIZES.items():
            keys = self.keys(table, size.rows)
            picked = rng.permutation(len(keys))[: len(keys) // 3]
            put, gone = keys[picked[: len(picked) * 3 // 4]], keys[picked[len(picked) * 3 // 4 :]]
            rows = row_values(number, put, size.dim)
            for key, row in zip(put.tolist(), rows.tolist(), strict=True):
                state[table][key] = tuple(row)
            for key in gone.tolist():
                state[table].pop(key, None)
            for shard in range(SHARDS):
                mine, lost = of_shard(put, shard), of_shard(gone, shard)
                found[shard].append(RowChange(table, put[mine], rows[mine], gone[lost]))
        self.rows = self.by_number[number] = state
        return found

    def counts(self, shard: int) -> dict[str, int]:
        """Of a shard's rows, by table."""
        return {table: int(of_shard(np.array([*rows], np.uint64), shard).sum()) for table, rows in self.rows.items()}

    def full(self, number: int = 1, **about: Any) -> Publication:
        """Publishes everything anew."""
        layout = self.begin()
        return self.commit(number, self.parts(number, layout), layout, **about)

    def begin(self) -> Layout:
        """Begins a full publication."""
        self.rows = {table: {} for table in SIZES}
        return self.dictionaries.begin(SIZES, dtype=self.dtype, shards=SHARDS)

    def weights(self, number: int) -> Weights:
        """A shard's slices."""
        return Weights(np.full(3, number, np.float32), np.full(2, -number, np.float32))

    def publish(self, number: int, **about: Any) -> Publication:
        """Publishes what `number` changes."""
        return self.commit(number, self.parts(number), **about)

    def parts(self, number: int, layout: Layout | None = None) -> list[ShardPart]:
        """What all shards have written."""
        changes = self.changes(number)
        return [self.write(number, shard, changes[shard], layout) for shard in range(SHARDS)]

    def write(self, number: int, shard: int, changes: Iterable[RowChange], layout: Layout | None = None) -> ShardPart:
        """A shard's part."""
        return self.dictionaries.write(
            number, shard, changes, self.weights(number), rows=self.counts(shard), layout=layout
        )

    def commit(self, number: int, parts: list[ShardPart], layout: Layout | None = None, **about: Any) -> Publication:
        """Commits and applies."""
        publication = self.publication(number, **about)
        self.dictionaries.commit(publication, parts, layout)
        for shard in range(SHARDS):
            self.dictionaries.apply(shard)
        return publication

    def publication(self, number: int, **about: Any) -> Publication:
        """What is said of a publication of the rows as they are now."""
        rows = {table: len(rows) for table, rows in self.rows.items()}
        given: dict[str, Any] = {"clock": {0: number}, "watermark": float(number), "published": 1.5}
        given |= {"dtype": self.dtype, "rows": rows} | about
        return Publication(number, None, self.model.keys.model, "run", "{}", **given)

    def looked_up(
        self, publication: Publication, table: str, keys: NDArray[np.uint64]
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Rows of a table, and which there are."""
        return self.origin.open(publication)[1].look_up({table: keys}).tables[table]

    def close(self) -> None:
        """Ends connections."""
        self.server.close()


def of_shard(keys: NDArray[np.uint64], shard: int) -> NDArray[np.bool_]:
    """Which keys are a shard's."""
    mine: NDArray[np.bool_] = keys >> np.uint64(63) == shard
    return mine


def row_values(number: int, keys: NDArray[np.uint64], dim: int) -> NDArray[np.float32]:
    """Rows that tell their publication and key, exact in every type of rows."""
    rows = np.zeros((len(keys), dim), np.float32)
    rows[:, 0] = 127
    rows[:, 1] = number
    rows[:, 2] = (keys % np.uint64(64)).astype(np.float32)
    return rows


class Taken:
    """A replica: what was taken, by table and key."""

    def __init__(self) -> None:
        self.rows: Rows = {table: {} for table in SIZES}

    def __call__(self, change: RowChange) -> None:
        assert change.rows.dtype == np.float32
        assert change.keys.dtype == change.gone.dtype == np.uint64
        for key, row in zip(change.keys.tolist(), change.rows.tolist(), strict=True):
            self.rows[change.table][key] = tuple(row)
        for key in change.gone.tolist():
            self.rows[change.table].pop(key, None)


def assert_weights(weights: Weights, number: int) -> None:
    assert weights.dense.tolist() == [number] * 3 * SHARDS
    assert weights.statistics.tolist() == [-number] * 2 * SHARDS


def loaded(published: Published, publication: Publication) -> tuple[Publication, Rows]:
    """What a load gives, whose weights are of the publication."""
    taken = Taken()
    found, weights = published.origin.load(publication, taken)
    assert_weights(weights, found.number)
    return found, taken.rows
