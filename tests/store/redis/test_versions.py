"""Versions: labels, history, holds, retention, deletion."""

import numpy as np
import pytest
import redis

from streamtrain.errors import PublicationCorrupt, PublicationError
from streamtrain.store.redis.codec import checksums
from tests.store.published import Published, Taken, loaded


def test_a_version_stays_as_it_is(published: Published) -> None:
    published.full(1)
    first = published.versions.make("ann", "a try")
    for number in (2, 3):
        published.publish(number)
    assert loaded(published, first) == (first, published.by_number[1])
    assert published.origin.find(1) == first
    assert published.origin.find(2) is None
    second = published.versions.make("ann")
    assert (second.number, second.version) == (3, 2)
    assert published.origin.versions() == [first, second]
    published.full(4)
    assert loaded(published, first) == (first, published.by_number[1])
    assert loaded(published, second) == (second, published.by_number[3])


def test_a_number_is_not_used_twice_though_all_is_forgotten(published: Published) -> None:
    published.full(1)
    assert [published.versions.make("ann").version for _ in range(2)] == [1, 2]
    published.server.call("DEL", *published.server.call("KEYS", "*"))
    published.full(2)
    assert [published.versions.make("ann").version for _ in range(2)] == [3, 4]
    assert [one.version for one in published.origin.versions()] == [3, 4]


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_versions_of_narrow_rows(redis_url: str, dtype: str) -> None:
    published = Published(redis_url, dtype=dtype)
    published.full(1)
    published.publish(2)
    version = published.versions.make("ann")
    assert version.dtype == dtype
    assert loaded(published, version) == (version, published.rows)
    published.close()


def test_checksums_are_those_of_the_shards(published: Published) -> None:
    published.full(1)
    expected = {}
    for table, rows in published.rows.items():
        encoded = np.array([*rows.values()], np.float32).view(np.uint8)
        expected[table] = checksums(np.array([*rows], np.uint64), encoded)
    assert published.versions.make("ann", expected=expected).version == 1
    expected["item"][0] += np.uint64(1)
    with pytest.raises(PublicationError, match=r"table item of .* does not have the checksum that its shards report"):
        published.versions.make("ann", expected=expected)
    assert len(published.origin.versions()) == 1
    sums = published.dictionaries.stored()[1].sums("item").sums
    assert sums.sum(dtype=np.uint64) + np.uint64(1) == expected["item"].sum(dtype=np.uint64)


def test_labels_and_the_way_back(published: Published) -> None:
    published.full(1, metrics={"label": {"auc": 0.5, "loss": None}})
    for _ in range(3):
        published.versions.promote(published.versions.make("ann").version, "ann")
    assert published.origin.labels() == {"prod": 3}
    published.versions.set_label("canary", 2, "bob", "see how it does")
    assert published.versions.rollback("ann", "worse") == 2
    assert published.origin.labels() == {"prod": 2, "canary": 2}
    published.versions.delete(3, "ann")
    published.versions.promote(2, "ann")
    assert published.versions.rollback("ann") == 1
    published.versions.set_label("canary", None, "bob", "done")
    assert published.origin.labels() == {"prod": 1}
    assert published.versions.rollback("bob", label="canary") == 2
    with pytest.raises(PublicationCorrupt, match="no version 9"):
        published.versions.set_label("prod", 9, "ann")
    deeds = published.versions.history()
    assert [(deed.what, deed.version, deed.was) for deed in deeds] == [
        ("rollback", 2, None),
        ("label", None, 2),
        ("rollback", 1, 2),
        ("label", 2, 2),
        ("delete", 3, None),
        ("rollback", 2, 3),
        ("label", 2, None),
        ("label", 3, 2),
        ("version", 3, None),
        ("label", 2, 1),
        ("version", 2, None),
        ("label", 1, None),
        ("version", 1, None),
    ]
    assert deeds[5][1:] == (
        "rollback",
        "ann",
        "worse",
        2,
        "prod",
        3,
        {"label": {"auc": 0.5, "loss": None}},
        "",
        "",
        "",
        "",
    )
    assert deeds[1].metrics == {}  # of what canary is not any more
    assert [deed.at for deed in deeds] == sorted((deed.at for deed in deeds), reverse=True)
    assert published.versions.history(1) == deeds[:1]


