"""Shards published to a real server: what can be read there is what they have learned, whatever fails meanwhile."""

import json
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import grpc
import numpy as np
import pytest
import redis

from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import OriginUnavailable, PublicationCorrupt, PublicationError, ShardError, ShardRefused
from streamtrain.model.spec import Spec
from streamtrain.ps.clock import Span
from streamtrain.ps.consistency import Async
from streamtrain.ps.nodes.node import Node
from streamtrain.ps.nodes.server import ShardServer
from streamtrain.ps.nodes.shards import Control, LocalControl
from streamtrain.ps.rpc.control import RemoteControl
from streamtrain.ps.shard import InitialState, Run, Shard
from streamtrain.publish.cluster_publisher import Publications, PublicationSchedule
from streamtrain.publish.shard_publisher import ShardPublisher
from streamtrain.store.publication import RowChange, Weights
from streamtrain.store.redis.dictionary import RedisDictionaries, ShardPart
from streamtrain.store.redis.layout import FullPublicationNeeded, Layout, TableSize
from streamtrain.store.redis.log import WriteToken
from streamtrain.store.redis.model import RedisModel
from tests.patience import until
from tests.ps.counting import DENSE, SPEC, key, new_shard, pushes
from tests.ps.served import COUNTING
from tests.publish.published import LOG, Cluster, assert_published, connect, counts, read


class RecordingDictionaries:
    """Records what a shard writes, in place of Redis; a test sets which token the head names."""

    def __init__(self) -> None:
        self.head: str | None = None
        self.error: Exception | None = None
        self.calls: list[tuple[object, ...]] = []
        self.changes: list[RowChange] = []  # of the last part, as are the weights
        self.weights = Weights(np.empty(0, np.float32), np.empty(0, np.float32))
        self._names = 0

    def token(self, shard: int) -> str | None:
        self.calls.append(("token", shard))
        return self.head

    def write(
        self,
        number: int,
        shard: int,
        changes: Iterable[RowChange],
        weights: Weights,
        *,
        rows: dict[str, int],
        layout: Layout | None = None,
        shards: int | None = None,
    ) -> ShardPart:
        assert shards is None
        if self.error is not None:
            raise self.error
        self.calls.append(("write", number, shard, layout is not None))
        self.changes, self.weights = [*changes], weights
        self._names += 1
        return ShardPart(number, 1, WriteToken(shard, f"{self._names}", 0), 0, dict(rows))

    def apply(self, shard: int) -> None:
        self.calls.append(("apply", shard))

    def check_lease(self, run: str, generation: int) -> None:
        self.calls.append(("check_lease", run, generation))

    @property
    def rows(self) -> dict[int, float]:
        """Rows of the last part, by key."""
        return {
            one: float(value)
            for change in self.changes
            for one, value in zip(change.keys.tolist(), change.rows[:, 0], strict=True)
        }


class OneShard:
    """A shard and its publisher, without a server."""

    def __init__(self, shard: Shard | None = None) -> None:
        self.shard, self.dictionaries = shard or new_shard(0, 1), RecordingDictionaries()
        self.publisher = ShardPublisher(self.dictionaries)  # type: ignore[arg-type]  # all that a publisher calls
        self.learned = self.number = 0
        sizes = {one["name"]: TableSize(one["dim"], 100) for one in self.shard.spec.tables}
        self.layout = Layout.from_sizes(1, "float32", 1, sizes).to_json()

    def learn(self, samples: int) -> None:
        (push,) = pushes(LOG, [Span(0, self.learned, self.learned + samples)], 1)
        self.shard.push(push._replace(watermark=self.learned))
        self.learned += samples

    def write(self, *, full: bool = False) -> Any:
        """Writes a part; returns the answer."""
        self.number += 1
        return json.loads(self.publisher.write(self.shard, self.number, self.layout if full else ""))

    def publish(self, *, full: bool = False) -> dict[int, float]:
        """Writes a part, commits it and returns its rows."""
        self.dictionaries.head = self.write(full=full)["part"][2][1]
        return self.dictionaries.rows

    def changing(self) -> set[int]:
        """Keys that the checksums leave out."""
        sums = self.publisher.sums(self.shard, self.number, self.layout)
        assert not sums.full
        return set(np.frombuffer(sums.tables[0].changing, "<u8").tolist())


