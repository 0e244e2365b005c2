"""What there was before is passed over: for a time, for good, and at the exit. Each in a process of its own."""

import atexit
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable

import pytest

from streamtrain.memory import exit_at_once, freeze_heap, kept_for_good


class Ring:
    """Refers to itself, so that only the collector ends it."""

    def __init__(self) -> None:
        self.itself = self


class Told(Ring):
    """Says so when it ends."""

    def __del__(self, say: Callable[[str], object] = print) -> None:
        say("ended")


def passed_over_until_the_end() -> None:
    before, tracked = Ring(), len(gc.get_objects())
    gc.collect()
    exempt = gc.get_freeze_count()  # CPython 3.12 keeps objects there that never end
    gone = weakref.ref(before)
    with freeze_heap():
        assert gc.get_freeze_count() > tracked / 2
        assert len(gc.get_objects()) < tracked / 2
        del before
        later = weakref.ref(Ring())
        gc.collect()
        assert later() is None
        assert gone() is not None
    gc.collect()
    assert gone() is None
    assert gc.get_freeze_count() == exempt


def kept_though_a_heap_was_frozen_for_a_time() -> None:
    with kept_for_good():
        kept = weakref.ref(Ring())
        assert not gc.isenabled()
    assert gc.isenabled()
    with freeze_heap():
        pass
    later = weakref.ref(Ring())
    gc.collect()
    assert kept() is not None
    assert later() is None


def left_alone_if_it_was_off() -> None:
    gc.disable()
    with kept_for_good():
        pass
    assert not gc.isenabled()


def nothing_is_searched_at_the_exit() -> None:
    exit_at_once()
    atexit.register(Told)  # which runs before


@pytest.mark.parametrize(
    "check",
    [
        passed_over_until_the_end,
        kept_though_a_heap_was_frozen_for_a_time,
        left_alone_if_it_was_off,
        nothing_is_searched_at_the_exit,
    ],
)
def test_the_collector(check: Callable[[], None]) -> None:
    code = f"from tests.test_garbage import {check.__name__} as check; check()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
