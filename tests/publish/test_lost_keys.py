"""Any keys of a model may be gone at any time: all is published again by itself, also while nothing is learned."""

from collections.abc import Iterator

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from streamtrain.embedded.valkey import Valkey
from streamtrain.store.redis.layout import RedisKeys
from streamtrain.store.redis.versions import RedisVersions
from tests.publish.published import OPEN, Cluster, assert_published, read, server

__all__ = ["server"]

KEYS = RedisKeys("counted")
NAMES = sorted(KEYS.all())


class Clock:
    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture(scope="module")
def shared() -> Iterator[Valkey]:
    with Valkey() as one:
        yield one


def lose(url: str, names: set[str], *, rows: bool) -> None:
    with redis.Redis.from_url(url) as client:
        if rows:
            names = names | {one.decode() for one in client.keys("streamtrain:rows:*")[:2]}
        if names:
            client.delete(*names)


def published_again(cluster: Cluster, now: Clock) -> None:
    for _ in range(4):
        now.at += 60
        cluster.publications.publish()


@settings(max_examples=40)
@given(names=st.sets(st.sampled_from(NAMES)), rows=st.booleans(), steps=st.integers(1, 3), more=st.booleans())
def test_whatever_is_lost_is_published_again(
    shared: Valkey, names: set[str], rows: bool, steps: int, more: bool
) -> None:
    with redis.Redis.from_url(shared.url) as client:
        client.flushall()
    now = Clock()
    cluster = Cluster(shared.url, now=now)
    for _ in range(steps):
        cluster.learn(2)
        cluster.publish()
    lose(shared.url, names, rows=rows)
    published_again(cluster, now)
    assert_published(shared.url, 2 * steps)
    now.at += 60
    assert cluster.publications.publish() is None  # it is quiet again
    if more:
        cluster.learn(1)
        cluster.publish()
        assert_published(shared.url, 2 * steps + 1)
    if names >= {KEYS.head, KEYS.dictionaries, KEYS.log}:  # nothing says what rows there were
        return
    cluster.model.sweep()
    with redis.Redis.from_url(shared.url) as client:  # and what was there before is deleted
        assert len({one.rsplit(b":", 1)[1] for one in client.keys("streamtrain:rows:*")}) == 1
    while OPEN:
        OPEN.pop().close()


@pytest.mark.parametrize("lost", ["head", "steps", "log", "applied", "numbers", "dictionaries"])
def test_it_is_said_and_followers_go_on(server: Valkey, lost: str, caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(server.url)
    cluster.learn(2)
    cluster.publish()
    cluster.learn(1)
    cluster.publish()
    lose(server.url, {f"streamtrain:model:{{counted}}:{lost}"}, rows=False)
    assert cluster.publications.publish() is not None
    assert caplog.text.count("Redis has lost") == 1
    assert lost in caplog.text
    assert_published(server.url, 3)
    assert cluster.publications.publish() is None


def test_numbers_of_versions_are_never_lower_than_one_there_is(server: Valkey) -> None:
    cluster = Cluster(server.url)
    cluster.learn(2)
    cluster.publish()
    assert [RedisVersions(cluster.model).make("me").version for _ in range(3)] == [1, 2, 3]
    lose(server.url, {KEYS.numbers}, rows=False)
    anew = Cluster(server.url)
    assert RedisVersions(anew.model).make("me").version == 4


def test_rows_of_versions_are_deleted_with_them_though_the_list_was_lost(server: Valkey) -> None:
    cluster = Cluster(server.url)
    cluster.learn(3)
    cluster.publish()
    versions = RedisVersions(cluster.model)
    version = versions.make("me").version
    lose(server.url, {KEYS.dictionaries}, rows=False)
    cluster.publish()
    versions.delete(version or 0, "me")
    with redis.Redis.from_url(server.url) as client:
        assert len({one.rsplit(b":", 1)[1] for one in client.keys("streamtrain:rows:*")}) == 1
    assert len(read(server.url)[1]) == 3
