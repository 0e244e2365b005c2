"""What is served changes by a decision, never by a loss: Redis that forgets labels, traffic or everything."""

from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest
import redis

from streamtrain.embedded.valkey import Valkey
from streamtrain.publish.versions import DecisionKeeper
from streamtrain.store.redis.layout import RedisKeys
from streamtrain.store.redis.model import RedisModel
from streamtrain.store.redis.server import RedisServer
from streamtrain.store.redis.traffic import RedisTraffic
from streamtrain.store.redis.versions import RedisVersions
from tests.patience import until
from tests.serve.in_redis import InRedis, predicted
from tests.stream.redis_fixtures import redis_binary

__all__ = ["redis_binary"]


@pytest.fixture
def own(redis_binary: str | None) -> Iterator[Valkey]:
    """A server of the test's own."""
    with Valkey(binary=redis_binary) as server:
        yield server


def has_lost(client: httpx.Client) -> bool:
    lost = "streamtrain_serving_decisions_lost 1.0" in client.get("/metrics").text
    return lost and "has lost labels or traffic" in client.get("/healthz/ready").json()["origin"]


@pytest.mark.parametrize("lost", [("labels",), ("labels", "decided"), ("decided", "versions", "labels", "traffic"), ()])
def test_a_promoted_version_is_served_on_and_put_back(own: Valkey, lost: tuple[str, ...]) -> None:
    """`()`: everything."""
    published = InRedis(own.url)
    published.keep(1, 2)
    published.publish(3)
    published.versions.promote(1, "ann")
    keeper_model = RedisModel(RedisServer(own.url), published.model.keys.model)
    with ExitStack() as stack:
        stack.callback(keeper_model.server.close)
        one, two = (stack.enter_context(published.served()) for _ in range(2))
        assert keeper_model.decided().labels == {"prod": 1}
        assert predicted(one) == predicted(two) == ("1", 1)
        keys = RedisKeys(published.model.keys.model)
        if lost:
            published.server.call("DEL", *(getattr(keys, name) for name in lost))
        else:
            with redis.Redis.from_url(own.url) as client:
                client.flushall()
        until(lambda: has_lost(one) and has_lost(two))
        assert predicted(one) == predicted(two) == ("1", 1)
        assert one.get("/healthz/ready").status_code == 200
        keeper = DecisionKeeper(keeper_model, 0.05)
        keeper.start()
        until(lambda: not has_lost(one) and not has_lost(two))
        keeper.stop()
        assert RedisVersions(RedisModel(published.server, keys.model)).labels() == {"prod": 1}
        assert predicted(one) == predicted(two) == ("1", 1)


def test_a_decision_after_the_loss_is_followed(own: Valkey) -> None:
    published = InRedis(own.url)
    published.keep(1, 2)
    published.versions.promote(1, "ann")
    with published.served() as client:
        assert predicted(client) == ("1", 1)
        keys = published.model.keys
        published.server.call("DEL", keys.labels, keys.decided)
        until(lambda: has_lost(client))
        RedisVersions(RedisModel(published.server, keys.model)).promote(2, "ann")
        until(lambda: predicted(client) == ("2", 2))
        assert not has_lost(client)
        published.versions.rollback("ann")  # to the head: nothing is before it, as the history was of what is lost
        until(lambda: predicted(client)[0] != "2")


def test_traffic_is_divided_on_and_put_back(own: Valkey) -> None:
    published = InRedis(own.url)
    published.keep(1, 2)
    published.versions.promote(1, "ann")
    published.versions.set_label("canary", 2, "ann")
    traffic = RedisTraffic(RedisModel(published.server, published.model.keys.model))
    traffic.change({"prod": 40.0, "canary": 60.0}, "ann", force=True)
    assert traffic.read() is not None
    keeper = RedisModel(published.server, published.model.keys.model)
    keeper.decided()
    for lost in (["traffic"], ["traffic", "labels"], ["traffic", "labels", "decided"]):
        published.server.call("DEL", *(getattr(published.model.keys, name) for name in lost))
        kept = traffic.read()
        assert kept is not None
        assert kept.weights() == {"prod": 40.0, "canary": 60.0}
        assert keeper.restore_decisions("me")
        anew = RedisTraffic(RedisModel(published.server, published.model.keys.model)).read()
        assert anew == kept
        assert not keeper.restore_decisions("me")
    traffic.change({"prod": 100.0}, "ann", force=True)
    assert keeper.decided().traffic != b""
    assert keeper.decided().at
    history = [(one.what, one.label, one.why) for one in published.versions.history(3)]
    assert ("label", "canary", "put back: Redis had lost it") in [
        *history,
        *((one.what, one.label, one.why) for one in published.versions.history()),
    ]


def test_a_decision_on_a_server_whose_clock_is_behind_is_followed(own: Valkey) -> None:
    """Such as one that has taken over from a lost one, and knows nothing of what was decided there."""
    published = InRedis(own.url)
    published.keep(1, 2)
    published.versions.promote(1, "ann")
    with published.served() as client:
        assert predicted(client) == ("1", 1)
        keys = published.model.keys
        known = int(published.server.call("GET", keys.decided))
        with redis.Redis.from_url(own.url) as other, other.pipeline() as at_once:
            at_once.delete(keys.labels)
            at_once.hset(keys.labels, "prod", 2)
            at_once.set(keys.decided, known - 30_000)
            at_once.execute()
        until(lambda: predicted(client) == ("2", 2))
        assert not has_lost(client)


def test_a_replica_that_is_behind_has_lost_what_was_decided_since(own: Valkey) -> None:
    published = InRedis(own.url)
    published.keep(1, 2)
    published.versions.promote(1, "ann")
    keys = published.model.keys
    before = [(key, published.server.call("DUMP", key)) for key in (keys.labels, keys.decided)]
    published.versions.promote(2, "ann")
    keeper = RedisModel(published.server, keys.model)
    assert keeper.decided().labels == {"prod": 2}
    for key, value in before:
        published.server.call("RESTORE", key, 0, value, "REPLACE")
    assert keeper.decided().labels == {"prod": 2}
    assert keeper.has_lost_decisions
    assert keeper.restore_decisions("me")
    assert RedisVersions(RedisModel(published.server, keys.model)).labels() == {"prod": 2}


def test_a_version_is_not_deleted_while_its_label_is_lost(own: Valkey) -> None:
    published = InRedis(own.url)
    published.keep(1, 2, 3)
    published.versions.promote(1, "ann")
    assert published.versions.labels() == {"prod": 1}
    published.server.call("DEL", published.model.keys.labels)
    assert published.versions.retain(1, "schedule") == [2]
    assert published.versions.labels() == {"prod": 1}