def test_without_the_label_the_head_is_served(published: Published) -> None:
    published.full(1, metrics={"label": {"auc": 0.5}})
    for _ in range(5):
        published.versions.make("ann")
    published.publish(2, metrics={"label": {"auc": 0.625}})
    published.versions.promote(None, "ann", "as it was")
    published.versions.promote(3, "ann")
    published.versions.promote(5, "ann")
    published.versions.promote(None, "ann")
    assert published.origin.labels() == {}
    deed = published.versions.history(1)[0]
    assert (deed.what, deed.label, deed.version, deed.was) == ("label", "prod", None, 5)
    assert deed.metrics == {"label": {"auc": 0.625}}
    assert [published.versions.rollback("ann") for _ in range(3)] == [5, 3, None]
    assert published.origin.labels() == {}
    deed = published.versions.history(1)[0]
    assert (deed.what, deed.version, deed.was, deed.metrics) == ("rollback", None, 3, {"label": {"auc": 0.625}})
    with pytest.raises(PublicationError, match=r"has no earlier prod version"):
        published.versions.rollback("ann")


def test_what_is_gone_is_not_rolled_back_to(published: Published, client: redis.Redis) -> None:
    with pytest.raises(PublicationCorrupt, match="no head"):
        published.versions.promote(None, "ann")
    published.full(1)
    for version in (1, 2, 3):
        published.versions.make("ann")
        published.versions.promote(version, "ann")
    published.versions.delete(2, "ann")
    assert published.versions.rollback("ann") == 1
    client.delete(published.model.keys.head)
    with pytest.raises(PublicationError, match="no earlier prod version"):
        published.versions.rollback("ann")
    assert published.origin.labels() == {"prod": 1}


def test_what_is_in_use_is_not_deleted(published: Published, client: redis.Redis) -> None:
    published.full(1)
    for _ in range(6):
        published.versions.make("ann")
    published.versions.set_label("prod", 1, "ann")
    published.versions.acquire(2, "server-1", 60)
    published.versions.acquire(3, "server-1", 0.001)
    published.versions.acquire(2, "server-2:8501", 60)
    assert published.versions.holders()[2] == ["server-1", "server-2:8501"]
    published.versions.release(2, "server-2:8501")
    for version, user in ((1, "the label prod"), (2, "the server server-1")):
        with pytest.raises(PublicationError, match=f"in use by {user}"):
            published.versions.delete(version, "ann")
    end = client.zscore(published.model.keys.holds, "3:server-1") or 0
    while client.time()[0] * 1000 + client.time()[1] // 1000 <= end:  # of a hold of a millisecond
        pass
    assert published.versions.holders() == {2: ["server-1"]}
    assert published.versions.retain(2, "ann") == [3, 4]
    assert [one.version for one in published.origin.versions()] == [1, 2, 5, 6]
    for one in published.origin.versions():
        loaded(published, one)
    published.versions.release(2, "server-1")
    assert published.versions.retain(0, "ann") == [2, 5, 6]
    with pytest.raises(PublicationCorrupt, match="no version 2"):
        published.versions.acquire(2, "server-1", 60)
    keys = list(client.scan_iter(f"streamtrain:rows:{{{published.model.keys.model}/*"))
    assert len({key.rpartition(b":")[2] for key in keys}) == 2
    assert client.hlen(published.model.keys.dictionaries) == 2


def test_a_version_that_is_deleted_while_it_is_read(published: Published) -> None:
    published.full(1)
    version = published.versions.make("ann")
    with pytest.raises(PublicationCorrupt, match="is damaged or missing"):
        published.origin.load(version, lambda _: published.versions.delete(1, "ann"))
    with pytest.raises(PublicationCorrupt, match=r"version 1 of .* was deleted"):
        published.origin.load(version, Taken())


def test_rows_are_looked_up(published: Published) -> None:
    published.full(1)
    head = published.publish(2)
    version = published.versions.make("ann")
    published.publish(3)
    keys = np.concatenate([published.keys("item", 2000), np.arange(50, dtype=np.uint64)])
    for publication, number in ((version, 2), (head, 3)):
        rows, found = published.looked_up(publication, "item", keys)
        expected = published.by_number[number]["item"]
        assert found.tolist() == [key in expected for key in keys.tolist()]
        assert rows.tolist() == [list(expected.get(key, [0.0] * 4)) for key in keys.tolist()]
    rows, found = published.looked_up(head, "item", keys[:0])
    assert (rows.shape, found.shape) == ((0, 4), (0,))
    with pytest.raises(PublicationError, match="unknown table 'none'; the tables are item, user"):
        published.looked_up(head, "none", keys)
