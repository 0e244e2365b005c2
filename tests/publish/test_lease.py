"""Two clusters that publish under one name, to a real server: one of them stops, and says why."""

import threading
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
import redis

from streamtrain.cluster.client import CoordinatorClient
from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import PublicationError, ShardRefused, TakenOver
from streamtrain.processes.ps import PsProcess
from streamtrain.ps.client import Client
from streamtrain.ps.clock import Span
from streamtrain.ps.nodes.shards import Shards
from streamtrain.ps.rpc.control import CHANNEL_OPTIONS
from streamtrain.ps.rpc.security import Security
from streamtrain.ps.shard import InitialState, Run, Shard
from streamtrain.publish.cluster_publisher import PublicationSchedule
from streamtrain.publish.lease import Lease, LeaseWatch
from streamtrain.settings.groups import Settings
from streamtrain.store.redis.dictionary import RedisDictionaries
from streamtrain.store.redis.model import RedisModel
from tests.patience import PATIENCE, until
from tests.ports import free_ports
from tests.ps.counting import SPEC
from tests.ps.served import COUNTING, push
from tests.publish.published import LOG, Cluster, assert_published, connect, server

__all__ = ["server"]


def cluster_of(url: str, host: str, run: str = "run", *, seconds: float = 60, shards: int = 2) -> Cluster:
    lease = Lease(RedisModel(connect(url), "counted"), host, seconds=seconds)
    return Cluster(url, shards, run, lease=lease)


def led_anew(cluster: Cluster, url: str, host: str) -> Cluster:
    """The same shards, with another process that leads them."""
    anew = cluster_of(url, host)
    anew.nodes, anew.controls, anew.learned = cluster.nodes, cluster.controls, cluster.learned
    anew.publications._controls = cluster.controls
    return anew


def test_a_second_copy_takes_over_and_the_first_stops(server: Valkey) -> None:
    first = cluster_of(server.url, "first")
    first.learn(2)
    first.publish()
    second = cluster_of(server.url, "second")
    second.learn(3)
    second.publish()
    first.learn(1)
    with pytest.raises(TakenOver, match=r"publisher on second since 20.*stops learning and publishing.*restart all"):
        first.publications.publish()
    for node in first.nodes:  # workers that join, pull or push, and checkpoints
        with pytest.raises(ShardRefused, match="publisher on second"):
            node.shard.check()
    with pytest.raises(ShardRefused, match="publisher on second"):
        first.learn(1)
    for _ in range(3):  # whatever it tries
        with pytest.raises(TakenOver):
            first.publications.publish()
        second.learn(1)
        second.publish()
        assert_published(server.url, second.learned)


def test_what_was_being_written_when_another_took_over_is_not_committed(server: Valkey) -> None:
    first, second = cluster_of(server.url, "first"), cluster_of(server.url, "second")
    first.learn(2)
    first.publish()
    second.learn(5)
    written = first.controls[1].publish

    def written_and_taken_over(number: int, layout: str, generation: int = 0) -> str:
        part = written(number, layout, generation)
        second.publish()
        return part

    first.controls[1].publish = written_and_taken_over  # type: ignore[method-assign]
    first.learn(1)
    with pytest.raises(PublicationError):
        first.publications.publish()
    assert_published(server.url, 5)


class Overtaken(RedisDictionaries):
    """Another cluster takes the lease, and has published nothing yet, just before the commit."""

    def commit(self, *arguments: Any, **options: Any) -> None:
        Lease(self._model, "second").acquire("run", 0)
        super().commit(*arguments, **options)


@pytest.mark.parametrize("samples", [0, 2])
def test_a_commit_of_an_older_generation_is_refused_by_the_server(server: Valkey, samples: int) -> None:
    cluster = cluster_of(server.url, "first")
    cluster.learn(2)
    if samples:
        cluster.publish()
    cluster.learn(1)
    cluster.publications._dictionaries = Overtaken(cluster.model)
    with pytest.raises(TakenOver, match="publisher on second"):
        cluster.publications.publish()
    head = cluster.publications.head()
    assert (head and dict(head.clock)) == ({0: 2} if samples else None)