def keys(*ids: int) -> set[int]:
    return {key(one) for one in ids}


def test_a_shard_writes_every_row_first_and_then_only_changes() -> None:
    one = OneShard()
    one.learn(3)
    answer = one.write(full=True)
    assert answer == {"part": [1, 1, [0, "1", 0], 0, {"ids": 3}], "clock": [[0, 3]], "watermark": 0}
    assert one.dictionaries.rows == counts(LOG[0][:3])
    assert one.dictionaries.weights.dense.tolist() == [3] * DENSE
    assert one.dictionaries.weights.statistics.tolist() == [3, 3]
    one.dictionaries.head = "1"
    one.learn(2)
    answer = one.write()
    assert answer == {"part": [2, 1, [0, "2", 0], 0, {"ids": 5}], "clock": [[0, 5]], "watermark": 3}
    assert one.dictionaries.rows == {key(1): 2, key(7): 1, key(8): 1}
    one.dictionaries.head = "2"
    assert one.publish() == {}
    one.publisher.apply(one.shard)
    one.publisher.check(one.shard, 7)
    assert one.dictionaries.calls == [
        ("write", 1, 0, True),
        ("token", 0),
        ("write", 2, 0, False),
        ("token", 0),
        ("write", 3, 0, False),
        ("apply", 0),
        ("check_lease", "run", 7),
    ]


def test_uncommitted_changes_are_written_again_and_excluded_from_checksums() -> None:
    one = OneShard()
    one.learn(2)
    one.publish(full=True)
    assert one.changing() == set()
    one.learn(1)
    assert one.changing() == keys(3)
    for samples, ids in ((1, [3, 1]), (1, [3, 1, 7, 8])):  # not committed
        one.learn(samples)
        one.write()
        assert one.dictionaries.rows.keys() == one.changing() == keys(*ids)
    one.dictionaries.error = OriginUnavailable("away")
    one.learn(1)
    for _ in range(2):
        with pytest.raises(OriginUnavailable):
            one.write()
        assert one.changing() == keys(3, 1, 7, 8, 9)
    one.dictionaries.error = None
    assert one.publish() == {key(3): 1, key(1): 2, key(7): 1, key(8): 1, key(9): 1}
    assert one.changing() == set()
    one.learn(1)
    assert one.publish() == {key(2): 3, key(3): 2}


def test_an_earlier_attempt_that_is_committed_late_loses_nothing() -> None:
    one = OneShard()
    one.publish(full=True)
    for _ in range(3):
        one.learn(1)
        one.write()
    one.dictionaries.head = "3"  # the second attempt: what the third wrote is missing from it
    assert keys(3) <= one.changing()
    one.learn(1)
    assert one.publish().keys() >= keys(3, 1)
    one.dictionaries.head = "2"
    assert one.write() == {"full": "the head's part of shard 0 was written by another process"}


def test_only_the_last_1000_attempts_are_remembered() -> None:
    one = OneShard()
    one.publish(full=True)
    for _ in range(1001):
        assert "part" in one.write()
    one.dictionaries.head = "2"
    assert one.write() == {"full": "the head's part of shard 0 was written by another process"}
    one.dictionaries.head = "1"
    assert one.changing() == set()
    one.dictionaries.head = "3"
    assert "part" in one.write()


