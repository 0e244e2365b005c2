"""Ids are forgotten: their rows, and those of crosses with them, are nowhere afterwards but where the receipt says."""

import json
import random
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import streamtrain.ps.rpc.ps_pb2 as pb
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from streamtrain._core import hash_bytes, shards_of
from streamtrain.cluster.client import CoordinatorClient
from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import (
    CheckpointError,
    GateClosed,
    PublicationCorrupt,
    ShardError,
    ShardRefused,
    ShardUnavailable,
)
from streamtrain.model.features import Categorical, Cross
from streamtrain.model.optimizers import SGD
from streamtrain.model.schema import Schema
from streamtrain.model.spec import Spec
from streamtrain.ps.nodes.shards import RunTemplate, Shards
from streamtrain.ps.rows_of_ids import Sought, cross_keys
from streamtrain.ps.shard import Shard
from streamtrain.store.redis.model import RedisModel
from streamtrain.store.redis.server import RedisServer
from streamtrain.store.redis.source import RedisOrigin
from streamtrain.store.redis.versions import RedisVersions
from tests.checkpoint.saved import restored
from tests.cluster.coordinated import Coordinated
from tests.cluster.counted import is_bad, log_of, wrong_counts
from tests.cluster.here import refused, run, told
from tests.cluster.scaled import Scaled
from tests.patience import PATIENCE, until

USERS, ITEMS = [f"u{n}" for n in range(6)], [str(n) for n in range(300)]
SCHEMA = Schema(
    label="click",
    time="ts",
    features=[
        Categorical("user", dim=2),
        Categorical("friends", table="user", dim=2),
        Categorical("item", dim=2),
        Categorical("hour", dim=2, expire_after="30d", min_count=2),
        Cross("user_item", of=("user", "item"), dim=2),
        Cross("item_friends", of=("item", "friends"), dim=2, expire_after="30d"),
        Cross("user_hour_item", of=("user", "hour", "item"), dim=2),
    ],
)


def spec(**about: Any) -> Spec:
    tables = tuple({"name": one.name, **one.settings(SGD(1.0), 0)} for one in SCHEMA.tables)
    described = {**json.loads(json.dumps(SCHEMA.about())), "weights": [], "statistics": []}
    return Spec("schema", 0, "row_sum", tables, (), (), {"optimizer": "sgd", "rate": 1.0}, {**described, **about})


def key(*ids: str) -> int:
    """Of an id, or of a combination."""
    keys = [xxhash.xxh64_intdigest(one.encode()) for one in ids]
    return keys[0] if len(keys) == 1 else xxhash.xxh64_intdigest(struct.pack(f"<{len(keys)}Q", *keys))


def rows_of(shards: list[Shard], table: str) -> set[int]:
    return {one for shard in shards for one in shard.keys(table, 0)[0].tolist()}


class Service:
    """Shards with rows of all users and items, published to Redis and saved."""

    def __init__(self, cluster: Coordinated, url: str) -> None:
        self.cluster, self.url = cluster, url
        self.model = RedisModel(RedisServer(url), "model")
        beginning = RunTemplate(spec(), np.empty(0, np.float32), np.empty(0, np.float32), {})
        Shards(cluster.channels, beginning).agree()
        self.put("user", *([one] for one in USERS))
        self.put("item", *([one] for one in ITEMS))
        self.put("user_item", *([user, item] for user in USERS for item in ITEMS[::2]))
        self.put("item_friends", *([item, user] for user in USERS for item in ITEMS[::3]))

    @property
    def shards(self) -> list[Shard]:
        return [self.cluster.shards[index].node.shard for index in sorted(self.cluster.shards)]

    @property
    def coordinator(self) -> Any:
        assert self.cluster.coordinator
        return self.cluster.coordinator.coordinator

    @property
    def client(self) -> CoordinatorClient:
        return self.cluster.client()

    def put(self, table: str, *ids: list[str]) -> None:
        keys = np.array([key(*one) for one in ids], np.uint64)
        owners, at = shards_of(keys, len(self.shards)), [one["name"] for one in spec().tables].index(table)
        for shard in self.shards:
            mine = keys[owners == shard.index]
            ones = np.ones(len(mine), np.uint32)
            shard.tables[at].load(
                mine, np.ones((len(mine), 2), np.float32), np.empty((len(mine), 0), np.float32), ones, ones
            )

    @contextmanager
    def learned_meanwhile(self, user: str) -> Iterator[None]:
        """A sample of a user is learned just before each checkpoint."""
        schedule = self.coordinator.checkpoints
        take = schedule.now

        def learn(**options: Any) -> Any:
            self.put("user", [user])
            return take(**options)

        schedule.now = learn
        try:
            yield
        finally:
            schedule.now = take

    def published(self) -> dict[str, set[int]]:
        """What a server loads."""
        origin, found = RedisOrigin(self.model), {one["name"]: set[int]() for one in spec().tables}
        head = origin.find(None)
        assert head is not None
        origin.load(head, lambda change: found[change.table].update(change.keys.tolist()))
        return found

    def holds(self, *keys: int) -> bool:
        """Whether Redis holds the rows of any of these keys, in dictionaries or in the log."""
        wanted = [struct.pack("<Q", one) for one in keys]
        with redis.Redis.from_url(self.url) as client:
            for name in client.scan_iter():
                kind = client.type(name)
                if kind == b"stream":
                    parts = [fields.get(b"k", b"") for _, fields in client.xrange(name)]
                else:
                    parts = [*client.hgetall(name)] if kind == b"hash" else []
                if any(one in part for part in parts for one in wanted):
                    return True
        return False