def test_a_shard_finds_out_though_nobody_leads_it(server: Valkey) -> None:
    first, second = cluster_of(server.url, "first"), cluster_of(server.url, "second")
    first.learn(2)
    first.publish()
    watch = LeaseWatch(first.nodes[1].check_lease, every=0.01)
    watch.start()
    second.learn(3)
    second.publish()
    until(lambda: refuses(first.nodes[1].shard))
    watch.stop()


def refuses(shard: Shard) -> bool:
    try:
        shard.check()
    except ShardRefused:
        return True
    return False


def test_a_shard_that_was_started_again_in_the_older_cluster_is_told(server: Valkey) -> None:
    first, second = cluster_of(server.url, "first"), cluster_of(server.url, "second")
    for one, samples in ((first, 2), (second, 3)):
        one.learn(samples)
        one.publish()
    again = Cluster(server.url)  # restored, of whose past nothing is known
    first.controls[0], first.nodes[0] = again.controls[0], again.nodes[0]
    with pytest.raises(TakenOver):
        first.publications.publish()
    with pytest.raises(ShardRefused, match="publisher on second"):
        again.nodes[0].shard.check()


def test_a_leader_that_was_killed_comes_back_at_once(server: Valkey) -> None:
    cluster = cluster_of(server.url, "first")
    cluster.learn(2)
    cluster.publish()
    again = led_anew(cluster, server.url, "elsewhere")
    again.learn(1)
    again.publish()
    assert_published(server.url, 3)
    assert lease_of(server.url) == (cluster.nodes[0].lease_generation, "elsewhere")


def lease_of(url: str) -> tuple[int, str]:
    held = RedisModel(connect(url), "counted").lease()
    assert held is not None
    return held.generation, held.host


def test_a_whole_cluster_that_was_killed_comes_back_at_once(server: Valkey) -> None:
    cluster = cluster_of(server.url, "first")
    cluster.learn(2)
    cluster.publish()
    again = cluster_of(server.url, "first")  # as if restored
    again.learn(3)
    again.publish()
    assert_published(server.url, 3)


def test_another_run_under_the_same_name_is_refused(server: Valkey) -> None:
    first, second = cluster_of(server.url, "first"), cluster_of(server.url, "second", run="another")
    first.learn(2)
    first.publish()
    second.learn(1)
    with pytest.raises(TakenOver, match=r"publisher on first since 20.*with another run \(run\): set publish\.model"):
        second.publications.publish()
    second.learn(1)  # it is no copy: it may learn
    first.learn(1)
    first.publish()
    assert_published(server.url, 3)
    first.publications.end_lease()
    second.publish()
    assert_published(server.url, 2)


def test_a_lease_that_was_not_renewed_may_be_taken_and_its_holder_says_so(server: Valkey) -> None:
    """Of a holder that could not reach Redis for long."""
    first, second = cluster_of(server.url, "first", seconds=0.05), cluster_of(server.url, "second", run="another")
    first.learn(2)
    first.publish()
    second.learn(1)
    until(lambda: publishes(second))
    first.learn(1)  # goes on, as the other has another run
    with pytest.raises(TakenOver, match="set publish"):
        first.publications.publish()
    second.publications.end_lease()
    first.publish()
    assert_published(server.url, 3)


def publishes(cluster: Cluster) -> bool:
    try:
        return cluster.publications.publish() is not None
    except TakenOver:
        return False


@pytest.mark.parametrize("forgotten", ["everything", "the lease"])
def test_a_server_that_forgets_the_lease_gets_it_again(server: Valkey, forgotten: str) -> None:
    cluster = cluster_of(server.url, "first")
    cluster.learn(2)
    cluster.publish()
    generation = lease_of(server.url)[0]
    with redis.Redis.from_url(server.url) as client:
        client.flushall() if forgotten == "everything" else client.delete("streamtrain:model:{counted}:lease")
    cluster.learn(1)
    cluster.publish()
    assert_published(server.url, 3)
    assert lease_of(server.url) == (generation, "first")


