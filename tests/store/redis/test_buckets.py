"""Rows in buckets: many commands at once, and what becomes of one that is refused."""

import numpy as np
import pytest
import redis

from streamtrain.errors import PublicationError
from streamtrain.store.redis.buckets import EncodedChange
from streamtrain.store.redis.commands import BATCH_ROWS
from streamtrain.store.redis.layout import Layout, TableLayout
from tests.store.published import Published

BUCKETS = 16
ROWS = 2 * BATCH_ROWS + 100


def test_one_refused_command_of_many_is_told(published: Published, client: redis.Redis) -> None:
    layout = Layout(1, "float32", 1, {"item": TableLayout(2, BUCKETS)})
    buckets = published.model.buckets(layout)
    keys = np.random.default_rng(1).permutation(ROWS).astype(np.uint64) << np.uint64(8)
    rows = np.repeat(keys[:, None], 2, axis=1).astype("<f4").view(np.uint8)
    change = EncodedChange("item", keys, rows, keys[:0])
    key = f"streamtrain:rows:{{{published.model.keys.model}/00000b}}:item:1"
    client.set(key, "no hash")
    with pytest.raises(PublicationError, match=r"not written by streamtrain: delete it"):
        buckets.put(change)
    client.delete(key)
    buckets.put(change)  # on a connection that has no answers of before
    found = {k: row for part, data, _ in buckets.read("item") for k, row in zip(part.tolist(), data, strict=True)}
    assert len(found) == ROWS
    assert all(found[k].tobytes() == row.tobytes() for k, row in zip(keys.tolist(), rows, strict=True))
    buckets.put(change._replace(keys=keys[:0], rows=rows[:0], gone=keys[::2]))
    assert sorted(k for part, _, _ in buckets.read("item") for k in part.tolist()) == sorted(keys[1::2].tolist())