@pytest.fixture
def service(server: Valkey, tmp_path: Path) -> Iterator[Service]:
    with Coordinated(tmp_path / "checkpoints", publish__url=server.url, publish__every="1h") as cluster:
        made = Service(cluster, server.url)
        yield made
        made.model.server.close()


def test_rows_of_an_id_and_of_its_crosses_are_gone(service: Service, tmp_path: Path) -> None:
    client, u1 = service.client, key("u1")
    client.publish_now()
    version = RedisVersions(service.model).make("test").version
    client.checkpoint()
    origin = RedisOrigin(service.model)
    before = origin.find(None)
    assert before is not None
    crossed = {key("u1", item) for item in ITEMS[::2]}
    friends = {key(item, "u1") for item in ITEMS[::3]}
    service.put("user", *([one] for one in USERS))  # written once more, so that the log has them, too
    service.coordinator.publications.now(removed=True)
    assert service.holds(u1)
    receipt = client.forget([("user", "u1")])
    assert receipt["rows"] == {"user": 1, "user_item": 150, "item_friends": 100, "user_hour_item": 0}
    assert not any(receipt["again"].values())
    assert (receipt["publication"], receipt["checkpoint"]) == (3, 2)
    assert rows_of(service.shards, "user") == {key(one) for one in USERS} - {u1}
    assert len(rows_of(service.shards, "item")) == len(ITEMS)
    assert not rows_of(service.shards, "user_item") & crossed
    assert len(rows_of(service.shards, "user_item")) == 5 * 150
    assert len(rows_of(service.shards, "item_friends")) == 5 * 100
    assert {table: len(rows) for table, rows in service.published().items()} == {
        "user": 5, "item": 300, "hour": 0, "user_item": 750, "item_friends": 500, "user_hour_item": 0,
    }  # fmt: skip
    assert client.verify().agrees
    left = {one["where"]: (one["what"], one["until"]) for one in receipt["remains"]}
    assert left[f"version {version} in Redis, and servers that serve it"] == (
        "at least 251 rows",
        "no label names it and 10 later ones exist (publish.keep)",
    )
    url = service.cluster.settings.checkpoint.url
    assert left[f"checkpoints at {url}"][0] == "epochs 1"
    assert left["shards, table user_hour_item"] == (
        "rows of the cross with an id that has no row any more in hour (min_count, expire_after)",
        "ever",
    )
    assert "shards, table user_item" not in left  # all items have rows
    RedisVersions(service.model).delete(version or 0, "test")
    service.model.sweep()
    assert not service.holds(u1, *crossed, *friends)
    for found in (restored(str(url), 2, shards) for shards in (2, 3)):
        assert not rows_of(found, "user") & {u1}
        assert not rows_of(found, "user_item") & crossed
    assert rows_of(restored(str(url), 1, 2), "user") >= {u1}
    with pytest.raises(PublicationCorrupt, match="no longer has"):  # who lagged loads the head again
        next(iter(origin.follow(before, 1.0)))


def test_it_may_be_repeated_and_takes_several_at_once(service: Service) -> None:
    client = service.client
    first = client.forget([("user", "u1"), ("friends", "u2"), ("item", "7"), ("item", "never seen")])
    assert first["rows"]["user"] == 2
    assert first["rows"]["item"] == 1
    assert first["rows"]["user_item"] == 2 * 150  # item 7 is in none
    again = client.forget([("user", "u1"), ("friends", "u2"), ("item", "7"), ("item", "never seen")])
    assert not any(again["rows"].values())
    assert again["publication"] > first["publication"]
    assert client.verify().agrees


def test_rows_that_come_back_are_told(service: Service) -> None:
    """As a sample is learned meanwhile, or a shard is restored from an earlier checkpoint."""
    with service.learned_meanwhile("u1"):
        receipt = service.client.forget([("user", "u1")])
    assert receipt["again"]["user"] == 1
    receipt = service.client.forget([("user", "u1")])
    assert receipt["rows"]["user"] == 1
    assert not any(receipt["again"].values())