def test_an_older_copy_stays_refused_when_the_server_has_forgotten(server: Valkey) -> None:
    first, second = cluster_of(server.url, "first"), cluster_of(server.url, "second")
    for one, samples in ((first, 2), (second, 3)):
        one.learn(samples)
        one.publish()
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    first.learn(1)
    first.publications.publish()  # it could not know
    second.learn(2)
    second.publish()
    assert_published(server.url, 5)
    with pytest.raises(TakenOver, match="publisher on second"):
        first.publications.publish()


def test_the_schedule_gives_signs_and_lets_go_in_the_end(server: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamtrain.publish.cluster_publisher.SECONDS", 0.03)
    cluster = cluster_of(server.url, "first", seconds=5)
    cluster.learn(1)
    schedule = PublicationSchedule(cluster.publications, 3600)
    schedule.start()
    schedule.now()
    model = RedisModel(connect(server.url), "counted")

    def ends() -> int:
        return int(model.server.call("HGET", model.keys.lease, "until"))

    was = ends()
    until(lambda: ends() > was)
    schedule.stop()
    assert ends() == 0


def test_workers_of_the_older_copy_end(server: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over gRPC. Neither those that are there nor those that come are left waiting."""
    monkeypatch.setattr(LeaseWatch.__init__, "__defaults__", (0.05,))
    with ExitStack() as stack:
        first = process(server.url, stack)
        client = client_of(first, stack)
        pushed(client, 0)
        publish(first.address)
        second = process(server.url, stack)
        other = client_of(second, stack)
        pushed(other, 0)
        pushed(other, 1)
        publish(second.address)
        until(lambda: refuses(first.node.shard))
        with pytest.raises(ShardRefused, match="by another cluster"):
            pushed(client, 1)
        with pytest.raises(ShardRefused, match="by another cluster"):
            client_of(first, stack)
        pushed(other, 2)
        publish(second.address)
    assert_published(server.url, 3)


def publish(address: str) -> None:
    with CoordinatorClient([address], Security()) as client:
        client.publish_now(timeout=PATIENCE)


def process(url: str, stack: ExitStack) -> PsProcess:
    """A cluster of one shard, which leads itself, with the run "run"."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    publish = {"url": url, "model": "counted", "every": 0.05}
    made = PsProcess(0, [address], Settings.model_validate({"ps": {"addresses": [address]}, "publish": publish}))
    made.node.initialise(InitialState(Run("run", {}), SPEC, COUNTING.dense, COUNTING.statistics))
    made.start()
    stack.callback(made.stop)
    return made


def client_of(shard: PsProcess, stack: ExitStack) -> Client:
    channel = grpc.insecure_channel(shard.address, options=CHANNEL_OPTIONS)
    stack.callback(channel.close)
    client = Shards([(channel, shard.address)], COUNTING).client("worker", Run("run", {}))
    stack.callback(client.close)
    client.join()
    return client


def pushed(client: Client, at: int) -> None:
    push(client, LOG, [Span(0, at, at + 1)]).wait()


def test_two_that_begin_at_once_do_not_both_publish(server: Valkey) -> None:
    clusters = [cluster_of(server.url, name) for name in ("first", "second", "third")]
    for one in clusters:
        one.learn(2)
    barrier = threading.Barrier(len(clusters))

    def publish(cluster: Cluster) -> None:
        barrier.wait()
        for _ in range(5):
            try:
                cluster.publications.publish()
                cluster.learn(1)
            except (PublicationError, ShardRefused):
                pass

    threads = [threading.Thread(target=publish, args=(one,)) for one in clusters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    going_on = [one for one in clusters if not refuses(one.nodes[1].shard)]
    assert len(going_on) == 1
    until(lambda: publishes(going_on[0]) or True)
    assert_published(server.url, going_on[0].learned)
