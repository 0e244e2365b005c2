"""Writers that die at any step, and a Redis that refuses, forgets, or goes away."""

from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import pytest
import redis

from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import OriginUnavailable, PublicationCorrupt, PublicationError
from streamtrain.store.redis.dictionary import RedisDictionaries
from streamtrain.store.redis.layout import FullPublicationNeeded, OutOfTurn
from streamtrain.store.redis.model import RedisModel
from streamtrain.store.redis.server import RedisServer
from tests.store.cutting import Cutter
from tests.store.published import Published, Taken, loaded


@pytest.fixture
def own(redis_binary: str | None) -> Iterator[Valkey]:
    """A server of the test's own, which forgets everything when it is restarted."""
    with Valkey(binary=redis_binary) as server:
        yield server


def through(published: Published, url: str) -> Callable[[], None]:
    """Lets the publisher, in a new process so to speak, write elsewhere; what is returned closes that."""
    server = RedisServer(url, timeout=20)
    published.dictionaries = RedisDictionaries(RedisModel(server, published.model.keys.model))
    return server.close


def assert_head(published: Published, *numbers: int) -> int:
    """Whoever loads gets exactly one of these publications; says which."""
    head = published.origin.find(None)
    assert head is not None
    found, rows = loaded(published, head)
    assert found.number in numbers
    assert rows == published.by_number[found.number]
    return found.number


def bytes_of(published: Published, publish: Callable[[], object]) -> int:
    """How many bytes go to the server for it."""
    cutter = Cutter(published.url, 1 << 40)
    close = through(published, cutter.url)
    publish()
    close()
    cutter.close()
    return (1 << 40) - cutter.left


def test_a_writer_may_die_at_any_step(published: Published) -> None:
    published.full(1)
    total = bytes_of(published, lambda: published.publish(2))
    number, seen = 2, set()
    for limit in np.linspace(0, total, 24).astype(int).tolist():
        before = published.rows
        cutter = Cutter(published.url, limit)
        close = through(published, cutter.url)
        with suppress(PublicationError):
            published.publish(number + 1)
        close()
        cutter.close()
        through(published, published.url)
        at = assert_head(published, number, number + 1)
        seen.add(at - number)
        if at == number:
            published.rows = before
            published.publish(number + 1)  # of the same rows: the number says which
        number += 1
        assert assert_head(published, number) == number
        published.publish(number + 1)  # which applies what the one that died has not
        number += 1
        assert assert_head(published, number) == number
    assert seen == {0, 1}


def test_a_full_publication_may_die_at_any_step(published: Published, client: redis.Redis) -> None:
    published.full(1)
    first = published.rows
    total = bytes_of(published, lambda: published.full(2))
    number = 2
    for limit in np.linspace(0, total, 8).astype(int).tolist():
        before = published.rows
        cutter = Cutter(published.url, limit)
        close = through(published, cutter.url)
        with suppress(PublicationError):
            published.full(number + 1)
        close()
        cutter.close()
        if assert_head(published, number, number + 1) == number:
            published.rows = before
        else:
            number += 1
    assert first != published.rows
    through(published, published.url)
    client.delete(published.model.keys.building)  # as if ten minutes had passed
    published.model.sweep()
    assert_head(published, number)
    assert client.hlen(published.model.keys.dictionaries) == 1
    keys = list(client.scan_iter(f"streamtrain:rows:{{{published.model.keys.model}/*"))
    assert len({key.rpartition(b":")[2] for key in keys}) == 1


def test_two_schedulers_cannot_both_commit(published: Published) -> None:
    published.full(1)
    other = RedisDictionaries(published.model)
    mine = published.parts(2)
    theirs = [
        other.write(2, shard, changes, part_weights, rows=published.counts(shard))
        for shard, changes in published.changes(2).items()
        for part_weights in [published.weights(2)]
    ]
    publication = published.publication(2)
    published.dictionaries.commit(publication, mine)
    with pytest.raises(OutOfTurn, match=r"next publication of .* is 3, not 2") as error:
        other.commit(publication, theirs)
    assert error.value.number == 2
    published.dictionaries.commit(publication, mine)  # as after an answer that was lost
    assert_head(published, 2)
    published.publish(3)
    assert_head(published, 3)


def test_a_shard_that_another_process_took_over_harms_nothing(published: Published) -> None:
    published.full(1)
    old = published.dictionaries
    parts = published.parts(2)
    old.commit(published.publication(2), parts)  # and stands still before it applies
    through(published, published.url)
    parts = published.parts(3)  # which applies publication 2 from the log
    published.dictionaries.commit(published.publication(3), parts)
    old.apply(0)
    assert_head(published, 3)
    published.publish(4)
    for shard in range(2):
        old.apply(shard)
    assert_head(published, 4)
    published.publish(5)
    version = published.versions.make("ann")
    assert loaded(published, version) == (version, published.rows)


def test_parts_must_be_whole_and_of_the_publication(published: Published) -> None:
    published.full(1)
    parts = published.parts(2)
    publication = published.publication(2)
    with pytest.raises(PublicationError, match=r"has 2 shards, but the parts are from shards \[0\]"):
        published.dictionaries.commit(publication, parts[:1])
    with pytest.raises(PublicationError, match="for publication 2"):
        published.dictionaries.commit(published.publication(3), parts)
    with pytest.raises(PublicationError, match="declares int8 and"):
        published.dictionaries.commit(published.publication(2, dtype="int8"), parts)
    with pytest.raises(OutOfTurn, match=r"next publication of .* is 2, not 3"):
        published.write(3, 0, [])
    with pytest.raises(FullPublicationNeeded, match="has 2 shards, so no shard 2"):
        published.write(2, 2, [])
    assert_head(published, 1)


