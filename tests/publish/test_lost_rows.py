"""Redis that has lost a part of what was published: it is noticed, and published anew."""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
import redis

from streamtrain._core import shards_of
from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import OriginUnavailable, PublicationError
from streamtrain.publish.cluster_publisher import Publications
from streamtrain.publish.head_check import HeadComparison
from streamtrain.store.redis import dictionary
from streamtrain.store.redis.server import NodeInfo, RedisServer
from tests.patience import PATIENCE, until
from tests.publish.published import Cluster, assert_published, read, server
from tests.store.redis.test_access import cluster as nodes
from tests.stream.redis_fixtures import redis_binary

__all__ = ["nodes", "redis_binary", "server"]


class Clock:
    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


def test_a_deleted_bucket_is_found_by_counting_and_published_anew(server: Valkey) -> None:
    now = Clock()
    cluster = Cluster(server.url, now=now)
    cluster.learn(6)
    cluster.publish()
    with redis.Redis.from_url(server.url) as client:
        name = client.keys("streamtrain:rows:*")[0]
        client.delete(name)
        assert cluster.publications.publish() is None  # it is not time to count yet
        now.at = 60
        cluster.publish()  # though nothing new was learned
        assert_published(server.url, 6)
        assert len(read(server.url)[1]) == 6
    now.at = 120
    assert cluster.publications.publish() is None


def test_what_a_server_had_a_while_ago_is_published_anew() -> None:
    """As many rows, but some of them older."""
    with Valkey(appendonly=True) as server:
        cluster = Cluster(server.url)
        cluster.learn(6)
        cluster.publish()
        with redis.Redis.from_url(server.url) as client:
            before = {name: client.dump(name) for name in client.scan_iter("streamtrain:rows:*")}
            cluster.learn(1)
            cluster.publish()
            for name, value in before.items():
                client.restore(name, 0, value, replace=True)
        server.restart()
        until(lambda: healed(cluster))
        assert_published(server.url, 7)


def test_a_server_that_was_restarted_and_has_everything_is_not_written_anew() -> None:
    with Valkey(appendonly=True) as server:
        cluster = Cluster(server.url)
        cluster.learn(4)
        cluster.publish()
        server.restart()
        until(lambda: answers(cluster))
        assert cluster.publications.publish() is None
        assert read(server.url)[0].number == 1
        cluster.learn(1)
        cluster.publish()
        assert_published(server.url, 5)