def test_what_cannot_be_is_refused(service: Service, tmp_path: Path) -> None:
    client = service.client
    for ids, why in (
        ([("nobody", "u1")], "the model has no categorical feature 'nobody'; it has user, friends, item, hour"),
        ([("user_item", "u1")], "no categorical feature 'user_item'"),
        ([], "0 ids: 1 to 1000 are forgotten at once"),
        ([("user", str(n)) for n in range(1001)], "1001 ids"),
    ):
        with pytest.raises(ShardRefused, match=why):
            client.forget(ids)
    assert len(rows_of(service.shards, "user")) == len(USERS)
    with Coordinated() as empty, pytest.raises(ShardUnavailable, match="nothing has been learned yet"):
        empty.client().forget([("user", "u1")])


def test_without_redis_and_checkpoints_shards_forget() -> None:
    with Coordinated() as cluster:
        beginning = RunTemplate(spec(), np.empty(0, np.float32), np.empty(0, np.float32), {})
        Shards(cluster.channels, beginning).agree()
        receipt = cluster.client().forget([("user", "u1")])
    assert (receipt["publication"], receipt["checkpoint"], receipt["servers"]) == (None, None, {})


def test_the_command_prints_a_receipt(service: Service, tmp_path: Path) -> None:
    asking = ("--set", f"coordinator.address={service.cluster.address}")
    shown = run("forget", "user=u1", *asking).stdout
    assert "user=u1: 1 of table user, 150 of table user_item, 100 of table item_friends rows deleted" in shown
    assert "Redis and servers that follow it: without them from publication 1 on" in shown
    assert "checkpoints: without them from epoch 1 on" in shown
    assert "left: topics stream and stream.dead: samples" not in shown  # stream.url is not set
    (tmp_path / "ids").write_text("user=u2\n\nitem=12\n")
    receipt = told("forget", "user=u=3", "--file", str(tmp_path / "ids"), *asking)
    assert receipt["ids"] == ["user=u=3", "user=u2", "item=12"]
    assert receipt["rows"]["user"] == receipt["rows"]["item"] == 1
    with service.learned_meanwhile("u4"):
        done = run("forget", "user=u4", *asking)
    assert done.returncode == 1
    assert "there again: 1 of table user; samples were learned meanwhile" in done.stdout
    for arguments, why in (
        ((), "give ids to forget, such as user=u1, or --file"),
        (("u1",), "'u1' is no FEATURE=ID, such as user=u1"),
        (("user=\udcff",), "is not UTF-8"),
        (("nobody=u1",), "the model has no categorical feature 'nobody'"),
        (("--file", str(tmp_path / "none")), "cannot be read"),
    ):
        assert why in refused("forget", *arguments, *asking, code=2)


def test_what_a_shard_is_asked_to_remove_is_checked(service: Service) -> None:
    control, u1 = service.cluster.control(0), np.array([key(user) for user in USERS], np.uint64)
    with pytest.raises(ShardRefused, match="of the keys are not of shard 0 of 2"):
        control.remove("user", u1)
    with pytest.raises(ShardRefused, match="unknown table 'nothing'"):
        control.remove("nothing", u1[:0])
    with pytest.raises(ShardRefused, match="7 bytes are not an array of keys"):
        control._stub.call("Remove", pb.RemoveRequest(table="user", keys=b"1234567"))
    with pytest.raises(ShardRefused, match="unknown table 'nothing'"):
        control.keys("nothing", 0)
    assert len(rows_of(service.shards, "user")) == len(USERS)


def test_forgotten_is_forgotten_whoever_is_killed(server: Valkey, tmp_path: Path) -> None:
    """Real processes, of which one is killed in the middle of it: asked until it is done, nothing is left."""
    cluster = Scaled(server.url, f"forgotten-{tmp_path.name}", tmp_path / "checkpoints")
    rng, forgotten = random.Random(5), set[int]()
    try:
        cluster.fill(0, 500)
        cluster.start()
        cluster.learned(500, 0, 1)
        for one in (1, 2, 3, 4):
            forgotten.add(one)
            victim = rng.choice([None, 0, 1])
            killer = threading.Timer(rng.random() * 0.3, cluster.restart, (victim,))
            killer.start()
            until(lambda one=one: is_forgotten(cluster, one), PATIENCE)  # type: ignore[misc]
            killer.join()
            until(lambda one=one: is_forgotten(cluster, one), PATIENCE)  # type: ignore[misc]
        for index in (0, 1):  # what is in the last checkpoint comes back, and nothing else
            cluster.restart(index)
        cluster.learned(500, 0, 1)
        good = ~is_bad(np.arange(500))
        wrong, _ = wrong_counts(cluster.shards(0, 1), [log_of(p, 500)[good] for p in range(2)])
        assert {one: count for one, (count, _) in wrong.items()} == dict.fromkeys(forgotten, 0)
        assert not cluster.failures
    finally:
        cluster.close()


