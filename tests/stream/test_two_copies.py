"""Two copies of a cluster in one consumer group of Kafka or Valkey, without a lease: only the later one learns."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from streamtrain.errors import ShardRefused, SourceRefused
from streamtrain.ps.shard import Run
from streamtrain.settings.groups import Settings
from streamtrain.settings.load import load_settings
from streamtrain.stream.source import Stream
from tests.cluster.counted import differences, messages_of
from tests.patience import until
from tests.processes.test_worker import Running, counted, fill, learned
from tests.ps.served import Served
from tests.stream.kinds import KINDS, Place

SUPERSEDED = "a later copy of this cluster"


@pytest.fixture(params=["kafka", "valkey"])
def place(request: pytest.FixtureRequest) -> Place:
    return Place(request.param, KINDS[request.param].server(request))


@pytest.fixture
def settings(place: Place) -> Settings:
    url = f"kafka://{place.server}" if place.name == "kafka" else place.server
    return load_settings(overrides={"stream.url": url, "stream.topic": place.topic, "stream.group": place.topic})


@pytest.fixture(autouse=True)
def _check_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamtrain.cluster.copies.CHECK_SECONDS", 0.2)


@contextmanager
def copy() -> Iterator[Served]:
    """A cluster of two shards, as if restored from the checkpoint from which all others are."""
    with counted() as where:
        join_run(where)
        yield where


def join_run(where: Served) -> None:
    shards = where.shards()
    shards._run = Run("run", {})
    shards.agree()


def restart(where: Served, index: int) -> None:
    """As if the process of a shard had been started again, with what it has learned."""
    node = where.nodes[index]
    node.incarnation, node.shard._fenced = None, None


def filled(place: Place, samples: int) -> Stream:
    stream = place.make(2)
    add(stream, 0, samples)
    return stream


def add(stream: Stream, before: int, samples: int) -> None:
    fill(stream, {p: messages_of(p, samples)[before:] for p in range(2)})


def assert_superseded(running: Running) -> None:
    running.join()
    assert isinstance(running.failure, SourceRefused | ShardRefused), running.failure
    assert SUPERSEDED in str(running.failure)
    assert "restart all shards and workers of this one" in str(running.failure)


def test_the_copy_started_later_learns_all_and_the_older_one_stops(place: Place, settings: Settings) -> None:
    stream = filled(place, 300)
    with copy() as older, copy() as newer:
        old = [Running(older, settings), Running(older, settings)]
        until(learned(older, 300))
        new = Running(newer, settings)
        for running in old:
            assert_superseded(running)
        for shard in older.held:  # nor does it take checkpoints, or another worker
            with pytest.raises(ShardRefused, match=SUPERSEDED):
                shard.check()
        assert_superseded(Running(older, settings))
        add(stream, 300, 800)
        until(learned(newer, 800))
        assert [shard.clock() for shard in older.held] == [{0: 300, 1: 300}] * 2
        new.stop()
        assert new.failure is None
        assert not differences(newer.shards(), 2, 800)


def test_an_older_copy_that_comes_back_while_the_newer_is_away_does_not_learn(place: Place, settings: Settings) -> None:
    stream = filled(place, 100)
    with copy() as older, copy() as newer:
        for where in (older, newer):
            running = Running(where, settings)
            until(learned(where, 100))
            running.stop()
            assert running.failure is None
        add(stream, 100, 200)
        assert_superseded(Running(older, settings))
        assert [shard.clock() for shard in older.held] == [{0: 100, 1: 100}] * 2
        again = Running(newer, settings)
        until(learned(newer, 200))
        again.stop()
        assert again.failure is None


def test_the_older_copy_learns_again_once_all_its_shards_and_workers_are_restarted(
    place: Place, settings: Settings
) -> None:
    stream = filled(place, 100)
    with copy() as older, copy() as newer:
        old = Running(older, settings)
        until(learned(older, 100))
        new = Running(newer, settings)
        assert_superseded(old)
        restart(older, 0)
        assert_superseded(Running(older, settings))  # the other shard is still that of the older copy
        until(learned(newer, 100))
        assert new.failure is None
        restart(older, 0)
        restart(older, 1)
        again = Running(older, settings)
        assert_superseded(new)
        add(stream, 100, 200)
        until(learned(older, 200))
        again.stop()
        assert again.failure is None


def test_restarts_within_a_cluster_do_not_make_it_another(place: Place, settings: Settings) -> None:
    stream = filled(place, 100)
    with copy() as where:
        survivor = Running(where, settings)
        until(learned(where, 100))
        for samples, restarted in ((200, [0]), (300, [1]), (400, [0, 1])):
            for index in restarted:
                restart(where, index)
            newcomer = Running(where, settings)
            add(stream, samples - 100, samples)
            until(learned(where, samples))
            newcomer.stop()
            assert newcomer.failure is None
        survivor.stop()
        assert survivor.failure is None
        assert where.nodes[0].incarnation == where.nodes[1].incarnation
