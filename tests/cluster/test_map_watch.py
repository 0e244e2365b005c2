"""A worker hears of other shards, and only of those."""

import threading

from streamtrain.cluster.map_watch import MapWatch
from streamtrain.errors import ShardUnavailable
from streamtrain.ps.nodes.topology import ShardMap

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
    watch = MapWatch(Told(ShardMap(4, C)), A, threading.Event())
    assert not watch.check()
    assert watch.in_use == (4, A)
    watch = MapWatch(Told(ShardMap(4, B)), A, threading.Event())
    assert watch.check()
    assert watch.leaving.is_set()
    assert watch.use_other() == (4, B)
    assert not (watch.check())
    assert not (watch.leaving.is_set())


def test_it_stays_while_nobody_answers_and_follows_every_later_map() -> None:
    told = Told()
    watch = MapWatch(told, A, threading.Event())
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
    assert watch.use_other() == (3, A)
    assert not (watch.check())
    assert not (watch.leaving.is_set())
    told.map = ShardMap(2, B)  # an answer that comes late
    assert not watch.check()


def test_one_that_ends_leaves_whatever_it_goes_by() -> None:
    stopped, told = threading.Event(), Told(ShardMap(1, A))
    watch = MapWatch(told, A, stopped)
    watch.check()
    told.map = ShardMap(2, B)
    watch.check()
    stopped.set()
    watch.stop()
    assert watch.leaving.is_set()
    watch.use_other()
    assert watch.leaving.is_set()