def test_reasons_for_a_full_publication() -> None:
    one = OneShard()
    assert one.write() == {"full": "shard 0 has just started"}
    assert one.publisher.sums(one.shard, 1, one.layout).full == "shard 0 has just started"
    one.publish(full=True)
    one.dictionaries.head = None
    assert one.write() == {"full": "there is no head, or it has no part of shard 0"}
    one.dictionaries.head = "another"
    said = "the head's part of shard 0 was written by another process"
    assert one.write() == {"full": said}
    assert one.publisher.sums(one.shard, 1, one.layout).full == said
    one.dictionaries.head = "1"
    for one.dictionaries.error in (FullPublicationNeeded("there is no head"), PublicationCorrupt("it is damaged")):
        assert one.write() == {"full": str(one.dictionaries.error)}


def test_full_publications_can_be_repeated() -> None:
    """Each closes the channels of the one before, of which a table has few."""
    one = OneShard()
    one.learn(2)
    for _ in range(4):
        assert one.publish(full=True) == counts(LOG[0][:2])
    one.learn(1)
    one.write()
    assert one.publish(full=True) == counts(LOG[0][:3])
    assert one.changing() == set()
    assert one.publish() == {}


@pytest.mark.parametrize("full", [False, True])
def test_non_finite_values_are_counted_and_nothing_is_written(full: bool) -> None:
    shard = Shard(InitialState(Run("run", {}), two_tables(), np.zeros(5, np.float32), np.zeros(2, np.float32)), 0, 1)
    one, steps = OneShard(shard), np.ones(5, np.uint32)
    if not full:
        one.publish(full=True)
    shard.dense.load(np.array([0, np.inf, 0, np.nan, 0], np.float32), np.empty((0, 5), np.float32), 0.0)
    shard.statistics.load(np.array([np.nan, 0], np.float32), np.empty((0, 2), np.float32), 0.0)
    for table, width in zip(shard.tables, (1, 2), strict=True):
        gradients = np.zeros((5, width), np.float32)
        gradients[[1, 3, 4], 0] = 2.0**50, -(2.0**50), 2.0**50
        table.push(np.arange(5, dtype=np.uint64), gradients, steps, steps, 3e38)  # three have diverged
    before = len(one.dictionaries.calls)
    found = "2 dense weights and 1 statistics and 3 rows of table ids and 3 rows of table wide"
    for _ in range(2):
        assert one.write(full=full) == {"bad": f"shard 0 has {found} that are not finite", "shard": 0}
    assert "write" not in {call[0] for call in one.dictionaries.calls[before:]}


def two_tables() -> Spec:
    wide = {**SPEC.tables[0], "name": "wide", "dim": 2}
    return Spec(**{**vars(SPEC), "tables": (SPEC.tables[0], wide)})


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


def fails(number: int, layout: str, generation: int = 0) -> str:
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


class LateCommit(RedisDictionaries):
    """Loses the answer to one commit, which the server gets later: as if the network held it back."""

    late: Callable[[], object] | None = None
    loses = False

    def commit(self, *arguments: Any, **options: Any) -> None:
        if self.loses:
            self.loses, self.late = False, lambda: RedisDictionaries.commit(self, *arguments, **options)
            raise OriginUnavailable("no answer")
        super().commit(*arguments, **options)

    def deliver(self) -> None:
        late, self.late = self.late, None
        if late is not None:
            with suppress(PublicationError):  # which nobody hears
                late()


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("moment", ["before", "between the shards", "before the commit", "after the commit", "after"])
def test_a_commit_that_comes_late_loses_nothing(server: Valkey, moment: str, full: bool) -> None:
    dictionaries = LateCommit(RedisModel(connect(server.url), "counted"))
    cluster = Cluster(server.url, dictionaries=dictionaries)
    cluster.learn(2)
    if not full:
        cluster.publish()
        cluster.learn(2)
    dictionaries.loses = True
    with pytest.raises(OriginUnavailable):
        cluster.publications.publish()
    cluster.learn(1)

    def then(late: Callable[[], object], done: Callable[..., Any]) -> Callable[..., Any]:
        def both(*arguments: Any, **options: Any) -> Any:
            late()
            return done(*arguments, **options)

        return both

    if moment == "before":
        dictionaries.deliver()
    if moment == "between the shards":
        cluster.nodes[1].publish = then(dictionaries.deliver, cluster.nodes[1].publish)  # type: ignore[method-assign]
        cluster.controls[1].publish = cluster.nodes[1].publish  # type: ignore[method-assign]
    if moment == "before the commit":
        dictionaries.commit = then(dictionaries.deliver, dictionaries.commit)  # type: ignore[method-assign]
    if moment == "after the commit":
        cluster.controls[0].apply = then(dictionaries.deliver, cluster.controls[0].apply)  # type: ignore[method-assign]
    tried(cluster)
    dictionaries.deliver()
    cluster.learn(1)
    until(lambda: tried(cluster))
    assert_published(server.url, cluster.learned)
    cluster.learn(2)
    until(lambda: tried(cluster))
    assert_published(server.url, cluster.learned)
    assert cluster.publications.verify().agrees