def is_forgotten(cluster: Scaled, one: int) -> bool:
    """Asks once; whether it is done."""
    try:
        receipt = cluster.client.forget([("id1", str(one))])
    except (ShardError, CheckpointError):
        return False
    return not any(receipt["again"].values())


def test_if_redis_is_away_it_is_to_be_repeated(service: Service, server: Valkey) -> None:
    service.client.publish_now()
    server.kill()
    with pytest.raises(ShardError, match="does not answer"):
        service.client.forget([("user", "u1")])
    server.restart()
    receipt: dict[str, Any] = {}

    def forgotten() -> bool:
        with suppress(ShardError):
            receipt.update(service.client.forget([("user", "u1")]))
        return bool(receipt)

    until(forgotten, PATIENCE)
    assert not any(receipt["rows"].values())  # which shards have forgotten the first time
    assert not service.published()["user"] & {key("u1")}
    assert not service.holds(key("u1"))


def test_a_publication_that_is_held_back_is_told(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def held(*_: object, **__: object) -> None:
        raise GateClosed("publication 2 is held back: its AUC is 0.5")

    monkeypatch.setattr(service.coordinator.publications, "now", held)
    receipt = service.client.forget([("user", "u1")])
    assert receipt["rows"]["user"] == 1
    assert receipt["publication"] is None
    assert receipt["remains"][1] == {
        "where": "Redis and servers, model model",
        "what": "all rows, as publication 2 is held back: its AUC is 0.5",
        "until": "the next publication",
    }


@given(st.lists(st.lists(st.integers(0, 2**64 - 1), min_size=4, max_size=4), min_size=2, max_size=3))
def test_keys_of_crosses(lists: list[list[int]]) -> None:
    columns = [np.array(one, np.uint64) for one in lists]
    expected = [xxhash.xxh64_intdigest(struct.pack(f"<{len(lists)}Q", *row)) for row in zip(*lists, strict=True)]
    assert cross_keys(columns).tolist() == expected
    assert cross_keys([np.uint64(lists[0][0]), *columns[1:]])[0] == expected[0]


def test_crosses_with_too_many_combinations_are_told(monkeypatch: pytest.MonkeyPatch, service: Service) -> None:
    monkeypatch.setattr("streamtrain.ps.rows_of_ids._MOST_COMBINATIONS", 200)
    receipt = service.client.forget([("user", "u1")])
    assert receipt["rows"]["user"] == 1
    assert receipt["rows"].get("user_item", 0) == 0
    left = {one["where"]: (one["what"], one["until"]) for one in receipt["remains"]}
    assert left["shards, table item_friends"] == (
        "rows of the cross: there are too many combinations to look for; give fewer ids at once",
        "they expire, 2592000 s after the id was last seen",
    )


def test_all_ids_together_are_searched_for_no_longer_than_that(
    monkeypatch: pytest.MonkeyPatch, service: Service
) -> None:
    monkeypatch.setattr("streamtrain.ps.rows_of_ids._MOST_COMBINATIONS", 2 * len(ITEMS))  # of two crosses with items
    too_many = "rows of the cross: there are too many combinations to look for; give fewer ids at once"
    together = service.client.forget([("user", "u1"), ("user", "u2")])
    assert too_many in [one["what"] for one in together["remains"]]
    assert sum(together["rows"].values()) < 2 * (1 + 150 + 100)
    for user in ("u1", "u2"):
        alone = service.client.forget([("user", user)])
        assert too_many not in [one["what"] for one in alone["remains"]]
    assert len(rows_of(service.shards, "user_item")) == 4 * 150
    assert len(rows_of(service.shards, "item_friends")) == 4 * 100


def test_ids_are_those_of_tables_that_features_share() -> None:
    found = Sought.of(spec(), [("friends", "u1")])
    assert found.keys["user"].tolist() == [hash_bytes(b"u1")]
    assert [(one.table, one.at) for one in found.crossed] == [
        ("user_item", 0),
        ("item_friends", 1),
        ("user_hour_item", 0),
    ]
    about = SCHEMA.about()["features"]
    for name, field, table in (
        ("friends_weight", "friends", "friends_weight"),  # of the same field as one that shares the table
        ("buyer", "buyer", "friends_weight"),  # of the same table as that
        ("other", "other", "other"),
    ):
        about[name] = {**about["user"], "name": repr(name), "field": repr(field), "table": repr(table)}
    found = Sought.of(spec(features=about), [("buyer", "u1"), ("item", "7")])
    assert list(found.keys) == ["user", "friends_weight", "item"]
    with pytest.raises(ShardRefused, match="it has none"):
        Sought.of(spec(features={}), [("user", "u1")])
