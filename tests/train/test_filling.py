"""For how long a batch fills: by the cost of the one before, within bounds."""

from typing import Any

import pytest

from streamtrain.train.loop import BatchLinger, LoopConfig


class Filled:
    """A filling whose clocks are set by hand."""

    def __init__(self, **pace: Any) -> None:
        self.now = self.cpu = 100.0
        self.filling = BatchLinger(LoopConfig(**pace), lambda: self.now, lambda: self.cpu)

    def learn(self, cpu: float, seconds: float | None = None) -> None:
        """A batch that takes so long."""
        self.filling.begin()
        self.cpu += cpu
        self.now += cpu if seconds is None else seconds
        self.filling.end()

    def left(self, waiting: int, after: float = 0.0) -> float:
        """What is left to fill, so many seconds later."""
        self.now += after
        return self.filling.remaining(waiting)


def test_a_sample_that_comes_after_a_pause_is_learned_at_once() -> None:
    filled = Filled(batch_age=1.0)
    assert filled.left(1) == 0.0
    filled.learn(0.01)
    assert filled.left(1, after=0.03) == pytest.approx(0.0)
    filled.learn(0.01)
    assert filled.left(1, after=10.0) == 0.0


def test_small_batches_keep_a_quarter_of_a_core_busy() -> None:
    filled = Filled(batch_age=1.0)
    filled.learn(0.01)
    assert filled.left(1, after=0.01) == pytest.approx(0.02)
    assert filled.left(1023, after=0.015) == pytest.approx(0.005)
    assert filled.left(5, after=0.005) == pytest.approx(0.0)


def test_a_full_batch_waits_for_nothing() -> None:
    filled = Filled(batch_size=64, batch_age=1.0)
    filled.learn(0.2)
    assert filled.left(63) > 0.5
    assert filled.left(64) == 0.0
    filled.filling.begin()
    assert filled.left(64) == 0.0


def test_no_sample_waits_longer_than_it_may() -> None:
    filled = Filled(batch_age=0.1)
    filled.learn(5.0)
    assert filled.left(0) == 0.0
    assert filled.left(1, after=1.0) == pytest.approx(0.1)
    assert filled.left(9, after=0.06) == pytest.approx(0.04)
    assert filled.left(9, after=0.04) == pytest.approx(0.0)


def test_waiting_for_others_is_no_cost() -> None:
    filled = Filled(batch_age=1.0)
    filled.learn(0.01, seconds=0.5)
    assert filled.left(1) == 0.0


def test_a_batch_under_way_does_not_hurry_the_next() -> None:
    filled = Filled(batch_age=0.1)
    filled.filling.begin()
    assert filled.left(3, after=0.05) == pytest.approx(0.1)
    filled.filling.end()
    assert filled.left(3) == 0.0


def test_fewer_than_the_least_wait_for_as_long_as_they_may() -> None:
    filled = Filled(batch_min=32, batch_size=64, batch_age=0.1)
    assert filled.left(31) == pytest.approx(0.1)
    assert filled.left(32) == 0.0
    assert filled.left(31, after=0.1) == pytest.approx(0.0)


def test_without_an_age_nothing_waits() -> None:
    filled = Filled(batch_age=0.0)
    filled.learn(1.0)
    assert filled.left(1) == 0.0
    filled.filling.begin()
    assert filled.left(1) == 0.0
