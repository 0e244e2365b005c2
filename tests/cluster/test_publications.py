"""Shards published to a real server: what can be read there is what they have learned, whatever fails meanwhile."""

import logging

import pytest
import redis

from streamtrain.cluster.publication_schedule import PublicationSchedule
from streamtrain.cluster.publications import Publications
from streamtrain.cluster.publisher import ShardPublisher
from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import OriginUnavailable, PublicationError, ShardError
from streamtrain.ps.consistency import Async
from streamtrain.ps.node import Node
from streamtrain.ps.shard import Initial, Run
from streamtrain.ps.shards import Control, LocalControl
from streamtrain.store.redis_dictionaries import RedisDictionaries
from streamtrain.store.redis_model import RedisModel
from tests.cluster.published import Cluster, assert_published, connect, read
from tests.ps.counting import SPEC
from tests.ps.raw import until
from tests.ps.served import COUNTING


def test_what_was_learned_is_published(server: Valkey) -> None:
    cluster = Cluster(server.url)
    for samples in (3, 1, 4):
        cluster.learn(samples)
        cluster.publish()
        assert_published(server.url, cluster.learned)
    assert cluster.publications.publish() is None  # nothing new
    head = read(server.url)[0]
    assert (head.number, head.run, head.model, head.version) == (3, "run", "counted", None)


def test_nothing_is_published_before_there_is_anything(server: Valkey) -> None:
    nodes = [Node(0, 1, Async, publisher=ShardPublisher(RedisDictionaries(RedisModel(connect(server.url), "m"))))]
    controls: list[Control] = [LocalControl(node) for node in nodes]
    publications = Publications(controls, RedisDictionaries(RedisModel(connect(server.url), "m")), "m")
    assert publications.publish() is None


def test_a_part_that_was_not_committed_is_published_with_the_next(server: Valkey) -> None:
    cluster = Cluster(server.url)
    cluster.learn(2)
    cluster.publish()
    cluster.learn(2)
    broken, cluster.controls[1].publish = cluster.controls[1].publish, fails  # type: ignore[method-assign]
    with pytest.raises(ShardError, match="away"):
        cluster.publications.publish()
    assert_published(server.url, 2)
    cluster.controls[1].publish = broken  # type: ignore[method-assign]
    cluster.learn(1)
    cluster.publish()
    assert_published(server.url, 5)


def fails(number: int, layout: str) -> str:
    raise ShardError("away")


@pytest.mark.parametrize("appendonly", [True, False])
def test_a_server_that_is_killed_gets_it_again(appendonly: bool) -> None:
    with Valkey(appendonly=appendonly) as server:
        cluster = Cluster(server.url)
        cluster.learn(3)
        cluster.publish()
        server.kill()
        cluster.learn(1)
        with pytest.raises(OriginUnavailable):
            cluster.publications.publish()
        server.restart()
        until(lambda: tried(cluster))
        assert_published(server.url, 4)


def tried(cluster: Cluster) -> bool:
    try:
        cluster.publications.publish()
    except PublicationError:
        return False
    return True


def test_everything_is_published_anew_when_all_is_deleted(server: Valkey) -> None:
    cluster = Cluster(server.url)
    cluster.learn(3)
    cluster.publish()
    forget(server)
    cluster.learn(1)
    cluster.publish()
    assert_published(server.url, 4)


def forget(server: Valkey) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.flushall()


@pytest.mark.parametrize("anew", ["nothing", "publications", "shards"])
def test_numbers_go_on_when_all_is_deleted(server: Valkey, anew: str) -> None:
    """Answers bear them: what was published under one may not be something else later."""
    cluster = Cluster(server.url)
    for _ in range(3):
        cluster.learn(1)
        cluster.publish()
    forget(server)
    if anew == "publications":
        cluster.publications = Publications(cluster.controls, RedisDictionaries(cluster.model), "counted")
    if anew == "shards":  # what they were asked for last they do not know
        for node in cluster.nodes:
            node.published = 0
    cluster.learn(1)
    cluster.publish()
    assert read(server.url)[0].number == 4
    assert_published(server.url, 4)


@pytest.mark.parametrize("anew", [False, True])
def test_numbers_go_on_when_redis_is_where_it_was_before(server: Valkey, anew: bool) -> None:
    """As after a kill, or on a replica that was behind."""
    cluster = Cluster(server.url)
    cluster.learn(1)
    cluster.publish()
    with redis.Redis.from_url(server.url) as client:
        before = {key: client.dump(key) for key in client.scan_iter()}
        for _ in range(3):
            cluster.learn(1)
            cluster.publish()
        client.flushall()
        for key, value in before.items():
            client.restore(key, 0, value)
    assert read(server.url)[0].number == 1
    if anew:
        cluster.publications = Publications(cluster.controls, RedisDictionaries(cluster.model), "counted")
    cluster.learn(1)
    assert cluster.publish().number == 5
    assert_published(server.url, 5)
    cluster.learn(1)
    assert cluster.publish().number == 6
    assert_published(server.url, 6)


def test_another_run_begins_anew(server: Valkey) -> None:
    first = Cluster(server.url)
    first.learn(6)
    first.publish()
    second = Cluster(server.url, run="another")
    second.learn(1)
    second.publish()
    assert_published(server.url, 1)
    assert read(server.url)[0].number == 2


def test_a_restarted_shard_publishes_everything_once(server: Valkey) -> None:
    cluster = Cluster(server.url)
    cluster.learn(3)
    cluster.publish()
    again = Cluster(server.url)  # as if restored from a checkpoint that is as new
    again.learn(3)
    again.learn(2)
    again.publish()
    assert_published(server.url, 5)


def test_another_number_of_shards_begins_anew(server: Valkey) -> None:
    first = Cluster(server.url, shards=2)
    first.learn(3)
    first.publish()
    second = Cluster(server.url, shards=3)
    second.learn(4)
    second.publish()
    assert_published(server.url, 4)


def test_the_schedule_publishes_and_says_once_that_it_cannot(server: Valkey, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "streamtrain.cluster")
    cluster = Cluster(server.url)
    cluster.learn(2)
    schedule = PublicationSchedule(cluster.publications, 0.02)
    schedule.start()
    until(lambda: schedule.published == 1)
    server.kill()
    cluster.learn(1)
    until(lambda: schedule.failed >= 3)
    server.restart()
    until(lambda: schedule.published == 2)
    schedule.stop()
    assert_published(server.url, 3)
    assert caplog.text.count("not published") == 1
    assert caplog.text.count("publishes again") == 1


def test_a_shard_without_a_place_to_publish_says_so() -> None:
    node = Node(0, 1, Async)
    node.initialise(Initial(Run("run", {}), SPEC, COUNTING.dense, COUNTING.statistics))
    with pytest.raises(ShardError, match=r"set publish\.url"):
        node.publish(1, "")
