"""A worker hears of other shards, and only of those."""

import threading
from typing import Any

from streamtrain.cluster.client import Heartbeat
from streamtrain.cluster.map_watch import MapWatch
from streamtrain.cluster.members import WORKER
from streamtrain.errors import ShardUnavailable
from streamtrain.ps.nodes.topology import ShardMap
from tests.patience import PATIENCE

A, B, C = ("a:1", "b:1"), ("a:1", "b:1", "c:1"), ("x:1", "y:1")


class Told:
    """A coordinator that tells a map, or does not answer."""

    def __init__(self, *told: ShardMap | None) -> None:
        self.map = told[0] if told else None

    def __call__(self) -> ShardMap:
        if self.map is None:
            raise ShardUnavailable("it does not answer")
        return self.map


def test_the_first_map_is_that_of_the_settings_unless_it_has_another_number_of_shards() -> None:
    watch = MapWatch(Told(ShardMap(4, C)), ShardMap(0, A), threading.Event())
    assert not watch.check()
    assert watch.in_use == ShardMap(4, A)
    watch = MapWatch(Told(ShardMap(4, B)), ShardMap(0, A), threading.Event())
    assert watch.check()
    assert watch.leaving.is_set()
    assert watch.use_other() == ShardMap(4, B)
    assert not (watch.check())
    assert not (watch.leaving.is_set())


def test_a_map_with_backups_is_another_one_than_that_of_settings_without() -> None:
    with_backups = ShardMap(1, A, B[:2])
    watch = MapWatch(Told(with_backups), ShardMap(0, A), threading.Event())
    assert watch.check()
    assert watch.use_other() == with_backups
    watch = MapWatch(Told(with_backups), ShardMap(0, A, C), threading.Event())
    assert not watch.check()
    assert watch.in_use == ShardMap(1, A, C)


def test_a_map_that_was_scaled_is_another_one_if_it_has_other_shards() -> None:
    watch = MapWatch(Told(ShardMap(2, C, scaled=True)), ShardMap(0, A), threading.Event())
    assert watch.check()
    assert watch.use_other().shards == C
    watch = MapWatch(Told(ShardMap(2, A, scaled=True)), ShardMap(0, A), threading.Event())
    assert not watch.check()
    assert watch.in_use == ShardMap(2, A)


def test_it_stays_while_nobody_answers_and_follows_every_later_map() -> None:
    told = Told()
    watch = MapWatch(told, ShardMap(0, A), threading.Event())
    assert not watch.check()
    told.map = ShardMap(1, A)
    assert not watch.check()
    told.map = None
    assert not watch.check()
    told.map = ShardMap(2, B)
    assert watch.check()
    told.map = ShardMap(3, A)  # before the worker has left: these shards have been restored meanwhile
    assert watch.check()
    assert watch.leaving.is_set()
    assert watch.use_other() == ShardMap(3, A)
    assert not (watch.check())
    assert not (watch.leaving.is_set())
    told.map = ShardMap(2, B)  # an answer that comes late
    assert not watch.check()


def test_a_map_is_asked_for_until_it_is_heard() -> None:
    """As the coordinator may end between the beat that says there is another one and the answer which it is."""
    told, beats, heard = Told(), threading.Semaphore(0), threading.Event()
    watch = MapWatch(told, ShardMap(0, A), threading.Event())

    class Coordinator:
        def beat(self, *_: object) -> int:
            beats.release()
            return 2

        def leave(self, *_: object) -> None:
            pass

        def close(self) -> None:
            pass

    def moved() -> bool:
        if watch.hear():
            heard.set()
        return heard.is_set()

    client: Any = Coordinator()
    with Heartbeat(client, WORKER, "one", dict, moved) as heartbeat:
        for _ in range(2):
            assert beats.acquire(timeout=PATIENCE)
            heartbeat.hurry()
        told.map = ShardMap(2, B)
        assert heard.wait(PATIENCE)
    assert watch.has_other


def test_one_that_ends_leaves_whatever_it_goes_by() -> None:
    stopped, told = threading.Event(), Told(ShardMap(1, A))
    watch = MapWatch(told, ShardMap(0, A), stopped)
    watch.check()
    told.map = ShardMap(2, B)
    watch.check()
    stopped.set()
    watch.stop()
    assert watch.leaving.is_set()
    watch.use_other()
    assert watch.leaving.is_set()
