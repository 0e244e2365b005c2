"""Rows that are looked up: of which publication they are."""

import numpy as np
import pytest

from streamtrain.errors import PublicationCorrupt, PublicationError
from tests.store.published import NO_KEYS, SHARDS, SIZES, Published


def test_all_tables_at_once(published: Published) -> None:
    published.full(1)
    published.publish(2)
    version = published.versions.make("ann")
    published.publish(3)
    for publication in (version, published.origin.find(None)):
        assert publication is not None
        step, lookup = published.origin.open(publication)
        keys = {table: published.keys(table, size.rows) for table, size in SIZES.items()} | {"user": NO_KEYS}
        found = lookup.look_up(keys)
        assert step.publication == publication
        assert found.number == publication.number
        expected = published.by_number[publication.number]["item"]
        rows, there = found.tables["item"]
        assert there.tolist() == [key in expected for key in keys["item"].tolist()]
        assert rows.tolist() == [list(expected.get(key, [0.0] * 4)) for key in keys["item"].tolist()]
        assert found.tables["user"][0].shape == (0, 8)
        assert lookup.look_up({}).tables == {}


def test_what_the_head_changed_comes_with_it(published: Published) -> None:
    """Its shards may not have written it to the dictionary yet; nothing of the next is there before its commit."""
    published.full(1)
    published.publish(2)
    parts = published.parts(3)
    published.dictionaries.commit(published.publication(3), parts)
    step, lookup = published.origin.open(published.publication(3))
    assert step.publication.number == 3
    changed = np.concatenate([change.keys for change in step.changes if change.table == "item"])
    gone = np.concatenate([change.gone for change in step.changes if change.table == "item"])
    others = np.setdiff1d(published.keys("item", 2000), np.concatenate([changed, gone]))
    for number in (3, 4):
        found = lookup.look_up({"item": others})
        assert found.number == number
        rows, there = found.tables["item"]
        expected = {key: published.by_number[3]["item"].get(key) for key in others.tolist()}
        assert there.tolist() == [row is not None for row in expected.values()]
        assert rows[there].tolist() == [list(row) for row in expected.values() if row]
        if number == 3:
            for shard in range(SHARDS):
                published.dictionaries.apply(shard)
            parts = [published.write(4, shard, []) for shard in range(SHARDS)]
            published.dictionaries.commit(published.publication(4), parts)


def test_what_is_gone_is_no_row(published: Published) -> None:
    published.full(1)
    head = published.publish(2)
    version = published.versions.make("ann")
    keys = {"item": published.keys("item", 3)}
    _, of_version = published.origin.open(version)
    _, of_head = published.origin.open(head)
    published.versions.delete(1, "ann")
    with pytest.raises(PublicationCorrupt, match=r"version 1 of .* was deleted"):
        of_version.look_up(keys)
    with pytest.raises(PublicationCorrupt, match=r"version 1 of .* was deleted"):
        published.origin.open(version)
    published.full(3)
    with pytest.raises(PublicationCorrupt, match="was replaced: load it again"):
        of_head.look_up(keys)
    with pytest.raises(PublicationError, match="unknown table 'none'; the tables are item, user"):
        of_head.look_up({"none": keys["item"]})
