"""Shards published to a real server: what can be read there is what they have learned, whatever fails meanwhile."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import redis

from streamtrain.cluster.publications import Publications, PublicationSchedule
from streamtrain.cluster.publisher import ShardPublisher
from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import OriginUnavailable, PublicationError, ShardError
from streamtrain.model.spec import slice_of
from streamtrain.ps.clock import Span
from streamtrain.ps.consistency import Async
from streamtrain.ps.node import Node
from streamtrain.ps.shard import Initial, Run
from streamtrain.ps.shards import Control, LocalControl
from streamtrain.store.origin import Publication, Weights
from streamtrain.store.redis_dictionaries import RedisDictionaries
from streamtrain.store.redis_model import RedisModel
from streamtrain.store.redis_origin import RedisOrigin
from streamtrain.store.redis_server import RedisServer
from tests.ps.counting import DENSE, SPEC, Log, key, pushes
from tests.ps.raw import until
from tests.ps.served import COUNTING

LOG: Log = {0: [[1, 2], [2], [3], [1], [7, 8], [9], [2, 3], [11]]}


@pytest.fixture
def server() -> Iterator[Valkey]:
    with Valkey() as one:
        yield one


OPEN: list[RedisServer] = []


def connect(url: str) -> RedisServer:
    """A connection that ends with the test."""
    OPEN.append(RedisServer(url, timeout=1.0))
    return OPEN[-1]


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


class Cluster:
    """Shards that learn a log, published under a name."""

    def __init__(self, url: str, shards: int = 2, run: str = "run") -> None:
        self.model = RedisModel(connect(url), "counted")
        self.nodes = [
            Node(i, shards, Async, publisher=ShardPublisher(RedisDictionaries(self.model))) for i in range(shards)
        ]
        for i, node in enumerate(self.nodes):
            slices = (slice_of(size, i, shards) for size in (DENSE, 2))
            zeros = (np.zeros(one.stop - one.start, np.float32) for one in slices)
            node.initialise(Initial(Run(run, {}), SPEC, *zeros))
        self.controls: list[Control] = [LocalControl(node) for node in self.nodes]
        self.publications = Publications(self.controls, RedisDictionaries(self.model), "counted")
        self.learned = 0

    def learn(self, samples: int) -> None:
        span = Span(0, self.learned, self.learned + samples)
        for node, push in zip(self.nodes, pushes(LOG, [span], len(self.nodes)), strict=True):
            node.shard.push(push)
        self.learned += samples

    def publish(self) -> Publication:
        published = self.publications.publish()
        assert published is not None
        return published


def read(url: str) -> tuple[Publication, dict[int, float], Weights]:
    """The head as a server loads it."""
    origin = RedisOrigin(RedisModel(connect(url), "counted"))
    head = origin.find(None)
    assert head is not None
    rows: dict[int, float] = {}

    def take(change: Any) -> None:
        for one in change.gone.tolist():
            rows.pop(one, None)
        rows.update(zip(change.keys.tolist(), change.rows[:, 0].tolist(), strict=True))

    publication, weights = origin.load(head, take)
    return publication, rows, weights


def counts(samples: Sequence[Sequence[int]]) -> dict[int, float]:
    return {key(one): float(n) for one, n in Counter(one for sample in samples for one in sample).items()}


def assert_published(url: str, samples: int) -> None:
    publication, rows, weights = read(url)
    assert dict(publication.clock) == {0: samples}
    assert rows == counts(LOG[0][:samples])
    assert dict(publication.rows) == {"ids": len(rows)}
    assert weights.dense.tolist() == [samples] * DENSE
    assert weights.statistics.tolist() == [samples] * 2


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
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    cluster.learn(1)
    cluster.publish()
    assert_published(server.url, 4)


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
    caplog.set_level(logging.INFO, "streamtrain.cluster.publications")
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