def test_a_server_that_tells_another_life_each_time_is_not_compared_all_the_time(
    server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does behind which are several."""
    now, lives, compared = Clock(), itertools.count(), 0
    cluster = Cluster(server.url, now=now)

    def nodes_of(_: RedisServer) -> list[NodeInfo]:
        return [NodeInfo("a proxy", str(next(lives)), "noeviction", 0)]

    def compare(publications: Publications) -> HeadComparison | None:
        nonlocal compared
        compared += 1
        now.at += 1.0
        return really(publications)

    really = Publications._compare
    monkeypatch.setattr(RedisServer, "nodes", nodes_of)
    monkeypatch.setattr(Publications, "_compare", compare)
    for _ in range(4):
        cluster.learn(1)
        cluster.publish()
        now.at += 7.0
    assert compared == 1
    assert_published(server.url, 4)
    monkeypatch.setattr(RedisServer, "nodes", lambda _: [NodeInfo("a proxy", "the same from now on", "noeviction", 0)])
    assert cluster.publications.publish() is None
    now.at += 60.0
    assert cluster.publications.publish() is None
    assert compared == 2  # what was passed over is made up for


def test_a_leader_that_is_new_as_well_notices(server: Valkey) -> None:
    cluster = Cluster(server.url)
    cluster.learn(4)
    cluster.publish()
    anew = Cluster(server.url)
    anew.publications._controls = cluster.controls
    with redis.Redis.from_url(server.url) as client:
        client.delete(*client.keys("streamtrain:rows:*"))
        client.hset("streamtrain:model:{counted}:head", "nodes", "{}")  # those that had it before
    anew.publish()
    assert_published(server.url, 4)


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random"])
def test_a_server_that_evicts_is_refused_until_it_does_not(server: Valkey, policy: str) -> None:
    cluster = Cluster(server.url)
    cluster.learn(4)
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory-policy", policy)
        with pytest.raises(PublicationError, match=rf"maxmemory-policy {policy}.*set it to noeviction"):
            cluster.publish()
        assert not client.keys("streamtrain:rows:*")
        client.config_set("maxmemory-policy", "volatile-lru")  # no key of ours expires
        cluster.publish()
    assert_published(server.url, 4)


@pytest.mark.parametrize("lost", ["applied", "log", "steps"])
def test_whatever_key_of_the_model_is_lost_it_is_published_anew(server: Valkey, lost: str) -> None:
    cluster = Cluster(server.url)
    cluster.learn(2)
    cluster.publish()
    cluster.learn(1)
    cluster.publish()
    with redis.Redis.from_url(server.url) as client:
        client.delete(f"streamtrain:model:{{counted}}:{lost}")
    for _ in range(2):
        cluster.learn(1)
        cluster.publish()
    assert_published(server.url, 5)


def test_a_node_of_a_cluster_that_comes_back_empty_is_filled_again(nodes: list[Valkey]) -> None:
    cluster = Cluster(nodes[0].url, cluster=True)
    keys = np.arange(1, 20_001, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for i, node in enumerate(cluster.nodes):
        mine = keys[shards_of(keys, 2) == i]
        ones = np.ones(len(mine), np.uint32)
        none = np.empty((len(mine), 0), np.float32)
        node.shard.tables[0].load(mine, np.ones((len(mine), 1), np.float32), none, ones, ones)
    cluster.learn(1)
    cluster.publish()
    other = next(node for node in nodes if not has_head(node))
    other.restart()
    until(lambda: healed(cluster))
    assert len(cluster.model.server.nodes()) == 3
    found = cluster.publications.verify()
    assert found.agrees
    assert found.tables["ids"].there == 20_002


def has_head(node: Valkey) -> bool:
    with redis.Redis.from_url(node.url) as client:
        return any(name.endswith(b":head") for name in client.keys("streamtrain:model:*"))


def answers(cluster: Cluster) -> bool:
    try:
        return bool(cluster.model.server.nodes())
    except OriginUnavailable:
        return False


def healed(cluster: Cluster) -> bool:
    try:
        return cluster.publications.publish() is not None
    except OriginUnavailable:
        return False


@pytest.fixture
def replicated() -> Iterator[tuple[Valkey, Valkey]]:
    """A server and its replica."""
    with ExitStack() as stack:
        primary = stack.enter_context(Valkey(config=["repl-diskless-sync-delay 0"]))
        replica = stack.enter_context(Valkey(config=[f"replicaof 127.0.0.1 {primary.port}"]))
        with redis.Redis.from_url(replica.url) as client:
            until(lambda: client.info("replication")["master_link_status"] == "up")
        yield primary, replica


def test_a_commit_is_on_a_replica_and_one_that_is_silent_is_told(
    replicated: tuple[Valkey, Valkey], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dictionary, "_REPLICATED_SECONDS", PATIENCE)
    primary, replica = replicated
    cluster = Cluster(primary.url)
    for samples in (2, 1):
        cluster.learn(samples)
        cluster.publish()
        with redis.Redis.from_url(replica.url) as client:
            assert client.hget("streamtrain:model:{counted}:head", "number") == b"%d" % (cluster.learned - 1)
    assert "no replica" not in caplog.text
    monkeypatch.setattr(dictionary, "_REPLICATED_SECONDS", 0.5)
    replica.pause()
    cluster.learn(1)
    cluster.publish()
    assert caplog.text.count("no replica of") == 1
    replica.resume()


def test_a_replica_that_takes_the_place_of_its_primary_is_compared(replicated: tuple[Valkey, Valkey]) -> None:
    primary, replica = replicated
    cluster = Cluster(primary.url)
    cluster.learn(3)
    cluster.publish()
    with redis.Redis.from_url(replica.url) as client:
        client.execute_command("REPLICAOF", "NO", "ONE")
    cluster.learn(1)
    cluster.publish()
    primary.kill()
    server = RedisServer(replica.url, timeout=1.0)  # as if at the same address
    was, cluster.model.server = cluster.model.server, server
    cluster.model.log._server = server
    cluster.publish()
    assert_published(replica.url, 4)
    was.close()
    server.close()