def test_a_shard_whose_part_of_the_head_is_of_another_process_writes_everything(server: Valkey) -> None:
    cluster = Cluster(server.url)
    cluster.learn(3)
    cluster.publish()
    other = Cluster(server.url)  # of the same run
    other.learn(2)
    other.publish()
    cluster.learn(1)
    cluster.publish()
    assert_published(server.url, 4)


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
    caplog.set_level(logging.INFO, "streamtrain")
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
    assert caplog.text.count("publishing succeeds again") == 1


GOOD = {"dictionary": 1, "dtype": "float32", "shards": 1, "tables": {"ids": [1, 4]}}


@pytest.mark.parametrize(
    "layout",
    [
        "",
        "{",
        "[]",
        "null",
        "7",
        "{}",
        '{"dictionary": 1e999}',
        GOOD | {"dtype": "pickle"},
        GOOD | {"tables": {}},
        GOOD | {"tables": {"others": [1, 4]}},
        GOOD | {"tables": {"ids": [2, 4]}},
        GOOD | {"tables": {"ids": [1, 3]}},
        GOOD | {"tables": {"ids": [1, 1 << 60]}},
        GOOD | {"tables": {"ids": [-1, 4]}},
        GOOD | {"dictionary": -1},
    ],
)
def test_a_layout_that_is_none_is_refused_with_a_sentence(server: Valkey, layout: object) -> None:
    node = Cluster(server.url, shards=1).nodes[0]
    node.publish(1, json.dumps(GOOD | {"dictionary": int(begun(server))}))
    text = layout if isinstance(layout, str) else json.dumps(layout)
    serving = ShardServer(node)
    address = f"127.0.0.1:{serving.grpc.add_insecure_port('127.0.0.1:0')}"
    serving.start()
    with grpc.insecure_channel(address) as channel:
        control = RemoteControl(channel, address)
        for ask in (control.sums, control.publish) if text else (control.sums,):
            with pytest.raises(ShardRefused, match="layout") as refused:
                ask(1, text)
            assert refused.value.reason == "malformed"
    serving.stop()


def test_a_full_publication_of_other_shards_is_refused(server: Valkey) -> None:
    node = Cluster(server.url, shards=1).nodes[0]
    with pytest.raises(ShardRefused, match="the layout is of 7 shards, this is one of 1"):
        node.publish(1, json.dumps(GOOD | {"dictionary": int(begun(server)), "shards": 7}))


def begun(server: Valkey) -> int:
    """A dictionary that may be filled."""
    sizes = {"ids": TableSize(1, 256)}
    return RedisDictionaries(RedisModel(connect(server.url), "counted")).begin(sizes, shards=1).dictionary


def test_a_shard_without_a_place_to_publish_says_so() -> None:
    node = Node(0, 1, Async)
    node.initialise(InitialState(Run("run", {}), SPEC, COUNTING.dense, COUNTING.statistics))
    with pytest.raises(ShardError, match=r"set publish\.url"):
        node.publish(1, "")