@pytest.mark.parametrize("step", ["write", "commit", "apply"])
def test_a_server_that_forgot_everything_needs_a_full_publication(own: Valkey, step: str) -> None:
    published = Published(own.url)
    first = published.full(1)
    published.versions.make("ann")
    if step == "write":
        own.restart()
    parts: list[object] = []
    if step == "commit":
        changes = published.changes(2)
        parts = [published.write(2, 0, changes[0])]
        own.restart()
    if step == "apply":
        published.publish(2)
        own.restart()
        published.dictionaries.apply(0)
    with pytest.raises(FullPublicationNeeded, match="write a full publication"):
        published.write(2, 1, [])
    with pytest.raises(FullPublicationNeeded, match="write a full publication"):
        published.dictionaries.commit(published.publication(2), parts)  # type: ignore[arg-type]
    with pytest.raises(PublicationCorrupt, match=r"missing|no longer"):
        list(published.origin.follow(first, 0.1))
    published.full(7)
    assert_head(published, 7)
    published.publish(8)
    assert_head(published, 8)
    published.close()


def test_a_full_publication_that_was_forgotten_is_not_committed(own: Valkey) -> None:
    published = Published(own.url)
    layout = published.begin()
    parts = published.parts(1, layout)
    own.restart()
    with pytest.raises(FullPublicationNeeded, match="was deleted"):
        published.dictionaries.commit(published.publication(1), parts, layout)
    with pytest.raises(PublicationError, match="start again"):
        published.parts(1, layout)
    published.close()


def test_a_server_that_is_away(own: Valkey) -> None:
    published = Published(own.url)
    publication = published.full(1)
    _, lookup = published.origin.open(publication)
    own.kill()
    for call in (
        lambda: published.publish(2),
        lambda: published.dictionaries.apply(0),
        lambda: published.versions.make("ann"),
        lambda: published.origin.find(None),
        published.origin.versions,
        lambda: published.origin.load(publication, Taken()),
        lambda: list(published.origin.follow(publication, 1)),
        lambda: published.origin.open(publication),
        lambda: lookup.look_up({"item": published.keys("item", 3)}),
    ):
        with pytest.raises(OriginUnavailable, match=r"Redis at 127.0.0.1:\d+ does not answer"):
            call()
    published.close()


def test_a_server_that_is_full(redis_binary: str | None) -> None:
    with Valkey(binary=redis_binary) as server, redis.Redis.from_url(server.url) as client:
        published = Published(server.url)
        published.full(1)
        published.publish(2)
        version = published.versions.make("ann").version
        assert version is not None
        before = published.rows
        client.config_set("maxmemory", 1)
        with pytest.raises(PublicationError, match="memory is full: give it more"):
            published.publish(3)
        with pytest.raises(PublicationError, match="memory is full"):
            published.versions.make("ann")
        published.rows = before
        assert_head(published, 2)
        published.versions.acquire(version, "server", 60)
        published.versions.release(version, "server")
        published.versions.delete(version, "ann")
        client.config_set("maxmemory", 0)
        published.publish(3)
        assert_head(published, 3)
        published.close()


def test_a_replica_refuses_to_be_written(redis_binary: str | None) -> None:
    with Valkey(binary=redis_binary) as primary, Valkey(binary=redis_binary) as replica:
        published = Published(primary.url)
        published.full(1)
        with redis.Redis.from_url(replica.url) as client:
            client.config_set("replica-read-only", "yes")
            client.replicaof("127.0.0.1", "1")
        elsewhere = Published(replica.url)
        with pytest.raises(PublicationError, match="use the address of the primary"):
            elsewhere.full(1)
        published.close()
        elsewhere.close()


def test_a_bucket_that_is_damaged_is_named(published: Published, client: redis.Redis) -> None:
    published.full(1)
    head = published.model.head()
    assert head is not None
    key = next(client.scan_iter(f"streamtrain:rows:{{{published.model.keys.model}/*:item:{head.layout.dictionary}"))
    version = published.versions.make("ann")
    for version_key in client.scan_iter(f"{key.decode().rpartition(':')[0]}:*"):
        field = next(iter(client.hgetall(version_key)))
        client.hset(version_key, field, bytes(16))
    with pytest.raises(PublicationCorrupt, match=rf"bucket {key.decode().rpartition(':')[0]}:\d+ .* is damaged"):
        published.origin.load(version, Taken())
    client.hset(key, b"short", b"x")
    client.hset(key, field, b"x")
    with pytest.raises(PublicationCorrupt, match="not rows of 16 bytes"):
        published.dictionaries.stored()[1].sums("item")
    client.delete(key)
    with pytest.raises(PublicationCorrupt, match=r"table item of publication 1 .* rows, not"):
        published.origin.load(published.publication(1), Taken())
    with pytest.raises(PublicationCorrupt, match=r"table item of publication 1 .* rows, not"):
        published.versions.make("ann")
    assert client.hlen(published.model.keys.dictionaries) == 2
